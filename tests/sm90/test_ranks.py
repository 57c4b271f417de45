"""The sm90 backend on several ranks, which share a GPU under MPS where there are not enough: results, bits, stress, faults and deaths.

From the least that can work to what may leave the GPU's service in disorder; one start of processes serves many cases. With
``-x``, the first hang ends the run: every start of processes has its own limit. ``--launches`` and ``--seconds`` limit the stress.
"""

from __future__ import annotations

import json

import pytest
from tests.sm90 import rank_work as work

from megamoe import env
from megamoe.testing.launcher import RanksFailed, launch
from megamoe.testing.mps import serving
from megamoe_sm90.shim import ranks as several

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(
        several.PROVED_RANKS == 1 and not env.allows_unproved_ranks(),
        reason=f"sm90 is not proved on several ranks and refuses them; {env.TEST_RANKS.name}=1 runs these tests, to prove it",
    ),
]

SOME = ("zipf", "masked", "one expert")
DEADLINE = 0.5
"""Of waits inside kernels, where they are meant to pass."""
MODES = pytest.mark.parametrize("mode", work.MODES)


def on(ranks):
    return pytest.param(ranks, marks=pytest.mark.ranks(ranks), id=f"{ranks} ranks")


def run(function, ranks, *args, limit=120.0, deadline=20.0):
    """``function(rank, *args)`` on ranks with a GPU."""
    with serving(ranks) as shared:
        more = {env.TIMEOUT.name: str(deadline), env.TEST_RANKS.name: "1", "NVSHMEM_SYMMETRIC_SIZE": "256M"}
        return launch(function, ranks, *args, timeout=limit, env={**shared, **more})


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """The kernels are there before any rank starts."""
    work.compile_all()


def wrong_of(found):
    return {case: what for case, what in found.items() if what}


@pytest.mark.parametrize("ranks", [on(2), on(4), on(8)])
@pytest.mark.parametrize("mode", [*work.MODES, *work.FEWER_BITS, *work.NO_ROOM])
def test_one_launch(ranks, mode):
    assert run(work.one_launch, ranks, mode, limit=60.0) == [("", 0)] * ranks


@pytest.mark.parametrize("ranks", [on(2), on(4)])
@pytest.mark.parametrize("mode", [*work.MODES, *work.FEWER_BITS, *work.NO_ROOM])
def test_every_routing_in_the_first_format(ranks, mode):
    for wrong, extra in run(work.routings, ranks, work.FORMATS[:1], mode, ()):
        assert wrong_of(wrong) == {}
        assert extra == [0], "one exchange a launch"
        assert len(wrong) > 200


@pytest.mark.parametrize("ranks", [on(2), on(4)])
@MODES
def test_other_formats(ranks, mode):
    for wrong, extra in run(work.routings, ranks, work.FORMATS[1:], mode, SOME):
        assert wrong_of(wrong) == {}
        assert extra == [0] * 3


@pytest.mark.ranks(8)
@MODES
def test_eight_ranks(mode):
    for wrong, extra in run(work.routings, 8, work.FORMATS[:1], mode, (*SOME, "all to rank 7")):
        assert wrong_of(wrong) == {}
        assert extra == [0]


@pytest.mark.ranks(4)
@MODES
def test_placements(mode):
    for wrong in run(work.placements, 4, mode):
        assert wrong_of(wrong) == {}
        assert len(wrong) > 60


@pytest.mark.ranks(4)
@MODES
def test_a_group_smaller_than_the_world_in_another_order(mode):
    for rank, wrong in enumerate(run(work.smaller_group, 4, mode)):
        assert wrong_of(wrong) == {}
        assert len(wrong) == (12 if rank == 1 else 24)


@pytest.mark.parametrize("ranks", [on(2), on(4)])
@MODES
def test_the_hot_path_is_one_launch_and_can_be_replayed(ranks, mode):
    for allocated, kinds, wrong, extra in run(work.hot_path, ranks, mode):
        assert allocated == 0
        assert kinds == [True], "a captured call is one kernel"
        assert wrong == [""] * 4
        assert extra == 0


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [on(4), on(2)])
@MODES
def test_skewed_launches_and_no_wrong_byte(ranks, mode, pytestconfig, capsys):
    launches, seconds = pytestconfig.getoption("--launches"), pytestconfig.getoption("--seconds")
    found = run(work.stress, ranks, mode, launches, seconds, limit=seconds + 120.0)
    with capsys.disabled():
        print(f"\n{ranks} ranks, {mode}: {found[0]['launches']} launches in {found[0]['seconds']:.1f} s")
    for one in found:
        assert one["judged"] == []
        assert one["bytes"] == 0
        assert one["extra"] == 0
        assert one["launches"] == found[0]["launches"]


@pytest.mark.timeout(400)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("mode", work.MODES[:1])
def test_fifty_faults_end_in_time_are_named_and_reset_repairs(mode):
    found = run(work.faults, 4, mode, 50, DEADLINE, limit=300.0, deadline=DEADLINE)  # each fault lasts a deadline, some two
    for number in range(50):
        each = [one[number] for one in found]
        victim, fault = each[0]["victim"], each[0]["fault"]
        others = [one for rank, one in enumerate(each) if rank != victim]
        assert [one["afterwards"] for one in each] == [""] * 4, each
        assert all(one["kind"] in ("PeerTimeout", "PeerAborted") for one in others), each
        assert all(one["seconds"] < DEADLINE + 1.5 for one in others), each
        if fault == "rejects its input":
            assert {(one["kind"], one["rank"]) for one in each} == {("PeerAborted", victim)}, each
            continue
        noticed = [one for one in others if one["kind"] == "PeerTimeout"]
        assert noticed, each
        for one in noticed:
            assert one["rank"] == victim, each
            assert one["site"], each
            assert one["expected"] != one["seen"], each
        assert each[victim]["kind"] == ("NoneType" if fault == "skips" else "PeerAborted"), each


@pytest.mark.last
@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", work.WAYS)
def test_a_process_that_leaves_is_named_by_reset_and_close_waits_for_nobody(way, tmp_path):
    try:
        run(work.leaves, 4, work.MODES[0], way, str(tmp_path), limit=60.0, deadline=DEADLINE)
    except RanksFailed as failed:
        assert way != "returns"
        assert list(failed.errors) == [3], failed  # noqa: PT017  the killed rank alone has no report
    for rank in range(3):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["wrong"] == ""
        assert seen["lost"]["kind"] in ("PeerTimeout", "PeerAborted"), seen
        assert seen["lost"]["seconds"] < DEADLINE + 2, seen
        assert (seen["reset"]["kind"], seen["reset"]["rank"]) == ("PeerAborted", 3), seen
        assert seen["reset"]["seconds"] < 2 * DEADLINE + 2, seen
        assert seen["closed"] < 2
        assert seen["alive"] == 3.0
