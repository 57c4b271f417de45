"""Symmetric memory through a stand-in for NVSHMEM: initialized once, given back, refused by name; groups smaller than the world."""

import json

import pytest
import torch
import torch.distributed as dist

from megamoe.ep import nvshmem
from megamoe.ep.group import Group
from megamoe.ep.heap import open_heap
from megamoe.ep.layout import Layout
from megamoe.errors import BackendUnavailable, InvalidInput, PeerAborted
from megamoe.testing.launcher import launch

from .groups import new_group

CPU = torch.device("cpu")


class FakeNvshmem:
    """Every process sees PE p's heap at (p + 1) << 32; ``far`` PEs cannot be reached."""

    def __init__(self, pe=-1, pes=0, far=(), room=1 << 20):
        self.pe, self.count, self.far, self.room = pe, pes, far, room
        self.calls = []

    def initialized(self):
        return self.count > 0

    def unique_id(self):
        return b"identity"

    def initialize(self, device, pe, pes, unique_id):
        assert unique_id == b"identity"
        self.calls.append("initialize")
        self.pe, self.count = pe, pes

    def finalize(self):
        self.calls.append("finalize")
        self.count = 0

    def my_pe(self):
        return self.pe

    def pes(self):
        return self.count

    def allocate(self, nbytes):
        self.calls.append(f"allocate {nbytes}")
        return (self.pe + 1) << 32 if nbytes <= self.room else 0

    def free(self, address):
        self.calls.append(f"free {address >> 32}")

    def peer(self, address, pe):
        assert address == (self.pe + 1) << 32
        return 0 if pe in self.far else (pe + 1) << 32


def heap_for(layout, members, library):
    """Open on a group of world ranks, and their order; tables lie on the CPU because there is no GPU."""
    handle, members = new_group(members)
    if dist.get_rank() not in members:
        return None, members
    return open_heap(layout, Group.of(handle), CPU, library), members


def sessions(rank):
    nvshmem._initialize = lambda library, group, device: initialize_without_gpu(library, group)
    layout = Layout.of({"x": 1000, "flags": 8})
    library = FakeNvshmem()
    first, group = heap_for(layout, [2, 0], library)  # smaller than the world, in an order of its own
    second, _ = heap_for(layout, [2, 0], library)
    if first is None:
        return None, library.calls
    assert first.bases == (1 << 32, 2 << 32)
    assert first.table.tolist() == list(first.bases)
    mine = group.index(rank)
    assert first.base == first.bases[mine]
    assert first.address("flags") == first.base + 1024
    assert first.address("flags", 1 - mine) == first.bases[1 - mine] + 1024
    first.close()
    first.close()
    assert "finalize" not in library.calls, "another heap is still open"
    second.close()
    return mine, library.calls


def initialize_without_gpu(library, group):
    words = group.gather_bytes(library.unique_id() if group.rank == 0 else b"", CPU)
    library.initialize(0, group.rank, group.size, words[0])
    return tuple(range(group.size))


def test_initialized_once_for_a_group_smaller_than_the_world_in_any_order_and_finalized_by_the_last():
    first, outside, last = launch(sessions, 3)
    assert outside == (None, [])
    assert {first[0], last[0]} == {0, 1}
    for pe, calls in (first, last):
        assert calls == ["initialize", "allocate 1280", "allocate 1280", f"free {pe + 1}", f"free {pe + 1}", "finalize"]


def beside_a_host(rank):
    """The host program initialized NVSHMEM over the world, PEs in the opposite order of the ranks."""
    library = FakeNvshmem(pe=2 - rank, pes=3)
    heap = open_heap(Layout.of({"x": 100}), Group.of(dist.group.WORLD), CPU, library)
    bases = heap.bases
    heap.close()
    return bases, library.calls


def test_a_host_that_initialized_nvshmem_keeps_it():
    for rank, (bases, calls) in enumerate(launch(beside_a_host, 3)):
        assert bases == (3 << 32, 2 << 32, 1 << 32)
        assert calls == ["allocate 256", f"free {3 - rank}"], "neither initialized nor finalized"


def refusals(rank):
    found = []
    world = Group.of(dist.group.WORLD)
    cases = (
        FakeNvshmem(pe=rank, pes=2, far=(1,) if rank == 0 else ()),
        FakeNvshmem(pe=rank, pes=2, room=10 if rank == 1 else 1000),
        FakeNvshmem(pe=rank, pes=2 if rank == 0 else 0),
        FakeNvshmem(pe=0, pes=2),
    )
    for library in cases:
        with pytest.raises(BackendUnavailable) as caught:
            open_heap(Layout.of({"x": 100}), world, CPU, library)
        found.append((str(caught.value), library.calls))
    return found


def test_refused_on_every_rank_with_the_same_words_and_nothing_is_left():
    first, second = launch(refusals, 2)
    assert [text for text, _ in first] == [text for text, _ in second]
    (far, far_calls), (short, short_calls), (mixed, _), (same, _) = first
    assert "world rank 0: no loads and stores to world ranks [1]" in far
    assert far_calls == ["allocate 256", "free 1"]
    assert "world rank 1: no 256 bytes of symmetric memory" in short
    assert short_calls == ["allocate 256"], "freeing would wait for the rank that has nothing to free"
    assert "not on world ranks [1]" in mixed
    assert "PEs [0, 0]" in same


def lost_while_opening(rank):
    """Rank 1 ends between its allocation and the first word about it."""
    library = FakeNvshmem(pe=rank, pes=2)
    world = Group.of(dist.group.WORLD)
    if rank == 1:
        nvshmem.join(world, CPU, library)
        dist.destroy_process_group()
        return []
    with pytest.raises(PeerAborted):
        open_heap(Layout.of({"x": 100}), world, CPU, library)
    return library.calls


def test_nothing_collective_is_called_when_a_rank_is_lost_while_opening():
    assert launch(lost_while_opening, 2)[0] == ["allocate 256"]


class Uniform(Group):
    """A group whose other ranks all say what this one says, but for their PE."""

    def gather_bytes(self, payload, device):
        word = json.loads(payload)
        return [json.dumps(word | {"facts": word["facts"] | {"pe": pe}}).encode() for pe in range(self.size)]


def test_the_most_ranks_of_an_nvlink_domain_are_in_the_table():
    heap = open_heap(Layout.of({"x": 100}), Uniform(71, 72, tuple(range(72))), CPU, FakeNvshmem(pe=71, pes=72))
    assert heap.table.tolist() == [pe + 1 << 32 for pe in range(72)]
    assert heap.address("x") == heap.address("x", 71) == 72 << 32
    heap.close()


def test_one_rank_has_ordinary_memory_and_a_table_of_one():
    heap = open_heap(Layout.of({"x": 10, "y": 20}), Group(0, 1, (0,)), CPU)
    assert heap.table.tolist() == [heap.base]
    assert heap.address("y") == heap.base + 256
    heap._memory[256:276] = torch.arange(20, dtype=torch.uint8)
    assert heap.read("y").tolist() == list(range(20))
    heap.close()


def test_more_ranks_than_an_nvlink_domain_are_refused():
    with pytest.raises(InvalidInput, match="73 ranks"):
        open_heap(Layout.of({}), Group(0, 73, tuple(range(73))), CPU)


def test_layout_keeps_order_and_alignment():
    layout = Layout.of({"a": 1, "b": 0, "c": 256})
    assert dict(layout.offsets) == {"a": (0, 1), "b": (256, 0), "c": (256, 256)}
    assert layout.nbytes == 512
