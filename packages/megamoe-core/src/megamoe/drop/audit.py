"""Check what ``shim/`` relies on against the kernel drop, without importing either."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megamoe.drop import contract as contracts
from megamoe.drop import manifest as manifests
from megamoe.drop.contract import Constant, Contract, Signature
from megamoe.drop.faults import Fault
from megamoe.drop.locate import find_package
from megamoe.drop.manifest import TREE, Manifest
from megamoe.drop.module import Module, Unreadable, parse
from megamoe.drop.parameters import differences, parameters, render
from megamoe.drop.source import collect
from megamoe.drop.symbols import Index, NotConstant, Symbol


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of :func:`audit`.

    Attributes:
        package: the package whose contract was checked.
        tree: the folder that holds the kernels it was checked against.
        checks: number of things checked.
        problems: every mismatch; empty when the drop keeps the contract.
    """

    package: Path
    tree: Path
    checks: int
    problems: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        """Whether the drop keeps the contract."""
        return not self.problems


def audit(wheel: str | Path, source: str | Path | None = None) -> Audit:
    """Check ``shim/contract.toml``, and that everything ``shim/`` imports from the drop is in it.

    Args:
        wheel: see ``locate.find_package``.
        source: check against this source tree instead of the installed drop: what would break if it were taken in.

    Raises:
        DropError: no such wheel, no drop in it, or the contract is not valid.
    """
    package = find_package(wheel)
    manifest = manifests.require(package)
    stated = contracts.read(package)
    if source is None:
        tree, namespace = package / TREE, manifest.namespace
        files = {name: path.read_bytes() for name, path in manifests.tree_files(package).items() if path.is_file()}
    else:
        tree, namespace = Path(source), ""
        files = collect(tree, manifest.packages, manifest.exclude)
    auditor = _Auditor(package, tree, Index(files, namespace), files)
    contract = stated or Contract()
    problems = [*auditor.contract(contract), *auditor.shim(contract, manifest)]
    if stated is None and manifests.kernel_files(package):
        problems.append(Fault(str(package / contracts.FOLDER / contracts.NAME), 1, "no such file; it states what shim/ relies on"))
    return Audit(package, tree, len(contract) + auditor.uses, tuple(sorted(problems)))


class _Auditor:
    def __init__(self, package: Path, tree: Path, index: Index, files: dict[str, bytes]) -> None:
        self._package, self._tree, self._index, self._files = package, tree, index, files
        self._contract = package / contracts.FOLDER / contracts.NAME
        self.uses = 0

    def contract(self, contract: Contract) -> Iterator[Fault]:
        for module, name in contract.symbols:
            if self._find(module, name) is None:
                yield self._missing(module, name, "symbols")
        for signature in contract.signatures:
            yield from self._signature(signature)
        for constant in contract.constants:
            yield from self._constant(constant)

    def shim(self, contract: Contract, manifest: Manifest) -> Iterator[Fault]:
        """What ``shim/`` imports from the drop, or names in a module of it: each must exist and be stated in the contract."""
        for path in sorted((self._package / contracts.FOLDER).rglob("*.py")):
            try:
                module = parse(path.read_bytes(), path.relative_to(self._package).as_posix(), str(path))
            except Unreadable as error:
                yield error.fault
                continue
            modules: dict[str, str] = {}
            for node in module.nodes:
                if isinstance(node, ast.ImportFrom) and (home := _inside(module, node, manifest.namespace)) is not None:
                    for alias in node.names:
                        inner = f"{home}.{alias.name}".lstrip(".")
                        if self._index.is_module(inner):
                            modules[alias.asname or alias.name] = inner
                        else:
                            yield from self._use(contract, home, alias.name, str(path), node.lineno)
                for alias in node.names if isinstance(node, ast.Import) else ():
                    if f"{alias.name}.".startswith(f"{manifest.namespace}."):
                        inner = alias.name[len(manifest.namespace) + 1 :]
                        if inner and not self._index.is_module(inner):
                            yield Fault(str(path), node.lineno, f"imports {inner}, which the drop does not have", inner, "no such module")
                        if alias.asname:
                            modules[alias.asname] = inner
            for use in ast.walk(module.tree):
                if isinstance(use, ast.Attribute) and isinstance(use.value, ast.Name) and use.value.id in modules:
                    yield from self._use(contract, modules[use.value.id], use.attr, str(path), use.lineno)

    def _use(self, contract: Contract, home: str, name: str, shown: str, line: int) -> Iterator[Fault]:
        self.uses += 1
        inner = f"{home}.{name}".lstrip(".")
        if not home or self._index.module(home) is None:
            yield Fault(shown, line, f"imports from {home or TREE}, which the drop does not have", inner, "no such module")
        elif self._find(home, name) is None:
            yield self._missing(home, name, file=shown, line=line)
        elif (home, name) not in contract.names:
            yield Fault(shown, line, f"uses {inner}, which {contracts.NAME} does not state", f"an entry for {inner}", "none")

    def _signature(self, stated: Signature) -> Iterator[Fault]:
        # Not every constructor is written out: a dataclass has one too.
        symbol = self._find(stated.module, stated.name.removesuffix(".__init__"))
        if symbol is None:
            yield self._missing(stated.module, stated.name, "signatures")
            return
        found = self._index.signature(symbol)
        if found is None:
            yield self._fault(symbol, f"{stated.name} has no signature of its own", render(list(stated.parameters)), symbol.kind)
            return
        home, arguments = found
        now = parameters(arguments)
        if stated.open:
            known = {parameter.name for parameter in stated.parameters}
            now = [parameter for parameter in now if parameter.name in known or parameter.required]
        for text, before, after, line in differences(list(stated.parameters), now):
            yield self._fault(home, f"{stated.name}: {text}", before, after, line)

    def _constant(self, stated: Constant) -> Iterator[Fault]:
        symbol = self._find(stated.module, stated.name)
        if symbol is None:
            yield self._missing(stated.module, stated.name, "constants")
        else:
            found = _value(self._index, symbol)
            if not _equal(stated.value, found):
                yield self._fault(symbol, f"constant {stated.name} has another value", repr(stated.value), _show(found))
        if stated.mirror:
            yield from self._mirror(stated)

    def _mirror(self, stated: Constant) -> Iterator[Fault]:
        file, _, name = stated.mirror.partition(":")
        path = self._package / file
        if not path.is_file():
            line = self._entry_line("constants", stated.module, stated.mirror)
            yield Fault(str(self._contract), line, f"mirror {stated.mirror} of {stated.name}: no such file", str(path), "nothing")
            return
        index = Index({file: path.read_bytes()})
        symbol = index.find(file.removesuffix(".py").replace("/", "."), name)
        found = _value(index, symbol) if symbol else None
        if not _equal(stated.value, found):
            text = f"{name}, our copy of {stated.module}.{stated.name}, has another value"
            yield Fault(str(path), symbol.line if symbol else 1, text, repr(stated.value), _show(found) if symbol else "no such constant")

    def _find(self, module: str, name: str) -> Symbol | None:
        return self._index.find(module, name)

    def _missing(self, module: str, name: str, kind: str = "", file: str = "", line: int = 1) -> Fault:
        home = self._index.module(module)
        if home is None:
            where = (file, line) if file else (str(self._contract), self._entry_line(kind, module, name))
            return Fault(*where, f"module {module} is not in the drop", f"{module}.{name}", "no such module")
        owner = self._find(module, name.rpartition(".")[0]) if "." in name else None
        if owner is not None:
            return self._fault(owner, f"{name} is not in {module}", name, "no such symbol")
        return Fault(file or str(self._tree / home.path), line, f"{name} is not in {module}", name, "no such symbol")

    def _entry_line(self, kind: str, module: str, name: str) -> int:
        """Where the contract states this; the TOML parser does not say."""
        table, right_module = "", False
        for number, line in enumerate(self._contract.read_text(encoding="utf-8").splitlines(), 1):
            if line.startswith("[["):
                table, right_module = line.strip("[] \t").partition("]")[0], False
            right_module |= f'"{module}"' in line
            if table == kind and right_module and f'"{name}"' in line:
                return number
        return 1

    def _fault(self, symbol: Symbol, text: str, expected: str, found: str, line: int = 0) -> Fault:
        return Fault(str(self._tree / symbol.module.path), line or symbol.line, text, expected, found)


class _Unknown:
    """The value of a constant that cannot be read without running code."""


def _value(index: Index, symbol: Symbol) -> object:
    try:
        return index.value(symbol)
    except NotConstant:
        return _Unknown()


def _equal(stated: object, found: object) -> bool:
    return isinstance(stated, bool) == isinstance(found, bool) and stated == found


def _show(found: object) -> str:
    return "an expression that only running it can tell" if isinstance(found, _Unknown) else repr(found)


def _inside(module: Module, node: ast.ImportFrom, namespace: str) -> str | None:
    """The module that a shim's import names, relative to the drop; ``""`` is the drop's root, ``None`` is outside of it."""
    dotted = node.module or ""
    if node.level:
        base = module.package[: len(module.package) - node.level + 1]
        dotted = ".".join([namespace.removesuffix(f".{TREE}"), *base, *([dotted] if dotted else [])])
    if not f"{dotted}.".startswith(f"{namespace}."):
        return None
    return dotted[len(namespace) + 1 :]
