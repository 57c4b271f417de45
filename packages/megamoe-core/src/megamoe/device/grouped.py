"""The way back in groups: a rank adds up what it made of a token and returns one row for it, as bf16 or as MXFP8.

A group is the routes of one token of one source rank to one rank. The source knows it when it routes: the slots of the group travel with
each of its routes as bits of a word. FC2 rows are staged by route; whoever brings the last member of a group adds them in slot order in
fp32, times their routing weights, and writes the sum into the source's inbox. The source adds the rows of a token in the order of their
places, which depends on routing alone, so every sum has the same order whatever comes first.

A token has `places` places in the inbox, min(ranks, top_k): by rank where ranks are fewer than slots, else by the group's first slot.
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


def place_of(slots, rank, ranks, top_k):
    """Where a group of these slots at `rank` has its place among the token's."""
    return rank if ranks < top_k else first_bit(slots)


@cute.jit
def send_rows(
    table: Int64,
    stage: Int64,
    row_route: Int64,
    groups: cutlass.Constexpr,
    arrived: Int64,
    inbox: cutlass.Constexpr,
    inbox_scale: cutlass.Constexpr,
    flags: cutlass.Constexpr,
    weights: cutlass.Constexpr,
    first: Int32,
    valid: Int32,
    launch: Int32,
    rank: Int32,
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
    """`warp` of `warps` of a CTA, once FC2 of a block is complete: its rows arrive at their groups; complete groups are added and returned.

    `groups`: where the words of groups lie behind `row_route`. `arrived`: counters of groups, by source and token; the last member takes
    its group's back to zero. `tokens`: most of a rank. A launch that has given up returns nothing: its rows may be wrong.
    """
    row = warp + lane * warps
    mine = lane < tile // warps and row < valid
    entry = row_route + Int64(first + cutlass.min(row, valid - 1)) * 4
    route = memory.ld_i32(entry)
    slots = memory.ld_i32(entry + groups)
    source = peers.source_of(route, ranks)
    token = peers.route_of(route, tokens * top_k) // top_k
    last = Int32(0)
    if mine:
        counter = arrived + (Int64(source) * tokens + token) * 4
        if memory.add_acq_rel(counter, Int32(1)) == cute.arch.popc(slots) - 1:
            memory.st_i32(counter, Int32(0))
            last = Int32(1)
    complete = cute.arch.vote_ballot_sync(last != 0)
    if complete != 0 and deadline.aborted(control) == 0:
        # A lane has seen the other members' rows of the groups that it completed; all lanes read them.
        cute.arch.sync_warp()
        place = place_of(slots, rank, ranks, top_k)
        rest = complete
        ahead = first_bit(rest)
        weight = weight_of(
            table, weights, cute.arch.shuffle_sync(source, ahead), cute.arch.shuffle_sync(token, ahead), top_k, weighted, lane
        )
        while rest != 0:
            at = first_bit(rest)
            rest = rest & (rest - 1)
            used = weight
            # Weights of the next group travel while this one is added; behind the last its own again: other tokens' sources may be through
            # with this launch, and write the weights of the next one.
            ahead = first_bit(rest | (Int32(rest == 0) << at))
            weight = weight_of(
                table, weights, cute.arch.shuffle_sync(source, ahead), cute.arch.shuffle_sync(token, ahead), top_k, weighted, lane
            )
            theirs = cute.arch.shuffle_sync(source, at)
            one = cute.arch.shuffle_sync(token, at)
            to = Int64(one) * min(ranks, top_k) + cute.arch.shuffle_sync(place, at)
            heap = peers.base_of(table, theirs)
            add_members(
                stage + (Int64(theirs) * tokens + one) * (top_k * hidden * 2),
                cute.arch.shuffle_sync(slots, at),
                used,
                heap + inbox + to * (hidden if mxfp8 else 2 * hidden),
                heap + inbox_scale + to * (-(-hidden // 128) * 4),
                hidden,
                weighted,
                mxfp8,
                lane,
            )
        cute.arch.sync_warp()
        peers.delay(delays)
        peers.fence()
        if last != 0:
            to = Int64(token) * min(ranks, top_k) + place
            peers.st_relaxed(peers.base_of(table, source) + flags + to * 8, peers.word(launch, Int32(1)))


@cute.jit
def weight_of(
    table: Int64,
    weights: cutlass.Constexpr,
    source: Int32,
    token: Int32,
    top_k: cutlass.Constexpr,
    weighted: cutlass.Constexpr,
    lane: Int32,
):
    """Lane k: the routing weight of slot k of a token; 1 where weights have been applied before."""
    value = Float32(1.0)
    if cutlass.const_expr(weighted):
        route = token * top_k + cutlass.min(lane, top_k - 1)
        value = memory.ld_f32(peers.base_of(table, source) + weights + Int64(route) * 4)
    return value


@cute.jit
def add_members(
    rows: Int64,
    slots: Int32,
    weight: Float32,
    to: Int64,
    to_scale: Int64,
    hidden: cutlass.Constexpr,
    weighted: cutlass.Constexpr,
    mxfp8: cutlass.Constexpr,
    lane: Int32,
):
    """One warp: the row at `to` becomes the sum of the token's rows of `slots`, in slot order."""
    pieces = min(PIECES, -(-hidden // 256))
    for start in cutlass.range(0, hidden, 256 * pieces, unroll=1):
        column = start + lane * 8
        total = [Float32(0.0) for _ in range(8 * pieces)]
        rest = slots
        while rest != 0:
            k = first_bit(rest)
            rest = rest & (rest - 1)
            scale = cute.arch.shuffle_sync(weight, k)
            words = []
            for p in cutlass.range_constexpr(pieces):
                # Columns behind the row read its end again and are not stored.
                inside = cutlass.min(column + 256 * p, hidden - 8)
                words.append(memory.ld_v4(rows + (Int64(k) * hidden + inside) * 2))
            for p in cutlass.range_constexpr(pieces):
                for w in cutlass.range_constexpr(4):
                    at = 8 * p + 2 * w
                    total[at] = cute.math.fma(scale, quantize.bf16_low(words[p][w]), total[at])
                    total[at + 1] = cute.math.fma(scale, quantize.bf16_high(words[p][w]), total[at + 1])
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


@cute.jit
def contributors(
    ids: Int64,
    token: Int32,
    top_k: cutlass.Constexpr,
    total: cutlass.Constexpr,
    place: Int64,
    copies: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    ranks: cutlass.Constexpr,
    lane: Int32,
):
    """(Bits of the token's places that get a row, the rank that writes this lane's place if its bit is set)."""
    route = token * top_k + cutlass.min(lane, top_k - 1)
    to = exchange.destination(memory.ld_i32(ids + Int64(route) * 4), route, top_k, total, place, copies)
    rank = Int32(-1)
    if to >= 0 and lane < top_k:
        rank = to // experts
    there = Int32(rank >= 0)
    if cutlass.const_expr(ranks < top_k):
        there = Int32(0)
    for k in cutlass.range(top_k, unroll=1):
        other = cute.arch.shuffle_sync(rank, k)
        if cutlass.const_expr(ranks < top_k):
            if other == lane:
                there = Int32(1)
        else:
            if k < lane and other == rank:
                there = Int32(0)
    if cutlass.const_expr(ranks < top_k):
        rank = lane
    return cute.arch.vote_ballot_sync(there != 0), rank


@cute.jit
def collect_rows(
    heap: Int64,
    inbox: cutlass.Constexpr,
    inbox_scale: cutlass.Constexpr,
    flags: cutlass.Constexpr,
    ids: Int64,
    out: Int64,
    tokens: Int32,
    top_k: cutlass.Constexpr,
    total: cutlass.Constexpr,
    place: Int64,
    copies: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    ranks: cutlass.Constexpr,
    hidden: cutlass.Constexpr,
    mxfp8: cutlass.Constexpr,
    launch: Int32,
    control: Int64,
    wait_ms: Int32,
    warp: Int32,
    warps: Int32,
    lane: Int32,
):
    """out[t] = bf16(sum of the rows that ranks returned for token t, by place), as they arrive; `warp` of `warps` over the grid."""
    places = min(ranks, top_k)
    pieces = min(SOURCE_PIECES, -(-hidden // 256))
    chunks = -(-hidden // (256 * pieces))
    unit = warp
    while unit < tokens * chunks:
        token = unit // chunks
        column = (unit - token * chunks) * (256 * pieces) + lane * 8
        rest, rank = contributors(ids, token, top_k, total, place, copies, experts, ranks, lane)
        if ((rest >> lane) & 1) != 0:
            at = heap + flags + (Int64(token) * places + lane) * 8
            peers.wait_word(at, launch, control, heap, wire.SITE_RESULTS, rank, wait_ms)
        cute.arch.sync_warp()
        sums = [Float32(0.0) for _ in range(8 * pieces)]
        while rest != 0:
            row = Int64(token) * places + first_bit(rest)
            rest = rest & (rest - 1)
            words, scales = [], []
            for p in cutlass.range_constexpr(pieces):
                inside = cutlass.min(column + 256 * p, hidden - 8)
                if cutlass.const_expr(mxfp8):
                    words.append(memory.ld_v2(heap + inbox + (row * hidden + inside)))
                    scales.append(memory.ld_i32(heap + inbox_scale + (row * -(-hidden // 128) + inside // 128) * 4))
                else:
                    words.append(memory.ld_v4(heap + inbox + (row * hidden + inside) * 2))
            for p in cutlass.range_constexpr(pieces):
                if cutlass.const_expr(mxfp8):
                    inside = cutlass.min(column + 256 * p, hidden - 8)
                    values = quantize.mxfp8_values(words[p], (scales[p] >> (inside // 32 % 4 * 8)) & 0xFF)
                else:
                    values = [half(words[p][w]) for w in range(4) for half in (quantize.bf16_low, quantize.bf16_high)]
                for i in cutlass.range_constexpr(8):
                    sums[8 * p + i] = sums[8 * p + i] + values[i]
        for p in cutlass.range_constexpr(pieces):
            if column + 256 * p < hidden:
                packed = [quantize.pack_bf16(sums[8 * p + 2 * w], sums[8 * p + 2 * w + 1]) for w in range(4)]
                memory.st_v4(out + (Int64(token) * hidden + (column + 256 * p)) * 2, *packed)
        unit = unit + warps
