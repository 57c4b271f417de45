"""``nvfp4``: E2M1 with an E4M3 scale per 16 elements of a row, and a float32 scale on top (static for activations, per expert for weights).

``scale = round_e4m3(min(448, amax / 6 / tensor scale))`` and ``data = round_e2m1(value / tensor scale / scale)``, saturating, with the
rounded scale; ``value = data * scale * tensor scale``. A scale that rounds to zero makes its block zero. A NaN or an infinity in a block
makes its scale NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megamoe.errors import InvalidInput
from megamoe.formats.base import Quantized
from megamoe.formats.blocks import largest, split
from megamoe.formats.elements import divided, pack_e2m1, unpack_e2m1

if TYPE_CHECKING:
    from megamoe.formats import FormatInfo

_SCALE_MAX = 448.0
_SMALLEST_TOTAL = 2.0**-118
"""Its reciprocal, divided by the smallest E4M3 scale, 2^-9, is still finite in float32."""


@dataclass(frozen=True, slots=True)
class NVFP4:
    """See :class:`megamoe.formats.base.Format`. Data are uint8 (..., K / 2), scales float8_e4m3fn (..., K / 16)."""

    info: FormatInfo

    def quantize(self, values: torch.Tensor, *, static_scale: float | None = None) -> Quantized:
        return self._quantize(values, _scalar(static_scale, values))

    def dequantize(self, data: torch.Tensor, scale: torch.Tensor | None, *, static_scale: float | None = None) -> torch.Tensor:
        return self._dequantize(data, scale) * _scalar(static_scale, data)

    def quantize_weight(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        magnitude = values.to(torch.float32).abs()
        amax = torch.where(magnitude.isfinite(), magnitude, 0.0).amax(dim=(1, 2))
        # The largest block of an expert gets the largest scale, as far as float32 reaches; an expert of zeros keeps 1.
        total = torch.where(amax > 0, divided(amax, _SCALE_MAX * self.info.max_value).clamp(min=_SMALLEST_TOTAL), 1.0)
        return *self._quantize(values, total[:, None, None, None, None]), total

    def dequantize_weight(self, data: torch.Tensor, scale: torch.Tensor | None, total: torch.Tensor | None) -> torch.Tensor:
        values = self._dequantize(data, scale)
        return values if total is None else values * total[:, None, None]

    def _quantize(self, values: torch.Tensor, total: torch.Tensor) -> Quantized:
        blocks = split(values, 1, self.info.block_k, self.info)
        norm = 1.0 / total
        scale = (divided(largest(blocks), self.info.max_value) * norm).clamp(max=_SCALE_MAX).to(torch.float8_e4m3fn)
        rounded = scale.to(torch.float32)
        multiplier = torch.where(rounded > 0, (norm / rounded).clamp(max=torch.finfo(torch.float32).max), 0.0)
        scaled = torch.where(rounded > 0, blocks * multiplier, 0.0)
        return Quantized(pack_e2m1(scaled.reshape(values.shape)), scale.squeeze(-1).squeeze(-2))

    def _dequantize(self, data: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            raise InvalidInput(
                f"format {self.info.name} needs E4M3 block scales; got none.", hint="pass the scales that came with the data"
            )
        values = unpack_e2m1(data)
        blocks = split(values, 1, self.info.block_k, self.info)
        return (blocks * scale.to(torch.float32)[..., :, None, :, None]).reshape(values.shape)


def _scalar(static_scale: float | None, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(1.0 if static_scale is None else static_scale, dtype=torch.float32, device=like.device)


make = NVFP4
