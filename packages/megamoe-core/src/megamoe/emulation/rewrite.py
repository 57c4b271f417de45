"""PTX for Blackwell to PTX for sm_90a.

Every statement is looked up in the instruction table; kernels get a call at their start (which poisons shared memory and checks its size)
and one before each return (which looks for tensor memory that was not given back).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megamoe.emulation.delayed import Later
from megamoe.emulation.emit import Code, Collective, Names
from megamoe.emulation.ptx import Function, Kind, Module, Statement, parse
from megamoe.emulation.regions import Region, find_regions, flatten
from megamoe.emulation.table import find
from megamoe.errors import EmulationError, InvalidInput

SHARED_LIMITS = {"sm_100": 227 * 1024, "sm_103": 227 * 1024, "sm_120": 99 * 1024, "sm_121": 99 * 1024}
"""Most shared memory of a CTA, bytes, by architecture."""

UNTRANSFORMED = "done by one thread: its region has control flow that a warp cannot follow"


@dataclass(frozen=True, slots=True)
class Options:
    """How to emulate.

    Attributes:
        strict: poison shared memory with NaN bytes and hold it to the real architecture's limit.
        seed: delayed mode with this seed, 1 or more; ``None``: every operation takes effect at once.
        loads_wait: in delayed mode, registers of tcgen05.ld arrive at tcgen05.wait::ld and see what a thread stored before its wait::st, as
            the specification says. ``False``: they arrive at once and see the thread's earlier stores, for code that leaves those waits
            out and relies on ptxas and on the order of a warp's accesses, as CuTe DSL 4.8's examples and FlashInfer's kernels do.
        limit_ms: milliseconds after which every barrier wait of a CTA gives up; 1 to 2**32 - 1.
    """

    strict: bool = True
    seed: int | None = None
    loads_wait: bool = True
    limit_ms: int = 10_000

    def __post_init__(self) -> None:
        if self.seed is not None and not 1 <= self.seed < 2**32:
            raise InvalidInput(f"seed={self.seed}; allowed: 1 to 2**32 - 1, or None.", hint="Options(seed=1)")
        if not 1 <= self.limit_ms < 2**32:
            raise InvalidInput(f"limit_ms={self.limit_ms}; allowed: 1 to 2**32 - 1.", hint="Options(limit_ms=10_000)")


@dataclass(frozen=True)
class Rewritten:
    """A module for sm_90a.

    Attributes:
        text: the PTX, without the device functions that it calls.
        source: the original PTX.
        lines: for every line of ``text``, the 1-based line of ``source`` that it came from (0: from none).
        forms: how often each form was replaced.
        notes: what is slower than usual, with its line.
        target: the architecture of ``source``.
        seed: what whoever loads the module writes to ``megamoe_seed``; 0 outside delayed mode.
    """

    text: str
    source: str
    lines: tuple[int, ...]
    forms: dict[str, int]
    notes: tuple[str, ...]
    target: str
    seed: int

    def instruction(self, line: int) -> str:
        """Text of a line of ``source``; empty for 0."""
        return self.source.splitlines()[line - 1].strip() if line else ""


def rewrite(ptx: str, options: Options | None = None) -> Rewritten:
    """Rewrite a module.

    Args:
        ptx: for sm_100a, sm_103a, sm_120a or sm_121a (and their families).
        options: how to emulate.

    Raises:
        UnsupportedInstruction: an instruction has no replacement.
        EmulationError: not PTX, or for another architecture.
    """
    module = parse(ptx)
    target = module.directive("target").split(",")[0].strip()
    if target.rstrip("af") not in SHARED_LIMITS:
        raise EmulationError(
            f"The PTX is for {target or 'no architecture'}; emulated are {', '.join(SHARED_LIMITS)}.", hint="compile for sm_100a or sm_120a"
        )
    return _Rewriter(flatten(module, _is_collective), ptx, target, options or Options()).run()


@dataclass
class _Rewriter:
    module: Module
    source: str
    target: str
    options: Options
    out: list[tuple[str, int]] = field(default_factory=list)
    forms: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    leaders: dict[int, str] = field(default_factory=dict)  # by election: the register with its lane, where the source names none
    meeting: dict[int, str] = field(default_factory=dict)  # by election: the label where its other lanes wait next

    def run(self) -> Rewritten:
        statements = self.module.statements
        functions = {function.start: function for function in self.module.functions()}
        index = 0
        while index < len(statements):
            if index in functions:
                function = functions[index]
                self._function(function)
                index = function.end
                continue
            self._keep(statements[index], _module_line(statements[index]))
            index += 1
        self.out.append((self.module.tail, 0))
        text = "".join(part for part, _ in self.out)
        lines = [1, *(line for part, line in self.out for _ in range(part.count("\n")))]
        return Rewritten(text, self.source, tuple(lines), dict(self.forms), tuple(self.notes), self.target, self.options.seed or 0)

    def _keep(self, statement: Statement, text: str) -> None:
        self.out.append((statement.lead, statement.line))
        self.out.append((text, statement.line))

    def _write(self, lines: Sequence[str], line: int) -> None:
        self.out.extend((f"\n{text}", line) for text in lines)

    def _function(self, function: Function) -> None:
        body = self.module.statements
        names = Names(delayed=self.options.seed is not None)
        later = Later(names)
        delayed: dict[int, list[str]] = {}
        if self.options.seed is not None:
            for index in range(function.start, function.end):
                if body[index].kind is Kind.INSTRUCTION and later.delays(body[index].instruction, self.options.loads_wait):
                    delayed[index] = later.add(body[index].instruction)
            if later.loads and not any("tcgen05.wait::ld" in s.text for s in body[function.start : function.end]):
                self.notes.append(f"{function.name} loads tensor memory and never waits for it: with loads_wait its registers stay NaN")
        later_ones = {id(body[index]) for index in delayed}
        regions = find_regions(body, function.start, function.end, lambda s: id(s) not in later_ones and _is_collective(s))
        first = next(i for i in range(function.start, function.end) if body[i].kind is not Kind.DECLARATION)
        for index in range(function.start, first):
            self._keep(body[index], body[index].text)
        place = len(self.out)
        for index in range(first, function.end):
            self._statement(index, function, names, later, delayed, regions)
        begin = Code(names)(*names.declared)
        if function.kernel:
            begin(*later.begin())
            limit = SHARED_LIMITS[self.target.rstrip("af")] if self.options.strict else 0xFFFFFFFF
            settings = (limit, self.options.limit_ms, int(self.options.strict), int(names.delayed))
            begin.call("megamoe_begin", [("b32", str(value)) for value in settings])
        self.out[place:place] = [(f"\n{text}", body[first].line) for text in begin.lines]

    def _statement(
        self, index: int, function: Function, names: Names, later: Later, delayed: dict[int, list[str]], regions: Sequence[Region]
    ) -> None:
        statement = self.module.statements[index]
        if statement.kind is not Kind.INSTRUCTION:
            self._keep(statement, statement.text)
            return
        instruction, line = statement.instruction, statement.line
        region = next((r for r in regions if r.elect <= index < r.end), None)
        if region and index == region.elect and instruction.operands[0].startswith("_"):
            self._keep(statement, statement.text.replace("_|", f"{names.register('b32')}|", 1))
            self.leaders[region.elect] = names.declared[-1].split()[-1].rstrip(";")
            return
        if region and index == region.branch:
            self.meeting[region.elect] = names.label()
            self._keep(statement, f"{region.guard} bra {self.meeting[region.elect]};")
            return
        if index in delayed:
            self.forms["delayed"] += 1
            self._replace(statement, names, delayed[index])
            return
        waited = later.wait(instruction) if self.options.seed is not None else None
        if waited is not None:
            self._replace(statement, names, waited)
            return
        if function.kernel and instruction.opcode in ("ret", "exit"):
            leave = Code(names)(*later.leave()).call("megamoe_end_delayed" if names.delayed else "megamoe_end", [])
            self._replace(statement, names, [*leave.lines, f"{instruction.opcode};"])
            return
        found = find(instruction)
        replacement = found[0].replace(instruction, found[1], names) if found else None
        if found is None or replacement is None:
            self._keep(statement, statement.text)
            return
        self.forms[found[0].name] += 1
        if not isinstance(replacement, Collective):
            self._replace(statement, names, [*later.order(instruction), *replacement])
        elif region:
            self._meet(region, index, replacement, names, line)
        else:
            if replacement.function in ("megamoe_mma", "megamoe_copy"):
                self.notes.append(f"line {line}: {instruction.opcode} is {UNTRANSFORMED}")
            self._replace(statement, names, replacement.alone(names, line))

    def _meet(self, region: Region, index: int, operation: Collective, names: Names, line: int) -> None:
        """The elected thread brings the operands, all lanes meet, and the others go on to the next meeting or to the region's end."""
        body = self.module.statements
        elect = body[region.elect].instruction.operands[0]
        leader = self.leaders.get(region.elect) or elect.split("|")[0]
        here = self.meeting[region.elect]
        if index == region.cuts[-1]:
            onward = body[region.end].label
        else:
            onward = self.meeting[region.elect] = names.label()
        self._write(operation.operands, line)
        self._write([f"{here}:", *operation.call(names, line, leader), f"{region.guard} bra {onward};", *operation.finish(names)], line)

    def _replace(self, statement: Statement, names: Names, lines: list[str]) -> None:
        """Lines in the place of a statement; its guard guards them all."""
        self.out.append((statement.lead.rstrip(" \t"), statement.line))
        guard = statement.instruction.guard
        if guard:
            inverse = guard[2:] if guard.startswith("@!") else f"!{guard[1:]}"
            lines = Code(names).unless(inverse, lines).lines
        self._write(lines, statement.line)


def _module_line(statement: Statement) -> str:
    if statement.kind is Kind.LINE and statement.text.startswith(".target"):
        return ".target sm_90a"
    if statement.kind is Kind.LINE and statement.text.startswith(".version"):
        return ".version 8.7"
    return statement.text


def _is_collective(statement: Statement) -> bool:
    instruction = statement.instruction
    found = find(instruction)
    return found is not None and isinstance(found[0].replace(instruction, found[1], Names()), Collective)
