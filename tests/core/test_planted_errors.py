"""An error planted in the formats or in the reference backend makes `megamoe check` fail: the oracle shares no code with them."""

import pytest
import torch

import megamoe
from megamoe.cli import codes, main
from megamoe.formats import blocks, elements, fp8_block128, fp8_tensor, mxfp8, nvfp4
from megamoe.formats.base import Quantized
from megamoe.formats.bf16 import BF16
from megamoe.reference import arithmetic, session
from megamoe.reference.backend import ReferenceBackend
from megamoe.testing.trial import make_trial

ROUND, PACK, LARGEST, BYTE = elements.round_fp8, elements.pack_e2m1, blocks.largest, mxfp8.exponent_byte
SUM = arithmetic.weighted_sum


def judged(format, **more):
    problem = megamoe.MoEProblem(8, 3, 256, 256, 64, format, **more)
    trial = make_trial(problem, seed=5)
    backend = ReferenceBackend()
    plan = backend.plan(problem)
    with backend.open_session(plan, backend.prepare_weights(plan, trial.local_weights(0))) as opened:
        return trial.judge(0, opened.run(*trial.inputs[0]))


def truncating(values, info):
    """Rounds toward zero."""
    rounded = ROUND(values, info)
    codes = rounded.view(torch.uint8)
    return torch.where(rounded.float().abs() > values.abs(), codes - 1, codes).view(rounded.dtype)


def rounds_up_early(values):
    """E2M1 with thresholds 5% too low."""
    return PACK(values * 1.05)


def ignores_half_of_the_block(parts):
    return LARGEST(parts[..., : parts.shape[-1] // 2])


def rounds_scale_down(amax, max_value):
    return BYTE(amax, max_value) - 1


def unlimited(gate, up, activation):
    return gate * up * torch.sigmoid(gate)


def first_route_twice(rows, routed, weights):
    return SUM(rows, routed, weights.index_select(1, torch.tensor([0, 0, *range(2, weights.shape[1])])))


def rounds_to_half_the_bits(self, values, *, static_scale=None):
    return Quantized((values.bfloat16().view(torch.int16) & -8).view(torch.bfloat16), None)


ERRORS = {
    "fp8_tensor rounds toward zero": ("fp8_tensor", fp8_tensor, "round_fp8", truncating),
    "fp8_tensor_e5m2 rounds toward zero": ("fp8_tensor_e5m2", fp8_tensor, "round_fp8", truncating),
    "fp8_block128 rounds toward zero": ("fp8_block128", fp8_block128, "round_fp8", truncating),
    "fp8_block128 scale from half the block": ("fp8_block128", fp8_block128, "largest", ignores_half_of_the_block),
    "mxfp8 rounds toward zero": ("mxfp8", mxfp8, "round_fp8", truncating),
    "mxfp8 scale rounded down": ("mxfp8", mxfp8, "exponent_byte", rounds_scale_down),
    "mxfp8_e5m2 scale rounded down": ("mxfp8_e5m2", mxfp8, "exponent_byte", rounds_scale_down),
    "nvfp4 rounds up": ("nvfp4", nvfp4, "pack_e2m1", rounds_up_early),
    "nvfp4 scale from half the block": ("nvfp4", nvfp4, "largest", ignores_half_of_the_block),
    "bf16 drops bits": ("bf16", BF16, "quantize", rounds_to_half_the_bits),
    "limit ignored": ("bf16", arithmetic, "swiglu", unlimited),
    "one route twice": ("bf16", session, "weighted_sum", first_route_twice),
}


@pytest.mark.parametrize("error", ERRORS)
def test_planted_error_is_seen(error, monkeypatch):
    format, module, name, wrong = ERRORS[error]
    more = {"activation": megamoe.SwiGLU(limit=0.8)} if error == "limit ignored" else {}
    clean = judged(format, **more)
    assert clean, clean.text
    monkeypatch.setattr(module, name, wrong)
    verdict = judged(format, **more)
    assert not verdict, verdict.text
    assert main(["check", "--backend", "reference", "--format", format]) == codes.FAILED
