"""A kernel's PTX as one C++ function. A module may have several kernels; each is translated by itself."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass

from megamoe.emulation.ptx import Kind, Module, Statement, parse

from .instructions import Instructions
from .operands import WIDTH, Functions, NotTranslated

_POISON = {8: "0", 16: "0xdead", 32: "0xffdeadadu", 64: "0xffdeadad7ff5dead", 128: "~(u128)0"}
"""What registers hold before they are written: no numbers, no addresses."""


_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"  # alignment and type
    r"(?:\.ptr\S*\s+(?:\.\w+\s+)*(?:\.align \d+\s+)?)?"  # what it points to
    r"([\w$]+)(?:\[(\d+)\])?"  # name and elements
)


@dataclass(frozen=True)
class Translated:
    """One kernel.

    Attributes:
        source: C++ of its function ``kernel``.
        params: (offset, bytes) of every parameter in the block that launches pass.
        params_bytes: size of that block.
        static_bytes: shared memory that it declares with sizes; dynamic memory comes behind it.
    """

    source: str
    params: tuple[tuple[int, int], ...]
    params_bytes: int
    static_bytes: int


def translate(text: str, functions: Functions | None = None, threads: int = 0) -> Translated:
    """Translate a kernel of a module.

    Args:
        text: the module.
        functions: what it may call.
        threads: of a CTA of the kernel; 0: the module has no other.

    Raises:
        NotTranslated: it has something that the machine does not know.
    """
    module, functions = parse(text), functions or Functions()
    kernels = [f for f in module.functions() if f.kernel]
    if threads and len(kernels) > 1:
        kernels = [f for f in kernels if _threads(module.statements[f.header].text) == threads]
    (function,) = kernels
    offsets, sizes, total = _params(module.statements[function.header].text)
    shared, static = _shared(module)
    statements = [s for s in module.statements[function.start : function.end] if s.text]
    body = _Body(Instructions(shared, offsets, functions), statements)
    for statement in statements:
        body.add(statement)
    head = '#include "arithmetic.h"\n\n' + functions.declarations + 'extern "C" void kernel(Thread* t) {\n'
    return Translated(head + body.declarations() + "\n".join(body.lines) + "\n}\n", tuple(sizes), total, static)


def _threads(header: str) -> int:
    """Of a CTA, as the kernel declares them."""
    found = re.search(r"\.(?:reqntid|maxntid) (\d+)", header)
    return int(found[1]) if found else 0


def _params(header: str) -> tuple[dict[str, int], list[tuple[int, int]], int]:
    offsets, sizes, at = {}, [], 0
    for align, kind, name, count in _PARAM.findall(header):
        size = WIDTH[kind] // 8 * int(count or 1)
        alignment = max(int(align or 0), WIDTH[kind] // 8)
        at = -(-at // alignment) * alignment
        offsets[name] = at
        sizes.append((at, size))
        at += size
    return offsets, sizes, at


def _shared(module: Module) -> tuple[dict[str, int], int]:
    found: dict[str, int] = {}
    dynamic, at = [], 0
    for statement in module.statements:
        if statement.kind is not Kind.DECLARATION or ".shared" not in statement.text:
            continue
        for align, kind, name, count in re.findall(r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*\[(\d*)\]", statement.text):
            alignment = int(align or 1)
            if not count:
                dynamic.append((name, alignment))
                continue
            at = -(-at // alignment) * alignment
            found[name] = at
            at += WIDTH[kind] // 8 * int(count)
    for name, alignment in dynamic:
        found[name] = -(-at // alignment) * alignment
    return found, at


class _Body:
    """Statements of a function; registers and labels of inner blocks get names of their own."""

    def __init__(self, instructions: Instructions, statements: Iterable[Statement]) -> None:
        self.instructions = instructions
        self.lines: list[str] = []
        self.arrays: list[str] = []
        self.blocks = 0
        self.open = [0]
        self.labels = _labels(statements)
        self.variables: ChainMap[str, str] = ChainMap({})
        instructions.variables, instructions.label = self.variables, self._label

    def add(self, statement: Statement) -> None:
        kind = statement.kind
        if kind is Kind.OPEN:
            self.blocks += 1
            self.open.append(self.blocks)
            self.variables = self.instructions.variables = self.variables.new_child()
        elif kind is Kind.CLOSE:
            self.open.pop()
            self.variables = self.instructions.variables = self.variables.parents
        elif kind is Kind.LABEL:
            self.lines.append(f"{self._label(statement.label)}:;")
        elif kind is Kind.DECLARATION:
            self._declare(statement.text)
        elif kind is Kind.INSTRUCTION:
            self.lines.append(self.instructions.translate(statement.instruction))

    def _label(self, name: str) -> str:
        """The label that can be seen here: the innermost open block's."""
        block = next(block for block in reversed(self.open) if (block, name) in self.labels)
        return f"L{block}_" + re.sub(r"\W", "_", name)

    def _declare(self, text: str) -> None:
        array = re.match(r"\.(param|local)\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]", text)
        if array:
            variable = f"array{len(self.arrays)}"
            self.arrays.append(f"  alignas({array[2]}) char {variable}[{array[4]}];\n")
            if array[1] == "local":
                self.instructions.local[array[3]] = variable
            else:
                self.variables[array[3]] = variable
                self.instructions.passed.add(variable)
            return
        match = re.match(r"\.(?:reg|param)\s+\.(\w+)\s+(.*?)\s*;$", text, re.DOTALL)
        if not match:
            if text.startswith(".pragma"):
                return
            raise NotTranslated(text)
        width = WIDTH[match[1]]
        for name in re.split(r"\s*,\s*", match[2]):
            many = re.fullmatch(r"(.*)<(\d+)>", name)
            for each in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                variable = re.sub(r"\W", "_", each) + (f"_{self.open[-1]}" if len(self.open) > 1 else "")
                self.variables[each] = variable
                self.instructions.widths[variable] = width
                if text.startswith(".param"):
                    self.instructions.passed.add(variable)

    def declarations(self) -> str:
        used = set(re.findall(r"\w+", "\n".join(self.lines)))
        lines = []
        for width, poison in _POISON.items():
            names = [f"{name} = {poison}" for name, bits in self.instructions.widths.items() if bits == width and name in used]
            if names:
                lines.append(f"  u{width} {', '.join(names)};\n")
        return "".join(lines + self.arrays)


def _labels(statements: Iterable[Statement]) -> set[tuple[int, str]]:
    """Each with the number of its block; a function's own is 0, inner ones are counted where they begin."""
    labels, open_blocks, blocks = set(), [0], 0
    for statement in statements:
        if statement.kind is Kind.OPEN:
            blocks += 1
            open_blocks.append(blocks)
        elif statement.kind is Kind.CLOSE:
            open_blocks.pop()
        elif statement.kind is Kind.LABEL:
            labels.add((open_blocks[-1], statement.label))
    return labels
