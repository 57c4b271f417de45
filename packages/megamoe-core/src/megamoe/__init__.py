"""megamoe: expert-parallel Mixture-of-Experts layers as one GPU kernel per rank, with backends that plug in as wheels.

Importing this package loads neither torch nor CuTe DSL; every name below is resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

_NAMES = {
    "catalog": ("backends",),
    "errors": (
        *("BackendAmbiguous", "BackendBroken", "BackendIncompatible", "BackendNotFound", "BackendUnavailable", "DropError", "InvalidInput"),
        *("MegaMoEError", "PeerAborted", "PeerTimeout", "RankMismatch", "SessionClosed", "UnsupportedProblem"),
    ),
    "layer": ("MoELayer",),
    "problem": ("MoEProblem", "Placement", "SwiGLU"),
    "protocol": ("BackendSpec", "DropInfo", "Plan", "Reason", "Region", "Verdict"),
    "select": ("get_backend",),
    "weights": ("ExpertWeights",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "BackendAmbiguous",
    "BackendBroken",
    "BackendIncompatible",
    "BackendNotFound",
    "BackendSpec",
    "BackendUnavailable",
    "DropError",
    "DropInfo",
    "ExpertWeights",
    "InvalidInput",
    "MegaMoEError",
    "MoELayer",
    "MoEProblem",
    "PeerAborted",
    "PeerTimeout",
    "Placement",
    "Plan",
    "RankMismatch",
    "Reason",
    "Region",
    "SessionClosed",
    "SwiGLU",
    "UnsupportedProblem",
    "Verdict",
    "__version__",
    "backends",
    "get_backend",
]

if TYPE_CHECKING:
    from megamoe.catalog import backends
    from megamoe.errors import (
        BackendAmbiguous,
        BackendBroken,
        BackendIncompatible,
        BackendNotFound,
        BackendUnavailable,
        DropError,
        InvalidInput,
        MegaMoEError,
        PeerAborted,
        PeerTimeout,
        RankMismatch,
        SessionClosed,
        UnsupportedProblem,
    )
    from megamoe.layer import MoELayer
    from megamoe.problem import MoEProblem, Placement, SwiGLU
    from megamoe.protocol import BackendSpec, DropInfo, Plan, Reason, Region, Verdict
    from megamoe.select import get_backend
    from megamoe.weights import ExpertWeights


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'megamoe' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"megamoe.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
