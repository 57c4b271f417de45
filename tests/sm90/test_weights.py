"""Packing: checkpoint tensors are used where they lie, bf16 is quantized, refits go in place. On the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe import InvalidInput, MoEProblem, Placement
from megamoe.bench.workloads import Shape, make_weights
from megamoe.formats import load
from megamoe.testing.trial import make_trial
from megamoe_sm90.backend import Sm90Backend

BACKEND = Sm90Backend()
SHAPE = Shape("small", 4, 2, 256, 128)


def weights_of(format, seed=0):
    return make_weights(SHAPE, format, torch.Generator().manual_seed(seed))


def packed_of(format, weights):
    return BACKEND.prepare_weights(BACKEND.plan(SHAPE.problem(16, format)), weights)


@pytest.mark.parametrize("format", ["fp8_block128", "fp8_tensor", "fp8_tensor_e5m2", "bf16"])
def test_checkpoint_tensors_are_not_copied(format):
    weights = weights_of(format)
    packed = packed_of(format, weights)
    for name, tensor in weights.tensors().items():
        assert packed.addresses[name] == tensor.data_ptr()
    extra = 8 if format.startswith("fp8_tensor") else 0  # the two static scales
    assert packed.nbytes == sum(t.nbytes for t in weights.tensors().values()) + extra


def test_bf16_weights_are_quantized_as_the_format_says():
    bf16 = weights_of("bf16")
    packed = packed_of("fp8_block128", bf16)
    data, scale, _ = load("fp8_block128").quantize_weight(bf16.w13)
    assert torch.equal(packed.tensors["w13"].view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(packed.tensors["w13_scale"], scale)


def test_biases_become_float32():
    bf16 = replace(weights_of("bf16"), b13=torch.randn(4, 256).to(torch.bfloat16), b2=torch.randn(4, 256))
    packed = packed_of("bf16", bf16)
    assert torch.equal(packed.tensors["b13"], bf16.b13.float())
    assert packed.tensors["b2"].data_ptr() == bf16.b2.data_ptr()


@pytest.mark.parametrize("format", ["fp8_block128", "bf16"])
def test_weights_that_were_packed_in_inference_mode_are_refitted_outside_of_it(format):
    with torch.inference_mode():
        own, quantized = packed_of(format, weights_of(format)), packed_of("fp8_block128", weights_of("bf16"))
    for packed, new in ((own, weights_of(format, 1)), (quantized, weights_of("bf16", 1))):
        packed.update(new)
        with torch.inference_mode():
            packed.update(new)
        fresh = BACKEND.prepare_weights(packed.plan, new)
        for name, tensor in fresh.tensors.items():
            assert torch.equal(packed.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_misaligned_tensors_are_copied():
    weights = weights_of("fp8_block128")
    store = torch.empty(weights.w13.numel() + 1, dtype=torch.uint8)
    view = store[1:].view(torch.float8_e4m3fn).view(weights.w13.shape).copy_(weights.w13)
    packed = packed_of("fp8_block128", replace(weights, w13=view))
    assert packed.addresses["w13"] % 16 == 0
    assert torch.equal(packed.tensors["w13"].view(torch.uint8), weights.w13.view(torch.uint8))


@pytest.mark.parametrize("source", ["bf16", "fp8_block128"])
def test_update_keeps_addresses(source):
    packed = packed_of("fp8_block128", weights_of(source))
    before, other = dict(packed.addresses), weights_of(source, seed=1)
    packed.update(other)
    assert packed.addresses == before
    want = packed_of("fp8_block128", other)
    for name, tensor in want.tensors.items():
        assert torch.equal(packed.tensors[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_tensor_e5m2"])
def test_bf16_weights_of_a_tensor_scaled_format_get_a_scale_an_expert(format):
    """Each expert's own: its largest magnitude becomes the largest element."""
    bf16 = weights_of("bf16")
    bf16.w13[2] *= 64
    scales = {"x_scale": 0.5, "mid_scale": 0.25}
    packed = packed_of(format, replace(bf16, **scales))
    largest = torch.finfo(packed.tensors["w13"].dtype).max
    for name in ("w13", "w2"):
        amax = getattr(bf16, name).float().abs().amax(dim=(1, 2))
        torch.testing.assert_close(packed.tensors[f"{name}_scale"], amax / largest, rtol=1e-6, atol=0)
        back = packed.tensors[name].float() * packed.tensors[f"{name}_scale"][:, None, None]
        assert ((back - getattr(bf16, name).float()).abs() <= amax[:, None, None] / 14).all()
    assert [packed.tensors[name].item() for name in ("x_static", "mid_static")] == [0.5, 0.25]
    with pytest.raises(InvalidInput, match="x_scale is missing"):
        packed_of(format, bf16)


def test_update_refuses_what_changes_more_than_values():
    packed = packed_of("fp8_tensor", weights_of("fp8_tensor"))
    with pytest.raises(InvalidInput, match="x_scale"):
        packed.update(replace(weights_of("fp8_tensor"), x_scale=0.5))
    with pytest.raises(InvalidInput, match="b2 absent, given"):
        packed.update(replace(weights_of("fp8_tensor"), b2=torch.zeros(4, 256)))


def test_sessions_need_a_gpu():
    plan = BACKEND.plan(SHAPE.problem(16, "bf16"))
    with pytest.raises(InvalidInput, match="cpu"):
        BACKEND.open_session(plan, BACKEND.prepare_weights(plan, weights_of("bf16")))


@pytest.mark.parametrize("format", ["fp8_block128", "fp8_tensor", "bf16"])
def test_a_rank_may_hold_no_expert(format, monkeypatch):
    monkeypatch.setenv("MEGAMOE_TEST_RANKS", "1")
    problem = MoEProblem(4, 2, 256, 128, 16, format, placement=Placement(((), (0, 1, 2, 3))))
    plan, trial = BACKEND.plan(problem, ranks=2), make_trial(problem, ranks=2)
    nothing, all_four = (BACKEND.prepare_weights(plan, trial.local_weights(rank)) for rank in range(2))
    assert {name: (t.dtype, t.shape[1:]) for name, t in nothing.tensors.items() if t.dim() > 1} == {
        name: (t.dtype, t.shape[1:]) for name, t in all_four.tensors.items() if t.dim() > 1
    }
    assert nothing.tensors["w13"].shape == (0, 256, 256)
