"""The compiler: which architectures it is asked for, its versions, and the machine that runs the host half of a compiled object."""

from __future__ import annotations

import functools
import platform
import re
import sys
from pathlib import Path
from typing import Any

from megamoe.errors import InvalidInput

_ARCH = re.compile(r"sm_\d{2,3}[af]?")
# What a compiled object's host code may use beyond plain x86-64: the compiler takes what it finds on the machine that it runs on.
_X86_LEVELS = (
    ("x86-64-v4", frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))),
    ("x86-64-v3", frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"))),
)
# Settings of CuTe DSL that never change what we compile: each request names its architecture, and libraries are a matter of paths.
_IRRELEVANT_SETTINGS = ("arch=", "shared_libs=")


def options(arch: str) -> tuple[Any, ...]:
    """Per-call options for ``cute.compile[...]``: the architecture (so that no GPU is needed) and calls through TVM-FFI.

    Raises:
        InvalidInput: not the name of an architecture.
    """
    if not _ARCH.fullmatch(arch):
        raise InvalidInput(
            f"arch={arch!r} is not an architecture; allowed: names such as sm_90a, sm_100a, sm_120a.", hint="pass --arch sm_90a"
        )
    import cutlass.cute as cute

    return cute.GPUArch(arch), cute.EnableTVMFFI


@functools.cache
def versions() -> dict[str, str]:
    """Versions of CuTe DSL (with its CUDA flavour and the settings that change its code) and TVM-FFI."""
    import cutlass
    import tvm_ffi
    from cutlass.base_dsl.version_info import CUDA_VERSION
    from cutlass.cutlass_dsl import CuTeDSL

    settings = CuTeDSL._get_dsl().envar.cache_key_str().split(";")
    return {
        "cutlass": cutlass.__version__,
        "cuda": f"{CUDA_VERSION.major}.{CUDA_VERSION.minor}",
        "settings": ";".join(s for s in settings if s and not s.startswith(_IRRELEVANT_SETTINGS)),
        "tvm_ffi": tvm_ffi.__version__,
    }


@functools.cache
def platform_name() -> str:
    """Operating system, processor family and, on x86-64, its feature level, for example ``linux-x86_64-v3``."""
    machine = platform.machine()
    if machine != "x86_64":
        return f"{sys.platform}-{machine}"
    flags = _cpu_flags()
    level = next((name for name, needed in _X86_LEVELS if needed <= flags), "x86-64")
    return f"{sys.platform}-{level.replace('x86-64', 'x86_64')}"


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
