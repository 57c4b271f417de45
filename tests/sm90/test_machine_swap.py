"""Swap-order kernels compute the layer: run on the CPU machine, in random thread order, against the oracle."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from tests.machine.launch import compiler
from tests.machine.layers import OneRank, check_calls, check_quantized, inputs_of

from megamoe import MoEProblem
from megamoe.device import regions
from megamoe.problem import SwiGLU

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")

OAI = SwiGLU(limit=7.0, alpha=1.702, up_bias=1.0)
BIASES = {"biases": ("b13", "b2")}
# More rows for one expert than the widest tile has, then what breaks kernels, over one workspace.
CALLS = (
    ("zipf", 64),
    ("one expert", 50),
    ("duplicates", 33),
    ("unrouted", 5),
    ("masked", 41),
    ("first quarter", 1),
    ("balanced", 0),
    ("zipf", 7),
)


def problem_of(**more):
    base = {"experts": 6, "top_k": 3, "hidden": 384, "intermediate": 256, "max_tokens": 64, "format": "fp8_block128"}
    return MoEProblem(**{**base, **more})


CASES = {
    "block128, tile 8": (8, {}, {}),
    "block128, tile 32, one K block": (32, {"hidden": 128, "intermediate": 128}, {"grid": 3}),
    "block128, tile 64, early": (64, {"routing_weight": "early"}, {"grid": 2}),
    "block128, tile 128": (128, {}, {"grid": 6}),
    "bf16, tile 16, partial tiles, biases": (16, {"format": "bf16", "hidden": 320, "intermediate": 192, "activation": OAI}, BIASES),
    "bf16, tile 64": (64, {"format": "bf16", "hidden": 256}, {}),
    "tensor scales, tile 32": (32, {"format": "fp8_tensor", "hidden": 512}, {"grid": 5}),
    "tensor scales in e5m2, tile 8": (8, {"format": "fp8_tensor_e5m2"}, {}),
}


@pytest.mark.parametrize(("tile", "problem", "more"), CASES.values(), ids=CASES)
def test_every_call_is_right_and_repeats_its_bytes(tile, problem, more):
    check_calls(OneRank(problem_of(**problem), "swap", tile, races=tile == 8, **more), CALLS)


@pytest.mark.parametrize("format", ["fp8_block128", "fp8_tensor"])
def test_quantized_activations_end_in_the_bytes_of_bf16_ones(format):
    check_quantized(problem_of(format=format), ("swap", 16), CALLS[:3])


def test_ids_out_of_range_are_no_routes_and_are_reported():
    layer = OneRank(problem_of(), "swap", 8)
    inputs = inputs_of(layer.problem, 40, "zipf", seed=2)
    wrong = inputs.topk_ids.clone()
    wrong[::3, 1] = layer.problem.experts
    inputs = inputs._replace(topk_ids=wrong)
    assert not layer.judge(inputs, layer.run(inputs))
    assert layer.workspace.report[regions.REPORT_STICKY // 4] == regions.STICKY_BAD_ID
    assert not layer.workspace.aborted
