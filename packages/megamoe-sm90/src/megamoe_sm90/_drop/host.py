"""What the compiler takes: the host function of a configuration, with example arguments. Compilation needs no GPU."""

import inspect

import cuda.bindings.driver as cuda
from cutlass import Int32, Int64

from .layer_config import LayerConfig
from .native import NativeMoE
from .ranks import RanksMoE
from .ranks_config import RanksConfig
from .ranks_grouped import GroupedMoE
from .swap_config import SwapConfig
from .swap_kernel import SwapKernel

_EXAMPLES = {Int32: Int32(1), Int64: Int64(1024), cuda.CUstream: cuda.CUstream(0)}


def kernel_and_args(config: LayerConfig):
    """The jit object and example arguments for a compilation."""
    kernel = _kernel_of(config)
    _, *parameters = inspect.signature(type(kernel).__call__).parameters.values()
    return kernel, tuple(_EXAMPLES[parameter.annotation] for parameter in parameters)


def _kernel_of(config):
    if isinstance(config, SwapConfig):
        return SwapKernel(config)
    if isinstance(config, RanksConfig):
        return (GroupedMoE if config.grouped else RanksMoE)(config)
    return NativeMoE(config)
