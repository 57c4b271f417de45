"""The warps that feed the stages: the scheduler, the weight loader (TMA) and the row loaders (cp.async gathers)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import deadline, memory, regions, routing, stream

from .config import MATH_WARPS, ROW_BYTES, SLOTS, TILE_N

ROW_WARPS = 2
WORDS = 8  # words of a task before its routes


class Loaders:
    """Mixin: `self.c` is the NativeConfig."""

    @property
    def slot_words(self):
        return WORDS + self.c.tile_m

    def _advance(self, index, phase, size):
        """Next (index, phase) of a ring, without a branch."""
        wrap = Int32(index == size - 1)
        return (index + 1) * (1 - wrap), phase ^ wrap

    @cute.jit
    def schedule(self, control, bank, ring, tfull, tempty, counts, base, bidx, grid, lane):
        """Claims tasks in stream order and hands them to the other warps, one task ahead of what they need."""
        c = self.c
        words = cute.make_tensor(ring, cute.make_layout(SLOTS * self.slot_words))
        count = cute.make_tensor(counts, cute.make_layout(c.experts))
        offsets = cute.make_tensor(base, cute.make_layout(c.experts + 1))
        blocks = offsets[c.experts]
        slot = Int32(0)
        phase = Int32(1)
        task = bidx
        kind = Int32(0)
        while kind != stream.END:
            kind, block, tile = stream.decode(task, blocks, c.group, c.n1, c.n2)
            if deadline.aborted(control) != 0:
                kind = Int32(stream.END)
            cute.arch.mbarrier_wait(tempty + slot, phase)
            at = slot * self.slot_words
            if kind != stream.END:
                e = routing.expert_of(block, base, c.experts, lane)
                valid = cutlass.min(count[e] - (block - offsets[e]) * c.tile_m, c.tile_m)
                if lane == 0:
                    words[at + 1] = e
                    words[at + 2] = tile
                    words[at + 3] = block * c.tile_m
                    words[at + 4] = valid
                    words[at + 5] = block
            if lane == 0:
                words[at] = kind
                cute.arch.mbarrier_arrive(tfull + slot)
                task = grid + memory.add_relaxed(bank + regions.CLAIMS, Int32(1))
            cute.arch.sync_warp()
            task = cute.arch.shuffle_sync(task, 0)
            slot, phase = self._advance(slot, phase, SLOTS)

    @cute.jit
    def load_weights(self, t13, g13, t2, g2, sBh, full, empty, ring, tfull, tempty, lane):
        """Weight panels by TMA, two boxes of 128 rows a stage; waits for nothing but free stages."""
        c = self.c
        words = cute.make_tensor(ring, cute.make_layout(SLOTS * self.slot_words))
        one = cute.make_layout(1)
        tile = (128, c.block_k)
        s13, g13 = cute.nvgpu.cpasync.tma_partition(
            t13, 0, one, cute.group_modes(sBh, 0, 2), cute.group_modes(cute.local_tile(g13, tile, (None, None, None)), 0, 2)
        )
        s2, g2 = cute.nvgpu.cpasync.tma_partition(
            t2, 0, one, cute.group_modes(sBh, 0, 2), cute.group_modes(cute.local_tile(g2, tile, (None, None, None)), 0, 2)
        )
        slot = Int32(0)
        tphase = Int32(0)
        stage = Int32(0)
        phase = Int32(1)
        kind = Int32(0)
        while kind != stream.END:
            cute.arch.mbarrier_wait(tfull + slot, tphase)
            at = slot * self.slot_words
            kind = cute.arch.make_warp_uniform(words[at])
            e = cute.arch.make_warp_uniform(words[at + 1])
            n = cute.arch.make_warp_uniform(words[at + 2])
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(tempty + slot)
            slot, tphase = self._advance(slot, tphase, SLOTS)
            if kind == stream.FC1:
                for kb in cutlass.range(c.kb1, unroll=1):
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_N * ROW_BYTES)
                    cute.copy(t13, g13[None, n, kb, 2 * e], s13[None, 2 * stage], tma_bar_ptr=full + stage)
                    cute.copy(t13, g13[None, n, kb, 2 * e + 1], s13[None, 2 * stage + 1], tma_bar_ptr=full + stage)
                    stage, phase = self._advance(stage, phase, c.num_stages)
            if kind == stream.FC2:
                for kb in cutlass.range(c.kb2, unroll=1):
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_N * ROW_BYTES)
                    cute.copy(t2, g2[None, 2 * n, kb, e], s2[None, 2 * stage], tma_bar_ptr=full + stage)
                    cute.copy(t2, g2[None, 2 * n + 1, kb, e], s2[None, 2 * stage + 1], tma_bar_ptr=full + stage)
                    stage, phase = self._advance(stage, phase, c.num_stages)

    @cute.jit
    def load_rows(
        self, x, xs, mid, mid_scale, w13_scale, w2_scale, row_route, control, bank, list_ready, routes, epoch, grid, wait_ms,
        a_addr, s_addr, rows, full, empty, ring, tfull, tempty, which, lane,
    ):
        """Rows `which * half` onward of every tile, gathered by token (FC1) or taken from mid (FC2) with 16-byte asynchronous copies.

        The copies are ordinary (generic proxy) writes of shared memory that wgmma then reads: each stage is announced by this warp only after
        its copies have landed and a proxy fence, `lag` stages behind the ones being issued.
        """
        c = self.c
        lag = 2
        half = c.tile_m // ROW_WARPS
        words = cute.make_tensor(ring, cute.make_layout(SLOTS * self.slot_words))
        index = cute.make_tensor(rows, cute.make_layout(c.tile_m))
        first = which * half
        q, chunk = lane // 8, lane % 8
        even = (first + q) * ROW_BYTES + (chunk ^ q) * 16
        odd = (first + q + 4) * ROW_BYTES + (chunk ^ (q + 4)) * 16
        slot = Int32(0)
        tphase = Int32(0)
        stage = Int32(0)
        phase = Int32(1)
        done = Int32(0)     # next stage to announce
        kind = Int32(0)
        while kind != stream.END:
            cute.arch.mbarrier_wait(tfull + slot, tphase)
            at = slot * self.slot_words
            kind = words[at]
            e = words[at + 1]
            n = words[at + 2]
            pool = words[at + 3]
            mine = cutlass.max(cutlass.min(words[at + 4] - first, half), 0)
            if kind != stream.END:
                src = Int64(0)
                sc = Int64(0)
                panel = Int64(0)
                stride = Int32(0)
                blocks = Int32(0)
                if kind == stream.FC1:
                    deadline.wait_ge(list_ready + Int64(e) * 4, epoch + 1, control, regions.SITE_LISTS, e, wait_ms)
                    if cutlass.const_expr(c.quantize):
                        deadline.wait_ge(bank + regions.QUANTIZED, grid, control, regions.SITE_QUANTIZED, Int32(0), wait_ms)
                    src = x
                    sc = xs
                    stride = Int32(c.hidden * c.element)
                    blocks = Int32(c.kb1)
                    if cutlass.const_expr(c.block_scales):
                        panel = w13_scale + Int64((e * 2 + cutlass.min(lane, 1)) * c.n1 + n) * (c.kb1 * 4)
                else:
                    block = words[at + 5]
                    deadline.wait_ge(
                        bank + regions.FC1_DONE + Int64(block) * 4, Int32(c.n1 * MATH_WARPS), control, regions.SITE_MID, block, wait_ms
                    )
                    src = mid
                    sc = mid_scale
                    stride = Int32(c.intermediate * c.element)
                    blocks = Int32(c.kb2)
                    if cutlass.const_expr(c.block_scales):
                        last = c.hidden // 128
                        panel = w2_scale + Int64(e * last + cutlass.min(2 * n + cutlass.min(lane, 1), last - 1)) * (c.kb2 * 4)
                for i in cutlass.range_constexpr(half // 32):
                    r = lane + 32 * i
                    inside = Int32(r < mine)
                    position = pool + (first + r) * inside
                    route = memory.ld_i32(row_route + Int64(position) * 4)
                    # An aborted launch may see a list that was never written: stay inside x.
                    route = cutlass.max(cutlass.min(route, routes - 1), 0)
                    words[at + WORDS + first + r] = route * inside - (1 - inside)
                    if kind == stream.FC1:
                        position = route // c.top_k
                    index[first + r] = position
                cute.arch.sync_warp()
                src = src + chunk * 16
                pairs = (mine + 7) // 8
                for kb in cutlass.range(blocks, unroll=1):
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    a_stage = a_addr + stage * (c.tile_m * ROW_BYTES)
                    for i in cutlass.range(pairs, unroll=1):
                        r0 = index[first + 8 * i + q]
                        r1 = index[first + 8 * i + q + 4]
                        memory.copy_16(a_stage + even + i * (8 * ROW_BYTES), src + Int64(r0) * stride)
                        memory.copy_16(a_stage + odd + i * (8 * ROW_BYTES), src + Int64(r1) * stride)
                    if cutlass.const_expr(c.block_scales):
                        s_stage = s_addr + stage * (c.scale_words * 4)
                        for i in cutlass.range_constexpr(half // 32):
                            if lane + 32 * i < mine:
                                r0 = index[first + lane + 32 * i]
                                memory.copy_4(s_stage + (first + lane + 32 * i) * 4, sc + Int64(r0) * (blocks * 4))
                        if which == 0 and lane < 2:
                            memory.copy_4(s_stage + (c.tile_m + lane) * 4, panel)
                        sc = sc + 4
                        panel = panel + 4
                    cute.arch.cp_async_commit_group()
                    src = src + ROW_BYTES
                    stage, phase = self._advance(stage, phase, c.num_stages)
                    if kb >= lag:
                        cute.arch.cp_async_wait_group(lag)
                        self.announce(full + done, lane)
                        done, unused = self._advance(done, Int32(0), c.num_stages)
                cute.arch.cp_async_wait_group(0)
                for i in cutlass.range(cutlass.min(blocks, lag), unroll=1):
                    self.announce(full + done, lane)
                    done, unused = self._advance(done, Int32(0), c.num_stages)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(tempty + slot)
            slot, tphase = self._advance(slot, tphase, SLOTS)

    @cute.jit
    def announce(self, barrier, lane):
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)
