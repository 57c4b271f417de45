"""A sweep spread over processes: they open sessions, compile peers and recompute tokens side by side, and measure one at a time."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from multiprocessing import connection, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megamoe.bench.points import Sweep, run
from megamoe.bench.results import Point
from megamoe.bench.roof import Roof
from megamoe.bench.turns import SharedTurns, Turns
from megamoe.env import threads_of_children
from megamoe.errors import MegaMoEError
from megamoe.testing.launcher import end_with_parent

Work = Callable[[Sweep, Roof, Turns], Iterable[Point]]


def measure(sweep: Sweep, roof: Roof, jobs: int, work: Work = run) -> Iterator[Point]:
    """Measure all points. They are given as they come; who stops asking for them ends the processes.

    Args:
        sweep, roof: see :func:`megamoe.bench.points.run`.
        jobs: processes at a time, 1 or more.
        work: what a process does with its part, a module-level function.

    Raises:
        MegaMoEError: what the first process that failed raised, see :func:`megamoe.bench.points.run`; or one has died. All others end.
    """
    context, waiting = get_context("spawn"), parts(sweep, jobs)
    cores = max(1, (os.cpu_count() or 1) // jobs)
    busy: dict[Any, Any] = {}  # the end of its pipe and the process
    with TemporaryDirectory(prefix="megamoe-bench-") as folder:
        turns = SharedTurns(Path(folder))
        try:
            while waiting or busy:
                while waiting and len(busy) < jobs:
                    part = waiting.pop(0)
                    here, there = context.Pipe(duplex=False)
                    process = context.Process(target=_measure, args=(there, work, part, roof, turns), name=part.shapes[0].name)
                    with threads_of_children(cores):
                        process.start()
                    there.close()
                    busy[here] = process
                ready: list[Any] = connection.wait(list(busy))
                for here in ready:
                    try:
                        found = here.recv()
                    except EOFError:
                        _ended(busy.pop(here))
                        continue
                    if isinstance(found, MegaMoEError):
                        raise found
                    yield found
        finally:
            for process in busy.values():
                process.kill()
            for process in busy.values():
                process.join()


def parts(sweep: Sweep, jobs: int) -> list[Sweep]:
    """Sweeps of one shape and format each; as many as there are processes, where there are enough token counts for so many.

    Counts of a shape are dealt out in turn, so that every process gets small and large ones.
    """
    pairs = [(format, shape) for format in sweep.formats for shape in sweep.shapes]
    most = sweep.max_tokens or max(sweep.tokens)
    found = []
    for place, (format, shape) in enumerate(pairs):
        count = min(max(1, jobs // len(pairs) + (place < jobs % len(pairs))), len(sweep.tokens))
        found += [
            replace(sweep, shapes=[shape], formats=[format], tokens=sweep.tokens[part::count], max_tokens=most) for part in range(count)
        ]
    return found


def _measure(there: Any, work: Work, part: Sweep, roof: Roof, turns: Turns) -> None:
    """A process: sends every point, or the error that ended it."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent says what was interrupted
    os.dup2(2, 1)  # stdout is for the results: what libraries print there would be among them
    try:
        for point in work(part, roof, turns):
            there.send(point)
    except MegaMoEError as error:
        there.send(error)
    except Exception:  # noqa: BLE001  the parent raises it
        there.send(MegaMoEError(f"Measuring {part.shapes[0].name} {part.formats[0]} failed:\n{traceback.format_exc().rstrip()}"))
    with turns.together():
        os._exit(0)  # within the turn: what the driver clears up behind a process disturbs others as any work on the GPU does


def _ended(process: Any) -> None:
    """A process whose pipe is closed.

    Raises:
        MegaMoEError: it has died.
    """
    process.join()
    if process.exitcode:
        raise MegaMoEError(
            f"A process that measured {process.name} has died, exit code {process.exitcode}.",
            hint="fewer --jobs: each holds the weights of a shape",
        )
