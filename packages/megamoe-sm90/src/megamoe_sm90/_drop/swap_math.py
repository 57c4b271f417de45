"""Math of the swap order: 64 weight rows x token_tile a warpgroup and step, and the stream-K sums of tiles that span CTAs.

A result fragment: value 4 j + 2 r + c of a thread is weight row 16 * (warp % 4) + lane / 4 + 8 r of the warpgroup's 64, token 8 j + 2 (lane % 4) + c.
The loop is bound by the weight stream (about 850 cycles for 128 rows x 128 bytes of K), a step takes a third of that, so every step
drains before it promotes: simple, and nothing is in flight over a loop's back edge.
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

    def mma(self, accumulate: bool):
        """Two constant atoms instead of one that is switched inside the loop."""
        major = cute.nvgpu.OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(self.dtype, self.dtype, major, major, Float32, (1, 1, 1), (64, self.cfg.token_tile))
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    def issue(self, out, w_stage, t_stage):
        """One K block (4 wgmma) into `out`, as one commit group. Scaled formats start at zero, bf16 accumulates."""
        cx = self.cx
        warpgroup.fence()
        for kk in range(4):
            first = kk == 0 and self.cfg.elem == 1
            cute.gemm(cx.mma0 if first else cx.mma1, out, cx.t_a[None, None, kk, w_stage], cx.t_b[None, None, kk, t_stage], out)
        warpgroup.commit_group()

    def promote(self, acc, temp, scale, xs):
        """acc += temp * weight scale * token scale; without block scales a plain sum, which keeps the long sum out of the tensor core."""
        for v in range(self.cfg.token_tile // 2):
            if self.cfg.scaled:
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
        kt = cfg.k1 if fc == 0 else cfg.k2
        halves = 2 if fc == 0 else 1
        shape = cx.mma0.get_slice(0).partition_shape_C((64, cfg.token_tile))
        accs = [cute.make_rmem_tensor(shape, Float32) for _ in range(halves)]
        pair = halves == 2 and cfg.token_tile <= 64  # gate and up in flight together where two temporaries fit
        if cutlass.const_expr(cfg.elem == 2):
            temps = accs
        else:
            temps = [cute.make_rmem_tensor(shape, Float32) for _ in range(2 if pair else 1)]
        units = cx.units1 if fc == 0 else cx.units2
        unit = self.span(units, cx.cta)
        last = self.span(units, cx.cta + 1)
        while unit < last:
            tile = unit // kt
            k0 = unit - tile * kt
            n = cutlass.min(kt - k0, last - unit)
            for acc in accs:
                acc.fill(0.0)
            for _ in cutlass.range(n, unroll=1):
                cute.arch.mbarrier_wait(cx.t_full + t_stage, t_phase)
                xs = []
                if cutlass.const_expr(cfg.scaled):
                    for j in cutlass.range_constexpr(cfg.token_tile // 8):
                        for c in cutlass.range_constexpr(2):
                            xs.append(cx.s_ts[8 * j + 2 * (cx.lane % 4) + c, 0, t_stage])
                for half in cutlass.range_constexpr(halves):
                    cute.arch.mbarrier_wait(cx.w_full + w_stage, w_phase)
                    scale = Float32(1.0)
                    if cutlass.const_expr(cfg.scaled):
                        scale = cx.s_ws[w_stage]
                    temp = temps[half % len(temps)]
                    self.issue(temp, w_stage, t_stage)
                    if cutlass.const_expr(pair and half == 0):
                        held, held_scale = w_stage, scale
                    else:
                        if cutlass.const_expr(pair):
                            warpgroup.wait_group(1)
                            self.release(cx.w_empty + held)
                            if cutlass.const_expr(cfg.elem == 1):
                                self.promote(accs[0], temps[0], held_scale, xs)
                        warpgroup.wait_group(0)
                        self.release(cx.w_empty + w_stage)
                        if cutlass.const_expr(half == halves - 1):
                            self.release(cx.t_empty + t_stage)
                        if cutlass.const_expr(cfg.elem == 1):
                            self.promote(accs[half], temp, scale, xs)
                    w_stage = w_stage + 1
                    if w_stage == cfg.stages:
                        w_stage = Int32(0)
                        w_phase = w_phase ^ 1
                t_stage = t_stage + 1
                if t_stage == cfg.token_stages:
                    t_stage = Int32(0)
                    t_phase = t_phase ^ 1
            if k0 != 0:
                self.send_partial(fc, accs)
            else:
                if n < kt:
                    self.collect_partials(fc, accs, units, last, (tile + 1) * kt)
                block, part = self.split_tile(fc, tile)
                if cutlass.const_expr(fc == 0):
                    self.finish_fc1(accs, block, part)
                else:
                    self.finish_fc2(accs[0], block, part)
            unit = unit + n
        return w_stage, w_phase, t_stage, t_phase

    def partial_address(self, fc, cta):
        """This thread's first four values in a CTA's buffer; the next four are 4096 bytes on."""
        cfg, cx = self.cfg, self.cx
        return cx.partial + Int64(cta) * cfg.partial_bytes + fc * (2 * 128 * cfg.token_tile * 4) + Int64(cx.tidx) * 16

    def partial_tag(self, fc, cta):
        return self.cx.control + (self.cfg.tags + 4 * self.cfg.blocks * self.cfg.tiles1) + Int64(cta) * 8 + fc * 4

    @cute.jit
    def send_partial(self, fc: cutlass.Constexpr, accs):
        """A share that starts inside a tile: its sums go to the CTA that has the tile's first K block. At most one a CTA and phase."""
        at = self.partial_address(fc, self.cx.cta)
        per = self.cfg.token_tile // 2
        for i in cutlass.range_constexpr(len(accs) * per // 4):
            v = [accs[4 * i // per][4 * i % per + x] for x in range(4)]
            cute.arch.inline_ptx("st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[at + i * 4096, *v])
        self.publish(self.partial_tag(fc, self.cx.cta))

    @cute.jit
    def collect_partials(self, fc: cutlass.Constexpr, accs, units: Int32, last: Int32, end: Int32):
        """The tile goes on in the next CTAs: add their sums in ascending K, whatever order they arrive in."""
        cx = self.cx
        per = self.cfg.token_tile // 2
        cta = cx.cta + 1
        start = last
        while start < end:
            stop = self.span(units, cta + 1)
            if stop > start:
                if cx.lane == 0:
                    deadline.wait_ge(self.partial_tag(fc, cta), cx.tag, cx.control, layout.SITE_PARTIAL, cta, cx.deadline)
                cute.arch.sync_warp()
                self.add_partial(fc, cta, accs)
            start = stop
            cta = cta + 1

    def add_partial(self, fc, cta, accs):
        at = self.partial_address(fc, cta)
        per = self.cfg.token_tile // 2
        for i in range(len(accs) * per // 4):
            acc, first = accs[4 * i // per], 4 * i % per
            v = cute.arch.inline_ptx("ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                                     write_only_types=[Float32] * 4, read_only_args=[at + i * 4096])
            for x in range(4):
                acc[first + x] = acc[first + x] + v[x]

    @cute.jit
    def publish(self, tag: Int64):
        """All math threads have written; readers that acquire the tag see it."""
        self.math_barrier()
        if self.cx.tidx == 0:
            memory.st_release(tag, self.cx.tag)
