"""Plans: pure, complete, and the ladder of kernels by live tokens. Needs neither a GPU nor CuTe DSL."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe import InvalidInput, MoEProblem, Placement, SwiGLU, UnsupportedProblem
from megamoe.bench.workloads import SHAPES
from megamoe.compile import Precompiles
from megamoe.presets import PRESETS
from megamoe.tune import Tunable
from megamoe_sm90 import SPEC
from megamoe_sm90.backend import Sm90Backend
from megamoe_sm90.shim.knobs import SPACE, ladder, variants_of
from megamoe_sm90.shim.variants import TICK, Operands

BACKEND = Sm90Backend()
PROBLEM = SHAPES["dsv3"].problem(4096, "fp8_block128")


def test_planning_loads_no_compiler():
    code = (
        "import sys; from megamoe_sm90.backend import Sm90Backend; from megamoe.bench.workloads import SHAPES\n"
        "before = list(sys.path); plan = Sm90Backend().plan(SHAPES['dsv3'].problem(64, 'bf16')); assert sys.path == before\n"
        "tops = {name.partition('.')[0] for name in sys.modules}; print(tops & {'cutlass', 'tvm_ffi', 'common', 'src'})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout.strip() == "set()"


@pytest.mark.parametrize("with_gpu", [False, True])
def test_weights_on_the_cpu_are_told_where_to_go(monkeypatch, with_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: with_gpu)
    (reason,) = BACKEND.probe(torch.device("cpu")).reasons
    assert str(reason) == "the device is cpu, these kernels need a GPU (fix: move the weights to the GPU, or backend='reference')."


def test_plan_says_what_a_session_holds():
    plan = BACKEND.plan(PROBLEM)
    regions = {r.name: r.nbytes for r in plan.regions}
    # By hand: 32 experts of 3 * 7168 * 2048 bytes and a float32 scale for every 128 x 128 of them.
    assert regions["weights"] == 32 * 3 * 7168 * 2048 * (1 + 4 / 128**2)
    # At least the rows between the GEMMs (all routes) and the bf16 result of every route.
    assert regions["scratch"] > 4096 * 8 * (2048 + 2 * 7168)
    assert set(regions) == {"weights", "scratch", "native control", "swap control"}
    assert plan.bounds["all weights once"] == pytest.approx(regions["weights"] / 4.45e12 * 1e6)
    assert all(nbytes <= 232448 for nbytes in plan.budgets.values())
    assert plan == BACKEND.plan(PROBLEM)


problems = st.builds(
    MoEProblem,
    experts=st.integers(1, 512),
    top_k=st.just(1),
    hidden=st.integers(1, 64).map(lambda n: 128 * n),
    intermediate=st.integers(1, 128).map(lambda n: 128 * n),
    max_tokens=st.sampled_from([1, 7, 8, 9, 127, 128, 129, 1000, 8192, 65536]),
    format=st.sampled_from(SPEC.formats),
    activation=st.sampled_from([SwiGLU(), SwiGLU(limit=7.0, alpha=1.702, up_bias=1.0)]),
    routing_weight=st.sampled_from(["late", "early"]),
)


@settings(max_examples=150)
@given(problem=problems, top_k=st.integers(1, 32), biases=st.booleans(), quantized=st.booleans())
def test_every_supported_problem_has_kernels_for_all_tokens(problem, top_k, biases, quantized):
    problem = replace(problem, top_k=min(top_k, problem.experts))
    assert BACKEND.supports(problem)
    rungs = BACKEND.plan(problem).detail
    tokens = [rung.tokens for rung in rungs]
    assert tokens == sorted(set(tokens))
    assert tokens[-1] == problem.max_tokens
    operands = Operands(quantized=quantized and problem.format != "bf16", b13=biases, b2=biases and problem.routing_weight == "late")
    for variant in variants_of(problem, rungs, operands):
        assert variant.shared_bytes <= 232448
        assert variant.control_bytes % 4 == 0
        ends = [offset + size for offset, size in variant.scratch.values()]
        starts = [offset for offset, _ in variant.scratch.values()]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)), "regions overlap"


def test_decode_runs_decode_kernels_on_a_prefill_sized_session():
    small, large = BACKEND.plan(replace(PROBLEM, max_tokens=8)), BACKEND.plan(replace(PROBLEM, max_tokens=65536))
    assert small.detail[0] == large.detail[0]
    assert large.detail[0].order == "swap"
    assert large.detail[-1].order == "native"


@pytest.mark.parametrize("order", ["native", "swap"])
def test_a_fixed_order_is_kept(order):
    problem = replace(PROBLEM, max_tokens=512)
    assert {rung.order for rung in BACKEND.plan(problem, knobs={"order": order}).detail} == {order}


def test_all_knobs_make_plans_or_say_why_not():
    problem = replace(PROBLEM, max_tokens=300)
    made = 0
    for knobs in SPACE.candidates():
        rungs = ladder(problem, knobs)
        assert rungs[-1].tokens == 300
        made += len(variants_of(problem, rungs, Operands()))
    assert made > 100


@pytest.mark.parametrize(("format", "hidden"), [("bf16", 49152), ("fp8_block128", 98304), ("bf16", 262144)])
def test_rows_too_wide_for_a_pool_are_gathered(format, hidden):
    """The dispatch warp holds a whole row in shared memory; what is left then is too little for a ring of stages."""
    problem = replace(PROBLEM, format=format, hidden=hidden, max_tokens=65536)
    rungs = BACKEND.plan(problem).detail
    assert {rung.rows for rung in rungs if rung.order == "native"} == {"gather"}
    assert rungs[-1].tokens == 65536
    with pytest.raises(InvalidInput, match="leave native_rows at 'auto'"):
        BACKEND.plan(problem, knobs={"native_rows": "pool"})
    assert BACKEND.plan(replace(problem, hidden=16384)).detail[-1].rows == "pool"


def test_swap_order_beyond_its_capacity_is_refused():
    """4096 routes at most: every block keeps the routing of the whole call in shared memory."""
    with pytest.raises(InvalidInput, match="1 to 512 with top_k=8"):
        BACKEND.plan(PROBLEM, knobs={"order": "swap", "swap_tile": 128})
    with pytest.raises(InvalidInput, match="1 to 512 with top_k=8"):
        BACKEND.plan(PROBLEM, knobs={"swap_tokens": 1024})


def test_swap_order_whose_shares_overflow_is_refused():
    """512 tokens in tiles of 8: 8 + 4096 / 8 blocks of 128 tiles of 256 K blocks; times 131 CTAs that is beyond 2^31."""
    problem = replace(PROBLEM, experts=8, hidden=16384, intermediate=16384, format="bf16", max_tokens=512)
    knobs = {"order": "swap", "swap_tile": 8}
    with pytest.raises(InvalidInput, match="17039360 K blocks; allowed: 16268815"):
        BACKEND.plan(problem, knobs=knobs)
    assert BACKEND.plan(replace(problem, max_tokens=480), knobs=knobs).detail[-1].order == "swap"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "mxfp8"}, "mxfp8 has no sm90 kernel"),
        ({"hidden": 7000}, "hidden=7000 is not a multiple of 128"),
        ({"intermediate": 96}, "intermediate=96 is not a multiple of 128"),
        ({"format": "bf16", "hidden": 2880 + 32}, "hidden=2912 is not a multiple of 64"),
        ({"experts": 513}, "at most 512"),
        ({"placement": Placement((tuple(reversed(range(32))),))}, "reorders"),
    ],
)
def test_refusals_name_their_reason(change, said):
    verdict = BACKEND.supports(replace(PROBLEM, **change))
    assert [said in str(reason) for reason in verdict.reasons].count(True) == 1
    assert all(reason.hint for reason in verdict.reasons)
    with pytest.raises(UnsupportedProblem, match=said):
        BACKEND.plan(replace(PROBLEM, **change))


@pytest.mark.parametrize("ranks", [0, -1, None, "2", 1.5, True])
def test_ranks_that_are_no_number_of_ranks(ranks):
    assert [str(reason).startswith(f"ranks={ranks!r}; allowed: ") for reason in BACKEND.supports(PROBLEM, ranks).reasons] == [True]
    with pytest.raises(UnsupportedProblem, match="a whole number of at least 1"):
        BACKEND.plan(PROBLEM, ranks=ranks)


def test_the_backend_can_be_tuned_and_compiled_ahead():
    assert isinstance(BACKEND, Tunable)
    assert isinstance(BACKEND, Precompiles)
    plan = BACKEND.plan(PROBLEM)
    chosen = [BACKEND.kernel(plan, tokens) for tokens in (0, 1, 8, 64, 65, 768, 4096)]
    assert chosen == ["swap-8", "swap-8", *["native-64-gather"] * 2, *["native-128-gather"] * 2, "native-128-pool"]


@pytest.mark.parametrize("name", ["dsv3", "dsv4", "qwen30b", "qwen235b"])
def test_small_layers_stay_in_swap_order_longer(name):
    """Swap order ends where more weights are touched than it streams well, or at 64 tokens; the ladder has no gap behind it."""
    problem = SHAPES[name].problem(8192, "fp8_block128")
    rungs = BACKEND.plan(problem).detail
    swap = [rung.tokens for rung in rungs if rung.order == "swap"]
    assert swap[-1] == {"dsv3": 2, "dsv4": 2, "qwen30b": 64, "qwen235b": 64}[name]
    assert [rung.tokens for rung in rungs] == sorted({rung.tokens for rung in rungs})
    assert rungs[-1].tokens == problem.max_tokens


@pytest.mark.parametrize(
    ("seconds", "want"), [(1e-6, 1), (1.0, 953), (30.0, 28610), (2.2e6, 2_098_083_496), (1e7, 2**31 - 1), (1e300, 2**31 - 1)]
)
def test_every_order_waits_for_the_deadline_that_was_asked_for(seconds, want):
    """In ticks of 2^20 ns that fit 32 bits: never 0, which would expire at once, and never past the sign bit."""
    rungs = BACKEND.plan(PROBLEM).detail
    found = {v.order: v.limits(seconds)[-1] for v in variants_of(PROBLEM, rungs, Operands())}
    assert found == {"native": want, "swap": want * 2**20}  # swap order takes nanoseconds and shifts them itself


def test_ticks_are_those_of_the_kernels():
    deadline = pytest.importorskip("megamoe.device.deadline", reason="needs nvidia-cutlass-dsl")
    assert deadline.TICK == TICK


def test_identity_placement_is_fine():
    assert BACKEND.supports(replace(PROBLEM, placement=Placement.even(32, 1)))


def test_kernels_are_named_for_the_cache():
    plan = BACKEND.plan(PROBLEM)
    requests = BACKEND.kernels(plan)
    assert len(requests) == 2 * len(plan.detail)
    assert {r.arch for r in requests} == {"sm_90a"}
    assert len({str(sorted(r.config.items(), key=str)) for r in requests}) == len(requests)
    with pytest.raises(InvalidInput, match="sm_90a"):
        BACKEND.kernels(plan, "sm_100a")


@pytest.mark.parametrize("when", ["late", "early"])
def test_kernels_for_weights_with_biases_are_others(when):
    """An output bias goes with late routing weights only."""
    plan = BACKEND.plan(replace(PROBLEM, routing_weight=when))
    plain, biased = BACKEND.kernels(plan), BACKEND.kernels(plan, biases=True)
    assert len(biased) == len(plain)
    assert {(r.config["bias13"], r.config["bias2"]) for r in plain} == {(False, False)}
    assert {(r.config["bias13"], r.config["bias2"]) for r in biased} == {(True, when == "late")}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tokens", [1, 65536])
def test_every_preset_can_be_compiled_ahead(name, tokens):
    plan = BACKEND.plan(PRESETS[name].problem(tokens))
    kinds = 1 if plan.problem.format == "bf16" else 2
    assert len(BACKEND.kernels(plan, biases=PRESETS[name].biases)) == kinds * len(plan.detail)


@pytest.mark.parametrize("sms", [26, 78, 114, 132])
def test_kernels_compiled_ahead_are_those_that_a_session_of_so_many_multiprocessors_looks_up(sms):
    plan = BACKEND.plan(PROBLEM)
    wanted = [v.request() for q in (False, True) for v in variants_of(PROBLEM, plan.detail, Operands(quantized=q, sms=sms))]
    assert [r.config for r in BACKEND.kernels(plan, sms=sms)] == [r.config for r in wanted]
    usual = BACKEND.kernels(plan)
    same = [r.config["order"] for r, u in zip(BACKEND.kernels(plan, sms=sms), usual, strict=True) if r.config == u.config]
    assert set(same) == ({"swap", "native"} if sms == 132 else {"swap"})
    with pytest.raises(InvalidInput, match="sms is 0; allowed: 1 or more"):
        BACKEND.kernels(plan, sms=0)


def test_overlapping_launches_are_asked_for_by_a_knob():
    """Other kernels, so that a tuner sees them and the cache keeps them apart."""
    plain, overlapping = (BACKEND.plan(PROBLEM, knobs=knobs) for knobs in (None, {"pdl": True}))
    assert [replace(rung, pdl=True) for rung in plain.detail] == list(overlapping.detail)
    for plan, wanted in ((plain, False), (overlapping, True)):
        assert {kernel.config["pdl"] for kernel in BACKEND.kernels(plan)} == {wanted}
        assert BACKEND.kernel(plan, 1).endswith("-pdl") == wanted
