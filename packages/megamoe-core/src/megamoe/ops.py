"""``torch.ops.megamoe``: the layer as operators that torch.compile does not look into, so that models compile with ``fullgraph=True``.

An operator's arguments are tensors and plain numbers, so a layer is passed as a handle. Handles hold no reference: a layer that was
closed or collected is an error of the call, not of the compiled graph's caller.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from megamoe.errors import MegaMoEError, SessionClosed

if TYPE_CHECKING:
    from megamoe.layer import MoELayer
    from megamoe.protocol import Session

_NUMBERS = itertools.count(1)
_LAYERS: weakref.WeakValueDictionary[int, MoELayer] = weakref.WeakValueDictionary()


def register(owner: MoELayer) -> int:
    """A handle of a layer for the operators below."""
    handle = next(_NUMBERS)
    _LAYERS[handle] = owner
    return handle


@torch.library.custom_op("megamoe::layer", mutates_args=())
def layer(
    handle: int, hidden: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, x_scale: torch.Tensor | None
) -> torch.Tensor:
    """Run a session into a new tensor. Arguments and errors are those of :meth:`megamoe.protocol.Session.run`."""
    return _session(handle).run(x, topk_ids, topk_weights, x_scale=x_scale)


@layer.register_fake
def _(
    handle: int, hidden: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, x_scale: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty((x.shape[0], hidden), dtype=torch.bfloat16)


@torch.library.custom_op("megamoe::refuse_gradient", mutates_args=())
def refuse_gradient(grad: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Stands in the backward graph of ``layer``, which is traced also where no gradient ever arrives; raises when one does."""
    raise no_backward()


@refuse_gradient.register_fake
def _(grad: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(of)


def no_backward() -> MegaMoEError:
    """The error of a gradient that arrives at the result of a layer."""
    return MegaMoEError("MoELayer is for inference and has no backward.", hint="call it under torch.no_grad()")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, x, _, topk_weights, _ = inputs
    ctx.save_for_backward(x, topk_weights)


def _refuse(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, topk_weights = ctx.saved_tensors
    return None, None, refuse_gradient(grad, x), None, refuse_gradient(grad, topk_weights), None


layer.register_autograd(_refuse, setup_context=_keep)


@torch.library.custom_op("megamoe::layer_out", mutates_args=("out",))
def layer_out(
    handle: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, x_scale: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Run a session into ``out``."""
    _session(handle).run(x, topk_ids, topk_weights, x_scale=x_scale, out=out)


@layer_out.register_fake
def _(
    handle: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, x_scale: torch.Tensor | None, out: torch.Tensor
) -> None:
    return None


def _session(handle: int) -> Session:
    owner = _LAYERS.get(handle)
    if owner is None:
        raise SessionClosed("The MoELayer of a compiled model is gone.", hint="keep the layer while the compiled model is used")
    return owner.session
