"""What is to be computed: the problem, its activation, and where experts live. Validated when made; loads no torch."""

from __future__ import annotations

import math
import numbers
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import SupportsInt, TypeGuard

from megamoe.errors import InvalidInput, UnsupportedProblem
from megamoe.formats import describe
from megamoe.protocol import Reason

MAX_TOP_K = 32
MAX_EXPERTS = 1 << 16
"""More than 72 ranks hold with 512 experts each; placements list experts and ranks one by one."""
_COUNT = "a whole number of at least 1"
_RANKS_HINT = "pass the size of the expert-parallel group"
_LARGEST = (2 - 2.0**-23) * 2.0**127
"""Largest float32: activations are computed in it."""


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """Gated activation of FC1's two halves, elementwise in float32.

    ``gate = min(gate, limit)``, ``up = clamp(up, -limit, limit)``, then ``(up + up_bias) * gate * sigmoid(alpha * gate)``.
    Plain SwiGLU is ``SwiGLU()``, clamped is ``SwiGLU(limit=10.0)``, gpt-oss uses ``SwiGLU(limit=7.0, alpha=1.702, up_bias=1.0)``.

    Attributes:
        limit: clamp bound, a number above 0; ``None`` (or infinity) for no clamp.
        alpha: factor inside the sigmoid, finite in float32.
        up_bias: added to ``up`` after the clamp, finite in float32.

    Raises:
        InvalidInput: a value outside what is allowed.
    """

    limit: float | None = None
    alpha: float = 1.0
    up_bias: float = 0.0

    def __post_init__(self) -> None:
        if self.limit is not None:
            limit = _real("limit", self.limit)
            if not limit > 0:
                raise InvalidInput(
                    f"limit={self.limit!r} is not a clamp bound; allowed: None or a number above 0.", hint="pass limit=None for no clamp"
                )
            object.__setattr__(self, "limit", None if limit > _LARGEST else limit)
        for name in ("alpha", "up_bias"):
            value = _real(name, getattr(self, name))
            if abs(value) > _LARGEST:
                raise InvalidInput(
                    f"{name}={value!r}; allowed: a number that is finite in float32.", hint=f"leave {name} at its default for plain SwiGLU"
                )
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which logical experts each rank holds, in the order of its local slots. Several ranks may hold one expert (redundant experts).

    Attributes:
        local: for every rank, the logical expert ids of its slots. Ranks may hold different numbers, also none.

    A route to an expert with ``n`` replicas goes to replica ``token_index % n`` in (rank, slot) order, where ``token_index`` counts
    the sender's tokens of the call; replicas hold equal weights, so the choice changes load, not results.
    """

    local: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "local", tuple(tuple(map(operator.index, rank)) for rank in self.local))
        except TypeError:
            raise InvalidInput(
                f"placement={self.local!r}; allowed: one sequence of expert ids, whole numbers, per rank.",
                hint="for example Placement(((0, 1, 2), (3, 4)))",
            ) from None
        if not self.local:
            raise InvalidInput(
                "placement has no ranks; allowed: one sequence of expert ids per rank.", hint="use Placement.even(experts, ranks)"
            )
        for rank, experts in enumerate(self.local):
            twice = [e for e, n in Counter(experts).items() if n > 1]
            if twice:
                raise InvalidInput(
                    f"placement puts expert {twice[0]} twice on rank {rank}; allowed: once per rank.",
                    hint="move the replica to another rank",
                )

    @classmethod
    def even(cls, experts: int, ranks: int) -> Placement:
        """Contiguous experts, as equally as they divide: the first ``experts % ranks`` ranks hold one more.

        Raises:
            InvalidInput: fewer than one expert or rank, or more than 65536.
        """
        experts, ranks = _positive("experts", experts, MAX_EXPERTS), _positive("ranks", ranks, MAX_EXPERTS, hint=_RANKS_HINT)
        share, rest = divmod(experts, ranks)
        starts = [r * share + min(r, rest) for r in range(ranks + 1)]
        return cls(tuple(tuple(range(a, b)) for a, b in pairwise(starts)))

    @classmethod
    def from_physical(cls, physical_to_logical: Sequence[int], ranks: int) -> Placement:
        """From an EPLB table: logical expert of every physical slot, rank after rank, the same number of slots on each.

        Raises:
            InvalidInput: no sequence, the slots do not divide by the ranks, or there is no rank.
        """
        ranks = _positive("ranks", ranks, hint=_RANKS_HINT)
        if not hasattr(physical_to_logical, "__len__"):
            raise InvalidInput(
                f"physical_to_logical is {physical_to_logical!r}; allowed: a sequence of expert ids.", hint="pass the table, one id a slot"
            )
        slots, rest = divmod(len(physical_to_logical), ranks)
        if rest:
            raise InvalidInput(
                f"{len(physical_to_logical)} physical experts do not divide by {ranks} ranks.",
                hint="pass Placement(local) with one tuple per rank",
            )
        return cls(tuple(tuple(physical_to_logical[r * slots : (r + 1) * slots]) for r in range(ranks)))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.local)

    def replicas(self, experts: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For every logical expert, its (rank, slot) pairs in ascending order."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
        for rank, ids in enumerate(self.local):
            for slot, expert in enumerate(ids):
                found[expert].append((rank, slot))
        return tuple(map(tuple, found))


@dataclass(frozen=True, slots=True)
class MoEProblem:
    """One MoE layer. Immutable and hashable; equal on all ranks.

    Attributes:
        experts: logical experts in the whole layer (not per rank), 1 to 65536.
        top_k: routes per token, 1 to 32 and at most ``experts``.
        hidden: width of a token, 1 or more.
        intermediate: width after the activation; FC1 has ``2 * intermediate`` rows, gate rows first.
        max_tokens: most tokens one rank brings to one call, 1 or more.
        format: name of the number format of activations and weights, see ``megamoe.formats.FORMATS``.
        activation: :class:`SwiGLU` in its plain, clamped or OAI form.
        routing_weight: ``"late"`` multiplies a route's weight into FC2's result in the final sum; ``"early"`` into the activation before
            it is re-quantized. An output bias ``b2`` needs ``"late"``.
        placement: which rank holds which experts; ``None`` needs ``experts`` divisible by the number of ranks.
        checked: check ids on the device before every call (synchronizes) instead of reporting bad ids with the next call.

    Raises:
        InvalidInput: a field outside its limits.
        UnsupportedProblem: an activation that no backend has.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    max_tokens: int
    format: str
    activation: SwiGLU = field(default_factory=SwiGLU)
    routing_weight: str = "late"
    placement: Placement | None = None
    checked: bool = False

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "hidden", "intermediate", "max_tokens"):
            most = MAX_EXPERTS if name == "experts" else None
            object.__setattr__(self, name, _positive(name, getattr(self, name), most))
        if self.top_k > MAX_TOP_K or self.top_k > self.experts:
            raise InvalidInput(
                f"top_k={self.top_k} with experts={self.experts}; allowed: 1 to min({MAX_TOP_K}, experts).",
                hint="check the model's router configuration",
            )
        describe(self.format)
        if not isinstance(self.activation, SwiGLU):
            raise UnsupportedProblem(
                [
                    Reason(
                        f"activation={self.activation!r} is implemented by no backend; SwiGLU in its plain, clamped and OAI forms is",
                        "pass megamoe.SwiGLU(...)",
                    )
                ]
            )
        if self.routing_weight not in ("late", "early"):
            raise InvalidInput(
                f"routing_weight={self.routing_weight!r}; allowed: 'late', 'early'.",
                hint="use 'late' unless the model was trained with 'early'",
            )
        if self.placement is not None:
            self._check_placement(self.placement)
        if not isinstance(self.checked, bool):
            raise InvalidInput(f"checked={self.checked!r}; allowed: True, False.", hint="pass checked=True to validate ids on every call")

    def _check_placement(self, placement: Placement) -> None:
        if not isinstance(placement, Placement):
            raise InvalidInput(
                f"placement={placement!r}; allowed: None or a megamoe.Placement.", hint="pass Placement.even(experts, ranks)"
            )
        held = {e for rank in placement.local for e in rank}
        missing = sorted(set(range(self.experts)) - held)
        foreign = sorted(held - set(range(self.experts)))
        if missing or foreign:
            raise InvalidInput(
                f"placement misses experts {missing[:8]} and names unknown ones {foreign[:8]}; "
                f"allowed: each of 0..{self.experts - 1}, at least once.",
                hint="pass Placement.even(experts, ranks)",
            )

    def placement_reasons(self, ranks: int) -> tuple[Reason, ...]:
        """What speaks against running this problem on so many ranks; empty when nothing does."""
        if not _is_count(ranks):
            return (Reason(f"ranks={ranks!r}; allowed: {_COUNT}", _RANKS_HINT),)
        if self.placement is not None:
            if self.placement.ranks != ranks:
                return (
                    Reason(
                        f"placement is for {self.placement.ranks} ranks, the group has {ranks}", "make the placement for the group's size"
                    ),
                )
        elif self.experts % ranks:
            return (
                Reason(
                    f"{self.experts} experts do not divide by {ranks} ranks",
                    f"pass placement=megamoe.Placement.even({self.experts}, {ranks})",
                ),
            )
        return ()

    def resolved_placement(self, ranks: int) -> Placement:
        """The placement given, or the even one.

        Raises:
            UnsupportedProblem: the experts do not divide by the ranks, or the placement is for another number of ranks.
        """
        reasons = self.placement_reasons(ranks)
        if reasons:
            raise UnsupportedProblem(reasons)
        return self.placement or Placement.even(self.experts, ranks)


def _positive(name: str, value: object, most: int | None = None, *, hint: str = "") -> int:
    if not _is_count(value) or (most is not None and int(value) > most):
        allowed = _COUNT if most is None else f"a whole number from 1 to {most}"
        raise InvalidInput(f"{name}={value!r}; allowed: {allowed}.", hint=hint or f"check {name} in the model's configuration")
    return int(value)


def _is_count(value: object) -> TypeGuard[SupportsInt]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidInput(f"{name}={value!r}; allowed: a number.", hint=f"pass {name} as a Python number")
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond float64
        number = -math.inf if value < 0 else math.inf
    if math.isnan(number):
        raise InvalidInput(f"{name} is NaN; allowed: a number.", hint=f"check where {name} comes from")
    return number
