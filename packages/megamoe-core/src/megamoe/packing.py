"""What every backend does in the same way with packed weights: their size, whose experts they are, refits, and what a session needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from megamoe.errors import InvalidInput
from megamoe.formats import describe
from megamoe.weights import ExpertWeights

if TYPE_CHECKING:
    import torch

    from megamoe.ep.group import Group
    from megamoe.problem import MoEProblem
    from megamoe.protocol import Plan


class Packed(Protocol):
    """Packed weights as the checks below see them."""

    plan: Plan
    experts: int
    x_scale: float | None
    mid_scale: float | None


def local_experts(plan: Plan, weights: ExpertWeights) -> int:
    """Number of experts given, checked against what some rank of the placement holds.

    Raises:
        InvalidInput: no rank holds so many, or ``weights`` are no :class:`megamoe.ExpertWeights` with a w13 of three dimensions.
    """
    held = sorted({len(local) for local in plan.problem.resolved_placement(plan.ranks).local})
    given = _are_weights(weights).experts
    if given not in held:
        raise InvalidInput(
            f"w13 is for {given} experts; allowed: {' or '.join(map(str, held))}, the experts that one of {plan.ranks} ranks holds.",
            hint="pass the experts of this rank only, placement.local[rank]",
        )
    return given


def check_update(packed: Packed, weights: ExpertWeights) -> None:
    """Check that the weights of a refit are right for the plan and keep the static activation scales.

    Raises:
        InvalidInput: they do not fit, or the scales differ.
    """
    _are_weights(weights).validate(packed.plan.problem, packed.experts)
    for name in ("x_scale", "mid_scale"):
        kept, given = getattr(packed, name), getattr(weights, name)
        if kept != given:
            raise InvalidInput(
                f"{name} is {given}, packed with {kept}; allowed: the same, all ranks agreed on it when the session opened.",
                hint="open a new session for other static scales",
            )


def check_refit(packed: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    """Check that a refit has the tensors that were packed.

    Raises:
        InvalidInput: a tensor is missing, new, or of another shape, dtype or device.
    """
    differing = [
        f"{name} {_describe(packed.get(name))}, given {_describe(given.get(name))}"
        for name in packed.keys() | given.keys()
        if _describe(packed.get(name)) != _describe(given.get(name))
    ]
    if differing:
        raise InvalidInput(
            f"update() with other tensors than were packed: {'; '.join(sorted(differing))}; allowed: same shapes, dtypes and device.",
            hint="prepare_weights again",
        )


def check_session(plan: Plan, packed: Packed, group: Group) -> None:
    """Check that plan, packed weights and group of ``open_session`` belong together.

    Raises:
        InvalidInput: they do not.
    """
    if packed.plan != plan:
        raise InvalidInput(
            "packed weights were prepared for another plan; allowed: the plan of this session.", hint="prepare_weights again"
        )
    if group.size != plan.ranks:
        raise InvalidInput(
            f"the group has {group.size} ranks, the plan is for {plan.ranks}; allowed: equal.",
            hint=f"plan(problem, ranks={group.size}), or pass the expert-parallel group",
        )
    held = len(plan.problem.resolved_placement(plan.ranks).local[group.rank])
    if packed.experts != held:
        raise InvalidInput(
            f"the packed weights hold {packed.experts} experts; allowed: {held}, what the placement gives to rank {group.rank}.",
            hint="pass the experts of this rank, in the order of placement.local[rank]",
        )


def expert_bytes(problem: MoEProblem) -> int:
    """Bytes of one expert's encoded matrices with their scales."""
    info, total = describe(problem.format), 0
    for rows, cols in ((2 * problem.intermediate, problem.hidden), (problem.hidden, problem.intermediate)):
        total += rows * cols * info.element_bits // 8
        if info.block_k:
            total += -(-rows // info.block_rows) * (cols // info.block_k) * info.scale_bytes
        if info.tensor_scale:
            total += 4
    return total


def _are_weights(weights: object) -> ExpertWeights:
    if not isinstance(weights, ExpertWeights):
        raise InvalidInput(
            f"weights are a {type(weights).__name__}; allowed: megamoe.ExpertWeights.", hint="pass megamoe.ExpertWeights(w13=w13, w2=w2)"
        )
    return weights


def _describe(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
