"""Conversions, pairs of floats, wide accesses and matrix loads and stores, as whole instructions on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

from . import kernels
from . import model_numbers as model


def pairs():
    rng = np.random.default_rng(11)
    x = rng.integers(0, 2**32, 4096, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x[:2048] = rng.standard_normal(2048).astype(np.float32) * 4
    return x


def convert(emulated, name, x):
    return emulated(kernels.convert(name), x, np.zeros(len(x) // 2, np.uint32), grid=len(x) // 64, block=32)[1]


@pytest.mark.parametrize(
    ("name", "target", "relu"),
    [("e2m1x2.f32", "e2m1", False), ("relu.e2m1x2.f32", "e2m1", True), ("e2m3x2.f32", "e2m3", False), ("e3m2x2.f32", "e3m2", False)],
)
def test_to_narrow(emulated, name, target, relu):
    x = pairs()
    codes = model.nearest(x, target, relu)
    np.testing.assert_array_equal(convert(emulated, name, x), codes[0::2] | codes[1::2] << (4 if target == "e2m1" else 8))


@pytest.mark.parametrize("up", [False, True])
def test_to_ue8m0(emulated, up):
    x = pairs()
    codes = model.power_of_two(x, up)
    np.testing.assert_array_equal(convert(emulated, f"{'rp' if up else 'rz'}.ue8m0x2.f32", x), codes[0::2] | codes[1::2] << 8)


def test_to_ue8m0_without_saturation(emulated):
    x = pairs()
    x[:64] = np.inf
    codes = model.power_of_two(x, True, satfinite=False)
    assert (codes == 255).sum() > 64
    np.testing.assert_array_equal(convert(emulated, "rp.ue8m0x2.f32 to NaN", x), codes[0::2] | codes[1::2] << 8)


def test_bf16_to_ue8m0(emulated):
    x = (pairs()[:2048].view(np.uint32) & 0xFFFF0000).view(np.float32)  # already bfloat16
    codes = model.power_of_two(x, True)
    np.testing.assert_array_equal(convert(emulated, "rp.ue8m0x2.bf16x2", x), codes[0::2] | codes[1::2] << 8)


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2"])
def test_from_narrow(emulated, name):
    bits = 1 + sum(model.SHAPES[name])
    low, high = (v.ravel() for v in np.meshgrid(np.arange(2**bits), np.arange(2**bits)))
    codes = (low | high << (4 if name == "e2m1" else 8)).astype(np.uint32)
    x = np.zeros(2 * len(codes), np.uint32)
    x[0::2] = codes
    out = convert(emulated, f"f16x2.{name}x2", x.view(np.float32)).view(np.float16).reshape(-1, 2)
    np.testing.assert_array_equal(out.astype(np.float64), np.stack([model.table(name)[low], model.table(name)[high]], 1))


def test_from_ue8m0(emulated):
    codes = np.arange(2**16, dtype=np.uint32)
    x = np.zeros(2**17, np.uint32)
    x[0::2] = codes
    out = convert(emulated, "bf16x2.ue8m0x2", x.view(np.float32))
    values = np.stack([out << 16, out & 0xFFFF0000], 1).astype(np.uint32).view(np.float32)
    expected = model.ue8m0_table()[np.stack([codes & 255, codes >> 8], 1)]
    np.testing.assert_array_equal(values.astype(np.float64), expected)


def test_pairs_of_floats(emulated):
    x = pairs()[:2048]
    low, high = x[0::2], x[1::2]
    np.testing.assert_array_equal(convert(emulated, "add f32x2", x).view(np.float32), (low + low) + (high + high))
    fused = [(v.astype(np.float64) * v + v).astype(np.float32) for v in (low, high)]
    np.testing.assert_array_equal(convert(emulated, "fma f32x2", x).view(np.float32), fused[0] - fused[1])


def test_three_way_maximum(emulated):
    x = pairs()[:2048]
    np.testing.assert_array_equal(convert(emulated, "max3", x).view(np.float32), np.maximum(np.maximum(x[0::2], x[1::2]), 1))


def test_redux(emulated):
    x = pairs()[:2048].copy()
    x[64 * 3] = np.nan  # an element of the fourth warp
    warps = x[0::2].reshape(-1, 32)
    got = convert(emulated, "redux max", x).view(np.float32).reshape(-1, 32)
    np.testing.assert_array_equal(got, np.repeat(np.nanmax(warps, 1)[:, None], 32, 1))
    got = convert(emulated, "redux min abs NaN", x).view(np.float32).reshape(-1, 32)
    np.testing.assert_array_equal(got, np.repeat(np.min(np.abs(warps), 1)[:, None], 32, 1))


def test_wide_access(emulated):
    x = np.random.default_rng(2).integers(0, 2**32, (32, 8), dtype=np.uint32)
    np.testing.assert_array_equal(emulated(kernels.wide_access(), x, np.zeros_like(x), block=32)[1], x)


def test_stmatrix_transposes_bytes(emulated):
    """Lane 4c + r of the fragment holds rows r-pairs of column c: element (k, n) of a 16 by 8 matrix goes to byte k of row n."""
    x = np.random.default_rng(3).integers(0, 256, (32, 4, 4), dtype=np.uint8)  # lane, matrix, byte
    out = emulated(kernels.stmatrix(), x, np.zeros((4, 8, 16), np.uint8), shared=1024, block=32)[1]
    expected = np.empty((4, 8, 16), np.uint8)
    for lane in range(32):
        for matrix in range(4):
            for byte in range(4):
                expected[matrix, 2 * (lane % 4) + byte % 2, lane // 4 + 8 * (byte // 2)] = x[lane, matrix, byte]
    np.testing.assert_array_equal(out, expected)


def test_ldmatrix_unpacks_nibbles(emulated):
    rows = np.random.default_rng(4).integers(0, 256, (32, 16), dtype=np.uint8)
    out = emulated(kernels.ldmatrix(), rows, np.zeros((32, 2, 4), np.uint8), shared=1024, block=32)[1]
    nibbles = np.stack([rows[:, :8] & 15, rows[:, :8] >> 4], -1).reshape(32, 16)
    for lane in range(32):
        for matrix in range(2):
            np.testing.assert_array_equal(out[lane, matrix], nibbles[8 * matrix + lane // 4, 4 * (lane % 4) : 4 * (lane % 4) + 4])


def test_nothing_is_left_to_cancel(emulated):
    assert (emulated(kernels.cancel(), np.zeros(128, np.uint32), shared=1024)[0] == 2).all()
