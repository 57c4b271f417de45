"""The device code of a launch on several ranks, lane by lane on the CPU: every row arrives where it belongs, whatever the order."""

import importlib.util
import random
import struct
import sys
import types
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

import megamoe_sm90
from megamoe.device import regions, wire
from megamoe.ep.lifecycle import EPOCHS_APART
from megamoe.ep.physical import PhysicalExperts
from megamoe.problem import Placement
from megamoe_sm90._drop.ranks_config import RanksConfig

from .lanes import LIVE, Barrier, Int32, Int64, Lane, Machine, Pointer, Stuck, device_modules, shuffle_sync, sync_warp

DEVICE = device_modules(
    *("memory", "deadline", "launch", "routing", "quantize", "combine", "stream", "peers", "exchange", "pull", "collect", "grouped")
)
MATH_WARPS, CTAS = 2, 2
MATH_THREADS = 32 * MATH_WARPS
THREADS = MATH_THREADS + 64  # and one warp each for tasks and for rows
TOKENS, TOP_K, HIDDEN, ELEMENT = 9, 3, 384, 1


class OneRank:
    """What the simulation needs of the one-rank kernel."""

    def row_word(self, row_route, row, kind):
        return DEVICE["memory"].ld_i32(row_route + row * 4)


def kernel_classes():
    """RanksMoE and GroupedMoE themselves, over a one-rank kernel that is reduced to what the CPU can do."""
    native = types.ModuleType("megamoe_sm90._drop.native")
    native.BAR_MATH, native.MATH_THREADS, native.NativeMoE = 1, MATH_THREADS, OneRank
    config = types.ModuleType("megamoe_sm90._drop.layer_config")
    config.MATH_WARPS, config.THREADS = MATH_WARPS, THREADS
    cutlass = DEVICE["peers"].cutlass
    package = types.ModuleType("megamoe.device")
    package.__dict__.update(DEVICE, regions=regions, wire=wire)
    stand_ins = {
        "cutlass": cutlass,
        "cutlass.cute": cutlass.cute,
        "megamoe.device": package,
        native.__name__: native,
        config.__name__: config,
    }
    for name in ("ranks", "ranks_grouped"):
        path = Path(megamoe_sm90.__file__).parent / "_drop" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"megamoe_sm90._drop.{name}", path)
        module = stand_ins[spec.name] = importlib.util.module_from_spec(spec)
        with mock.patch.dict(sys.modules, stand_ins):
            spec.loader.exec_module(module)
    return stand_ins["megamoe_sm90._drop.ranks"].RanksMoE, stand_ins["megamoe_sm90._drop.ranks_grouped"].GroupedMoE


RanksMoE, GroupedMoE = kernel_classes()


class Cta:
    """Shared memory of a block."""

    def __init__(self, config, number):
        self.number, self.threads = number, THREADS
        self.shared = bytearray(config.move_slots * config.row_bytes)
        self.arrays = {
            "counts": [0] * config.experts,
            "base": [0] * (config.experts + 1),
            "sent": [0] * (config.slots + 1),
            "first": [0] * (config.slots + 1),
            "cursor": [0],
        }
        self.moved = Barrier()


class Simulation:
    """Mixin: one lane's view of the kernel, with a layer that gives every byte of a row back times 3 plus the expert's number."""

    def __init__(self, rank, lane):
        self.rank, self.lane, self.c = rank, lane, rank.config

    def sum_rows(self, rows, experts):
        """Keep what has arrived for this warp's tokens instead of summing it."""
        c, w = self.c, self.w
        assert experts == c.total
        if w.lane == 0:
            for token in range(w.bidx * MATH_WARPS + w.warp, w.tokens, w.grid * MATH_WARPS):
                for slot in range(c.top_k):
                    route = token * c.top_k + slot
                    at = rows + route * c.hidden * 2
                    self.rank.received[route] = self.rank.machine.load(at, c.hidden * 2)

    def tasks(self, ready, control):
        """The scheduler warp, and in place of the math: FC1 copies rows and scales into mid, FC2 writes its tile of the rows of a block."""
        c, w, m, wait = self.c, self.w, self.rank.machine, DEVICE["deadline"].wait_ge
        stream, memory = DEVICE["stream"], DEVICE["memory"]
        blocks, task = Int32(w.cta.arrays["base"][c.experts]), w.bidx
        while True:
            kind, block, tile = stream.decode(task, blocks, c.group, c.n1, c.n2)
            if kind == stream.END or DEVICE["deadline"].aborted(control):
                return
            e = int(DEVICE["routing"].search_expert(block, w.base, c.experts))
            valid = min(w.cta.arrays["counts"][e] - (block - w.cta.arrays["base"][e]) * c.tile_m, c.tile_m)
            place = self.place_of(block)
            if kind == stream.FC1:
                wait(ready + block * 4, Int32(valid), control, regions.SITE_ROWS, block, w.wait_ms)
            else:
                wait(w.bank + regions.FC1_DONE + block * 4, Int32(c.n1), control, regions.SITE_MID, block, w.wait_ms)
            if w.lane == 0 and not DEVICE["deadline"].aborted(control):
                for row in range(valid):
                    for _ in range(m.rng.choice((0, 0, 0, 3, 30))):
                        m.pause()  # a tile takes its time
                    if kind == stream.FC1:
                        self.fc1_row(place + row, tile)
                    else:
                        self.fc2_row(place + row, tile, self.row_word(w.row_route, block * c.tile_m + row, kind), e)
            sync_warp()
            if w.lane == 0 and kind == stream.FC1:
                memory.red_release(w.bank + regions.FC1_DONE + block * 4, Int32(1))
            self.returned([kind, e, tile, place, Int32(valid), block], 0, True, w.lane)
            if w.lane == 0:
                task = w.grid + memory.add_relaxed(w.bank + regions.CLAIMS, Int32(1))
            task = shuffle_sync(task, 0)

    def fc1_row(self, row, tile):
        c, m, rank = self.c, self.rank.machine, self.rank
        m.store(rank.mid + row * c.intermediate + tile * 128, m.load(rank.pool + row * c.row_bytes + tile * 128, 128))
        m.store(rank.mid_scale + 4 * (tile * c.pool_rows + row), m.load(rank.pool_scale + 4 * (tile * c.pool_rows + row), 4))

    def fc2_row(self, row, tile, route, expert):
        c, m, rank = self.c, self.rank.machine, self.rank
        data = m.load(rank.mid + row * c.intermediate, c.intermediate)
        scales = [struct.unpack("<i", m.load(rank.mid_scale + 4 * (k * c.pool_rows + row), 4))[0] for k in range(c.kb2)]
        columns = range(tile * 256, min(tile * 256 + 256, c.hidden))
        values = [fc2(data[i], scales[i // 128], rank.number * c.experts + expert) for i in columns]
        m.store(self.result_row(self.w.stage, route) + columns[0] * 2, struct.pack(f"<{len(values)}H", *values))

    def body(self):
        """What native.py does around the methods of RanksMoE."""
        c, rank, lane, launch = self.c, self.rank, self.lane, DEVICE["launch"]
        control = rank.control
        epoch = launch.epoch_of(control)
        bank = launch.bank_of(control, epoch, c.bank_bytes)
        pointers = {name: Pointer(array) for name, array in lane.cta.arrays.items()}
        self.w = types.SimpleNamespace(
            control=control,
            bank=bank,
            epoch=epoch,
            list_ready=Int64(control + regions.BANKS + 2 * c.bank_bytes),
            xq=rank.table,
            xs=rank.place,
            ids=rank.ids,
            topk_w=rank.weights,
            stage=rank.stage,
            out=rank.out,
            x=rank.x,
            x_scale=rank.x_scale,
            tokens=Int32(rank.tokens),
            routes=Int32(rank.tokens * c.top_k),
            bank_bytes=c.bank_bytes,
            pool_rows=Int32(c.pool_rows),
            wait_ms=Int32(rank.wait),
            row_route=rank.row_route,
            bidx=Int32(lane.cta.number),
            grid=Int32(CTAS),
            warp=Int32(lane.number // 32),
            tidx=Int32(lane.number),
            lane=Int32(lane.lane),
            cta=lane.cta,
            **pointers,
        )
        w = self.w
        self.count()
        ready = bank + regions.ready_offset(c.bank_bytes)
        if lane.number >= MATH_THREADS:
            self.await_counts()
            if w.warp == MATH_WARPS:
                self.tasks(ready, control)
            else:
                self.move_rows(Int64(rank.pool), Int64(rank.pool_scale), ready, Int32(0), lane.cta.moved)
        else:
            launch.clear_next_bank(control, epoch, c.bank_bytes, w.bidx * MATH_THREADS + w.tidx, CTAS * MATH_THREADS)
            self.front()
            self.finish()
            if w.tidx == 0:
                launch.leave(control, w.grid)


class Simulated(Simulation, RanksMoE):
    pass


def fc2(byte, scale, expert):
    return (byte * 3 + scale * 5 + expert * 977) & 0xFFFF


class Rank:
    """A rank: its memory, and its launches one after another as on a stream."""

    kernel = Simulated

    def __init__(self, world, number):
        c, m = world.config, world.machine
        self.world, self.number, self.machine, self.config = world, number, m, c
        self.heap = m.allocate(c.layout.nbytes)
        for name in ("signal", "counts", "flags"):
            at, size = c.layout.offsets[name]
            m.memory[self.heap + at : self.heap + at + size] = bytes(size)
        self.control = Int64(m.allocate(c.control_bytes, zero=True))
        struct.pack_into("<i", m.memory, self.control + wire.RANK, number)
        local = m.allocate(c.local.nbytes)
        self.pool, self.pool_scale, self.mid, self.mid_scale = (
            local + c.local.offsets[name][0] for name in ("pool", "pool_scale", "mid", "mid_scale")
        )
        self.row_route = Int64(local + c.local.offsets["row_route"][0])
        self.x = Int64(m.allocate(c.max_tokens * c.row_bytes))
        self.x_scale = Int64(m.allocate(c.max_tokens * c.kb1 * 4))
        self.ids = Int64(m.allocate(c.max_tokens * TOP_K * 4))
        self.stage = Int64(local + c.local.offsets["stage"][0])
        self.out, self.weights = Int64(m.allocate(c.max_tokens * c.hidden * 2)), Int64(m.allocate(c.max_tokens * TOP_K * 4))
        self.calls, self.received, self.wait, self.left, self.faults = [], {}, 1 << 30, 0, []

    def __str__(self):
        return f"rank {self.number}"

    def restart(self, epoch):
        """What the host does at a reset, see DeviceFabric.restart."""
        memory, c = self.machine.memory, self.config
        memory[self.control : self.control + c.control_bytes] = bytes(c.control_bytes)
        struct.pack_into("<i", memory, self.control + regions.EPOCH, epoch)
        struct.pack_into("<i", memory, self.control + wire.RANK, self.number)
        struct.pack_into("<q", memory, self.heap + wire.TOLD, 0)
        self.faults, self.wait = [], 1 << 30

    def begin(self):
        """Start the next launch, if there is one."""
        if not self.calls:
            return
        rows, scales, ids = self.now = self.calls.pop(0)
        memory = self.machine.memory
        self.tokens, self.received = len(ids), {}
        self.place, self.table = self.world.place, self.world.table
        for t, row in enumerate(rows):
            memory[self.x + t * len(row) : self.x + (t + 1) * len(row)] = row
        flat = [s for row in scales for s in row]
        struct.pack_into(f"<{len(flat)}i", memory, self.x_scale, *flat)
        flat = [e for token in ids for e in token]
        struct.pack_into(f"<{len(flat)}i", memory, self.ids, *flat)
        lanes, self.blocks = [], [Cta(self.config, number) for number in range(CTAS)]
        for cta in self.blocks:
            for warp in range(THREADS // 32):
                shared = object()
                for lane in range(32):
                    one = Lane(self.machine, None, self, shared, warp * 32 + lane, cta, lane)
                    one.body = lambda lane: self.kernel(self, lane).body()
                    lanes.append(one)
        self.left = len(lanes)
        self.machine.start(lanes)

    def ended(self, lane):
        self.left -= 1
        if self.left == 0:
            self.machine.launch_ended(self, self.blocks)
            if self.word(regions.ABORT):
                self.faults.append(struct.unpack_from("<8q", self.machine.memory, self.control + regions.RECORD))
            else:
                self.check()
            self.begin()

    def word(self, at):
        return struct.unpack_from("<i", self.machine.memory, self.control + at)[0]

    def check(self):
        """Every route's row is here, made by the right expert from the right token."""
        c = self.config
        rows, scales, ids = self.now
        for t, token in enumerate(ids):
            for slot, there in self.routes_of(t, token):
                want = struct.pack(f"<{c.hidden}H", *[fc2(rows[t][i], scales[t][i // 128], there) for i in range(c.hidden)])
                assert self.received[t * TOP_K + slot] == want, (self, t, slot, there)

    def routes_of(self, t, token):
        """(slot, physical expert) of token t's routes."""
        for slot, expert in enumerate(token):
            if 0 <= expert < self.config.total:
                count, *copies = self.world.physical.rows[expert]
                yield slot, copies[t % count] if self.config.copies else expert


class World:
    """Ranks with a placement on one machine; ``more`` goes to the configuration, ``rank`` is their class."""

    def __init__(self, seed, placement, experts, *, rank=Rank, **more):
        self.machine, self.rng = Machine(seed, 1 << 23), random.Random(seed)
        self.physical = PhysicalExperts.of(placement, experts)
        self.config = RanksConfig(
            **{
                "fmt": "fp8_block128",
                "experts": self.physical.width,
                "top_k": TOP_K,
                "hidden": HIDDEN,
                "intermediate": HIDDEN,
                "act_bf16": False,
                "tile_m": 64,
                "rows": "pool",
                "ranks": placement.ranks,
                "max_tokens": TOKENS,
                "total": experts,
                "copies": self.physical.copies,
                "sms": 1,
                **more,
            }
        )
        self.ranks = [rank(self, number) for number in range(placement.ranks)]
        self.table = Int64(self.machine.allocate(8 * placement.ranks))
        struct.pack_into(f"<{placement.ranks}q", self.machine.memory, self.table, *[rank.heap for rank in self.ranks])
        flat = [value for row in self.physical.rows for value in row]
        self.place = Int64(self.machine.allocate(4 * len(flat)))
        struct.pack_into(f"<{len(flat)}i", self.machine.memory, self.place, *flat)

    def call(self, rank, ids):
        """Add a launch with these ids and random rows."""
        rows = [self.rng.randbytes(HIDDEN * ELEMENT) for _ in ids]
        scales = [[self.rng.randrange(1 << 16) for _ in range(self.config.kb1)] for _ in ids]
        self.ranks[rank].calls.append((rows, scales, ids))

    def run(self):
        LIVE.append(self.machine)
        try:
            for rank in self.ranks:
                rank.begin()
            self.machine.run()
        finally:
            LIVE.pop()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    """Spinning lanes look at clock and abort words often: a simulated poll is slow."""
    monkeypatch.setattr(DEVICE["peers"], "POLLS", 2)
    monkeypatch.setattr(DEVICE["deadline"], "POLLS", 2)


def ids_of(rng, tokens, experts, pattern):
    if pattern == "one expert":
        return [[experts - 1] * TOP_K for _ in range(tokens)]
    if pattern == "first rank":
        return [[rng.randrange(2) for _ in range(TOP_K)] for _ in range(tokens)]
    if pattern == "holes":
        return [[rng.choice((-1, rng.randrange(experts))) for _ in range(TOP_K)] if t % 3 else [-1] * TOP_K for t in range(tokens)]
    return [[rng.randrange(experts) for _ in range(TOP_K)] for _ in range(tokens)]


CASES = {
    "even": (Placement.even(6, 2), 6),
    "three ranks": (Placement.even(6, 3), 6),
    "redundant and uneven": (Placement(((0, 1, 2, 4), (3, 4), (5, 0))), 6),
    "a rank without experts": (Placement(((0, 1, 2), ())), 3),
}


@pytest.mark.parametrize(("case", "seed"), [("even", 1), *((case, 0) for case in CASES)])
def test_every_row_comes_back_in_launch_after_launch(case, seed):
    placement, experts = CASES[case]
    world = World(seed, placement, experts)
    rng = random.Random(seed)
    launches = ("random", "first rank", "one expert", "holes")
    for pattern in launches:
        for rank in range(placement.ranks):
            tokens = rng.choice((0, 1, TOKENS, rng.randrange(TOKENS + 1)))
            world.call(rank, ids_of(rng, tokens, experts, pattern))
    world.run()
    for rank in world.ranks:
        assert rank.faults == []
        assert rank.word(regions.EPOCH) == len(launches)
        assert rank.word(wire.EXCHANGES) == len(launches), "one exchange a launch"


def test_a_token_crosses_to_a_rank_once():
    placement = Placement.even(6, 2)
    world = World(3, placement, 6)
    ids = [[5, 3, 4], [0, 4, 3], [1, 2, 0], [3, 3, 5]]
    world.call(0, ids)
    world.call(1, [])
    world.run()
    pulls = Counter()
    for place, address, _ in world.machine.bulk_loads:
        at = address - world.ranks[0].heap - world.config.offset("x")
        if place.number == 1 and 0 <= at < TOKENS * HIDDEN:
            pulls[at // HIDDEN] += 1
    # Token 3 names one expert twice: only a smaller expert of the rank can carry a row for another one, so both copies cross.
    assert pulls == {0: 1, 1: 1, 3: 2}


def test_no_tokens_anywhere_ends():
    world = World(0, Placement.even(4, 2), 4)
    for _ in range(3):
        for rank in range(2):
            world.call(rank, [])
    world.run()
    assert [rank.word(regions.EPOCH) for rank in world.ranks] == [3, 3]


def test_bad_ids_raise_the_sticky_flag_and_are_no_route():
    world = World(0, Placement.even(4, 2), 4)
    world.call(0, [[7, 1, -5], [3, -1, 2]])
    world.call(1, [])
    world.run()
    assert [rank.word(regions.STICKY) for rank in world.ranks] == [regions.STICKY_BAD_ID, 0]


def test_a_rank_that_never_launches_is_named_by_the_first_and_everybody_ends():
    world = World(1, Placement.even(6, 3), 6)
    for rank in (0, 2):
        world.ranks[rank].wait = 8000
        world.call(rank, ids_of(random.Random(rank), 5, 6, "random"))
    world.run()
    records = [world.ranks[rank].faults[0] for rank in (0, 2)]
    assert all(world.ranks[rank].word(regions.ABORT) == 1 for rank in (0, 2))
    blamed = [(record[1], record[6]) for record in records]
    assert (wire.SITE_COUNTS, 1) in blamed, "the deadline names rank 1"
    assert all(found in ((wire.SITE_COUNTS, 1), (wire.SITE_TOLD, 0), (wire.SITE_TOLD, 2)) for found in blamed)
    told = struct.unpack_from("<q", world.machine.memory, world.ranks[1].heap + wire.TOLD)[0]
    assert told in (1, 3), "rank 1 will not wait for its peers when it comes"


def test_after_a_reset_nothing_of_the_failed_launch_is_left():
    """Ranks 0 and 2 give up on rank 1, whose own launch then finds their abort; restarted behind every number in use, all is well again."""
    world = World(4, Placement.even(6, 3), 6)
    rng = random.Random(4)
    for rank in (0, 2):
        world.ranks[rank].wait = 8000
        world.call(rank, ids_of(rng, 6, 6, "random"))
    world.run()
    world.call(1, ids_of(rng, 6, 6, "random"))
    world.run()
    assert all(rank.faults for rank in world.ranks)

    latest = max(rank.word(regions.EPOCH) for rank in world.ranks)
    for rank in world.ranks:
        rank.restart(latest + EPOCHS_APART)
    for pattern in ("random", "one expert", "holes"):
        for rank in range(3):
            world.call(rank, ids_of(rng, rng.randrange(TOKENS + 1), 6, pattern))
    world.run()
    for rank in world.ranks:
        assert rank.faults == []
        assert rank.word(regions.EPOCH) == latest + EPOCHS_APART + 3


def test_a_rank_that_is_told_leaves_at_once():
    world = World(2, Placement.even(4, 2), 4)
    struct.pack_into("<q", world.machine.memory, world.ranks[0].heap + wire.TOLD, 2)
    world.call(0, [[0, 1, 2]])
    world.run()
    (record,) = world.ranks[0].faults
    assert (record[1], record[6]) == (wire.SITE_TOLD, 1)
    assert world.machine.steps < 200_000


def with_tiles(count):
    """``announce`` that takes a block for complete after ``count`` tiles."""
    right = DEVICE["collect"].announce

    def wrong(table, flags, row_route, done, tiles, *rest):
        del tiles
        right(table, flags, row_route, done, count, *rest)

    return wrong


def without_earlier_ranks(right):
    """``words_of`` by which every source looks like rank 0 to its neighbours: rows of several ranks meet in one place."""

    def wrong(heap, offset, launch, ranks, source, experts):
        return right(heap, offset, launch, ranks, source * 0, experts)

    return wrong


def relaxed_add(right):
    """``red_release`` without its release."""
    del right
    return lambda address, value: DEVICE["memory"].add_relaxed(address, value)


PLANTED = {
    "results announced with the first of two tiles": ("collect", "announce", lambda right: with_tiles(1)),
    "count words of all ranks in one place": ("exchange", "words_of", without_earlier_ranks),
    "no fence before words to peers": ("peers", "fence", lambda right: lambda: None),
    "rows of the pool counted without a release": ("memory", "red_release", relaxed_add),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_found(fault, monkeypatch):
    module, name, plant = PLANTED[fault]
    monkeypatch.setattr(DEVICE[module], name, plant(getattr(DEVICE[module], name)))
    for seed in range(3):
        world = World(seed, Placement.even(4, 2), 4)
        for rank in range(2):
            world.ranks[rank].wait = 8000
            world.call(rank, ids_of(random.Random(10 * seed + rank), 6, 4, "random"))
        try:
            world.run()
        except (AssertionError, Stuck, KeyError, struct.error):
            return
        if any(rank.faults for rank in world.ranks):
            return
    pytest.fail("the simulation does not see it")
