"""Dispatch by pull: one warp a CTA brings rows from their source ranks into the pool, each token once; further copies are made here.

Rows are taken in stream order. The row of a token's smallest expert on this rank is its carrier; rows of its other experts are copied from
there. Pool and mid are rings of `span` blocks: a row goes to its number modulo their rows. So a carrier may be gone; every row that brings
or copies a token becomes its carrier, and where the latest one is gone too the token crosses to this rank again. That one is there until
FC2 of the block `span - ahead` behind it is complete: a token crosses once where its rows follow each other within about so many blocks.

Why nobody waits for good, by induction over the tasks and rows in stream order:
- a row waits for lower rows (its warp's, its carrier) and for FC2 of the blocks `ahead` and `span` before its own. Both are at least two
  groups of the stream, and FC2 of a group comes before FC1 of the second group behind it: so before all tasks that take the row;
- of a batch only the first row waits, others go along when they can: no row waits for a higher one;
- a task waits for rows of its block or for tasks before it; tasks are claimed in stream order, by CTAs that are all running, and a CTA
  works on its own in that order;
- this warp has no other duty, so it never waits behind a task of its CTA;
- of a peer it needs what lies in that peer's memory since its counts came, never its progress.
So the first task or row that is not through can go on. With the pool row goes the mid row: FC1 of a block finds its rows in the pool only
after FC2 of the block that had them has read mid.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import deadline, memory, peers, regions, routing, wire

WIRE = 1  # what is to be done with a row: bring it from its source rank,
COPY = 2  # or copy it from its carrier


@cute.jit
def room(
    fc2_done: Int64,
    tiles: cutlass.Constexpr,
    span: cutlass.Constexpr,
    ahead: cutlass.Constexpr,
    block: Int32,
    first: Int32,
    control: Int64,
    wait_ms: Int32,
):
    """Whether the rows of `block` may be written; the first row of a batch waits until they may. Orders the writes behind (acquire)."""
    free = Int32(1)
    for back in cutlass.range_constexpr(2):
        before = block - (ahead if back == 0 else span)
        if before >= 0:
            done = fc2_done + Int64(before) * 4
            if first != 0:
                deadline.wait_ge(done, Int32(tiles), control, regions.SITE_RING, block, wait_ms)
            else:
                free = free & Int32(memory.ld_acquire(done) >= tiles)
    return free


@cute.jit
def lost(
    fc2_done: Int64,
    tiles: cutlass.Constexpr,
    span: cutlass.Constexpr,
    ahead: cutlass.Constexpr,
    block: Int32,
    blocks: Int32,
):
    """Whether rows of `block` that this thread has read before may have been overwritten then, of `blocks` blocks in this launch.

    Who overwrites them has seen FC2 of the block `ahead` before its own complete, see `room`.
    """
    gone = Int32(0)
    if block + span < blocks:
        memory.fence()
        gone = Int32(memory.ld_relaxed(fc2_done + Int64(block + (span - ahead)) * 4) >= tiles)
    return gone


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
    fc2_done: Int64,
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
    tiles: cutlass.Constexpr,
    span: cutlass.Constexpr,
    ahead: cutlass.Constexpr,
    delays: cutlass.Constexpr,
    pool_rows: Int32,
    launch: Int32,
    bidx: Int32,
    grid: Int32,
    wait_ms: Int32,
    lane: Int32,
):
    """One warp. `slots` rows of `row_bytes` bytes travel at a time through the shared buffer; `scales` fp32 scales a row go along.

    `tokens`: most tokens of a rank. `tiles`: FC2 tasks a block. `span`: blocks of the ring, 0 where the pool has all rows and none is
    written twice; `ahead`: blocks that a row is at most pulled before FC2. Lane s looks up row s of a batch. Scales are stored transposed.
    """
    count = cute.make_tensor(counts, cute.make_layout(experts))
    offsets = cute.make_tensor(base, cute.make_layout(experts + 1))
    total = offsets[experts] * tile
    parity = Int32(0)
    row = bidx
    while row < total:
        route = Int32(0)
        todo = Int32(0)
        taken = Int32(slots)
        own = row + cutlass.min(lane, slots - 1) * grid
        if lane < slots and own < total:
            e = routing.search_expert(own // tile, base, experts)
            if own - offsets[e] * tile < count[e]:
                deadline.wait_tag(list_ready + Int64(e) * 4, launch, control, regions.SITE_LISTS, e, wait_ms)
                route = memory.ld_i32(row_route + Int64(own) * 4)
                todo = Int32(WIRE) + Int32(route < 0)
        place = own
        if cutlass.const_expr(span > 0):
            place = own % (span * tile)
            below = cute.arch.vote_ballot_sync(todo != 0) & Int32(cute.arch.lanemask_lt())
            free = Int32(1)
            peers.delay(delays)
            if todo != 0:
                free = room(fc2_done, tiles, span, ahead, own // tile, Int32(below == 0), control, wait_ms)
            # From the first row that has no room on, rows wait for the next batch, whose first it is.
            full = cute.arch.vote_ballot_sync(free == 0)
            if full != 0:
                taken = cute.arch.popc((full & -full) - 1)
            if lane >= taken:
                todo = Int32(0)
            cute.arch.sync_warp()
        source = peers.source_of(route, ranks)
        token = peers.route_of(route, tokens * top_k) // top_k
        carrier = carriers + (Int64(source) * tokens + token) * 8
        left = cute.arch.vote_ballot_sync(todo != 0)
        while left != 0:
            # Rows that cross go first: copies may wait for them.
            crossing = cute.arch.vote_ballot_sync(todo == WIRE)
            at = Int32(-1)
            peers.delay(delays)
            if todo == WIRE:
                at = token
            if crossing == 0 and todo == COPY:
                if (left & Int32(cute.arch.lanemask_lt())) == 0:
                    at = peers.wait_word(carrier, launch, control, heap, wire.SITE_CARRIER, source, wait_ms)
                else:
                    at = peers.look(carrier, launch)
            kept = at
            if at >= 0:
                address = Int64(0)
                if crossing != 0:
                    address = peers.base_of(table, source) + x_offset + Int64(at) * row_bytes
                else:
                    if cutlass.const_expr(span > 0):
                        at = at % (span * tile)
                    else:
                        at = cutlass.min(at, pool_rows - 1)
                    address = pool + Int64(at) * row_bytes
                memory.proxy_fence()
                memory.bulk_load(buffer + lane * row_bytes, address, Int32(row_bytes), barrier)
            moving = cute.arch.vote_ballot_sync(at >= 0)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, cute.arch.popc(moving) * row_bytes)
            cute.arch.sync_warp()
            if cutlass.const_expr(scales > 0):
                for s in cutlass.range(slots, unroll=1):
                    if ((moving >> s) & 1) != 0:
                        first = pool_scale + Int64(cute.arch.shuffle_sync(at, s)) * 4
                        step = Int64(pool_rows) * 4
                        if crossing != 0:
                            theirs = peers.base_of(table, cute.arch.shuffle_sync(source, s))
                            first = theirs + xs_offset + Int64(cute.arch.shuffle_sync(at, s)) * (scales * 4)
                            step = Int64(4)
                        to = pool_scale + Int64(cute.arch.shuffle_sync(place, s)) * 4
                        values = []
                        for j in cutlass.range_constexpr(0, scales, 32):
                            values.append(memory.ld_i32(first + Int64(cutlass.min(lane + j, scales - 1)) * step))
                        for j in cutlass.range_constexpr(0, scales, 32):
                            if lane + j < scales:
                                memory.st_i32(to + Int64(lane + j) * (Int64(pool_rows) * 4), values[j // 32])
            cute.arch.mbarrier_wait(barrier, parity)
            parity = parity ^ 1
            cute.arch.sync_warp()
            if cutlass.const_expr(span > 0):
                if at >= 0 and todo == COPY:
                    if lost(fc2_done, tiles, span, ahead, kept // tile, offsets[experts]) != 0:
                        todo = Int32(WIRE)
                        at = Int32(-1)
            if at >= 0:
                memory.bulk_store(pool + Int64(place) * row_bytes, buffer + lane * row_bytes, Int32(row_bytes))
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0)
            cute.arch.sync_warp()
            if at >= 0:
                memory.red_release(ready + Int64(own // tile) * 4, Int32(1))
                if cutlass.const_expr(span > 0):
                    peers.st_release_gpu(carrier, peers.word(launch, own))
                else:
                    if todo == WIRE:
                        peers.st_release_gpu(carrier, peers.word(launch, own))
                todo = Int32(0)
            cute.arch.sync_warp()
            left = cute.arch.vote_ballot_sync(todo != 0)
        row = row + taken * grid
