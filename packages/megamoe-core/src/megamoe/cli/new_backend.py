"""Make a wheel with a backend of your own: it has a torch kernel, passes the conformance kit, and is yours to change.

docs/writing_a_backend.md walks through it.
"""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

import megamoe
from megamoe import metadata
from megamoe.cli import codes
from megamoe.cli.output import Output
from megamoe.drop.folder import in_use, write_folder
from megamoe.errors import InvalidInput
from megamoe.protocol import ENTRY_POINT_GROUP, PROTOCOL
from megamoe.select import AUTO, REFERENCE

SUMMARY = "make a wheel with a backend of your own"

_SUFFIX = ".tmpl"
_PACKAGE = "PACKAGE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Name and folder."""
    parser.add_argument("name", metavar="NAME", help="the name users will choose the backend by, for example acme")
    parser.add_argument("folder", metavar="DIR", help="a new or empty folder for the wheel's project")


def run(args: argparse.Namespace) -> int:
    """Write the project and say what to do next."""
    out = Output.of(args)
    folder = Path(args.folder)
    written = new_backend(args.name, folder)
    distribution, package = names(args.name)
    out.text(f"wrote {distribution} to {folder}: {len(written)} files")
    out.text("next:")
    for line in (f"cd {folder}", 'pip install -e ".[test]"', "pytest", f"megamoe backends  # {args.name} is in the list"):
        out.text(f"  {line}")
    out.document(
        "new-backend", {"name": args.name, "distribution": distribution, "package": package, "folder": folder.resolve(), "files": written}
    )
    return codes.OK


def names(name: str) -> tuple[str, str]:
    """Names of the distribution and of the import package for a backend."""
    return f"megamoe-{name.replace('_', '-')}", f"megamoe_{name}"


def new_backend(name: str, folder: Path) -> list[str]:
    """Write the project of a wheel with the backend ``name``.

    Args:
        name: lower-case letters, digits and single underscores between them, a letter first; neither an installed backend nor one of
            megamoe's own wheels has it.
        folder: where to write; must not exist yet or be empty.

    Returns:
        paths written, relative to ``folder``.

    Raises:
        InvalidInput: the name or the folder is not usable.
        DropError: writing failed; nothing is left behind.
    """
    _check(name, folder)
    distribution, package = names(name)
    major, minor = megamoe.__version__.split(".")[:2]
    values = {
        "name": name,
        "distribution": distribution,
        "package": package,
        "class_name": "".join(part.capitalize() for part in name.split("_")) + "Backend",
        "protocol": repr(PROTOCOL),
        "core": f">={major}.{minor},<{major}.{int(minor) + 1}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    rendered = {path.replace(_PACKAGE, package): Template(text).substitute(values).encode() for path, text in _templates()}
    write_folder(folder, rendered)
    return sorted(rendered)


def _check(name: str, folder: Path) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise InvalidInput(
            f"{name!r} cannot name a backend; allowed: lower-case letters, digits and single underscores between them, a letter first.",
            hint="for example acme_sm90",
        )
    ours = (metadata.CORE, *metadata.ARCH_WHEELS)
    if name in (AUTO, REFERENCE) or names(name)[0] in ours:
        raise InvalidInput(
            f"the name {name!r} is megamoe's own; allowed: any but {AUTO}, {REFERENCE} and those of {', '.join(ours)}.",
            hint="choose another name",
        )
    from importlib.metadata import entry_points

    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            holder = entry.dist.name if entry.dist else entry.value
            raise InvalidInput(f"the name {name!r} is taken by {holder}; a second one would be ambiguous.", hint="choose another name")
    if in_use(folder):
        raise InvalidInput(f"{folder} exists; allowed: a new or an empty folder.", hint="name another folder")


def _templates() -> Iterator[tuple[str, str]]:
    """Path and text of every template."""
    pending: list[tuple[str, Traversable]] = [("", files("megamoe") / "templates" / "backend")]
    while pending:
        path, place = pending.pop()
        for child in place.iterdir():
            inner = f"{path}{child.name}"
            if child.is_dir():
                pending.append((f"{inner}/", child))
            elif child.name.endswith(_SUFFIX):
                yield inner.removesuffix(_SUFFIX), child.read_text(encoding="utf-8")
