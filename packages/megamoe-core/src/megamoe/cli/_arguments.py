"""Checks of arguments that several commands take."""

from __future__ import annotations

from megamoe import nvml
from megamoe.errors import BackendUnavailable, InvalidInput


def check_ranks(ranks: int) -> int:
    """The value of ``--ranks``.

    Raises:
        InvalidInput: below 1.
    """
    if ranks < 1:
        raise InvalidInput(f"--ranks {ranks}; allowed: 1 or more.", hint="--ranks 2")
    return ranks


def require_gpu(command: str) -> None:
    """Refuse to go on where there is nothing to measure on.

    Raises:
        BackendUnavailable: no GPU is visible.
    """
    gpus = nvml.gpus()
    if not gpus.devices:
        raise BackendUnavailable(
            f"megamoe {command} measures on a GPU, and none is visible: {gpus.problem}.", hint="megamoe demo runs without one"
        )
