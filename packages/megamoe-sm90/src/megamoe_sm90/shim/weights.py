"""Experts in kernel layout, which is the checkpoint's: gate rows, then up rows, K contiguous. Quantized tensors are used where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megamoe.formats import describe, load
from megamoe.packing import check_refit, check_update, local_experts

if TYPE_CHECKING:
    from megamoe.protocol import Plan
    from megamoe.weights import ExpertWeights

_TMA_ALIGNMENT = 16


class Sm90Weights:
    """See :class:`megamoe.protocol.PackedWeights`. Quantized tensors stay the caller's own and are not copied; bf16 weights of an FP8
    format are quantized expert by expert, biases become float32.

    Args:
        plan: what they are for.
        weights: this rank's experts.

    Raises:
        InvalidInput: weights do not fit the plan's problem.
    """

    def __init__(self, plan: Plan, weights: ExpertWeights) -> None:
        self.plan = plan
        self.experts = local_experts(plan, weights)
        weights.validate(plan.problem, self.experts)
        self.x_scale = weights.x_scale
        self.mid_scale = weights.mid_scale
        self.device = weights.w13.device
        self.tensors = {name: _aligned(tensor) for name, tensor in self._encode(weights).items()}
        for name, value in (("x_static", self.x_scale), ("mid_static", self.mid_scale)):
            if value is not None:
                self.tensors[name] = torch.tensor([value], dtype=torch.float32, device=self.device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def addresses(self) -> dict[str, int]:
        """Device address of every tensor; the static scales are ``x_static`` and ``mid_static``."""
        return {name: tensor.data_ptr() for name, tensor in self.tensors.items()}

    def update(self, weights: ExpertWeights) -> None:
        """See the protocol. Copies on the current stream: order it behind launches on other streams that still read the old values."""
        check_update(self, weights)
        encoded = self._encode(weights)
        check_refit({name: t for name, t in self.tensors.items() if not name.endswith("_static")}, encoded)
        with torch.inference_mode():  # tensors that were made in it can be written in it alone
            for name, tensor in encoded.items():
                self.tensors[name].copy_(tensor)

    def _encode(self, weights: ExpertWeights) -> dict[str, torch.Tensor]:
        """The tensors to keep, by field name of ``ExpertWeights``."""
        tensors = {name: tensor.detach() for name, tensor in weights.tensors().items()}
        tensors |= {name: tensors[name].to(torch.float32) for name in ("b13", "b2") if name in tensors}
        if describe(self.plan.problem.format).element != "bf16" and not weights.quantized:
            for name in ("w13", "w2"):
                tensors[name], tensors[f"{name}_scale"] = self._quantized(tensors[name])
        return tensors

    def _quantized(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert at a time: the float32 temporaries of all of them would be several times the layer."""
        quantize = load(self.plan.problem.format).quantize_weight
        parts = [quantize(expert) for expert in values.unsqueeze(1)] or [quantize(values)]  # a rank may hold no expert
        data, scale = zip(*((part[0], part[1]) for part in parts), strict=True)
        return torch.cat(data), torch.cat([s for s in scale if s is not None])


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy where its address is not one that the TMA unit can load from."""
    return tensor if tensor.data_ptr() % _TMA_ALIGNMENT == 0 else tensor.clone()
