"""Looking is cheap: importing our packages loads neither torch nor CuTe DSL, and the list of backends comes at once."""

import importlib.util
import os
import subprocess
import sys

import pytest

from .stopwatch import assert_within

WHEELS = ("megamoe", "megamoe_sm90", "megamoe_sm100", "megamoe_sm120")
INSTALLED = [name for name in WHEELS if importlib.util.find_spec(name)]
HEAVY = ("torch", "cutlass", "numpy", "nvshmem", "transformers", "rich")


def loaded_by(code):
    """Top-level modules that Python loads for ``code``, by its own account."""
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_imports_are_light():
    start = loaded_by("pass")
    loaded = loaded_by("import " + ", ".join(INSTALLED))
    assert set(INSTALLED) <= loaded
    assert not set(HEAVY) & (loaded - start)


def test_the_measure_itself_sees_a_heavy_import():
    assert "numpy" in loaded_by("import numpy")


def test_listing_backends_loads_nothing_heavy():
    start = loaded_by("pass")
    assert not set(HEAVY) & (loaded_by("import megamoe; megamoe.backends()") - start)


@pytest.mark.alone
@pytest.mark.parametrize("command", [["backends"], ["--help"]])
def test_commands_answer_within_three_tenths_of_a_second(command):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEGAMOE_")}
    answer = [sys.executable, "-m", "megamoe", *command]
    assert_within(0.3, lambda: subprocess.run(answer, stdout=subprocess.DEVNULL, check=True, env=environment, timeout=60))
