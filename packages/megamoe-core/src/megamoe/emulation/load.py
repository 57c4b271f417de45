"""Putting rewritten code under compiled CuTe DSL functions.

CuTe DSL is told to compile for Blackwell and to keep its PTX. Each function it compiles is rewritten and assembled at once, so that what
cannot be emulated raises out of ``cute.compile``. Its host code, whether called by CuTe DSL's own executor or through TVM-FFI, loads its
machine code by ``_cudaLibraryLoadData`` of the DSL's runtime library; a small library in front of that one asks Python which bytes to load.
Compiled functions unload their code when they are dropped; what its record says is read before.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megamoe.emulation.assemble import assemble, kept
from megamoe.emulation.faults import RECORD, read_fault
from megamoe.emulation.rewrite import Options, Rewritten, rewrite
from megamoe.errors import EmulationError
from megamoe.log import logger

ARCHS = {"sm100": "sm_100a", "sm103": "sm_103a", "sm120": "sm_120a"}
"""Names of emulated architectures, as backends and commands write them, and what CuTe DSL calls them."""

_SHIM = Path(__file__).parent / "device" / "shim.c"
_LOAD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_UNLOAD = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass
class Emulation:
    """One emulated architecture in this process; made by :func:`emulate`.

    Attributes:
        arch: for example ``"sm_100a"``.
        options: how kernels are rewritten.
        modules: every module rewritten so far.
    """

    arch: str
    options: Options
    modules: list[Rewritten] = field(default_factory=list)
    _code: dict[str, tuple[bytes, Rewritten]] = field(default_factory=dict)
    _loaded: list[tuple[int, Rewritten]] = field(default_factory=list)
    _keep: list[Any] = field(default_factory=list)
    _error: Exception | None = None

    def compiled(self, ptx: str, cubin: bytes) -> None:
        """Rewrite what was compiled, before anything can launch it.

        Raises:
            UnsupportedInstruction: it uses what has no replacement.
        """
        rewritten = rewrite(ptx, self.options)
        for note in rewritten.notes:
            logger().warning("emulated kernel: %s", note)
        self._code[hashlib.sha256(cubin).hexdigest()] = (assemble(rewritten), rewritten)
        self.modules.append(rewritten)

    def load(self, library: int, image: int) -> int:
        """Called for every library that the host code loads: give the real loader the rewritten code. Returns its status."""
        try:
            data = _image(image)
            code, rewritten = self._code.get(hashlib.sha256(data).hexdigest(), (None, None))
            if code is None:
                raise EmulationError(
                    "A library was loaded whose PTX this process did not see: it was compiled before the emulation began, or elsewhere.",
                    hint="compile inside `with megamoe.emulation.emulate(...)`, without a cache of compiled objects",
                )
            buffer = ctypes.create_string_buffer(code, len(code))
            self._keep.append(buffer)
            status = int(_runtime()._cudaLibraryLoadData(ctypes.c_void_p(library), buffer, None, None, 0, None, None, 0))
            if status == 0 and rewritten is not None:
                handle = ctypes.c_void_p.from_address(library).value or 0
                self._loaded.append((handle, rewritten))
                if rewritten.seed:
                    _write_global(handle, b"megamoe_seed", rewritten.seed.to_bytes(4, "little"))
        except Exception as error:  # noqa: BLE001 cannot pass through host code; check() raises it
            self._error = self._error or error
            logger().error("emulation: %s", error)
            return 1
        return status

    def unloading(self, handle: int) -> None:
        """Called before a library is unloaded: look at its record while it is there. :meth:`check` raises what it says."""
        mine = [entry for entry in self._loaded if entry[0] == handle]
        try:
            self._look(mine)
        except Exception as error:  # noqa: BLE001 cannot pass through host code and destructors
            self._error = self._error or error
        self._loaded = [entry for entry in self._loaded if entry not in mine]

    def check(self) -> None:
        """Wait for the device and raise what went wrong in emulated kernels since the last check.

        Raises:
            EmulationFault: a kernel did what the real architecture forbids, or waited past its deadline.
            EmulationError: code could not be loaded, or the device is in error.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._look(self._loaded)

    def _look(self, loaded: list[tuple[int, Rewritten]]) -> None:
        """Wait for the device and raise the fault in the first of these records that has one."""
        if not loaded:
            return
        status = _runtime()._cudaDeviceSynchronize()
        if status:
            raise EmulationError(f"The device reports CUDA error {status} after emulated kernels.", hint="start a new process")
        for handle, rewritten in loaded:
            fault = read_fault(_read_global(handle, b"megamoe_fault"), rewritten)
            if fault:
                _write_global(handle, b"megamoe_fault", bytes(RECORD.size))
                raise fault


_ACTIVE: list[Emulation] = []


def current() -> Emulation | None:
    """The emulation that is on in this process."""
    return _ACTIVE[-1] if _ACTIVE else None


@contextlib.contextmanager
def emulate(arch: str, options: Options | None = None) -> Iterator[Emulation]:
    """Emulate a Blackwell architecture for every CuTe DSL function that is compiled inside.

    CuTe DSL reads its settings once, so a process emulates one architecture. Faults of kernels raise when the block ends, or from
    :meth:`Emulation.check` earlier.

    Args:
        arch: ``"sm100"``, ``"sm103"`` or ``"sm120"``; CuTe DSL's own names are taken too.
        options: strict checks, delayed mode, deadline.

    Raises:
        EmulationError: unknown architecture, another one is on, CuTe DSL was loaded for another one, or a tool is missing.
        EmulationFault: see :meth:`Emulation.check`.
    """
    name = ARCHS.get(arch, arch)
    if name not in ARCHS.values():
        raise EmulationError(f"arch={arch!r} is not emulated; allowed: {', '.join(ARCHS)}.", hint="emulate('sm100')")
    if _ACTIVE:
        raise EmulationError(f"{_ACTIVE[-1].arch} is being emulated already.", hint="end that block first")
    _prepare(name)
    emulation = Emulation(name, options or Options())
    _ACTIVE.append(emulation)
    try:
        yield emulation
        emulation.check()
    finally:
        _ACTIVE.pop()


def _prepare(arch: str) -> None:
    """Set CuTe DSL up for this architecture, once."""
    if "cutlass" not in sys.modules:
        os.environ["CUTE_DSL_ARCH"] = arch
        os.environ["CUTE_DSL_DUMP_DIR"] = _folder().name
        os.environ["CUTE_DSL_KEEP"] = "ptx,cubin"
        os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
        os.environ["CUTE_DSL_LIBS"] = f"{_shim()}{os.pathsep}{_runtime_path()}"
    from cutlass.cutlass_dsl import CuTeDSL

    settings = CuTeDSL._get_dsl().envar
    if settings.arch != arch or str(_shim()) not in str(os.environ.get("CUTE_DSL_LIBS")):
        raise EmulationError(
            f"CuTe DSL was loaded for {settings.arch} before the emulation of {arch} began; it reads its settings once.",
            hint="begin the emulation before cutlass is imported, in a process of its own",
        )
    _hook()


def _hook() -> None:
    from cutlass.base_dsl.dsl import BaseDSL
    from cutlass.base_dsl.jit_executor import register_library_unload_callback
    from cutlass.cutlass_dsl import cuda_jit_executor
    from cutlass.utils.hardware_info import HardwareInfo

    dsl: Any = BaseDSL
    hardware: Any = HardwareInfo
    hardware.get_max_active_clusters = lambda self, cluster_size, *args, **kwargs: _most_clusters(cluster_size)
    compiled_function: Any = cuda_jit_executor.CudaDialectJitCompiledFunction
    if getattr(compiled_function, "_megamoe_emulation", False):
        return
    original: Callable[..., None] = compiled_function.__init__

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        emulation = current()
        if emulation is not None and self.has_gpu_module:
            emulation.compiled(*_artifacts(self))

    compiled_function.__init__ = construct
    compiled_function._megamoe_emulation = True
    libraries = [str(_shim()), str(_runtime_path())]
    dsl.get_shared_libs = lambda self: list(libraries)
    shim = ctypes.CDLL(libraries[0], mode=ctypes.RTLD_GLOBAL)

    def load(library: int, image: int) -> int:
        emulation = current()
        if emulation is None:
            return int(_runtime()._cudaLibraryLoadData(ctypes.c_void_p(library), ctypes.c_void_p(image), None, None, 0, None, None, 0))
        return emulation.load(library, image)

    def unloading(handle: int) -> None:
        emulation = current()
        if emulation is not None:
            emulation.unloading(handle)

    def unload(library: int) -> None:
        unloading(ctypes.c_void_p.from_address(library).value or 0)
        _runtime().cuda_dialect_unload_library_once(ctypes.c_void_p(library))

    register_library_unload_callback(unloading)
    hooks = _LOAD(load), _UNLOAD(unload)
    shim.megamoe_set_hooks(*hooks)
    compiled_function._megamoe_hooks = hooks  # as long as the shim has their addresses
    atexit.register(shim.megamoe_set_hooks, None, None)


def _most_clusters(cluster_size: int) -> int:
    """How many clusters fit on the device, one CTA on each SM: the DSL asks the driver with a kernel for the emulated architecture."""
    device, count = ctypes.c_int(), ctypes.c_int()
    status = _runtime()._cudaGetDevice(ctypes.byref(device))
    status = status or _runtime()._cudaDeviceGetAttribute(ctypes.byref(count), ctypes.c_int(_MULTIPROCESSORS), device)
    if status:
        raise EmulationError(f"The device does not say how many multiprocessors it has (CUDA error {status}).", hint="megamoe doctor")
    return max(1, count.value // cluster_size)


_MULTIPROCESSORS = 16  # cudaDevAttrMultiProcessorCount


def _artifacts(function: Any) -> tuple[str, bytes]:
    ptx, cubin = function.__ptx__, function.__cubin__
    if isinstance(ptx, str) and len(ptx) < 4096 and Path(ptx.strip()).exists():
        ptx = Path(ptx.strip()).read_text()
    if isinstance(cubin, str) and Path(cubin.strip()).exists():
        cubin = Path(cubin.strip()).read_bytes()
    if not isinstance(ptx, str) or ".target" not in ptx or not isinstance(cubin, bytes):
        raise EmulationError("CuTe DSL kept no PTX and machine code of a function.", hint="begin the emulation before cutlass is imported")
    return ptx, cubin


_TO_DEVICE, _TO_HOST = 1, 2


def _global(handle: int, name: bytes) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    address, size = ctypes.c_void_p(), ctypes.c_size_t()
    status = _runtime()._cudaLibraryGetGlobal(ctypes.byref(address), ctypes.byref(size), ctypes.c_void_p(handle), name)
    if status:
        raise EmulationError(f"{name.decode()} of an emulated module cannot be found (CUDA error {status}).", hint="start a new process")
    return address, size


def _read_global(handle: int, name: bytes) -> bytes:
    address, size = _global(handle, name)
    buffer = ctypes.create_string_buffer(size.value)
    if _runtime()._cudaMemcpy(buffer, address, size, ctypes.c_int(_TO_HOST)):
        raise EmulationError(f"{name.decode()} of an emulated module cannot be read.", hint="start a new process")
    return buffer.raw


def _write_global(handle: int, name: bytes, data: bytes) -> None:
    address, _ = _global(handle, name)
    if _runtime()._cudaMemcpy(address, data, ctypes.c_size_t(len(data)), ctypes.c_int(_TO_DEVICE)):
        raise EmulationError(f"{name.decode()} of an emulated module cannot be written.", hint="start a new process")


_FATBIN = 0xBA55ED50
_FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of what follows
_FATBIN_ENTRY = struct.Struct("<HHIQ")  # kind, version, size of this header, size of its image


def _image(address: int) -> bytes:
    """The machine code at an address: an ELF image, or the one inside a fat binary."""
    if struct.unpack("<I", ctypes.string_at(address, 4))[0] == _FATBIN:
        entry = address + int(_FATBIN_HEADER.unpack(ctypes.string_at(address, _FATBIN_HEADER.size))[2])
        _, _, header, size = _FATBIN_ENTRY.unpack(ctypes.string_at(entry, _FATBIN_ENTRY.size))
        return ctypes.string_at(entry + header, size)
    elf = ctypes.string_at(address, 64)
    if elf[:4] != b"\x7fELF":
        raise EmulationError("The host code loads something that is neither an ELF image nor a fat binary.")
    section_at, program_at = (int.from_bytes(elf[at : at + 8], "little") for at in (40, 32))
    program_size, programs, section_size, sections = (int.from_bytes(elf[at : at + 2], "little") for at in (54, 56, 58, 60))
    return ctypes.string_at(address, max(section_at + section_size * sections, program_at + program_size * programs))


_RUNTIME: list[ctypes.CDLL] = []


def _runtime() -> ctypes.CDLL:
    if not _RUNTIME:
        _RUNTIME.append(ctypes.CDLL(str(_runtime_path())))
    return _RUNTIME[0]


def _runtime_path() -> Path:
    for entry in sys.path:
        for pattern in ("nvidia_cutlass_dsl/cu1[23]/lib/libcute_dsl_runtime.so", "../cu1[23]/lib/libcute_dsl_runtime.so"):
            found = sorted(Path(entry or ".").glob(pattern))
            if found:
                return found[-1].resolve()
    raise EmulationError("libcute_dsl_runtime.so of CuTe DSL was not found.", hint="pip install nvidia-cutlass-dsl")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Files of this process: what CuTe DSL dumps, and the library in front of its runtime."""
    return tempfile.TemporaryDirectory(prefix="megamoe-emulation-")


@functools.cache
def _shim() -> Path:
    """The library in front of the DSL's runtime, built at first use by the host compiler that nvcc needs anyway."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise EmulationError("No C compiler (cc, gcc, clang) on PATH; the emulation and nvcc need one.", hint="install gcc")

    def built(folder: Path) -> bytes:
        to = folder / "shim.so"
        run = subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", str(_SHIM), "-o", str(to)],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise EmulationError(f"{compiler} could not build {_SHIM.name}: {run.stderr.strip()[-1000:]}", hint="install gcc")
        return to.read_bytes()

    path = Path(_folder().name) / "shim.so"
    path.write_bytes(kept(hashlib.sha256(_SHIM.read_bytes()).hexdigest(), {"name": "emulation shim", "compiler": compiler}, built))
    return path
