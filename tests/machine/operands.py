"""Operands of PTX instructions as C++: registers are variables of unsigned integers of their width, predicates are bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megamoe.emulation.ptx import address


class NotTranslated(Exception):
    """The machine does not know an instruction or an operand."""


WIDTH = (
    {"pred": 8, "b128": 128}
    | {f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64)}
    | {"bf16": 16, "f16x2": 32, "bf16x2": 32}
)


@dataclass(frozen=True)
class Functions:
    """C functions that kernels may call.

    Attributes:
        signatures: type of the result and types of the arguments, by name.
        types: C++ declarations of the types among them that are no numbers.
        polls: whether waits for mbarriers come back when they fail, so that what the kernel calls then is called.
    """

    signatures: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    types: str = ""
    polls: bool = False

    @property
    def declarations(self) -> str:
        lines = [f"{result} {name}({', '.join(arguments)});" for name, (result, arguments) in self.signatures.items()]
        return "\n".join([self.types, 'extern "C" {', *lines, "}\n"]) if lines else ""


_SPECIAL = {
    "%laneid": "t->lane",
    "%warpid": "t->warp",
    "%smid": "t->smid",
    "%nsmid": "t->smids",
    "%cluster_ctarank": "t->rank",
    "%cluster_nctarank": "t->ranks",
    "%globaltimer": "globaltimer(t)",
    "%clock64": "globaltimer(t)",
    "%clock": "globaltimer(t)",
    "%globaltimer_lo": "globaltimer(t)",
    "%lanemask_lt": "((1u << t->lane) - 1)",
    "%lanemask_le": "((2u << t->lane) - 1)",
    "%lanemask_gt": "~((2u << t->lane) - 1)",
    "%lanemask_ge": "~((1u << t->lane) - 1)",
    "%lanemask_eq": "(1u << t->lane)",
    "%total_smem_size": "t->shared_bytes",
}
for _axis, _name in enumerate("xyz"):
    _SPECIAL |= {
        f"%tid.{_name}": "t->tid" if _axis == 0 else "0",
        f"%ntid.{_name}": "t->block" if _axis == 0 else "1",
        f"%ctaid.{_name}": f"t->cta[{_axis}]",
        f"%nctaid.{_name}": f"t->grid[{_axis}]",
        f"%cluster_ctaid.{_name}": f"t->cta[{_axis}] % t->cluster[{_axis}]",
        f"%cluster_nctaid.{_name}": f"t->cluster[{_axis}]",
        f"%clusterid.{_name}": f"t->cta[{_axis}] / t->cluster[{_axis}]",
        f"%nclusterid.{_name}": f"t->grid[{_axis}] / t->cluster[{_axis}]",
    }


class Operands:
    """Reads and writes operands.

    Attributes:
        shared: window offsets of shared symbols behind the CTA's first byte.
        params: byte offsets of kernel parameters.
        functions: what kernels may call besides.
        variables: C++ variable of every register that can be seen where the instruction is; set by the caller.
        passed: C++ variables that hold arguments and results of calls, by value; set by the caller.
        local: C++ arrays of local memory by name; set by the caller.
        widths: bits of C++ variables.
        label: C++ label of a label; set by the caller.
    """

    def __init__(self, shared: dict[str, int], params: dict[str, int], functions: Functions) -> None:
        self.shared, self.params, self.functions = shared, params, functions
        self.passed: set[str] = set()
        self.local: dict[str, str] = {}
        self.variables: Mapping[str, str] = {}
        self.widths: dict[str, int] = {}
        self.label: Callable[[str], str] = str

    # ---- operands ----

    def bits(self, operand: str) -> str:
        """The operand's bits as an unsigned expression."""
        operand = operand.strip()
        if operand in self.variables:
            return self.variables[operand]
        if operand.startswith(("0f", "0F")):
            return f"0x{operand[2:]}u"
        if operand.startswith(("0d", "0D")):
            return f"0x{operand[2:]}ull"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", operand):
            return f"(u64){int(operand.rstrip('U'), 0) & (2**64 - 1):#x}ull"
        if operand in _SPECIAL:
            return f"({_SPECIAL[operand]})"
        if operand in self.shared:
            return f"(t->shared + {self.shared[operand]}u)"
        if operand in self.params:
            return f"(u64)(t->params + {self.params[operand]})"
        if operand in self.local:
            return f"(u64){self.local[operand]}"
        raise NotTranslated(f"operand {operand}")

    def value(self, operand: str, kind: str) -> str:
        """The operand as a C++ value of a PTX type."""
        negated = operand.startswith("!")
        bits = self.bits(operand.lstrip("!"))
        if kind == "pred":
            return f"({'!' if negated else ''}({bits}))" if operand.lstrip("!") in self.variables else f"(bool)({bits})"
        if kind == "f32":
            return f"f((u32)({bits}))"
        if kind == "f64":
            return f"d((u64)({bits}))"
        return f"({cpp(kind)})({bits})"

    def put(self, operand: str, value: str, kind: str) -> str:
        """Write a C++ value of a PTX type into a register, extended where the register is wider."""
        if operand == "_":
            return f"(void)({value});"
        name = self.variables[operand]
        width = self.widths[name]
        if kind == "pred":
            return f"{name} = ({value}) ? 1 : 0;"
        if kind in ("f32", "f64"):
            return f"{name} = bits(({'float' if kind == 'f32' else 'double'})({value}));"
        wide = f"(s{width})" if kind.startswith("s") else ""
        return f"{name} = (u{width}){wide}({cpp(kind)})({value});"

    def number(self, operand: str, kind: str, ftz: bool) -> str:
        text = self.value(operand, kind)
        return f"flushed({text})" if ftz else text

    def where(self, operand: str, space: str = "") -> str:
        """An address in brackets as an expression of 64 bits (32 where the register has 32)."""
        base, offset = address(operand)
        name = self.bits(base)
        width = 32 if space.startswith("shared") else 64
        return f"(u64)(u{width})({name} + (u64){offset}ll)"


def cpp(kind: str) -> str:
    return {"b": "u"}.get(kind[0], kind[0]) + kind[1:]


def only(words, allowed):
    unknown = [w for w in words if w not in allowed]
    if unknown:
        raise NotTranslated(", ".join(unknown))
