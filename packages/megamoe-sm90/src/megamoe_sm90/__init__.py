"""megamoe kernels for Hopper (sm90). Importing this package loads neither torch nor CuTe DSL."""

from __future__ import annotations

from megamoe.protocol import BackendSpec, DropInfo

__version__ = "0.1.0"

SPEC = BackendSpec(
    name="sm90",
    protocol=(1, 0),
    archs=((9, 0),),
    formats=("bf16", "fp8_tensor", "fp8_tensor_e5m2", "fp8_block128"),
    summary="Hopper: FP8 (per tensor or 128-blockwise scales) and BF16",
    factory="megamoe_sm90.backend:Sm90Backend",
    features=("biases", "prequantized activations", "prequantized weights", "early and late routing weight", "CUDA graphs"),
    status="native",
    drop=DropInfo(origin="first-party", commit=__version__, date="2026-11-30"),
)
