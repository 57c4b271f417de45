"""The swap-order kernel's configuration: what it refuses, and that its memory holds what its own routing rules can ask for."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from megamoe_sm90._drop.layer_config import FORMATS, SMEM_BYTES
from megamoe_sm90._drop.swap_config import TOKEN_TILES, SwapConfig

PLAIN = {"fmt": "fp8_block128", "experts": 32, "top_k": 8, "hidden": 7168, "intermediate": 2048, "max_tokens": 128}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fmt": "nvfp4"}, "fmt='nvfp4'"),
        ({"token_tile": 24}, "token_tile=24"),
        ({"hidden": 7168 + 64}, "hidden=7232"),
        ({"fmt": "bf16", "intermediate": 2048 + 32}, "intermediate=2080"),
        ({"experts": 513}, "experts=513"),
        ({"top_k": 33}, "top_k=33"),
        ({"top_k": 0}, "top_k=0"),
        ({"max_tokens": 513}, "max_tokens=513"),
        ({"token_tile": 128, "stages": 13}, "stages=13"),
        ({"stages": 3}, "stages=3"),
        ({"token_stages": 1}, "token_stages=1"),
        ({"stages": 8, "window": 9}, "window=9"),
        ({"window": 1}, "window=1"),
        ({"bias2": True, "early": True}, "bias2 with early"),
        ({"experts": 512, "max_tokens": 512}, "max_tokens=512"),
    ],
)
def test_refuses_and_names_what_it_got(change, named):
    with pytest.raises(ValueError, match=r"allowed|needs") as caught:
        SwapConfig(**{**PLAIN, **change})
    assert named in str(caught.value)


def test_names_every_fault_at_once():
    with pytest.raises(ValueError, match="experts=0") as caught:
        SwapConfig(**{**PLAIN, "experts": 0, "token_tile": 7, "hidden": 100})
    assert "token_tile=7" in str(caught.value)
    assert "hidden=100" in str(caught.value)


@pytest.mark.parametrize("tile", TOKEN_TILES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("early", [False, True])
def test_derived_depths_fit_shared_memory(fmt, tile, early):
    cfg = SwapConfig(**{**PLAIN, "fmt": fmt, "token_tile": tile, "early": early})
    assert cfg.shared_bytes <= SMEM_BYTES
    assert 2 <= cfg.window <= cfg.stages
    assert cfg.stages >= 6  # fewer do not cover the change from FC1 to FC2
    assert cfg.widths[-1] == tile


@pytest.mark.parametrize("tile", TOKEN_TILES)
def test_pool_and_block_list_hold_any_routing(tile):
    rng = random.Random(tile)
    for _ in range(300):
        experts, top_k = rng.choice([(1, 1), (4, 2), (32, 8), (128, 8), (512, 3)])
        tokens = rng.randint(1, 64)
        cfg = SwapConfig("fp8_block128", experts, top_k, 256, 128, max_tokens=tokens, token_tile=tile)
        spread = rng.choice([1, 2, experts])
        ids = [rng.randrange(min(spread, experts)) for _ in range(tokens * top_k)]
        counts = [ids.count(e) for e in set(ids)]
        assert sum(-(-c // 8) * 8 for c in counts) <= cfg.rows
        assert sum(-(-c // tile) for c in counts) <= cfg.blocks


def test_memory_regions_are_apart_and_in_argument_order():
    cfg = SwapConfig(**PLAIN, token_tile=32)
    regions = cfg.scratch_regions(132)
    assert list(regions) == ["xq", "xs", "partial", "mid", "mid_scale", "stage"]
    end = 0
    for offset, size in regions.values():
        assert offset % 256 == 0
        assert offset >= end
        end = offset + size
    assert end <= cfg.scratch_bytes(132)
    # fp32 sums of 256 weight rows x 32 tokens, one FC1 and one FC2 tile a CTA
    assert regions["partial"][1] == 132 * 2 * 256 * 32 * 4
    assert regions["stage"][1] >= 128 * 8 * 7168 * 2


def test_variants_of_a_problem_agree_on_counters():
    """They may share one control block: what is counted (not tagged with the epoch) must lie in the same place in all of them."""
    banks = {(c.bank_bytes, c.tags) for c in (SwapConfig(**PLAIN, token_tile=t) for t in TOKEN_TILES)}
    assert len(banks) == 1
    small = SwapConfig(**{**PLAIN, "max_tokens": 1}, token_tile=8)
    assert (small.bank_bytes, small.tags) in banks
    assert small.control_bytes(132) <= SwapConfig(**PLAIN, token_tile=8).control_bytes(132)


def test_imports_neither_torch_nor_cutlass():
    code = "import sys, megamoe_sm90._drop.swap_config; print([m for m in ('torch', 'cutlass', 'cuda') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"
