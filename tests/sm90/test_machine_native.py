"""Native-order kernels compute the layer: run on the CPU machine, in random thread order, against the oracle."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from tests.machine.launch import MachineFault, compiler
from tests.machine.layers import OneRank, check_calls, check_quantized, inputs_of

from megamoe import MoEProblem
from megamoe.device import regions
from megamoe.problem import SwiGLU

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")

OAI = SwiGLU(limit=7.0, alpha=1.702, up_bias=1.0)
# One expert with more rows than a tile, then what breaks kernels, over one workspace.
CALLS = (
    ("zipf", 200),
    ("one expert", 130),
    ("duplicates", 33),
    ("unrouted", 5),
    ("masked", 41),
    ("first quarter", 1),
    ("balanced", 0),
    ("zipf", 64),
)


def problem_of(**more):
    base = {"experts": 6, "top_k": 3, "hidden": 384, "intermediate": 256, "max_tokens": 200, "format": "fp8_block128"}
    return MoEProblem(**{**base, **more})


CASES = {
    "block128, 128 rows through the pool": ({}, (128, "pool"), {"grid": 3, "races": True}),
    "block128, 128 rows through the pool, early claims": ({}, (128, "pool", "early"), {"grid": 3, "races": True}),
    "bf16, 64 rows, early claims, one K block": ({"format": "bf16", "hidden": 64, "intermediate": 64}, (64, "gather", "early"), {}),
    "block128, 64 rows gathered, one K block": ({"hidden": 128, "intermediate": 128}, (64, "gather"), {"races": True}),
    "block128, 128 rows gathered, early": ({"routing_weight": "early"}, (128, "gather"), {}),
    "bf16, partial tiles, biases": (
        {"format": "bf16", "hidden": 320, "intermediate": 192, "activation": OAI},
        (128, "pool"),
        {"biases": ("b13", "b2"), "grid": 2},
    ),
    "bf16, 64 rows gathered": ({"format": "bf16", "hidden": 256}, (64, "gather"), {"grid": 6}),
    "tensor scales, 128 rows through the pool": ({"format": "fp8_tensor", "hidden": 512}, (128, "pool"), {}),
    "tensor scales in e5m2, 64 rows gathered": ({"format": "fp8_tensor_e5m2"}, (64, "gather"), {}),
}


@pytest.mark.parametrize(("problem", "kernel", "more"), CASES.values(), ids=CASES)
def test_every_call_is_right_and_repeats_its_bytes(problem, kernel, more):
    check_calls(OneRank(problem_of(**problem), "native", *kernel, **more), CALLS)


@pytest.mark.parametrize(("format", "kernel"), [("fp8_block128", (128, "pool")), ("fp8_tensor", (64, "gather"))])
def test_quantized_activations_end_in_the_bytes_of_bf16_ones(format, kernel):
    check_quantized(problem_of(format=format), ("native", *kernel), CALLS[:3])


def test_small_tiles_around_a_large_one_do_not_share_their_maxima():
    """Both warpgroups have half of a row's channels where a tile has few rows, and swap maxima; where it has many they do not meet."""
    problem = MoEProblem(experts=3, top_k=1, hidden=256, intermediate=128, max_tokens=130, format="fp8_block128")
    layer = OneRank(problem, "native", 128, "pool", grid=1, races=True)
    inputs = inputs_of(problem, 130, "balanced", seed=0)
    ids = torch.tensor([0] * 20 + [1] * 90 + [2] * 20, dtype=torch.int32)[:, None]
    assert not layer.judge(inputs._replace(topk_ids=ids), layer.run(inputs._replace(topk_ids=ids)))


@pytest.fixture
def layer():
    return OneRank(problem_of(), "native", 128, "pool", grid=3, deadline=0.05)


def test_a_wait_that_cannot_end_is_recorded_and_every_block_leaves(layer):
    inputs = inputs_of(layer.problem, 40, "zipf", seed=1)
    control = layer.workspace.controls["native"]
    control[regions.BANKS + regions.FC1_DONE :][:4].view(torch.int32).fill_(-100_000)
    layer.run(inputs)
    status = layer.status()
    assert status["abort"] == 1
    assert regions.SITE_NAMES[status["site"]] == "intermediate rows of a block"
    assert status["seen"] < 0 < status["expected"]
    assert layer.workspace.aborted
    assert layer.workspace.failed_wait().site == "intermediate rows of a block"
    control.zero_()
    layer.workspace.report.zero_()
    layer.workspace._listen()
    assert not layer.judge(inputs, layer.run(inputs, seed=1))


def test_ids_out_of_range_are_no_routes_and_are_reported(layer):
    inputs = inputs_of(layer.problem, 40, "zipf", seed=2)
    wrong = inputs.topk_ids.clone()
    wrong[::3, 1] = layer.problem.experts
    wrong[5, 0] = -7
    inputs = inputs._replace(topk_ids=wrong)
    assert not layer.judge(inputs, layer.run(inputs))
    assert layer.workspace.take_bad_ids()
    assert not layer.workspace.aborted


def test_rows_that_are_missing_are_read_outside_their_buffer(layer):
    inputs = inputs_of(layer.problem, 40, "zipf", seed=3)
    with pytest.raises(MachineFault, match="lie in no buffer"):
        layer.run(inputs._replace(x=inputs.x[:30].clone()), tokens=40)
