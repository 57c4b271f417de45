"""Several ranks without a GPU: what is refused and why, what would run, its memory, and that it compiles without spilling."""

import re

import pytest

from megamoe import InvalidInput, MoEProblem, Placement, UnsupportedProblem
from megamoe.compile import cubin
from megamoe.compile.obtain import obtain
from megamoe.ep.confighash import configuration
from megamoe_sm90 import ranks_plan
from megamoe_sm90.backend import Sm90Backend

BACKEND = Sm90Backend()
MIB = 1 << 20


def problem_of(**more):
    return MoEProblem(**{"experts": 16, "top_k": 4, "hidden": 512, "intermediate": 256, "max_tokens": 64, "format": "fp8_block128", **more})


@pytest.fixture
def proved(monkeypatch):
    """As if the kernels had been seen to run on any number of ranks."""
    monkeypatch.setenv("MEGAMOE_TEST_RANKS", "1")


def test_more_ranks_than_have_been_proved_are_refused_with_the_true_reason(monkeypatch):
    monkeypatch.delenv("MEGAMOE_TEST_RANKS", raising=False)
    assert BACKEND.supports(problem_of(), ranks=8)
    (reason,) = BACKEND.supports(problem_of(), ranks=16).reasons
    assert "16 ranks: on GPUs the kernel has been run on up to 8" in reason.text
    with pytest.raises(UnsupportedProblem, match="16 ranks"):
        BACKEND.plan(problem_of(), ranks=16)


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


LARGE = MoEProblem(256, 6, 4096, 2048, 8192, "fp8_block128")
RESULTS = {  # knobs, percent of the average that is staged, what holds
    "by default": ({}, 125, "at a fixed number of ranks"),
    "MXFP8": ({"wire": "mxfp8"}, 125, "returns it as mxfp8"),
    "half": ({"stage": 50}, 50, "at a fixed number of ranks"),
    "routes": ({"combine": "routes"}, None, "the same for every number of ranks"),
}


@pytest.mark.parametrize("case", RESULTS)
def test_a_plan_lists_its_symmetric_memory(proved, case):
    knobs, percent, words = RESULTS[case]
    plan = BACKEND.plan(LARGE, ranks=8, knobs=knobs)
    symmetric = {region.name: region.nbytes for region in plan.regions if region.kind == "symmetric"}
    assert symmetric["inbox"] == 8192 * 6 * 4096 * 2
    assert symmetric["x"] == 8192 * 4096
    assert sum(symmetric.values()) < 700 * MIB
    local = {region.name: region.nbytes for region in plan.regions if region.kind == "local"}
    blocks = 0 if percent is None else percent * 8192 * 6 // 100 // 128 + 32
    assert local.get("stage", 0) == blocks * 128 * 4096 * 2 <= 512 * MIB
    assert sum(nbytes for name, nbytes in local.items() if name != "weights of experts") < 800 * MIB
    assert plan.wire == {"combine": "grouped", "wire": "bf16", **{name: value for name, value in knobs.items() if name != "stage"}}
    assert any(words in text for text in plan.properties)
    assert BACKEND.kernel(plan, 5) == "ranks-128"


def test_ranks_that_differ_in_what_returns_have_different_plans_on_the_wire(proved):
    texts = [
        configuration(BACKEND.plan(LARGE, ranks=8, knobs=knobs), drop="", x_scale=None, mid_scale=None) for knobs, *_ in RESULTS.values()
    ]
    assert len({str(text) for text in texts}) == 3, "room for rows is a rank's own matter"


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"combine": "routes", "wire": "mxfp8"}, "combine='routes' takes wire='bf16'"),
        ({"combine": "sums"}, "allowed: grouped, routes"),
        ({"wire": "fp8"}, "allowed: bf16, mxfp8"),
    ],
)
def test_what_cannot_return_is_refused(proved, knobs, words):
    with pytest.raises(InvalidInput, match=words):
        BACKEND.plan(problem_of(), ranks=2, knobs=knobs)


def test_one_rank_sends_nothing_that_a_wire_format_could_round():
    with pytest.raises(InvalidInput, match="on one rank"):
        BACKEND.plan(problem_of(), knobs={"wire": "mxfp8"})
    assert BACKEND.plan(problem_of(), knobs={"combine": "routes"}).ranks == 1


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
    for knobs in ({}, {"ring": 128}, {"ring": 0, "stage": 200}):
        regions = {region.name: region for region in BACKEND.plan(problem_of(), ranks=2, knobs=knobs).regions}
        assert regions["pool"].nbytes == regions["stage"].nbytes // 2 == (2 * 64 * 4 // 64 + 8) * 64 * 512
        assert "every row that may come" in regions["pool"].purpose
        assert "every row that may come" in regions["stage"].purpose


def test_without_room_for_rows_that_wait_there_is_no_region_for_them(proved):
    regions = {region.name for region in BACKEND.plan(problem_of(), ranks=2, knobs={"stage": 0}).regions}
    assert "stage" not in regions
    assert "row_group" in regions


def test_the_ring_and_the_staging_are_for_several_ranks_and_of_the_sizes_that_are_named(proved):
    with pytest.raises(InvalidInput, match="ring=4 on one rank"):
        BACKEND.plan(problem_of(), knobs={"ring": 4})
    with pytest.raises(InvalidInput, match="allowed: auto, 0, 2, 4, 8"):
        BACKEND.plan(problem_of(), ranks=2, knobs={"ring": 1})
    with pytest.raises(InvalidInput, match="stage=100 on one rank"):
        BACKEND.plan(problem_of(), knobs={"stage": 100})


def test_tiles_follow_the_rows_that_experts_get(proved):
    few, many = problem_of(max_tokens=16), problem_of(max_tokens=512)
    assert [BACKEND.kernel(BACKEND.plan(p, ranks=2), 1) for p in (few, many)] == ["ranks-64", "ranks-128"]
    assert BACKEND.kernel(BACKEND.plan(few, ranks=2, knobs={"native_tile": 128}), 1) == "ranks-128"


@pytest.mark.parametrize("knobs", [{"order": "swap"}, {"native_rows": "gather"}, {"native_claims": "late"}, {"swap_tile": 8}])
def test_knobs_of_one_rank_are_refused(proved, knobs):
    with pytest.raises(InvalidInput, match="on several ranks"):
        BACKEND.plan(problem_of(), ranks=2, knobs=knobs)


def test_another_architecture_is_refused(proved):
    with pytest.raises(InvalidInput, match="sm_100a"):
        BACKEND.kernels(BACKEND.plan(problem_of(), ranks=2), arch="sm_100a")


REDUNDANT = Placement(((0, 1, 2, 3), (4, 5, 0), (6, 7, 0)))
KERNELS = {
    "block scales": ({}, 2, {"native_tile": 128}),
    "small tile": ({}, 4, {"native_tile": 64}),
    "redundant experts, early weights": ({"experts": 8, "placement": REDUNDANT, "routing_weight": "early", "format": "bf16"}, 3, {}),
    "routes": ({}, 2, {"combine": "routes"}),
    "mxfp8, block scales": ({}, 2, {"native_tile": 128, "wire": "mxfp8"}),
    "mxfp8, ranks fewer than slots": ({"format": "fp8_tensor_e5m2", "routing_weight": "early"}, 2, {"wire": "mxfp8", "native_tile": 64}),
    "mxfp8, bf16": ({"format": "bf16"}, 8, {"wire": "mxfp8", "native_tile": 128}),
    "the most ranks": ({"experts": 288, "top_k": 8}, 72, {}),
    "eight ranks": ({"format": "fp8_tensor", "experts": 256, "top_k": 8}, 8, {}),
    "no room for rows that wait": ({}, 2, {"native_tile": 128, "stage": 0}),
    "no room, mxfp8, bf16": ({"format": "bf16"}, 4, {"wire": "mxfp8", "native_tile": 64, "stage": 0}),
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
