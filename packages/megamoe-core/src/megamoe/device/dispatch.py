"""Copying rows into the pool: one warp a CTA walks the pool rows in stream order and moves whole rows by bulk copies.

The source of a row is given by its route; on one rank that is a row of the local activations. A block's ready counter counts its rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import deadline, memory, regions, routing


@cute.jit
def move_rows(
    x: Int64,
    xs: Int64,
    pool: Int64,
    pool_scale: Int64,
    row_route: Int64,
    list_ready: Int64,
    ready: Int64,
    control: Int64,
    counts: cute.Pointer,
    base: cute.Pointer,
    buffer: Int32,
    barrier: cute.Pointer,
    slots: cutlass.Constexpr,
    row_bytes: cutlass.Constexpr,
    scales: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    top_k: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    pool_rows: Int32,
    routes: Int32,
    epoch: Int32,
    bidx: Int32,
    grid: Int32,
    wait_ms: Int32,
    lane: Int32,
):
    """One warp. `slots` rows of `row_bytes` bytes travel at a time through the shared buffer, with `scales` fp32 scales a row, transposed.

    Lane s looks up row s of a batch, so the chain expert -> list -> route -> row costs its latency once a batch.
    """
    count = cute.make_tensor(counts, cute.make_layout(experts))
    offsets = cute.make_tensor(base, cute.make_layout(experts + 1))
    total = offsets[experts] * tile
    parity = Int32(0)
    row = bidx
    while row < total:
        token = Int32(-1)
        own = row + cutlass.min(lane, slots - 1) * grid
        if lane < slots and own < total:
            e = routing.search_expert(own // tile, base, experts)
            if own - offsets[e] * tile < count[e]:
                deadline.wait_tag(list_ready + Int64(e) * 4, epoch + 1, control, regions.SITE_LISTS, e, wait_ms)
                # An aborted launch may see a list that was never written: stay inside x.
                token = cutlass.max(cutlass.min(memory.ld_i32(row_route + Int64(own) * 4), routes - 1), 0) // top_k
                memory.bulk_load(buffer + lane * row_bytes, x + Int64(token) * row_bytes, Int32(row_bytes), barrier)
        moved = cute.arch.popc(cute.arch.vote_ballot_sync(token >= 0))
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, moved * row_bytes)
        if cutlass.const_expr(scales > 0):
            for j in cutlass.range_constexpr(0, scales, 32):
                for first in cutlass.range_constexpr(0, slots, 4):
                    values = []
                    for s in cutlass.range_constexpr(first, min(first + 4, slots)):
                        t = cutlass.max(cute.arch.shuffle_sync(token, s), 0)
                        values.append(memory.ld_i32(xs + (Int64(t) * scales + cutlass.min(lane + j, scales - 1)) * 4))
                    for s in cutlass.range_constexpr(first, min(first + 4, slots)):
                        if cute.arch.shuffle_sync(token, s) >= 0 and lane + j < scales:
                            memory.st_i32(pool_scale + (Int64(lane + j) * pool_rows + (row + s * grid)) * 4, values[s - first])
        cute.arch.mbarrier_wait(barrier, parity)
        parity = parity ^ 1
        if token >= 0:
            memory.bulk_store(pool + Int64(own) * row_bytes, buffer + lane * row_bytes, Int32(row_bytes))
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.sync_warp()
        if token >= 0:
            memory.red_release(ready + Int64(own // tile) * 4, Int32(1))
        cute.arch.sync_warp()
        row = row + slots * grid
