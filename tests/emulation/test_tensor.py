"""Tensor copies of four-bit elements, which Hopper's unit does not do, and of bytes, which it does."""

from __future__ import annotations

import numpy as np
import pytest

from . import kernels, model_layout

ROWS, COLUMNS = 100, 512
PACKED, PADDED, BYTES = 11, 12, 0


def tensor_map(address: int, kind: int, row_bytes: int, sizes: tuple[int, int], box: tuple[int, int]) -> bytes:
    """A map of a 2-dimensional tensor, rows swizzled over 128 bytes, in the words that test_layout.py decodes."""
    words = np.zeros(16, np.uint64)
    words[0] = address
    words[1] = row_bytes >> 4 << 32 | 0x240000 | 3 << 13 | kind << 7 | 1 << 4 | 2
    words[4] = (sizes[1] - 1) << 32 | (sizes[0] - 1)
    words[6] = (box[0] - 1) << 56
    words[7] = box[1] - 1
    return words.tobytes()


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("corner", [(0, 0), (256, 60), (-32, 5), (384, -3)])
@pytest.mark.parametrize("kind", [PACKED, PADDED, BYTES])
def test_boxes(emulated, kind, corner, pair):
    rng = np.random.default_rng(kind)
    elements = rng.integers(0, 256 if kind == BYTES else 16, (ROWS, COLUMNS), dtype=np.uint8)
    data = elements if kind == BYTES else elements[:, 0::2] | elements[:, 1::2] << 4
    box = (256 if kind == PACKED else 128, 64)
    place, back = emulated.tensor(data)
    encoded = tensor_map(place, kind, data.shape[1], (COLUMNS, ROWS), box)
    (out,) = emulated(
        kernels.tensor_load(8192, pair),
        encoded,
        corner[0] & 0xFFFFFFFF,
        corner[1] & 0xFFFFFFFF,
        np.zeros((64, 8, 16), np.uint8),
        shared=kernels.OPERANDS + 8192,
    )
    np.testing.assert_array_equal(back(), data)

    padded = np.zeros((ROWS + 200, COLUMNS + 800), np.uint8)  # what lies outside is zero
    padded[100 : 100 + ROWS, 400 : 400 + COLUMNS] = elements
    window = padded[100 + corner[1] :, 400 + corner[0] :][: box[1], : box[0]]
    if kind == PACKED:
        rows = window[:, 0::2] | window[:, 1::2] << 4
    elif kind == PADDED:
        rows = np.zeros((64, 8, 16), np.uint8)
        chunks = window.reshape(64, 8, 16)
        rows[..., :8] = chunks[..., 0::2] | chunks[..., 1::2] << 4
        rows = rows.reshape(64, 128)
    else:
        rows = window
    expected = np.empty((64, 8, 16), np.uint8)
    for row in range(64):
        for chunk in range(8):
            expected[row, model_layout.chunk_place(row, chunk, 128)] = rows[row, 16 * chunk : 16 * chunk + 16]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("corner", [(0, 40), (256, 60), (-32, 1), (384, 99)])
@pytest.mark.parametrize("kind", [PACKED, BYTES])
def test_gathered_rows(emulated, kind, corner):
    """Rows outside the tensor, and columns, are zero."""
    away = (7, -2, 30)
    elements = np.random.default_rng(kind + 5).integers(0, 256 if kind == BYTES else 16, (ROWS, COLUMNS), dtype=np.uint8)
    data = elements if kind == BYTES else elements[:, 0::2] | elements[:, 1::2] << 4
    width = 256 if kind == PACKED else 128
    place, _ = emulated.tensor(data)
    encoded = tensor_map(place, kind, data.shape[1], (COLUMNS, ROWS), (width, 1))
    corner_words = [c & 0xFFFFFFFF for c in corner]
    text = kernels.tensor_load(512, rows=away)
    (out,) = emulated(text, encoded, *corner_words, np.zeros((4, 8, 16), np.uint8), shared=kernels.OPERANDS + 512)
    padded = np.zeros((ROWS + 200, COLUMNS + 800), np.uint8)
    padded[100 : 100 + ROWS, 400 : 400 + COLUMNS] = elements
    for index, distance in enumerate((0, *away)):
        row = padded[100 + corner[1] + distance, 400 + corner[0] :][:width]
        row = row if kind == BYTES else row[0::2] | row[1::2] << 4
        for chunk in range(8):
            np.testing.assert_array_equal(out[index, model_layout.chunk_place(index, chunk, 128)], row[16 * chunk : 16 * chunk + 16])


@pytest.mark.parametrize("kind", [PACKED, BYTES])
def test_stores(emulated, kind):
    """A box goes back to its tensor; what lies outside the tensor is not written."""
    rng = np.random.default_rng(kind)
    rows = rng.integers(0, 256, (64, 8, 16), dtype=np.uint8)
    image = np.empty_like(rows)
    for row in range(64):
        for chunk in range(8):
            image[row, model_layout.chunk_place(row, chunk, 128)] = rows[row, chunk]
    place, back = emulated.tensor(np.zeros((100, 256), np.uint8))
    box, sizes = ((256, 64), (512, 50)) if kind == PACKED else ((128, 64), (256, 50))
    emulated(kernels.tensor_store(8192), tensor_map(place, kind, 256, sizes, box), image, shared=kernels.OPERANDS + 8192)
    expected = np.zeros((100, 256), np.uint8)
    expected[:50, :128] = rows.reshape(64, 128)[:50]
    np.testing.assert_array_equal(back(), expected)
