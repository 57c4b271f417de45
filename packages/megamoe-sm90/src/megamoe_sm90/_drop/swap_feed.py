"""The two load warps: weights, which wait for nothing but free stages, and tokens, which wait for what the launch computes."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from megamoe.device import deadline, memory
from megamoe_sm90._drop import swap_config as layout

# Cache hints of the TMA unit: weights pass through L2 once, tokens are read by every CTA.
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000


class SwapFeed:
    """Mixin of SwapKernel."""

    @cute.jit
    def span(self, units: Int32, cta: Int32):
        """Stream-K: first unit of a CTA's contiguous share of `units` (one unit is one K block of one tile)."""
        return (units * cta) // self.cx.grid

    @cute.jit
    def feed_weights(self, lane: Int32):
        cx, cfg = self.cx, self.cfg
        stage = Int32(0)
        phase = Int32(1)  # a fresh barrier counts as passed for parity 1
        # Stages requested so far, and the oldest that may not have landed yet.
        issued, landed, landed_phase = Int32(0), Int32(0), Int32(0)
        for fc in cutlass.range_constexpr(2):
            kt = cfg.kb1 if fc == 0 else cfg.kb2
            tma = cx.tma_w13 if fc == 0 else cx.tma_w2
            units = cx.units1 if fc == 0 else cx.units2
            unit = self.span(units, cx.cta)
            last = self.span(units, cx.cta + 1)
            while unit < last:
                tile = unit // kt
                k0 = unit - tile * kt
                n = cutlass.min(kt - k0, last - unit)
                parts, words, to = self.weight_boxes(fc, tile)
                for i in cutlass.range(n, unroll=1):
                    k = k0 + i
                    for half in cutlass.range_constexpr(2):
                        if issued >= cfg.window:
                            cute.arch.mbarrier_wait(cx.w_full + landed, landed_phase)
                            landed = landed + 1
                            if landed == cfg.stages:
                                landed = Int32(0)
                                landed_phase = landed_phase ^ 1
                        issued = issued + 1
                        cute.arch.mbarrier_wait(cx.w_empty + stage, phase)
                        bar = cx.w_full + stage
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(bar, layout.STAGE_BYTES)
                            if cutlass.const_expr(cfg.block_scales):
                                memory.copy_4(memory.shared_address(cx.s_ws.iterator + stage), words[half] + Int64(k) * 4)
                                cute.arch.cp_async_mbarrier_arrive_noinc(bar)
                        cute.copy(tma, parts[half][None, k], to[None, stage], tma_bar_ptr=bar, cache_policy=Int64(EVICT_FIRST))
                        stage = stage + 1
                        if stage == cfg.stages:
                            stage = Int32(0)
                            phase = phase ^ 1
                unit = unit + n

    def weight_boxes(self, fc, tile):
        """A tile's two boxes of 128 rows (gate and up of the same channels, or 256 neighbouring output columns), each by K block, and
        the addresses of their lines of scales."""
        cx, cfg = self.cx, self.cfg
        kt = cfg.kb1 if fc == 0 else cfg.kb2
        tma, source = (cx.tma_w13, cx.g_w13) if fc == 0 else (cx.tma_w2, cx.g_w2)
        expert, part = self.weight_tile(fc, tile)
        rows = 2 * cfg.intermediate if fc == 0 else cfg.hidden
        parts, words = [], []
        for half in range(2):
            first = expert * rows + (part * 128 + half * cfg.intermediate if fc == 0 else part * 256 + half * 128)
            box = cute.local_tile(cute.domain_offset((first, 0), source), (128, cfg.block_k), (0, None))
            to, of = cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(cx.s_w, 0, 2), cute.group_modes(box, 0, 2))
            parts.append(of)
            if cfg.block_scales:
                line = part + half * cfg.n1 if fc == 0 else cutlass.min(2 * part + half, rows // 128 - 1)  # an odd last half repeats
                words.append((cx.w13_scale if fc == 0 else cx.w2_scale) + (Int64(expert) * (rows // 128) + line) * (kt * 4))
        return parts, words, to

    @cute.jit
    def weight_tile(self, fc: cutlass.Constexpr, tile: Int32):
        """Tile number -> (expert, part): FC1 goes block by block, FC2 by output columns, so that columns complete one after the other."""
        cx = self.cx
        block, part = self.split_tile(fc, tile)
        return cx.block_info[block] // 65536, part

    @cute.jit
    def split_tile(self, fc: cutlass.Constexpr, tile: Int32):
        """Tile number -> (block, part)."""
        block = Int32(0)
        part = Int32(0)
        if cutlass.const_expr(fc == 0):
            block = tile // self.cfg.n1
            part = tile - block * self.cfg.n1
        else:
            part = tile // self.cx.blocks
            block = tile - part * self.cx.blocks
        return block, part

    @cute.jit
    def feed_tokens(self, lane: Int32):
        cx, cfg = self.cx, self.cfg
        stage = Int32(0)
        phase = Int32(1)
        deadline.wait_ge(cx.bank, cx.pieces, cx.control, layout.SITE_ACTIVATIONS, Int32(0), cx.deadline)
        cute.arch.fence_proxy("async.global")
        for fc in cutlass.range_constexpr(2):
            kt = cfg.kb1 if fc == 0 else cfg.kb2
            tma, source = (cx.tma_x, cx.g_x) if fc == 0 else (cx.tma_m, cx.g_m)
            tma_s, scales = (cx.tma_xs, cx.g_xs) if fc == 0 else (cx.tma_ms, cx.g_ms)
            units = cx.units1 if fc == 0 else cx.units2
            unit = self.span(units, cx.cta)
            last = self.span(units, cx.cta + 1)
            while unit < last:
                tile = unit // kt
                k0 = unit - tile * kt
                n = cutlass.min(kt - k0, last - unit)
                block, _ = self.split_tile(fc, tile)
                row = cx.block_row[block]
                boxes = ((cx.block_info[block] & 65535) + (cfg.box_rows - 1)) // cfg.box_rows
                if cutlass.const_expr(fc == 1):
                    self.wait_mid(block, k0, n, lane)
                box = cute.local_tile(cute.domain_offset((row, 0), source), (cfg.box_rows, cfg.block_k), (None, None))
                small = cute.local_tile(cx.s_t, (cfg.box_rows, cfg.block_k), (None, 0, None))
                to, of = cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(small, 0, 2), cute.group_modes(box, 0, 2))
                size = boxes * (cfg.box_rows * 128)
                if cutlass.const_expr(cfg.block_scales):
                    size = size + cfg.token_tile * 4
                    box_s = cute.local_tile(cute.domain_offset((row, 0), scales), (cfg.token_tile, 1), (0, None))
                    to_s, of_s = cpasync.tma_partition(
                        tma_s, 0, cute.make_layout(1), cute.group_modes(cx.s_ts, 0, 2), cute.group_modes(box_s, 0, 2)
                    )
                for i in cutlass.range(n, unroll=1):
                    cute.arch.mbarrier_wait(cx.t_empty + stage, phase)
                    if cutlass.const_expr(cfg.block_scales):
                        cute.arch.fence_proxy("async.shared", space="cta")  # threads have read the scales that TMA replaces
                    bar = cx.t_full + stage
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(bar, size)
                    if cutlass.const_expr(cfg.block_scales):
                        cute.copy(tma_s, of_s[None, k0 + i], to_s[None, stage], tma_bar_ptr=bar, cache_policy=Int64(EVICT_LAST))
                    for b in cutlass.range(boxes, unroll=1):
                        cute.copy(tma, of[None, b, k0 + i], to[None, b, stage], tma_bar_ptr=bar, cache_policy=Int64(EVICT_LAST))
                    stage = stage + 1
                    if stage == cfg.token_stages:
                        stage = Int32(0)
                        phase = phase ^ 1
                unit = unit + n

    @cute.jit
    def wait_mid(self, block: Int32, k0: Int32, n: Int32, lane: Int32):
        """K block k of FC2 reads what FC1 tile k * block_k / 128 of the same block wrote: one tag per FC1 tile, polled by one lane each."""
        cx, cfg = self.cx, self.cfg
        per = 128 // cfg.block_k
        part = k0 // per + lane
        end = (k0 + n - 1) // per
        while part <= end:
            index = block * cfg.n1 + part
            deadline.wait_tag(cx.control + (cfg.tags + Int64(index) * 4), cx.tag, cx.control, layout.SITE_MID, index, cx.deadline)
            part = part + 32
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async.global")
