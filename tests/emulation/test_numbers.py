"""Conversions on the host, from the source that the GPU runs: every code, and every rounding case of the other direction."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from . import model_numbers as model


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def decode(pure, name):
    codes = np.arange(2 ** (1 + sum(model.SHAPES[name])), dtype=np.uint32)
    out = np.empty(len(codes), np.float32)
    pure.to_float(model.CODES[name], len(codes), pointer(codes), pointer(out))
    return out


@pytest.mark.parametrize("name", model.SHAPES)
def test_every_code_has_its_value(pure, name):
    np.testing.assert_array_equal(decode(pure, name).astype(np.float64), model.table(name))
    assert np.array_equal(np.signbit(decode(pure, name)), np.signbit(model.table(name))) or name in ("e4m3", "e5m2")


def test_halves(pure):
    codes = np.arange(2**16, dtype=np.uint32)
    out = np.empty(2**16, np.float32)
    pure.to_float(16, 2**16, pointer(codes), pointer(out))
    np.testing.assert_array_equal(out, codes.astype(np.uint16).view(np.float16).astype(np.float32))


def test_ue8m0_values_and_their_bfloat16(pure):
    codes = np.arange(256, dtype=np.uint32)
    out, pairs = np.empty(256, np.float32), np.empty(256, np.uint32)
    pure.ue8m0(256, pointer(codes), pointer(out))
    np.testing.assert_array_equal(out.astype(np.float64), model.ue8m0_table())
    pure.ue8m0_bf16(256, pointer(codes), pointer(pairs))
    np.testing.assert_array_equal((pairs << 16).view(np.float32).astype(np.float64), model.ue8m0_table())


def awkward(name=None):
    """Floats around every boundary between codes and around powers of two, denormals, infinities, NaN, and random bit patterns."""
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 2**32, 400_000, dtype=np.uint64).astype(np.uint32)
    points = [2.0**e for e in range(-149, 128)]
    if name:
        values = model.table(name)[: 2 ** sum(model.SHAPES[name])]
        points += [*values, *((values[:-1] + values[1:]) / 2)]
    centre = np.array(points, np.float32)
    around = [centre, np.nextafter(centre, np.float32(np.inf)), np.nextafter(centre, np.float32(-np.inf))]
    special = np.array([0.0, np.inf, np.nan, 1e30, 3.4e38, 1e-45], np.float32)
    everything = np.concatenate([bits.view(np.float32), *around, special])
    return np.concatenate([everything, -everything]).astype(np.float32)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2"])
def test_rounding_to_narrow_formats(pure, name, relu):
    values = awkward(name)
    out = np.empty(len(values), np.uint32)
    pure.to_small(*model.SHAPES[name], int(relu), len(values), pointer(values), pointer(out))
    np.testing.assert_array_equal(out, model.nearest(values, name, relu))


@pytest.mark.parametrize("satfinite", [False, True])
@pytest.mark.parametrize("up", [False, True])
def test_rounding_to_powers_of_two(pure, up, satfinite):
    values = awkward()
    out = np.empty(len(values), np.uint32)
    pure.to_ue8m0(int(up), int(satfinite), len(values), pointer(values), pointer(out))
    expected = model.power_of_two(values, up, satfinite)
    # Below 2**-127 there is no smaller power: everything rounds to code 0, or up to it as far as it reaches.
    np.testing.assert_array_equal(out, expected)
