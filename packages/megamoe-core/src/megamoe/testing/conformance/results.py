"""What a backend computes: weights taken over, results against the oracle, refusals, and the end of a session."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from megamoe.errors import InvalidInput, SessionClosed
from megamoe.formats import FORMATS
from megamoe.formats import load as load_format
from megamoe.problem import SwiGLU
from megamoe.protocol import Backend, PackedWeights, Session
from megamoe.testing import oracle
from megamoe.testing.conformance.subject import Opened, Subject, bytes_of
from megamoe.testing.trial import Inputs

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "early": {"routing_weight": "early"},
    "clamped": {"activation": SwiGLU(limit=1.0)},
    "oai": {"activation": SwiGLU(limit=1.5, alpha=1.702, up_bias=1.0)},
}
"""Fields of the problem by name of the variant; ``oai`` comes with both biases."""


class ResultTests(Subject):
    """Weights, results, refusals and the end. Every test makes its own random data."""

    def test_weights_are_checked(self, runnable: Backend, format: str) -> None:
        problem = self.problem(format)
        plan, good = runnable.plan(problem), self.weights(problem)
        wrong = {
            "w13": good.w13[:, :-1].contiguous(),
            "w2": good.w2.transpose(1, 2).contiguous().transpose(1, 2),
            "b13": good.w13[:, :, 0].double(),
            "b2": good.w2[:, :-1, 0].contiguous(),
        }
        for name, tensor in wrong.items():
            changed: dict[str, Any] = {name: tensor}
            with pytest.raises(InvalidInput, match=name):
                runnable.prepare_weights(plan, replace(good, **changed))

    def test_packing_leaves_the_callers_weights(self, runnable: Backend, format: str) -> None:
        problem = self.problem(format)
        given = self.weights(problem)
        before = {name: tensor.clone() for name, tensor in given.tensors().items()}
        with self.open(runnable, problem, given) as opened:
            assert isinstance(opened.packed, PackedWeights)
            assert opened.packed.nbytes > 0
            assert opened.packed.plan == opened.session.plan
            opened.session.run(*self.inputs(problem))
        assert all(bytes_of(tensor) == bytes_of(before[name]) for name, tensor in given.tensors().items()), "the caller's weights changed"

    def test_update_refits_in_place(self, runnable: Backend, format: str) -> None:
        problem = self.problem(format)
        inputs = self.inputs(problem)
        with self.open(runnable, problem) as opened:
            first = self.check(opened, inputs)
            other = self.weights(problem, seed=11)
            opened.packed.update(other)
            second = self.check(opened._replace(weights=other), inputs)
            assert bytes_of(first) != bytes_of(second)
            with pytest.raises(InvalidInput):
                opened.packed.update(replace(other, w13=other.w13[:-1], w2=other.w2[:-1]))
            assert bytes_of(opened.session.run(*inputs)) == bytes_of(second), "a refused update changed the weights"

    def test_prequantized_operands(self, runnable: Backend, format: str) -> None:
        if FORMATS[format].element == "bf16":
            pytest.skip("bf16 has no quantized operands")
        if "prequantized weights" not in self.spec.features:
            pytest.skip(f"{self.spec.name} does not declare the feature 'prequantized weights'")
        problem = self.problem(format)
        quantize, plain = load_format(format), self.weights(problem)
        made: dict[str, Any] = {}
        for name in ("w13", "w2"):
            data, scale, total = quantize.quantize_weight(getattr(plain, name))
            made |= {name: data, f"{name}_scale": scale, f"{name}_global": total}
        with self.open(runnable, problem, replace(plain, **made)) as opened:
            inputs = self.inputs(problem)
            self.check(opened, inputs)
            data, scale = quantize.quantize(inputs.x, static_scale=plain.x_scale)
            self.check(opened, inputs._replace(x=data), x_scale=scale)

    # ------------------------------------------------------------------------------------------------ results

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_against_the_oracle(self, runnable: Backend, format: str, variant: str) -> None:
        problem = self.problem(format, **VARIANTS[variant])
        with self.open(runnable, problem, self.weights(problem, biases=variant == "oai")) as opened:
            for tokens, seed in ((None, 3), (1, 4), (17, 5)):
                self.check(opened, self.inputs(problem, tokens, seed))

    def test_no_tokens(self, opened: Opened) -> None:
        out = opened.session.run(*self.inputs(opened.problem, 0))
        assert tuple(out.shape) == (0, opened.problem.hidden)
        self.check(opened, self.inputs(opened.problem))
        assert opened.session.run(*self.inputs(opened.problem, 0)).shape[0] == 0

    def test_unrouted_and_duplicate_routes(self, opened: Opened) -> None:
        inputs = self.inputs(opened.problem)
        inputs.topk_ids[0] = -1
        inputs.topk_ids[1, 1:] = -1
        inputs.topk_ids[2] = 5
        inputs.topk_ids[3, :2] = 0
        # Nothing of an unrouted slot may be read.
        inputs.topk_weights[inputs.topk_ids < 0] = float("nan")
        out = opened.session.run(*inputs)
        clean = inputs._replace(topk_weights=inputs.topk_weights.nan_to_num())
        verdict = oracle.judge(out, oracle.compute(opened.problem, opened.weights, *clean), format=opened.problem.format)
        assert verdict.ok, verdict.text
        assert not out[0].any(), "a token without any route is not zero"

    @pytest.mark.parametrize("expert", [0, -1], ids=["first", "last"])
    def test_all_tokens_to_one_expert(self, opened: Opened, expert: int) -> None:
        inputs = self.inputs(opened.problem)
        inputs.topk_ids[:] = expert % opened.problem.experts
        self.check(opened, inputs)
        assert opened.session.counts().tolist()[expert] == inputs.topk_ids.numel()

    def test_counts(self, opened: Opened) -> None:
        inputs = self.inputs(opened.problem, seed=6)
        inputs.topk_ids[1] = -1
        opened.session.run(*inputs)
        counts = opened.session.counts()
        ids = inputs.topk_ids[inputs.topk_ids >= 0].long()
        assert str(counts.device) == "cpu"
        assert counts.tolist() == ids.cpu().bincount(minlength=opened.problem.experts).tolist()

    def test_out_is_written_whole(self, opened: Opened) -> None:
        import torch

        inputs = self.inputs(opened.problem, 9)
        inputs.topk_ids[4] = -1
        fresh = self.check(opened, inputs)
        poisoned = torch.full_like(fresh, float("nan"))
        returned = opened.session.run(*inputs, out=poisoned)
        assert returned.data_ptr() == poisoned.data_ptr(), "run returned another tensor than out"
        assert bytes_of(poisoned) == bytes_of(fresh)

    def test_runs_repeat_to_the_byte(self, opened: Opened) -> None:
        inputs = self.inputs(opened.problem, seed=7)
        first = opened.session.run(*inputs).clone()
        opened.session.run(*self.inputs(opened.problem, 5, seed=8))
        for _ in range(3):
            assert bytes_of(opened.session.run(*inputs)) == bytes_of(first)

    def test_types_of_routing(self, opened: Opened) -> None:
        import torch

        inputs = self.inputs(opened.problem, seed=9)
        same = opened.session.run(*inputs._replace(topk_ids=inputs.topk_ids.to(torch.int64)))
        assert bytes_of(same) == bytes_of(opened.session.run(*inputs._replace(topk_ids=inputs.topk_ids.to(torch.int32))))
        for dtype in (torch.bfloat16, torch.float16):
            self.check(opened, inputs._replace(topk_weights=inputs.topk_weights.to(dtype)))

    def test_modes_of_torch_end_with_their_block(self, runnable: Backend, format: str) -> None:
        """Engines load models in inference mode and under a default device, and call them outside of both."""
        import torch

        problem = self.problem(format)
        with torch.inference_mode():
            given = self.weights(problem)
        inputs, other = self.inputs(problem), self.weights(problem, seed=11)
        with ExitStack() as stack:
            with torch.inference_mode(), torch.device("meta"):
                opened = stack.enter_context(self.open(runnable, problem, given))
                assert str(opened.session.counts().device) == "cpu"
            first = self.check(opened, inputs)
            for dtype in (torch.float32, torch.bfloat16):
                weights = inputs.topk_weights.to(dtype)
                wanted = opened.session.run(*inputs._replace(topk_weights=weights)).clone()
                for _ in range(2):
                    got = opened.session.run(*inputs._replace(topk_weights=weights.requires_grad_()))
                    assert bytes_of(got.detach()) == bytes_of(wanted)
            opened.packed.update(other)
            assert bytes_of(self.check(opened._replace(weights=other), inputs)) != bytes_of(first)
            with torch.inference_mode():
                opened.packed.update(opened.weights)
                opened.session.reset()
            assert bytes_of(opened.session.run(*inputs)) == bytes_of(first)

    def test_a_nan_stays_in_its_token(self, opened: Opened) -> None:
        inputs = self.inputs(opened.problem, 9, seed=10)
        clean = opened.session.run(*inputs).clone()
        inputs.x[3, 7] = float("nan")
        out = self.check(opened, inputs)
        keep = [t for t in range(9) if t != 3]
        assert bytes_of(out[keep]) == bytes_of(clean[keep])

    # ------------------------------------------------------------------------------------------------ refusals and the end

    def test_bad_inputs_are_refused(self, opened: Opened) -> None:
        import torch

        problem, good = opened.problem, self.inputs(opened.problem)
        over = Inputs(*(torch.cat([tensor, tensor[:1]]) for tensor in good))
        bad = {
            "hidden": good._replace(x=good.x[:, :-1]),
            "x": good._replace(x=good.x.double()),
            "topk_ids": good._replace(topk_ids=good.topk_ids[:-1]),
            "topk_weights": good._replace(topk_weights=good.topk_weights.double()),
            "max_tokens": over,
        }
        for name, inputs in bad.items():
            with pytest.raises(InvalidInput, match="x has shape" if name == "hidden" else name):
                opened.session.run(*inputs)
        with pytest.raises(InvalidInput, match="out"):
            opened.session.run(*good, out=torch.empty(problem.max_tokens, problem.hidden, device=good.x.device))
        self.check(opened, good)

    def test_ids_out_of_range(self, runnable: Backend, format: str) -> None:
        for checked in (True, False):
            problem = self.problem(format, checked=checked)
            with self.open(runnable, problem) as opened:
                inputs = self.inputs(problem)
                inputs.topk_ids[2, 1] = problem.experts
                if checked or self.place() == "cpu":
                    with pytest.raises(InvalidInput, match="out of range"):
                        opened.session.run(*inputs)
                else:
                    self.check(opened, inputs)  # the oracle counts it as unrouted
                    with pytest.raises(InvalidInput, match="out of range"):
                        opened.session.counts()
                self.check(opened, self.inputs(problem, seed=12))

    def test_nothing_runs_after_close(self, runnable: Backend, format: str) -> None:
        problem = self.problem(format)
        inputs = self.inputs(problem)
        with self.open(runnable, problem) as opened:
            assert isinstance(opened.session, Session)
            opened.session.run(*inputs)
        opened.session.close()
        for call in (lambda: opened.session.run(*inputs), opened.session.counts, opened.session.reset):
            with pytest.raises(SessionClosed):
                call()
