"""Public CuTe DSL examples, run as they are: real compiler output, tensor copies, clusters, warp roles. Each judges itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TUTORIAL = "cute/blackwell/tutorial/tutorial_gemm"
BLOCK_SCALED = "cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py"
MXFP8 = "--a_dtype Float8E4M3FN --b_dtype Float8E4M3FN --sf_dtype Float8E8M0FNU --sf_vec_size 32 --c_dtype Float16"
NVFP4 = "--a_dtype Float4E2M1FN --b_dtype Float4E2M1FN --sf_dtype Float8E4M3FN --sf_vec_size 16 --c_dtype Float16"
COOPERATIVE, PINGPONG = (
    f"cute/blackwell_geforce/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_{schedule}.py"
    for schedule in ("cooperative", "pingpong")
)
ONE, TWO = "--mma_tiler_mn 128,128 --cluster_shape_mn 1,1", "--mma_tiler_mn 256,128 --cluster_shape_mn 2,1"

EXAMPLES = {
    "fp16 one CTA": ("sm100", f"{TUTORIAL}/fp16_gemm_0.py", "--mnk 128,256,128"),
    "fp16 pair": ("sm100", f"{TUTORIAL}/fp16_gemm_1.py", "--mnk 256,256,128"),
    "fp16 warp roles": ("sm100", f"{TUTORIAL}/fp16_gemm_2.py", "--mnk 256,256,128"),
    "fp16 persistent": ("sm100", f"{TUTORIAL}/fp16_gemm_3.py", "--mnk 256,256,128"),
    "fp16 launch control": ("sm100", f"{TUTORIAL}/fp16_gemm_3_1.py", "--mnk 256,256,128"),
    "fp16 preferred cluster": ("sm100", f"{TUTORIAL}/fp16_gemm_4.py", "--mnk 512,512,128"),
    "fp16 prefetch": ("sm100", f"{TUTORIAL}/fp16_gemm_5.py", "--mnk 512,512,128"),
    "nvfp4 one CTA": ("sm100", f"{TUTORIAL}/nvfp4_gemm_0.py", "--mnkl 128,256,256,1"),
    "nvfp4 pair": ("sm100", f"{TUTORIAL}/nvfp4_gemm_1.py", "--mnkl 256,256,256,1"),
    "mxfp8 persistent": ("sm100", BLOCK_SCALED, f"{MXFP8} {ONE} --mnkl 128,128,256,1"),
    "mxfp8 persistent pair": ("sm100", BLOCK_SCALED, f"{MXFP8} {TWO} --mnkl 256,128,256,1"),
    "nvfp4 persistent": ("sm100", BLOCK_SCALED, f"{NVFP4} {ONE} --mnkl 128,128,256,1"),
    "nvfp4 persistent pair": ("sm100", BLOCK_SCALED, f"{NVFP4} {TWO} --mnkl 256,128,256,1"),
    "sm120 mxfp8 cooperative": ("sm120", COOPERATIVE, f"{MXFP8} --mnkl 128,128,128,1"),
    "sm120 nvfp4 cooperative": ("sm120", COOPERATIVE, f"{NVFP4} --mnkl 128,128,128,1"),
    "sm120 mxfp8 pingpong": ("sm120", PINGPONG, f"{MXFP8} --mnkl 128,128,128,1"),
    "sm120 nvfp4 pingpong": ("sm120", PINGPONG, f"{NVFP4} --mnkl 128,128,128,1"),
}


@pytest.fixture(scope="module")
def examples():
    folder = os.environ.get("MEGAMOE_CUTLASS_EXAMPLES")
    if not folder:
        pytest.skip("MEGAMOE_CUTLASS_EXAMPLES does not name the folder examples/python/CuTeDSL of NVIDIA/cutlass")
    return Path(folder)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["host", "host:3", pytest.param("gpu", marks=pytest.mark.emulated)])
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(toolkit, examples, tmp_path, name, where):
    arch, script, arguments = EXAMPLES[name]
    command = [sys.executable, str(HERE / "run_example.py"), where, arch, str(examples / script), *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "PASS" in done.stdout
    rewritten, launched = map(int, re.search(r"rewritten: (\d+), launched here: (\d+)", done.stdout).groups())
    assert rewritten
    assert bool(launched) == (where != "gpu")
