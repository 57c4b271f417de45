"""Shared steps of the formats with block scales: splitting a tensor into blocks and finding each block's largest magnitude."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megamoe.errors import InvalidInput

if TYPE_CHECKING:
    from megamoe.formats import FormatInfo


def split(values: torch.Tensor, rows: int, cols: int, info: FormatInfo) -> torch.Tensor:
    """(..., N, K) -> float32 (..., N / rows, rows, K / cols, cols).

    Raises:
        InvalidInput: N or K is not a multiple of the block.
    """
    *lead, n, k = values.shape
    if n % rows or k % cols:
        raise InvalidInput(
            f"a ({n}, {k}) matrix does not divide into {rows} x {cols} blocks of format {info.name}.",
            hint=f"pad to multiples of {rows} rows and {cols} columns, or use another format",
        )
    return values.to(torch.float32).reshape(*lead, n // rows, rows, k // cols, cols)


def largest(blocks: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each block, (..., N / rows, 1, K / cols, 1); NaN where the block holds a NaN or an infinity."""
    amax = blocks.abs().amax(dim=(-3, -1), keepdim=True)
    return torch.where(amax.isfinite(), amax, torch.nan)
