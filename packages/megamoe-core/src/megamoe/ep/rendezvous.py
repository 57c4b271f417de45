"""Meetings of all ranks that always end: who does not come before the deadline is named.

Through the key-value store of torch.distributed and not through a collective, because a collective that lost a rank fails without saying
which one, or hangs, and leaves the group unusable.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from megamoe.errors import PeerAborted

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from megamoe.ep.group import Group

_opened: Counter[tuple[int, ...]] = Counter()
"""How many meetings' series were opened for the same ranks: all of them count alike, because opening is collective."""


class Rendezvous:
    """A series of meetings among the ranks of a group. Made by every rank at the same point of its program.

    Args:
        group: the ranks.
        seconds: how long a rank waits for the others at each meeting.
        store: where they leave word; ``None`` is the store of torch.distributed.
    """

    def __init__(self, group: Group, seconds: float, store: Store | None = None) -> None:
        self._group, self._seconds, self._number, self._left = group, seconds, 0, ""
        self._store: Store | None = None
        if group.size > 1:
            series = _opened[group.members]
            _opened[group.members] += 1
            prefix = f"megamoe/{'-'.join(map(str, group.members))}/{series}"
            # torch has no public way to the store that init_process_group was given.
            self._store = PrefixStore(prefix, _get_default_store() if store is None else store)

    def meet(self, subject: str, word: str = "") -> list[str]:
        """Wait for every rank and exchange a word.

        Args:
            subject: what for; ranks that meet for different things do not find each other.
            word: what this rank has to say.

        Returns:
            every rank's word, by rank.

        Raises:
            PeerAborted: somebody did not come in time, or the store is gone; ``rank`` is the first who is missing.
        """
        if self._store is None:
            return [word]
        number, self._number = self._number, self._number + 1
        keys = [f"{subject}/{number}/{rank}" for rank in range(self._group.size)]
        end = time.monotonic() + self._seconds
        try:
            # A prefix tells an empty word from an absent one.
            self._store.set(keys[self._group.rank], "=" + word)
            missing = [rank for rank, key in enumerate(keys) if not self._arrived(key, end)]
            if not missing:
                # Everybody has come here, and so has read the words of the meeting before.
                if self._left:
                    self._store.delete_key(self._left)
                self._left = keys[self._group.rank]
                return [self._store.get(key).decode()[1:] for key in keys]
        except (RuntimeError, ValueError) as error:
            host = self._group.members[0]
            raise PeerAborted(
                f"The store through which the ranks find each other is gone: {error}", rank=0, hint=f"look at world rank {host}"
            ) from error
        named = ", ".join(str(self._group.members[rank]) for rank in missing)
        raise PeerAborted(
            f"World rank {named} did not come to {subject} within {self._seconds:g} s",
            rank=missing[0],
            hint="look at that rank's output, then start the ranks again",
        )

    def _arrived(self, key: str, end: float) -> bool:
        assert self._store is not None
        # The store counts whole milliseconds; rounded up, so that nobody is given up before the deadline.
        left = max(math.ceil(1000 * (end - time.monotonic())), 1)
        try:
            self._store.wait([key], timedelta(milliseconds=left))
        except dist.DistStoreError:
            return False
        return True
