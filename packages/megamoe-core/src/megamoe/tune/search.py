"""Try every kernel that the knobs allow for one number of tokens, fastest first. The caller says how a plan is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from megamoe.errors import MegaMoEError
from megamoe.problem import MoEProblem
from megamoe.protocol import Backend, Plan
from megamoe.tune.space import Space, Values


@runtime_checkable
class Tunable(Backend, Protocol):
    """A backend with knobs."""

    @property
    def space(self) -> Space:
        """Its knobs."""
        ...

    def kernel(self, plan: Plan, tokens: int) -> str:
        """Name of what a session of this plan launches for so many tokens; equal names are equal kernels."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a problem.

    Attributes:
        kernel: name of what would be launched.
        knobs: the first knobs (in the order of the space) that lead to it.
        plan: what would run.
    """

    kernel: str
    knobs: Values
    plan: Plan


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate and what came of it.

    Attributes:
        candidate: what was run.
        ms: time of one launch; infinite when it failed.
        fault: why it failed; empty when it did not.
    """

    candidate: Candidate
    ms: float
    fault: str = ""


def candidates(backend: Tunable, problem: MoEProblem, tokens: int, fixed: Values | None = None) -> list[Candidate]:
    """Plans that differ in what runs for exactly so many tokens; the backend's own choice is the first.

    Args:
        backend: whose knobs.
        problem: the layer; ``max_tokens`` is replaced by ``tokens``, so that each plan's last kernel is the one that runs.
        tokens: live tokens.
        fixed: knobs that stay as they are.
    """
    sized = replace(problem, max_tokens=tokens)
    found: dict[str, Candidate] = {}
    for knobs in backend.space.candidates(fixed):
        try:
            plan = backend.plan(sized, knobs=knobs)
        except MegaMoEError:  # these knobs do not fit these tokens
            continue
        name = backend.kernel(plan, tokens)
        found.setdefault(name, Candidate(name, knobs, plan))
    return list(found.values())


def search(found: list[Candidate], measure: Callable[[Candidate], float]) -> Iterator[Tried]:
    """Measure every candidate, in order.

    Args:
        found: from :func:`candidates`.
        measure: milliseconds of a launch; raises :class:`MegaMoEError` when the result is wrong or the plan cannot run.
    """
    for candidate in found:
        try:
            yield Tried(candidate, measure(candidate))
        except MegaMoEError as error:
            yield Tried(candidate, float("inf"), str(error))
