"""One PTX instruction as C++ statements.

Each method takes an instruction's words and its operands and returns the statements. What has no method, or has a word that its method does
not know, raises :class:`NotTranslated` by name.
"""

from __future__ import annotations

import re

from megamoe.emulation.ptx import Instruction, address, vector

from .arithmetic import Arithmetic
from .operands import WIDTH, NotTranslated, cpp, only

_SPACES = {"global": "global_at", "shared": "shared_at", "": "generic_at"}
_ORDER = {"weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"}
_SCOPE = {name: f"SCOPE_{name.upper()}" for name in ("cta", "cluster", "gpu", "sys")}
_CACHE = re.compile(r"(?:ca|cg|cs|lu|cv|wb|wt|nc|L1::.*|L2::.*)$")
_TYPES = {"bf16": "BF16", "f16": "F16", "e4m3": "E4M3", "e5m2": "E5M2"}


class Instructions(Arithmetic):
    """Everything else: control, memory, warps, barriers, asynchronous copies, products."""

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
        if "(t" in code or i.parts[0] == "call":
            code = f"t->line = {i.line}; {code}"
        if i.guard:
            predicate = self.variables[i.guard.lstrip("@!")]
            code = f"if ({'!' if '!' in i.guard else ''}{predicate}) {{ {code} }}"
        return code

    # ---- control ----

    def do_bra(self, p, o):
        return f"goto {self.label(o[0])};"

    def do_ret(self, p, o):
        return "return;"

    do_exit = do_ret

    def do_call(self, p, o):
        to, name, listed = ("", o[0], o[1:]) if not o[0].startswith("(") else (o[0].strip("()"), o[1], o[2:])
        if name not in self.functions.signatures:
            raise NotTranslated(f"function {name}")
        result, kinds = self.functions.signatures[name]
        given = [x.strip() for x in listed[0].strip("()").split(",") if x.strip()] if listed else []
        call = f"{name}({', '.join(self.value(x, 'f32' if kind == 'float' else kind) for x, kind in zip(given, kinds, strict=True))})"
        if not to:
            return f"{call};"
        if result == "float" or result in WIDTH:
            return self.put(to, call, "f32" if result == "float" else result)
        return f"{{ {result} result = {call}; memcpy({self.variables[to]}, &result, sizeof result); }}"

    def do_trap(self, p, o):
        return 'fail(t, "trap");'

    def _nothing(self, p, o):
        return ";"

    def do_fence(self, p, o):
        if p[1:3] != ["proxy", "async"]:
            return f"memory_fence(t, {_SCOPE[p[2]]} | ACQUIRE | RELEASE);" if p[1] in ("acq_rel", "sc") else ";"
        spaces = [word.split("::")[0] for word in p[3:]] or ["shared", "global"]
        return f"proxy_fence(t, {str('shared' in spaces).lower()}, {str('global' in spaces).lower()});"

    def do_membar(self, p, o):
        return f"memory_fence(t, {_SCOPE[{'gl': 'gpu'}.get(p[1], p[1])]} | ACQUIRE | RELEASE);"

    do_prefetch = do_prefetchu = do_setmaxnreg = do_griddepcontrol = do_discard = do_applypriority = _nothing

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
            elif word not in _ORDER | kinds and word not in _SCOPE and not _CACHE.match(word) and word not in ("v2", "v4", "v8"):
                raise NotTranslated(word)
        return space

    def _how(self, p, atomic=False):
        """Scope of a strong access and what it orders, as C++; 0 for a weak one."""
        words = set(p)
        if not atomic and not words & (_ORDER - {"weak"}):
            return "0"
        how = [code for word, code in _SCOPE.items() if word in words] or ["SCOPE_GPU" if atomic else "SCOPE_SYS"]  # sys: volatile
        if words & {"acquire", "acq_rel"}:
            how.append("ACQUIRE")
        if words & {"release", "acq_rel"}:
            how.append("RELEASE")
        return " | ".join(how + ["ATOMIC"] * atomic)

    def do_ld(self, p, o):
        kind = p[-1]
        parts = vector(o[0])
        if "param" in p:
            at = self._parameter(o[1])
        elif "local" in p:
            at = f"(char*){self.where(o[1])}"
        else:
            space = self._access(p, set())
            at = f"{_SPACES[space]}(t, {self.where(o[1], space)}, {WIDTH[kind] // 8 * len(parts)}, false, {self._how(p)})"
        plain = "b" + kind[1:] if kind[0] == "f" else kind
        lines = [f"const {cpp(plain)}* from = (const {cpp(plain)}*){at};"]
        if len(parts) > 1:  # an address register may be among the targets
            lines.append(" ".join(f"{cpp(plain)} v{i} = from[{i}];" for i in range(len(parts))))
            lines += [self.put(part, f"v{i}", plain) for i, part in enumerate(parts)]
        elif {"relaxed", "acquire", "volatile"} & set(p):
            lines = [f"u64 at = {self.where(o[1], space)};", *lines, f"{cpp(plain)} v = *from;", self.put(o[0], "v", plain)]
            lines.append("polled(t, at, (u64)v);")
        else:
            lines.append(self.put(o[0], "*from", plain))
        return "{ " + " ".join(lines) + " }"

    def _parameter(self, operand):
        """Where a parameter lies: the kernel's own, one of a call, or one whose address is in a register."""
        name, offset = address(operand)
        if name in self.params:
            return f"(t->params + {self.params[name] + offset})"
        variable = self.variables[name]
        return f"((char*)&{variable} + {offset})" if variable in self.passed else f"(char*){self.where(operand)}"

    def do_st(self, p, o):
        kind = "b" + p[-1][1:] if p[-1][0] == "f" else p[-1]
        if "param" in p:
            return self.put(address(o[0])[0], self.value(o[1], kind), kind)
        parts = vector(o[1])
        if "local" in p:
            at = f"(char*){self.where(o[0])}"
        else:
            space = self._access(p, set())
            at = f"{_SPACES[space]}(t, {self.where(o[0], space)}, {WIDTH[kind] // 8 * len(parts)}, true, {self._how(p)})"
        lines = [f"{cpp(kind)}* to = ({cpp(kind)}*){at};"]
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
        how = self._how(p, atomic=True)
        lines = [f"{cpp(plain)}* at = ({cpp(plain)}*){_SPACES[space]}(t, {self.where(where, space)}, {WIDTH[kind] // 8}, true, {how});"]
        lines.append(f"{cpp(plain)} old = *at;")
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
        if p[-1] in ("bf16x2", "f16x2"):
            return self._add_halves(p, o)
        return self._atomic(p, "", o[0], o[1:])

    def _add_halves(self, p, o):
        """Sums of pairs, each rounded by itself."""
        only([w for w in p[1:-1] if w not in _ORDER | set(_SCOPE)], {"global", "add", "noftz", "v2", "v4"})
        parts, of = vector(o[1]), p[-1].removesuffix("x2")
        lines = [f"u32* at = (u32*)global_at(t, {self.where(o[0])}, {4 * len(parts)}, true, {self._how(p, atomic=True)});"]
        for i, part in enumerate(parts):
            sums = (
                f"to_{of}(from_{of}((u16)(at[{i}] >> {shift})) + from_{of}((u16)({self.value(part, 'u32')} >> {shift})))"
                for shift in (16, 0)
            )
            lines.append(f"at[{i}] = pair({', '.join(sums)});")
        return "{ " + " ".join([*lines, "stored(t);"]) + " }"

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
        only(p[1:], {"any", "sync", "b32", "b64"})
        return self.put(o[0], f"match_any(t, {self.value(o[1], p[-1])}, {self.value(o[2], 'u32')})", "u32")

    def do_elect(self, p, o):
        leader, predicate = o[0].split("|")
        put = "" if leader == "_" else self.put(leader, "leader", "u32")
        return f"{{ u32 leader; {self.variables[predicate]} = elect(t, {self.value(o[1], 'u32')}, &leader); {put} }}"

    def do_ldmatrix(self, p, o):
        only(p[1:], {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"})
        parts = vector(o[0])
        lines = [f"u32 m[4]; ldmatrix(t, {self.where(o[1], 'shared')}, {len(parts)}, {'true' if 'trans' in p else 'false'}, m);"]
        return "{ " + " ".join(lines + [self.put(part, f"m[{i}]", "b32") for i, part in enumerate(parts)]) + " }"

    def do_stmatrix(self, p, o):
        only(p[1:], {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"})
        parts = vector(o[1])
        words = ", ".join(self.value(part, "u32") for part in parts)
        transposed = "true" if "trans" in p else "false"
        return f"{{ u32 m[] = {{{words}}}; stmatrix(t, {self.where(o[0], 'shared')}, {len(parts)}, {transposed}, m); }}"

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
            call = (
                f"mbarrier_arrive(t, {self.where(rest[0], 'shared')}, {count}, {expected}, {'true' if what == 'arrive_drop' else 'false'})"
            )
            return self.put(to, call, "b64") if to else f"{call};"
        if what in ("try_wait", "test_wait"):
            parity = self.value(o[2], "u32") if "parity" in p else f"(u32)({self.bits(o[2])})"
            blocks = what == "try_wait" and not self.functions.polls
            call = f"mbarrier_wait(t, {self.where(o[1], 'shared')}, {parity}, {'true' if blocks else 'false'})"
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
        only([w for w in p[2:] if not _CACHE.match(w)], {"shared", "shared::cta", "global"})
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
            size, barrier = self.value(o[2], "u32"), self.where(o[3], "shared")
            return f"bulk_load(t, {self.where(o[0], 'shared')}, {self.where(o[1])}, {size}, {barrier}, {multicast});"
        if words[:2] == ["global", "shared::cta"]:
            only(words[2:], {"bulk_group"})
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
            only(words[4:], {"mbarrier::complete_tx::bytes", "mbarrier", "complete_tx::bytes", "multicast::cluster"})
            multicast = self.value(o[3], "u32") if "multicast::cluster" in words else "0"
            call = f"tensor_load(t, {rank}, {self.where(o[0], 'shared')}, {at}, corner, {self.where(o[2], 'shared')}, {multicast});"
            return f"{{ const s32 corner[] = {{{corner}}}; {call} }}"
        only(words[2:], {"global", "shared::cta", "bulk_group"})
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
        place = "a" if registers else "nullptr"
        types, b = f"{_TYPES[a_type]}, {_TYPES[b_type]}", self.value(o[2], "u64")
        what = f"{{{n}, {types}, {a}, {b}, {place}, {keep}, {signs[0]}, {signs[1]}}}"
        return f"{{ {registers} u32* const d[] = {{{', '.join('&' + self.variables[x] for x in places)}}}; wgmma(t, Products{what}, d); }}"
