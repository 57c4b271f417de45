"""Benchmarks over several ranks, with the reference on the CPU."""

import json

import pytest

from megamoe import InvalidInput
from megamoe.bench import ranks, workloads
from megamoe.cli import main
from megamoe.errors import MegaMoEError

SMALL = workloads.Shape("small", 4, 2, 256, 128)


def test_the_slowest_rank_counts_and_every_rank_is_checked():
    point = ranks.measure(SMALL, "bf16", 3, "random", backend="reference", ranks=2, launches=1, repeats=1)
    assert (point.ranks, point.tokens, point.backend) == (2, 3, "reference")
    assert point.ms >= point.fastest_ms > 0
    assert 0 < point.rel_l2 < 0.01
    assert 1 <= point.imbalance <= 2
    assert point.wire_bytes > 0


def test_what_cannot_be_measured_is_said_before_anything_starts():
    with pytest.raises(InvalidInput, match="2 or more"):
        ranks.measure(SMALL, "bf16", 1, "random", backend="reference", ranks=1)
    with pytest.raises(InvalidInput, match="fp7"):
        ranks.measure(SMALL, "fp7", 1, "random", backend="reference", ranks=2)
    with pytest.raises(InvalidInput, match="the reference backend has none"):
        ranks.measure(SMALL, "bf16", 1, "random", backend="reference", ranks=2, knobs={"pdl": True})
    with pytest.raises(MegaMoEError, match=r"2 of 2 ranks failed(.|\n)*routing='sideways'"):
        ranks.measure(SMALL, "bf16", 1, "sideways", backend="reference", ranks=2)


def test_the_command_prints_and_writes_the_slowest_rank(monkeypatch, capsys):
    monkeypatch.setitem(workloads.SHAPES, "small", SMALL)
    words = ["bench", "--ranks", "2", "--backend", "reference", "--shapes", "small", "--tokens", "3", "--formats", "bf16,fp8_block128"]
    assert main([*words, "--launches", "1", "--repeats", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ranks"] == 2
    assert [point["format"] for point in document["points"]] == ["bf16", "fp8_block128"]
    assert all(point["ms"] >= point["fastest_ms"] for point in document["points"])
    assert main([*words[:1], "--ranks", "0", "--json"]) == 2


def test_knobs_of_the_command_reach_every_rank(monkeypatch, capsys):
    given = []

    class Measured(Exception):
        pass

    def measure(*_, knobs, **__):
        given.append(knobs)
        raise Measured

    monkeypatch.setattr(ranks, "measure", measure)
    words = ["bench", "--ranks", "2", "--backend", "sm90", "--shapes", "mixtral", "--tokens", "1", "--knob", "pdl=true", "--knob", "ring=4"]
    with pytest.raises(Measured):
        main(words)
    assert given == [{"pdl": True, "ring": 4}]


@pytest.mark.parametrize(
    "words", [["--output", "result.json"], ["--graph"], ["--measure-roof"], ["--max-tokens", "8"], ["--against", "unfused"]]
)
def test_options_of_one_rank_are_refused_instead_of_ignored(capsys, words):
    assert main(["bench", "--ranks", "2", "--backend", "reference", "--shapes", "mixtral", "--tokens", "1", *words]) == 2
    assert words[0] in capsys.readouterr().err
