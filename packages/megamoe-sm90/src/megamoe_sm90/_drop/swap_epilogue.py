"""What becomes of a finished tile: FC1 -> activation, re-quantization, mid; FC2 -> bf16 rows of the routes."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8

from megamoe.device import memory
from megamoe_sm90._drop import swap_config as layout
from megamoe_sm90._drop.swap_division import divide, reciprocal


class SwapEpilogue:
    """Mixin of SwapKernel. All 256 math threads run these together."""

    def activate(self, gate, up):
        """kernels.md order: clamp, activation. Selects instead of min / max, which would swallow a NaN."""
        cfg = self.cfg
        if cfg.limit is not None:
            gate = Float32(cutlass.select_(gate > cfg.limit, Float32(cfg.limit), gate))
            up = Float32(cutlass.select_(up > cfg.limit, Float32(cfg.limit), up))
            up = Float32(cutlass.select_(up < -cfg.limit, Float32(-cfg.limit), up))
        if cfg.up_bias != 0.0:
            up = up + cfg.up_bias
        return up * gate * cute.arch.rcp_approx(1.0 + cute.math.exp2(gate * (-cfg.alpha * math.log2(math.e)), fastmath=True))

    @cute.jit
    def finish_fc1(self, n: cutlass.Constexpr, accs, block: Int32, part: Int32, count: Int32):
        cx, cfg = self.cx, self.cfg
        expert = cx.block_info[block] // 65536
        row = cx.block_row[block]
        per = n // 2
        channel = cx.wg * 64 + (cx.warp % 4) * 16 + cx.lane // 4
        gate, up = accs
        if cutlass.const_expr(cfg.element == 1 and not cfg.block_scales):
            factor = memory.ld_f32(cx.w13_scale + Int64(expert) * 4) * memory.ld_f32(cx.x_scale)
            for v in cutlass.range_constexpr(per):
                gate[v] = gate[v] * factor
                up[v] = up[v] * factor
        if cutlass.const_expr(cfg.bias13):
            for r in cutlass.range_constexpr(2):
                # Channels past the width (a width that is no multiple of 128) are never stored: any bias does for them.
                ch = cutlass.min(part * 128 + channel + 8 * r, cfg.intermediate - 1)
                at = cx.b13 + (Int64(expert) * (2 * cfg.intermediate) + ch) * 4
                bias_gate = memory.ld_f32(at)
                bias_up = memory.ld_f32(at + cfg.intermediate * 4)
                for v in cutlass.range_constexpr(per):
                    if cutlass.const_expr((v // 2) % 2 == r):
                        gate[v] = gate[v] + bias_gate
                        up[v] = up[v] + bias_up
        for v in cutlass.range_constexpr(per):
            value = self.activate(gate[v], up[v])
            if cutlass.const_expr(cfg.early):
                value = value * cx.row_weight[row + cutlass.max(cutlass.min((v // 4) * 8 + 2 * (cx.lane % 4) + v % 2, count - 1), 0)]
            gate[v] = value
        if cutlass.const_expr(cfg.block_scales):
            self.scale_mid(n, gate, row, count, part)
        elif cutlass.const_expr(cfg.element == 1):
            mid = memory.ld_f32(cx.mid_static)
            inverse = reciprocal(mid)
            for v in cutlass.range_constexpr(per):
                gate[v] = divide(gate[v], mid, inverse)
        target = cx.mid + (Int64(row) * cfg.intermediate + part * 128) * cfg.element
        self.write_rows(n, gate, self.dtype, target, cfg.intermediate * cfg.element, count, (cfg.intermediate - part * 128) * cfg.element)
        self.publish(cx.control + (cfg.tags + Int64(block * cfg.n1 + part) * 4), count)

    @cute.jit
    def scale_mid(self, n: cutlass.Constexpr, value, row: Int32, count: Int32, part: Int32):
        """Per token: amax over the tile's 128 channels, which the 8 math warps share 16 each; then value / scale and the scale's store."""
        cx, cfg = self.cx, self.cfg
        cols = n // 4
        amax = cx.amax
        for i in cutlass.range_constexpr(cols):
            a = value[(i // 2) * 4 + i % 2]
            b = value[(i // 2) * 4 + i % 2 + 2]
            top = cute.arch.fmax(cute.arch.fmax(a, -a), cute.arch.fmax(b, -b))
            for step in cutlass.range_constexpr(3):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 4 << step))
            if cx.lane < 4:
                amax[(i // 2) * 8 + 2 * cx.lane + i % 2, cx.warp] = top
        self.math_barrier()
        for i in cutlass.range_constexpr(cols):
            col = (i // 2) * 8 + 2 * (cx.lane % 4) + i % 2
            top = Float32(1e-10)
            for w in cutlass.range_constexpr(8):
                top = cute.arch.fmax(top, cx.amax[col, w])
            scale = divide(top, Float32(448.0), Float32(1.0 / 448.0))
            inverse = reciprocal(scale)
            for r in cutlass.range_constexpr(2):
                v = (i // 2) * 4 + i % 2 + 2 * r
                value[v] = divide(value[v], scale, inverse)
            if cx.warp == 0 and cx.lane < 4 and col < count:
                memory.st_f32(cx.mid_scale + (Int64(part) * cfg.rows + row + col) * 4, scale)

    @cute.jit
    def finish_fc2(self, n: cutlass.Constexpr, accs, block: Int32, part: Int32, count: Int32):
        cx, cfg = self.cx, self.cfg
        expert = cx.block_info[block] // 65536
        row = cx.block_row[block]
        channel = cx.wg * 64 + (cx.warp % 4) * 16 + cx.lane // 4
        factor = Float32(1.0)
        if cutlass.const_expr(cfg.element == 1 and not cfg.block_scales):
            factor = memory.ld_f32(cx.w2_scale + Int64(expert) * 4) * memory.ld_f32(cx.mid_static)
        for half in cutlass.range_constexpr(2):
            acc = accs[half]
            first = part * 256 + half * 128
            if cutlass.const_expr(cfg.element == 1 and not cfg.block_scales):
                for v in cutlass.range_constexpr(n // 2):
                    acc[v] = acc[v] * factor
            if cutlass.const_expr(cfg.bias2):
                for r in cutlass.range_constexpr(2):
                    ch = cutlass.min(first + channel + 8 * r, cfg.hidden - 1)
                    bias = memory.ld_f32(cx.b2 + (Int64(expert) * cfg.hidden + ch) * 4)
                    for v in cutlass.range_constexpr(n // 2):
                        if cutlass.const_expr((v // 2) % 2 == r):
                            acc[v] = acc[v] + bias
            if cutlass.const_expr(half == 1):
                self.math_barrier()
            target = cx.stage + (Int64(row) * cfg.hidden + first) * 2
            self.write_rows(n, acc, BFloat16, target, cfg.hidden * 2, count, (cfg.hidden - first) * 2)
        self.math_barrier()
        if cx.tidx == 0 and count > 0:
            memory.red_release(cx.bank + (layout.BANK_TILES + Int64(part) * 4), Int32(1))

    @cute.jit
    def write_rows(
        self, n: cutlass.Constexpr, value, dtype: cutlass.Constexpr, target: Int64, pitch: cutlass.Constexpr, count: Int32, width: Int32
    ):
        """Round to `dtype` and transpose through shared memory: `count` token rows of 128 channels, at most `width` bytes each."""
        cx, cfg = self.cx, self.cfg
        size = dtype.width // 8
        cols = n if size == 1 else min(n, cfg.out_cols)
        line = 128 * size + 16  # padded: the four tokens of a quad fall into different banks
        channel = cx.wg * 64 + (cx.warp % 4) * 16 + cx.lane // 4
        rounded = cute.make_rmem_tensor(cute.make_layout(n // 2), dtype)
        flat = cute.make_rmem_tensor(cute.make_layout(n // 2), Float32)
        for v in cutlass.range_constexpr(n // 2):
            flat[v] = value[v]
        rounded.store(flat.load().to(dtype))
        raw = cute.recast_tensor(rounded, Uint8) if size == 1 else rounded
        start = cx.out_bytes if size == 1 else cute.recast_ptr(cx.out_bytes, dtype=BFloat16)
        box = cute.make_tensor(start, cute.make_layout((cols, 128), stride=(line // size, 1)))
        words = cute.make_tensor(
            cute.recast_ptr(cx.out_bytes, dtype=Int32), cute.make_layout((4, line // 16, cols), stride=(1, 4, line // 4))
        )
        lanes = 8 * size  # threads a row
        step = 256 // lanes
        for p in cutlass.range_constexpr(n // cols):
            if cutlass.const_expr(p > 0):
                self.math_barrier()
            for u in cutlass.range_constexpr(cols // 2):
                v = p * (cols // 2) + u
                box[(u // 4) * 8 + 2 * (cx.lane % 4) + u % 2, channel + 8 * ((u // 2) % 2)] = raw[v]
            self.math_barrier()
            for i in cutlass.range_constexpr(-(-cols // step)):
                col = i * step + cx.tidx // lanes
                seg = cx.tidx % lanes
                if col < cols and p * cols + col < count and seg * 16 < width:
                    w = words[None, seg, col].load()
                    memory.st_v4(target + Int64(p * cols + col) * pitch + seg * 16, w[0], w[1], w[2], w[3])
