"""Routing of a few thousand routes, done by every CTA for itself in shared memory: no grid-wide step before the first weight load.

A bitmap says which routes each expert has: setting bits commutes, so every CTA gets the same ranks (route order) whatever order its
threads run in. The bitmap lies in the weight ring, which is not in use yet.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import deadline, memory
from megamoe_sm90._drop.layer_config import THREADS

BATCH = 4  # ids in flight per thread


class SwapRouting:
    """Mixin of SwapKernel. Shared arrays: route (id * 65536 + rank, later pool row or -1), base per expert, blocks."""

    @cute.jit
    def load_ids(self, routes: Int32):
        """topk_ids into shared memory; an id outside [0, experts) becomes -1, and one other than -1 is reported (by one CTA)."""
        cx, cfg = self.cx, self.cfg
        route = cx.route
        first = cx.tidx
        while first < routes:
            loaded = []
            for j in cutlass.range_constexpr(BATCH):
                r = cutlass.min(first + j * THREADS, routes - 1)
                loaded.append(memory.ld_i32(cx.ids + Int64(r) * 4))
            for j in cutlass.range_constexpr(BATCH):
                r = first + j * THREADS
                if r < routes:
                    expert = loaded[j]
                    inside = expert >= 0 and expert < cfg.experts
                    route[r] = Int32(cutlass.select_(inside, Int32(expert), Int32(-1)))
                    if expert < -1 or expert >= cfg.experts:
                        deadline.bad_id(cx.control)
            first = first + BATCH * THREADS

    @cute.jit
    def build_routing(self, routes: Int32):
        """All threads: rank of every route inside its expert, first pool row of every expert, list of blocks. Blocks go to misc[0]."""
        cx, cfg = self.cx, self.cfg
        tidx, e_all, per = cx.tidx, cfg.experts, -(-cfg.experts // THREADS)
        route, bits, ranks, base, sums, misc = cx.route, cx.bits, cx.ranks, cx.base, cx.sums, cx.misc
        block_info, block_row = cx.block_info, cx.block_row
        words = (routes + 31) // 32
        i = tidx
        while i < words * e_all:
            bits[i] = Int32(0)
            i = i + THREADS
        self.load_ids(routes)
        cute.arch.sync_threads()
        r = tidx
        while r < routes:
            expert = route[r]
            if expert >= 0:
                self.set_bit(bits.iterator + (r // 32) * e_all + expert, Int32(1) << (r % 32))
            r = r + THREADS
        cute.arch.sync_threads()
        # Rows (padded to 8) in the low half, blocks in the high half of one word: one scan for both.
        word = Int32(0)
        counts = []
        for j in cutlass.range_constexpr(per):
            e = tidx * per + j
            count = Int32(0)
            if e < e_all:
                for w in cutlass.range(words, unroll=4):
                    ranks[w * e_all + e] = count
                    count = count + Int32(cute.arch.popc(bits[w * e_all + e]))
            counts.append(count)
            word = word + ((count + (cfg.token_tile - 1)) // cfg.token_tile) * 65536 + ((count + 7) // 8) * 8
        total = word
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(total, 1 << step, mask_and_clamp=0)
            if cx.lane >= (1 << step):
                total = total + below
        if cx.lane == 31:
            sums[tidx // 32] = total
        cute.arch.sync_threads()
        ahead = total - word
        every = Int32(0)
        for w in cutlass.range_constexpr(THREADS // 32):
            part = sums[w]
            if w < tidx // 32:
                ahead = ahead + part
            every = every + part
        for j in cutlass.range_constexpr(per):
            e = tidx * per + j
            if e < e_all:
                row = ahead & 65535
                base[e] = row
                left = counts[j]
                block = ahead // 65536
                while left > 0:
                    block_info[block] = e * 65536 + cutlass.min(left, cfg.token_tile)
                    block_row[block] = row
                    row = row + cfg.token_tile
                    left = left - cfg.token_tile
                    block = block + 1
                ahead = block * 65536 + (ahead & 65535) + ((counts[j] + 7) // 8) * 8
        if tidx == 0:
            misc[0] = every // 65536
        r = tidx
        while r < routes:
            expert = route[r]
            if expert >= 0:
                at = (r // 32) * e_all + expert
                below = (Int32(1) << (r % 32)) - 1
                route[r] = expert * 65536 + ranks[at] + Int32(cute.arch.popc(bits[at] & below))
            r = r + THREADS
        # The bitmap's bytes are the TMA unit's from here on.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()

    def set_bit(self, pointer, bit):
        cute.arch.inline_ptx("red.shared.or.b32 [{$r0}], {$r1};", read_only_args=[memory.shared_address(pointer), bit])

    @cute.jit
    def resolve_rows(self, routes: Int32):
        """The math threads: expert and rank -> pool row; with early weights also the weight of every row."""
        cx = self.cx
        route, base, row_weight = cx.route, cx.base, cx.row_weight
        r = cx.tidx
        while r < routes:
            word = route[r]
            if word >= 0:
                row = base[word // 65536] + (word & 65535)
                route[r] = row
                if cutlass.const_expr(self.cfg.early):
                    row_weight[row] = memory.ld_f32(cx.topk_w + Int64(r) * 4)
            r = r + 256
