"""Instructions that only look at registers, as C++ statements."""

from __future__ import annotations

import re

from megamoe.emulation.ptx import address, vector

from .operands import WIDTH, NotTranslated, Operands, cpp, only


class Arithmetic(Operands):
    """Moves, integers, floating point. A method takes an instruction's words and its operands and returns its statements."""

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
        if {"shared", "shared::cta", "shared::cluster", "param", "global", "local"} & set(p):
            return self.put(o[0], self.value(o[1], p[-1]), p[-1])
        raise NotTranslated("space")

    def do_mapa(self, p, o):
        base, offset = address(o[1])
        return self.put(o[0], f"(((u64){self.bits(base)} + {offset}) & 0xffffff) | (u64){self.value(o[2], 'u32')} << 24", p[-1])

    def _two(self, p, o, symbol):
        kind = p[-1]
        only(p[1:-1], {"rn", "ftz", "sat", "u"})
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
        only(p[1:-1], {"rn", "ftz"})
        name = "fmaf" if kind == "f32" else "fma"
        ftz = "ftz" in p
        text = f"{name}({', '.join(self.number(x, kind, ftz) for x in o[1:4])})"
        return self.put(o[0], f"flushed({text})" if ftz else text, kind)

    def do_div(self, p, o):
        if p[-1] == "f32":
            only(p[1:-1], {"rn", "approx", "full", "ftz"})
            return self._two(["div", *(["ftz"] if "ftz" in p else []), "f32"], o, "/")
        return self.put(o[0], f"quotient({self.value(o[1], p[-1])}, {self.value(o[2], p[-1])})", p[-1])

    def do_rem(self, p, o):
        return self.put(o[0], f"remainder_of({self.value(o[1], p[-1])}, {self.value(o[2], p[-1])})", p[-1])

    def _extreme(self, p, o, which):
        kind = p[-1]
        if p[1:] == ["xorsign", "abs", "f32"]:
            a, b = (self.value(x, "u32") for x in o[1:])
            name = f"{which}_number(fabsf(f({a})), fabsf(f({b})))"
            return self.put(o[0], f"bits({name}) | (({a} ^ {b}) & 0x80000000u)", "b32")
        only(p[1:-1], {"NaN", "relu", "ftz"})
        if kind == "f32":
            name = f"{which}_{'nan' if 'NaN' in p else 'number'}"
            text = self.number(o[1], kind, "ftz" in p)
            for other in o[2:]:
                text = f"{name}({text}, {self.number(other, kind, 'ftz' in p)})"
            return self.put(o[0], text, kind)
        if kind in ("f16x2", "bf16x2", "f16", "bf16"):
            name = f"{which}_{'nan' if 'NaN' in p else 'number'}"
            return self._halves(o, kind, lambda i: f"{name}({self._half(o[1], kind, i)}, {self._half(o[2], kind, i)})")
        text = f"{'smaller' if which == 'min' else 'larger'}<{cpp(kind)}>({self.value(o[1], kind)}, {self.value(o[2], kind)})"
        if "relu" in p:
            text = f"larger<{cpp(kind)}>({text}, 0)"
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
        return self.put(o[0], f"left<{cpp(kind)}>({self.value(o[1], kind)}, {self.value(o[2], 'u32')})", kind)

    def do_shr(self, p, o):
        return self.put(o[0], f"right<{cpp(p[-1])}>({self.value(o[1], p[-1])}, {self.value(o[2], 'u32')})", p[-1])

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
        only(p[1:], {"b32"})
        return self.put(o[0], f"reversed({self.value(o[1], 'u32')})", "u32")

    def do_bfind(self, p, o):
        only(p[1:], {"u32", "u64"})
        value = self.value(o[1], p[-1])
        return self.put(o[0], f"({value} ? 63 - __builtin_clzll({value}) : -1)", "u32")

    def do_fns(self, p, o):
        only(p[1:], {"b32"})
        return self.put(o[0], f"find_nth_set({', '.join(self.value(x, 'u32') for x in o[1:])})", "u32")

    def do_bfe(self, p, o):
        return self.put(
            o[0], f"field<{cpp(p[-1])}>({self.value(o[1], p[-1])}, {self.value(o[2], 'u32')}, {self.value(o[3], 'u32')})", p[-1]
        )

    def do_bfi(self, p, o):
        only(p[1:], {"b32"})
        return self.put(o[0], f"insert_field({', '.join(self.value(x, 'u32') for x in o[1:5])})", "b32")

    def do_prmt(self, p, o):
        only(p[1:], {"b32"})
        return self.put(o[0], f"permute({', '.join(self.value(x, 'u32') for x in o[1:4])})", "b32")

    def do_lop3(self, p, o):
        only(p[1:], {"b32"})
        return self.put(o[0], f"lop3({', '.join(self.value(x, 'u32') for x in o[1:5])})", "b32")

    def do_shf(self, p, o):
        only(p[2:], {"wrap", "clamp", "b32"})
        by = self.value(o[3], "u32") + (" & 31" if "wrap" in p else "")
        name = {"l": "shf_left", "r": "shf_right"}[p[1]]
        return self.put(o[0], f"{name}({self.value(o[1], 'u32')}, {self.value(o[2], 'u32')}, {by})", "b32")

    def do_selp(self, p, o):
        kind = "b" + p[-1][1:] if p[-1] in ("f32", "f64") else p[-1]
        return self.put(o[0], f"{self.value(o[3], 'pred')} ? {self.value(o[1], kind)} : {self.value(o[2], kind)}", kind)

    def do_setp(self, p, o):
        kind, how = p[-1], p[1]
        only(p[2:-1], {"ftz", "and", "or", "xor"})
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
        only(p[1:], {"approx", "ftz", "f32"})
        return self.put(o[0], f"flushed(exp2f({self.number(o[1], 'f32', True)}))", "f32")

    def do_lg2(self, p, o):
        only(p[1:], {"approx", "ftz", "f32"})
        return self.put(o[0], f"log2f({self.number(o[1], 'f32', 'ftz' in p)})", "f32")

    def do_rcp(self, p, o):
        only(p[1:], {"approx", "rn", "ftz", "f32"})
        text = f"1.0f / {self.number(o[1], 'f32', 'ftz' in p)}"
        return self.put(o[0], f"flushed({text})" if "ftz" in p else text, "f32")

    def do_sqrt(self, p, o):
        only(p[1:], {"approx", "rn", "ftz", "f32"})
        return self.put(o[0], f"sqrtf({self.number(o[1], 'f32', 'ftz' in p)})", "f32")

    def do_rsqrt(self, p, o):
        only(p[1:], {"approx", "ftz", "f32"})
        return self.put(o[0], f"1.0f / sqrtf({self.number(o[1], 'f32', 'ftz' in p)})", "f32")

    def do_tanh(self, p, o):
        only(p[1:], {"approx", "f32"})
        return self.put(o[0], f"tanhf({self.value(o[1], 'f32')})", "f32")

    def do_cvt(self, p, o):
        to, source = p[-2], p[-1]
        words = set(p[1:-2])
        integer = re.compile(r"[su](8|16|32|64)$")
        if integer.match(to) and integer.match(source):
            only(words, set())
            return self.put(o[0], self.value(o[1], source), to)
        if to in ("e4m3x2", "e5m2x2") and source == "f32":
            only(words, {"rn", "satfinite"})
            name = "to_" + to[:-2]
            return self.put(o[0], f"pair({name}({self.value(o[1], 'f32')}), {name}({self.value(o[2], 'f32')}))", "b16")
        if to in ("bf16x2", "f16x2") and source == "f32":
            only(words, {"rn"})
            return self._halves(o, to, lambda i: self.value(o[2 - i], "f32"))
        if to == "f16x2" and source in ("e4m3x2", "e5m2x2"):
            only(words, {"rn"})
            value = self.value(o[1], "u16")
            return self._halves(o, to, lambda i: f"from_{source[:-2]}((u8)({value} >> {8 * i}))")
        if to in ("bf16", "f16") and source == "f32":
            only(words, {"rn"})
            return self.put(o[0], f"to_{to}({self.value(o[1], 'f32')})", "b16")
        if to == "f32" and source in ("bf16", "f16"):
            only(words, set())
            return self.put(o[0], f"from_{source}({self.value(o[1], 'u16')})", "f32")
        if to == "f32" and integer.match(source):
            only(words, {"rn"})
            return self.put(o[0], f"(float){self.value(o[1], source)}", "f32")
        if to == "f32" and source == "f32" and words == {"rni"}:
            return self.put(o[0], f"rintf({self.value(o[1], 'f32')})", "f32")
        if to in ("s32", "u32") and source == "f32":
            name = {"rzi": "truncf", "rni": "rintf", "rmi": "floorf", "rpi": "ceilf"}[(words - {"ftz"}).pop()]
            low, high = ("-2147483648.0", "2147483647.0") if to == "s32" else ("0.0", "4294967295.0")
            value = f"(double){name}({self.value(o[1], 'f32')})"
            return self.put(
                o[0], f"({cpp(to)})(!({value} == {value}) ? 0 : {value} < {low} ? {low} : {value} > {high} ? {high} : {value})", to
            )
        raise NotTranslated("conversion")
