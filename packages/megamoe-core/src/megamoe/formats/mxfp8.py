"""``mxfp8``, ``mxfp8_e5m2``: OCP microscaling FP8, one power-of-two (UE8M0) scale per 32 elements of a row.

The scale is the smallest power of two not below ``amax / largest element`` (``amax`` times the float32 reciprocal), as a biased exponent
byte; a block of zeros has byte 0. ``data = round(value * 2^(127 - byte))``, saturating. A NaN or an infinity in a block makes its byte 255,
which is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megamoe.errors import InvalidInput
from megamoe.formats.base import Quantized
from megamoe.formats.blocks import largest, split
from megamoe.formats.elements import round_fp8

if TYPE_CHECKING:
    from megamoe.formats import FormatInfo

_MANTISSA = 0x7FFFFF
_NAN_BYTE = 255


@dataclass(frozen=True, slots=True)
class MXFP8:
    """See :class:`megamoe.formats.base.Format`. Scales are float8_e8m0fnu, (..., K / 32) or (E, N, K / 32); uint8 is read alike."""

    info: FormatInfo

    def quantize(self, values: torch.Tensor, *, static_scale: float | None = None) -> Quantized:
        blocks = split(values, 1, self.info.block_k, self.info)
        amax = largest(blocks)
        byte = exponent_byte(amax, self.info.max_value)
        # 2^(127 - byte) built from its bits; a finite amax never gives more than 247.
        multiplier = ((254 - byte.clamp(max=253)) << 23).view(torch.float32)
        multiplier = torch.where(byte == _NAN_BYTE, torch.nan, multiplier)
        data = round_fp8(torch.where(byte == 0, 0.0, blocks * multiplier), self.info)
        scale = byte.to(torch.uint8).view(torch.float8_e8m0fnu)
        return Quantized(data.reshape(values.shape), scale.squeeze(-1).squeeze(-2))

    def dequantize(self, data: torch.Tensor, scale: torch.Tensor | None, *, static_scale: float | None = None) -> torch.Tensor:
        if scale is None:
            raise InvalidInput(
                f"format {self.info.name} needs UE8M0 block scales; got none.", hint="pass the scales that came with the data"
            )
        blocks = split(data, 1, self.info.block_k, self.info)
        return (blocks * scale.view(torch.float8_e8m0fnu).to(torch.float32)[..., :, None, :, None]).reshape(data.shape)

    def quantize_weight(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        return *self.quantize(values), None

    def dequantize_weight(self, data: torch.Tensor, scale: torch.Tensor | None, total: torch.Tensor | None) -> torch.Tensor:
        return self.dequantize(data, scale)


def exponent_byte(amax: torch.Tensor, max_value: float) -> torch.Tensor:
    """Biased exponent (int32, 0 to 255) of the smallest power of two not below ``amax / max_value``; ``amax`` float32, not negative."""
    bits = (amax * torch.tensor(1.0 / max_value, dtype=torch.float32, device=amax.device)).view(torch.int32)
    byte = (bits >> 23) + ((bits & _MANTISSA) != 0).to(torch.int32)
    return torch.where(amax.isnan(), _NAN_BYTE, byte)


make = MXFP8
