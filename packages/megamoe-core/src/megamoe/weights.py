"""This rank's expert weights as a user hands them over: bf16, or quantized with their scales as checkpoints hold them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from megamoe.errors import InvalidInput
from megamoe.formats import FormatInfo, describe

if TYPE_CHECKING:
    import torch

    from megamoe.problem import MoEProblem

_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Normal float32 numbers: kernels hold static scales, and divide by them, in float32."""


@dataclass(slots=True, eq=False)
class ExpertWeights:
    """Weights of the experts that this rank holds, ``E`` of them, in the order of its local slots.

    Shapes use ``H`` hidden and ``I`` intermediate (after the activation).
    Data are bf16 (quantized when packed) or already in the problem's element type; both tensors the same way. K is contiguous.

    Attributes:
        w13: (E, 2 I, H), gate rows first, then up rows; ``nvfp4`` quantized: (E, 2 I, H / 2) uint8, low nibble first.
        w2: (E, H, I); ``nvfp4`` quantized: (E, H, I / 2) uint8.
        w13_scale: quantized only. ``fp8_tensor``: (E,) float32. ``fp8_block128``: (E, ceil(2 I / 128), ceil(H / 128)) float32.
            ``mxfp8``: (E, 2 I, H / 32) float8_e8m0fnu or uint8. ``nvfp4``: (E, 2 I, H / 16) float8_e4m3fn.
            Scales multiply: value = data * scale.
        w2_scale: likewise for ``w2``.
        w13_global, w2_global: ``nvfp4`` only, (E,) float32, multiplies on top of the block scales; 1.0 when absent.
        x_scale: static activation scale, value = data * scale, a number above 0, equal on all ranks. ``fp8_tensor``: required.
            ``nvfp4``: 1.0 when absent. Other formats have none.
        mid_scale: the same for the re-quantized value between FC1 and FC2.
        b13: (E, 2 I) bf16 or float32, added to FC1's result before the activation; ``None`` for no bias.
        b2: (E, H) bf16 or float32, added to FC2's result of every route before it is weighted; needs ``routing_weight="late"``.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w13_global: torch.Tensor | None = None
    w2_global: torch.Tensor | None = None
    x_scale: float | None = None
    mid_scale: float | None = None
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None

    @property
    def quantized(self) -> bool:
        """Whether the data come with scales (or in an 8- or 4-bit type) instead of as bf16."""
        return str(self.w13.dtype) != "torch.bfloat16"

    @property
    def device(self) -> torch.device:
        """Where ``w13`` lies.

        Raises:
            InvalidInput: it is not a tensor, or has no data.
        """
        _dtype("w13", self.w13)
        if self.w13.is_meta:
            raise InvalidInput("w13 is on the meta device; allowed: loaded weights.", hint="load w13 onto this rank's device")
        return self.w13.device

    @property
    def experts(self) -> int:
        """``E``, the number of experts given.

        Raises:
            InvalidInput: ``w13`` is not a tensor of three dimensions.
        """
        _dtype("w13", self.w13)
        if self.w13.dim() != 3:
            raise InvalidInput(
                f"w13 has shape {tuple(self.w13.shape)}; allowed: (experts of this rank, 2 * intermediate, hidden).",
                hint="stack the experts along the first dimension",
            )
        return int(self.w13.shape[0])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor given, by field name."""
        import torch

        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def validate(self, problem: MoEProblem, experts: int) -> None:
        """Check everything against a problem and the number of local experts; touches no tensor data.

        Raises:
            InvalidInput: the first field that does not fit; names got, allowed and the fix.
        """
        info = describe(problem.format)
        self._check_scalars(info)
        hidden, inter = problem.hidden, problem.intermediate
        self._check_matrix("w13", info, (experts, 2 * inter, hidden))
        self._check_matrix("w2", info, (experts, hidden, inter))
        if self.w13.dtype != self.w2.dtype:
            raise InvalidInput(
                f"w13 is {self.w13.dtype} and w2 is {self.w2.dtype}; allowed: the same dtype.", hint="quantize both or neither"
            )
        for name, rows, cols in (("w13", 2 * inter, hidden), ("w2", hidden, inter)):
            self._check_scale(name, info, experts, rows, cols)
        for name, shape in (("b13", (experts, 2 * inter)), ("b2", (experts, hidden))):
            self._check_plain(name, getattr(self, name), shape, ("bfloat16", "float32"))
        if self.b2 is not None and problem.routing_weight != "late":
            raise InvalidInput(
                "b2 is given with routing_weight='early'; allowed: an output bias with 'late' only.",
                hint="use MoEProblem(routing_weight='late')",
            )
        devices = {str(t.device) for t in self.tensors().values()}
        if len(devices) > 1:
            raise InvalidInput(f"weights lie on {sorted(devices)}; allowed: one device.", hint="move all of them to this rank's device")

    def _check_matrix(self, name: str, info: FormatInfo, shape: tuple[int, int, int]) -> None:
        from megamoe.formats.elements import TORCH_TYPE

        tensor = getattr(self, name)
        dtype = _dtype(name, tensor)
        element = _name(TORCH_TYPE[info.element])
        if dtype not in ("bfloat16", element):
            raise InvalidInput(
                f"{name} is {dtype}; allowed for format {info.name}: {' or '.join(dict.fromkeys(('bfloat16', element)))}.",
                hint=f"pass {name}.to(torch.bfloat16)" + ("" if element == "bfloat16" else f", or {element} data with {name}_scale"),
            )
        if info.element == "e2m1" and dtype == element:
            shape = (shape[0], shape[1], shape[2] // 2)
        _check_shape(name, tensor, shape)
        if not tensor.is_contiguous():
            raise InvalidInput(
                f"{name} has strides {tuple(tensor.stride())}; allowed: contiguous, the last dimension (K) fastest.",
                hint=f"pass {name}.contiguous()",
            )

    def _check_scale(self, name: str, info: FormatInfo, experts: int, rows: int, cols: int) -> None:
        from megamoe.formats.elements import SCALE_TYPES

        scale, total = getattr(self, f"{name}_scale"), getattr(self, f"{name}_global")
        if not self.quantized or info.element == "bf16":
            for what, given in ((f"{name}_scale", scale), (f"{name}_global", total)):
                if given is not None:
                    raise InvalidInput(
                        f"{what} is given but {name} is bfloat16; allowed: scales with quantized data only.", hint=f"drop {what}"
                    )
            return
        if scale is None:
            raise InvalidInput(f"{name} is quantized but {name}_scale is missing.", hint=f"pass {name}_scale, or bf16 weights")
        if info.block_k:
            shape: tuple[int, ...] = (experts, -(-rows // info.block_rows), -(-cols // info.block_k))
            dtypes = tuple(map(_name, SCALE_TYPES[info.scale]))
        else:
            shape, dtypes = (experts,), ("float32",)
        self._check_plain(f"{name}_scale", scale, shape, dtypes)
        if total is not None and info.element != "e2m1":
            raise InvalidInput(f"{name}_global is given for format {info.name}; allowed: nvfp4 only.", hint=f"drop {name}_global")
        self._check_plain(f"{name}_global", total, (experts,), ("float32",))

    def _check_plain(self, name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        if tensor is None:
            return
        if _dtype(name, tensor) not in dtypes:
            raise InvalidInput(f"{name} is {_dtype(name, tensor)}; allowed: {' or '.join(dtypes)}.", hint=f"convert {name}")
        _check_shape(name, tensor, shape)
        if not tensor.is_contiguous():
            raise InvalidInput(f"{name} has strides {tuple(tensor.stride())}; allowed: contiguous.", hint=f"pass {name}.contiguous()")

    def _check_scalars(self, info: FormatInfo) -> None:
        for name in ("x_scale", "mid_scale"):
            value = getattr(self, name)
            if value is None:
                if info.tensor_scale == "required":
                    raise InvalidInput(
                        f"{name} is missing; format {info.name} quantizes activations with one static scale.",
                        hint=f"calibrate on sample data: {name} = largest absolute value / {info.max_value:g}",
                    )
                continue
            if not info.tensor_scale:
                raise InvalidInput(f"{name} is given but format {info.name} has no static activation scale.", hint=f"drop {name}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not _SMALLEST <= value <= _LARGEST:
                raise InvalidInput(
                    f"{name}={value!r}; allowed: a Python number, normal in float32: 2^-126 to below 2^128.", hint=f"pass float({name})"
                )


def _dtype(name: str, tensor: object) -> str:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(f"{name} is {type(tensor).__name__}; allowed: a torch.Tensor.", hint=f"pass {name} as a tensor")
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise InvalidInput(
            f"{name} has shape {tuple(tensor.shape)}; allowed: {shape}.", hint="experts of this rank only, gate rows before up rows, K last"
        )
