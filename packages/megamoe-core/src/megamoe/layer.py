"""``MoELayer``: the expert layer as a module, on whatever backend this machine has."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import torch

from megamoe import ops
from megamoe.ep.confighash import reject
from megamoe.ep.group import Group
from megamoe.errors import InvalidInput, MegaMoEError, SessionClosed
from megamoe.problem import MoEProblem
from megamoe.select import get_backend
from megamoe.weights import ExpertWeights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megamoe.protocol import Backend, Plan, Session


class MoELayer(torch.nn.Module):
    """Routed experts of one MoE layer, for inference.

    Making one is collective over ``group``: every rank does it with the same problem and its own experts. So are calls and ``close``.
    Usable as a context manager, which closes it. It has no parameters: weights are packed once, :meth:`update` refits them. It cannot be
    copied or pickled.

    Args:
        problem: the layer.
        weights: the experts that this rank holds, in the order of ``problem.resolved_placement(ranks).local[rank]``, on this rank's device.
        backend: name of a backend, or ``None`` or ``"auto"`` for the one that fits (``MEGAMOE_BACKEND``, then the device).
        group: the expert-parallel process group; ``None`` is a group of one rank.

    Raises:
        InvalidInput: weights or group do not fit the problem.
        UnsupportedProblem: the backend cannot compute it; carries every reason.
        BackendNotFound, BackendUnavailable, BackendIncompatible, BackendBroken, BackendAmbiguous: no backend can be used.
        RankMismatch: the ranks disagree on backend, version, problem or static scales; raised on every rank.
        PeerAborted: another rank raised one of the above.
    """

    def __init__(self, problem: MoEProblem, weights: ExpertWeights, backend: str | None = None, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.problem = problem
        ours = Group.of(group)
        device = torch.device("cpu")
        try:
            device = _device(problem, weights)
            chosen: Backend = get_backend(backend, device=device)
            plan = chosen.plan(problem, ranks=ours.size)
            self._packed = chosen.prepare_weights(plan, weights)
        except BaseException as error:
            # The others are on their way into open_session, where they would wait for this rank.
            reject(ours, error, device)
            raise
        self._session: Session | None = chosen.open_session(plan, self._packed, group)
        self._handle = ops.register(self)

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        x_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer on this rank's tokens. Collective. Arguments, result and errors are those of :meth:`megamoe.protocol.Session.run`.

        There is no backward: a gradient that arrives at the result raises. Works under ``torch.compile(fullgraph=True)``.
        """
        if torch.compiler.is_compiling():  # an operator that the compiler does not look into; it says itself when the layer was closed
            if out is not None and not _wants_gradient(x, topk_weights):
                ops.layer_out(self._handle, x, topk_ids, topk_weights, x_scale, out)
                return out
            made: torch.Tensor = ops.layer(self._handle, self.problem.hidden, x, topk_ids, topk_weights, x_scale)
            # An operator that writes into an argument cannot refuse a gradient.
            return made if out is None else out.copy_(made)
        y = self._open().run(x, topk_ids, topk_weights, x_scale=x_scale, out=out)
        if _wants_gradient(x, topk_weights):
            return cast("torch.Tensor", _NoBackward.apply(y, x, topk_weights))  # type: ignore[no-untyped-call]
        return y

    @property
    def plan(self) -> Plan:
        """What runs: backend, knobs, memory regions."""
        return self._packed.plan

    @property
    def session(self) -> Session:
        """The open session.

        Raises:
            SessionClosed: after ``close``.
        """
        return self._open()

    def update(self, weights: ExpertWeights) -> None:
        """Refit in place: same shapes, dtypes and static scales, other values.

        Raises:
            InvalidInput: the weights differ in more than values.
            SessionClosed: after ``close``.
        """
        self._open()
        self._packed.update(weights)

    def counts(self) -> torch.Tensor:
        """(local experts,) int64 on the host: rows that each local expert received in the last call. Synchronizes.

        Raises:
            SessionClosed: after ``close``.
            InvalidInput: the last call had ids out of range.
        """
        return self._open().counts()

    def close(self) -> None:
        """Release everything. Collective; safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def __getstate__(self) -> NoReturn:
        raise MegaMoEError(
            "A MoELayer cannot be copied or pickled: it holds an open session with its peers.",
            hint="make another one from the problem and the weights",
        )

    def extra_repr(self) -> str:
        state = "open" if self._session is not None else "closed"
        return f"{self.problem}, backend={self.plan.backend!r}, ranks={self.plan.ranks}, {state}"

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open(self) -> Session:
        if self._session is None:
            raise SessionClosed("This MoELayer was closed.", hint="make another one, or close it later")
        return self._session


def _device(problem: MoEProblem, weights: ExpertWeights) -> torch.device:
    """Where the weights are."""
    for name, value, kind in (("problem", problem, MoEProblem), ("weights", weights, ExpertWeights)):
        if not isinstance(value, kind):
            allowed = f"megamoe.{kind.__name__}"
            raise InvalidInput(f"{name} is a {type(value).__name__}; allowed: a {allowed}.", hint=f"pass {allowed}(...)")
    return weights.device


def _wants_gradient(x: torch.Tensor, topk_weights: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad)


class _NoBackward(torch.autograd.Function):
    """Keeps the result attached to the graph, so that a backward pass fails instead of silently missing a gradient."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        raise ops.no_backward()
