"""Move a module's imports of the drop's own packages to the private namespace, and back. Bytes that are not an import stay untouched.

``from common.x import y`` becomes ``from megamoe_sm90._drop.common.x import y``: only the prefix is inserted, at the byte where the
module name starts, so that line numbers stay and removing the prefix gives the original bytes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable

from megamoe.drop.module import Module, Site, parse, top


def add_prefix(module: Module, namespace: str, packages: Iterable[str]) -> bytes:
    """The module with every absolute import of ``packages`` made private."""
    prefix, tops = f"{namespace}.".encode(), frozenset(packages)
    return _edit(module, lambda site: top(site.module) in tops, b"", prefix)


def remove_prefix(module: Module, namespace: str, packages: Iterable[str]) -> bytes:
    """The inverse of :func:`add_prefix`."""
    prefix = f"{namespace}.".encode()
    tops = tuple(f"{namespace}.{package}" for package in packages)
    return _edit(module, lambda site: f"{site.module}.".startswith(tuple(f"{t}." for t in tops)), prefix, b"")


def rewrite(module: Module, namespace: str, packages: Iterable[str]) -> bytes:
    """:func:`add_prefix`, with its three promises checked: same number of lines, same syntax tree but for the prefix, exact inverse."""
    packages = tuple(packages)
    data = add_prefix(module, namespace, packages)
    if data == module.data:
        return data
    after = parse(data, str(module.path), str(module.path))
    assert len(data.splitlines()) == len(module.data.splitlines()), module.path
    assert remove_prefix(after, namespace, packages) == module.data, module.path
    assert _same(module.tree, after.tree, f"{namespace}."), module.path
    return data


def _edit(module: Module, chosen: Callable[[Site], bool], old: bytes, new: bytes) -> bytes:
    pieces, end = [], 0
    for site in sorted(filter(chosen, module.sites()), key=lambda s: s.offset):
        if not module.data.startswith(old, site.offset):
            continue  # blanks inside the dotted name: not written by this module, so not undone by it
        pieces += [module.data[end : site.offset], new]
        end = site.offset + len(old)
    return b"".join([*pieces, module.data[end:]])


def _same(before: ast.AST, after: ast.AST, prefix: str) -> bool:
    """Whether two trees are equal, positions aside and ``prefix`` taken off the module names of imports in ``after``."""
    pending: list[tuple[ast.AST, ast.AST]] = [(before, after)]
    while pending:
        old, new = pending.pop()
        if type(old) is not type(new):
            return False
        dotted = {ast.ImportFrom: "module", ast.alias: "name"}.get(type(old))
        for name in old._fields:
            left, right = getattr(old, name, None), getattr(new, name, None)
            if left is right:
                continue
            if isinstance(left, ast.AST) and isinstance(right, ast.AST):
                pending.append((left, right))
            elif isinstance(left, list) and isinstance(right, list):
                if len(left) != len(right):
                    return False
                for pair in zip(left, right, strict=True):
                    if isinstance(pair[0], ast.AST):
                        pending.append(pair)
                    elif pair[0] != pair[1]:
                        return False
            elif type(left) is not type(right) or (left != right and not (name == dotted and right == f"{prefix}{left}")):
                return False
    return True
