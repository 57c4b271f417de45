"""Timing of a layer over several ranks, each in a process of its own: the slowest rank counts.

Shapes are those of one rank, so that ``ranks`` of them make the layer. Launches are enqueued back to back on every rank without a host
synchronization between them: one a launch would measure how far apart the ranks start.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megamoe.bench.timing import Timing
from megamoe.bench.workloads import Shape, make_ids, make_weights
from megamoe.errors import InvalidInput, MegaMoEError
from megamoe.problem import MoEProblem
from megamoe.testing.traffic import Traffic, imbalance, traffic
from megamoe.weights import ExpertWeights

if TYPE_CHECKING:
    import torch

    from megamoe.protocol import Session

_MOST_CHECKED_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class RanksPoint:
    """One workload on several ranks.

    Attributes:
        shape, format, routing, ranks, tokens: the workload; ``tokens`` is per rank.
        backend: who ran it.
        ms: median time of a launch on the slowest rank, in milliseconds.
        spread: of that rank, (slowest - fastest repeat) / median.
        fastest_ms: on the fastest rank.
        wire_bytes: least that crosses between a rank and its peers in a launch, on the rank with most; see :mod:`megamoe.testing.traffic`.
        imbalance: rows that the fullest rank receives, over the mean.
        rel_l2: error of a sampled token of every rank against the oracle, the largest; ``None`` when the layer is too large to check.
    """

    shape: str
    format: str
    routing: str
    ranks: int
    tokens: int
    backend: str
    ms: float
    spread: float
    fastest_ms: float
    wire_bytes: int
    imbalance: float
    rel_l2: float | None


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank saw."""

    timing: Timing
    traffic: Traffic
    rel_l2: float | None
    backend: str


def measure(
    shape: Shape,
    format: str,
    tokens: int,
    routing: str,
    *,
    backend: str | None,
    ranks: int,
    launches: int = 20,
    repeats: int = 5,
    knobs: Mapping[str, object] | None = None,
) -> RanksPoint:
    """Measure one point.

    Args:
        shape: of one rank.
        format, tokens, routing: the workload; ``tokens`` of every rank.
        backend: by name; ``None`` takes what a user gets who names none.
        ranks: processes, 2 or more; they share a GPU under MPS where there are not enough.
        launches: back to back in a repeat.
        repeats: of which the median counts.
        knobs: for the backend.

    Raises:
        InvalidInput: fewer than two ranks, an unknown format, or knobs that the backend does not have.
        UnsupportedProblem, BackendUnavailable: the backend refuses the layer or cannot run here.
        MegaMoEError: whatever the backend raises, with every failed rank's traceback; or the oracle rejects a token.
    """
    from megamoe.select import get_backend
    from megamoe.testing.launcher import launch
    from megamoe.testing.rehearsal import shared_gpu

    if ranks < 2:
        raise InvalidInput(f"ranks={ranks}; allowed: 2 or more.", hint="megamoe bench without --ranks measures one rank")
    # What it refuses, it refuses before any rank starts.
    get_backend(backend).plan(_problem(shape, format, tokens, ranks), ranks=ranks, knobs=knobs)
    with shared_gpu(backend, ranks) as env:
        parts = launch(_rank, ranks, shape, format, tokens, routing, backend, launches, repeats, knobs, timeout=600.0, env=env)
    slowest = max(parts, key=lambda part: part.timing.ms)
    errors = [part.rel_l2 for part in parts if part.rel_l2 is not None]
    return RanksPoint(
        shape=shape.name,
        format=format,
        routing=routing,
        ranks=ranks,
        tokens=tokens,
        backend=parts[0].backend,
        ms=slowest.timing.ms,
        spread=slowest.timing.spread,
        fastest_ms=min(part.timing.ms for part in parts),
        wire_bytes=max(part.traffic.wire_bytes for part in parts),
        imbalance=imbalance([part.traffic for part in parts]),
        rel_l2=max(errors, default=None),
    )


def _rank(
    rank: int,
    local: Shape,
    format: str,
    tokens: int,
    routing: str,
    backend_name: str | None,
    launches: int,
    repeats: int,
    knobs: Mapping[str, object] | None,
) -> _Part:
    """One rank's process."""
    import torch
    import torch.distributed as dist

    from megamoe.select import choose, get_backend

    ranks = dist.get_world_size()
    spec = choose(backend_name).spec
    on_gpu = spec is not None and bool(spec.archs) and torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)  # events are recorded on the current device
    problem = _problem(local, format, tokens, ranks)
    backend = get_backend(backend_name, device=device)
    plan = backend.plan(problem, ranks=ranks, knobs=knobs)
    generator = torch.Generator(device=device).manual_seed(rank)
    weights = make_weights(local, format, generator)
    x = torch.randn(tokens, local.hidden, device=device, generator=generator).to(torch.bfloat16)
    ids = make_ids(routing, problem, tokens, generator)
    topk = torch.randn(tokens, local.top_k, device=device, generator=generator).softmax(dim=1)
    out = torch.full_like(x, float("nan"))
    with backend.open_session(plan, backend.prepare_weights(plan, weights), dist.group.WORLD) as session:
        call = _call(session, x, ids, topk, out)
        call()
        error = _checked(problem, local, format, ranks, weights, x, ids, topk, out)
        timing = _timed(call, device, launches, repeats)
    return _Part(timing, traffic(problem, ids, ranks, rank, plan.wire), error, backend.spec.name)


def _problem(local: Shape, format: str, tokens: int, ranks: int) -> MoEProblem:
    """The layer that ``ranks`` of a shape make."""
    return replace(local.problem(max(tokens, 1), format), experts=local.experts * ranks)


def _call(session: Session, x: torch.Tensor, ids: torch.Tensor, topk: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    return lambda: session.run(x, ids, topk, out=out)


def _timed(call: Callable[[], object], device: torch.device, launches: int, repeats: int) -> Timing:
    """Mean of a repeat's launches, by the device's clock where it has one."""
    import torch
    import torch.distributed as dist

    samples = []
    for repeat in range(-1, repeats):
        dist.barrier()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(launches):
                call()
            end.record()
            end.synchronize()
            took = start.elapsed_time(end)
        else:
            begun = time.perf_counter()
            for _ in range(launches):
                call()
            took = 1000 * (time.perf_counter() - begun)
        if repeat >= 0:  # the first round warms up
            samples.append(took / launches)
    assert statistics.median(samples) > 0
    return Timing.of(samples)


def _checked(
    problem: MoEProblem,
    local: Shape,
    format: str,
    ranks: int,
    mine: ExpertWeights,
    x: torch.Tensor,
    ids: torch.Tensor,
    topk: torch.Tensor,
    out: torch.Tensor,
) -> float | None:
    """Error of this rank's first token, for which the other ranks' experts are made again from their seeds."""
    import torch

    from megamoe.testing import oracle

    if not torch.isfinite(out).all():
        raise MegaMoEError("elements of the output are unwritten or not finite.", hint="megamoe check --ranks 2")
    if not len(x) or ranks * sum(tensor.nbytes for tensor in mine.tensors().values()) > _MOST_CHECKED_BYTES:
        return None
    parts = [make_weights(local, format, torch.Generator(device=x.device).manual_seed(other)).tensors() for other in range(ranks)]
    # Joined as bytes: torch cannot concatenate every 8-bit type on every device.
    joined: dict[str, Any] = {
        name: torch.cat([part[name].view(torch.uint8) for part in parts]).view(first.dtype) for name, first in parts[0].items()
    }
    whole = replace(mine, **joined)
    verdict = oracle.judge(out[:1], oracle.compute(problem, whole, x[:1], ids[:1], topk[:1]), format=format)
    if not verdict.ok:
        raise MegaMoEError(f"{verdict.text}.", hint="megamoe check --ranks 2")
    return verdict.rel_l2
