"""megamoe kernels for Blackwell data centre (sm100). Importing this package loads neither torch nor CuTe DSL."""

from __future__ import annotations

from megamoe.protocol import BackendSpec

__version__ = "0.1.0"

SPEC = BackendSpec(
    name="sm100",
    protocol=(1, 0),
    archs=((10, 0), (10, 3)),
    formats=("bf16", "mxfp8", "mxfp8_e5m2", "nvfp4"),
    summary="Blackwell data centre: NVFP4, MXFP8 and BF16",
    factory="megamoe_sm100.backend:Sm100Backend",
    missing="this release has no sm100 kernel yet",
)
