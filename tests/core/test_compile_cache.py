"""Compiling a small kernel without a GPU and finding it again: from other processes, folders, Python versions, and not after an edit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

KERNEL = """
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

class Scale:
    def __init__(self, threads):
        self.threads = threads

    @cute.jit
    def __call__(self, address: Int64, factor: Float32, n: Int32, stream: cuda.CUstream):
        self.kernel(address, factor, n).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, address: Int64, factor: Float32, n: Int32):
        thread, _, _ = cute.arch.thread_idx()
        data = cute.make_tensor(cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(n))
        if thread < n:
            data[thread] = data[thread] * factor

def parts(threads):
    return Scale(threads), (Int64(0), Float32(1.0), Int32(1), cuda.CUstream(0))
"""

SCRIPT = """
import json, logging, sys
from pathlib import Path
logging.basicConfig()
from megamoe.compile import cubin
from megamoe.compile.obtain import function, obtain
from megamoe.compile.request import KernelRequest
from megamoe.compile.store import Store

def build():
    from toydrop.kernel import parts
    return parts(threads)

threads, arch = int(sys.argv[2]), sys.argv[3]
request = KernelRequest("toy", ("toydrop",), {"threads": threads}, arch, build)
store = Store(Path(sys.argv[1]))
got = obtain(request, store)
try:
    function(request, store)()
except TypeError as error:
    signature = str(error)
image, = cubin.images(got.object)
kernel, = cubin.resources(image)
print(json.dumps({"hit": got.hit, "digest": got.digest, "signature": signature, "registers": kernel.registers, "stack": kernel.stack_bytes,
                  "kernel": kernel.kernel, "python": sys.version_info[:2]}))
"""


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "src"
    (folder / "toydrop").mkdir(parents=True)
    (folder / "toydrop" / "__init__.py").touch()
    (folder / "toydrop" / "kernel.py").write_text(KERNEL)
    return folder


def compiled(
    store: Path, folder: Path, *, threads: int = 64, arch: str = "sm_90a", python: str = sys.executable, **environment: str
) -> dict:
    env = {**os.environ, **environment}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]))
    done = subprocess.run(
        [python, "-c", SCRIPT, str(store), str(threads), arch],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def test_second_process_and_other_folder_hit(place, tmp_path):
    first = compiled(tmp_path / "store", place)
    assert not first["hit"]
    assert "address: int64" in first["signature"]
    assert first["registers"] > 0
    assert first["stack"] == 0
    elsewhere = tmp_path / "another" / "place"
    elsewhere.parent.mkdir()
    (place).rename(elsewhere)
    second = compiled(tmp_path / "store", elsewhere)
    assert second["hit"]
    assert (second["digest"], second["signature"]) == (first["digest"], first["signature"])


def test_edited_source_configuration_and_architecture_miss(place, tmp_path):
    digests = [compiled(tmp_path / "store", place)["digest"]]
    other = compiled(tmp_path / "store", place, threads=128)
    assert not other["hit"]
    digests.append(other["digest"])
    other = compiled(tmp_path / "store", place, arch="sm_100a")
    assert not other["hit"]
    digests.append(other["digest"])
    source = place / "toydrop" / "kernel.py"
    source.write_text(KERNEL.replace("* factor", "+ factor"))
    other = compiled(tmp_path / "store", place)
    assert not other["hit"]
    assert len({*digests, other["digest"]}) == 4
    source.write_text(KERNEL)
    assert compiled(tmp_path / "store", place)["hit"]


def test_damaged_object_is_compiled_again(place, tmp_path):
    digest = compiled(tmp_path / "store", place)["digest"]
    path = tmp_path / "store" / f"{digest}.o"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = compiled(tmp_path / "store", place)
    assert not again["hit"]
    assert "SHA-256 differs" in again["stderr"]
    assert compiled(tmp_path / "store", place)["hit"]


def test_many_processes_compile_once(place, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: compiled(tmp_path / "store", place), range(4)))
    assert [r["hit"] for r in results].count(False) == 1
    assert {path.suffix for path in (tmp_path / "store").iterdir()} == {".o", ".json", ".lock"}


def test_cache_folder_that_cannot_be_written_is_a_warning(place, tmp_path):
    (tmp_path / "file").touch()
    got = compiled(tmp_path / "file" / "store", place)
    assert not got["hit"]
    assert "address: int64" in got["signature"]
    assert "cannot be written" in got["stderr"]


def test_other_python_version_hits(place, tmp_path):
    """The other interpreter is named by OTHER_PYTHON, its CuTe DSL and this source tree by OTHER_PYTHONPATH (nox sets both)."""
    python = os.environ.get("OTHER_PYTHON")
    if not python:
        pytest.skip("no second Python with CuTe DSL: set OTHER_PYTHON (and OTHER_PYTHONPATH), or run `nox -s compile-python`")
    first = compiled(tmp_path / "store", place)
    second = compiled(tmp_path / "store", place, python=python, PYTHONPATH=os.environ.get("OTHER_PYTHONPATH", ""))
    assert second["python"] != first["python"]
    assert second["hit"]
    assert second["signature"] == first["signature"]
