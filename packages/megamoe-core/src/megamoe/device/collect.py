"""The way back: results lie in the source rank's inbox by route, one word a route announces them, and the source waits for its own."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import combine, deadline, exchange, memory, peers, wire


@cute.jit
def announce(
    table: Int64,
    flags_offset: cutlass.Constexpr,
    row_route: Int64,
    done: Int64,
    tiles: cutlass.Constexpr,
    pool: Int32,
    valid: Int32,
    launch: Int32,
    ranks: cutlass.Constexpr,
    most: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    delays: cutlass.Constexpr,
    control: Int64,
    lane: Int32,
):
    """One warp, after one FC2 tile of a block is stored: the last of its `tiles` tiles announces the rows.

    `done`: the block's counter; `most`: routes of a rank. Nothing is announced by a launch that has given up: its rows may be wrong.
    """
    before = Int32(0)
    if lane == 0:
        before = memory.add_acq_rel(done, Int32(1))
    cute.arch.sync_warp()
    if cute.arch.shuffle_sync(before, 0) == tiles - 1:
        if deadline.aborted(control) == 0:
            peers.delay(delays)
            peers.fence()
            for i in cutlass.range(tile // 32, unroll=1):
                r = lane + 32 * i
                if r < valid:
                    route = memory.ld_i32(row_route + Int64(pool + r) * 4)
                    theirs = peers.base_of(table, peers.source_of(route, ranks)) + flags_offset
                    peers.st_relaxed(theirs + Int64(peers.route_of(route, most)) * 8, peers.word(launch, Int32(1)))


@cute.jit
def await_rows(
    heap: Int64,
    flags_offset: cutlass.Constexpr,
    ids: Int64,
    tokens: Int32,
    top_k: cutlass.Constexpr,
    total: cutlass.Constexpr,
    place: Int64,
    copies: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    hidden: cutlass.Constexpr,
    launch: Int32,
    control: Int64,
    wait_ms: Int32,
    warp: Int32,
    warps: Int32,
    lane: Int32,
):
    """Wait for the results of the tokens that `combine.sum_rows` gives to this warp."""
    chunks = -(-hidden // (256 * combine.PIECES))
    unit = warp
    while unit < tokens * chunks:
        token = unit // chunks
        route = token * top_k + cutlass.min(lane, top_k - 1)
        to = exchange.destination(memory.ld_i32(ids + Int64(route) * 4), route, top_k, total, place, copies)
        if to >= 0 and lane < top_k:
            peers.wait_word(heap + flags_offset + Int64(route) * 8, launch, control, heap, wire.SITE_RESULTS, to // experts, wait_ms)
        cute.arch.sync_warp()
        unit = unit + warps


@cute.jit
def copy_words(source: Int64, target: Int64, words: Int32, thread: Int32, threads: Int32):
    """Copy int32 words; `thread` of `threads` over the grid."""
    i = thread
    while i < words:
        memory.st_i32(target + Int64(i) * 4, memory.ld_i32(source + Int64(i) * 4))
        i = i + threads


@cute.jit
def copy_lines(source: Int64, target: Int64, lines: Int32, thread: Int32, threads: Int32):
    """Copy lines of 16 bytes; `thread` of `threads` over the grid."""
    i = thread
    while i < lines:
        memory.st_v4(target + Int64(i) * 16, *memory.ld_v4(source + Int64(i) * 16))
        i = i + threads
