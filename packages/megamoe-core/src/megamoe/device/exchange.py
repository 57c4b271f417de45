"""The one exchange of a launch: a rank lists its routes by destination, tells every owner how many it has, and builds its own row lists.

A rank's list is one array ordered by physical expert (rank by rank, `experts` slots a rank); its peers read their part of it. Count words
go to every rank, zeros too: a rank knows from them that its peers have begun this launch, and so have ended the one before.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import memory, peers, routing, wire

BATCH = 8  # words a thread has in flight


@cute.jit
def physical(expert: Int32, token: Int32, place: Int64, copies: cutlass.Constexpr):
    """Physical expert of a route. Row `expert` of the placement table: number of copies, then the copies. `copies` 0: all in order."""
    found = expert
    if cutlass.const_expr(copies > 0):
        row = place + Int64(expert) * (4 * (copies + 1))
        which = Int32(0)
        if cutlass.const_expr(copies > 1):
            which = token % memory.ld_i32(row)
        found = memory.ld_i32(row + Int64(which + 1) * 4)
    return found


@cute.jit
def destination(expert: Int32, route: Int32, top_k: cutlass.Constexpr, total: cutlass.Constexpr, place: Int64, copies: cutlass.Constexpr):
    """Physical expert of a route, -1 where the id is no expert."""
    found = Int32(-1)
    if expert >= 0 and expert < total:
        found = physical(expert, route // top_k, place, copies)
    return found


@cute.jit
def count_sent(
    ids: Int64,
    routes: Int32,
    top_k: cutlass.Constexpr,
    total: cutlass.Constexpr,
    place: Int64,
    copies: cutlass.Constexpr,
    counts: cute.Pointer,
    control: Int64,
    thread: Int32,
    threads: cutlass.Constexpr,
):
    """Add this rank's routes to every physical expert to the zeroed shared array `counts`; bad ids raise the sticky flag."""
    i = thread
    bad = Int32(0)
    while i < routes:
        values = []
        for j in cutlass.range_constexpr(BATCH):
            values.append(memory.ld_i32(ids + Int64(cutlass.min(i + j * threads, routes - 1)) * 4))
        for j in cutlass.range_constexpr(BATCH):
            if i + j * threads < routes:
                to = destination(values[j], i + j * threads, top_k, total, place, copies)
                if to >= 0:
                    memory.shared_increment(counts + to)
                else:
                    if values[j] != -1:
                        bad = Int32(1)
        i = i + BATCH * threads
    if bad != 0:
        routing.deadline.bad_id(control)


@cute.jit
def again(
    ids: Int64,
    token: Int32,
    to: Int32,
    top_k: cutlass.Constexpr,
    total: cutlass.Constexpr,
    place: Int64,
    copies: cutlass.Constexpr,
    experts: cutlass.Constexpr,
):
    """Whether the token also goes to a smaller physical expert of the same rank, which pulls it for all of them."""
    found = Int32(0)
    for k in cutlass.range(top_k, unroll=1):
        route = token * top_k + k
        other = destination(memory.ld_i32(ids + Int64(route) * 4), route, top_k, total, place, copies)
        if other >= 0 and other < to and other // experts == to // experts:
            found = Int32(1)
    return found


@cute.jit
def slots_of(
    ids: Int64,
    token: Int32,
    to: Int32,
    top_k: cutlass.Constexpr,
    total: cutlass.Constexpr,
    place: Int64,
    copies: cutlass.Constexpr,
    experts: cutlass.Constexpr,
):
    """Bits of the token's slots that go to the rank of physical expert `to`."""
    found = Int32(0)
    for k in cutlass.range(top_k, unroll=1):
        route = token * top_k + k
        other = destination(memory.ld_i32(ids + Int64(route) * 4), route, top_k, total, place, copies)
        if other >= 0 and other // experts == to // experts:
            found = found | (Int32(1) << k)
    return found


@cute.jit
def list_sent(
    ids: Int64,
    routes: Int32,
    top_k: cutlass.Constexpr,
    total: cutlass.Constexpr,
    place: Int64,
    copies: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    slots: cutlass.Constexpr,
    counts: cute.Pointer,
    first: cute.Pointer,
    cursor: cute.Pointer,
    lists: Int64,
    groups: cutlass.Constexpr,
    bidx: Int32,
    grid: Int32,
    thread: Int32,
    threads: cutlass.Constexpr,
    barrier_id: cutlass.Constexpr,
):
    """`threads` threads of a CTA: write the lists of the physical experts that this CTA takes.

    `first`: where each starts; `cursor`: a zeroed shared int32; `groups`: where the words of groups lie behind the lists, 0 for none.
    """
    lane = thread % 32
    count = cute.make_tensor(counts, cute.make_layout(slots))
    start = cute.make_tensor(first, cute.make_layout(slots + 1))
    taken = cute.make_tensor(cursor, cute.make_layout(1))
    to = bidx
    while to < slots:
        if count[to] > 0:
            rows = lists + Int64(start[to]) * 4
            i = thread
            while i - lane < routes:
                values = []
                for j in cutlass.range_constexpr(BATCH):
                    values.append(memory.ld_i32(ids + Int64(cutlass.min(i + j * threads, routes - 1)) * 4))
                for j in cutlass.range_constexpr(BATCH):
                    route = i + j * threads
                    hit = destination(values[j], route, top_k, total, place, copies) == to and route < routes
                    ballot = cute.arch.vote_ballot_sync(hit)
                    if ballot != 0:
                        at = Int32(0)
                        if lane == 0:
                            at = memory.shared_add(cursor, cute.arch.popc(ballot))
                        at = cute.arch.shuffle_sync(at, 0)
                        if hit:
                            at = at + cute.arch.popc(ballot & Int32(cute.arch.lanemask_lt()))
                            copy = again(ids, route // top_k, to, top_k, total, place, copies, experts)
                            memory.st_i32(rows + Int64(at) * 4, route | (copy << 31))
                            if cutlass.const_expr(groups != 0):
                                slots_to = slots_of(ids, route // top_k, to, top_k, total, place, copies, experts)
                                memory.st_i32(rows + (Int64(at) * 4 + groups), slots_to)
                i = i + BATCH * threads
            cute.arch.barrier(barrier_id=barrier_id, number_of_threads=threads)
            if thread == 0:
                taken[0] = Int32(0)
            cute.arch.barrier(barrier_id=barrier_id, number_of_threads=threads)
        to = to + grid


def words_of(heap, offset, launch, ranks, source, experts):
    """Address of the count words that `source` sends for this launch: routes by expert, then where its list for this rank starts."""
    return heap + offset + Int64(((launch & 1) * ranks + source) * (experts + 1)) * 8


@cute.jit
def publish(
    table: Int64,
    offset: cutlass.Constexpr,
    launch: Int32,
    rank: Int32,
    ranks: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    counts: cute.Pointer,
    first: cute.Pointer,
    thread: Int32,
    threads: cutlass.Constexpr,
):
    """Send the count words to every rank, after everything that this rank has written for its peers."""
    count = cute.make_tensor(counts, cute.make_layout(ranks * experts))
    start = cute.make_tensor(first, cute.make_layout(ranks * experts + 1))
    peers.fence()
    i = thread
    while i < ranks * (experts + 1):
        peer = i // (experts + 1)
        e = i - peer * (experts + 1)
        value = start[peer * experts]
        if e < experts:
            value = count[peer * experts + e]
        peers.st_relaxed(
            words_of(peers.base_of(table, peer), offset, launch, ranks, rank, experts) + Int64(e) * 8, peers.word(launch, value)
        )
        i = i + threads


@cute.jit
def receive(
    heap: Int64,
    offset: cutlass.Constexpr,
    launch: Int32,
    ranks: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    counts: cute.Pointer,
    control: Int64,
    wait_ms: Int32,
    thread: Int32,
    threads: cutlass.Constexpr,
):
    """Wait for every rank's count words and add up the rows of every local expert in the zeroed shared array `counts`."""
    i = thread
    while i < ranks * (experts + 1):
        source = i // (experts + 1)
        e = i - source * (experts + 1)
        at = words_of(heap, offset, launch, ranks, source, experts) + Int64(e) * 8
        value = peers.wait_word(at, launch, control, heap, wire.SITE_COUNTS, source, wait_ms)
        if e < experts and value != 0:
            memory.shared_add(counts + e, value)
        i = i + threads


@cute.jit
def value_of(address: Int64, launch: Int32):
    """Value of a word that was waited for; 0 where an aborted launch did not get it."""
    word = memory.ld_i64(address)
    return Int32(word) * Int32(Int32(word >> 32) == launch)


@cute.jit
def list_received(
    table: Int64,
    heap: Int64,
    counts_offset: cutlass.Constexpr,
    lists_offset: cutlass.Constexpr,
    groups: cutlass.Constexpr,
    row_groups: cutlass.Constexpr,
    route_rows: cutlass.Constexpr,
    staged: cutlass.Constexpr,
    singles: cutlass.Constexpr,
    launch: Int32,
    ranks: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    most: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    base: cute.Pointer,
    row_route: Int64,
    list_ready: Int64,
    bidx: Int32,
    grid: Int32,
    thread: Int32,
    threads: cutlass.Constexpr,
    barrier_id: cutlass.Constexpr,
):
    """`threads` threads of a CTA: gather the row lists of the local experts that this CTA takes from all ranks, a warp a source.

    `most`: routes of a rank. `groups`: where the words of groups lie behind a rank's lists, `row_groups` behind `row_route`; 0 for none.
    A row's word becomes 0 where the row returns alone: always in a launch to which more than `staged` blocks come, and with `singles` where
    it is its group's only one. The others find each other by `route_rows`, also behind `row_route`: the row of every route.
    """
    lane = thread % 32
    offsets = cute.make_tensor(base, cute.make_layout(experts + 1))
    apart = Int32(offsets[experts] > staged)
    e = bidx
    while e < experts:
        rows = row_route + Int64(offsets[e]) * (tile * 4)
        source = thread // 32
        while source < ranks:
            # Rows of this expert from smaller ranks come first; in the source's list, rows of smaller experts.
            above = Int32(0)
            r = lane
            while r < source:
                above = above + value_of(words_of(heap, counts_offset, launch, ranks, r, experts) + Int64(e) * 8, launch)
                r = r + 32
            words = words_of(heap, counts_offset, launch, ranks, source, experts)
            before = Int32(0)
            r = lane
            while r < e:
                before = before + value_of(words + Int64(r) * 8, launch)
                r = r + 32
            above = cute.arch.warp_redux_sync(above, "add")
            before = cute.arch.warp_redux_sync(before, "add") + value_of(words + experts * 8, launch)
            count = value_of(words + Int64(e) * 8, launch)
            theirs = peers.base_of(table, source) + lists_offset
            i = lane
            while i < count:
                values, slots = [], []
                for j in cutlass.range_constexpr(BATCH):
                    at = cutlass.min(before + cutlass.min(i + 32 * j, count - 1), most - 1)
                    values.append(memory.ld_i32(theirs + Int64(at) * 4))
                    if cutlass.const_expr(groups != 0):
                        slots.append(memory.ld_i32(theirs + (Int64(at) * 4 + groups)))
                for j in cutlass.range_constexpr(BATCH):
                    if i + 32 * j < count:
                        row = rows + Int64(above + i + 32 * j) * 4
                        memory.st_i32(row, values[j] | (source << wire.ROUTE_BITS))
                        if cutlass.const_expr(groups != 0):
                            alone = apart
                            if cutlass.const_expr(singles):
                                alone = alone | Int32(cute.arch.popc(slots[j]) == 1)
                            memory.st_i32(row + row_groups, slots[j] * (1 - alone))
                            if alone == 0:
                                route = Int64(source) * most + peers.route_of(values[j], most)
                                memory.st_i32(row_route + (route * 4 + route_rows), offsets[e] * tile + (above + i + 32 * j))
                i = i + 32 * BATCH
            source = source + threads // 32
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=threads)
        if thread == 0:
            memory.st_release(list_ready + Int64(e) * 4, launch)
        e = e + grid
