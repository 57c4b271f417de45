"""Results that return in groups, on the machine: the oracle's values, and bit for bit the sums that an independent computation makes.

The rows that a launch has staged are read from its memory. From them, in float64 with one rounding to float32 a step, the formats of
``megamoe.formats`` and the routing of the inputs, each rank's output is formed anew.
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
from megamoe.device import grouped, wire
from megamoe.ep.physical import PhysicalExperts
from megamoe.formats import load
from megamoe.testing import routing

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")

REDUNDANT = Placement(((0, 1, 2, 3, 4, 5, 6), (7, 8, 9, 0, 3), (10, 11, 12, 13, 3), (14, 15, 0)))


def problem_of(format="fp8_block128", **more):
    return MoEProblem(**{"experts": 16, "top_k": 4, "hidden": 512, "intermediate": 256, "max_tokens": 64, "format": format, **more})


def single(values):
    """Rounded to float32, kept as float64."""
    return values.to(torch.float32).to(torch.float64)


def staged(layer, rank):
    """FC2 rows of a rank's last launch: (source rank, route, hidden)."""
    config, scratch = layer.variant.config, layer.memory[rank]._scratch
    at, size = config.local.offsets["stage"]
    rows = scratch[at : at + size].view(torch.bfloat16).reshape(config.ranks, config.most, config.hidden)
    return rows.to(torch.float64)


def crossed(row, wire):
    """What arrives of a row of float32 values."""
    if wire == "bf16":
        return row.to(torch.bfloat16).to(torch.float64)
    form = load("mxfp8")
    quantized = form.quantize(row[None].to(torch.float32))
    return form.dequantize(quantized.data.to(torch.float32), quantized.scale)[0].to(torch.float64)


def expected(layer, inputs):
    """Outputs of all ranks from what their peers have staged."""
    problem, config = layer.problem, layer.variant.config
    physical = PhysicalExperts.of(problem.resolved_placement(layer.ranks), problem.experts)
    rows = [staged(layer, rank) for rank in range(layer.ranks)]
    outs = []
    for source, (_, ids, weights) in enumerate(inputs):
        out = torch.zeros(len(ids), problem.hidden, dtype=torch.bfloat16)
        for token, chosen in enumerate(ids.tolist()):
            groups = {}
            for slot, expert in enumerate(chosen):
                if 0 <= expert < problem.experts:
                    count, *copies = physical.rows[expert]
                    there = copies[token % count] if physical.copies else expert
                    groups.setdefault(there // config.experts, []).append(slot)
            order = sorted(groups) if layer.ranks < problem.top_k else groups  # else by the first slot
            total = torch.zeros(problem.hidden, dtype=torch.float64)
            for owner in order:
                row = torch.zeros(problem.hidden, dtype=torch.float64)
                for slot in groups[owner]:
                    weight = 1.0 if problem.routing_weight == "early" else float(weights[token, slot])
                    row = single(rows[owner][source, token * problem.top_k + slot] * weight + row)
                total = single(total + crossed(row, config.wire))
            out[token] = total.to(torch.bfloat16)
        outs.append(out)
    return outs


CASES = {
    # ranks, problem, kernel
    "two ranks": (2, {}, {}),
    "two ranks, MXFP8": (2, {}, {"wire_format": "mxfp8", "races": True}),
    "four ranks, MXFP8, two blocks of rows at a time": (4, {"format": "fp8_tensor"}, {"wire_format": "mxfp8", "ring": 2, "tile": 64, "races": True}),
    "ranks fewer than slots, early weights": (3, {"experts": 6, "format": "bf16", "routing_weight": "early"}, {"tile": 64}),
    "ranks more than slots": (4, {"top_k": 3, "hidden": 320, "format": "bf16"}, {"wire_format": "mxfp8", "delays": True}),
    "top-k larger than local experts, random waits": (2, {"experts": 6, "top_k": 6, "format": "fp8_tensor_e5m2"}, {"delays": True}),
    "redundant experts": (4, {"placement": REDUNDANT}, {"wire_format": "mxfp8", "tile": 64}),
}


@pytest.mark.parametrize("case", CASES)
def test_sums_have_the_bits_of_an_independent_computation_launch_after_launch(case):
    ranks, more, kernel = CASES[case]
    problem = problem_of(**more)
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


def test_a_row_that_is_not_finite_stays_its_own_tokens():
    problem = problem_of(format="bf16")
    layer = Ranks(problem, 2, grid=2, combine="grouped", wire_format="mxfp8")
    inputs = [inputs_of(problem, 20, "balanced", seed=rank) for rank in range(2)]
    inputs[1].x[3, 5] = float("nan")
    inputs[0].x[7, 9] = float("inf")
    outs = layer.run(inputs)
    broken = [{token for token in range(20) if not out[token].isfinite().all()} for out in outs]
    assert broken == [{7}, {3}]


def test_peers_of_a_rank_that_is_killed_between_its_tiles_end_in_time():
    problem = problem_of()
    layer = Ranks(problem, 2, grid=2, combine="grouped", deadline=0.05)
    inputs = [inputs_of(problem, 40, "balanced", seed=rank) for rank in range(2)]
    layer.run(inputs, change=lambda rank, launch: launch.killed(60_000) if rank == 1 else launch)
    found = layer.status(0)
    assert found["abort"] == 1
    assert (found["site"], found["index"]) in {(wire.SITE_RESULTS, 1), (wire.SITE_COUNTS, 1)}


@cute.jit
def one_member(
    ids: Int64,
    token: Int32,
    to: Int32,
    top_k: cutlass.Constexpr,
    total: cutlass.Constexpr,
    place: Int64,
    copies: cutlass.Constexpr,
    experts: cutlass.Constexpr,
):
    """`slots_of` by which every group is complete with its first member."""
    return Int32(1)


def last_place(slots, rank, ranks, top_k):
    """`place_of` that puts all groups of a token into one place."""
    return slots * 0


@pytest.mark.parametrize(("module", "name", "wrong"), [(grouped.exchange, "slots_of", one_member), (grouped, "place_of", last_place)])
def test_planted_faults_are_found(module, name, wrong, monkeypatch):
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
