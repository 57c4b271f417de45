"""Faults among ranks, with the real kernel on the machine and the real host side around it: every peer's launch ends, says whom it waited
for, and a reset repairs; a rank that is gone for good is named."""

from __future__ import annotations

import random
import time

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from tests.machine.launch import compiler
from tests.machine.layers import inputs_of
from tests.machine.sessions import DEADLINE, Sessions
from tests.sm90.rank_work import MODES

from megamoe import MoEProblem
from megamoe.ep.lifecycle import Lifecycle
from megamoe.errors import PeerAborted, PeerTimeout
from megamoe.testing import routing

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")

USUAL = {"combine": MODES[0]}
"""How results return unless somebody chooses."""
LATE = int(1.5e9 * DEADLINE)


def problem_of():
    return MoEProblem(experts=8, top_k=3, hidden=128, intermediate=128, max_tokens=24, format="fp8_block128")


def some_inputs(problem, ranks, rng):
    """Random tokens and routes of every rank."""
    patterns = list(routing.PATTERNS)
    return [inputs_of(problem, rng.choice((0, 1, 7, 16, 17, 24)), rng.choice(patterns), rng.randrange(1 << 30)) for _ in range(ranks)]


def assert_right(sessions, inputs, seed):
    outs = sessions.run(inputs, seed=seed)
    assert sessions.errors() == [None] * sessions.ranks
    assert sessions.judge(inputs, outs) == []


def is_right(sessions, inputs, outs, rank):
    return not any(text.startswith(f"rank {rank}:") for text in sessions.judge(inputs, outs))


def assert_named(errors, victim):
    """Every peer raises; at least one of them waited for the victim in vain, the others were told by a peer."""
    others = [error for rank, error in enumerate(errors) if rank != victim]
    assert all(others), errors
    waited = [error for error in others if isinstance(error, PeerTimeout)]
    assert waited
    for error in waited:
        assert error.rank == victim, error
        assert error.site in ("route counts of a rank", "results of a rank"), error
        assert error.expected != error.seen
    for error in others:
        assert error in waited or error.rank not in (victim, None), error


@pytest.mark.parametrize("ranks", [2, 4])
def test_skipped_late_and_rejected_launches_are_named_and_reset_repairs(ranks):
    rng, problem = random.Random(ranks), problem_of()
    sessions = Sessions(problem, ranks, grid=2, **USUAL)
    assert_right(sessions, some_inputs(problem, ranks, rng), 0)
    for number in range(18):
        victim, fault, inputs = rng.randrange(ranks), ("skips", "late", "rejects")[number % 3], some_inputs(problem, ranks, rng)
        if fault == "rejects":
            sessions.lives[victim].reject()
        outs = sessions.run(
            inputs,
            seed=number,
            change=lambda rank, made, victim=victim, fault=fault: made if rank != victim else made.late(LATE) if fault == "late" else None,
        )
        errors = sessions.errors()
        if fault == "rejects":
            assert [(type(error), error.rank) for error in errors] == [(PeerAborted, victim)] * ranks
            assert sessions.ran.nanoseconds < 1e9 * DEADLINE, "told, long before the deadline"
        else:
            assert_named(errors, victim)
            # A late launch may end well: where it needs nothing of those who gave up.
            assert isinstance(errors[victim], PeerAborted) or fault == "skips" or is_right(sessions, inputs, outs, victim)
        assert sessions.each(Lifecycle.reset) == [None] * ranks
        assert_right(sessions, some_inputs(problem, ranks, rng), 100 + number)
    assert sessions.each(Lifecycle.close) == [True] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_dies_inside_its_launch_leaves_no_peer_behind(ranks):
    rng, problem, noticed = random.Random(10 + ranks), problem_of(), 0
    inputs = [inputs_of(problem, 24, "zipf", rank) for rank in range(ranks)]
    for number in range(12):
        sessions = Sessions(problem, ranks, meeting_seconds=1.5, grid=2, **USUAL)
        assert_right(sessions, some_inputs(problem, ranks, rng), number)
        victim = number % ranks
        # Anywhere between its start and a third of what its launch before has taken.
        steps = sessions.ran.switches * rng.randrange(1, 100) // (300 * ranks)
        outs = sessions.run(
            inputs, seed=number, change=lambda rank, made, victim=victim, steps=steps: made.killed(steps) if rank == victim else made
        )
        assert sessions.ran.nanoseconds < 1e9 * (2 * DEADLINE + 1)
        errors = sessions.errors()
        others = [rank for rank in range(ranks) if rank != victim]
        for rank in others:
            assert isinstance(errors[rank], PeerTimeout | PeerAborted) or is_right(sessions, inputs, outs, rank)
        noticed += any(errors[rank] for rank in others)
        start = time.monotonic()
        for error in sessions.each(Lifecycle.reset, others):
            assert isinstance(error, PeerAborted)
            assert error.rank == victim
            assert f"World rank {sessions.world[victim]} did not come" in str(error)
        assert sessions.each(Lifecycle.close, others) == [False] * len(others), "nobody is met any more"
        assert time.monotonic() - start < 20
    assert noticed >= 8, "most were killed before they had sent what the others needed"
