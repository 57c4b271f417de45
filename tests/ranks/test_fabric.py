"""Control words and abort words on the CPU: the ranks are sessions of one process that really write into each other's memory."""

import pytest
import torch

from megamoe.device import regions, wire
from megamoe.ep.fabric import DeviceFabric
from megamoe.ep.group import Group
from megamoe.ep.heap import Heap
from megamoe.ep.layout import Layout
from megamoe.ep.lifecycle import FailedWait

CPU = torch.device("cpu")
RANKS = 3
LAYOUT = Layout.of({"signal": 256, "counts": 64})


class Rank:
    """A rank's memory and fabric; `words` reads int32 words of the control region, `told` the abort word."""

    def __init__(self, rank, memories):
        self.memory = memories[rank]
        self.control = torch.full((4096,), 7, dtype=torch.uint8)
        heap = Heap(LAYOUT, tuple(m.data_ptr() for m in memories), rank, CPU, None)
        self.fabric = DeviceFabric(heap, Group(rank, RANKS, (4, 9, 2)), self.control)

    def word(self, at):
        return int(self.control[at : at + 4].view(torch.int32))

    @property
    def told(self):
        return int(self.memory[:8].view(torch.int64))

    def launch_fails(self, **record):
        """What a kernel leaves behind when a wait fails."""
        values = [record.get(name, 0) for name in regions.RECORD_FIELDS]
        end = regions.RECORD + 8 * len(values)
        self.control[regions.RECORD : end].view(torch.int64).copy_(torch.tensor(values))
        host = int(self.control[regions.REPORT : regions.REPORT + 8].view(torch.int64))
        assert host == self.fabric._report.data_ptr()
        self.fabric._words[regions.REPORT_ABORT // 4] = 1


@pytest.fixture
def ranks():
    memories = [torch.zeros(LAYOUT.nbytes, dtype=torch.uint8) for _ in range(RANKS)]
    return [Rank(rank, memories) for rank in range(RANKS)]


def test_a_new_session_starts_at_zero_and_knows_its_rank(ranks):
    for rank, one in enumerate(ranks):
        assert (one.word(regions.EPOCH), one.word(regions.ABORT), one.word(wire.RANK)) == (0, 0, rank)
        assert not one.control[regions.BANKS :].any()
        assert one.fabric.failed_wait() is None
        assert one.fabric.quiesce() == 0


def test_a_default_device_of_the_process_is_not_where_words_for_the_host_lie():
    memories = [torch.zeros(LAYOUT.nbytes, dtype=torch.uint8) for _ in range(RANKS)]
    control = torch.full((4096,), 7, dtype=torch.uint8)
    with torch.device("meta"):
        heap = Heap(LAYOUT, tuple(m.data_ptr() for m in memories), 0, CPU, torch.empty(RANKS, device=CPU))
        fabric = DeviceFabric(heap, Group(0, RANKS, (4, 9, 2)), control)
        memories[0][LAYOUT.offsets["counts"][0]] = 5
        assert heap.read("counts")[0] == 5
    assert int(control[regions.REPORT : regions.REPORT + 8].view(torch.int64)) == fabric._report.data_ptr()
    assert fabric.failed_wait() is None


def test_an_abort_reaches_every_peer_and_says_from_whom(ranks):
    ranks[1].fabric.tell_abort()
    assert [one.told for one in ranks] == [2, 0, 2]


def test_a_wait_for_a_peer_names_it(ranks):
    ranks[0].launch_fails(site=wire.SITE_COUNTS, index=2, expected=5, seen=4, cta=11, epoch=4)
    assert ranks[0].fabric.failed_wait() == FailedWait(
        2, "route counts of a rank", 5, 4, detail="route counts of a rank, block 11, launch 5"
    )


def test_a_wait_inside_a_rank_names_itself_and_its_counter(ranks):
    ranks[1].launch_fails(site=regions.SITE_ROWS, index=17, expected=64, seen=63)
    found = ranks[1].fabric.failed_wait()
    assert (found.rank, found.told) == (1, False)
    assert "counter 17" in found.detail


def test_being_told_names_the_teller(ranks):
    ranks[2].launch_fails(site=wire.SITE_TOLD, index=1)
    found = ranks[2].fabric.failed_wait()
    assert (found.rank, found.told) == (1, True)


def test_a_restart_clears_what_failed_and_starts_behind_the_epoch(ranks):
    ranks[1].fabric.tell_abort()
    ranks[0].launch_fails(site=wire.SITE_TOLD, index=1)
    ranks[0].control[regions.BANKS :].fill_(3)
    assert ranks[0].fabric.failed_wait() is not None
    ranks[0].fabric.restart(12)
    assert ranks[0].fabric.failed_wait() is None
    assert ranks[0].told == 0
    assert ranks[2].told == 2, "every rank clears its own"
    assert ranks[0].fabric.quiesce() == 12
    assert ranks[0].word(wire.RANK) == 0
    assert not ranks[0].control[regions.BANKS :].any()


def test_bad_ids_are_reported_once(ranks):
    ranks[0].fabric._words[regions.REPORT_STICKY // 4] = 1
    assert [ranks[0].fabric.take_bad_ids() for _ in range(2)] == [True, False]
