"""What every format's module implements, in torch, on CPU and GPU alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from megamoe.formats import FormatInfo


class Quantized(NamedTuple):
    """Data with the scales that turn them back into values: ``value = data * block scale * tensor scale``.

    Attributes:
        data: (..., K) in the format's element type; ``e2m1`` packs two along K into a uint8, low nibble first.
        scale: block scales in the plain layout, (..., K / block_k) for activations; ``None`` when the format has none.
    """

    data: torch.Tensor
    scale: torch.Tensor | None


class Format(Protocol):
    """One number format. Rounding is exactly what the kernels do."""

    @property
    def info(self) -> FormatInfo:
        """The format's facts."""
        ...

    def quantize(self, values: torch.Tensor, *, static_scale: float | None = None) -> Quantized:
        """Quantize activations row by row.

        Args:
            values: (..., K) bf16 or float32, K a multiple of the format's block.
            static_scale: the tensor scale, value = data * scale; required by ``fp8_tensor``, 1.0 when absent in ``nvfp4``.
        """
        ...

    def dequantize(self, data: torch.Tensor, scale: torch.Tensor | None, *, static_scale: float | None = None) -> torch.Tensor:
        """Back to float32, (..., K)."""
        ...

    def quantize_weight(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Quantize expert weights (E, N, K) bf16 or float32.

        Returns:
            data, scale and global scale with the shapes that ``ExpertWeights`` documents; ``None`` where the format has none.
        """
        ...

    def dequantize_weight(self, data: torch.Tensor, scale: torch.Tensor | None, total: torch.Tensor | None) -> torch.Tensor:
        """Back to float32, (E, N, K)."""
        ...
