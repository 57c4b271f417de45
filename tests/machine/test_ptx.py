"""The machine by small kernels of its own: arithmetic, memory, barriers, copies and products against values obtained otherwise."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from tests.machine.launch import MachineFault, Program, compiler, run
from tests.machine.operands import NotTranslated

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")

HEAD = """.version 8.3
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .u64 input, .param .u64 output)
{
.reg .pred %p<20>;
.reg .b16 %rs<20>;
.reg .b32 %r<200>;
.reg .b64 %rd<40>;
ld.param.b64 %rd1, [input];
ld.param.b64 %rd2, [output];
mov.u32 %r0, %tid.x;
mul.wide.u32 %rd3, %r0, 4;
add.s64 %rd4, %rd1, %rd3;
add.s64 %rd5, %rd2, %rd3;
"""


def launch(body, given, output, *, block=32, grid=1, cluster=1, shared=4096, seed=0):
    """Run a kernel body; %rd4 and %rd5 are the thread's words of input and output."""
    program = Program(HEAD + body + "\nret;\n}\n")
    params = np.array([given.data_ptr(), output.data_ptr()], np.uint64).tobytes()
    run([program.launch(params, (grid, 1, 1), block, (cluster, 1, 1), shared)], [given, output], seed=seed)
    return output


def words(values):
    return torch.tensor(np.asarray(values, np.uint32).view(np.int32).copy())


def mapped(body, values, block=None):
    """What a kernel makes of every word: in %r1, out of %r2."""
    given = words(values)
    text = f"ld.global.b32 %r1, [%rd4];\n{body}\nst.global.b32 [%rd5], %r2;"
    return launch(text, given, torch.full_like(given, -1), block=block or len(given)).numpy().view(np.uint32)


FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.5, 447.9, 448.0, 463.9, 464.1, -1e30, 2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 0.0175, 57344, 61440, 3.3e-5], np.float32
)


def random_floats(count=240, seed=0):
    generator = np.random.default_rng(seed)
    return np.concatenate([FLOATS, (generator.standard_normal(count) * np.exp2(generator.integers(-20, 12, count))).astype(np.float32)])


@pytest.mark.parametrize(("name", "dtype", "largest"), [("e4m3", torch.float8_e4m3fn, 448.0), ("e5m2", torch.float8_e5m2, 57344.0)])
def test_conversions_to_fp8_are_those_of_torch(name, dtype, largest):
    values = random_floats()
    got = mapped(f"cvt.rn.satfinite.{name}x2.f32 %rs1, 0f3F800000, %r1;\ncvt.u32.u16 %r2, %rs1;", values.view(np.uint32))
    want = torch.from_numpy(values).clamp(-largest, largest).to(dtype).view(torch.uint8).numpy()
    assert (got & 255).tolist() == want.tolist()
    assert set((got >> 8).tolist()) == {int(torch.tensor(1.0).to(dtype).view(torch.uint8))}


def test_conversion_to_bf16_is_that_of_torch():
    values = random_floats()
    got = mapped("cvt.rn.bf16x2.f32 %r2, 0f40000000, %r1;", values.view(np.uint32))
    want = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (got & 0xFFFF).tolist() == want.tolist()
    assert set((got >> 16).tolist()) == {0x4000}


INTEGERS = [
    ("prmt.b32 %r2, %r1, 0x11223344, 0x7a10;", lambda v: (0x11 << 24) | ((v >> 16 & 128 and 255) << 16) | (v & 0xFFFF)),
    ("lop3.b32 %r2, %r1, 0xff00ff00, 0x0ff00ff0, 0xe8;", lambda v: (v & 0xFF00FF00) | (v & 0x0FF00FF0) | (0xFF00FF00 & 0x0FF00FF0)),
    ("shf.l.wrap.b32 %r2, %r1, 0x12345678, 37;", lambda v: (0x12345678 << 5 | v >> 27) & 0xFFFFFFFF),
    ("bfe.u32 %r2, %r1, 7, 9;", lambda v: v >> 7 & 511),
    ("bfi.b32 %r2, %r1, 0, 4, 8;", lambda v: (v & 255) << 4),
    ("mad.lo.s32 %r2, %r1, -3, 7;", lambda v: (v * -3 + 7) & 0xFFFFFFFF),
    ("mul.hi.u32 %r2, %r1, -1431655765;", lambda v: v * 2863311531 >> 32),
    ("shr.s32 %r2, %r1, 40;", lambda v: 0xFFFFFFFF if v >> 31 else 0),
    ("shl.b32 %r2, %r1, 32;", lambda v: 0),
    ("div.s32 %r2, %r1, -7;", lambda v: int(np.trunc((v - 2**32 if v >> 31 else v) / -7)) & 0xFFFFFFFF),
    ("popc.b32 %r2, %r1;", lambda v: bin(v).count("1")),
    ("min.relu.s32 %r2, %r1, 1000;", lambda v: 0 if v >> 31 else min(v, 1000)),
    ("setp.lt.s32 %p1, %r1, 5;\nselp.b32 %r2, 3, 4, %p1;", lambda v: 3 if v >> 31 or v < 5 else 4),
]


def test_integers():
    values = np.random.default_rng(1).integers(0, 2**32, 64, dtype=np.uint32)
    given, output = words(values), torch.zeros(len(INTEGERS), 64, dtype=torch.int32)
    stores = [f"{body}\nst.global.b32 [%rd5+{256 * i}], %r2;" for i, (body, _) in enumerate(INTEGERS)]
    launch("ld.global.b32 %r1, [%rd4];\n" + "\n".join(stores), given, output, block=64)
    for (body, want), got in zip(INTEGERS, output.numpy().view(np.uint32), strict=True):
        assert got.tolist() == [want(int(v)) for v in values], body


def test_shuffles_and_votes_among_some_lanes():
    values = np.arange(32) * 3
    body = """
    shfl.sync.up.b32 %r3|%p1, %r1, 3, 0, -1;
    shfl.sync.bfly.b32 %r4, %r1, 5, 31, -1;
    selp.b32 %r5, 1000, 0, %p1;
    add.s32 %r2, %r3, %r4;
    add.s32 %r2, %r2, %r5;
    setp.lt.u32 %p2, %r0, 8;
    @!%p2 bra $L__BB0_1;
    redux.sync.add.s32 %r2, %r1, 0xff;
    $L__BB0_1:
    """
    got = mapped(body, values).tolist()
    want = [(values[i - 3] + 1000 if i >= 3 else values[i]) + values[i ^ 5] for i in range(32)]
    assert got[8:] == want[8:]
    assert got[:8] == [sum(range(8)) * 3] * 8


def test_a_lane_that_is_not_in_the_mask():
    with pytest.raises(MachineFault, match="lane 8 is not in the mask 0xff"):
        mapped("shfl.sync.idx.b32 %r2, %r1, 0, 31, 0xff;\n", np.arange(9), block=9)


def test_accesses_outside_and_across_buffers():
    given = words(range(32))
    with pytest.raises(MachineFault, match=r"thread 31, line 17: 4 bytes at global address .* lie in no buffer"):
        launch("ld.global.b32 %r1, [%rd4+4];", given, given.clone(), seed=3)
    with pytest.raises(MachineFault, match="not aligned to 16 bytes"):
        launch("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd4];", given, given.clone())
    with pytest.raises(MachineFault, match="4 bytes at shared offset 4096 lie outside the 4096 bytes"):
        launch("mov.b32 %r1, dynamic;\nld.shared.b32 %r2, [%r1+4096];", given, given.clone())


def test_a_barrier_that_not_all_reach_is_a_deadlock_with_its_lines():
    given = words(range(64))
    body = "setp.lt.u32 %p1, %r0, 40;\n@!%p1 bra $L__BB0_1;\nbar.sync 0;\n$L__BB0_1:"
    with pytest.raises(MachineFault, match=r"(?s)no thread can go on.*line 19 \(bar\): threads 0-39"):
        launch(body, given, given.clone(), block=64)


POLL = """
$L__BB0_1:
ld.acquire.gpu.global.b32 %r1, [%rd1];
setp.ne.b32 %p1, %r1, 1;
@%p1 bra $L__BB0_1;
"""


def test_polls_end_when_another_block_stores_and_are_a_fault_when_none_does():
    body = "mov.u32 %r2, %ctaid.x;\nsetp.eq.b32 %p2, %r2, 1;\n@%p2 st.release.gpu.global.b32 [%rd1], 1;\n" + POLL
    given = words([0])
    launch(body, given, torch.zeros(32, dtype=torch.int32), grid=2)
    with pytest.raises(MachineFault, match="poll in vain"):
        launch(POLL, words([0]), torch.zeros(32, dtype=torch.int32))


def test_the_clock_goes_on_while_all_wait():
    first = "mov.u64 %rd6, %globaltimer;\nnanosleep.u32 5000000;\nmov.u64 %rd7, %globaltimer;\n"
    got = launch(
        first + "sub.s64 %rd8, %rd7, %rd6;\ncvt.u32.u64 %r1, %rd8;\n" + "st.global.b32 [%rd5], %r1;",
        words([0] * 32),
        torch.zeros(32, dtype=torch.int32),
    )
    assert ((got >= 5_000_000) & (got < 6_000_000)).all()


def outcomes(body, given):
    """What twelve seeds make of a kernel that should copy its input: "right", "wrong", or a fault."""
    seen = set()
    for seed in range(12):
        try:
            seen.add("right" if torch.equal(launch(body, given, torch.zeros_like(given), seed=seed), given) else "wrong")
        except MachineFault as fault:
            seen.add(str(fault))
    return seen


COPY = """
mov.b32 %r1, dynamic;
setp.ne.b32 %p1, %r0, 0;
@%p1 bra $L__BB0_1;
mbarrier.init.shared.b64 [%r1+1024], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r1+1024], EXPECTED;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 128, [%r1+1024];
$L__BB0_1:
bar.sync 0;
$L__BB0_2:
WAIT
shl.b32 %r2, %r0, 2;
add.s32 %r3, %r1, %r2;
ld.shared.b32 %r4, [%r3];
st.global.b32 [%rd5], %r4;
"""
WAIT = "mbarrier.try_wait.parity.shared.b64 %p2, [%r1+1024], 0;\n@!%p2 bra $L__BB0_2;"


def test_bulk_load_is_seen_behind_its_barrier_only():
    given = words(range(32))
    body = COPY.replace("EXPECTED", "128")
    for seed in range(6):
        assert torch.equal(launch(body.replace("WAIT", WAIT), given, torch.zeros_like(given), seed=seed), given)
    seen = outcomes(body.replace("WAIT", ""), given)
    assert seen - {"right"}
    assert seen <= {"right", "wrong", "line 24: CTA 0 has ended while a bulk copy into its memory was under way"}


def test_barrier_that_expects_the_wrong_bytes_never_ends():
    given = words(range(32))
    with pytest.raises(MachineFault, match=r"no thread can go on(?s:.)*\(mbarrier\): threads 0-31"):
        launch(COPY.replace("EXPECTED", "144").replace("WAIT", WAIT), given, torch.zeros_like(given))


STORE = """
mov.b32 %r1, dynamic;
shl.b32 %r2, %r0, 2;
add.s32 %r3, %r1, %r2;
st.shared.b32 [%r3], %r0;
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ne.b32 %p1, %r0, 0;
@%p1 bra $L__BB0_1;
cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], 128;
cp.async.bulk.commit_group;
WAIT
$L__BB0_1:
bar.sync 0;
st.shared.b32 [%r3], 77;
"""


@pytest.mark.parametrize("wait", ["cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"])
def test_bulk_store_has_read_its_source_behind_either_wait(wait):
    given = words(range(32))
    for seed in range(6):
        assert torch.equal(launch(STORE.replace("WAIT", wait), given, torch.zeros_like(given), seed=seed), given)


def test_bulk_store_without_a_wait_loses_its_source():
    seen = outcomes(STORE.replace("WAIT", ""), words(range(32)))
    assert seen - {"right"}
    assert all(text in ("right", "wrong") or re.search(r"CTA ends while the bulk store of line \d+ reads", text) for text in seen), seen


def test_what_is_unknown_is_named():
    given = words([0] * 32)
    with pytest.raises(NotTranslated, match=r"line 17: tcgen05\.fence::before_thread_sync"):
        launch("tcgen05.fence::before_thread_sync;", given, given.clone())
    with pytest.raises(NotTranslated, match=r"line 17: .*sat"):
        launch("add.sat.f32 %r1, %r2, %r3;", given, given.clone())
