"""Edits of an installed drop are found, file by file; pending local diffs are accounted for; it works away from the source."""

import base64
import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe import DropError
from megamoe.drop.export import export
from megamoe.drop.faults import DropRefused
from megamoe.drop.patches import apply
from megamoe.drop.update import update
from megamoe.drop.verify import verify

from .drop_trees import PACKAGES, PLAIN, edit, make_wheel, snapshot, write_tree

DIFF = b"""A note above the diff.
--- a/moe_x/kernel.py
+++ b/moe_x/kernel.py
@@ -1,3 +1,3 @@
 \"\"\"Says `from common.constants import BLOCK` in prose, which must stay.\"\"\"
-from common.constants import BLOCK, TILE  # the tile
+from common.constants import BLOCK, TILE
 import src.runtime as runtime; from src import Runtime
@@ -11,2 +11,3 @@
         from common import constants
-        return constants.TILE + BLOCK + TILE + runtime.Runtime.size + Runtime.size
+        from common.extra import MORE
+        return MORE + constants.TILE + BLOCK + TILE + runtime.Runtime.size + Runtime.size
--- /dev/null
+++ b/common/extra.py
@@ -0,0 +1 @@
+MORE = 1
--- a/moe_x/notes.txt
+++ /dev/null
@@ -1 +0,0 @@
-read me: from common.constants import BLOCK
"""


@pytest.fixture
def wheel(tmp_path):
    wheel = make_wheel(tmp_path)
    update(wheel, write_tree(tmp_path / "upstream", PLAIN), PACKAGES)
    return wheel


@pytest.fixture
def patched(tmp_path):
    """A wheel whose drop has a pending local diff."""
    write_tree(tmp_path, {"fix.patch": DIFF})
    wheel = make_wheel(tmp_path)
    update(wheel, write_tree(tmp_path / "upstream", PLAIN), PACKAGES, patches=[(tmp_path / "fix.patch", "reported as #12")])
    return wheel


EDITS = {
    "byte in code": ("moe_x/kernel.py", b"stages=3", b"stages=4"),
    "byte in a comment": ("moe_x/kernel.py", b"# the tile", b"# a  tile"),
    "byte in a data file": ("moe_x/notes.txt", b"read", b"Read"),
    "prefix taken out": ("moe_x/kernel.py", b"from acme_kernels._drop.common.constants import", b"from common.constants import"),
    "prefix put into prose": ("moe_x/kernel.py", b"Says `from common", b"Says `from acme_kernels._drop.common"),
    "line ends": ("common/constants.py", b"BLOCK = 32\n", b"BLOCK = 32\r\n"),
    "blank at the end": ("common/constants.py", b"'b')\n", b"'b') \n"),
    "import added": ("common/constants.py", b"BLOCK = 32\n", b"import os\nBLOCK = 32\n"),
    "no longer Python": ("common/constants.py", b"BLOCK = 32\n", b"BLOCK == = 32\n"),
    "no longer UTF-8": ("common/constants.py", b"BLOCK = 32\n", b"BLOCK = 32 # \xff\n"),
}


@pytest.mark.parametrize(("name", "old", "new"), EDITS.values(), ids=EDITS.keys())
def test_edited_byte(wheel, tmp_path, name, old, new):
    edit(wheel / "_drop" / name, old, new)
    found = verify(wheel)
    assert not found.ok
    assert {problem.file for problem in found.problems} == {str(wheel / "_drop" / name)}
    with pytest.raises(DropRefused):
        export(wheel, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_files_added_removed_and_linked(wheel):
    write_tree(wheel / "_drop", {"src/extra.py": b"", "src/__pycache__/extra.pyc": b"not kernel code"})
    (wheel / "_drop/common/constants.py").unlink()
    (wheel / "_drop/moe_x/notes.txt").unlink()
    (wheel / "_drop/moe_x/notes.txt").symlink_to(wheel / "__init__.py")
    (wheel / "_drop/src/elsewhere").symlink_to(wheel.parent, target_is_directory=True)
    (wheel / "_drop/src/nowhere.py").symlink_to("gone.py")
    write_tree(wheel / "_drop", {"src/sourceless.pyc": b"importable"})
    found = {problem.file.removeprefix(f"{wheel}/_drop/"): problem.text for problem in verify(wheel).problems}
    assert found == {
        "common/constants.py": "is part of the recorded drop but is not there",
        "moe_x/notes.txt": "is a link, not a file of the drop",
        "src/elsewhere": "is a link, not a file of the drop",
        "src/extra.py": "is not part of the recorded drop",
        "src/nowhere.py": "is a link, not a file of the drop",
        "src/sourceless.pyc": "is not part of the recorded drop",
    }


def test_code_injected_into_the_namespace_package(wheel):
    init = wheel / "_drop/__init__.py"
    init.write_bytes(init.read_bytes() + b"import sys\n")
    (problem,) = verify(wheel).problems
    assert (problem.file, problem.line) == (str(init), 2)


def test_renamed_wheel(wheel, tmp_path):
    wheel.rename(tmp_path / "other_name")
    (problem,) = verify(tmp_path / "other_name").problems
    assert (problem.expected, problem.found) == ("other_name._drop", "acme_kernels._drop")


def test_drop_nested_in_a_package(tmp_path, monkeypatch):
    write_tree(tmp_path, {"acme/__init__.py": b"raise RuntimeError('verify must not import this')\n"})
    wheel = make_wheel(tmp_path / "acme", "kernels")
    update(wheel, write_tree(tmp_path / "upstream", PLAIN), PACKAGES)
    assert b"from acme.kernels._drop.common.constants import" in (wheel / "_drop/moe_x/kernel.py").read_bytes()
    monkeypatch.syspath_prepend(tmp_path)
    assert verify("acme.kernels").ok


def test_wheel_without_a_drop(tmp_path):
    with pytest.raises(DropError, match="carries no kernel drop"):
        verify(make_wheel(tmp_path))


def test_export_wants_a_place_of_its_own(wheel, tmp_path):
    write_tree(tmp_path / "used", {"mine.txt": b"keep"})
    with pytest.raises(DropRefused, match="not an empty folder"):
        export(wheel, tmp_path / "used")
    assert snapshot(tmp_path / "used") == {"mine.txt": hashlib.sha256(b"keep").hexdigest()}
    (tmp_path / "empty").mkdir()
    export(wheel, tmp_path / "empty")
    assert snapshot(tmp_path / "empty") == snapshot(tmp_path / "upstream")


def test_pending_diff_is_installed_recorded_and_accounted_for(patched, tmp_path):
    kernel = (patched / "_drop/moe_x/kernel.py").read_bytes()
    assert b"from acme_kernels._drop.common.extra import MORE" in kernel
    assert b"# the tile" not in kernel
    assert (patched / "_drop/common/extra.py").read_bytes() == b"MORE = 1\n"
    assert not (patched / "_drop/moe_x/notes.txt").exists()
    assert (patched / "drop_patches/fix.patch").read_bytes() == DIFF
    found = verify(patched)
    assert found.ok
    assert [(patch.file, patch.reason) for patch in found.manifest.patches] == [("drop_patches/fix.patch", "reported as #12")]
    export(patched, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(tmp_path / "upstream")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("_drop/moe_x/kernel.py", b"MORE + constants", b"MORE * constants"),  # in a changed line
        ("_drop/moe_x/kernel.py", b"stages=3", b"stages=4"),  # in a line the diff does not touch
        ("_drop/common/extra.py", b"1", b"2"),  # in an added file
        ("drop_patches/fix.patch", b"MORE = 1", b"MORE = 2"),
        ("drop_patches/fix.patch", b"A note", b"No note"),
    ],
)
def test_edit_beside_a_pending_diff(patched, name, old, new):
    edit(patched / name, old, new)
    assert not verify(patched).ok


def test_missing_and_unlisted_diffs(patched):
    (patched / "drop_patches/fix.patch").rename(patched / "drop_patches/other.patch")
    texts = {problem.file.rpartition("/")[2]: problem.text for problem in verify(patched).problems}
    assert "is not there" in texts["fix.patch"]
    assert "not listed" in texts["other.patch"]


def test_diff_survives_an_update_and_is_given_up_by_name(patched, tmp_path):
    newer = write_tree(tmp_path / "newer", {**PLAIN, "common/constants.py": b"BLOCK = 64\nTILE = 256\n"})
    assert update(patched, newer).changed == ("common/constants.py",)
    assert verify(patched).ok
    update(patched, newer, without_patches=["fix.patch"])
    assert not (patched / "drop_patches").exists()
    assert b"# the tile" in (patched / "_drop/moe_x/kernel.py").read_bytes()
    assert verify(patched).ok


def test_diff_that_upstream_has_overtaken(patched, tmp_path):
    overtaken = {**PLAIN, "moe_x/kernel.py": PLAIN["moe_x/kernel.py"].replace(b"  # the tile", b"")}
    before = snapshot(patched)
    with pytest.raises(DropRefused, match=r"--without-patch fix\.patch") as caught:
        update(patched, write_tree(tmp_path / "newer", overtaken))
    (fault,) = caught.value.faults
    assert (fault.file, fault.line) == (str(patched / "drop_patches/fix.patch"), 4)
    assert snapshot(patched) == before


@pytest.mark.parametrize(
    ("diff", "line"),
    [
        (b"nothing of the kind\n", 1),
        (b"@@ -1 +1 @@\n-a\n+b\n", 1),
        (b"--- a/moe_x/kernel.py\n+++ b/moe_x/kernel.py\n@@ -1,2 +1,2 @@\n-a\n", 5),
        (b"--- a/moe_x/gone.py\n+++ b/moe_x/gone.py\n@@ -1 +1 @@\n-a\n+b\n", 1),
        (b"--- /dev/null\n+++ b/moe_x/kernel.py\n@@ -0,0 +1 @@\n+b\n", 1),
        (b"--- a/common/constants.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-BLOCK = 32\n", 1),
        (b"diff --git a/x b/x\nBinary files a/x and b/x differ\n", 2),
        (b"--- /dev/null\n+++ b/tools/x.py\n@@ -0,0 +1 @@\n+b\n", 1),
        (b"--- /dev/null\n+++ b/common/../../x.py\n@@ -0,0 +1 @@\n+b\n", 1),
    ],
)
def test_diff_that_does_not_fit(wheel, tmp_path, diff, line):
    write_tree(tmp_path, {"bad.patch": diff})
    before = snapshot(wheel)
    with pytest.raises(DropRefused) as caught:
        update(wheel, tmp_path / "upstream", patches=[(tmp_path / "bad.patch", "why not")])
    assert [(fault.file, fault.line) for fault in caught.value.faults] == [(str(tmp_path / "bad.patch"), line)]
    assert snapshot(wheel) == before


TEXT = st.lists(st.sampled_from(["a\n", "b\r\n", "c\n", "\n", "-d\n", "+e\n", "@@ -1 +1 @@\n"]), max_size=12)


@settings(max_examples=300)
@given(TEXT, TEXT, st.integers(0, 3))
def test_diffs_of_the_standard_library_apply_and_undo(before, after, context):
    diff = "".join(difflib.unified_diff(before, after, "a/f", "b/f", n=context)).encode()
    if before != after:
        old, new = {"f": "".join(before).encode()}, {"f": "".join(after).encode()}
        assert apply(old, diff, "diff") == new
        assert apply(new, diff, "diff", undo=True) == old


def test_diff_needs_a_reason_and_a_name_of_its_own(patched, tmp_path):
    with pytest.raises(DropError, match="no reason"):
        update(patched, tmp_path / "upstream", without_patches=["fix.patch"], patches=[(tmp_path / "fix.patch", " ")])
    with pytest.raises(DropError, match="already a pending local diff"):
        update(patched, tmp_path / "upstream", patches=[(tmp_path / "fix.patch", "again")])
    with pytest.raises(DropError, match=r"no pending local diff 'none.patch'; there are: fix.patch"):
        update(patched, tmp_path / "upstream", without_patches=["none.patch"])


def test_local_diff_lets_a_refused_source_in(tmp_path):
    files = {**PLAIN, "moe_x/bad.py": b"import common\r\nx = common.constants.BLOCK"}
    diff = (
        b"--- a/moe_x/bad.py\n+++ b/moe_x/bad.py\n@@ -1,2 +1,2 @@\n-import common\r\n-x = common.constants.BLOCK\n"
        b"\\ No newline at end of file\n+from common import constants\r\n+x = constants.BLOCK\n\\ No newline at end of file\n"
    )
    source, wheel = write_tree(tmp_path / "upstream", files), make_wheel(tmp_path)
    write_tree(tmp_path, {"private.patch": diff})
    update(wheel, source, PACKAGES, patches=[(tmp_path / "private.patch", "plain import")])
    assert (wheel / "_drop/moe_x/bad.py").read_bytes() == b"from acme_kernels._drop.common import constants\r\nx = constants.BLOCK"
    export(wheel, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


FIRST_PARTY = {
    "drop.toml": b'schema = 1\norigin = "first-party"\nnamespace = "acme_kernels._drop"\n',
    "_drop/__init__.py": b"",
    "_drop/tiles.py": b"T = 1\n",
    "_drop/moe/__init__.py": b"",
    "_drop/moe/kernel.py": b"from acme_kernels._drop.tiles import T\nfrom ..tiles import T as U\nfrom . import kernel\n",
}


@pytest.mark.parametrize(
    ("name", "old", "new", "line"),
    [
        ("moe/kernel.py", b"from acme_kernels._drop.tiles", b"from tiles", 1),
        ("moe/kernel.py", b"from . import kernel", b"from moe import kernel", 3),
        ("tiles.py", b"T = 1", b"T = = 1", 1),
        ("__init__.py", b"", b"import os", 1),
    ],
)
def test_first_party_kernels_keep_to_their_namespace(tmp_path, name, old, new, line):
    wheel = write_tree(make_wheel(tmp_path), FIRST_PARTY)
    found = verify(wheel)
    assert (found.ok, found.files) == (True, 3)
    export(wheel, tmp_path / "back")
    assert (tmp_path / "back/moe/kernel.py").read_bytes() == FIRST_PARTY["_drop/moe/kernel.py"]
    path = wheel / "_drop" / name
    path.write_bytes(path.read_bytes().replace(old, new) if old else new)
    (wheel / "_drop/zzz.py").symlink_to("gone.py")
    assert [(problem.file, problem.line) for problem in verify(wheel).problems] == [(str(path), line), (str(wheel / "_drop/zzz.py"), 1)]


def pack(wheel, folder):
    """A wheel file of a package, with an entry point, as any build tool makes it."""
    files = {path.relative_to(wheel.parent).as_posix(): path.read_bytes() for path in wheel.rglob("*") if path.is_file()}
    info = "acme_wheel-1.0.dist-info"
    files[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: acme-wheel\nVersion: 1.0\n"
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[megamoe.backends]\nacme = acme_kernels:SPEC\n"
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]).encode()
    target = folder / "acme_wheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return target


def test_installed_wheel_away_from_the_source(patched, tmp_path, monkeypatch):
    archive = pack(patched, tmp_path)
    shutil.rmtree(tmp_path / "upstream")
    shutil.rmtree(patched)
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site), str(archive)]
    subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    for wheel in ("acme-wheel", "acme", "acme-kernels", "acme_kernels", str(site / "acme_kernels")):
        assert megamoe(tmp_path / "elsewhere", "drop", "verify", wheel) == (0, [("acme_kernels", True)])
    code, wheels = megamoe(tmp_path / "elsewhere", "drop", "verify")
    assert (code, ("acme_kernels", True) in wheels) == (0, True)
    edit(site / "acme_kernels/_drop/common/constants.py", b"32", b"33")
    assert megamoe(tmp_path / "elsewhere", "drop", "verify", "acme-kernels") == (1, [("acme_kernels", False)])


def megamoe(folder, *words):
    """Run a command in a process of its own; its exit code, and which packages it found good."""
    ran = subprocess.run([sys.executable, "-m", "megamoe", *words, "--json"], cwd=folder, capture_output=True, text=True, check=False)
    return ran.returncode, [(wheel["package"].rpartition("/")[2], wheel["ok"]) for wheel in json.loads(ran.stdout)["wheels"]]
