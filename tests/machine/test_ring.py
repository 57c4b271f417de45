"""The kernel for several ranks with a ring of a few row blocks: the bytes of a kernel that holds every row, launch after launch."""

from __future__ import annotations

import random

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Int32, Int64
from tests.machine import layers
from tests.machine.launch import MachineFault, compiler
from tests.machine.layers import Ranks, inputs_of, same_bytes

from megamoe import MoEProblem
from megamoe.device import pull
from megamoe.testing import routing

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")


def problem_of(format, experts, most):
    return MoEProblem(experts=experts, top_k=4, hidden=256, intermediate=256, max_tokens=most, format=format)


CASES = {
    # ranks, format, tile, ring, grid, experts, most tokens, delays
    "two blocks": (2, "fp8_block128", 64, 2, 1, 32, 60, False),
    "four ranks, random waits": (4, "fp8_block128", 64, 2, 2, 32, 40, True),
    "large tiles": (2, "fp8_tensor", 128, 2, 3, 24, 150, False),
    "room to spare": (2, "bf16", 64, 5, 2, 32, 60, False),
}


@pytest.mark.parametrize("case", CASES)
def test_every_routing_gives_the_bytes_of_a_pool_for_all_rows(case):
    ranks, format, tile, ring, grid, experts, most, delays = CASES[case]
    problem = problem_of(format, experts, most)
    whole, small = (Ranks(problem, ranks, tile=tile, ring=r, grid=grid, delays=delays, races=r > 0 and grid == 1) for r in (0, ring))
    config = small.variant.config
    assert config.span == ring * config.group < config.blocks
    assert config.pool_rows < whole.variant.config.pool_rows == config.listed
    rng = random.Random(ring)
    for number, pattern in enumerate(routing.PATTERNS):
        inputs = [inputs_of(problem, rng.choice((0, most, rng.randint(1, most))), pattern, seed=number + 10 * r) for r in range(ranks)]
        wanted, got = whole.run(inputs, seed=number), small.run(inputs, seed=number)
        assert [small.status(rank)["abort"] for rank in range(ranks)] == [0] * ranks
        assert not small.judge(inputs, got), pattern
        assert all(map(same_bytes, got, wanted)), pattern


@cute.jit
def always_room(
    fc2_done: Int64,
    tiles: cutlass.Constexpr,
    span: cutlass.Constexpr,
    ahead: cutlass.Constexpr,
    block: Int32,
    first: Int32,
    control: Int64,
    wait_ms: Int32,
):
    return Int32(1)


@cute.jit
def never_lost(fc2_done: Int64, tiles: cutlass.Constexpr, span: cutlass.Constexpr, ahead: cutlass.Constexpr, block: Int32, blocks: Int32):
    return Int32(0)


@pytest.mark.parametrize(("name", "wrong"), [("room", always_room), ("lost", never_lost)])
def test_planted_faults_are_found(name, wrong, monkeypatch):
    monkeypatch.setattr(layers, "_KERNELS", {})
    monkeypatch.setattr(pull, name, wrong)
    problem = problem_of("fp8_block128", 32, 60)
    layer = Ranks(problem, 2, tile=64, ring=2, grid=1, deadline=0.1)
    for seed in range(4):
        inputs = [inputs_of(problem, 60, "balanced", seed=seed + 10 * rank) for rank in range(2)]
        try:
            outs = layer.run(inputs, seed=seed)
        except MachineFault:
            return
        if any(layer.status(rank)["abort"] for rank in range(2)) or layer.judge(inputs, outs):
            return
    pytest.fail("every result is right without it")
