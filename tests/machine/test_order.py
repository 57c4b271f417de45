"""Happens-before on the machine by small kernels: a message in every form that orders it, and in forms that look alike and do not."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.machine.launch import MachineFault, Order, Program, compiler, run

pytestmark = pytest.mark.skipif(compiler() is None, reason="the machine needs a C++ compiler (g++ or clang++)")

HEAD = """.version 8.3
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .u64 input, .param .u32 side)
{
.reg .pred %p<20>;
.reg .b32 %r<60>;
.reg .b64 %rd<40>;
.reg .b64 %data, %flag, %out;
.reg .b32 %role, %tid, %smem;
.reg .pred %first, %second, %reads;
ld.param.b64 %data, [input];
ld.param.b32 %role, [side];
add.s64 %flag, %data, 256;
add.s64 %out, %data, 512;
mov.u32 %tid, %tid.x;
mov.u32 %r0, %ctaid.x;
add.s32 %role, %role, %r0;
mov.b32 %smem, dynamic;
setp.eq.b32 %first, %tid, 0;
setp.eq.b32 %second, %tid, 1;
setp.ne.b32 %reads, %role, 0;
"""


@functools.cache
def program_of(body):
    return Program(HEAD + body + "\nret;\n}\n")


class Memory:
    """Words of data, flags and results, and the order of what happens to them."""

    def __init__(self, loose=False):
        block = torch.zeros(512, dtype=torch.int32)
        self.words = block[-block.data_ptr() % 512 // 4 :][:256]
        data = (self.words.data_ptr(), 16)
        self.order = Order({"words": self.words}, [data] if loose else [])

    def run(self, body, *, gpus=(0,), block=32, grid=1, seed=0):
        """One launch on every GPU named; its place in `gpus` is the role of its first CTA."""
        program = program_of(body)
        launches = []
        for role, gpu in enumerate(gpus):
            params = np.zeros(2, np.uint64)
            params[0], params[1] = self.words.data_ptr(), role
            launches.append(replace(program.launch(params.tobytes()[:12], (grid, 1, 1), block, (1, 1, 1), 4096), gpu=gpu))
        run(launches, [self.words], seed=seed, order=self.order)

    def result(self):
        return int(self.words[128])


def message(write, read, *, before="@%first st.global.b32 [%data], 7;", after="@%first ld.global.b32 %r5, [%data];"):
    """Data and a flag from the CTA of role 0 to that of role 1."""
    return f"""
@%reads bra $L__BB0_9;
{before}
{write}
ret;
$L__BB0_9:
{read}
{after}
@%first st.global.b32 [%out], %r5;
"""


def polled(load, fence=""):
    """Thread 0 waits for the flag."""
    return f"""
@!%first bra $L__BB0_3;
$L__BB0_2:
{load}
setp.eq.b32 %p1, %r1, 0;
@%p1 bra $L__BB0_2;
{fence}
$L__BB0_3:
"""


STORE = "@%first st.{}.global.b32 [%flag], 1;"
LOAD = "ld.{}.global.b32 %r1, [%flag];"
BETWEEN_CTAS, BETWEEN_GPUS = {"grid": 2}, {"gpus": (0, 1)}
RELEASE, ACQUIRE = STORE.format("release.gpu"), polled(LOAD.format("acquire.gpu"))
SYS_RELEASE, SYS_ACQUIRE = STORE.format("release.sys"), polled(LOAD.format("acquire.sys"))
FENCED, FENCED_SYS = "fence.acq_rel.gpu;\n" + STORE.format("relaxed.gpu"), "fence.acq_rel.sys;\n" + STORE.format("relaxed.sys")
BOTH = "@%first st.global.b32 [%data], 7;\n@%second st.global.b32 [%data+4], 7;"
OTHER_READS = "@%second ld.global.b32 %r6, [%data];\n@%first ld.global.b32 %r5, [%data];"
BULK = """
@!%first bra $L__BB0_5;
st.shared.b32 [%smem], 7;
fence.proxy.async;
cp.async.bulk.global.shared::cta.bulk_group [%data], [%smem], 16;
cp.async.bulk.commit_group;
WAIT
$L__BB0_5:
"""

RIGHT = {
    "release, acquire": (BETWEEN_CTAS, message(RELEASE, ACQUIRE)),
    "release, acquire between GPUs": (BETWEEN_GPUS, message(SYS_RELEASE, SYS_ACQUIRE)),
    "fence and relaxed store": (BETWEEN_CTAS, message(FENCED, ACQUIRE)),
    "fence and relaxed store between GPUs": (BETWEEN_GPUS, message(FENCED_SYS, SYS_ACQUIRE)),
    "relaxed load and fence": (BETWEEN_CTAS, message(RELEASE, polled(LOAD.format("relaxed.gpu"), "fence.acq_rel.gpu;"))),
    "older fences": (BETWEEN_CTAS, message("membar.gl;\n" + STORE.format("volatile"), polled(LOAD.format("volatile"), "fence.sc.gpu;"))),
    "atomics": (
        BETWEEN_CTAS,
        message("@%first red.release.gpu.global.add.s32 [%flag], 1;", polled("atom.acq_rel.gpu.global.add.s32 %r1, [%flag], 0;")),
    ),
    "another thread's atomic between": (
        BETWEEN_CTAS,
        message(RELEASE + "\nbar.warp.sync -1;\n@%second atom.relaxed.gpu.global.add.s32 %r9, [%flag], 1;", ACQUIRE),
    ),
    "other lanes' data": (
        BETWEEN_CTAS,
        message("bar.warp.sync -1;\n" + RELEASE, ACQUIRE, before=BOTH, after="@%first ld.global.b32 %r5, [%data+4];"),
    ),
    "for other lanes": (BETWEEN_CTAS, message(RELEASE, ACQUIRE + "bar.warp.sync -1;", after=OTHER_READS)),
    "for the CTA": (BETWEEN_CTAS, message("bar.sync 0;\n" + RELEASE, ACQUIRE + "bar.sync 0;", before=BOTH, after=OTHER_READS)),
    "bulk store": (BETWEEN_CTAS, message(RELEASE, ACQUIRE, before=BULK.replace("WAIT", "cp.async.bulk.wait_group 0;"))),
    "the same value": (
        BETWEEN_CTAS,
        message("", "", before="st.global.b32 [%data], 0;", after="mov.b32 %r5, 0;\nst.global.b32 [%data], 0;"),
    ),
    "the flag itself": (
        BETWEEN_CTAS,
        message(STORE.format("relaxed.gpu"), polled(LOAD.format("relaxed.gpu")), before="", after="@%first ld.global.b32 %r5, [%flag];"),
    ),
}

WRONG = {
    "relaxed store": (BETWEEN_CTAS, message(STORE.format("relaxed.gpu"), ACQUIRE)),
    "relaxed load": (BETWEEN_CTAS, message(RELEASE, polled(LOAD.format("relaxed.gpu")))),
    "weak store": (BETWEEN_CTAS, message("@%first st.global.b32 [%flag], 1;", ACQUIRE)),
    "store of GPU scope between GPUs": (BETWEEN_GPUS, message(RELEASE, SYS_ACQUIRE)),
    "load of GPU scope between GPUs": (BETWEEN_GPUS, message(SYS_RELEASE, ACQUIRE)),
    "fence of GPU scope between GPUs": (BETWEEN_GPUS, message("fence.acq_rel.gpu;\n" + STORE.format("relaxed.sys"), SYS_ACQUIRE)),
    "store of CTA scope": (BETWEEN_CTAS, message(STORE.format("release.cta"), ACQUIRE)),
    "fence of CTA scope": (BETWEEN_CTAS, message("fence.acq_rel.cta;\n" + STORE.format("relaxed.gpu"), ACQUIRE)),
    "fence behind the store": (BETWEEN_CTAS, message(STORE.format("relaxed.gpu") + "\nfence.acq_rel.gpu;", ACQUIRE)),
    "fence before the load": (BETWEEN_CTAS, message(RELEASE, "fence.acq_rel.gpu;\n" + polled(LOAD.format("relaxed.gpu")))),
    "relaxed atomic": (BETWEEN_CTAS, message("@%first red.relaxed.gpu.global.add.s32 [%flag], 1;", ACQUIRE)),
    "another thread's store between": (
        BETWEEN_CTAS,
        message(RELEASE + "\nbar.warp.sync -1;\n@%second st.relaxed.gpu.global.b32 [%flag], 1;", ACQUIRE.replace("0;\n@%p1", "7;\n@%p1"))
        .replace("[%flag], 1;\nbar", "[%flag], 7;\nbar")
        .replace("$L__BB0_2:\n", "nanosleep.u32 100000;\n$L__BB0_2:\n"),
    ),
    "other lanes' data behind a shuffle": (
        BETWEEN_CTAS,
        message("shfl.sync.idx.b32 %r9, %r0, 0, 31, -1;\n" + RELEASE, ACQUIRE, before=BOTH, after="@%first ld.global.b32 %r5, [%data+4];"),
    ),
    "for other lanes behind a vote": (
        BETWEEN_CTAS,
        message(RELEASE, ACQUIRE + "vote.sync.ballot.b32 %r9, %first, -1;", after=OTHER_READS),
    ),
    "no barrier of the CTA": (
        BETWEEN_CTAS | {"block": 64},
        message(
            "@%p9 bra $L__BB0_9;\n" + RELEASE,
            ACQUIRE,
            before="setp.eq.b32 %p8, %tid, 32;\nsetp.ne.b32 %p9, 0, 0;\n@%p8 st.global.b32 [%data], 7;",
        ),
    ),
    "bulk store that was only read": (
        BETWEEN_CTAS,
        message(RELEASE, ACQUIRE, before=BULK.replace("WAIT", "cp.async.bulk.wait_group.read 0;")),
    ),
    "nothing at all": (BETWEEN_CTAS, message("", "")),
    "two values": (
        BETWEEN_CTAS,
        message("", "", before="@%first st.global.b32 [%data], 1;", after="mov.b32 %r5, 0;\n@%first st.global.b32 [%data], 2;"),
    ),
}


@pytest.mark.parametrize("form", RIGHT)
def test_messages_in_order_are_silent(form):
    how, body = RIGHT[form]
    for seed in range(4):
        Memory().run(body, seed=seed, **how)


@pytest.mark.parametrize("form", WRONG)
def test_messages_out_of_order_are_data_races(form):
    how, body = WRONG[form]
    for seed in range(2):
        with pytest.raises(MachineFault, match=r"data races:\n  lines \d+ and \d+(, between CTAs|, between GPUs|): .* by GPU \d, CTA \d"):
            Memory().run(body, seed=seed, **how)


WRITES = "st.global.b32 [%data], %role;"
READS = "ld.global.b32 %r5, [%data];"


def test_launches_of_one_gpu_follow_each_other_and_those_of_two_do_not():
    memory = Memory()
    memory.run("@%first " + WRITES)
    memory.run("@%second " + READS)
    memory.run("@%second " + WRITES.replace("%role", "3"))
    with pytest.raises(MachineFault, match=r"between GPUs: weak write .* by GPU 0, .*; weak read .* by GPU 1, .*; at words \+ 0"):
        memory.run("@%first " + READS, gpus=(1,))


def test_what_another_gpu_reads_may_be_overwritten_only_after_its_message():
    """A launch reads what its peer has sent; the peer's next launch writes it anew."""
    there, back = message(SYS_RELEASE, SYS_ACQUIRE), "st.release.sys.global.b32 [%flag+64], 1;"
    answer = there.replace("@%first st.global.b32 [%out], %r5;", "@%first " + back)
    memory = Memory()
    memory.run(there, gpus=(0, 1))
    with pytest.raises(MachineFault, match=r"between GPUs: weak read .* by GPU 1, .*; weak write .* by GPU 0"):
        memory.run("@%first " + WRITES.replace("%role", "9"))
    memory = Memory()
    memory.run(answer, gpus=(0, 1))
    assert memory.words[80] == 1
    memory.run("@!%first bra $L__BB0_1;\nld.acquire.sys.global.b32 %r9, [%flag+64];\nst.global.b32 [%data], 9;\n$L__BB0_1:")


MBARRIER = """
@%first mbarrier.init.shared.b64 [%smem+64], 1;
bar.sync 0;
@%first bra $L__BB0_5;
$L__BB0_4:
WAIT
ld.shared.b32 %r5, [%smem];
setp.eq.b32 %p3, %tid, 32;
@%p3 st.global.b32 [%out], %r5;
ret;
$L__BB0_5:
st.shared.b32 [%smem], 7;
mbarrier.arrive.shared.b64 %rd1, [%smem+64];
"""
WAIT = "mbarrier.try_wait.parity.shared.b64 %p2, [%smem+64], 0;\n@!%p2 bra $L__BB0_4;"


def test_a_barrier_in_shared_memory_orders_who_arrives_before_who_waits():
    memory = Memory()
    memory.run(MBARRIER.replace("WAIT", WAIT), block=64)
    assert memory.result() == 7
    with pytest.raises(MachineFault, match=r"data races(?s:.)*at shared offset 0"):
        Memory().run(MBARRIER.replace("WAIT", ""), block=64)
    with pytest.raises(MachineFault, match=r"data races(?s:.)*at shared offset 64|is no mbarrier"):
        Memory().run(MBARRIER.replace("bar.sync 0;", "").replace("WAIT", WAIT), block=64)


def test_words_of_a_loose_interval_that_are_read_while_they_are_written_are_poison():
    seen = set()
    for seed in range(8):
        memory = Memory(loose=True)
        memory.run(message("", "", after="@%first ld.global.b32 %r5, [%data];"), grid=2, seed=seed)
        seen.add(memory.result())
    assert seen == {0, -1}, "read before it was written, or hidden"


def by_warps(*bodies):
    """What each warp does, by its lanes together; %p4 is its first lane, %p5 its second one."""
    starts = "\n".join(f"setp.eq.b32 %p6, %r8, {warp};\n@%p6 bra $L__BB1_{warp};" for warp in range(len(bodies)))
    code = "\n".join(f"$L__BB1_{warp}:\n{body}\nret;" for warp, body in enumerate(bodies))
    inits = "\n".join(f"@%first mbarrier.init.shared.b64 [%smem+{64 + 8 * which}], 1;" for which in range(3))
    lanes = "and.b32 %r7, %tid, 31;\nshr.u32 %r8, %tid, 5;\nsetp.eq.b32 %p4, %r7, 0;\nsetp.eq.b32 %p5, %r7, 1;"
    return f"{inits}\nbar.sync 0;\n{lanes}\n{starts}\nret;\n{code}"


def arrives(which):
    return f"@%p4 mbarrier.arrive.shared.b64 %rd1, [%smem+{64 + 8 * which}];"


def waits(which, parity=0, label="a"):
    label = f"$L__BB2_{which}{parity}{label}"
    return f"{label}:\nmbarrier.try_wait.parity.shared.b64 %p2, [%smem+{64 + 8 * which}], {parity};\n@!%p2 bra {label};"


READ, WRITE, BY_OTHER_LANE = "@%p4 ld.shared.b32 %r5, [%smem];", "@%p4 st.shared.b32 [%smem], 7;", "@%p5 ld.shared.b32 %r5, [%smem+4];"
FENCE, CONVERGE, BAR = "@%p4 fence.proxy.async;", "shfl.sync.idx.b32 %r9, %r0, 0, 31, -1;", "bar.sync 1, 64;"
COPY, COPIED = "@%p4 cp.async.ca.shared.global [%smem], [%data], 16;", "cp.async.wait_all;"
LOADS = """
@%p4 mbarrier.arrive.expect_tx.shared.b64 %rd1, [%smem+80], 16;
@%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%smem], [%data], 16, [%smem+80];
"""
LOAD = LOADS + waits(2)
SEND = """
@%p4 cp.async.bulk.global.shared::cta.bulk_group [%data], [%smem], 16;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
"""
TELLS = "@%p4 st.release.gpu.global.b32 [%flag], 1;"
HEARS = "$L__BB2_flag:\nld.acquire.gpu.global.b32 %r1, [%flag];\nsetp.eq.b32 %p1, %r1, 0;\n@%p1 bra $L__BB2_flag;"


def lines(*each):
    return "\n".join(each)


FENCED_PROXIES = {
    "by who reads": (lines(READ, FENCE, arrives(0)), lines(waits(0), LOAD)),
    "by who copies": (lines(READ, arrives(0)), lines(waits(0), FENCE, LOAD)),
    "by a thread between": (lines(READ, arrives(0)), lines(waits(1), LOAD), lines(waits(0), FENCE, arrives(1))),
    "by who writes": (lines(WRITE, FENCE, arrives(0)), lines(waits(0), LOAD)),
    "before a barrier of the CTA": (lines(READ, FENCE, BAR), lines(BAR, LOAD)),
    "behind a barrier of the CTA": (lines(READ, BAR), lines(BAR, FENCE, LOAD)),
    "before a barrier of the CTA at which it only arrives": (lines(READ, FENCE, "bar.arrive 1, 64;"), lines(BAR, LOAD)),
    "before a release": (lines(READ, FENCE, TELLS), lines(HEARS, LOAD)),
    "behind an acquire": (lines(READ, TELLS), lines(HEARS, FENCE, LOAD)),
    "before a fence and a relaxed store": (
        lines(READ, FENCE, "fence.acq_rel.gpu;", TELLS.replace("release", "relaxed")),
        lines(HEARS.replace("acquire", "relaxed"), "fence.acq_rel.gpu;", LOAD),
    ),
    "of shared memory": (lines(READ, arrives(0)), lines(waits(0), FENCE.replace(";", ".shared::cta;"), LOAD)),
    "of the cluster's shared memory": (lines(READ, arrives(0)), lines(waits(0), FENCE.replace(";", ".shared::cluster;"), LOAD)),
    "of one thread": (lines(READ, FENCE, LOAD),),
    "by another lane": (lines(BY_OTHER_LANE, "bar.warp.sync -1;", FENCE, arrives(0)), lines(waits(0), LOAD)),
    "by another lane behind a shuffle": (lines(BY_OTHER_LANE, CONVERGE, FENCE, arrives(0)), lines(waits(0), LOAD)),
    "behind copies of the generic proxy": (lines(COPY, COPIED, FENCE, arrives(0)), lines(waits(0), LOAD)),
    "before a bulk store": (lines(WRITE, FENCE, arrives(0)), lines(waits(0), SEND)),
    "none before a bulk store of what is only read": (lines(READ, SEND),),
    "none within a proxy": (lines(LOAD, CONVERGE, LOADS, waits(2, 1)),),
    "none before reads of what a copy brought": (lines(LOAD, READ),),
}

UNFENCED_PROXIES = {
    "none": (lines(READ, arrives(0)), lines(waits(0), LOAD)),
    "none behind a write": (lines(WRITE, arrives(0)), lines(waits(0), LOAD)),
    "none in a thread": (lines(READ, LOAD),),
    "none at a barrier of the CTA": (lines(READ, BAR), lines(BAR, LOAD)),
    "none between a release and an acquire": (lines(READ, TELLS), lines(HEARS, LOAD)),
    "before the read": (lines(FENCE, READ, arrives(0)), lines(waits(0), LOAD)),
    "before it knows of the read": (lines(READ, arrives(0)), lines(FENCE, waits(0), LOAD)),
    "behind the arrival": (lines(READ, arrives(0), FENCE), lines(waits(0), LOAD)),
    "in a thread that is not between": (lines(READ, arrives(0)), lines(waits(0), LOAD), lines(waits(0, label="b"), FENCE)),
    "by another lane that knows nothing of a write": (lines(WRITE, CONVERGE, "@%p5 fence.proxy.async;", arrives(0)), lines(waits(0), LOAD)),
    "behind the copy": (lines(READ, arrives(0)), lines(waits(0), LOADS, FENCE, waits(2))),
    "of global memory": (lines(READ, arrives(0)), lines(waits(0), FENCE.replace(";", ".global;"), LOAD)),
    "of memory order": (lines(READ, "fence.acq_rel.sys;", arrives(0)), lines(waits(0), "fence.sc.sys;", LOAD)),
    "by another lane before a shuffle": (lines(BY_OTHER_LANE, FENCE, CONVERGE, arrives(0)), lines(waits(0), LOAD)),
    "before copies of the generic proxy are there": (lines(COPY, FENCE, COPIED, arrives(0)), lines(waits(0), LOAD)),
    "by another lane before a bulk store": (lines(WRITE, CONVERGE, "@%p5 fence.proxy.async;", arrives(0)), lines(waits(0), SEND)),
    "once, and the stage is used again": (lines(READ, FENCE, LOAD, CONVERGE, READ, LOADS, waits(2, 1)),),
}


def run_warps(bodies, seed):
    Memory().run(by_warps(*bodies), block=32 * len(bodies), seed=seed)


@pytest.mark.parametrize("fence", FENCED_PROXIES)
def test_copies_behind_a_proxy_fence_are_silent(fence):
    for seed in range(4):
        run_warps(FENCED_PROXIES[fence], seed)


@pytest.mark.parametrize("fence", UNFENCED_PROXIES)
def test_copies_over_what_threads_accessed_without_a_proxy_fence_are_data_races(fence):
    unfenced = (
        r"data races:\n  lines \d+ and \d+, without a proxy fence: weak .* thread \d+; weak .* by (copies|a bulk store) .* at shared offset"
    )
    for seed in range(2):
        with pytest.raises(MachineFault, match=unfenced) as caught:
            run_warps(UNFENCED_PROXIES[fence], seed)
        assert str(caught.value).count("\n  lines") == 1
