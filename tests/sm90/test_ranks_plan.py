"""Several ranks without a GPU: what is refused and why, what would run, its memory, and that it compiles without spilling."""

import re

import pytest

from megamoe import InvalidInput, MoEProblem, Placement, UnsupportedProblem
from megamoe.compile import cubin
from megamoe.compile.obtain import obtain
from megamoe_sm90 import ranks_plan
from megamoe_sm90.backend import Sm90Backend
from megamoe_sm90.ranks_session import share
from megamoe_sm90.shim import ranks as several

BACKEND = Sm90Backend()
MIB = 1 << 20


def problem_of(**more):
    return MoEProblem(**{"experts": 16, "top_k": 4, "hidden": 512, "intermediate": 256, "max_tokens": 64, "format": "fp8_block128", **more})


@pytest.fixture
def proved(monkeypatch):
    """As if the kernels had been seen to run on any number of ranks."""
    monkeypatch.setattr(several, "PROVED_RANKS", 72)


def test_several_ranks_are_refused_with_the_true_reason():
    (reason,) = BACKEND.supports(problem_of(), ranks=2).reasons
    assert "no launch of it has been seen to complete on GPUs" in reason.text
    with pytest.raises(UnsupportedProblem, match="2 ranks"):
        BACKEND.plan(problem_of(), ranks=2)


@pytest.mark.parametrize(
    ("more", "ranks", "words"),
    [
        ({"experts": 146}, 73, "at most 72"),
        ({"max_tokens": 1 << 22}, 2, f"at most {(1 << 24) // 4 - 1}"),
        ({"experts": 2048}, 2, "1024 experts on a rank"),
        ({"experts": 15}, 2, "15 experts do not divide by 2 ranks"),
    ],
)
def test_limits_are_named(proved, more, ranks, words):
    verdict = BACKEND.supports(problem_of(**more), ranks=ranks)
    assert not verdict
    assert words in " ".join(reason.text for reason in verdict.reasons)


def test_a_plan_lists_its_symmetric_memory(proved):
    problem = MoEProblem(256, 6, 4096, 2048, 8192, "fp8_block128")
    plan = BACKEND.plan(problem, ranks=8)
    symmetric = {region.name: region.nbytes for region in plan.regions if region.kind == "symmetric"}
    assert symmetric["inbox"] == 8192 * 6 * 4096 * 2
    assert symmetric["x"] == 8192 * 4096
    assert sum(symmetric.values()) < 700 * MIB
    assert plan.wire["combine"] == "routes"
    assert any("every number of ranks" in text for text in plan.properties)
    assert BACKEND.kernel(plan, 5) == "ranks-128"


def test_local_memory_of_a_large_layer_is_bounded(proved):
    problem = MoEProblem(256, 6, 4096, 2048, 8192, "fp8_block128")

    def held(**knobs):
        plan = BACKEND.plan(problem, ranks=8, knobs=knobs)
        sizes = {region.name: region.nbytes for region in plan.regions if region.kind == "local"}
        assert sizes["row_route"] + sizes["control"] < 8 * MIB, "counters and lists, a few bytes a row"
        return sum(sizes[name] for name in ("pool", "pool_scale", "mid", "mid_scale"))

    row = (4096 + 2048) * (1 + 4 / 128)
    group = 17 * 128  # rows: two FC1 tasks of 128 columns for each of 132 multiprocessors
    assert held() == (256 * MIB // (group * row)) * group * row
    assert held(ring=4) == 4 * group * row < 64 * MIB
    assert held(ring=0) == (8 * 8192 * 6 + 32 * 128) * row > 2300 * MIB, "every route of every rank"


def test_a_layer_whose_rows_fit_anyway_has_no_ring(proved):
    for knobs in ({}, {"ring": 128}, {"ring": 0}):
        regions = {region.name: region for region in BACKEND.plan(problem_of(), ranks=2, knobs=knobs).regions}
        assert regions["pool"].nbytes == (2 * 64 * 4 // 64 + 8) * 64 * 512
        assert "every row that may come" in regions["pool"].purpose


def test_the_ring_is_for_several_ranks_and_of_the_sizes_that_are_named(proved):
    with pytest.raises(InvalidInput, match="ring=4 on one rank"):
        BACKEND.plan(problem_of(), knobs={"ring": 4})
    with pytest.raises(InvalidInput, match="allowed: auto, 0, 2, 4, 8"):
        BACKEND.plan(problem_of(), ranks=2, knobs={"ring": 1})


def test_tiles_follow_the_rows_that_experts_get(proved):
    few, many = problem_of(max_tokens=16), problem_of(max_tokens=512)
    assert [BACKEND.kernel(BACKEND.plan(p, ranks=2), 1) for p in (few, many)] == ["ranks-64", "ranks-128"]
    assert BACKEND.kernel(BACKEND.plan(few, ranks=2, knobs={"native_tile": 128}), 1) == "ranks-128"


@pytest.mark.parametrize("knobs", [{"order": "swap"}, {"native_rows": "gather"}, {"native_claims": "late"}, {"swap_tile": 8}])
def test_knobs_of_one_rank_are_refused(proved, knobs):
    with pytest.raises(InvalidInput, match="on several ranks"):
        BACKEND.plan(problem_of(), ranks=2, knobs=knobs)


def test_ranks_that_share_a_gpu_share_what_they_see():
    one = {"gpu": "a", "seen": 132}
    assert [share([one] * n, 0) for n in (1, 2, 4, 8)] == [132, 66, 33, 16]
    assert share([{"gpu": "a", "seen": 66}, {"gpu": "a", "seen": 64}], 0) == 32
    assert [share([one, {"gpu": "b", "seen": 100}, one], rank) for rank in range(3)] == [66, 100, 66]
    assert share([{"gpu": "a", "seen": 2}] * 4, 3) == 1


def test_another_architecture_is_refused(proved):
    with pytest.raises(InvalidInput, match="sm_100a"):
        BACKEND.kernels(BACKEND.plan(problem_of(), ranks=2), arch="sm_100a")


REDUNDANT = Placement(((0, 1, 2, 3), (4, 5, 0), (6, 7, 0)))
KERNELS = {
    "block scales": ({}, 2, {"native_tile": 128}),
    "small tile": ({}, 4, {"native_tile": 64}),
    "redundant experts, early weights": ({"experts": 8, "placement": REDUNDANT, "routing_weight": "early", "format": "bf16"}, 3, {}),
    "eight ranks": ({"format": "fp8_tensor", "experts": 256, "top_k": 8}, 8, {}),
    "a ring": ({"max_tokens": 8192}, 8, {"ring": 2}),
    "a ring, two bytes": ({"format": "bf16", "max_tokens": 8192}, 4, {"ring": 4}),
}


@pytest.mark.parametrize("case", KERNELS)
def test_kernels_compile_and_nothing_spills(proved, case, disassemble, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    more, ranks, knobs = KERNELS[case]
    plan = BACKEND.plan(problem_of(**more), ranks=ranks, knobs=knobs)
    requests = BACKEND.kernels(plan)
    config = ranks_plan.variant(plan.problem, ranks, plan.detail).config
    assert (config.span > 0) == ("ring" in knobs)
    assert len(requests) == (1 if plan.problem.format == "bf16" else 2)
    for image in cubin.images(obtain(requests[0]).object):
        # The producers' code lies between the two places where registers are handed out anew.
        _, producers, _ = re.split(r"USETMAXREG\.(?:DEALLOC|TRY_ALLOC)", text := disassemble(image))
        assert max(map(int, re.findall(r"\bR(\d+)\b", producers))) < config.registers[1]
        assert not re.search(r"\b(LDL|STL)\b", text)
        for used in cubin.resources(image):
            assert used.stack_bytes == 0
            assert used.registers <= 168
    assert max(plan.budgets.values()) <= 227 * 1024
