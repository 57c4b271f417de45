"""Core without any arch wheel and without CuTe DSL: the reference does the job, and what is missing is named with its command."""

import importlib.util
import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.environment("minimal")


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "megamoe", *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_no_kernel_compiler_and_no_arch_wheel_is_here():
    assert [name for name in ("cutlass", "megamoe_sm90", "megamoe_sm100", "megamoe_sm120") if importlib.util.find_spec(name)] == []


@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm120"])
def test_a_missing_arch_wheel_is_named_with_the_command_that_installs_it(arch):
    import megamoe

    with pytest.raises(megamoe.BackendNotFound, match=rf"No backend named '{arch}'.*pip install \"megamoe-core\[{arch}\]\""):
        megamoe.get_backend(arch)
    done = run("check", "--backend", arch)
    assert done.returncode == 3
    assert f'pip install "megamoe-core[{arch}]"' in done.stderr


def test_the_environment_variable_is_never_answered_by_another_backend(monkeypatch):
    monkeypatch.setenv("MEGAMOE_BACKEND", "sm100")
    done = run("demo")
    assert done.returncode == 3
    assert "MEGAMOE_BACKEND" in done.stderr
    assert 'pip install "megamoe-core[sm100]"' in done.stderr


def test_the_reference_is_the_only_backend_and_is_right():
    done = run("check", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ran"] == ["reference"]


def test_the_demo_does_the_job():
    done = run("demo", "--backend", "reference", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


def test_doctor_answers():
    done = run("doctor", "--json")
    assert done.returncode in (0, 1, 3), done.stderr
    assert json.loads(done.stdout)["command"] == "doctor"
