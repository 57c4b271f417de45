"""A session's standing after failures, with three ranks as threads: who raises what, what a reset brings back, that nothing lasts."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from megamoe.ep.group import Group
from megamoe.ep.lifecycle import FailedWait, Lifecycle
from megamoe.ep.rendezvous import Rendezvous
from megamoe.errors import PeerAborted, PeerTimeout, SessionClosed

RANKS = 3
WORLD = (5, 1, 8)
SECONDS = 0.6
"""How long those wait who wait in vain."""
ENOUGH = 60.0
"""How long those wait who must not wait in vain, on a machine however busy."""


class FakeFabric:
    """Launch numbers and abort words in plain memory, shared by the ranks of a test."""

    def __init__(self, rank, words, epoch):
        self.rank, self.words, self.epoch = rank, words, epoch
        self.failure = None

    def tell_abort(self):
        for rank in range(RANKS):
            if rank != self.rank:
                self.words[rank] = self.rank

    def failed_wait(self):
        told_by = self.words.get(self.rank)
        if self.failure is None and told_by is not None:
            self.failure = FailedWait(told_by, "counts", 0, 0, told=True)
        return self.failure

    def quiesce(self):
        return self.epoch

    def restart(self, epoch):
        self.failure, self.epoch = None, epoch
        self.words.pop(self.rank, None)


class Ranks:
    """Three sessions that share a store; ``epochs`` are the launches each has made, ``seconds`` how long they wait for each other."""

    def __init__(self, name, epochs=(7, 7, 7), seconds=ENOUGH):
        store, words = HashStore(), {}
        self.fabrics = [FakeFabric(rank, words, epochs[rank]) for rank in range(RANKS)]
        self.lives = []
        for rank in range(RANKS):
            group = Group(rank, RANKS, WORLD, handle=None)
            meeting = Rendezvous(group, seconds, store)
            # Threads share what a process has once: every rank of this test is in the same series.
            meeting._store = type(meeting._store)(name, store)
            self.lives.append(Lifecycle(group, meeting, self.fabrics[rank], 30.0))

    def on(self, ranks, call):
        """Call on some ranks at the same time; result or error by rank."""
        together = threading.Barrier(len(ranks))

        def one(rank):
            together.wait()  # those who wait in vain wait for less time than a busy machine may take to start the others
            try:
                return call(self.lives[rank])
            except Exception as error:  # noqa: BLE001
                return error

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(one, ranks))


def test_a_passed_deadline_names_rank_site_and_values_until_reset():
    ranks = Ranks("timeout", epochs=(9, 8, 9))
    ranks.fabrics[0].failure = FailedWait(1, "counts of a rank", 9, 8, detail="block 3")
    for _ in range(2):
        with pytest.raises(PeerTimeout, match=r"30 s \(block 3\)") as caught:
            ranks.lives[0].check()
        assert (caught.value.rank, caught.value.site, caught.value.expected, caught.value.seen) == (1, "counts of a rank", 9, 8)
    ranks.lives[2].check()

    assert ranks.on(range(RANKS), Lifecycle.reset) == [None] * RANKS
    assert [fabric.epoch for fabric in ranks.fabrics] == [11, 11, 11], "past every number in use, the same on all"
    assert ranks.on(range(RANKS), Lifecycle.check) == [None] * RANKS


def test_a_rejected_input_stops_the_peers_at_once_and_a_reset_brings_all_back():
    ranks = Ranks("reject")
    ranks.lives[2].reject()
    for rank in (0, 1):
        with pytest.raises(PeerAborted, match="World rank 8 stopped") as caught:
            ranks.lives[rank].check()
        assert caught.value.rank == 2
    with pytest.raises(PeerAborted, match="rejected its input"):
        ranks.lives[2].check()
    assert ranks.on(range(RANKS), Lifecycle.reset) == [None] * RANKS
    assert ranks.on(range(RANKS), Lifecycle.check) == [None] * RANKS


def test_a_reset_of_a_healthy_session_disturbs_nobody():
    ranks = Ranks("healthy")
    assert ranks.on([0], lambda life: life._fabric.failed_wait()) == [None]
    assert ranks.on(range(RANKS), Lifecycle.reset) == [None] * RANKS
    assert all(fabric.failure is None for fabric in ranks.fabrics)


def test_reset_without_a_dead_rank_names_it_and_close_then_meets_nobody(monkeypatch):
    ranks = Ranks("death", seconds=SECONDS)
    start = time.monotonic()
    errors = ranks.on([0, 2], Lifecycle.reset)
    assert SECONDS <= time.monotonic() - start < ENOUGH
    for error in errors:
        assert isinstance(error, PeerAborted)
        assert error.rank == 1
        assert "World rank 1 did not come to reset" in str(error)
    with pytest.raises(PeerAborted, match="is gone"):
        ranks.lives[0].check()
    with pytest.raises(PeerAborted, match="is gone"):
        ranks.lives[0].reset()

    monkeypatch.setattr(Rendezvous, "meet", lambda *_: pytest.fail("a close after a death waits for nobody"))
    assert ranks.on([0, 2], Lifecycle.close) == [False, False]
    with pytest.raises(SessionClosed):
        ranks.lives[0].check()


def test_close_is_collective_safe_to_repeat_and_ends_without_a_dead_rank():
    ranks = Ranks("close")
    assert ranks.on(range(RANKS), Lifecycle.close) == [True] * RANKS
    assert ranks.lives[0].close() is True
    half = Ranks("half", seconds=SECONDS)
    start = time.monotonic()
    assert half.on([0, 1], Lifecycle.close) == [False, False]
    assert time.monotonic() - start < ENOUGH


def test_a_meeting_exchanges_words_by_rank_and_waits_for_the_last():
    store = HashStore()
    meetings = [Rendezvous(Group(rank, 2, (4, 6), handle=None), ENOUGH, store) for rank in range(2)]
    meetings[1]._store = meetings[0]._store
    words = {}

    def late():
        time.sleep(SECONDS)
        words[1] = meetings[1].meet("words", "of one")

    thread = threading.Thread(target=late)
    thread.start()
    words[0] = meetings[0].meet("words", "")
    thread.join()
    assert words == {0: ["", "of one"], 1: ["", "of one"]}


def test_one_rank_needs_no_store():
    alone = Group(0, 1, (0,))
    assert Rendezvous(alone, SECONDS).meet("anything", "word") == ["word"]


def test_meetings_leave_no_words_behind_but_the_last_ones():
    store = HashStore()
    meetings = [Rendezvous(Group(rank, 2, (0, 1), handle=None), ENOUGH, store) for rank in range(2)]
    meetings[1]._store = meetings[0]._store
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            list(pool.map(lambda meeting: meeting.meet("again", "word"), meetings))
    assert store.num_keys() == 2
