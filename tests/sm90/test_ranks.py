"""The sm90 backend on several ranks, which share a GPU under MPS where there are not enough: results, bits, stress, faults and deaths.

Processes cost more than what they do, so for every number of ranks one start of them does all of parts_of(), from the least that can work;
a test looks at one part. With ``-x``, the first hang ends the run: every start of processes has its own limit. ``--launches`` and
``--seconds`` limit the stress.
"""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from tests.sm90 import rank_work as work

from megamoe import env
from megamoe.testing.launcher import RanksFailed, launch
from megamoe.testing.mps import serving

pytestmark = [pytest.mark.sm90, pytest.mark.timeout(600)]  # the first test of a number of ranks waits for all of its parts

SOME = ("zipf", "masked", "one expert")
DEADLINE = 0.5
"""Of waits inside kernels, where they are meant to pass."""
MODES = pytest.mark.parametrize("mode", work.MODES)


def parts_of(ranks):
    """What so many ranks do: name -> (name of a function of ``work``, its arguments)."""
    parts = {f"one launch, {mode}": ("one_launch", mode) for mode in work.PLAIN}
    if ranks == 8:
        return parts | {f"some routings, {mode}": ("routings", work.FORMATS[:1], mode, (*SOME, "all to rank 7")) for mode in work.MODES}
    parts |= {f"every routing, {mode}": ("routings", work.FORMATS[:1], mode, ()) for mode in work.PLAIN}
    parts |= {f"other formats, {mode}": ("routings", work.FORMATS[1:], mode, SOME) for mode in work.MODES}
    parts |= {f"hot path, {mode}": ("hot_path", mode) for mode in work.MODES}
    if ranks == 4:
        parts |= {f"placements, {mode}": ("placements", mode) for mode in work.MODES}
        parts |= {f"smaller group, {mode}": ("smaller_group", mode) for mode in work.MODES}
    return parts | {f"every routing, {mode}": ("routings", work.FORMATS[:1], mode, ()) for mode in work.OVERLAPPING}


def on(ranks):
    return pytest.param(ranks, marks=pytest.mark.ranks(ranks), id=f"{ranks} ranks")


def run(function, ranks, *args, limit=120.0, deadline=20.0, in_turn=False):
    """``function(rank, *args)`` on ranks with a GPU; ``in_turn`` lets those that share one have it one after the other, without MPS."""
    with nullcontext({}) if in_turn else serving(ranks) as shared:
        more = {env.TIMEOUT.name: str(deadline), "NVSHMEM_SYMMETRIC_SIZE": "256M"}
        return launch(function, ranks, *args, timeout=limit, env={**shared, **more})


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """The kernels are there before any rank starts."""
    work.compile_all()


@pytest.fixture(scope="module")
def done():
    """A function: number of ranks, part -> what every rank found. Starts the ranks when first asked for their number."""
    known = {}

    def found(ranks, part):
        if ranks not in known:
            try:
                known[ranks] = run(work.many, ranks, parts_of(ranks), limit=280.0)
            except RanksFailed as failed:
                known[ranks] = failed
        if isinstance(known[ranks], RanksFailed):
            raise known[ranks]
        for rank, did in enumerate(known[ranks]):
            assert part in did, f"rank {rank} came no further than {list(did)[-1]}: {list(did.values())[-1]}"
            assert not isinstance(did[part], str), f"rank {rank}: {did[part]}"
        return [did[part] for did in known[ranks]]

    return found


def wrong_of(found):
    return {case: what for case, what in found.items() if what}


@pytest.mark.parametrize("ranks", [on(2), on(4), on(8)])
@pytest.mark.parametrize("mode", work.PLAIN)
def test_one_launch(done, ranks, mode):
    assert done(ranks, f"one launch, {mode}") == [("", 0)] * ranks


@pytest.mark.parametrize("ranks", [on(2), on(4)])
@pytest.mark.parametrize("mode", [*work.PLAIN, *work.OVERLAPPING])
def test_every_routing_in_the_first_format(done, ranks, mode):
    for wrong, extra in done(ranks, f"every routing, {mode}"):
        assert wrong_of(wrong) == {}
        assert extra == [0], "one exchange a launch"
        assert len(wrong) > 200


@pytest.mark.parametrize("ranks", [on(2), on(4)])
@MODES
def test_other_formats(done, ranks, mode):
    for wrong, extra in done(ranks, f"other formats, {mode}"):
        assert wrong_of(wrong) == {}
        assert extra == [0] * 3
        assert len(wrong) > 100


@pytest.mark.ranks(8)
@MODES
def test_eight_ranks(done, mode):
    for wrong, extra in done(8, f"some routings, {mode}"):
        assert wrong_of(wrong) == {}
        assert extra == [0]
        assert len(wrong) > 90


@pytest.mark.ranks(4)
@MODES
def test_placements(done, mode):
    for wrong in done(4, f"placements, {mode}"):
        assert wrong_of(wrong) == {}
        assert len(wrong) > 60


@pytest.mark.ranks(4)
@MODES
def test_a_group_smaller_than_the_world_in_another_order(done, mode):
    for rank, wrong in enumerate(done(4, f"smaller group, {mode}")):
        assert wrong_of(wrong) == {}
        assert len(wrong) == (12 if rank == 1 else 24)


@pytest.mark.parametrize("ranks", [on(2), on(4)])
@MODES
def test_the_hot_path_is_one_launch_and_can_be_replayed(done, ranks, mode):
    for allocated, kinds, wrong, extra in done(ranks, f"hot path, {mode}"):
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
    """Under MPS every process saw an illegal memory access when one was killed in a kernel, also those without a kernel of their own (H200,
    driver 580). So ranks that share a GPU have it in turn there."""
    try:
        run(work.leaves, 4, work.MODES[0], way, str(tmp_path), limit=60.0, deadline=DEADLINE, in_turn=way == "killed in a kernel")
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
