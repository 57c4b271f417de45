"""The top-k sum: FC2 rows are staged by route in bf16, and every token adds its rows in slot order in fp32, rounding once."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from megamoe.device import memory, quantize, routing

PIECES = 4  # 256-column pieces of a row that a warp sums at a time
BATCH = 8  # routes in flight per piece


def slot_of(ids, topk_w, token, slot, top_k, weighted):
    """(expert id, weight) of a token's slot."""
    route = token * top_k + slot
    expert = routing.load_id(ids, route)
    return expert, memory.ld_f32(topk_w + Int64(route) * 4) if weighted else Float32(1.0)


@cute.jit
def sum_rows(
    stage: Int64,
    ids: Int64,
    topk_w: Int64,
    out: Int64,
    tokens: Int32,
    experts: cutlass.Constexpr,
    top_k: cutlass.Constexpr,
    hidden: cutlass.Constexpr,
    weighted: cutlass.Constexpr,
    warp: Int32,
    warps: Int32,
    lane: Int32,
):
    """out[t] = bf16(sum over slots k in order of w[t, k] * stage[t * top_k + k]); slots without an expert add nothing.

    `warp` of `warps` over the grid.
    """
    if tokens > 0:
        _sum_units(stage, ids, topk_w, out, tokens, experts, top_k, hidden, weighted, warp, warps, lane)


@cute.jit
def _sum_units(
    stage,
    ids,
    topk_w,
    out,
    tokens,
    experts: cutlass.Constexpr,
    top_k: cutlass.Constexpr,
    hidden: cutlass.Constexpr,
    weighted: cutlass.Constexpr,
    warp,
    warps,
    lane,
):
    width = 256 * PIECES
    chunks = -(-hidden // width)
    slot = cutlass.min(lane, top_k - 1)
    unit = warp
    # Ids and weights of the next unit travel while this one is summed.
    next_expert, next_weight = slot_of(ids, topk_w, cutlass.min(unit // chunks, tokens - 1), slot, top_k, weighted)
    while unit < tokens * chunks:
        token = unit // chunks
        column = (unit - token * chunks) * width + lane * 8
        used = (next_expert >= 0) & (next_expert < experts) & (lane < top_k)
        weight = Float32(0.0)
        if used:
            weight = next_weight
        next_expert, next_weight = slot_of(ids, topk_w, cutlass.min((unit + warps) // chunks, tokens - 1), slot, top_k, weighted)
        slots = cute.arch.vote_ballot_sync(used)
        total = [Float32(0.0) for _ in range(8 * PIECES)]
        for first in cutlass.range_constexpr(0, top_k, BATCH):
            last = min(first + BATCH, top_k)
            rows, keep = {}, {}
            for k in cutlass.range_constexpr(first, last):
                for p in cutlass.range_constexpr(PIECES):
                    # A slot without an expert and columns behind the row read the start of the region and are masked to zero.
                    there = ((slots >> k) & 1) * Int32(column + 256 * p < hidden)
                    offset = (Int64(token) * (top_k * hidden) + (k * hidden + column + 256 * p)) * 2
                    rows[k, p] = memory.ld_v4(stage + offset * Int64(there))
                    keep[k, p] = -there
            for k in cutlass.range_constexpr(first, last):
                scale = cute.arch.shuffle_sync(weight, k)
                for p in cutlass.range_constexpr(PIECES):
                    for w in cutlass.range_constexpr(4):
                        word = rows[k, p][w] & keep[k, p]
                        at = 8 * p + 2 * w
                        total[at] = cute.math.fma(scale, quantize.bf16_low(word), total[at])
                        total[at + 1] = cute.math.fma(scale, quantize.bf16_high(word), total[at + 1])
        for p in cutlass.range_constexpr(PIECES):
            if column + 256 * p < hidden:
                packed = [quantize.pack_bf16(total[8 * p + 2 * w], total[8 * p + 2 * w + 1]) for w in range(4)]
                memory.st_v4(out + (Int64(token) * hidden + (column + 256 * p)) * 2, *packed)
        unit = unit + warps
