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
def emulated(toolkit):
    """Runs a small Blackwell kernel on the Hopper GPU: see ``launch.run``."""
    from . import launch

    return launch.run
