"""Regions that one elected thread runs, made into work of its whole warp.

The compiler writes a single-thread region as

    elect.sync %r|%p, -1;   not.pred %q, %p;   @%q bra END;   ...   tcgen05.mma ...;   ...   END:

An emulated operation in it is far too slow for one thread. So the region is cut at it: the elected thread runs up to the cut and brings the
operands into registers, all lanes meet at the cut and do the operation together, and the elected thread goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megamoe.emulation.ptx import Function, Kind, Module, Statement

_ELECT = re.compile(r"(?P<lane>[%\w]+)\|(?P<predicate>%\w+)")
_HARMLESS = re.compile(
    r"(mov|add|sub|mul|mad|and|or|xor|not|shl|shr|selp|setp|cvt|cvta|neg|min|max|prmt|bfe|bfi|lop3|shf|ld\.param|ld\.shared|fma|mapa)\b"
)
_BETWEEN = 8
"""How many instructions the compiler may have moved between an election and its branch."""


@dataclass(frozen=True)
class Region:
    """A region that can be cut.

    Attributes:
        elect: index of the election.
        branch: index of the branch that the other lanes take.
        end: index of the label where they go.
        cuts: indices of the operations to be done by the warp.
        guard: the branch's guard, true for the other lanes.
    """

    elect: int
    branch: int
    end: int
    cuts: tuple[int, ...]
    guard: str


def flatten(module: Module, collective: Callable[[Statement], bool]) -> Module:
    """The module without the blocks of inline assembly around operations for the warp, so that all lanes can reach those.

    Registers of such a block get names of their own. A block with labels, blocks or arrays of registers in it stays.
    """
    statements, count = list(module.statements), 0
    for function in module.functions():
        for start, end in _blocks(module.statements, function):
            inside = statements[start + 1 : end]
            instructions = [s for s in inside if s.kind is Kind.INSTRUCTION]
            declared = [match for s in inside if s.kind is Kind.DECLARATION and (match := _REGISTERS.fullmatch(s.text))]
            if len(instructions) + len(declared) < len(inside) or not any(collective(s) for s in instructions):
                continue
            count += 1
            names = [name.strip() for match in declared for name in match[1].split(",")]
            own = {name: f"%block{count}_{name.replace('%', '_')}" for name in names}
            for index in (start, end):
                statements[index] = replace(statements[index], kind=Kind.LINE, text="")
            for index in range(start + 1, end):
                statements[index] = replace(statements[index], text=_renamed(statements[index].text, own))
    return Module(statements, module.tail)


def _renamed(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"(?<![\w.%$:])[%\w$]+(?![\w.])", lambda match: names.get(match[0], match[0]), text)


_REGISTERS = re.compile(r"\.reg\s+\.\w+\s+([\w%$]+(?:\s*,\s*[\w%$]+)*)\s*;")


def _blocks(body: Sequence[Statement], function: Function) -> list[tuple[int, int]]:
    """Opening and closing brace of the blocks of a function that have no block inside."""
    found, opened = [], -1
    for index in range(function.start, function.end):
        if body[index].kind is Kind.OPEN:
            opened = index
        elif body[index].kind is Kind.CLOSE and opened >= 0:
            found.append((opened, index))
            opened = -1
    return found


def find_regions(body: Sequence[Statement], start: int, end: int, collective: Callable[[Statement], bool]) -> list[Region]:
    """Regions between statements ``start`` and ``end`` of a function in which every operation for the warp can be reached by all lanes."""
    depths = _depths(body, start, end)
    # Labels inside a block of inline assembly are its own.
    labels = {body[i].label: i for i in range(start, end) if body[i].kind is Kind.LABEL and depths[i] == 0}
    found = []
    for index in range(start, end):
        statement = body[index]
        if statement.kind is not Kind.INSTRUCTION or not statement.text.startswith("elect.sync"):
            continue
        branch = _branch_of(body, index, end)
        if branch is None:
            continue
        target = labels.get(body[branch].instruction.operands[0], -1)
        cuts = tuple(i for i in range(branch + 1, max(target, branch + 1)) if body[i].kind is Kind.INSTRUCTION and collective(body[i]))
        if target > branch and cuts and _can_be_cut(body, range(start, end), branch, target, cuts, labels, depths):
            found.append(Region(index, branch, target, cuts, body[branch].instruction.guard))
    return found


def _branch_of(body: Sequence[Statement], elect: int, end: int) -> int | None:
    """The branch that the lanes which lost this election take."""
    match = _ELECT.match(body[elect].instruction.operands[0])
    if not match or body[elect].instruction.operands[1] not in ("-1", "0xffffffff", "4294967295"):
        return None
    losers = {f"@!{match['predicate']}"}
    for index in range(elect + 1, min(elect + 2 + _BETWEEN, end)):
        if body[index].kind is not Kind.INSTRUCTION:
            return None
        instruction = body[index].instruction
        if instruction.opcode in ("bra", "bra.uni"):
            return index if instruction.guard in losers else None
        if instruction.opcode == "not.pred" and instruction.operands[1] == match["predicate"]:
            losers.add(f"@{instruction.operands[0]}")
        elif not _HARMLESS.match(instruction.opcode):
            return None
    return None


def _depths(body: Sequence[Statement], start: int, end: int) -> dict[int, int]:
    """How many blocks each statement lies in."""
    depths, depth = {}, 0
    for index in range(start, end):
        depth -= body[index].kind is Kind.CLOSE
        depths[index] = depth
        depth += body[index].kind is Kind.OPEN
    return depths


def _can_be_cut(
    body: Sequence[Statement], whole: range, branch: int, target: int, cuts: tuple[int, ...], labels: dict[str, int], depths: dict[int, int]
) -> bool:
    """Whether the elected thread comes past every cut exactly once, and nothing enters the region from outside."""
    guard = body[branch].instruction.guard.lstrip("@!")
    for index in range(branch + 1, target):
        if body[index].kind is not Kind.INSTRUCTION:
            continue
        instruction = body[index].instruction
        if index in cuts and (depths[index] or instruction.guard):
            return False
        if instruction.opcode.split(".")[0] in ("ret", "exit", "brx", "bar", "barrier", "elect"):
            return False
        writes = instruction.operands[0] if instruction.operands and not instruction.opcode.startswith("bra") else ""
        if re.search(rf"{re.escape(guard)}\b", writes):
            return False
    for index in whole:
        if index == branch or body[index].kind is not Kind.INSTRUCTION or not body[index].instruction.opcode.startswith("bra"):
            continue
        to = labels.get(body[index].instruction.operands[0])
        if branch < index < target:
            if depths[index] and to is None:
                continue  # stays in its block
            if to is None or not branch < to <= target or any((index < cut) != (to < cut) for cut in cuts):
                return False
        elif to is not None and branch < to < target:
            return False
    return True
