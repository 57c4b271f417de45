"""``drop.toml``: where a wheel's kernels come from and what every original file hashed to. Read with tomllib, written here."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from megamoe.drop.faults import DropRefused, Fault
from megamoe.protocol import DropInfo

NAME = "drop.toml"
TREE = "_drop"
INIT = "__init__.py"
SCHEMA = 1
FIRST_PARTY = "first-party"
UPSTREAM = "upstream"

DEFAULT_EXCLUDE = (
    # caches and editor leavings
    "__pycache__", "*.pyc", "*.pyo", ".*_cache", ".git", ".DS_Store", "*.egg-info",
    # data blobs
    "benchmark_data", "core.python.*", "*.npy", "*.npz", "*.pt", "*.pth", "*.bin", "*.safetensors", "*.so", "*.o", "*.cubin",
    # scaffolding at the root of a kernel repository
    "/ci", "/tester", "/tests", "/scripts", "/pyproject.toml", "/dispatch_test.py", "/README.md",
)  # fmt: skip
"""What ``update`` leaves out unless ``drop.toml`` says otherwise. A pattern matches a file or folder name at any depth; with a leading
slash it matches a path from the root of the source tree."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A pending local diff: a change to the drop that upstream has not taken yet.

    Attributes:
        file: the unified diff, a path inside the package; it applies to the original files, in the order of ``drop.toml``.
        sha256: of the diff's bytes.
        reason: why the change is needed, and where it was reported.
    """

    file: str
    sha256: str
    reason: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of ``drop.toml``.

    Attributes:
        origin: ``"upstream"``, or ``"first-party"`` for kernels that are written in this wheel (no originals to compare with).
        upstream: name of the upstream project.
        commit: its commit.
        date: ISO date of the drop.
        namespace: dotted name under which the packages are imported, ``<package>._drop``.
        packages: the top-level packages taken; for a first-party drop those in ``_drop`` are meant.
        exclude: patterns left out at take-in, see :data:`DEFAULT_EXCLUDE`.
        patches: pending local diffs, in order.
        files: sha256 of each original file, by path relative to the source root; empty for a first-party drop.
    """

    origin: str = UPSTREAM
    upstream: str = ""
    commit: str = ""
    date: str = ""
    namespace: str = ""
    packages: tuple[str, ...] = ()
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    patches: tuple[Patch, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def first_party(self) -> bool:
        """Whether the kernels are written in this wheel."""
        return self.origin == FIRST_PARTY

    def to_toml(self) -> str:
        """The text of ``drop.toml``; :func:`read` gives an equal manifest back."""
        lines = ["# Written by `megamoe drop update`. `exclude` may be edited and holds for the next update.", f"schema = {SCHEMA}"]
        for key in ("origin", "upstream", "commit", "date", "namespace"):
            if value := getattr(self, key):
                lines.append(f"{key} = {_quote(value)}")
        lines += [f"packages = {_array(self.packages)}", f"exclude = {_array(self.exclude)}"]
        for patch in self.patches:
            lines += ["", "[[patches]]", *(f"{f.name} = {_quote(getattr(patch, f.name))}" for f in fields(Patch))]
        if self.files:
            lines += ["", "[files]", *(f"{_quote(path)} = {_quote(digest)}" for path, digest in sorted(self.files.items()))]
        return "\n".join(lines) + "\n"


def read(package: Path) -> Manifest | None:
    """The manifest of the package in this folder, ``None`` when it has none.

    Raises:
        DropRefused: ``drop.toml`` is not valid; names file and line, or the key.
    """
    path = package / NAME
    if not path.is_file():
        return None
    table = read_table(path, _problems, hint="write it with `megamoe drop update`")
    table.pop("schema")
    table.update({key: tuple(table[key]) for key in ("packages", "exclude") if key in table})
    table["patches"] = tuple(Patch(**patch) for patch in table.get("patches", ()))
    return Manifest(**table)


def require(package: Path) -> Manifest:
    """Like :func:`read`, but a package without a manifest is an error."""
    manifest = read(package)
    if manifest is None:
        fault = Fault(str(package / NAME), 1, "no such file")
        raise DropRefused(f"{package} carries no kernel drop.", [fault], hint="take one in with `megamoe drop update`")
    return manifest


def drop_info(init: str) -> DropInfo:
    """What ``drop.toml`` says, for ``BackendSpec.drop``: ``drop=drop_info(__file__)`` in ``__init__.py`` is never out of date.

    Raises:
        DropRefused: no ``drop.toml`` beside that file, or an invalid one.
    """
    manifest = require(Path(init).parent)
    return DropInfo(FIRST_PARTY if manifest.first_party else manifest.upstream, manifest.commit, manifest.date)


def read_table(path: Path, problems: Callable[[dict[str, Any]], Iterable[str]], *, hint: str) -> dict[str, Any]:
    """Parse a TOML file and check what it says.

    Args:
        path: the file.
        problems: says what is wrong with the parsed table.
        hint: the fix for that.

    Raises:
        DropRefused: every problem; or a syntax error with its line; or not UTF-8.
    """
    table = _parse(path)
    faults = [Fault(str(path), 1, text) for text in problems(table)]
    if faults:
        raise DropRefused(f"{path} is not valid.", faults, hint=hint)
    return table


def _parse(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        line, text = 1 + data[: error.start].count(b"\n"), "is not UTF-8"
    except tomllib.TOMLDecodeError as error:
        text = str(error)
        line = int(found[1]) if (found := re.search(r"line (\d+)", text)) else len(data.splitlines())  # "at end of document"
    raise DropRefused(f"{path} is not valid TOML.", [Fault(str(path), line, text)], hint="correct the file")


def tree_files(package: Path) -> dict[str, Path]:
    """Every file under ``_drop`` but caches, by path relative to it."""
    root = package / TREE
    found = (p for p in sorted(root.rglob("*")) if p.is_symlink() or not p.is_dir())
    relative = {p.relative_to(root): p for p in found}
    # Python imports a .pyc that lies beside the sources, so only those in its cache folders are no part of the kernels.
    return {name.as_posix(): p for name, p in relative.items() if "__pycache__" not in name.parts}


def kernel_files(package: Path) -> dict[str, Path]:
    """:func:`tree_files` without ``_drop/__init__.py``, which belongs to the wheel and not to the drop."""
    found = tree_files(package)
    found.pop(INIT, None)
    return found


def tree_digest(package: Path) -> str:
    """sha256 over the names and bytes of all kernel files as installed: equal digests mean equal kernels, wherever they lie.

    This is the drop hash that ranks compare and that compile caches are keyed by.
    """
    total = hashlib.sha256()
    for relative, path in tree_files(package).items():
        data = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        total.update(f"{relative}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return total.hexdigest()


def _problems(table: Mapping[str, Any]) -> list[str]:
    found = []
    if table.get("schema") != SCHEMA:
        found.append(f"schema is {table.get('schema')!r}; this version reads {SCHEMA}")
    if table.get("origin", UPSTREAM) not in (UPSTREAM, FIRST_PARTY):
        found.append(f"origin is {table['origin']!r}; allowed: {UPSTREAM!r}, {FIRST_PARTY!r}")
    known = {"schema", *(f.name for f in fields(Manifest))}
    found += [f"unknown key {key!r}; allowed: {', '.join(sorted(known))}" for key in table if key not in known]
    for key in ("upstream", "commit", "date", "namespace"):
        if not isinstance(table.get(key, ""), str):
            found.append(f"{key} is {table[key]!r}; allowed: a string")
    for key in ("packages", "exclude"):
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            found.append(f"{key} is {value!r}; allowed: a list of strings")
    patches, files = table.get("patches", []), table.get("files", {})
    if not isinstance(patches, list) or any(not isinstance(p, dict) or set(p) != {"file", "sha256", "reason"} for p in patches):
        found.append("each of [[patches]] has exactly the keys file, sha256 and reason")
        patches = []
    if not isinstance(files, dict) or not all(isinstance(v, str) for v in files.values()):
        found.append("[files] maps paths to sha256 strings")
        files = {}
    for path in [*files, *(p["file"] for p in patches)]:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts:
            found.append(f"path {path!r} leaves the tree")
    return found


def _quote(text: str) -> str:
    # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _array(items: tuple[str, ...]) -> str:
    body = ", ".join(map(_quote, items))
    return f"[{body}]" if len(body) < 120 else "[\n" + "".join(f"  {_quote(item)},\n" for item in items) + "]"
