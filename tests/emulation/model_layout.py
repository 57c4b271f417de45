"""Layouts of operands, accumulators and registers in numpy, written from the figures of the PTX specification.

Shared-memory operands are built as images: 16-byte chunks of a row take the place that their number, exchanged by the row's, says.
"""

from __future__ import annotations

import numpy as np

SWIZZLES = {128: 2, 64: 4, 32: 6, 16: 0}
"""Row bytes of a swizzle atom (16: no swizzle) -> its code in a matrix descriptor."""


def descriptor(start: int, leading: int, stride: int, width: int) -> int:
    """A matrix descriptor; all in bytes."""
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLES[width] << 61


def chunk_place(row: int, chunk: int, width: int) -> int:
    """Where chunk `chunk` of row `row` (of 8) lies within its row of the atom."""
    return chunk ^ {128: row % 8, 64: row % 8 // 2, 32: row % 8 // 4, 16: 0}[width]


def k_major_bytes(rows: int, kbytes: int, width: int) -> tuple[np.ndarray, int, int]:
    """Offsets [row, byte] of a K-major operand of `kbytes` <= width bytes a row (32 without swizzle), with its leading and stride bytes."""
    offsets = np.empty((rows, kbytes), np.int64)
    leading, stride = (128, 256) if width == 16 else (16, 8 * width)
    for row in range(rows):
        for byte in range(kbytes):
            chunk, rest = divmod(byte, 16)
            if width == 16:  # core matrices of 8 rows by 16 bytes, one after the other along K, then along the rows
                offsets[row, byte] = row // 8 * stride + chunk * leading + row % 8 * 16 + rest
            else:
                offsets[row, byte] = row // 8 * stride + row % 8 * width + chunk_place(row, chunk, width) * 16 + rest
    return offsets, leading, stride


def mn_major_elements(mn: int, k: int, size: int, width: int) -> tuple[np.ndarray, int, int]:
    """Offsets [mn, k] of elements of an MN-major operand, with its leading and stride bytes."""
    offsets = np.empty((mn, k), np.int64)
    per_row = width // size
    if width == 16:  # core matrices of 8 k by 16 bytes of mn
        stride, leading = 128, 128 * (mn * size // 16)
    else:  # atoms of 8 k by `width` bytes of mn: along k first, then along mn
        stride = 8 * width
        leading = stride * (k // 8)
    for m in range(mn):
        for j in range(k):
            if width == 16:
                offsets[m, j] = m // per_row * stride + j // 8 * leading + j % 8 * 16 + m % per_row * size
            else:
                chunk, rest = divmod(m % per_row * size, 16)
                offsets[m, j] = m // per_row * leading + j // 8 * stride + j % 8 * width + chunk_place(j, chunk, width) * 16 + rest
    return offsets, leading, stride


def load_cells(shape: str, registers: int) -> np.ndarray:
    """(row, column) of [lane, register] of tcgen05.ld and st.

    16x64b: register r holds 8 bytes of row for two lanes; 16x128b: four lanes a row; 16x256b: four lanes, two registers each, a row.
    """
    cells = np.empty((32, registers, 2), np.int64)
    for lane in range(32):
        for register in range(registers):
            if shape == "32x32b":
                row, column = lane, register
            elif shape == "16x32bx2":
                row, column = lane % 16, register  # and the distance of the halves in the upper 16 lanes
            elif shape == "16x64b":
                repeat = register
                row, column = lane // 4 + 8 * (lane % 2), 2 * repeat + lane % 4 // 2
            elif shape == "16x128b":
                repeat, half = divmod(register, 2)
                row, column = 8 * half + lane // 4, 4 * repeat + lane % 4
            else:
                repeat, part = divmod(register, 4)
                row, column = 8 * (part // 2) + lane // 4, 8 * repeat + 2 * (lane % 4) + part % 2
            cells[lane, register] = row, column
    return cells
