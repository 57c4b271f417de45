"""What a backend computes on several ranks: the experts spread over processes, each with its own tokens, some with none."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from megamoe import nvml
from megamoe.problem import MoEProblem
from megamoe.protocol import Backend
from megamoe.testing import cases, mps
from megamoe.testing.conformance.subject import Subject, bytes_of, text
from megamoe.testing.launcher import launch
from megamoe.testing.trial import Inputs, make_trial

if TYPE_CHECKING:
    import torch

PATTERNS = ("masked", "one expert")
"""Of :mod:`megamoe.testing.cases`, each with all its token counts."""


class RankTests(Subject):
    """Expert parallelism.

    Attributes:
        ranks: how many processes.
        shared_gpu: whether they may share a GPU, under MPS, when there are fewer GPUs than ranks.
    """

    ranks: ClassVar[int] = 2
    shared_gpu: ClassVar[bool] = False

    def test_on_several_ranks(self, runnable: Backend) -> None:
        gpus = len(nvml.gpus().devices)
        on_gpu = self.place() == "cuda"
        if on_gpu and gpus < self.ranks and not (self.shared_gpu and mps.available()):
            pytest.skip(f"needs {self.ranks} GPUs, found {gpus}; or shared_gpu, and {mps.CONTROL} on the path")
        problems = [self.problem(format) for format in self.spec.formats]
        refusals = {problem.format: text(runnable.supports(problem, self.ranks)) for problem in problems}
        problems = [problem for problem in problems if not refusals[problem.format]]
        if not problems:
            pytest.skip(f"{self.spec.name} refuses {self.ranks} ranks: {refusals}")
        collectives = "cpu:gloo,cuda:nccl" if on_gpu and gpus >= self.ranks else "gloo"
        arguments = (self.ranks, self.spec.factory, problems, gpus if on_gpu else 0)
        with mps.serving(self.ranks if on_gpu else 0) as env:
            faults = launch(_rank, self.ranks, *arguments, backend=collectives, timeout=280.0, env=env)
        assert not any(faults), "\n".join(f"rank {rank}: {fault}" for rank, found in enumerate(faults) for fault in found)


def _rank(rank: int, ranks: int, factory: str, problems: list[MoEProblem], gpus: int) -> list[str]:
    """One rank's process: every case of every problem in turn; returns what is wrong."""
    import torch

    if gpus:
        torch.cuda.set_device(rank % gpus)
    place = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    module, _, name = factory.partition(":")
    backend: Backend = getattr(import_module(module), name)()
    return [fault for problem in problems for fault in _problem(rank, ranks, backend, problem, place)]


def _problem(rank: int, ranks: int, backend: Backend, problem: MoEProblem, place: Any) -> list[str]:
    """Everything twice: the second turn gives the bytes of the first."""
    import torch.distributed as dist

    trial = make_trial(problem, ranks=ranks, seed=3)
    plan = backend.plan(problem, ranks=ranks)
    packed = backend.prepare_weights(plan, trial.local_weights(rank, place))
    first: dict[str, bytes] = {}

    def repeats(case: str, inputs: Inputs, out: torch.Tensor) -> str:
        return "" if bytes_of(out) == first.setdefault(case, bytes_of(out)) else "the second turn gave other bytes"

    with backend.open_session(plan, packed, dist.group.WORLD) as session:
        turns = [cases.go_through(session, trial, rank, place, only=PATTERNS, also=repeats) for _ in range(2)]
    return [f"{problem.format}, {case}: {fault}" for wrong in turns for case, fault in wrong.items() if fault]
