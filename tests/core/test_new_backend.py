"""``megamoe new-backend``: the wheel it writes proves itself, and it writes whole or not at all."""

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megamoe import InvalidInput, MegaMoEError
from megamoe.cli import main
from megamoe.cli.new_backend import new_backend
from megamoe.drop.audit import audit
from megamoe.drop.update import update
from megamoe.drop.verify import verify

from .drop_trees import PACKAGES, PLAIN, edit, snapshot, write_tree


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere") / "wheel"
    new_backend("acme_x", folder)
    return folder


@pytest.fixture(scope="module")
def installed(project, tmp_path_factory):
    """The wheel as an installer lays it out, with what its pyproject.toml declares; and how to run Python there."""
    site = tmp_path_factory.mktemp("site")
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    for path in (project / "src").rglob("*"):
        if path.is_file():
            write_tree(site, {path.relative_to(project / "src").as_posix(): path.read_bytes()})
    entries = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in table.items())
        for group, table in declared["entry-points"].items()
    ]
    requires = "".join(f"Requires-Dist: {line}\n" for line in declared["dependencies"])
    metadata = f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: 0.1.0\n{requires}"
    info = {"METADATA": metadata.encode(), "entry_points.txt": "".join(entries).encode()}
    write_tree(site / f"{declared['name'].replace('-', '_')}-0.1.0.dist-info", info)

    def run(*words, **more):
        path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *words], cwd=site.parent, env=environment, capture_output=True, text=True, check=False, **more
        )

    return run


def test_it_passes_the_conformance_kit(project, installed):
    ran = installed("-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", str(project / "tests"))
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
    last = ran.stdout.strip().splitlines()[-1]
    assert int(last.split(" passed")[0]) >= 20, last


def test_it_is_found_and_its_kernels_are_checked(installed):
    found = json.loads(installed("-m", "megamoe", "backends", "--json").stdout)
    (record,) = [record for record in found["backends"] if record["name"] == "acme_x"]
    assert record["state"] == "ok"
    for action in ("verify", "audit"):
        ran = installed("-m", "megamoe", "drop", action, "megamoe-acme-x", "--json")
        assert (ran.returncode, json.loads(ran.stdout)["ok"]) == (0, True), ran.stdout


def test_importing_it_loads_neither_torch_nor_kernels(installed):
    code = "import sys, megamoe_acme_x; print(sorted({'torch', 'cutlass', 'megamoe_acme_x._drop'} & set(sys.modules)))"
    assert installed("-c", code).stdout == "[]\n"


def test_audit_guards_its_contract(project, tmp_path):
    copy = write_tree(tmp_path / "copy", {p.relative_to(project).as_posix(): p.read_bytes() for p in project.rglob("*") if p.is_file()})
    package = copy / "src/megamoe_acme_x"
    assert audit(copy).checks == 4
    edit(package / "_drop/moe_torch/kernel.py", b"limit: float | None, alpha: float", b"alpha: float, limit: float | None")
    edit(package / "shim/launch.py", b"_NO_ROUTE = -1", b"_NO_ROUTE = -2")
    problems = audit(copy).problems
    assert [(Path(p.file).name, p.text) for p in problems] == [
        ("kernel.py", "MoEKernel: parameters were reordered"),
        ("launch.py", "_NO_ROUTE, our copy of moe_torch.kernel.NO_ROUTE, has another value"),
    ]


def test_a_drop_takes_the_place_of_its_kernel(tmp_path):
    new_backend("taker", tmp_path / "wheel")
    package = tmp_path / "wheel/src/megamoe_taker"
    source = write_tree(tmp_path / "upstream", PLAIN)
    with pytest.raises(MegaMoEError, match="first-party"):
        update(tmp_path / "wheel", source, PACKAGES)
    for path in [*(package / "_drop/moe_torch").iterdir(), package / "drop.toml"]:
        path.unlink()
    update(tmp_path / "wheel", source, PACKAGES)
    assert verify(tmp_path / "wheel").ok


def test_every_python_file_parses_and_no_placeholder_is_left(project):
    files = [path for path in project.rglob("*") if path.is_file()]
    inside = ("py.typed", "drop.toml", "shim/contract.toml", "_drop/moe_torch/kernel.py")
    expected = {"pyproject.toml", "README.md", *(f"src/megamoe_acme_x/{name}" for name in inside)}
    assert expected <= {path.relative_to(project).as_posix() for path in files}
    for path in files:
        text = path.read_text()
        assert "$" not in text, path
        assert "PACKAGE" not in str(path)
        if path.suffix == ".py":
            ast.parse(text)
        elif path.suffix == ".toml":
            tomllib.loads(text)


def test_the_kit_without_pytest_names_the_extra_that_brings_it():
    code = "import sys; sys.modules['pytest'] = None; import megamoe.testing.conformance"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'ImportError: The conformance kit needs pytest. Fix: pip install "megamoe-core[testing]"' in ran.stderr


def test_its_own_tests_need_what_the_kit_needs(project):
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert [Requirement(text).name for text in declared["dependencies"]] == ["megamoe-core", "torch"]
    (needed,) = map(Requirement, declared["optional-dependencies"]["test"])
    assert (needed.name, needed.extras, needed.specifier) == (
        "megamoe-core",
        {"testing"},
        Requirement(declared["dependencies"][0]).specifier,
    )


NAMES = ["", "Acme", "9x", "a-b", "a.b", "../x", "acme_", "a__b", "_x", "reference", "auto", "core", "sm90", "sm100", "sm120"]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_do_not_work(tmp_path, name, capsys, monkeypatch):
    """Also where the wheel of that name is not installed: the new one would take its place in an index or an environment."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    assert main(["new-backend", "--", name, str(tmp_path / "wheel")]) == 2
    assert "InvalidInput" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_folder_in_use(tmp_path):
    write_tree(tmp_path / "wheel", {"mine.txt": b"keep"})
    before = snapshot(tmp_path)
    with pytest.raises(InvalidInput, match="a new or an empty folder"):
        new_backend("acme", tmp_path / "wheel")
    assert snapshot(tmp_path) == before
    (tmp_path / "empty").mkdir()
    assert "pyproject.toml" in new_backend("acme", tmp_path / "empty")


def test_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(MegaMoEError, match="disk full"):
        new_backend("acme", tmp_path / "wheel")
    assert list(tmp_path.iterdir()) == []


def test_what_the_command_says(tmp_path, capsys):
    assert main(["new-backend", "acme", str(tmp_path / "wheel"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["distribution"], found["package"]) == ("megamoe-acme", "megamoe_acme")
    assert set(found["files"]) == {p.relative_to(tmp_path / "wheel").as_posix() for p in (tmp_path / "wheel").rglob("*") if p.is_file()}
    assert main(["new-backend", "acme", str(tmp_path / "other")]) == 0
    assert f"cd {tmp_path / 'other'}" in capsys.readouterr().out
