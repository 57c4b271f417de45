"""What happens to a warpgroup's accumulators: FC1 -> activation -> re-quantization -> mid; FC2 -> bf16 rows by route.

Fragment order of a wgmma result: value 4 j + 2 r + k of a 64 x 64 piece is row lane / 4 + 8 r, column 8 j + 2 (lane % 4) + k. The four lanes
of a quad hold a row; a transpose inside the quad gives every lane 16 contiguous bytes, so rows are stored straight from registers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from megamoe.device import quantize

from . import words as w


class Epilogue:
    """Mixin: `self.c` is the NativeConfig. All methods are plain Python: they run while the kernel is traced."""

    def _channel(self, piece, wg):
        """First column of a piece inside its 128-row weight panel."""
        return piece * 64 if self.c.tile_m == 128 else wg * 64

    def _activate(self, gate, up):
        c = self.c
        if c.limit is not None:
            gate = w.min_nan(gate, Float32(c.limit))
            up = quantize.max_nan(w.min_nan(up, Float32(c.limit)), Float32(-c.limit))
        sigmoid = w.rcp(1.0 + w.exp2(gate * (-c.alpha * w.LOG2E)))
        if c.up_bias != 0.0:
            up = up + c.up_bias
        return up * (gate * sigmoid)

    def _fc1_values(self, accs, e, n, wg, lane, dequant, weights, b13):
        """accs[p] of the gate pieces become the activated values (still fp32)."""
        c = self.c
        half = c.pieces // 2
        for p in range(half):
            for j in range(8):
                for k in range(2):
                    bias = None
                    if c.bias13:
                        channel = n * 128 + self._channel(p, wg) + 8 * j + 2 * (lane % 4) + k
                        channel = cutlass.min(channel, c.intermediate - 1)
                        at = b13 + (Int64(e) * (2 * c.intermediate) + channel) * 4
                        bias = w.load_f32(at), w.load_f32(at + c.intermediate * 4)
                    for r in range(2):
                        v = 4 * j + 2 * r + k
                        gate, up = accs[p][v], accs[half + p][v]
                        if dequant is not None:
                            gate, up = gate * dequant, up * dequant
                        if bias is not None:
                            gate, up = gate + bias[0], up + bias[1]
                        value = self._activate(gate, up)
                        if weights is not None:
                            value = value * weights[r]
                        accs[p][v] = value

    def _row_amax(self, accs, r):
        """Largest magnitude of row r over this warpgroup's channels; the same in all lanes of a quad."""
        amax = Float32(0.0)
        for p in range(self.c.pieces // 2):
            for j in range(8):
                for k in range(2):
                    amax = quantize.max_nan(amax, quantize.absolute(accs[p][4 * j + 2 * r + k]))
        for s in (1, 2):
            amax = quantize.max_nan(amax, cute.arch.shuffle_sync_bfly(amax, s))
        return amax

    def _store_fp8(self, accs, r, n, wg, lane, scale, inverse, address, ok, selectors):
        """Row r of the gate pieces, divided by scale, as FP8 at `address` (that row of mid)."""
        c = self.c
        for p in range(c.pieces // 2):
            out = []
            for m in range(4):
                q = [quantize.quotient(accs[p][4 * j + 2 * r + k], scale, inverse) for j in (2 * m, 2 * m + 1) for k in range(2)]
                out.append(quantize.pack_fp8(*q, c.e5m2))
            t = w.quad_transpose(out, selectors)
            # Word s: columns 2 s, 2 s + 1 of groups 2 t (low half) and 2 t + 1 (high half).
            t = [w.permute(t[0], t[1], Int32(0x5410)), w.permute(t[2], t[3], Int32(0x5410)),
                 w.permute(t[0], t[1], Int32(0x7632)), w.permute(t[2], t[3], Int32(0x7632))]
            column = n * 128 + self._channel(p, wg) + 16 * (lane % 4)
            w.store_16(address + Int64(column), t, ok & self._inside(column, c.intermediate, 128))

    def _store_bf16(self, acc, r, column, limit, span, lane, address, ok, selectors):
        """Row r of a 64-column piece as bf16 at `column` of the row at `address`; the tile spans `span` columns and is cut at `limit`."""
        for g in range(2):
            out = [quantize.pack_bf16(acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]) for j in range(4 * g, 4 * g + 4)]
            at = column + 32 * g + 8 * (lane % 4)
            w.store_16(address + Int64(at) * 2, w.quad_transpose(out, selectors), ok & self._inside(at, limit, span))

    def _inside(self, column, limit, span):
        """False for columns behind the end of a row whose last tile is partial; constant where there is none."""
        return Boolean(True) if limit % span == 0 else column < limit

    def fc1(self, accs, e, n, pool, valid, routes, row, wg, lane, x_scale, w13_scale, b13, topk_w, mid_static, mid, mid_scale, pool_rows, exchange):
        c = self.c
        selectors = w.quad_selectors(lane)
        dequant = None
        if c.fmt in ("fp8_tensor", "fp8_tensor_e5m2"):
            dequant = w.load_f32(x_scale) * w.load_f32(w13_scale + Int64(e) * 4)
        weights = None
        if c.early:
            weights = [w.load_f32(topk_w + Int64(cutlass.max(routes[row + 8 * r], 0)) * 4) for r in range(2)]
        self._fc1_values(accs, e, n, wg, lane, dequant, weights, b13)
        amax = []
        if c.block_scales:
            amax = [self._row_amax(accs, r) for r in range(2)]
            if c.tile_m == 64:
                amax = exchange(amax)
        for r in range(2):
            ok = row + 8 * r < valid
            address = mid + Int64(pool + row + 8 * r) * (c.intermediate * c.element)
            if c.fmt == "bf16":
                for p in range(c.pieces // 2):
                    self._store_bf16(accs[p], r, n * 128 + self._channel(p, wg), c.intermediate, 128, lane, address, ok, selectors)
                continue
            if c.block_scales:
                scale = quantize.block_scale(amax[r], c.e5m2)
                first = (lane % 4 == 0) & ok
                w.store_f32(mid_scale + (Int64(n) * pool_rows + (pool + row + 8 * r)) * 4, scale, first)
            else:
                scale = w.load_f32(mid_static)
            self._store_fp8(accs, r, n, wg, lane, scale, quantize.reciprocal(scale), address, ok, selectors)

    def fc2(self, accs, e, n, valid, routes, row, wg, lane, mid_static, w2_scale, b2, stage):
        c = self.c
        selectors = w.quad_selectors(lane)
        half = c.pieces // 2
        dequant = None
        if c.fmt in ("fp8_tensor", "fp8_tensor_e5m2"):
            dequant = w.load_f32(mid_static) * w.load_f32(w2_scale + Int64(e) * 4)
        # Pieces 0 .. half - 1 lie in the first 128-column panel, the others in the second.
        columns = [n * 256 + (p // half) * 128 + self._channel(p % half, wg) for p in range(c.pieces)]
        if dequant is not None or c.bias2:
            for p in range(c.pieces):
                for j in range(8):
                    for k in range(2):
                        bias = None
                        if c.bias2:
                            column = cutlass.min(columns[p] + 8 * j + 2 * (lane % 4) + k, c.hidden - 1)
                            bias = w.load_f32(b2 + (Int64(e) * c.hidden + column) * 4)
                        for r in range(2):
                            v = 4 * j + 2 * r + k
                            value = accs[p][v] if dequant is None else accs[p][v] * dequant
                            accs[p][v] = value if bias is None else value + bias
        for r in range(2):
            ok = row + 8 * r < valid
            address = stage + Int64(routes[row + 8 * r]) * (c.hidden * 2)
            for p in range(c.pieces):
                self._store_bf16(accs[p], r, columns[p], c.hidden, 256, lane, address, ok, selectors)
