"""What a backend says about itself and what it plans; everything here works on a machine without GPU."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from megamoe.errors import InvalidInput, UnsupportedProblem
from megamoe.formats import FORMATS
from megamoe.protocol import ENTRY_POINT_GROUP, PROTOCOL, Backend, Verdict
from megamoe.testing.conformance.subject import Subject, text


class DescriptionTests(Subject):
    """Description, then planning."""

    def test_spec_is_valid(self) -> None:
        spec = self.spec
        assert spec.name, "a backend needs a name"
        assert spec.name == spec.name.lower(), f"name {spec.name!r} is not in lower case"
        assert spec.summary, "a backend needs a one-line summary"
        assert spec.protocol[0] == PROTOCOL[0], f"protocol {spec.protocol} has another major than core's {PROTOCOL}"
        assert spec.protocol[1] <= PROTOCOL[1], f"protocol {spec.protocol} is newer than core's {PROTOCOL}"
        assert spec.formats, "a backend computes at least one format"
        assert set(spec.formats) <= set(FORMATS), f"formats {spec.formats} has names outside {tuple(FORMATS)}"
        assert len(set(spec.formats)) == len(spec.formats), f"formats {spec.formats} names one twice"
        assert spec.status in ("native", "emulated", "compiled", "none"), f"status {spec.status!r}"
        assert spec.status == "none" or not spec.missing, f"status {spec.status!r}, yet {spec.missing!r}"
        for major, minor in spec.archs:
            assert major >= 9, f"archs {spec.archs} are (major, minor) compute capabilities"
            assert minor is None or 0 <= minor <= 9, f"archs {spec.archs} are (major, minor) compute capabilities"
        module, colon, name = spec.factory.partition(":")
        assert all((module, colon, name)), f"factory {spec.factory!r} is not 'module:Class'"

    def test_an_entry_point_describes_it_without_torch_and_cutlass(self) -> None:
        entries = [e for e in metadata.entry_points(group=ENTRY_POINT_GROUP) if e.name == self.spec.name]
        assert len(entries) == 1, f"{len(entries)} entry points {self.spec.name!r} in group {ENTRY_POINT_GROUP}; allowed: one"
        code = (
            "import sys; from importlib import import_module; "
            f"spec = getattr(import_module({entries[0].module!r}), {entries[0].attr!r}); "
            "print(sorted({'torch', 'cutlass'} & set(sys.modules)), spec)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout.strip() == f"[] {self.spec}", done.stdout + done.stderr

    def test_factory_makes_a_backend(self, backend: Backend) -> None:
        assert isinstance(backend, Backend), f"{type(backend).__name__} lacks methods of megamoe.protocol.Backend"
        assert backend.spec == self.spec

    def test_probe_answers_for_any_device(self, backend: Backend) -> None:
        import torch

        for device in (None, torch.device("cpu"), torch.device("cuda")):
            check_verdict(backend.probe(device))

    # ------------------------------------------------------------------------------------------------ planning, on any machine

    def test_plan(self, backend: Backend, format: str) -> None:
        # On a machine with a GPU another test may have started CUDA; planning must not be what does.
        started = _cuda_started()
        for ranks in (1, 2):
            problem = self.problem(format)
            verdict = backend.supports(problem, ranks)
            check_verdict(verdict)
            if not verdict:
                continue
            plan = backend.plan(problem, ranks=ranks)
            assert plan == backend.plan(problem, ranks=ranks), "planning twice gives two plans"
            assert (plan.backend, plan.problem, plan.ranks) == (self.spec.name, problem, ranks)
            assert plan.version
            names = [region.name for region in plan.regions]
            assert len(set(names)) == len(names), f"regions {names} share a name"
            for region in plan.regions:
                assert region.nbytes >= 0, region
                assert region.kind in ("symmetric", "local"), region
            assert plan == backend.plan(problem, ranks=ranks, knobs=dict(plan.knobs)), "a plan's own knobs give another plan"
        assert backend.supports(self.problem(format)), f"{format} is declared but {text(backend.supports(self.problem(format)))}"
        assert _cuda_started() == started, "planning started CUDA"

    def test_what_is_not_declared_is_refused(self, backend: Backend) -> None:
        refused = [(self.problem(format), 1) for format in FORMATS if format not in self.spec.formats]
        first = self.spec.formats[0]
        refused += [(self.problem(first), 0), (self.problem(first, experts=7), 2)]
        for problem, ranks in refused:
            verdict = backend.supports(problem, ranks)
            check_verdict(verdict)
            assert not verdict, f"supports {problem} on {ranks} ranks"
            with pytest.raises(UnsupportedProblem) as caught:
                backend.plan(problem, ranks=ranks)
            assert caught.value.reasons == verdict.reasons, "plan and supports give different reasons"

    def test_knobs_are_legal_or_refused(self, backend: Backend) -> None:
        problem = self.problem(self.spec.formats[0])
        with pytest.raises(InvalidInput, match="no_such_knob"):
            backend.plan(problem, knobs={"no_such_knob": 1})
        for name in backend.plan(problem).knobs:
            with pytest.raises(InvalidInput, match=name):
                backend.plan(problem, knobs={name: object()})


def _cuda_started() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def check_verdict(verdict: Verdict) -> None:
    """Fail unless it is a verdict whose every reason says something."""
    assert isinstance(verdict, Verdict), f"{verdict!r} is not a Verdict"
    assert all(reason.text for reason in verdict.reasons), f"{verdict} has a reason without text"
