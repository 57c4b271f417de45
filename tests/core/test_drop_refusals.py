"""What cannot be taken in is refused with file and line, all faults at once, and nothing changes on disk."""

import os
from pathlib import Path

import pytest

import megamoe
from megamoe import DropError
from megamoe.drop.faults import DropRefused
from megamoe.drop.update import update

from .drop_trees import PACKAGES, PLAIN, edit, make_wheel, snapshot, write_tree

BAD_LINES = {
    "plain import": (b"import os\nimport common\n", 2, "plain `import common`"),
    "plain import of a submodule": (b"import common.constants\n", 1, "plain `import common.constants`"),
    "plain import among others": (b"import os, src, sys\n", 1, "plain `import src`"),
    "plain import in a function": (b"def f():\n    x = 1\n    import moe_x\n", 3, "plain `import moe_x`"),
    "star import of a top": (b"\nfrom common import *\n", 2, "star import of common"),
    "star import of a module": (b"from common.constants import *\n", 1, "star import of common.constants"),
    "import_module": (b'import importlib\nm = importlib.import_module("common.constants")\n', 2, "'common.constants'"),
    "import_module by another name": (b'from importlib import import_module as load\n\nload("src")\n', 3, "'src'"),
    "import_module with a built name": (b'import importlib as i\nx = 1\nm = i.import_module(f"common.{x}")\n', 3, "'common.'"),
    "import_module with the package": (b'import importlib\nimportlib.import_module(".a", package="common")\n', 2, "'common'"),
    "__import__": (b'm = __import__("common.constants")\n', 1, "'common.constants'"),
    "find_spec": (b'import importlib.util\nimportlib.util.find_spec("moe_x.kernel")\n', 2, "'moe_x.kernel'"),
    "sys.modules": (b'import sys\nm = sys.modules["common.constants"]\n', 2, "'common.constants'"),
    "sys.modules.get": (b'import sys\nm = sys.modules.get("common")\n', 2, "'common'"),
    "relative import above the top": (b"from ..common import constants\n", 1, "above the top-level package moe_x"),
    "relative import far above the top": (b"\n\nfrom ... import x\n", 3, "above the top-level package moe_x"),
    "syntax error": (b"x = 1\ndef f(:\n", 2, "syntax error"),
    "null byte": (b"x = 1\0\n", 1, ""),
    "not UTF-8": (b"x = 1\r\ny = 2\r\ns = '\xe9'\r\n", 3, "not UTF-8 (byte 0xe9)"),
    "declared in another encoding": (b"#!/usr/bin/env python\n# coding: latin-1\n", 2, "declares the encoding iso-8859-1"),
    "unknown encoding": (b"# coding: klingon\n", 1, "unknown encoding"),
    "already private": (b"from acme_kernels._drop.common.constants import BLOCK\n", 1, "already in the private namespace"),
}


@pytest.fixture
def wheel(tmp_path):
    """A wheel with a drop in it, so that there is something to lose."""
    wheel = make_wheel(tmp_path)
    update(wheel, write_tree(tmp_path / "before", PLAIN), PACKAGES, commit="old")
    return wheel


def refusal(wheel, source, packages=PACKAGES, **options):
    """The refusal of an update; fails when something on disk changed."""
    before = snapshot(wheel.parent)
    with pytest.raises(DropRefused) as caught:
        update(wheel, source, packages, commit="new", **options)
    assert snapshot(wheel.parent) == before
    assert isinstance(caught.value, DropError)
    for fault in caught.value.faults:
        assert f"{fault.file}:{fault.line}: " in str(caught.value)
    return caught.value


@pytest.mark.parametrize(("data", "line", "text"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_bad_file(tmp_path, wheel, data, line, text):
    source = write_tree(tmp_path / "upstream", {**PLAIN, "moe_x/bad.py": data})
    (fault,) = refusal(wheel, source).faults
    assert (fault.file, fault.line) == (str(source / "moe_x/bad.py"), line)
    assert text in fault.text


def test_all_faults_at_once(tmp_path, wheel):
    source = write_tree(
        tmp_path / "upstream", {**PLAIN, "common/a.py": b"import src\n\nfrom moe_x import *\n", "src/b.py": b"from .. import common\n"}
    )
    found = [(fault.file.rpartition("/")[2], fault.line) for fault in refusal(wheel, source).faults]
    assert found == [("a.py", 1), ("a.py", 3), ("b.py", 1)]


def test_data_file_that_is_not_utf8(tmp_path, wheel):
    source = write_tree(tmp_path / "upstream", {**PLAIN, "moe_x/table.dat": b"ok\n\xff\xfe"})
    (fault,) = refusal(wheel, source).faults
    assert (fault.file, fault.line) == (str(source / "moe_x/table.dat"), 2)


@pytest.mark.parametrize(
    ("packages", "text"),
    [
        (("common", "tester"), "no package 'tester'"),
        (("common", "common"), "overlap"),
        (("common", "common/constants"), "overlap"),
        (("common.constants", "common"), "overlap"),
        (("moe_x", "MOE_X"), "overlap"),
        (("../common",), "not the name of a top-level package"),
        (("moe_x/kernel.py",), "not the name of a top-level package"),
    ],
)
def test_bad_packages(tmp_path, wheel, packages, text):
    source = write_tree(tmp_path / "upstream", PLAIN)
    faults = refusal(wheel, source, packages).faults
    assert any(text in fault.text for fault in faults)
    assert all(fault.file.startswith(str(source)) for fault in faults)


def test_package_without_python(tmp_path, wheel):
    source = write_tree(tmp_path / "upstream", {**PLAIN, "empty/readme.txt": b"nothing\n"})
    (fault,) = refusal(wheel, source, (*PACKAGES, "empty")).faults
    assert "holds no Python file" in fault.text


def test_source_that_is_not_there(tmp_path, wheel):
    (fault,) = refusal(wheel, tmp_path / "nowhere").faults
    assert fault.file == str(tmp_path / "nowhere")


def test_first_update_without_a_package_names_those_there(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", PLAIN), make_wheel(tmp_path)
    (fault,) = refusal(wheel, source, ()).faults
    assert "common, moe_x, src" in fault.text


@pytest.mark.parametrize("target", ["/etc/hostname", "../outside.py", "nothing.py"])
def test_links_that_leave_the_tree_or_lead_nowhere(tmp_path, wheel, target):
    write_tree(tmp_path, {"outside.py": b"x = 1\n"})
    source = write_tree(tmp_path / "upstream", PLAIN)
    link = source / "moe_x/link.py"
    link.symlink_to(tmp_path / "outside.py" if target.startswith("..") else target)
    (fault,) = refusal(wheel, source).faults
    assert fault.file == str(link)
    assert "link" in fault.text


def test_linked_folders_that_leave_the_tree_or_turn_in_circles(tmp_path, wheel):
    write_tree(tmp_path / "elsewhere", {"a.py": b""})
    source = write_tree(tmp_path / "upstream", PLAIN)
    (source / "src/far").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (source / "src/self").symlink_to(source / "src", target_is_directory=True)
    texts = [fault.text for fault in refusal(wheel, source).faults]
    assert len(texts) == 2
    assert "leaves the tree" in texts[0]
    assert "a folder that holds it" in texts[1]


def test_package_that_is_a_link_out(tmp_path, wheel):
    source = write_tree(tmp_path / "upstream", {name: data for name, data in PLAIN.items() if not name.startswith("common")})
    (source / "common").symlink_to(write_tree(tmp_path / "elsewhere", {"__init__.py": b""}), target_is_directory=True)
    assert any("leaves the tree" in fault.text for fault in refusal(wheel, source).faults)


def test_links_inside_the_tree_are_files_like_others(tmp_path, wheel):
    source = write_tree(tmp_path / "upstream", PLAIN)
    (source / "moe_x/constants.py").symlink_to("../common/constants.py")
    update(wheel, source)
    copy = wheel / "_drop/moe_x/constants.py"
    assert not copy.is_symlink()
    assert copy.read_bytes() == PLAIN["common/constants.py"]


def test_pipe(tmp_path, wheel):
    source = write_tree(tmp_path / "upstream", PLAIN)
    os.mkfifo(source / "moe_x/pipe")
    (fault,) = refusal(wheel, source).faults
    assert fault.file == str(source / "moe_x/pipe")


def plant_edit(wheel):
    edit(wheel / "_drop/common/constants.py", b"32", b"33")
    return "_drop/common/constants.py"


def plant_file(wheel):
    write_tree(wheel, {"_drop/common/new.py": b""})
    return "_drop/common/new.py"


def plant_removal(wheel):
    (wheel / "_drop/src/runtime.py").unlink()
    return "_drop/src/runtime.py"


@pytest.mark.parametrize("plant", [plant_edit, plant_file, plant_removal])
def test_dirty_target(tmp_path, wheel, plant):
    name = plant(wheel)
    source = write_tree(tmp_path / "upstream", PLAIN)
    (fault,) = refusal(wheel, source).faults
    assert fault.file == str(wheel / name)


def test_target_with_kernels_of_unknown_origin(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", PLAIN), make_wheel(tmp_path)
    write_tree(wheel, {"_drop/__init__.py": b"", "_drop/common/mine.py": b"x = 1\n"})
    (fault,) = refusal(wheel, source).faults
    assert fault.file == str(wheel / "_drop/common/mine.py")


def test_target_whose_namespace_package_runs_code(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", PLAIN), make_wheel(tmp_path)
    write_tree(wheel, {"_drop/__init__.py": b'"""Ours."""\n\nimport sys\n'})
    (fault,) = refusal(wheel, source).faults
    assert (fault.file, fault.line) == (str(wheel / "_drop/__init__.py"), 3)


def test_file_that_cannot_be_read(tmp_path, wheel, monkeypatch):
    source = write_tree(tmp_path / "upstream", PLAIN)
    locked = source / "src/runtime.py"
    real = Path.read_bytes

    def read_bytes(self):
        if self == locked:
            raise PermissionError(13, "Permission denied")
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(DropRefused) as caught:
        update(wheel, source)
    assert [(fault.file, fault.text) for fault in caught.value.faults] == [(str(locked), "cannot be read (Permission denied)")]


def test_target_with_first_party_kernels(tmp_path):
    source, wheel = write_tree(tmp_path / "upstream", PLAIN), make_wheel(tmp_path)
    write_tree(wheel, {"_drop/moe/k.py": b"", "drop.toml": b'schema = 1\norigin = "first-party"\n'})
    (fault,) = refusal(wheel, source).faults
    assert "first-party" in fault.text


@pytest.mark.parametrize("name", ["reference", "megamoe", Path(megamoe.__file__).parent])
def test_core_is_no_target(tmp_path, name):
    source = write_tree(tmp_path / "source", PLAIN)
    with pytest.raises(DropError, match=r"megamoe-core, which holds no kernel drop; allowed: a wheel of its own\. Fix: "):
        update(name, source, PACKAGES, dry_run=True)


def test_target_left_by_an_interrupted_update(tmp_path, wheel):
    write_tree(wheel / ".drop-update/old", {"drop.toml": b""})
    faults = refusal(wheel, write_tree(tmp_path / "upstream", PLAIN)).faults
    assert [fault.file for fault in faults] == [str(wheel / ".drop-update")]


@pytest.mark.parametrize("wheel_name", ["no_such_wheel", "no-such.wheel", "/nowhere/at/all"])
def test_unknown_wheel(tmp_path, wheel_name):
    with pytest.raises(DropError, match="neither an installed package nor a folder"):
        update(wheel_name, write_tree(tmp_path / "upstream", PLAIN), PACKAGES)


@pytest.mark.parametrize("date", ["31.07.2026", "2026-13-01", "today"])
def test_date_that_is_not_iso(tmp_path, wheel, date):
    before = snapshot(wheel)
    with pytest.raises(DropError, match="allowed: an ISO date"):
        update(wheel, write_tree(tmp_path / "upstream", PLAIN), date=date)
    assert snapshot(wheel) == before


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (b"schema = 1\npackages = [\n", 2, ""),
        (b"schema = 2\n", 1, "schema is 2"),
        (b'schema = 1\norigin = "found"\n', 1, "origin"),
        (b"schema = 1\ncolour = 3\n", 1, "unknown key 'colour'"),
        (b'schema = 1\n[files]\n"../x" = "0"\n', 1, "leaves the tree"),
        (b'schema = 1\n[files]\n"/etc/x" = "0"\n', 1, "leaves the tree"),
        (b"schema = 1\npackages = [1]\n", 1, "list of strings"),
        (b'schema = 1\n[[patches]]\nfile = "a"\n', 1, "reason"),
        (b"schema = 1\n\n# \xff\n", 3, "not UTF-8"),
    ],
)
def test_damaged_manifest(tmp_path, wheel, text, line, what):
    (wheel / "drop.toml").write_bytes(text)
    faults = refusal(wheel, write_tree(tmp_path / "upstream", PLAIN)).faults
    assert {(fault.file, fault.line) for fault in faults} == {(str(wheel / "drop.toml"), line)}
    assert any(what in fault.text for fault in faults)
