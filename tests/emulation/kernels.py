"""Small kernels in PTX for the tests, as functions that give the text; ``ALL`` has one text or more of every one."""

from __future__ import annotations

HEAD = """.version 9.0
.target {target}
.address_size 64

.extern .shared .align 1024 .b8 smem[];

.visible .entry kernel({parameters})
{directives}
{{
	.reg .pred 	%p<32>;
	.reg .b16 	%rs<32>;
	.reg .b32 	%r<400>;
	.reg .b64 	%rd<64>;
	.reg .f32 	%f<64>;
	.reg .b128 	%rq<4>;
{body}
	ret;
}}
"""

OPERANDS = 1024
"""Where operands begin in shared memory; before them the tensor memory address (0) and a barrier (8)."""


def kernel(target: str, parameters: str, body: str, directives: str = ".reqntid 128, 1, 1") -> str:
    listed = ",\n".join(f"\t.param .{p.split()[0]} {p.split()[1]}" for p in parameters.split(", "))
    return HEAD.format(target=target, parameters=f"\n{listed}\n", directives=directives, body=body)


def fill(name: str, parameter: str, count: str, offset: str, rank: bool = False) -> str:
    """All threads copy `count` bytes from global memory to shared memory at `offset` (registers or numbers)."""
    by_rank = f"\tmad.wide.u32 %rd1, %r4, {count}, %rd1;\n" if rank else ""
    return f"""	ld.param.u64 %rd1, [{parameter}];
{by_rank}	shl.b32 %r10, %r1, 2;
$fill_{name}:
	setp.ge.u32 %p9, %r10, {count};
	@%p9 bra $filled_{name};
	cvt.u64.u32 %rd2, %r10;
	add.u64 %rd3, %rd1, %rd2;
	ld.global.b32 %r11, [%rd3];
	add.u32 %r12, %r2, %r10;
	add.u32 %r12, %r12, {offset};
	st.shared.b32 [%r12], %r11;
	add.u32 %r10, %r10, 512;
	bra $fill_{name};
$filled_{name}:
"""


START = """	mov.u32 %r1, %tid.x;
	mov.u32 %r2, smem;
	shr.u32 %r3, %r1, 5;
	mov.u32 %r4, %cluster_ctarank;
"""

WAIT = """$wait:
	mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r2+8], 0;
	@!%p8 bra $wait;
"""


def allocate(columns: int = 512, group: int = 1) -> str:
    return f"""	setp.ne.u32 %p1, %r3, 0;
	@%p1 bra $allocated;
	mov.b32 %r5, {columns};
	tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r2], %r5;
	tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
$allocated:
	setp.ne.u32 %p2, %r1, 0;
	mov.b32 %r6, 1;
	@%p2 bra $initialized;
	mbarrier.init.shared::cta.b64 [%r2+8], %r6;
	fence.mbarrier_init.release.cluster;
$initialized:
"""


def free(columns: int = 512, group: int = 1) -> str:
    return f"""	bar.sync 0;
	@%p1 bra $freed;
	tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r7, {columns};
$freed:
"""


def dump(columns: int, wait: bool = True) -> str:
    """Every warp writes its 32 lanes of `columns` columns to the array in parameter d."""
    waited = "\ttcgen05.wait::ld.sync.aligned;\n" if wait else ""
    values = ", ".join(f"%r{100 + i}" for i in range(8))
    stores = "".join(f"\tst.global.b32 [%rd9+{4 * i}], %r{100 + i};\n" for i in range(8))
    return f"""	ld.param.u64 %rd8, [d];
	mad.lo.u32 %r20, %r4, 128, %r1;
	mul.lo.u32 %r20, %r20, {4 * columns};
	cvt.u64.u32 %rd9, %r20;
	add.u64 %rd9, %rd8, %rd9;
	shl.b32 %r21, %r3, 21;
	add.u32 %r21, %r21, %r7;
	mov.b32 %r22, 0;
$dump:
	tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{values}}}, [%r21];
{waited}{stores}	add.u64 %rd9, %rd9, 32;
	add.u32 %r21, %r21, 8;
	add.u32 %r22, %r22, 8;
	setp.lt.u32 %p3, %r22, {columns};
	@%p3 bra $dump;
"""


MMA_PARAMETERS = (
    "u64 a, u64 b, u64 scales, u64 d, u32 a_bytes, u32 b_bytes, u64 a_descriptor, u64 b_descriptor, u32 a_step, u32 b_step, u32 idesc"
)


def mma(kind: str, columns: int, steps: int = 1, group: int = 1, block: str = "", elected: bool = True, omit: tuple[str, ...] = ()) -> str:
    """One product over `steps` slabs of K: operands to shared memory, scales to TMEM, tcgen05.mma, commit, wait, TMEM to global memory.

    Descriptors are relative to the operands' start; `a_step` and `b_step` are added to them for every slab (16 bytes a unit). The scales
    are 32 by 16 bytes for A, then as many for B. `omit` leaves out "commit", "wait", "wait::ld", "cp".
    """
    scaled = bool(block)
    body = (
        START
        + "\tld.param.u32 %r30, [a_bytes];\n\tld.param.u32 %r31, [b_bytes];\n\tadd.u32 %r32, %r30, 1024;\n\tadd.u32 %r33, %r32, %r31;\n"
    )
    body += fill("a", "a", "%r30", str(OPERANDS), rank=group == 2) + fill("b", "b", "%r31", "%r32", rank=group == 2)
    if scaled:
        body += fill("s", "scales", "1024", "%r33")
    body += allocate(512, group)
    body += "\tbar.sync 0;\n\tld.shared.b32 %r7, [%r2];\n"
    if group == 2:
        body += "\tbarrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;\n"
    body += "\tfence.proxy.async.shared::cta;\n"
    body += "\tsetp.ne.u32 %p4, %r3, 0;\n\t@%p4 bra $issued;\n"
    if group == 2:
        body += "\tsetp.ne.u32 %p4, %r4, 0;\n\t@%p4 bra $issued;\n"
    if elected:
        body += "\telect.sync %r8|%p5, -1;\n\tnot.pred %p6, %p5;\n\t@%p6 bra $issued;\n"
    else:
        body += "\tsetp.ne.u32 %p6, %r1, 0;\n\t@%p6 bra $issued;\n"
    body += """	ld.param.u64 %rd10, [a_descriptor];
	ld.param.u64 %rd11, [b_descriptor];
	ld.param.u32 %r40, [a_step];
	ld.param.u32 %r41, [b_step];
	ld.param.u32 %r42, [idesc];
	add.u32 %r43, %r2, 1024;
	shr.u32 %r43, %r43, 4;
	and.b32 %r43, %r43, 0x3fff;
	cvt.u64.u32 %rd12, %r43;
	add.u64 %rd10, %rd10, %rd12;
	add.u32 %r44, %r2, %r32;
	shr.u32 %r44, %r44, 4;
	and.b32 %r44, %r44, 0x3fff;
	cvt.u64.u32 %rd13, %r44;
	add.u64 %rd11, %rd11, %rd13;
	cvt.u64.u32 %rd14, %r40;
	cvt.u64.u32 %rd15, %r41;
	add.u32 %r50, %r7, 256;
	add.u32 %r51, %r7, 288;
"""
    if scaled and "cp" not in omit:
        body += """	add.u32 %r45, %r2, %r33;
	shr.u32 %r45, %r45, 4;
	and.b32 %r45, %r45, 0x3fff;
	cvt.u64.u32 %rd16, %r45;
	mov.b64 %rd17, 0x400800000000;
	or.b64 %rd16, %rd16, %rd17;
	add.u64 %rd18, %rd16, 32;
"""
        for to, source in (("%r50", "%rd16"), ("%r51", "%rd18")):
            body += f"\ttcgen05.cp.cta_group::{group}.32x128b.warpx4 [{to}], {source};\n"
    for step in range(steps):
        scales = "[%r50], [%r51], " if scaled else ""
        body += f"\tsetp.ne.u32 %p7, {step}, 0;\n"
        opcode = f"tcgen05.mma.cta_group::{group}.kind::{kind}{'.block_scale' if scaled else ''}{block}"
        body += f"\t{opcode} [%r7], %rd10, %rd11, %r42, {scales}%p7;\n"
        body += "\tadd.u64 %rd10, %rd10, %rd14;\n\tadd.u64 %rd11, %rd11, %rd15;\n"
    if "commit" not in omit:
        if group == 2:
            body += "\tmov.b16 %rs1, 3;\n"
            body += "\ttcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r2+8], %rs1;\n"
        else:
            body += "\ttcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+8];\n"
    body += "$issued:\n"
    body += WAIT if "wait" not in omit else ""
    body += "\ttcgen05.fence::after_thread_sync;\n" + dump(columns, wait="wait::ld" not in omit)
    if "wait" in omit:  # so that nothing is left to happen after the tensor memory is freed
        body += WAIT
    if group == 2:
        body += "\tbarrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;\n"
    directives = ".reqntid 128, 1, 1" + ("\n.reqnctapercluster 2, 1, 1" if group == 2 else "")
    return kernel("sm_100a", MMA_PARAMETERS, body + free(512, group), directives)


def ld_st(shape: str, registers: int, columns: int, wait_store: bool = True, unpack: bool = False) -> str:
    """Every warp stores lane * 1000 + register (+ 100000 * warp) with `shape`, then dumps its lanes."""
    values = ", ".join(f"%r{100 + i}" for i in range(registers))
    body = START + allocate() + "\tbar.sync 0;\n\tld.shared.b32 %r7, [%r2];\n\tand.b32 %r8, %r1, 31;\n"
    body += "\tmul.lo.u32 %r8, %r8, 1000;\n\tmad.lo.u32 %r8, %r3, 100000, %r8;\n"
    body += "".join(f"\tadd.u32 %r{100 + i}, %r8, {i};\n" for i in range(registers))
    body += "\tshl.b32 %r9, %r3, 21;\n\tadd.u32 %r9, %r9, %r7;\n"
    for half in range(1 if shape == "32x32b" else 2):  # 16-lane shapes: both halves of the warp's lanes
        if half:
            body += "\tadd.u32 %r9, %r9, 1048576;\n" + "".join(f"\tadd.u32 %r{100 + i}, %r{100 + i}, 50000;\n" for i in range(registers))
        opcode = f"tcgen05.st.sync.aligned.{shape}.x{repeats(shape, registers)}{'.unpack::16b' * unpack}.b32"
        body += f"\t{opcode} [%r9], {split(shape)}{{{values}}};\n"
    body += "\ttcgen05.wait::st.sync.aligned;\n" if wait_store else ""
    return kernel("sm_100a", "u64 d", body + dump(columns) + free())


def st_in_a_loop(columns: int) -> str:
    """What `ld_st` stores with 32x32b, one column after the other by the same instruction, all before one wait."""
    body = (
        START
        + allocate()
        + f"""	bar.sync 0;
	ld.shared.b32 %r7, [%r2];
	and.b32 %r8, %r1, 31;
	mul.lo.u32 %r8, %r8, 1000;
	mad.lo.u32 %r8, %r3, 100000, %r8;
	shl.b32 %r9, %r3, 21;
	add.u32 %r9, %r9, %r7;
	mov.b32 %r10, 0;
$again:
	tcgen05.st.sync.aligned.32x32b.x1.b32 [%r9], {{%r8}};
	add.u32 %r8, %r8, 1;
	add.u32 %r9, %r9, 1;
	add.u32 %r10, %r10, 1;
	setp.lt.u32 %p4, %r10, {columns};
	@%p4 bra $again;
	tcgen05.wait::st.sync.aligned;
"""
    )
    return kernel("sm_100a", "u64 d", body + dump(columns) + free())


def split(shape: str) -> str:
    """Operand with the distance of the two halves of 16x32bx2, in columns."""
    return f"{SPLIT}, " if shape == "16x32bx2" else ""


SPLIT = 5


def load_shape(shape: str, registers: int, columns: int, pack: bool = False) -> str:
    """Warps store lane * 1000 + column (+ 100000 * warp) with 32x32b, then load with `shape` into d[thread][register]."""
    values = ", ".join(f"%r{100 + i}" for i in range(registers))
    body = START + allocate() + "\tbar.sync 0;\n\tld.shared.b32 %r7, [%r2];\n\tand.b32 %r8, %r1, 31;\n"
    body += "\tmul.lo.u32 %r8, %r8, 1000;\n\tmad.lo.u32 %r8, %r3, 100000, %r8;\n\tshl.b32 %r9, %r3, 21;\n\tadd.u32 %r9, %r9, %r7;\n"
    for column in range(columns):
        body += f"\tadd.u32 %r10, %r8, {column};\n\ttcgen05.st.sync.aligned.32x32b.x1.b32 [%r9+{column}], {{%r10}};\n"
    body += "\ttcgen05.wait::st.sync.aligned;\n"
    opcode = f"tcgen05.ld.sync.aligned.{shape}.x{repeats(shape, registers)}{'.pack::16b' * pack}.b32"
    body += f"\t{opcode} {{{values}}}, {', '.join(['[%r9]', *filter(None, [split(shape)[:-2]])])};\n\ttcgen05.wait::ld.sync.aligned;\n"
    body += f"\tld.param.u64 %rd8, [d];\n\tmad.wide.u32 %rd9, %r1, {4 * registers}, %rd8;\n"
    body += "".join(f"\tst.global.b32 [%rd9+{4 * i}], %r{100 + i};\n" for i in range(registers))
    return kernel("sm_100a", "u64 d", body + free())


def repeats(shape: str, registers: int) -> int:
    return registers // {"32x32b": 1, "16x32bx2": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}[shape]


def cp(shape: str, rows: int, columns: int) -> str:
    """`rows` rows of `columns` words in core matrices, to TMEM column 0, dumped."""
    size = rows * columns * 4
    body = START + fill("a", "a", str(size), str(OPERANDS)) + allocate() + "\tbar.sync 0;\n\tld.shared.b32 %r7, [%r2];\n"
    body += "\tsetp.ne.u32 %p4, %r3, 0;\n\t@%p4 bra $issued;\n\telect.sync _|%p5, -1;\n\t@!%p5 bra $issued;\n"
    body += "\tadd.u32 %r40, %r2, 1024;\n\tshr.u32 %r40, %r40, 4;\n\tcvt.u64.u32 %rd10, %r40;\n"
    stride = 128 if columns == 4 else 256
    body += f"\tor.b64 %rd10, %rd10, {8 << 16 | stride >> 4 << 32 | 1 << 46};\n"
    body += f"\ttcgen05.cp.cta_group::1.{shape} [%r7], %rd10;\n"
    body += "\ttcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+8];\n$issued:\n" + WAIT
    return kernel("sm_100a", "u64 a, u64 d", body + dump(8) + free())


def mma_sync(kind: str, shape: str, vectors: int, a: str, b: str, scale: str) -> str:
    """One warp: registers from arrays, mma.sync with scales, the four sums to d. `selectors` are byte and thread ids of A and B."""
    body = "\tmov.u32 %r1, %tid.x;\n"
    for name, first, count in (("a", 100, 4), ("b", 104, 2), ("c", 106, 4), ("scales", 110, 2)):
        body += f"\tld.param.u64 %rd1, [{name}];\n\tmad.wide.u32 %rd1, %r1, {4 * count}, %rd1;\n"
        body += "".join(f"\tld.global.b32 %r{first + i}, [%rd1+{4 * i}];\n" for i in range(count))
    body += "\tld.param.u64 %rd1, [selectors];\n" + "".join(f"\tld.global.u16 %rs{i}, [%rd1+{2 * i}];\n" for i in range(4))
    body += "".join(f"\tmov.b32 %f{i}, %r{106 + i};\n" for i in range(4))
    body += f"""	mma.sync.aligned.kind::{kind}.block_scale.scale_vec::{vectors}X.{shape}.row.col.f32.{a}.{b}.f32.{scale}
		{{%f10, %f11, %f12, %f13}}, {{%r100, %r101, %r102, %r103}}, {{%r104, %r105}}, {{%f0, %f1, %f2, %f3}},
		%r110, {{%rs0, %rs1}}, %r111, {{%rs2, %rs3}};
	ld.param.u64 %rd2, [d];
	mad.wide.u32 %rd2, %r1, 16, %rd2;
	st.global.v4.f32 [%rd2], {{%f10, %f11, %f12, %f13}};
"""
    return kernel("sm_120a", "u64 a, u64 b, u64 c, u64 scales, u64 selectors, u64 d", body, ".reqntid 32, 1, 1")


CONVERSIONS = {
    "e2m1x2.f32": "{ .reg .b8 %t; cvt.rn.satfinite.e2m1x2.f32 %t, %f2, %f1; cvt.u32.u8 %r9, %t; }",
    "relu.e2m1x2.f32": "{ .reg .b8 %t; cvt.rn.satfinite.relu.e2m1x2.f32 %t, %f2, %f1; cvt.u32.u8 %r9, %t; }",
    "e2m3x2.f32": "cvt.rn.satfinite.e2m3x2.f32 %rs1, %f2, %f1; cvt.u32.u16 %r9, %rs1;",
    "e3m2x2.f32": "cvt.rn.satfinite.e3m2x2.f32 %rs1, %f2, %f1; cvt.u32.u16 %r9, %rs1;",
    "rp.ue8m0x2.f32": "cvt.rp.satfinite.ue8m0x2.f32 %rs1, %f2, %f1; cvt.u32.u16 %r9, %rs1;",
    "rz.ue8m0x2.f32": "cvt.rz.satfinite.ue8m0x2.f32 %rs1, %f2, %f1; cvt.u32.u16 %r9, %rs1;",
    "rp.ue8m0x2.f32 to NaN": "cvt.rp.ue8m0x2.f32 %rs1, %f2, %f1; cvt.u32.u16 %r9, %rs1;",
    "rp.ue8m0x2.bf16x2": "cvt.rn.bf16x2.f32 %r9, %f2, %f1; cvt.rp.satfinite.ue8m0x2.bf16x2 %rs1, %r9; cvt.u32.u16 %r9, %rs1;",
    "bf16x2.ue8m0x2": "mov.b32 %r9, %f1; cvt.u16.u32 %rs1, %r9; cvt.rn.bf16x2.ue8m0x2 %r9, %rs1;",
    "f16x2.e2m1x2": "{ .reg .b8 %t; mov.b32 %r9, %f1; cvt.u8.u32 %t, %r9; cvt.rn.f16x2.e2m1x2 %r9, %t; }",
    "f16x2.e2m3x2": "mov.b32 %r9, %f1; cvt.u16.u32 %rs1, %r9; cvt.rn.f16x2.e2m3x2 %r9, %rs1;",
    "f16x2.e3m2x2": "mov.b32 %r9, %f1; cvt.u16.u32 %rs1, %r9; cvt.rn.f16x2.e3m2x2 %r9, %rs1;",
    "max3": "max.NaN.f32 %f3, %f1, %f2, 0f3F800000; mov.b32 %r9, %f3;",
    "redux max": "redux.sync.max.f32 %f3, %f1, -1; mov.b32 %r9, %f3;",
    "redux min abs NaN": "redux.sync.min.abs.NaN.f32 %f3, %f1, -1; mov.b32 %r9, %f3;",
    "add f32x2": "mov.b64 %rd5, {%f1, %f2}; add.rn.f32x2 %rd6, %rd5, %rd5;"
    " mov.b64 {%f3, %f4}, %rd6; add.f32 %f3, %f3, %f4; mov.b32 %r9, %f3;",
    "fma f32x2": "mov.b64 %rd5, {%f1, %f2}; fma.rn.f32x2 %rd6, %rd5, %rd5, %rd5;"
    " mov.b64 {%f3, %f4}, %rd6; sub.f32 %f3, %f3, %f4; mov.b32 %r9, %f3;",
}


def convert(name: str) -> str:
    """d[i] = conversion of the pair x[2i], x[2i + 1], 32 pairs a block."""
    body = f"""	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %ctaid.x;
	mad.lo.u32 %r1, %r2, 32, %r1;
	ld.param.u64 %rd1, [x];
	mad.wide.u32 %rd1, %r1, 8, %rd1;
	ld.global.v2.f32 {{%f1, %f2}}, [%rd1];
	{CONVERSIONS[name]}
	ld.param.u64 %rd2, [d];
	mad.wide.u32 %rd2, %r1, 4, %rd2;
	st.global.b32 [%rd2], %r9;
"""
    return kernel("sm_100a", "u64 x, u64 d", body, ".reqntid 32, 1, 1")


def wide_access() -> str:
    """Copies 32 bytes a thread with one load and one store."""
    body = """	mov.u32 %r1, %tid.x;
	ld.param.u64 %rd1, [x];
	ld.param.u64 %rd2, [d];
	mad.wide.u32 %rd1, %r1, 32, %rd1;
	mad.wide.u32 %rd2, %r1, 32, %rd2;
	ld.global.v8.b32 {%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}, [%rd1];
	st.global.v4.b64 [%rd2], {%rd10, %rd11, %rd12, %rd13};
"""
    pack = "".join(f"\tmov.b64 %rd{10 + i}, {{%r{10 + 2 * i}, %r{11 + 2 * i}}};\n" for i in range(4))
    return kernel("sm_100a", "u64 x, u64 d", body.replace("\tst.global", pack + "\tst.global"), ".reqntid 32, 1, 1")


def tensor_load(boxes: int, pair: bool = False, rows: tuple[int, ...] = ()) -> str:
    """One box of a 2-dimensional tensor to shared memory at 1024, then `boxes` bytes of it to d. x and y are its corner.

    With `rows` it gathers four rows: that y, and three that lie so many rows away from it.
    """
    body = (
        START
        + """	setp.ne.u32 %p2, %r1, 0;
	@%p2 bra $initialized;
	mov.b32 %r6, 1;
	mbarrier.init.shared::cta.b64 [%r2+8], %r6;
	fence.mbarrier_init.release.cluster;
$initialized:
	bar.sync 0;
	mov.b64 %rd1, map;
	cvta.param.u64 %rd2, %rd1;
	ld.param.u32 %r10, [x];
	ld.param.u32 %r11, [y];
	setp.ne.u32 %p4, %r3, 0;
	@%p4 bra $issued;
	elect.sync %r8|%p5, -1;
	not.pred %p6, %p5;
	@%p6 bra $issued;
"""
    )
    opcode = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes" + (".cta_group::2" if pair else "")
    corner = ", ".join(["%r10", "%r11", *(f"%r{30 + i}" for i in range(len(rows)))])
    body += "".join(f"\tadd.s32 %r{30 + i}, %r11, {row};\n" for i, row in enumerate(rows))
    if rows:  # PTX writes the CTA's own shared memory here
        opcode = opcode.replace("global.tile", "global.tile::gather4").replace("shared::cluster", "shared::cta")
    body += f"""	mov.b32 %r12, {boxes};
	mbarrier.arrive.expect_tx.shared::cta.b64 %rd3, [%r2+8], %r12;
	{opcode} [%r2+1024], [%rd2, {{{corner}}}], [%r2+8];
$issued:
"""
    body += (
        WAIT
        + f"""	ld.param.u64 %rd8, [d];
	shl.b32 %r20, %r1, 2;
$copy:
	add.u32 %r21, %r2, %r20;
	ld.shared.b32 %r22, [%r21+1024];
	cvt.u64.u32 %rd9, %r20;
	add.u64 %rd9, %rd9, %rd8;
	st.global.b32 [%rd9], %r22;
	add.u32 %r20, %r20, 512;
	setp.lt.u32 %p7, %r20, {boxes};
	@%p7 bra $copy;
"""
    )
    text = kernel("sm_100a", "u64 map, u32 x, u32 y, u64 d", body)
    return text.replace(".param .u64 map", ".param .align 64 .b8 map[128]")


def tensor_store(size: int) -> str:
    """`size` bytes from x to shared memory at 1024, then one box of them to a 2-dimensional tensor at (0, 0)."""
    body = (
        START
        + fill("x", "x", str(size), str(OPERANDS))
        + """	fence.proxy.async.shared::cta;
	bar.sync 0;
	mov.b64 %rd1, map;
	cvta.param.u64 %rd2, %rd1;
	prefetch.tensormap [%rd2];
	setp.ne.u32 %p4, %r3, 0;
	@%p4 bra $issued;
	mov.b32 %r10, 0;
	elect.sync %r8|%p5, -1;
	not.pred %p6, %p5;
	@%p6 bra $issued;
	cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd2, {%r10, %r10}], [%r2+1024];
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group 0;
$issued:
"""
    )
    return kernel("sm_100a", "u64 map, u64 x", body).replace(".param .u64 map", ".param .align 64 .b8 map[128]")


def bulk_store(omit: str = "", times: int = 1, open_groups: int = 0) -> str:
    """Shared memory is filled with 7, stored by bulk copies in `times` pieces, and overwritten with 9 when all but `open_groups` are read.

    `omit` leaves out "wait" or "commit".
    """
    committed = "" if omit == "commit" else "\tcp.async.bulk.commit_group;\n"
    waited = "" if omit == "wait" else f"\tcp.async.bulk.wait_group.read {open_groups};\n"
    body = (
        START
        + f"""	mov.b32 %r10, 7;
	shl.b32 %r11, %r1, 2;
	add.u32 %r11, %r11, %r2;
	st.shared.b32 [%r11], %r10;
	fence.proxy.async.shared::cta;
	bar.sync 0;
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra $stored;
	ld.param.u64 %rd1, [d];
	cvta.to.global.u64 %rd1, %rd1;
	mov.b32 %r12, 0;
$again:
	cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], {512 // times};
	add.u64 %rd1, %rd1, {512 // times};
	add.u32 %r12, %r12, 1;
	setp.lt.u32 %p2, %r12, {times};
	@%p2 bra $again;
{committed}{waited}$stored:
	bar.sync 0;
	mov.b32 %r10, 9;
	st.shared.b32 [%r11], %r10;
	bar.sync 0;
"""
    )
    return kernel("sm_100a", "u64 d", body)


def stmatrix() -> str:
    """Four 16 by 8 matrices of bytes, transposed: lane i gives the address of row i (16 bytes); the shared memory to d."""
    body = (
        START
        + """	ld.param.u64 %rd1, [x];
	mad.wide.u32 %rd1, %r1, 16, %rd1;
	ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd1];
	shl.b32 %r14, %r1, 4;
	add.u32 %r14, %r14, %r2;
	stmatrix.sync.aligned.m16n8.x4.trans.shared.b8 [%r14], {%r10, %r11, %r12, %r13};
	bar.warp.sync -1;
	ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r14];
	ld.param.u64 %rd2, [d];
	mad.wide.u32 %rd2, %r1, 16, %rd2;
	st.global.v4.b32 [%rd2], {%r10, %r11, %r12, %r13};
"""
    )
    return kernel("sm_120a", "u64 x, u64 d", body, ".reqntid 32, 1, 1")


def ldmatrix() -> str:
    """Two 8 by 16 matrices of four-bit elements: rows of 16 bytes, the first 8 of them data, from x; registers to d."""
    body = (
        START
        + """	ld.param.u64 %rd1, [x];
	mad.wide.u32 %rd1, %r1, 16, %rd1;
	ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd1];
	shl.b32 %r14, %r1, 4;
	add.u32 %r14, %r14, %r2;
	st.shared.v4.b32 [%r14], {%r10, %r11, %r12, %r13};
	bar.warp.sync -1;
	ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.b4x16_p64 {%r15, %r16}, [%r14];
	ld.param.u64 %rd2, [d];
	mad.wide.u32 %rd2, %r1, 8, %rd2;
	st.global.v2.b32 [%rd2], {%r15, %r16};
"""
    )
    return kernel("sm_120a", "u64 x, u64 d", body, ".reqntid 32, 1, 1")


def cancel() -> str:
    """Asks for another CTA's work, waits for the answer, and writes whether there was some."""
    body = (
        START
        + """	setp.ne.u32 %p2, %r1, 0;
	@%p2 bra $asked;
	mov.b32 %r6, 1;
	mbarrier.init.shared::cta.b64 [%r2+8], %r6;
	fence.mbarrier_init.release.cluster;
	mov.b32 %r7, 16;
	mbarrier.arrive.expect_tx.shared::cta.b64 %rd3, [%r2+8], %r7;
	clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r2+16], [%r2+8];
$asked:
	bar.sync 0;
"""
        + WAIT
        + """	ld.shared.b128 %rq1, [%r2+16];
	clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %rq1;
	selp.b32 %r9, 1, 2, %p3;
	ld.param.u64 %rd1, [d];
	mad.wide.u32 %rd1, %r1, 4, %rd1;
	st.global.b32 [%rd1], %r9;
"""
    )
    return kernel("sm_100a", "u64 d", body)


ALL = {
    "stmatrix": stmatrix(),
    "ldmatrix": ldmatrix(),
    "cancel": cancel(),
    **{f"convert {name}": convert(name) for name in CONVERSIONS},
    **{f"st {shape}": ld_st(shape, registers, 8) for shape, registers in (("32x32b", 8), ("16x64b", 4), ("16x128b", 4), ("16x256b", 4))},
    **{
        f"ld {shape}": load_shape(shape, registers, 8)
        for shape, registers in (("32x32b", 8), ("16x64b", 4), ("16x128b", 4), ("16x256b", 4))
    },
    "gather4": tensor_load(512, rows=(7, -2, 30)),
    "st 16x32bx2": ld_st("16x32bx2", 2, 8),
    "st 16x32bx2 unpack": ld_st("16x32bx2", 2, 16, unpack=True),
    "st 16x256b unpack": ld_st("16x256b", 4, 16, unpack=True),
    "ld 16x32bx2": load_shape("16x32bx2", 2, 8),
    "ld 32x32b pack": load_shape("32x32b", 4, 16, pack=True),
    "ld 16x32bx2 pack": load_shape("16x32bx2", 2, 16, pack=True),
    "cp 32x128b": cp("32x128b.warpx4", 32, 4),
    "cp 128x128b": cp("128x128b", 128, 4),
    "cp 128x256b": cp("128x256b", 128, 8),
    "cp 64x128b 02_13": cp("64x128b.warpx2::02_13", 64, 4),
    "cp 64x128b 01_23": cp("64x128b.warpx2::01_23", 64, 4),
    **{f"mma {kind}": mma(kind, 64, 2) for kind in ("f16", "tf32", "f8f6f4", "i8")},
    "mma pair": mma("f16", 64, 2, group=2),
    "mma by one thread": mma("f16", 64, 1, elected=False),
    "mma mxf8f6f4": mma("mxf8f6f4", 64, 1, block=".block32"),
    "mma mxf4": mma("mxf4", 64, 1, block=".block32"),
    "mma mxf4nvf4": mma("mxf4nvf4", 64, 1, block=".block16"),
    "mma.sync mxf8f6f4": mma_sync("mxf8f6f4", "m16n8k32", 1, "e4m3", "e2m1", "ue8m0"),
    "mma.sync mxf4": mma_sync("mxf4", "m16n8k64", 2, "e2m1", "e2m1", "ue8m0"),
    "mma.sync mxf4nvf4": mma_sync("mxf4nvf4", "m16n8k64", 4, "e2m1", "e2m1", "ue4m3"),
    "wide access": wide_access(),
    "tensor load": tensor_load(8192),
    "tensor load pair": tensor_load(8192, pair=True),
    "tensor store": tensor_store(8192),
    "bulk store": bulk_store(),
}
