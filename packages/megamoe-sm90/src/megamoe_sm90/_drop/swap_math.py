"""Math of the swap order: 2 x 64 weight rows x a block of tokens a warpgroup and step, and the stream-K sums of tiles that span CTAs.

A tile is 256 weight rows in two halves of 128: FC1 gate and up of 128 channels, FC2 256 output columns. A warpgroup has 64 rows of each
half. A result fragment: value 4 j + 2 r + c of a thread is row 16 * (warp % 4) + lane / 4 + 8 r of the warpgroup's 64 and token
8 j + 2 (lane % 4) + c.

The loop is bound by the weight stream (about 850 cycles for 128 rows x 128 bytes of K), a step takes a part of that, so every K block
drains before the next one: simple, and nothing is in flight over a loop's back edge.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from megamoe.device import deadline, memory
from megamoe_sm90._drop import swap_config as layout

MATH_BARRIER = 1


class SwapMath:
    """Mixin of SwapKernel."""

    def bind_mma(self):
        """Per width: the MMA that starts at zero, the one that accumulates (two constant atoms instead of one that is switched in the
        loop), and the operand descriptors. Called at the top of the kernel."""
        cx, bk = self.cx, self.cfg.block_k
        major = cute.nvgpu.OperandMajorMode.K
        for n in self.cfg.widths:
            atoms = []
            for accumulate in (False, True):
                mma = sm90.make_trivial_tiled_mma(self.dtype, self.dtype, major, major, Float32, (1, 1, 1), (64, n))
                mma.set(warpgroup.Field.ACCUMULATE, accumulate)
                atoms.append(mma)
            thr = atoms[0].get_slice(0)
            a = atoms[0].make_fragment_A(thr.partition_A(cute.local_tile(cx.s_w, (64, bk), (cx.wg, 0, None))))
            b = atoms[0].make_fragment_B(thr.partition_B(cute.local_tile(cx.s_t, (n, bk), (0, 0, None))))
            cx.mma[n] = (*atoms, a, b, thr.partition_shape_C((64, n)))

    def issue(self, n, out, w_stage, t_stage):
        """One K block (4 wgmma) into `out`, as one commit group. FP8 starts at zero, bf16 accumulates."""
        mma0, mma1, a, b, _ = self.cx.mma[n]
        warpgroup.fence()
        for kk in range(4):
            cute.gemm(mma0 if kk == 0 and self.cfg.element == 1 else mma1, out, a[None, None, kk, w_stage], b[None, None, kk, t_stage], out)
        warpgroup.commit_group()

    def promote(self, acc, temp, scale, xs):
        """acc += temp * weight scale * token scale; without block scales a plain sum, which keeps the long sum out of the tensor core."""
        if not self.cfg.promotes:
            return
        for v in range(cute.size(acc)):
            if self.cfg.block_scales:
                acc[v] = cute.math.fma(temp[v], scale * xs[(v // 4) * 2 + v % 2], acc[v])
            else:
                acc[v] = acc[v] + temp[v]

    def math_barrier(self):
        cute.arch.barrier(barrier_id=MATH_BARRIER, number_of_threads=256)

    @cute.jit
    def release(self, barrier: cute.Pointer):
        if self.cx.lane == 0:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def run_phase(self, fc: cutlass.Constexpr, w_stage: Int32, w_phase: Int32, t_stage: Int32, t_phase: Int32):
        """All tiles of FC1 (fc 0) or FC2 (fc 1) in this CTA's share."""
        cx, cfg = self.cx, self.cfg
        kt = cfg.kb1 if fc == 0 else cfg.kb2
        units = cx.units1 if fc == 0 else cx.units2
        unit = self.span(units, cx.cta)
        last = self.span(units, cx.cta + 1)
        # The first pass has no K blocks and stores nothing: it brings the code of the epilogue into the instruction cache while math has
        # nothing to do yet, instead of when all other CTAs wait for this one's result.
        rehearsal = Int32(1)
        while unit < last:
            tile = unit // kt
            k0 = unit - tile * kt
            blocks = cutlass.min(kt - k0, last - unit)
            end = (tile + 1) * kt
            block, part = self.split_tile(fc, tile)
            count = cx.block_info[block] & 65535
            stored = count
            if rehearsal != 0:
                k0, blocks, end, stored = Int32(0), Int32(0), Int32(0), Int32(0)
                rehearsal = Int32(0)
            below = 0
            for n in cfg.widths:
                if count > below and count <= n:
                    w_stage, w_phase, t_stage, t_phase = self.run_tile(
                        fc, n, block, part, stored, k0, blocks, units, last, end, w_stage, w_phase, t_stage, t_phase
                    )
                below = n
            unit = unit + blocks
        return w_stage, w_phase, t_stage, t_phase

    @cute.jit
    def run_tile(
        self,
        fc: cutlass.Constexpr,
        n: cutlass.Constexpr,
        block: Int32,
        part: Int32,
        count: Int32,
        k0: Int32,
        blocks: Int32,
        units: Int32,
        last: Int32,
        end: Int32,
        w_stage: Int32,
        w_phase: Int32,
        t_stage: Int32,
        t_phase: Int32,
    ):
        """K blocks k0 .. k0 + blocks of a tile with `count` <= `n` tokens, whose units end at `end`; then its partial sum or epilogue."""
        cx, cfg = self.cx, self.cfg
        shape = cx.mma[n][4]
        accs = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        pair = n <= 64  # both halves in flight together where two temporaries fit
        if cutlass.const_expr(not cfg.promotes):
            temps = accs
        else:
            temps = [cute.make_rmem_tensor(shape, Float32) for _ in range(2 if pair else 1)]
        for acc in accs:
            acc.fill(0.0)
        for _ in cutlass.range(blocks, unroll=1):
            cute.arch.mbarrier_wait(cx.t_full + t_stage, t_phase)
            xs = []
            if cutlass.const_expr(cfg.block_scales):
                for j in cutlass.range_constexpr(n // 8):
                    for c in cutlass.range_constexpr(2):
                        xs.append(cx.s_ts[8 * j + 2 * (cx.lane % 4) + c, 0, t_stage])
            stages, scales = [], []
            for half in cutlass.range_constexpr(2):
                stages.append(w_stage)
                cute.arch.mbarrier_wait(cx.w_full + w_stage, w_phase)
                scales.append(cx.s_ws[w_stage] if cutlass.const_expr(cfg.block_scales) else None)
                self.issue(n, temps[half % len(temps)], w_stage, t_stage)
                w_stage = w_stage + 1
                if w_stage == cfg.stages:
                    w_stage = Int32(0)
                    w_phase = w_phase ^ 1
                if cutlass.const_expr(not pair):
                    warpgroup.wait_group(0)
                    self.release(cx.w_empty + stages[half])
                    if cutlass.const_expr(half == 1):
                        self.release(cx.t_empty + t_stage)
                    self.promote(accs[half], temps[half % len(temps)], scales[half], xs)
            if cutlass.const_expr(pair):
                for half in cutlass.range_constexpr(2):
                    warpgroup.wait_group(1 - half)
                    self.release(cx.w_empty + stages[half])
                    if cutlass.const_expr(half == 1):
                        self.release(cx.t_empty + t_stage)
                    self.promote(accs[half], temps[half], scales[half], xs)
            t_stage = t_stage + 1
            if t_stage == cfg.token_stages:
                t_stage = Int32(0)
                t_phase = t_phase ^ 1
        if k0 != 0:
            self.send_partial(fc, n, accs)
        else:
            if last < end:
                self.collect_partials(fc, n, accs, units, last, end)
            if cutlass.const_expr(fc == 0):
                self.finish_fc1(n, accs, block, part, count)
            else:
                self.finish_fc2(n, accs, block, part, count)
        return w_stage, w_phase, t_stage, t_phase

    # ------------------------------------------------------------ stream-K
    def partial_address(self, fc, cta):
        """This thread's first four values in a CTA's buffer; the next four are 4096 bytes on."""
        cfg = self.cfg
        return self.cx.partial + Int64(cta) * cfg.partial_bytes + fc * (cfg.partial_bytes // 2) + Int64(self.cx.tidx) * 16

    def partial_tag(self, fc, cta):
        return self.cx.control + (self.cfg.tags + 4 * self.cfg.blocks * self.cfg.n1) + Int64(cta) * 8 + fc * 4

    @cute.jit
    def send_partial(self, fc: cutlass.Constexpr, n: cutlass.Constexpr, accs):
        """A share that starts inside a tile: its sums go to the CTA that has the tile's first K block. At most one a CTA and phase."""
        at = self.partial_address(fc, self.cx.cta)
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(n // 8):
                memory.st_v4(at + (half * (n // 8) + i) * 4096, *[accs[half][4 * i + x] for x in range(4)])
        self.publish(self.partial_tag(fc, self.cx.cta), Int32(1))

    @cute.jit
    def collect_partials(self, fc: cutlass.Constexpr, n: cutlass.Constexpr, accs, units: Int32, last: Int32, end: Int32):
        """The tile goes on in the next CTAs: add their sums in ascending K, whatever order they arrive in."""
        cx = self.cx
        cta = cx.cta + 1
        start = last
        while start < end:
            stop = self.span(units, cta + 1)
            if stop > start:
                if cx.lane == 0:
                    deadline.wait_tag(self.partial_tag(fc, cta), cx.tag, cx.control, layout.SITE_PARTIAL, cta, cx.deadline)
                cute.arch.sync_warp()
                self.add_partial(fc, n, cta, accs)
            start = stop
            cta = cta + 1

    def add_partial(self, fc, n, cta, accs):
        at = self.partial_address(fc, cta)
        values = [
            cute.arch.inline_ptx(
                "ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Float32] * 4, read_only_args=[at + i * 4096]
            )
            for i in range(n // 4)
        ]
        for i, four in enumerate(values):
            acc, first = accs[i // (n // 8)], 4 * (i % (n // 8))
            for x in range(4):
                acc[first + x] = acc[first + x] + four[x]

    @cute.jit
    def publish(self, tag: Int64, count: Int32):
        """All math threads have written (if there is a `count`); readers that acquire the tag see it."""
        self.math_barrier()
        if self.cx.tidx == 0 and count > 0:
            memory.st_release(tag, self.cx.tag)
