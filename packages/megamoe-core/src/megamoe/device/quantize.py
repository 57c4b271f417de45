"""Activation quantization inside the launch: bf16 rows -> FP8 rows and scales, exactly as the format modules define it."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from megamoe.device import memory

SMALLEST_AMAX = 1e-10


def max_nan(a, b):
    """Maximum that keeps NaN."""
    return cute.arch.inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def absolute(a):
    return cute.arch.inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def divide(a, b):
    """IEEE division, rounded to nearest."""
    return cute.arch.inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def reciprocal(a):
    return cute.arch.inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def quotient(a, b, inverse):
    """a / b with b's reciprocal at hand: one Newton step on the quotient gives the correctly rounded result in the normal range."""
    q = a * inverse
    rest = cute.math.fma(-q, b, a)
    return cute.math.fma(rest, inverse, q)


def largest(e5m2):
    return 57344.0 if e5m2 else 448.0


def pack_fp8(a, b, c, d, e5m2):
    """Four floats, saturated and rounded to nearest even, as the bytes of one word (a lowest)."""
    kind = "e5m2x2" if e5m2 else "e4m3x2"
    return cute.arch.inline_ptx(
        "{ .reg .b16 lo, hi; "
        f"cvt.rn.satfinite.{kind}.f32 lo, {{$r1}}, {{$r0}}; "
        f"cvt.rn.satfinite.{kind}.f32 hi, {{$r3}}, {{$r2}}; "
        "mov.b32 {$w0}, {lo, hi}; }",
        write_only_types=[Int32],
        read_only_args=[a, b, c, d],
    )


def pack_bf16(a, b):
    """Two floats as bf16 in one word (a low)."""
    return cute.arch.inline_ptx("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[a, b])


def bf16_low(word):
    return cute.arch.inline_ptx("shl.b32 {$w0}, {$r0}, 16;", write_only_types=[Float32], read_only_args=[word])


def bf16_high(word):
    return cute.arch.inline_ptx("and.b32 {$w0}, {$r0}, 0xffff0000;", write_only_types=[Float32], read_only_args=[word])


def unpack_e4m3(word):
    """The four floats of pack_fp8, exactly."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 lo, hi, a, b, c, d; .reg .b32 x, y; mov.b32 {lo, hi}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 x, lo; cvt.rn.f16x2.e4m3x2 y, hi; mov.b32 {a, b}, x; mov.b32 {c, d}, y; "
        "cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; cvt.f32.f16 {$w2}, c; cvt.f32.f16 {$w3}, d; }",
        write_only_types=[Float32] * 4,
        read_only_args=[word],
    )


def bits_of(value):
    """The bits of a float32."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def float_of(bits):
    """The float32 with these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def mxfp8_block(values):
    """Eight floats of a lane, of a block of 32 in four neighbouring lanes, as MXFP8: (UE8M0 byte of the block, two words of E4M3).

    The byte is that of the smallest power of two not below amax / 448; 255, which is NaN, where a value is not finite.
    """
    amax = absolute(values[0])
    for value in values[1:]:
        amax = max_nan(amax, absolute(value))
    for s in (1, 2):
        amax = max_nan(amax, cute.arch.shuffle_sync_bfly(amax, s))
    bits = bits_of(amax * Float32(1.0 / 448.0))
    byte = cutlass.min((bits >> 23) + Int32((bits & 0x7FFFFF) != 0), 255)
    factor = float_of((254 - cutlass.min(byte, 253)) << 23)
    scaled = [value * factor for value in values]
    return byte, (pack_fp8(*scaled[:4], False), pack_fp8(*scaled[4:], False))


def mxfp8_values(words, byte):
    """Eight floats from two words of E4M3 and their block's UE8M0 byte."""
    # 255 << 23 would be infinity; byte 0 comes with zeros alone.
    scale = float_of((byte << 23) | (Int32(byte == 255) << 22))
    return [value * scale for word in words for value in unpack_e4m3(word)]


def block_scale(amax, e5m2):
    """max(amax, smallest) / largest; NaN stays NaN."""
    return divide(max_nan(amax, Float32(SMALLEST_AMAX)), Float32(largest(e5m2)))


def segment_chunks(hidden, most):
    """256-column chunks of a segment: the most that divide a row evenly."""
    row = -(-hidden // 256)
    return max(n for n in range(1, most + 1) if row % n == 0)


@cute.jit
def quantize_rows(
    x: Int64,
    xq: Int64,
    xs: Int64,
    static_scale: Float32,
    tokens: Int32,
    hidden: cutlass.Constexpr,
    block_scales: cutlass.Constexpr,
    e5m2: cutlass.Constexpr,
    many: cutlass.Constexpr,
    warp: Int32,
    warps: Int32,
    lane: Int32,
):
    """Quantize `tokens` rows of `hidden` bf16 values: 1 x 128 blocks with their own scale into xs, or one static scale.

    `warp` of `warps` over the grid takes a segment of a row at a time; `many` tokens: longer segments, for more loads in flight.
    """
    chunks = segment_chunks(hidden, 8 if many else 4)
    segments = -(-hidden // (256 * chunks))
    unit = warp
    while unit < tokens * segments:
        token = unit // segments
        column = (unit - token * segments) * (256 * chunks) + lane * 8
        words = []
        for i in cutlass.range_constexpr(chunks):
            # Lanes behind the end of the row load its first columns again: all lanes take part in the shuffles.
            inside = cutlass.min(column + 256 * i, hidden - 8)
            words.append(memory.ld_v4(x + (Int64(token) * hidden + inside) * 2))
        for i in cutlass.range_constexpr(chunks):
            v = []
            for w in cutlass.range_constexpr(4):
                v.append(bf16_low(words[i][w]))
                v.append(bf16_high(words[i][w]))
            scale = static_scale
            if cutlass.const_expr(block_scales):
                amax = absolute(v[0])
                for k in cutlass.range_constexpr(1, 8):
                    amax = max_nan(amax, absolute(v[k]))
                for s in cutlass.range_constexpr(4):
                    amax = max_nan(amax, cute.arch.shuffle_sync_bfly(amax, 1 << s))
                scale = block_scale(amax, e5m2)
            inverse = reciprocal(scale)
            q = [quotient(value, scale, inverse) for value in v]
            if column + 256 * i < hidden:
                at = Int64(token) * hidden + (column + 256 * i)
                memory.st_v2(xq + at, pack_fp8(q[0], q[1], q[2], q[3], e5m2), pack_fp8(q[4], q[5], q[6], q[7], e5m2))
                if cutlass.const_expr(block_scales):
                    if lane % 16 == 0:
                        memory.st_f32(xs + at // 128 * 4, scale)
        unit = unit + warps
