"""The layer that a kernel computes, as every operand order sees it: fields, what they may be, and the tiles that follow. Plain Python."""

from dataclasses import dataclass

FORMATS = ("fp8_block128", "fp8_tensor", "fp8_tensor_e5m2", "bf16")
TILE_N = 256  # weight rows of a tile: 128 gate and 128 up rows in FC1, 256 output columns in FC2
ROW_BYTES = 128  # a K block is one 128-byte swizzled line a row
SMEM_BYTES = 232448
MATH_WARPS = 8
THREADS = 384


@dataclass(frozen=True)
class LayerConfig:
    """What all kernels of a layer have in common. Every field is a compile-time constant.

    fmt: one of FORMATS. experts: of this rank. intermediate: the width after the activation. act_bf16: x is bf16 and is quantized in the
    launch; otherwise x comes in the format's type, with x_scale. limit (None for no clamp), alpha, up_bias: the activation. bias13, bias2:
    expert biases are there. early: routing weight applied before re-quantization. pdl: a launch may begin while the one before it on
    the stream ends (programmatic dependent launch).
    """

    fmt: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    act_bf16: bool = True
    limit: float | None = None
    alpha: float = 1.0
    up_bias: float = 0.0
    bias13: bool = False
    bias2: bool = False
    early: bool = False
    pdl: bool = False

    def __post_init__(self):
        faults = self.faults()
        if faults:
            raise ValueError("; ".join(faults))

    def faults(self) -> list[str]:
        """What is wrong, all of it: which field, what it is, and what it may be."""
        found = [self.not_among("fmt", FORMATS)]
        grain = 128 if self.block_scales else 64
        for name in ("hidden", "intermediate"):
            if getattr(self, name) <= 0 or getattr(self, name) % grain:
                found.append(f"{name}={getattr(self, name)}; allowed: multiples of {grain} for {self.fmt}")
        for name, most in (("experts", 512), ("top_k", 32)):
            if not 1 <= getattr(self, name) <= most:
                found.append(f"{name}={getattr(self, name)}; allowed: 1 to {most}")
        if self.early and self.bias2:
            found.append("bias2 with early; an output bias needs the late routing weight")
        return [fault for fault in found if fault]

    def not_among(self, name: str, allowed: tuple) -> str:
        """The fault of a field that has none of these values; "" where it has one."""
        value = getattr(self, name)
        return "" if value in allowed else f"{name}={value!r}; allowed: {', '.join(map(str, allowed))}"

    @property
    def block_scales(self) -> bool:
        return self.fmt == "fp8_block128"

    @property
    def e5m2(self) -> bool:
        return self.fmt == "fp8_tensor_e5m2"

    @property
    def element(self) -> int:
        """Bytes of one weight or activation element."""
        return 2 if self.fmt == "bf16" else 1

    @property
    def promotes(self) -> bool:
        """Tensor cores add up FP8 products for one K block only: of a sum they keep about 14 bits and cut off the rest."""
        return self.element == 1

    @property
    def quantize(self) -> bool:
        return self.act_bf16 and self.fmt != "bf16"

    @property
    def block_k(self) -> int:
        """Elements of a K block."""
        return ROW_BYTES // self.element

    @property
    def kb1(self) -> int:
        """K blocks of FC1."""
        return -(-self.hidden // self.block_k)

    @property
    def kb2(self) -> int:
        """K blocks of FC2."""
        return -(-self.intermediate // self.block_k)

    @property
    def n1(self) -> int:
        """FC1 tiles of an expert's weights: 128 gate and 128 up rows, 128 channels of mid."""
        return -(-self.intermediate // 128)

    @property
    def n2(self) -> int:
        """FC2 tiles of an expert's weights: 256 output columns."""
        return -(-self.hidden // TILE_N)
