"""Results that return in groups, lane by lane on the CPU: every sum has its members, once each and in slot order, whatever comes first and
wherever it is made.

Numbers are integers here and adding is `31 * sum + weight * value`, so that a sum tells which members it has and in which order.
"""

import struct

import pytest

from megamoe.device import regions, wire
from megamoe.ep.lifecycle import EPOCHS_APART
from megamoe.problem import Placement

from .lanes import Stuck, machine
from .test_device_exchange import CASES, DEVICE, TOKENS, TOP_K, GroupedMoE, Rank, Simulation, World, fc2, ids_of, quick_looks  # noqa: F401

WARPS = 2  # take the rows of a block to their groups; the scheduler's warp stands in for them


class Simulated(Simulation, GroupedMoE):
    def returned(self, words, at, used, lane):
        complete, block, valid = self.completed(words, at, used, self.w.control, lane)
        if complete:
            for warp in range(WARPS):
                self.send(block, valid, DEVICE["peers"].Int32(warp), WARPS, lane)


class GroupedRank(Rank):
    kernel = Simulated

    def __init__(self, world, number):
        super().__init__(world, number)
        self.factors = [world.rng.randrange(1, 9) for _ in range(world.config.most)]
        struct.pack_into(f"<{world.config.most}i", self.machine.memory, self.weights, *self.factors)

    def check(self):
        """Every token's output is the sum over ranks, in their order, of what they made of it."""
        c = self.config
        rows, scales, ids = self.now
        for t, token in enumerate(ids):
            groups = {}
            for slot, there in self.routes_of(t, token):
                groups.setdefault(there // c.experts, []).append((slot, there))
            total = [0] * c.hidden
            for members in groups.values():
                row = [0] * c.hidden
                for slot, there in members:
                    factor = 1 if c.early else self.factors[t * TOP_K + slot]
                    row = [(31 * row[i] + factor * fc2(rows[t][i], scales[t][i // 128], there)) & 0xFFFF for i in range(c.hidden)]
                if c.mxfp8:
                    row = [(row[i] & 0xFF) + 256 * (row[i // 32 * 32] & 0x7F) for i in range(c.hidden)]
                total = [(a + b) & 0xFFFF for a, b in zip(total, row, strict=True)]
            found = self.machine.memory[self.out + t * c.hidden * 2 : self.out + (t + 1) * c.hidden * 2]
            assert struct.unpack(f"<{c.hidden}H", found) == tuple(total), (self, t)
        counters = self.control + c.control_bytes - 4 * c.ranks * c.max_tokens
        assert not any(self.machine.memory[counters : self.control + c.control_bytes]), "groups that are not complete"


def block(values):
    words = [sum((int(v) & 0xFF) << (8 * i) for i, v in enumerate(values[at : at + 4])) for at in (0, 4)]
    return DEVICE["peers"].Int32(int(values[0]) & 0x7F), tuple(map(DEVICE["peers"].Int32, words))


@pytest.fixture(autouse=True)
def whole_numbers(monkeypatch):
    """Integers for floats."""
    quantize = DEVICE["quantize"]
    monkeypatch.setattr(quantize, "bf16_low", lambda word: int(word) & 0xFFFF)
    monkeypatch.setattr(quantize, "bf16_high", lambda word: (int(word) >> 16) & 0xFFFF)
    monkeypatch.setattr(quantize, "pack_bf16", lambda a, b: DEVICE["peers"].Int32((int(a) & 0xFFFF) | (int(b) & 0xFFFF) << 16))
    monkeypatch.setattr(quantize, "mxfp8_block", block)
    monkeypatch.setattr(
        quantize, "mxfp8_values", lambda words, byte: [((int(w) >> (8 * i)) & 0xFF) + 256 * int(byte) for w in words for i in range(4)]
    )
    monkeypatch.setattr(DEVICE["grouped"].cute.math, "fma", lambda a, b, c: (31 * int(c) + int(a) * int(b)) & 0xFFFF, raising=False)


ENOUGH = 99  # blocks


def world_of(seed, placement, experts, **more):
    return World(seed, placement, experts, rank=GroupedRank, **{"combine": "grouped", "stage": ENOUGH, **more})


WAYS = {
    "bf16": {},
    "mxfp8": {"wire": "mxfp8"},
    "early": {"early": True, "wire": "mxfp8"},
    "no room": {"stage": 0},
    "no room, early": {"early": True, "stage": 0},
    "room for two blocks": {"stage": 2, "wire": "mxfp8"},
}
MIXED = [("even", "mxfp8"), ("three ranks", "early"), ("redundant and uneven", "no room"), ("even", "no room, early")]


@pytest.mark.parametrize(
    ("case", "way"), [*MIXED, ("three ranks", "room for two blocks"), ("even", "room for two blocks"), *((case, "bf16") for case in CASES)]
)
def test_every_sum_has_its_members_in_order_in_launch_after_launch(case, way):
    placement, experts = CASES[case]
    world = world_of(sum(map(ord, case + way)), placement, experts, **WAYS[way])
    for pattern in ("random", "first rank", "one expert", "holes"):
        for rank in range(placement.ranks):
            tokens = world.rng.choice((0, 1, TOKENS, world.rng.randrange(TOKENS + 1)))
            world.call(rank, ids_of(world.rng, tokens, experts, pattern))
    world.run()
    for rank in world.ranks:
        assert rank.faults == []
        assert rank.word(regions.EPOCH) == 4


def test_a_rank_that_never_comes_is_named_and_a_reset_leaves_no_half_group():
    world = world_of(4, Placement.even(6, 3), 6)
    for rank in (0, 2):
        world.ranks[rank].wait = 8000
        world.call(rank, ids_of(world.rng, 6, 6, "random"))
    world.run()
    blamed = {(record[1], record[6]) for rank in (0, 2) for record in world.ranks[rank].faults}
    assert (wire.SITE_COUNTS, 1) in blamed
    world.call(1, ids_of(world.rng, 6, 6, "random"))
    world.run()
    assert all(rank.faults for rank in world.ranks)

    latest = max(rank.word(regions.EPOCH) for rank in world.ranks)
    for rank in world.ranks:
        rank.restart(latest + EPOCHS_APART)
    for pattern in ("random", "one expert", "holes"):
        for rank in range(3):
            world.call(rank, ids_of(world.rng, world.rng.randrange(TOKENS + 1), 6, pattern))
    world.run()
    assert [rank.faults for rank in world.ranks] == [[]] * 3


def without(module, name, place, instead):
    """A fault: inside ``place`` (module, function) the function ``name`` of ``module`` is replaced by ``instead``."""

    def plant(monkeypatch):
        inside, right, outer = set(), getattr(DEVICE[module], name), getattr(*place)

        def enclosed(*args):
            inside.add(machine().current)
            try:
                return outer(*args)
            finally:
                inside.discard(machine().current)

        monkeypatch.setattr(*place, enclosed)
        monkeypatch.setattr(DEVICE[module], name, lambda *args: (instead if machine().current in inside else right)(*args))

    return plant


def slots(wrong):
    """A fault: the word of a group is made by ``wrong(ids of the token, physical ids, rank, experts of a rank)``."""

    def plant(monkeypatch):
        def slots_of(ids, token, to, top_k, total, place, copies, experts):
            exchange, load = DEVICE["exchange"], DEVICE["memory"].ld_i32
            logical = [load(ids + (token * top_k + k) * 4) for k in range(top_k)]
            there = [int(exchange.destination(e, token * top_k + k, top_k, total, place, copies)) for k, e in enumerate(logical)]
            found = wrong(logical, there, int(to) // experts, experts)
            return DEVICE["peers"].Int32(sum(1 << k for k in found))

        monkeypatch.setattr(DEVICE["exchange"], "slots_of", slots_of)

    return plant


def first_alone(monkeypatch):
    """A fault: of rows that return alone nobody waits for more than a token's first."""
    right, flags = DEVICE["peers"].wait_word, world_of(0, UNEVEN, 6).config.offset("flags")

    def wait_word(address, launch, control, signal, site, *rest):
        if site == wire.SITE_RESULTS and (address - signal - flags) // 8 % TOP_K != 0:
            return DEVICE["peers"].Int32(wire.ALONE)
        return right(address, launch, control, signal, site, *rest)

    monkeypatch.setattr(DEVICE["peers"], "wait_word", wait_word)


UNEVEN = Placement(((0, 1, 2, 4), (3, 4), (5, 0)))
SEND = (DEVICE["grouped"], "send_rows")
DONE = (GroupedMoE, "completed")
PLANTED = {
    "sums sent without a fence": without("peers", "fence", SEND, lambda: None),
    "FC2 counted without a release": without("memory", "add_acq_rel", DONE, lambda *args: DEVICE["memory"].add_relaxed(*args)),
    "counters of groups left as they are": without("memory", "st_i32", SEND, lambda *args: None),
    "a slot without an expert counted": slots(lambda ids, there, rank, n: [k for k, t in enumerate(there) if t // n == rank or t < 0]),
    "a repeated expert counted once": slots(
        lambda ids, there, rank, n: [k for k, t in enumerate(there) if t >= 0 and t // n == rank and t not in there[:k]]
    ),
    "copies of experts not looked up": slots(lambda ids, there, rank, n: [k for k, e in enumerate(ids) if e >= 0 and e // n == rank]),
}
WITHOUT_ROOM = {
    "rows announced without a fence": without("peers", "fence", SEND, lambda: None),
    "rows that return alone announced as sums": without("peers", "word", SEND, lambda launch, _: (launch * (1 << 32)) | wire.SUMMED),
    "rows that return alone not waited for": first_alone,
}


@pytest.mark.parametrize(("fault", "stage"), [*((f, ENOUGH) for f in PLANTED), *((f, 0) for f in WITHOUT_ROOM)])
def test_planted_faults_are_found(fault, stage, monkeypatch):
    {**PLANTED, **WITHOUT_ROOM}[fault](monkeypatch)
    for seed in range(3):
        world = world_of(seed, UNEVEN, 6, stage=stage)
        for pattern in ("holes", "random"):
            for rank in range(3):
                world.ranks[rank].wait = 8000
                world.call(rank, ids_of(world.rng, 6, 6, pattern))
        try:
            world.run()
        except (AssertionError, Stuck, KeyError, struct.error):
            return
        if any(rank.faults for rank in world.ranks):
            return
    pytest.fail("the simulation does not see it")
