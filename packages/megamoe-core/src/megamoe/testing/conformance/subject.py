"""What is put to the test: the backend, and the problems, data and sessions that the tests start from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pytest

from megamoe.problem import MoEProblem
from megamoe.protocol import Backend, BackendSpec, PackedWeights, Session, Verdict
from megamoe.testing import oracle
from megamoe.testing.trial import Inputs, make_trial
from megamoe.weights import ExpertWeights

if TYPE_CHECKING:
    import torch


class Opened(NamedTuple):
    """A session and what it was opened with; ``weights`` are a copy that ``update`` does not reach."""

    problem: MoEProblem
    weights: ExpertWeights
    packed: PackedWeights
    session: Session


class Subject:
    """Fixtures and helpers of the conformance tests.

    Attributes:
        spec: the backend's description.
        device: where to compute; empty: ``"cuda"`` for backends with ``archs``, else ``"cpu"``.
        sizes: the problem that is computed, small so that the oracle takes a moment.
    """

    spec: ClassVar[BackendSpec]
    device: ClassVar[str] = ""
    sizes: ClassVar[dict[str, int]] = {"experts": 8, "top_k": 3, "hidden": 256, "intermediate": 256, "max_tokens": 48}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test, and one shared session, for each format that the backend declares."""
        if "format" in metafunc.fixturenames:
            metafunc.parametrize("format", self.spec.formats, scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls) -> Backend:
        """The backend, made by its factory."""
        if cls.spec.missing:
            pytest.skip(f"{cls.spec.name}: {cls.spec.missing}")
        module, _, name = cls.spec.factory.partition(":")
        made: Backend = getattr(import_module(module), name)()
        return made

    @pytest.fixture(scope="class")
    @classmethod
    def runnable(cls, backend: Backend) -> Backend:
        """The backend, where it can compute."""
        import torch

        verdict = backend.probe(torch.device(cls.place()))
        if not verdict:
            pytest.skip(f"{cls.spec.name} cannot run here: {text(verdict)}")
        return backend

    @pytest.fixture(scope="class")
    @classmethod
    def opened(cls, runnable: Backend, format: str) -> Iterator[Opened]:
        """A session of one rank, shared by the tests of a format."""
        with cls.open(runnable, cls.problem(format)) as opened:
            yield opened

    @classmethod
    def place(cls) -> str:
        """The device that computes."""
        return cls.device or ("cuda" if cls.spec.archs else "cpu")

    @classmethod
    def problem(cls, format: str, **changes: Any) -> MoEProblem:
        """The problem of ``sizes`` with some fields changed."""
        return MoEProblem(**{**cls.sizes, "format": format, **changes})

    @classmethod
    def weights(cls, problem: MoEProblem, seed: int = 1, *, biases: bool = False) -> ExpertWeights:
        """Random experts, bf16."""
        import torch

        weights = make_trial(problem, tokens=0, seed=seed).local_weights(0, cls.place())
        if biases:
            generator = torch.Generator().manual_seed(seed + 100)
            b13 = torch.randn(problem.experts, 2 * problem.intermediate, generator=generator).bfloat16()
            b2 = torch.randn(problem.experts, problem.hidden, generator=generator)
            weights = replace(weights, b13=b13.to(cls.place()), b2=b2.to(cls.place()))
        return weights

    @classmethod
    def inputs(cls, problem: MoEProblem, tokens: int | None = None, seed: int = 2) -> Inputs:
        """Random tokens and routes; ``None`` is ``max_tokens``."""
        return make_trial(problem, tokens=tokens, seed=seed).inputs[0].to(cls.place())

    @classmethod
    @contextmanager
    def open(cls, backend: Backend, problem: MoEProblem, weights: ExpertWeights | None = None) -> Iterator[Opened]:
        """Open a session of one rank; skips the test when the backend refuses the problem."""
        verdict = backend.supports(problem)
        if not verdict:
            pytest.skip(f"{cls.spec.name} does not compute this: {text(verdict)}")
        given = weights or cls.weights(problem)
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in given.tensors().items()}
        plan = backend.plan(problem)
        packed = backend.prepare_weights(plan, given)
        with backend.open_session(plan, packed) as session:
            yield Opened(problem, replace(given, **copies), packed, session)

    @classmethod
    def check(cls, opened: Opened, inputs: Inputs, **more: Any) -> torch.Tensor:
        """Run, have the oracle judge, and return the output."""
        out = opened.session.run(*inputs, **more)
        result = oracle.compute(opened.problem, opened.weights, *inputs, x_scale=more.get("x_scale"))
        verdict = oracle.judge(out, result, format=opened.problem.format)
        assert verdict.ok, verdict.text
        assert str(out.dtype) == "torch.bfloat16", f"output is {out.dtype}; allowed: bfloat16"
        return out


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, to be compared exactly (also NaN)."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def text(verdict: Verdict) -> str:
    """All reasons in one line."""
    return " ".join(map(str, verdict.reasons))
