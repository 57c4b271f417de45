"""What ranks compare when a session opens: canonical text, its digest, and the words of a disagreement."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from megamoe import MoEProblem, Placement, Plan, SwiGLU
from megamoe.ep import confighash
from megamoe.ep.confighash import canonical, configuration, digest

PROBLEM = MoEProblem(experts=8, top_k=2, hidden=256, intermediate=128, max_tokens=64, format="mxfp8", activation=SwiGLU(limit=7.0))
PLAN = Plan("sm90", "0.1.0", PROBLEM, 2, knobs={"stages": 4}, wire={"row_bytes": 264, "ring": (1, 2)})


def test_equal_values_have_equal_text():
    assert canonical({"b": (1, 2.0), "a": None}) == canonical({"a": None, "b": [1, 2.0]})
    assert canonical(SwiGLU(limit=7)) == canonical(SwiGLU(limit=7.0))
    assert canonical(Placement(((0,), (1,)))) == canonical(Placement([[0], [1]]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.1, np.nextafter(0.1, 1).item()),
        (1, 1.0),
        (0.0, -0.0),
        (True, 1),
        ("1", 1),
        (None, "null"),
        ((1, (2, 3)), ((1, 2), 3)),
        (SwiGLU(), SwiGLU(alpha=1.702)),
        (Placement(((0, 1), ())), Placement(((0,), (1,)))),
    ],
)
def test_different_values_have_different_text(one, other):
    assert canonical(one) != canonical(other)


def test_what_has_no_canonical_text_is_refused():
    with pytest.raises(TypeError, match="has no canonical text"):
        canonical({"kernel": object()})


def test_everything_that_must_agree_is_part_of_it():
    config = configuration(PLAN, drop="d1", x_scale=0.5, mid_scale=0.25)
    changed = [
        configuration(replace(PLAN, backend="sm100"), drop="d1", x_scale=0.5, mid_scale=0.25),
        configuration(replace(PLAN, version="0.1.1"), drop="d1", x_scale=0.5, mid_scale=0.25),
        configuration(replace(PLAN, ranks=4), drop="d1", x_scale=0.5, mid_scale=0.25),
        configuration(replace(PLAN, wire={"row_bytes": 264, "ring": (1, 3)}), drop="d1", x_scale=0.5, mid_scale=0.25),
        configuration(replace(PLAN, wire={"row_bytes": 264}), drop="d1", x_scale=0.5, mid_scale=0.25),
        configuration(PLAN, drop="d2", x_scale=0.5, mid_scale=0.25),
        configuration(PLAN, drop="d1", x_scale=np.nextafter(0.5, 1).item(), mid_scale=0.25),
        configuration(PLAN, drop="d1", x_scale=0.5),
    ]
    for field, value in {
        "experts": 16,
        "top_k": 3,
        "hidden": 512,
        "intermediate": 256,
        "max_tokens": 65,
        "format": "nvfp4",
        "activation": SwiGLU(limit=7.0, up_bias=1.0),
        "routing_weight": "early",
        "placement": Placement.even(8, 2),
        "checked": True,
    }.items():
        changed.append(configuration(replace(PLAN, problem=replace(PROBLEM, **{field: value})), drop="d1", x_scale=0.5, mid_scale=0.25))
    assert len({digest(c) for c in (config, *changed)}) == 1 + len(changed)


def test_knobs_that_do_not_touch_the_wire_may_differ():
    assert digest(configuration(PLAN)) == digest(configuration(replace(PLAN, knobs={"stages": 5}, regions=(), bounds={"math": 1.0})))


def test_the_digest_is_the_same_in_every_process():
    code = "import json, sys; from megamoe.ep.confighash import digest; print(digest(json.load(sys.stdin)))"
    config = configuration(PLAN, x_scale=0.1)
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(dict(reversed(config.items()))),
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == digest(config)


def test_a_disagreement_names_every_field_and_who_holds_what():
    one, two = configuration(PLAN, x_scale=0.5), configuration(replace(PLAN, version="0.2.0"))
    text = confighash._differences([one, two, one])
    assert text == (
        'The ranks disagree: version is "0.1.0" on ranks [0, 2], "0.2.0" on ranks [1]; '
        'x_scale is "0.5" on ranks [0, 2], null on ranks [1]; allowed: equal on all 3 ranks.'
    )


def test_a_whole_number_is_the_same_scale_however_it_is_written():
    assert digest(configuration(PLAN, x_scale=1, mid_scale=2)) == digest(configuration(PLAN, x_scale=1.0, mid_scale=2.0))
