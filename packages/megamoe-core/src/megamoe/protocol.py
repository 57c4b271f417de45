"""What a backend is: the types that core and the arch wheels meet on. Small enough to read at one sitting.

    BackendSpec   what a wheel says about itself without loading torch or its kernels      (stage 1: describe)
    Backend       plans, packs weights and opens sessions                                  (stage 2: create)
    PackedWeights this rank's experts in kernel layout
    Session       runs the layer, once per call, on every rank

    backend = get_backend("sm90")
    plan    = backend.plan(problem, ranks=8)              pure: no GPU needed
    packed  = backend.prepare_weights(plan, weights)      local to this rank
    with backend.open_session(plan, packed, group) as s:  collective
        y = s.run(x, topk_ids, topk_weights)              collective, on the current stream

A backend needs no base class: any object with these methods is one. ``megamoe.testing.conformance`` holds the tests that prove it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from megamoe.problem import MoEProblem
    from megamoe.weights import ExpertWeights

PROTOCOL = (1, 0)
"""Version of this page. A plugin works when its major is equal and its minor is not above core's."""

ENTRY_POINT_GROUP = "megamoe.backends"
"""Entry-point group that discovery reads; one entry per backend, its value names a :class:`BackendSpec`."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something cannot be done, and what would change that.

    Attributes:
        text: what was found and what is needed, as a sentence without its full stop.
        hint: the fix: a command, an argument, or another backend; empty when there is none.
    """

    text: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.text} (fix: {self.hint})." if self.hint else f"{self.text}."


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer with all its reasons. True in a boolean context exactly when ``ok``.

    Attributes:
        reasons: every reason against; empty exactly when ``ok``.
    """

    reasons: tuple[Reason, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.reasons

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True)
class DropInfo:
    """Where a wheel's kernels come from.

    Attributes:
        origin: ``"first-party"`` or the upstream's name.
        commit: upstream commit, or the wheel's version for first-party kernels.
        date: ISO date on which the drop was taken in.
    """

    origin: str
    commit: str
    date: str


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A wheel's description of one backend. Importing the module that holds it must load neither torch nor CuTe DSL.

    Attributes:
        name: the entry-point name, and the name users choose by.
        protocol: the :data:`PROTOCOL` version this backend was written for.
        archs: compute capabilities it has machine code for, for example ``((9, 0),)``; ``(12, None)`` stands for the whole family.
            Empty: needs no GPU.
        formats: names from ``megamoe.formats.FORMATS``.
        features: short names of what it can do beyond the minimum, for tables.
        summary: one line for ``megamoe backends``.
        factory: ``"module:Class"``; called without arguments it gives the :class:`Backend`.
        status: how its kernels have been tried: ``"native"``, ``"emulated"``, ``"compiled"`` or ``"none"``.
        missing: why the backend cannot run at all yet (no kernel); empty when it can.
        docs_url: where to read on.
        drop: provenance of the kernels, ``None`` when there are none.
    """

    name: str
    protocol: tuple[int, int]
    archs: tuple[tuple[int, int | None], ...]
    formats: tuple[str, ...]
    summary: str
    factory: str
    features: tuple[str, ...] = ()
    status: str = "none"
    missing: str = ""
    docs_url: str = ""
    drop: DropInfo | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """A named piece of memory that a session holds.

    Attributes:
        name: stable name, as printed by ``megamoe explain``.
        nbytes: size in bytes on each rank.
        kind: ``"symmetric"`` (peers read or write it) or ``"local"``.
        purpose: what lies in it.
    """

    name: str
    nbytes: int
    kind: str = "local"
    purpose: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a backend would run for a problem, decided without a GPU. Immutable; equal on every rank.

    Attributes:
        backend: name of the backend that made it.
        version: version of the wheel that made it.
        problem: the problem it is for.
        ranks: size of the expert-parallel group.
        knobs: every tunable and its value, defaults filled in.
        wire: the part of the configuration that all ranks must agree on; hashed and compared when a session opens.
        regions: memory that a session will hold.
        budgets: limits of the chosen kernels, for example ``{"shared_memory_bytes": 231424, "registers": 240}``.
        bounds: predicted lower bounds in microseconds, for example ``{"weights": 79.0, "math": 12.0}``.
        properties: what holds for the result, for example ``("bitwise repeatable",)``.
        detail: the backend's own data; core does not look into it.
    """

    backend: str
    version: str
    problem: MoEProblem
    ranks: int
    knobs: Mapping[str, object] = field(default_factory=dict)
    wire: Mapping[str, object] = field(default_factory=dict)
    regions: tuple[Region, ...] = ()
    budgets: Mapping[str, int] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=dict)
    properties: tuple[str, ...] = ()
    detail: Any = None


@runtime_checkable
class PackedWeights(Protocol):
    """This rank's experts in kernel layout."""

    @property
    def plan(self) -> Plan:
        """The plan these weights were packed for."""
        ...

    @property
    def nbytes(self) -> int:
        """Device bytes held by the packed tensors."""
        ...

    def update(self, weights: ExpertWeights) -> None:
        """Refit in place: same shapes, dtypes and addresses, so that a captured CUDA graph replays with the new values.

        Where packing did not need a copy, the packed tensors are the caller's own and are overwritten.

        Raises:
            InvalidInput: shapes, dtypes or format differ from what was packed.
        """
        ...


@runtime_checkable
class Session(Protocol):
    """An open, collective context in which the layer runs. Every rank of the group makes the same sequence of calls."""

    @property
    def plan(self) -> Plan:
        """The plan this session runs."""
        ...

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        x_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer on this rank's tokens, on the current stream. Collective: every rank calls it, also with zero tokens.

        Args:
            x: (tokens, hidden) bf16, or already quantized in the problem's format (``nvfp4``: (tokens, hidden // 2) uint8).
                ``tokens`` is 0 to ``max_tokens`` and may differ on every rank and call.
            topk_ids: (tokens, top_k) int32 or int64, global logical expert ids; -1 is no route; duplicates are separate routes.
            topk_weights: (tokens, top_k) float32, bf16 or float16.
            x_scale: scales of a quantized ``x`` in the format's plain layout; ``None`` for bf16 and for static scales.
            out: (tokens, hidden) bf16 to write into; allocated when ``None``.

        Returns:
            (tokens, hidden) bf16; rows without any route are zero.

        Raises:
            InvalidInput: shape, dtype, device or strides are wrong, more tokens than ``max_tokens``, or ids out of range
                (on the CPU or with ``checked=True`` at once, otherwise by the next call).
            SessionClosed: after ``close``.
            PeerTimeout, PeerAborted: a peer did not take part.
        """
        ...

    def counts(self) -> torch.Tensor:
        """(local experts,) int64 on the host: rows received by each local expert in the last run. Synchronizes."""
        ...

    def reset(self) -> None:
        """Make the session usable again after a timeout or abort. Collective."""
        ...

    def close(self) -> None:
        """Release everything. Collective; safe to call twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None: ...


@runtime_checkable
class Backend(Protocol):
    """A way to compute the layer. Created by selection from ``BackendSpec.factory``; holds no device state of its own."""

    @property
    def spec(self) -> BackendSpec:
        """The description this backend was created from."""
        ...

    def probe(self, device: torch.device | None = None) -> Verdict:
        """Can it run on this device, now? ``None`` is the current device. Every reason if not."""
        ...

    def supports(self, problem: MoEProblem, ranks: int = 1) -> Verdict:
        """Can it compute this problem? Pure. Every reason if not."""
        ...

    def plan(self, problem: MoEProblem, *, ranks: int = 1, knobs: Mapping[str, object] | None = None) -> Plan:
        """Decide what would run. Pure; works on a machine without a GPU.

        Raises:
            UnsupportedProblem: ``supports`` says no; carries every reason.
            InvalidInput: an unknown knob or an illegal value; names the legal ones.
        """
        ...

    def prepare_weights(self, plan: Plan, weights: ExpertWeights) -> PackedWeights:
        """Bring this rank's experts into kernel layout. Not collective; releases nothing of the caller's.

        Raises:
            InvalidInput: shapes, dtypes, strides or missing scales; names got, allowed, fix.
        """
        ...

    def open_session(self, plan: Plan, packed: PackedWeights, group: ProcessGroup | None = None) -> Session:
        """Open a session over a process group; ``None`` is a group of one. Collective.

        Raises:
            RankMismatch: ranks disagree on backend, version, drop or wire configuration; raised on every rank.
            BackendUnavailable: a peer cannot be reached.
        """
        ...
