"""Rewritten kernels without a GPU: ``tests/machine`` runs them on the CPU, with the emulation's own device functions as what they call.

Threads take turns in an order that a seed draws, and memory is sequentially consistent: this shows what a rewritten kernel computes, and
that its accesses lie in its buffers and its waits are there. With :data:`RACES` the machine also checks what happens before what, in the
kernel and in the emulation's functions: a missing fence, or a barrier of the warp where memory must be ordered, is a data race.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.machine import launch as machine
from tests.machine.operands import Functions

from megamoe.emulation import Options, rewrite
from megamoe.emulation.assemble import DEVICE_SOURCES
from megamoe.emulation.faults import RECORD, read_fault

HOST = Path(__file__).parent / "host"
SMS = 160
"""That the emulation keeps tensor memory for."""
RACES = False
"""Whether data races are faults. A process decides before its first launch: the functions are another library then."""
CHANGES: list[tuple[str, str, str]] = []
"""Faults to plant in that library: file of the device functions, text, what takes its place."""
_PARTS = ("tmem_cells", "tmem_scratch", "tmem_taken", "tmem_owner", "ctas", "queued", "megamoe_fault")
_OWN_PARTS = 2
_ALIGNMENT = 256


@functools.cache
def functions():
    """The device functions, built; None where there is no C++ compiler with half precision."""
    if machine.compiler() is None:
        return None
    machine.runtime()  # it has what they call
    content = [path.read_bytes() for path in (*sorted(HOST.iterdir()), *_device_sources(), *sorted(machine.HOST.glob("*.h")))]
    flags = ("-std=c++17", "-fno-strict-aliasing", "-ffp-contract=off", "-Wl,-Bsymbolic", f"-I{_device_sources()[0].parent}", f"-I{HOST}")
    try:
        # Without libraries, because the one of -fsanitize=thread would take the calls that are ours.
        told = ("-O1", "-fsanitize=thread", "--param", "tsan-distinguish-volatile=1", "-nostdlib") if RACES else ("-O2",)
        return machine.kept("emulation", content, [HOST / "functions.cpp"], *flags, *told)
    except AssertionError as error:
        if "_Float16" in str(error):
            return None
        raise


@functools.cache
def _device_sources():
    """The files, with the faults that are to be planted."""
    files = sorted(DEVICE_SOURCES.iterdir())
    if not CHANGES:
        return files
    folder = Path(tempfile.mkdtemp(prefix="megamoe-planted-"))
    atexit.register(shutil.rmtree, folder)
    for path in files:
        text = path.read_text()
        for name, old, new in CHANGES:
            assert name != path.name or text.count(old) == 1, (name, old, text.count(old))
            text = text.replace(old, new) if name == path.name else text
        (folder / path.name).write_text(text)
    return sorted(folder.iterdir())


@functools.cache
def declared():
    """What rewritten kernels may call. Their waits call a function that gives up after a while, so waits must come back."""
    text = "".join(path.read_text() for path in DEVICE_SOURCES.glob("*.cuh"))
    signatures = {}
    for result, name, listed in re.findall(r"EMU_CALL (\w+) (megamoe_\w+)\(([^)]*)\)", text):
        signatures[name] = result, tuple(argument.split()[0] for argument in listed.split(",") if argument.strip())
    return Functions(signatures, "struct Four { float v[4]; };", polls=True)


@functools.cache
def program(ptx, threads):
    """The kernel of a rewritten module whose CTAs have so many threads, translated and built."""
    functions()
    return machine.Program(ptx, declared(), threads)


def launch(rewritten, given, buffers, order=0):
    """One launch of a program of this module; `order` is the seed of the order of threads.

    Raises:
        EmulationFault: the kernel did what its architecture forbids.
        MachineFault: it did what no device allows, or never ends.
    """
    functions().emulation_start(ctypes.c_uint32(rewritten.seed))
    memory = (ctypes.c_uint64 * (2 * len(_PARTS)))()
    functions().emulation_memory(memory)
    parts = dict(zip(_PARTS, zip(memory[::2], memory[1::2], strict=True), strict=True))
    known = list(parts.values()) if RACES else list(parts.values())[:_OWN_PARTS]
    try:
        return machine.run([replace(given, sms=SMS)], [*buffers, *known], seed=order, order=machine.Order(parts) if RACES else None)
    finally:
        record = ctypes.create_string_buffer(RECORD.size)
        functions().emulation_end(record)
        fault = read_fault(record.raw, rewritten)
        if fault:
            raise fault


def aligned(array):
    """A copy that lies in memory as device memory does."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    copy = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Captured:
    """Takes the launches of CuTe DSL's host functions and runs them here, module by module.

    Attributes:
        count: launches that ran.
        error: of the first launch that failed; the host function then raises one of its own.
    """

    def __init__(self, module_of, buffers):
        """`module_of`: gives the rewritten module that is being launched; `buffers`: gives the memory that its kernels may touch."""
        self.module_of, self.buffers, self.count, self.error = module_of, buffers, 0, None

    def hook(self):
        """Before anything is compiled: there is nothing to load, and launches come here."""
        from cutlass.base_dsl.dsl import BaseDSL
        from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction as Function

        from megamoe.emulation import load

        library = machine.capture_library()
        self.callback = machine.CALLBACK(self._launched)
        library.capture_launches(self.callback)
        Function._load_cuda_library = lambda function: []
        BaseDSL.get_shared_libs = lambda dsl: [str(library._name), str(load._runtime_path())]

    def _launched(self, configured, _, arguments):
        rewritten = self.module_of()
        try:
            _, block, _, _ = machine.configuration(configured)
            launch(rewritten, program(rewritten.text, block[0]).captured(configured, arguments), self.buffers())
        except Exception as error:  # noqa: BLE001 cannot pass through the host code
            self.error = self.error or error
            return 1
        self.count += 1
        return 0


def run(ptx, *arguments, grid=1, block=128, shared=0, options=None, buffers=()):
    """Like ``launch.run``, without a GPU. `buffers`: memory that kernels may touch besides the arrays."""
    rewritten = rewrite(ptx, options or Options(limit_ms=2000))
    built = program(rewritten.text, block)
    outputs, params = [], bytearray(built.translated.params_bytes)
    for (offset, size), argument in zip(built.translated.params, arguments, strict=True):
        if isinstance(argument, np.ndarray):
            outputs.append(aligned(argument))
            value = outputs[-1].ctypes.data
        else:
            value = argument.value if isinstance(argument, ctypes._SimpleCData) else argument
        data = value if isinstance(value, bytes) else int(value).to_bytes(size, "little", signed=value < 0)
        assert len(data) == size, (len(data), size)
        params[offset : offset + size] = data
    cluster = (int(found[1]), 1, 1) if (found := re.search(r"\.reqnctapercluster (\d+)", ptx)) else (1, 1, 1)
    given = built.launch(bytes(params), (grid, 1, 1), block, cluster, shared)
    launch(rewritten, given, [*buffers, *((output.ctypes.data, output.nbytes) for output in outputs)], order=rewritten.seed)
    return outputs
