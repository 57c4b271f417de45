"""Runs a random trial on a backend, in this process or on several ranks in processes of their own, and has the oracle judge it.

done = rehearse("reference", problem, ranks=2, tokens=(48, 0))
assert done.ok, done.text
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megamoe import nvml
from megamoe.errors import MegaMoEError
from megamoe.testing.oracle import Judgement
from megamoe.testing.traffic import imbalance, traffic
from megamoe.testing.trial import Trial, make_trial

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from megamoe.problem import MoEProblem
    from megamoe.protocol import Backend

STEPS = 5
"""How often a rehearsal in this process reports progress, apart from its timed runs."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What happened.

    Attributes:
        backend: name of the backend that ran.
        device: where, for example ``"NVIDIA H200"`` or ``"CPU"``.
        tokens: of each rank.
        seconds: the median run of the slowest rank, after one run to warm up.
        judgements: the oracle's, by rank.
        wire_bytes: least that crosses between a rank and its peers in a run, on the rank with most; see :mod:`megamoe.testing.traffic`.
        imbalance: rows that the fullest rank receives, over the mean.
    """

    backend: str
    device: str
    tokens: tuple[int, ...]
    seconds: float
    judgements: tuple[Judgement, ...]
    wire_bytes: int = 0
    imbalance: float = 1.0

    @property
    def ok(self) -> bool:
        """Whether every rank's output is right."""
        return all(judgement.ok for judgement in self.judgements)

    @property
    def rel_l2(self) -> float:
        """The worst rank's relative L2 error."""
        return max(judgement.rel_l2 for judgement in self.judgements)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return sum(self.tokens) / self.seconds

    @property
    def text(self) -> str:
        """The oracle's sentence about the worst rank."""
        rank, worst = max(enumerate(self.judgements), key=lambda pair: (not pair[1].ok, pair[1].worst))
        return f"rank {rank}: {worst.text}" if len(self.judgements) > 1 else worst.text


def rehearse(
    backend: str | None,
    problem: MoEProblem,
    *,
    ranks: int = 1,
    tokens: int | Sequence[int] | None = None,
    seed: int = 0,
    pattern: str = "zipf",
    repeats: int = 1,
    most: int | None = None,
    timeout: float = 120.0,
    step: Callable[[], None] = lambda: None,
) -> Rehearsal:
    """Make a trial, run it, judge it.

    Args:
        backend: by name; ``None`` takes what a user gets who names none.
        problem: what is to be computed.
        ranks: 1 runs in this process; more start a process each, with gloo on the CPU, and a GPU each (or one shared) where the backend
            needs one.
        tokens, seed, pattern: of the trial, see :func:`make_trial`.
        repeats: timed runs, after one that is not.
        most: judge so many tokens a rank, ``None`` all.
        timeout: seconds that several ranks may take.
        step: called ``STEPS + repeats`` times as work proceeds; of one rank only.

    Raises:
        MegaMoEError: whatever the backend raises; of several ranks with every failed rank's traceback.
    """
    if ranks == 1:
        trial = make_trial(problem, tokens=tokens, seed=seed, pattern=pattern)
        step()
        parts = [_run(trial, backend, 0, None, repeats, most, step)]
    else:
        from megamoe.testing.launcher import launch

        each = tuple(tokens) if isinstance(tokens, Sequence) else tokens
        collectives = "cpu:gloo,cuda:nccl" if len(nvml.gpus().devices) >= ranks else "gloo"
        arguments = (problem, ranks, each, seed, pattern, backend, repeats, most)
        with shared_gpu(backend, ranks) as env:
            parts = launch(_rank, ranks, *arguments, timeout=timeout, backend=collectives, env=env)
    first = parts[0]
    return replace(
        first,
        tokens=tuple(part.tokens[0] for part in parts),
        seconds=max(part.seconds for part in parts),
        judgements=tuple(part.judgements[0] for part in parts),
    )


def _rank(
    rank: int,
    problem: MoEProblem,
    ranks: int,
    tokens: int | Sequence[int] | None,
    seed: int,
    pattern: str,
    backend: str | None,
    repeats: int,
    most: int | None,
) -> Rehearsal:
    """One rank's process."""
    import torch.distributed as dist

    trial = make_trial(problem, ranks=ranks, tokens=tokens, seed=seed, pattern=pattern)
    return _run(trial, backend, rank, dist.group.WORLD, repeats, most, lambda: None)


def _run(
    trial: Trial, name: str | None, rank: int, group: ProcessGroup | None, repeats: int, most: int | None, step: Callable[[], None]
) -> Rehearsal:
    from megamoe.select import get_backend

    device = _device(name, rank)
    backend: Backend = get_backend(name, device=device)
    plan = backend.plan(trial.problem, ranks=trial.ranks)
    packed = backend.prepare_weights(plan, trial.local_weights(rank, device))
    step()
    inputs = trial.inputs[rank].to(device)
    with backend.open_session(plan, packed, group) as session:
        step()
        out = session.run(*inputs)
        _finish(device)
        step()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            out = session.run(*inputs)
            _finish(device)
            seconds.append(time.perf_counter() - start)
            step()
        judgement = trial.judge(rank, out, most=most)
    step()
    moved = [traffic(trial.problem, one.topk_ids, trial.ranks, number, plan.wire) for number, one in enumerate(trial.inputs)]
    return Rehearsal(
        backend=backend.spec.name,
        device=_device_name(device),
        tokens=(inputs.x.shape[0],),
        seconds=statistics.median(seconds),
        judgements=(judgement,),
        wire_bytes=max(one.wire_bytes for one in moved),
        imbalance=imbalance(moved),
    )


def _device(name: str | None, rank: int) -> torch.device:
    """The GPU of a rank where the chosen backend is made for one, else the CPU."""
    import torch

    from megamoe.select import choose

    spec = choose(name).spec
    gpus = nvml.gpus().devices
    return torch.device("cuda", rank % len(gpus)) if spec is not None and spec.archs and gpus else torch.device("cpu")


def shared_gpu(name: str | None, ranks: int) -> AbstractContextManager[Mapping[str, str]]:
    """Environment variables with which ranks of a backend run at the same time: MPS where they share GPUs, nothing on the CPU."""
    from megamoe.testing.mps import serving

    try:
        on_gpu = _device(name, 0).type == "cuda"
    except MegaMoEError:
        on_gpu = False  # the ranks raise it, each with its own traceback
    return serving(ranks) if on_gpu else nullcontext({})


def _device_name(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else nvml.gpus().devices[device.index].name


def _finish(device: torch.device) -> None:
    """Wait for the device, so that the clock sees the work."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
