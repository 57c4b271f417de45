"""The cases that every backend has to get right on several ranks, with the real kernel on the machine; and the most ranks there can be."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

import torch
from tests.machine.launch import compiler
from tests.machine.layers import OneRank, Ranks, same_bytes
from tests.machine.sessions import Sessions
from tests.sm90.rank_work import MODES

from megamoe import MoEProblem
from megamoe.testing import cases
from megamoe.testing.trial import make_trial

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")


def problem_of(**more):
    return MoEProblem(**{"experts": 8, "top_k": 3, "hidden": 128, "intermediate": 128, "max_tokens": 24, "format": "fp8_block128", **more})


def go_through(problem, ranks, only, **more):
    """What is wrong, by case; one session for all of them."""
    sessions = Sessions(problem, ranks, grid=2, **more)
    trial, generator, wrong = make_trial(problem, ranks=ranks, seed=5), torch.Generator().manual_seed(6), {}
    sessions.trial = replace(trial, weights=sessions.trial.weights)
    for number, case in enumerate(cases.cases(problem, ranks, only)):
        ids = [case.pattern(problem, tokens, generator).to(torch.int32) for tokens in case.tokens]
        clean = [one.rows(torch.arange(len(each)))._replace(topk_ids=each) for one, each in zip(trial.inputs, ids, strict=True)]
        unread = [one._replace(topk_weights=one.topk_weights.masked_fill(one.topk_ids < 0, float("nan"))) for one in clean]
        outs = sessions.run(unread, seed=number)
        found = sessions.judge(clean, outs)
        found += [str(error) for error in sessions.errors() if error]
        counts = [session.counts().tolist() for session in sessions.sessions]
        if counts != [cases.received(problem, ranks, rank, ids) for rank in range(ranks)]:
            found.append(f"counts are {counts}")
        if [fabric.exchanges for fabric in sessions.fabrics] != [number + 1] * ranks:
            found.append("not one exchange a launch")
        wrong[case.name] = found
    return wrong


def wrong_of(found):
    return {case: what for case, what in found.items() if what}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_routings(ranks, mode):
    found = go_through(problem_of(), ranks, ("masked", "one expert", "all to rank 1"), delays=True, combine=mode)
    assert wrong_of(found) == {}
    assert len(found) == 36


@pytest.mark.parametrize("name", cases.placements(8, 4))
@pytest.mark.parametrize("mode", MODES)
def test_placements(name, mode):
    problem = cases.placed(problem_of(top_k=6), cases.placements(8, 4)[name])
    found = go_through(problem, 4, ("masked",), combine=mode)
    assert wrong_of(found) == {}
    assert len(found) == 12


@pytest.mark.parametrize("format", ["fp8_block128", "bf16"])
def test_every_number_of_ranks_gives_the_bits_of_one(format):
    problem = problem_of(format=format)
    one = OneRank(problem, "native", 128, "pool")
    for ranks in (2, 4, 8):
        several = Ranks(problem, ranks, grid=2, tokens=[(24, 0, 17, 1, 7)[rank % 5] for rank in range(ranks)])
        assert torch.equal(several.trial.weights.w13, one.trial.weights.w13)
        for rank, out in enumerate(several.run(several.trial.inputs, seed=ranks)):
            want = one.run(several.trial.inputs[rank], seed=rank)
            assert same_bytes(out, want), (ranks, rank)


@pytest.mark.parametrize("ranks", [20, 72])
def test_more_ranks_than_sixteen_with_fewer_experts_than_a_token_has_routes(ranks):
    layer = Ranks(problem_of(experts=2 * ranks, top_k=4, max_tokens=8), ranks, grid=1, tile=64)
    for seed in range(2):
        outs = layer.run(layer.trial.inputs, seed=seed)
        assert layer.judge(layer.trial.inputs, outs) == []
