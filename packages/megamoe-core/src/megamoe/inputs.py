"""What ``Session.run`` accepts, checked in one place for every backend, before any collective or launch. Touches no tensor data, except ids
where the rules of :class:`megamoe.MoEProblem` say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megamoe.errors import InvalidInput
from megamoe.formats import describe
from megamoe.formats.elements import SCALE_TYPES, TORCH_TYPE

if TYPE_CHECKING:
    from megamoe.formats import FormatInfo
    from megamoe.problem import MoEProblem


def check_inputs(
    problem: MoEProblem,
    device: torch.device,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    alignment: int = 1,
) -> None:
    """Check the arguments of ``Session.run`` against its documentation; ids are checked for type and shape only, see :func:`find_bad_ids`.

    Rows may be slices of wider tensors: only the last dimension has to be contiguous.

    Args:
        problem: what the session runs.
        device: where the session's weights are.
        x, topk_ids, topk_weights, x_scale, out: as passed to ``run``.
        alignment: bytes that the addresses and row strides of ``x``, ``x_scale`` and ``out`` must be multiples of.

    Raises:
        InvalidInput: the first argument that does not fit; names got, allowed and the fix.
    """
    info = describe(problem.format)
    element = TORCH_TYPE[info.element]
    _check_kind("x", x, device, (torch.bfloat16,) if element == torch.bfloat16 else (torch.bfloat16, element))
    tokens = x.shape[0] if x.dim() else 0
    width = problem.hidden // 2 if info.element == "e2m1" and x.dtype == element else problem.hidden
    _check_rows("x", x, (tokens, width), alignment, hint=f"pass (tokens, {width}); flatten batch and sequence into tokens")
    if tokens > problem.max_tokens:
        raise InvalidInput(
            f"{tokens} tokens; allowed: 0 to max_tokens={problem.max_tokens} per rank and call.",
            hint="split the batch, or make the problem with a larger max_tokens",
        )

    routes = (tokens, problem.top_k)
    _check_kind("topk_ids", topk_ids, device, (torch.int32, torch.int64))
    _check_rows("topk_ids", topk_ids, routes, 1, hint="one row of top_k expert ids for every row of x")
    _check_kind("topk_weights", topk_weights, device, (torch.float32, torch.bfloat16, torch.float16))
    _check_rows("topk_weights", topk_weights, routes, 1, hint="one row of top_k weights for every row of x")

    if x.dtype == torch.bfloat16 or not info.block_k:
        if x_scale is not None:
            raise InvalidInput(
                f"x_scale is given with x of {x.dtype}; allowed for format {info.name}: {_x_scale_rule(info)}.",
                hint="drop x_scale",
            )
    elif x_scale is None:
        raise InvalidInput(
            f"x is quantized ({x.dtype}) but x_scale is missing.",
            hint=f"pass x_scale of shape ({tokens}, {problem.hidden // info.block_k})",
        )
    else:
        _check_kind("x_scale", x_scale, device, SCALE_TYPES[info.scale])
        _check_rows("x_scale", x_scale, (tokens, -(-problem.hidden // info.block_k)), alignment, hint="pass the format's plain layout")

    if out is not None:
        _check_kind("out", out, device, (torch.bfloat16,))
        _check_rows("out", out, (tokens, problem.hidden), alignment, hint="pass torch.empty_like of a bf16 x, or no out")
        _check_writable(out, {"x": x, "x_scale": x_scale, "topk_ids": topk_ids, "topk_weights": topk_weights})


def _x_scale_rule(info: FormatInfo) -> str:
    if info.block_k:
        return f"with x of {TORCH_TYPE[info.element]} only"
    return "no x_scale, its activation scale is static" if info.tensor_scale else "no x_scale"


def checked_at_once(problem: MoEProblem, topk_ids: torch.Tensor) -> bool:
    """Whether ids out of range raise before any work (no synchronization is needed, or it was asked for), or with the next call."""
    return problem.checked or topk_ids.device.type == "cpu"


def find_bad_ids(topk_ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Look for ids outside -1 to ``experts - 1``, without synchronizing.

    Returns:
        (3,) int64 on the ids' device: how many are out of range, position of the first in the flattened ids, and its value.
    """
    flat = topk_ids.reshape(-1).to(torch.int64)
    if flat.numel() == 0:
        return torch.zeros(3, dtype=torch.int64, device=flat.device)
    bad = (flat < -1) | (flat >= experts)
    first = bad.to(torch.int32).argmax()
    return torch.stack((bad.sum(), first, flat.gather(0, first.unsqueeze(0)).squeeze(0)))


def raise_bad_ids(report: torch.Tensor, problem: MoEProblem, *, call: str = "this call") -> None:
    """Turn a report of :func:`find_bad_ids` into an error. Synchronizes.

    Raises:
        InvalidInput: the report counts at least one id.
    """
    count, first, value = report.tolist()
    if count:
        token, slot = divmod(first, problem.top_k)
        raise InvalidInput(
            f"topk_ids of {call} has {count} ids out of range, the first is {value} at token {token}, slot {slot}; "
            f"allowed: 0 to {problem.experts - 1}, and -1 for no route.",
            hint="check the router; pass -1 for padding",
        )


def _check_kind(name: str, tensor: object, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(f"{name} is {type(tensor).__name__}; allowed: a torch.Tensor.", hint=f"pass {name} as a tensor on {device}")
    if tensor.dtype not in dtypes:
        raise InvalidInput(f"{name} is {tensor.dtype}; allowed: {' or '.join(map(str, dtypes))}.", hint=f"convert {name} to {dtypes[0]}")
    if tensor.device != device:
        raise InvalidInput(f"{name} is on {tensor.device}; allowed: {device}, where the weights are.", hint=f"pass {name}.to('{device}')")


def _check_rows(name: str, tensor: torch.Tensor, shape: tuple[int, int], alignment: int, *, hint: str) -> None:
    if tuple(tensor.shape) != shape:
        raise InvalidInput(f"{name} has shape {tuple(tensor.shape)}; allowed: {shape}.", hint=hint)
    rows, columns = shape
    if rows and columns > 1 and tensor.stride(1) != 1:
        raise InvalidInput(
            f"{name} has strides {tuple(tensor.stride())}; allowed: the last dimension contiguous.", hint=f"pass {name}.contiguous()"
        )
    size = tensor.element_size()
    if rows and tensor.data_ptr() % alignment:
        raise InvalidInput(
            f"{name} starts at an address that is not a multiple of {alignment} bytes; allowed: {alignment}-byte aligned.",
            hint=f"pass {name}.clone()",
        )
    if rows > 1 and tensor.stride(0) * size % alignment:
        raise InvalidInput(
            f"{name} has rows {tensor.stride(0) * size} bytes apart; allowed: multiples of {alignment} bytes.",
            hint=f"pass {name}.contiguous()",
        )


def _check_writable(out: torch.Tensor, inputs: dict[str, torch.Tensor | None]) -> None:
    rows, columns = out.shape
    if rows > 1 and out.stride(0) < columns:
        raise InvalidInput(
            f"out has strides {tuple(out.stride())}, so its rows overlap; allowed: rows at least {columns} elements apart.",
            hint="pass a tensor of its own memory",
        )
    for name, tensor in inputs.items():
        if tensor is not None and _overlap(out, tensor):
            raise InvalidInput(
                f"out shares memory with {name}; allowed: memory of its own, peers may still read {name} while out is written.",
                hint="pass another out, or none",
            )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two row matrices can share a byte. Column slices of one wide tensor do not."""
    if not a.numel() or not b.numel():
        return False
    (start_a, row_a, pitch_a, end_a), (start_b, row_b, pitch_b, end_b) = _extent(a), _extent(b)
    if end_a <= start_b or end_b <= start_a:
        return False
    if pitch_a != pitch_b or not pitch_a:
        return True
    shift = (start_b - start_a) % pitch_a
    return shift < row_a or shift + row_b > pitch_a


def _extent(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """First byte, bytes of a row, bytes between rows, and the byte after the last."""
    size, rows, columns = tensor.element_size(), *tensor.shape
    start, row, pitch = tensor.data_ptr(), columns * size, tensor.stride(0) * size
    return start, row, pitch, start + (rows - 1) * pitch + row
