"""Results that return in groups, on the machine: the oracle's values, and bit for bit the sums that an independent computation makes.

The FC2 rows of a launch are read from memory: where it has staged them, or where they have arrived alone. From them, in float64 with one
rounding to float32 a step, the formats of ``megamoe.formats`` and the routing of the inputs, each rank's output is formed anew.
"""

import random

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32, Int64
from tests.machine import layers
from tests.machine.launch import MachineFault, compiler
from tests.machine.layers import Ranks, inputs_of, same_bytes

from megamoe import MoEProblem, Placement
from megamoe.device import exchange, wire
from megamoe.ep.physical import PhysicalExperts
from megamoe.formats import load
from megamoe.testing import routing
from megamoe_sm90._drop.ranks_grouped import GroupedMoE
from megamoe_sm90.shim import ranks as several

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")

REDUNDANT = Placement(((0, 1, 2, 3, 4, 5, 6), (7, 8, 9, 0, 3), (10, 11, 12, 13, 3), (14, 15, 0)))


def problem_of(format="fp8_block128", **more):
    return MoEProblem(**{"experts": 16, "top_k": 4, "hidden": 512, "intermediate": 256, "max_tokens": 64, "format": format, **more})


def single(values):
    """Rounded to float32, kept as float64."""
    return values.to(torch.float32).to(torch.float64)


class Made:
    """FC2 rows of the last launch of all ranks, by owner, source rank and route."""

    def __init__(self, layer, inputs):
        self.config, self.layer = layer.variant.config, layer
        c = self.config
        self.physical = PhysicalExperts.of(layer.problem.resolved_placement(layer.ranks), layer.problem.experts)
        received = [[0] * c.experts for _ in range(layer.ranks)]
        for _, ids, _ in inputs:
            for token, chosen in enumerate(ids.tolist()):
                for there in map(self.expert, chosen, [token] * c.top_k):
                    if there is not None:
                        received[there // c.experts][there % c.experts] += 1
        self.fits = [sum(-(-rows // c.tile_m) for rows in of) <= c.staged for of in received]

    def expert(self, expert, token):
        """The physical expert of a route, None where there is none."""
        if not 0 <= expert < self.layer.problem.experts:
            return None
        count, *copies = self.physical.rows[expert]
        return copies[token % count] if self.config.copies else expert

    def local(self, owner, name, kind):
        at, size = self.config.local.offsets[name]
        return self.layer.memory[owner]._scratch[at : at + size].view(kind)

    def rows(self, owner, source, token, slots):
        """The rows of a group, one a slot, with a look at how they have returned."""
        c, heap = self.config, self.layer.heaps[source]
        alone = not self.fits[owner] or (c.wire == "bf16" and len(slots) == 1)
        flags = self.layer.region(heap, "flags").view(torch.int32)[::2]
        routes = [token * c.top_k + slot for slot in slots]
        assert {int(flags[route]) for route in (routes if alone else routes[:1])} == {wire.ALONE if alone else wire.SUMMED}
        if alone:
            inbox = self.layer.region(heap, "inbox").view(torch.bfloat16).reshape(c.most, c.hidden)
            return inbox[routes].to(torch.float64)
        numbers = self.local(owner, "route_row", torch.int32)[[source * c.most + route for route in routes]]
        return self.local(owner, "stage", torch.bfloat16).reshape(-1, c.hidden)[numbers].to(torch.float64)


def crossed(row, wire):
    """What arrives of a row of float32 values."""
    if wire == "bf16":
        return row.to(torch.bfloat16).to(torch.float64)
    form = load("mxfp8")
    quantized = form.quantize(row[None].to(torch.float32))
    return form.dequantize(quantized.data.to(torch.float32), quantized.scale)[0].to(torch.float64)


def expected(layer, inputs):
    """Outputs of all ranks from the rows that they and their peers have made."""
    problem, config, made = layer.problem, layer.variant.config, Made(layer, inputs)
    outs = []
    for source, (_, ids, weights) in enumerate(inputs):
        out = torch.zeros(len(ids), problem.hidden, dtype=torch.bfloat16)
        for token, chosen in enumerate(ids.tolist()):
            groups = {}
            for slot, expert in enumerate(chosen):
                if (there := made.expert(expert, token)) is not None:
                    groups.setdefault(there // config.experts, []).append(slot)
            total = torch.zeros(problem.hidden, dtype=torch.float64)
            for owner, slots in groups.items():  # by their first slots
                row = torch.zeros(problem.hidden, dtype=torch.float64)
                for slot, each in zip(slots, made.rows(owner, source, token, slots), strict=True):
                    weight = 1.0 if problem.routing_weight == "early" else float(weights[token, slot])
                    row = single(each * weight + row)
                total = single(total + crossed(row, config.wire))
            out[token] = total.to(torch.bfloat16)
        outs.append(out)
    return outs


@pytest.fixture
def room(monkeypatch):
    """Makes layers with room for so many blocks of rows that wait for their groups."""

    def make(blocks):
        monkeypatch.setattr(several, "stage_of", lambda config, percent: blocks)

    return make


CASES = {
    # ranks, problem, kernel; room: blocks of rows that wait for their groups
    "two ranks": (2, {}, {}),
    "two ranks, MXFP8": (2, {}, {"wire_format": "mxfp8", "races": True}),
    "four ranks, MXFP8, two blocks of rows at a time": (
        4,
        {"format": "fp8_tensor"},
        {"wire_format": "mxfp8", "ring": 2, "tile": 64, "races": True},
    ),
    "ranks fewer than slots, early weights": (3, {"experts": 6, "format": "bf16", "routing_weight": "early"}, {"tile": 64}),
    "ranks more than slots": (4, {"top_k": 3, "hidden": 320, "format": "bf16"}, {"wire_format": "mxfp8", "delays": True}),
    "top-k larger than local experts, random waits": (2, {"experts": 6, "top_k": 6, "format": "fp8_tensor_e5m2"}, {"delays": True}),
    "redundant experts": (4, {"placement": REDUNDANT}, {"wire_format": "mxfp8", "tile": 64}),
    "no room": (2, {}, {"room": 0, "tile": 64, "races": True}),
    "no room, MXFP8, two blocks of pool rows": (
        4,
        {"format": "bf16"},
        {"room": 0, "wire_format": "mxfp8", "ring": 2, "tile": 64, "races": True},
    ),
    "room for some launches": (3, {"experts": 6, "format": "bf16"}, {"room": 3, "tile": 64, "delays": True}),
    "room for some launches, MXFP8, early weights": (
        4,
        {"top_k": 3, "hidden": 320, "format": "bf16", "routing_weight": "early"},
        {"room": 3, "tile": 64, "wire_format": "mxfp8"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_sums_have_the_bits_of_an_independent_computation_launch_after_launch(case, room):
    ranks, more, kernel = CASES[case]
    problem = problem_of(**more)
    kernel = dict(kernel)
    if "room" in kernel:
        room(kernel.pop("room"))
    layer = Ranks(problem, ranks, grid=2, combine="grouped", **kernel)
    rng = random.Random(case)
    for number, pattern in enumerate(routing.PATTERNS):
        tokens = [rng.choice((0, 1, 17, 40)) for _ in range(ranks)]
        inputs = [inputs_of(problem, n, pattern, seed=100 * number + rank) for rank, n in enumerate(tokens)]
        outs = layer.run(inputs, seed=number)
        assert [layer.status(rank)["abort"] for rank in range(ranks)] == [0] * ranks
        assert layer.judge(inputs, outs) == []
        for rank, want in enumerate(expected(layer, inputs)):
            assert torch.equal(outs[rank].view(torch.int16), want.view(torch.int16)), (pattern, rank)
        for rank, again in enumerate(layer.run(inputs, seed=1000 + number)):
            assert same_bytes(outs[rank], again), "another order of arrival, the same bits"


@pytest.mark.parametrize("wire_format", wire.WIRES)
def test_no_bit_depends_on_how_much_room_there_is(wire_format, room):
    problem, layers_ = problem_of(max_tokens=40), []
    for blocks in (0, 5, 99):
        room(blocks)
        layers_.append(Ranks(problem, 2, grid=2, tile=64, combine="grouped", wire_format=wire_format))
    fitted = set()
    for number, pattern in enumerate(routing.PATTERNS):
        inputs = [inputs_of(problem, tokens, pattern, seed=100 * number + rank) for rank, tokens in enumerate((40, 17))]
        outs = [layer.run(inputs, seed=10 * number + i) for i, layer in enumerate(layers_)]
        for other in outs[1:]:
            assert all(same_bytes(one, two) for one, two in zip(outs[0], other, strict=True)), pattern
        fitted |= {tuple(Made(layer, inputs).fits) for layer in layers_}
    assert len(fitted) > 2, "a rank had room, the other one not"


@pytest.mark.parametrize("blocks", [0, 99])
def test_a_row_that_is_not_finite_stays_its_own_tokens(blocks, room):
    room(blocks)
    problem = problem_of(format="bf16")
    layer = Ranks(problem, 2, grid=2, combine="grouped", wire_format="mxfp8")
    inputs = [inputs_of(problem, 20, "balanced", seed=rank) for rank in range(2)]
    inputs[1].x[3, 5] = float("nan")
    inputs[0].x[7, 9] = float("inf")
    outs = layer.run(inputs)
    broken = [{token for token in range(20) if not out[token].isfinite().all()} for out in outs]
    assert broken == [{7}, {3}]


@pytest.mark.parametrize("blocks", [0, 99])
def test_peers_of_a_rank_that_is_killed_between_its_tiles_end_in_time(blocks, room):
    room(blocks)
    problem = problem_of()
    layer = Ranks(problem, 2, grid=2, combine="grouped", deadline=0.05)
    inputs = [inputs_of(problem, 40, "balanced", seed=rank) for rank in range(2)]
    layer.run(inputs, change=lambda rank, launch: launch.killed(60_000) if rank == 1 else launch)
    found = layer.status(0)
    assert found["abort"] == 1
    assert (found["site"], found["index"]) in {(wire.SITE_RESULTS, 1), (wire.SITE_COUNTS, 1)}


@cute.jit
def two_members(
    ids: Int64,
    token: Int32,
    to: Int32,
    top_k: cutlass.Constexpr,
    total: cutlass.Constexpr,
    place: Int64,
    copies: cutlass.Constexpr,
    experts: cutlass.Constexpr,
):
    """`slots_of` by which every group is complete with its second member."""
    return Int32(3)


def beside(self, region, route, size):
    """`at_source` for the route's neighbour."""
    return AT_SOURCE(self, region, route ^ 1, size)


AT_SOURCE = GroupedMoE.at_source
WRONG = {
    "groups of two": (99, exchange, "slots_of", two_members),
    "sums announced as rows": (99, wire, "SUMMED", wire.ALONE),
    "rows at the places of their neighbours": (0, GroupedMoE, "at_source", beside),
}


@pytest.mark.parametrize("fault", WRONG)
def test_planted_faults_are_found(fault, monkeypatch, room):
    blocks, module, name, wrong = WRONG[fault]
    room(blocks)
    monkeypatch.setattr(layers, "_KERNELS", {})
    monkeypatch.setattr(module, name, wrong)
    problem = problem_of()
    layer = Ranks(problem, 2, grid=2, combine="grouped", deadline=0.1)
    inputs = [inputs_of(problem, 40, "balanced", seed=rank) for rank in range(2)]
    try:
        outs = layer.run(inputs)
    except MachineFault:
        return
    assert layer.status(0)["abort"] or layer.status(1)["abort"] or layer.judge(inputs, outs)
