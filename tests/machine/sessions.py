"""Sessions of several ranks around kernels on the machine: their abort words, records, meetings and counts, all in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore

from megamoe.ep.fabric import DeviceFabric
from megamoe.ep.group import Group
from megamoe.ep.heap import Heap
from megamoe.ep.lifecycle import Lifecycle
from megamoe.ep.rendezvous import Rendezvous
from megamoe.errors import PeerAborted, PeerTimeout
from megamoe_sm90.ranks_session import Sm90RanksSession

from .layers import HOST, Ranks

DEADLINE = 4.0
"""Of waits in kernels, in virtual seconds."""
ENOUGH = 60.0


class Sessions(Ranks):
    """Ranks with what a session has on the host. Their world ranks are in descending order."""

    def __init__(self, problem, ranks, meeting_seconds=ENOUGH, **more):
        super().__init__(problem, ranks, deadline=DEADLINE, **more)
        self.world = tuple(range(ranks))[::-1]
        store = HashStore()
        bases = tuple(heap.data_ptr() for heap in self.heaps)
        self.fabrics, self.lives, self.sessions = [], [], []
        for rank in range(ranks):
            group = Group(rank, ranks, self.world)
            heap = Heap(self.variant.config.layout, bases, rank, HOST, None)
            self.fabrics.append(DeviceFabric(heap, group, self.memory[rank].control))
            meeting = Rendezvous(group, meeting_seconds, store)
            # The ranks of a process are opened one after the other here: all belong to one series.
            meeting._store = type(meeting._store)("session", store)
            self.lives.append(Lifecycle(group, meeting, self.fabrics[rank], DEADLINE))
            session = Sm90RanksSession.__new__(Sm90RanksSession)
            session._life, session._fabric, session._heap = self.lives[rank], self.fabrics[rank], heap
            session._config, session._held = self.variant.config, len(problem.resolved_placement(ranks).local[rank])
            self.sessions.append(session)

    @property
    def buffers(self):
        return [*super().buffers, *(fabric._report for fabric in self.fabrics)]

    def errors(self):
        """What the next use of the session raises, by rank."""
        found = []
        for life in self.lives:
            try:
                life.check()
                found.append(None)
            except (PeerTimeout, PeerAborted) as error:
                found.append(error)
        return found

    def each(self, call, ranks=None):
        """``call(life)`` on some ranks at the same time; what it returned or raised, by rank."""
        chosen = [self.lives[rank] for rank in (range(self.ranks) if ranks is None else ranks)]

        def caught(life):
            try:
                return call(life)
            except PeerAborted as error:
                return error

        with ThreadPoolExecutor(len(chosen)) as pool:
            return list(pool.map(caught, chosen))
