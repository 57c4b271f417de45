"""The several-rank kernel computes the layer: all ranks run at once on the CPU machine, against the oracle; ranks that never come, too."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

import torch
from tests.machine.launch import compiler
from tests.machine.layers import OneRank, Ranks, inputs_of, same_bytes

from megamoe import MoEProblem, Placement
from megamoe.device import wire
from megamoe.formats import load
from megamoe.testing import routing

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")

REDUNDANT = Placement(((0, 1, 2, 3, 4), (5, 6, 0, 3), (1, 7), (3, 2)))


def problem_of(**more):
    base = {"experts": 8, "top_k": 3, "hidden": 256, "intermediate": 128, "max_tokens": 48, "format": "fp8_block128"}
    return MoEProblem(**{**base, **more})


def calls(layer, pattern, first):
    """Tokens of every rank: uneven with none on one rank, all there may be, and none but on the last rank."""
    uneven = [17, 0, 7, 1][: layer.ranks]
    for number, tokens in enumerate((uneven, [layer.problem.max_tokens] * layer.ranks, [0] * (layer.ranks - 1) + [33])):
        yield [inputs_of(layer.problem, n, pattern, seed=100 * (first + number) + rank) for rank, n in enumerate(tokens)]


CASES = {
    "2 ranks, block128": (2, {}, {"races": True}),
    "2 ranks, bf16, 64-row tiles, biases, delays": (2, {"format": "bf16"}, {"tile": 64, "biases": ("b13", "b2"), "delays": True}),
    "4 ranks, block128, several copies of experts": (4, {"placement": REDUNDANT}, {"grid": 2, "races": True}),
    "3 ranks, tensor scales, early": (3, {"format": "fp8_tensor", "routing_weight": "early", "experts": 9}, {"grid": 2}),
}


@pytest.mark.parametrize(("ranks", "problem", "more"), CASES.values(), ids=CASES)
def test_every_routing_is_right_launch_after_launch(ranks, problem, more):
    layer = Ranks(problem_of(**problem), ranks, **more)
    number = 0
    for pattern in routing.PATTERNS:
        for inputs in calls(layer, pattern, number):
            outs = layer.run(inputs, seed=number)
            assert not layer.judge(inputs, outs), (pattern, number, layer.judge(inputs, outs))
            number += 1
    assert [layer.status(rank)["abort"] for rank in range(ranks)] == [0] * ranks


def test_bytes_are_those_of_one_rank_in_any_order_of_threads():
    problem = problem_of()
    layer, alone = Ranks(problem, 2), OneRank(problem, "native", 128, "pool", grid=2)
    inputs = [inputs_of(problem, n, "zipf", seed=n) for n in (48, 29)]
    want = [alone.run(each) for each in inputs]
    for seed in range(12):
        assert all(same_bytes(out, one) for out, one in zip(layer.run(inputs, seed=seed), want, strict=True)), seed


def test_quantized_activations_travel_as_they_are():
    problem = problem_of()
    plain, quantized = (Ranks(problem, 2, quantized=q) for q in (False, True))
    inputs = [inputs_of(problem, n, "zipf", seed=n) for n in (31, 8)]
    given = [load(problem.format).quantize(each.x) for each in inputs]
    outs = quantized.run([each._replace(x=x) for each, (x, _) in zip(inputs, given, strict=True)], x_scales=[scale for _, scale in given])
    assert all(same_bytes(out, want) for out, want in zip(outs, plain.run(inputs, seed=9), strict=True))


@pytest.fixture
def pair():
    return Ranks(problem_of(), 2, deadline=0.1)


def test_a_rank_that_never_launches_is_named_at_the_deadline(pair):
    inputs = [inputs_of(pair.problem, 20, "zipf", seed=rank) for rank in range(2)]
    assert not pair.judge(inputs, pair.run(inputs))
    pair.run(inputs, change=lambda rank, launch: None if rank == 1 else launch)
    status = pair.status(0)
    assert (status["abort"], wire.SITE_NAMES[status["site"]], status["index"]) == (1, "route counts of a rank", 1)
    told = pair.region(pair.heaps[1], "signal")[wire.TOLD : wire.TOLD + 8].view(torch.int64)
    assert int(told) == 1, "1 + rank 0, which tells its peer that it gave up"


def test_a_rank_that_comes_before_the_deadline_is_waited_for(pair):
    inputs = [inputs_of(pair.problem, 20, "zipf", seed=rank) for rank in range(2)]
    outs = pair.run(inputs, change=lambda rank, launch: launch.late(40_000_000) if rank == 1 else launch)
    assert not pair.judge(inputs, outs)


def test_a_rank_that_comes_too_late_learns_that_its_peer_gave_up(pair):
    inputs = [inputs_of(pair.problem, 20, "zipf", seed=rank) for rank in range(2)]
    pair.run(inputs, change=lambda rank, launch: launch.late(10_000_000_000) if rank == 1 else launch)
    assert pair.status(0)["abort"] == 1
    late = pair.status(1)
    assert late["abort"] == 1
    assert wire.SITE_NAMES.get(late["site"], late["site"]) == "abort of a peer"


def test_a_rank_that_dies_anywhere_lets_its_peer_end(pair):
    """Whether the peer has all that it needs by then or not: it ends by itself, and gives up or is right."""
    inputs = [inputs_of(pair.problem, 20, "zipf", seed=rank) for rank in range(2)]
    want = pair.run(inputs)[0]
    most, gave_up = pair.ran.switches // 2, []
    for part in range(12):
        fresh = Ranks(pair.problem, 2, deadline=0.1)
        dies = most * part // 11 + 1
        out = fresh.run(inputs, seed=part, change=lambda rank, launch, at=dies: launch.killed(at) if rank == 1 else launch)[0]
        status = fresh.status(0)
        gave_up.append(status["abort"])
        assert status["abort"] or same_bytes(out, want), dies
        assert not status["abort"] or status["site"] in wire.SITE_NAMES, status
    assert gave_up[0] == 1
    assert gave_up[-1] == 0, "it had ended all but its last steps"
