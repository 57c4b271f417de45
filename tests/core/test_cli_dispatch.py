"""The command line itself: what is a command, exit codes, and one way to print for a person, a pipe and a program."""

import argparse
import dataclasses
import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import megamoe
from megamoe import cli, errors
from megamoe.cli import codes
from megamoe.cli.output import Output
from megamoe.protocol import Reason


@pytest.fixture
def command(monkeypatch):
    """Plant a command ``planted`` whose ``run`` is the function given."""

    def plant(run, add_arguments=lambda parser: None):
        module = types.ModuleType("megamoe.cli.planted", "What it does.")
        module.SUMMARY, module.run, module.add_arguments = "planted for a test", run, add_arguments
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(cli, "commands", lambda: ("doctor", "planted"))

    return plant


def test_every_command_module_keeps_the_contract():
    assert {"backends", "doctor"} <= set(cli.commands())
    for name in cli.commands():
        module = cli._load(name)
        assert not isinstance(module, Exception), f"{name}: {module}"
        assert module.SUMMARY
        assert len(module.SUMMARY) < 80
        assert callable(module.add_arguments)
        assert callable(module.run)


def test_every_command_explains_itself_and_takes_json(capsys):
    for name in cli.commands():
        assert cli.main([name, "--help"]) == 0
        assert "--json" in capsys.readouterr().out, name


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megamoe {megamoe.__version__}\n"
    assert cli.main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())  # however wide the terminal
    assert "Exit codes: 0 fine, 1 a check failed, 2 usage, 3 nothing suitable." in text
    assert all(name in text for name in cli.commands())


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["doctor", "--no-such-option"], ["--json", "doctor"]])
def test_wrong_usage_is_two(arguments, capsys):
    assert cli.main(arguments) == 2
    assert "usage: megamoe" in capsys.readouterr().err


CODES = {
    errors.BackendNotFound: 3,
    errors.BackendUnavailable: 3,
    errors.BackendIncompatible: 3,
    errors.BackendBroken: 3,
    errors.BackendAmbiguous: 3,
    errors.InvalidInput: 2,
    errors.DropError: 1,
    errors.RankMismatch: 1,
}


@pytest.mark.parametrize("kind", CODES)
def test_errors_become_exit_codes_and_messages(command, capsys, kind):
    def run(args):
        raise kind("This happened.", hint="do that")

    command(run)
    assert cli.main(["planted"]) == CODES[kind]
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"megamoe: {kind.__name__}: This happened. Fix: do that\n")
    assert cli.main(["planted", "--json"]) == CODES[kind]
    document = json.loads(capsys.readouterr().out)
    assert document["error"] == {"type": kind.__name__, "message": "This happened.", "fix": "do that"}
    assert (document["schema"], document["command"]) == (1, "planted")


def test_an_unsupported_problem_is_nothing_suitable(command):
    def run(args):
        raise errors.UnsupportedProblem((Reason("hidden is 100", "use 128"),))

    command(run)
    assert cli.main(["planted"]) == 3


def test_an_error_after_the_document_does_not_spoil_it(command, capsys):
    def run(args):
        out = Output.of(args)
        out.document("planted", {"passed": True})
        raise errors.RankMismatch("This came late.")

    command(run)
    assert cli.main(["planted", "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["passed"] is True
    assert "This came late." in shown.err


def test_ctrl_c_is_what_shells_expect(command):
    def run(args):
        raise KeyboardInterrupt

    command(run)
    assert cli.main(["planted"]) == 130


def test_faults_of_ours_are_not_hidden(command):
    def run(args):
        raise ZeroDivisionError

    command(run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["planted"])


def test_a_command_that_cannot_be_loaded_leaves_the_others(monkeypatch, capsys):
    real = cli.import_module

    def without_rich(name):
        if name == "megamoe.cli.backends":
            raise ImportError("No module named 'rich'")
        return real(name)

    monkeypatch.setattr(cli, "import_module", without_rich)
    assert cli.main(["--help"]) == 0
    assert "cannot be loaded: No module named 'rich'" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["backends", "-v", "--json"]) == codes.FAILED
    assert "'backends' cannot be loaded: ImportError: No module named 'rich'. Fix: megamoe doctor" in capsys.readouterr().err


def test_dashes_in_commands_are_underscores_in_files(tmp_path, monkeypatch):
    for name in ("new_thing", "output", "codes", "_hidden"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.setattr(cli, "__path__", [str(tmp_path)])
    assert cli.commands() == ("new-thing",)


def test_nested_parsers_take_json_too(command):
    seen = []

    def add_arguments(parser):
        from megamoe.cli.output import add_json_flag

        add_json_flag(parser.add_subparsers(required=True).add_parser("verify"))

    command(lambda args: seen.append(args.json) or 0, add_arguments)
    for arguments in (["verify"], ["verify", "--json"], ["--json", "verify"]):
        assert cli.main(["planted", *arguments]) == 0
    assert seen == [False, True, True]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no pipes to close early")
def test_a_reader_that_leaves_is_no_traceback():
    code = "import sys\nfrom megamoe.cli import main\nsys.exit(main(['doctor']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert "Traceback" not in said
    assert "BrokenPipeError" not in said


def test_what_the_operating_system_refuses_is_said_without_a_traceback(command, capsys):
    def run(args):
        raise PermissionError(13, "Permission denied", "/data/kernels")

    command(run)
    assert cli.main(["planted"]) == codes.FAILED
    assert capsys.readouterr().err.startswith("megamoe: MegaMoEError: The operating system refused: [Errno 13] Permission denied: '/data/k")
    assert cli.main(["planted", "--json"]) == codes.FAILED
    assert "/data/kernels" in json.loads(capsys.readouterr().out)["error"]["message"]


# Output


def text_of(write, *, terminal=False, json_mode=False):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    write(Output(json=json_mode, stream=stream))
    return stream.getvalue()


ROWS = [("a[sm90]", 1, 0.123456, True), ("longer", 23, 1e-9, None)]
COLUMNS = ("name", "count", "error", "ok")


def test_a_pipe_gets_aligned_text():
    shown = text_of(lambda out: out.table(COLUMNS, ROWS, title="Results"))
    assert shown == (
        "Results\n"
        "name     count   error  ok\n"
        "a[sm90]      1  0.1235  yes\n"
        "longer      23   1e-09  -\n"
    )  # fmt: skip


def test_an_empty_table_is_its_header():
    assert text_of(lambda out: out.table(COLUMNS, [])) == "name  count  error  ok\n"


def test_a_row_of_the_wrong_length_is_our_fault():
    with pytest.raises(ValueError, match="a row has 1 cells; the table has 4 columns"):
        text_of(lambda out: out.table(COLUMNS, [("a",)]))


def test_a_person_gets_every_cell_brackets_included(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    shown = text_of(lambda out: (out.table(COLUMNS, ROWS, title="T[1]"), out.text("pip install megamoe-core[sm90]")), terminal=True)
    for part in ("a[sm90]", "T[1]", "0.1235", "megamoe-core[sm90]", "\u2502"):
        assert part in shown


def test_a_dumb_terminal_gets_plain_text(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert text_of(lambda out: out.table(COLUMNS, ROWS), terminal=True) == text_of(lambda out: out.table(COLUMNS, ROWS))


def test_a_terminal_without_rich_gets_plain_text(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert text_of(lambda out: out.table(COLUMNS, ROWS), terminal=True) == text_of(lambda out: out.table(COLUMNS, ROWS))


def test_facts_are_aligned():
    assert text_of(lambda out: out.facts([("a", 1), ("long", None)], title="F")) == "F\n  a     1\n  long  -\n"


def test_json_prints_the_document_alone():
    @dataclasses.dataclass
    class Thing:
        where: Path
        error: float

    def write(out):
        out.text("prose")
        out.table(COLUMNS, ROWS)
        out.facts([("a", 1)])
        with out.progress("working", total=2) as step:
            step()
        out.document("demo", {"thing": Thing(Path("/x"), float("nan")), "set": {2, 1}, "pair": (1, 2.5), "none": None})

    document = json.loads(text_of(write, json_mode=True), parse_constant=pytest.fail)
    assert document == {
        "schema": 1,
        "command": "demo",
        "megamoe": megamoe.__version__,
        "thing": {"where": "/x", "error": "nan"},
        "set": [1, 2],
        "pair": [1, 2.5],
        "none": None,
    }


def test_no_document_without_json():
    assert text_of(lambda out: out.document("demo", {"a": 1})) == ""


def test_progress_is_for_a_person_on_stderr(monkeypatch, capsys):
    def count(out):
        with out.progress("working", total=3) as step:
            for _ in range(3):
                step()

    text_of(count)
    assert capsys.readouterr() == ("", "")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert text_of(count) == ""
    assert "working" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


def test_output_of_arguments():
    assert Output.of(argparse.Namespace(json=True)).json
    assert not Output.of(argparse.Namespace()).json
