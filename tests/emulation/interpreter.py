"""Runs rewritten kernels without a GPU: their PTX is interpreted thread by thread, the device functions they call run as compiled C++.

Only what the kernels of these tests contain is understood; anything else raises. Threads take turns where they wait, so memory is
sequentially consistent: this shows what a rewritten kernel computes, not that its fences suffice.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np

from megamoe.emulation import Options, rewrite
from megamoe.emulation.assemble import DEVICE_SOURCES
from megamoe.emulation.faults import RECORD, read_fault
from megamoe.emulation.ptx import Kind, address, parse, vector

from . import model_numbers

HERE = Path(__file__).parent / "host"
FUNCTIONS = (
    *("begin", "end", "end_delayed", "waiting", "waiting_delayed", "tmem_alloc", "tmem_dealloc", "tmem_relinquish", "tmem_address"),
    *("mma", "copy", "commit", "tensor_load", "tensor_store", "try_cancel", "mma_sync", "stmatrix_b8", "ldmatrix_b4", "redux"),
    *("to_narrow", "from_narrow", "to_ue8m0", "bf16_to_ue8m0", "from_ue8m0"),
)
"""In the order of their numbers in ``host/machine.cpp``."""
SHARED_BEGIN = 1024
MOST_CTAS = 4
MOST_STEPS = 3_000


class NotInterpreted(Exception):
    """The kernel has an instruction that is only there on a GPU."""


def build(folder):
    """The device functions for this machine; None where there is no C++ compiler with half precision."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return None
    library = folder / "machine.so"
    flags = ["-std=c++17", "-O2", "-w", "-shared", "-fPIC", f"-I{DEVICE_SOURCES}", f"-I{HERE}"]
    done = subprocess.run([compiler, *flags, str(HERE / "machine.cpp"), "-o", str(library)], capture_output=True, text=True, check=False)
    if done.returncode and "_Float16" in done.stderr:
        return None
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    loaded.machine_shared.restype = loaded.machine_result.restype = ctypes.c_void_p
    return loaded


def f32(bits):
    return np.uint32(bits & 0xFFFFFFFF).view(np.float32)


def f32_array(words):
    return np.array(words, np.uint32).view(np.float32)


def bits(value):
    return int(np.float32(value).view(np.uint32))


def signed(value, kind):
    """A register's bits as a number of this type."""
    width = int(re.sub(r"\D", "", kind) or 32)
    return value - 2**width if kind.startswith("s") and value >> (width - 1) & 1 else value


def bf16(word):
    """Nearest even; NaN as the hardware writes it."""
    return 0x7FFF if (word & 0x7FFFFFFF) > 0x7F800000 else (word + 0x7FFF + (word >> 16 & 1)) >> 16 & 0xFFFF


class Thread:
    def __init__(self, index, kernel):
        self.index, self.rank, self.tid = index, index // kernel.block, index % kernel.block
        self.registers, self.params, self.at = {}, {}, kernel.start
        self.waiting = None  # what for: "call", "poll", "warp", "cluster", a numbered barrier, or nothing
        self.exchange = None  # of shfl: value shown, lane asked for, register for it


class Kernel:
    """One launch of one cluster (or of CTAs one after the other, when they form none)."""

    def __init__(self, machine, text, values, block, shared, ctas):
        self.machine, self.block, self.shared, self.ctas = machine, block, shared, ctas
        self.module = parse(text)
        self.function = next(f for f in self.module.functions() if f.kernel)
        self.start, self.values, self.grid, self.cluster = self.function.start, values, (1, 1, 1), (ctas, 1, 1)
        self.statements = self.module.statements
        self.arrays = set(re.findall(r"(\w+)\[\d+\]", self.statements[self.function.header].text))
        shared = [s.text for s in self.statements if s.kind is Kind.DECLARATION and ".shared" in s.text]
        self.shared_names = {name for text in shared for name in re.findall(r"(\w+)\[\d*\]", text)}
        self.labels, self.program = self._program()

    def _program(self):
        labels, program, scopes = {}, {}, [0]
        for index in range(self.function.start, self.function.end):
            statement = self.statements[index]
            if statement.kind is Kind.OPEN:
                scopes.append(index)
            elif statement.kind is Kind.CLOSE:
                scopes.pop()
            elif statement.kind is Kind.LABEL:
                labels[scopes[-1], statement.label] = index
            elif statement.kind is Kind.INSTRUCTION:
                i = statement.instruction
                program[index] = (i.guard[1:].lstrip("!"), i.guard.startswith("@!"), i.opcode.split("."), i.operands, tuple(scopes))
        return labels, program

    # ---- operands ----

    def value(self, t, operand, kind="b32"):
        if operand in t.registers:
            return t.registers[operand]
        if operand.startswith("0f"):
            return int(operand[2:], 16)
        if operand[0] == "%":
            return self.special(t, operand)
        if operand in self.shared_names:
            return SHARED_BEGIN | t.rank << 24
        if operand in self.values:
            return operand
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return int(operand.rstrip("U"), 0) & (2**64 - 1 if kind.endswith("64") else 2**32 - 1)
        raise NotInterpreted(f"operand {operand}")

    def special(self, t, name):
        known = {"%tid.x": t.tid, "%laneid": t.tid % 32, "%cluster_ctarank": t.rank, "%cluster_nctarank": self.ctas, "%warpid": t.tid // 32}
        known |= {f"%ctaid.{axis}": at for axis, at in zip("xyz", self.places[t.rank], strict=True)}
        known |= {f"%nctaid.{axis}": count for axis, count in zip("xyz", self.grid, strict=True)}
        for axis, size, at in zip("xyz", self.cluster, self.places[t.rank], strict=True):
            known |= {f"%cluster_ctaid.{axis}": at % size, f"%cluster_nctaid.{axis}": size, f"%clusterid.{axis}": at // size}
            known[f"%nclusterid.{axis}"] = known[f"%nctaid.{axis}"] // size
        return known.get(name, 0)  # a register that was never written on this path: its value does not matter

    def write(self, t, operand, value, kind):
        if operand != "_":
            width = int(re.sub(r"\D", "", kind) or 32)
            t.registers[operand] = value & (2**width - 1)

    def place(self, t, space, operand):
        base, offset = address(operand)
        where = self.value(t, base, "b64") + offset
        if space == "shared":
            return self.machine.machine_shared(ctypes.c_uint32(where & 0xFFFFFFFF))  # the address has its CTA's rank
        return where

    # ---- running ----

    def run(self, first):
        """Run the cluster whose first CTA has this place in the grid."""
        x, y, z = self.cluster
        self.places = [(first[0] + i, first[1] + j, first[2] + k) for k in range(z) for j in range(y) for i in range(x)]
        threads = [Thread(i, self) for i in range(self.block * self.ctas)]
        finished, done = (ctypes.c_int * len(threads))(), 0
        alive = set(range(len(threads)))
        for _ in range(MOST_STEPS):
            for index in sorted(alive):
                t = threads[index]
                self.now = t
                while t.waiting is None and index in alive:
                    if not self.step(t):
                        alive.discard(index)
            if not alive:
                return
            self.meet([threads[i] for i in alive], stuck=done == 0)
            done = self.machine.machine_step(finished)
            for k in range(done):
                threads[finished[k]].waiting = None
        places = {}
        for i in alive:
            place = f"{threads[i].waiting} at line {self.statements[threads[i].at - 1].line}: {self.statements[threads[i].at - 1].text}"
            places.setdefault(place, []).append(i)
        raise AssertionError(f"the interpreted kernel does not end: {places}")

    def meet(self, threads, stuck):
        """Let those go on whose barrier is complete (a warp, a CTA or the cluster waits at it), and those that poll."""
        for name, members in (("warp", lambda t: t.index // 32), ("cluster", lambda t: 0)):
            groups = {}
            for t in threads:
                groups.setdefault(members(t), []).append(t)
            for group in groups.values():
                if all(t.waiting == name for t in group):
                    shown = {t.tid % 32: t.exchange[0] for t in group if t.exchange}
                    for t in group:
                        t.waiting = None
                        if t.exchange and isinstance(t.exchange[1], str):
                            self.matrices(t, shown)
                        elif t.exchange:
                            self.write(t, t.exchange[2], shown[t.exchange[1] % 32], "b32")
                        t.exchange = None
        numbered = {}
        for t in threads:
            if isinstance(t.waiting, tuple):
                numbered.setdefault((t.rank, *t.waiting), []).append(t)
        for (rank, _, count), group in numbered.items():
            if len(group) == (count or sum(t.rank == rank for t in threads)):
                for t in group:
                    t.waiting = None
        if stuck or not any(t.waiting == "call" for t in threads):  # those that poll let the others compute first
            for t in threads:
                if t.waiting == "poll":
                    t.waiting = None

    def step(self, t):
        """One statement; False when the thread has left."""
        entry = self.program.get(t.at)
        t.at += 1
        if entry is None:
            return t.at <= self.function.end
        guard, negated, parts, operands, scopes = entry
        if guard and bool(self.value(t, guard)) == negated:
            return True
        if parts[0] in ("ret", "exit"):
            return False
        if parts[0] == "bra":
            t.at = next(self.labels[scope, operands[0]] for scope in reversed(scopes) if (scope, operands[0]) in self.labels)
            return True
        action = getattr(self, f"do_{parts[0]}", None)
        if action is None:
            raise NotInterpreted(".".join(parts))
        action(t, parts, operands)
        return True

    # ---- instructions ----

    def do_mov(self, t, parts, o):
        kind = parts[-1]
        if o[0].startswith("{"):
            value = self.value(t, o[1], kind)
            elements = vector(o[0])
            width = int(kind[1:]) // len(elements)
            for index, element in enumerate(elements):
                self.write(t, element, value >> (width * index), f"b{width}")
        elif o[1].startswith("{"):
            elements = vector(o[1])
            width = int(kind[1:]) // len(elements)
            self.write(t, o[0], sum((self.value(t, e) & (2**width - 1)) << (width * i) for i, e in enumerate(elements)), kind)
        elif o[1] in self.values:
            t.registers[o[0]] = self.values[o[1]]
        else:
            self.write(t, o[0], self.value(t, o[1], kind), kind)

    def do_cvta(self, t, parts, o):
        t.registers[o[0]] = self.value(t, o[1], "b64")

    def do_add(self, t, parts, o):
        if parts[-1] == "f32":
            return self.write(t, o[0], bits(f32(self.value(t, o[1])) + f32(self.value(t, o[2]))), "b32")
        return self.write(t, o[0], self.value(t, o[1], parts[-1]) + self.value(t, o[2], parts[-1]), parts[-1])

    def do_sub(self, t, parts, o):
        self.write(t, o[0], bits(f32(self.value(t, o[1])) - f32(self.value(t, o[2]))), "b32")

    def do_fma(self, t, parts, o):
        x, y, z = (float(f32(self.value(t, v))) for v in o[1:])
        self.write(t, o[0], bits(x * y + z), "b32")

    def do_max(self, t, parts, o):
        x, y = (f32(self.value(t, v)) for v in o[1:])
        self.write(t, o[0], bits(np.maximum(x, y) if "NaN" in parts else np.fmax(x, y)), "b32")

    def do_mul(self, t, parts, o):
        kind = parts[-1].replace("32", "64") if "wide" in parts else parts[-1]
        self.write(t, o[0], signed(self.value(t, o[1]), parts[-1]) * signed(self.value(t, o[2]), parts[-1]), kind)

    def do_mad(self, t, parts, o):
        kind = parts[-1].replace("32", "64") if "wide" in parts else parts[-1]
        product = signed(self.value(t, o[1], parts[-1]), parts[-1]) * signed(self.value(t, o[2], parts[-1]), parts[-1])
        self.write(t, o[0], product + self.value(t, o[3], kind), kind)

    def do_div(self, t, parts, o):
        x, y = (signed(self.value(t, v), parts[-1]) for v in o[1:])
        self.write(t, o[0], abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1), parts[-1])

    def do_rem(self, t, parts, o):
        x, y = (signed(self.value(t, v), parts[-1]) for v in o[1:])
        self.write(t, o[0], abs(x) % abs(y) * (-1 if x < 0 else 1), parts[-1])

    def do_prmt(self, t, parts, o):
        both, selector = self.value(t, o[1]) | self.value(t, o[2]) << 32, self.value(t, o[3])
        self.write(t, o[0], sum((both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i for i in range(4)), "b32")

    def do_ldmatrix(self, t, parts, o):
        base, offset = address(o[1])
        t.exchange = self.value(t, base) + offset, "load", vector(o[0])
        t.waiting = "warp"

    def do_stmatrix(self, t, parts, o):
        base, offset = address(o[0])
        t.exchange = self.value(t, base) + offset, "store", [self.value(t, register) for register in vector(o[1])]
        t.waiting = "warp"

    def matrices(self, t, addresses):
        """ldmatrix and stmatrix m8n8 of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8."""
        lane = t.tid % 32
        for index, register in enumerate(t.exchange[2]):
            memory = self.machine.machine_shared(ctypes.c_uint32(addresses[8 * index + lane // 4])) + 4 * (lane % 4)
            if t.exchange[1] == "load":
                self.write(t, register, ctypes.c_uint32.from_address(memory).value, "b32")
            else:
                ctypes.c_uint32.from_address(memory).value = register

    def do_neg(self, t, parts, o):
        self.write(t, o[0], -self.value(t, o[1]), parts[-1])

    def do_min(self, t, parts, o):
        self.write(t, o[0], min(signed(self.value(t, v), parts[-1]) for v in o[1:]), parts[-1])

    def do_shl(self, t, parts, o):
        self.write(t, o[0], self.value(t, o[1]) << self.value(t, o[2]), parts[-1])

    def do_shr(self, t, parts, o):
        self.write(t, o[0], signed(self.value(t, o[1], parts[-1]), parts[-1]) >> self.value(t, o[2]), parts[-1])

    def do_and(self, t, parts, o):
        self.write(t, o[0], self.value(t, o[1], parts[-1]) & self.value(t, o[2], parts[-1]), parts[-1])

    def do_or(self, t, parts, o):
        self.write(t, o[0], self.value(t, o[1], parts[-1]) | self.value(t, o[2], parts[-1]), parts[-1])

    def do_xor(self, t, parts, o):
        self.write(t, o[0], self.value(t, o[1], parts[-1]) ^ self.value(t, o[2], parts[-1]), parts[-1])

    def do_not(self, t, parts, o):
        value = self.value(t, o[1], parts[-1])
        self.write(t, o[0], int(not value) if parts[-1] == "pred" else ~value, "b1" if parts[-1] == "pred" else parts[-1])

    def do_shfl(self, t, parts, o):
        t.exchange = self.value(t, o[1]), self.value(t, o[2]), o[0]
        t.waiting = "warp"

    def do_cvt(self, t, parts, o):
        if parts[-1] == "f32":
            words = [self.value(t, operand) for operand in o[1:]]
            if parts[-2] == "e4m3x2":
                codes = model_numbers.nearest(f32_array(words), "e4m3")
                return self.write(t, o[0], int(codes[0]) << 8 | int(codes[1]), "b16")
            halves = [bf16(word) if parts[-2] == "bf16x2" else int(f32(word).astype(np.float16).view(np.uint16)) for word in words]
            return self.write(t, o[0], halves[0] << 16 | halves[1], "b32")
        if parts[-2:] == ["f32", "f16"]:
            return self.write(t, o[0], bits(np.uint16(self.value(t, o[1])).view(np.float16)), "b32")
        width = int(parts[-1][1:])
        return self.write(t, o[0], signed(self.value(t, o[1], parts[-1]) & (2**width - 1), parts[-1]), parts[-2])

    def do_setp(self, t, parts, o):
        width = int(parts[-1][1:])
        x, y = (signed(self.value(t, v, parts[-1]) & (2**width - 1), parts[-1]) for v in o[1:])
        compared = {"ne": x != y, "eq": x == y, "ge": x >= y, "gt": x > y, "le": x <= y, "lt": x < y}
        t.registers[o[0]] = int(compared[parts[1]])

    def do_selp(self, t, parts, o):
        self.write(t, o[0], self.value(t, o[1] if self.value(t, o[3]) else o[2]), parts[-1])

    def do_ld(self, t, parts, o):
        kind, elements = parts[-1], vector(o[0])
        size = int(kind[1:]) // 8
        if parts[1] == "param":
            name, offset = address(o[1])
            if name in t.params:
                return self.write(t, o[0], t.params[name] >> (8 * offset), kind)
            if name not in self.arrays:
                return self.write(t, o[0], self.values[name], kind)
            where = self.values[name] + offset
        else:
            where = self.place(t, parts[1].split("::")[0], o[1])
        data = ctypes.string_at(where, size * len(elements))
        for index, element in enumerate(elements):
            self.write(t, element, int.from_bytes(data[size * index : size * index + size], "little"), kind)
        return None

    def do_st(self, t, parts, o):
        kind, elements = parts[-1], vector(o[1])
        size = int(kind[1:]) // 8
        if parts[1] == "param":
            t.params[address(o[0])[0]] = self.value(t, o[1], kind)
            return
        data = b"".join((self.value(t, e, kind) & (2 ** (8 * size) - 1)).to_bytes(size, "little") for e in elements)
        ctypes.memmove(self.place(t, parts[1].split("::")[0], o[0]), data, len(data))

    def do_call(self, t, parts, o):
        returned, operands = (o[0].strip("()"), o[1:]) if o[0].startswith("(") else ("", o)
        number = FUNCTIONS.index(operands[0].removeprefix("megamoe_"))
        names = [name for name in operands[1].strip("()").split(", ") if name] if len(operands) > 1 else []
        values = (ctypes.c_uint64 * max(len(names), 1))(*(t.params[name] for name in names))
        self.machine.machine_call(t.index, number, len(names), values)
        t.waiting = "call"
        if returned:
            t.params[returned] = Result(self.machine, t.index)

    def do_bar(self, t, parts, o):
        t.waiting = "warp" if parts[1] == "warp" else (self.value(t, o[0]), self.value(t, o[1]) if len(o) > 1 else 0)

    def do_barrier(self, t, parts, o):
        if parts[2] == "wait":
            t.waiting = "cluster"

    def do_mapa(self, t, parts, o):
        t.registers[o[0]] = self.value(t, o[1]) & 0xFFFFFF | self.value(t, o[2]) << 24

    def do_fence(self, t, parts, o):
        pass

    def do_elect(self, t, parts, o):
        lane, predicate = o[0].split("|")
        self.write(t, lane, 0, "b32")
        t.registers[predicate] = int(t.tid % 32 == 0)

    def do_mbarrier(self, t, parts, o):
        def at(operand):
            base, offset = address(operand)
            return ctypes.c_uint32(self.value(t, base) + offset)

        if parts[1] == "arrive" and "expect_tx" not in parts:
            self.machine.barrier_arrive(at(o[1]))
        elif parts[1] == "init":
            self.machine.barrier_init(at(o[0]), self.value(t, o[1]))
        elif parts[1] == "try_wait":
            passed = self.machine.barrier_passed(at(o[1]), self.value(t, o[2]))
            t.registers[o[0]] = passed
            if not passed:
                t.waiting = "poll"
        else:  # arrive.expect_tx
            self.machine.barrier_expect(at(o[1]), self.value(t, o[2]))

    def do_clusterlaunchcontrol(self, t, parts, o):
        raise NotInterpreted(".".join(parts))

    def do_cp(self, t, parts, o):
        name = ".".join(parts)
        if name.startswith("cp.async.bulk.global.shared::cta.bulk_group"):
            ctypes.memmove(self.place(t, "global", o[0]), self.place(t, "shared", o[1]), self.value(t, o[2]))
        elif re.match(r"cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global\.tile\.mbarrier", name) and "multicast" not in name:
            bytes_ = self.tensor_box(t, o[1], o[0], load=True)
            base, offset = address(o[2])
            self.machine.barrier_complete(ctypes.c_uint32(self.value(t, base) + offset), bytes_)
        elif re.match(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta", name):
            self.tensor_box(t, o[0], o[1], load=False)
        elif parts[3] not in ("commit_group", "wait_group"):
            raise NotInterpreted(name)

    def tensor_box(self, t, tensor, shared, load):
        """What Hopper's own unit does for a box of whole bytes; returns its bytes."""
        pointer, coordinates = (part.strip() for part in tensor[1:-1].split(",", 1))
        q = np.frombuffer(ctypes.string_at(self.value(t, pointer, "b64"), 64), np.uint64).tolist()
        rank, kind, swizzle = (q[1] >> 4 & 7) + 1, q[1] >> 7 & 15, q[1] >> 13 & 3
        size = {0: 1, 1: 2, 6: 2, 9: 2, 2: 4, 3: 4, 7: 4}[kind]
        strides = [size, *(16 * part for part in (q[1] >> 32, q[2] & 0xFFFFFFFF, q[2] >> 32, q[3] & 0xFFFFFFFF))]
        extents = [1 + part for part in (q[4] & 0xFFFFFFFF, q[4] >> 32, q[5] & 0xFFFFFFFF, q[5] >> 32, q[6] & 0xFFFFFFFF)]
        box = [1 + (q[6] >> 56), *(1 + (q[7] >> 8 * i & 255) for i in range(4))][:rank]
        corner = [signed(self.value(t, c), "s32") for c in vector(coordinates)]
        base, offset = address(shared)
        place = self.value(t, base) + offset
        row = box[0] * size
        for index in range(int(np.prod(box[1:]))):
            rest, where, inside = index, q[0], True
            for d in range(1, rank):
                c = corner[d] + rest % box[d]
                rest //= box[d]
                inside &= 0 <= c < extents[d]
                where += c * strides[d]
            for chunk in range(0, row, 16):
                at = place + index * row + chunk
                at ^= (at >> 3) & {0: 0, 1: 0x10, 2: 0x30, 3: 0x70}[swizzle]
                memory = self.machine.machine_shared(ctypes.c_uint32(at))
                first = corner[0] + chunk // size
                valid = min(max(extents[0] - first, 0), 16 // size) * size if inside and first >= 0 else 0
                if load:
                    data = ctypes.string_at(where + first * size, valid) if valid else b""
                    ctypes.memmove(memory, data.ljust(16, b"\0"), 16)
                elif valid:
                    ctypes.memmove(where + first * size, memory, valid)
        return row * int(np.prod(box[1:]))


class Result:
    """What a call returned, read when it is done."""

    def __init__(self, machine, index):
        self.machine, self.index = machine, index

    def __rshift__(self, shift):
        low, high = (ctypes.c_uint64 * 2).from_address(self.machine.machine_result(self.index))
        return (low | high << 64) >> shift


def run(machine, ptx, *arguments, grid=1, block=128, shared=0, options=None):
    """Like ``launch.run``, without a GPU."""
    options = options or Options(limit_ms=2000)
    rewritten = rewrite(ptx, options)
    names = re.findall(r"\.param [^,)]*?([\w]+)(?:\[\d+\])?\s*[,)\n]", rewritten.text[: rewritten.text.index("{\n")])
    outputs, values, kept = [], {}, []
    for name, argument in zip(names, arguments, strict=True):
        if isinstance(argument, np.ndarray):
            outputs.append(np.ascontiguousarray(argument).copy())
            values[name] = outputs[-1].ctypes.data
        elif isinstance(argument, bytes):
            kept.append(ctypes.create_string_buffer(argument, len(argument)))
            values[name] = ctypes.addressof(kept[-1])
        else:
            values[name] = argument.value if isinstance(argument, ctypes._SimpleCData) else argument
    clustered = ".reqnctapercluster 2" in ptx
    fault = None
    for first in range(0, grid, 2 if clustered else 1):
        machine.machine_start(2 if clustered else 1, block, shared, options.seed or 0)
        Kernel(machine, rewritten.text, values, block, shared, 2 if clustered else 1).run((first, 0, 0))
        record = ctypes.create_string_buffer(RECORD.size)
        machine.machine_fault(record)
        fault = fault or read_fault(record.raw, rewritten)
    if fault:
        raise fault
    return outputs


def tensor(array):
    """A tensor in the machine's global memory, its address and a function that gives it back."""
    copy = np.ascontiguousarray(array).copy()
    return copy.ctypes.data, lambda: copy


assert struct.calcsize("P") == 8, "addresses of the machine are 64 bits"


def launch(machine, rewritten, pointers, grid, block, shared, cluster=(1, 1, 1)):
    """A launch as host code makes it, `pointers` to the kernel's parameters. Clusters of up to four CTAs run one after the other."""
    header = rewritten.text[: rewritten.text.index("{\n")]
    values = {}
    declared = re.findall(r"\.param (?:\.align \d+ )?\.(\w+) (\w+)(?:\[(\d+)\])?", header)
    for index, (kind, name, size) in enumerate(declared):
        if size:
            values[name] = pointers[index]
        else:
            values[name] = int.from_bytes(ctypes.string_at(pointers[index], int(kind[1:]) // 8), "little")
    ctas = int(np.prod(cluster))
    if ctas > MOST_CTAS:
        raise NotInterpreted(f"a cluster of {ctas} CTAs")
    for first in itertools.product(*(range(0, extent, size) for extent, size in zip(grid, cluster, strict=True))):
        machine.machine_start(ctas, block, shared, rewritten.seed)
        kernel = Kernel(machine, rewritten.text, values, block, shared, ctas)
        kernel.grid, kernel.cluster = grid, cluster
        kernel.run(first)
        record = ctypes.create_string_buffer(RECORD.size)
        machine.machine_fault(record)
        fault = read_fault(record.raw, rewritten)
        if fault:
            raise fault
