"""Where every route goes: from expert ids to ranks and their local slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megamoe.problem import Placement


class RouteTable:
    """The placement as tensors: for every logical expert its replicas, each a (rank, slot) pair, in ascending order.

    Args:
        placement: which rank holds which experts.
        experts: number of logical experts.
        device: where ids will be.
    """

    def __init__(self, placement: Placement, experts: int, device: torch.device) -> None:
        replicas = placement.replicas(experts)
        most = max(map(len, replicas))
        padded = [[pairs[min(i, len(pairs) - 1)] for i in range(most)] for pairs in replicas]
        self._place = torch.tensor(padded, dtype=torch.int64, device=device)
        self._replicas = torch.tensor([len(pairs) for pairs in replicas], dtype=torch.int64, device=device)
        self._ranks = placement.ranks

    def routes(self, topk_ids: torch.Tensor) -> Routes:
        """Routes of one call; ids outside 0 to experts - 1 are no route.

        Args:
            topk_ids: (tokens, top_k) integer.
        """
        ids = topk_ids.to(torch.int64)
        routed = (ids >= 0) & (ids < len(self._replicas))
        token, slot = routed.nonzero(as_tuple=True)
        expert = ids[token, slot]
        rank, local = self._place[expert, token % self._replicas[expert]].unbind(1)
        order = rank.argsort(stable=True)
        sent = torch.bincount(rank, minlength=self._ranks).tolist()
        return Routes(routed, token[order], slot[order], local[order], order, sent)


def take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Some rows of a matrix of any dtype; torch cannot index every 8-bit type on every device."""
    return rows.view(torch.uint8)[index].view(rows.dtype) if rows.element_size() == 1 else rows[index]


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The routes of one call on one rank, ordered by destination rank, then token, then slot.

    Attributes:
        routed: (tokens, top_k) bool, which pairs are routes.
        token, slot: (routes,) int64, the pair that each route comes from.
        local: (routes,) int64, the expert's slot on the destination rank.
        order: (routes,) int64, position of each route among the routed pairs in (token, slot) order.
        sent: number of routes to every rank.
    """

    routed: torch.Tensor
    token: torch.Tensor
    slot: torch.Tensor
    local: torch.Tensor
    order: torch.Tensor
    sent: list[int]

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in this order -> rows in (token, slot) order."""
        return torch.empty_like(rows).index_copy_(0, self.order, rows)
