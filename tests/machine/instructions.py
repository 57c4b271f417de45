"""One PTX instruction as C++ statements.

Registers are C++ variables of unsigned integers of their width (predicates: one byte); instructions look at their bits. Each method takes an
instruction's words and its operands and returns the statements; what has no method, or has a word that its method does not know, raises
:class:`NotTranslated` by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from megamoe.emulation.ptx import Instruction, address, vector


class NotTranslated(Exception):
    """The machine does not know an instruction or an operand."""


WIDTH = {"pred": 8, "b128": 128} | {f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64)} | {"bf16": 16, "f16x2": 32, "bf16x2": 32}
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
    "%dynamic_smem_size": "dynamic_shared_size(t)",
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
_SPACES = {"global": "global_at", "shared": "shared_at", "": "generic_at"}
_ORDER = {"weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"}
_SCOPE = {"cta", "cluster", "gpu", "sys"}
_CACHE = re.compile(r"(?:ca|cg|cs|lu|cv|wb|wt|nc|L1::.*|L2::.*)$")
_TYPES = {"bf16": "BF16", "f16": "F16", "e4m3": "E4M3", "e5m2": "E5M2"}


class Instructions:
    """Translates instructions. `names` resolves a register, label or symbol in the scope of the statement.

    Attributes:
        variables: C++ variable of a register in the current scope, or None; set by the caller.
        widths: bits of C++ variables.
        shared: window offsets of shared symbols behind the CTA's first byte.
        params: byte offsets of kernel parameters.
    """

    def __init__(self, shared: dict[str, int], params: dict[str, int]) -> None:
        self.shared, self.params = shared, params
        self.variables: Mapping[str, str] = {}
        self.widths: dict[str, int] = {}
        self.label: Callable[[str], str] = str

    def translate(self, i: Instruction) -> str:
        """The statements of an instruction, its guard included."""
        method = getattr(self, f"do_{i.parts[0].replace('::', '_')}", None)
        if method is None:
            raise NotTranslated(f"line {i.line}: {i.opcode}")
        try:
            code = method(list(i.parts), list(i.operands))
        except NotTranslated as error:
            raise NotTranslated(f"line {i.line}: {i} ({error})") from None
        except (ValueError, KeyError, IndexError, AttributeError) as error:
            raise NotTranslated(f"line {i.line}: {i} ({type(error).__name__}: {error})") from error
        if "(t" in code:
            code = f"t->line = {i.line}; {code}"
        if i.guard:
            predicate = self.variables[i.guard.lstrip("@!")]
            code = f"if ({'!' if '!' in i.guard else ''}{predicate}) {{ {code} }}"
        return code

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
        return f"({_cpp(kind)})({bits})"

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
        return f"{name} = (u{width}){wide}({_cpp(kind)})({value});"

    def number(self, operand: str, kind: str, ftz: bool) -> str:
        text = self.value(operand, kind)
        return f"flushed({text})" if ftz else text

    def where(self, operand: str, space: str = "") -> str:
        """An address in brackets as an expression of 64 bits (32 where the register has 32)."""
        base, offset = address(operand)
        name = self.bits(base)
        width = 32 if space.startswith("shared") else 64
        return f"(u64)(u{width})({name} + (u64){offset}ll)"

    # ---- moves and integers ----

    def do_mov(self, p, o):
        kind = p[-1]
        if o[0].startswith("{"):
            parts = vector(o[0])
            width = WIDTH[kind] // len(parts)
            lines = [f"u64 v = {self.value(o[1], kind)};"]
            lines += [self.put(part, f"v >> {width * i}", f"b{width}") for i, part in enumerate(parts)]
            return "{ " + " ".join(lines) + " }"
        if o[1].startswith("{"):
            parts = vector(o[1])
            width = WIDTH[kind] // len(parts)
            return self.put(o[0], " | ".join(f"(u64){self.value(part, f'b{width}')} << {width * i}" for i, part in enumerate(parts)), kind)
        if kind in ("f32", "f64"):
            kind = "b" + kind[1:]
        return self.put(o[0], self.value(o[1], kind), kind)

    def do_cvta(self, p, o):
        if "shared" in p or "shared::cta" in p or "shared::cluster" in p or "param" in p or "global" in p:
            return self.put(o[0], self.value(o[1], p[-1]), p[-1])
        raise NotTranslated("space")

    def do_mapa(self, p, o):
        base, offset = address(o[1])
        return self.put(o[0], f"(((u64){self.bits(base)} + {offset}) & 0xffffff) | (u64){self.value(o[2], 'u32')} << 24", p[-1])

    def _two(self, p, o, symbol):
        kind = p[-1]
        _only(p[1:-1], {"rn", "ftz", "sat", "u"})
        if kind in ("f32", "f64"):
            if "sat" in p:
                raise NotTranslated("sat")
            ftz = "ftz" in p
            text = f"{self.number(o[1], kind, ftz)} {symbol} {self.number(o[2], kind, ftz)}"
            if kind == "f32":
                text = f"flushed({text})" if ftz else text
            return self.put(o[0], text, kind)
        if kind in ("f16x2", "bf16x2", "f16", "bf16"):
            return self._halves(o, kind, lambda i: f"{self._half(o[1], kind, i)} {symbol} {self._half(o[2], kind, i)}")
        unsigned = "u" + kind[1:]
        return self.put(o[0], f"{self.value(o[1], unsigned)} {symbol} {self.value(o[2], unsigned)}", unsigned)

    def _half(self, operand, kind, i):
        return f"from_{kind.removesuffix('x2')}((u16)((u32)({self.bits(operand)}) >> {16 * i}))"

    def _halves(self, o, kind, part):
        to = f"to_{kind.removesuffix('x2')}"
        if kind.endswith("x2"):
            return self.put(o[0], f"pair({to}({part(1)}), {to}({part(0)}))", "b32")
        return self.put(o[0], f"{to}({part(0)})", "b16")

    def do_add(self, p, o):
        return self._two(p, o, "+")

    def do_sub(self, p, o):
        return self._two(p, o, "-")

    def do_mul(self, p, o):
        kind = p[-1]
        if kind in ("f32", "f64", "f16x2", "bf16x2", "f16", "bf16"):
            return self._two(p, o, "*")
        return self._product(p, o, "")

    def _product(self, p, o, plus):
        kind, bits = p[-1], WIDTH[p[-1]]
        letter = kind[0] if kind[0] != "b" else "u"
        double = "__int128" if bits == 64 else f"s{2 * bits}"
        if letter == "u":
            double = "unsigned __int128" if bits == 64 else f"u{2 * bits}"
        product = f"({double}){self.value(o[1], kind)} * ({double}){self.value(o[2], kind)}"
        if "wide" in p:
            return self.put(o[0], f"{product}{plus and f' + ({double})' + self.value(o[3], letter + str(2 * bits))}", f"{letter}{2 * bits}")
        if "hi" in p:
            product = f"(({product}) >> {bits})"
        elif "lo" not in p:
            raise NotTranslated("part of the product")
        return self.put(o[0], f"(u{bits})({product}){plus and ' + ' + self.value(o[3], f'u{bits}')}", f"u{bits}")

    def do_mad(self, p, o):
        if p[-1] in ("f32", "f64"):
            return self.do_fma(p, o)
        return self._product(p, o, "+")

    def do_fma(self, p, o):
        kind = p[-1]
        if kind in ("f16x2", "bf16x2", "f16", "bf16"):
            return self._halves(o, kind, lambda i: f"fmaf({', '.join(self._half(x, kind, i) for x in o[1:4])})")
        _only(p[1:-1], {"rn", "ftz"})
        name = "fmaf" if kind == "f32" else "fma"
        ftz = "ftz" in p
        text = f"{name}({', '.join(self.number(x, kind, ftz) for x in o[1:4])})"
        return self.put(o[0], f"flushed({text})" if ftz else text, kind)

    def do_div(self, p, o):
        if p[-1] == "f32":
            _only(p[1:-1], {"rn", "approx", "full", "ftz"})
            return self._two(["div", *(["ftz"] if "ftz" in p else []), "f32"], o, "/")
        return self.put(o[0], f"quotient({self.value(o[1], p[-1])}, {self.value(o[2], p[-1])})", p[-1])

    def do_rem(self, p, o):
        return self.put(o[0], f"remainder_of({self.value(o[1], p[-1])}, {self.value(o[2], p[-1])})", p[-1])

    def _extreme(self, p, o, which):
        kind = p[-1]
        _only(p[1:-1], {"NaN", "relu", "ftz"})
        if kind == "f32":
            name = f"{which}_{'nan' if 'NaN' in p else 'number'}"
            text = self.number(o[1], kind, "ftz" in p)
            for other in o[2:]:
                text = f"{name}({text}, {self.number(other, kind, 'ftz' in p)})"
            return self.put(o[0], text, kind)
        if kind in ("f16x2", "bf16x2", "f16", "bf16"):
            name = f"{which}_{'nan' if 'NaN' in p else 'number'}"
            return self._halves(o, kind, lambda i: f"{name}({self._half(o[1], kind, i)}, {self._half(o[2], kind, i)})")
        text = f"{'smaller' if which == 'min' else 'larger'}<{_cpp(kind)}>({self.value(o[1], kind)}, {self.value(o[2], kind)})"
        if "relu" in p:
            text = f"larger<{_cpp(kind)}>({text}, 0)"
        return self.put(o[0], text, kind)

    def do_min(self, p, o):
        return self._extreme(p, o, "min")

    def do_max(self, p, o):
        return self._extreme(p, o, "max")

    def do_neg(self, p, o):
        if p[-1] in ("f32", "f64"):
            return self.put(o[0], f"{self.value(o[1], 'b' + p[-1][1:])} ^ (1ull << {WIDTH[p[-1]] - 1})", "b" + p[-1][1:])
        if "f16" in p[-1]:
            return self.put(o[0], f"{self.value(o[1], f'b{WIDTH[p[-1]]}')} ^ 0x80008000u", f"b{WIDTH[p[-1]]}")
        return self.put(o[0], f"0 - {self.value(o[1], 'u' + p[-1][1:])}", "u" + p[-1][1:])

    def do_abs(self, p, o):
        if p[-1] in ("f32", "f64"):
            return self.put(o[0], f"{self.value(o[1], 'b' + p[-1][1:])} & ~(1ull << {WIDTH[p[-1]] - 1})", "b" + p[-1][1:])
        if "f16" in p[-1]:
            return self.put(o[0], f"{self.value(o[1], f'b{WIDTH[p[-1]]}')} & 0x7fff7fffu", f"b{WIDTH[p[-1]]}")
        value = self.value(o[1], p[-1])
        return self.put(o[0], f"({value} < 0 ? 0 - {value} : {value})", p[-1])

    def do_shl(self, p, o):
        kind = "u" + p[-1][1:]
        return self.put(o[0], f"left<{_cpp(kind)}>({self.value(o[1], kind)}, {self.value(o[2], 'u32')})", kind)

    def do_shr(self, p, o):
        return self.put(o[0], f"right<{_cpp(p[-1])}>({self.value(o[1], p[-1])}, {self.value(o[2], 'u32')})", p[-1])

    def _bitwise(self, p, o, symbol):
        if p[-1] == "pred":
            return self.put(o[0], f"{self.value(o[1], 'pred')} {symbol} {self.value(o[2], 'pred')}", "pred")
        return self.put(o[0], f"{self.value(o[1], p[-1])} {symbol} {self.value(o[2], p[-1])}", p[-1])

    def do_and(self, p, o):
        return self._bitwise(p, o, "&")

    def do_or(self, p, o):
        return self._bitwise(p, o, "|")

    def do_xor(self, p, o):
        return self._bitwise(p, o, "^")

    def do_not(self, p, o):
        return self.put(o[0], f"{'!' if p[-1] == 'pred' else '~'}{self.value(o[1], p[-1])}", p[-1])

    def do_popc(self, p, o):
        return self.put(o[0], f"__builtin_popcountll({self.value(o[1], p[-1])})", "u32")

    def do_clz(self, p, o):
        width, value = WIDTH[p[-1]], self.value(o[1], p[-1])
        return self.put(o[0], f"({value} ? __builtin_clzll({value}) - {64 - width} : {width})", "u32")

    def do_brev(self, p, o):
        _only(p[1:], {"b32"})
        return self.put(o[0], f"reversed({self.value(o[1], 'u32')})", "u32")

    def do_bfind(self, p, o):
        _only(p[1:], {"u32", "u64"})
        value = self.value(o[1], p[-1])
        return self.put(o[0], f"({value} ? 63 - __builtin_clzll({value}) : -1)", "u32")

    def do_bfe(self, p, o):
        return self.put(o[0], f"field<{_cpp(p[-1])}>({self.value(o[1], p[-1])}, {self.value(o[2], 'u32')}, {self.value(o[3], 'u32')})", p[-1])

    def do_bfi(self, p, o):
        _only(p[1:], {"b32"})
        return self.put(o[0], f"insert_field({', '.join(self.value(x, 'u32') for x in o[1:5])})", "b32")

    def do_prmt(self, p, o):
        _only(p[1:], {"b32"})
        return self.put(o[0], f"permute({', '.join(self.value(x, 'u32') for x in o[1:4])})", "b32")

    def do_lop3(self, p, o):
        _only(p[1:], {"b32"})
        return self.put(o[0], f"lop3({', '.join(self.value(x, 'u32') for x in o[1:5])})", "b32")

    def do_shf(self, p, o):
        _only(p[2:], {"wrap", "clamp", "b32"})
        by = self.value(o[3], "u32") + (" & 31" if "wrap" in p else "")
        name = {"l": "shf_left", "r": "shf_right"}[p[1]]
        return self.put(o[0], f"{name}({self.value(o[1], 'u32')}, {self.value(o[2], 'u32')}, {by})", "b32")

    def do_selp(self, p, o):
        kind = "b" + p[-1][1:] if p[-1] in ("f32", "f64") else p[-1]
        return self.put(o[0], f"{self.value(o[3], 'pred')} ? {self.value(o[1], kind)} : {self.value(o[2], kind)}", kind)

    def do_setp(self, p, o):
        kind, how = p[-1], p[1]
        _only(p[2:-1], {"ftz", "and", "or", "xor"})
        compared = how.removesuffix("u") if kind.startswith("f") and len(how) == 3 else how
        a, b = (self.number(x, kind, "ftz" in p) for x in o[1:3])
        symbol = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
        if how in ("num", "nan"):
            test = f"({a} == {a} && {b} == {b})" if how == "num" else f"({a} != {a} || {b} != {b})"
        elif kind.startswith("f"):
            unordered = f"({a} != {a} || {b} != {b})"
            test = f"({a} {symbol[compared]} {b})"
            test = f"({test} || {unordered})" if len(how) == 3 else f"({test} && !{unordered})"
        else:
            test = f"({a} {symbol[compared]} {b})"
        for word in ("and", "or", "xor"):
            if word in p:
                test = f"{test} {'&|^'[('and', 'or', 'xor').index(word)]} {self.value(o[3], 'pred')}"
        first, _, second = o[0].partition("|")
        return self.put(first, test, "pred") + (" " + self.put(second, f"!({test})", "pred") if second else "")

    # ---- floating point ----

    def do_ex2(self, p, o):
        _only(p[1:], {"approx", "ftz", "f32"})
        return self.put(o[0], f"flushed(exp2f({self.number(o[1], 'f32', True)}))", "f32")

    def do_lg2(self, p, o):
        _only(p[1:], {"approx", "ftz", "f32"})
        return self.put(o[0], f"log2f({self.number(o[1], 'f32', 'ftz' in p)})", "f32")

    def do_rcp(self, p, o):
        _only(p[1:], {"approx", "rn", "ftz", "f32"})
        text = f"1.0f / {self.number(o[1], 'f32', 'ftz' in p)}"
        return self.put(o[0], f"flushed({text})" if "ftz" in p else text, "f32")

    def do_sqrt(self, p, o):
        _only(p[1:], {"approx", "rn", "ftz", "f32"})
        return self.put(o[0], f"sqrtf({self.number(o[1], 'f32', 'ftz' in p)})", "f32")

    def do_rsqrt(self, p, o):
        _only(p[1:], {"approx", "ftz", "f32"})
        return self.put(o[0], f"1.0f / sqrtf({self.number(o[1], 'f32', 'ftz' in p)})", "f32")

    def do_tanh(self, p, o):
        _only(p[1:], {"approx", "f32"})
        return self.put(o[0], f"tanhf({self.value(o[1], 'f32')})", "f32")

    def do_cvt(self, p, o):
        to, source = p[-2], p[-1]
        words = set(p[1:-2])
        integer = re.compile(r"[su](8|16|32|64)$")
        if integer.match(to) and integer.match(source):
            _only(words, set())
            return self.put(o[0], self.value(o[1], source), to)
        if to in ("e4m3x2", "e5m2x2") and source == "f32":
            _only(words, {"rn", "satfinite"})
            name = "to_" + to[:-2]
            return self.put(o[0], f"pair({name}({self.value(o[1], 'f32')}), {name}({self.value(o[2], 'f32')}))", "b16")
        if to in ("bf16x2", "f16x2") and source == "f32":
            _only(words, {"rn"})
            return self._halves(o, to, lambda i: self.value(o[2 - i], "f32"))
        if to == "f16x2" and source in ("e4m3x2", "e5m2x2"):
            _only(words, {"rn"})
            value = self.value(o[1], "u16")
            return self._halves(o, to, lambda i: f"from_{source[:-2]}((u8)({value} >> {8 * i}))")
        if to in ("bf16", "f16") and source == "f32":
            _only(words, {"rn"})
            return self.put(o[0], f"to_{to}({self.value(o[1], 'f32')})", "b16")
        if to == "f32" and source in ("bf16", "f16"):
            _only(words, set())
            return self.put(o[0], f"from_{source}({self.value(o[1], 'u16')})", "f32")
        if to == "f32" and integer.match(source):
            _only(words, {"rn"})
            return self.put(o[0], f"(float){self.value(o[1], source)}", "f32")
        if to == "f32" and source == "f32" and words == {"rni"}:
            return self.put(o[0], f"rintf({self.value(o[1], 'f32')})", "f32")
        if to in ("s32", "u32") and source == "f32":
            name = {"rzi": "truncf", "rni": "rintf", "rmi": "floorf", "rpi": "ceilf"}[(words - {"ftz"}).pop()]
            low, high = ("-2147483648.0", "2147483647.0") if to == "s32" else ("0.0", "4294967295.0")
            value = f"(double){name}({self.value(o[1], 'f32')})"
            return self.put(o[0], f"({_cpp(to)})(!({value} == {value}) ? 0 : {value} < {low} ? {low} : {value} > {high} ? {high} : {value})", to)
        raise NotTranslated("conversion")

    # ---- control ----

    def do_bra(self, p, o):
        return f"goto {self.label(o[0])};"

    def do_ret(self, p, o):
        return "return;"

    do_exit = do_ret

    def do_trap(self, p, o):
        return 'fail(t, "trap");'

    def _nothing(self, p, o):
        return ";"

    do_fence = do_membar = do_prefetch = do_prefetchu = do_setmaxnreg = do_griddepcontrol = do_discard = do_applypriority = _nothing

    def do_nanosleep(self, p, o):
        return f"sleep_for(t, {self.value(o[0], 'u32')});"

    # ---- memory ----

    def _access(self, p, kinds):
        """(space, words before the type) of a load, store or atomic."""
        space = ""
        for word in p[1:-1]:
            name = word.split("::")[0]
            if name in ("global", "shared"):
                space = name
            elif word not in _ORDER | _SCOPE | kinds and not _CACHE.match(word) and word not in ("v2", "v4", "v8"):
                raise NotTranslated(word)
        return space

    def do_ld(self, p, o):
        kind = p[-1]
        parts = vector(o[0])
        if "param" in p:
            name, offset = address(o[1])
            at = f"(t->params + {self.params[name] + offset})"
        else:
            space = self._access(p, set())
            at = f"{_SPACES[space]}(t, {self.where(o[1], space)}, {WIDTH[kind] // 8 * len(parts)}, false)"
        plain = "b" + kind[1:] if kind[0] == "f" else kind
        lines = [f"const {_cpp(plain)}* from = (const {_cpp(plain)}*){at};"]
        if len(parts) > 1:  # an address register may be among the targets
            lines.append(" ".join(f"{_cpp(plain)} v{i} = from[{i}];" for i in range(len(parts))))
            lines += [self.put(part, f"v{i}", plain) for i, part in enumerate(parts)]
        elif {"relaxed", "acquire", "volatile"} & set(p):
            lines = [f"u64 at = {self.where(o[1], space)};", *lines, f"{_cpp(plain)} v = *from;", self.put(o[0], "v", plain)]
            lines.append("polled(t, at, (u64)v);")
        else:
            lines.append(self.put(o[0], "*from", plain))
        return "{ " + " ".join(lines) + " }"

    def do_st(self, p, o):
        kind = "b" + p[-1][1:] if p[-1][0] == "f" else p[-1]
        space, parts = self._access(p, set()), vector(o[1])
        at = f"{_SPACES[space]}(t, {self.where(o[0], space)}, {WIDTH[kind] // 8 * len(parts)}, true)"
        lines = [f"{_cpp(kind)}* to = ({_cpp(kind)}*){at};"]
        lines += [f"to[{i}] = {self.value(part, kind)};" for i, part in enumerate(parts)]
        if {"relaxed", "release", "volatile"} & set(p):
            lines.append("stored(t);")
        return "{ " + " ".join(lines) + " }"

    def _atomic(self, p, to, where, values):
        kind, operation = p[-1], p[-2]
        space = self._access([*p[:-2], p[-1]], {"noftz"})
        plain = "b" + kind[1:] if kind[0] == "f" else kind
        new = {
            "add": lambda v: f"bits(f(old) + {v})" if kind == "f32" else f"old + {v}",
            "or": lambda v: f"old | {v}",
            "and": lambda v: f"old & {v}",
            "xor": lambda v: f"old ^ {v}",
            "exch": lambda v: v,
            "min": lambda v: f"smaller(old, {v})",
            "max": lambda v: f"larger(old, {v})",
            "inc": lambda v: f"(old >= {v} ? 0 : old + 1)",
            "dec": lambda v: f"(old == 0 || old > {v} ? {v} : old - 1)",
        }
        lines = [f"{_cpp(plain)}* at = ({_cpp(plain)}*){_SPACES[space]}(t, {self.where(where, space)}, {WIDTH[kind] // 8}, true);"]
        lines.append(f"{_cpp(plain)} old = *at;")
        if operation == "cas":
            lines.append(f"if (old == {self.value(values[0], plain)}) *at = {self.value(values[1], plain)};")
        elif operation in new and kind != "f64":
            lines.append(f"*at = {new[operation](self.value(values[0], kind if operation == 'add' else plain))};")
        else:
            raise NotTranslated(operation)
        if to:
            lines.append(self.put(to, "old", plain))
        lines.append("stored(t);")
        return "{ " + " ".join(lines) + " }"

    def do_atom(self, p, o):
        return self._atomic(p, o[0], o[1], o[2:])

    def do_red(self, p, o):
        return self._atomic(p, "", o[0], o[1:])

    # ---- warps ----

    def do_shfl(self, p, o):
        first, _, inside = o[0].partition("|")
        values = ", ".join(self.value(x, "u32") for x in o[1:5])
        target = f"&{self.variables[inside]}" if inside else "nullptr"
        return self.put(first, f"shfl(t, SHFL_{p[2].upper()}, {values}, {target})", "u32")

    def do_vote(self, p, o):
        mask = self.value(o[2], "u32")
        got = f"ballot(t, {self.value(o[1], 'pred')}, {mask})"
        if p[2] == "ballot":
            return self.put(o[0], got, "u32")
        test = {"any": "got != 0", "all": f"got == {mask}", "uni": f"got == 0 || got == {mask}"}[p[2]]
        return f"{{ u32 got = {got}; {self.put(o[0], test, 'pred')} }}"

    def do_redux(self, p, o):
        unsigned = "U" if p[-1] == "u32" and p[2] in ("min", "max") else ""
        return self.put(o[0], f"redux(t, REDUX_{unsigned}{p[2].upper()}, {self.value(o[1], 'u32')}, {self.value(o[2], 'u32')})", "u32")

    def do_match(self, p, o):
        _only(p[1:], {"any", "sync", "b32", "b64"})
        return self.put(o[0], f"match_any(t, {self.value(o[1], p[-1])}, {self.value(o[2], 'u32')})", "u32")

    def do_elect(self, p, o):
        leader, predicate = o[0].split("|")
        put = "" if leader == "_" else self.put(leader, "leader", "u32")
        return f"{{ u32 leader; {self.variables[predicate]} = elect(t, {self.value(o[1], 'u32')}, &leader); {put} }}"

    def do_ldmatrix(self, p, o):
        _only(p[1:], {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"})
        parts = vector(o[0])
        lines = [f"u32 m[4]; ldmatrix(t, {self.where(o[1], 'shared')}, {len(parts)}, {'true' if 'trans' in p else 'false'}, m);"]
        return "{ " + " ".join(lines + [self.put(part, f"m[{i}]", "b32") for i, part in enumerate(parts)]) + " }"

    def do_stmatrix(self, p, o):
        _only(p[1:], {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"})
        parts = vector(o[1])
        words = ", ".join(self.value(part, "u32") for part in parts)
        return f"{{ u32 m[] = {{{words}}}; stmatrix(t, {self.where(o[0], 'shared')}, {len(parts)}, {'true' if 'trans' in p else 'false'}, m); }}"

    # ---- barriers ----

    def do_bar(self, p, o):
        if p[1:] == ["warp", "sync"]:
            return f"warp_sync(t, {self.value(o[0], 'u32')});"
        name = {"sync": "bar_sync", "arrive": "bar_arrive"}[p[-1] if p[1] != "cta" else p[2]]
        return f"{name}(t, {self.value(o[0], 'u32')}, {self.value(o[1], 'u32') if len(o) > 1 else 0});"

    def do_barrier(self, p, o):
        if p[1] == "cluster":
            return f"cluster_{p[2]}(t);"
        words = [w for w in p[1:] if w not in ("aligned", "cta")]
        return self.do_bar(["bar", *words], o)

    def do_mbarrier(self, p, o):
        what = p[1]
        if what == "init":
            return f"mbarrier_init(t, {self.where(o[0], 'shared')}, {self.value(o[1], 'u32')});"
        if what == "inval":
            return f"mbarrier_inval(t, {self.where(o[0], 'shared')});"
        if what == "expect_tx":
            return f"mbarrier_expect(t, {self.where(o[0], 'shared')}, {self.value(o[1], 'u32')});"
        if what == "complete_tx":
            return f"mbarrier_complete(t, {self.where(o[0], 'shared')}, {self.value(o[1], 'u32')});"
        if what in ("arrive", "arrive_drop"):
            to, rest = ("", o) if o[0].startswith("[") else (o[0], o[1:])
            expects = "expect_tx" in p
            count = self.value(rest[1], "u32") if len(rest) > 1 and not expects else "1"
            expected = self.value(rest[1], "u32") if expects else "0"
            call = f"mbarrier_arrive(t, {self.where(rest[0], 'shared')}, {count}, {expected}, {'true' if what == 'arrive_drop' else 'false'})"
            return self.put(to, call, "b64") if to else f"{call};"
        if what in ("try_wait", "test_wait"):
            parity = self.value(o[2], "u32") if "parity" in p else f"(u32)({self.bits(o[2])})"
            call = f"mbarrier_wait(t, {self.where(o[1], 'shared')}, {parity}, {'true' if what == 'try_wait' else 'false'})"
            return f"{self.variables[o[0]]} = {call};"
        raise NotTranslated(what)

    # ---- asynchronous copies ----

    def do_cp(self, p, o):
        if p[1] != "async" or "reduce" in p:
            raise NotTranslated("copy")
        if p[2] == "bulk":
            return self._bulk(p, o)
        if p[2] == "commit_group":
            return "cp_async_commit(t);"
        if p[2] == "wait_group":
            return f"cp_async_wait(t, {int(o[0])});"
        if p[2] == "wait_all":
            return "cp_async_wait(t, -1);"
        if p[2:4] == ["mbarrier", "arrive"]:
            return f"cp_async_arrive(t, {self.where(o[0], 'shared')}, {'true' if 'noinc' in p else 'false'});"
        _only([w for w in p[2:] if not _CACHE.match(w)], {"shared", "shared::cta", "global"})
        size = self.value(o[2], "u32")
        read = self.value(o[3], "u32") if len(o) > 3 else size
        if len(o) > 3 and o[3] in self.variables and self.widths[self.variables[o[3]]] == 8:
            read = f"({self.variables[o[3]]} ? 0 : {size})"
        return f"cp_async(t, {self.where(o[0], 'shared')}, {self.where(o[1])}, {size}, {read});"

    def _bulk(self, p, o):
        words = [w for w in p[3:] if w not in ("L2::cache_hint", "tile")]
        if words == ["commit_group"]:
            return "bulk_commit(t);"
        if words[0] == "wait_group":
            return f"bulk_wait(t, {self.value(o[0], 'u32')}, {'true' if 'read' in words else 'false'});"
        if words[0] == "prefetch":
            return ";"
        if words[0] == "tensor":
            return self._tensor(words, o)
        multicast = self.value(o[4], "u32") if "multicast::cluster" in words else "0"
        if words[:2] in (["shared::cluster", "global"], ["shared::cta", "global"]):
            return f"bulk_load(t, {self.where(o[0], 'shared')}, {self.where(o[1])}, {self.value(o[2], 'u32')}, {self.where(o[3], 'shared')}, {multicast});"
        if words[:2] == ["global", "shared::cta"]:
            _only(words[2:], {"bulk_group"})
            return f"bulk_store(t, {self.where(o[0])}, {self.where(o[1], 'shared')}, {self.value(o[2], 'u32')});"
        if words[:2] == ["shared::cluster", "shared::cta"]:
            places = [self.where(o[i], "shared") for i in (0, 1, 3)]
            return f"bulk_to_cluster(t, {places[0]}, {places[1]}, {self.value(o[2], 'u32')}, {places[2]});"
        raise NotTranslated("bulk copy")

    def _tensor(self, words, o):
        rank = int(words[1][0])
        load = words[2].startswith("shared")
        tensor = o[1] if load else o[0]
        map_at, corner = (part.strip() for part in tensor.strip()[1:-1].split(",", 1))
        corner = ", ".join(self.value(c, "s32") for c in vector(corner))
        at = f"(u64)({self.bits(map_at)})"
        if load:
            _only(words[4:], {"mbarrier::complete_tx::bytes", "mbarrier", "complete_tx::bytes", "multicast::cluster"})
            multicast = self.value(o[3], "u32") if "multicast::cluster" in words else "0"
            return f"{{ const s32 corner[] = {{{corner}}}; tensor_load(t, {rank}, {self.where(o[0], 'shared')}, {at}, corner, {self.where(o[2], 'shared')}, {multicast}); }}"
        _only(words[2:], {"global", "shared::cta", "bulk_group"})
        return f"{{ const s32 corner[] = {{{corner}}}; tensor_store(t, {rank}, {at}, corner, {self.where(o[1], 'shared')}); }}"

    # ---- products ----

    def do_wgmma(self, p, o):
        if p[1] == "fence":
            return "wgmma_fence(t);"
        if p[1] == "commit_group":
            return "wgmma_commit(t);"
        if p[1] == "wait_group":
            return f"wgmma_wait(t, {int(o[0])});"
        shape = re.fullmatch(r"m64n(\d+)k(16|32)", p[4])
        _, d_type, a_type, b_type = p[4:8]
        if p[1] != "mma_async" or not shape or d_type != "f32" or len(p) > 8:
            raise NotTranslated("product")
        places = vector(o[0])
        n = int(shape[1])
        if len(places) != n // 2:
            raise NotTranslated(f"{len(places)} accumulators")
        signs = [int(x) for x in o[4:6]]
        if any(int(x) for x in o[6:]):
            raise NotTranslated("an operand that is not K-major")
        registers = f"const u32 a[] = {{{', '.join(self.value(x, 'u32') for x in vector(o[1]))}}};" if o[1].startswith("{") else ""
        a = "0" if registers else self.value(o[1], "u64")
        keep = self.value(o[3], "pred") if o[3] in self.variables else str(bool(int(o[3]))).lower()
        what = f"{{{n}, {_TYPES[a_type]}, {_TYPES[b_type]}, {a}, {self.value(o[2], 'u64')}, {'a' if registers else 'nullptr'}, {keep}, {signs[0]}, {signs[1]}}}"
        return f"{{ {registers} u32* const d[] = {{{', '.join('&' + self.variables[x] for x in places)}}}; wgmma(t, Products{what}, d); }}"


def _cpp(kind: str) -> str:
    return {"b": "u"}.get(kind[0], kind[0]) + kind[1:]


def _only(words, allowed):
    unknown = [w for w in words if w not in allowed]
    if unknown:
        raise NotTranslated(", ".join(unknown))
