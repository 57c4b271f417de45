"""PTX text as statements, and back again byte for byte.

A module is a flat list of statements. Each keeps the source it came from, with the white space and comments before it, so that printing an
unchanged module gives its text back exactly; what a rewriter replaces is replaced as text. Instructions are taken apart on demand:

    @!%p1 mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2}, {%r1, %r2}, [%rd1+16];
    guard  opcode                                           operands
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from megamoe.errors import EmulationError


class Kind(Enum):
    """What a statement is."""

    INSTRUCTION = "instruction"
    DECLARATION = "declaration"  # a directive that ends with ``;``: .reg, .shared, .global, .pragma ...
    LINE = "line"  # a directive that ends with its line: .version, .target, .loc ...
    LABEL = "label"
    HEADER = "header"  # everything of .entry or .func before its body
    OPEN = "{"
    CLOSE = "}"


@dataclass(frozen=True)
class Statement:
    """One statement.

    Attributes:
        kind: what it is.
        lead: white space and comments before it.
        text: its source without ``lead``.
        line: 1-based line of its first character.
    """

    kind: Kind
    lead: str
    text: str
    line: int

    @cached_property
    def instruction(self) -> Instruction:
        """Its parts; only for statements of kind ``INSTRUCTION``."""
        return Instruction.parse(self.text, self.line)

    @property
    def label(self) -> str:
        """Name of a label."""
        return self.text.rstrip(": \t")


_INSTRUCTION = re.compile(r"(?:@(!?)\s*([%$\w]+)\s+)?([a-z_][\w]*(?:(?:\.|::)\w+)*)\s*(.*?)\s*;\s*$", re.DOTALL)


@dataclass(frozen=True)
class Instruction:
    """Parts of one instruction.

    Attributes:
        guard: ``"@%p1"`` or ``"@!%p1"``; empty when it is not predicated.
        opcode: with all modifiers, for example ``"tcgen05.wait::ld.sync.aligned"``.
        operands: as written, split at the commas that lie in no bracket.
        line: 1-based line in the module.
    """

    guard: str
    opcode: str
    operands: tuple[str, ...]
    line: int

    @classmethod
    def parse(cls, text: str, line: int) -> Instruction:
        """Take one instruction apart.

        Raises:
            EmulationError: not an instruction.
        """
        match = _INSTRUCTION.match(text)
        if not match:
            raise EmulationError(f"Line {line} of the PTX is not an instruction: {text.strip()!r}.")
        negated, predicate, opcode, rest = match.groups()
        return cls(f"@{negated or ''}{predicate}" if predicate else "", opcode, split_operands(rest), line)

    @property
    def parts(self) -> tuple[str, ...]:
        """The opcode's words: ``("tcgen05", "wait::ld", "sync", "aligned")``."""
        return tuple(self.opcode.split("."))

    def __str__(self) -> str:
        guard = f"{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)};" if self.operands else f"{guard}{self.opcode};"


def split_operands(text: str) -> tuple[str, ...]:
    """Split at commas outside brackets: ``"%r1, {%r2, %r3}, [%rd1, {%r4}]"`` has three operands."""
    operands, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            operands.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return (*operands, last) if last else tuple(operands)


def vector(operand: str) -> tuple[str, ...]:
    """Elements of ``{%r1, %r2}``; a plain operand is a vector of one."""
    return split_operands(operand[1:-1]) if operand.startswith("{") else (operand,)


def address(operand: str) -> tuple[str, int]:
    """Base and byte offset of ``[%r1+16]``, ``[%r1]`` or ``[name]``; brackets are optional."""
    base, sign, offset = re.fullmatch(r"\[?\s*([^+\-\[\]\s]+)\s*(?:([+-])\s*(-?\w+))?\s*\]?", operand).groups()  # type: ignore[union-attr]
    return base, int(offset, 0) * (-1 if sign == "-" else 1) if offset else 0


@dataclass(frozen=True)
class Function:
    """A kernel or device function inside a module.

    Attributes:
        name: its symbol.
        kernel: whether it is an entry.
        header: index of its header statement.
        start: index of its first statement inside the body.
        end: index of the closing brace.
    """

    name: str
    kernel: bool
    header: int
    start: int
    end: int


@dataclass
class Module:
    """A whole PTX module.

    Attributes:
        statements: in order.
        tail: white space and comments after the last one.
    """

    statements: list[Statement] = field(default_factory=list)
    tail: str = ""

    def __str__(self) -> str:
        return "".join(f"{s.lead}{s.text}" for s in self.statements) + self.tail

    def functions(self) -> Iterator[Function]:
        """Functions that have a body, in order."""
        for index, statement in enumerate(self.statements):
            if statement.kind is not Kind.HEADER or index + 1 == len(self.statements) or self.statements[index + 1].kind is not Kind.OPEN:
                continue
            name = re.search(r"\.(entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", statement.text)
            if name:
                yield Function(name[2], name[1] == "entry", index, index + 2, self._closing(index + 1))

    def directive(self, name: str) -> str:
        """Argument of the first line directive ``.name``; empty when there is none."""
        for statement in self.statements:
            if statement.kind is Kind.LINE and statement.text.startswith(f".{name}"):
                return statement.text.partition(" ")[2].strip()
        return ""

    def _closing(self, opening: int) -> int:
        depth = 0
        for index in range(opening, len(self.statements)):
            kind = self.statements[index].kind
            depth += (kind is Kind.OPEN) - (kind is Kind.CLOSE)
            if depth == 0:
                return index
        raise EmulationError("The PTX module ends inside a function.")


_BLANK = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_LINE = re.compile(r"\.(?:version|target|address_size|file|loc)\b[^\n]*")
_LABEL = re.compile(r"[$%\w]+\s*:(?!:)")
_HEADER = re.compile(r"(?:\.(?:visible|extern|weak|common)\s+)*\.(?:entry|func|section|alias)\b")
_STOP = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"]*"|[;{]', re.DOTALL)


def parse(text: str) -> Module:
    """Split a module into statements.

    Raises:
        EmulationError: the text ends inside a statement.
    """
    module, at, line = Module(), 0, 1
    while True:
        blank = _BLANK.match(text, at)
        assert blank is not None
        lead = blank[0]
        start = blank.end()
        line += lead.count("\n")
        if start == len(text):
            module.tail = lead
            return module
        kind, end = _statement(text, start, line)
        module.statements.append(Statement(kind, lead, text[start:end], line))
        line += text.count("\n", start, end)
        at = end


def _statement(text: str, start: int, line: int) -> tuple[Kind, int]:
    if text[start] in "{}":
        return (Kind.OPEN if text[start] == "{" else Kind.CLOSE), start + 1
    for pattern, kind in ((_LINE, Kind.LINE), (_LABEL, Kind.LABEL)):
        match = pattern.match(text, start)
        if match:
            return kind, match.end()
    header = _HEADER.match(text, start) is not None
    for stop in _STOP.finditer(text, start):
        if stop[0] == ";":
            kind = Kind.HEADER if header else Kind.DECLARATION if text[start] == "." else Kind.INSTRUCTION
            return kind, stop.end()
        if stop[0] == "{" and header:  # the body; elsewhere it opens a vector or an initializer
            return Kind.HEADER, len(text[: stop.start()].rstrip())
    raise EmulationError(f"The PTX ends inside the statement that begins on line {line}.")
