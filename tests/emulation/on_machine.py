"""Rewritten kernels on the machine of ``tests/machine``: translated to C++ with the emulation's device functions as they are, fast enough
for whole layers. Threads take turns where they wait, in an order that a seed draws; memory is sequentially consistent."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

from tests.machine import instructions, launch, translate

from megamoe.emulation.assemble import DEVICE_SOURCES
from megamoe.emulation.faults import RECORD, read_fault
from megamoe.emulation.ptx import address, parse

HOST = Path(__file__).parent / "host"


@functools.cache
def functions():
    """The device functions, built."""
    launch._runtime()  # it has what they call
    headers = [*sorted(HOST.glob("*.h")), *sorted(DEVICE_SOURCES.iterdir()), HOST / "on_machine.cpp", *sorted(launch.HOST.glob("*.h"))]
    content = [path.read_bytes() for path in headers]
    flags = ("-std=c++17", "-O2", "-fno-strict-aliasing", "-Wl,-Bsymbolic", f"-I{DEVICE_SOURCES}", f"-I{HOST}")
    return ctypes.CDLL(str(launch._build("emulation", content, [HOST / "on_machine.cpp"], *flags)), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def signatures():
    """By name: type of the result and of the arguments."""
    text = "".join(path.read_text() for path in DEVICE_SOURCES.glob("*.cuh"))
    found = {}
    for result, name, listed in re.findall(r"EMU_CALL (\w+) (megamoe_\w+)\(([^)]*)\)", text):
        found[name] = result, [argument.split()[0] for argument in listed.split(",") if argument.strip()]
    return found


class Instructions(instructions.Instructions):
    """With calls of device functions, local memory, and what the megakernels use besides."""

    delayed = False

    def do_mbarrier(self, p, o):
        if self.delayed:  # waiting threads must come back: delayed operations make progress where they poll
            p = ["test_wait" if word == "try_wait" else word for word in p]
        return super().do_mbarrier(p, o)

    def bits(self, operand):
        operand = operand.strip()
        return f"(u64){operand}" if operand.startswith("__local_depot") else super().bits(operand)

    def do_call(self, p, o):
        to, name, listed = ("", o[0], o[1:]) if not o[0].startswith("(") else (o[0].strip("()"), o[1], o[2:])
        result, kinds = signatures()[name]
        arguments = [x.strip() for x in listed[0].strip("()").split(",") if x.strip()] if listed else []
        values = ", ".join(
            self.value(x, "f32") if kind == "float" else self.value(x, "u" + kind[1:]) for x, kind in zip(arguments, kinds, strict=True)
        )
        call = "emulation_enter(t); "
        if not to:
            return f"{{ {call}{name}({values}); }}"
        if result == "Four":
            return f"{{ {call}Four r = {name}({values}); memcpy({self.variables[to]}, &r, 16); }}"
        return f"{{ {call}{self.put(to, f'{name}({values})', 'f32' if result == 'float' else result)} }}"

    def do_ld(self, p, o):
        if p[1] == "param" and o[1].startswith("[%"):  # a parameter's address in a register
            return f"{{ u{self.width(p)} v; memcpy(&v, (char*){self.where(o[1])}, sizeof v); {self.put(o[0], 'v', f'b{self.width(p)}')} }}"
        if p[1] == "param" and address(o[1])[0] in self.variables:
            name, offset = address(o[1])
            at = f"(char*){'' if self.variables[name].startswith('array') else '&'}{self.variables[name]} + {offset}"
            return f"{{ u{self.width(p)} v; memcpy(&v, {at}, sizeof v); {self.put(o[0], 'v', f'b{self.width(p)}')} }}"
        if p[1] == "local":
            return f"{{ u{self.width(p)} v; memcpy(&v, (char*){self.where(o[1])}, sizeof v); {self.put(o[0], 'v', p[-1])} }}"
        return super().do_ld(p, o)

    def do_st(self, p, o):
        if p[1] == "param":
            return self.put(address(o[0])[0], self.value(o[1], f"b{self.width(p)}"), f"b{self.width(p)}")
        if p[1] == "local":
            return f"{{ u{self.width(p)} v = {self.value(o[1], f'b{self.width(p)}')}; memcpy((char*){self.where(o[0])}, &v, sizeof v); }}"
        return super().do_st(p, o)

    @staticmethod
    def width(p):
        return instructions.WIDTH[p[-1]]

    def do_cvta(self, p, o):
        return self.put(o[0], self.value(o[1], p[-1]), p[-1]) if "local" in p else super().do_cvta(p, o)

    def do_red(self, p, o):
        if p[-1] != "bf16x2" or "v2" not in p:
            return super().do_red(p, o)
        parts = [self.value(part, "u32") for part in instructions.vector(o[1])]
        lines = [f"u32* at = (u32*)global_at(t, {self.where(o[0])}, {4 * len(parts)}, true);"]
        for i, part in enumerate(parts):
            sums = (f"to_bf16(from_bf16((u16)(at[{i}] >> {shift})) + from_bf16((u16)({part} >> {shift})))" for shift in (16, 0))
            lines.append(f"at[{i}] = pair({', '.join(sums)});")
        return "{ " + " ".join([*lines, "stored(t);"]) + " }"

    def do_fns(self, p, o):
        return self.put(o[0], f"find_nth_set({', '.join(self.value(x, 'u32') for x in o[1:])})", "u32")

    def do_max(self, p, o):
        if "xorsign" not in p:
            return super().do_max(p, o)
        a, b = (self.value(x, "u32") for x in o[1:])
        return self.put(o[0], f"bits(fmaxf(fabsf(f({a})), fabsf(f({b})))) | (({a} ^ {b}) & 0x80000000u)", "b32")


class Body(translate._Body):
    def _declare(self, text):
        array = re.fullmatch(r"\.param \.align \d+ \.b8 (\w+)\[16\];", text)
        local = re.match(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\]", text)
        if array:
            self.arrays = getattr(self, "arrays", 0) + 1
            self.variables[array[1]] = f"array{self.arrays}"
        elif local:
            self.locals = f"  alignas({local[1]}) char {local[2]}[{local[3]}];\n"
        else:
            super()._declare(re.sub(r"^\.param", ".reg", text))

    def declarations(self):
        arrays = "".join(f"  u32 array{i}[4];\n" for i in range(1, getattr(self, "arrays", 0) + 1))
        return super().declarations() + arrays + getattr(self, "locals", "")


class Kernel:
    """One kernel of a rewritten module, translated and built."""

    def __init__(self, rewritten, function, module):
        header = module.statements[function.header].text
        offsets, self.params, self.params_bytes = translate._params(header)
        shared, self.static_bytes = translate._shared(module)
        self.threads = int(re.search(r"\.(?:reqntid|maxntid) (\d+)", header)[1])
        self.rewritten = rewritten
        translated = Instructions(shared, offsets)
        translated.delayed = bool(rewritten.seed)
        body = Body(translated)
        for index in range(function.start, function.end):
            if module.statements[index].text:
                body.add(module.statements[index])
        names = set(re.findall(r"\bmegamoe_\w+(?=\()", "\n".join(body.lines)))
        declared = "".join(f"{signatures()[name][0]} {name}({', '.join(signatures()[name][1])});\n" for name in sorted(names))
        source = (
            '#include "arithmetic.h"\n#include <string.h>\nstruct Four { float v[4]; };\nextern "C" {\nvoid emulation_enter(Thread*);\n'
            f'u32 find_nth_set(u32, u32, int);\n{declared}}}\nextern "C" void kernel(Thread* t) {{\n'
        )
        self.source = source + body.declarations() + "\n".join(body.lines) + "\n}\n"
        functions()
        self.library = launch._build_kernel(translate.Translated(self.source, tuple(self.params), self.params_bytes, self.static_bytes))
        self.address = ctypes.cast(self.library.kernel, ctypes.c_void_p).value


def kernels(rewritten):
    """The kernels of a rewritten module, translated."""
    module = parse(rewritten.text)
    return [Kernel(rewritten, function, module) for function in module.functions() if function.kernel]


def run(kernel, params, grid, block, cluster, dynamic_shared, buffers, seed=0):
    """One launch.

    Raises:
        EmulationFault: the kernel did what its architecture forbids.
        MachineFault: it did what no device allows, or never ends.
    """
    shared = kernel.static_bytes + dynamic_shared
    functions().emulation_start(shared, kernel.rewritten.seed)
    memory = (ctypes.c_uint64 * 4)()
    functions().emulation_memory(memory)
    given = launch.Launch(kernel.address, params, grid, block, cluster, shared)
    try:
        ran = launch.run([given], [*buffers, (memory[0], memory[1]), (memory[2], memory[3])], seed=seed)
    finally:
        record = ctypes.create_string_buffer(RECORD.size)
        functions().emulation_fault(record)
        fault = read_fault(record.raw, kernel.rewritten)
        if fault:
            raise fault
    return ran
