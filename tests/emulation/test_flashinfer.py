"""FlashInfer's MoE megakernels: real code of other people, whole layers. They are compiled, rewritten, assembled, and run with every output
compared with a reference of our own: a small layer on the CPU's machine (``tests/machine``), a larger one emulated on a Hopper GPU.

The kernels come from the folder that MEGAMOE_FLASHINFER names (flashinfer/moe_ep/kernel_src of the wheel), else from the wheel itself,
which is fetched for the test and thrown away.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WHEEL = "flashinfer-python==0.7.2.post1"
KERNELS = "flashinfer/moe_ep/kernel_src/"
TREES = ("sm100/cutedsl_megamoe/src/", "sm120/swapab_cutedsl_megakernel/src/")
CTA_REGISTERS = 65536
FORMS = {
    "sm120": {"mma.sync block_scale", "cvt to ue8m0", "cvt ue8m0 to bf16", "stmatrix b8", "tensor load"},
    "sm100 one CTA": {"tcgen05.mma", "tcgen05.cp", "tcgen05.ld, st", "tcgen05.commit", "f32x2", "cvt f32 to fp4, fp6", "tensor store"},
    "sm100 pair": {"tcgen05.mma", "tcgen05.cp", "tcgen05.commit", "tensor load"},
    "sm120 standalone return": {"mma.sync block_scale", "stmatrix b8"},
    "sm100 reduce": {"tcgen05.mma", "f32x2"},
}  # fmt: skip
"""What each variant that gives right results uses, simplest first."""
PADDING = 64
"""Rows that SM120 pads an expert's tokens to."""

pytestmark = [pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def flashinfer(tmp_path_factory):
    """The folder with the kernels' trees."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile kernels")
    pytest.importorskip("torch", reason="needs torch for the kernels' tensors")
    folder = os.environ.get("MEGAMOE_FLASHINFER")
    if folder:
        return Path(folder)
    fetched = tmp_path_factory.mktemp("flashinfer")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(fetched), WHEEL]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        reason = (ran.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        pytest.skip(f"MEGAMOE_FLASHINFER is not set and {WHEEL} cannot be fetched here: {reason}")
    (wheel,) = fetched.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(fetched, [name for name in archive.namelist() if any(name.startswith(KERNELS + tree) for tree in TREES)])
    wheel.unlink()
    return fetched / KERNELS


def run(flashinfer, tmp_path, where, variant, *size):
    command = [sys.executable, str(HERE / "run_flashinfer.py"), where, str(flashinfer), variant, *size]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(variant, found)
    return found


@pytest.mark.parametrize("where", ["machine", pytest.param("gpu", marks=pytest.mark.emulated)])
@pytest.mark.parametrize("variant", FORMS)
def test_no_output_is_wrong(toolkit, flashinfer, tmp_path, variant, where):
    found = run(flashinfer, tmp_path, where, variant)
    assert FORMS[variant] <= {form for forms in found["forms"] for form in forms}
    assert found["notes"] == []  # nothing is left to a single thread
    assert found["kernels"]
    for kernel in found["kernels"]:
        assert kernel["threads"] * kernel["registers"] <= CTA_REGISTERS, kernel
    assert found["wrong"] == 0, found
    assert found["close"] > 0.9, found  # the others are sums of bfloat16 terms


@pytest.mark.parametrize(("variant", "seed"), [("sm120", 2), ("sm100 pair", 5)])
def test_no_output_is_wrong_when_operations_are_delayed(toolkit, flashinfer, tmp_path, variant, seed):
    found = run(flashinfer, tmp_path, f"machine:{seed}", variant)
    assert {"delayed"} <= {form for forms in found["forms"] for form in forms}
    assert found["wrong"] == 0, found


@pytest.mark.parametrize("where", ["machine", pytest.param("gpu", marks=pytest.mark.emulated)])
def test_the_reported_fault_of_the_tile_of_128_tokens_shows(toolkit, flashinfer, tmp_path, where):
    """On hardware this tile gives wrong results, FlashInfer therefore does not choose it. Experts are padded to 64 rows, finished tiles of
    the first product are counted for each 128: an expert that begins halfway shares the counter of the one before, whose tiles let its
    second product begin too early, with what nobody has written yet.

    In a small launch experts come one after the other, and that counter is full when the second expert begins. With a CTA for every tile
    all experts' first products end together, and the fault hangs on who is first: an H200 that emulated that gave no wrong output."""
    found = run(flashinfer, tmp_path, where, "sm120 128 tokens", "small")
    assert found["wrong"] > 0
    assert not found["error"] <= 0.05, "NaN: what was read too early is poison"
    assert found["wrong_experts"]
    assert all(found["first_rows"][expert] % (2 * PADDING) == PADDING for expert in found["wrong_experts"]), found


def test_the_reported_illegal_access_of_the_sum_inside_the_kernel_shows(toolkit, flashinfer, tmp_path):
    """Not on a GPU: the access is out of bounds there, too."""
    with pytest.raises(AssertionError, match=r"bytes at global address .* lie in no buffer of the launch"):
        run(flashinfer, tmp_path, "machine", "sm120 reduce")


@pytest.mark.emulated
def test_a_layer_takes_less_than_five_seconds(toolkit, flashinfer, tmp_path):
    """128 tokens, hidden 2048. Rewriting included, with its result on disk from the first run, imports and CuTe DSL's compiler are not."""
    for _ in range(2):
        found = run(flashinfer, tmp_path, "gpu", "sm100 one CTA", "large")
        assert found["wrong"] == 0, found
    assert found["rewritten"] + found["launched"] < 5, found
