"""An open session of the reference backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from megamoe.errors import PeerAborted, SessionClosed
from megamoe.formats import load
from megamoe.inputs import check_inputs, checked_at_once, find_bad_ids, raise_bad_ids
from megamoe.reference.arithmetic import expert_rows, float32_arithmetic, weighted_sum
from megamoe.reference.exchange import Exchange, Step
from megamoe.reference.routing import RouteTable, take

if TYPE_CHECKING:
    from megamoe.ep.group import Group
    from megamoe.protocol import Plan
    from megamoe.reference.weights import ReferenceWeights


class ReferenceSession:
    """See :class:`megamoe.protocol.Session`. Made by ``ReferenceBackend.open_session``.

    A rank whose ``run`` raises :class:`InvalidInput` tells the others, whose ``run`` then raises :class:`PeerAborted`; all may go on with
    the next call. A rank that closes (also by leaving its ``with`` block through an exception) ends the session for all.
    """

    def __init__(self, plan: Plan, weights: ReferenceWeights, group: Group) -> None:
        self._plan = plan
        self._weights: ReferenceWeights | None = weights
        self._exchange = Exchange(group, weights.device)
        self._format = load(plan.problem.format)
        placement = plan.problem.resolved_placement(plan.ranks)
        self._table = RouteTable(placement, plan.problem.experts, weights.device)
        self._counts = torch.zeros(weights.experts, dtype=torch.int64, device="cpu")
        self._bad_ids: torch.Tensor | None = None

    @property
    def plan(self) -> Plan:
        return self._plan

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        x_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weights = self._open()
        with float32_arithmetic(weights.device):
            y = self._layer(weights, x, topk_ids, topk_weights, x_scale, out)
            return y if out is None else out.copy_(y)

    def counts(self) -> torch.Tensor:
        self._open()
        self._raise_bad_ids()
        return self._counts.clone()

    def reset(self) -> None:
        self._open()
        self._exchange.announce(Step.RESET, [0] * self._plan.ranks)
        self._bad_ids = None

    def close(self) -> None:
        if self._weights is not None:
            self._weights = None
            self._tell(Step.LEAVE)

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _layer(
        self,
        weights: ReferenceWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        x_scale: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Quantize, send every route's row to its expert, compute, send the results back, sum."""
        exchange, late = self._exchange, self._plan.problem.routing_weight == "late"
        with self._or_tell(Step.REJECT):
            self._check(x, topk_ids, topk_weights, x_scale, out)
            if x.dtype == torch.bfloat16:
                x, x_scale = self._format.quantize(x, static_scale=weights.x_scale)
            topk_weights = topk_weights.to(torch.float32)
            routes = self._table.routes(topk_ids)
        there, here = routes.sent, exchange.announce(Step.RUN, routes.sent)
        data = exchange.rows(take(x, routes.token), there, here)
        scale = None if x_scale is None else exchange.rows(take(x_scale, routes.token), there, here)
        local = exchange.rows(routes.local, there, here)
        early = exchange.rows(topk_weights[routes.token, routes.slot], there, here)

        with self._or_tell(Step.FAIL):
            results = self._experts(weights, data, scale, local, early)
        exchange.announce(Step.RUN, here)
        rows = routes.back(exchange.rows(results, here, there))
        return weighted_sum(rows, routes.routed, topk_weights if late else torch.ones_like(topk_weights))

    def _experts(
        self, weights: ReferenceWeights, data: torch.Tensor, scale: torch.Tensor | None, local: torch.Tensor, early: torch.Tensor
    ) -> torch.Tensor:
        """What this rank's experts make of the rows they received: (rows, hidden) bf16, in the order of the rows."""
        problem, fmt = self._plan.problem, self._format
        results = torch.empty(len(local), problem.hidden, dtype=torch.bfloat16, device=weights.device)
        counts = torch.bincount(local, minlength=weights.experts).cpu()
        for slot in counts.nonzero().flatten().tolist():
            mine = (local == slot).nonzero().squeeze(1)
            values = fmt.dequantize(take(data, mine), None if scale is None else take(scale, mine), static_scale=weights.x_scale)
            results[mine] = expert_rows(problem, fmt, weights.expert(slot), values, early[mine], weights.mid_scale)
        self._counts = counts
        return results

    def _check(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, x_scale: torch.Tensor | None, out: torch.Tensor | None
    ) -> None:
        problem = self._plan.problem
        self._raise_bad_ids()
        check_inputs(problem, self._exchange.device, x, topk_ids, topk_weights, x_scale=x_scale, out=out)
        report = find_bad_ids(topk_ids, problem.experts)
        if checked_at_once(problem, topk_ids):
            raise_bad_ids(report, problem)
        else:
            self._bad_ids = report

    def _raise_bad_ids(self) -> None:
        report, self._bad_ids = self._bad_ids, None
        if report is not None:
            raise_bad_ids(report, self._plan.problem, call="the previous call")

    @contextmanager
    def _or_tell(self, step: Step) -> Iterator[None]:
        """Tells the peers, who are about to wait for this rank, when it cannot go on."""
        try:
            yield
        except BaseException:
            self._tell(step)
            raise

    def _tell(self, step: Step) -> None:
        """Announce a step that no peer has to share: it is their call that raises, not this one."""
        if not self._exchange.over:
            with suppress(PeerAborted):
                self._exchange.announce(step, [0] * self._plan.ranks)

    def _open(self) -> ReferenceWeights:
        if self._weights is None or self._exchange.over:
            how = "was closed" if self._weights is None else "ended when a peer left it"
            raise SessionClosed(f"The session {how}.", hint="open another one with backend.open_session(plan, packed, group)")
        return self._weights
