"""The way back in groups: a rank adds up what it made of a token and returns one row for it, as bf16 or as MXFP8.

A group is the routes of one token of one source rank to one rank. The source knows it when it routes: the slots of the group travel with
each of its routes as bits of a word. FC2 rows are staged in the order in which they are made; whoever brings the last member of a group
adds them in slot order in fp32, times their routing weights, and writes the sum into the source's inbox.

There is room for a limited number of blocks of such rows. A launch that brings a rank more returns every row by itself, straight from FC2,
and the source does with the rows of a group what that rank would have done: the same sum, rounded like what travels. So nothing waits for
room, and not a bit depends on which way was taken. On a bf16 wire the only row of a group goes this way in any case.

The source adds the sums of a token in the order of their groups' first slots, which depends on routing alone: whatever comes first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from megamoe.device import deadline, exchange, memory, peers, quantize, wire

PIECES = 8  # 256-column pieces of a row that a warp adds at a time at the owner
SOURCE_PIECES = 4  # and at the source


def first_bit(bits):
    """Number of the lowest bit that is set."""
    return cute.arch.popc((bits & (-bits)) - 1)


@cute.jit
def send_rows(
    table: Int64,
    stage: Int64,
    row_route: Int64,
    row_groups: cutlass.Constexpr,
    route_rows: cutlass.Constexpr,
    arrived: Int64,
    inbox: cutlass.Constexpr,
    inbox_scale: cutlass.Constexpr,
    flags: cutlass.Constexpr,
    weights: cutlass.Constexpr,
    first: Int32,
    valid: Int32,
    launch: Int32,
    ranks: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
    top_k: cutlass.Constexpr,
    hidden: cutlass.Constexpr,
    weighted: cutlass.Constexpr,
    mxfp8: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    delays: cutlass.Constexpr,
    control: Int64,
    warp: Int32,
    warps: cutlass.Constexpr,
    lane: Int32,
):
    """`warp` of `warps` of a CTA, once FC2 of a block is complete: its rows arrive at their groups; complete groups are added and returned,
    and rows that FC2 has returned alone are announced.

    `row_groups`, `route_rows`: see `exchange.list_received`. `arrived`: counters of groups, by source and token; the last member takes its
    group's back to zero. `tokens`: most of a rank. A launch that has given up announces nothing: its rows may be wrong.
    """
    row = warp + lane * warps
    mine = lane < tile // warps and row < valid
    entry = row_route + Int64(first + cutlass.min(row, valid - 1)) * 4
    travelling = memory.ld_i32(entry)
    slots = memory.ld_i32(entry + row_groups)
    source = peers.source_of(travelling, ranks)
    route = peers.route_of(travelling, tokens * top_k)
    token = route // top_k
    last, alone = Int32(0), Int32(0)
    if mine:
        if slots == 0:
            alone = Int32(1)
        else:
            counter = arrived + (Int64(source) * tokens + token) * 4
            if memory.add_acq_rel(counter, Int32(1)) == cute.arch.popc(slots) - 1:
                memory.st_i32(counter, Int32(0))
                last = Int32(1)
    complete = cute.arch.vote_ballot_sync(last != 0)
    if cute.arch.vote_ballot_sync(last + alone != 0) != 0 and deadline.aborted(control) == 0:
        if complete != 0:
            # A lane has seen the other members' rows of the groups that it completed; all lanes read them.
            cute.arch.sync_warp()
            rest = complete
            ahead = first_bit(rest)
            index, weight = member_of(table, weights, row_route + route_rows, source, token, ahead, tokens, top_k, weighted, lane)
            while rest != 0:
                at = first_bit(rest)
                rest = rest & (rest - 1)
                used_index, used_weight = index, weight
                # What the next group needs travels while this one is added; behind the last its own again: other tokens' sources may be
                # through with this launch, and write the weights of the next one.
                ahead = first_bit(rest | (Int32(rest == 0) << at))
                index, weight = member_of(table, weights, row_route + route_rows, source, token, ahead, tokens, top_k, weighted, lane)
                members = cute.arch.shuffle_sync(slots, at)
                to = Int64(cute.arch.shuffle_sync(token, at)) * top_k + first_bit(members)
                heap = peers.base_of(table, cute.arch.shuffle_sync(source, at))
                return_sum(
                    stage,
                    used_index,
                    members,
                    used_weight,
                    heap + inbox + to * (2 * hidden),
                    heap + inbox_scale + to * (-(-hidden // 128) * 4),
                    hidden,
                    mxfp8,
                    lane,
                )
        cute.arch.sync_warp()
        peers.delay(delays)
        peers.fence()
        if last + alone != 0:
            to, what = route, Int32(wire.ALONE)
            if last != 0:
                to, what = token * top_k + first_bit(slots), Int32(wire.SUMMED)
            peers.st_relaxed(peers.base_of(table, source) + flags + Int64(to) * 8, peers.word(launch, what))


@cute.jit
def member_of(
    table: Int64,
    weights: cutlass.Constexpr,
    rows: Int64,
    source: Int32,
    token: Int32,
    of: Int32,
    tokens: cutlass.Constexpr,
    top_k: cutlass.Constexpr,
    weighted: cutlass.Constexpr,
    lane: Int32,
):
    """Lane k: (staged row, routing weight) of slot k of lane `of`'s token; the weight is 1 where weights have been applied before."""
    route = cute.arch.shuffle_sync(token, of) * top_k + cutlass.min(lane, top_k - 1)
    theirs = cute.arch.shuffle_sync(source, of)
    row = memory.ld_i32(rows + (Int64(theirs) * (tokens * top_k) + route) * 4)
    weight = Float32(1.0)
    if cutlass.const_expr(weighted):
        weight = memory.ld_f32(peers.base_of(table, theirs) + weights + Int64(route) * 4)
    return row, weight


@cute.jit
def add_members(
    rows: Int64,
    index: Int32,
    slots: Int32,
    weight: Float32,
    column: Int32,
    hidden: cutlass.Constexpr,
    pieces: cutlass.Constexpr,
):
    """The sum in slot order of a group's bf16 rows: eight columns from `column` on of each of `pieces` pieces. Lane k knows slot k's row
    and weight."""
    total = [Float32(0.0) for _ in range(8 * pieces)]
    rest = slots
    while rest != 0:
        k = first_bit(rest)
        rest = rest & (rest - 1)
        scale = cute.arch.shuffle_sync(weight, k)
        row = rows + Int64(cute.arch.shuffle_sync(index, k)) * (2 * hidden)
        words = []
        for p in cutlass.range_constexpr(pieces):
            # Columns behind the row read its end again and are not stored.
            words.append(memory.ld_v4(row + Int64(cutlass.min(column + 256 * p, hidden - 8)) * 2))
        for p in cutlass.range_constexpr(pieces):
            for w in cutlass.range_constexpr(4):
                at = 8 * p + 2 * w
                total[at] = cute.math.fma(scale, quantize.bf16_low(words[p][w]), total[at])
                total[at + 1] = cute.math.fma(scale, quantize.bf16_high(words[p][w]), total[at + 1])
    return total


@cute.jit
def return_sum(
    rows: Int64,
    index: Int32,
    slots: Int32,
    weight: Float32,
    to: Int64,
    to_scale: Int64,
    hidden: cutlass.Constexpr,
    mxfp8: cutlass.Constexpr,
    lane: Int32,
):
    """One warp: the row at `to` becomes the sum of a group."""
    pieces = min(PIECES, -(-hidden // 256))
    for start in cutlass.range(0, hidden, 256 * pieces, unroll=1):
        column = start + lane * 8
        total = add_members(rows, index, slots, weight, column, hidden, pieces)
        for p in cutlass.range_constexpr(pieces):
            values = [total[8 * p + i] for i in range(8)]
            if cutlass.const_expr(mxfp8):
                byte, words = quantize.mxfp8_block(values)
                four = byte
                for i in cutlass.range_constexpr(1, 4):
                    four = four | (cute.arch.shuffle_sync_bfly(byte, 4 * i) << (8 * i))
                if column + 256 * p < hidden:
                    memory.st_v2(to + (column + 256 * p), *words)
                    if lane % 16 == 0:
                        memory.st_i32(to_scale + (column + 256 * p) // 128 * 4, four)
            else:
                if column + 256 * p < hidden:
                    words = [quantize.pack_bf16(values[2 * w], values[2 * w + 1]) for w in range(4)]
                    memory.st_v4(to + Int64(column + 256 * p) * 2, *words)


def wired(values, mxfp8):
    """Eight values of a lane as they are when they have travelled."""
    if mxfp8:
        byte, words = quantize.mxfp8_block(values)
        return quantize.mxfp8_values(words, byte)
    return unpacked(quantize.pack_bf16(values[2 * w], values[2 * w + 1]) for w in range(4))


def unpacked(words):
    """The bf16 values of words."""
    return [half(word) for word in words for half in (quantize.bf16_low, quantize.bf16_high)]


@cute.jit
def group_of(
    ids: Int64,
    token: Int32,
    top_k: cutlass.Constexpr,
    total: cutlass.Constexpr,
    place: Int64,
    copies: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    lane: Int32,
):
    """Lane k, of slot k of a token: (the rank it goes to, -1 for none, and the bits of the slots that go there)."""
    route = token * top_k + cutlass.min(lane, top_k - 1)
    to = exchange.destination(memory.ld_i32(ids + Int64(route) * 4), route, top_k, total, place, copies)
    rank = Int32(-1)
    if to >= 0 and lane < top_k:
        rank = to // experts
    slots = Int32(0)
    for k in cutlass.range(top_k, unroll=1):
        slots = slots | (Int32(cute.arch.shuffle_sync(rank, k) == rank) << k)
    return rank, slots


@cute.jit
def collect_rows(
    heap: Int64,
    inbox: cutlass.Constexpr,
    inbox_scale: cutlass.Constexpr,
    flags: cutlass.Constexpr,
    ids: Int64,
    topk_w: Int64,
    out: Int64,
    tokens: Int32,
    top_k: cutlass.Constexpr,
    total: cutlass.Constexpr,
    place: Int64,
    copies: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    hidden: cutlass.Constexpr,
    weighted: cutlass.Constexpr,
    mxfp8: cutlass.Constexpr,
    launch: Int32,
    control: Int64,
    wait_ms: Int32,
    warp: Int32,
    warps: Int32,
    lane: Int32,
):
    """out[t] = bf16(sum of the groups of token t, by their first slots), as they arrive; `warp` of `warps` over the grid."""
    pieces = min(SOURCE_PIECES, -(-hidden // 256))
    chunks = -(-hidden // (256 * pieces))
    unit = warp
    while unit < tokens * chunks:
        token = unit // chunks
        column = (unit - token * chunks) * (256 * pieces) + lane * 8
        rank, slots = group_of(ids, token, top_k, total, place, copies, experts, lane)
        own = token * top_k + cutlass.min(lane, top_k - 1)
        weight = Float32(1.0)
        if cutlass.const_expr(weighted):
            weight = memory.ld_f32(topk_w + Int64(own) * 4)
        # The flag of a group's first slot says whether there are more.
        first = first_bit(slots) & 31
        leads = cute.arch.vote_ballot_sync(rank >= 0 and first == lane)
        flag = heap + flags + Int64(own) * 8
        what = Int32(0)
        if rank >= 0 and first == lane:
            what = peers.wait_word(flag, launch, control, heap, wire.SITE_RESULTS, rank, wait_ms)
        cute.arch.sync_warp()
        of_group = cute.arch.shuffle_sync(what, first)
        if rank >= 0 and first != lane and of_group == wire.ALONE:
            peers.wait_word(flag, launch, control, heap, wire.SITE_RESULTS, rank, wait_ms)
        cute.arch.sync_warp()
        sums = [Float32(0.0) for _ in range(8 * pieces)]
        while leads != 0:
            lead = first_bit(leads)
            leads = leads & (leads - 1)
            if cute.arch.shuffle_sync(what, lead) == wire.ALONE:
                members = cute.arch.shuffle_sync(slots, lead)
                rows = add_members(heap + inbox, own, members, weight, column, hidden, pieces)
                for p in cutlass.range_constexpr(pieces):
                    values = wired([rows[8 * p + i] for i in range(8)], mxfp8)
                    for i in cutlass.range_constexpr(8):
                        sums[8 * p + i] = sums[8 * p + i] + values[i]
            else:
                row = Int64(token) * top_k + lead
                words, scales = [], []
                for p in cutlass.range_constexpr(pieces):
                    inside = cutlass.min(column + 256 * p, hidden - 8)
                    if cutlass.const_expr(mxfp8):
                        words.append(memory.ld_v2(heap + inbox + (row * (2 * hidden) + inside)))
                        scales.append(memory.ld_i32(heap + inbox_scale + (row * -(-hidden // 128) + inside // 128) * 4))
                    else:
                        words.append(memory.ld_v4(heap + inbox + (row * hidden + inside) * 2))
                for p in cutlass.range_constexpr(pieces):
                    if cutlass.const_expr(mxfp8):
                        inside = cutlass.min(column + 256 * p, hidden - 8)
                        values = quantize.mxfp8_values(words[p], (scales[p] >> (inside // 32 % 4 * 8)) & 0xFF)
                    else:
                        values = unpacked(words[p])
                    for i in cutlass.range_constexpr(8):
                        sums[8 * p + i] = sums[8 * p + i] + values[i]
        for p in cutlass.range_constexpr(pieces):
            if column + 256 * p < hidden:
                packed = [quantize.pack_bf16(sums[8 * p + 2 * w], sums[8 * p + 2 * w + 1]) for w in range(4)]
                memory.st_v4(out + (Int64(token) * hidden + (column + 256 * p)) * 2, *packed)
        unit = unit + warps
