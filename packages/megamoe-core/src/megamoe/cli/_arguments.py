"""Checks of arguments that several commands take."""

from __future__ import annotations

import re

from megamoe import catalog, nvml
from megamoe.catalog import Record
from megamoe.errors import BackendUnavailable, InvalidInput


def check_ranks(ranks: int) -> int:
    """The value of ``--ranks``.

    Raises:
        InvalidInput: below 1.
    """
    if ranks < 1:
        raise InvalidInput(f"--ranks {ranks}; allowed: 1 or more.", hint="--ranks 2")
    return ranks


def check_seed(seed: int) -> int:
    """The value of ``--seed``.

    Raises:
        InvalidInput: more than torch's generators take.
    """
    if not -(2**63) <= seed < 2**64:
        raise InvalidInput(f"--seed {seed}; allowed: -2^63 to 2^64 - 1.", hint="--seed 1")
    return seed


def for_arch(arch: str) -> Record | None:
    """The backend that is made for an architecture: exactly before its family; ``None`` when none is.

    Raises:
        InvalidInput: ``arch`` names no architecture.
    """
    digits = re.fullmatch(r"sm_?(\d+)(\d)[af]?", arch)
    if digits is None:
        raise InvalidInput(
            f"arch={arch!r} is not an architecture; allowed: for example sm_90a, sm_100a, sm_120a.", hint="pass --arch sm_90a"
        )
    capability = int(digits[1]), int(digits[2])
    for how in ("exact", "family"):
        for record in catalog.backends():
            if record.spec is not None and catalog.match(record.spec, capability) == how:
                return record
    return None


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
