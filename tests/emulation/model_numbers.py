"""Number formats in numpy, from their definitions: a table of every value, and rounding as a search in that table."""

from __future__ import annotations

import numpy as np

SHAPES = {"e4m3": (4, 3), "e5m2": (5, 2), "e2m3": (2, 3), "e3m2": (3, 2), "e2m1": (2, 1)}
CODES = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}


def table(name: str) -> np.ndarray:
    """Value of every code, float64; NaN and infinities where the format has them."""
    exponent, mantissa = SHAPES[name]
    bias = 2 ** (exponent - 1) - 1
    codes = np.arange(2 ** (1 + exponent + mantissa))
    e, m = codes >> mantissa & (2**exponent - 1), codes & (2**mantissa - 1)
    values = np.where(e > 0, (1 + m / 2**mantissa) * 2.0 ** (e - bias), m / 2**mantissa * 2.0 ** (1 - bias))
    values = np.where(codes >> (exponent + mantissa), -values, values)
    if name == "e4m3":
        values[(codes & 0x7F) == 0x7F] = np.nan
    if name == "e5m2":
        values[(codes & 0x7F) == 0x7C] = np.where(codes[(codes & 0x7F) == 0x7C] > 127, -np.inf, np.inf)
        values[(codes & 0x7F) > 0x7C] = np.nan
    return values


def ue8m0_table() -> np.ndarray:
    """2**(code - 127); 255 is NaN."""
    values = 2.0 ** (np.arange(256) - 127.0)
    values[255] = np.nan
    return values


def nearest(values: np.ndarray, name: str, relu: bool = False) -> np.ndarray:
    """Codes by .rn.satfinite: the nearest value, of two the one with an even code; NaN gives the largest."""
    positive = table(name)[: 2 ** sum(SHAPES[name])]
    sign_bit = len(positive)
    positive = positive[np.isfinite(positive)]
    with np.errstate(invalid="ignore"):  # signalling NaN
        magnitude = np.abs(values.astype(np.float64))
    above = np.clip(np.searchsorted(positive, magnitude), 0, len(positive) - 1)
    below = np.clip(above - 1, 0, None)
    to_above, to_below = np.abs(positive[above] - magnitude), np.abs(magnitude - positive[below])
    code = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    code = np.where(magnitude >= positive[-1], len(positive) - 1, code)
    code = code + sign_bit * np.signbit(values)
    if relu:
        code = np.where(np.signbit(values), 0, code)
    return np.where(np.isnan(values), len(positive) - 1, code)


def power_of_two(values: np.ndarray, up: bool, satfinite: bool = True) -> np.ndarray:
    """UE8M0 codes of magnitudes, rounded down or up to a power of two; above 2**127 is the largest of them, or NaN."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        magnitude = np.abs(values.astype(np.float64))
    with np.errstate(divide="ignore"):
        exponent = np.log2(magnitude)
    rounded = np.ceil(exponent) if up else np.floor(exponent)
    # log2 in float64 is exact for powers of two; next to them the float32 argument is far enough away for floor and ceil.
    code = np.clip(np.nan_to_num(rounded, neginf=-127, posinf=128), -127, 127 if satfinite else 128) + 127
    return np.where(np.isnan(values), 255, code).astype(np.int64)
