"""Writing replacement code: fresh names, operands in registers, calls of device functions.

A replaced instruction becomes a call of a function of ``device/``. Its operands are marshalled by the PTX calling convention; the number of
the instruction's line goes first, so that a fault names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megamoe.emulation.ptx import address

ALONE = "0xffffffff"
"""In the place of an elected lane: the calling thread acts by itself."""


@dataclass
class Names:
    """Fresh names of one function, and the declarations that they need.

    Attributes:
        delayed: whether the function is rewritten for delayed mode.
    """

    delayed: bool = False
    count: int = 0
    declared: list[str] = field(default_factory=list)

    def register(self, kind: str) -> str:
        """A register of type ``kind`` that lives in the whole function."""
        self.count += 1
        name = f"%megamoe{self.count}"
        self.declared.append(f".reg .{kind} {name};")
        return name

    def label(self) -> str:
        """A label."""
        self.count += 1
        return f"$megamoe_{self.count}"


@dataclass
class Code:
    """PTX lines under construction.

    Attributes:
        names: where fresh names come from.
        lines: so far.
    """

    names: Names
    lines: list[str] = field(default_factory=list)

    def __call__(self, *lines: str) -> Code:
        """Append lines."""
        self.lines += lines
        return self

    def move(self, kind: str, source: str) -> str:
        """A fresh register that holds ``source``, a register or an immediate."""
        register = self.names.register(kind)
        self(f"mov.{kind} {register}, {source};")
        return register

    def shared_address(self, operand: str) -> str:
        """A fresh 32-bit register with the address ``[base+offset]``."""
        base, offset = address(operand)
        register = self.names.register("b32")
        self(f"mov.b32 {register}, {base};")
        if offset:
            self(f"add.u32 {register}, {register}, {offset};")
        return register

    def widen(self, source: str) -> str:
        """A fresh 32-bit register with a 16-bit one."""
        register = self.names.register("b32")
        self(f"cvt.u32.u16 {register}, {source};")
        return register

    def truth(self, predicate: str) -> str:
        """A fresh 32-bit register: 1 where the predicate holds."""
        register = self.names.register("b32")
        self(f"selp.b32 {register}, 1, 0, {predicate};")
        return register

    def call(self, function: str, arguments: Iterable[tuple[str, str]], result: tuple[str, str] | None = None) -> Code:
        """Call with (type, register or immediate) arguments; ``result`` is the type and the register that takes it."""
        arguments = list(arguments)
        self("{")
        for index, (kind, value) in enumerate(arguments):
            self(f".param .{kind} p{index}; st.param.{kind} [p{index}], {value};")
        names = ", ".join(f"p{index}" for index in range(len(arguments)))
        if result:
            self(f".param .{result[0]} r; call (r), {function}, ({names}); ld.param.{result[0]} {result[1]}, [r];")
        else:
            self(f"call {function}, ({names});")
        return self("}")

    def unless(self, predicate: str, body: Iterable[str]) -> Code:
        """Lines that are skipped where the predicate holds."""
        skip = self.names.label()
        return self(f"@{predicate} bra {skip};", *body, f"{skip}:")

    def __str__(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class Collective:
    """An operation that a whole warp does for the thread that issued it.

    Attributes:
        operands: lines that the issuing thread runs first, to bring operands into registers.
        function: device function; its first two arguments are the line and the elected lane.
        arguments: (type, register or immediate) of the others.
        result: register for its 32-bit result; empty when it has none.
        after: lines that the issuing thread runs when the result is 0.
    """

    operands: list[str]
    function: str
    arguments: list[tuple[str, str]]
    result: str = ""
    after: tuple[str, ...] = ()

    def call(self, names: Names, line: int, leader: str) -> list[str]:
        """The call alone."""
        code = Code(names)
        code.call(self.function, [("b32", str(line)), ("b32", leader), *self.arguments], ("b32", self.result) if self.result else None)
        return code.lines

    def finish(self, names: Names) -> list[str]:
        """What the issuing thread does after the call."""
        if not self.after:
            return []
        done = names.register("pred")
        return Code(names)(f"setp.ne.u32 {done}, {self.result}, 0;").unless(done, self.after).lines

    def alone(self, names: Names, line: int) -> list[str]:
        """The whole operation by one thread."""
        return [*self.operands, *self.call(names, line, ALONE), *self.finish(names)]
