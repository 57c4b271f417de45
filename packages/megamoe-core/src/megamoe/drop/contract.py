"""``shim/contract.toml``: what a wheel's adapter code relies on in its kernel drop.

::

    schema = 1

    [[symbols]]                                     # must exist
    module = "moe_x.runner_common"                  # relative to _drop
    names = ["ceil_div", "round_up"]

    [[signatures]]                                  # exactly these parameters; a class stands for its constructor
    module = "moe_x.kernel"
    name = "Kernel.__call__"
    signature = "(self, a, b, *, stream=...)"       # a default of ... stands for any default
    open = true                                     # optional: parameters with a default may be added

    [[constants]]                                   # this value
    module = "common.constants"
    name = "BLOCK"
    value = 32
    mirror = "shim/plan.py:_BLOCK"                  # optional: our own copy of it, which must agree too
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe.drop.manifest import read_table
from megamoe.drop.parameters import Parameter, parse_signature

NAME = "contract.toml"
FOLDER = "shim"
SCHEMA = 1
_OPTIONAL = {"signatures": {"open"}, "constants": {"mirror"}}
_KEYS = {"symbols": {"module", "names"}, "signatures": {"module", "name", "signature"}, "constants": {"module", "name", "value"}}


@dataclass(frozen=True, slots=True)
class Signature:
    """A callable with exactly these parameters; where ``open``, others that have a default may come."""

    module: str
    name: str
    parameters: tuple[Parameter, ...]
    open: bool


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant with exactly this value; ``mirror`` is ``path:NAME`` of our own copy, or empty."""

    module: str
    name: str
    value: object
    mirror: str


@dataclass(frozen=True, slots=True)
class Contract:
    """The contents of ``contract.toml``.

    Attributes:
        symbols: (module, name) pairs that must exist.
        signatures: callables and their parameters.
        constants: constants and their values.
    """

    symbols: tuple[tuple[str, str], ...] = ()
    signatures: tuple[Signature, ...] = ()
    constants: tuple[Constant, ...] = ()

    @property
    def names(self) -> frozenset[tuple[str, str]]:
        """Every (module, top-level name) that the contract speaks of."""
        stated = [*self.symbols, *((s.module, s.name) for s in self.signatures), *((c.module, c.name) for c in self.constants)]
        return frozenset((module, name.partition(".")[0]) for module, name in stated)

    def __len__(self) -> int:
        return len(self.symbols) + len(self.signatures) + len(self.constants)


def read(package: Path) -> Contract | None:
    """The contract of the package in this folder, ``None`` when it has none.

    Raises:
        DropRefused: the file is not valid; names file and line, or the entry.
    """
    path = package / FOLDER / NAME
    if not path.is_file():
        return None
    table = read_table(path, _problems, hint="docs/kernel_drops.md describes the entries")
    return Contract(
        symbols=tuple((entry["module"], name) for entry in table.get("symbols", ()) for name in entry["names"]),
        signatures=tuple(
            Signature(entry["module"], entry["name"], tuple(parse_signature(entry["signature"])), entry.get("open", False))
            for entry in table.get("signatures", ())
        ),
        constants=tuple(
            Constant(entry["module"], entry["name"], entry["value"], entry.get("mirror", "")) for entry in table.get("constants", ())
        ),
    )


def _problems(table: dict[str, Any]) -> Iterator[str]:
    if table.get("schema") != SCHEMA:
        yield f"schema is {table.get('schema')!r}; this version reads {SCHEMA}"
    for key in table.keys() - _KEYS.keys() - {"schema"}:
        yield f"unknown key {key!r}; allowed: schema, {', '.join(_KEYS)}"
    for kind, keys in _KEYS.items():
        entries = table.get(kind, [])
        if not isinstance(entries, list):
            yield f"{kind} must be a list of tables, [[{kind}]]"
            continue
        for number, entry in enumerate(entries, 1):
            yield from (f"[[{kind}]] number {number} {text}" for text in _entry_problems(kind, keys, entry))


def _entry_problems(kind: str, keys: set[str], entry: object) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield "is not a table"
        return
    allowed = keys | _OPTIONAL.get(kind, set())
    if missing := keys - entry.keys():
        yield f"lacks {', '.join(sorted(missing))}"
    if unknown := entry.keys() - allowed:
        yield f"has unknown keys {', '.join(sorted(unknown))}; allowed: {', '.join(sorted(allowed))}"
    if not isinstance(entry.get("open", False), bool):
        yield f"has open = {entry['open']!r}; allowed: true, false"
    for key in allowed & entry.keys() - {"value", "names", "open"}:
        if not isinstance(entry[key], str):
            yield f"has {key} = {entry[key]!r}; allowed: a string"
    names = entry.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        yield f"has names = {names!r}; allowed: a list of strings"
    if isinstance(signature := entry.get("signature"), str):
        try:
            parse_signature(signature)
        except SyntaxError:
            yield f"has signature = {signature!r}; allowed: a parameter list such as '(self, a, *, b=...)'"
    mirror = entry.get("mirror")
    if isinstance(mirror, str) and (mirror.count(":") != 1 or not mirror.partition(":")[0].endswith(".py")):
        yield f"has mirror = {mirror!r}; allowed: 'shim/file.py:NAME'"
