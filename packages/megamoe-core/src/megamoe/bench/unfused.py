"""The layer as a torch pipeline: what a user would write without a fused kernel.

    sort routes by expert -> gather and quantize rows -> grouped GEMM -> gated activation, quantize -> grouped GEMM -> weighted index-add

torch's grouped FP8 GEMM has scales per row, not per 128 x 128 block, so block-scaled weights are re-quantized once, when they are packed,
and results differ from the format's own by that rounding. Elementwise steps are compiled with ``torch.compile`` where it works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from megamoe.formats import describe, load

if TYPE_CHECKING:
    from megamoe.problem import MoEProblem
    from megamoe.weights import ExpertWeights

_E4M3_MAX = 448.0
Grouped = Callable[[torch.Tensor, "torch.Tensor | None", torch.Tensor, "torch.Tensor | None", torch.Tensor], torch.Tensor]


class Unfused:
    """The pipeline with its packed weights.

    Args:
        problem: the layer; ``bf16``, ``fp8_tensor`` or ``fp8_block128``, late routing weights.
        weights: all experts, with or without biases.
        compiled: fuse elementwise steps with ``torch.compile``.
        grouped: (rows, row scales, (E, N, K), (E, N) scales, ends) -> (rows, N) bf16; replaceable for tests.
    """

    def __init__(self, problem: MoEProblem, weights: ExpertWeights, *, compiled: bool = True, grouped: Grouped | None = None) -> None:
        self.problem = problem
        self.fp8 = describe(problem.format).element != "bf16"
        self._w13, self._s13 = _rowwise(problem.format, weights.w13, weights.w13_scale, self.fp8)
        self._w2, self._s2 = _rowwise(problem.format, weights.w2, weights.w2_scale, self.fp8)
        self._b13, self._b2 = weights.b13, weights.b2
        self._grouped = grouped or _grouped
        fuse: Any = torch.compile(dynamic=True) if compiled else _unchanged
        self._quantize = fuse(_quantize_rows)
        self._activate = fuse(_activate_quantize if self.fp8 else _activate)
        self._weigh = fuse(_weigh)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Run the layer: (tokens, hidden) bf16 and its routes -> ``out``."""
        experts, top_k = self.problem.experts, self.problem.top_k
        flat = ids.flatten()
        flat = torch.where(flat < 0, experts, flat)
        sorted_ids, order = flat.sort(stable=True)
        ends = torch.searchsorted(sorted_ids, torch.arange(experts, device=x.device, dtype=sorted_ids.dtype), right=True).to(torch.int32)
        token = order // top_k
        rows, scale = self._quantize(x) if self.fp8 else (x, None)
        fc1 = self._grouped(rows[token], None if scale is None else scale[token], self._w13, self._s13, ends)
        form, owner = self.problem.activation, sorted_ids.clamp(max=experts - 1)
        made = self._activate(_with_bias(fc1, self._b13, owner), form.limit, form.alpha, form.up_bias)
        mid, mid_scale = made if self.fp8 else (made, None)
        fc2 = self._grouped(mid, mid_scale, self._w2, self._s2, ends)
        total = torch.zeros(x.shape[0], self.problem.hidden, dtype=torch.float32, device=x.device)
        total.index_add_(0, token, self._weigh(_with_bias(fc2, self._b2, owner), weights.flatten()[order], sorted_ids < experts))
        return out.copy_(total)


def _unchanged(function: Any) -> Any:
    return function


def _rowwise(format: str, data: torch.Tensor, scale: torch.Tensor | None, fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(E, N, K) with one scale per row, expert by expert to bound the float32 temporary."""
    if not fp8:
        return data, None
    packed = torch.empty(data.shape, dtype=torch.float8_e4m3fn, device=data.device)
    scales = torch.empty(data.shape[:2], dtype=torch.float32, device=data.device)
    for expert in range(data.shape[0]):
        part = slice(expert, expert + 1)
        values = load(format).dequantize_weight(data[part], None if scale is None else scale[part], None)
        packed[part], scales[part] = _quantize_rows(values)
    return packed, scales


def _grouped(
    rows: torch.Tensor, scale: torch.Tensor | None, weight: torch.Tensor, weight_scale: torch.Tensor | None, ends: torch.Tensor
) -> torch.Tensor:
    if scale is None or weight_scale is None:
        return torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    return torch._scaled_grouped_mm(
        rows, weight.transpose(1, 2), scale, weight_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exact = values.to(torch.float32)
    scale = exact.abs().amax(dim=-1).clamp(min=1e-10) / _E4M3_MAX
    return (exact / scale.unsqueeze(-1)).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scale


def _with_bias(rows: torch.Tensor, bias: torch.Tensor | None, expert: torch.Tensor) -> torch.Tensor:
    return rows if bias is None else rows + bias[expert]


def _activate(fc1: torch.Tensor, limit: float | None, alpha: float, up_bias: float) -> torch.Tensor:
    gate, up = fc1.to(torch.float32).chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + up_bias) * gate * torch.sigmoid(alpha * gate)).to(torch.bfloat16)


def _activate_quantize(fc1: torch.Tensor, limit: float | None, alpha: float, up_bias: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantize_rows(_activate(fc1, limit, alpha, up_bias))


def _weigh(fc2: torch.Tensor, weights: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
    # Rows behind the last expert's end are never written by the grouped GEMM and may hold anything.
    return torch.where(routed.unsqueeze(-1), fc2.to(torch.float32) * weights.unsqueeze(-1), 0.0)
