"""What is to be compiled, and the key under which the result is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from megamoe.compile import sources, toolchain
from megamoe.protocol import Plan


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """One kernel in one configuration for one architecture.

    Attributes:
        name: readable name, for listings; also part of the key.
        packages: packages whose source files the machine code depends on, for example ``("megamoe.device", "megamoe_sm90._drop")``.
        config: everything else that changes the machine code; JSON values only.
        arch: target, for example ``"sm_90a"``.
        build: called without arguments on a miss; gives the object to compile (with a jitted ``__call__``) and example arguments for it.
    """

    name: str
    packages: tuple[str, ...]
    config: Mapping[str, object]
    arch: str
    build: Callable[[], tuple[Any, tuple[Any, ...]]] = field(compare=False, repr=False)

    def key(self) -> dict[str, object]:
        """Everything that decides about the machine code. Holds no path and no Python version. Imports CuTe DSL for its version."""
        return {
            "name": self.name,
            "sources": sources.loaded(self.packages),
            "config": dict(self.config),
            "arch": self.arch,
            "toolchain": toolchain.versions(),
            "platform": toolchain.platform_name(),
        }

    def digest(self) -> str:
        """Hexadecimal SHA-256 of the key."""
        return hashlib.sha256(json.dumps(self.key(), sort_keys=True).encode()).hexdigest()


@runtime_checkable
class Precompiles(Protocol):
    """A backend whose kernels can be compiled ahead, also on a machine without its GPU. ``megamoe compile`` asks for this."""

    def kernels(self, plan: Plan, arch: str | None = None, *, biases: bool = False, sms: int | None = None) -> tuple[KernelRequest, ...]:
        """Every kernel that a session of this plan may launch.

        Args:
            plan: from ``Backend.plan``.
            arch: target; ``None`` for the backend's own.
            biases: whether the weights have every bias that the problem allows, or none. A plan does not say.
            sms: multiprocessors that a session will find on its GPU, at least 1; ``None`` for those of the GPU that the backend is
                tuned for. A plan does not say this either.

        Raises:
            InvalidInput: the backend has no kernel for this architecture, or ``sms`` is below 1.
        """
        ...
