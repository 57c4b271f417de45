"""Fixtures of the emulation's tests: its pure functions on the host, and small kernels on a Hopper GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def pure(tmp_path_factory):
    """The device functions that are plain C++, compiled for this machine behind loops over arrays (``pure.cpp``)."""
    from megamoe.emulation.assemble import DEVICE_SOURCES

    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("needs a C++ compiler (g++, c++ or clang++)")
    library = tmp_path_factory.mktemp("pure") / "pure.so"
    command = [compiler, "-std=c++17", "-O2", "-Wall", "-Werror", "-Wno-unused-function", "-shared", "-fPIC", f"-I{DEVICE_SOURCES}"]
    subprocess.run([*command, str(HERE / "pure.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="session")
def toolkit():
    """nvcc and ptxas; tests that need them are skipped where they are not."""
    from megamoe.emulation.assemble import tool, version
    from megamoe.errors import EmulationError

    try:
        return tool("nvcc"), version("ptxas")
    except EmulationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    """The device functions compiled for this machine, for ``interpreter.run``."""
    from . import interpreter

    built = interpreter.build(tmp_path_factory.mktemp("machine"))
    if built is None:
        pytest.skip("needs g++ or clang++ with half precision (_Float16)")
    return built


class OnGpu:
    """Runs a small Blackwell kernel on the Hopper GPU: see ``launch.run``."""

    def __call__(self, *arguments, **how):
        from . import launch

        return launch.run(*arguments, **how)

    def tensor(self, array):
        from . import launch

        memory = launch.Memory(array)
        return memory.address.value, memory.back


class OnHost:
    """Runs it by the interpreter: see ``interpreter.run``. What only a GPU has is skipped."""

    def __init__(self, machine):
        self.machine = machine

    def __call__(self, *arguments, **how):
        from . import interpreter

        try:
            return interpreter.run(self.machine, *arguments, **how)
        except interpreter.NotInterpreted as reason:
            pytest.skip(f"needs a GPU: {reason} is native")

    def tensor(self, array):
        from . import interpreter

        return interpreter.tensor(array)


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.emulated)])
def emulated(request):
    """Runs small Blackwell kernels, rewritten: by the interpreter everywhere, and on a Hopper GPU where there is one."""
    if request.param == "host":
        return OnHost(request.getfixturevalue("machine"))
    request.getfixturevalue("toolkit")
    return OnGpu()
