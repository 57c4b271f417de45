"""Register-level helpers of the epilogues: byte permutes, quad transposes, predicated 16-byte stores, the activation."""

import cutlass.cute as cute
from cutlass import Float32, Int32

LOG2E = 1.4426950408889634


def permute(a, b, selector):
    return cute.arch.inline_ptx("prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[a, b, selector])


def quad_selectors(lane):
    """(send, low, high) byte selectors of the two exchange rounds of `quad_transpose`, by the lane's bits 0 and 1."""
    out = []
    for bit in range(2):
        odd = (lane >> bit) & 1
        # An even lane sends word b and receives into b; an odd lane sends a and receives into a.
        out.append((Int32(0x7654) - odd * 0x4444, Int32(0x3210) + odd * 0x4444))
    return out


def quad_transpose(words, selectors):
    """Words w[0..3] of the four lanes of a quad, transposed: lane t gets word t of lanes 0 to 3."""
    w = list(words)
    for bit, pairs in ((0, ((0, 1), (2, 3))), (1, ((0, 2), (1, 3)))):
        send, keep = selectors[bit]
        for a, b in pairs:
            got = cute.arch.shuffle_sync_bfly(permute(w[a], w[b], send), 1 << bit)
            # keep = 0x3210 (even): a stays, b becomes got; 0x7654 (odd): a becomes got, b stays.
            w[a], w[b] = permute(w[a], got, keep), permute(got, w[b], keep)
    return w


def store_16(address, words, predicate):
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words], predicate=predicate)


def store_f32(address, value, predicate):
    cute.arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, value], predicate=predicate)


def load_f32(address):
    """A constant of this launch."""
    return cute.arch.inline_ptx("ld.global.nc.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def fma_here(a, b, c):
    """a * b + c between the side effects around it; the compiler moves a plain one to where it is used."""
    return cute.arch.inline_ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c])


def min_nan(a, b):
    return cute.arch.inline_ptx("min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def exp2(a):
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def rcp(a):
    return cute.arch.inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])
