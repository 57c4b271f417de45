"""Building: the device functions once, rewritten modules into machine code for sm_90a; both kept on disk.

``nvcc``, ``ptxas`` and ``nvlink`` are taken from ``PATH``, else from the ``nvidia-cuda-nvcc`` wheel. Nothing built is shipped.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from megamoe import env
from megamoe.compile.store import Store
from megamoe.emulation.rewrite import Rewritten
from megamoe.errors import EmulationError, UnsupportedInstruction
from megamoe.log import logger

DEVICE_SOURCES = Path(__file__).parent / "device"
_WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu13", "nvidia-cuda-nvcc-cu12")
_FIX = (
    "install a CUDA toolkit of version 12.8 or newer and put its bin folder on PATH, or "
    "`pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl`"
)


@functools.cache
def tool(name: str) -> Path:
    """Where ``nvcc``, ``ptxas`` or ``nvlink`` is.

    Raises:
        EmulationError: neither on ``PATH`` or beside the ``nvcc`` there, nor in a wheel.
    """
    compiler = shutil.which("nvcc")
    found = shutil.which(name) or (shutil.which(name, path=str(Path(compiler).resolve().parent)) if compiler else None)
    if found:
        return Path(found)
    for wheel in _WHEELS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.files(wheel) or ():
                path = Path(str(file.locate()))
                if path.name == name and path.parent.name == "bin" and path.exists():
                    if not os.access(path, os.X_OK):
                        path.chmod(path.stat().st_mode | 0o111)  # some installers drop the bit
                    return path
    raise EmulationError(f"{name} was found neither on PATH nor in the wheels {', '.join(_WHEELS)}.", hint=_FIX)


@functools.cache
def version(name: str) -> str:
    """First line that names the release of a tool."""
    text = _run([str(tool(name)), "--version"]).stdout
    return next((line.strip() for line in text.splitlines() if "release" in line), text.strip())


# ---- the device functions ----

_CTA_REGISTERS = 65536
_REGISTERS, _FEWEST = 128, 64
"""Of a thread of a device function: so that hardly one spills, and for kernels with so many threads that each has fewer."""
_NVCC = ("-arch=sm_90a", "-rdc=true", "-O3", "-Werror", "all-warnings", "-ptx")


@functools.cache
def _device_digest() -> str:
    """Of all that the device functions are built from."""
    digest = hashlib.sha256(repr((version("nvcc"), version("ptxas"), _NVCC)).encode())
    for source in sorted(DEVICE_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


@functools.cache
def _device_ptx() -> str:
    def built(folder: Path) -> bytes:
        to = folder / "emulation.ptx"
        _succeed([str(tool("nvcc")), *_NVCC, str(DEVICE_SOURCES / "emulation.cu"), "-o", str(to)])
        return to.read_bytes()

    return kept(_device_digest(), {"name": "emulation device functions", "nvcc": version("nvcc")}, built).decode()


def _device_object(registers: int) -> bytes:
    """The device functions, assembled: what is linked to kernels whose threads have so many registers."""

    def built(folder: Path) -> bytes:
        source, to = folder / "emulation.ptx", folder / "emulation.o"
        source.write_text(_device_ptx())
        _succeed([str(tool("ptxas")), "-c", "-arch=sm_90a", f"-maxrregcount={registers}", str(source), "-o", str(to)])
        return to.read_bytes()

    digest = hashlib.sha256(f"{_device_digest()} {registers}".encode()).hexdigest()
    return kept(digest, {"name": f"emulation device functions, {registers} registers", "ptxas": version("ptxas")}, built)


# ---- modules ----

_CALL = re.compile(r"\bcall(?:\.uni)?\s+(?:\([^)]*\)\s*,\s*)?([\w$]+)")
_PROTOTYPE = re.compile(r"^\.visible (\.func\s+(?:\([^)]*\)\s*)?(\w+)\s*\([^)]*\))", re.MULTILINE)
_DIRECTIVES = re.compile(r"^\.(?:version|target|address_size)\b.*\n", re.MULTILINE)
_KERNEL = re.compile(r"\.entry\b(.*?)^\{", re.MULTILINE | re.DOTALL)
_THREADS = re.compile(r"\.(?:req|max)ntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_STATIC_SHARED = re.compile(r"(?<!\.extern )\.shared\s+\.(?:align|[bsuf]\d)")


def assemble(rewritten: Rewritten) -> bytes:
    """Machine code for sm_90a of a rewritten module; from the disk when the same was assembled before.

    Raises:
        UnsupportedInstruction: ``ptxas`` refuses a line that the rewriter kept.
        EmulationError: a tool is missing or fails.
    """
    digest = hashlib.sha256(f"{_device_digest()} {version('nvlink')}\0{rewritten.text}".encode()).hexdigest()
    key = {"name": "emulated module", "target": rewritten.target, "ptxas": version("ptxas")}
    return kept(digest, key, lambda folder: build(rewritten, folder)[0])


def build(rewritten: Rewritten, folder: Path) -> tuple[bytes, str]:
    """Machine code of a rewritten module, made in an empty folder, and what the tools tell of its registers and stacks.

    Its device functions are assembled apart from it, once for all modules. The linker forgets how dynamic shared memory is aligned, which
    matters behind static shared memory; modules that have some are assembled together with the functions, which takes seconds.

    Raises:
        UnsupportedInstruction, EmulationError: see :func:`assemble`.
    """
    library, together = _device_ptx(), bool(_STATIC_SHARED.search(rewritten.text))
    called = set(_CALL.findall(rewritten.text))
    prototypes = "".join(f".extern {match[1]};\n" for match in _PROTOTYPE.finditer(library) if match[2] in called)
    version_line = re.compile(r"^\.version\s+\S+", re.MULTILINE)
    text = version_line.sub(version_line.search(library)[0], rewritten.text, count=1)  # type: ignore[index]
    functions = _DIRECTIVES.sub("", library) if together else prototypes
    text = re.sub(r"^\.address_size 64", lambda _: f".address_size 64\n{functions}", text, count=1, flags=re.MULTILINE)
    source, kernel, rest, to = (folder / name for name in ("module.ptx", "module.o", "emulation.o", "module.cubin"))
    source.write_text(text)
    command = [str(tool("ptxas")), "-v", "-arch=sm_90a", str(source), "-o", str(to if together else kernel)]
    run = _run(command if together else [*command, "-c"])
    refused = re.search(r"line (\d+); error\s*:\s*(.*)", run.stderr)
    if refused:
        # The device functions stand between the directives and the kernel: count from the end.
        line = len(rewritten.lines) - 1 - (text.count("\n") - (int(refused[1]) - 1))
        original = rewritten.lines[line] if 0 <= line < len(rewritten.lines) else 0
        raise UnsupportedInstruction(rewritten.instruction(original), original, f"ptxas for sm_90a says: {refused[2].strip()}")
    told = _succeeded(run)
    if not together:
        rest.write_bytes(_device_object(_registers(rewritten.text)))
        told += _succeed([str(tool("nvlink")), "-v", "-arch=sm_90a", str(kernel), str(rest), "-o", str(to)])
    return to.read_bytes(), told


def _registers(text: str) -> int:
    """How many registers a device function may have in all kernels of a module."""
    for header in _KERNEL.findall(text):
        threads, ctas = _THREADS.search(header), re.search(r"\.minnctapersm\s+(\d+)", header)
        count = math.prod(int(n) for n in threads.groups() if n) if threads else _CTA_REGISTERS
        if count * int(ctas[1] if ctas else 1) * _REGISTERS > _CTA_REGISTERS:
            return _FEWEST
    return _REGISTERS


# ---- files and tools ----


def kept(digest: str, key: Mapping[str, object], built: Callable[[Path], bytes]) -> bytes:
    """Bytes from the emulation's cache, or built in an empty folder and kept. A cache that cannot be written costs time, nothing else."""
    store = Store(env.cache_dir() / "emulation")
    with contextlib.ExitStack() as held:
        found = store.read(digest)
        if found is None:
            try:
                held.enter_context(store.lock(digest))
                found = store.read(digest)
            except OSError as error:
                logger().warning("the emulation's cache cannot be written: %s", error)
        if found is not None:
            return found[1]
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            data = built(Path(folder))
        with contextlib.suppress(OSError):
            store.save(digest, key, data, time.perf_counter() - start)
        return data


def _succeed(command: list[str]) -> str:
    return _succeeded(_run(command))


def _succeeded(run: subprocess.CompletedProcess[str]) -> str:
    """What a tool says when it was successful."""
    told = f"{run.stdout}{run.stderr}"
    if run.returncode:
        raise EmulationError(f"{Path(run.args[0]).name} failed: {told.strip()[-2000:]}", hint=_FIX)
    return told


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmulationError(f"{command[0]} cannot be run: {error}", hint=_FIX) from error
