"""Building: the device functions once, rewritten modules into machine code for sm_90a; both kept on disk.

``nvcc`` and ``ptxas`` are taken from ``PATH``, else from the ``nvidia-cuda-nvcc`` wheel. Nothing built is shipped.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megamoe import env
from megamoe.compile.store import Store
from megamoe.emulation.ptx import Kind, parse
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
    """Where ``nvcc`` or ``ptxas`` is.

    Raises:
        EmulationError: neither on ``PATH`` nor in a wheel.
    """
    found = shutil.which(name)
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


@dataclass(frozen=True)
class _Library:
    """The device functions' PTX, taken apart: what every module needs, and each function with the functions that it calls."""

    version: str
    common: str
    functions: dict[str, str]
    calls: dict[str, frozenset[str]]

    def text(self, wanted: set[str]) -> str:
        """The part of the library that these functions need, in its order."""
        needed, work = set(), [name for name in wanted if name in self.functions]
        while work:
            name = work.pop()
            if name not in needed:
                needed.add(name)
                work += self.calls[name]
        return self.common + "".join(text for name, text in self.functions.items() if name in needed)


@functools.cache
def _library() -> _Library:
    module = parse(_device_ptx())
    functions: dict[str, str] = {}
    calls: dict[str, frozenset[str]] = {}
    inside: set[int] = set()
    for function in module.functions():
        members = range(function.header, function.end + 1)
        inside.update(members)
        functions[function.name] = "".join(module.statements[i].lead + module.statements[i].text for i in members)
    for name, text in functions.items():
        functions[name] = text.replace(".visible .func", ".func", 1)
        calls[name] = frozenset(_CALL.findall(text)) & functions.keys()
    common = "".join(
        s.lead + s.text.replace(".visible .func", ".func")
        for i, s in enumerate(module.statements)
        if i not in inside and s.kind is not Kind.LINE
    )
    return _Library(module.directive("version"), common, functions, calls)


_CALL = re.compile(r"\bcall(?:\.uni)?\s+(?:\([^)]*\)\s*,\s*)?([\w$]+)")


@functools.cache
def _device_ptx() -> str:
    sources = sorted(DEVICE_SOURCES.iterdir())
    digest = hashlib.sha256(version("nvcc").encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return _cached(digest.hexdigest(), {"name": "emulation device functions", "nvcc": version("nvcc")}, _build_device_functions).decode()


def _build_device_functions() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "emulation.ptx"
        command = [str(tool("nvcc")), "-arch=sm_90a", "-rdc=true", "-O3", "-ptx", str(DEVICE_SOURCES / "emulation.cu"), "-o", str(to)]
        run = _run(command)
        if run.returncode:
            raise EmulationError(f"nvcc could not build the emulation's device functions: {run.stderr.strip()[-2000:]}", hint=_FIX)
        return to.read_bytes()


def link(rewritten: Rewritten) -> str:
    """A rewritten module together with the device functions that it calls."""
    library = _library()
    functions = library.text(set(_CALL.findall(rewritten.text)))
    text = re.sub(r"^\.version\s+\S+", f".version {library.version}", rewritten.text, count=1, flags=re.MULTILINE)
    return re.sub(r"^\.address_size 64", lambda _: f".address_size 64\n{functions}", text, count=1, flags=re.MULTILINE)


def assemble(rewritten: Rewritten) -> bytes:
    """Machine code for sm_90a of a rewritten module; from the disk when the same was assembled before.

    Raises:
        UnsupportedInstruction: ``ptxas`` refuses a line that the rewriter kept.
        EmulationError: a tool is missing or fails.
    """
    text = link(rewritten)
    digest = hashlib.sha256(f"{version('ptxas')}\0{text}".encode()).hexdigest()
    key = {"name": "emulated module", "target": rewritten.target, "ptxas": version("ptxas")}
    return _cached(digest, key, lambda: _assemble(rewritten, text))


def _assemble(rewritten: Rewritten, text: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, to = Path(folder) / "module.ptx", Path(folder) / "module.cubin"
        source.write_text(text)
        run = _run([str(tool("ptxas")), "-arch=sm_90a", str(source), "-o", str(to)])
        if run.returncode == 0:
            return to.read_bytes()
    refused = re.search(r"line (\d+); error\s*:\s*(.*)", run.stderr)
    if refused:
        # The device functions stand between the directives and the kernel: count from the end.
        line = len(rewritten.lines) - 1 - (text.count("\n") - (int(refused[1]) - 1))
        original = rewritten.lines[line] if 0 <= line < len(rewritten.lines) else 0
        raise UnsupportedInstruction(rewritten.instruction(original), original, f"ptxas for sm_90a says: {refused[2].strip()}")
    raise EmulationError(f"ptxas refused a rewritten module: {run.stderr.strip()[-2000:]}", hint="report this with the kernel's PTX")


def _cached(digest: str, key: Mapping[str, object], build: Callable[[], bytes]) -> bytes:
    """Bytes from the emulation's cache, or built and kept there. A folder that cannot be written costs time, nothing else."""
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
        data = build()
        with contextlib.suppress(OSError):
            store.save(digest, key, data, time.perf_counter() - start)
        return data


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmulationError(f"{command[0]} cannot be run: {error}", hint=_FIX) from error
