"""Runs one of CuTe DSL's public examples, as it is, emulated; its own comparison with torch judges the result.

    python run_example.py WHERE[:SEED] ARCH SCRIPT [its arguments]

WHERE is "gpu" (a Hopper GPU) or "host": without a GPU tensors stay in host memory, the host code is compiled by the DSL as ever, and
kernels run on the CPU (``tests/machine``). SEED, when given, is that of delayed mode. Prints how many modules were rewritten and how many
launches ran here.
"""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.emulation import model_numbers, on_machine  # noqa: E402

from megamoe import emulation  # noqa: E402


class NoStream:
    cuda_stream = 0


def stay_on_the_host():
    """torch functions that take a device leave tensors where they are."""
    import torch
    from cuda.bindings import driver

    def hostly(function):
        def call(*args, **kwargs):
            kwargs.pop("device", None)
            return function(*(a for a in args if isinstance(a, torch.Tensor) or not (isinstance(a, torch.device) or a == "cuda")), **kwargs)

        return call

    for name in (
        "empty_like",
        "zeros_like",
        "empty",
        "zeros",
        "ones",
        "full",
        "rand",
        "randn",
        "randint",
        "tensor",
        "arange",
        "empty_strided",
    ):
        setattr(torch, name, hostly(getattr(torch, name)))
    original = torch.Tensor.to
    torch.Tensor.to = lambda self, *args, **kwargs: hostly(lambda *a, **k: original(self, *a, **k) if a or k else self)(*args, **kwargs)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.cuda.is_available = lambda: True
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args: NoStream()
    torch._scaled_mm = scaled_product
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.get_device_capability = lambda *args: (10, 0)
    driver.cuInit = lambda *args: (driver.CUresult.CUDA_SUCCESS,)
    driver.cuDeviceGetCount = lambda *args: (driver.CUresult.CUDA_SUCCESS, 1)
    for name in ("cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuEventElapsedTime", "cuEventDestroy", "cuStreamSynchronize"):
        setattr(driver, name, lambda *args: (driver.CUresult.CUDA_SUCCESS, 1.0))


def scaled_product(a, b, scale_a, scale_b, bias=None, out_dtype=None):
    """What torch._scaled_mm does for NVFP4 and MXFP8 on a Blackwell GPU, in float64: (M, K) by (K, N), a scale for 16 or 32 elements of K.

    Four-bit elements are two to a byte; scales come in blocks of 128 rows by 4, of which row r is word r // 32 of line r % 32.
    """
    import torch

    assert bias is None

    def codes(tensor):
        return tensor.view(torch.uint8).cpu().numpy()  # as bytes: narrow types can do little, on a GPU still less

    def values(data, scales):
        if data.dtype == torch.float4_e2m1fn_x2:
            table, pairs = model_numbers.table("e2m1"), codes(data)
            elements = np.stack([table[pairs & 15], table[pairs >> 4]], -1).reshape(len(pairs), -1)
        else:
            elements = model_numbers.table({torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}[data.dtype])[codes(data)]
        size, factors = (32, model_numbers.ue8m0_table()) if scales.dtype == torch.float8_e8m0fnu else (16, model_numbers.table("e4m3"))
        blocks = -(-elements.shape[1] // (4 * size))
        flat = factors[codes(scales)].reshape(-1, blocks, 32, 4, 4)
        rows = flat.transpose(0, 3, 2, 1, 4).reshape(-1, blocks * 4)[: len(elements), : elements.shape[1] // size]
        return elements * np.repeat(rows, size, 1)

    return torch.from_numpy(values(a, scale_a) @ values(b.transpose(0, 1), scale_b).T).to(a.device, out_dtype)


class Modules:
    """Which rewritten module the function that is being called launches."""

    def __init__(self, emulated):
        self.emulated, self.running, self.of = emulated, None, {}

    def hook(self):
        from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction as Function

        call, construct = Function.__call__, Function.__init__

        def constructed(function, *args, **kwargs):
            construct(function, *args, **kwargs)
            if function.has_gpu_module:  # some are called as soon as they are compiled
                self.of[id(function)] = self.running = self.emulated.modules[-1]

        def called(function, *args, **kwargs):
            self.running = self.of.get(id(function))
            return call(function, *args, **kwargs)

        Function.__init__, Function.__call__ = constructed, called


def tensors():
    """All that are alive."""
    import torch

    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]


def main():
    where, arch, script, *arguments = sys.argv[1:]
    where, _, seed = where.partition(":")
    with emulation.emulate(arch, emulation.Options(seed=int(seed) if seed else None, loads_wait=False)) as emulated:
        modules = Modules(emulated)
        launches = on_machine.Captured(lambda: modules.running, tensors)
        if where == "host":
            from cutlass.utils.hardware_info import HardwareInfo

            stay_on_the_host()
            HardwareInfo.get_max_active_clusters = lambda *args, **kwargs: 1
            HardwareInfo.__init__ = lambda *args: None
            modules.hook()
            launches.hook()
        else:
            import torch

            if torch.cuda.get_device_capability() < (10, 0):  # the examples judge themselves by what Hopper's cuBLAS does not have
                torch._scaled_mm = scaled_product
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).parent))
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            if launches.error:
                raise launches.error
        emulated.check()
        print(f"rewritten: {len(emulated.modules)}, launched here: {launches.count}")


if __name__ == "__main__":
    main()
