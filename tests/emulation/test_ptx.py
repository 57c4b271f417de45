"""PTX in, the same PTX out; instructions taken apart as they are written."""

from __future__ import annotations

import re

import pytest

from megamoe.emulation.ptx import Instruction, Kind, address, parse, split_operands, vector
from megamoe.errors import EmulationError

from . import kernels

AWKWARD = """//
// Generated
.version 8.7
.target sm_100a, debug
.address_size 64

	// .globl	f
.extern .func (.param .b32 r) helper (.param .b64 a, .param .b32 b);
.global .align 4 .b8 table[8] = {1, 2, 0xff, 4, 5, 6, 7, 8};
.visible .entry f(
	.param .align 64 .b8 f_param_0[128],
	.param .u64 f_param_1
)
.reqntid 128, 1, 1
.minnctapersm 1
{
	.reg .pred 	%p<3>; .reg .b32 %r<4>;
	.shared .align 16 .b8 buffer[16];
	.loc	1 12 0
	.pragma "nounroll";
$L__BB0_1:  // a loop; with a semicolon
	// begin inline asm
	{
	.reg .pred       P1;{blank}
	LAB_WAIT:{blank}
	mbarrier.try_wait.parity.shared.b64 P1, [%r1+8], 1, 10000000; @P1 bra.uni DONE; bra.uni LAB_WAIT; /* not; here */
	DONE:{blank}
	}
	@!%p1 st.global.v2.b32 [%rd1+-16], {%r1, %r2};
	{ // callseq 0, 0
	.param .b64 param0; call.uni (retval0), helper, (param0, param1);
	}
	ret;
}
.func g() { ret; }
""".replace("{blank}", " ")


@pytest.mark.parametrize("name", ["awkward", *kernels.ALL])
def test_what_goes_in_comes_out(name):
    text = AWKWARD if name == "awkward" else kernels.ALL[name]
    assert str(parse(text)) == text


def test_functions_labels_and_lines():
    module = parse(AWKWARD)
    functions = {function.name: function for function in module.functions()}
    assert {name: f.kernel for name, f in functions.items()} == {"f": True, "g": False}
    assert module.directive("target") == "sm_100a, debug"
    inside = module.statements[functions["f"].start : functions["f"].end]
    assert [s.label for s in inside if s.kind is Kind.LABEL] == ["$L__BB0_1", "LAB_WAIT", "DONE"]
    lines = AWKWARD.splitlines()
    for statement in module.statements:
        assert lines[statement.line - 1].find(statement.text.splitlines()[0].strip()) >= 0


def test_every_instruction_is_taken_apart_without_loss():
    for text in kernels.ALL.values():
        for statement in parse(text).statements:
            if statement.kind is Kind.INSTRUCTION:
                assert re.sub(r"\s", "", str(statement.instruction)) == re.sub(r"\s", "", statement.text)


def test_parts_of_an_instruction():
    i = Instruction.parse("@!%p1 cp.async.bulk.tensor.2d.shared::cta.global [%r15+128], [%rd18, {%r408, %r7}], [%r13], %rd19;", 7)
    assert i.guard == "@!%p1"
    assert i.operands == ("[%r15+128]", "[%rd18, {%r408, %r7}]", "[%r13]", "%rd19")
    assert i.parts[3:] == ("tensor", "2d", "shared::cta", "global")
    assert vector("{%r1, _, 5}") == ("%r1", "_", "5")
    assert vector("%r1") == ("%r1",)
    assert split_operands("{a, {b, c}}, (d, e), f") == ("{a, {b, c}}", "(d, e)", "f")
    assert [address(a) for a in ("[%r1]", "[%r1+16]", "[%rd2+-8]", "[name-4]", "%r3")] == [
        ("%r1", 0),
        ("%r1", 16),
        ("%rd2", -8),
        ("name", -4),
        ("%r3", 0),
    ]


@pytest.mark.parametrize("text", [".version 8.7\n.entry f() { mov.b32 %r1, 0", ".reg .b32 %r1", "5 + 5;"])
def test_what_is_not_ptx(text):
    with pytest.raises(EmulationError):
        taken_apart(text)


def taken_apart(text):
    module = parse(text)
    return list(module.functions()), [s.instruction for s in module.statements if s.kind is Kind.INSTRUCTION]
