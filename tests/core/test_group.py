"""The group of ranks without a second process: a group of one, and which device a collective needs."""

import pytest
import torch
import torch.distributed as dist

from megamoe import InvalidInput, PeerAborted
from megamoe.ep.group import UNKNOWN_RANK, Group, collective

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


def test_no_group_is_a_group_of_one():
    group = Group.of(None)
    assert (group.rank, group.size, group.members, group.handle) == (0, 1, (0,), None)
    assert group.gather_bytes(b"mine", CPU) == [b"mine"]
    assert group.wire_device(GPU) == GPU


@pytest.mark.parametrize(
    ("served", "device", "wire"),
    [
        ("cpu:gloo,cuda:gloo", CPU, CPU),
        ("cpu:gloo,cuda:gloo", GPU, CPU),
        ("cpu:gloo,cuda:nccl", CPU, CPU),
        ("cpu:gloo,cuda:nccl", GPU, GPU),
        ("cuda:nccl", GPU, GPU),
    ],
)
def test_collectives_use_the_gpu_only_through_nccl(monkeypatch, served, device, wire):
    monkeypatch.setattr(dist, "get_backend_config", lambda handle: served)
    assert Group(0, 2, (0, 1), handle=object()).wire_device(device) == wire


def test_a_group_that_serves_the_gpu_only(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda handle: "cuda:nccl")
    with pytest.raises(InvalidInput, match="through 'cuda:nccl', and this rank's weights lie on cpu; allowed: NCCL for cuda, gloo for cpu"):
        Group(0, 2, (0, 1), handle=object()).wire_device(CPU)


@pytest.mark.parametrize("group", ["world", 0, object(), dist.GroupMember.NON_GROUP_MEMBER])
def test_what_is_no_group(group):
    with pytest.raises(InvalidInput, match=r"allowed: None or a torch\.distributed\.ProcessGroup .* Fix: "):
        Group.of(group)


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), ValueError("Default process group has not been initialized")])
def test_a_failed_collective_is_an_aborted_peer(error):
    with pytest.raises(PeerAborted, match=str(error)) as caught, collective():
        raise error
    assert caught.value.rank == UNKNOWN_RANK
    assert caught.value.__cause__ is error
