"""Proxy fences, checked over the text: bulk and tensor loads go through another proxy than the loads of threads.

What one thread wrote with ordinary stores, and another has acquired, a bulk or tensor load of the second sees only behind a
``fence.proxy.async``. Emulation cannot show a missing one, so this looks for paths from an acquire of global memory to such a load without
the fence. It follows each thread's own control flow: an acquire by one warp that hands over to another through a barrier is not followed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megamoe.emulation.ptx import Function, Kind, Module, parse

_ACQUIRE = re.compile(
    r"(ld|atom|red|multimem\.ld_reduce)\..*(acquire|acq_rel)\b.*|fence\.(acq_rel|acquire|sc)\.(gpu|sys|cluster).*|membar\.(gl|sys)"
)
_SHARED = re.compile(r".*\.shared\b.*")
_PROXY = re.compile(r"fence\.proxy\.async(\.global)?|fence\.proxy\.async::generic.*")
_LOAD = re.compile(r"cp\.async\.bulk(\.tensor\.\dd)?\.shared::\w+\.global\..*")


@dataclass(frozen=True)
class UnfencedLoad:
    """A path without a fence.

    Attributes:
        function: the kernel.
        acquire: the instruction that acquires, and ``acquire_line`` its line.
        load: the bulk or tensor load, and ``load_line`` its line.
    """

    function: str
    acquire: str
    acquire_line: int
    load: str
    load_line: int


def unfenced_loads(ptx: str) -> tuple[UnfencedLoad, ...]:
    """Every bulk or tensor load from global memory that some path reaches from an acquire without ``fence.proxy.async``.

    Args:
        ptx: a module, for any architecture.
    """
    module = parse(ptx)
    return tuple(found for function in module.functions() if function.kernel for found in _of_kernel(module, function))


def _of_kernel(module: Module, function: Function) -> list[UnfencedLoad]:
    body = module.statements
    follows = _successors(module, function)
    # The acquires that may be unfenced before each statement, until nothing changes.
    before: dict[int, frozenset[int]] = {function.start: frozenset()}
    work = [function.start]
    while work:
        index = work.pop()
        after = _after(module, index, before[index])
        for successor in follows[index]:
            known = before.get(successor)
            joined = after if known is None else known | after
            if joined != known:
                before[successor] = joined
                work.append(successor)
    found = []
    for index, acquires in sorted(before.items()):
        if body[index].kind is Kind.INSTRUCTION and _LOAD.fullmatch(body[index].instruction.opcode):
            load = body[index].instruction
            for acquire in sorted(acquires):
                first = body[acquire].instruction
                found.append(UnfencedLoad(function.name, str(first), first.line, str(load), load.line))
    return found


def _after(module: Module, index: int, acquires: frozenset[int]) -> frozenset[int]:
    statement = module.statements[index]
    if statement.kind is not Kind.INSTRUCTION:
        return acquires
    opcode, guarded = statement.instruction.opcode, bool(statement.instruction.guard)
    if _PROXY.fullmatch(opcode) and not guarded:
        return frozenset()
    if _ACQUIRE.fullmatch(opcode) and not _SHARED.fullmatch(opcode):
        return acquires | {index}
    return acquires


def _successors(module: Module, function: Function) -> dict[int, list[int]]:
    """Where control may go from each statement. Labels inside a block hide those outside."""
    body = module.statements
    scopes: list[dict[str, int]] = [{}]
    where: dict[int, list[dict[str, int]]] = {}
    for index in range(function.start, function.end + 1):
        if body[index].kind is Kind.OPEN:
            scopes = [*scopes, {}]
        elif body[index].kind is Kind.CLOSE and len(scopes) > 1:
            scopes = scopes[:-1]
        elif body[index].kind is Kind.LABEL:
            scopes[-1][body[index].label] = index
        where[index] = scopes
    follows: dict[int, list[int]] = {}
    for index in range(function.start, function.end + 1):
        ends, targets = False, []
        if body[index].kind is Kind.INSTRUCTION:
            instruction = body[index].instruction
            first = instruction.opcode.split(".")[0]
            if first in ("bra", "ret", "exit", "trap"):
                ends = not instruction.guard
            if first == "bra":
                targets = [scope[instruction.operands[0]] for scope in reversed(where[index]) if instruction.operands[0] in scope][:1]
            elif first == "brx":
                ends, targets = True, [label for label in where[index][0].values()]
        follows[index] = targets + ([] if ends or index == function.end else [index + 1])
    return follows
