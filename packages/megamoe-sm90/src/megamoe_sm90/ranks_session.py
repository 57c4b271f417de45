"""An open session of the sm90 backend on several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megamoe import env
from megamoe.ep.fabric import DeviceFabric
from megamoe.ep.heap import open_heap
from megamoe.ep.lifecycle import Lifecycle
from megamoe.ep.rendezvous import Rendezvous
from megamoe.ep.together import attempt, given_back
from megamoe.inputs import find_bad_ids, raise_bad_ids
from megamoe_sm90 import residency
from megamoe_sm90.session import Sm90Session
from megamoe_sm90.shim.launch import Launcher
from megamoe_sm90.shim.ranks import RanksLauncher, RanksMemory, RanksVariant
from megamoe_sm90.shim.variants import Operands

if TYPE_CHECKING:
    from megamoe.ep.group import Group
    from megamoe.protocol import Plan
    from megamoe_sm90.shim.weights import Sm90Weights

_MEETING_DEADLINES = 2
"""Ranks come to a meeting up to one deadline apart: the one that waited in a kernel comes last."""


class Sm90RanksSession(Sm90Session):
    """See :class:`megamoe.protocol.Session`. Made by ``Sm90Backend.open_session``; collective.

    A call is one launch on every rank, also with zero tokens. Tensors, streams, graphs and late reports are as in
    :class:`megamoe_sm90.session.Sm90Session`. After an error of a call (a deadline passed, a peer gave up, this rank's input was rejected)
    the calls of all ranks raise until every rank has come to :meth:`reset`.

    Args:
        plan: what runs.
        weights: of this rank.
        group: the ranks.
        delays: random waits at every step of the kernels, for tests.
    """

    def __init__(self, plan: Plan, weights: Sm90Weights, group: Group, *, delays: bool = False) -> None:
        self._plan, self._problem, self._weights, self._device = plan, plan.problem, weights, weights.device
        self._held = len(plan.problem.resolved_placement(group.size).local[group.rank])
        self._ids: torch.Tensor | None = None
        seconds = env.timeout_seconds()
        biases = {name: name in weights.tensors for name in ("b13", "b2")}
        kinds = (False,) if self._problem.format == "bf16" else (False, True)
        with torch.cuda.device(self._device), torch.inference_mode(False):  # as on one rank
            ctas = residency.ctas_of(group, self._device)
            variants = {
                quantized: RanksVariant.of(
                    self._problem, group.size, plan.detail, Operands(quantized=quantized, sms=ctas, **biases), delays=delays
                )
                for quantized in kinds
            }
            residency.check(group, self._device, variants.values())
            self._config = variants[False].config
            self._heap = open_heap(self._config.layout, group, self._device)
            with given_back(lambda alone: self._heap.close(alone=alone)):
                attempt(group, self._device, lambda: self._prepare(group, variants, weights, seconds))
            self._life = Lifecycle(group, Rendezvous(group, _MEETING_DEADLINES * seconds), self._fabric, seconds)

    def _prepare(self, group: Group, variants: dict[bool, RanksVariant], weights: Sm90Weights, seconds: float) -> None:
        """This rank's own memory, and its kernels on the device."""
        memory = RanksMemory(variants[False], self._heap, self._device)
        self._workspace = memory  # type: ignore[assignment]  # what is inherited only calls used_on
        self._fabric = DeviceFabric(self._heap, group, memory.control)
        routes = (self._problem.max_tokens, self._problem.top_k)
        self._ids64 = torch.empty(routes, dtype=torch.int64, device=self._device)
        self._ids32 = torch.empty(routes, dtype=torch.int32, device=self._device)
        self._weights32 = torch.empty(routes, dtype=torch.float32, device=self._device)
        self._stream = torch.cuda.current_stream(self._device)
        # Every kernel now, and alone: one that is loaded while peers wait in theirs would let them wait for long.
        self._launchers = {}
        for quantized, variant in variants.items():
            launcher = RanksLauncher(variant, weights, memory, seconds)
            launcher.load(group.rank, self._stream)
            self._launchers[quantized] = launcher

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        x_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._life.check()
        try:
            self._check(x, topk_ids, topk_weights, x_scale, out)
            y = torch.empty(x.shape[0], self._problem.hidden, dtype=torch.bfloat16, device=self._device) if out is None else out
        except BaseException:
            self._life.reject()
            raise
        self._ids = topk_ids
        with torch.cuda.device(self._device):
            self._launch(x.shape[0], x, topk_ids, topk_weights, x_scale, y)
        return y

    def counts(self) -> torch.Tensor:
        """See the protocol. As every rank announced them for the last call."""
        latest = self._fabric.quiesce()
        self._life.check()
        words = self._heap.read("counts").view(torch.int64).reshape(2, self._config.ranks, self._config.experts + 1)[latest % 2]
        announced = torch.where(words >> 32 == latest, words & 0xFFFFFFFF, 0)
        return announced[:, : self._held].sum(0)

    def reset(self) -> None:
        self._life.reset()

    def close(self) -> None:
        if self._weights is not None:
            self._weights = None
            everyone = self._life.close()
            self._launchers.clear()
            self._heap.close(alone=not everyone)
            del self._workspace, self._ids64, self._ids32, self._weights32

    def _launcher(self, *, quantized: bool) -> Launcher:
        return self._launchers[quantized]

    def _raise_reported(self) -> None:
        if self._fabric.take_bad_ids() and self._ids is not None:
            raise_bad_ids(find_bad_ids(self._ids, self._problem.experts), self._problem, call="an earlier call")
