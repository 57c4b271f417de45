"""Errors go through pickle and copy as they are: engines send what a worker raised to the process that reports it."""

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from megamoe import errors
from megamoe.drop.faults import DropRefused, Fault
from megamoe.protocol import Reason

TIMEOUT = {"rank": 3, "site": "counts of a peer", "expected": 8, "seen": 5}


def every_kind(base=errors.MegaMoEError):
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, base)]
    special = {
        errors.UnsupportedProblem: lambda: errors.UnsupportedProblem([Reason("too wide", "pad it"), Reason("too deep")], subject="No"),
        errors.PeerTimeout: lambda: errors.PeerTimeout("A wait ended", **TIMEOUT, hint="reset"),
        errors.PeerAborted: lambda: errors.PeerAborted("A peer left", rank=1, hint="look there"),
        errors.UnsupportedInstruction: lambda: errors.UnsupportedInstruction("tcgen05.mma", 12, "no such unit"),
        errors.EmulationFault: lambda: errors.EmulationFault("read of nothing", code="unwritten", line=7),
        DropRefused: lambda: DropRefused("Not taken in.", [Fault("a.py", 3, "star import", "names", "*")], hint="name them"),
    }
    return [special.get(kind, lambda kind=kind: kind("what was got", hint="the fix")) for kind in (*found, DropRefused)]


@pytest.mark.parametrize("make", every_kind(), ids=lambda make: type(make()).__name__)
@pytest.mark.parametrize(
    "again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy], ids=["pickle", "copy", "deep"]
)
def test_an_error_arrives_as_it_was(make, again):
    error = make()
    error.add_note("on rank 3")
    arrived = again(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)
    assert arrived.__notes__ == ["on rank 3"]


def wait_in_vain():
    raise errors.PeerTimeout("A wait ended", **TIMEOUT)


def test_a_worker_of_a_pool_can_raise_it():
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(errors.PeerTimeout, match="counts of a peer") as caught,
    ):
        pool.submit(wait_in_vain).result()
    assert (caught.value.rank, caught.value.expected, caught.value.seen) == (3, 8, 5)
