"""The sm90 backend on several ranks, which share a GPU under MPS where there are not enough: results, bits, stress and faults.

The ranks of a test run in processes of their own and return what they saw; one start of processes serves several cases.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace

import pytest
import torch

from megamoe import MoEProblem, Placement
from megamoe.errors import InvalidInput, MegaMoEError
from megamoe.testing import routing
from megamoe.testing.launcher import launch
from megamoe.testing.mps import serving
from megamoe.testing.trial import Inputs, make_trial
from megamoe_sm90.shim import ranks as several

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(
        several.PROVED_RANKS == 1 and not os.environ.get("MEGAMOE_TEST_RANKS"),
        reason="sm90 is not proved on several ranks and refuses them; MEGAMOE_TEST_RANKS=1 runs these tests, to prove it",
    ),
]

FORMATS = ("fp8_block128", "fp8_tensor", "fp8_tensor_e5m2", "bf16")
REDUNDANT = Placement(((0, 1, 2, 3, 4, 5, 6), (7, 8, 9, 0, 3), (10, 11, 12, 13, 3), (14, 15, 0)))
PINNED = {"order": "native", "native_tile": 128, "native_rows": "pool"}


def run(function, ranks, *args, timeout=150.0, seconds=20):
    """``function(rank, *args)`` on ranks with a GPU; ``seconds`` is the deadline of waits inside kernels."""
    with serving(ranks) as shared:
        env = {**shared, "MEGAMOE_TIMEOUT": str(seconds), "NVSHMEM_SYMMETRIC_SIZE": "256M"}
        return launch(function, ranks, *args, timeout=timeout, env=env)


def problem_of(format="fp8_block128", **more):
    return MoEProblem(**{"experts": 16, "top_k": 4, "hidden": 512, "intermediate": 256, "max_tokens": 64, "format": format, **more})


class Opened:
    """A rank's session beside the same layer on one rank, whose bits are the expected ones."""

    def __init__(self, rank, ranks, problem, *, delays=False, seed=0):
        import torch.distributed as dist

        from megamoe.ep.group import Group
        from megamoe_sm90.backend import Sm90Backend
        from megamoe_sm90.ranks_session import Sm90RanksSession

        several.PROVED_RANKS = 72
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.rank, self.ranks, self.problem = rank, ranks, problem
        self.trial = make_trial(problem, ranks=ranks, seed=seed)
        backend = Sm90Backend()
        plan = backend.plan(problem, ranks=ranks, knobs={"native_tile": 128})
        packed = backend.prepare_weights(plan, self.trial.local_weights(rank, self.device))
        alone = replace(problem, placement=None)
        whole = make_trial(alone, seed=seed)
        assert torch.equal(whole.weights.w13, self.trial.weights.w13)
        single = backend.plan(alone, knobs=PINNED)
        whole_packed = backend.prepare_weights(single, whole.local_weights(0, self.device))
        self.single = self.in_turn(lambda: backend.open_session(single, whole_packed))
        if delays:
            self.session = Sm90RanksSession(plan, packed, Group.of(dist.group.WORLD), delays=True)
        else:
            self.session = backend.open_session(plan, packed, dist.group.WORLD)
        self.generator = torch.Generator().manual_seed(100 * seed + rank)

    def inputs(self, tokens, pattern="zipf"):
        ids = routing.PATTERNS[pattern](self.problem, tokens, self.generator).to(torch.int32)
        x = torch.randn(tokens, self.problem.hidden, generator=self.generator).to(torch.bfloat16)
        return Inputs(x, ids, routing.weights(tokens, self.problem.top_k, self.generator)).to(self.device)

    def in_turn(self, call):
        """One rank after the other: kernels of one rank take every multiprocessor, so no two of them fit on a shared GPU."""
        import torch.distributed as dist

        for turn in range(self.ranks):
            if turn == self.rank:
                found = call()
                torch.cuda.synchronize()
            dist.barrier()
        return found

    def expected(self, inputs):
        """What one rank makes of it. All ranks call it."""
        return self.in_turn(lambda: self.single.run(*inputs))

    def call(self, inputs):
        """Launch into an output of NaN."""
        out = torch.full((inputs.x.shape[0], self.problem.hidden), float("nan"), dtype=torch.bfloat16, device=self.device)
        self.session.run(*inputs, out=out)
        return out

    def same(self, out, want):
        return bool(torch.equal(out.view(torch.int16), want.view(torch.int16)))


def cases(rank, ranks, format, more):
    problem = problem_of(format, **more)
    opened = Opened(rank, ranks, problem)
    wrong, launches = [], 0
    uneven = [17, 16, 7, 1][:ranks]
    for pattern in routing.PATTERNS:
        for tokens in (uneven, uneven[::-1], [0] * ranks, [64] * ranks, [0] * (ranks - 1) + [33]):
            inputs = opened.inputs(tokens[rank], pattern)
            out, launches = opened.call(inputs), launches + 1
            if not opened.same(out, opened.expected(inputs)):
                wrong.append((pattern, tokens))
    from megamoe.testing import oracle

    inputs = opened.inputs(64)
    verdict = oracle.judge(opened.call(inputs), oracle.compute(problem, opened.trial.weights, *inputs), format=format)
    exchanges = opened.session._fabric.exchanges
    counts = opened.session.counts()
    opened.session.close()
    opened.session.close()
    return wrong, verdict.ok, verdict.text, exchanges - launches, counts.tolist(), inputs.topk_ids.cpu()


@pytest.mark.parametrize(
    ("ranks", "format", "more"),
    [
        *[pytest.param(2, format, {}, marks=pytest.mark.ranks(2)) for format in FORMATS],
        *[pytest.param(4, format, {}, marks=pytest.mark.ranks(4)) for format in FORMATS],
        pytest.param(4, "fp8_block128", {"placement": REDUNDANT}, marks=pytest.mark.ranks(4)),
        pytest.param(4, "bf16", {"placement": REDUNDANT, "routing_weight": "early"}, marks=pytest.mark.ranks(4)),
    ],
)
def test_every_routing_gives_the_bits_of_one_rank(ranks, format, more):
    results = run(cases, ranks, ranks, format, more)
    for wrong, good, text, extra, _, _ in results:
        assert wrong == []
        assert good, text
        assert extra == 1, "one exchange a launch, also in the last one, which the oracle judges"
    everyone = torch.cat([ids.flatten() for *_, ids in results])
    assert sum(sum(counts) for *_, counts, _ in results) == int((everyone >= 0).sum())


def stress(rank, ranks, launches):
    opened = Opened(rank, ranks, problem_of(max_tokens=48), delays=True, seed=1)
    rng = random.Random(rank)
    pool = []
    for _ in range(24):
        tokens = rng.choice((0, 0, 1, 2, 7, 16, 17, 48, rng.randrange(49)))
        inputs = opened.inputs(tokens, rng.choice(list(routing.PATTERNS)))
        pool.append((inputs, opened.expected(inputs).clone(), torch.empty(tokens, 512, dtype=torch.bfloat16, device=opened.device)))
    bad = torch.zeros((), dtype=torch.int64, device=opened.device)
    for _ in range(launches):
        inputs, want, out = rng.choice(pool)
        out.fill_(float("nan"))
        opened.session.run(*inputs, out=out)
        bad += (out.view(torch.int16) != want.view(torch.int16)).sum()
    found = int(bad)
    opened.session.counts()  # raises if a launch gave up
    opened.session.close()
    return found


@pytest.mark.ranks(4)
def test_thousands_of_skewed_launches_and_no_wrong_byte():
    launches = int(os.environ.get("MEGAMOE_TEST_LAUNCHES", "5000"))
    assert run(stress, 4, 4, launches, timeout=290.0) == [0] * 4


def raised(call):
    """What a call, or a look at the session after it, raised."""
    try:
        call()
    except MegaMoEError as error:
        return error
    return None


def faults(rank, ranks):
    opened = Opened(rank, ranks, problem_of(), seed=2)
    session, found = opened.session, []

    def launch_and_look():
        opened.call(opened.inputs(20))
        session.counts()

    def good():
        inputs = opened.inputs(20)
        return opened.same(opened.call(inputs), opened.expected(inputs))

    for victim in range(ranks):
        found.append(good())
        start = time.monotonic()
        error = None if rank == victim else raised(launch_and_look)  # the victim skips a launch
        found.append((type(error).__name__, getattr(error, "rank", None), time.monotonic() - start < 15))
        session.reset()
        found.append(good())
        if rank == victim:
            time.sleep(4)  # it comes after the others have given up
        error = raised(launch_and_look)
        found.append((type(error).__name__, getattr(error, "rank", None)))
        session.reset()
        found.append(good())
        if rank == victim:
            with pytest.raises(InvalidInput):
                session.run(torch.zeros(1, 7, dtype=torch.bfloat16, device=opened.device), *opened.inputs(1)[1:])
            error = raised(launch_and_look)
        else:
            start = time.monotonic()
            error = raised(launch_and_look)
            assert time.monotonic() - start < 1.5, "told, long before the deadline"
        found.append((type(error).__name__, getattr(error, "rank", None)))
        session.reset()
        found.append(good())
    return found


@pytest.mark.ranks(4)
def test_skipped_late_and_rejected_launches_end_are_named_and_reset_repairs():
    for rank, found in enumerate(run(faults, 4, 4, seconds=2)):
        for victim in range(4):
            first, skipped, second, late, third, rejected, fourth = found[7 * victim : 7 * victim + 7]
            assert first, (rank, victim)
            assert second, (rank, victim)
            assert third, (rank, victim)
            assert fourth, (rank, victim)
            if rank != victim:
                assert skipped[0] in ("PeerTimeout", "PeerAborted")
                assert skipped[2]
                assert skipped[0] == "PeerAborted" or skipped[1] == victim
            assert late[0] in ("PeerTimeout", "PeerAborted")
            assert rejected == ("PeerAborted", victim)


def death(rank, ranks):
    opened = Opened(rank, ranks, problem_of(), seed=3)
    opened.call(opened.inputs(8))
    torch.cuda.synchronize()
    if rank == ranks - 1:
        return None  # the process leaves between launches, without a word to its peers
    time.sleep(3)
    first = raised(lambda: (opened.call(opened.inputs(8)), opened.session.counts()))
    second = raised(opened.session.reset)
    start = time.monotonic()
    opened.session.close()
    closed = time.monotonic() - start
    alive = float(torch.ones(3, device=opened.device).sum())
    return type(first).__name__, type(second).__name__, getattr(second, "rank", None), closed < 2, alive


@pytest.mark.ranks(4)
def test_a_process_that_leaves_is_named_by_reset_and_close_waits_for_nobody():
    *survivors, left = run(death, 4, 4, seconds=2)
    assert left is None
    for first, second, named, closed, alive in survivors:
        assert first in ("PeerTimeout", "PeerAborted")
        assert second == "PeerAborted"
        assert named == 3
        assert closed
        assert alive == 3.0
