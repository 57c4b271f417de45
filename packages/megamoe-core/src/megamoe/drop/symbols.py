"""What a tree of modules defines, found by ``ast`` alone: classes, functions, signatures, constants, followed through re-exports."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from megamoe.drop.module import Module, Unreadable, parse

_DEPTH = 16
_ARITHMETIC: dict[type, Callable[..., object]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_, ast.BitXor: operator.xor,
}  # fmt: skip
_UNARY: dict[type, Callable[..., object]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert, ast.Not: operator.not_,
}  # fmt: skip

Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


class NotConstant(Exception):
    """An expression whose value cannot be read without running code."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A definition.

    Attributes:
        name: its own name, without that of its class.
        module: the module it is defined in, which a re-export follows to.
        node: its syntax node.
        owner: the class that holds it, ``None`` at module level.
    """

    name: str
    module: Module
    node: Node
    owner: ast.ClassDef | None = None

    @property
    def line(self) -> int:
        """Line of the definition, decorators aside."""
        return self.node.lineno

    @property
    def kind(self) -> str:
        """``"class"``, ``"function"`` or ``"constant"``."""
        if isinstance(self.node, ast.ClassDef):
            return "class"
        return "constant" if isinstance(self.node, ast.Assign | ast.AnnAssign) else "function"


class Index:
    """The definitions of a tree.

    Args:
        files: contents by path relative to the tree's root.
        namespace: prefix under which absolute imports name the tree's own packages; empty for an original tree.
    """

    def __init__(self, files: Mapping[str, bytes], namespace: str = "") -> None:
        self._files = files
        self._prefix = f"{namespace}." if namespace else ""
        self._parsed: dict[str, Module | None] = {}

    def module(self, dotted: str) -> Module | None:
        """The module of this dotted name relative to the root; ``None`` when there is none or it is not Python."""
        if dotted not in self._parsed:
            stem = dotted.replace(".", "/")
            path = next((p for p in (f"{stem}.py", f"{stem}/__init__.py") if p in self._files), None)
            try:
                self._parsed[dotted] = parse(self._files[path], path, path) if path else None
            except Unreadable:
                self._parsed[dotted] = None
        return self._parsed[dotted]

    def is_module(self, dotted: str) -> bool:
        """Whether there is such a module, or a folder that can be imported as one."""
        return self.module(dotted) is not None or any(path.startswith(f"{dotted.replace('.', '/')}/") for path in self._files)

    def find(self, dotted: str, name: str, depth: int = _DEPTH) -> Symbol | None:
        """The definition of ``name`` (``Class.method`` for a member, also an inherited one) in a module, through re-exports."""
        module = self.module(dotted)
        if module is None or not depth:
            return None
        first, _, rest = name.partition(".")
        symbol = self._in_module(module, first, depth)
        for part in rest.split(".") if rest else ():
            symbol = self._member(symbol, part, depth) if symbol else None
        return symbol

    def public(self, dotted: str) -> Iterator[tuple[str, Symbol]]:
        """Public definitions of a module itself, and the public and the constructing and calling methods of its classes."""
        module = self.module(dotted)
        for node in _statements(module.tree.body) if module else ():
            for name in _names(node):
                if module is None or name.startswith("_"):
                    continue
                yield name, Symbol(name, module, node)
                if isinstance(node, ast.ClassDef):
                    for member in _statements(node.body):
                        for part in _names(member):
                            if not part.startswith("_") or part in ("__init__", "__call__"):
                                yield f"{name}.{part}", Symbol(part, module, member, node)

    def value(self, symbol: Symbol, depth: int = _DEPTH) -> object:
        """The value of a constant: literals, arithmetic, and names of other constants of the tree.

        Raises:
            NotConstant: it depends on code that would have to run.
        """
        if not isinstance(symbol.node, ast.Assign | ast.AnnAssign) or symbol.node.value is None:
            raise NotConstant
        return self._evaluate(_assigned(symbol.node, symbol.name), symbol, depth)

    def signature(self, symbol: Symbol) -> tuple[Symbol, ast.arguments] | None:
        """The parameters of a function, or of what constructs a class, and where they stand; ``None`` when it cannot be told."""
        if isinstance(symbol.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return symbol, symbol.node.args
        if not isinstance(symbol.node, ast.ClassDef):
            return None
        init = self._member(symbol, "__init__", _DEPTH)
        if init is not None and isinstance(init.node, ast.FunctionDef):
            return init, init.node.args
        generated = self._dataclass_init(symbol)
        return None if generated is None else (symbol, generated)

    def _in_module(self, module: Module, name: str, depth: int) -> Symbol | None:
        found = None
        for node in _statements(module.tree.body):
            if name in _names(node):
                found = Symbol(name, module, node)  # the last definition is the one in force
        return found or self._imported(module, name, depth)

    def _imported(self, module: Module, name: str, depth: int) -> Symbol | None:
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name and (home := self._home(module, node)) is not None:
                        return self.find(home, alias.name, depth - 1)
        return None

    def _home(self, module: Module, node: ast.ImportFrom) -> str | None:
        if not node.level:
            dotted = node.module or ""
            return dotted.removeprefix(self._prefix) if dotted.startswith(self._prefix) else None
        base = module.package[: len(module.package) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    def _member(self, symbol: Symbol, name: str, depth: int) -> Symbol | None:
        if not isinstance(symbol.node, ast.ClassDef) or not depth:
            return None
        found = None
        for node in _statements(symbol.node.body):
            if name in _names(node):
                found = Symbol(name, symbol.module, node, symbol.node)
        for base in symbol.node.bases if found is None else ():
            parent = self._in_module(symbol.module, base.id, depth) if isinstance(base, ast.Name) else None
            found = self._member(parent, name, depth - 1) if parent else None
            if found:
                break
        return found

    def _dataclass_init(self, symbol: Symbol) -> ast.arguments | None:
        if not isinstance(symbol.node, ast.ClassDef) or not any("dataclass" in ast.unparse(d) for d in symbol.node.decorator_list):
            return None
        fields: dict[str, ast.AnnAssign] = {}
        for node in self._dataclass_fields(symbol, _DEPTH):
            assert isinstance(node.target, ast.Name)
            fields[node.target.id] = node
        everything_keyword = any("kw_only=True" in ast.unparse(d) for d in symbol.node.decorator_list)
        result = ast.arguments([], [ast.arg("self")], None, [], [], None, [])
        for name, node in fields.items():
            options = _field_options(node.value)
            default = node.value if options is None else options.get("default", options.get("default_factory"))
            if options and isinstance(init := options.get("init"), ast.Constant) and init.value is False:
                continue
            keyword = options.get("kw_only") if options else None
            if everything_keyword or (isinstance(keyword, ast.Constant) and keyword.value is True):
                result.kwonlyargs.append(ast.arg(name, lineno=node.lineno, col_offset=node.col_offset))
                result.kw_defaults.append(default)
            else:
                result.args.append(ast.arg(name, lineno=node.lineno, col_offset=node.col_offset))
                result.defaults += [default] if default is not None else []
        return result

    def _dataclass_fields(self, symbol: Symbol, depth: int) -> Iterator[ast.AnnAssign]:
        if not isinstance(symbol.node, ast.ClassDef) or not depth:
            return
        for base in reversed(symbol.node.bases):
            if isinstance(base, ast.Name) and (parent := self._in_module(symbol.module, base.id, depth)):
                yield from self._dataclass_fields(parent, depth - 1)
        for node in symbol.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "ClassVar" not in ast.unparse(node.annotation):
                yield node

    def _evaluate(self, node: ast.expr, symbol: Symbol, depth: int) -> object:
        if not depth:
            raise NotConstant
        match node:
            case ast.Constant():
                return node.value
            case ast.Tuple() | ast.List():
                return [self._evaluate(item, symbol, depth - 1) for item in node.elts]
            case ast.Dict(keys=keys) if all(key is not None for key in keys):
                pairs = zip(keys, node.values, strict=True)
                return {self._evaluate(k, symbol, depth - 1): self._evaluate(v, symbol, depth - 1) for k, v in pairs if k is not None}
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return self._arithmetic(_UNARY[type(op)], self._evaluate(operand, symbol, depth - 1))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                sides = self._evaluate(left, symbol, depth - 1), self._evaluate(right, symbol, depth - 1)
                return self._arithmetic(_ARITHMETIC[type(op)], *sides)
            case ast.Name(id=name):
                owner = Symbol(symbol.owner.name, symbol.module, symbol.owner) if symbol.owner else None
                found = (self._member(owner, name, depth - 1) if owner else None) or self._in_module(symbol.module, name, depth - 1)
                if found is not None and found.node is not symbol.node:
                    return self.value(found, depth - 1)
        raise NotConstant

    @staticmethod
    def _arithmetic(function: Callable[..., object], *operands: object) -> object:
        if not all(isinstance(x, int | float) for x in operands):
            raise NotConstant
        try:
            return function(*operands)
        except (ArithmeticError, TypeError, ValueError):
            raise NotConstant from None


def module_name(path: str) -> str:
    """The dotted name of a file relative to the root: ``common/x.py`` is ``common.x``, ``common/__init__.py`` is ``common``."""
    pure = PurePosixPath(path).with_suffix("")
    return ".".join(pure.parts[:-1] if pure.name == "__init__" else pure.parts)


def _statements(body: list[ast.stmt]) -> Iterator[Node]:
    """Definitions in a body, also those under ``if``, ``try`` and ``with``."""
    for node in body:
        if isinstance(node, Node):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for inner in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, inner, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _names(node: Node) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        yield from (t.id for target in node.targets for t in ast.walk(target) if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store))
    elif isinstance(node, ast.AnnAssign):
        yield from ([node.target.id] if isinstance(node.target, ast.Name) else [])
    else:
        yield node.name


def _assigned(node: ast.Assign | ast.AnnAssign, name: str) -> ast.expr:
    """The expression that an assignment gives to ``name``, also in ``A, B = 1, 2``."""
    value = node.value
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Name) and target.id == name and value is not None:
            return value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for part, item in zip(target.elts, value.elts, strict=True):
                if isinstance(part, ast.Name) and part.id == name:
                    return item
    raise NotConstant


def _field_options(value: ast.expr | None) -> dict[str, ast.expr] | None:
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
        return {keyword.arg: keyword.value for keyword in value.keywords if keyword.arg}
    return None
