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
    # Warnings are the compiler's own, and products are not contracted, so that neither its release nor its target decides about a test.
    command = [compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{DEVICE_SOURCES}"]
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
    """Runs it on the CPU: see ``on_machine.run``."""

    def __init__(self):
        self.tensors = []

    def __call__(self, *arguments, **how):
        from . import on_machine

        return on_machine.run(*arguments, buffers=self.tensors, **how)

    def tensor(self, array):
        from . import on_machine

        copy = on_machine.aligned(array)
        self.tensors.append((copy.ctypes.data, copy.nbytes))
        return copy.ctypes.data, lambda: copy


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.emulated)])
def emulated(request):
    """Runs small Blackwell kernels, rewritten: on the CPU by ``tests/machine`` everywhere, and on a Hopper GPU where there is one."""
    if request.param == "host":
        from . import on_machine

        if on_machine.functions() is None:
            pytest.skip("needs g++ or clang++ with half precision (_Float16)")
        return OnHost()
    request.getfixturevalue("toolkit")
    return OnGpu()
