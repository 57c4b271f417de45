"""Faults planted in the PTX of real kernels: the machine reports each, or bytes are wrong. Otherwise its silence would prove nothing."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from tests.machine.launch import MachineFault, compiler
from tests.machine.layers import OneRank, inputs_of, same_bytes

from megamoe import MoEProblem

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")

SEEDS = 10
ALWAYS = "setp.eq.b32 P1, 0, 0;"


def layer_of(order):
    problem = MoEProblem(experts=4, top_k=2, hidden=256, intermediate=256, max_tokens=40, format="fp8_block128")
    return OneRank(problem, *{"native": ("native", 128, "pool"), "gather": ("native", 64, "gather"), "swap": ("swap", 16)}[order], grid=2)


def nth(pattern, number, new):
    """Replace one occurrence of a pattern; negative numbers count from the end."""

    def change(ptx):
        found = list(re.finditer(pattern, ptx))
        at = found[number]
        return ptx[: at.start()] + new + ptx[at.end() :]

    return change


def everywhere(pattern, new):
    return lambda ptx: re.sub(pattern, new, ptx)


def consequence(order, change):
    """What the first seed that notices sees: the fault, "wrong bytes", or "" where none does."""
    layer = layer_of(order)
    inputs = inputs_of(layer.problem, 40, "zipf", seed=1)
    good, kernel = layer.run(inputs), layer.function.kernel.changed(change)
    for seed in range(SEEDS):
        layer = layer_of(order)
        layer.function.kernel = kernel
        try:
            out = layer.run(inputs, seed=seed)
        except MachineFault as fault:
            return str(fault)
        if not same_bytes(out, good):
            return "wrong bytes"
    return ""


TRY_WAIT, WGMMA_WAIT = r"mbarrier\.try_wait\.parity[^;]*;", r"wgmma\.wait_group\.sync\.aligned\s+\d;"
PLANTED = {
    "products are never waited for": ("gather", everywhere(WGMMA_WAIT, ""), "wrong bytes|has not waited for"),
    "one wait too weak": (
        "native",
        nth(r"wgmma\.wait_group\.sync\.aligned\s+0;", -1, "wgmma.wait_group.sync.aligned 1;"),
        "wrong bytes|has not waited for",
    ),
    "no fence before products": ("swap", everywhere(r"wgmma\.fence\.sync\.aligned;", ""), "without wgmma.fence"),
    "the loader does not wait for a free stage": ("native", nth(TRY_WAIT, 1, ALWAYS), "wrong bytes|arrivals|can go on"),
    "products do not wait for their stage": ("swap", nth(TRY_WAIT, -1, ALWAYS), "wrong bytes|arrivals|can go on|lie outside|in no buffer"),
    "rows leave before they have arrived": ("native", nth(TRY_WAIT, 9, ALWAYS), "wrong bytes|arrivals"),
    "bulk stores are not waited for": (
        "native",
        everywhere(r"cp\.async\.bulk\.wait_group\s+0;", ""),
        "wrong bytes|CTA ends while the bulk store",
    ),
    "copies that nobody counts": ("gather", everywhere(r"cp\.async\.mbarrier\.arrive\.noinc[^;]*;", ""), "no thread can go on"),
    "a barrier expects too little": ("native", nth(r"mov\.b32\s+%r\d+, 32768;", 0, ""), "arrivals|wrong bytes|can go on|overflows"),
    "a barrier of the block is missing": (
        "native",
        nth(r"\tbar\.sync\s+0;", 1, ""),
        "wrong bytes|can go on|is no mbarrier|in no buffer|poll in vain",
    ),
    "a store shifted by 4": ("native", nth(r"st\.global\.v4\.b32 \[(%rd\d+)\]", -1, "st.global.v4.b32 [%rd1+4]"), "not aligned to 16"),
    "a shared load behind the end": (
        "native",
        nth(r"ld\.shared\.b32\s+(%r\d+), \[(%r\d+)\+\d+\];", 0, r"ld.shared.b32 %r1, [%r1+230000];"),
        "lie outside",
    ),
    "a tile 64 columns further": ("gather", nth(r"(?<=, )%r\d+(?=\}\], \[[^\n]*\n\$L)", 0, "77"), "wrong bytes"),
}


@pytest.mark.parametrize(("order", "change", "seen"), PLANTED.values(), ids=PLANTED)
def test_is_noticed(order, change, seen):
    got = consequence(order, change)
    assert re.search(seen, got), got or f"{SEEDS} seeds noticed nothing"


@pytest.mark.parametrize("order", ["native", "gather", "swap"])
def test_kernels_without_a_planted_fault_are_silent(order):
    assert consequence(order, lambda ptx: ptx + "// the same\n") == ""
