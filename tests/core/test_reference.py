"""The reference backend on one rank, judged by the float64 oracle."""

import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from megamoe import ExpertWeights, InvalidInput, MoEProblem, SessionClosed, SwiGLU, UnsupportedProblem
from megamoe.formats import FORMATS, load
from megamoe.reference import SPEC, arithmetic, session
from megamoe.reference.backend import ReferenceBackend
from megamoe.testing import oracle, routing
from megamoe.testing.trial import make_trial

BACKEND = ReferenceBackend()
ACTIVATIONS = {
    "plain": SwiGLU(),
    "clamped": SwiGLU(limit=0.5),
    "oai": SwiGLU(limit=7.0, alpha=1.702, up_bias=1.0),
    "a clamp that never bites": SwiGLU(limit=1e30),
}


def problem(format="bf16", **changes):
    sizes = {"experts": 8, "top_k": 3, "hidden": 256, "intermediate": 128, "max_tokens": 40}
    return MoEProblem(**sizes | {"format": format} | changes)


def opened(problem, weights):
    plan = BACKEND.plan(problem)
    return BACKEND.open_session(plan, BACKEND.prepare_weights(plan, weights))


def run(problem, weights, *inputs, **more):
    with opened(problem, weights) as s:
        return s.run(*inputs, **more)


def same(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def right(problem, weights, out, *inputs):
    judgement = oracle.judge(out, oracle.compute(problem, weights, *inputs), format=problem.format)
    assert judgement.ok, judgement.text


# ---------------------------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("routing_weight", ["late", "early"])
def test_every_format_activation_and_place_of_the_routing_weight(format, activation, routing_weight):
    trial = make_trial(problem(format, activation=ACTIVATIONS[activation], routing_weight=routing_weight), seed=11, pattern="masked")
    out = run(trial.problem, trial.weights, *trial.inputs[0])
    judgement = trial.judge(0, out)
    assert judgement.ok, judgement.text


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_biases(format, dtype):
    trial = make_trial(problem(format, activation=ACTIVATIONS["oai"]), seed=12, pattern="masked")
    generator = torch.Generator().manual_seed(13)
    b13 = torch.randn(8, 256, generator=generator).to(dtype)
    b2 = torch.randn(8, 256, generator=generator).to(dtype)
    weights = replace(trial.weights, b13=b13, b2=b2)
    out = run(trial.problem, weights, *trial.inputs[0])
    right(trial.problem, weights, out, *trial.inputs[0])
    early = replace(trial.problem, routing_weight="early")
    without_b2 = replace(weights, b2=None)
    right(early, without_b2, run(early, without_b2, *trial.inputs[0]), *trial.inputs[0])


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "bf16"])
def test_prequantized_weights_and_activations(format):
    trial, fmt = make_trial(problem(format), seed=14), load(format)
    x, ids, route_weights = trial.inputs[0]
    made = {}
    for name in ("w13", "w2"):
        data, scale, total = fmt.quantize_weight(getattr(trial.weights, name))
        made |= {name: data, f"{name}_scale": scale} | ({f"{name}_global": total} if total is not None else {})
    static = trial.weights.x_scale
    weights = ExpertWeights(**made, x_scale=static, mid_scale=trial.weights.mid_scale)
    data, scale = fmt.quantize(x, static_scale=static)
    out = run(trial.problem, weights, data, ids, route_weights, x_scale=scale)
    right(trial.problem, weights, out, data, ids, route_weights, scale)
    assert same(out, run(trial.problem, trial.weights, x, ids, route_weights))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("magnitude", [1e-9, 3e-11, 1e-20, 1e-34, 1e-37])
def test_weights_of_small_magnitude(format, magnitude):
    trial = make_trial(problem(format), seed=44)
    trial = replace(trial, weights=replace(trial.weights, w2=trial.weights.w2 * magnitude))
    right(trial.problem, trial.weights, run(trial.problem, trial.weights, *trial.inputs[0]), *trial.inputs[0])


@pytest.mark.parametrize("format", FORMATS)
def test_an_infinite_weight_spoils_what_it_must_and_nothing_else(format):
    trial = make_trial(problem(format), seed=45)
    trial.weights.w2[1, 7, 3] = float("inf")
    right(trial.problem, trial.weights, run(trial.problem, trial.weights, *trial.inputs[0]), *trial.inputs[0])


def test_nvfp4_static_and_global_scales_are_applied():
    trial, fmt = make_trial(problem("nvfp4"), seed=15), load("nvfp4")
    w13, w13_scale, _ = fmt.quantize_weight(trial.weights.w13)
    w2, w2_scale, _ = fmt.quantize_weight(trial.weights.w2)
    globals_ = torch.rand(8, generator=torch.Generator().manual_seed(1)) * 0.01
    weights = ExpertWeights(
        w13, w2, w13_scale=w13_scale, w2_scale=w2_scale, w13_global=globals_, w2_global=globals_.flip(0), x_scale=0.01, mid_scale=3e-5
    )
    right(trial.problem, weights, run(trial.problem, weights, *trial.inputs[0]), *trial.inputs[0])
    absent = replace(weights, w13_global=None, w2_global=None)
    right(trial.problem, absent, run(trial.problem, absent, *trial.inputs[0]), *trial.inputs[0])


@pytest.mark.parametrize("name", routing.PATTERNS)
@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
def test_routing_patterns(name, format):
    trial, generator = make_trial(problem(format), seed=16), torch.Generator().manual_seed(17)
    ids = routing.PATTERNS[name](trial.problem, 40, generator)
    inputs = trial.inputs[0]._replace(topk_ids=ids)
    out = run(trial.problem, trial.weights, *inputs)
    right(trial.problem, trial.weights, out, *inputs)
    assert not out[(ids < 0).all(dim=1)].any()


def test_a_duplicate_counts_twice():
    trial = make_trial(problem(top_k=2), seed=18)
    x = trial.inputs[0].x
    twice = run(trial.problem, trial.weights, x, torch.full((40, 2), 5), torch.tensor([[0.25, 0.5]]).expand(40, 2))
    once = run(trial.problem, trial.weights, x, torch.tensor([[5, -1]]).expand(40, 2), torch.tensor([[0.75, 9.0]]).expand(40, 2))
    torch.testing.assert_close(twice, once, rtol=2**-8, atol=0)


@pytest.mark.parametrize(("top_k", "experts"), [(1, 1), (1, 8), (6, 8), (8, 8), (10, 16), (16, 16), (32, 64)])
def test_top_k_of_models(top_k, experts):
    trial = make_trial(problem(top_k=top_k, experts=experts, hidden=64, intermediate=32, max_tokens=9), seed=19)
    judgement = trial.judge(0, run(trial.problem, trial.weights, *trial.inputs[0]))
    assert judgement.ok, judgement.text


@pytest.mark.parametrize(
    ("format", "hidden", "intermediate"),
    [
        ("bf16", 2880, 704),
        ("bf16", 33, 7),
        ("fp8_tensor", 200, 72),
        ("mxfp8", 2880, 704),
        ("nvfp4", 3584, 176),
        ("fp8_block128", 3584, 128),
    ],
)
def test_awkward_sizes_run(format, hidden, intermediate):
    sizes = {"experts": 2, "top_k": 1, "max_tokens": 3, "hidden": hidden, "intermediate": intermediate}
    trial = make_trial(problem(format, **sizes), seed=20)
    judgement = trial.judge(0, run(trial.problem, trial.weights, *trial.inputs[0]))
    assert judgement.ok, judgement.text


def test_sizes_that_do_not_divide_into_blocks_give_every_reason():
    awkward = problem("fp8_block128", hidden=2880, intermediate=704)
    with pytest.raises(
        UnsupportedProblem, match=r"hidden=2880 is not a multiple of 128.*intermediate=704 is not a multiple of 128"
    ) as caught:
        BACKEND.plan(awkward, ranks=3)
    assert len(caught.value.reasons) == len(BACKEND.supports(awkward, 3).reasons) == 3
    assert all(reason.hint for reason in caught.value.reasons)


def test_most_of_256_experts_get_nothing():
    trial = make_trial(problem(experts=256, top_k=2, hidden=32, intermediate=16), seed=21, tokens=4)
    plan = BACKEND.plan(trial.problem)
    with BACKEND.open_session(plan, BACKEND.prepare_weights(plan, trial.weights)) as s:
        out = s.run(*trial.inputs[0])
        assert s.counts().tolist() == torch.bincount(trial.inputs[0].topk_ids.flatten(), minlength=256).tolist()
    judgement = trial.judge(0, out)
    assert judgement.ok, judgement.text


# ---------------------------------------------------------------------------------------------------- the arithmetic itself


def test_the_final_sum_is_float32_in_slot_order_with_one_rounding():
    generator = torch.Generator().manual_seed(22)
    routed = torch.rand(50, 6, generator=generator) < 0.7
    rows = (torch.randn(int(routed.sum()), 8, generator=generator) * 10.0 ** torch.randint(-3, 4, (1, 8), generator=generator)).bfloat16()
    weights = torch.rand(50, 6, generator=generator).masked_fill(~routed, torch.nan)
    want, next_row = np.zeros((50, 8), np.float32), iter(rows.float().numpy())
    for token in range(50):
        for slot in range(6):
            if routed[token, slot]:
                want[token] = want[token] + np.float32(weights[token, slot]) * next(next_row)
    assert same(arithmetic.weighted_sum(rows, routed, weights), torch.from_numpy(want).bfloat16())
    # Sums that only this order gets right: float32 loses the 1 beside 10^8.
    big = torch.tensor([[1e8], [-1e8], [1.0], [1.0], [1e8], [-1e8]]).bfloat16()
    assert arithmetic.weighted_sum(big, torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3)).tolist() == [[1.0], [0.0]]


def test_rows_are_rounded_to_bf16_before_they_are_weighted():
    """Expert 0 gives 1 + 2^-9 in every element, which bf16 rounds to 1: weighted by 2 it must come out as 2, not as 2 + 2^-8."""
    sizes = problem(experts=1, top_k=1, hidden=1, intermediate=2, max_tokens=1)
    unit = torch.nn.functional.silu(torch.tensor(64.0)).item()
    assert unit == 64.0
    w13 = torch.tensor([[[64.0], [64.0], [1 / 64], [1 / 64]]]).bfloat16()
    weights = ExpertWeights(w13, torch.tensor([[[1.0, 2.0**-9]]]).bfloat16())
    out = run(sizes, weights, torch.ones(1, 1).bfloat16(), torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), 2.0 + 2**-6))
    assert out.item() == 2.0 + 2**-6
    late = replace(sizes, routing_weight="early")
    out = run(late, weights, torch.ones(1, 1).bfloat16(), torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), 2.0))
    assert out.item() == 2.0


def test_autocast_and_reduced_precision_of_the_caller_do_not_reach_in():
    trial = make_trial(problem(hidden=1024, intermediate=512), seed=23)
    plain = run(trial.problem, trial.weights, *trial.inputs[0])
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert same(run(trial.problem, trial.weights, *trial.inputs[0]), plain)
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_overlapping_calls_of_threads_keep_the_precision_that_the_process_chose():
    """One thread begins and ends while another computes: that one goes on in true float32, and what was chosen comes back after both."""
    setting = torch.backends.mkldnn.matmul
    begun, go_on = threading.Event(), threading.Event()

    def compute():
        with arithmetic.float32_arithmetic(torch.device("cpu")):
            begun.set()
            go_on.wait()

    other = threading.Thread(target=compute)
    setting.fp32_precision = "bf16"
    try:
        with arithmetic.float32_arithmetic(torch.device("cpu")):
            other.start()
            begun.wait()
        assert setting.fp32_precision == "ieee"
        go_on.set()
        other.join()
        assert setting.fp32_precision == "bf16"
    finally:
        go_on.set()
        setting.fp32_precision = "none"


def test_two_calls_give_the_same_bytes():
    trial = make_trial(problem("mxfp8"), seed=24)
    with opened(trial.problem, trial.weights) as s:
        assert same(s.run(*trial.inputs[0]), s.run(*trial.inputs[0]))


# ---------------------------------------------------------------------------------------------------- what must not matter


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e38])
def test_garbage_without_a_route_changes_nothing(format, garbage):
    trial = make_trial(problem(format), seed=25, pattern="masked")
    x, ids, weights = (tensor.clone() for tensor in trial.inputs[0])
    ids[::3] = -1
    clean = run(trial.problem, trial.weights, x, ids, weights)
    x[::3], weights[ids < 0] = garbage, garbage
    out = run(trial.problem, trial.weights, x, ids, weights)
    assert same(out, clean)
    assert not out[::3].any()


@pytest.mark.parametrize("format", FORMATS)
def test_a_token_of_nan_stays_alone(format):
    trial = make_trial(problem(format), seed=26)
    x, ids, weights = trial.inputs[0]
    clean = run(trial.problem, trial.weights, x, ids, weights)
    x = x.clone()
    x[7] = torch.nan
    out = run(trial.problem, trial.weights, x, ids, weights)
    assert out[7].isnan().all()
    others = torch.arange(40) != 7
    assert same(out[others], clean[others])


def test_id_and_weight_types_in_any_order_on_one_session():
    trial = make_trial(problem(), seed=27)
    x, ids, _ = trial.inputs[0]
    weights = torch.full((40, 3), 0.375)
    with opened(trial.problem, trial.weights) as s:
        results = [
            s.run(x, ids.to(id_type), weights.to(weight_type))
            for id_type in (torch.int64, torch.int32, torch.int64)
            for weight_type in (torch.float32, torch.bfloat16, torch.float16)
        ]
    assert all(same(result, results[0]) for result in results)


def test_strided_and_offset_arguments():
    trial = make_trial(problem(), seed=28)
    x, ids, weights = trial.inputs[0]
    want = run(trial.problem, trial.weights, x, ids, weights)
    memory = torch.zeros(40, 600, dtype=torch.bfloat16)
    wide_ids, wide_weights = torch.full((40, 9), 99), torch.full((40, 9), torch.nan)
    wide_ids[:, 1:4], wide_weights[:, 5:8] = ids, weights
    with opened(trial.problem, trial.weights) as s:
        for start in (0, 1, 8):
            memory[:, start : start + 256] = x
            assert same(s.run(memory[:, start : start + 256], wide_ids[:, 1:4], wide_weights[:, 5:8]), want)
        # The same address again, with other strides.
        flat = torch.zeros(40 * 600, dtype=torch.bfloat16)
        flat[: 40 * 256] = x.flatten()
        assert same(s.run(flat[: 40 * 256].view(40, 256), ids, weights), want)
        flat.view(40, 600)[:, :256] = x
        assert same(s.run(flat.view(40, 600)[:, :256], ids, weights), want)


def test_token_counts_of_successive_calls():
    trial = make_trial(problem(), seed=29)
    with opened(trial.problem, trial.weights) as s:
        full = s.run(*trial.inputs[0])
        for count in (40, 3, 0, 1, 0, 40):
            out = s.run(*trial.inputs[0].rows(torch.arange(count)))
            assert out.shape == (count, 256)
            torch.testing.assert_close(out, full[:count], rtol=2**-7, atol=2**-10)
            assert int(s.counts().sum()) == 3 * count
        with pytest.raises(InvalidInput, match="41 tokens; allowed: 0 to max_tokens=40"):
            s.run(torch.zeros(41, 256).bfloat16(), torch.zeros(41, 3, dtype=torch.int64), torch.zeros(41, 3))
        assert same(s.run(*trial.inputs[0]), full)


def test_out_is_written_and_returned():
    trial = make_trial(problem(), seed=30)
    wide = torch.full((40, 300), torch.nan).bfloat16()
    out = wide[:, 4:260]
    with opened(trial.problem, trial.weights) as s:
        assert s.run(*trial.inputs[0], out=out) is out
        assert same(out.contiguous(), s.run(*trial.inputs[0]))
    assert wide[:, :4].isnan().all()
    assert wide[:, 260:].isnan().all()


# ---------------------------------------------------------------------------------------------------- ids out of range


@pytest.mark.parametrize("bad", [8, 9, 2**31 - 1, -2, -(2**31)])
def test_bad_ids_raise_before_any_work(bad):
    trial = make_trial(problem(), seed=31)
    x, ids, weights = trial.inputs[0]
    ids = ids.clone()
    ids[4, 1] = bad
    out = torch.full_like(x, 5)
    with opened(trial.problem, trial.weights) as s:
        with pytest.raises(InvalidInput, match=f"1 ids out of range, the first is {bad} at token 4, slot 1; allowed: 0 to 7"):
            s.run(x, ids, weights, out=out)
        assert (out == 5).all()
        assert not s.counts().any()
        s.run(*trial.inputs[0])


def test_bad_ids_that_are_not_checked_at_once(monkeypatch):
    """As on a GPU: unrouted in this call, an error of the next one, which is then told and forgotten."""
    monkeypatch.setattr(session, "checked_at_once", lambda problem, ids: False)
    trial = make_trial(problem(), seed=32)
    x, ids, weights = trial.inputs[0]
    bad, unrouted = ids.clone(), ids.clone()
    bad[4, 1], unrouted[4, 1] = 8, -1
    bad[5, 2], unrouted[5, 2] = -7, -1
    said = "topk_ids of the previous call has 2 ids out of range, the first is 8 at token 4, slot 1"
    with opened(trial.problem, trial.weights) as s:
        want = s.run(x, unrouted, weights)
        assert same(s.run(x, bad, weights), want)
        with pytest.raises(InvalidInput, match=said):
            s.run(x, ids, weights)
        s.run(x, ids, weights)
        s.run(x, bad, weights)
        with pytest.raises(InvalidInput, match=said):
            s.counts()
        s.counts()
        s.run(x, bad, weights)
        s.reset()
        s.run(x, ids, weights)


# ---------------------------------------------------------------------------------------------------- plans, weights, lifetime


def test_the_spec_is_light_and_names_every_format():
    assert SPEC.formats == tuple(FORMATS)
    assert SPEC.archs == ()
    assert BACKEND.spec is SPEC
    assert BACKEND.probe().ok
    assert BACKEND.probe(torch.device("cpu")).ok


@pytest.mark.parametrize("format", FORMATS)
def test_the_plan_says_what_the_weights_take(format):
    trial = make_trial(problem(format))
    plan = BACKEND.plan(trial.problem)
    packed = BACKEND.prepare_weights(plan, trial.weights)
    assert [region.nbytes for region in plan.regions] == [packed.nbytes]
    assert packed.plan == plan


def test_knobs_are_rejected():
    with pytest.raises(InvalidInput, match=r"knobs \['tile'\]; allowed: the reference backend has none"):
        BACKEND.plan(problem(), knobs={"tile": 128})
    assert BACKEND.plan(problem(), knobs={}) == BACKEND.plan(problem())


@pytest.mark.parametrize("format", FORMATS)
def test_refit_in_place(format):
    old, new = make_trial(problem(format), seed=33), make_trial(problem(format), seed=34)
    biases = [torch.randn(8, 256, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    before, after = replace(old.weights, b13=biases[0], b2=biases[1]), replace(new.weights, b13=biases[2], b2=biases[3])
    kept = {name: tensor.clone() for name, tensor in after.tensors().items()}
    want = run(old.problem, after, *old.inputs[0])
    plan = BACKEND.plan(old.problem)
    packed = BACKEND.prepare_weights(plan, before)
    nbytes = packed.nbytes
    with BACKEND.open_session(plan, packed) as s:
        assert not same(s.run(*old.inputs[0]), want)
        packed.update(after)
        assert same(s.run(*old.inputs[0]), want)
    assert packed.nbytes == nbytes
    assert all(torch.equal(tensor, kept[name]) for name, tensor in after.tensors().items())


def test_refit_writes_into_the_callers_tensors_where_no_copy_was_needed():
    weights, new = make_trial(problem(), seed=35).weights, make_trial(problem(), seed=36).weights
    packed = BACKEND.prepare_weights(BACKEND.plan(problem()), weights)
    packed.update(new)
    assert torch.equal(weights.w13, new.w13)
    assert weights.w13.data_ptr() != new.w13.data_ptr()


def test_refit_with_something_else():
    trial = make_trial(problem("fp8_tensor"), seed=37)
    packed = BACKEND.prepare_weights(BACKEND.plan(trial.problem), trial.weights)
    with pytest.raises(InvalidInput, match=r"x_scale is 0\.5, packed with .*open a new session"):
        packed.update(replace(trial.weights, x_scale=0.5))
    with pytest.raises(InvalidInput, match=r"b13 absent, given \(8, 256\) torch.float32"):
        packed.update(replace(trial.weights, b13=torch.zeros(8, 256)))
    with pytest.raises(InvalidInput, match=r"w13 has shape \(7, 256, 256\); allowed: \(8, 256, 256\)"):
        packed.update(replace(trial.weights, w13=trial.weights.w13[:7]))


def test_weights_of_another_number_of_experts():
    trial = make_trial(problem(), seed=38)
    half = replace(trial.weights, w13=trial.weights.w13[:4], w2=trial.weights.w2[:4])
    with pytest.raises(InvalidInput, match=r"w13 is for 4 experts; allowed: 8, .*1 ranks"):
        BACKEND.prepare_weights(BACKEND.plan(trial.problem), half)
    assert BACKEND.prepare_weights(BACKEND.plan(trial.problem, ranks=2), half).experts == 4
    with pytest.raises(InvalidInput, match="w13 is NoneType"):
        BACKEND.prepare_weights(BACKEND.plan(trial.problem), replace(trial.weights, w13=None))


def test_a_session_needs_its_own_plan_weights_and_group():
    trial = make_trial(problem(), seed=39)
    plan = BACKEND.plan(trial.problem)
    packed = BACKEND.prepare_weights(plan, trial.weights)
    two = BACKEND.plan(trial.problem, ranks=2)
    half = replace(trial.weights, w13=trial.weights.w13[:4], w2=trial.weights.w2[:4])
    with pytest.raises(InvalidInput, match="the group has 1 ranks, the plan is for 2"):
        BACKEND.open_session(two, BACKEND.prepare_weights(two, half))
    with pytest.raises(InvalidInput, match="prepared for another plan"):
        BACKEND.open_session(BACKEND.plan(replace(trial.problem, max_tokens=41)), packed)
    with pytest.raises(InvalidInput, match="packed is ExpertWeights"):
        BACKEND.open_session(plan, trial.weights)
    with pytest.raises(InvalidInput, match="group='world'; allowed: None or a"):
        BACKEND.open_session(plan, packed, "world")


def test_a_closed_session_says_so():
    trial = make_trial(problem(), seed=40)
    s = opened(trial.problem, trial.weights)
    with s:
        s.run(*trial.inputs[0])
    s.close()
    for use in (lambda: s.run(*trial.inputs[0]), s.counts, s.reset, s.__enter__):
        with pytest.raises(SessionClosed, match=r"The session was closed\. Fix: open another one"):
            use()


def test_gradients_are_not_recorded():
    trial = make_trial(problem(), seed=41)
    x, ids, weights = trial.inputs[0]
    assert not run(trial.problem, trial.weights, x.requires_grad_(), ids, weights.requires_grad_()).requires_grad


def test_describing_the_backend_loads_no_torch():
    code = "import sys, megamoe.reference; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
