"""The conformance kit finds faults: a reference backend with one fault each, and the test of the kit that must fail on it."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature

import pytest
import torch

import megamoe
from megamoe.reference import SPEC
from megamoe.reference.backend import ReferenceBackend
from megamoe.testing.conformance import BackendConformance

pytest_plugins = "pytester"

FORMAT = "mxfp8"


class Kit(BackendConformance):
    spec = SPEC
    __test__ = False  # its tests are called one by one below


class Wrapped:
    """A session that does what the real one does, unless a subclass says otherwise."""

    def __init__(self, session):
        self.inner = session
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    @property
    def plan(self):
        return self.inner.plan

    def run(self, *args, out=None, **more):
        self.calls += 1
        return self.inner.run(*args, out=out, **more)

    def counts(self):
        return self.inner.counts()

    def reset(self):
        self.inner.reset()

    def close(self):
        self.inner.close()


def backend_with(session=Wrapped, problem=lambda problem: problem, weights=lambda weights: weights, **methods):
    """A reference backend whose sessions are of a faulty class, or that computes another problem or other weights than it was given."""

    class Faulty(ReferenceBackend):
        def prepare_weights(self, plan, given):
            packed = super().prepare_weights(replace(plan, problem=problem(plan.problem)), weights(given))
            packed.plan = plan
            return packed

        def open_session(self, plan, packed, group=None):
            wrapped = session(super().open_session(plan, packed, group))
            wrapped.inner._plan = replace(plan, problem=problem(plan.problem))
            return wrapped

    for name, method in methods.items():
        setattr(Faulty, name, method)
    return Faulty()


class LeavesRowsUnwritten(Wrapped):
    def run(self, x, ids, weights, *, out=None, **more):
        y = self.inner.run(x, ids, weights, **more)
        if out is None:
            return y
        rows = (ids >= 0).any(dim=1)
        out[rows] = y[rows]
        return out


class IgnoresOut(Wrapped):
    def run(self, *args, out=None, **more):
        return self.inner.run(*args, **more)


class ReadsWeightsOfUnroutedSlots(Wrapped):
    def run(self, x, ids, weights, **more):
        return self.inner.run(x, ids, weights, **more) + 0 * weights.sum(dim=1, keepdim=True).bfloat16()


class SumsInChangingOrder(Wrapped):
    def run(self, x, ids, weights, **more):
        y = super().run(x, ids, weights, **more)
        return torch.where(y == y.max(), y * (1 + 2**-7 * (self.calls % 2)), y) if len(y) else y


class DropsDuplicates(Wrapped):
    def run(self, x, ids, weights, **more):
        ids = ids.clone()
        for k in range(1, ids.shape[1]):
            ids[:, k][(ids[:, :k] == ids[:, k : k + 1]).any(dim=1)] = -1
        return self.inner.run(x, ids, weights, **more)


class SpreadsNaN(Wrapped):
    def run(self, x, ids, weights, **more):
        return self.inner.run(x, ids, weights, **more) + 0 * x.sum(dim=0)


class SkipsTheLastToken(Wrapped):
    def run(self, x, ids, weights, **more):
        y = self.inner.run(x, ids, weights, **more)
        y[16:] = 0
        return y


class CountsTokensNotRoutes(Wrapped):
    def counts(self):
        return self.inner.counts().clamp(max=1)


class NeverCloses(Wrapped):
    def close(self):
        pass


class TakesTooManyTokens(Wrapped):
    def run(self, x, ids, weights, **more):
        most = self.plan.problem.max_tokens
        return self.inner.run(x[:most], ids[:most], weights[:most], **more)


def no_limit(problem):
    return replace(problem, activation=replace(problem.activation, limit=None))


def no_alpha(problem):
    return replace(problem, activation=replace(problem.activation, alpha=1.0))


def always_late(problem):
    return replace(problem, routing_weight="late")


def always_bf16(problem):
    return replace(problem, format="bf16")


def scribble(weights):
    weights.w13.mul_(1.25)
    return weights


def swapped(weights):
    gate, up = weights.w13.chunk(2, dim=1)
    return replace(weights, w13=torch.cat([up, gate], dim=1))


def any_knobs(self, problem, *, ranks=1, knobs=None):
    return ReferenceBackend.plan(self, problem, ranks=ranks)


def always_yes(self, problem, ranks=1):
    return megamoe.Verdict()


def random_plan(self, problem, *, ranks=1, knobs=None):
    return replace(ReferenceBackend.plan(self, problem, ranks=ranks, knobs=knobs), detail=object())


def without_biases(weights):
    return megamoe.ExpertWeights(weights.w13, weights.w2)


FAULTS = {
    "limit ignored": (dict(problem=no_limit), "test_against_the_oracle", "clamped"),
    "alpha ignored": (dict(problem=no_alpha), "test_against_the_oracle", "oai"),
    "biases ignored": (dict(weights=without_biases), "test_against_the_oracle", "oai"),
    "early weight ignored": (dict(problem=always_late), "test_against_the_oracle", "early"),
    "quantization left out": (dict(problem=always_bf16), "test_against_the_oracle", "plain"),
    "gate and up swapped": (dict(weights=swapped), "test_against_the_oracle", "plain"),
    "last token skipped": (dict(session=SkipsTheLastToken), "test_against_the_oracle", "plain"),
    "duplicates dropped": (dict(session=DropsDuplicates), "test_unrouted_and_duplicate_routes"),
    "weights of unrouted slots read": (dict(session=ReadsWeightsOfUnroutedSlots), "test_unrouted_and_duplicate_routes"),
    "zero rows left unwritten": (dict(session=LeavesRowsUnwritten), "test_out_is_written_whole"),
    "out ignored": (dict(session=IgnoresOut), "test_out_is_written_whole"),
    "sums in changing order": (dict(session=SumsInChangingOrder), "test_runs_repeat_to_the_byte"),
    "NaN spreads": (dict(session=SpreadsNaN), "test_a_nan_stays_in_its_token"),
    "counts wrong": (dict(session=CountsTokensNotRoutes), "test_counts"),
    "usable after close": (dict(session=NeverCloses), "test_nothing_runs_after_close"),
    "tokens cut to max_tokens": (dict(session=TakesTooManyTokens), "test_bad_inputs_are_refused"),
    "caller's weights changed": (dict(weights=scribble), "test_packing_leaves_the_callers_weights"),
    "any knob accepted": (dict(plan=any_knobs), "test_knobs_are_legal_or_refused"),
    "everything supported": (dict(supports=always_yes), "test_what_is_not_declared_is_refused"),
    "plan not repeatable": (dict(plan=random_plan), "test_plan"),
}


@contextmanager
def arguments(kit, backend, test, variant=None):
    """What pytest would pass to a test of the kit."""
    names = signature(getattr(kit, test)).parameters
    given = {"backend": backend, "runnable": backend, "format": FORMAT, "variant": variant}
    with ExitStack() as stack:
        if "opened" in names:
            given["opened"] = stack.enter_context(kit.open(backend, kit.problem(FORMAT)))
        yield {name: given[name] for name in names}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault):
    changes, test, *variant = FAULTS[fault]
    kit = Kit()
    with arguments(kit, backend_with(), test, *variant) as given:
        getattr(kit, test)(**given)
    with arguments(kit, backend_with(**changes), test, *variant) as given, pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(kit, test)(**given)


def test_a_backend_without_kernel_is_skipped_with_its_reason(pytester):
    pytester.makepyfile("""
        from dataclasses import replace
        from megamoe.reference import SPEC
        from megamoe.testing.conformance import BackendConformance

        class TestNoKernel(BackendConformance):
            spec = replace(SPEC, name="nokernel", formats=("mxfp8",), status="none", missing="this release has no kernel yet")
    """)
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider", "-k", "not entry_point")
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] == 1  # the description
    assert outcomes["skipped"] > 15
    assert "failed" not in outcomes
    result.stdout.fnmatch_lines(["SKIPPED*nokernel: this release has no kernel yet"])
