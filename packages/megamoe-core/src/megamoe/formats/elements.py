"""Rounding float32 to the small element types: to nearest, ties to even, saturating, sign of zero kept, NaN kept where the type has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megamoe.formats import FormatInfo

TORCH_TYPE = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.uint8}
"""How torch holds each element type of ``FormatInfo.element``."""
SCALE_TYPES = {"f32": (torch.float32,), "e8m0": (torch.float8_e8m0fnu, torch.uint8), "e4m3": (torch.float8_e4m3fn,)}
"""What block scales of each ``FormatInfo.scale`` may be held in; the first is what quantizing gives."""

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# A value belongs to the next code above each midpoint; at the midpoint itself the even code wins.
_E2M1_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def divided(values: torch.Tensor, number: float) -> torch.Tensor:
    """float32 ``values / number``, correctly rounded on every device.

    With a Python number torch on CUDA multiplies by the rounded reciprocal instead, which is a unit in the last place off now and then.
    """
    return values / torch.full((), number, dtype=torch.float32, device=values.device)


def round_fp8(values: torch.Tensor, info: FormatInfo) -> torch.Tensor:
    """float32 -> float8, saturating at the largest finite element (infinities too)."""
    return values.clamp(-info.max_value, info.max_value).to(TORCH_TYPE[info.element])


def pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    """float32 (..., K) without NaN -> uint8 (..., K / 2): two E2M1 codes a byte, even K in the low nibble."""
    magnitude = values.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for midpoint, inclusive in _E2M1_MIDPOINTS:
        code += (magnitude >= midpoint) if inclusive else (magnitude > midpoint)
    code |= torch.signbit(values).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_e2m1(data: torch.Tensor) -> torch.Tensor:
    """uint8 (..., K / 2) -> float32 (..., K)."""
    table = torch.tensor([*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)], dtype=torch.float32, device=data.device)
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
    return table[codes.long()]
