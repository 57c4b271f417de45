"""All ranks go on or none does: whatever one of them raises, all raise, and only what all raise is undone together."""

import pytest
import torch

from megamoe.ep.group import Group
from megamoe.ep.together import attempt, given_back, together
from megamoe.errors import BackendUnavailable, PeerAborted
from megamoe.testing.launcher import launch

from .groups import new_group

CPU = torch.device("cpu")


def attempts(rank):
    handle, members = new_group([1, 0])
    group, seen = Group.of(handle), []

    def build():
        if rank == 1:
            raise MemoryError("all is full")
        return "built"

    with pytest.raises(BackendUnavailable) as caught, given_back(lambda alone: seen.append(alone)):
        attempt(group, CPU, build)
    own = type(caught.value.__context__).__name__
    return str(caught.value), own, seen, attempt(group, CPU, lambda: rank), members, together(group, CPU, "", {"rank": rank})


def test_what_one_rank_cannot_do_all_raise_by_its_name_and_the_next_attempt_is_fresh():
    (first, first_own, *first_seen), (second, second_own, *second_seen) = launch(attempts, 2)
    assert first == second
    assert "world rank 1: MemoryError: all is full" in first
    assert (first_own, second_own) == ("NoneType", "MemoryError")
    for rank, (undone, again, members, facts) in enumerate((first_seen, second_seen)):
        assert (undone, again) == ([False], rank)
        assert facts == [{"rank": member} for member in members]


def test_after_any_other_error_a_rank_may_be_missing():
    seen = []
    with pytest.raises(PeerAborted), given_back(seen.append):
        raise PeerAborted("A collective among the ranks failed", rank=-1)
    with given_back(seen.append):
        pass
    assert seen == [True]
