"""What rewritten and linked modules have besides: calls, local memory, several kernels, waves of CTAs, and rarer instructions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.machine.launch import MachineFault, Program, compiler, kept, run
from tests.machine.operands import Functions, NotTranslated
from tests.machine.test_ptx import HEAD, launch, mapped, words

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")

SOURCE = """
#include "machine.h"
struct Two { u64 v[2]; };
extern "C" {
u32 test_mixed(u32 a, float b, u64 c) { return a + (u32)b + (u32)(c >> 32); }
Two test_two(u32 a) { return {{a + 1ull, (u64)running->tid << 32 | running->smid}}; }
}
"""
FUNCTIONS = Functions({"test_mixed": ("u32", ("u32", "float", "u64")), "test_two": ("Two", ("u32",))}, "struct Two { u64 v[2]; };")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    source = tmp_path_factory.mktemp("functions") / "functions.cpp"
    source.write_text(SOURCE)
    from tests.machine import launch as machine

    machine.runtime()
    content = [SOURCE.encode(), *(path.read_bytes() for path in sorted(machine.HOST.glob("*.h")))]
    return kept("test-functions", content, [source], "-std=c++17")


def called(body, count, *, grid=1, sms=0):
    """What threads write to their words of the output; %rd4 is 4 times the number among all threads."""
    program = Program(HEAD + body + "\nret;\n}\n", FUNCTIONS)
    given, output = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    params = np.array([given.data_ptr(), output.data_ptr()], np.uint64).tobytes()
    one = program.launch(params, (grid, 1, 1), 32, (1, 1, 1), 1024)
    run([type(one)(**{**vars(one), "sms": sms})], [given, output])
    return output.tolist()


def test_calls_pass_numbers_and_return_them(library):
    body = """
    cvt.rn.f32.u32 %r1, %r0;
    mul.wide.u32 %rd6, %r0, 7;
    shl.b64 %rd6, %rd6, 32;
    {
    .param .b32 p0; st.param.b32 [p0], %r0;
    .param .b32 p1; st.param.b32 [p1], %r1;
    .param .b64 p2; st.param.b64 [p2], %rd6;
    .param .b32 r; call (r), test_mixed, (p0, p1, p2); ld.param.b32 %r2, [r];
    }
    st.global.b32 [%rd5], %r2;
    """
    assert called(body, 32) == [9 * t for t in range(32)]


def test_calls_return_structures_and_know_who_calls(library):
    body = """
    {
    .param .b32 p0; st.param.b32 [p0], 41;
    .param .align 16 .b8 r[16];
    call (r), test_two, (p0);
    ld.param.v2.b32 {%r1, %r2}, [r];
    ld.param.b32 %r3, [r+12];
    }
    add.u32 %r4, %r1, %r3;
    st.global.b32 [%rd5], %r4;
    """
    assert called(body, 32) == [42 + t for t in range(32)]


def test_a_function_that_nobody_has_is_named():
    with pytest.raises(NotTranslated, match="function elsewhere"):
        Program(HEAD + "call elsewhere, ();\nret;\n}\n")


def test_more_ctas_than_sms_run_one_after_the_other(library):
    """Every CTA has an SM of its own as long as it runs."""
    body = """
    {
    .param .b32 p0; st.param.b32 [p0], 0;
    .param .align 16 .b8 r[16];
    call (r), test_two, (p0);
    ld.param.b32 %r1, [r+8];
    }
    mov.u32 %r2, %smid;
    sub.u32 %r1, %r1, %r2;
    setp.ge.u32 %p1, %r2, 3;
    @%p1 trap;
    mov.u32 %r3, %ctaid.x;
    mad.lo.u32 %r1, %r1, 100, %r3;
    mad.lo.u32 %r4, %r3, 32, %r0;
    mul.wide.u32 %rd6, %r4, 4;
    add.s64 %rd7, %rd2, %rd6;
    st.global.b32 [%rd7], %r1;
    """
    assert called(body, 320, grid=10, sms=3) == [cta for cta in range(10) for _ in range(32)]


def test_local_memory_and_parameters_whose_address_is_in_a_register():
    body = """
    .local .align 8 .b8 depot[16];
    mov.b64 %rd6, depot;
    ld.global.b32 %r1, [%rd4];
    st.local.v2.b32 [%rd6], {%r1, %r0};
    ld.local.b32 %r2, [%rd6+4];
    ld.local.b32 %r3, [%rd6];
    add.u32 %r3, %r3, %r2;
    mov.b64 %rd7, output;
    ld.param.b64 %rd8, [%rd7];
    sub.u64 %rd9, %rd8, %rd2;
    cvt.u32.u64 %r4, %rd9;
    add.u32 %r3, %r3, %r4;
    st.global.b32 [%rd5], %r3;
    """
    given = words(range(100, 132))
    assert launch(body, given, torch.zeros_like(given)).tolist() == [100 + 2 * t for t in range(32)]


def test_the_kernel_of_a_module_is_chosen_by_its_threads():
    def kernel(name, threads, value):
        text = HEAD[HEAD.index(".visible") :].replace("kernel", name).replace("{\n", f".reqntid {threads}, 1, 1\n{{\n", 1)
        return f"{text}mov.b32 %r1, {value};\nst.global.b32 [%rd5], %r1;\nret;\n}}\n"

    text = HEAD[: HEAD.index(".visible")] + kernel("first", 32, 5) + kernel("second", 64, 6)
    for threads, value in ((32, 5), (64, 6)):
        program, output = Program(text, threads=threads), torch.zeros(64, dtype=torch.int32)
        params = np.array([output.data_ptr(), output.data_ptr()], np.uint64).tobytes()
        run([program.launch(params, (1, 1, 1), threads, (1, 1, 1), 1024)], [output])
        assert output.tolist() == [value] * threads + [0] * (64 - threads)


def test_a_lane_votes_alone_while_the_others_wait_for_it():
    body = """
    setp.ne.u32 %p1, %r0, 3;
    @%p1 bra $together;
    shl.b32 %r3, 1, 3;
    setp.eq.u32 %p2, %r0, 3;
    vote.sync.ballot.b32 %r2, %p2, %r3;
$together:
    bar.warp.sync -1;
    shfl.sync.idx.b32 %r4, %r2, 3, 31, -1;
    st.global.b32 [%rd5], %r4;
    """
    given = words([0] * 32)
    for seed in range(8):
        assert launch(body, given, torch.zeros_like(given), seed=seed).tolist() == [8] * 32


def test_a_vote_of_two_lanes_beside_a_meeting_of_all_is_a_fault():
    body = """
    setp.gt.u32 %p1, %r0, 1;
    @%p1 bra $together;
    setp.eq.u32 %p2, %r0, 0;
    vote.sync.ballot.b32 %r2, %p2, 3;
$together:
    bar.warp.sync -1;
    """
    given, seen = words([0] * 32), set()
    for seed in range(8):
        try:
            launch(body, given, torch.zeros_like(given), seed=seed)
        except MachineFault as fault:
            seen.add("another mask" in str(fault))
    assert seen == {True}


@pytest.mark.parametrize("n", [1, 2, 5, -1, -3])
def test_fns(n):
    masks = np.random.default_rng(n + 9).integers(0, 2**32, 256, dtype=np.uint32)
    got = mapped(f"fns.b32 %r2, %r1, 13, {n};", masks)
    for mask, found in zip(masks.tolist(), got.tolist(), strict=True):
        at = [i for i in (range(13, 32) if n > 0 else range(13, -1, -1)) if mask >> i & 1]
        assert found == (at[abs(n) - 1] if len(at) >= abs(n) else 0xFFFFFFFF)
    assert mapped("fns.b32 %r2, %r1, 13, 0;", masks).tolist() == [13 if mask >> 13 & 1 else 0xFFFFFFFF for mask in masks.tolist()]


def test_max_xorsign():
    values = np.random.default_rng(1).standard_normal(256).astype(np.float32)
    got = mapped("max.xorsign.abs.f32 %r2, %r1, 0fBF000000;", values.view(np.uint32)).view(np.float32)
    assert np.array_equal(got, np.where(values < 0, 1, -1) * np.maximum(np.abs(values), np.float32(0.5)))


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_red_of_pairs_rounds_every_sum(kind, dtype):
    generator = torch.Generator().manual_seed(4)
    added, held = (torch.randn(64, generator=generator).to(dtype) for _ in range(2))
    body = f"""
    and.b32 %r1, %r0, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra $done;
    ld.global.v2.b32 {{%r2, %r3}}, [%rd4];
    red.relaxed.gpu.global.add.noftz.v2.{kind}x2 [%rd5], {{%r2, %r3}};
$done:
    """
    got = launch(body, added.view(torch.int32), held.view(torch.int32).clone())
    assert torch.equal(got.view(dtype), (added.float() + held.float()).to(dtype))


def test_sixteen_bytes_in_a_register():
    body = """
    .reg .b128 %rq<2>;
    and.b32 %r1, %r0, 3;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra $done;
    ld.global.b128 %rq1, [%rd4];
    st.global.b128 [%rd5], %rq1;
$done:
    """
    given = words(range(7, 39))
    assert torch.equal(launch(body, given, torch.zeros_like(given)), given)
