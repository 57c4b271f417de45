"""How the reference moves rows between ranks: one round of headers in which every rank says what it will do, then all-to-alls of rows.

The header comes first so that a rank that rejects its input, or leaves, tells its peers instead of letting them wait in a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import torch
import torch.distributed as dist

from megamoe.ep.group import Group, collective
from megamoe.errors import PeerAborted


class Step(IntEnum):
    """What a rank is about to do, first word of its header."""

    RUN = 0
    REJECT = 1
    FAIL = 2
    RESET = 3
    LEAVE = 4


_MEANING = {
    Step.RUN: "is running the layer",
    Step.REJECT: "rejected its input",
    Step.FAIL: "failed in its computation",
    Step.RESET: "is resetting the session",
    Step.LEAVE: "left the session",
}


class Exchange:
    """Collectives among the ranks of a session, for tensors on one device.

    Attributes:
        over: a rank left or was lost, so there is nobody to meet in another collective.

    Args:
        group: the ranks.
        device: where this rank's tensors are.

    Raises:
        InvalidInput: the group cannot serve the device.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.wire = group.wire_device(device)
        self.over = False

    def announce(self, step: Step, rows: Sequence[int]) -> list[int]:
        """Tell every rank what this one does and how many rows it will send to each. Collective.

        Args:
            step: what this rank is about to do.
            rows: rows for every rank.

        Returns:
            rows that every rank will send to this one.

        Raises:
            PeerAborted: a rank announced another step (its ``rank`` is the first such), or was lost.
        """
        if self.group.handle is None:
            return list(rows)
        mine = torch.tensor([step, *rows], dtype=torch.int64, device=self.wire)
        headers = [torch.empty_like(mine) for _ in range(self.group.size)]
        with self._together():
            dist.all_gather(headers, mine, group=self.group.handle)
        everyone = [header.tolist() for header in headers]
        self.over = any(other == Step.LEAVE for other, *_ in everyone)
        for rank, (other, *_) in enumerate(everyone):
            if other != step:
                raise PeerAborted(
                    f"World rank {self.group.members[rank]} {_MEANING[Step(other)]} while this rank {_MEANING[step]}",
                    rank=rank,
                    hint="look at what that rank raised; every rank makes the same sequence of calls",
                )
        return [counts[self.group.rank] for _, *counts in everyone]

    def rows(self, values: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """All-to-all of rows. Collective.

        Args:
            values: (sum(send), ...) of any dtype: the rows for rank 0, then for rank 1, and so on.
            send: rows for every rank.
            receive: rows from every rank, as :meth:`announce` returned.

        Returns:
            (sum(receive), ...): the rows from rank 0, then from rank 1, and so on.

        Raises:
            PeerAborted: a rank was lost.
        """
        if self.group.handle is None:
            return values
        rest = values.shape[1:]
        # As bytes: the collective libraries do not know every dtype.
        flat = values.contiguous().reshape(values.shape[0], rest.numel()).view(torch.uint8).to(self.wire)
        received = torch.empty((sum(receive), flat.shape[1]), dtype=torch.uint8, device=self.wire)
        with self._together():
            dist.all_to_all_single(received, flat, list(receive), list(send), group=self.group.handle)
        return received.to(self.device).view(values.dtype).reshape(-1, *rest)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            with collective():
                yield
        except PeerAborted:
            self.over = True
            raise
