"""A sweep spread over processes: they open sessions, compile peers and recompute tokens side by side, and measure one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from megamoe.bench.points import Sweep, run
from megamoe.bench.results import Point
from megamoe.bench.roof import Roof
from megamoe.bench.turns import SharedTurns, Turns
from megamoe.errors import MegaMoEError

Work = Callable[[Sweep, Roof, Turns], list[Point]]


def measure(sweep: Sweep, roof: Roof, jobs: int, work: Work | None = None) -> Iterator[Point]:
    """Measure all points, as they come.

    Args:
        sweep, roof: see :func:`megamoe.bench.points.run`.
        jobs: processes.
        work: what a process does with its part, a module-level function; ``None`` measures it.

    Raises:
        MegaMoEError: see :func:`megamoe.bench.points.run`; or a process died.
    """
    with TemporaryDirectory(prefix="megamoe-bench-") as folder, ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        turns = SharedTurns(Path(folder))
        waiting = [pool.submit(work or _measured, part, roof, turns) for part in parts(sweep, jobs)]
        try:
            for done in as_completed(waiting):
                yield from done.result()
        except BrokenProcessPool:
            raise MegaMoEError("A process that measured has died.", hint="fewer --jobs: each holds the weights of a shape") from None
        finally:
            pool.shutdown(cancel_futures=True)


def parts(sweep: Sweep, jobs: int) -> list[Sweep]:
    """Sweeps of one shape and format each, with as few token counts as keep all processes busy."""
    each = max(1, len(sweep.shapes) * len(sweep.formats))
    count = min(len(sweep.tokens), -(-jobs // each))
    most = sweep.max_tokens or max(sweep.tokens)
    return [
        replace(sweep, shapes=[shape], formats=[format], tokens=sweep.tokens[part::count], max_tokens=most)
        for part in range(count)
        for format in sweep.formats
        for shape in sweep.shapes
    ]


def _measured(sweep: Sweep, roof: Roof, turns: Turns) -> list[Point]:
    return list(run(sweep, roof, turns))
