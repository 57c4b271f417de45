"""What commands print: tables and progress for a person, plain aligned text for a pipe, one JSON document for ``--json``.

    out = Output.of(args)
    out.text("all experts on one rank")
    out.table(("backend", "state"), [("sm90", "ok"), ("sm100", "unavailable")])
    with out.progress("running", total=20) as step:
        for _ in range(20):
            step()
    out.document("check", {"passed": True})     # the only thing printed with --json

``text``, ``facts`` and ``table`` print nothing with ``--json`` and ``document`` prints nothing without it, so that commands need no
branches. Only the standard library is needed; rich is used when it is installed and stdout is a terminal.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import IO, TYPE_CHECKING

import megamoe

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from megamoe.errors import MegaMoEError

SCHEMA = 1
"""Version of the JSON documents: raised when a key is renamed, removed or changes its meaning, not when one is added."""

_COLOURS = {
    "green": ("ok", "pass", "passed", "native", "yes"),
    "yellow": ("unavailable", "disabled", "emulated", "compiled", "skipped", "warning", "note"),
    "red": ("broken", "incompatible", "ambiguous", "fail", "failed", "error", "missing"),
}
_COLOUR_OF = {word: colour for colour, words in _COLOURS.items() for word in words}


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Give a (nested) parser the ``--json`` flag; leaves what an outer parser has set alone."""
    import argparse

    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document")


class Output:
    """Where a command's results go. One per call of a command.

    Args:
        json: print nothing but the document.
        stream: where results go; ``None`` is stdout.
    """

    def __init__(self, *, json: bool = False, stream: IO[str] | None = None) -> None:
        self.json = json
        self.stream = sys.stdout if stream is None else stream
        self._documented = False
        self._console: Console | None = None if json else _console(self.stream)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Output:
        """The output that the arguments of a command ask for; the same one for the same arguments, so that documents are counted."""
        known: Output | None = getattr(args, "output_of_command", None)
        if known is None:
            known = args.output_of_command = cls(json=bool(getattr(args, "json", False)))
        return known

    def text(self, line: str = "", *, style: str = "") -> None:
        """Print a line. ``style`` is a rich style for a person, for example ``"bold green"``."""
        if self.json:
            return
        if self._console is None:
            self.stream.write(line.rstrip() + "\n")
            return
        from rich.text import Text

        self._console.print(Text(line, style=style), soft_wrap=True)

    def facts(self, pairs: Iterable[tuple[str, object]], *, title: str = "") -> None:
        """Print names and values, one a line, the values aligned."""
        if title:
            self.text(title, style="bold")
        rows = [(name, _cell(value)) for name, value in pairs]
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.text(f"{'  ' if title else ''}{name:<{width}}  {value}")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
        """Print a table. Columns that hold numbers alone are right-aligned; floats are printed to 4 digits."""
        if self.json:
            return
        body = [list(row) for row in rows]
        for row in body:
            if len(row) != len(columns):
                raise ValueError(f"a row has {len(row)} cells; the table has {len(columns)} columns: {row!r}")
        right = [bool(body) and all(_is_number(row[i]) for row in body) for i in range(len(columns))]
        cells = [[_cell(value) for value in row] for row in body]
        if self._console is None:
            self._plain_table(columns, cells, right, title)
        else:
            self._rich_table(columns, cells, right, title)

    @contextmanager
    def progress(self, what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show progress on stderr to a person; silent for pipes and ``--json``.

        Args:
            what: what is being done.
            total: number of steps, ``None`` when unknown.

        Yields:
            a function to call after each step.
        """
        console = None if self.json else _console(sys.stderr)
        if console is None:
            yield lambda: None
            return
        from rich.progress import Progress

        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)

    def document(self, command: str, content: Mapping[str, object]) -> None:
        """Print the JSON document of a command: ``content`` after the schema version, the command and megamoe's version."""
        if not self.json:
            return
        self._documented = True
        head = {"schema": SCHEMA, "command": command, "megamoe": megamoe.__version__}
        self.stream.write(json.dumps(jsonable({**head, **content}), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def error(self, error: MegaMoEError, *, command: str = "") -> None:
        """Say on stderr what went wrong; with ``--json`` also as the document, unless there has been one."""
        sys.stderr.write(f"megamoe: {type(error).__name__}: {error}\n")
        if not self._documented:
            self.document(command, {"error": {"type": type(error).__name__, "message": error.message, "fix": error.hint}})

    def _plain_table(self, columns: Sequence[str], cells: list[list[str]], right: list[bool], title: str) -> None:
        widths = [max(len(column), *(len(row[i]) for row in cells), 0) for i, column in enumerate(columns)]
        if title:
            self.text(title)
        for row in ([*columns], *cells):
            padded = (text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True))
            self.text("  ".join(padded))

    def _rich_table(self, columns: Sequence[str], cells: list[list[str]], right: list[bool], title: str) -> None:
        from rich.table import Table
        from rich.text import Text

        # Text, not str: rich would take "megamoe-core[sm90]" for markup and drop the bracket.
        table = Table(title=Text(title) if title else None, title_justify="left", header_style="bold")
        for column, r in zip(columns, right, strict=True):
            table.add_column(Text(column), justify="right" if r else "left", overflow="fold")
        for row in cells:
            table.add_row(*(Text(text, style=_COLOUR_OF.get(text, "")) for text in row))
        assert self._console is not None
        self._console.print(table)


def jsonable(value: object) -> object:
    """A value as JSON can hold it: dataclasses become objects, tuples and sets lists, infinities and NaN the words for them."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((jsonable(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _console(stream: IO[str]) -> Console | None:
    """A rich console when a person is looking at ``stream`` and rich is there."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False)
