"""No data race in rewritten kernels, whatever order their threads run in: fences and barriers of the emulation's device functions suffice.

The functions are built so that every access of theirs is told to the machine's check of what happens before what (``tests/machine``). It
knows the PTX memory model, not the hardware, and asks for proxy fences only where bulk and tensor copies use shared memory.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which tells volatile accesses from others"),
    pytest.mark.timeout(600),
]


def found(*arguments):
    done = subprocess.run(
        [sys.executable, str(HERE / "run_races.py"), *arguments], capture_output=True, text=True, check=False, timeout=580
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_rewritten_kernels_have_no_data_race():
    races = found()
    assert len(races) > 5
    assert not any(races.values()), races


PLANTED = {
    "a commit does not wait for the sums of other lanes": (
        "one CTA",
        "async.cuh",
        "    mma_run(m, lane(), 32);\n  }\n  if (!alone) __syncwarp();",
        "    mma_run(m, lane(), 32);\n  }",
        "at tmem_cells",
    ),
    "an operation is not there when its queue says so": (
        "one CTA, delayed",
        "async.cuh",
        "    __threadfence();\n    atomicAdd(&cta->tail, 1);",
        "    atomicAdd(&cta->tail, 1);",
        "at queued",
    ),
    "four warps enter the queue in the same place": (
        "four warps, delayed",
        "async.cuh",
        "while (atomicCAS(&cta->adding, 0, 1)) {",
        "while (false) {",
        "at queued",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_race_in_the_device_functions_is_found(name):
    kernel, *change, where = PLANTED[name]
    (races,) = found(kernel, *change).values()
    assert "data races" in races
    assert where in races
