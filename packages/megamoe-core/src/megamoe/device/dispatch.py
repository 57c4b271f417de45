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
    """One warp. `slots` rows of `row_bytes` bytes travel at a time through the shared buffer; `scales` fp32 scales a row go along, transposed."""
    count = cute.make_tensor(counts, cute.make_layout(experts))
    offsets = cute.make_tensor(base, cute.make_layout(experts + 1))
    total = offsets[experts] * tile
    parity = Int32(0)
    row = bidx
    while row < total:
        tokens = [Int32(-1) for _ in range(slots)]
        moved = Int32(0)
        for s in cutlass.range_constexpr(slots):
            r = row + s * grid
            if r < total:
                e = routing.expert_of(r // tile, base, experts, lane)
                if r - offsets[e] * tile < count[e]:
                    deadline.wait_ge(list_ready + Int64(e) * 4, epoch + 1, control, regions.SITE_LISTS, e, wait_ms)
                    # An aborted launch may see a list that was never written: stay inside x.
                    route = cutlass.max(cutlass.min(memory.ld_i32(row_route + Int64(r) * 4), routes - 1), 0)
                    tokens[s] = route // top_k
                    moved = moved + 1
                    if lane == 0:
                        memory.bulk_load(buffer + s * row_bytes, x + Int64(tokens[s]) * row_bytes, Int32(row_bytes), barrier)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, moved * row_bytes)
        if cutlass.const_expr(scales > 0):
            for j in cutlass.range_constexpr(0, scales, 32):
                values = []
                for s in cutlass.range_constexpr(slots):
                    at = Int64(cutlass.max(tokens[s], 0)) * scales + cutlass.min(lane + j, scales - 1)
                    values.append(memory.ld_i32(xs + at * 4))
                for s in cutlass.range_constexpr(slots):
                    if tokens[s] >= 0 and lane + j < scales:
                        memory.st_i32(pool_scale + (Int64(lane + j) * pool_rows + (row + s * grid)) * 4, values[s])
        cute.arch.mbarrier_wait(barrier, parity)
        parity = parity ^ 1
        if lane == 0:
            for s in cutlass.range_constexpr(slots):
                if tokens[s] >= 0:
                    memory.bulk_store(pool + Int64(row + s * grid) * row_bytes, buffer + s * row_bytes, Int32(row_bytes))
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.sync_warp()
        if lane == 0:
            for s in cutlass.range_constexpr(slots):
                if tokens[s] >= 0:
                    memory.red_release(ready + Int64((row + s * grid) // tile) * 4, Int32(1))
        cute.arch.sync_warp()
        row = row + slots * grid
