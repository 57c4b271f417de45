"""From compiled host functions to launches, and running them.

CuTe DSL compiles a kernel for sm_90a and keeps its PTX. Its host code is called as ever, but a small library in front of the DSL's runtime
library takes the launches, with all parameters: tensor maps are encoded by the DSL's own host code. Nothing of this needs a GPU.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megamoe.emulation import load

from .operands import Functions
from .translate import Translated, translate

HOST = Path(__file__).parent / "host"
_SOURCES = ("fibers", "memory", "order", "warp", "barriers", "copies", "wgmma")
_CLUSTER_DIMENSION = 4  # cudaLaunchAttributeID
_ATTRIBUTE_BYTES = 72
_FOLDER = Path(tempfile.gettempdir()) / f"megamoe-machine-{os.getuid()}"


class MachineFault(Exception):
    """A kernel did what the device forbids, read or wrote outside its buffers, or can never end."""


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("params", ctypes.c_char_p),
        ("params_size", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("smids", ctypes.c_uint32),
        ("stop_after", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("gpu", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class Launch:
    """One launch, ready to run.

    Attributes:
        kernel: address of the translated function.
        params: its parameter block.
        grid, block, cluster: as launched.
        shared_bytes: static and dynamic shared memory of a CTA.
        start: nanoseconds of virtual time after which it starts.
        stop_after: steps of its threads after which it stops for ever, as a killed process does; 0: never.
        sms: of the device, each for one CTA at a time; 0: as many as CTAs.
        gpu: number of the GPU that it runs on; ``None``: its place among the launches of the run. Matters for :class:`Order`.
    """

    kernel: int
    params: bytes
    grid: tuple[int, int, int]
    block: int
    cluster: tuple[int, int, int]
    shared_bytes: int
    start: int = 0
    stop_after: int = 0
    sms: int = 0
    gpu: int | None = None

    def late(self, nanoseconds: int) -> Launch:
        """The same launch, but it starts later."""
        return replace(self, start=nanoseconds)

    def killed(self, steps: int) -> Launch:
        """The same launch, but it stops midway."""
        return replace(self, stop_after=steps)


@dataclass(frozen=True)
class Ran:
    """What a run took.

    Attributes:
        switches: between threads.
        nanoseconds: of virtual time.
        unseen: words that bulk and tensor loads read with no fence.proxy.async since they were written; they got poison.
        text: the first of them.
    """

    switches: int
    nanoseconds: int
    unseen: int
    text: str


class Order:
    """What has happened before what, over all runs that get it: runs check that no two accesses are a data race.

    The launches of a GPU happen one after the other. Between GPUs there is no order but what the kernels make.

    Args:
        kept: memory that the launches of several runs share, by name: torch tensors or (address, bytes). All else is new in every run.
        loose: where words may be read while they are written, because nobody uses what is read: it arrives as poison.
    """

    def __init__(self, kept: Mapping[str, Any] | None = None, loose: Iterable[Any] = ()) -> None:
        self._names = {name: _interval(each) for name, each in (kept or {}).items() if each is not None}
        new, free = runtime().order_new, runtime().order_free
        new.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self.handle = new(*_table(list(self._names.values())), *_table([_interval(each) for each in loose]))
        weakref.finalize(self, free, self.handle)

    def named(self, text: str) -> str:
        """The text with names for addresses."""

        def name(match: re.Match[str]) -> str:
            at = int(match[1], 16)
            return next((f"{name} + {at - first}" for name, (first, size) in self._names.items() if first <= at < first + size), match[1])

        return re.sub(r"@(0x[0-9a-f]+)", name, text)


def run(launches: Iterable[Launch], buffers: Iterable[Any], *, seed: int = 0, most_idle: int = 200_000, order: Order | None = None) -> Ran:
    """Run launches together until all have ended.

    Args:
        launches: each is a GPU of its own, unless they share memory.
        buffers: all that they may touch: torch tensors in host memory, or (address, bytes).
        seed: of the order of threads and of the times of asynchronous copies and products.
        most_idle: rounds in which all threads poll in vain before that is a fault; a round is a millisecond of virtual time.
        order: check it, see there.

    Raises:
        MachineFault: see there; data races, too.
    """
    launches = tuple(launches)
    given = (_Arguments * len(launches))()
    for number, (at, launch) in enumerate(zip(given, launches, strict=True)):
        at.gpu = number if launch.gpu is None else launch.gpu
        at.kernel, at.params, at.params_size = launch.kernel, launch.params, len(launch.params)
        at.grid[:], at.block, at.cluster[:] = launch.grid, launch.block, launch.cluster
        at.shared_bytes, at.smids = launch.shared_bytes, launch.sms or launch.grid[0] * launch.grid[1] * launch.grid[2]
        at.stop_after, at.start = launch.stop_after, launch.start
    intervals = _intervals(buffers)
    table, count = _table(intervals)
    statistics, text = (ctypes.c_uint64 * 3)(), ctypes.create_string_buffer(1 << 16)
    limits = (ctypes.c_uint64(seed), ctypes.c_uint64(most_idle))
    limits = (*limits, ctypes.c_void_p(order.handle if order else None))
    failed = runtime().machine_run(given, len(given), table, count, *limits, statistics, text, ctypes.c_uint64(len(text)))
    if failed:
        raise MachineFault(order.named(text.value.decode()) if order else text.value.decode())
    return Ran(*statistics, text.value.decode())


def _interval(buffer: Any) -> tuple[int, int]:
    return buffer if isinstance(buffer, tuple) else (buffer.data_ptr(), buffer.numel() * buffer.element_size())


def _table(spans: Sequence[tuple[int, int]]) -> tuple[ctypes.Array[ctypes.c_uint64], int]:
    return (ctypes.c_uint64 * (2 * len(spans)))(*(word for span in spans for word in span)), len(spans)


def _intervals(buffers: Iterable[Any]) -> list[tuple[int, int]]:
    """Merged where they overlap: views of one tensor."""
    spans = sorted(_interval(b) for b in buffers if b is not None)
    merged: list[tuple[int, int]] = []
    for address, size in spans:
        if not size:
            continue
        if merged and address < sum(merged[-1]):
            merged[-1] = (merged[-1][0], max(sum(merged[-1]), address + size) - merged[-1][0])
        else:
            merged.append((address, size))
    return merged


class Program:
    """A kernel of a PTX module, translated and built.

    Args:
        ptx: the module.
        functions: what the kernel may call; a library that has them must be loaded.
        threads: of a CTA of the kernel; 0: the module has no other.
    """

    def __init__(self, ptx: str, functions: Functions | None = None, threads: int = 0) -> None:
        self.ptx = ptx
        self.translated = translate(ptx, functions, threads)
        self._library = _build_kernel(self.translated)
        self.address = ctypes.cast(self._library.kernel, ctypes.c_void_p).value or 0

    def launch(self, params: bytes, grid: tuple[int, int, int], block: int, cluster: tuple[int, int, int], dynamic_shared: int) -> Launch:
        """A launch with a parameter block as ``Translated.params`` lays it out."""
        assert len(params) == self.translated.params_bytes, (len(params), self.translated.params)
        return Launch(self.address, params, grid, block, cluster, self.translated.static_bytes + dynamic_shared)

    def captured(self, configured: int, arguments: int) -> Launch:
        """The launch of a ``cudaLaunchConfig_t`` and pointers to the parameters."""
        pointers = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        params = bytearray(self.translated.params_bytes)
        for index, (offset, size) in enumerate(self.translated.params):
            params[offset : offset + size] = ctypes.string_at(pointers[index], size)
        grid, block, cluster, shared = configuration(configured)
        assert block[1:] == (1, 1), block
        return self.launch(bytes(params), grid, block[0], cluster, shared)


class Kernel:
    """A kernel of CuTe DSL for this machine.

    Args:
        build: gives the jit object and example arguments, as a ``KernelRequest`` does.
    """

    def __init__(self, build: Callable[[], tuple[Any, tuple[Any, ...]]]) -> None:
        self._function, ptx, self._examples = _compile(build)
        self.program = Program(ptx)

    @property
    def ptx(self) -> str:
        return self.program.ptx

    def changed(self, change: Callable[[str], str]) -> Kernel:
        """The same kernel with a change of its PTX: how tests plant faults."""
        text = change(self.ptx)
        assert text != self.ptx, "the change found nothing to change"
        other = copy.copy(self)
        other.program = Program(text)
        return other

    def launch(self, *arguments: Any) -> Launch:
        """The one launch that the host function makes with these arguments: integers, floats, the stream last."""
        typed = [a if isinstance(a, type(e)) else type(e)(a) for a, e in zip(arguments, self._examples, strict=True)]
        return _capture(lambda: self._function(*typed), self.program)


def _compile(build: Callable[[], tuple[Any, tuple[Any, ...]]]) -> tuple[Any, str, tuple[Any, ...]]:
    """The host function, which launches into :func:`_capture`, its kernel's PTX, and the example arguments."""
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir, KeepPTX
    from cutlass.base_dsl.dsl import BaseDSL
    from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

    jit, examples = build()
    libraries = [str(capture_library()._name), str(load._runtime_path())]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseDSL, "get_shared_libs", lambda self: list(libraries))
        # Otherwise it keeps no host code where there is no GPU.
        patch.setattr(CutlassBaseDSL, "_runtime_can_run_compiled", lambda *args, **kwargs: True)
        function = cute.compile[cute.GPUArch("sm_90a"), KeepPTX(), DumpDir(folder)](jit, *examples)
        function._load_cuda_library = list  # there is no GPU to load it to
        ptx = function.__ptx__
        if ".target" not in ptx:
            ptx = Path(ptx.strip("\0 \n")).read_text()
    return function, ptx.rstrip("\0"), examples


CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def configuration(address: int) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int], int]:
    """Grid, block, cluster and dynamic shared bytes of a ``cudaLaunchConfig_t``."""

    def words(at: int) -> tuple[int, int, int]:
        return tuple((ctypes.c_uint32 * 3).from_address(at))  # type: ignore[return-value]

    cluster = (1, 1, 1)
    attributes = ctypes.c_uint64.from_address(address + 40).value
    for index in range(ctypes.c_uint32.from_address(address + 48).value):
        at = attributes + _ATTRIBUTE_BYTES * index
        if ctypes.c_uint32.from_address(at).value == _CLUSTER_DIMENSION:
            cluster = words(at + 8)
    return words(address), words(address + 12), cluster, ctypes.c_uint64.from_address(address + 24).value


def _capture(call: Callable[[], Any], program: Program) -> Launch:
    launches: list[Launch] = []

    def launched(configured: int, _: int, arguments: int) -> int:
        launches.append(program.captured(configured, arguments))
        return 0

    callback = CALLBACK(launched)
    capture_library().capture_launches(callback)
    call()
    (launch,) = launches
    return launch


# ---- what the host compiler builds ----


def compiler() -> str | None:
    """The C++ compiler, or None: then there is no machine."""
    return shutil.which("g++") or shutil.which("clang++")


def kept(name: str, content: Sequence[bytes], sources: Sequence[Path], *flags: str) -> ctypes.CDLL:
    """A library that stays in a folder of this user, by the digest of its sources."""
    digest = hashlib.sha256(repr((flags, compiler())).encode() + b"".join(content)).hexdigest()[:24]
    _FOLDER.mkdir(mode=0o700, exist_ok=True)
    path = _FOLDER / f"{name}-{digest}.so"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.part")
        _build(part, sources, *flags)
        os.replace(part, path)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _build(path: Path, sources: Sequence[Path], *flags: str) -> None:
    always = ("-w", "-ffp-contract=off", "-shared", "-fPIC", f"-I{HOST}")
    command = [compiler() or "g++", *always, *flags, *map(str, sources), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@functools.cache
def runtime() -> ctypes.CDLL:
    """The machine itself, which kernels and what they call find in this process."""
    sources = [HOST / f"{name}.cpp" for name in _SOURCES]
    content = [path.read_bytes() for path in (*sources, *sorted(HOST.glob("*.h")))]
    return kept("machine", content, sources, "-std=c++17", "-O3")


@functools.cache
def _kernels() -> tuple[tempfile.TemporaryDirectory[str], Iterator[int]]:
    """Files stay as long as the process: one that had the inode of a loaded library would be taken for that library."""
    return tempfile.TemporaryDirectory(prefix="megamoe-machine-"), itertools.count()


def _build_kernel(translated: Translated) -> ctypes.CDLL:
    runtime()  # it has what the kernel calls
    folder, numbers = _kernels()
    library = Path(folder.name) / f"kernel{next(numbers)}.so"
    source = library.with_suffix(".cpp")
    source.write_text(translated.source)
    _build(library, [source], "-std=c++17", "-O0")  # runs are short: -O1 takes longer to compile than it saves
    return ctypes.CDLL(str(library))


@functools.cache
def capture_library() -> ctypes.CDLL:
    """Stands in front of CuTe DSL's runtime library and gives launches to the function that ``capture_launches`` was told."""
    source = HOST / "capture.c"
    return kept("capture", [source.read_bytes()], [source], "-x", "c")
