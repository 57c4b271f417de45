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


LAYERS = {
    "native": (256, ("native", 128, "pool")),
    "native, more K blocks than stages": (768, ("native", 128, "pool")),
    "gather": (256, ("native", 64, "gather")),
    "swap": (256, ("swap", 16)),
}
"""Hidden size and kernel."""


def layer_of(name):
    hidden, kernel = LAYERS[name]
    problem = MoEProblem(experts=4, top_k=2, hidden=hidden, intermediate=256, max_tokens=40, format="fp8_block128")
    return OneRank(problem, *kernel, grid=2)


def nth(pattern, number, new):
    """Replace one occurrence of a pattern; negative numbers count from the end."""

    def change(ptx):
        found = list(re.finditer(pattern, ptx))
        at = found[number]
        return ptx[: at.start()] + new + ptx[at.end() :]

    return change


def everywhere(pattern, new):
    return lambda ptx: re.sub(pattern, new, ptx)


def consequence(name, change):
    """What the first seed that notices sees: the fault, "wrong bytes", or "" where none does."""
    layer = layer_of(name)
    inputs = inputs_of(layer.problem, 40, "zipf", seed=1)
    good, kernel = layer.run(inputs), layer.function.kernel.changed(change)
    for seed in range(SEEDS):
        layer = layer_of(name)
        layer.function.kernel = kernel
        try:
            out = layer.run(inputs, seed=seed)
        except MachineFault as fault:
            return str(fault)
        if not same_bytes(out, good):
            return f"wrong bytes; {layer.ran.text}"
    return ""


TRY_WAIT, WGMMA_WAIT = r"mbarrier\.try_wait\.parity[^;]*;", r"wgmma\.wait_group\.sync\.aligned\s+\d;"
PLANTED = {
    "products are never waited for": ("gather", everywhere(WGMMA_WAIT, ""), "wrong bytes|has not waited for|no fence.proxy"),
    "one wait too weak": (
        "native",
        nth(r"wgmma\.wait_group\.sync\.aligned\s+0;", -1, "wgmma.wait_group.sync.aligned 1;"),
        "wrong bytes|has not waited for",
    ),
    "no fence before products": ("swap", everywhere(r"wgmma\.fence\.sync\.aligned;", ""), "without wgmma.fence"),
    "the loader does not wait for a free stage": (
        "native, more K blocks than stages",
        nth(TRY_WAIT, 1, ALWAYS),
        "wrong bytes|arrivals|can go on",
    ),
    "products do not wait for their stage": ("swap", nth(TRY_WAIT, -1, ALWAYS), "wrong bytes|arrivals|can go on|lie outside|in no buffer"),
    "rows leave before they have arrived": ("native", nth(TRY_WAIT, 9, ALWAYS), "wrong bytes|arrivals"),
    "bulk stores are not waited for": (
        "native",
        everywhere(r"cp\.async\.bulk\.wait_group\s+0;", ""),
        "wrong bytes|CTA ends while the bulk store",
    ),
    "no proxy fence before rows are copied": (
        "native",
        nth(r"fence\.proxy\.async;", 0, ""),
        "wrong bytes.*reads what line .* wrote, and there is no fence.proxy.async",
    ),
    "no proxy fence before products of gathered rows": (
        "gather",
        everywhere(r"fence\.proxy\.async\.shared::cta;", ""),
        "reads what line .* wrote, and there is no fence.proxy.async",
    ),
    "no proxy fence before tiles of intermediate rows": (
        "swap",
        everywhere(r"fence\.proxy\.async\.global;", ""),
        "wrong bytes.*reads what line .* wrote, and there is no fence.proxy.async",
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


@pytest.mark.parametrize(("layer", "change", "seen"), PLANTED.values(), ids=PLANTED)
def test_is_noticed(layer, change, seen):
    got = consequence(layer, change)
    assert re.search(seen, got), got or f"{SEEDS} seeds noticed nothing"


@pytest.mark.parametrize("layer", LAYERS)
def test_kernels_without_a_planted_fault_are_silent(layer):
    assert consequence(layer, lambda ptx: ptx + "// the same\n") == ""
