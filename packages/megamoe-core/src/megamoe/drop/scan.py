"""What in a module would not survive the private namespace: constructs that find modules by name behind the parser's back."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megamoe.drop.faults import Fault
from megamoe.drop.module import Module, top

_BY_NAME = frozenset({"import_module", "__import__", "find_spec", "run_module"})
_PKGUTIL = frozenset({"get_data", "resolve_name"})
_LOOKUP_HOMES = frozenset({"importlib", "importlib.util", "runpy", "pkgutil"})
_PATH_EDITS = frozenset({"append", "insert", "extend"})


@dataclass(slots=True)
class Findings:
    """What :func:`scan` saw.

    Attributes:
        faults: constructs that are refused.
        notes: what is taken but worth knowing: edits of ``sys.path``, modules looked up under a computed name, imports of what was not
            taken.
        external: top-level modules imported from outside the drop and the standard library.
    """

    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)
    external: set[str] = field(default_factory=set)


class Scanner:
    """Scans the modules of one drop.

    Args:
        namespace: the private namespace that the drop will have.
        packages: its top-level packages.
        paths: every file of the drop, relative to its root.
    """

    def __init__(self, namespace: str, packages: Iterable[str], paths: Iterable[str]) -> None:
        self._namespace = namespace
        self._tops = frozenset(packages)
        self._modules = _module_names(paths)

    def scan(self, module: Module, shown: str, findings: Findings) -> None:
        """Add to ``findings`` what this module holds, with ``shown`` as its path."""
        lookups = _lookup_names(module)
        for node in module.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                texts: Iterable[str] = self._import(node, module, shown, findings)
            elif isinstance(node, ast.Call):
                texts = self._call(node, lookups, shown, findings)
            else:
                texts = self._named(node.slice, "sys.modules is asked for") if _dotted(node.value) == "sys.modules" else ()
            findings.faults.extend(Fault(shown, node.lineno, text) for text in texts)

    def private(self, module: Module, shown: str) -> Iterator[Fault]:
        """Imports of the drop's own packages in an *installed* module that are not in the private namespace."""
        for site in module.sites():
            if top(site.module) in self._tops:
                yield Fault(shown, site.line, f"imports {site.module} from the top level", f"{self._namespace}.{site.module}", site.module)

    def _import(self, node: ast.Import | ast.ImportFrom, module: Module, shown: str, findings: Findings) -> Iterator[str]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from self._absolute(alias.name, node.lineno, shown, findings)
                if top(alias.name) in self._tops and alias.asname is None:
                    yield f"plain `import {alias.name}` binds {top(alias.name)}, which has no private name; write `from ... import ...`"
            return
        star = any(alias.name == "*" for alias in node.names)
        if not node.level:
            dotted = node.module or ""
            yield from self._absolute(dotted, node.lineno, shown, findings)
            if star and top(dotted) in self._tops:
                yield f"star import of {dotted}; name what is imported"
            return
        if node.level > len(module.package):
            dots = f"{'.' * node.level}{node.module or ''}"
            yield f"relative import `from {dots} import ...` goes above the top-level package {module.package[0]}"
            return
        base = module.package[: len(module.package) - node.level + 1]
        self._must_exist(".".join([*base, *([node.module] if node.module else [])]), node.lineno, shown, findings)

    def _absolute(self, dotted: str, line: int, shown: str, findings: Findings) -> Iterator[str]:
        if f"{dotted}.".startswith(f"{self._namespace}."):
            yield f"imports {dotted}: the source is already in the private namespace; take the exported original in"
        elif top(dotted) in self._tops:
            self._must_exist(dotted, line, shown, findings)
        elif top(dotted) not in sys.stdlib_module_names:
            findings.external.add(top(dotted))

    def _must_exist(self, dotted: str, line: int, shown: str, findings: Findings) -> None:
        if dotted not in self._modules:
            findings.notes.append(Fault(shown, line, f"imports {dotted}, which was not taken; this module cannot be imported"))

    def _call(self, node: ast.Call, lookups: frozenset[str], shown: str, findings: Findings) -> Iterator[str]:
        name = _dotted(node.func)
        last = name.rpartition(".")[2]
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if last in _BY_NAME or name in lookups or name in {f"pkgutil.{function}" for function in _PKGUTIL}:
            named = [text for argument in arguments for text in self._named(argument, f"{name}(...) looks up")]
            yield from named
            if not named and arguments and not isinstance(arguments[0], ast.Constant):
                findings.notes.append(Fault(shown, node.lineno, f"{name}(...) looks a module up under a name known only at run time"))
        elif name in ("sys.modules.get", "sys.modules.pop", "sys.modules.setdefault"):
            yield from self._named(arguments[0] if arguments else None, "sys.modules is asked for")
        elif name.startswith("sys.path.") and last in _PATH_EDITS:
            findings.notes.append(Fault(shown, node.lineno, "edits sys.path; import it under megamoe.drop.guard.drop_imports only"))

    def _named(self, node: ast.expr | None, what: str) -> Iterator[str]:
        if isinstance(node, ast.JoinedStr) and node.values:
            node = node.values[0] if isinstance(node.values[0], ast.Constant) else None
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and top(node.value) in self._tops:
            yield f"{what} {node.value!r} by its top-level name; write an import statement"


def _lookup_names(module: Module) -> frozenset[str]:
    """Local names of functions that find a module by name: ``from importlib import import_module as load`` gives ``load``."""
    return frozenset(
        alias.asname or alias.name
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and node.module in _LOOKUP_HOMES
        for alias in node.names
        if alias.name in _BY_NAME | _PKGUTIL
    )


def _module_names(paths: Iterable[str]) -> frozenset[str]:
    names: set[str] = set()
    for path in paths:
        parts = path.split("/")
        names.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
        if parts[-1].endswith(".py"):
            names.add(".".join([*parts[:-1], parts[-1].removesuffix(".py")]))
    return frozenset(names)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else [""]), *reversed(parts)])
