"""The launcher that all rank tests rely on: results by rank, and every kind of failure reported for the rank it happened on."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from megamoe.testing.launcher import RanksFailed, launch


def summed(rank, factor):
    total = torch.tensor([rank * factor])
    dist.all_reduce(total)
    return rank, int(total), os.environ.get("MEGAMOE_TEST_WORD")


def networks(rank):
    names = ("GLOO_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NVSHMEM_REMOTE_TRANSPORT")
    return [os.environ[name] for name in names]


def raises(rank):
    if rank == 1:
        raise KeyError("from rank one")
    dist.barrier()


def dies(rank):
    if rank == 1:
        os._exit(3)
    return rank


NAP = 600


def sleeps(rank):
    if rank == 1:
        time.sleep(NAP)


def test_results_by_rank():
    assert launch(summed, 3, 10) == [(0, 30, None), (1, 30, None), (2, 30, None)]
    assert launch(summed, 2, 1, env={"MEGAMOE_TEST_WORD": "yes"}) == [(0, 1, "yes"), (1, 1, "yes")]
    assert launch(summed, 1, 1) == [(0, 0, None)]


def test_ranks_of_one_machine_need_no_network_unless_the_user_says_otherwise(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NVSHMEM_REMOTE_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)
    (one, two, transport), second = launch(networks, 2)
    assert one == two
    assert one.startswith("lo")
    assert transport == "none"
    assert second == [one, two, transport]
    assert launch(networks, 1, env={"NVSHMEM_REMOTE_TRANSPORT": "ibrc"}) == [[one, two, "ibrc"]]


def test_an_exception_comes_with_its_traceback():
    with pytest.raises(RanksFailed, match="from rank one") as caught:
        launch(raises, 2)
    assert "in raises" in caught.value.errors[1]
    assert "KeyError" in caught.value.errors[1]


def test_a_process_that_dies_is_reported():
    with pytest.raises(RanksFailed, match="ended without a report, exit code 3") as caught:
        launch(dies, 2)
    assert list(caught.value.errors) == [1]


def test_a_rank_that_hangs_is_ended_and_says_where_it_was():
    start = time.monotonic()
    launch(summed, 2, 1)
    enough = 5 + 5 * (time.monotonic() - start)  # for two processes to come to their work, on this machine as it is now
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="in sleeps") as caught:
        launch(sleeps, 2, timeout=enough)
    assert list(caught.value.errors) == [1]
    assert time.monotonic() - start < enough + NAP / 2
