"""The step of `megamoe check --emulate`: what a backend compiles for a Blackwell architecture, rewritten and assembled for Hopper."""

from __future__ import annotations

from megamoe.nvml import gpus
from megamoe.problem import MoEProblem
from megamoe.protocol import Backend, BackendSpec

CAPABILITIES: dict[str, tuple[int, int]] = {"sm100": (10, 0), "sm103": (10, 3), "sm120": (12, 0)}
"""Compute capability of every architecture that can be emulated."""


def is_native(arch: str) -> bool:
    """Whether a visible GPU is of this architecture: nothing is emulated then."""
    return any(device.capability == CAPABILITIES[arch] for device in gpus().devices)


def serves(spec: BackendSpec, arch: str) -> bool:
    """Whether a backend has machine code for this architecture."""
    major, minor = CAPABILITIES[arch]
    return any(have[0] == major and have[1] in (None, minor) for have in spec.archs)


def rewrite_kernels(backend: Backend, problem: MoEProblem, ranks: int, arch: str) -> str | None:
    """Compile, rewrite and assemble every kernel of a backend's plan; what was done, or ``None`` when it cannot compile ahead.

    Raises:
        UnsupportedInstruction: a kernel uses what cannot be emulated.
        EmulationError: a tool is missing, or CuTe DSL is loaded already for another architecture.
    """
    from megamoe.compile import Precompiles, toolchain
    from megamoe.emulation import emulate

    if not isinstance(backend, Precompiles):
        return None
    with emulate(arch) as emulated:
        import cutlass.cute as cute

        for request in backend.kernels(backend.plan(problem, ranks=ranks), emulated.arch):
            kernel, arguments = request.build()
            cute.compile[toolchain.options(request.arch)](kernel, *arguments)
    replaced = sum(sum(module.forms.values()) for module in emulated.modules)
    return f"{len(emulated.modules)} kernels rewritten and assembled for sm_90a, {replaced} instructions replaced; none launched"
