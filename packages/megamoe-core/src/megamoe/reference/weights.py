"""This rank's experts as the reference keeps them: encoded in the problem's format, dequantized one expert at a time on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from megamoe.errors import InvalidInput
from megamoe.formats import load

if TYPE_CHECKING:
    from megamoe.protocol import Plan
    from megamoe.weights import ExpertWeights


class Expert(NamedTuple):
    """One expert's weights as float32 values: (2 intermediate, hidden), (hidden, intermediate), and biases or ``None``."""

    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None


class ReferenceWeights:
    """See :class:`megamoe.protocol.PackedWeights`. Prequantized tensors are kept as they are; bf16 ones are quantized first.

    Args:
        plan: what they are for.
        weights: this rank's experts.

    Raises:
        InvalidInput: weights do not fit the plan's problem, or no rank of its placement holds so many experts.
    """

    def __init__(self, plan: Plan, weights: ExpertWeights) -> None:
        self.plan = plan
        self.experts = _count(plan, weights)
        weights.validate(plan.problem, self.experts)
        self.x_scale = weights.x_scale
        self.mid_scale = weights.mid_scale
        self._format = load(plan.problem.format)
        self._tensors = self._encode(weights)

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where the session runs."""
        return self._tensors["w13"].device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def update(self, weights: ExpertWeights) -> None:
        weights.validate(self.plan.problem, self.experts)
        for name in ("x_scale", "mid_scale"):
            packed, given = getattr(self, name), getattr(weights, name)
            if packed != given:
                raise InvalidInput(
                    f"{name} is {given}, packed with {packed}; allowed: the same, all ranks agreed on it when the session opened.",
                    hint="open a new session for other static scales",
                )
        encoded = self._encode(weights)
        differing = [
            f"{name} {_describe(self._tensors.get(name))}, given {_describe(encoded.get(name))}"
            for name in self._tensors.keys() | encoded.keys()
            if _describe(self._tensors.get(name)) != _describe(encoded.get(name))
        ]
        if differing:
            raise InvalidInput(
                f"update() with other tensors than were packed: {'; '.join(sorted(differing))}; allowed: same shapes, dtypes and device.",
                hint="prepare_weights again",
            )
        for name, tensor in encoded.items():
            self._tensors[name].copy_(tensor)

    def expert(self, slot: int) -> Expert:
        """The weights of one local slot as float32 values."""
        one = {name: tensor[slot : slot + 1] for name, tensor in self._tensors.items()}
        w13, w2 = (
            self._format.dequantize_weight(one[name], one.get(f"{name}_scale"), one.get(f"{name}_global"))[0] for name in ("w13", "w2")
        )
        b13, b2 = (one[name][0].to(torch.float32) if name in one else None for name in ("b13", "b2"))
        return Expert(w13, w2, b13, b2)

    def _encode(self, weights: ExpertWeights) -> dict[str, torch.Tensor]:
        """The tensors to keep, by field name of ``ExpertWeights``."""
        tensors = {name: tensor.detach() for name, tensor in weights.tensors().items()}
        for name in ("w13", "w2"):
            if weights.quantized:
                if self._format.info.element == "e2m1":
                    ones = torch.ones(self.experts, dtype=torch.float32, device=weights.w13.device)
                    tensors.setdefault(f"{name}_global", ones)
                continue
            encoded = self._format.quantize_weight(tensors[name])
            tensors |= {key: t for key, t in zip((name, f"{name}_scale", f"{name}_global"), encoded, strict=True) if t is not None}
        return tensors


def _count(plan: Plan, weights: ExpertWeights) -> int:
    """Number of local experts given, checked against what some rank of the placement holds."""
    held = sorted({len(local) for local in plan.problem.resolved_placement(plan.ranks).local})
    given = weights.w13.shape[0] if isinstance(weights.w13, torch.Tensor) and weights.w13.dim() else 0
    if given not in held:
        raise InvalidInput(
            f"w13 is for {given} experts; allowed: {' or '.join(map(str, held))}, the experts that one of {plan.ranks} ranks holds.",
            hint="pass the experts of this rank only, placement.local[rank]",
        )
    return given


def _describe(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
