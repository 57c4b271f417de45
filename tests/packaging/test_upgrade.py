"""A newer core beside an arch wheel that was left behind."""

import importlib.metadata
import json
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.environment("upgrade")


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "megamoe", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_record_is_incompatible_before_anything_of_the_wheel_is_imported():
    from megamoe import catalog

    (record,) = (record for record in catalog.backends() if record.name == "sm90")
    assert record.state == "incompatible"
    assert record.spec is None
    assert "megamoe_sm90" not in sys.modules
    text = " ".join(map(str, record.reasons))
    old = importlib.metadata.version("megamoe-sm90")
    assert f"megamoe-core=={old}" in text.replace(" ", "")
    assert "99.0.0" in text
    assert "pip install" in text


def test_asking_for_it_raises_and_the_others_are_untouched():
    from megamoe import BackendIncompatible, catalog, select

    with pytest.raises(BackendIncompatible, match=re.escape("99.0.0")):
        select.choose("sm90")
    assert [record.state for record in catalog.backends() if record.name == "reference"] == ["ok"]


def test_the_commands_report_it():
    listed = run("backends", "--json")
    states = {entry["name"]: entry["state"] for entry in json.loads(listed.stdout)["backends"]}
    assert states == {"reference": "ok", "sm90": "incompatible"}
    assert run("check", "--backend", "sm90").returncode == 1
    diagnosis = run("doctor")
    assert diagnosis.returncode != 0
    assert "megamoe-sm90" in diagnosis.stdout
