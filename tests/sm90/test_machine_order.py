"""What orders the accesses of several ranks: each instruction that does is taken away or narrowed in turn, and the data race is found."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from tests.machine.launch import MachineFault, compiler
from tests.machine.layers import OneRank, Ranks, inputs_of, kernel_of

from megamoe import MoEProblem
from megamoe_sm90.shim import ranks as several

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")

PROBLEM = MoEProblem(experts=8, top_k=4, hidden=512, intermediate=256, max_tokens=40, format="fp8_block128")


def without_room():
    """A layer whose rows return alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(several, "stage_of", lambda config, percent: 0)
        return Ranks(PROBLEM, 2, grid=2, tile=64, combine="grouped", races=True)


LAYERS = {
    "routes": lambda: Ranks(PROBLEM, 2, grid=2, tile=64, races=True),
    "grouped": lambda: Ranks(PROBLEM, 2, grid=2, tile=64, combine="grouped", wire_format="mxfp8", races=True),
    "alone": without_room,
    "gather": lambda: OneRank(PROBLEM, "native", 64, "gather", grid=3, races=True),
    "swap": lambda: OneRank(PROBLEM, "swap", 16, races=True),
}
TOKENS = ((40, 17), (1, 40), (40, 33))


def consequence(name, change):
    """What two seeds and three launches in a row see: the fault, or "" where there is none."""
    kernel = kernel_of(LAYERS[name]().variant).changed(change)
    for seed in range(2):
        layer = LAYERS[name]()
        ranks = isinstance(layer, Ranks)
        for function in [f for f, _ in layer.launchers] if ranks else [layer.function]:
            function.kernel = kernel
        for number, tokens in enumerate(TOKENS):
            inputs = [inputs_of(PROBLEM, n, "balanced", seed=10 * number + rank) for rank, n in enumerate(tokens)]
            try:
                layer.run(inputs if ranks else inputs[0], seed=10 * seed + number)
            except MachineFault as fault:
                return str(fault)
    return ""


def everywhere(pattern, new=""):
    return lambda ptx: re.sub(pattern, new, ptx)


def last(pattern, new=""):
    def change(ptx):
        at = list(re.finditer(pattern, ptx))[-1]
        return ptx[: at.start()] + new + ptx[at.end() :]

    return change


ARITHMETIC = "shfl|mov|add|mad|mul|setp|selp|shl|cvt|and|or|min|max|sub"


def whole_lines(ptx, before=0):
    """Loads of several words of a 16-byte line of shared memory also take its other words: ptxas makes one load of them.

    `before`: bytes by which the line begins too early.
    """
    lines, seen = [], set()
    for line in ptx.splitlines():
        load = re.match(r"\s*ld\.shared\.(?:v2\.)?b32\s.*\[(%r\d+)\+(\d+)\];", line)
        if load:
            register, at = load[1], int(load[2]) // 16 * 16
            if (register, at) in seen:
                lines.append(f"ld.shared.v4.b32 {{%line0, %line1, %line2, %line3}}, [{register}+{at - before}];")
            seen.add((register, at))
        elif not re.match(rf"\s*(//|({ARITHMETIC})\.)", line):
            seen.clear()  # the end of a block, or what no load moves past
        lines.append(line)
    return "\n".join(lines).replace(".reg .pred", ".reg .b32 %line<4>;\n.reg .pred", 1)


FENCE, BETWEEN_GPUS, BETWEEN_CTAS = r"fence\.acq_rel\.sys;", "data races(?s:.)*between GPUs", "data races(?s:.)*between CTAs"
SHARED_FENCE = r"fence\.proxy\.async\.shared::cta;"
UNFENCED = r"data races:\n  lines \d+ and \d+, without a proxy fence: .*{} of .*; weak write of .* by copies that complete on an mbarrier"
PLANTED = {
    "counts without a fence": ("routes", last(FENCE), BETWEEN_GPUS + ".* at (x|lists|xs) of rank"),
    "counts behind a fence of GPU scope": ("routes", last(FENCE, "fence.acq_rel.gpu;"), BETWEEN_GPUS + ".* at (x|lists|xs) of rank"),
    "results without a fence": ("routes", lambda ptx: re.sub(FENCE, "", ptx, count=ptx.count("fence.acq_rel.sys;") - 1), BETWEEN_GPUS),
    "words of GPU scope": ("routes", everywhere(r"st\.relaxed\.sys", "st.relaxed.gpu"), BETWEEN_GPUS),
    "waits of GPU scope": ("routes", everywhere(r"ld\.acquire\.sys", "ld.acquire.gpu"), BETWEEN_GPUS),
    "waits that acquire nothing": ("routes", everywhere(r"ld\.acquire\.sys", "ld.relaxed.sys"), BETWEEN_GPUS),
    "tiles that are counted without order": ("routes", everywhere(r"atom\.acq_rel", "atom.relaxed"), "data races"),
    "lists that nothing releases": ("routes", everywhere(r"st\.release\.gpu\.global\.b32", "st.relaxed.gpu.global.b32"), BETWEEN_CTAS),
    "rows that nothing releases": ("routes", everywhere(r"red\.release", "red.relaxed"), BETWEEN_CTAS),
    "rows on their way": ("routes", everywhere(r"cp\.async\.bulk\.wait_group\s+0;", "cp.async.bulk.wait_group.read 0;"), BETWEEN_CTAS),
    "waits that acquire nothing on this rank": ("routes", everywhere(r"ld\.acquire\.gpu", "ld.relaxed.gpu"), BETWEEN_CTAS),
    "lanes that do not wait for each other": ("routes", everywhere(r"bar\.warp\.sync[^;]*;"), "data races"),
    "groups without a fence": ("grouped", everywhere(FENCE), BETWEEN_GPUS),
    "rows alone without a fence": ("alone", everywhere(FENCE), BETWEEN_GPUS),
    "rows alone behind tiles that are counted without order": ("alone", everywhere(r"atom\.acq_rel", "atom.relaxed"), "data races"),
    "groups that are counted without order": ("grouped", everywhere(r"atom\.acq_rel", "atom.relaxed"), "data races"),
    "intermediate rows that nothing releases": ("gather", everywhere(r"red\.release", "red.relaxed"), BETWEEN_CTAS),
    "lists that nobody acquires": ("gather", everywhere(r"ld\.acquire", "ld.relaxed"), BETWEEN_CTAS),
    "row scales over those that threads have read": ("swap", last(SHARED_FENCE), UNFENCED.format("read")),
    "weights over what lists were made of": ("swap", lambda ptx: re.sub(SHARED_FENCE, "", ptx, count=1), UNFENCED.format("(read|write)")),
    "loads of a task that reach into the one before": ("gather", lambda ptx: whole_lines(ptx, before=16), "data races"),
}


@pytest.mark.parametrize(("name", "change", "seen"), PLANTED.values(), ids=PLANTED)
def test_is_found(name, change, seen):
    got = consequence(name, change)
    assert re.search(seen, got), got or "nothing was noticed"


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_as_they_are_have_no_data_race(name):
    assert consequence(name, lambda ptx: ptx + "// the same\n") == ""


@pytest.mark.parametrize("name", ["routes", "gather"])
def test_a_line_of_a_task_is_loaded_without_a_word_that_somebody_writes(name):
    """Racecheck reported it on an H200 where tasks were not aligned: the word in front of a task is another warp's. Nobody used it."""
    assert consequence(name, whole_lines) == ""
