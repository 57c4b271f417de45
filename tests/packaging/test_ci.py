"""CI's choice of GPU jobs, and that what it runs exists."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu_jobs():
    spec = importlib.util.spec_from_file_location("gpu_jobs", ROOT / "ci" / "gpu_jobs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_arch_wheel_has_its_gpu_and_every_row_its_fields(gpu_jobs):
    rows = gpu_jobs.rows()
    wheels = {path.name.removeprefix("megamoe-") for path in (ROOT / "packages").iterdir()} - {"core"}
    assert {row["wheel"] for row in rows} == wheels
    assert all(row.keys() == {"wheel", "gpu", "runs-on", "gpus"} for row in rows)
    gpus = {wheel: {row["gpu"] for row in rows if row["wheel"] == wheel} for wheel in wheels}
    assert any(gpu.startswith(("H100", "H200")) for gpu in gpus["sm90"])
    assert "B200" in gpus["sm100"]
    assert "RTX PRO 6000" in gpus["sm120"]


@pytest.mark.parametrize(
    ("changed", "wheels"),
    [
        (["README.md", "docs/formats.md"], set()),
        (["packages/megamoe-sm120/src/megamoe_sm120/backend.py"], {"sm120"}),
        (["tests/sm90/test_run.py", "README.md"], {"sm90"}),
        (["tests/emulation/test_mma.py"], {"sm90"}),
        (["packages/megamoe-core/src/megamoe/device/combine.py"], {"sm90", "sm100", "sm120"}),
        (["packages/megamoe-core/README.md"], set()),
        (["tests/core/test_reference_gpu.py"], {"sm90", "sm100", "sm120"}),
        (["pyproject.toml"], {"sm90", "sm100", "sm120"}),
        ([".github/workflows/ci.yml"], {"sm90", "sm100", "sm120"}),
    ],
)
def test_a_change_takes_the_gpus_it_needs_and_no_others(gpu_jobs, changed, wheels):
    assert {row["wheel"] for row in gpu_jobs.needed(changed)} == wheels


def test_the_script_prints_what_github_reads(gpu_jobs):
    run = subprocess.run([sys.executable, str(ROOT / "ci" / "gpu_jobs.py"), "--all"], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == gpu_jobs.rows()


def test_workflow_runs_sessions_that_exist():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    noxfile = (ROOT / "noxfile.py").read_text()
    asked = set(re.findall(r"-s \"?(gpu-\$WHEEL|[\w-]+)", text))
    assert asked == {"gpu-$WHEEL", "multigpu"}
    assert 'name=f"gpu-{arch}"' in noxfile
    assert "def multigpu(" in noxfile
    assert "bash .ci/run" in text
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
