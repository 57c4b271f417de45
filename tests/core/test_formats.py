"""Formats against formulas of their own in numpy float64, over every code, midpoint, exponent, and the special values."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe import InvalidInput
from megamoe.formats import FORMATS, load
from megamoe.formats.elements import pack_e2m1, round_fp8, unpack_e2m1
from megamoe.formats.layout import blocked_bytes, from_blocked, to_blocked

from .number_tables import TABLES, hard_values, nearest

MX = ("mxfp8", "mxfp8_e5m2")
EXPONENTS = np.arange(-149, 128)


def f32(value) -> np.ndarray:
    return np.asarray(value, np.float32)


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_tensor_e5m2"])
def test_fp8_rounding_of_every_code_and_midpoint(name):
    info = FORMATS[name]
    values = hard_values(info.element)
    got = round_fp8(torch.from_numpy(values), info).view(torch.uint8).numpy()
    np.testing.assert_array_equal(got, nearest(values, info.element))


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_tensor_e5m2"])
def test_fp8_keeps_nan(name):
    info = FORMATS[name]
    assert round_fp8(torch.tensor([math.nan, -math.nan]), info).to(torch.float32).isnan().all()


def test_e2m1_rounding_of_every_code_and_midpoint():
    values = hard_values("e2m1")
    packed = pack_e2m1(torch.from_numpy(values)).numpy()
    codes = nearest(values, "e2m1")
    np.testing.assert_array_equal(packed, codes[0::2] | codes[1::2] << 4)


def test_e2m1_unpacks_low_nibble_first():
    every = np.arange(256, dtype=np.uint8)
    value = np.concatenate([TABLES["e2m1"], -TABLES["e2m1"]])
    expected = np.stack([value[every & 15], value[every >> 4]], -1).reshape(-1)
    np.testing.assert_array_equal(unpack_e2m1(torch.from_numpy(every)).numpy(), expected)


def test_fp8_tensor_divides_by_its_scale_in_float32():
    rng = np.random.default_rng(1)
    values, scale = f32(rng.standard_normal((7, 96)) * 5), 0.0173
    quantized = load("fp8_tensor").quantize(torch.from_numpy(values), static_scale=scale)
    code = nearest(values / f32(scale), "e4m3")
    np.testing.assert_array_equal(quantized.data.view(torch.uint8).numpy(), code)
    back = load("fp8_tensor").dequantize(*quantized, static_scale=scale)
    expected = np.copysign(TABLES["e4m3"][code & 0x7F], values) * np.float64(f32(scale))
    np.testing.assert_allclose(back.numpy(), expected, rtol=1e-6)


def test_fp8_tensor_weight_scale_is_per_expert_and_zero_experts_survive():
    weight = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(2))
    weight[1] = 0
    data, scale, total = load("fp8_tensor").quantize_weight(weight)
    expected = np.maximum(np.abs(weight.numpy()).max((1, 2)), f32(1e-12)) / f32(448)
    np.testing.assert_array_equal(scale.numpy(), expected)
    assert total is None
    assert (data[1].to(torch.float32) == 0).all()
    assert data[0].to(torch.float32).abs().max() == 448


def test_fp8_tensor_without_static_scale_is_refused():
    with pytest.raises(InvalidInput, match="static activation scale"):
        load("fp8_tensor").quantize(torch.ones(1, 4))


def test_block128_scale_and_data_over_every_exponent():
    amax = f32(np.ldexp(1.5, EXPONENTS[:-1]))
    rng = np.random.default_rng(3)
    values = f32(rng.uniform(-1, 1, (len(amax), 128))) * amax[:, None]
    values[:, 17] = -amax
    quantized = load("fp8_block128").quantize(torch.from_numpy(values))
    scale = np.maximum(amax, f32(1e-10)) / f32(448)
    np.testing.assert_array_equal(quantized.scale.numpy()[:, 0], scale)
    np.testing.assert_array_equal(quantized.data.view(torch.uint8).numpy(), nearest(values / scale[:, None], "e4m3"))


def test_block128_zero_block_and_special_values():
    values = torch.ones(4, 256)
    values[0, :128] = 0
    values[1, 5] = math.nan
    values[2, 200] = -math.inf
    quantized = load("fp8_block128").quantize(values)
    back = load("fp8_block128").dequantize(*quantized)
    assert quantized.scale[0, 0] == np.float32(1e-10) / np.float32(448)
    assert (back[0, :128] == 0).all()
    assert back[1, :128].isnan().all()
    assert back[2, 128:].isnan().all()
    torch.testing.assert_close(back[3], values[3], rtol=1e-6, atol=0)
    torch.testing.assert_close(back[1, 128:], values[1, 128:], rtol=1e-6, atol=0)
    torch.testing.assert_close(back[2, :128], values[2, :128], rtol=1e-6, atol=0)


def test_block128_weight_blocks_are_128_by_128():
    rng = np.random.default_rng(4)
    weight = f32(rng.standard_normal((2, 256, 384)) * np.exp(rng.standard_normal((2, 256, 1))))
    data, scale, _ = load("fp8_block128").quantize_weight(torch.from_numpy(weight))
    expected = np.abs(weight.reshape(2, 2, 128, 3, 128)).max((2, 4)) / f32(448)
    np.testing.assert_array_equal(scale.numpy(), expected)
    wide = expected.repeat(128, 1).repeat(128, 2)
    np.testing.assert_array_equal(data.view(torch.uint8).numpy(), nearest(weight / wide, "e4m3"))


def mx_byte(amax: np.ndarray, max_value: float) -> np.ndarray:
    """Smallest exponent whose power of two is not below float32(amax * float32(1 / max)), biased."""
    product = f32(amax.astype(np.float64) * np.float64(f32(1 / max_value)))
    fraction, exponent = np.frexp(product.astype(np.float64))
    ceil_log2 = np.where(fraction == 0.5, exponent - 1, exponent)
    return np.where(product == 0, 0, np.maximum(ceil_log2 + 127, 1))


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("mantissa", [1.0, 1.0 + 2**-23, 1.25, 1.75, 1.75 + 2**-22, 2 - 2**-23])
def test_mx_scale_and_data_over_every_exponent(name, mantissa):
    info = FORMATS[name]
    with np.errstate(over="ignore", under="ignore"):
        amax = f32(np.ldexp(mantissa, EXPONENTS))
    amax = amax[np.isfinite(amax)]
    rng = np.random.default_rng(5)
    values = f32(rng.uniform(-1, 1, (len(amax), 32))) * amax[:, None]
    values[:, 30] = amax
    quantized = load(name).quantize(torch.from_numpy(values))
    byte = mx_byte(amax, info.max_value)
    np.testing.assert_array_equal(quantized.scale.view(torch.uint8).numpy()[:, 0], byte)
    scaled = np.where(byte[:, None] == 0, np.copysign(0.0, values) * 0, values.astype(np.float64) * 2.0 ** (127.0 - byte[:, None]))
    got = quantized.data.view(torch.uint8).numpy()
    np.testing.assert_array_equal(
        np.where(got == 0x80, 0, got), np.where(nearest(scaled, info.element) == 0x80, 0, nearest(scaled, info.element))
    )


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("exponent", [-20, -1, 0, 1, 20])
def test_mx_power_of_two_amax_needs_no_headroom(name, exponent):
    info = FORMATS[name]
    values = torch.zeros(1, 32)
    values[0, 3] = math.ldexp(info.max_value, exponent)
    quantized = load(name).quantize(values)
    assert int(quantized.scale.view(torch.uint8)) == 127 + exponent
    assert float(quantized.data.to(torch.float32)[0, 3]) == info.max_value


@pytest.mark.parametrize("name", MX)
def test_mx_zero_block_and_special_values(name):
    values = torch.ones(3, 64)
    values[0, :32] = 0
    values[1, 40] = math.nan
    values[2, 2] = math.inf
    quantized = load(name).quantize(values)
    back = load(name).dequantize(*quantized)
    assert quantized.scale.view(torch.uint8).tolist()[0][0] == 0
    assert (quantized.data[0, :32].view(torch.uint8) == 0).all()
    assert quantized.scale.view(torch.uint8)[1, 1] == 255
    assert back[1, 32:].isnan().all()
    assert back[2, :32].isnan().all()
    assert (back[1, :32] == 1).all()
    assert (back[2, 32:] == 1).all()


@pytest.mark.parametrize("tensor_scale", [1.0, 0.37, 1 / 512])
def test_nvfp4_scale_and_data_over_many_exponents(tensor_scale):
    amax = f32(np.ldexp(1.3, np.arange(-40, 40)))
    rng = np.random.default_rng(6)
    values = f32(rng.uniform(-1, 1, (len(amax), 16))) * amax[:, None]
    values[:, 9] = amax
    quantized = load("nvfp4").quantize(torch.from_numpy(values), static_scale=tensor_scale)
    norm = f32(1) / f32(tensor_scale)
    scale_code = nearest(np.minimum(f32(448), amax / f32(6) * norm), "e4m3")
    np.testing.assert_array_equal(quantized.scale.view(torch.uint8).numpy()[:, 0], scale_code)
    rounded = f32(TABLES["e4m3"][scale_code])
    with np.errstate(divide="ignore", over="ignore"):
        multiplier = np.where(rounded > 0, np.minimum(norm / rounded, np.finfo(np.float32).max), f32(0))
    scaled = np.where(rounded[:, None] > 0, values * multiplier[:, None], f32(0))
    codes = nearest(scaled, "e2m1")
    np.testing.assert_array_equal(quantized.data.numpy(), codes[:, 0::2] | codes[:, 1::2] << 4)
    back = load("nvfp4").dequantize(*quantized, static_scale=tensor_scale).numpy()
    value = np.concatenate([TABLES["e2m1"], -TABLES["e2m1"]])[codes]
    np.testing.assert_allclose(back, value * rounded[:, None] * tensor_scale, rtol=1e-6)


def test_nvfp4_nan_or_infinity_poisons_its_block_only():
    values = torch.ones(2, 32)
    values[0, 3], values[1, 20] = math.nan, -math.inf
    back = load("nvfp4").dequantize(*load("nvfp4").quantize(values))
    assert back[0, :16].isnan().all()
    assert back[1, 16:].isnan().all()
    torch.testing.assert_close(back[0, 16:], values[0, 16:], rtol=0.07, atol=0)
    torch.testing.assert_close(back[1, :16], values[1, :16], rtol=0.07, atol=0)


def test_nvfp4_weight_global_scale_puts_the_largest_block_at_448():
    weight = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(7))
    weight[2] = 0
    data, scale, total = load("nvfp4").quantize_weight(weight)
    np.testing.assert_allclose(total.numpy()[:2], np.abs(weight.numpy()[:2]).max((1, 2)) / (448 * 6), rtol=1e-6)
    assert total[2] == 1
    assert scale.to(torch.float32)[:2].amax((1, 2)).tolist() == [448, 448]
    assert (data[2] == 0).all()


@pytest.mark.parametrize("magnitude", [1e-34, 1e-35, 1e-36, 2.0**-126, 1e-40])
def test_nvfp4_weights_too_small_for_the_reciprocal_of_their_scale(magnitude):
    weight = torch.full((1, 2, 32), magnitude)
    weight[0, 1, 16:] = 0
    back = load("nvfp4").dequantize_weight(*load("nvfp4").quantize_weight(weight))
    assert (back[0, 1, 16:] == 0).all()
    # The global scale stops at 2^-118, and an E4M3 scale below 2^-10 rounds to zero.
    want = weight if magnitude > 2.0**-118 * 6 * 2.0**-10 else torch.zeros_like(weight)
    torch.testing.assert_close(back, want, rtol=0.07, atol=1e-41)


def test_nvfp4_weights_with_an_infinity_lose_that_block_only():
    weight = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(8))
    finite = load("nvfp4").quantize_weight(weight.clone())[2]
    weight[0, 2, 5] = math.inf
    data, scale, total = load("nvfp4").quantize_weight(weight)
    assert scale.to(torch.float32).isnan().nonzero().tolist() == [[0, 2, 0]]
    assert 0 < total <= finite
    assert load("nvfp4").dequantize_weight(data, scale, total).isnan().sum() == 16


def test_blocked_layout_byte_by_byte():
    rows, blocks = 300, 10
    plain = torch.from_numpy(np.random.default_rng(8).integers(1, 256, (2, rows, blocks), dtype=np.uint8))
    flat = to_blocked(plain)
    assert flat.shape == (2, blocked_bytes(rows, blocks)) == (2, 384 * 12)
    expected = np.zeros(tuple(flat.shape), np.uint8)
    for r in range(rows):
        for c in range(blocks):
            atom = (r // 128) * 3 + c // 4
            expected[:, atom * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = plain[:, r, c]
    np.testing.assert_array_equal(flat.numpy(), expected)


@settings(max_examples=40)
@given(rows=st.integers(0, 300), blocks=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_blocked_layout_round_trip(rows, blocks, seed):
    plain = torch.randint(0, 256, (rows, blocks), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    scale = plain.view(torch.float8_e4m3fn)
    assert torch.equal(from_blocked(to_blocked(scale), rows, blocks).view(torch.uint8), plain)


def test_blocked_layout_refuses_what_does_not_fit():
    with pytest.raises(InvalidInput, match="one-byte"):
        to_blocked(torch.ones(4, 4))
    with pytest.raises(InvalidInput, match="512"):
        from_blocked(torch.zeros(100, dtype=torch.uint8), 4, 4)


@settings(max_examples=60)
@given(
    name=st.sampled_from([n for n in FORMATS if n != "bf16"]),
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 4),
    magnitude=st.floats(-8, 8),
)
def test_quantizing_dequantized_values_changes_nothing(name, seed, tokens, magnitude):
    fmt = load(name)
    values = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(seed)) * 2**magnitude
    static = {"required": 2**magnitude / 64, "optional": 2**magnitude / 64, "": None}[fmt.info.tensor_scale]
    first = fmt.dequantize(*fmt.quantize(values, static_scale=static), static_scale=static)
    second = fmt.dequantize(*fmt.quantize(first, static_scale=static), static_scale=static)
    step = {"e4m3": 2**-4, "e5m2": 2**-3, "e2m1": 0.26}[fmt.info.element]
    # Each block's largest value stays representable, so a second pass moves values by at most one step of the first.
    torch.testing.assert_close(second, first, rtol=step, atol=2.0 ** (magnitude - 8))
    if fmt.info.scale == "e8m0":
        assert torch.equal(second, first)
    torch.testing.assert_close(first, values, rtol=2 * step, atol=2.0 ** (magnitude - 2))


@pytest.mark.parametrize(("name", "width"), [("fp8_block128", 192), ("mxfp8", 48), ("nvfp4", 24)])
def test_widths_that_do_not_divide_into_blocks_are_refused(name, width):
    with pytest.raises(InvalidInput, match="does not divide"):
        load(name).quantize(torch.ones(2, width))


def test_unknown_format_is_refused_with_the_names_there_are():
    with pytest.raises(InvalidInput, match="fp8_block128"):
        load("fp6")
