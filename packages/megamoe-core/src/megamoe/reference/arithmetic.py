"""The layer's arithmetic, one expert at a time, with every rounding where the kernels have it. No routing and no communication here.

h    = x @ w13^T + b13                      float32, on the dequantized operands
a    = (up + up_bias) * gate * sigmoid(alpha * gate)          clamped first if the activation has a limit
a    = a * routing weight                   only with routing_weight="early"
mid  = a, quantized in the format
row  = bf16(mid @ w2^T + b2)                float32, one rounding
y    = bf16(sum over slots of w * row)      float32 in slot order, one rounding; w = 1 with "early"
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megamoe.formats.base import Format
    from megamoe.problem import MoEProblem, SwiGLU
    from megamoe.reference.weights import Expert


def expert_rows(
    problem: MoEProblem, fmt: Format, expert: Expert, x: torch.Tensor, routing_weight: torch.Tensor, mid_scale: float | None
) -> torch.Tensor:
    """What one expert makes of its rows.

    Args:
        problem: activation and where the routing weight goes.
        fmt: the number format.
        expert: its weights as values.
        x: (rows, hidden) float32, the dequantized input.
        routing_weight: (rows,) float32.
        mid_scale: static scale of the value between FC1 and FC2, where the format has one.

    Returns:
        (rows, hidden) bf16.
    """
    h = x @ expert.w13.T
    if expert.b13 is not None:
        h = h + expert.b13
    gate, up = h.chunk(2, dim=1)
    a = swiglu(gate, up, problem.activation)
    if problem.routing_weight == "early":
        a = a * routing_weight[:, None]
    mid = fmt.dequantize(*fmt.quantize(a, static_scale=mid_scale), static_scale=mid_scale)
    y = mid @ expert.w2.T
    if expert.b2 is not None:
        y = y + expert.b2
    return y.to(torch.bfloat16)


def swiglu(gate: torch.Tensor, up: torch.Tensor, activation: SwiGLU) -> torch.Tensor:
    """The gated activation, elementwise in float32."""
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(min=-activation.limit, max=activation.limit)
    return (up + activation.up_bias) * gate * torch.sigmoid(activation.alpha * gate)


def weighted_sum(rows: torch.Tensor, routed: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum every token's rows in slot order.

    Args:
        rows: (routes, hidden) bf16, the rows of all routed (token, slot) pairs, in that order.
        routed: (tokens, top_k) bool, which pairs have a row.
        weights: (tokens, top_k) float32; where there is no row it is not read, so it may be anything.

    Returns:
        (tokens, hidden) bf16; zero for tokens without a row.
    """
    tokens, top_k = routed.shape
    position = routed.reshape(-1).cumsum(0).reshape(tokens, top_k) - 1
    total = torch.zeros(tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    for slot in range(top_k):
        token = routed[:, slot].nonzero().squeeze(1)
        total[token] += weights[token, slot, None] * rows[position[token, slot]].to(torch.float32)
    return total.to(torch.bfloat16)


@contextmanager
def float32_arithmetic(device: torch.device) -> Iterator[None]:
    """True float32 products whatever the caller chose for the process: no autocast, no TF32, no bf16 products; no autograd."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _IEEE:
        yield


class _Ieee:
    """Torch's setting for float32 products, which is the process's: the first thread to come sets it, the last to leave puts back what the
    process had chosen."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._chosen: list[tuple[Any, str]] = []

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
                self._chosen = [(backend, backend.fp32_precision) for backend in backends]
                for backend in backends:
                    backend.fp32_precision = "ieee"
            self._inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                for backend, precision in self._chosen:
                    backend.fp32_precision = precision


_IEEE = _Ieee()
