"""What a session of several ranks does on the host, without a GPU: counts from announced words, rejections, closing after a loss."""

from types import SimpleNamespace

import pytest
import torch

from megamoe import InvalidInput, MoEProblem, PeerAborted
from megamoe_sm90.ranks_session import Sm90RanksSession

EXPERTS, RANKS = 3, 2


class FakeLife:
    def __init__(self, everyone=True):
        self.calls, self.everyone, self.error = [], everyone, None

    def check(self):
        self.calls.append("check")
        if self.error:
            raise self.error

    def reject(self):
        self.calls.append("reject")

    def close(self):
        self.calls.append("close")
        return self.everyone


class FakeFabric:
    def __init__(self, latest):
        self.latest, self.bad = latest, False

    def quiesce(self):
        return self.latest

    def take_bad_ids(self):
        bad, self.bad = self.bad, False
        return bad


class FakeHeap:
    def __init__(self, words):
        self.words, self.closed = words, []

    def read(self, region):
        assert region == "counts"
        return self.words.view(torch.uint8).flatten()

    def close(self, *, alone):
        self.closed.append(alone)


def session(words=None, latest=0, **more):
    one = Sm90RanksSession.__new__(Sm90RanksSession)
    one._problem = MoEProblem(6, 2, 128, 128, 4, "fp8_block128")
    one._device, one._weights, one._ids = torch.device("cpu"), object(), None
    one._config, one._held = SimpleNamespace(ranks=RANKS, experts=EXPERTS), EXPERTS - 1
    one._life, one._fabric, one._heap = FakeLife(**more), FakeFabric(latest), FakeHeap(words)
    one._launchers, one._workspace, one._ids64, one._ids32, one._weights32 = {}, None, None, None, None
    return one


def word(launch, value):
    return (launch << 32) | value


def test_counts_are_those_of_the_last_launch_over_all_ranks_and_of_held_experts_only():
    words = torch.zeros(2, RANKS, EXPERTS + 1, dtype=torch.int64)
    words[0] = torch.tensor([[word(4, v) for v in (9, 9, 9, 9)]] * RANKS)  # the launch before
    words[1, 0] = torch.tensor([word(5, v) for v in (1, 2, 7, 40)])  # the last one is where the list starts
    words[1, 1] = torch.tensor([word(5, v) for v in (10, 0, 7, 40)])
    assert session(words, latest=5).counts().tolist() == [11, 2]


def test_counts_before_the_first_launch_are_zero():
    assert session(torch.zeros(2, RANKS, EXPERTS + 1, dtype=torch.int64)).counts().tolist() == [0, 0]


def test_input_that_is_rejected_here_lets_the_peers_go():
    one = session()
    with pytest.raises(InvalidInput, match="x"):
        one.run(torch.zeros(2, 7, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2))
    assert one._life.calls == ["check", "reject"]


def test_bad_ids_of_an_earlier_call_let_the_peers_go_too():
    one = session()
    one._ids, one._fabric.bad = torch.tensor([[9, 0]], dtype=torch.int32), True
    with pytest.raises(InvalidInput, match="earlier call"):
        one.run(torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2))
    assert one._life.calls == ["check", "reject"]


def test_after_an_error_of_the_session_nothing_is_rejected_again():
    one = session()
    one._life.error = PeerAborted("World rank 1 stopped", rank=1)
    with pytest.raises(PeerAborted):
        one.run(torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2))
    assert one._life.calls == ["check"]


@pytest.mark.parametrize("everyone", [True, False])
def test_close_frees_symmetric_memory_only_with_everyone_and_once(everyone):
    one = session(everyone=everyone)
    one.close()
    one.close()
    assert one._life.calls == ["close"]
    assert one._heap.closed == [not everyone]
