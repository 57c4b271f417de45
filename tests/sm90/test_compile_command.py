"""``megamoe compile`` fills the cache without a GPU, ``megamoe cache`` shows and clears it."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from megamoe.cli import main
from megamoe.cli.compile import Job

SHAPE = ["--model", "qwen3-30b", "--experts", "8", "--top-k", "2", "--hidden", "256", "--intermediate", "128", "--max-tokens", "8"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    return tmp_path


def document(capsys, *words):
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_filled_once_then_found(capsys, cache, jobs):
    code, first = document(capsys, "compile", "--backend", "sm90", *SHAPE, "--jobs", jobs)
    assert code == 0
    assert len(first["kernels"]) == 2  # from bf16 and from quantized activations
    assert {(k["kernel"], k["arch"], k["hit"]) for k in first["kernels"]} == {("sm90-swap-8", "sm_90a", False)}
    assert all(k["registers"] == 168 and k["stack_bytes"] == 0 for k in first["kernels"])
    _, again = document(capsys, "compile", "--backend", "sm90", *SHAPE, "--jobs", jobs)
    assert [(k["digest"], k["hit"]) for k in again["kernels"]] == [(k["digest"], True) for k in first["kernels"]]
    code, listed = document(capsys, "cache")
    assert code == 0
    assert {e["digest"] for e in listed["entries"]} == {k["digest"] for k in first["kernels"]}
    assert document(capsys, "cache", "clear")[1]["removed"] == 2
    assert document(capsys, "cache")[1]["entries"] == []


def test_a_target_names_its_backend(capsys):
    code, found = document(capsys, "compile", "--arch", "sm_90a", *SHAPE, "--jobs", "1")
    assert code == 0
    assert {k["kernel"] for k in found["kernels"]} == {"sm90-swap-8"}


def test_kernels_for_biases_are_compiled_when_the_model_has_them(monkeypatch, capsys):
    """gpt-oss has expert biases: kernels without them would be of no use to its sessions."""
    made = []
    monkeypatch.setattr(Job, "requests", lambda job: made.append(job.biases) or ())
    for more, want in (((), True), (("--no-biases",), False)):
        assert main(["compile", "--backend", "sm90", "--model", "gpt-oss-120b", *more]) == 0
        assert made.pop() is want
    for more, want in (((), False), (("--biases",), True)):
        assert main(["compile", "--backend", "sm90", "--model", "dsv3", *more]) == 0
        assert made.pop() is want
    capsys.readouterr()


@pytest.mark.parametrize(("more", "want"), [((), None), (("--sms", "114"), 114)])
def test_multiprocessors_of_the_gpu_reach_the_list_of_kernels(monkeypatch, capsys, more, want):
    made = []
    monkeypatch.setattr(Job, "requests", lambda job: made.append(job.sms) or ())
    assert main(["compile", "--backend", "sm90", *SHAPE, *more]) == 0
    assert made == [want]
    capsys.readouterr()


def test_a_cache_that_cannot_be_written_is_a_failure_and_nothing_is_compiled(capsys, cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(cache / "file" / "cache"))
    assert main(["compile", "--backend", "sm90", *SHAPE]) == 1
    assert "cannot be written. Fix: export MEGAMOE_CACHE_DIR=" in capsys.readouterr().err


def test_a_kernel_that_the_cache_did_not_keep_is_a_failure(capsys, caplog, cache):
    """The folder can be written, but not this entry: as on a disk that is full."""
    assert main(["compile", "--backend", "sm90", *SHAPE, "--jobs", "1"]) == 0
    for path in (cache / "kernels").glob("*.json"):
        path.unlink()
        path.mkdir()
    assert main(["compile", "--backend", "sm90", *SHAPE, "--jobs", "1"]) == 1
    assert "the compiled kernel sm90-swap-8 is not cached: " in caplog.text
    assert "did not keep it: a warning above says why. Fix: free some space, or export MEGAMOE_CACHE_DIR=" in capsys.readouterr().err


def test_what_cannot_be_compiled_is_said(capsys):
    assert main(["compile", "--backend", "reference", *SHAPE]) == 3
    assert "has no kernels to compile" in capsys.readouterr().err
    assert main(["compile", "--arch", "sm_70", *SHAPE]) == 3
    assert "No installed backend is made for sm_70" in capsys.readouterr().err
    assert main(["compile", "--backend", "sm90", "--arch", "sm_100a", *SHAPE]) == 2
    assert "sm_90a" in capsys.readouterr().err
    assert main(["compile", "--backend", "sm90", *SHAPE, "--jobs", "0"]) == 2
    assert "--jobs 0; allowed: 1 or more" in capsys.readouterr().err
    assert main(["compile", "--backend", "sm90", *SHAPE, "--format", "mxfp8"]) == 3
    assert "mxfp8 has no sm90 kernel" in capsys.readouterr().err
