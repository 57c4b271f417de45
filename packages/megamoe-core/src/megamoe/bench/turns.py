"""Turns on a GPU: many processes may use it side by side, or one alone, which then measures what nobody disturbs."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol


class Turns(Protocol):
    """When a process may use the GPU."""

    def together(self) -> AbstractContextManager[None]:
        """Beside others."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Beside nobody."""
        ...


class AllTheTime:
    """The turns of who has the GPU for himself."""

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()


ALL_THE_TIME = AllTheTime()


class SharedTurns:
    """Turns of several processes.

    Who wants to be alone keeps others from coming, then waits until those who are there have left.

    Args:
        folder: an existing folder that all of them share; two files are made in it.
    """

    def __init__(self, folder: Path) -> None:
        self._door, self._room = (folder / name for name in ("door", "room"))

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._room.open("a") as room:
            with _held(self._door, fcntl.LOCK_EX):
                fcntl.flock(room, fcntl.LOCK_SH)
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        with _held(self._door, fcntl.LOCK_EX), _held(self._room, fcntl.LOCK_EX):
            yield


@contextmanager
def _held(path: Path, kind: int) -> Iterator[None]:
    with path.open("a") as file:  # closing it lets go
        fcntl.flock(file, kind)
        yield
