"""Tests that cannot run here say why, a GPU runner that runs no GPU test fails, and no outcome hangs on the day or on the machine."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe import nvml

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"


@pytest.fixture(scope="module")
def conftest():
    spec = importlib.util.spec_from_file_location("conftest_under_test", CONFTEST)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Item:
    """A collected test with these marks."""

    def __init__(self, *marks):
        self.marks = {mark.name: mark for mark in (m.mark if hasattr(m, "mark") else m for m in marks)}

    def get_closest_marker(self, name):
        return self.marks.get(name)


def machine(monkeypatch, *capabilities):
    devices = tuple(nvml.Device(i, f"GPU {i}", f"GPU-{i}", capability, 1 << 30) for i, capability in enumerate(capabilities))
    found = nvml.Gpus(devices=devices, problem="" if devices else "no NVIDIA driver")
    monkeypatch.setattr(nvml, "gpus", lambda refresh=False: found)
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)


H200, B200, B300, RTX = (9, 0), (10, 0), (10, 3), (12, 0)
mark = pytest.mark


@pytest.mark.parametrize(
    ("marks", "gpus", "reason"),
    [
        ([], [], ""),
        ([mark.ranks(4)], [], ""),  # over gloo, in processes
        ([mark.gpu], [], "needs a GPU: no NVIDIA driver"),
        ([mark.gpu], [RTX], ""),
        ([mark.sm90], [H200], ""),
        ([mark.sm90], [B200, RTX], "needs an sm90 GPU, found GPU 0 (10.0), GPU 1 (12.0)"),
        ([mark.sm100], [B300], ""),
        ([mark.sm100], [H200], "needs an sm100 GPU, found GPU 0 (9.0)"),
        ([mark.sm120], [H200, RTX], ""),
        ([mark.emulated], [H200], ""),
        ([mark.emulated], [B200], "emulates Blackwell code on a Hopper GPU, found GPU 0 (10.0)"),
        ([mark.gpu, mark.ranks(2)], [H200, H200], ""),
        (
            [mark.gpu, mark.ranks(2)],
            [H200],
            "needs 2 GPUs, or one shared through MPS (nvidia-cuda-mps-control), found GPU 0 (9.0)",
        ),
        ([mark.environment("minimal")], [], "needs the environment that `nox -s minimal` makes"),
        ([mark.environment("wheel", "wheel_tests")], [], "needs the environment that `nox -s wheel_tests` makes"),
    ],
)
def test_the_reason(conftest, monkeypatch, marks, gpus, reason):
    machine(monkeypatch, *gpus)
    assert conftest.why_not(Item(*marks), "") == reason


def test_one_gpu_shared_through_mps_is_enough_for_ranks(conftest, monkeypatch, tmp_path):
    machine(monkeypatch, H200)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert conftest.why_not(Item(mark.gpu, mark.ranks(4)), "").startswith("needs 4 GPUs, or one shared through MPS")
    (tmp_path / "control").touch()  # the service runs
    assert conftest.why_not(Item(mark.gpu, mark.ranks(4)), "") == ""
    (tmp_path / "control").unlink()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "nvidia-cuda-mps-control" else None)
    assert conftest.why_not(Item(mark.gpu, mark.ranks(4)), "") == ""


def test_the_environment_that_is_there_runs_its_tests(conftest):
    assert conftest.why_not(Item(mark.environment("minimal")), "minimal") == ""


@pytest.mark.parametrize(("environment", "code"), [("gpu", 1), ("", 0)])
def test_a_gpu_runner_that_ran_no_gpu_test_fails(tmp_path, environment, code):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text("def test_without_gpu():\n    assert 1 + 1 == 2\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--environment", environment, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert ("no GPU test ran" in done.stdout) == bool(code)


DRAWS = """
import os, random, time
import torch
from hypothesis import given, strategies as st

seen = []


def draw():
    seen.append((random.random(), torch.rand(1).item(), sorted(name for name in os.environ if name.startswith("MEGAMOE_"))))
    assert seen[-1] == seen[0]
    assert seen[0][2] == ["MEGAMOE_CACHE_DIR"]


def test_first(): draw()
def test_second(): draw()


@given(st.integers())
def test_example_that_takes_long(number):
    time.sleep(0.4 * (not numbers))  # longer than hypothesis allows by itself
    numbers.append(number)


numbers = []


def test_write(): print("numbers", numbers)
"""


def test_no_outcome_hangs_on_luck_on_the_order_of_tests_or_on_settings(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(DRAWS)
    settings = {
        "MEGAMOE_BACKEND": "nobody",
        "MEGAMOE_DISABLE": "reference",
        "MEGAMOE_ARCH": "x",
        "MEGAMOE_LOG": "x",
        "MEGAMOE_CACHE_DIR": "y",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(tmp_path)]
    printed = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, env={**os.environ, **settings})
        assert done.returncode == 0, done.stdout + done.stderr
        printed += [line for line in done.stdout.splitlines() if "numbers" in line]
    assert len(printed) == 2
    assert printed[0] == printed[1]
