"""`megamoe doctor`: the verdict first, for any damage, with nothing but the standard library."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megamoe
from megamoe import cli, doctor, nvml
from megamoe.doctor import Examination
from megamoe.doctor.finding import Finding

HURT = Examination(
    backend=None,
    findings=(Finding("error", "It is broken.", "pip install mend"), Finding("warning", "It may rain."), Finding("note", "It is Monday.")),
    records=(),
    gpus=nvml.Gpus(devices=(nvml.Device(0, "NVIDIA H200", "GPU-1", (9, 0), 2**37),), driver="580.1", cuda=(13, 0)),
    packages=(("torch", "2.13.0", "/site"),),
)


@pytest.fixture
def bare(tmp_path):
    """Our package alone in a folder, and a Python that sees neither site packages nor settings."""
    shutil.copytree(Path(megamoe.__file__).parent, tmp_path / "megamoe", ignore=shutil.ignore_patterns("__pycache__"))

    def run(*arguments, **variables):
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path), **variables}
        command = [sys.executable, "-S", "-m", "megamoe", "doctor", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)

    return run


def test_the_verdict_and_the_fix_come_first(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: HURT)
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["NOT HEALTHY: 1 problem(s). It is broken.", "Fix first: pip install mend"]
    assert lines[3:7] == ["error: It is broken.", "  fix: pip install mend", "warning: It may rain.", "note: It is Monday."]
    text = "\n".join(lines)
    for part in ("580.1, CUDA 13.0", "NVIDIA H200", "9.0", "torch", "2.13.0", "MEGAMOE_TIMEOUT", "CUDA_VISIBLE_DEVICES"):
        assert part in text


def test_json_says_the_same(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: HURT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["command"], document["healthy"], document["backend"]) == (1, "doctor", False, None)
    assert document["findings"][0] == {"level": "error", "text": "It is broken.", "fix": "pip install mend"}
    variables = {row["name"]: row["value"] for row in document["environment"]}
    assert variables["CUDA_VISIBLE_DEVICES"] == "''"


def test_the_standard_library_is_enough(bare):
    done = bare()
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("NOT HEALTHY: 1 problem(s). megamoe-core needs importlib-metadata, numpy, packaging, rich, torch")
    assert second == "Fix first: pip install importlib-metadata numpy packaging rich torch"
    assert "reference" in done.stdout


DAMAGE = {
    "settings": {"MEGAMOE_TIMEOUT": "soon", "MEGAMOE_LOG": "loud", "MEGAMOE_BACKEND": "nobody", "MEGAMOE_DISABLE": ",,reference"},
    "hidden GPUs": {"CUDA_VISIBLE_DEVICES": "-1", "CUDA_DEVICE_ORDER": "nonsense"},
    "no home": {"HOME": "/nonexistent", "MEGAMOE_CACHE_DIR": "/dev/null/cache"},
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_it_never_raises(bare, kind):
    done = bare("--json", **DAMAGE[kind])
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    document = json.loads(done.stdout)
    texts = " ".join(f["text"] for f in document["findings"])
    assert "itself failed" not in texts
    if kind == "settings":
        for part in ("MEGAMOE_TIMEOUT='soon'", "MEGAMOE_LOG='loud'", "MEGAMOE_BACKEND=nobody"):
            assert part in texts


def test_the_doctor_loads_nothing_heavy():
    code = (
        "import sys; from megamoe import doctor; doctor.examine(); print(*sorted({'torch', 'cutlass', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""
