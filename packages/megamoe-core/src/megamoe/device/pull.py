"""Dispatch by pull: one warp a CTA brings rows from their source ranks into the pool, each token once; further copies are made here.

The row of a token's smallest expert on this rank is its carrier. Rows are taken in pool order, which is ascending in experts, and of each
batch the carriers go first: so a copy only ever waits for a carrier in its own or an earlier batch, whose warp waits for nothing later.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import deadline, memory, peers, regions, routing, wire


@cute.jit
def pull_rows(
    table: Int64,
    heap: Int64,
    x_offset: cutlass.Constexpr,
    xs_offset: cutlass.Constexpr,
    pool: Int64,
    pool_scale: Int64,
    row_route: Int64,
    list_ready: Int64,
    ready: Int64,
    carriers: Int64,
    control: Int64,
    counts: cute.Pointer,
    base: cute.Pointer,
    buffer: Int32,
    barrier: cute.Pointer,
    slots: cutlass.Constexpr,
    row_bytes: cutlass.Constexpr,
    scales: cutlass.Constexpr,
    ranks: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    top_k: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    delays: cutlass.Constexpr,
    pool_rows: Int32,
    launch: Int32,
    bidx: Int32,
    grid: Int32,
    wait_ms: Int32,
    lane: Int32,
):
    """One warp. `slots` rows of `row_bytes` bytes travel at a time through the shared buffer; `scales` fp32 scales a row go along.

    `tokens`: most tokens of a rank. Lane s looks up row s of a batch. Scales are stored transposed.
    """
    count = cute.make_tensor(counts, cute.make_layout(experts))
    offsets = cute.make_tensor(base, cute.make_layout(experts + 1))
    total = offsets[experts] * tile
    parity = Int32(0)
    row = bidx
    while row < total:
        route = Int32(0)
        there = Int32(0)
        own = row + cutlass.min(lane, slots - 1) * grid
        if lane < slots and own < total:
            e = routing.search_expert(own // tile, base, experts)
            if own - offsets[e] * tile < count[e]:
                deadline.wait_tag(list_ready + Int64(e) * 4, launch, control, regions.SITE_LISTS, e, wait_ms)
                route = memory.ld_i32(row_route + Int64(own) * 4)
                there = Int32(1)
        source = peers.source_of(route, ranks)
        token = peers.route_of(route, tokens * top_k) // top_k
        copy = Int32(route < 0)
        carrier = carriers + (Int64(source) * tokens + token) * 8
        for turn in cutlass.range_constexpr(2):
            active = there != 0 and copy == turn
            at = Int32(0)
            peers.delay(delays)
            if active:
                address = Int64(0)
                if cutlass.const_expr(turn == 0):
                    address = peers.base_of(table, source) + x_offset + Int64(token) * row_bytes
                else:
                    at = peers.wait_word(carrier, launch, control, heap, wire.SITE_CARRIER, source, wait_ms)
                    at = cutlass.max(cutlass.min(at, pool_rows - 1), 0)
                    address = pool + Int64(at) * row_bytes
                memory.proxy_fence()
                memory.bulk_load(buffer + lane * row_bytes, address, Int32(row_bytes), barrier)
            moving = cute.arch.vote_ballot_sync(active)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, cute.arch.popc(moving) * row_bytes)
            if cutlass.const_expr(scales > 0):
                for s in cutlass.range(slots, unroll=1):
                    if ((moving >> s) & 1) != 0:
                        first = Int64(0)
                        step = Int64(4)
                        if cutlass.const_expr(turn == 0):
                            theirs = peers.base_of(table, cute.arch.shuffle_sync(source, s))
                            first = theirs + xs_offset + Int64(cute.arch.shuffle_sync(token, s)) * (scales * 4)
                        else:
                            first = pool_scale + Int64(cute.arch.shuffle_sync(at, s)) * 4
                            step = Int64(pool_rows) * 4
                        to = pool_scale + Int64(row + s * grid) * 4
                        values = []
                        for j in cutlass.range_constexpr(0, scales, 32):
                            values.append(memory.ld_i32(first + Int64(cutlass.min(lane + j, scales - 1)) * step))
                        for j in cutlass.range_constexpr(0, scales, 32):
                            if lane + j < scales:
                                memory.st_i32(to + Int64(lane + j) * (Int64(pool_rows) * 4), values[j // 32])
            cute.arch.mbarrier_wait(barrier, parity)
            parity = parity ^ 1
            if active:
                memory.bulk_store(pool + Int64(own) * row_bytes, buffer + lane * row_bytes, Int32(row_bytes))
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0)
            cute.arch.sync_warp()
            if active:
                memory.red_release(ready + Int64(own // tile) * 4, Int32(1))
                if cutlass.const_expr(turn == 0):
                    peers.st_release_gpu(carrier, peers.word(launch, own))
            cute.arch.sync_warp()
        row = row + slots * grid
