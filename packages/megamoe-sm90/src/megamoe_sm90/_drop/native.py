"""The fused MoE layer of one rank in native order: tokens on M, 256 weight rows on N, one persistent launch.

Roles of a CTA (384 threads, one per SM): two math warpgroups and a producer warpgroup with the weight loader, the scheduler and two row
loaders (or one, and the dispatch warp that fills the pool). The math warpgroups first quantize activations and write the row lists of the
CTA's experts; the weight loader streams meanwhile. See loaders.py, mathloop.py, epilogue.py and megamoe.device for the parts.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from megamoe.device import combine, deadline, dispatch, launch, memory, quantize, regions, routing, stream

from .config import NativeConfig
from .epilogue import Epilogue
from .layer_config import MATH_WARPS, THREADS, TILE_N
from .loaders import ROW_WARPS, WORDS, Loaders
from .mathloop import MathLoop
from .tensors import DTYPES, loads, matrix, swizzled, tensor

MATH_THREADS = 32 * MATH_WARPS
BAR_MATH = 1
BAR_AMAX = 2


class NativeMoE(Loaders, MathLoop, Epilogue):
    """One configuration of the kernel. Tokens, addresses, grid and deadline are run-time values."""

    def __init__(self, config: NativeConfig):
        self.c = config
        self.dtype = DTYPES[config.fmt]

    @property
    def row_arrivals(self):
        """Arrivals of the row side on a full barrier: every lane's copies, or the TMA's and every lane's copies of scales."""
        if self.c.rows == "gather":
            return 32 * ROW_WARPS
        return 33 if self.c.block_scales else 1

    @property
    def task_readers(self):
        """Threads that read a task. Each gives it back for itself: no lane has to know what others of its warp have read."""
        return 32 * (1 + (1 if self.c.rows == "pool" else ROW_WARPS) + MATH_WARPS)

    @cute.jit
    def __call__(
        self,
        w13: Int64,
        w2: Int64,
        w13_scale: Int64,
        w2_scale: Int64,
        x: Int64,
        x_scale: Int64,
        ids: Int64,
        topk_w: Int64,
        b13: Int64,
        b2: Int64,
        mid_static: Int64,
        control: Int64,
        xq: Int64,
        xs: Int64,
        row_route: Int64,
        pool: Int64,
        pool_scale: Int64,
        mid: Int64,
        mid_scale: Int64,
        stage: Int64,
        out: Int64,
        tokens: Int32,
        bank_bytes: Int32,
        pool_rows: Int32,
        grid: Int32,
        wait_ms: Int32,
        stream: cuda.CUstream,
    ):
        c = self.c
        e, h, i, bk, stages = c.experts, c.hidden, c.intermediate, c.block_k, c.num_stages
        la = swizzled(self.dtype, c.tile_m, bk, stages)
        lb = swizzled(self.dtype, TILE_N, bk, stages)
        lh = swizzled(self.dtype, TILE_N // 2, bk, 2 * stages)
        # Gate and up rows of an expert are two slices: a partial last panel is cut off by the TMA unit in both.
        t13, g13 = loads(tensor(self.dtype, w13, (i, h, 2 * e), (h, 1, i * h)), lh, (TILE_N // 2, bk))
        t2, g2 = loads(tensor(self.dtype, w2, (h, i, e), (i, 1, h * i)), lh, (TILE_N // 2, bk))
        # Row tiles of the pool and of mid; without a pool the first only stands in.
        lr = swizzled(self.dtype, 64, bk, c.tile_m // 64 * stages)
        tx, gx = loads(matrix(self.dtype, pool if c.rows == "pool" else mid, pool_rows, h), lr, (64, bk))
        tm, gm = loads(matrix(self.dtype, mid, pool_rows, i), lr, (64, bk))

        @cute.struct
        class Storage:
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, c.tile_m * bk * stages], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, TILE_N * bk * stages], 1024]
            s: cute.struct.Align[cute.struct.MemRange[Float32, c.scale_words * stages], 16]
            counts: cute.struct.MemRange[Int32, c.experts]
            base: cute.struct.MemRange[Int32, c.experts + 1]
            # Aligned: the compiler loads the first words of a task at once, and no word of the task before must come along with them.
            ring: cute.struct.Align[cute.struct.MemRange[Int32, c.task_slots * self.slot_words], 16]
            rows: cute.struct.Align[cute.struct.MemRange[Int32, c.tile_m], 16]
            amax: cute.struct.MemRange[Float32, 256]
            cursor: cute.struct.MemRange[Int32, 1]
            moving: cute.struct.Align[cute.struct.MemRange[Int32, max(c.move_slots * c.row_bytes // 4, 4)], 16]
            full: cute.struct.Align[cute.struct.MemRange[Int64, stages], 8]
            empty: cute.struct.MemRange[Int64, stages]
            tfull: cute.struct.MemRange[Int64, c.task_slots]
            tempty: cute.struct.MemRange[Int64, c.task_slots]
            moved: cute.struct.MemRange[Int64, 1]
            sent: cute.struct.MemRange[Int32, c.slots + 1]
            first: cute.struct.MemRange[Int32, c.slots + 1]

        self.storage = Storage
        given = SimpleNamespace(
            t13=t13,
            g13=g13,
            t2=t2,
            g2=g2,
            tx=tx,
            gx=gx,
            tm=tm,
            gm=gm,
            la=la,
            lb=lb,
            lh=lh,
            lr=lr,
            w13_scale=w13_scale,
            w2_scale=w2_scale,
            x=x,
            x_scale=x_scale,
            ids=ids,
            topk_w=topk_w,
            b13=b13,
            b2=b2,
            mid_static=mid_static,
            control=control,
            xq=xq,
            xs=xs,
            row_route=row_route,
            pool=pool,
            pool_scale=pool_scale,
            mid=mid,
            mid_scale=mid_scale,
            stage=stage,
            out=out,
            tokens=tokens,
            bank_bytes=bank_bytes,
            pool_rows=pool_rows,
            wait_ms=wait_ms,
        )
        self.kernel(given).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl)

    @cute.kernel
    def kernel(self, g: SimpleNamespace):
        """`g`: tensor maps, layouts and arguments, as `__call__` gathers them."""
        c = self.c
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // 128)
        lane = tidx % 32

        st = utils.SmemAllocator().allocate(self.storage)
        full, empty, tfull, tempty = st.full.data_ptr(), st.empty.data_ptr(), st.tfull.data_ptr(), st.tempty.data_ptr()
        counts, base, ring = st.counts.data_ptr(), st.base.data_ptr(), st.ring.data_ptr()
        count = st.counts.get_tensor(cute.make_layout(c.experts))
        cursor = st.cursor.get_tensor(cute.make_layout(1))
        sA = st.a.get_tensor(g.la.outer, swizzle=g.la.inner)
        sB = st.b.get_tensor(g.lb.outer, swizzle=g.lb.inner)
        sAr = st.a.get_tensor(g.lr.outer, swizzle=g.lr.inner)
        sBh = st.b.get_tensor(g.lh.outer, swizzle=g.lh.inner)
        moving, moved = st.moving.data_ptr(), st.moved.data_ptr()
        a_ptr, scale_ptr, rows, amax, cursor_ptr = (
            st.a.data_ptr(),
            st.s.data_ptr(),
            st.rows.data_ptr(),
            st.amax.data_ptr(),
            st.cursor.data_ptr(),
        )

        if cutlass.const_expr(not c.pdl):
            epoch, bank, list_ready = self.own_counters(g)
        routes = g.tokens * c.top_k
        i = tidx
        while i < c.experts:
            count[i] = Int32(0)
            i = i + THREADS
        if warp == 0:
            cpasync.prefetch_descriptor(g.t13)
            cpasync.prefetch_descriptor(g.t2)
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(c.num_stages):
                    cute.arch.mbarrier_init(full + s, 1 + self.row_arrivals)
                    cute.arch.mbarrier_init(empty + s, MATH_WARPS)
                for s in cutlass.range_constexpr(c.task_slots):
                    cute.arch.mbarrier_init(tfull + s, 1)
                    cute.arch.mbarrier_init(tempty + s, self.task_readers)
                cute.arch.mbarrier_init(moved, 1)
                cursor[0] = Int32(0)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(c.pdl):
            # Until here only what is this CTA's own. From here on all that came before on the stream is complete, for every thread:
            # weights, activations and ids, and what the launch before this one did to the control block and the workspace. On several
            # ranks it is also why counts of a launch reach no peer before this rank has left the launch before it.
            cute.arch.griddepcontrol_wait()
            epoch, bank, list_ready = self.own_counters(g)
        cute.arch.sync_threads()
        # What depends on where rows come from and go to, for the methods that one rank and several have of their own.
        self.w = SimpleNamespace(
            **vars(g),
            bank=bank,
            epoch=epoch,
            list_ready=list_ready,
            routes=routes,
            counts=counts,
            base=base,
            cursor=cursor_ptr,
            sent=st.sent.data_ptr(),
            first=st.first.data_ptr(),
            bidx=bidx,
            grid=grid,
            warp=warp,
            tidx=tidx,
            lane=lane,
        )
        self.count()

        # setmaxnreg takes effect only where each role is one branch of a single if / else.
        if wg == 2:
            cute.arch.setmaxregister_decrease(c.registers[1])
            self.await_counts()
            if warp == MATH_WARPS:
                self.load_weights(g.t13, g.g13, g.t2, g.g2, sBh, full, empty, ring, tfull, tempty, lane)
            elif warp == MATH_WARPS + 1:
                self.schedule(g.control, bank, ring, tfull, tempty, counts, base, bidx, grid, lane)
            else:
                if cutlass.const_expr(c.rows == "gather"):
                    self.load_rows(
                        *self.rows_of_x(),
                        g.mid,
                        g.mid_scale,
                        g.w13_scale,
                        g.w2_scale,
                        g.row_route,
                        g.control,
                        bank,
                        list_ready,
                        routes,
                        g.pool_rows,
                        epoch,
                        grid,
                        g.wait_ms,
                        memory.shared_address(a_ptr),
                        memory.shared_address(scale_ptr),
                        rows,
                        full,
                        empty,
                        ring,
                        tfull,
                        tempty,
                        warp - (MATH_WARPS + 2),
                        lane,
                    )
                else:
                    ready = bank + regions.ready_offset(g.bank_bytes)
                    if warp == MATH_WARPS + 2:
                        self.load_tiles(
                            g.tx,
                            g.gx,
                            g.tm,
                            g.gm,
                            sAr,
                            g.pool_scale,
                            g.mid_scale,
                            g.w13_scale,
                            g.w2_scale,
                            g.row_route,
                            g.control,
                            bank,
                            ready,
                            g.pool_rows,
                            g.wait_ms,
                            memory.shared_address(scale_ptr),
                            full,
                            empty,
                            ring,
                            tfull,
                            tempty,
                            lane,
                        )
                    else:
                        self.move_rows(g.pool, g.pool_scale, ready, memory.shared_address(moving), moved)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            launch.clear_next_bank(g.control, epoch, g.bank_bytes, bidx * MATH_THREADS + tidx, grid * MATH_THREADS)
            self.front()
            self.math(
                sA,
                sB,
                scale_ptr,
                amax,
                full,
                empty,
                ring,
                tfull,
                tempty,
                wg,
                warp,
                tidx,
            )
            if cutlass.const_expr(c.pdl):
                # When all CTAs of this launch have come here, and so are resident, CTAs of the next one may take the places of those that
                # leave. They keep no rank that shares the GPU from starting: tasks end only after all CTAs of all ranks have counted.
                cute.arch.griddepcontrol_launch_dependents()
            self.finish()
            if tidx == 0:
                launch.leave(g.control, grid)

    def own_counters(self, g):
        """(Number of this launch, its bank of counters, row lists that are ready)."""
        epoch = launch.epoch_of(g.control)
        return epoch, launch.bank_of(g.control, epoch, g.bank_bytes), g.control + regions.BANKS + Int64(g.bank_bytes) * 2

    @cute.jit
    def count(self):
        """Every CTA counts all routes, so that all know where each expert's rows go."""
        c, w = self.c, self.w
        routing.count_routes(w.ids, w.routes, c.experts, w.counts, w.control, w.tidx, THREADS)
        cute.arch.sync_threads()
        if w.warp == 0:
            routing.block_prefix(w.counts, w.base, c.experts, c.tile_m, w.lane)
        cute.arch.sync_threads()

    def await_counts(self):
        """Where the producer warps wait for the counts; here they have them."""

    def rows_of_x(self):
        """Activations and their scales, as FC1 takes them."""
        return (self.w.xq, self.w.xs) if self.c.quantize else (self.w.x, self.w.x_scale)

    @cute.jit
    def move_rows(self, pool, pool_scale, ready, buffer, barrier):
        """The dispatch warp: rows into the pool."""
        c, w = self.c, self.w
        rows, scales = self.rows_of_x()
        if cutlass.const_expr(c.quantize):
            deadline.wait_ge(w.bank + regions.QUANTIZED, w.grid, w.control, regions.SITE_QUANTIZED, Int32(0), w.wait_ms)
            # Other CTAs wrote these rows with ordinary stores; bulk copies read them through the async proxy.
            memory.proxy_fence()
        dispatch.move_rows(
            rows,
            scales,
            pool,
            pool_scale,
            w.row_route,
            w.list_ready,
            ready,
            w.control,
            w.counts,
            w.base,
            buffer,
            barrier,
            c.move_slots,
            c.row_bytes,
            c.kb1 if c.block_scales else 0,
            c.experts,
            c.top_k,
            c.tile_m,
            w.pool_rows,
            w.routes,
            w.epoch,
            w.bidx,
            w.grid,
            w.wait_ms,
            w.lane,
        )

    @cute.jit
    def quantize_to(self, xq, xs):
        c, w = self.c, self.w
        static = Float32(1.0)
        if cutlass.const_expr(not c.block_scales):
            static = memory.ld_f32(w.x_scale)
        quantize.quantize_rows(
            w.x,
            xq,
            xs,
            static,
            w.tokens,
            c.hidden,
            c.block_scales,
            c.e5m2,
            c.rows == "pool",
            w.bidx * MATH_WARPS + w.warp,
            w.grid * MATH_WARPS,
            w.lane,
        )

    @cute.jit
    def front(self):
        """The math warps before the tasks: quantized activations, and the row lists of this CTA's experts."""
        c, w = self.c, self.w
        if cutlass.const_expr(c.quantize):
            self.quantize_to(w.xq, w.xs)
            cute.arch.barrier(barrier_id=BAR_MATH, number_of_threads=MATH_THREADS)
            if w.tidx == 0:
                memory.red_release(w.bank + regions.QUANTIZED, Int32(1))
        routing.build_lists(
            w.ids,
            w.routes,
            c.experts,
            c.tile_m,
            w.counts,
            w.base,
            w.cursor,
            w.row_route,
            w.list_ready,
            w.epoch,
            w.bidx,
            w.grid,
            w.tidx,
            MATH_THREADS,
            BAR_MATH,
        )

    @cute.jit
    def finish(self):
        """The math warps after the tasks: the top-k sum, once all rows are there."""
        c, w = self.c, self.w
        cute.arch.barrier(barrier_id=BAR_MATH, number_of_threads=MATH_THREADS)
        if w.tidx == 0:
            memory.red_release(w.bank + regions.FINISHED, Int32(1))
        if w.warp == 0:
            deadline.wait_ge(w.bank + regions.FINISHED, w.grid, w.control, regions.SITE_END, Int32(0), w.wait_ms)
        cute.arch.barrier(barrier_id=BAR_MATH, number_of_threads=MATH_THREADS)
        self.sum_rows(w.stage, c.experts)

    @cute.jit
    def sum_rows(self, rows, experts: cutlass.Constexpr):
        c, w = self.c, self.w
        combine.sum_rows(
            rows,
            w.ids,
            w.topk_w,
            w.out,
            w.tokens,
            experts,
            c.top_k,
            c.hidden,
            not c.early,
            w.bidx * MATH_WARPS + w.warp,
            w.grid * MATH_WARPS,
            w.lane,
        )

    @cute.jit
    def math(
        self,
        sA,
        sB,
        scales,
        amax_ptr,
        full,
        empty,
        ring,
        tfull,
        tempty,
        wg,
        warp,
        tidx,
    ):
        """The math warpgroups' walk over the tasks."""
        c = self.c
        lane = tidx % 32
        words = cute.make_tensor(ring, cute.make_layout(c.task_slots * self.slot_words))
        exchanged = cute.make_tensor(amax_ptr, cute.make_layout((64, 2, 2)))
        parts = self.operands(sA, sB, scales, wg, warp, lane)
        slot = Int32(0)
        tphase = Int32(0)
        stage = Int32(0)
        phase = Int32(0)
        flip = Int32(0)
        kind = Int32(0)
        while kind != stream.END:
            cute.arch.mbarrier_wait(tfull + slot, tphase)
            at = slot * self.slot_words
            kind = cute.arch.make_warp_uniform(words[at])
            valid = cute.arch.make_warp_uniform(words[at + 4])
            if kind != stream.END:
                self.other_task(kind, words, at, warp, lane)
                if cutlass.const_expr(c.tile_m == 128):
                    if valid > 64 and kind < stream.END:
                        stage, phase, flip = self.run_tile(
                            parts["full"],
                            kind,
                            words,
                            at,
                            full,
                            empty,
                            stage,
                            phase,
                            flip,
                            exchanged,
                            wg,
                            lane,
                        )
                if valid <= 64 and kind < stream.END:
                    stage, phase, flip = self.run_tile(
                        parts["split"],
                        kind,
                        words,
                        at,
                        full,
                        empty,
                        stage,
                        phase,
                        flip,
                        exchanged,
                        wg,
                        lane,
                    )
                cute.arch.mbarrier_arrive(tempty + slot)
            slot, tphase = self._advance(slot, tphase, c.task_slots)

    def other_task(self, kind, words, at, warp, lane):
        """Tasks of the math warps that are no tile; none here."""

    @cute.jit
    def run_tile(
        self,
        part: cutlass.Constexpr,
        kind,
        words,
        at,
        full,
        empty,
        stage,
        phase,
        flip,
        exchanged,
        wg,
        lane,
    ):
        """K loop and epilogue of one tile."""
        c, w = self.c, self.w
        for p in cutlass.range_constexpr(part.pieces):
            part.accs[p].fill(0.0)
        rounds = Int32(c.kb2 // c.k_unroll)
        if kind == stream.FC1:
            rounds = Int32(c.kb1 // c.k_unroll)
        tensors = None
        if cutlass.const_expr(c.promotes and not c.block_scales):
            tensors = self.tensor_scales(kind, words[at + 1])
        for _ in cutlass.range(rounds, unroll=1):
            stage, phase = self.iteration(part, full, empty, stage, phase, lane, tensors)
        routes = cute.make_tensor(words.iterator + (at + WORDS), cute.make_layout(c.tile_m))
        e, n, pool, valid = words[at + 1], words[at + 2], words[at + 3], words[at + 4]
        if kind == stream.FC1:

            def exchange(own):
                return self.exchange_amax(own, exchanged, flip, part.row, wg)

            self.fc1(
                part,
                part.accs,
                e,
                n,
                pool,
                valid,
                routes,
                lane,
                w.b13,
                w.topk_w,
                w.mid_static,
                w.mid,
                w.mid_scale,
                w.pool_rows,
                exchange,
            )
            if cutlass.const_expr(part.split):  # a full tile meets nobody: its turn would hand the words of the tile before to the next one
                flip = flip ^ 1
        else:
            self.fc2(part, part.accs, e, n, valid, routes, lane, w.b2, w.stage)
        return stage, phase, flip

    @cute.jit
    def tensor_scales(self, kind, e):
        """Scale of x times that of the expert's w13 for FC1, of mid times that of its w2 for FC2."""
        rows, weights = self.w.mid_static, self.w.w2_scale
        if kind == stream.FC1:
            rows, weights = self.w.x_scale, self.w.w13_scale
        return memory.ld_f32(rows) * memory.ld_f32(weights + Int64(e) * 4)

    def exchange_amax(self, own, exchanged, flip, row, wg):
        """In a split tile each warpgroup has half of a row's 128 channels: the maximum over both."""
        for r in range(2):
            exchanged[row + 8 * r, wg, flip] = own[r]  # the four lanes of a quad write the same value
        cute.arch.barrier(barrier_id=BAR_AMAX, number_of_threads=MATH_THREADS)
        return [quantize.max_nan(own[r], exchanged[row + 8 * r, 1 - wg, flip]) for r in range(2)]
