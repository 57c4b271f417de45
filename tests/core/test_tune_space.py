"""Knob spaces: one statement of what is legal serves validation and enumeration alike."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe.errors import InvalidInput
from megamoe.problem import MoEProblem
from megamoe.protocol import Plan
from megamoe.tune import Knob, Space
from megamoe.tune.search import candidates, search
from megamoe.tune.space import Rule

SPACE = Space(
    (
        Knob("order", ("auto", "native", "swap"), "operand order"),
        Knob("tile", (64, 128), "rows", wire=True),
        Knob("fold", (False, True), "x"),
    ),
    (Rule(lambda v: not (v["order"] == "swap" and v["tile"] == 128), "swap needs tile 64"),),
)
ALL = [
    dict(zip(("order", "tile", "fold"), c, strict=True)) for c in itertools.product(("auto", "native", "swap"), (64, 128), (False, True))
]
LEGAL = [v for v in ALL if (v["order"], v["tile"]) != ("swap", 128)]


def test_defaults_are_the_first_values():
    assert SPACE.complete() == {"order": "auto", "tile": 64, "fold": False}
    assert SPACE.wire(SPACE.complete({"tile": 128})) == {"tile": 128}


@given(st.sampled_from(ALL))
def test_completion_accepts_exactly_the_legal(values):
    if values in LEGAL:
        assert SPACE.complete(values) == values
    else:
        with pytest.raises(InvalidInput, match="swap needs tile 64"):
            SPACE.complete(values)


def test_candidates_are_the_legal_combinations():
    assert list(SPACE.candidates()) == LEGAL
    assert list(SPACE.candidates({"order": "swap"})) == [v for v in LEGAL if v["order"] == "swap"]


@pytest.mark.parametrize(("knobs", "said"), [({"tyle": 64}, "order, tile, fold"), ({"tile": 32}, "64, 128"), ({"fold": 1}, "False, True")])
def test_errors_name_what_is_legal(knobs, said):
    with pytest.raises(InvalidInput, match=said):
        SPACE.complete(knobs)
    with pytest.raises(InvalidInput):
        list(SPACE.candidates(knobs))


def test_knobs_that_are_no_mapping():
    with pytest.raises(InvalidInput, match="knobs are a list; allowed: a mapping"):
        SPACE.complete(["order"])


class Fake:
    """A backend whose kernel follows from two of its three knobs, and which refuses one of them for few tokens."""

    space = SPACE

    def plan(self, problem, *, ranks=1, knobs=None):
        values = SPACE.complete(knobs)
        if values["order"] == "native" and problem.max_tokens < 8:
            raise InvalidInput("too few tokens")
        return Plan("fake", "1", problem, ranks, knobs=values)

    def kernel(self, plan, tokens):
        order = plan.knobs["order"] if plan.knobs["order"] != "auto" else "swap" if tokens < 100 else "native"
        return f"{order}-{plan.knobs['tile']}"


PROBLEM = MoEProblem(4, 2, 128, 128, 4096, "bf16")


def test_candidates_are_the_kernels_that_differ():
    few = candidates(Fake(), PROBLEM, 4)
    assert [c.kernel for c in few] == ["swap-64", "swap-128"]  # the backend's own choice first; native does not fit
    assert all(c.plan.problem.max_tokens == 4 for c in few)
    assert [c.kernel for c in candidates(Fake(), PROBLEM, 200)] == ["native-64", "native-128", "swap-64"]
    assert [c.kernel for c in candidates(Fake(), PROBLEM, 200, {"tile": 128})] == ["native-128"]


def test_search_keeps_failures():
    def measure(candidate):
        if candidate.kernel == "native-128":
            raise InvalidInput("wrong result", hint="")
        return {"native-64": 2.0, "swap-64": 1.0}[candidate.kernel]

    tried = list(search(candidates(Fake(), PROBLEM, 200), measure))
    assert [(t.candidate.kernel, t.ms, t.fault) for t in tried] == [
        ("native-64", 2.0, ""),
        ("native-128", float("inf"), "wrong result"),
        ("swap-64", 1.0, ""),
    ]
