"""How many blocks of a compiled kernel a multiprocessor runs at the same time, as the driver counts them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megamoe.compile import cubin


def blocks_per_multiprocessor(data: bytes, threads: int, shared_bytes: int, driver: Any = None) -> int:
    """Ask the driver, for the current CUDA context: its device, and what MPS leaves to this process.

    Args:
        data: a compiled object that holds one kernel.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        driver: stands in for ``cuda.bindings.driver`` in tests.

    Returns:
        blocks; 0 when not even one fits.

    Raises:
        RuntimeError: a call of the driver failed.
    """
    if driver is None:
        driver = import_module("cuda.bindings.driver")
    (image,) = cubin.images(data)
    (kernel,) = cubin.resources(image)

    def call(name: str, *arguments: object, refusal: object = None) -> Any:
        status, *values = getattr(driver, name)(*arguments)
        if status == refusal:
            return None
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} for the kernel {kernel.kernel} failed: {status!r}")
        return values[0] if values else True

    library = call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
    try:
        handle = call("cuLibraryGetKernel", library, kernel.kernel.encode())
        dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        invalid = driver.CUresult.CUDA_ERROR_INVALID_VALUE  # more shared memory than a block may have
        if not call("cuKernelSetAttribute", dynamic, shared_bytes, handle, call("cuCtxGetDevice"), refusal=invalid):
            return 0
        # This query takes a kernel that is not loaded into the context, in place of a function.
        blocks = call("cuOccupancyMaxActiveBlocksPerMultiprocessor", driver.CUfunction(int(handle)), threads, shared_bytes)
        return int(blocks)
    finally:
        call("cuLibraryUnload", library)
