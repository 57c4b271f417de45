"""What a routing moves between ranks: bytes on the wire, and how unevenly the rows fall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megamoe.formats import describe

if TYPE_CHECKING:
    import torch

    from megamoe.problem import MoEProblem


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank's tokens move.

    Attributes:
        wire_bytes: least that crosses between the rank and its peers for its tokens, both ways together.
        sent: its routes to every rank, itself included.
    """

    wire_bytes: int
    sent: tuple[int, ...]


def traffic(problem: MoEProblem, ids: torch.Tensor, ranks: int, rank: int, wire: Mapping[str, object] | None = None) -> Traffic:
    """What a rank's routes move: every token to a rank once, in the format's own encoding; one result back for every remote route, in bf16.

    Args:
        problem: the layer.
        ids: (tokens, top_k) of this rank.
        ranks, rank: how many there are, and which this is.
        wire: of the plan; with ``combine`` at ``"grouped"`` one result a token and remote rank comes back, with ``wire`` at ``"mxfp8"`` in
            that format.
    """
    import torch

    places = problem.resolved_placement(ranks).replicas(problem.experts)
    most = max(map(len, places))
    owners = torch.tensor([[owner for owner, _ in copies] + [-1] * (most - len(copies)) for copies in places])
    copies = torch.tensor([len(each) for each in places])
    given = ids.cpu().to(torch.int64)
    named = given.clamp(min=0)
    chosen = torch.arange(len(given)).unsqueeze(1) % copies[named]
    targets = owners[named, chosen].masked_fill(given < 0, -1)
    sent = tuple(int((targets == other).sum()) for other in range(ranks))
    crossing = sum(int((targets == other).any(dim=1).sum()) for other in range(ranks) if other != rank)
    info = describe(problem.format)
    row = problem.hidden * info.element_bits // 8
    scales = info.scale_bytes * (problem.hidden // info.block_k) if info.block_k else 0
    agreed = wire or {}
    results = crossing if agreed.get("combine") == "grouped" else sum(sent) - sent[rank]
    result = problem.hidden * 33 // 32 if agreed.get("wire") == "mxfp8" else problem.hidden * 2
    return Traffic(crossing * (row + scales) + results * result, sent)


def imbalance(everyone: Sequence[Traffic]) -> float:
    """Rows that the fullest rank receives, over the mean of all ranks; 1 where there are no rows."""
    received = [sum(one.sent[rank] for one in everyone) for rank in range(len(everyone))]
    return max(received) * len(everyone) / sum(received) if any(received) else 1.0
