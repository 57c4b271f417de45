"""What a new source tree changes against the drop that is installed: files, and public symbols with their signatures and values."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megamoe.drop import manifest as manifests
from megamoe.drop.export import original_files
from megamoe.drop.locate import find_package
from megamoe.drop.parameters import parameters, render
from megamoe.drop.source import collect
from megamoe.drop.symbols import Index, NotConstant, Symbol, module_name


@dataclass(frozen=True, slots=True)
class SymbolChange:
    """A public symbol that differs.

    Attributes:
        module: dotted name relative to the root of the drop.
        name: the symbol, ``Class.method`` for a member.
        before: how it was defined, empty for a new one.
        after: how it is defined now, empty for one that is gone.
    """

    module: str
    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of :func:`diff`.

    Attributes:
        added, removed, changed: paths relative to the root.
        unchanged: number of files with equal bytes.
        symbols: public symbols that differ, in the changed files.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: int
    symbols: tuple[SymbolChange, ...]


def diff(wheel: str | Path, source: str | Path, packages: Sequence[str] = ()) -> Difference:
    """Compare a source tree with the drop in a wheel (its originals, pending local diffs aside).

    Args:
        wheel: see ``locate.find_package``.
        source: the folder that holds the packages.
        packages: packages to compare; empty for those of the installed drop.

    Raises:
        DropError: no such wheel or no drop in it, the drop was edited, or the source cannot be read.
    """
    package = find_package(wheel)
    manifest = manifests.require(package)
    before, after = original_files(package), collect(Path(source), tuple(packages) or manifest.packages, manifest.exclude)
    changed = tuple(sorted(name for name in before.keys() & after.keys() if before[name] != after[name]))
    touched = {*changed, *(before.keys() ^ after.keys())}
    return Difference(
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        changed=changed,
        unchanged=len(before.keys() & after.keys()) - len(changed),
        symbols=_symbol_changes(before, after, sorted(name for name in touched if name.endswith(".py"))),
    )


def _symbol_changes(before: Mapping[str, bytes], after: Mapping[str, bytes], paths: Sequence[str]) -> tuple[SymbolChange, ...]:
    old_index, new_index = Index(before), Index(after)
    found = []
    for path in paths:
        module = module_name(path)
        old = {name: _describe(old_index, symbol) for name, symbol in (old_index.public(module) if path in before else ())}
        new = {name: _describe(new_index, symbol) for name, symbol in (new_index.public(module) if path in after else ())}
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                found.append(SymbolChange(module, name, old.get(name, ""), new.get(name, "")))
    return tuple(found)


def _describe(index: Index, symbol: Symbol) -> str:
    node = symbol.node
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})" if node.bases else f"class {node.name}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"def {node.name}{render(parameters(node.args))}"
    try:
        return f"{symbol.name} = {index.value(symbol)!r}"
    except NotConstant:
        return f"{symbol.name} = {ast.unparse(node.value) if node.value else '...'}"
