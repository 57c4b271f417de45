"""The instruction table: which forms sm_90a lacks, what takes their place, and which test holds each against a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from megamoe.emulation import replacements as by
from megamoe.emulation.emit import Names
from megamoe.emulation.ptx import Instruction
from megamoe.emulation.replacements import COPY_SHAPES, LOAD_SHAPES, Replacement


@dataclass(frozen=True)
class Form:
    """One instruction form.

    Attributes:
        name: for people.
        pattern: of the whole opcode.
        replace: gives the replacement; ``None`` keeps the instruction as it is.
        test: file below ``tests/emulation`` that compares it with a model written from the PTX specification.
        operands: number of operands, when the opcode alone does not tell; 0 otherwise.
    """

    name: str
    pattern: re.Pattern[str]
    replace: Callable[[Instruction, re.Match[str], Names], Replacement | None]
    test: str
    operands: int = 0

    def match(self, instruction: Instruction) -> re.Match[str] | None:
        """Whether an instruction has this form."""
        if self.operands and len(instruction.operands) != self.operands:
            return None
        return self.pattern.fullmatch(instruction.opcode)


def _form(
    name: str, pattern: str, replace: Callable[[Instruction, re.Match[str], Names], Replacement | None], test: str, operands: int = 0
) -> Form:
    return Form(name, re.compile(pattern), replace, test, operands)


FORMS: tuple[Form, ...] = (
    _form("tcgen05.alloc", r"tcgen05\.alloc\..*", by.alloc, "test_tmem.py"),
    _form("tcgen05.dealloc", r"tcgen05\.dealloc\..*", by.dealloc, "test_tmem.py"),
    _form("tcgen05.relinquish_alloc_permit", r"tcgen05\.relinquish_alloc_permit\..*", by.relinquish, "test_tmem.py"),
    _form(
        "tcgen05.ld, st",
        rf"tcgen05\.(ld|st)\.sync\.aligned\.(?P<shape>{'|'.join(LOAD_SHAPES)})\.x\d+(\.(un)?pack::16b)?\.b32",
        by.tmem_ld_st,
        "test_tmem.py",
    ),
    _form("tcgen05.wait", r"tcgen05\.wait::(ld|st)\.sync\.aligned", by.nothing, "test_delayed.py"),
    _form("tcgen05.fence", r"tcgen05\.fence::\w+", by.nothing, "test_mma.py"),
    _form("tcgen05.mma", r"tcgen05\.mma\..*kind::(?P<kind>\w+).*", by.mma, "test_mma.py"),
    _form("tcgen05.cp", rf"tcgen05\.cp\.cta_group::[12]\.(?P<shape>{'|'.join(map(re.escape, COPY_SHAPES))})", by.cp, "test_tmem.py"),
    _form(
        "tcgen05.commit",
        r"tcgen05\.commit\.cta_group::[12]\.mbarrier::arrive::one(\.shared::cluster)?(?P<multicast>\.multicast::cluster)?\.b64",
        by.commit,
        "test_mma.py",
    ),
    _form(
        "mma.sync block_scale",
        r"mma\.sync\.aligned(\.m16n8k\d+\.row\.col)?\.kind::(?P<kind>mxf8f6f4|mxf4nvf4|mxf4)\.block_scale(\.scale_vec::(?P<vectors>[124])X)(\.m16n8k\d+\.row\.col)?"
        r"\.f32\.(?P<a>\w+)\.(?P<b>\w+)\.f32\.(?P<scale>ue8m0|ue4m3)",
        by.mma_sync,
        "test_mma_sync.py",
    ),
    _form("stmatrix b8", r"stmatrix\.sync\.aligned\.m16n8\.x[124]\.trans\.shared(::cta)?\.b8", by.stmatrix, "test_warp.py"),
    _form(
        "ldmatrix b4x16_p64",
        r"ldmatrix\.sync\.aligned\.m8n16\.x[124]\.shared(::cta)?\.b8x16\.b4x16_p64",
        by.ldmatrix,
        "test_warp.py",
    ),
    _form("redux f32", r"redux\.sync\.(?P<op>min|max)(?P<abs>\.abs)?(?P<nan>\.NaN)?\.f32", by.redux, "test_warp.py"),
    _form(
        "cvt f32 to fp4, fp6",
        r"cvt\.rn\.satfinite(?P<relu>\.relu)?\.(?P<format>e2m1|e2m3|e3m2)x2\.f32",
        by.to_narrow,
        "test_numbers.py",
    ),
    _form("cvt fp4, fp6 to f16", r"cvt\.rn(?P<relu>\.relu)?\.f16x2\.(?P<format>e2m1|e2m3|e3m2)x2", by.from_narrow, "test_numbers.py"),
    _form(
        "cvt to ue8m0",
        r"cvt\.(?P<round>rp|rz)(?P<satfinite>\.satfinite)?\.ue8m0x2\.(?P<source>f32|bf16x2)",
        by.to_ue8m0,
        "test_numbers.py",
    ),
    _form("cvt ue8m0 to bf16", r"cvt\.rn\.bf16x2\.ue8m0x2", by.from_ue8m0, "test_numbers.py"),
    _form("f32x2", r"(?P<op>add|sub|mul|fma)(?P<modifiers>(\.(rn|rz|rm|rp|ftz|sat))*)\.f32x2", by.float_pairs, "test_warp.py"),
    _form(
        "256-bit ld, st",
        r"(?P<op>ld|st)\.(?P<modifiers>\S*global\S*?)\.v(?P<count>[48])\.(?P<type>[bfus](32|64))",
        lambda i, m, n: by.wide_access(i, m, n) if int(m["count"]) * int(m["type"][1:]) == 256 else None,
        "test_warp.py",
    ),
    _form("3-input min, max", r"(min|max)(\.\w+)*\.f32", by.three_way, "test_warp.py", 4),
    _form("tensor load", r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::\w+\.global\..*", by.tensor_load, "test_tensor.py"),
    _form(
        "tensor store",
        r"cp\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta(\.tile)?\.bulk_group(\.L2::cache_hint)?",
        by.tensor_store,
        "test_tensor.py",
    ),
    _form("prefetches", r"prefetch\.tensormap|cp\.async\.bulk\.prefetch\.tensor\..*", by.nothing, "test_tensor.py"),
    _form("clusterlaunchcontrol.try_cancel", r"clusterlaunchcontrol\.try_cancel\..*", by.try_cancel, "test_warp.py"),
    _form(
        "clusterlaunchcontrol.query_cancel",
        r"clusterlaunchcontrol\.query_cancel\.(?P<what>is_canceled|get_first_ctaid)\S*",
        by.query_cancel,
        "test_warp.py",
    ),
    _form("mbarrier waits", r"mbarrier\.(try_wait|test_wait)\..*", by.wait, "test_delayed.py"),
    _form("griddepcontrol.launch_dependents", r"griddepcontrol\.launch_dependents", by.nothing, "test_rewrite.py"),
    _form("setmaxnreg", r"setmaxnreg\..*", by.nothing, "test_rewrite.py"),
)
"""Every form that is replaced, most specific first."""

_BLACKWELL = re.compile(
    r"tcgen05\..*|.*\.kind::.*|clusterlaunchcontrol\..*|.*(e2m1|e2m3|e3m2|ue8m0|f32x2|cta_group::2|b4x16|b6x16|::gather4|::scatter4|im2col::w).*"
)

_LAST_WHOLE_TYPE = 12
"""Hopper knows element types of tensormap.replace up to this one."""


def find(instruction: Instruction) -> tuple[Form, re.Match[str]] | None:
    """The form of an instruction; ``None`` when it is an instruction of sm_90a.

    Raises:
        UnsupportedInstruction: it is one of Blackwell's that has no replacement.
    """
    for form in FORMS:
        match = form.match(instruction)
        if match:
            return form, match
    if instruction.opcode.startswith("tensormap.replace.tile.elemtype.") and int(instruction.operands[1], 0) > _LAST_WHOLE_TYPE:
        raise by.unsupported(instruction, "a tensor map cannot be given a 4- or 6-bit element type on the device")
    if _BLACKWELL.fullmatch(instruction.opcode):
        raise by.unsupported(instruction, "no entry in the instruction table")
    return None
