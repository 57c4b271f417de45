"""Operands of tcgen05.mma: from matrices of codes to images of shared memory, and products in float64."""

from __future__ import annotations

import numpy as np

from . import model_layout, model_numbers

F16, TF32, F8F6F4, I8, MXF8F6F4, MXF4, MXF4NVF4 = range(7)
BITS = {F16: 16, TF32: 32, F8F6F4: 8, I8: 8, MXF8F6F4: 8, MXF4: 4, MXF4NVF4: 4}
"""Bits of an element's place in shared memory (16 narrow elements of the 8-bit kinds take 16 bytes)."""


def slab_bytes(codes: np.ndarray, kind: int, bits: int) -> np.ndarray:
    """[row, byte] of K-major rows of codes."""
    rows, k = codes.shape
    if BITS[kind] in (16, 32):
        return np.ascontiguousarray(codes.astype(f"<u{BITS[kind] // 8}")).view(np.uint8).reshape(rows, -1)
    if BITS[kind] == 8 and bits == 8:
        return codes.astype(np.uint8)
    if BITS[kind] == 4:
        return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    out = np.zeros((rows, k), np.uint8)  # 16 elements packed to 8 or 12 bytes, then padding
    for row in range(rows):
        for group in range(k // 16):
            word = sum(int(code) << (bits * i) for i, code in enumerate(codes[row, 16 * group : 16 * group + 16]))
            out[row, 16 * group : 16 * group + 2 * bits] = np.frombuffer(word.to_bytes(2 * bits, "little"), np.uint8)
    return out


def k_major_image(data: np.ndarray, width: int) -> tuple[np.ndarray, int, int]:
    """Shared-memory image of [row, byte] data, with its relative descriptor and what a slab of 32 bytes adds to it."""
    offsets, leading, stride = model_layout.k_major_bytes(*data.shape, width)
    image = np.zeros(-(-(int(offsets.max()) + 1) // 1024) * 1024, np.uint8)
    image[offsets] = data
    return image, model_layout.descriptor(0, leading, stride, width), 2


def mn_major_image(codes: np.ndarray, size: int, width: int, slab: int) -> tuple[np.ndarray, int, int]:
    """The same of [mn, k] elements, MN-major; a slab is `slab` elements of K."""
    offsets, leading, stride = model_layout.mn_major_elements(*codes.shape, size, width)
    image = np.zeros(-(-(int(offsets.max()) + size) // 1024) * 1024, np.uint8)
    raw = np.ascontiguousarray(codes.astype(f"<u{size}")).view(np.uint8).reshape(*codes.shape, size)
    image[offsets[..., None] + np.arange(size)] = raw
    return (
        image,
        model_layout.descriptor(0, leading, stride, width),
        int(offsets[0, slab] - offsets[0, 0]) >> 4 if codes.shape[1] > slab else 0,
    )


def scale_image(scale_a: np.ndarray, scale_b: np.ndarray) -> np.ndarray:
    """[32 lanes, 4 columns] words for A then for B: row r in lane r % 32, column r // 32; its up to 4 scales are the word's bytes."""
    image = np.full((2, 32, 4, 4), 0xFF, np.uint8)
    for index, scales in enumerate((scale_a, scale_b)):
        for row in range(len(scales)):
            image[index, row % 32, row // 32, : scales.shape[1]] = scales[row]
    return image


def values(codes: np.ndarray, name: str) -> np.ndarray:
    """Codes as float64."""
    if name == "f16":
        return codes.astype(np.uint16).view(np.float16).astype(np.float64)
    if name in ("bf16", "tf32"):
        return (codes.astype(np.uint32) << (16 if name == "bf16" else 0)).view(np.float32).astype(np.float64)
    if name in ("s8", "u8"):
        return codes.astype(np.uint8).view(np.int8 if name == "s8" else np.uint8).astype(np.float64)
    return model_numbers.table(name)[codes]


def random_codes(rng: np.random.Generator, shape: tuple[int, int], name: str) -> np.ndarray:
    """Random finite codes; floats of few significant bits, so that sums of their products are exact in float32."""
    if name in ("s8", "u8"):
        return rng.integers(0, 256, shape)
    few = rng.integers(-16, 17, shape) / 8.0
    if name == "f16":
        return few.astype(np.float16).view(np.uint16).astype(np.int64)
    if name in ("bf16", "tf32"):
        return (few.astype(np.float32).view(np.uint32) >> (16 if name == "bf16" else 0)).astype(np.int64)
    table = model_numbers.table(name)
    finite = np.flatnonzero(np.isfinite(table) & (np.abs(table) <= 8) & ((np.abs(table) >= 2**-4) | (table == 0)))
    return rng.choice(finite, shape)
