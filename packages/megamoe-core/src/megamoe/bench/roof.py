"""The best that a GPU can do, measured, and the floor that it sets under a workload."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from megamoe.bench.timing import measure
from megamoe.formats import describe

if TYPE_CHECKING:
    from megamoe.bench.workloads import Shape

_READ_BYTES = 4 << 30
_GEMM = 8192


@dataclass(frozen=True, slots=True)
class Roof:
    """Rates of one GPU.

    Attributes:
        read_tb_s: read-only reduction of a tensor that does not fit in any cache, in 10^12 bytes per second.
        fp8_tflops: cuBLAS, 8192^3, E4M3 per tensor, random data.
        bf16_tflops: the same in bf16.
    """

    read_tb_s: float
    fp8_tflops: float
    bf16_tflops: float

    def floor_ms(self, shape: Shape, format: str, tokens: int, touched: float) -> float:
        """Least time of a workload on one rank: its touched experts' weights have to be read, its products have to be formed.

        Args:
            shape, format, tokens: the workload.
            touched: experts with at least one route (a mean over input sets).
        """
        info = describe(format)
        width = {"bf16": 2.0, "e2m1": 0.5}.get(info.element, 1.0)
        rate = self.bf16_tflops if info.element == "bf16" else self.fp8_tflops
        read = touched * shape.expert_elements * width / self.read_tb_s
        math = 2 * tokens * shape.top_k * shape.expert_elements / rate
        return max(read, math) * 1e-9

    def as_dict(self) -> dict[str, float]:
        """For the result file."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


H200 = Roof(read_tb_s=4.45, fp8_tflops=1468.0, bf16_tflops=790.0)
"""One NVIDIA H200 as measured on 2026-11-30 (driver 580, torch 2.11). Fixed, so that results of different days share their floors."""


def measure_roof() -> Roof:
    """Measure the current CUDA device; takes about a second and 5 GiB."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(0)
    block = torch.randint(0, 1 << 30, (_READ_BYTES // 4,), dtype=torch.int32, device="cuda", generator=generator).view(torch.float32)
    a, b = (torch.randn(_GEMM, _GEMM, device="cuda", generator=generator).to(torch.bfloat16) for _ in range(2))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    times = measure(
        {
            "read": [lambda: block.amax()],
            "bf16": [lambda: torch.mm(a, b.t())],
            "fp8": [lambda: torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)],
        }
    )
    operations = 2 * _GEMM**3
    return Roof(
        read_tb_s=_READ_BYTES / times["read"].ms * 1e-9,
        fp8_tflops=operations / times["fp8"].ms * 1e-9,
        bf16_tflops=operations / times["bf16"].ms * 1e-9,
    )
