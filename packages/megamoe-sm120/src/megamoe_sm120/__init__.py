"""megamoe kernels for Blackwell workstation (sm120). Importing this package loads neither torch nor CuTe DSL."""

from __future__ import annotations

from megamoe.protocol import BackendSpec

__version__ = "0.1.0"

SPEC = BackendSpec(
    name="sm120",
    protocol=(1, 0),
    archs=((12, None),),
    formats=("mxfp8", "nvfp4"),
    summary="Blackwell workstation: MXFP8, then NVFP4",
    factory="megamoe_sm120.backend:Sm120Backend",
    missing="this release has no sm120 kernel yet",
)
