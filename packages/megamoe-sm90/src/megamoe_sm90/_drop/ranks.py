"""The native-order kernel on several ranks: the front publishes x and route lists, rows are pulled from peers, FC2 rows go home.

Everything between, the tile stream and the matrix work, is the one-rank kernel's. Its launch arguments are too, but `xq` is the table of
the ranks' heaps, `xs` the placement table, and `stage` is not used. See megamoe.device.{exchange,pull,collect,peers,wire}.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from megamoe.device import collect, deadline, exchange, memory, peers, pull, regions, routing, stream, wire

from .layer_config import MATH_WARPS, THREADS
from .native import BAR_MATH, MATH_THREADS, NativeMoE

BAR_COUNTED = 3


class RanksMoE(NativeMoE):
    """`self.c` is a RanksConfig."""

    def enter(self):
        """What a launch on several ranks knows beside the one-rank kernel's values."""
        c, w = self.c, self.w
        w.table, w.place = w.xq, w.xs
        w.launch = w.epoch + 1
        w.rank = memory.ld_i32(w.control + wire.RANK)
        w.heap = peers.base_of(w.table, w.rank)
        w.fc2_done = w.bank + wire.fc2_done_offset(w.bank_bytes)
        w.carriers = w.list_ready + regions.round_up(4 * c.experts, regions.ALIGN)
        w.arrived = w.carriers + 8 * c.ranks * c.max_tokens

    def count(self):
        self.enter()
        self.count_own()

    @cute.jit
    def count_own(self):
        """Every CTA counts the routes that this rank sends to every physical expert, and where each list starts."""
        c, w = self.c, self.w
        sent = cute.make_tensor(w.sent, cute.make_layout(c.slots))
        i = w.tidx
        while i < c.slots:
            sent[i] = Int32(0)
            i = i + THREADS
        cute.arch.sync_threads()
        exchange.count_sent(w.ids, w.routes, c.top_k, c.total, w.place, c.copies, w.sent, w.control, w.tidx, THREADS)
        cute.arch.sync_threads()
        if w.warp == 0:
            routing.block_prefix(w.sent, w.first, c.slots, 1, w.lane)
        cute.arch.sync_threads()

    def await_counts(self):
        """The producer warps wait until the math warps know how many rows this rank has received."""
        cute.arch.barrier(barrier_id=BAR_COUNTED, number_of_threads=THREADS)

    @cute.jit
    def front(self):
        """The math warps: stage activations and lists, publish the counts when the last CTA is through, then receive everyone's."""
        c, w = self.c, self.w
        thread, threads = w.bidx * MATH_THREADS + w.tidx, w.grid * MATH_THREADS
        to, scales = w.heap + c.offset("x"), w.heap + c.offset("xs")
        if cutlass.const_expr(c.quantize):
            self.quantize_to(to, scales)
        else:
            collect.copy_lines(w.x, to, w.tokens * (c.row_bytes // 16), thread, threads)
            if cutlass.const_expr(c.block_scales):
                collect.copy_words(w.x_scale, scales, w.tokens * c.kb1, thread, threads)
        if cutlass.const_expr(c.early or c.grouped):
            collect.copy_words(w.topk_w, w.heap + c.offset("weights"), w.routes, thread, threads)
        exchange.list_sent(
            w.ids,
            w.routes,
            c.top_k,
            c.total,
            w.place,
            c.copies,
            c.experts,
            c.slots,
            w.sent,
            w.first,
            w.cursor,
            w.heap + c.offset("lists"),
            c.groups,
            w.bidx,
            w.grid,
            w.tidx,
            MATH_THREADS,
            BAR_MATH,
        )
        cute.arch.barrier(barrier_id=BAR_MATH, number_of_threads=MATH_THREADS)
        last = cute.make_tensor(w.cursor, cute.make_layout(1))
        if w.tidx == 0:
            last[0] = Int32(memory.add_acq_rel(w.bank + regions.QUANTIZED, Int32(1)) == w.grid - 1)
        cute.arch.barrier(barrier_id=BAR_MATH, number_of_threads=MATH_THREADS)
        if last[0] != 0:
            peers.delay(c.delays)
            exchange.publish(w.table, c.offset("counts"), w.launch, w.rank, c.ranks, c.experts, w.sent, w.first, w.tidx, MATH_THREADS)
            if w.tidx == 0:
                memory.red_release(w.control + wire.EXCHANGES, Int32(1))
        peers.delay(c.delays)
        exchange.receive(w.heap, c.offset("counts"), w.launch, c.ranks, c.experts, w.counts, w.control, w.wait_ms, w.tidx, MATH_THREADS)
        cute.arch.barrier(barrier_id=BAR_MATH, number_of_threads=MATH_THREADS)
        if w.warp == 0:
            routing.block_prefix(w.counts, w.base, c.experts, c.tile_m, w.lane)
        self.await_counts()
        exchange.list_received(
            w.table,
            w.heap,
            c.offset("counts"),
            c.offset("lists"),
            c.groups,
            c.row_groups,
            c.route_rows,
            c.staged,
            not c.mxfp8,
            w.launch,
            c.ranks,
            c.experts,
            c.most,
            c.tile_m,
            w.base,
            w.row_route,
            w.list_ready,
            w.bidx,
            w.grid,
            w.tidx,
            MATH_THREADS,
            BAR_MATH,
        )

    def move_rows(self, pool, pool_scale, ready, buffer, barrier):
        c, w = self.c, self.w
        pull.pull_rows(
            w.table,
            w.heap,
            c.offset("x"),
            c.offset("xs"),
            pool,
            pool_scale,
            w.row_route,
            w.list_ready,
            ready,
            w.fc2_done,
            w.carriers,
            w.control,
            w.counts,
            w.base,
            buffer,
            barrier,
            c.move_slots,
            c.row_bytes,
            c.kb1 if c.block_scales else 0,
            c.ranks,
            c.experts,
            c.top_k,
            c.max_tokens,
            c.tile_m,
            c.n2,
            c.span,
            c.ahead,
            c.delays,
            w.pool_rows,
            w.launch,
            w.bidx,
            w.grid,
            w.wait_ms,
            w.lane,
        )

    def place_of(self, block):
        c = self.c
        return (block % c.span if c.span else block) * c.tile_m

    def first_route(self, pool, block):
        return block * self.c.tile_m if self.c.span else pool

    @cute.jit
    def returned(self, words, at, used, lane):
        """The scheduler, for every task that has come back: rows whose FC2 is complete are announced to their source ranks."""
        c, w = self.c, self.w
        if used:
            if words[at] == stream.FC2:
                collect.announce(
                    w.table,
                    c.offset("flags"),
                    w.row_route,
                    w.fc2_done + Int64(words[at + 5]) * 4,
                    c.n2,
                    words[at + 5] * c.tile_m,
                    words[at + 4],
                    w.launch,
                    c.ranks,
                    c.most,
                    c.tile_m,
                    c.delays,
                    w.control,
                    lane,
                )

    def at_source(self, region, route, size):
        """Address of a route's entry in a region of its source rank."""
        c = self.c
        heap = peers.base_of(self.w.table, peers.source_of(route, c.ranks))
        return heap + c.offset(region) + Int64(peers.route_of(route, c.most)) * size

    def result_row(self, stage, route):
        return self.at_source("inbox", route, self.c.hidden * 2)

    def weight_of(self, topk_w, route):
        return self.at_source("weights", route, 4)

    @cute.jit
    def finish(self):
        """The math warps after the tasks: sum this rank's tokens as their results arrive; a launch that gave up tells its peers."""
        c, w = self.c, self.w
        peers.delay(c.delays)
        self.collect()
        cute.arch.barrier(barrier_id=BAR_MATH, number_of_threads=MATH_THREADS)
        if deadline.aborted(w.control) != 0:
            peers.tell_abort(w.table, w.rank, c.ranks, w.tidx, MATH_THREADS)

    @cute.jit
    def collect(self):
        c, w = self.c, self.w
        collect.await_rows(
            w.heap,
            c.offset("flags"),
            w.ids,
            w.tokens,
            c.top_k,
            c.total,
            w.place,
            c.copies,
            c.experts,
            c.hidden,
            w.launch,
            w.control,
            w.wait_ms,
            w.bidx * MATH_WARPS + w.warp,
            w.grid * MATH_WARPS,
            w.lane,
        )
        self.sum_rows(w.heap + c.offset("inbox"), c.total)
