"""Knob spaces: one statement of what is legal serves validation and enumeration alike."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe.errors import InvalidInput
from megamoe.tune import Knob, Space
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
