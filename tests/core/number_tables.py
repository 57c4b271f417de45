"""Every finite value of the small float types, from their bit fields, in float64; and rounding by search over the table."""

import numpy as np


def table(exponent_bits: int, mantissa_bits: int, bias: int, codes: int) -> np.ndarray:
    """Values of the codes 0..codes-1 with the sign bit clear."""
    code = np.arange(codes)
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    assert exponent.max() < 1 << exponent_bits
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - float(bias)))


TABLES = {
    "e4m3": table(4, 3, 7, 0x7F),  # 0x7F is NaN
    "e5m2": table(5, 2, 15, 0x7C),  # 0x7C is infinity
    "e2m1": table(2, 1, 1, 8),
}


def nearest(values: np.ndarray, name: str) -> np.ndarray:
    """Codes of the nearest table values (ties to the even code, saturating); the sign bit on top. No NaN."""
    positive = TABLES[name]
    magnitude = np.minimum(np.abs(values.astype(np.float64)), positive[-1])
    upper = np.searchsorted(positive, magnitude)
    lower = np.maximum(upper - 1, 0)
    below, above = magnitude - positive[lower], positive[upper] - magnitude
    code = np.where(below < above, lower, np.where(above < below, upper, np.where(lower % 2 == 0, lower, upper)))
    sign_bit = 8 if name == "e2m1" else 0x80
    return code | np.where(np.signbit(values), sign_bit, 0)


def hard_values(name: str) -> np.ndarray:
    """float32: every table value, every midpoint and its two float32 neighbours, values beyond the largest, both signs."""
    positive = TABLES[name].astype(np.float32)
    middle = ((TABLES[name][1:] + TABLES[name][:-1]) / 2).astype(np.float32)
    around = np.concatenate([middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))])
    beyond = np.array([positive[-1] * 1.01, positive[-1] * 1.07, positive[-1] * 2, 3e38, np.inf, 1e-45, 1e-38], np.float32)
    every = np.concatenate([positive, around, beyond])
    return np.concatenate([every, -every])
