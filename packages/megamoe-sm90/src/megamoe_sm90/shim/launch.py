"""From a call's live tokens to a compiled kernel with its arguments: the hot path of a session."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from megamoe.compile import KernelRequest
from megamoe.compile.obtain import function
from megamoe_sm90.shim.variants import Variant
from megamoe_sm90.shim.workspace import Workspace

if TYPE_CHECKING:
    from megamoe_sm90.shim.knobs import Rung
    from megamoe_sm90.shim.weights import Sm90Weights


class Launcher:
    """The kernels of a session for one kind of activations, with every argument that does not change from call to call.

    Args:
        rungs: which kernel up to how many tokens.
        variants: the kernels, one a rung.
        weights: packed experts.
        workspace: the session's memory.
        seconds: deadline of waits inside the kernels.
    """

    def __init__(
        self, rungs: tuple[Rung, ...], variants: tuple[Variant, ...], weights: Sm90Weights, workspace: Workspace, seconds: float
    ) -> None:
        self._steps = [rung.tokens for rung in rungs]
        self._calls = [Call(variant, weights.addresses, workspace.addresses(variant), seconds) for variant in variants]

    def run(self, tokens: int, x: int, x_scale: int, ids: int, topk_weights: int, out: int, stream: int) -> None:
        """Launch on a stream; addresses of contiguous tensors, 16-byte aligned. ``tokens`` is 0 to the session's most."""
        self._calls[bisect_left(self._steps, tokens)].run(tokens, x, x_scale, ids, topk_weights, out, stream)

    def warm_up(self, ids: int, stream: int) -> None:
        """Launch every kernel on no tokens: loads its module, which must not happen for the first time while a graph is captured."""
        for call in self._calls:
            call.run(0, ids, ids, ids, ids, ids, stream)


class Kernel(Protocol):
    """What a launch needs to know of a kernel; see :class:`Variant`."""

    @property
    def addresses(self) -> tuple[str, ...]: ...

    def request(self) -> KernelRequest: ...

    def limits(self, seconds: float) -> tuple[int, ...]: ...


class Call:
    """One kernel with its arguments.

    Args:
        variant: the kernel.
        weights: addresses of packed experts by name, also of the static scales.
        memory: addresses of the session's regions by name.
        seconds: deadline of waits inside the kernel.
    """

    def __init__(self, variant: Kernel, weights: Mapping[str, int], memory: Mapping[str, int], seconds: float) -> None:
        self._function: Callable[..., Any] = function(variant.request())
        fixed = {**weights, **memory}
        # The addresses that change lie in two places of the argument list: x, x_scale, ids and topk_w, and out.
        names = variant.addresses
        first, last = names.index("x"), names.index("topk_w") + 1
        assert names[first:last] == ("x", "x_scale", "ids", "topk_w"), names
        assert names[-1] == "out", names
        self._before = tuple(fixed.get(name, 0) for name in names[:first])
        self._between = tuple(fixed.get(name, 0) for name in names[last:-1])
        self._static_scale = weights.get("x_static", 0)
        self._limits = variant.limits(seconds)

    def run(self, tokens: int, x: int, x_scale: int, ids: int, topk_weights: int, out: int, stream: int) -> None:
        scale = x_scale or self._static_scale
        self._function(*self._before, x, scale, ids, topk_weights, *self._between, out, tokens, *self._limits, stream)
