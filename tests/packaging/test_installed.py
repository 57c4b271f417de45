"""One arch wheel beside core, as a user installs it: everything comes from the wheels in dist/, nothing from the checkout."""

import csv
import importlib
import importlib.metadata
import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.environment("wheel", "wheel_tests")

ROOT = Path(__file__).resolve().parents[2]
ARCHS = {"sm90", "sm100", "sm120"}


@pytest.fixture
def arch(request):
    return request.config.getoption("--wheel")


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_both_packages_are_in_this_environment_and_nothing_of_the_checkout_is_on_the_path(arch):
    purelib = Path(sysconfig.get_paths()["purelib"]).resolve()
    for name in ("megamoe", f"megamoe_{arch}"):
        assert Path(importlib.import_module(name).__file__).resolve().is_relative_to(purelib)
    packages = ROOT / "packages"
    assert not [path for path in sys.path if Path(path).resolve().is_relative_to(packages)]


def test_the_extra_brought_this_wheel_and_no_other(arch):
    found = {distribution.name for distribution in importlib.metadata.distributions() if distribution.name.startswith("megamoe")}
    assert found == {"megamoe-core", f"megamoe-{arch}"}


def test_what_is_installed_is_what_was_built(arch):
    for name in ("megamoe_core", f"megamoe_{arch}"):
        installed = importlib.metadata.distribution(name.replace("_", "-"))
        (wheel,) = (ROOT / "dist").glob(f"{name}-{installed.version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (record,) = (file for file in archive.namelist() if file.endswith(".dist-info/RECORD"))
            built = {row[0]: row[1] for row in csv.reader(archive.read(record).decode().splitlines()) if row[1]}
        here = {str(file): f"{file.hash.mode}={file.hash.value}" for file in installed.files if file.hash}
        assert built.items() <= here.items()
        assert len(built) > 5


def test_importing_loads_neither_torch_nor_cutlass(arch):
    done = run("-c", f"import sys, megamoe, megamoe_{arch}; print(sorted({{'torch', 'cutlass', 'numpy'}} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


def test_it_is_found_by_its_entry_point_and_says_truly_whether_it_can_run(arch):
    from megamoe import nvml

    done = run("-m", "megamoe", "backends", "--json")
    found = {entry["name"]: entry for entry in json.loads(done.stdout)["backends"]}
    assert found.keys() == {"reference", arch}
    assert found["reference"]["state"] == "ok"
    spec = importlib.import_module(f"megamoe_{arch}").SPEC
    capabilities = {device.capability for device in nvml.gpus().devices}
    fits = any(have in spec.archs or (have[0], None) in spec.archs for have in capabilities)
    assert found[arch]["state"] == ("ok" if fits and not spec.missing else "unavailable")
    if found[arch]["state"] != "ok":
        assert found[arch]["reasons"]


def test_a_kernel_drop_is_installed_as_it_was_recorded(arch):
    package = Path(importlib.import_module(f"megamoe_{arch}").__file__).parent
    if not (package / "drop.toml").exists():
        assert not list(package.glob("_drop/**/*.py")), "kernels without drop.toml"
        pytest.skip(f"megamoe-{arch} carries no kernel drop yet")
    for action in ("verify", "audit"):
        done = run("-m", "megamoe", "drop", action, f"megamoe-{arch}")
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_other_arch_wheels_are_named_with_the_command_that_installs_them(arch):
    import megamoe

    for other in ARCHS - {arch}:
        with pytest.raises(megamoe.BackendNotFound, match=rf"No backend named '{other}'.*pip install \"megamoe-core\[{other}\]\""):
            megamoe.get_backend(other)
