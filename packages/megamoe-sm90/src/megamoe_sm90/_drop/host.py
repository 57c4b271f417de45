"""Compile and launch of the native-order kernel. Compilation needs no GPU."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from .config import NativeConfig
from .native import NativeMoE
from .ranks import RanksMoE
from .ranks_config import RanksConfig
from .ranks_grouped import GroupedMoE

ARCH = "sm_90a"
ADDRESSES = (
    "w13",
    "w2",
    "w13_scale",
    "w2_scale",
    "x",
    "x_scale",
    "ids",
    "topk_w",
    "b13",
    "b2",
    "mid_static",
    "control",
    "xq",
    "xs",
    "row_route",
    "pool",
    "pool_scale",
    "mid",
    "mid_scale",
    "stage",
    "out",
)


def kernel_and_args(config: NativeConfig):
    """The jit object and example arguments for a compilation, which needs no GPU."""
    several = isinstance(config, RanksConfig)
    kernel = (GroupedMoE if config.grouped else RanksMoE)(config) if several else NativeMoE(config)
    return kernel, (
        *[Int64(1024)] * len(ADDRESSES),
        Int32(1),
        Int32(0),
        Int32(128),
        Int32(1),
        Int32(1),
        cuda.CUstream(0),
    )


def compile_native(config: NativeConfig, options: str = ""):
    """The compiled launcher of `config`: call it with `arguments(...)`."""
    kernel, args = kernel_and_args(config)
    return cute.compile[cute.GPUArch(ARCH)](kernel, *args, **({"options": options} if options else {}))


def arguments(addresses, tokens, bank_bytes, pool_rows, grid, wait_ms, stream):
    """Launch arguments in order; `addresses` maps names of ADDRESSES to integers (0 where unused)."""
    return (
        *[Int64(addresses.get(name, 0)) for name in ADDRESSES],
        Int32(tokens),
        Int32(bank_bytes),
        Int32(pool_rows),
        Int32(grid),
        Int32(wait_ms),
        cuda.CUstream(stream),
    )
