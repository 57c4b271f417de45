"""Sessions on a Hopper GPU: results against the float64 oracle; graphs, compile, refit, deadlines and streams around the kernels."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from megamoe import InvalidInput, MoELayer, MoEProblem, PeerTimeout, SessionClosed, SwiGLU
from megamoe.formats import load
from megamoe.testing import oracle, routing
from megamoe.testing.trial import Inputs, make_trial
from megamoe_sm90.backend import Sm90Backend

pytestmark = pytest.mark.sm90

BACKEND = Sm90Backend()
FORMATS = ("fp8_block128", "fp8_tensor", "fp8_tensor_e5m2", "bf16")
NATIVE = [{"order": "native", "native_tile": tile, "native_rows": rows} for tile in (64, 128) for rows in ("gather", "pool")]
SWAP = [{"order": "swap", "swap_tile": tile} for tile in (8, 16, 32, 64, 128)]
OAI = SwiGLU(limit=7.0, alpha=1.702, up_bias=1.0)


def problem_of(format="fp8_block128", experts=8, top_k=2, hidden=512, intermediate=256, max_tokens=1024, activation=None, **more):
    return MoEProblem(experts, top_k, hidden, intermediate, max_tokens, format, activation or SwiGLU(limit=2.0), **more)


class Opened:
    """A trial with an open session on the GPU."""

    def __init__(self, problem, knobs=None, tokens=None, seed=0, weights=None, **more):
        self.trial = make_trial(problem, tokens=tokens, seed=seed, **more)
        if weights:
            self.trial = replace(self.trial, weights=replace(self.trial.weights, **weights(self.trial.weights)))
        self.problem = problem
        self.experts = oracle.Experts(problem.format, self.trial.weights)
        self.plan = BACKEND.plan(problem, knobs=knobs)
        self.packed = BACKEND.prepare_weights(self.plan, self.trial.local_weights(0, "cuda"))
        self.session = BACKEND.open_session(self.plan, self.packed)
        self.inputs = self.trial.inputs[0].to("cuda")

    def poison(self):
        self.session._workspace.scratch.fill_(0xFF)  # NaN in every format

    def run(self, inputs=None, **more):
        inputs = inputs or self.inputs
        self.poison()
        out = torch.full((inputs.x.shape[0], self.problem.hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
        assert self.session.run(*inputs, out=out, **more) is out
        return out

    def judge(self, out, inputs=None):
        inputs = inputs or self.inputs
        if self.experts.weights is not self.trial.weights:
            self.experts = oracle.Experts(self.problem.format, self.trial.weights)
        verdict = oracle.judge(out, oracle.compute(self.problem, self.experts, *inputs), format=self.problem.format)
        assert verdict.ok, verdict.text

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.session.close()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("knobs", [*NATIVE, *SWAP], ids=lambda k: "-".join(str(v) for v in k.values()))
def test_every_kernel_against_the_oracle(format, knobs):
    """Around every tile boundary; one expert takes all in the last but one, and a third of the routes are masked in the last."""
    problem = problem_of(format, max_tokens=300)
    with Opened(problem, knobs) as opened:
        generator = torch.Generator().manual_seed(1)
        for tokens in (300, 1, 65, 129, 8, 0):
            inputs = opened.inputs.rows(torch.arange(tokens))
            opened.judge(opened.run(inputs), inputs)
        for ids in (routing.one_expert(problem, 300, generator), routing.partly_masked(problem, 300, generator)):
            inputs = opened.inputs._replace(topk_ids=ids.to(torch.int32).cuda())
            opened.judge(opened.run(inputs), inputs)


@pytest.mark.parametrize("order", ["native", "swap"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_one_expert_of_any_length(order, tokens):
    """Tokens per expert from none to two tiles and one."""
    problem = problem_of(experts=2, top_k=1, max_tokens=512)
    with Opened(problem, {"order": order}, tokens=tokens) as opened:
        inputs = opened.inputs._replace(topk_ids=torch.ones_like(opened.inputs.topk_ids))
        opened.judge(opened.run(inputs), inputs)
        assert opened.session.counts().tolist() == [0, tokens]


CASES = {
    "early weights": ({"routing_weight": "early"}, None),
    "OAI with biases": (
        {"format": "bf16", "activation": OAI},
        lambda w: {"b13": torch.randn(w.w13.shape[:2]).to(torch.bfloat16), "b2": torch.randn(w.w2.shape[:2])},
    ),
    "many experts": ({"experts": 512, "top_k": 8}, None),
    "32 routes": ({"experts": 64, "top_k": 32}, None),
    "width of 64": ({"format": "fp8_tensor", "hidden": 448, "intermediate": 192}, None),
    "gpt-oss width": ({"format": "bf16", "hidden": 2880, "intermediate": 320, "activation": OAI}, None),
    "single expert": ({"experts": 1, "top_k": 1}, None),
}


@pytest.mark.parametrize("order", ["native", "swap"])
@pytest.mark.parametrize("case", CASES)
def test_shapes_and_forms(case, order):
    change, weights = CASES[case]
    problem = problem_of(**{"max_tokens": 100, **change})
    with Opened(problem, {"order": order}, weights=weights) as opened:
        opened.judge(opened.run())


@pytest.mark.parametrize("format", ["fp8_block128", "fp8_tensor", "fp8_tensor_e5m2"])
def test_quantized_activations(format):
    with Opened(problem_of(format, max_tokens=300)) as opened:
        for tokens in (5, 300):
            inputs = opened.inputs.rows(torch.arange(tokens))
            data, scale = load(format).quantize(inputs.x.cpu(), static_scale=opened.trial.weights.x_scale)
            inputs = inputs._replace(x=data.cuda())
            opened.poison()
            out = opened.session.run(*inputs, x_scale=None if scale is None else scale.cuda())
            want = oracle.compute(opened.problem, opened.trial.weights, *inputs, scale)
            assert oracle.judge(out, want, format=format).ok
            # The kernel quantizes as the format says, so both ways end in the same bytes.
            assert torch.equal(out, opened.run(opened.inputs.rows(torch.arange(tokens))))


@pytest.mark.parametrize("tokens", [1, 12, 40, 100, 200, 600])
def test_same_bytes_every_time(tokens):
    with Opened(problem_of(), tokens=tokens) as opened:
        first = opened.run()
        opened.judge(first)
        for _ in range(5):
            assert torch.equal(opened.run(), first)


def test_decode_on_a_prefill_sized_session_runs_the_decode_kernel():
    with Opened(problem_of(max_tokens=1024)) as opened, Opened(problem_of(max_tokens=8)) as small:
        names = []
        for session in (opened.session, small.session):
            inputs = opened.inputs.rows(torch.arange(4))
            session.run(*inputs)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                session.run(*inputs)
                torch.cuda.synchronize()
            names.append({event.key for event in profile.key_averages() if "cutlass" in event.key or "Swap" in event.key})
        assert names[0] == names[1]
        assert len(names[0]) == 1


def test_other_dtypes_and_strides_give_the_same_bytes():
    with Opened(problem_of(), tokens=50) as opened:
        x, ids, weights = opened.inputs
        want = opened.run()
        wide = torch.empty(50, 1200, dtype=torch.bfloat16, device="cuda")
        wide[:, 7:519] = x
        assert torch.equal(opened.session.run(wide[:, 7:519], ids.to(torch.int64), weights), want)
        padded = torch.full((50, 6), -1, dtype=torch.int32, device="cuda")
        padded[:, 1:3] = ids
        out = torch.full((50, 1030), 7.0, dtype=torch.bfloat16, device="cuda")
        opened.session.run(x, padded[:, 1:3], weights, out=out[:, 3:515])
        assert torch.equal(out[:, 3:515], want)
        assert (out[:, :3] == 7).all()
        assert (out[:, 515:] == 7).all()
        half = weights.to(torch.float16)
        assert torch.equal(opened.session.run(x, ids, half), opened.session.run(x, ids, half.float()))


@pytest.mark.parametrize("tokens", [3, 100, 500])
def test_hot_path_neither_allocates_nor_synchronizes(tokens):
    with Opened(problem_of(), tokens=tokens) as opened:
        out = torch.empty_like(opened.inputs.x)
        opened.session.run(*opened.inputs, out=out)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            opened.session.run(*opened.inputs, out=out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def captured(opened, static, out):
    opened.session.run(*static, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opened.session.run(*static, out=out)
    return graph


@pytest.mark.parametrize("rows", [16, 100, 700])
def test_graph_replay_equals_eager_with_changing_live_tokens(rows):
    with Opened(problem_of(), tokens=rows) as opened:
        static = Inputs(*(torch.empty_like(t) for t in opened.inputs))
        for target, source in zip(static, opened.inputs, strict=True):
            target.copy_(source)
        out = torch.empty_like(static.x)
        graph = captured(opened, static, out)
        for live in (rows, 1, rows // 2, 0, rows):
            static.topk_ids.copy_(opened.inputs.topk_ids)
            static.topk_ids[live:] = -1
            opened.poison()
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, opened.run(static))
            assert not out[live:].any()
            few = opened.inputs.rows(torch.arange(live))
            opened.judge(out[:live], few)


def test_captured_graph_replays_with_refitted_weights():
    problem = problem_of()
    other = make_trial(problem, seed=9)
    with Opened(problem, tokens=20) as opened:
        out = torch.empty_like(opened.inputs.x)
        graph = captured(opened, opened.inputs, out)
        graph.replay()
        opened.judge(out)
        opened.packed.update(other.local_weights(0, "cuda"))
        out.fill_(float("nan"))
        graph.replay()
        opened.trial = replace(opened.trial, weights=other.weights)
        opened.judge(out)


OVERLAPPING = [{"order": "native", "native_tile": 64}, {"order": "native", "native_rows": "pool"}, {"order": "swap"}]


def chain(opened, x, length):
    """Launches back to back, with nothing between them: each takes what the one before it made."""
    outs = []
    for _ in range(length):
        x = opened.session.run(*opened.inputs._replace(x=x))
        outs.append(x)
    return outs


def same(outs, wanted):
    return all(torch.equal(out.view(torch.int16), want.view(torch.int16)) for out, want in zip(outs, wanted, strict=True))


@pytest.mark.parametrize("knobs", OVERLAPPING, ids=lambda k: "-".join(str(v) for v in k.values()))
def test_launches_that_may_overlap_give_the_same_bytes(knobs):
    problem = problem_of(max_tokens=128)
    other = make_trial(problem, seed=9).local_weights(0, "cuda")
    with Opened(problem, knobs) as plain, Opened(problem, {**knobs, "pdl": True}) as opened:
        plain.judge(plain.run())
        wanted = chain(plain, plain.inputs.x, 6)
        assert wanted[0].any()
        for _ in range(20):
            opened.poison()
            assert same(chain(opened, opened.inputs.x, 6), wanted)

        graph, x = torch.cuda.CUDAGraph(), torch.empty_like(opened.inputs.x)
        with torch.cuda.graph(graph):
            outs = chain(opened, x, 6)
        for _ in range(3):
            for out in outs:
                out.fill_(float("nan"))
            x.copy_(opened.inputs.x)  # the kernel just before the first launch writes what that launch reads
            graph.replay()
            graph.replay()  # and one launch of a graph follows another
            assert same(outs, wanted)

        # Weights change just before a launch, and just behind one.
        for session in (plain, opened):
            session.packed.update(other)
        changed = chain(plain, plain.inputs.x, 6)
        assert not same(changed, wanted)
        assert same(chain(opened, opened.inputs.x, 6), changed)
        opened.packed.update(opened.trial.local_weights(0, "cuda"))
        assert same(chain(opened, opened.inputs.x, 6), wanted)


def test_layer_under_torch_compile():
    trial = make_trial(problem_of(), tokens=33)
    inputs = trial.inputs[0].to("cuda")
    with MoELayer(trial.problem, trial.local_weights(0, "cuda"), backend="sm90") as layer, torch.no_grad():
        compiled = torch.compile(lambda x, i, w: layer(x * 1.0, i, w) + 1, fullgraph=True)
        assert torch.equal(compiled(*inputs), layer(*inputs) + 1)
        assert trial.judge(0, layer(*inputs)).ok


def test_calls_from_other_streams_are_ordered():
    with Opened(problem_of(), tokens=600) as opened:
        want = opened.run()
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        outs = []
        for turn in range(9):
            with torch.cuda.stream(streams[turn % 3]):
                outs.append(opened.session.run(*opened.inputs))
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("bad", [8, 2**32 + 1])  # the low 32 bits of the second name an expert
@pytest.mark.parametrize("tokens", [4, 300])
def test_bad_ids_are_reported_by_the_next_call(tokens, bad):
    with Opened(problem_of(), tokens=tokens) as opened:
        ids = opened.inputs.topk_ids.to(torch.int64, copy=True)
        ids[1, 0], ids[2, 1] = bad, -2
        out = opened.session.run(opened.inputs.x, ids, opened.inputs.topk_weights)
        torch.cuda.synchronize()
        dropped = opened.inputs._replace(topk_ids=torch.where((ids < 0) | (ids >= 8), -1, ids))
        opened.judge(out, dropped)
        with pytest.raises(InvalidInput, match=f"2 ids out of range, the first is {bad} at token 1, slot 0"):
            opened.session.run(*opened.inputs)
        opened.judge(opened.run())


def test_checked_problems_refuse_bad_ids_at_once():
    with Opened(problem_of(checked=True), tokens=4) as opened, pytest.raises(InvalidInput, match="this call"):
        opened.session.run(opened.inputs.x, opened.inputs.topk_ids + 8, opened.inputs.topk_weights)


@pytest.mark.parametrize("order", ["native", "swap"])
def test_deadline_ends_a_wait_and_the_context_survives(order, monkeypatch):
    """A grid of one block more than fit at once: the others wait for it, and it cannot start before they leave."""
    # Large enough that the last block has work of its own in swap order, where work is dealt out in advance.
    problem, knobs = problem_of(experts=16, hidden=2048, intermediate=1024, max_tokens=64), {"order": order}
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    monkeypatch.setenv("MEGAMOE_TIMEOUT", "0.2")
    monkeypatch.setattr("megamoe_sm90.session.multiprocessors", lambda device: sms + 1)
    monkeypatch.setattr("megamoe_sm90.shim.launch.Launcher.warm_up", lambda *_: None)
    with Opened(problem, knobs) as stuck:
        start = time.perf_counter()
        stuck.session.run(*stuck.inputs)
        torch.cuda.synchronize()
        assert 0.1 < time.perf_counter() - start < 10
        for _ in range(2):  # until reset() it stays refused
            with pytest.raises(PeerTimeout, match=r"deadline of 0.2 s") as caught:
                stuck.session.run(*stuck.inputs)
        assert caught.value.seen < caught.value.expected
        assert "site" not in caught.value.site
        stuck.session.reset()
        stuck.session.run(*stuck.inputs)  # refused no longer (and stuck again)
        torch.cuda.synchronize()
    monkeypatch.undo()
    with Opened(problem, knobs) as opened:
        opened.judge(opened.run())


def test_closed_session_says_so():
    with Opened(problem_of(), tokens=4) as opened:
        opened.session.close()
        with pytest.raises(SessionClosed):
            opened.session.run(*opened.inputs)
        opened.session.close()


@pytest.mark.alone
def test_opening_is_fast_when_everything_is_compiled():
    """From open_session to the first output, imports done and the compile cache warm: under a second."""
    with Opened(problem_of(max_tokens=777), tokens=10):
        pass
    from megamoe.compile import obtain

    obtain._LOADED.clear()
    with Opened(problem_of(max_tokens=776), tokens=10):  # compiles; the next one of this size loads
        pass
    obtain._LOADED.clear()
    trial = make_trial(problem_of(max_tokens=776), tokens=10)
    plan = BACKEND.plan(trial.problem)
    packed, inputs = BACKEND.prepare_weights(plan, trial.local_weights(0, "cuda")), trial.inputs[0].to("cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    with BACKEND.open_session(plan, packed) as session:
        session.run(*inputs)
        torch.cuda.synchronize()
        assert time.perf_counter() - start < 1.0
