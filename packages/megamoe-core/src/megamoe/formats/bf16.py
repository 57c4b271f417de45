"""``bf16``: no quantization beyond rounding to bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megamoe.formats.base import Quantized

if TYPE_CHECKING:
    from megamoe.formats import FormatInfo


@dataclass(frozen=True, slots=True)
class BF16:
    """Values in bfloat16, rounded to nearest even; see :class:`megamoe.formats.base.Format`."""

    info: FormatInfo

    def quantize(self, values: torch.Tensor, *, static_scale: float | None = None) -> Quantized:
        return Quantized(values.to(torch.bfloat16), None)

    def dequantize(self, data: torch.Tensor, scale: torch.Tensor | None, *, static_scale: float | None = None) -> torch.Tensor:
        return data.to(torch.float32)

    def quantize_weight(self, values: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return values.to(torch.bfloat16), None, None

    def dequantize_weight(self, data: torch.Tensor, scale: torch.Tensor | None, total: torch.Tensor | None) -> torch.Tensor:
        return data.to(torch.float32)


make = BF16
