"""From expert ids to blocks of rows, without any grid-wide step.

Every CTA counts all routes in shared memory, so all know the same block offsets. The row list of an expert is written by the one CTA that
owns it (expert modulo grid) and announced by an epoch-tagged word. The order of the rows of an expert is left open: the bytes of the result
do not depend on it, because FC2 rows are returned by route and summed in slot order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import deadline, memory

BATCH = 16  # ids a thread has in flight


def load_id(ids, route, condition=True):
    """The expert id of a route, -1 unless `condition` holds."""
    return memory.ld_i32_if(ids + Int64(route) * 4, condition)


@cute.jit
def count_routes(
    ids: Int64,
    routes: Int32,
    experts: cutlass.Constexpr,
    counts: cute.Pointer,
    control: Int64,
    thread: Int32,
    threads: cutlass.Constexpr,
):
    """Add the routes of every expert to the zeroed shared array `counts`; ids that are neither an expert nor -1 raise the sticky flag."""
    i = thread
    bad = Int32(0)
    while i < routes:
        values = []
        for j in cutlass.range_constexpr(BATCH):
            values.append(load_id(ids, i + j * threads, i + j * threads < routes))
        for j in cutlass.range_constexpr(BATCH):
            if values[j] >= 0 and values[j] < experts:
                memory.shared_increment(counts + values[j])
            else:
                if values[j] != -1:
                    bad = Int32(1)
        i = i + BATCH * threads
    if bad != 0:
        deadline.bad_id(control)


@cute.jit
def block_prefix(counts: cute.Pointer, base: cute.Pointer, experts: cutlass.Constexpr, tile: cutlass.Constexpr, lane: Int32):
    """One warp: base[e] = blocks of `tile` rows of the experts before e, for e = 0 to experts (the last is the total)."""
    per = -(-experts // 32)
    first = lane * per
    own = Int32(0)
    for j in cutlass.range_constexpr(per):
        if first + j < experts:
            own = own + (cute.make_tensor(counts, cute.make_layout(experts))[first + j] + tile - 1) // tile
    total = own
    for s in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(total, 1 << s, mask_and_clamp=0)
        if lane >= (1 << s):
            total = total + other
    run = total - own
    offsets = cute.make_tensor(base, cute.make_layout(experts + 1))
    for j in cutlass.range_constexpr(per):
        if first + j < experts:
            offsets[first + j] = run
            run = run + (cute.make_tensor(counts, cute.make_layout(experts))[first + j] + tile - 1) // tile
    if lane == 31:
        offsets[experts] = total


@cute.jit
def expert_of(block: Int32, base: cute.Pointer, experts: cutlass.Constexpr, lane: Int32):
    """One warp: the expert that block number `block` belongs to."""
    offsets = cute.make_tensor(base, cute.make_layout(experts + 1))
    before = Int32(0)
    for j in cutlass.range_constexpr(-(-experts // 32)):
        e = lane + 32 * j
        if e < experts:
            if offsets[e + 1] <= block:
                before = before + 1
    return cute.arch.warp_redux_sync(before, "add")


@cute.jit
def search_expert(block: Int32, base: cute.Pointer, experts: cutlass.Constexpr):
    """One thread: the expert that block number `block` (below the total) belongs to, by bisection."""
    offsets = cute.make_tensor(base, cute.make_layout(experts + 1))
    low = Int32(0)
    for s in cutlass.range_constexpr((experts - 1).bit_length() - 1, -1, -1):
        middle = low + (1 << s)
        if middle < experts:
            if offsets[middle] <= block:
                low = middle
    return low


@cute.jit
def build_lists(
    ids: Int64,
    routes: Int32,
    experts: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    counts: cute.Pointer,
    base: cute.Pointer,
    cursor: cute.Pointer,
    row_route: Int64,
    list_ready: Int64,
    epoch: Int32,
    bidx: Int32,
    grid: Int32,
    thread: Int32,
    threads: cutlass.Constexpr,
    barrier_id: cutlass.Constexpr,
):
    """`threads` threads of a CTA: write the row lists of the experts that this CTA owns. `cursor` is one zeroed shared int32."""
    lane = thread % 32
    count = cute.make_tensor(counts, cute.make_layout(experts))
    offsets = cute.make_tensor(base, cute.make_layout(experts + 1))
    taken = cute.make_tensor(cursor, cute.make_layout(1))
    e = bidx
    while e < experts:
        if count[e] > 0:
            rows = row_route + Int64(offsets[e]) * (tile * 4)
            i = thread
            while i - lane < routes:
                values = []
                for j in cutlass.range_constexpr(BATCH):
                    values.append(load_id(ids, i + j * threads, i + j * threads < routes))
                for j in cutlass.range_constexpr(BATCH):
                    route = i + j * threads
                    hit = values[j] == e
                    ballot = cute.arch.vote_ballot_sync(hit)
                    if ballot != 0:
                        place = Int32(0)
                        if lane == 0:
                            place = memory.shared_add(cursor, cute.arch.popc(ballot))
                        place = cute.arch.shuffle_sync(place, 0)
                        if hit:
                            place = place + cute.arch.popc(ballot & Int32(cute.arch.lanemask_lt()))
                            memory.st_i32(rows + Int64(place) * 4, route)
                i = i + BATCH * threads
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=threads)
        if thread == 0:
            taken[0] = Int32(0)
            memory.st_release(list_ready + Int64(e) * 4, epoch + 1)
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=threads)
        e = e + grid
