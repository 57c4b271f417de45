"""Parameters of a call, as data: for saying exactly how one signature differs from another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

ANY_DEFAULT = "..."


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter.

    Attributes:
        name: with its stars, for ``*args`` and ``**kwargs``.
        kind: ``"positional"`` (only), ``"either"`` or ``"keyword"`` (only); ``"rest"`` for the starred ones.
        default: source text of the default, ``None`` when a value is required.
        line: line of the definition, 0 where it has none.
    """

    name: str
    kind: str
    default: str | None
    line: int = 0

    def __str__(self) -> str:
        text = self.name if self.default is None else f"{self.name}={self.default}"
        return {"positional": f"positional-only {text}", "keyword": f"keyword-only {text}"}.get(self.kind, text)

    @property
    def required(self) -> bool:
        """Whether a caller must pass it."""
        return self.default is None and self.kind != "rest"


def parameters(arguments: ast.arguments) -> list[Parameter]:
    """The parameters of a function in order."""
    found = []
    places = [(a, "positional") for a in arguments.posonlyargs] + [(a, "either") for a in arguments.args]
    defaults = [None] * (len(places) - len(arguments.defaults)) + list(arguments.defaults)
    found += [_parameter(a, kind, default) for (a, kind), default in zip(places, defaults, strict=True)]
    if arguments.vararg:
        found.append(Parameter(f"*{arguments.vararg.arg}", "rest", None, _line(arguments.vararg)))
    found += [_parameter(a, "keyword", default) for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        found.append(Parameter(f"**{arguments.kwarg.arg}", "rest", None, _line(arguments.kwarg)))
    return found


def parse_signature(text: str) -> list[Parameter]:
    """Parameters written as in Python, ``(self, a, *, b=...)``; a default of ``...`` stands for any.

    Raises:
        SyntaxError: it is not a parameter list.
    """
    match ast.parse(f"def _{text.strip()}: pass").body:
        case [ast.FunctionDef(args=arguments)]:
            return parameters(arguments)
    raise SyntaxError("not a parameter list")


def render(found: list[Parameter]) -> str:
    """The parameters as a Python parameter list."""
    parts: list[str] = []
    kind = ""
    for parameter in found:
        if kind == "positional" and parameter.kind != "positional":
            parts.append("/")
        if parameter.kind == "keyword" and kind != "keyword" and not any(p.startswith("*") for p in parts):
            parts.append("*")
        parts.append(parameter.name if parameter.default is None else f"{parameter.name}={parameter.default}")
        kind = parameter.kind
    return f"({', '.join([*parts, *(['/'] if kind == 'positional' else [])])})"


def differences(expected: list[Parameter], found: list[Parameter]) -> Iterator[tuple[str, str, str, int]]:
    """Every difference as (text, expected, found, line); the line is 0 where only the definition itself has one."""
    before, after = {p.name: p for p in expected}, {p.name: p for p in found}
    gone = [p for p in expected if p.name not in after]
    new = [p for p in found if p.name not in before]
    for parameter in list(gone):
        place = expected.index(parameter)
        heir = found[place] if place < len(found) else None
        if heir in new and heir is not None and heir.kind == parameter.kind and len(expected) - len(gone) == len(found) - len(new):
            gone.remove(parameter)
            new.remove(heir)
            yield f"parameter {parameter.name!r} was renamed", parameter.name, heir.name, heir.line
    for parameter in gone:
        yield f"parameter {parameter.name!r} was removed", str(parameter), "no such parameter", 0
    for parameter in new:
        need = "required" if parameter.required else "optional"
        yield f"new {need} parameter {parameter.name!r}", "no such parameter", str(parameter), parameter.line
    order = [p.name for p in expected if p.name in after], [p.name for p in found if p.name in before]
    if order[0] != order[1]:
        first = next(after[b] for a, b in zip(*order, strict=True) if a != b)
        yield "parameters were reordered", ", ".join(order[0]), ", ".join(order[1]), first.line
    for parameter in expected:
        now = after.get(parameter.name)
        if now is None:
            continue
        any_default = parameter.default == ANY_DEFAULT and now.default is not None
        if parameter.kind != now.kind or (parameter.default != now.default and not any_default):
            yield f"parameter {parameter.name!r} is passed differently", str(parameter), str(now), now.line


def _parameter(argument: ast.arg, kind: str, default: ast.expr | None) -> Parameter:
    return Parameter(argument.arg, kind, None if default is None else ast.unparse(default), _line(argument))


def _line(argument: ast.arg) -> int:
    return getattr(argument, "lineno", 0)
