"""What a backend computes on several ranks: the experts spread over processes, each with its own tokens, some with none."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

import pytest

from megamoe import nvml
from megamoe.problem import MoEProblem
from megamoe.protocol import Backend
from megamoe.testing.conformance.subject import Subject, bytes_of, text
from megamoe.testing.launcher import launch
from megamoe.testing.trial import Trial, make_trial


class RankTests(Subject):
    """Expert parallelism.

    Attributes:
        ranks: how many processes.
        shared_gpu: whether they may share a GPU when there are fewer GPUs than ranks (as under MPS).
    """

    ranks: ClassVar[int] = 2
    shared_gpu: ClassVar[bool] = False

    def test_on_several_ranks(self, runnable: Backend) -> None:
        gpus = len(nvml.gpus().devices)
        on_gpu = self.place() == "cuda"
        if on_gpu and gpus < self.ranks and not self.shared_gpu:
            pytest.skip(f"needs {self.ranks} GPUs, found {gpus}; or set shared_gpu where the ranks can share one")
        problems = [self.problem(format) for format in self.spec.formats]
        refusals = {problem.format: text(runnable.supports(problem, self.ranks)) for problem in problems}
        problems = [problem for problem in problems if not refusals[problem.format]]
        if not problems:
            pytest.skip(f"{self.spec.name} refuses {self.ranks} ranks: {refusals}")
        collectives = "cpu:gloo,cuda:nccl" if on_gpu and gpus >= self.ranks else "gloo"
        arguments = (self.ranks, self.spec.factory, problems, gpus if on_gpu else 0)
        faults = launch(_rank, self.ranks, *arguments, backend=collectives, timeout=280.0)
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
    import torch.distributed as dist

    cases = _cases(problem, ranks)
    plan = backend.plan(problem, ranks=ranks)
    packed = backend.prepare_weights(plan, cases["uneven"].local_weights(rank, place))
    faults = []
    with backend.open_session(plan, packed, dist.group.WORLD) as session:
        first: dict[str, bytes] = {}
        for turn in (1, 2):
            for case, trial in cases.items():
                out = session.run(*trial.inputs[rank].to(place))
                verdict = trial.judge(rank, out)
                if not verdict:
                    faults.append(f"{problem.format}, {case}: {verdict.text}")
                if bytes_of(out) != first.setdefault(case, bytes_of(out)):
                    faults.append(f"{problem.format}, {case}: turn {turn} gave other bytes")
                received, want = session.counts().tolist(), _received(trial, rank)
                if received != want:
                    faults.append(f"{problem.format}, {case}: counts are {received}, should be {want}")
    return faults


def _cases(problem: MoEProblem, ranks: int) -> dict[str, Trial]:
    """Trials that share their weights."""
    most = problem.max_tokens
    tokens = {
        "uneven": [most - 5 * (rank % 4) for rank in range(ranks)],
        "one rank with none": [0 if rank == 1 else most for rank in range(ranks)],
        "only the last with any": [7 if rank == ranks - 1 else 0 for rank in range(ranks)],
        "nobody": [0] * ranks,
        "all to one expert": [most] * ranks,
    }
    trials = {case: make_trial(problem, ranks=ranks, tokens=each, seed=3) for case, each in tokens.items()}
    for inputs in trials["all to one expert"].inputs:
        inputs.topk_ids[:] = problem.experts - 1
    for inputs in trials["uneven"].inputs:
        inputs.topk_ids[::3] = -1
    return {case: replace(trial, weights=trials["uneven"].weights) for case, trial in trials.items()}


def _received(trial: Trial, rank: int) -> list[int]:
    """Rows that each local expert of a rank receives from all ranks."""
    import torch

    ids = torch.cat([inputs.topk_ids.flatten() for inputs in trial.inputs]).long()
    everywhere = ids[ids >= 0].bincount(minlength=trial.problem.experts)
    return [int(everywhere[expert]) for expert in trial.problem.resolved_placement(trial.ranks).local[rank]]
