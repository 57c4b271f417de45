"""The two ends of a launch: activations into the pool rows of their routes, and the top-k sum of the routes' rows."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from megamoe.device import deadline, memory
from megamoe_sm90._drop import swap_config as layout
from megamoe_sm90._drop.swap_division import divide, reciprocal


class SwapEnds:
    """Mixin of SwapKernel, run by the math warps."""

    def load_piece(self, piece):
        """This lane's 16 neighbouring elements of a piece of 512, as 32-bit words; lanes past the row repeat its end."""
        cx, cfg = self.cx, self.cfg
        pieces_a_token = -(-cfg.hidden // 512)
        token = piece // pieces_a_token
        at = cutlass.min((piece - token * pieces_a_token) * 512 + cx.lane * 16, cfg.hidden - 16)
        address = cx.x + (Int64(token) * cfg.hidden + at) * (self.piece_words() // 4)
        words = list(memory.ld_v4(address))
        if self.piece_words() == 8:
            words += list(memory.ld_v4(address + 16))
        return words

    def piece_words(self):
        return 8 if self.cfg.act_bf16 or self.cfg.element == 2 else 4

    @cute.jit
    def load_first_piece(self):
        """Activations before anything else: a load issued behind a queue of weight requests waits for all of them."""
        cx, early = self.cx, self.cx.early
        piece = cx.warp * cx.grid + cx.cta
        if piece < cx.pieces:
            loaded = self.load_piece(piece)
            for i in cutlass.range_constexpr(self.piece_words()):
                early[i] = loaded[i]

    @cute.jit
    def place_activations(self):
        """Pieces of 512 elements of a token, one a warp and step: quantize and copy into the pool row of each of the token's routes."""
        cx, words = self.cx, self.cx.early
        done = Int32(0)
        piece = cx.warp * cx.grid + cx.cta
        while piece < cx.pieces:
            mine = [words[i] for i in range(self.piece_words())]
            following = piece + 8 * cx.grid
            if following < cx.pieces:
                loaded = self.load_piece(following)
                for i in cutlass.range_constexpr(self.piece_words()):
                    words[i] = loaded[i]
            self.place_piece(piece, mine)
            done = done + 1
            piece = following
        cute.arch.sync_warp()
        if cx.lane == 0 and done > 0:
            memory.red_release(cx.bank, done)

    @cute.jit
    def place_piece(self, piece: Int32, words):
        cx, cfg = self.cx, self.cfg
        pieces_a_token = -(-cfg.hidden // 512)
        token = piece // pieces_a_token
        at = (piece - token * pieces_a_token) * 512 + cx.lane * 16
        inside = at < cfg.hidden
        at = cutlass.min(at, cfg.hidden - 16)
        scale = Float32(0.0)
        if cutlass.const_expr(cfg.quantize):
            words, scale = self.quantize(words)
        elif cutlass.const_expr(cfg.block_scales):
            scale = memory.ld_f32(cx.x_scale + (Int64(token) * cfg.kb1 + at // 128) * 4)
        leads = inside and cx.lane % 8 == 0
        for slot in cutlass.range(cfg.top_k, unroll=1):
            row = cx.route[token * cfg.top_k + slot]
            if row >= 0:
                if inside:
                    to = cx.xq + (Int64(row) * cfg.hidden + at) * cfg.element
                    for i in cutlass.range_constexpr(len(words) // 4):
                        memory.st_v4(to + 16 * i, *words[4 * i : 4 * i + 4])
                if cutlass.const_expr(cfg.block_scales):
                    if leads:
                        memory.st_f32(cx.xs + (Int64(at // 128) * cfg.rows + row) * 4, scale)

    def quantize(self, words):
        """16 bf16 elements -> (4 words of the format, scale). With block scales the 8 lanes of a block of 128 share its amax; all lanes of
        the warp take part."""
        cfg = self.cfg
        raw = cute.make_rmem_tensor(cute.make_layout(8), Int32)
        for i in range(8):
            raw[i] = words[i]
        value = cute.make_rmem_tensor(cute.make_layout(16), Float32)
        value.store(cute.recast_tensor(raw, BFloat16).load().to(Float32))
        if cfg.block_scales:
            top = Float32(1e-10)
            for i in range(16):
                top = cute.arch.fmax(top, cute.arch.fmax(value[i], -value[i]))
            for step in range(3):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << step))
            scale = divide(top, Float32(448.0), Float32(1.0 / 448.0))
        else:
            scale = memory.ld_f32(self.cx.x_scale)
        inverse = reciprocal(scale)
        for i in range(16):
            value[i] = divide(value[i], scale, inverse)
        out = cute.make_rmem_tensor(cute.make_layout(16), self.dtype)
        out.store(value.load().to(self.dtype))
        packed = cute.recast_tensor(out, Int32)
        return [packed[i] for i in range(4)], scale

    @cute.jit
    def sum_rows(self):
        """out[token] = sum over slots, in slot order, fp32, one rounding. An item is (256 columns, token): one warp, 8 columns a lane.

        A CTA's items lie next to the columns that it finished itself, so few of them are waited for.
        """
        cx, cfg = self.cx, self.cfg
        items = cx.tokens * cfg.n2
        item = self.span(items, cx.cta)
        last = self.span(items, cx.cta + 1)
        if item < last:
            part = item // cx.tokens + cx.lane
            while part <= (last - 1) // cx.tokens:
                done = cx.bank + (layout.BANK_TILES + Int64(part) * 4)
                deadline.wait_ge(done, cx.blocks, cx.control, layout.SITE_ROWS, part, cx.deadline)
                part = part + 32
            cute.arch.sync_warp()
            item = item + cx.warp
            while item < last:
                part = item // cx.tokens
                at = part * 256 + cx.lane * 8
                if at < cfg.hidden:
                    self.sum_token(item - part * cx.tokens, at)
                item = item + 8

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
            for (row, four), weight in zip(words, weights, strict=True):
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
        return cute.arch.inline_ptx(
            "ld.global.cg.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[self.cx.stage + (Int64(row) * self.cfg.hidden + at) * 2],
        )

    def bits_to_float(self, bits):
        return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])
