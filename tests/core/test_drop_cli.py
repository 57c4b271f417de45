"""``megamoe drop``: exit codes, what a pipe sees, and what ``--json`` holds."""

import json

import pytest

from megamoe.cli import main

from .drop_trees import PLAIN, edit, make_wheel, snapshot, write_tree

CONTRACT = b'schema = 1\n[[constants]]\nmodule = "common.constants"\nname = "BLOCK"\nvalue = 32\n'


@pytest.fixture
def wheel(tmp_path, capsys):
    wheel = write_tree(make_wheel(tmp_path), {"shim/contract.toml": CONTRACT})
    source = write_tree(tmp_path / "upstream", PLAIN)
    words = ["drop", "update", str(wheel), str(source), "--package", "common", "--package", "src", "moe_x", "--commit", "1275b8b"]
    assert main([*words, "--date", "2026-07-31", "--upstream", "acme"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("took in 7 files of common, src, moe_x\n")
    assert "acme 1275b8b 2026-07-31" in printed
    return wheel


def document(capsys):
    return json.loads(capsys.readouterr().out)


def test_verify_and_audit_pass_then_fail(wheel, capsys):
    assert main(["drop", "verify", str(wheel)]) == 0
    assert capsys.readouterr().out == "acme_kernels (acme 1275b8b 2026-07-31): ok, 7 kernel files are the recorded original\n"
    assert main(["drop", "audit", str(wheel)]) == 0
    assert capsys.readouterr().out == f"acme_kernels against {wheel}/_drop: ok, 1 checks\n"
    edit(wheel / "_drop/common/constants.py", b"32", b"64")
    assert main(["drop", "verify", str(wheel)]) == 1
    assert f"{wheel}/_drop/common/constants.py:1: was edited" in capsys.readouterr().out
    assert main(["drop", "audit", str(wheel)]) == 1
    expected = f"{wheel}/_drop/common/constants.py:1: constant BLOCK has another value (expected 32, found 64)"
    assert expected in capsys.readouterr().out


def test_json_of_a_check(wheel, capsys):
    edit(wheel / "_drop/common/constants.py", b"32", b"64")
    assert main(["drop", "audit", str(wheel), "--json"]) == 1
    found = document(capsys)
    assert (found["command"], found["ok"]) == ("drop audit", False)
    place = {"file": f"{wheel}/_drop/common/constants.py", "line": 1}
    problem = {**place, "text": "constant BLOCK has another value", "expected": "32", "found": "64"}
    assert found["wheels"][0]["problems"] == [problem]
    assert main(["drop", "--json", "verify", str(wheel)]) == 1
    assert document(capsys)["wheels"][0]["ok"] is False


def test_json_of_the_other_actions(wheel, tmp_path, capsys):
    source = write_tree(tmp_path / "newer", {**PLAIN, "common/more.py": b"X = 1\n"})
    assert main(["drop", "diff", str(wheel), str(source), "--json"]) == 0
    found = document(capsys)
    assert (found["added"], found["symbols"]) == (
        ["common/more.py"],
        [{"module": "common.more", "name": "X", "before": "", "after": "X = 1"}],
    )
    assert main(["drop", "export", str(wheel), str(tmp_path / "back"), "--json"]) == 0
    assert document(capsys)["files"] == sorted(PLAIN)
    assert main(["drop", "update", str(wheel), str(source), "--dry-run", "--json"]) == 0
    found = document(capsys)
    assert (found["ok"], found["written"], found["added"]) == (True, False, ["common/more.py"])


def test_plain_text_of_a_diff(wheel, tmp_path, capsys):
    source = write_tree(tmp_path / "newer", {**PLAIN, "common/constants.py": b"BLOCK = 64\n"})
    assert main(["drop", "diff", str(wheel), str(source)]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["0", "files", "added, 0 removed, 1 changed, 6 unchanged"], ["~", "common/constants.py"]]
    assert ["common.constants", "BLOCK", "BLOCK = 32          BLOCK = 64"] in lines


def test_refused_update_lists_every_fault_and_changes_nothing(wheel, tmp_path, capsys):
    source = write_tree(tmp_path / "newer", {**PLAIN, "common/bad.py": b"import src\n", "src/bad.py": b"from common import *\n"})
    before = snapshot(wheel)
    assert main(["drop", "update", str(wheel), str(source)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{source}/common/bad.py:1: plain `import src`" in printed.err
    assert f"{source}/src/bad.py:1: star import of common" in printed.err
    assert main(["drop", "update", str(wheel), str(source), "--json"]) == 1
    found = document(capsys)
    assert (found["ok"], [fault["file"] for fault in found["faults"]]) == (False, [f"{source}/common/bad.py", f"{source}/src/bad.py"])
    assert found["fix"]
    assert snapshot(wheel) == before


def test_diff_files_on_the_command_line(wheel, tmp_path, capsys):
    diff = b"--- a/common/constants.py\n+++ b/common/constants.py\n@@ -1 +1 @@\n-BLOCK = 32\n+BLOCK = 8\n"
    write_tree(tmp_path, {"smaller.patch": diff})
    words = ["drop", "update", str(wheel), str(tmp_path / "upstream")]
    assert main([*words, "--patch", str(tmp_path / "smaller.patch"), "reported as #3"]) == 0
    assert "local diffs         drop_patches/smaller.patch\n" in capsys.readouterr().out
    assert main([*words, "--without-patch", "smaller.patch"]) == 0
    assert "local diffs         none\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["drop"], ["drop", "upgrade"], ["drop", "update", "x"], ["drop", "export", "x"], ["drop", "verify", "--all"]]
)
def test_usage(words, capsys):
    assert main(words) == 2
    assert "usage: megamoe" in capsys.readouterr().err


def test_nothing_installed_to_verify(monkeypatch, capsys):
    monkeypatch.setattr("megamoe.drop.locate.installed_drops", list)
    assert main(["drop", "verify"]) == 3
    assert "no installed backend carries a kernel drop" in capsys.readouterr().out
