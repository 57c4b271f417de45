"""Routing of a few thousand routes, done by every CTA for itself in shared memory: no grid-wide step before the first weight load."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from megamoe.device import memory
from megamoe_sm90._drop.swap_config import STICKY

STICKY_BAD_ID = 1


class SwapRouting:
    """Mixin of SwapKernel. Shared arrays: route (id * 65536 + rank, later pool row or -1), count and base per expert, blocks."""

    @cute.jit
    def load_ids(self, tidx: Int32, routes: Int32):
        """All threads: topk_ids into shared memory; an id outside [0, experts) becomes -1, and one other than -1 sets the sticky word."""
        cx = self.cx
        route = cx.route
        r = tidx
        while r < routes:
            expert = Int32(-1)
            if cutlass.const_expr(self.cfg.ids64):
                wide = memory.ld_i64(cx.ids + cutlass.Int64(r) * 8)
                if wide >= 0 and wide < self.cfg.experts:
                    expert = Int32(wide)
                if wide < -1 or wide >= self.cfg.experts:
                    memory.red_or(cx.control + STICKY, Int32(STICKY_BAD_ID))
            else:
                expert = memory.ld_i32(cx.ids + cutlass.Int64(r) * 4)
                if expert < -1 or expert >= self.cfg.experts:
                    memory.red_or(cx.control + STICKY, Int32(STICKY_BAD_ID))
                    expert = Int32(-1)
            route[r] = expert
            r = r + 384

    @cute.jit
    def count_and_place(self, lane: Int32, routes: Int32):
        """One warp: rank of every route inside its expert in route order, first pool row of every expert, list of blocks.

        The order is the same in every CTA, which is what makes redundant routing legal.
        """
        cx, cfg = self.cx, self.cfg
        route, counts, bases = cx.route, cx.count, cx.base
        block_info, block_row, misc = cx.block_info, cx.block_row, cx.misc
        e = lane
        while e < cfg.experts:
            counts[e] = Int32(0)
            e = e + 32
        cute.arch.sync_warp()
        r = lane
        while r - lane < routes:
            expert = Int32(-1)
            if r < routes:
                expert = route[r]
            peers = cute.arch.match_sync(-1, expert)
            rank = Int32(cute.arch.popc(peers & cute.arch.lanemask_lt()))
            if expert >= 0:
                before = counts[expert]
                route[r] = expert * 65536 + before + rank
            cute.arch.sync_warp()
            if expert >= 0 and rank == 0:
                counts[expert] = counts[expert] + Int32(cute.arch.popc(peers))
            cute.arch.sync_warp()
            r = r + 32
        # Rows (padded to 8) in the low half, blocks in the high half of one word: one scan for both.
        row = Int32(0)
        block = Int32(0)
        e = lane
        while e - lane < cfg.experts:
            count = Int32(0)
            if e < cfg.experts:
                count = counts[e]
            tiles = (count + (cfg.token_tile - 1)) // cfg.token_tile
            word = tiles * 65536 + ((count + 7) // 8) * 8
            total = word
            for step in cutlass.range_constexpr(5):
                below = cute.arch.shuffle_sync_up(total, 1 << step, mask_and_clamp=0)
                if lane >= (1 << step):
                    total = total + below
            ahead = total - word
            my_row = row + (ahead & 65535)
            my_block = block + ahead // 65536
            if e < cfg.experts:
                bases[e] = my_row
            i = Int32(0)
            while i < tiles:
                block_info[my_block + i] = e * 65536 + cutlass.min(count - i * cfg.token_tile, cfg.token_tile)
                block_row[my_block + i] = my_row + i * cfg.token_tile
                i = i + 1
            last = cute.arch.shuffle_sync(total, 31)
            row = row + (last & 65535)
            block = block + last // 65536
            e = e + 32
        if lane == 0:
            misc[0] = block

    @cute.jit
    def resolve_rows(self, tidx: Int32, routes: Int32):
        """The math threads: expert and rank -> pool row; with early weights also the weight of every row."""
        cx = self.cx
        route, base, row_weight = cx.route, cx.base, cx.row_weight
        r = tidx
        while r < routes:
            word = route[r]
            if word >= 0:
                row = base[word // 65536] + (word & 65535)
                route[r] = row
                if cutlass.const_expr(self.cfg.early):
                    row_weight[row] = memory.ld_f32(cx.topk_w + cutlass.Int64(r) * 4)
            r = r + 256
