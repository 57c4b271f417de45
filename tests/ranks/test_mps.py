"""When CUDA MPS is started for ranks that share a GPU, with a stand-in for its control program."""

import os
from pathlib import Path

import pytest

from megamoe import nvml
from megamoe.errors import BackendUnavailable
from megamoe.nvml import Device, Gpus
from megamoe.testing import mps

CONTROL = """#!/bin/sh
echo "$@ $(if [ "$1" != -d ]; then cat; fi) $CUDA_MPS_PIPE_DIRECTORY" >> {log}
exit {code}
"""


def gpus(count):
    devices = tuple(Device(i, "NVIDIA H200", f"GPU-{i}", (9, 0), 1 << 37) for i in range(count))
    return Gpus(devices, 0, "580.1", (13, 0), "")


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Puts a control program on the path; its log lists every call. The usual pipe folder is an empty one."""
    log = tmp_path / "calls"
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "nobody"))

    def install(code=0):
        program = tmp_path / "bin" / mps.CONTROL
        program.parent.mkdir()
        program.write_text(CONTROL.format(log=log, code=code))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    install.calls = lambda: log.read_text().splitlines() if log.exists() else []
    return install


def test_started_for_ranks_that_outnumber_the_gpus_and_ended(control, monkeypatch):
    monkeypatch.setattr(nvml, "gpus", lambda: gpus(1))
    control()
    with mps.serving(4) as env:
        pipe = env["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(pipe).is_dir()
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in env
        assert env.items() >= mps.SHARED.items()
    assert not Path(pipe).exists()
    assert [call.split() for call in control.calls()] == [["-d", pipe], ["quit", pipe]]


def test_ended_also_after_an_error(control, monkeypatch):
    monkeypatch.setattr(nvml, "gpus", lambda: gpus(1))
    control()
    with pytest.raises(ZeroDivisionError), mps.serving(2):
        1 / 0  # noqa: B018
    assert "quit" in control.calls()[-1]


@pytest.mark.parametrize(("count", "ranks"), [(0, 4), (2, 2), (8, 4)])
def test_not_started_where_it_is_not_needed(control, monkeypatch, count, ranks):
    monkeypatch.setattr(nvml, "gpus", lambda: gpus(count))
    control()
    with mps.serving(ranks) as env:
        assert env == {}
    assert control.calls() == []


def test_a_running_service_is_used(control, monkeypatch, tmp_path):
    monkeypatch.setattr(nvml, "gpus", lambda: gpus(1))
    control()
    (tmp_path / "nobody").mkdir()
    (tmp_path / "nobody" / "control").touch()
    with mps.serving(4) as env:
        assert env == mps.SHARED
    assert control.calls() == []


def test_its_failure_and_its_absence_are_said(control, monkeypatch):
    monkeypatch.setattr(nvml, "gpus", lambda: gpus(1))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BackendUnavailable, match="2 ranks on 1 GPU need CUDA MPS"), mps.serving(2):
        pass
    monkeypatch.setenv("PATH", os.defpath)
    control(code=1)
    with pytest.raises(BackendUnavailable, match="CUDA MPS failed"), mps.serving(2):
        pass
