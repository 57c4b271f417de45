"""All four wheels in one environment and one process."""

import importlib
import importlib.metadata
import json
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.environment("coexist")

PACKAGES = ("megamoe", "megamoe_sm90", "megamoe_sm100", "megamoe_sm120")


def test_every_package_imports_beside_the_others_without_torch_and_cutlass():
    code = f"import sys, {', '.join(PACKAGES)}; print(sorted({{'torch', 'cutlass'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_they_are_of_one_version_and_bring_four_top_level_names():
    names = ["megamoe-core", *(package.replace("_", "-") for package in PACKAGES[1:])]
    distributions = [importlib.metadata.distribution(name) for name in names]
    assert len({distribution.version for distribution in distributions}) == 1
    tops = {file.parts[0] for d in distributions for file in d.files if ".." not in file.parts and not file.parts[0].endswith(".dist-info")}
    assert tops == set(PACKAGES)


def test_loading_every_backend_leaves_the_path_alone_and_brings_no_other_top_level_name():
    from megamoe import BackendUnavailable, catalog, select

    before = list(sys.path)
    loaded = set()
    for record in catalog.backends():
        if record.spec.missing:  # no kernel yet is the only good excuse
            with pytest.raises(BackendUnavailable, match=re.escape(record.spec.missing)):
                select.load_backend(record.name)
        else:
            loaded.add(select.load_backend(record.name).spec.name)
    assert "reference" in loaded
    assert sys.path == before
    assert not {"common", "src", "shim", "_drop"} & set(sys.modules)


def test_the_list_of_backends_holds_all_four_in_natural_order():
    done = subprocess.run([sys.executable, "-m", "megamoe", "backends", "--json"], capture_output=True, text=True, check=False)
    found = [(entry["name"], entry["state"]) for entry in json.loads(done.stdout)["backends"]]
    assert [name for name, _ in found] == ["reference", "sm90", "sm100", "sm120"]
    assert {state for _, state in found} <= {"ok", "unavailable"}
    for name in PACKAGES[1:]:
        assert importlib.import_module(name).SPEC.name == name.removeprefix("megamoe_")
