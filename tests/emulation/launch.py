"""Small kernels on the GPU through the driver's library: rewritten, assembled, launched, and their fault record raised."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace

import numpy as np

from megamoe.emulation import Options, assemble, rewrite
from megamoe.emulation.faults import RECORD, read_fault

_DYNAMIC_SHARED = 8


@functools.cache
def driver():
    library = ctypes.CDLL("libcuda.so.1")
    check(library.cuInit(0))
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(library.cuDeviceGet(ctypes.byref(device), 0))
    check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    check(library.cuCtxSetCurrent(context))
    return library


def check(status):
    assert status == 0, f"CUDA driver error {status}"


class Memory:
    """A copy of an array on the device."""

    def __init__(self, array):
        self.array = np.ascontiguousarray(array)
        self.address = ctypes.c_uint64()
        check(driver().cuMemAlloc_v2(ctypes.byref(self.address), ctypes.c_size_t(max(self.array.nbytes, 16))))
        check(driver().cuMemcpyHtoD_v2(self.address, self.array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(self.array.nbytes)))

    def back(self):
        check(driver().cuMemcpyDtoH_v2(self.array.ctypes.data_as(ctypes.c_void_p), self.address, ctypes.c_size_t(self.array.nbytes)))
        check(driver().cuMemFree_v2(self.address))
        return self.array


@functools.cache
def module(ptx, options):
    """The loaded module, the kernel and what it was rewritten from. The code of one kernel is the same for all seeds."""
    rewritten = rewrite(ptx, options)
    code = assemble(rewritten)
    handle, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver().cuModuleLoadData(ctypes.byref(handle), code))
    check(driver().cuModuleGetFunction(ctypes.byref(kernel), handle, b"kernel"))
    return handle, kernel, rewritten


def variable(handle, name):
    address, size = ctypes.c_uint64(), ctypes.c_size_t()
    check(driver().cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), handle, name))
    return address, size


def run(ptx, *arguments, grid=1, block=128, shared=0, options=None):
    """Launch the kernel named ``kernel``. Arrays are copied to the device, back and returned; integers are 32-bit; bytes go as they are.

    Raises EmulationFault for what the kernel did wrong.
    """
    options = options or Options(limit_ms=2000)
    handle, kernel, rewritten = module(ptx, replace(options, seed=1) if options.seed else options)
    if options.seed:
        address, size = variable(handle, b"megamoe_seed")
        check(driver().cuMemcpyHtoD_v2(address, ctypes.byref(ctypes.c_uint32(options.seed)), size))
    check(driver().cuFuncSetAttribute(kernel, _DYNAMIC_SHARED, shared))
    memories, holders = [], []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            memories.append(Memory(argument))
            holders.append(memories[-1].address)
        elif isinstance(argument, bytes):
            holders.append(ctypes.create_string_buffer(argument, len(argument)))
        elif isinstance(argument, Memory):
            holders.append(argument.address)
        else:
            holders.append(argument if isinstance(argument, ctypes._SimpleCData) else ctypes.c_uint32(argument))
    pointers = (ctypes.c_void_p * len(holders))(*(ctypes.cast(ctypes.byref(holder), ctypes.c_void_p) for holder in holders))
    check(driver().cuLaunchKernel(kernel, grid, 1, 1, block, 1, 1, shared, None, pointers, None))
    check(driver().cuCtxSynchronize())
    outputs = [memory.back() for memory in memories]
    address, size = variable(handle, b"megamoe_fault")
    record = np.zeros(RECORD.size, np.uint8)
    check(driver().cuMemcpyDtoH_v2(record.ctypes.data_as(ctypes.c_void_p), address, ctypes.c_size_t(record.nbytes)))
    fault = read_fault(record.tobytes(), rewritten)
    if fault:
        check(driver().cuMemsetD8_v2(address, 0, size))
        raise fault
    return outputs
