"""Delayed mode for what has no queue on the device: registers of tcgen05.ld and st, and bulk stores.

A site keeps its operands in registers of its own and a predicate that says whether it is pending. It takes effect at the next wait that the
same thread runs, wherever that is, or when the thread comes to it again; until then loaded registers hold NaN and stored bytes have not
moved. A bulk store waits for a wait that covers its group, so it needs its commit, too. A missing wait or commit shows every time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from megamoe.emulation.emit import Code, Collective, Names
from megamoe.emulation.ptx import Instruction
from megamoe.emulation.replacements import tmem_access, tmem_base
from megamoe.emulation.table import find

_BULK_STORE = re.compile(r"cp\.(reduce\.)?async\.bulk(\.tensor\.\dd)?\.global\.shared::cta\..*bulk_group.*")
_ACCESS = re.compile(r"tcgen05\.(?P<what>ld|st)\.sync\.aligned\.(?P<shape>\w+)\.x\d+(\.(un)?pack::16b)?\.b32")


@dataclass
class _Site:
    """One instruction that takes effect later: its predicate, one to work with, and lines that do it; of a bulk store, its group."""

    pending: str
    other: str
    lines: list[str] = field(default_factory=list)
    group: str = ""


@dataclass
class Later:
    """The delayed sites of one kernel. All sites must be added before the first wait is written."""

    names: Names
    loads: list[_Site] = field(default_factory=list)
    stores: list[_Site] = field(default_factory=list)
    bulk: list[_Site] = field(default_factory=list)
    groups: str = ""  # register with the number of bulk groups that the thread has committed

    @staticmethod
    def delays(instruction: Instruction, loads: bool) -> bool:
        """Whether the instruction is one of those that are delayed here; `loads`: tcgen05.ld is."""
        access = _ACCESS.fullmatch(instruction.opcode)
        return bool((access and (loads or access["what"] == "st")) or _BULK_STORE.fullmatch(instruction.opcode))

    def add(self, instruction: Instruction) -> list[str]:
        """The code at the place of a delayed instruction."""
        access = _ACCESS.fullmatch(instruction.opcode)
        return self._access(instruction, access) if access else self._bulk_store(instruction)

    def _site(self) -> _Site:
        return _Site(self.names.register("pred"), self.names.register("pred"))

    def _access(self, instruction: Instruction, match: re.Match[str]) -> list[str]:
        lines, base, registers = tmem_base(instruction, match["shape"], self.names)
        shadows = [self.names.register("b32") for _ in registers]
        site, code = self._site(), Code(self.names, lines)
        if match["what"] == "ld":
            code(*tmem_access(instruction, match["shape"], self.names, shadows, base))
            code(*(f"mov.b32 {register}, -1;" for register in registers))
            site.lines = [f"mov.b32 {register}, {shadow};" for register, shadow in zip(registers, shadows, strict=True)]
            self.loads.append(site)
        else:
            kept = self.names.register("b64")
            site.lines = tmem_access(instruction, match["shape"], self.names, shadows, kept)
            code(*self._happen([site]))
            code(f"mov.b64 {kept}, {base};", *(f"mov.b32 {s}, {r};" for r, s in zip(registers, shadows, strict=True)))
            self.stores.append(site)
        return code(f"setp.eq.u32 {site.pending}, 0, 0;").lines

    def _bulk_store(self, instruction: Instruction) -> list[str]:
        self.groups = self.groups or self.names.register("b32")
        site, moves, operands = self._site(), Code(self.names), []
        site.group = self.names.register("b32")
        for operand in instruction.operands:
            kept = operand
            for name in dict.fromkeys(re.findall(r"%\w+", operand)):
                shadow = self.names.register("b64" if name.startswith("%rd") else "b32")
                moves(f"mov.{'b64' if name.startswith('%rd') else 'b32'} {shadow}, {name};")
                kept = re.sub(rf"{re.escape(name)}\b", shadow, kept)
            operands.append(kept)
        store = Instruction("", instruction.opcode, tuple(operands), instruction.line)
        found = find(store)
        replaced = found[0].replace(store, found[1], self.names) if found else None
        lines = replaced.alone(self.names, store.line) if isinstance(replaced, Collective) else [str(store)]
        site.lines = ["fence.proxy.async.shared::cta;", *lines]  # what was written since is what a late store may read
        self.bulk.append(site)
        return [*self._happen([site]), *moves.lines, f"mov.b32 {site.group}, {self.groups};", f"setp.eq.u32 {site.pending}, 0, 0;"]

    def wait(self, instruction: Instruction) -> list[str] | None:
        """What takes the place of a wait for these or of a commit; ``None`` for other instructions."""
        if instruction.opcode.startswith("tcgen05.wait::ld"):
            return list(self._happen(self.loads))
        if instruction.opcode.startswith("tcgen05.wait::st"):
            return [*self._happen(self.stores), "bar.warp.sync -1;"]
        if instruction.opcode == "cp.async.bulk.commit_group" and self.bulk:
            return [str(instruction), f"add.u32 {self.groups}, {self.groups}, 1;"]
        if instruction.opcode.startswith("cp.async.bulk.wait_group") and self.bulk:
            code = Code(self.names)
            limit = self.names.register("b32")
            code(f"sub.s32 {limit}, {self.groups}, {instruction.operands[0]};", *self._happen(self.bulk, limit))
            return code("cp.async.bulk.commit_group;", f"{instruction.opcode} 0;").lines
        return None

    def order(self, instruction: Instruction) -> list[str]:
        """What happens before a tcgen05.ld that is not delayed: its thread's earlier stores, on which some code relies."""
        if not self.stores or not instruction.opcode.startswith("tcgen05.ld."):
            return []
        return [*self._happen(self.stores), "bar.warp.sync -1;"]

    def leave(self) -> list[str]:
        """What still happens when a thread ends."""
        return [*self._happen(self.bulk), "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;"] if self.bulk else []

    def begin(self) -> list[str]:
        """Lines at the kernel's start: nothing is pending."""
        none = [f"setp.ne.u32 {site.pending}, 0, 0;" for site in (*self.loads, *self.stores, *self.bulk)]
        return [*none, f"mov.b32 {self.groups}, 0;"] if self.bulk else none

    def _happen(self, sites: list[_Site], limit: str = "") -> Iterator[str]:
        """Those that are pending take effect, of bulk stores with a limit those in groups before it."""
        for site in sites:
            code = Code(self.names)
            if limit:
                code(f"setp.lt.s32 {site.other}, {site.group}, {limit};", f"and.pred {site.other}, {site.other}, {site.pending};")
                code(f"not.pred {site.other}, {site.other};")
            else:
                code(f"not.pred {site.other}, {site.pending};")
            # In a block, for labels of its own: the same lines stand at every wait.
            yield from code.unless(site.other, ["{", *site.lines, "}", f"setp.ne.u32 {site.pending}, 0, 0;"]).lines
