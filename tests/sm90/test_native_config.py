"""Native kernel configurations: legal values, and the hardware limits that everything derived from them must keep."""

from __future__ import annotations

import itertools

import pytest

from megamoe_sm90._drop.config import ROWS, TILES_M, NativeConfig
from megamoe_sm90._drop.layer_config import FORMATS, SMEM_BYTES, THREADS

SHAPES = ((32, 8, 7168, 2048), (96, 6, 7168, 3072), (128, 8, 2048, 768), (512, 32, 16384, 4096), (1, 1, 128, 128), (8, 2, 4096, 14336))


@pytest.mark.parametrize(("shape", "fmt", "tile", "rows"), list(itertools.product(SHAPES, FORMATS, TILES_M, ROWS)))
def test_budgets(shape, fmt, tile, rows):
    experts, top_k, hidden, intermediate = shape
    config = NativeConfig(fmt, experts, top_k, hidden, intermediate, tile_m=tile, rows=rows)
    assert config.shared_bytes <= SMEM_BYTES
    assert config.num_stages >= 2
    math, producer = config.registers
    assert math % 8 == producer % 8 == 0
    assert 256 * math + (THREADS - 256) * producer <= 65536
    assert config.kb1 % config.k_unroll == config.kb2 % config.k_unroll == 0
    assert config.kb1 * config.block_k >= hidden > (config.kb1 - 1) * config.block_k
    assert config.n1 * 128 >= intermediate
    assert config.n2 * 256 >= hidden
    # Two FC1 tasks a CTA lie between FC1 and FC2 of a group.
    assert config.group * config.n1 >= 2 * config.sms
    if rows == "pool":
        assert 1 <= config.move_slots <= 8


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fmt": "fp4"}, "fmt"),
        ({"tile_m": 96}, "tile_m"),
        ({"rows": "push"}, "rows"),
        ({"hidden": 192}, "hidden"),
        ({"intermediate": 0}, "intermediate"),
        ({"experts": 513}, "experts"),
        ({"top_k": 33}, "top_k"),
        ({"early": True, "bias2": True}, "early"),
    ],
)
def test_illegal_values_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        NativeConfig(**{"fmt": "fp8_block128", "experts": 8, "top_k": 2, "hidden": 256, "intermediate": 128, **change})


def test_rows_may_end_within_a_panel_without_block_scales():
    assert NativeConfig("fp8_tensor", 8, 2, 448, 192).n1 == 2
    assert NativeConfig("bf16", 8, 2, 2880, 320).n2 == 12
