"""The number formats: one module each, and the table of what each is. Importing this package does not load torch.

``describe(name)`` gives the facts (block sizes, which scales exist); ``load(name)`` gives the :class:`Format` with the torch code.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from megamoe.errors import InvalidInput

if TYPE_CHECKING:
    from megamoe.formats.base import Format


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """What a format stores.

    Attributes:
        name: the name users choose by.
        module: where its torch code is, below ``megamoe.formats``.
        element: element type of the data: ``bf16``, ``e4m3``, ``e5m2`` or ``e2m1`` (two per byte along K, low nibble first).
        scale: element type of the block scales: ``f32``, ``e8m0``, ``e4m3``, or ``""`` when there are none.
        block_k: elements along K that share one scale; 0: no block scales.
        block_rows: weight rows that share one scale (activations always have one row of scales a token); 0: no block scales.
        tensor_scale: whether a scalar multiplies on top: ``"required"`` (static, calibrated), ``"optional"`` (1.0 when absent) or ``""``.
        multiple: hidden and intermediate must be multiples of this.
        max_value: largest finite element.
    """

    name: str
    module: str
    element: str
    scale: str
    block_k: int
    block_rows: int
    tensor_scale: str
    multiple: int
    max_value: float

    @property
    def element_bits(self) -> int:
        """Bits of an element."""
        return _BITS[self.element]

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block scale; 0 when there are none."""
        return _BITS[self.scale] // 8 if self.scale else 0


_BITS = {"bf16": 16, "e4m3": 8, "e5m2": 8, "e2m1": 4, "e8m0": 8, "f32": 32}

FORMATS = {
    info.name: info
    for info in (
        FormatInfo("bf16", "bf16", "bf16", "", 0, 0, "", 1, 3.3895313892515355e38),
        FormatInfo("fp8_tensor", "fp8_tensor", "e4m3", "", 0, 0, "required", 1, 448.0),
        FormatInfo("fp8_tensor_e5m2", "fp8_tensor", "e5m2", "", 0, 0, "required", 1, 57344.0),
        FormatInfo("fp8_block128", "fp8_block128", "e4m3", "f32", 128, 128, "", 128, 448.0),
        FormatInfo("mxfp8", "mxfp8", "e4m3", "e8m0", 32, 1, "", 32, 448.0),
        FormatInfo("mxfp8_e5m2", "mxfp8", "e5m2", "e8m0", 32, 1, "", 32, 57344.0),
        FormatInfo("nvfp4", "nvfp4", "e2m1", "e4m3", 16, 1, "optional", 16, 6.0),
    )
}
"""Every format by name."""


def describe(name: str) -> FormatInfo:
    """Facts about a format.

    Raises:
        InvalidInput: no such format; names the ones there are.
    """
    info = FORMATS.get(name) if isinstance(name, str) else None
    if info is None:
        raise InvalidInput(
            f"format={name!r} is not a format; allowed: {', '.join(FORMATS)}.", hint="pass one of these names as MoEProblem(format=...)"
        )
    return info


def load(name: str) -> Format:
    """The torch implementation of a format (imports torch)."""
    info = describe(name)
    return cast("Format", import_module(f"megamoe.formats.{info.module}").make(info))
