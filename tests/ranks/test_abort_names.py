"""Who stopped a session is named by all its ranks: a rank that was told of it does not tell it on under its own name."""

import pytest

from megamoe.ep.group import Group
from megamoe.ep.lifecycle import FailedWait, Lifecycle
from megamoe.ep.rendezvous import Rendezvous

WORLD = (3, 1, 2)


class Fabric:
    def __init__(self, failed):
        self.failed, self.tells = failed, 0

    def tell_abort(self):
        self.tells += 1

    def failed_wait(self):
        return self.failed

    def quiesce(self):
        return 4

    def restart(self, epoch):
        self.failed = None


@pytest.mark.parametrize(
    ("failed", "tells"),
    [
        (None, 0),
        (FailedWait(0, "abort of a peer", 0, 0, told=True), 0),
        (FailedWait(2, "results of a rank", 5, 4), 1),
    ],
)
def test_reset_tells_of_this_ranks_own_failure_only(failed, tells):
    fabric = Fabric(failed)
    life = Lifecycle(Group(1, 3, WORLD), Rendezvous(Group(0, 1, (1,)), 1.0), fabric, 1.0)
    life.reset()
    assert fabric.tells == tells
    life.check()


def test_a_rejection_is_told_once():
    fabric = Fabric(None)
    life = Lifecycle(Group(1, 3, WORLD), Rendezvous(Group(0, 1, (1,)), 1.0), fabric, 1.0)
    life.reject()
    life.reset()
    assert fabric.tells == 1
