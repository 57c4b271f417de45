"""tcgen05.alloc, ld, st, cp and dealloc on the GPU, against the cells that the specification's figures give."""

from __future__ import annotations

import numpy as np
import pytest

from . import kernels
from . import model_layout as model

SHAPES = (("32x32b", 8), ("16x64b", 4), ("16x128b", 4), ("16x256b", 4))
NEVER_WRITTEN = 0xFFFFFFFF


@pytest.mark.parametrize(("shape", "registers"), SHAPES)
def test_stores(emulated, shape, registers):
    (out,) = emulated(kernels.ld_st(shape, registers, 8), np.zeros((4, 32, 8), np.uint32), shared=1024)
    expected = np.full((4, 32, 8), NEVER_WRITTEN, np.uint32)
    cells = model.load_cells(shape, registers)
    for warp in range(4):
        for half in range(1 if shape == "32x32b" else 2):
            for lane in range(32):
                for register in range(registers):
                    row, column = cells[lane, register]
                    expected[warp, row + 16 * half, column] = lane * 1000 + warp * 100000 + register + 50000 * half
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("shape", "registers"), SHAPES)
def test_loads(emulated, shape, registers):
    (out,) = emulated(kernels.load_shape(shape, registers, 8), np.zeros((4, 32, registers), np.uint32), shared=1024)
    cells = model.load_cells(shape, registers)
    expected = cells[..., 0] * 1000 + cells[..., 1] + np.arange(4)[:, None, None] * 100000
    np.testing.assert_array_equal(out, expected)


def core_matrices(words: np.ndarray) -> np.ndarray:
    """Rows of 4 or 8 words in core matrices of 8 rows by 16 bytes: along the row first."""
    rows, columns = words.shape
    return np.ascontiguousarray(words.reshape(rows // 8, 8, columns // 4, 4).transpose(0, 2, 1, 3))


@pytest.mark.parametrize(
    ("shape", "rows", "columns", "lanes"),
    [
        ("32x128b.warpx4", 32, 4, [*range(32)] * 4),
        ("128x128b", 128, 4, [*range(128)]),
        ("128x256b", 128, 8, [*range(128)]),
        ("64x128b.warpx2::02_13", 64, 4, [*range(64), *range(64)]),
        ("64x128b.warpx2::01_23", 64, 4, [*range(32), *range(32), *range(32, 64), *range(32, 64)]),
    ],
)
def test_copies(emulated, shape, rows, columns, lanes):
    words = np.random.default_rng(3).integers(0, 2**32, (rows, columns), dtype=np.uint32)
    out = emulated(kernels.cp(shape, rows, columns), core_matrices(words), np.zeros((128, 8), np.uint32), shared=8192)[1]
    expected = np.full((128, 8), NEVER_WRITTEN, np.uint32)
    expected[:, :columns] = words[lanes]
    np.testing.assert_array_equal(out, expected)
