"""The ``megamoe`` command. Each command is a module of this package, found by its presence and loaded only when it is called.

A command module ``megamoe/cli/<command>.py`` (dashes in the command are underscores in the file) has

    SUMMARY: str                   one line for the list of commands
    add_arguments(parser)          its own arguments; ``--json`` is already there (nested parsers add it with ``add_json_flag``)
    run(args) -> int               an exit code from :mod:`megamoe.cli.codes`

and loads torch, kernels and anything else that is slow inside ``run`` only. It prints through :class:`megamoe.cli.output.Output`.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import megamoe
from megamoe.cli import codes
from megamoe.cli.output import Output, add_json_flag
from megamoe.errors import MegaMoEError

_NOT_COMMANDS = frozenset({"codes", "output"})


def commands() -> tuple[str, ...]:
    """Names of the commands in this package, sorted. Loads none of them."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name.replace("_", "-") for name in names if name not in _NOT_COMMANDS and not name.startswith("_")))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; ``None`` takes them from the command line.

    Returns:
        0 fine, 1 a check failed, 2 usage, 3 nothing suitable.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(arguments).parse_args(arguments)
    except SystemExit as stop:  # argparse has printed its message or the help text
        return stop.code if isinstance(stop.code, int) else codes.USAGE
    try:
        code = int(args.run(args))
        sys.stdout.flush()  # here, where a reader that has gone is expected; short output has been in the buffer until now
    except MegaMoEError as error:
        Output.of(args).error(error, command=args.command)
        return codes.of_error(error)
    except KeyboardInterrupt:
        return codes.INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain again while flushing at exit, so hand it an open sink.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return codes.FAILED
    except OSError as error:  # a folder that may not be read, a disk that is full: nobody's mistake in this program
        fix = "look at that file or folder, its permissions and the space on its disk"
        Output.of(args).error(MegaMoEError(f"The operating system refused: {error}.", hint=fix), command=args.command)
        return codes.FAILED
    return code


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megamoe", description="Mixture-of-Experts layers by the backend this machine can run.", epilog="Exit codes: " + codes.MEANING
    )
    parser.add_argument("--version", action="version", version=f"megamoe {megamoe.__version__}")
    group = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    known = commands()
    # The command is the first word, since the options before it take no value; knowing it spares loading the others for their help lines.
    called = next((word for word in arguments if not word.startswith("-")), None)
    for name in (called,) if called in known else known:
        _add_command(group, str(name))
    return parser


def _add_command(group: argparse._SubParsersAction[argparse.ArgumentParser], name: str) -> None:
    module = _load(name)
    if isinstance(module, Exception):
        # One command that cannot be loaded must not take the others (least of all `doctor`) with it.
        # Its arguments are not known, so no prefix marks an option and all of them are taken.
        broken = group.add_parser(name, help=f"cannot be loaded: {module}".replace("%", "%%"), add_help=False, prefix_chars="\0")
        broken.add_argument("rest", nargs="*")
        broken.set_defaults(run=_raise(module), json=False)
        return
    parser = group.add_parser(name, help=module.SUMMARY, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(run=module.run, json=False)
    add_json_flag(parser)
    module.add_arguments(parser)


def _load(name: str) -> ModuleType | Exception:
    try:
        return import_module(f"{__name__}.{name.replace('-', '_')}")
    except Exception as error:  # noqa: BLE001  whatever a missing or damaged dependency raises
        return error


def _raise(cause: Exception) -> object:
    def run(args: argparse.Namespace) -> int:
        raise MegaMoEError(
            f"The command {args.command!r} cannot be loaded: {type(cause).__name__}: {cause}.", hint="megamoe doctor"
        ) from cause

    return run
