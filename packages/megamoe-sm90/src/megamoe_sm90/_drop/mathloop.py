"""The K loop of a math warpgroup: wgmma into 64 x 64 pieces, with FP8 promoted every 128 of K from two temporaries in rotation.

A step is one K block of one piece: four wgmma into a temporary. Step i + 1 is issued before step i is promoted (acc = fma(temp, scale,
acc)), so a warpgroup keeps the tensor cores fed while it runs its own FMAs. The scale is the row's times the panel's, or that of the two
tensors. Nothing may be in flight across the back edge of the loop: ptxas serialises every wgmma of a loop that reads a temporary issued in
the previous iteration. So an iteration takes `k_unroll` K blocks and drains at its end. In bf16 the tensor cores accumulate over all of K.
In FP8 that took 1.8% (L2) off the results of a layer with hidden size 7168: what they cut off is always towards zero.
"""

from types import SimpleNamespace

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

from .words import fma_here

TEMPS = 2


class MathLoop:
    """Mixin: `self.c` is the NativeConfig, `self.dtype` the operand type."""

    def _mma(self, accumulate):
        """A 64 x 64 MMA with a fixed accumulate flag: two constant atoms instead of one that is switched in the loop."""
        major = cute.nvgpu.OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(self.dtype, self.dtype, major, major, Float32, (1, 1, 1), (64, 64))
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    def operands(self, sA, sB, scales, wg, warp, lane):
        """The ways a warpgroup can take part in a tile: {"full": ..., "split": ...}, with registers in common.

        full: it has 64 of 128 rows and all 256 weight rows. split: at most 64 rows are in use; each warpgroup has all of them and half of
        the weight rows, the same half of gate and up. A 64-row tile is always split.
        """
        c = self.c
        fresh, more = self._mma(False), self._mma(True)
        thr = fresh.get_slice(0)
        shape = thr.partition_shape_C((64, 64))
        accs = [cute.make_rmem_tensor(shape, Float32) for _ in range(4 if c.tile_m == 128 else 2)]
        temps = [cute.make_rmem_tensor(shape, Float32) for _ in range(TEMPS if c.promotes else 0)]
        parts = {}
        for name in ("full", "split") if c.tile_m == 128 else ("split",):
            split = name == "split"
            block, blocks = (0, [wg, 2 + wg]) if split else (wg, [0, 1, 2, 3])
            parts[name] = SimpleNamespace(
                split=split,
                pieces=len(blocks),
                channel=(lambda p, wg=wg: wg * 64) if split else (lambda p: p * 64),  # first column of a piece in its 128-row panel
                fresh=fresh,
                more=more,
                a=fresh.make_fragment_A(thr.partition_A(cute.local_tile(sA, (64, c.block_k), (block, 0, None)))),
                b=[fresh.make_fragment_B(thr.partition_B(cute.local_tile(sB, (64, c.block_k), (p, 0, None)))) for p in blocks],
                accs=accs,
                temps=temps,
                scales=cute.make_tensor(scales, cute.make_layout((c.scale_words, c.num_stages))),
                row=(0 if split else wg * 64) + (warp % 4) * 16 + lane // 4,
            )
        return parts

    @cute.jit
    def release(self, empty, stage, lane):
        if lane == 0:
            cute.arch.mbarrier_arrive(empty + stage)

    def _ready(self, full, stage, phase):
        """Wait for a stage. Gathered rows are ordinary writes of shared memory: a proxy fence orders them before wgmma reads them."""
        cute.arch.mbarrier_wait(full + stage, phase)
        if self.c.rows == "gather":
            cute.arch.fence_view_async_shared()

    def _issue(self, mma, target, first, b, stage):
        """Four wgmma over one K block of one piece."""
        for kk in range(4):
            atom = mma.fresh if first and kk == 0 else mma.more
            cute.gemm(atom, target, mma.a[None, None, kk, stage], b[None, None, kk, stage], target)

    def iteration(self, mma, full, empty, stage, phase, lane, tensors):
        """`k_unroll` K blocks; returns the next (stage, phase). `tensors`: the product of the two tensors' scales, where they have some."""
        if self.c.promotes:
            return self._promoted(mma, full, empty, stage, phase, lane, tensors)
        return self._plain(mma, full, empty, stage, phase, lane)

    def _finish(self, i, mma, scales, stages, empty, lane):
        """Step i's wgmmas are complete: give the stage back if this was its last user, then promote."""
        u, p = i // mma.pieces, i % mma.pieces
        if p == mma.pieces - 1:
            self.release(empty, stages[u], lane)
        acc, temp = mma.accs[p], mma.temps[i % TEMPS]
        scale = scales[u](p // (mma.pieces // 2))
        # With one scale for all K blocks the compiler would promote several together, and keep their temporaries until then: they spill.
        fma = cute.math.fma if self.c.block_scales else fma_here
        for v in range(32):
            acc[v] = fma(temp[v], scale[(v // 2) % 2], acc[v])

    def _scales(self, mma, stage, tensors):
        """A function: panel -> the scales of this thread's two rows of a K block."""
        if tensors is not None:
            return lambda panel: (tensors, tensors)
        rows = (mma.scales[mma.row, stage], mma.scales[mma.row + 8, stage])
        panels = (mma.scales[self.c.tile_m, stage], mma.scales[self.c.tile_m + 1, stage])
        return lambda panel: tuple(row * panels[panel] for row in rows)

    def _promoted(self, mma, full, empty, stage, phase, lane, tensors):
        c = self.c
        steps = c.k_unroll * mma.pieces
        scales, stages = {}, {}
        for i in range(steps):
            u, p = i // mma.pieces, i % mma.pieces
            if p == 0:
                stages[u] = stage
                self._ready(full, stage, phase)
                scales[u] = self._scales(mma, stage, tensors)
            warpgroup.fence()
            self._issue(mma, mma.temps[i % TEMPS], True, mma.b[p], stage)
            warpgroup.commit_group()
            if p == mma.pieces - 1:
                stage, phase = self._advance(stage, phase, c.num_stages)
            if i >= TEMPS - 1:
                warpgroup.wait_group(TEMPS - 1)
                self._finish(i - (TEMPS - 1), mma, scales, stages, empty, lane)
        for j in range(TEMPS - 1):
            warpgroup.wait_group(TEMPS - 2 - j)
            self._finish(steps - (TEMPS - 1) + j, mma, scales, stages, empty, lane)
        return stage, phase

    def _plain(self, mma, full, empty, stage, phase, lane):
        c = self.c
        previous = None
        for _ in range(c.k_unroll):
            self._ready(full, stage, phase)
            warpgroup.fence()
            for p in range(mma.pieces):
                self._issue(mma, mma.accs[p], False, mma.b[p], stage)
            warpgroup.commit_group()
            if previous is not None:
                warpgroup.wait_group(1)
                self.release(empty, previous, lane)
            previous = stage
            stage, phase = self._advance(stage, phase, c.num_stages)
        warpgroup.wait_group(0)
        self.release(empty, previous, lane)
        return stage, phase
