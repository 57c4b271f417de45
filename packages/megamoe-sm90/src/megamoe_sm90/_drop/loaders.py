"""The warps that feed the stages: the scheduler, the weight loader (TMA) and the row loaders (cp.async gathers)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import deadline, memory, regions, routing, stream

from .layer_config import ROW_BYTES, TILE_N

ROW_WARPS = 2
WORDS = 8  # words of a task before its routes
EVICT_FIRST = 0x12F0000000000000  # L2 policy descriptor


class Loaders:
    """Mixin: `self.c` is the NativeConfig."""

    @property
    def slot_words(self):
        """Words of a task: a multiple of 4, see `ring` of the kernel's storage."""
        return WORDS + self.c.tile_m

    @property
    def partial_k(self):
        """Whether rows of x or mid end in the middle of a 128-byte line."""
        return (self.c.hidden * self.c.element) % ROW_BYTES != 0 or (self.c.intermediate * self.c.element) % ROW_BYTES != 0

    def _advance(self, index, phase, size):
        """Next (index, phase) of a ring, without a branch."""
        wrap = Int32(index == size - 1)
        return (index + 1) * (1 - wrap), phase ^ wrap

    @cute.jit
    def schedule(self, control, bank, ring, tfull, tempty, counts, base, bidx, grid, lane):
        """Claims tasks in stream order and hands them to the other warps, as many as there are slots.

        A slot that comes back means that all math warps have finished its task: this warp then publishes it, so that no math warp waits
        for a fence.
        """
        c = self.c
        words = cute.make_tensor(ring, cute.make_layout(c.task_slots * self.slot_words))
        count = cute.make_tensor(counts, cute.make_layout(c.experts))
        offsets = cute.make_tensor(base, cute.make_layout(c.experts + 1))
        blocks = offsets[c.experts]
        slot = Int32(0)
        phase = Int32(1)
        task = bidx
        kind = Int32(0)
        used = Int32(0)
        while kind != stream.END:
            if cutlass.const_expr(c.claims == "late"):
                self.take_back(bank, words, tempty, slot, phase, used >= c.task_slots, lane)
                task = self.claim(task, bank, grid, used > 0, lane)
            kind, block, tile = stream.decode(task, blocks, c.group, c.n1, c.n2)
            if deadline.aborted(control) != 0:
                kind = Int32(stream.END)
            if cutlass.const_expr(c.claims == "early"):
                self.take_back(bank, words, tempty, slot, phase, used >= c.task_slots, lane)
            at = slot * self.slot_words
            if kind != stream.END:
                self.describe(words, at, block, tile, count, offsets, base, lane)
            if lane == 0:
                words[at] = kind
                cute.arch.mbarrier_arrive(tfull + slot)
            if cutlass.const_expr(c.claims == "early"):
                task = self.claim(task, bank, grid, True, lane)
            used = used + 1
            slot, phase = self._advance(slot, phase, c.task_slots)
        # The end task stays in its slot; the others still come back.
        for _ in cutlass.range_constexpr(c.task_slots - 1):
            self.take_back(bank, words, tempty, slot, phase, used >= c.task_slots, lane)
            used = used + 1
            slot, phase = self._advance(slot, phase, c.task_slots)

    @cute.jit
    def claim(self, task, bank, grid, wanted, lane):
        """The next task of the stream, if `wanted`; else `task`. The first of every CTA is its own number."""
        if wanted:
            if lane == 0:
                task = grid + memory.add_relaxed(bank + regions.CLAIMS, Int32(1))
            cute.arch.sync_warp()
            task = cute.arch.shuffle_sync(task, 0)
        return task

    @cute.jit
    def describe(self, words, at, block, tile, count, offsets, base, lane):
        """Write what other warps need to know of a task."""
        c = self.c
        e = routing.expert_of(block, base, c.experts, lane)
        valid = cutlass.min(count[e] - (block - offsets[e]) * c.tile_m, c.tile_m)
        if lane == 0:
            words[at + 1] = e
            words[at + 2] = tile
            words[at + 3] = self.place_of(block)
            words[at + 4] = valid
            words[at + 5] = block

    @cute.jit
    def take_back(self, bank, words, tempty, slot, phase, used, lane):
        """Wait until a slot is free and publish the FC1 task that it held."""
        cute.arch.mbarrier_wait(tempty + slot, phase)
        at = slot * self.slot_words
        if used and lane == 0:
            if words[at] == stream.FC1:
                memory.red_release(bank + regions.FC1_DONE + Int64(words[at + 5]) * 4, Int32(1))
        self.returned(words, at, used, lane)
        cute.arch.sync_warp()

    def place_of(self, block):
        """First row of a block in the pool and in mid."""
        return block * self.c.tile_m

    def first_route(self, pool, block):
        """First row of a block in the list of routes, beside its first row in the pool."""
        return pool

    def row_word(self, row_route, row, kind):
        """What the epilogue of a tile of this kind has to know of a row: its route."""
        return memory.ld_i32(row_route + Int64(row) * 4)

    def returned(self, words, at, used, lane):
        """An FC2 task that has come back needs no word here: the end of all tiles is waited for."""

    @cute.jit
    def load_weights(self, t13, g13, t2, g2, sBh, full, empty, ring, tfull, tempty, lane):
        """Weight panels by TMA, two boxes of 128 rows a stage; waits for nothing but free stages."""
        c = self.c
        words = cute.make_tensor(ring, cute.make_layout(c.task_slots * self.slot_words))
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
            cute.arch.mbarrier_arrive(tempty + slot)
            slot, tphase = self._advance(slot, tphase, c.task_slots)
            if kind == stream.FC1:
                for kb in cutlass.range(c.kb1, unroll=1):
                    self.arm_weights(full, empty, stage, phase)
                    self.copy_weights(t13, g13[None, n, kb, 2 * e], s13[None, 2 * stage], full + stage)
                    self.copy_weights(t13, g13[None, n, kb, 2 * e + 1], s13[None, 2 * stage + 1], full + stage)
                    stage, phase = self._advance(stage, phase, c.num_stages)
            if kind == stream.FC2:
                for kb in cutlass.range(c.kb2, unroll=1):
                    self.arm_weights(full, empty, stage, phase)
                    self.copy_weights(t2, g2[None, 2 * n, kb, e], s2[None, 2 * stage], full + stage)
                    self.copy_weights(t2, g2[None, 2 * n + 1, kb, e], s2[None, 2 * stage + 1], full + stage)
                    stage, phase = self._advance(stage, phase, c.num_stages)

    @cute.jit
    def arm_weights(self, full, empty, stage, phase):
        cute.arch.mbarrier_wait(empty + stage, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_N * ROW_BYTES)

    def copy_weights(self, tma, source, target, barrier):
        hint = {"cache_policy": Int64(EVICT_FIRST)} if self.c.stream_weights else {}
        cute.copy(tma, source, target, tma_bar_ptr=barrier, **hint)

    @cute.jit
    def load_rows(
        self,
        x,
        xs,
        mid,
        mid_scale,
        w13_scale,
        w2_scale,
        row_route,
        control,
        bank,
        list_ready,
        routes,
        pool_rows,
        epoch,
        grid,
        wait_ms,
        a_addr,
        s_addr,
        rows,
        full,
        empty,
        ring,
        tfull,
        tempty,
        which,
        lane,
    ):
        """Rows `which * half` onward of every tile, gathered by token (FC1) or taken from mid (FC2) with 16-byte asynchronous copies.

        A lane copies 16-byte chunk lane % 8 of rows lane / 8 + 4 j. Where a row starts, in units of 16 bytes, waits in shared memory, so
        ordered that a lane reads four rows at once. The copies announce themselves: every lane's arrival follows its own copies.
        """
        c = self.c
        half = c.tile_m // ROW_WARPS
        words = cute.make_tensor(ring, cute.make_layout(c.task_slots * self.slot_words))
        index = cute.make_tensor(rows, cute.make_layout(c.tile_m))
        first = which * half
        q, chunk = lane // 8, lane % 8
        even = a_addr + (first + q) * ROW_BYTES + (chunk ^ q) * 16
        odd = a_addr + (first + q + 4) * ROW_BYTES + (chunk ^ (q + 4)) * 16
        starts = memory.shared_address(rows) + (first + q * (half // 4)) * 4
        slot = Int32(0)
        tphase = Int32(0)
        stage = Int32(0)
        phase = Int32(1)
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
                    deadline.wait_tag(list_ready + Int64(e) * 4, epoch + 1, control, regions.SITE_LISTS, e, wait_ms)
                    if cutlass.const_expr(c.quantize):
                        deadline.wait_ge(bank + regions.QUANTIZED, grid, control, regions.SITE_QUANTIZED, Int32(0), wait_ms)
                    src = x
                    sc = xs
                    stride = Int32(c.hidden * c.element // 16)
                    blocks = Int32(c.kb1)
                    if cutlass.const_expr(c.block_scales):
                        panel = w13_scale + Int64((e * 2 + cutlass.min(lane, 1)) * c.n1 + n) * (c.kb1 * 4)
                else:
                    block = words[at + 5]
                    deadline.wait_ge(bank + regions.FC1_DONE + Int64(block) * 4, Int32(c.n1), control, regions.SITE_MID, block, wait_ms)
                    src = mid
                    sc = mid_scale
                    stride = Int32(c.intermediate * c.element // 16)
                    blocks = Int32(c.kb2)
                    if cutlass.const_expr(c.block_scales):
                        last = c.hidden // 128
                        panel = w2_scale + Int64(e * last + cutlass.min(2 * n + cutlass.min(lane, 1), last - 1)) * (c.kb2 * 4)
                # x has its scales by row, mid by K block: what a row and a K block are worth in words.
                scale_at = [Int32(0) for _ in range(half // 32)]
                by_row, by_block = Int32(1), pool_rows
                if kind == stream.FC1:
                    by_row, by_block = Int32(c.kb1), Int32(1)
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
                    index[first + (r % 4) * (half // 4) + r // 4] = position * stride
                    scale_at[i] = position * by_row
                cute.arch.sync_warp()
                src = src + chunk * 16
                # A row may end in the middle of its last K block: zeros follow, as TMA gives them for the weights.
                left = stride - chunk
                for _ in cutlass.range(blocks, unroll=1):
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    size = 16
                    if cutlass.const_expr(self.partial_k):
                        size = 16 * Int32(left > 0)
                        left = left - ROW_BYTES // 16
                    at_even, at_odd = even + stage * (c.tile_m * ROW_BYTES), odd + stage * (c.tile_m * ROW_BYTES)
                    for m in cutlass.range_constexpr(half // 16):
                        # Sixteen rows: the last group may copy rows that are not in use, from the block's first row.
                        if 16 * m < mine:
                            at4 = memory.shared_v4(starts + 16 * m)
                            memory.copy_16(at_even + 16 * m * ROW_BYTES, src + memory.unsigned(at4[0]) * 16, size)
                            memory.copy_16(at_odd + 16 * m * ROW_BYTES, src + memory.unsigned(at4[1]) * 16, size)
                            memory.copy_16(at_even + (16 * m + 8) * ROW_BYTES, src + memory.unsigned(at4[2]) * 16, size)
                            memory.copy_16(at_odd + (16 * m + 8) * ROW_BYTES, src + memory.unsigned(at4[3]) * 16, size)
                    if cutlass.const_expr(c.block_scales):
                        s_stage = s_addr + stage * (c.scale_words * 4) + (first + lane) * 4
                        for i in cutlass.range_constexpr(half // 32):
                            if lane + 32 * i < mine:
                                memory.copy_4(s_stage + 128 * i, sc + memory.unsigned(scale_at[i]) * 4)
                        if which == 0 and lane < 2:
                            memory.copy_4(s_stage + c.tile_m * 4, panel)
                        sc = sc + Int64(by_block) * 4
                        panel = panel + 4
                    cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                    src = src + ROW_BYTES
                    stage, phase = self._advance(stage, phase, c.num_stages)
            cute.arch.sync_warp()  # `rows` has been read
            cute.arch.mbarrier_arrive(tempty + slot)
            slot, tphase = self._advance(slot, tphase, c.task_slots)

    @cute.jit
    def load_tiles(
        self,
        tx,
        gx,
        tm,
        gm,
        sAr,
        pool_scale,
        mid_scale,
        w13_scale,
        w2_scale,
        row_route,
        control,
        bank,
        ready,
        pool_rows,
        wait_ms,
        s_addr,
        full,
        empty,
        ring,
        tfull,
        tempty,
        lane,
    ):
        """Row tiles by TMA: FC1 from the pool once its rows have arrived, FC2 from mid once FC1 of the block is complete."""
        c = self.c
        words = cute.make_tensor(ring, cute.make_layout(c.task_slots * self.slot_words))
        one = cute.make_layout(1)
        tile = (64, c.block_k)
        sx, gx = cute.nvgpu.cpasync.tma_partition(
            tx, 0, one, cute.group_modes(sAr, 0, 2), cute.group_modes(cute.local_tile(gx, tile, (None, None)), 0, 2)
        )
        sm, gm = cute.nvgpu.cpasync.tma_partition(
            tm, 0, one, cute.group_modes(sAr, 0, 2), cute.group_modes(cute.local_tile(gm, tile, (None, None)), 0, 2)
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
            e = words[at + 1]
            n = words[at + 2]
            pool = cute.arch.make_warp_uniform(words[at + 3])
            valid = cute.arch.make_warp_uniform(words[at + 4])
            block = cute.arch.make_warp_uniform(words[at + 5])
            if kind < stream.END:
                if kind == stream.FC1:
                    deadline.wait_ge(ready + Int64(block) * 4, valid, control, regions.SITE_ROWS, block, wait_ms)
                else:
                    deadline.wait_ge(bank + regions.FC1_DONE + Int64(block) * 4, Int32(c.n1), control, regions.SITE_MID, block, wait_ms)
                memory.proxy_fence()
                if cutlass.const_expr(c.early) or kind == stream.FC2:
                    for i in cutlass.range_constexpr(c.tile_m // 32):
                        r = lane + 32 * i
                        words[at + WORDS + r] = self.row_word(row_route, self.first_route(pool, block) + cutlass.min(r, valid - 1), kind)
                cute.arch.sync_warp()
                if kind == stream.FC1:
                    panel = Int64(0)
                    if cutlass.const_expr(c.block_scales):
                        panel = w13_scale + Int64((e * 2 + cutlass.min(lane, 1)) * c.n1 + n) * (c.kb1 * 4)
                    stage, phase = self.load_loop(
                        tx,
                        gx,
                        sx,
                        c.kb1,
                        pool // 64,
                        valid,
                        pool_scale + Int64(pool) * 4,
                        panel,
                        pool_rows,
                        s_addr,
                        full,
                        empty,
                        stage,
                        phase,
                        lane,
                    )
                else:
                    panel = Int64(0)
                    if cutlass.const_expr(c.block_scales):
                        last = c.hidden // 128
                        panel = w2_scale + Int64(e * last + cutlass.min(2 * n + cutlass.min(lane, 1), last - 1)) * (c.kb2 * 4)
                    stage, phase = self.load_loop(
                        tm,
                        gm,
                        sm,
                        c.kb2,
                        pool // 64,
                        valid,
                        mid_scale + Int64(pool) * 4,
                        panel,
                        pool_rows,
                        s_addr,
                        full,
                        empty,
                        stage,
                        phase,
                        lane,
                    )
            cute.arch.mbarrier_arrive(tempty + slot)
            slot, tphase = self._advance(slot, tphase, c.task_slots)

    @cute.jit
    def load_loop(self, tma, g, s, blocks: cutlass.Constexpr, box, valid, scale, panel, pool_rows, s_addr, full, empty, stage, phase, lane):
        """The K blocks of one row tile, 64 rows a box; with block scales also the row scales (contiguous) and the two panel scales.

        Scales come by cp.async, rows by TMA: threads read the scales themselves, and a later TMA over what they have read would need a
        proxy fence behind their reads.
        """
        c = self.c
        boxes = c.tile_m // 64
        used = Int32(1)
        if cutlass.const_expr(boxes == 2):
            used = used + Int32(valid > 64)
        for kb in cutlass.range(blocks, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, used * (64 * ROW_BYTES))
            if cutlass.const_expr(c.block_scales):
                to = s_addr + stage * (c.scale_words * 4)
                if lane < c.tile_m // 4:
                    memory.copy_16(to + lane * 16, scale + Int64(lane) * 16)
                if lane < 2:
                    memory.copy_4(to + (c.tile_m + lane) * 4, panel)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
            cute.arch.sync_warp()
            cute.copy(tma, g[None, box, kb], s[None, stage * boxes], tma_bar_ptr=full + stage)
            if cutlass.const_expr(boxes == 2):
                if used == 2:
                    cute.copy(tma, g[None, box + 1, kb], s[None, stage * boxes + 1], tma_bar_ptr=full + stage)
            scale = scale + Int64(pool_rows) * 4
            panel = panel + 4
            stage, phase = self._advance(stage, phase, c.num_stages)
        return stage, phase
