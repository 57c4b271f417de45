"""Benchmarks without a GPU: routing patterns, floors, the torch pipeline against the oracle, result files, plots, comparison."""

from __future__ import annotations

import itertools
import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megamoe import nvml
from megamoe.bench import compare, contestants, plot, results, workloads
from megamoe.bench.contestants import Case, open_contestant
from megamoe.bench.results import Point
from megamoe.bench.roof import H200, Roof
from megamoe.bench.timing import Timing, orders
from megamoe.bench.unfused import Unfused
from megamoe.bench.workloads import Shape, make_ids, make_inputs, make_weights
from megamoe.cli import main
from megamoe.errors import InvalidInput
from megamoe.problem import SwiGLU
from megamoe.testing import oracle

SMALL = Shape("small", experts=8, top_k=2, hidden=256, intermediate=128, activation=SwiGLU(limit=2.0))

WIDE = Shape("wide", experts=16, top_k=4, hidden=128, intermediate=128).problem(400, "bf16")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def point(shape: str, tokens: int, ms: float, **more) -> Point:
    base = {"format": "fp8_block128", "routing": "random", "spread": 0.01, "floor_ms": 0.5 * ms, "touched": 8.0, "tflops": 1.0, "tb_s": 1.0}
    return Point(shape=shape, tokens=tokens, ms=ms, **{**base, **more})


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dsv3", (32, 8, 7168, 2048)),  # on 8 ranks
        ("dsv4", (96, 6, 7168, 3072)),  # on 4
        ("qwen30b", (128, 8, 2048, 768)),
        ("qwen235b", (16, 8, 4096, 1536)),  # on 8
        ("kimi-k2", (48, 8, 7168, 2048)),  # on 8
        ("gpt-oss", (128, 4, 2880, 2880)),
    ],
)
def test_shapes_are_those_of_published_figures(name, sizes):
    shape = workloads.SHAPES[name]
    assert (shape.experts, shape.top_k, shape.hidden, shape.intermediate) == sizes
    assert shape.activation.limit == (7.0 if name == "gpt-oss" else 10.0)
    assert shape.biases == (name == "gpt-oss")


@pytest.mark.parametrize("routing", workloads.ROUTINGS)
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_ids_are_experts(routing, tokens):
    ids = make_ids(routing, WIDE, tokens, generator())
    assert ids.shape == (tokens, 4)
    assert ids.dtype == torch.int32
    assert ((ids >= 0) & (ids < 16)).all()
    assert routing == "one" or all(len(set(row.tolist())) == 4 for row in ids)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_nobody_always_comes_behind_the_same(count):
    names = [f"contestant {n}" for n in range(count)]
    rounds = orders(names, 6)
    assert all(sorted(one) == names for one in rounds)
    one_after_the_other = [name for one in rounds for name in one]
    behind = {(name, before) for before, name in itertools.pairwise(one_after_the_other)}
    assert all(len({before for name, before in behind if name == who}) >= 2 for who in names)


def test_patterns_load_experts_as_they_say():
    def load(routing):
        return (
            torch.bincount(make_ids(routing, WIDE, 400, generator()).flatten().long(), minlength=16).sort(descending=True).values.tolist()
        )

    assert set(load("balanced")) == {100}
    assert load("few") == [400] * 4 + [0] * 12
    assert load("one") == [1600] + [0] * 15
    assert load("zipf")[0] > 2.5 * load("zipf")[8]
    assert 70 < min(load("random")) <= max(load("random")) < 130


def test_unknown_names_say_what_there_is():
    with pytest.raises(InvalidInput, match="zipf"):
        make_ids("even", WIDE, 1, generator())
    with pytest.raises(InvalidInput, match="qwen30b"):
        workloads.shape("dsv9")


@pytest.mark.parametrize("format", ["bf16", "fp8_tensor", "fp8_block128"])
def test_operands_keep_the_variance(format):
    """Otherwise a benchmark would time saturated or vanishing numbers."""
    weights = make_weights(SMALL, format, generator())
    weights.validate(SMALL.problem(64, format), SMALL.experts)
    inputs = make_inputs(SMALL, format, 64, "random", weights.x_scale, generator(1))
    value = oracle.compute(SMALL.problem(64, format), weights, inputs.data, inputs.ids, inputs.weights, inputs.scale).value
    assert inputs.touched == 8
    assert 0.05 < value.std() < 2


def test_a_peer_without_biases_is_not_timed_on_a_shape_that_has_them():
    shape = replace(SMALL, biases=True)
    case = Case(shape, shape.problem(64, "fp8_tensor"), make_weights(shape, "fp8_tensor", generator()), "sm90")
    with pytest.raises(InvalidInput, match="adds no expert biases"):
        open_contestant("flashinfer", case)


@pytest.mark.parametrize(
    ("folders", "found"),
    [
        ((), None),
        (("flashinfer",), None),
        (("flashinfer", "pull_style"), "pull_style"),
        (
            ("flashinfer/moe_ep/kernel_src/sm90/pull_style_cutedsl_megakernel", "pull_style"),
            "flashinfer.moe_ep.kernel_src.sm90.pull_style_cutedsl_megakernel",
        ),
    ],
)
def test_a_flashinfer_without_the_peer_hides_no_peer(tmp_path, monkeypatch, folders, found):
    """Seen on an H200: a folder of that name with other kernels of it on the path, before the peer's own."""
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert contestants._flashinfer_name() == found
    assert ("flashinfer" in contestants.importable_others()) == (found is not None)


def test_floor_is_the_larger_of_bytes_and_products():
    roof = Roof(read_tb_s=4.0, fp8_tflops=1000.0, bf16_tflops=500.0)
    shape = Shape("s", 32, 8, 7168, 2048)
    # By hand: one expert has 3 * 7168 * 2048 = 44,040,192 elements.
    assert roof.floor_ms(shape, "fp8_block128", 1, 8) == pytest.approx(8 * 44_040_192 / 4e12 * 1e3)
    assert roof.floor_ms(shape, "bf16", 1, 8) == pytest.approx(2 * 8 * 44_040_192 / 4e12 * 1e3)
    assert roof.floor_ms(shape, "fp8_block128", 8192, 32) == pytest.approx(6 * 8192 * 8 * 7168 * 2048 / 1e15 * 1e3)
    # The floor under which performance.md's peer measurement at dsv3, 8192 tokens, is 1.73 times.
    assert 6.808 / H200.floor_ms(shape, "fp8_block128", 8192, 32) == pytest.approx(1.73, abs=0.005)


def test_timing_takes_the_median():
    assert Timing.of([5.0, 1.0, 2.0]) == Timing(2.0, 2.0)


def by_loop(rows, scale, weight, weight_scale, ends):
    """Grouped matrix product one group at a time, on dequantized float32 operands."""
    out = torch.full((rows.shape[0], weight.shape[1]), float("nan"), dtype=torch.bfloat16)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        a, b = rows[start:end].float(), weight[expert].float()
        if scale is not None:
            a, b = a * scale[start:end, None], b * weight_scale[expert][:, None]
        out[start:end] = (a @ b.T).to(torch.bfloat16)
        start = end
    return out


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("format", "allowed"), [("bf16", 0.006), ("fp8_tensor", 0.09), ("fp8_block128", 0.09)])
def test_unfused_pipeline_computes_the_layer(format, allowed, biases):
    """E4M3 rounds by 2.6% (RMS). The pipeline and the oracle quantize activations with different scales and the pipeline re-quantizes
    weights row by row: up to six independent roundings, 2.6% * sqrt(6) = 6.4%, and values below the static scales' normal range."""
    problem = SMALL.problem(50, format)
    weights = make_weights(replace(SMALL, biases=biases), format, generator())
    assert (weights.b13 is not None) == (weights.b2 is not None) == biases
    inputs = make_inputs(SMALL, format, 50, "random", weights.x_scale, generator(1))
    inputs.ids[3, 1] = -1
    inputs.ids[7] = -1
    inputs.ids[9] = 5  # the same expert twice
    want = oracle.compute(problem, weights, inputs.x, inputs.ids, inputs.weights)
    got = Unfused(problem, weights, compiled=False, grouped=by_loop)(inputs.x, inputs.ids, inputs.weights, inputs.out.fill_(float("nan")))
    assert got[7].abs().max() == 0
    assert oracle.judge(got, want, format=format).rel_l2 < allowed


def test_result_file_round_trip(tmp_path):
    points = [point("dsv3", 8, 0.25, peer="flashinfer", peer_ms=0.3, others={"unfused": 0.9}, bf16_ms=0.26), point("dsv3", 1, 0.1)]
    results.save(tmp_path / "deep" / "r.json", {"gpu": "H200"}, points)
    environment, again = results.load(tmp_path / "deep" / "r.json")
    assert environment == {"gpu": "H200"}
    assert again == points
    raw = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert {"shape", "tokens", "format", "ms", "spread", "peer", "peer_ms", "floor_ms"} <= set(raw["points"][0])


@pytest.mark.parametrize("text", ["", "[]", '{"points": [{"shape": "x"}], "environment": {}}'])
def test_not_a_result_file(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(InvalidInput, match="not a result file"):
        results.load(tmp_path / "r.json")


def test_compare_joins_by_workload_and_respects_noise():
    old = [point("a", 1, 1.0), point("a", 8, 1.0), point("b", 1, 1.0), point("a", 32, 1.0, spread=0.2)]
    new = [point("a", 8, 1.1), point("a", 1, 0.5), point("c", 1, 1.0), point("a", 32, 1.1)]
    found = compare.ratios(old, new)
    assert [(r.new.tokens, round(r.ratio, 6), r.slower(0.03)) for r in found] == [(8, 1.1, True), (1, 0.5, False), (32, 1.1, False)]
    assert compare.geometric_mean([4.0, 1.0]) == pytest.approx(2.0)


def test_compare_command(tmp_path, capsys):
    results.save(tmp_path / "old.json", {}, [point("a", 1, 1.0)])
    results.save(tmp_path / "new.json", {}, [point("a", 1, 2.0)])
    assert main(["bench", "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["slower"] == 1
    assert document["geometric_mean"] == pytest.approx(2.0)
    assert main(["bench", "compare", str(tmp_path / "new.json"), str(tmp_path / "old.json")]) == 0


def test_plot_draws_every_point(tmp_path):
    points = [point(shape, tokens, 0.1 * (1 + tokens), others={"unfused": 1.0}) for shape in ("a<b", "c") for tokens in (1, 8, 64)]
    points.append(replace(points[0], routing="zipf"))
    results.save(tmp_path / "r.json", {"gpu": "H200", "date": "2026-11-30"}, points)
    assert main(["bench", "plot", str(tmp_path / "r.json"), str(tmp_path / "f.svg")]) == 0
    root = ElementTree.fromstring((tmp_path / "f.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{space}g")) == 3
    assert len(root.findall(f".//{space}circle")) == 2 * len(points)  # megamoe and unfused; the floor has no marks
    texts = [element.text for element in root.iter(f"{space}text")]
    assert {"a<b fp8_block128", "a<b fp8_block128 zipf", "c fp8_block128", "H200 2026-11-30"} <= set(texts)
    # The vertical axis grows upwards: a slower point lies higher.
    line = [pair.split(",") for pair in root.find(f".//{space}polyline").get("points").split()]
    assert float(line[0][1]) > float(line[-1][1])


def test_figure_of_one_point_is_drawn():
    ElementTree.fromstring(plot.svg({}, [point("a", 1, 0.1)]))


@pytest.mark.parametrize("arguments", [[], ["--measure-roof"], ["--backend", "reference"], ["--ranks", "2"]])
def test_measuring_needs_a_gpu(capsys, monkeypatch, arguments):
    monkeypatch.setattr(nvml, "gpus", lambda refresh=False: nvml.Gpus(problem="no NVIDIA driver in this test"))
    assert main(["bench", *arguments]) == 3
    assert "measures on a GPU, and none is visible: no NVIDIA driver in this test. Fix: " in capsys.readouterr().err


def test_knobs_of_the_command_reach_the_contestants(capsys, monkeypatch):
    swept = []
    monkeypatch.setattr("megamoe.cli.bench.require_gpu", lambda command: None)
    monkeypatch.setattr("megamoe.bench.points.run", lambda sweep, limits: swept.append(sweep) or ())
    assert main(["bench", "--backend", "sm90", "--against", "none", "--knob", "pdl=true", "--json"]) == 0
    assert [sweep.knobs for sweep in swept] == [{"pdl": True}]


def test_list_of_shapes(capsys):
    assert main(["bench", "--shapes", "list", "--json"]) == 0
    assert {s["name"] for s in json.loads(capsys.readouterr().out)["shapes"]} >= {"dsv3", "dsv4", "qwen30b", "qwen235b"}


def test_commit_outside_a_checkout_is_empty(tmp_path: Path):
    assert results.commit(tmp_path) == ""
