"""``fp8_tensor``, ``fp8_tensor_e5m2``: FP8 with one static scale for all activations and one scale per expert's weight.

``data = round(value / scale)``, float32 division, saturating; ``value = data * scale``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megamoe.errors import InvalidInput
from megamoe.formats.base import Quantized
from megamoe.formats.elements import divided, round_fp8

if TYPE_CHECKING:
    from megamoe.formats import FormatInfo

SMALLEST_AMAX = 1e-12
"""An all-zero weight gets the scale of this magnitude instead of zero."""


@dataclass(frozen=True, slots=True)
class FP8Tensor:
    """See :class:`megamoe.formats.base.Format`. ``static_scale`` is required."""

    info: FormatInfo

    def quantize(self, values: torch.Tensor, *, static_scale: float | None = None) -> Quantized:
        return Quantized(round_fp8(values.to(torch.float32) / self._scalar(static_scale, values), self.info), None)

    def dequantize(self, data: torch.Tensor, scale: torch.Tensor | None, *, static_scale: float | None = None) -> torch.Tensor:
        return data.to(torch.float32) * self._scalar(static_scale, data)

    def quantize_weight(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        exact = values.to(torch.float32)
        scale = divided(exact.abs().amax(dim=(1, 2)).clamp(min=SMALLEST_AMAX), self.info.max_value)
        return round_fp8(exact / scale[:, None, None], self.info), scale, None

    def dequantize_weight(self, data: torch.Tensor, scale: torch.Tensor | None, total: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            raise InvalidInput(
                f"format {self.info.name} needs one float32 weight scale per expert; got none.", hint="pass w13_scale and w2_scale"
            )
        return data.to(torch.float32) * scale[:, None, None]

    def _scalar(self, static_scale: float | None, like: torch.Tensor) -> torch.Tensor:
        if static_scale is None:
            raise InvalidInput(
                f"format {self.info.name} needs a static activation scale; got none.", hint="pass ExpertWeights(x_scale=..., mid_scale=...)"
            )
        return torch.tensor(static_scale, dtype=torch.float32, device=like.device)


make = FP8Tensor
