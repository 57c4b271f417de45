"""Exit codes of every command, and which error ends in which."""

from __future__ import annotations

from megamoe.errors import (
    BackendAmbiguous,
    BackendBroken,
    BackendIncompatible,
    BackendNotFound,
    BackendUnavailable,
    InvalidInput,
    MegaMoEError,
    UnsupportedProblem,
)

OK = 0
FAILED = 1
USAGE = 2
NOTHING_SUITABLE = 3
INTERRUPTED = 130
"""What a shell reports for a program ended by Ctrl-C."""

MEANING = "0 fine, 1 a check failed, 2 usage, 3 nothing suitable."

_NOTHING_SUITABLE = (BackendAmbiguous, BackendBroken, BackendIncompatible, BackendNotFound, BackendUnavailable, UnsupportedProblem)


def of_error(error: MegaMoEError) -> int:
    """The exit code for an error that a command let through."""
    if isinstance(error, InvalidInput):
        return USAGE
    return NOTHING_SUITABLE if isinstance(error, _NOTHING_SUITABLE) else FAILED
