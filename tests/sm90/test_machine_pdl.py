"""Kernels that may begin while the launch before them ends: launched so, and with the bytes of those that may not. On the CPU machine."""

from __future__ import annotations

import ctypes

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from tests.machine import launch, layers
from tests.machine.launch import compiler
from tests.machine.layers import OneRank, Ranks, same_bytes

from megamoe import MoEProblem
from megamoe_sm90.shim.ranks import RanksVariant
from megamoe_sm90.shim.variants import Variant

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")

PROBLEM = MoEProblem(experts=8, top_k=2, hidden=256, intermediate=128, max_tokens=48, format="fp8_block128")
SERIALIZATION, ATTRIBUTE_BYTES = 6, 72  # cudaLaunchAttributeProgrammaticStreamSerialization; sizeof(cudaLaunchAttribute)


@pytest.fixture
def overlapping(monkeypatch):
    """Whether each launch until now was allowed to overlap, of the host code's own ``cudaLaunchConfig_t``."""
    found: list[bool] = []
    known = launch.configuration

    def configuration(address):
        attributes = ctypes.c_uint64.from_address(address + 40).value
        places = (attributes + ATTRIBUTE_BYTES * i for i in range(ctypes.c_uint32.from_address(address + 48).value))
        values = {ctypes.c_uint32.from_address(at).value: ctypes.c_int.from_address(at + 8).value for at in places}
        found.append(bool(values.get(SERIALIZATION, 0)))
        return known(address)

    monkeypatch.setattr(launch, "configuration", configuration)
    return found


def with_pdl(monkeypatch):
    """Layers that are made from here on have kernels with the knob."""
    one, several = Variant.of, RanksVariant.of
    monkeypatch.setattr(layers.Variant, "of", lambda *given, **more: one(*given, **{**more, "pdl": True}))
    monkeypatch.setattr(
        layers.several.RanksVariant,
        "of",
        lambda problem, ranks, choice, operands, **more: several(problem, ranks, choice._replace(pdl=True), operands, **more),
    )


@pytest.mark.parametrize("kernel", [("native", 128, "pool"), ("native", 64, "gather"), ("swap", 16)], ids=lambda k: k[0] + "-" + str(k[1]))
def test_one_rank(kernel, overlapping, monkeypatch):
    plain = OneRank(PROBLEM, *kernel, tokens=40)
    inputs = plain.trial.inputs[0]
    want = plain.run(inputs)
    with_pdl(monkeypatch)
    layer = OneRank(PROBLEM, *kernel, tokens=40)
    assert layer.variant.config.pdl
    assert not plain.judge(inputs, want)
    for seed in range(3):  # on one workspace
        assert same_bytes(layer.run(inputs, seed=seed), want)
    assert overlapping == [False, True, True, True]


@pytest.mark.parametrize("combine", ["routes", "grouped"])
def test_several_ranks(combine, overlapping, monkeypatch):
    plain = Ranks(PROBLEM, 2, combine=combine, tokens=[20, 33])
    inputs = plain.trial.inputs
    wanted = plain.run(inputs)
    assert not plain.judge(inputs, wanted)
    with_pdl(monkeypatch)
    layer = Ranks(PROBLEM, 2, combine=combine, tokens=[20, 33])
    for seed in range(2):
        assert all(same_bytes(out, want) for out, want in zip(layer.run(inputs, seed=seed), wanted, strict=True))
    assert overlapping == [False] * 2 + [True] * 4
