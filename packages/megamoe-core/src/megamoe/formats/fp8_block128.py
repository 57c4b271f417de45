"""``fp8_block128``: E4M3 with float32 scales, one per 128 activations of a row and one per 128 x 128 weights (DeepSeek checkpoints).

``scale = max(amax, 1e-10) / 448`` and ``data = round(value / scale)``, both float32 divisions, saturating; ``value = data * scale``.
A NaN or an infinity in a block makes its scale NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megamoe.errors import InvalidInput
from megamoe.formats.base import Quantized
from megamoe.formats.blocks import largest, split
from megamoe.formats.elements import divided, round_fp8

if TYPE_CHECKING:
    from megamoe.formats import FormatInfo

SMALLEST_AMAX = 1e-10
"""An all-zero block gets the scale of this magnitude instead of zero."""


@dataclass(frozen=True, slots=True)
class FP8Block128:
    """See :class:`megamoe.formats.base.Format`. Scales are float32, (..., K / 128) or (E, N / 128, K / 128)."""

    info: FormatInfo

    def quantize(self, values: torch.Tensor, *, static_scale: float | None = None) -> Quantized:
        data, scale = self._quantize(values, rows=1)
        return Quantized(data, scale)

    def dequantize(self, data: torch.Tensor, scale: torch.Tensor | None, *, static_scale: float | None = None) -> torch.Tensor:
        return self._dequantize(data, scale, rows=1)

    def quantize_weight(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        data, scale = self._quantize(values, rows=self.info.block_rows)
        return data, scale, None

    def dequantize_weight(self, data: torch.Tensor, scale: torch.Tensor | None, total: torch.Tensor | None) -> torch.Tensor:
        return self._dequantize(data, scale, rows=self.info.block_rows)

    def _quantize(self, values: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = split(values, rows, self.info.block_k, self.info)
        scale = divided(largest(blocks).clamp(min=SMALLEST_AMAX), self.info.max_value)
        return round_fp8(blocks / scale, self.info).reshape(values.shape), scale.squeeze(-1).squeeze(-2)

    def _dequantize(self, data: torch.Tensor, scale: torch.Tensor | None, rows: int) -> torch.Tensor:
        if scale is None:
            raise InvalidInput(
                f"format {self.info.name} needs float32 block scales; got none.", hint="pass the scales that came with the data"
            )
        blocks = split(data, rows, self.info.block_k, self.info)
        return (blocks * scale.to(torch.float32)[..., :, None, :, None]).reshape(data.shape)


make = FP8Block128
