"""What only a GPU shows beside the sessions' tests: wide weights, launch numbers that wrap, other devices, compute-sanitizer."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megamoe import MoEProblem, SwiGLU
from megamoe.bench.workloads import Shape, make_inputs, make_weights
from megamoe.device import regions
from megamoe.testing import oracle
from megamoe.testing.trial import make_trial
from megamoe_sm90 import session as sessions
from megamoe_sm90.backend import Sm90Backend

pytestmark = pytest.mark.sm90

BACKEND = Sm90Backend()
KERNELS = (
    {"order": "native", "native_tile": 128, "native_rows": "pool"},
    {"order": "native", "native_tile": 64, "native_rows": "gather"},
    {"order": "swap", "swap_tile": 16},
)
PROBLEM = MoEProblem(8, 2, 512, 256, 64, "fp8_block128", SwiGLU(limit=2.0))

each_kernel = pytest.mark.parametrize("knobs", KERNELS, ids=lambda k: "-".join(str(v) for v in k.values()))


@pytest.fixture(scope="module")
def wide():
    """A layer whose w13 has more than 2^31 elements: experts at its end lie beyond 32-bit offsets."""
    shape = Shape("wide", 144, 2, 4096, 2048)
    generator = torch.Generator(device="cuda").manual_seed(0)
    weights = make_weights(shape, "fp8_block128", generator)
    assert weights.w13.numel() > 2**31
    return shape, weights, make_inputs(shape, "fp8_block128", 6, "random", None, generator)


@each_kernel
def test_more_than_2_31_elements(wide, knobs):
    shape, weights, inputs = wide
    problem = shape.problem(64, "fp8_block128")
    ids = torch.tensor([[143, 0], [142, 143], [0, 1], [127, 128], [129, 143], [143, -1]], dtype=torch.int32, device="cuda")
    plan = BACKEND.plan(problem, knobs=knobs)
    with BACKEND.open_session(plan, BACKEND.prepare_weights(plan, weights)) as session:
        out = session.run(inputs.x, ids, inputs.weights)
    verdict = oracle.judge(out, oracle.compute(problem, weights, inputs.x, ids, inputs.weights), format=problem.format)
    assert verdict.ok, verdict.text


@pytest.mark.parametrize("format", ["fp8_block128", "fp8_tensor", "fp8_tensor_e5m2", "bf16"])
@each_kernel
def test_long_sums_do_not_shrink(knobs, format):
    """Of a sum of FP8 products the tensor cores keep about 14 bits and cut off the rest, towards zero: kernels that let them add up 7168
    products of fp8_tensor gave results 1.8% off."""
    shape = Shape("long", 2, 1, 7168, 2048)
    generator = torch.Generator(device="cuda").manual_seed(1)
    weights = make_weights(shape, format, generator)
    problem = shape.problem(64, format)
    inputs = make_inputs(shape, format, 64, "random", weights.x_scale, generator)
    plan = BACKEND.plan(problem, knobs=knobs)
    with BACKEND.open_session(plan, BACKEND.prepare_weights(plan, weights)) as session:
        out = session.run(inputs.x, inputs.ids, inputs.weights)
    result = oracle.compute(problem, weights, inputs.x, inputs.ids, inputs.weights)
    verdict = oracle.judge(out, result, format=format)
    assert verdict.ok, verdict.text
    got, want = out.double().cpu().numpy(), result.value
    assert abs((got * want).sum() / (want * want).sum() - 1) < 2e-3


def opened(knobs, device):
    trial = make_trial(PROBLEM, tokens=40)
    plan = BACKEND.plan(PROBLEM, knobs=knobs)
    return trial, BACKEND.open_session(plan, BACKEND.prepare_weights(plan, trial.local_weights(0, device)))


@each_kernel
@pytest.mark.parametrize("before", [2**31 - 4, -4], ids=["2^31", "2^32"])
def test_launch_numbers_may_wrap(knobs, before):
    trial, session = opened(knobs, "cuda")
    with session:
        inputs = trial.inputs[0].to("cuda")
        want = session.run(*inputs)
        assert trial.judge(0, want).ok
        session.reset()
        for control in session._workspace.controls.values():
            control[regions.EPOCH : regions.EPOCH + 4].view(torch.int32).fill_(before)
        for _ in range(8):
            assert torch.equal(session.run(*inputs), want)
        torch.cuda.synchronize()
        assert not session._workspace.aborted


@each_kernel
def test_sessions_on_another_device_than_the_current_one(knobs):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs in one process")
    outs = []
    for device in ("cuda:0", "cuda:1"):
        trial, session = opened(knobs, device)
        with session:
            out = session.run(*trial.inputs[0].to(device))
            torch.cuda.synchronize(device)
        assert out.device == torch.device(device)
        assert trial.judge(0, out).ok
        outs.append(out.cpu())
    assert torch.equal(*outs)


@each_kernel
def test_a_closed_session_leaves_no_memory_behind(knobs):
    def held():
        trial, session = opened(knobs, "cuda")
        with session:
            session.run(*trial.inputs[0].to("cuda"))
        del session
        gc.collect()
        return torch.cuda.memory_allocated()

    assert held() == held()


def sanitizer():
    """Path of compute-sanitizer, from the wheel nvidia-cuda-sanitizer-api or a CUDA toolkit, or ``None``."""
    wheels = importlib.util.find_spec("nvidia")
    places = [bin for place in (wheels.submodule_search_locations or () if wheels else ()) for bin in Path(place).glob("*/bin")]
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(map(str, [*places, *os.get_exec_path(), *homes, "/usr/local/cuda/bin"])))


def version_of(sanitizer):
    told = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    return tuple(map(int, re.search(r"Version (\d+)\.(\d+)", told).groups()))


def launch_once():
    """Every kernel on a small shape, from bf16, on the whole GPU and on 4 CTAs; a test starts this under the sanitizer.

    Of 4 CTAs each has 8 of the 32 tasks, with 24 K blocks: it uses its task slots and stages again, as it does on a large layer.
    """
    for ctas in (sessions.multiprocessors(torch.device("cuda")), 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sessions, "multiprocessors", lambda device, ctas=ctas: ctas)
            for knobs in KERNELS:
                trial, session = opened(knobs, "cuda")
                with session:
                    assert trial.judge(0, session.run(*trial.inputs[0].to("cuda"))).ok


LEAST = {"racecheck": (2026, 4)}
"""Versions before take accesses that mbarriers and wgmma order for races (2025.3), or have not been tried."""

TOOLS = {
    # No API errors: cuda-python looks up driver functions that only newer drivers have. Between allocations lies what nobody may touch.
    "memcheck": ("--report-api-errors", "no", "--padding", "512"),
    "racecheck": (),
    "synccheck": (),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_compute_sanitizer_finds_nothing(tool):
    """Nothing is filtered: any finding in any kernel of the process fails, also one in what PyTorch launches.

    What the tools do not see by themselves is judged elsewhere. Memcheck checks no tensor copies (TMA), and leaks only where a context is
    destroyed: the test above. Racecheck knows shared memory only, and there neither tensor copies nor what wgmma reads; the order of those
    and of all accesses to global memory is checked on the machine (test_machine_order.py). Racecheck sees machine code, the machine PTX: a
    load that ptxas widens to a word of another warp is a hazard here even if nobody uses that word.
    """
    found = sanitizer()
    if found is None:
        pytest.skip("compute-sanitizer is not installed (it comes with the CUDA toolkit, or: pip install nvidia-cuda-sanitizer-api)")
    version = version_of(found)
    if version < LEAST.get(tool, version):
        pytest.skip(f"{tool} of {'.'.join(map(str, version))} takes ordered accesses for races (pip install nvidia-cuda-sanitizer-api)")
    launch_once()  # compiles, outside of the tool
    ran = subprocess.run(
        [
            found,
            "--tool",
            tool,
            *TOOLS[tool],
            "--show-backtrace",
            "device",
            "--error-exitcode",
            "9",
            sys.executable,
            "-c",
            "from tests.sm90.test_limits import launch_once; launch_once()",
        ],
        cwd=Path(__file__).parents[2],
        # Every tensor an allocation of its own: else the tool sees only the large ones that torch cuts them from.
        env={**os.environ, "MEGAMOE_TIMEOUT": "120", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    told = f"{ran.stdout[:3000]}\n{ran.stderr[-3000:]}"
    assert ran.returncode == 0, told
    assert re.search(r"SUMMARY: 0 (errors|hazards)\b", ran.stdout), told
    assert "might be incorrect" not in ran.stdout, told  # more mbarriers than the tool follows
