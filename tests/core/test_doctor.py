"""Each fault is planted, found, and named with the command that ends it; a healthy installation draws no complaint."""

import importlib.metadata
import re
import types

import pytest

import megamoe
from megamoe import catalog, doctor, nvml
from megamoe.catalog import Record
from megamoe.doctor import cuda_wheels, installed, machine, own_wheels
from megamoe.doctor.installed import Package
from megamoe.protocol import Reason

from .wheels import HOPPER, WORKSTATION, Site, gpus, see_gpus, see_only

BLACKWELL = nvml.Device(0, "NVIDIA B200", "GPU-9", (10, 0), 190_000_000_000)


def site_of(**versions):
    """An installation with these distributions: ``site_of(torch="2.13.0")``, underscores for dashes."""
    return {name.replace("_", "-"): (Package(name.replace("_", "-"), version, "/site"),) for name, version in versions.items()}


def dsl(version, *flavours, base=""):
    parts = {"nvidia_cutlass_dsl": version, "nvidia_cutlass_dsl_libs_base": base or version}
    return site_of(**parts, **{f"nvidia_cutlass_dsl_libs_cu{flavour}": version for flavour in flavours})


def with_driver(*devices, cuda=(13, 0)):
    return nvml.Gpus(devices=devices, driver="570.1", cuda=cuda)


def only(findings):
    (finding,) = findings
    return finding


# Packaging traps


@pytest.mark.parametrize("version", ["4.5.2", "4.7.9", "4.7"])
def test_dsl_flavours_that_overwrite_each_other(version):
    found = only(cuda_wheels.dsl_overwritten(dsl(version, 13)))
    assert found.level == "error"
    assert f"nvidia-cutlass-dsl-libs-cu13 {version}" in found.text
    assert 'pip install --upgrade "nvidia-cutlass-dsl[cu13]>=4.8,<4.9"' in found.fix


@pytest.mark.parametrize("healthy", [dsl("4.8", 12, 13), dsl("4.8.0", 12, 13), dsl("4.10.0", 12, 13), dsl("4.5.2"), {}])
def test_dsl_flavours_that_are_apart_or_alone(healthy):
    assert cuda_wheels.dsl_overwritten(healthy) == []


def test_dsl_parts_that_have_drifted():
    found = only(cuda_wheels.dsl_drift(dsl("4.8.1", 12, 13, base="4.8.0")))
    assert "nvidia-cutlass-dsl-libs-base 4.8.0" in found.text
    assert "nvidia-cutlass-dsl[cu13]" in found.fix
    assert cuda_wheels.dsl_drift(dsl("4.8.1", 12, 13)) == []


@pytest.mark.parametrize(
    ("packages", "gpu", "cuda", "expected"),
    [
        (dsl("4.8.1", 12), BLACKWELL, (13, 0), "CUDA 12 flavour is active for NVIDIA B200"),
        (dsl("4.7.0"), WORKSTATION, (13, 1), "CUDA 12 flavour is active for RTX PRO 6000"),  # before 4.8 the base wheel is CUDA 12
        (dsl("4.8.1", 12, 13), BLACKWELL, (13, 0), ""),
        (dsl("4.8.1", 12), BLACKWELL, (12, 9), ""),  # the driver has no CUDA 13
        (dsl("4.8.1", 12), HOPPER, (13, 0), ""),  # Hopper works with CUDA 12
        (dsl("4.8.1", 13), HOPPER, (12, 8), "is installed for CUDA 13, but the driver 570.1 supports CUDA 12.8 at most"),
        (dsl("4.8.1", 12, 13), HOPPER, (12, 8), ""),  # the older flavour becomes active
        ({}, BLACKWELL, (13, 0), ""),
    ],
)
def test_dsl_flavour_against_driver_and_gpu(packages, gpu, cuda, expected):
    findings = cuda_wheels.dsl_flavour(packages, with_driver(gpu, cuda=cuda))
    assert bool(findings) == bool(expected)
    if expected:
        assert expected in findings[0].text
        assert "nvidia-cutlass-dsl" in findings[0].fix


def test_dsl_flavour_without_a_driver_says_nothing():
    assert cuda_wheels.dsl_flavour(dsl("4.8.1", 13), gpus()) == []


def test_nvshmem_without_its_library():
    found = only(cuda_wheels.nvshmem_library(site_of(nvshmem4py_cu13="0.4.1", nvidia_nvshmem_cu12="3.4"), gpus()))
    assert "nvidia-nvshmem-cu13 is not installed (there is one for CUDA 12)" in found.text
    assert found.fix == "pip install nvidia-nvshmem-cu13"


def test_nvshmem_in_two_flavours():
    both = site_of(nvshmem4py_cu13="0.4.1", nvidia_nvshmem_cu13="3.8", nvshmem4py_cu12="0.4.1", nvidia_nvshmem_cu12="3.8")
    found = only(cuda_wheels.nvshmem_library(both, with_driver(HOPPER, cuda=(12, 8))))
    assert found.fix == "pip uninstall -y nvshmem4py-cu12 nvshmem4py-cu13; pip install nvshmem4py-cu12"


def test_nvshmem_newer_than_the_driver():
    pair = site_of(nvshmem4py_cu13="0.4.1", nvidia_nvshmem_cu13="3.8")
    assert "needs a driver with CUDA 13" in only(cuda_wheels.nvshmem_library(pair, with_driver(HOPPER, cuda=(12, 8)))).text
    assert cuda_wheels.nvshmem_library(pair, with_driver(HOPPER)) == []
    assert cuda_wheels.nvshmem_library(pair, gpus()) == []


def test_torch_without_cuda_beside_a_gpu():
    found = only(cuda_wheels.torch_without_cuda(site_of(torch="2.13.0+cpu"), gpus(HOPPER)))
    assert (found.level, found.fix) == ("error", 'pip install --force-reinstall "torch==2.13.0"')
    assert cuda_wheels.torch_without_cuda(site_of(torch="2.13.0+cpu"), gpus()) == []
    assert cuda_wheels.torch_without_cuda(site_of(torch="2.13.0+cu130"), gpus(HOPPER)) == []


def test_files_written_by_two_distributions():
    ours = {"cute/a.py": "sha256=1", "cute/b.py": "sha256=2", "cute/__init__.py": ""}
    theirs = {"cute/a.py": "sha256=9", "cute/b.py": "sha256=2", "cute/__init__.py": "sha256=4"}
    packages = {
        name: (Package(name, "1", place, files),)
        for name, place, files in (
            ("nvidia-cutlass-dsl-libs-base", "/site", ours),
            ("nvidia-cutlass-dsl-libs-cu13", "/site", theirs),
            ("nvidia-cutlass-dsl-libs-cu14", "/elsewhere", {"cute/a.py": "sha256=7"}),
        )
    }
    found = only(cuda_wheels.overwritten_files(packages))
    assert "nvidia-cutlass-dsl-libs-base and nvidia-cutlass-dsl-libs-cu13 installed 1 file(s)" in found.text
    assert "cute/a.py" in found.text


def test_version_drift_between_our_wheels():
    found = only(own_wheels.version_drift(site_of(megamoe_core=megamoe.__version__, megamoe_sm90="9.9.9")))
    assert "megamoe-sm90 is 9.9.9" in found.text
    assert found.fix == "pip install --upgrade megamoe-core megamoe-sm90"
    same = site_of(megamoe_core=megamoe.__version__, megamoe_sm90=f"{megamoe.__version__}+local")
    assert own_wheels.version_drift(same) == []
    stale = only(own_wheels.version_drift(site_of(megamoe_core="0.0.1")))
    assert stale.fix == "pip install --upgrade megamoe-core"


def test_an_imported_wheel_that_is_not_the_recorded_one():
    modules = {"megamoe_sm90": types.SimpleNamespace(__version__="0.2", __file__="/old/megamoe_sm90/__init__.py")}
    found = only(own_wheels.module_drift(site_of(megamoe_sm90="0.1"), modules))
    assert "0.1 by its metadata, but its package in /old/megamoe_sm90/__init__.py says 0.2" in found.text
    assert own_wheels.module_drift(site_of(megamoe_sm90="0.2"), modules) == []
    assert own_wheels.module_drift(site_of(megamoe_sm90="0.1"), {}) == []


def test_copies_that_shadow_each_other():
    copies = (Package("torch", "2.9.0", "/home/user/site"), Package("torch", "2.13.0", "/site"))
    found = only(own_wheels.shadowed_copies({"torch": copies, "other": (Package("other", "1"), Package("other", "2"))}))
    assert "2.9.0 in /home/user/site, 2.13.0 in /site" in found.text
    assert own_wheels.shadowed_copies({"torch": copies[:1] * 2}) == []


def test_missing_requirements_are_named_together():
    everything = dict.fromkeys(own_wheels.NEEDS, True)
    found = only(own_wheels.missing_requirements({**everything, "rich": False, "importlib_metadata": False}))
    assert found.fix == "pip install importlib-metadata rich"
    assert own_wheels.missing_requirements(everything) == []


def test_the_requirements_looked_for_are_those_of_the_wheel():
    declared = {re.match(r"[\w.-]+", text)[0] for text in importlib.metadata.requires("megamoe-core") if "extra ==" not in text}
    assert set(own_wheels.NEEDS.values()) == declared


def test_files_that_are_gone(tmp_path):
    (tmp_path / "there.py").write_text("")
    files = {"there.py": "", "gone.py": "sha256=1", "__pycache__/gone.pyc": "", "../../bin/megamoe": "sha256=2"}
    found = only(own_wheels.missing_files({"megamoe-sm90": (Package("megamoe-sm90", "0.1", str(tmp_path), files),)}))
    assert "1 file(s) of megamoe-sm90 0.1 are gone, for example gone.py" in found.text


# The machine and the settings


def test_unlike_gpus_numbered_by_speed(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert "PCI_BUS_ID" in only(machine.gpu_order(gpus(HOPPER, WORKSTATION))).fix
    assert machine.gpu_order(gpus(HOPPER, HOPPER)) == []
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert machine.gpu_order(gpus(HOPPER, WORKSTATION)) == []


@pytest.mark.parametrize(("variable", "value"), [("MEGAMOE_TIMEOUT", "soon"), ("MEGAMOE_TIMEOUT", "-1"), ("MEGAMOE_LOG", "loud")])
def test_settings_that_cannot_be_used(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    found = only(machine.settings())
    assert (found.level, found.fix) == ("error", f"unset {variable}")
    assert repr(value) in found.text


def test_names_in_settings_that_nobody_offers(monkeypatch):
    monkeypatch.setenv("MEGAMOE_BACKEND", "sm91")
    monkeypatch.setenv("MEGAMOE_DISABLE", "sm90,sm92")
    found = machine.names_in_settings([Record("sm90", "ok")])
    assert [(f.level, f.fix) for f in found] == [("error", "unset MEGAMOE_BACKEND"), ("note", "")]
    assert "sm92" in found[1].text
    monkeypatch.setenv("MEGAMOE_BACKEND", "auto")
    monkeypatch.setenv("MEGAMOE_DISABLE", "sm90")
    assert machine.names_in_settings([Record("sm90", "ok")]) == []


def test_a_cache_folder_that_cannot_be_made(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / "new" / "deep"))
    assert machine.cache_folder() == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert "MEGAMOE_CACHE_DIR" in only(machine.cache_folder()).fix


@pytest.mark.parametrize(
    ("state", "level"),
    [("broken", "error"), ("ambiguous", "error"), ("incompatible", "error"), ("unavailable", "note"), ("disabled", "note")],
)
def test_backends_that_do_not_run(state, level):
    found = only(machine.backends([Record("m", state, (Reason("this happened", "do that"),)), Record("fine", "ok")]))
    assert (found.level, found.fix) == (level, "do that" if level == "error" else "")
    assert found.text == f"Backend m is {state}: this happened."


# The whole


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An examination that sees an empty site folder and no GPU."""
    planted = Site(tmp_path / "site")
    see_only(monkeypatch, planted.folder)
    monkeypatch.setattr(own_wheels, "missing_requirements", list)
    for name in ("MEGAMOE_TIMEOUT", "MEGAMOE_LOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    return planted


def test_a_bare_machine_is_healthy(site):
    found = doctor.examine()
    assert (found.backend, found.errors) == ("reference", ())
    assert [f.text for f in found.findings] == ["No GPU is visible: no NVIDIA driver."]


def test_errors_come_first_and_every_fault_is_there(site, monkeypatch):
    site.info("nvidia-cutlass-dsl-libs-base", "4.6.0")
    site.info("nvidia-cutlass-dsl-libs-cu13", "4.6.0")
    site.info("nvshmem4py-cu13", "0.4.1")
    site.info("megamoe-sm90", "9.9.9")
    site.wheel("m", "1 / 0")
    see_gpus(monkeypatch, HOPPER)
    found = doctor.examine()
    levels = [f.level for f in found.findings]
    assert levels == sorted(levels, key=["error", "warning", "note"].index)
    text = " ".join(f.text for f in found.errors)
    for part in (
        "overwrite each other's files",
        "nvidia-nvshmem-cu13 is not installed",
        "megamoe-sm90 is 9.9.9",
        "ZeroDivisionError",
        "sm90",
    ):
        assert part in text


def test_a_gpu_without_its_wheel_is_the_verdict(site, monkeypatch):
    see_gpus(monkeypatch, HOPPER)
    found = doctor.examine()
    assert found.backend is None
    assert 'pip install "megamoe-core[sm90]"' in only(found.errors).fix


@pytest.mark.parametrize("victim", ["nvml.gpus", "catalog.refresh", "machine.cache_folder", "cuda_wheels.dsl_drift", "machine.choice"])
def test_a_check_that_fails_is_a_finding_and_the_others_go_on(site, monkeypatch, victim):
    def fail(*args, **kwargs):
        raise RuntimeError("the check broke")

    module, name = victim.split(".")
    fail.__name__ = name
    monkeypatch.setattr({"nvml": nvml, "catalog": catalog, "machine": machine, "cuda_wheels": cuda_wheels}[module], name, fail)
    monkeypatch.setenv("MEGAMOE_TIMEOUT", "soon")
    found = doctor.examine()
    assert any("itself failed: RuntimeError: the check broke" in f.text for f in found.findings)
    assert any("MEGAMOE_TIMEOUT" in f.text for f in found.errors)


def test_the_snapshot_reads_what_is_installed(site):
    info = site.info("nvshmem4py-cu13", "0.4.1")
    (info / "RECORD").write_text('nvshmem/__init__.py,sha256=abc,10\n"a,b.py",,\n')
    site.info("Other_Thing", "2")
    (site.folder / "husk-1.dist-info").mkdir()
    (package,) = installed.snapshot()["nvshmem4py-cu13"]
    assert (package.version, package.location) == ("0.4.1", str(site.folder))
    assert package.files == {"nvshmem/__init__.py": "sha256=abc", "a,b.py": ""}
    assert installed.version(installed.snapshot(), "other-thing") == "2"
    assert "husk" not in installed.snapshot()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4.8.1", (4, 8, 1)),
        ("4.10", (4, 10)),
        ("2.13.0+cu130", (2, 13, 0)),
        ("2.13+cu13.4", (2, 13)),
        ("4.8.0rc1", (4, 8, 0)),
        ("4.8.dev3", (4, 8)),
        ("", ()),
    ],
)
def test_numbers_of_a_version(text, expected):
    assert installed.numbers(text) == expected
