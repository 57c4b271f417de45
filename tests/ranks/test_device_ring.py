"""A ring of pool and mid rows that is much smaller than what may come, lane by lane on the CPU: no row is overwritten before its time."""

import random
import struct
from collections import Counter

import pytest

from megamoe.device import regions
from megamoe.problem import Placement
from megamoe_sm90._drop import ranks_config
from megamoe_sm90._drop.ranks_config import RanksConfig

from .lanes import Stuck
from .test_device_exchange import DEVICE, TOKENS, TOP_K, World, quick_looks  # noqa: F401  the fixture

EXPERTS, RANKS = 12, 2
LOCAL = EXPERTS // RANKS


def ids_of(rng, tokens, pattern):
    choose = {
        "balanced": lambda: rng.sample(range(EXPERTS), TOP_K),
        "one rank": lambda: rng.sample(range(LOCAL), TOP_K),
        "one expert": lambda: [LOCAL] * TOP_K,
        "far apart": lambda: [0, rng.randrange(1, LOCAL - 1), LOCAL - 1],
        "zero": lambda: [-1] * TOP_K,
    }[pattern]
    return [choose() for _ in range(tokens)]


def ring_world(seed, ring, **more):
    return World(seed, Placement.even(EXPERTS, RANKS), EXPERTS, ring=ring, **more)


def run(world, *launches):
    """Launches in a row; a launch is its ids by rank."""
    for launch in launches:
        for rank, ids in enumerate(launch):
            world.call(rank, ids)
    world.run()


def crossed(world, rank):
    """Times that each token of another rank was brought to ``rank``, by (source, token)."""
    found = Counter()
    for place, address, _ in world.machine.bulk_loads:
        for source in world.ranks:
            at = address - source.heap - world.config.offset("x")
            if place.number == rank != source.number and 0 <= at < world.config.max_tokens * world.config.row_bytes:
                found[source.number, at // world.config.row_bytes] += 1
    return found


@pytest.fixture(params=[8, 7])
def slots(request, monkeypatch):
    """Rows of a batch: with 7, batches reach from one block into the next."""
    monkeypatch.setattr(RanksConfig, "move_slots", property(lambda _: request.param))


@pytest.mark.parametrize(("ring", "sms"), [(2, 1), (3, 1), (2, 2)])
def test_every_row_comes_back_in_launch_after_launch(slots, ring, sms):
    world = ring_world(10 * ring + sms, ring, sms=sms)
    blocks = world.config.span
    assert blocks == ring * world.config.group < world.config.blocks
    rng = random.Random(ring)
    patterns = ("balanced", "one rank", "zero", "far apart", "one expert", "balanced")
    run(world, *[[ids_of(rng, rng.choice((0, TOKENS, rng.randrange(TOKENS + 1))), pattern) for _ in range(RANKS)] for pattern in patterns])
    for rank in world.ranks:
        assert rank.faults == []
        assert rank.word(regions.EPOCH) == len(patterns)


@pytest.mark.parametrize("slots", [7], indirect=True)
@pytest.mark.parametrize("seed", range(3))
def test_all_routes_to_one_expert_or_rank_and_more_blocks_than_the_ring(slots, seed):
    """150 rows of one expert are three blocks, two of which the ring holds."""
    world = ring_world(seed, 2, max_tokens=25)
    assert world.config.span == 2
    rng = random.Random(seed)
    run(world, [ids_of(rng, 25, "one expert")] * RANKS, [ids_of(rng, 25, "one rank")] * RANKS)
    for rank in world.ranks:
        assert rank.faults == []
        assert rank.word(regions.EPOCH) == 2


def test_tokens_cross_again_only_where_the_ring_has_lost_them():
    """Rank 1 holds nothing of its own; 9 tokens of it go to the first, the last and another expert of rank 0."""
    times = {}
    for ring in (0, 2, 3, 5):
        world = ring_world(1, ring)
        run(world, [[], ids_of(random.Random(0), TOKENS, "far apart")])
        found = crossed(world, 0)
        assert world.ranks[1].faults == []
        assert set(found) == {(1, token) for token in range(TOKENS)}, "every token crosses"
        times[ring] = sum(found.values())
    assert times[0] == TOKENS, "once, where nothing is overwritten"
    assert TOKENS <= times[5] <= times[3] <= times[2] <= TOP_K * TOKENS
    assert times[2] > TOKENS, "two of six blocks cannot keep what the last one needs"


def no_wait(right):
    """``room`` that never waits."""
    del right
    return lambda *_: 1


def believing(right):
    """``lost`` that takes every copy for good."""
    del right
    return lambda *_: 0


PLANTED = {"rows written before FC2 of their forerunners": ("room", no_wait), "copies of rows that are gone": ("lost", believing)}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_found(fault, monkeypatch):
    name, plant = PLANTED[fault]
    monkeypatch.setattr(DEVICE["pull"], name, plant(getattr(DEVICE["pull"], name)))
    for seed in range(6):
        world = ring_world(seed, 2)
        rng = random.Random(seed)
        for rank in world.ranks:
            rank.wait = 20000
        try:
            run(world, [ids_of(rng, TOKENS, "far apart") for _ in range(RANKS)])
        except (AssertionError, Stuck, KeyError, struct.error):
            return
        if any(rank.faults for rank in world.ranks):
            return
    pytest.fail("the simulation does not see it")


def test_a_ring_of_one_group_is_refused_because_it_would_stand_still(monkeypatch):
    with pytest.raises(ValueError, match="ring=1"):
        ring_world(0, 1)
    monkeypatch.setattr(ranks_config, "LEAST_RING", 1)
    failed = {}
    for ring in (1, 2):
        world = ring_world(0, ring)
        for rank in world.ranks:
            rank.wait = 20000
        run(world, [ids_of(random.Random(0), TOKENS, "one rank") for _ in range(RANKS)])
        failed[ring] = [bool(rank.faults) for rank in world.ranks]
    assert failed == {1: [True] * RANKS, 2: [False] * RANKS}
