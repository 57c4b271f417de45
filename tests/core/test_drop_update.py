"""Updating: what is left out, what is reported, and that an update happens whole or not at all."""

import datetime
from pathlib import Path

import pytest

from megamoe import DropError
from megamoe.drop import manifest as manifests
from megamoe.drop.diff import SymbolChange, diff
from megamoe.drop.update import update
from megamoe.drop.verify import verify

from .drop_trees import PACKAGES, PLAIN, make_wheel, snapshot, write_tree

LEAVINGS = {
    "common/__pycache__/a.cpython-311.pyc": b"\0",
    "moe_x/benchmark_data/sweep.csv": b"1,2\n",
    "moe_x/core.python.123": b"\0",
    "moe_x/weights.npz": b"\0",
    ".git/config": b"",
    "ci/run.sh": b"",
    "tester/solver.py": b"import common\n",
    "tests/test_x.py": b"import common\n",
    "pyproject.toml": b"",
    "dispatch_test.py": b"import common\n",
    "README.md": b"",
}


def test_caches_blobs_and_scaffolding_stay_out(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", {**PLAIN, **LEAVINGS}), make_wheel(tmp_path)
    assert set(update(wheel, source, PACKAGES).manifest.files) == set(PLAIN)
    assert set(manifests.tree_files(wheel)) == {*PLAIN, "__init__.py"}
    with pytest.raises(DropError, match=r"package 'tester' is left out by the pattern '/tester'"):
        update(wheel, source, [*PACKAGES, "tester"])


def test_what_stays_out_is_overridden_in_the_manifest(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", {**PLAIN, **LEAVINGS}), make_wheel(tmp_path)
    text = 'schema = 1\nexclude = ["__pycache__", "*.npz", "core.python.*", "/moe_x/notes.*"]\n'
    (wheel / "drop.toml").write_text(text)
    done = update(wheel, source, PACKAGES)
    assert set(done.manifest.files) == {*PLAIN, "moe_x/benchmark_data/sweep.csv"} - {"moe_x/notes.txt"}
    assert done.manifest.exclude == ("__pycache__", "*.npz", "core.python.*", "/moe_x/notes.*")
    assert update(wheel, source).manifest == done.manifest


def test_what_an_update_reports(tmp_path):
    files = {
        **PLAIN,
        "moe_x/runner.py": b"import sys, torch\nsys.path.insert(0, '..')\nfrom tester.solver import solve\nfrom common.gone import x",
        "moe_x/late.py": b"import importlib\ndef load(name):\n    return importlib.import_module(name)\n",
    }
    done = update(make_wheel(tmp_path), write_tree(tmp_path / "upstream", files), PACKAGES)
    assert done.external == ("tester", "torch")
    notes = [(note.file.rpartition("/")[2], note.line, note.text.split(",")[0].split(";")[0]) for note in done.notes]
    assert notes == [
        ("late.py", 3, "importlib.import_module(...) looks a module up under a name known only at run time"),
        ("runner.py", 2, "edits sys.path"),
        ("runner.py", 4, "imports common.gone"),
    ]


def test_defaults(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", PLAIN), make_wheel(tmp_path)
    before = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = update(wheel, source, PACKAGES).manifest
    assert made.upstream == "upstream"
    assert before <= made.date <= datetime.datetime.now(datetime.UTC).date().isoformat()
    update(wheel, source, upstream="acme", date="2026-01-02")
    made = update(wheel, source, commit="beef").manifest
    assert (made.upstream, made.commit, made.packages) == ("acme", "beef", PACKAGES)


def test_new_drop_replaces_the_old_one(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", PLAIN), make_wheel(tmp_path)
    update(wheel, source, PACKAGES)
    (wheel / "_drop/__init__.py").write_text('"""Ours."""\n')
    newer = {name: data for name, data in PLAIN.items() if not name.startswith("src/")}
    newer.update({"moe_x/kernel.py": b"from common.constants import BLOCK\n", "moe_x/more.py": b""})
    done = update(wheel, write_tree(tmp_path / "newer", newer), ["common", "moe_x"])
    assert (done.added, done.removed, done.changed) == (
        ("moe_x/more.py",), ("src/__init__.py", "src/runtime.py"), ("moe_x/kernel.py",),
    )  # fmt: skip
    assert set(manifests.tree_files(wheel)) == {*newer, "__init__.py"}
    assert (wheel / "_drop/__init__.py").read_text() == '"""Ours."""\n'
    assert verify(wheel).ok


def test_dry_run_writes_nothing(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", PLAIN), make_wheel(tmp_path)
    before = snapshot(tmp_path)
    done = update(wheel, source, PACKAGES, dry_run=True)
    assert (done.written, len(done.added)) == (False, len(PLAIN))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("step", range(8))
@pytest.mark.parametrize("operation", ["write_bytes", "write_text", "rename", "mkdir"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_interrupted_at_any_step_the_wheel_is_as_it_was(tmp_path, monkeypatch, step, operation, error):
    source, wheel = write_tree(tmp_path / "upstream", PLAIN), make_wheel(tmp_path)
    write_tree(tmp_path, {"a.patch": b"--- a/common/constants.py\n+++ b/common/constants.py\n@@ -1 +1 @@\n-BLOCK = 32\n+BLOCK = 8\n"})
    update(wheel, source, PACKAGES, patches=[(tmp_path / "a.patch", "test")])
    write_tree(source, {"moe_x/new.py": b""})
    before, calls, real = snapshot(wheel), [], getattr(Path, operation)

    def fail_once(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == step + 1:
            raise error
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, operation, fail_once)
    try:
        update(wheel, source)
    except (DropError, KeyboardInterrupt):
        monkeypatch.undo()
        assert snapshot(wheel) == before
    else:
        assert len(calls) <= step, "the failure was swallowed"
        assert (wheel / "_drop/moe_x/new.py").exists()


@pytest.mark.parametrize("form", ["project", "flat project", "package"])
def test_ways_to_name_a_wheel_by_its_folder(tmp_path, form):
    package = make_wheel(tmp_path / "wheel/src" if form == "project" else tmp_path / "wheel")
    write_tree(tmp_path / "wheel", {"pyproject.toml": b""})
    named = package if form == "package" else tmp_path / "wheel"
    done = update(str(named), write_tree(tmp_path / "upstream", PLAIN), PACKAGES)
    assert (done.package, done.manifest.namespace) == (package, "acme_kernels._drop")


def test_project_with_two_packages_is_ambiguous(tmp_path):
    make_wheel(tmp_path / "src", "one")
    make_wheel(tmp_path / "src", "two")
    with pytest.raises(DropError, match=r"2 import packages \(one, two\)"):
        update(tmp_path, write_tree(tmp_path / "upstream", PLAIN), PACKAGES)


def test_diff_names_files_and_public_symbols(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", PLAIN), make_wheel(tmp_path)
    update(wheel, source, PACKAGES)
    same = diff(wheel, source)
    assert (same.added, same.removed, same.changed, same.unchanged, same.symbols) == ((), (), (), len(PLAIN), ())
    newer = {name: data for name, data in PLAIN.items() if name != "moe_x/notes.txt"}
    newer["common/constants.py"] = b"# moved by one line\nBLOCK = 64\nTILE = BLOCK * 2\nNAMES = ('a', 'b')\n_HIDDEN = 1\n"
    newer["moe_x/kernel.py"] = PLAIN["moe_x/kernel.py"].replace(b"tile, cluster, *", b"tile, *, cluster")
    newer["moe_x/more.py"] = b"def run(a, b=1): ...\ndef _private(): ...\nclass Base(int): ...\n"
    found = diff(wheel, write_tree(tmp_path / "newer", newer))
    assert (found.added, found.removed) == (("moe_x/more.py",), ("moe_x/notes.txt",))
    assert found.changed == ("common/constants.py", "moe_x/kernel.py")
    assert found.unchanged == len(PLAIN) - 3
    assert found.symbols == (
        SymbolChange("common.constants", "BLOCK", "BLOCK = 32", "BLOCK = 64"),
        SymbolChange(
            "moe_x.kernel", "Kernel.__init__",
            "def __init__(self, tile, cluster, *, stages=3, clamp=None)", "def __init__(self, tile, *, cluster, stages=3, clamp=None)",
        ),
        SymbolChange("moe_x.more", "Base", "", "class Base(int)"),
        SymbolChange("moe_x.more", "run", "", "def run(a, b=1)"),
    )  # fmt: skip
