"""The fused expert layer of one rank for few tokens per expert: weights on M, tokens on N, one persistent launch.

384 threads a CTA: two math warpgroups and a load warpgroup (warp 8 weights, warp 9 tokens). Every CTA computes the whole routing by itself,
then takes the same contiguous share (stream-K) of all FC1 K blocks and after them of all FC2 K blocks. The weight warp knows its whole
sequence from the routing alone and runs a full ring ahead: at the start while activations are quantized, and at the change from FC1 to FC2
while `mid` is finished. Partial tiles are summed in ascending K by the CTA that has the first K block, so bytes repeat.
Global words that are waited for are epoch tags or counters of a bank that the next launch's predecessor zeroes: the host zeroes nothing.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from megamoe.device import memory, regions
from megamoe_sm90._drop.layer_config import MATH_WARPS, THREADS
from megamoe_sm90._drop.swap_config import SwapConfig
from megamoe_sm90._drop.swap_ends import SwapEnds
from megamoe_sm90._drop.swap_epilogue import SwapEpilogue
from megamoe_sm90._drop.swap_feed import SwapFeed
from megamoe_sm90._drop.swap_math import SwapMath
from megamoe_sm90._drop.swap_routing import SwapRouting
from megamoe_sm90._drop.tensors import DTYPES, loads, matrix, swizzled, tensor

WEIGHT_WARP, TOKEN_WARP, EPOCH_WARP = 8, 9, 10


class Context:
    """What every role reads: addresses, shared arrays, sizes of the call. Written at the top of the kernel only, before the roles part."""

    def set(self, **values):
        self.__dict__.update(values)


class SwapKernel(SwapRouting, SwapEnds, SwapFeed, SwapMath, SwapEpilogue):
    """One compiled variant; see SwapConfig for what is constant."""

    def __init__(self, cfg: SwapConfig):
        self.cfg = cfg
        self.dtype = DTYPES[cfg.fmt]
        self.cx = Context()

    # ---------------------------------------------------------------- host side
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
        partial: Int64,
        mid: Int64,
        mid_scale: Int64,
        stage: Int64,
        out: Int64,
        tokens: Int32,
        grid: Int32,
        deadline_ns: Int64,
        stream: cuda.CUstream,
    ):
        """Addresses (0 where unused), then sizes. The arguments and their order are the native kernel's, with `partial` for `row_route`."""
        cfg = self.cfg
        e, h, i, rows, nt = cfg.experts, cfg.hidden, cfg.intermediate, cfg.rows, cfg.token_tile

        lw = swizzled(self.dtype, 128, cfg.block_k, cfg.stages)
        lt = swizzled(self.dtype, nt, cfg.block_k, cfg.token_stages)
        lbox = swizzled(self.dtype, cfg.box_rows, cfg.block_k)
        ls = cute.make_layout((nt, 1, cfg.token_stages), stride=(1, nt, cfg.scale_pitch))
        t13, g13 = loads(matrix(self.dtype, w13, e * 2 * i, h), lw, (128, cfg.block_k))
        t2, g2 = loads(matrix(self.dtype, w2, e * h, i), lw, (128, cfg.block_k))
        tx, gx = loads(matrix(self.dtype, xq, rows, h), lbox, (cfg.box_rows, cfg.block_k))
        tm, gm = loads(matrix(self.dtype, mid, rows, i), lbox, (cfg.box_rows, cfg.block_k))
        txs, gxs, tms, gms = tx, gx, tm, gm
        if cutlass.const_expr(cfg.block_scales):  # one plane of scales a K block
            txs, gxs = loads(tensor(Float32, xs, (rows, cfg.kb1), (1, rows)), ls, (nt, 1))
            tms, gms = loads(tensor(Float32, mid_scale, (rows, cfg.kb2), (1, rows)), ls, (nt, 1))

        @cute.struct
        class Storage:
            w: cute.struct.Align[cute.struct.MemRange[self.dtype, 128 * cfg.block_k * cfg.stages], 1024]
            t: cute.struct.Align[cute.struct.MemRange[self.dtype, nt * cfg.block_k * cfg.token_stages], 1024]
            ts: cute.struct.Align[cute.struct.MemRange[Float32, cfg.scale_pitch * cfg.token_stages if cfg.block_scales else 4], 128]
            out: cute.struct.Align[cute.struct.MemRange[Uint8, cfg.epilogue_bytes], 16]
            amax: cute.struct.Align[cute.struct.MemRange[Float32, nt * 8], 16]
            w_full: cute.struct.MemRange[Int64, cfg.stages]
            w_empty: cute.struct.MemRange[Int64, cfg.stages]
            t_full: cute.struct.MemRange[Int64, cfg.token_stages]
            t_empty: cute.struct.MemRange[Int64, cfg.token_stages]
            ws: cute.struct.MemRange[Float32, cfg.stages]
            route: cute.struct.MemRange[Int32, cfg.routes]
            sums: cute.struct.MemRange[Int32, THREADS // 32]
            base: cute.struct.MemRange[Int32, cfg.experts]
            block_info: cute.struct.MemRange[Int32, cfg.blocks]
            block_row: cute.struct.MemRange[Int32, cfg.blocks]
            row_weight: cute.struct.MemRange[Float32, cfg.rows if cfg.early else 4]
            misc: cute.struct.MemRange[Int32, 4]

        self.storage = Storage
        given = SimpleNamespace(
            tma_w13=t13,
            g_w13=g13,
            tma_w2=t2,
            g_w2=g2,
            tma_x=tx,
            g_x=gx,
            tma_xs=txs,
            g_xs=gxs,
            tma_m=tm,
            g_m=gm,
            tma_ms=tms,
            g_ms=gms,
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
            partial=partial,
            mid=mid,
            mid_scale=mid_scale,
            stage=stage,
            out=out,
            tokens=tokens,
            deadline=Int32(deadline_ns >> 20),
            lw=lw,
            lt=lt,
            ls=ls,
        )
        self.kernel(given).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=cfg.pdl)

    # ---------------------------------------------------------------- device side
    @cute.kernel
    def kernel(self, g: SimpleNamespace):
        """`g`: tensor maps, layouts and arguments, as `__call__` gathers them."""
        cfg = self.cfg
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        gdim, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // 128)
        lane = tidx % 32
        st = SmemAllocator().allocate(self.storage)
        s_misc = st.misc.get_tensor(cute.make_layout(4))
        ring = cute.recast_ptr(cute.recast_ptr(st.w.data_ptr(), dtype=Uint8), dtype=Int32)
        cx = self.cx
        cx.set(
            **vars(g),
            tidx=tidx,
            cta=bidx,
            grid=gdim,
            warp=warp,
            wg=wg,
            lane=lane,
            s_w=st.w.get_tensor(g.lw.outer, swizzle=g.lw.inner),
            s_t=st.t.get_tensor(g.lt.outer, swizzle=g.lt.inner),
            s_ts=st.ts.get_tensor(g.ls) if cfg.block_scales else None,
            s_ws=st.ws.get_tensor(cute.make_layout(cfg.stages)),
            out_bytes=st.out.data_ptr(),
            amax=st.amax.get_tensor(cute.make_layout((cfg.token_tile, 8), stride=(8, 1))),
            w_full=st.w_full.data_ptr(),
            w_empty=st.w_empty.data_ptr(),
            t_full=st.t_full.data_ptr(),
            t_empty=st.t_empty.data_ptr(),
            route=st.route.get_tensor(cute.make_layout(cfg.routes)),
            sums=st.sums.get_tensor(cute.make_layout(THREADS // 32)),
            base=st.base.get_tensor(cute.make_layout(cfg.experts)),
            block_info=st.block_info.get_tensor(cute.make_layout(cfg.blocks)),
            block_row=st.block_row.get_tensor(cute.make_layout(cfg.blocks)),
            row_weight=st.row_weight.get_tensor(cute.make_layout(cfg.rows)) if cfg.early else None,
            misc=s_misc,
            mma={},
            bits=cute.make_tensor(ring, cute.make_layout(cfg.bitmap_words)),
            ranks=cute.make_tensor(ring + cfg.bitmap_words, cute.make_layout(cfg.bitmap_words)),
        )

        routes = cx.tokens * cfg.top_k
        if cutlass.const_expr(not cfg.pdl):
            self.take_epoch()
        if warp == WEIGHT_WARP:
            for atom in (cx.tma_w13, cx.tma_w2, cx.tma_x, cx.tma_m) + ((cx.tma_xs, cx.tma_ms) if cfg.block_scales else ()):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(cfg.stages):
                    # With block scales the scale's own copy arrives beside the TMA.
                    cute.arch.mbarrier_init(cx.w_full + s, 2 if cfg.block_scales else 1)
                    cute.arch.mbarrier_init(cx.w_empty + s, MATH_WARPS)
                for s in cutlass.range_constexpr(cfg.token_stages):
                    cute.arch.mbarrier_init(cx.t_full + s, 1)
                    cute.arch.mbarrier_init(cx.t_empty + s, MATH_WARPS)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(cfg.pdl):
            # Until here only what is this CTA's own. From here on all that came before on the stream is complete, for every thread:
            # weights, activations and ids, and what the launch before this one did to the control block and the workspace.
            cute.arch.griddepcontrol_wait()
            self.take_epoch()
        cx.set(pieces=cx.tokens * (-(-cfg.hidden // 512)))
        cx.set(early=cute.make_rmem_tensor(cute.make_layout(self.piece_words()), Int32))
        if warp < MATH_WARPS:
            self.load_first_piece()
        self.build_routing(routes)

        blocks = s_misc[0]
        epoch = s_misc[1]
        cx.set(
            blocks=blocks,
            units1=blocks * (cfg.n1 * cfg.kb1),
            units2=blocks * (cfg.n2 * cfg.kb2),
            tag=epoch + 1,
            bank=cx.control + regions.BANKS + Int64(epoch & 1) * cfg.bank_bytes,
        )
        self.bind_mma()
        # setmaxnreg takes effect only where each role is one branch of a single if / else.
        if wg == 2:
            cute.arch.setmaxregister_decrease(24)
            if warp == WEIGHT_WARP:
                self.feed_weights(lane)
            if warp == TOKEN_WARP:
                self.feed_tokens(lane)
            if warp == EPOCH_WARP:
                self.advance_epoch(epoch)
                self.clear_next_bank(epoch, lane)
        else:
            cute.arch.setmaxregister_increase(240)
            self.resolve_rows(routes)
            self.math_barrier()
            self.place_activations()
            w_stage, w_phase, t_stage, t_phase = self.run_phase(0, Int32(0), Int32(0), Int32(0), Int32(0))
            self.run_phase(1, w_stage, w_phase, t_stage, t_phase)
            if cutlass.const_expr(cfg.pdl):
                # CTAs of the next launch may take the place of those that leave, when all CTAs of this one have come here.
                cute.arch.griddepcontrol_launch_dependents()
            self.sum_rows()

    @cute.jit
    def take_epoch(self):
        """Where all threads find it once the routing is built."""
        misc, control = self.cx.misc, self.cx.control
        if self.cx.tidx == 32 * EPOCH_WARP:
            misc[1] = memory.ld_relaxed(control + regions.EPOCH)

    @cute.jit
    def advance_epoch(self, epoch: Int32):
        """All CTAs have read the epoch when the last one arrives here, which then advances it for the next launch."""
        cx = self.cx
        if cx.lane == 0:
            if memory.add_acq_rel(cx.control + regions.EXITS, Int32(1)) == cx.grid - 1:
                memory.st_i32(cx.control + regions.EXITS, Int32(0))
                memory.st_i32(cx.control + regions.EPOCH, epoch + 1)

    @cute.jit
    def clear_next_bank(self, epoch: Int32, lane: Int32):
        """CTA 0: the bank of the next launch, which nobody touches during this one."""
        base = self.cx.control + regions.BANKS + Int64((epoch + 1) & 1) * self.cfg.bank_bytes
        i = self.cx.cta * 32 + lane
        while i < self.cfg.bank_bytes // 4:
            memory.st_i32(base + Int64(i) * 4, Int32(0))
            i = i + 32 * self.cx.grid
