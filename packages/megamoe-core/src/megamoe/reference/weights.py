"""This rank's experts as the reference keeps them: encoded in the problem's format, dequantized one expert at a time on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from megamoe.formats import load
from megamoe.packing import check_refit, check_update, local_experts

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
        self.experts = local_experts(plan, weights)
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
        check_update(self, weights)
        encoded = self._encode(weights)
        check_refit(self._tensors, encoded)
        with torch.inference_mode():  # tensors that were made in it can be written in it alone
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
