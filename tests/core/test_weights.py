"""``ExpertWeights.validate``: every tensor's shape, dtype, strides and device, and what the errors say."""

import math
from dataclasses import replace

import pytest
import torch

from megamoe import ExpertWeights, InvalidInput, MoEProblem
from megamoe.formats import FORMATS, load

E, H, INTER = 3, 256, 128


def problem(format="bf16", **changes):
    return MoEProblem(experts=E, top_k=2, hidden=H, intermediate=INTER, max_tokens=8, format=format, **changes)


def static(format):
    return {"x_scale": 0.5, "mid_scale": 0.25} if FORMATS[format].tensor_scale == "required" else {}


def bf16(format="bf16"):
    generator = torch.Generator().manual_seed(5)
    return ExpertWeights(
        torch.randn(E, 2 * INTER, H, generator=generator).bfloat16(),
        torch.randn(E, H, INTER, generator=generator).bfloat16(),
        **static(format),
    )


def quantized(format):
    plain, fmt = bf16(), load(format)
    made = {}
    for name in ("w13", "w2"):
        data, scale, total = fmt.quantize_weight(getattr(plain, name))
        made |= {name: data, f"{name}_scale": scale} | ({f"{name}_global": total} if total is not None else {})
    return ExpertWeights(**made, **static(format))


def rejects(weights, said, **changes):
    with pytest.raises(InvalidInput, match=said) as caught:
        weights.validate(problem(**changes), E)
    assert " Fix: " in str(caught.value)


@pytest.mark.parametrize("format", FORMATS)
def test_bf16_and_quantized_weights_of_every_format_are_accepted(format):
    bf16(format).validate(problem(format), E)
    assert not bf16(format).quantized
    if format != "bf16":
        quantized(format).validate(problem(format), E)
        assert quantized(format).quantized


@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2"])
def test_mx_scales_may_come_as_bytes(format):
    weights = quantized(format)
    weights.w13_scale, weights.w2_scale = weights.w13_scale.view(torch.uint8), weights.w2_scale.view(torch.uint8)
    weights.validate(problem(format), E)


def test_no_local_experts_are_fine():
    ExpertWeights(torch.empty(0, 2 * INTER, H, dtype=torch.bfloat16), torch.empty(0, H, INTER, dtype=torch.bfloat16)).validate(problem(), 0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_matrix_of_another_shape_dtype_or_stride(format, name):
    weights = bf16(format)
    good = getattr(weights, name)
    rejects(replace(weights, **{name: good[:, :-1].contiguous()}), rf"{name} has shape .*; allowed: \(3, ", format=format)
    rejects(replace(weights, **{name: good[0]}), f"{name} has shape", format=format)
    rejects(replace(weights, **{name: good.float()}), f"{name} is float32; allowed for format {format}: bfloat16", format=format)
    rejects(replace(weights, **{name: good.mT.contiguous().mT}), f"{name} has strides .*K", format=format)
    rejects(replace(weights, **{name: good[:1].expand(E, -1, -1)}), f"{name} has strides", format=format)
    rejects(replace(weights, **{name: None}), f"{name} is NoneType; allowed: a torch.Tensor", format=format)


def test_experts_and_device_are_those_of_w13():
    assert (bf16().experts, bf16().device) == (E, torch.device("cpu"))
    for w13, said in ((None, "w13 is NoneType"), ([1.0], "w13 is list"), (torch.ones(4, 8), r"w13 has shape \(4, 8\); allowed: \(experts")):
        with pytest.raises(InvalidInput, match=said):
            _ = replace(bf16(), w13=w13).experts
    with pytest.raises(InvalidInput, match="w13 is on the meta device"):
        _ = replace(bf16(), w13=torch.empty(E, 2, 2, device="meta")).device


def test_number_of_experts_is_that_of_the_rank():
    with pytest.raises(InvalidInput, match=r"w13 has shape \(3, 256, 256\); allowed: \(2, 256, 256\)"):
        bf16().validate(problem(), 2)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "bf16"])
def test_scales_of_quantized_weights(format):
    weights = quantized(format)
    for name in ("w13_scale", "w2_scale"):
        good = getattr(weights, name)
        rejects(replace(weights, **{name: None}), f"{name} is missing", format=format)
        rejects(replace(weights, **{name: good.to(torch.float64)}), f"{name} is float64; allowed", format=format)
        rejects(replace(weights, **{name: good[:-1]}), f"{name} has shape", format=format)
        if good.dim() > 1:
            rejects(replace(weights, **{name: torch.stack((good, good), dim=-1)[..., 0]}), f"{name} has strides", format=format)
    rejects(replace(weights, w2=bf16().w2), "allowed: the same dtype", format=format)


def test_scales_without_quantized_data_are_rejected_not_ignored():
    for name in ("w13_scale", "w2_scale", "w13_global", "w2_global"):
        for format in ("bf16", "fp8_block128", "nvfp4"):
            rejects(replace(bf16(format), **{name: torch.ones(E)}), f"{name} is given but", format=format)


def test_global_scales_belong_to_nvfp4():
    rejects(
        replace(quantized("mxfp8"), w13_global=torch.ones(E)), "w13_global is given for format mxfp8; allowed: nvfp4 only", format="mxfp8"
    )
    rejects(replace(quantized("nvfp4"), w2_global=torch.ones(E, 1)), r"w2_global has shape \(3, 1\); allowed: \(3,\)", format="nvfp4")
    replace(quantized("nvfp4"), w13_global=None, w2_global=None).validate(problem("nvfp4"), E)


@pytest.mark.parametrize("name", ["x_scale", "mid_scale"])
def test_static_scales(name):
    rejects(replace(bf16("fp8_tensor"), **{name: None}), rf"{name} is missing.*largest absolute value / 448", format="fp8_tensor")
    rejects(replace(bf16("mxfp8"), **{name: 1.0}), f"{name} is given but format mxfp8 has no static", format="mxfp8")
    for value in (0.0, -1.0, math.inf, math.nan, True, "1", 1e-60, 1e300, torch.tensor(1.0)):
        rejects(replace(bf16("nvfp4"), **{name: value}), f"{name}=.*allowed: a Python number", format="nvfp4")
    for value in (1, 2.0**-126, 3.4e38):
        replace(bf16("nvfp4"), **{name: value}).validate(problem("nvfp4"), E)


def test_biases():
    for dtype in (torch.bfloat16, torch.float32):
        replace(bf16(), b13=torch.zeros(E, 2 * INTER, dtype=dtype), b2=torch.zeros(E, H, dtype=dtype)).validate(problem(), E)
    rejects(replace(bf16(), b13=torch.zeros(E, INTER)), r"b13 has shape \(3, 128\); allowed: \(3, 256\)")
    rejects(replace(bf16(), b13=torch.zeros(E, 2 * INTER).half()), "b13 is float16; allowed: bfloat16 or float32")
    rejects(replace(bf16(), b2=torch.zeros(H, E).T), "b2 has strides")
    rejects(replace(bf16(), b2=[0.0]), "b2 is list; allowed: a torch.Tensor")


def test_output_bias_needs_the_late_weight():
    weights = replace(bf16(), b2=torch.zeros(E, H))
    rejects(weights, "b2 is given with routing_weight='early'", routing_weight="early")
    replace(bf16(), b13=torch.zeros(E, 2 * INTER)).validate(problem(routing_weight="early"), E)


def test_all_tensors_lie_on_one_device():
    rejects(replace(bf16(), w2=bf16().w2.to("meta")), r"weights lie on \['cpu', 'meta'\]; allowed: one device")


def test_more_than_two_to_the_31_elements_are_no_special_case():
    experts, inter, hidden = 40, 4096, 8192
    large = MoEProblem(experts=experts, top_k=2, hidden=hidden, intermediate=inter, max_tokens=8, format="bf16")
    w13 = torch.empty(experts, 2 * inter, hidden, dtype=torch.bfloat16, device="meta")
    assert w13.numel() > 2**31
    ExpertWeights(w13, torch.empty(experts, hidden, inter, dtype=torch.bfloat16, device="meta")).validate(large, experts)


def test_tensors_lists_what_is_there():
    assert set(bf16().tensors()) == {"w13", "w2"}
    assert set(quantized("nvfp4").tensors()) == {"w13", "w2", "w13_scale", "w2_scale", "w13_global", "w2_global"}
