"""Launch numbers are 32 bits and wrap: kernels go on where their sign changes, on every kernel that tags words with them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from tests.machine.launch import compiler
from tests.machine.layers import OneRank, Ranks, inputs_of

from megamoe import MoEProblem
from megamoe.device import regions

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")

PROBLEM = MoEProblem(experts=4, top_k=2, hidden=256, intermediate=128, max_tokens=40, format="fp8_block128")
EDGE = 2**31 - 3
"""Launches made before: the numbers of the next ones are 2 ** 31 - 2 and up."""


def epoch(control):
    return control[regions.EPOCH : regions.EPOCH + 4].view(torch.int32)


@pytest.mark.parametrize("kernel", [("native", 128, "pool"), ("native", 64, "gather"), ("swap", 16)], ids=str)
def test_one_rank_goes_on_over_the_change_of_sign(kernel):
    layer = OneRank(PROBLEM, *kernel, grid=3)
    word = epoch(layer.workspace.controls[layer.variant.order])
    word.fill_(EDGE)
    for number in range(4):
        inputs = inputs_of(PROBLEM, 40 - 9 * number, "zipf", seed=number)
        out = layer.run(inputs, seed=number)
        assert not layer.judge(inputs, out), number
        assert layer.status()["abort"] == 0, number
    assert int(word) == EDGE + 4 - 2**32


def test_several_ranks_go_on_over_the_change_of_sign():
    layer = Ranks(PROBLEM, 2, grid=2)
    for memory in layer.memory:
        epoch(memory.control).fill_(EDGE)
    for number in range(4):
        inputs = [inputs_of(PROBLEM, 17 - number, "zipf", seed=10 * number + rank) for rank in range(2)]
        outs = layer.run(inputs, seed=number)
        assert not layer.judge(inputs, outs), number
        assert [layer.status(rank)["abort"] for rank in range(2)] == [0, 0], number
