"""GPUs as the driver's library reports them, read through a library compiled here, and CUDA_VISIBLE_DEVICES as the CUDA driver reads it."""

import ctypes
import shutil
import subprocess
import sys

import pytest

from megamoe import nvml

UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]

# The functions and struct layouts of NVIDIA's public nvml.h, for a machine with two Hoppers and a workstation card; the second Hopper is
# cut into slices.
LIBRARY = r"""
#include <stdio.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
static int open_count;
static const char *uuids[] = {"GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3", "MIG-slice"};
static const char *names[] = {"NVIDIA H200", "NVIDIA H200", "RTX PRO 6000", "NVIDIA H200 MIG 1g.18gb"};
static int major_[] = {9, 9, 12}, minor_[] = {0, 0, 0};
static char handles[4];
int nvmlInit_v2(void) { open_count++; return FAIL_INIT; }
int nvmlShutdown(void) { open_count--; return 0; }
int opened(void) { return open_count; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "Other"; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { snprintf(out, n, "580.65.06"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13010; return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = COUNT; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out) { *out = &handles[i]; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    for (int i = 0; i < 4; i++) if (!strcmp(uuid, uuids[i])) { *out = &handles[i]; return 0; }
    return 6;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *h, void **out) { if (h != &handles[3]) return 2; *out = &handles[1]; return 0; }
int nvmlDeviceGetUUID(void *h, char *out, unsigned n) { snprintf(out, n, "%s", uuids[(char *)h - handles]); return 0; }
int nvmlDeviceGetName(void *h, char *out, unsigned n) { snprintf(out, n, "%s", names[(char *)h - handles]); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) {
    int i = (char *)h - handles; if (i > 2) return 2; *a = major_[i]; *b = minor_[i]; return 0;
}
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) { m->total = 141ull << 30; m->free = m->used = 0; return 0; }
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler to build a stand-in for the driver's library")
    folder = tmp_path_factory.mktemp("nvml")

    def make(fail=0, count=3):
        source = folder / "nvml.c"
        source.write_text(LIBRARY)
        out = folder / f"nvml_{fail}_{count}.so"
        subprocess.run([compiler, "-shared", "-fPIC", f"-DFAIL_INIT={fail}", f"-DCOUNT={count}", "-o", out, source], check=True)
        return ctypes.CDLL(str(out))

    return make


@pytest.fixture
def ask(build, monkeypatch):
    def query(wish=None, **machine):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if wish is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wish)
        library = build(**machine)
        found = nvml.query(lambda name: library if name == "libnvidia-ml.so.1" else pytest.fail(name))
        assert library.opened() == (1 if machine.get("fail") else 0)  # closed again, so that a fork inherits nothing
        return found

    return query


def test_every_field_of_every_gpu(ask):
    found = ask()
    assert (found.driver, found.cuda, found.hidden, found.problem) == ("580.65.06", (13, 1), 0, "")
    memory = 141 * 2**30
    assert found.devices == (
        nvml.Device(0, "NVIDIA H200", "GPU-aaaa-1", (9, 0), memory),
        nvml.Device(1, "NVIDIA H200", "GPU-aabb-2", (9, 0), memory),
        nvml.Device(2, "RTX PRO 6000", "GPU-cccc-3", (12, 0), memory),
    )


def test_devices_are_numbered_as_the_process_sees_them(ask):
    found = ask("2,0")
    assert [(d.index, d.uuid, d.capability) for d in found.devices] == [(0, "GPU-cccc-3", (12, 0)), (1, "GPU-aaaa-1", (9, 0))]
    assert found.hidden == 1


def test_a_slice_has_its_parents_capability(ask):
    (only,) = ask("MIG-slice").devices
    assert (only.name, only.uuid, only.capability) == ("NVIDIA H200 MIG 1g.18gb", "MIG-slice", (9, 0))


def test_hidden_gpus_are_not_there_and_the_reason_is_said(ask):
    found = ask("")
    assert (found.devices, found.hidden, found.driver) == ((), 3, "580.65.06")
    assert found.problem == "CUDA_VISIBLE_DEVICES='' hides all 3 GPUs"


def test_a_driver_that_does_not_answer(ask):
    found = ask(fail=9)
    assert (found.devices, found.problem) == ((), "the NVIDIA driver does not answer: nvmlInit_v2: Driver Not Loaded")


def test_a_driver_without_gpus(ask):
    assert ask(count=0).problem == "the NVIDIA driver finds no GPU"


def test_no_driver():
    def load(name):
        raise OSError(f"{name}: cannot open shared object file")

    found = nvml.query(load)
    assert (found.devices, found.driver) == ((), None)
    assert "libnvidia-ml.so.1 not found" in found.problem


def test_a_library_too_old_to_have_a_function():
    assert "no nvmlInit_v2" in nvml.query(lambda name: object()).problem


# What CUDA's documentation and torch.cuda's own reading of the variable say of each value.
VISIBLE = {
    None: [0, 1, 2],
    "": [],
    " ": [],
    "0": [0],
    " 1 , 0 ": [1, 0],
    "0,1,2": [0, 1, 2],
    "2,7,0": [2],  # ends before the first that does not exist
    "-1": [],
    "1,-1,0": [1],
    "1,1": [],  # named twice: none at all
    "1,none,0": [1],
    "1 apple,2": [1, 2],  # leading digits count
    "GPU-cccc-3,GPU-aaaa-1": [2, 0],
    "GPU-c": [2],  # a unique beginning
    "GPU-aa": [],  # two begin so
    "GPU-aab": [1],
    "GPU-x,0": [],
    "MIG-nowhere,0": [],
    "0,": [0],
}


@pytest.mark.parametrize("wish", VISIBLE)
def test_visible_devices_as_the_driver_reads_them(wish):
    assert nvml.visible(wish, UUIDS) == [UUIDS[i] for i in VISIBLE[wish]]


def test_asked_once_until_refreshed(monkeypatch):
    answers = iter([nvml.Gpus(problem="first"), nvml.Gpus(problem="second")])
    monkeypatch.setattr(nvml, "query", lambda: next(answers))
    monkeypatch.setattr(nvml, "_known", None)
    assert [nvml.gpus().problem, nvml.gpus().problem, nvml.gpus(refresh=True).problem] == ["first", "first", "second"]


@pytest.mark.gpu
def test_agrees_with_torch_and_starts_no_cuda():
    code = """
from megamoe import nvml
found = nvml.query().devices
import torch
assert not torch.cuda.is_initialized()
assert len(found) == torch.cuda.device_count()
for d in found:
    p = torch.cuda.get_device_properties(d.index)
    assert (d.name, d.capability) == (p.name, (p.major, p.minor)), (d, p)
    assert d.uuid.removeprefix('GPU-').startswith(str(p.uuid)) or d.uuid.startswith('MIG-'), (d, p)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
