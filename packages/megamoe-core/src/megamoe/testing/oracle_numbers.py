"""Number formats of the oracle, in numpy, with formulas of its own: bit patterns to values, values to bit patterns, block scales.

Shares no code with ``megamoe.formats`` on purpose: an error there must show as a difference here. The rounding rules are those of the
kernels: to nearest, ties to even, saturating, block scales as each format defines them, in float32 where the kernels compute in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float64]

_F32_MAX = np.float32(np.finfo(np.float32).max)

_SOME = 32
"""Rows of a weight that are in float64 at a time: those of a large layer fit a processor's own cache, 1.8 MB of 7168 columns."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the oracle knows of a format.

    Attributes:
        element: element type of the data.
        largest: largest finite element.
        block: elements along K that share a scale; 0 for none.
        rows: weight rows that share a scale.
        scale: element type of the block scales; empty for none.
        rel_l2: largest relative L2 error that a correct kernel shows.
        sums: error of its sums over K, of the spread that such sums have: of float32, or of Hopper's tensor cores, which add FP8 products
            to about 14 bits, with some room.
    """

    element: str
    largest: float
    block: int = 0
    rows: int = 1
    scale: str = ""
    rel_l2: float = 0.01
    sums: float = 2.0**-20


_FP8_SUMS = 2.0**-11

FACTS = {
    "bf16": Facts("bf16", float(_F32_MAX), rel_l2=0.004),
    "fp8_tensor": Facts("e4m3", 448.0, sums=_FP8_SUMS),
    "fp8_tensor_e5m2": Facts("e5m2", 57344.0, sums=_FP8_SUMS),
    "fp8_block128": Facts("e4m3", 448.0, 128, 128, "f32", sums=_FP8_SUMS),
    "mxfp8": Facts("e4m3", 448.0, 32, 1, "e8m0"),
    "mxfp8_e5m2": Facts("e5m2", 57344.0, 32, 1, "e8m0"),
    "nvfp4": Facts("e2m1", 6.0, 16, 1, "e4m3"),
}
"""Every format by name."""


class Codes(NamedTuple):
    """A quantized array: value = element * block scale * tensor scale.

    Attributes:
        data: one uint8 code per element, never packed; for ``bf16`` the uint16 bit patterns.
        scale: block scales, (..., K / block) for activations and (N / rows, K / block) for one expert's weights: float32 values, or uint8
            codes; ``None`` without block scales.
        tensor: the scalar on top, 1.0 when there is none.
    """

    data: Array
    scale: Array | None
    tensor: np.float32


# ---------------------------------------------------------------------------------------------------- bit patterns to values


def _small_float(exponent_bits: int, mantissa_bits: int, bias: int) -> Floats:
    """Values of all codes sign | exponent | mantissa, as if every exponent were finite."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / 2.0**mantissa_bits
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    magnitude = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    return np.where(codes >> (exponent_bits + mantissa_bits), -magnitude, magnitude)


def _tables() -> dict[str, Floats]:
    e4m3 = _small_float(4, 3, 7)
    e4m3[[0x7F, 0xFF]] = np.nan
    e5m2 = _small_float(5, 2, 15)
    e5m2[[0x7C, 0xFC]] = np.inf, -np.inf
    e5m2[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    e8m0 = np.append(2.0 ** np.arange(-127, 128), np.nan)
    return {"e4m3": e4m3, "e5m2": e5m2, "e2m1": _small_float(2, 1, 1), "e8m0": e8m0}


TABLES = _tables()
"""For each 8- and 4-bit type, the float64 value of every code."""


def decode(kind: str, codes: Array) -> Floats:
    """Values of bit patterns (uint8, or uint16 for ``bf16``), float64."""
    if kind == "bf16":
        bits: NDArray[np.uint32] = codes.astype(np.uint32) << np.uint32(16)
        wide: Floats = bits.view(np.float32).astype(np.float64)
        return wide
    values: Floats = TABLES[kind].take(codes, mode="clip")  # every code has its value; looking for others takes as long again
    return values


def unpack_nibbles(packed: Array) -> Array:
    """(..., K / 2) bytes to (..., K) codes, the low nibble first."""
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_nibbles(codes: Array) -> Array:
    """(..., K) codes to (..., K / 2) bytes, the low nibble first."""
    packed: Array = (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)
    return packed


# ---------------------------------------------------------------------------------------------------- values to bit patterns


def _round_bits(values: Array, mantissa_bits: int, bias: int, top: int) -> Array:
    """Round float32 to a small float by its bits: drop mantissa bits to even, rebase the exponent, cap at code ``top``.

    Below the smallest normal the codes are equally spaced, so there the value is counted in units of the smallest denormal.
    """
    drop = 23 - mantissa_bits
    magnitude = np.abs(values)
    bits = magnitude.view(np.uint32)
    even = (bits >> np.uint32(drop)) & np.uint32(1)
    rounded = (bits + (np.uint32((1 << (drop - 1)) - 1) + even)) >> np.uint32(drop)
    normal = rounded.astype(np.int32) - ((127 - bias) << mantissa_bits)
    smallest = np.float32(2.0 ** (1 - bias))
    step = np.float32(2.0 ** (mantissa_bits + bias - 1))
    tiny = np.rint(np.where(magnitude < smallest, magnitude, np.float32(0)) * step).astype(np.int32)
    return np.minimum(np.where(magnitude < smallest, tiny, normal), top)


def encode(kind: str, values: Array) -> Array:
    """Bit patterns of float32 values: to nearest, ties to even, saturating; NaN becomes NaN where the type has one (``e2m1``: +0)."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if kind == "bf16":
        bits = values.view(np.uint32)
        rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    if kind == "e2m1":
        size = np.abs(values)
        code = np.zeros(values.shape, np.uint8)
        # Halfway points between neighbours; an odd code below gives the tie away, an even one keeps it.
        for lower, half in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
            code += (size >= half) if lower % 2 else (size > half)
        sign = np.uint8(8)
    else:
        mantissa_bits, bias, top = (3, 7, 0x7E) if kind == "e4m3" else (2, 15, 0x7B)
        code = _round_bits(values, mantissa_bits, bias, top).astype(np.uint8)
        sign = np.uint8(0x80)
    code |= np.where(np.signbit(values), sign, np.uint8(0))
    return np.where(np.isnan(values), np.uint8(0 if kind == "e2m1" else 0x7F), code)


# ---------------------------------------------------------------------------------------------------- block scales


def _scale_f32(amax: Array, largest: float) -> tuple[Array, Array]:
    """Scale and divisor of ``fp8_block128``; a block that is not finite has scale NaN."""
    scale = np.maximum(amax, np.float32(1e-10)) / np.float32(largest)
    scale = np.where(np.isfinite(amax), scale, np.float32(np.nan))
    return scale, scale


def _scale_e8m0(amax: Array, largest: float) -> tuple[Array, Array]:
    """Scale code (rounded up to a power of two) and multiplier of ``mxfp8``; a block that is not finite has scale NaN, code 255."""
    bits = (amax * (np.float32(1) / np.float32(largest))).view(np.uint32).astype(np.int64)
    exponent = np.where(np.isfinite(amax), (bits >> 23) + ((bits & 0x7FFFFF) != 0), 255)
    multiplier = np.where(exponent == 0, 0.0, 2.0 ** (127.0 - exponent))
    multiplier = np.where(exponent == 255, np.nan, multiplier)
    return exponent.astype(np.uint8), multiplier.astype(np.float32)


def _scale_e4m3(amax: Array, norm: np.float32) -> tuple[Array, Array]:
    """Scale code and multiplier of ``nvfp4``; a block that is not finite has scale NaN, since ``e2m1`` cannot hold one."""
    wanted = np.minimum(amax / np.float32(6) * norm, np.float32(448))
    code = np.where(np.isfinite(amax), encode("e4m3", wanted), np.uint8(0x7F))
    rounded = TABLES["e4m3"][code].astype(np.float32)
    return code, np.where(rounded > 0, np.minimum(norm / rounded, _F32_MAX), np.float32(0))


def _quantize(facts: Facts, values: Array, rows: int, tensor: np.float32) -> Codes:
    """Quantize float32 (N, K) in blocks of ``rows`` x ``facts.block``."""
    count, width = values.shape
    if facts.block == 0:
        return Codes(encode(facts.element, values if facts.element == "bf16" else values / tensor), None, tensor)
    tall = -(-count // rows)
    padded = np.zeros((tall * rows, width), np.float32)
    padded[:count] = values
    blocks = padded.reshape(tall, rows, width // facts.block, facts.block)
    amax = np.abs(blocks).max(axis=(1, 3), initial=0)
    if facts.scale == "f32":
        scale, divisor = _scale_f32(amax, facts.largest)
        scaled = blocks / divisor[:, None, :, None]
    else:
        scale, multiplier = _scale_e8m0(amax, facts.largest) if facts.scale == "e8m0" else _scale_e4m3(amax, np.float32(1) / tensor)
        scaled = blocks * multiplier[:, None, :, None]
    return Codes(encode(facts.element, scaled.reshape(padded.shape)[:count]), scale, tensor)


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def quantize_activations(format: str, values: Array, static_scale: float | None = None) -> Codes:
    """Quantize (N, K) activations, or the value between FC1 and FC2, row by row.

    Args:
        format: a name in :data:`FACTS`.
        values: float32 or float64; rounded to float32 first, as kernels hold them.
        static_scale: the tensor scale of ``fp8_tensor`` and ``nvfp4``; 1.0 when ``None``.
    """
    return _quantize(FACTS[format], np.asarray(values, np.float32), 1, np.float32(1.0 if static_scale is None else static_scale))


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def quantize_weight(format: str, values: Array) -> Codes:
    """Quantize one expert's (N, K) weights. The tensor scale maps the largest value to the largest representable one.

    It has a floor: amax 1e-12 for ``fp8_tensor``; for ``nvfp4`` 2^-118, where the multiplier of its smallest block scale is still float32.
    """
    facts = FACTS[format]
    values = np.asarray(values, np.float32)
    tensor = np.float32(1)
    amax = np.abs(values).max(initial=0)
    if facts.element != "bf16" and facts.block == 0:
        tensor = np.maximum(amax, np.float32(1e-12)) / np.float32(facts.largest)
    elif facts.scale == "e4m3":
        amax = np.abs(values[np.isfinite(values)]).max(initial=0)
        tensor = np.maximum(amax / np.float32(facts.largest * 448), np.float32(2.0**-118)) if amax > 0 else tensor
    return _quantize(facts, values, facts.rows, tensor)


def dequantize(format: str, codes: Codes, rows: int = 1) -> Floats:
    """Values of (N, K) codes in float64; ``rows`` is how many rows share a scale (1 for activations, ``Facts.rows`` for weights)."""
    facts = FACTS[format]
    values = decode(facts.element, codes.data)
    factor = np.float64(codes.tensor)
    if codes.scale is None:
        values *= factor
    else:
        scale = (decode(facts.scale, codes.scale) if facts.scale != "f32" else codes.scale.astype(np.float64)) * factor
        scale = np.repeat(scale, rows, axis=0)[: values.shape[0]] if rows > 1 else scale
        blocks = values.reshape(values.shape[0], values.shape[1] // facts.block, facts.block)
        blocks *= scale[:, :, None]  # in place, and exact: no product has more than 31 bits
    return values


def some_rows(format: str, codes: Codes) -> Iterator[tuple[slice, Floats]]:
    """One expert's weights (N, K) in float64 piece by piece: which rows, and their values."""
    rows = FACTS[format].rows
    for first in range(0, len(codes.data), _SOME):
        part = slice(first, first + _SOME)
        scale = None if codes.scale is None else codes.scale[first // rows : -(-part.stop // rows)]
        yield part, dequantize(format, Codes(codes.data[part], scale, codes.tensor), rows)


_LARGEST_CODE = {"bf16": 0x7F7F, "e4m3": 0x7E, "e5m2": 0x7B, "e2m1": 0x7}
"""Code of the largest finite element. The sign is the bit above its highest one."""


def step(format: str, codes: Codes) -> Floats:
    """Distance from every element of (N, K) activation codes to the next one away from zero, the largest one's to the one below it."""
    top = _LARGEST_CODE[FACTS[format].element]
    sign = 1 << top.bit_length()
    lower = np.minimum(codes.data & (sign - 1), top - 1)
    return dequantize(format, codes._replace(data=lower + 1)) - dequantize(format, codes._replace(data=lower))


def distance_to_edge(format: str, codes: Codes, values: Floats) -> tuple[Floats, Floats]:
    """For (N, K) values and their codes: how far each is from where its neighbouring code begins, and how far apart the two codes are.

    The neighbour is the one on the value's side of its code; values that saturate are far from any edge.
    """
    magnitude = codes.data & ((1 << _LARGEST_CODE[FACTS[format].element].bit_length()) - 1)
    below = codes._replace(data=np.maximum(magnitude, 1) - 1)
    beyond = np.abs(values) - np.abs(dequantize(format, codes))
    apart = np.where(beyond > 0, step(format, codes), step(format, below))
    return np.abs(apart / 2 - np.abs(beyond)), apart
