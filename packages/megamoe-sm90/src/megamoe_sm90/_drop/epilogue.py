"""What happens to a warpgroup's accumulators: FC1 -> activation -> re-quantization -> mid; FC2 -> bf16 rows by route.

Fragment order of a wgmma result: value 4 j + 2 r + k of a 64 x 64 piece is row lane / 4 + 8 r, column 8 j + 2 (lane % 4) + k. The four
lanes of a quad hold a row; a transpose inside the quad gives every lane 16 contiguous bytes, so rows are stored straight from registers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from megamoe.device import quantize

from . import words as w


class Epilogue:
    """Mixin: `self.c` is the NativeConfig. All methods are plain Python: they run while the kernel is traced."""

    def _activate(self, gates, ups):
        """Gated activation of two channels: they share one reciprocal (the special-function unit limits this epilogue)."""
        c = self.c
        terms = []
        for i in range(2):
            if c.limit is not None:
                gates[i] = w.min_nan(gates[i], Float32(c.limit))
                ups[i] = quantize.max_nan(w.min_nan(ups[i], Float32(c.limit)), Float32(-c.limit))
            # The bound keeps the product below finite; 2 ** -60 is as good as 0 for the sigmoid. NaN comes back through the factor `gate`.
            terms.append(1.0 + w.exp2(cute.arch.fmin(gates[i] * (-c.alpha * w.LOG2E), Float32(60.0))))
        inverse = w.rcp(terms[0] * terms[1])
        if c.up_bias != 0.0:
            ups = [up + c.up_bias for up in ups]
        return [ups[i] * (gates[i] * (inverse * terms[1 - i])) for i in range(2)]

    def _fc1_values(self, part, accs, e, n, lane, weights, b13):
        """accs[p] of the gate pieces become the activated values (still fp32)."""
        c = self.c
        half = part.pieces // 2
        for p in range(half):
            for j in range(8):
                bias = None
                if c.bias13:
                    channel = n * 128 + part.channel(p) + 8 * j + 2 * (lane % 4)
                    at = [b13 + (Int64(e) * (2 * c.intermediate) + cutlass.min(channel + k, c.intermediate - 1)) * 4 for k in range(2)]
                    bias = [(w.load_f32(x), w.load_f32(x + c.intermediate * 4)) for x in at]
                for r in range(2):
                    v = 4 * j + 2 * r
                    gates, ups = [accs[p][v], accs[p][v + 1]], [accs[half + p][v], accs[half + p][v + 1]]
                    if bias is not None:
                        gates, ups = [gates[k] + bias[k][0] for k in range(2)], [ups[k] + bias[k][1] for k in range(2)]
                    for k, value in enumerate(self._activate(gates, ups)):
                        accs[p][v + k] = value if weights is None else value * weights[r]

    def _row_amax(self, part, accs, r):
        """Largest magnitude of row r over this warpgroup's channels; the same in all lanes of a quad."""
        amax = Float32(0.0)
        for p in range(part.pieces // 2):
            for j in range(8):
                for k in range(2):
                    amax = quantize.max_nan(amax, quantize.absolute(accs[p][4 * j + 2 * r + k]))
        for s in (1, 2):
            amax = quantize.max_nan(amax, cute.arch.shuffle_sync_bfly(amax, s))
        return amax

    def _store_fp8(self, part, accs, r, n, lane, scale, inverse, address, ok, selectors):
        """Row r of the gate pieces, divided by scale, as FP8 at `address` (that row of mid)."""
        c = self.c
        for p in range(part.pieces // 2):
            out = []
            for m in range(4):
                q = [quantize.quotient(accs[p][4 * j + 2 * r + k], scale, inverse) for j in (2 * m, 2 * m + 1) for k in range(2)]
                out.append(quantize.pack_fp8(*q, c.e5m2))
            t = w.quad_transpose(out, selectors)
            # Word s: columns 2 s, 2 s + 1 of groups 2 t (low half) and 2 t + 1 (high half).
            t = [
                w.permute(t[0], t[1], Int32(0x5410)),
                w.permute(t[2], t[3], Int32(0x5410)),
                w.permute(t[0], t[1], Int32(0x7632)),
                w.permute(t[2], t[3], Int32(0x7632)),
            ]
            column = n * 128 + part.channel(p) + 16 * (lane % 4)
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

    def result_row(self, stage, route):
        """Where the FC2 row of a route goes."""
        return stage + Int64(route) * (self.c.hidden * 2)

    def weight_of(self, topk_w, route):
        """Where the routing weight of a route lies; -1, a row without a route, reads the first."""
        return topk_w + Int64(cutlass.max(route, 0)) * 4

    def fc1(self, part, accs, e, n, pool, valid, routes, lane, b13, topk_w, mid_static, mid, mid_scale, pool_rows, exchange):
        c = self.c
        row = part.row
        selectors = w.quad_selectors(lane)
        weights = None
        if c.early:
            weights = [w.load_f32(self.weight_of(topk_w, routes[row + 8 * r])) for r in range(2)]
        self._fc1_values(part, accs, e, n, lane, weights, b13)
        amax = []
        if c.block_scales:
            amax = [self._row_amax(part, accs, r) for r in range(2)]
            if part.split:
                amax = exchange(amax)
        for r in range(2):
            ok = row + 8 * r < valid
            address = mid + Int64(pool + row + 8 * r) * (c.intermediate * c.element)
            if c.fmt == "bf16":
                for p in range(part.pieces // 2):
                    self._store_bf16(accs[p], r, n * 128 + part.channel(p), c.intermediate, 128, lane, address, ok, selectors)
                continue
            if c.block_scales:
                scale = quantize.block_scale(amax[r], c.e5m2)
                first = (lane % 4 == 0) & ok
                w.store_f32(mid_scale + (Int64(n) * pool_rows + (pool + row + 8 * r)) * 4, scale, first)
            else:
                scale = w.load_f32(mid_static)
            self._store_fp8(part, accs, r, n, lane, scale, quantize.reciprocal(scale), address, ok, selectors)

    def fc2(self, part, accs, e, n, valid, routes, lane, b2, stage):
        c = self.c
        row = part.row
        selectors = w.quad_selectors(lane)
        half = part.pieces // 2
        # Pieces 0 .. half - 1 lie in the first 128-column panel, the others in the second.
        columns = [n * 256 + (p // half) * 128 + part.channel(p % half) for p in range(part.pieces)]
        if c.bias2:
            for p in range(part.pieces):
                for j in range(8):
                    for k in range(2):
                        column = cutlass.min(columns[p] + 8 * j + 2 * (lane % 4) + k, c.hidden - 1)
                        bias = w.load_f32(b2 + (Int64(e) * c.hidden + column) * 4)
                        for r in range(2):
                            v = 4 * j + 2 * r + k
                            accs[p][v] = accs[p][v] + bias
        for r in range(2):
            ok = row + 8 * r < valid
            address = self.result_row(stage, routes[row + 8 * r])
            for p in range(part.pieces):
                self._store_bf16(accs[p], r, columns[p], c.hidden, 256, lane, address, ok, selectors)
