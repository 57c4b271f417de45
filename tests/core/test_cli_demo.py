"""`megamoe demo`: a real layer cut to the machine, run, judged and printed; a wrong backend is found out."""

import json
import re

import pytest

from megamoe import catalog, nvml
from megamoe.catalog import Record
from megamoe.cli import codes, demo, main
from megamoe.presets import PRESETS
from megamoe.protocol import BackendSpec, Reason
from megamoe.reference import session as reference_session

TINY = ["--hidden", "256", "--intermediate", "128", "--experts", "6", "--top-k", "2", "--max-tokens", "9"]


def document(capsys, *arguments):
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_small_layer_runs_whole_and_is_right(capsys):
    code, found = document(capsys, "demo", "--ranks", "1", "--backend", "reference", *TINY)
    assert code == codes.OK
    assert found["problem"] == found["whole"]
    assert found["result"]["tokens"] == [9]
    assert found["result"]["backend"] == "reference"
    assert 0 < found["error"] < 0.01
    assert found["tokens_per_second"] == pytest.approx(9 / found["result"]["seconds"])


def test_a_large_layer_is_cut_in_experts_and_tokens_only_and_says_so(capsys, monkeypatch):
    budget = demo.Budget(parameters=9 * 3 * 2048 * 768, tokens=4, ranks=1, why="a machine of this test")
    monkeypatch.setattr(demo, "_budget", lambda record: budget)
    code, found = document(capsys, "demo", "--backend", "reference", "--ranks", "1")
    assert code == codes.OK
    whole, cut = found["whole"], found["problem"]
    assert (whole["experts"], whole["top_k"], whole["hidden"], whole["intermediate"]) == (128, 8, 2048, 768)
    assert cut == {**whole, "experts": cut["experts"], "max_tokens": cut["max_tokens"]}
    assert (cut["experts"], cut["max_tokens"]) == (9, 4)
    assert (found["why_cut"], found["result"]["tokens"]) == ("a machine of this test", [4])


def test_ranks_run_in_processes_of_their_own_also_when_experts_do_not_divide(capsys):
    code, found = document(capsys, "demo", "--backend", "reference", "--ranks", "4", *TINY)
    assert code == codes.OK
    assert found["result"]["tokens"] == [9] * 4
    assert [len(rank) for rank in found["problem"]["placement"]["local"]] == [2, 2, 1, 1]


def test_a_pipe_gets_plain_text_with_a_line_for_the_result_and_for_every_gpu_wheel(capsys):
    assert main(["demo", "--ranks", "1", "--backend", "reference", *TINY]) == codes.OK
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert re.search(r"^reference +CPU +1 +9 +[\d.]+ +\d+ +0\.\d+ +pass$", text, re.MULTILINE)
    assert "in float64" in text


def test_a_wrong_result_fails(capsys, monkeypatch):
    right = reference_session.ReferenceSession.run
    monkeypatch.setattr(reference_session.ReferenceSession, "run", lambda self, *inputs, **more: right(self, *inputs, **more) * 1.05)
    code, found = document(capsys, "demo", "--ranks", "1", "--backend", "reference", *TINY)
    assert code == codes.FAILED
    assert found["ok"] is False
    assert found["error"] == pytest.approx(0.05, rel=0.1)


def test_without_a_gpu_it_says_why_and_takes_the_reference(capsys, monkeypatch):
    monkeypatch.setattr(nvml, "query", lambda: nvml.Gpus(problem="no NVIDIA driver in this test"))
    catalog.refresh()
    try:
        code, found = document(capsys, "demo", "--ranks", "1", *TINY)
    finally:
        monkeypatch.undo()
        catalog.refresh()
    assert code == codes.OK
    assert found["result"]["backend"] == "reference"
    assert "no NVIDIA driver in this test" in found["why_cut"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--model", "gpt-2"], ["gpt-2", *PRESETS]),
        (["--format", "fp9"], ["fp9", "fp8_block128", "nvfp4"]),
        (["--top-k", "0"], ["top_k=0"]),
        (["--ranks", "0"], ["--ranks 0; allowed: 1 or more"]),
        (["--ranks", "-1"], ["--ranks -1; allowed: 1 or more"]),
        (["--seed", str(2**64)], [f"--seed {2**64}; allowed: -2^63 to 2^64 - 1"]),
        (["--seed", str(-(2**63) - 1)], [f"--seed {-(2**63) - 1}; allowed"]),
    ],
)
def test_bad_arguments_name_what_is_allowed(capsys, arguments, names):
    assert main(["demo", *arguments]) == codes.USAGE
    error = capsys.readouterr().err
    assert all(name in error for name in names)
    assert "Fix:" in error


def test_what_the_backend_refuses_is_said_once_and_before_any_rank_starts(capsys):
    assert main(["demo", "--backend", "reference", "--hidden", "100"]) == codes.NOTHING_SUITABLE
    error = capsys.readouterr().err
    assert error.count("hidden=100 is not a multiple of 128") == 1
    assert "Traceback" not in error


def test_a_backend_named_by_the_environment_is_not_replaced(capsys, monkeypatch):
    monkeypatch.setattr(nvml, "gpus", lambda refresh=False: nvml.Gpus(problem="no NVIDIA driver in this test"))
    monkeypatch.setenv("MEGAMOE_BACKEND", "hopper")
    spec = BackendSpec(name="hopper", protocol=(1, 0), archs=((9, 0),), formats=("bf16",), summary="", factory="m:C")
    records = (Record("hopper", "unavailable", (Reason("needs compute capability 9.0, found no GPU"),), spec),)
    monkeypatch.setattr(catalog, "backends", lambda refresh=False: records)
    assert main(["demo", *TINY]) == codes.NOTHING_SUITABLE
    assert "Backend 'hopper' is unavailable: needs compute capability 9.0" in capsys.readouterr().err


@pytest.fixture
def lonely_gpu(monkeypatch):
    """A GPU that no installed wheel is made for."""
    gpu = nvml.Device(0, "NVIDIA Old", "GPU-1", (7, 0), 16 << 30)
    monkeypatch.setattr(nvml, "gpus", lambda refresh=False: nvml.Gpus(devices=(gpu,)))
    monkeypatch.delenv("MEGAMOE_BACKEND", raising=False)


@pytest.mark.usefixtures("lonely_gpu")
def test_a_gpu_without_a_backend_is_said_and_the_demonstration_goes_on(capsys):
    code, found = document(capsys, "demo", "--ranks", "1", *TINY)
    assert code == codes.OK
    assert found["result"]["device"] == "CPU"
    assert "NVIDIA Old" in found["note"]
    assert found["why_cut"].startswith("reference runs on the CPU")


def test_a_gpu_gets_the_whole_layer_where_its_memory_and_patience_allow(monkeypatch):
    gpu = nvml.Device(0, "NVIDIA H200", "GPU-1", (9, 0), 141 << 30)
    monkeypatch.setattr(nvml, "gpus", lambda refresh=False: nvml.Gpus(devices=(gpu,)))
    hopper = BackendSpec(name="sm90", protocol=(1, 0), archs=((9, 0),), formats=("bf16",), summary="", factory="m:C")
    budget = demo._budget(Record("sm90", "ok", (), hopper))
    assert budget.ranks == 1
    assert "NVIDIA H200, 141 GiB" in budget.why
    qwen = PRESETS["qwen3-30b"].problem(4096)
    assert demo._cut(qwen, budget, 1) == qwen
    cut = demo._cut(PRESETS["dsv3"].problem(4096), budget, 1)
    assert (cut.experts, cut.max_tokens) == (700_000_000 // (3 * 7168 * 2048), 4096)
