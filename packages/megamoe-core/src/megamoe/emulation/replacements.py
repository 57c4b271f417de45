"""The replacements of the instruction table: an instruction in, the code that takes its place out.

Most are calls of device functions (``device/*.cuh``). Inline are those where a call would cost more than it explains: two narrower
instructions instead of a wide one, and the registers of tcgen05.ld and st.
"""

from __future__ import annotations

import re

from megamoe.emulation.emit import Code, Collective, Names
from megamoe.emulation.ptx import Instruction, address, vector
from megamoe.errors import UnsupportedInstruction

KINDS = {"f16": 0, "tf32": 1, "f8f6f4": 2, "i8": 3, "mxf8f6f4": 4, "mxf4": 5, "mxf4nvf4": 6}
FORMATS = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
LOAD_SHAPES = {"32x32b": 0, "16x256b": 1, "16x128b": 2, "16x64b": 3, "16x32bx2": 4}
PACKED = 8
"""Added to a shape: a register holds the lower halves of two columns."""
COPY_SHAPES = {"32x128b.warpx4": 0, "128x128b": 1, "128x256b": 2, "64x128b.warpx2::02_13": 3, "64x128b.warpx2::01_23": 4}

Replacement = list[str] | Collective


def unsupported(instruction: Instruction, reason: str) -> UnsupportedInstruction:
    """The error for an instruction."""
    return UnsupportedInstruction(str(instruction), instruction.line, reason)


def group(opcode: str) -> int:
    return 2 if "cta_group::2" in opcode else 1


# ---- tensor memory ----


def alloc(i: Instruction, _: re.Match[str], names: Names) -> Replacement:
    code = Code(names)
    to = code.shared_address(i.operands[0])
    return code.call("megamoe_tmem_alloc", [("b32", str(i.line)), ("b32", to), ("b32", i.operands[1])]).lines


def dealloc(i: Instruction, _: re.Match[str], names: Names) -> Replacement:
    return Code(names).call("megamoe_tmem_dealloc", [("b32", str(i.line)), ("b32", i.operands[0]), ("b32", i.operands[1])]).lines


def relinquish(i: Instruction, _: re.Match[str], names: Names) -> Replacement:
    return Code(names).call("megamoe_tmem_relinquish", [("b32", str(i.line))]).lines


def register_offset(shape: int, register: int) -> int:
    """Bytes between the cells of register 0 and of this one, the same for every thread (a TMEM row is 2048 bytes)."""
    columns = {0: register, 1: register % 2 + 8 * (register // 4), 2: 4 * (register // 2), 3: 2 * register, 4: register}[shape]
    rows = {0: 0, 1: 8 * (register // 2 % 2), 2: 8 * (register % 2), 3: 0, 4: 0}[shape]
    return 4 * columns + 2048 * rows


def tmem_access(i: Instruction, shape: str, names: Names, registers: list[str], base: str) -> list[str]:
    """Load (tcgen05.ld) or store (tcgen05.st) registers at the global address in ``base``."""
    code, load = Code(names), ".ld" in i.opcode
    if "pack::16b" in i.opcode:
        return packed_access(i, shape, names, registers, base)
    width = {0: 4 if len(registers) % 4 == 0 else 1, 1: 2}.get(LOAD_SHAPES[shape], 1)
    for first in range(0, len(registers), width):
        group = registers[first : first + width]
        vec, values = (f".v{width}", f"{{{', '.join(group)}}}") if width > 1 else ("", group[0])
        place = f"[{base}+{register_offset(LOAD_SHAPES[shape], first)}]"
        code(f"ld.global.cg{vec}.b32 {values}, {place};" if load else f"st.global.cg{vec}.b32 {place}, {values};")
    return code("bar.warp.sync -1;").lines


def packed_access(i: Instruction, shape: str, names: Names, registers: list[str], base: str) -> list[str]:
    """The same for pack::16b and unpack::16b: a register's halves are the lower halves of two columns."""
    code, low, high = Code(names), names.register("b32"), names.register("b32")
    for index, register in enumerate(registers):
        offset = register_offset(LOAD_SHAPES[shape], index)
        rows, columns = divmod(offset, 2048)
        first, second = (f"[{base}+{2048 * rows + 2 * columns + 4 * half}]" for half in range(2))
        if ".ld" in i.opcode:
            code(f"ld.global.cg.b32 {low}, {first};", f"ld.global.cg.b32 {high}, {second};", f"prmt.b32 {register}, {low}, {high}, 0x5410;")
        else:
            code(f"and.b32 {low}, {register}, 0xffff;", f"shr.u32 {high}, {register}, 16;")
            code(f"st.global.cg.b32 {first}, {low};", f"st.global.cg.b32 {second}, {high};")
    return code("bar.warp.sync -1;").lines


def tmem_base(i: Instruction, shape: str, names: Names) -> tuple[list[str], str, list[str]]:
    """Lines that find the address of a tcgen05.ld or st, the register that holds it, and the instruction's data registers."""
    operand, data = (i.operands[1], i.operands[0]) if ".ld" in i.opcode else (i.operands[0], i.operands[-1])
    split = i.operands[2 if ".ld" in i.opcode else 1] if len(i.operands) == 3 else "0"
    form = LOAD_SHAPES[shape] + (PACKED if "pack::16b" in i.opcode else 0)
    registers = list(vector(data))
    code, base = Code(names), names.register("b64")
    at = code.shared_address(operand)
    code.call(
        "megamoe_tmem_address",
        [("b32", str(i.line)), ("b32", at), ("b32", str(form)), ("b32", str(len(registers))), ("b32", split)],
        ("b64", base),
    )
    return code.lines, base, registers


def tmem_ld_st(i: Instruction, m: re.Match[str], names: Names) -> Replacement:
    lines, base, registers = tmem_base(i, m["shape"], names)
    return [*lines, *tmem_access(i, m["shape"], names, registers, base)]


def nothing(i: Instruction, _: re.Match[str], names: Names) -> Replacement:
    return [f"/* {i} */"]


# ---- tcgen05.mma, cp, commit ----


def mma(i: Instruction, m: re.Match[str], names: Names) -> Replacement:
    if re.search(r"\.(sp|ws|ashift)\b", i.opcode):
        raise unsupported(i, "sparse, weight-stationary and shifted forms have no replacement")
    kind, block = KINDS[m["kind"]], 0
    if kind >= KINDS["mxf8f6f4"]:
        stated = re.search(r"\.(?:block(16|32)|scale_vec::([124])X)", i.opcode)
        block = 32 if m["kind"] != "mxf4nvf4" else 16
        if stated:
            block = int(stated[1]) if stated[1] else {"1": 32, "2": 32, "4": 16}[stated[2]]
    code = Code(names)
    d, rest = code.shared_address(i.operands[0]), list(i.operands[4:])
    in_tmem = i.operands[1].startswith("[")
    a = names.register("b64")
    if in_tmem:
        code(f"cvt.u64.u32 {a}, {code.shared_address(i.operands[1])};")
    else:
        code(f"mov.b64 {a}, {i.operands[1]};")
    b, idesc = code.move("b64", i.operands[2]), code.move("b32", i.operands[3])
    scale_a = scale_b = "0"
    if block:
        scale_a, scale_b, rest = code.shared_address(rest[0]), code.shared_address(rest[1]), rest[2:]
    masks = vector(rest.pop(0)) if rest and rest[0].startswith("{") else ()
    if len(rest) != 1:
        raise unsupported(i, "a scale of D has no replacement")
    accumulate = (
        code.truth(rest[0]) if rest[0].startswith("%") or rest[0].isidentifier() else code.move("b32", str(int(bool(int(rest[0], 0)))))
    )
    if masks:
        some, masked = code.move("b32", "0"), names.register("pred")
        for mask in masks:
            code(f"or.b32 {some}, {some}, {mask};")
        code(f"setp.ne.u32 {masked}, {some}, 0; @{masked} or.b32 {accumulate}, {accumulate}, 2;")
    flags = kind | group(i.opcode) << 4 | in_tmem << 6 | block << 8
    arguments = [
        ("b32", str(flags)),
        ("b32", d),
        ("b64", a),
        ("b64", b),
        ("b32", idesc),
        ("b32", scale_a),
        ("b32", scale_b),
        ("b32", accumulate),
    ]
    return Collective(code.lines, "megamoe_mma", arguments)


def cp(i: Instruction, m: re.Match[str], names: Names) -> Replacement:
    code = Code(names)
    to, source = code.shared_address(i.operands[0]), code.move("b64", i.operands[1])
    shape = COPY_SHAPES[m["shape"]]
    return Collective(code.lines, "megamoe_copy", [("b32", str(shape)), ("b32", str(group(i.opcode))), ("b32", to), ("b64", source)])


def commit(i: Instruction, m: re.Match[str], names: Names) -> Replacement:
    code = Code(names)
    barrier = names.register("b32")
    base, offset = address(i.operands[0])
    # The barrier's address may be a generic one, in a 64-bit register.
    code(
        f"cvt.u32.u64 {barrier}, {base};" if re.match(r"%rd|%l", base) else f"mov.b32 {barrier}, {base};",
        f"add.u32 {barrier}, {barrier}, {offset};",
    )
    mask = code.widen(i.operands[1]) if m["multicast"] else "0"
    return code.call(
        "megamoe_commit", [("b32", str(i.line)), ("b32", barrier), ("b32", mask), ("b32", str(int(bool(m["multicast"]))))]
    ).lines


# ---- warp instructions ----


def mma_sync(i: Instruction, m: re.Match[str], names: Names) -> Replacement:
    d, a, b, c, scale_a, select_a, scale_b, select_b = (vector(o) for o in i.operands)
    formats = [FORMATS.get(m[x]) for x in ("a", "b")]
    if None in formats:
        raise unsupported(i, f"operand types {m['a']} and {m['b']}")
    if m["kind"] == "mxf4nvf4" and m["vectors"] == "4" and m["scale"] != "ue4m3":
        raise unsupported(i, "four UE8M0 scales")
    code = Code(names)("{")
    selectors = []
    for value in (*select_a, *select_b):
        selectors.append(code.widen(value) if value.startswith("%") or not value.isdigit() else value)
    words = [(("b32"), w) for w in (*a, *b)] + [("f32", w) for w in c]
    arguments = [
        ("b32", m["vectors"]),
        ("b32", str(int(m["scale"] == "ue4m3"))),
        ("b32", str(formats[0])),
        ("b32", str(formats[1])),
        *words,
    ]
    arguments += [("b32", scale_a[0]), ("b32", selectors[0]), ("b32", selectors[1])]
    arguments += [("b32", scale_b[0]), ("b32", selectors[2]), ("b32", selectors[3])]
    for index, (kind, value) in enumerate(arguments):
        code(f".param .{kind} p{index}; st.param.{kind} [p{index}], {value};")
    code(".param .align 4 .b8 r[16];", f"call (r), megamoe_mma_sync, ({', '.join(f'p{x}' for x in range(len(arguments)))});")
    code(*(f"ld.param.b32 {register}, [r+{4 * x}];" for x, register in enumerate(d)))
    return code("}").lines


def stmatrix(i: Instruction, _: re.Match[str], names: Names) -> Replacement:
    code = Code(names)
    at = code.shared_address(i.operands[0])
    for index, register in enumerate(vector(i.operands[1])):
        code.call("megamoe_stmatrix_b8", [("b32", at), ("b32", register), ("b32", str(index))])
    return code.lines


def ldmatrix(i: Instruction, _: re.Match[str], names: Names) -> Replacement:
    code = Code(names)
    at = code.shared_address(i.operands[1])
    for index, register in enumerate(vector(i.operands[0])):
        code.call("megamoe_ldmatrix_b4", [("b32", at), ("b32", str(index))], ("b32", register))
    return code.lines


def redux(i: Instruction, m: re.Match[str], names: Names) -> Replacement:
    operation = (m["op"] == "max") | bool(m["abs"]) << 1 | bool(m["nan"]) << 2
    return (
        Code(names)
        .call("megamoe_redux", [("b32", str(operation)), ("f32", i.operands[1]), ("b32", i.operands[2])], ("f32", i.operands[0]))
        .lines
    )


# ---- conversions ----


def to_narrow(i: Instruction, m: re.Match[str], names: Names) -> Replacement:
    code, register = Code(names), names.register("b32")
    arguments = [("b32", str(FORMATS[m["format"]])), ("b32", str(int(bool(m["relu"])))), ("f32", i.operands[1]), ("f32", i.operands[2])]
    code.call("megamoe_to_narrow", arguments, ("b32", register))
    return code(f"cvt.u{8 if m['format'] == 'e2m1' else 16}.u32 {i.operands[0]}, {register};").lines


def from_narrow(i: Instruction, m: re.Match[str], names: Names) -> Replacement:
    code, register = Code(names), names.register("b32")
    code(f"cvt.u32.u{8 if m['format'] == 'e2m1' else 16} {register}, {i.operands[1]};")
    arguments = [("b32", str(FORMATS[m["format"]])), ("b32", str(int(bool(m["relu"])))), ("b32", register)]
    return code.call("megamoe_from_narrow", arguments, ("b32", i.operands[0])).lines


def to_ue8m0(i: Instruction, m: re.Match[str], names: Names) -> Replacement:
    code, register, mode = Code(names), names.register("b32"), str((m["round"] == "rp") | bool(m["satfinite"]) << 1)
    if m["source"] == "f32":
        code.call("megamoe_to_ue8m0", [("b32", mode), ("f32", i.operands[1]), ("f32", i.operands[2])], ("b32", register))
    else:
        code.call("megamoe_bf16_to_ue8m0", [("b32", mode), ("b32", i.operands[1])], ("b32", register))
    return code(f"cvt.u16.u32 {i.operands[0]}, {register};").lines


def from_ue8m0(i: Instruction, _: re.Match[str], names: Names) -> Replacement:
    code = Code(names)
    return code.call("megamoe_from_ue8m0", [("b32", code.widen(i.operands[1]))], ("b32", i.operands[0])).lines


# ---- two narrower instructions ----


def float_pairs(i: Instruction, m: re.Match[str], names: Names) -> Replacement:
    code = Code(names)
    low, high = ([names.register("f32") for _ in i.operands] for _ in range(2))
    for index, operand in enumerate(i.operands[1:], 1):
        code(f"mov.b64 {{{low[index]}, {high[index]}}}, {operand};")
    modifiers = m["modifiers"] or (".rn" if m["op"] == "fma" else "")
    for half in (low, high):
        code(f"{m['op']}{modifiers}.f32 {', '.join(half)};")
    return code(f"mov.b64 {i.operands[0]}, {{{low[0]}, {high[0]}}};").lines


def wide_access(i: Instruction, m: re.Match[str], names: Names) -> Replacement:
    load, half = m["op"] == "ld", int(m["count"]) // 2
    data, place = (i.operands[0], i.operands[1]) if load else (i.operands[1], i.operands[0])
    base, offset = address(place)
    registers, code = vector(data), Code(names)
    for part in range(2):
        values = f"{{{', '.join(registers[part * half : (part + 1) * half])}}}"
        at = f"[{base}+{offset + 16 * part}]"
        opcode = f"{m['op']}.{m['modifiers']}.v{half}.{m['type']}"
        code(f"{opcode} {values}, {at};" if load else f"{opcode} {at}, {values};")
    return code.lines


def three_way(i: Instruction, m: re.Match[str], names: Names) -> Replacement:
    first = names.register("f32")
    d, a, b, c = i.operands
    return [f"{i.opcode} {first}, {a}, {b};", f"{i.opcode} {d}, {first}, {c};"]


# ---- tensor copies and cluster launch control ----


def coordinates(code: Code, operand: str) -> tuple[str, list[tuple[str, str]]]:
    tensor, coordinates = (part.strip() for part in operand[1:-1].split(",", 1))
    values = list(vector(coordinates))
    padded = [*values, *["0"] * (5 - len(values))]
    return code.move("b64", tensor), [("b32", code.move("b32", value)) for value in padded]


def tensor_load(i: Instruction, m: re.Match[str], names: Names) -> Replacement:
    if not re.search(r"\.global(\.tile(::gather4)?)?\.mbarrier", i.opcode):
        raise unsupported(i, "only copies of tiles have a replacement")
    code, pair, gather = Code(names), "cta_group::2" in i.opcode, "::gather4" in i.opcode
    tensor, at = coordinates(code, i.operands[1])
    to, barrier = code.shared_address(i.operands[0]), code.shared_address(i.operands[2])
    mask = code.widen(i.operands[3]) if "multicast" in i.opcode else "0"
    arguments = [("b64", tensor), *at, ("b32", to), ("b32", barrier), ("b32", mask), ("b32", str(pair | gather << 1))]
    native = f"{re.sub(r'[.]cta_group::1', '', i.opcode)} {', '.join(i.operands)};"
    return Collective(code.lines, "megamoe_tensor_load", arguments, names.register("b32"), () if pair or gather else (native,))


def tensor_store(i: Instruction, _: re.Match[str], names: Names) -> Replacement:
    code = Code(names)
    tensor, at = coordinates(code, i.operands[0])
    arguments = [("b64", tensor), *at, ("b32", code.shared_address(i.operands[1]))]
    return Collective(code.lines, "megamoe_tensor_store", arguments, names.register("b32"), (f"{i.opcode} {', '.join(i.operands)};",))


def try_cancel(i: Instruction, _: re.Match[str], names: Names) -> Replacement:
    code = Code(names)
    to, barrier = code.shared_address(i.operands[0]), code.shared_address(i.operands[1])
    return code.call("megamoe_try_cancel", [("b32", to), ("b32", barrier), ("b32", str(int("multicast" in i.opcode)))]).lines


def query_cancel(i: Instruction, m: re.Match[str], _: Names) -> Replacement:
    if m["what"] == "is_canceled":
        return [f"setp.ne.u32 {i.operands[0]}, 0, 0;"]
    return [f"mov.b32 {register}, 0;" for register in vector(i.operands[0])]


def wait(i: Instruction, m: re.Match[str], names: Names) -> Replacement | None:
    predicate = i.operands[0]
    if predicate == "_":
        return None
    code, give_up = Code(names), names.register("b32")
    # Without the time hint, so that the thread comes back to look at the deadline.
    code(f"{i.opcode} {', '.join(i.operands[:3])};")
    inner = Code(names)
    barrier = inner.shared_address(i.operands[1])
    inner.call(
        "megamoe_waiting_delayed" if names.delayed else "megamoe_waiting", [("b32", str(i.line)), ("b32", barrier)], ("b32", give_up)
    )(f"setp.ne.u32 {predicate}, {give_up}, 0;")
    return code.unless(predicate, inner.lines).lines
