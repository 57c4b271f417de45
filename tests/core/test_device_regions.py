"""The workspace arithmetic: enough blocks for any routing, no more than the worst needs, and regions that do not touch."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.device import regions

TILES = st.sampled_from((8, 64, 128))


def blocks_of(counts, tile):
    return sum((count + tile - 1) // tile for count in counts)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=40), st.integers(1, 32), TILES)
def test_no_routing_needs_more_blocks(counts, top_k, tile):
    """Routes that no expert owns (masked ids) only make it less."""
    routes = sum(counts)
    tokens = -(-routes // top_k)
    assert blocks_of(counts, tile) <= regions.max_blocks(tokens, top_k, len(counts), tile)


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 64), TILES)
def test_some_routing_comes_within_one_block_an_expert(tokens, top_k, experts, tile):
    """One row in every expert that can have one, the rest in the first: no bound could be much lower."""
    routes = tokens * top_k
    touched = min(experts, routes)
    counts = [routes - touched + 1] + [1] * (touched - 1)
    assert regions.max_blocks(tokens, top_k, experts, tile) - blocks_of(counts, tile) <= 1 + touched // tile


@given(st.integers(0, 5000), st.integers(1, 8), st.integers(1, 64), st.sampled_from((64, 128)))
def test_control_words_do_not_overlap(tokens, top_k, experts, tile):
    blocks = regions.max_blocks(tokens, top_k, experts, tile)
    size = regions.bank_bytes(blocks)
    ready = regions.ready_offset(size)
    spans = [(regions.EPOCH, 4), (regions.EXITS, 4), (regions.ABORT, 4), (regions.STICKY, 4), (regions.REPORT, 8)]
    spans.append((regions.RECORD, 8 * len(regions.RECORD_FIELDS)))
    for bank in range(2):
        start = regions.BANKS + bank * size
        spans += [(start + at, 4) for at in (regions.CLAIMS, regions.QUANTIZED, regions.FINISHED)]
        spans += [(start + regions.FC1_DONE, 4 * blocks), (start + ready, 4 * blocks)]
    spans.append((regions.lists_offset(blocks), 4 * experts))
    spans = sorted(span for span in spans if span[1])
    for (start, length), (following, _) in pairwise(spans):
        assert start + length <= following
    assert spans[-1][0] + spans[-1][1] <= regions.control_bytes(tokens, top_k, experts, tile)


@given(st.integers(0, 3000), st.integers(1, 8), st.integers(1, 64), st.booleans(), st.booleans(), st.booleans())
def test_scratch_regions_are_apart_and_large_enough(tokens, top_k, experts, quantize, block_scales, pool):
    hidden, intermediate, tile, element = 512, 256, 128, 1
    found = regions.scratch_regions(
        tokens=tokens,
        top_k=top_k,
        experts=experts,
        hidden=hidden,
        intermediate=intermediate,
        tile=tile,
        element=element,
        quantize=quantize,
        block_scales=block_scales,
        pool=pool,
    )
    rows = max(regions.max_blocks(tokens, top_k, experts, tile), 1) * tile
    sizes = {name: size for name, (_, size) in found.items()}
    assert sizes["row_route"] == 4 * rows
    assert sizes["mid"] == rows * intermediate
    assert sizes["mid_scale"] == (rows * intermediate // 128 * 4 if block_scales else 0)
    assert sizes["pool"] == (rows * hidden if pool else 0)
    assert sizes["pool_scale"] == (rows * hidden // 128 * 4 if pool and block_scales else 0)
    assert sizes["xq"] == (tokens * hidden if quantize else 0)
    assert sizes["xs"] == (tokens * hidden // 128 * 4 if quantize and block_scales else 0)
    assert sizes["stage"] == tokens * top_k * hidden * 2
    end = 0
    for offset, size in found.values():
        assert offset % 256 == 0
        assert offset >= end
        end = offset + size
    assert end <= regions.scratch_bytes(found)
