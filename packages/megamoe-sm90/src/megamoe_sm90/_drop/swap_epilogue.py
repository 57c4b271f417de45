"""What becomes of a finished tile: FC1 -> activation, re-quantization, mid; FC2 -> bf16 rows; and, once columns are complete, the top-k sum."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float8E5M2, Float32, Int32, Int64, Uint8
from megamoe.device import deadline, memory

from megamoe_sm90._drop import swap_config as layout


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
        return up * gate / (1.0 + cute.math.exp2(gate * (-cfg.alpha * math.log2(math.e)), fastmath=True))

    @cute.jit
    def finish_fc1(self, accs, block: Int32, part: Int32):
        cx, cfg = self.cx, self.cfg
        expert = cx.block_info[block] // 65536
        count = cx.block_info[block] & 65535
        row = cx.block_row[block]
        per = cfg.token_tile // 2
        channel = cx.wg * 64 + (cx.warp % 4) * 16 + cx.lane // 4
        gate, up = accs
        if cutlass.const_expr(cfg.elem == 1 and not cfg.scaled):
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
                value = value * cx.row_weight[row + cutlass.min((v // 4) * 8 + 2 * (cx.lane % 4) + v % 2, count - 1)]
            gate[v] = value
        if cutlass.const_expr(cfg.scaled):
            self.scale_mid(gate, row, part)
        elif cutlass.const_expr(cfg.elem == 1):
            mid = memory.ld_f32(cx.mid_static)
            for v in cutlass.range_constexpr(per):
                gate[v] = gate[v] / mid
        target = cx.mid + (Int64(row) * cfg.intermediate + part * 128) * cfg.elem
        self.write_rows(gate, self.dtype, target, cfg.intermediate * cfg.elem, count, (cfg.intermediate - part * 128) * cfg.elem)
        self.publish(cx.control + (cfg.tags + Int64(block * cfg.tiles1 + part) * 4))

    @cute.jit
    def scale_mid(self, value, row: Int32, part: Int32):
        """Per token: amax over the tile's 128 channels, which the 8 math warps share 16 each; then value / scale and the scale's store."""
        cx, cfg = self.cx, self.cfg
        cols = cfg.token_tile // 4
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
            scale = top / 448.0
            for r in cutlass.range_constexpr(2):
                v = (i // 2) * 4 + i % 2 + 2 * r
                value[v] = value[v] / scale
            if cx.warp == 0 and cx.lane < 4:
                memory.st_f32(cx.mid_scale + (Int64(part) * cfg.rows + row + col) * 4, scale)

    @cute.jit
    def finish_fc2(self, acc, block: Int32, part: Int32):
        cx, cfg = self.cx, self.cfg
        expert = cx.block_info[block] // 65536
        count = cx.block_info[block] & 65535
        row = cx.block_row[block]
        per = cfg.token_tile // 2
        channel = cx.wg * 64 + (cx.warp % 4) * 16 + cx.lane // 4
        if cutlass.const_expr(cfg.elem == 1 and not cfg.scaled):
            factor = memory.ld_f32(cx.w2_scale + Int64(expert) * 4) * memory.ld_f32(cx.mid_static)
            for v in cutlass.range_constexpr(per):
                acc[v] = acc[v] * factor
        if cutlass.const_expr(cfg.bias2):
            for r in cutlass.range_constexpr(2):
                ch = cutlass.min(part * 128 + channel + 8 * r, cfg.hidden - 1)
                bias = memory.ld_f32(cx.b2 + (Int64(expert) * cfg.hidden + ch) * 4)
                for v in cutlass.range_constexpr(per):
                    if cutlass.const_expr((v // 2) % 2 == r):
                        acc[v] = acc[v] + bias
        target = cx.stage + (Int64(row) * cfg.hidden + part * 128) * 2
        self.write_rows(acc, BFloat16, target, cfg.hidden * 2, count, (cfg.hidden - part * 128) * 2)
        self.math_barrier()
        if cx.tidx == 0:
            memory.red_release(cx.bank + (layout.BANK_TILES + Int64(part) * 4), Int32(1))

    @cute.jit
    def write_rows(self, value, dtype: cutlass.Constexpr, target: Int64, pitch: cutlass.Constexpr, count: Int32, width: Int32):
        """Round to `dtype` and transpose through shared memory: `count` token rows of 128 channels (at most `width` bytes), 16 bytes a store."""
        cx, cfg = self.cx, self.cfg
        size = dtype.width // 8
        cols = cfg.token_tile if size == 1 else cfg.out_cols
        line = 128 * size + 16  # padded: the four tokens of a quad fall into different banks
        channel = cx.wg * 64 + (cx.warp % 4) * 16 + cx.lane // 4
        rounded = cute.make_rmem_tensor(cute.make_layout(cfg.token_tile // 2), dtype)
        flat = cute.make_rmem_tensor(cute.make_layout(cfg.token_tile // 2), Float32)
        for v in cutlass.range_constexpr(cfg.token_tile // 2):
            flat[v] = value[v]
        rounded.store(flat.load().to(dtype))
        raw = cute.recast_tensor(rounded, Uint8) if size == 1 else rounded
        box = cute.make_tensor(cx.out_bytes if size == 1 else cute.recast_ptr(cx.out_bytes, dtype=BFloat16), cute.make_layout((cols, 128), stride=(line // size, 1)))
        words = cute.make_tensor(cute.recast_ptr(cx.out_bytes, dtype=Int32), cute.make_layout((4, line // 16, cols), stride=(1, 4, line // 4)))
        lanes = 8 * size  # threads a row
        step = 256 // lanes
        for p in cutlass.range_constexpr(cfg.token_tile // cols):
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

    # ------------------------------------------------------------ activations in
    @cute.jit
    def place_activations(self):
        """Pieces of 512 elements of a token, one a warp and step: quantize and copy into the pool row of each of the token's routes."""
        cx, cfg = self.cx, self.cfg
        pieces_a_token = -(-cfg.hidden // 512)
        done = Int32(0)
        piece = cx.warp * cx.grid + cx.cta
        while piece < cx.pieces:
            token = piece // pieces_a_token
            first = (piece - token * pieces_a_token) * 512
            for half in cutlass.range_constexpr(2):
                at = first + half * 256 + cx.lane * 8
                inside = at < cfg.hidden
                # Lanes past the row repeat its end: they take part in the shuffles and store nothing.
                at = cutlass.min(at, cfg.hidden - 8)
                if cutlass.const_expr(cfg.act_bf16):
                    words = memory.ld_v4(cx.x + (Int64(token) * cfg.hidden + at) * 2)
                    if cutlass.const_expr(cfg.elem == 2):
                        self.copy_to_routes(token, cx.xq + at * 2, words, inside)
                    else:
                        self.quantize(token, at, words, inside)
                elif cutlass.const_expr(cfg.elem == 2):
                    self.copy_to_routes(token, cx.xq + at * 2, memory.ld_v4(cx.x + (Int64(token) * cfg.hidden + at) * 2), inside)
                else:
                    self.copy_to_routes(token, cx.xq + at, [memory.ld_i64(cx.x + Int64(token) * cfg.hidden + at)], inside)
                    if cutlass.const_expr(cfg.scaled):
                        k = at // 128
                        scale = memory.ld_f32(cx.x_scale + (Int64(token) * cfg.k1 + k) * 4)
                        self.scale_to_routes(token, k, scale, inside and cx.lane % 16 == 0)
            done = done + 1
            piece = piece + 8 * cx.grid
        cute.arch.sync_warp()
        if cx.lane == 0 and done > 0:
            memory.red_release(cx.bank, done)

    @cute.jit
    def quantize(self, token: Int32, at: Int32, words, inside):
        cx, cfg = self.cx, self.cfg
        raw = cute.make_rmem_tensor(cute.make_layout(4), Int32)
        for i in cutlass.range_constexpr(4):
            raw[i] = words[i]
        value = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        value.store(cute.recast_tensor(raw, BFloat16).load().to(Float32))
        if cutlass.const_expr(cfg.scaled):
            top = Float32(1e-10)
            for i in cutlass.range_constexpr(8):
                top = cute.arch.fmax(top, cute.arch.fmax(value[i], -value[i]))
            for step in cutlass.range_constexpr(4):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << step))
            scale = top / 448.0
            self.scale_to_routes(token, at // 128, scale, inside and cx.lane % 16 == 0)
        else:
            scale = memory.ld_f32(cx.x_scale)
        for i in cutlass.range_constexpr(8):
            value[i] = value[i] / scale
        out = cute.make_rmem_tensor(cute.make_layout(8), self.dtype)
        out.store(value.load().to(self.dtype))
        self.copy_to_routes(token, cx.xq + at, [cute.recast_tensor(out, Int64)[0]], inside)

    @cute.jit
    def copy_to_routes(self, token: Int32, base: Int64, words, inside):
        cx, cfg = self.cx, self.cfg
        for slot in cutlass.range(cfg.top_k, unroll=1):
            row = cx.route[token * cfg.top_k + slot]
            if inside and row >= 0:
                at = base + Int64(row) * (cfg.hidden * cfg.elem)
                if cutlass.const_expr(len(words) == 1):
                    memory.st_i64(at, words[0])
                else:
                    memory.st_v4(at, words[0], words[1], words[2], words[3])

    @cute.jit
    def scale_to_routes(self, token: Int32, k: Int32, scale: Float32, inside):
        cx, cfg = self.cx, self.cfg
        for slot in cutlass.range(cfg.top_k, unroll=1):
            row = cx.route[token * cfg.top_k + slot]
            if inside and row >= 0:
                memory.st_f32(cx.xs + (Int64(k) * cfg.rows + row) * 4, scale)

    # ------------------------------------------------------------ result out
    @cute.jit
    def sum_rows(self):
        """out[token] = sum over slots, in slot order, fp32, one rounding. An item is (128 columns, token): 16 lanes, 8 columns each.

        A CTA's items lie next to the columns that it finished itself, so few of them are waited for.
        """
        cx, cfg = self.cx, self.cfg
        items = cx.tokens * cfg.tiles2
        item = self.span(items, cx.cta)
        last = self.span(items, cx.cta + 1)
        if item < last:
            part = item // cx.tokens + cx.lane
            while part <= (last - 1) // cx.tokens:
                deadline.wait_ge(cx.bank + (layout.BANK_TILES + Int64(part) * 4), cx.blocks, cx.control, layout.SITE_ROWS, part, cx.deadline)
                part = part + 32
            cute.arch.sync_warp()
            item = item + cx.tidx // 16
            while item < last:
                part = item // cx.tokens
                token = item - part * cx.tokens
                at = part * 128 + (cx.tidx % 16) * 8
                if at < cfg.hidden:
                    self.sum_token(token, at)
                item = item + 16

    @cute.jit
    def sum_token(self, token: Int32, at: Int32):
        cx, cfg = self.cx, self.cfg
        acc = [Float32(0.0)] * 8
        for first in cutlass.range_constexpr(0, cfg.top_k, 8):
            slots = range(first, min(first + 8, cfg.top_k))
            words, weights = [], []
            for slot in slots:  # all loads of a batch are in flight before the first is used
                index = token * cfg.top_k + slot
                row = cx.route[index]
                weight = Float32(1.0)
                if cutlass.const_expr(not cfg.early):
                    weight = memory.ld_f32(cx.topk_w + Int64(index) * 4)
                # A slot without a route reads row 0, which may hold anything, and counts nothing.
                words.append((row, self.ld_row(cutlass.max(row, 0), at)))
                weights.append(weight)
            for (row, four), weight in zip(words, weights):
                for i in cutlass.range_constexpr(4):
                    low = self.bits_to_float(four[i] << 16)
                    high = self.bits_to_float(four[i] & -65536)
                    for c, value in ((0, low), (1, high)):
                        term = cute.math.fma(value, weight, acc[2 * i + c])
                        acc[2 * i + c] = Float32(cutlass.select_(row >= 0, term, acc[2 * i + c]))
        flat = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        for i in cutlass.range_constexpr(8):
            flat[i] = acc[i]
        rounded = cute.make_rmem_tensor(cute.make_layout(8), BFloat16)
        rounded.store(flat.load().to(BFloat16))
        w = cute.recast_tensor(rounded, Int32)
        memory.st_v4(cx.out + (Int64(token) * cfg.hidden + at) * 2, w[0], w[1], w[2], w[3])

    def ld_row(self, row, at):
        return cute.arch.inline_ptx("ld.global.cg.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4,
                                    read_only_args=[self.cx.stage + (Int64(row) * self.cfg.hidden + at) * 2])

    def bits_to_float(self, bits):
        return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


DTYPES = {"fp8_block128": Float8E4M3FN, "fp8_tensor": Float8E4M3FN, "fp8_tensor_e5m2": Float8E5M2, "bf16": BFloat16}
