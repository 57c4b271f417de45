"""tcgen05.alloc, ld, st, cp and dealloc on the GPU, against the cells that the specification's figures give."""

from __future__ import annotations

import numpy as np
import pytest

from . import kernels
from . import model_layout as model

SHAPES = (("32x32b", 8), ("16x64b", 4), ("16x128b", 4), ("16x256b", 4), ("16x32bx2", 2))
PACKED = (("32x32b", 4), ("16x64b", 2), ("16x128b", 4), ("16x256b", 4), ("16x32bx2", 2))
COLUMNS = 16
NEVER_WRITTEN = 0xFFFFFFFF


def cells(shape, registers, packed=False):
    """(row, column) of [lane, register], or of [lane, register, half] for two halves in a register."""
    where = model.load_cells(shape, registers)
    if packed:
        where = np.stack([where * (1, 2), where * (1, 2) + (0, 1)], 2)
    if shape == "16x32bx2":
        where[16:, ..., 1] += kernels.SPLIT
    return where


@pytest.mark.parametrize(("shape", "registers"), SHAPES)
def test_stores(emulated, shape, registers):
    (out,) = emulated(kernels.ld_st(shape, registers, 8), np.zeros((4, 32, 8), np.uint32), shared=1024)
    expected = np.full((4, 32, 8), NEVER_WRITTEN, np.uint32)
    where = cells(shape, registers)
    for warp, half, lane, register in np.ndindex(4, 1 if shape == "32x32b" else 2, 32, registers):
        row, column = where[lane, register]
        expected[warp, row + 16 * half, column] = lane * 1000 + warp * 100000 + register + 50000 * half
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("shape", "registers"), PACKED)
def test_unpacking_stores(emulated, shape, registers):
    text = kernels.ld_st(shape, registers, COLUMNS, unpack=True)
    (out,) = emulated(text, np.zeros((4, 32, COLUMNS), np.uint32), shared=1024)
    expected = np.full((4, 32, COLUMNS), NEVER_WRITTEN, np.uint32)
    where = cells(shape, registers, packed=True)
    for warp, half, lane, register in np.ndindex(4, 1 if shape == "32x32b" else 2, 32, registers):
        value = lane * 1000 + warp * 100000 + register + 50000 * half
        for part in range(2):
            row, column = where[lane, register, part]
            expected[warp, row + 16 * half, column] = value >> 16 * part & 0xFFFF
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("shape", "registers"), SHAPES)
def test_loads(emulated, shape, registers):
    (out,) = emulated(kernels.load_shape(shape, registers, 8), np.zeros((4, 32, registers), np.uint32), shared=1024)
    where = cells(shape, registers)
    expected = where[..., 0] * 1000 + where[..., 1] + np.arange(4)[:, None, None] * 100000
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("shape", "registers"), PACKED)
def test_packing_loads(emulated, shape, registers):
    text = kernels.load_shape(shape, registers, COLUMNS, pack=True)
    (out,) = emulated(text, np.zeros((4, 32, registers), np.uint32), shared=1024)
    where = cells(shape, registers, packed=True)
    halves = where[..., 0] * 1000 + where[..., 1] + np.arange(4)[:, None, None, None] * 100000 & 0xFFFF
    np.testing.assert_array_equal(out, halves[..., 0] | halves[..., 1] << 16)


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
