"""Timing on the device: events around back-to-back launches, contestants in turn, medians with their spread."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LAUNCHES = 20
REPEATS = 5
_HEAD_START_CYCLES = 6_000_000  # about 4 ms


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one launch.

    Attributes:
        ms: median over the repeats of the mean over a repeat's launches, in milliseconds.
        spread: (slowest - fastest repeat) / median.
    """

    ms: float
    spread: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """From the repeats' mean times."""
        middle = statistics.median(samples)
        return cls(middle, (max(samples) - min(samples)) / middle if middle else 0.0)


def measure(
    contestants: Mapping[str, Sequence[Callable[[], object]]], *, launches: int = LAUNCHES, repeats: int = REPEATS, graph: bool = False
) -> dict[str, Timing]:
    """Time contestants on the current CUDA device, alternating between them so that clocks and heat are shared.

    Args:
        contestants: for each name its launches, one for each set of inputs; they are called in rotation.
        launches: back-to-back launches inside one pair of events; rounded up to whole rotations.
        repeats: pairs of events.
        graph: replay the launches as one CUDA graph, which leaves the host's launch cost out.
    """
    import torch

    runs: dict[str, tuple[Callable[[], object], int]] = {}
    for name, calls in contestants.items():
        rounds = -(-launches // len(calls))
        for call in calls:
            call()

        def all_calls(calls: Sequence[Callable[[], object]] = calls, rounds: int = rounds) -> None:
            for _ in range(rounds):
                for call in calls:
                    call()

        runs[name] = (_captured(all_calls) if graph else all_calls, rounds * len(calls))
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for repeat, names in enumerate(orders(list(runs), repeats + 1)):
        for name in names:
            run, count = runs[name]
            start, end = _event(), _event()
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]  # the host queues the launches meanwhile, so that none waits for it
            start.record()
            run()
            end.record()
            end.synchronize()
            if repeat:  # the first round warms up
                samples[name].append(start.elapsed_time(end) / count)
    return {name: Timing.of(times) for name, times in samples.items()}


def orders(names: Sequence[str], rounds: int) -> list[list[str]]:
    """Who comes after whom, another way every round: behind one who heats the GPU up, its clock is lower (10% were seen on an H200)."""
    rng = random.Random(0)
    return [rng.sample(names, len(names)) for _ in range(rounds)]


def _event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    import torch

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
