// Instructions of one warp or one thread: block-scaled mma.sync, 8-bit stmatrix, 4-bit ldmatrix, redux of floats, conversions.
#pragma once
#include "mma.cuh"

struct Four { float v[4]; };

// A byte with one element of mma.sync kind::mxf8f6f4 as a half.
EMU_INLINE u32 byte_half(u32 byte, int format) {
  if (format == FMT_E2M1) return (byte & 0x20) << 10 | (byte & 0x1c) << 7;
  return six_bit_half(byte, format);
}

EMU_INLINE void widen_bytes(u32 word, int format, u32 *pairs) {
  if (format == FMT_E4M3 || format == FMT_E5M2) { widen<2>(word, format, pairs); return; }
  for (int i = 0; i < 2; i++) {
    u32 low = byte_half(word >> (16 * i) & 0xff, format), high = byte_half(word >> (16 * i + 8) & 0xff, format);
    pairs[i] = multiply_pair(halves(low, high), format == FMT_E3M2 ? 0x6c006c00 : 0x74007400);
  }
}

// mma.sync m16n8k32 kind::mxf8f6f4 (vectors = 1) and m16n8k64 kind::mxf4 and kind::mxf4nvf4 (vectors = 2 or 4). Scales come from the lanes
// that the selectors name: rows g and g + 8 of A from lanes 4g + 2 * thread_a and the next, column n of B from lane 4n + thread_b.
EMU_CALL Four megamoe_mma_sync(u32 vectors, u32 e4m3_scales, u32 format_a, u32 format_b, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1, float c2,
                               float c3, u32 scales_a, u32 byte_a, u32 thread_a, u32 scales_b, u32 byte_b, u32 thread_b) {
  u32 g = lane() >> 2, t = lane() & 3, a_words[4] = {a0, a1, a2, a3}, b_words[2] = {b0, b1};
  u32 scale_a[2], scale_b[2];
  for (int i = 0; i < 2; i++) scale_a[i] = __shfl_sync(~0u, scales_a, 4 * g + 2 * thread_a + i) >> (8 * byte_a);
  for (int i = 0; i < 2; i++) scale_b[i] = __shfl_sync(~0u, scales_b, 4 * (2 * t + i) + thread_b) >> (8 * byte_b);
  u32 own_b = __shfl_sync(~0u, scales_b, 4 * g + thread_b) >> (8 * byte_b);
  Four d = {{c0, c1, c2, c3}};
  if (vectors == 1) {
    u32 a[4][2], b[2][2];
    for (int i = 0; i < 4; i++) widen_bytes(a_words[i], format_a, a[i]);
    for (int i = 0; i < 2; i++) widen_bytes(b_words[i], format_b, b[i]);
    float sum[4] = {0, 0, 0, 0};
    for (int j = 0; j < 2; j++) {
      u32 half[4] = {a[0][j], a[1][j], a[2][j], a[3][j]};
      multiply_16(sum, half, b[0][j], b[1][j], false);
    }
    for (int i = 0; i < 4; i++) d.v[i] += scaled(sum[i], scale_a[i >> 1] & 0xff, scale_b[i & 1] & 0xff);
    return d;
  }
  u32 a[4][4], b[2][4];
  for (int i = 0; i < 4; i++) widen<4>(a_words[i], FMT_E2M1, a[i]);
  for (int i = 0; i < 2; i++) widen<4>(b_words[i], FMT_E2M1, b[i]);
  if (vectors == 4 && e4m3_scales) {
    for (int i = 0; i < 4; i++) {
      u32 byte = scale_a[i & 1] >> (8 * ((i >> 1) * 2 + (t >> 1))) & 0xff, factor = e4m3_pair(byte | byte << 8);
      for (int j = 0; j < 4; j++) a[i][j] = multiply_pair(a[i][j], factor);
    }
    for (int i = 0; i < 2; i++) {
      u32 byte = own_b >> (16 * i + 8 * (t >> 1)) & 0xff, factor = e4m3_pair(byte | byte << 8);
      for (int j = 0; j < 4; j++) b[i][j] = multiply_pair(b[i][j], factor);
    }
    for (int j = 0; j < 4; j++) {
      u32 half[4] = {a[0][j], a[1][j], a[2][j], a[3][j]};
      multiply_16(d.v, half, b[0][j], b[1][j], false);
    }
    return d;
  }
  for (int block = 0; block < 2; block++) {
    float sum[4] = {0, 0, 0, 0};
    for (int j = 0; j < 4; j += 2) {
      u32 half[4] = {a[2 * block][j], a[2 * block + 1][j], a[2 * block][j + 1], a[2 * block + 1][j + 1]};
      multiply_16(sum, half, b[block][j], b[block][j + 1], false);
    }
    for (int i = 0; i < 4; i++) d.v[i] += scaled(sum[i], scale_a[i >> 1] >> (8 * block) & 0xff, scale_b[i & 1] >> (8 * block) & 0xff);
  }
  return d;
}

// stmatrix.m16n8.trans.b8, matrix `index`: 8 rows of 16 bytes whose addresses lanes 8 * index and on give.
EMU_CALL void megamoe_stmatrix_b8(u32 address, u32 value, u32 index) {
  u32 column = lane() >> 2;
  for (int i = 0; i < 2; i++) {
    u32 row = __shfl_sync(~0u, address, (lane() & 3) * 2 + i + 8 * index);
    store_shared8(shared_of(row + column, cluster_rank()), value >> (8 * i));
    store_shared8(shared_of(row + column + 8, cluster_rank()), value >> (8 * i + 16));
  }
  __syncwarp();
}

// ldmatrix.m8n16.b8x16.b4x16_p64, matrix `index`: 16 four-bit elements of a row, each to a byte of its own.
EMU_CALL u32 megamoe_ldmatrix_b4(u32 address, u32 index) {
  u32 row = __shfl_sync(~0u, address, (lane() >> 2) + 8 * index);
  u32 packed = load_shared16(shared_of(row + (lane() & 3) * 2, cluster_rank()));
  return (packed & 0xf) | (packed & 0xf0) << 4 | (packed & 0xf00) << 8 | (packed & 0xf000) << 12;
}

// redux.sync of floats. operation: 0 min, 1 max; bit 1: of absolute values; bit 2: NaN wins.
EMU_CALL float megamoe_redux(u32 operation, float value, u32 members) {
  if (operation & 2) value = fabsf(value);
  float result = value;
  for (u32 i = 0; i < 32; i++) {
    if (!(members >> i & 1)) continue;
    float other = __shfl_sync(members, value, i);
    if (operation & 4 && !(other == other)) result = other;
    else if (!(operation & 4 && !(result == result))) result = operation & 1 ? fmaxf(result, other) : fminf(result, other);
  }
  return result;
}

// cvt.rn.satfinite.{e2m1x2,e2m3x2,e3m2x2}.f32: the first operand becomes the upper code.
EMU_CALL u32 megamoe_to_narrow(u32 format, u32 relu, float high, float low) {
  int exponent = format == FMT_E3M2 ? 3 : 2, mantissa = format == FMT_E2M1 ? 1 : format == FMT_E2M3 ? 3 : 2;
  u32 h = float_to_small(high, exponent, mantissa, relu), l = float_to_small(low, exponent, mantissa, relu);
  return format == FMT_E2M1 ? h << 4 | l : h << 8 | l;
}

// cvt.rn.f16x2.{e2m1x2,e2m3x2,e3m2x2}.
EMU_CALL u32 megamoe_from_narrow(u32 format, u32 relu, u32 codes) {
  u32 pair = format == FMT_E2M1 ? e2m1_pair(codes)
                                : multiply_pair(halves(six_bit_half(codes & 0xff, format), six_bit_half(codes >> 8 & 0xff, format)), format == FMT_E2M3 ? 0x74007400 : 0x6c006c00);
  if (relu) pair &= ~((pair >> 15 & 0x00010001) * 0xffffu);
  return pair;
}

// mode: bit 0 rounds up, bit 1 saturates.
EMU_CALL u32 megamoe_to_ue8m0(u32 mode, float high, float low) {
  return float_to_ue8m0(high, mode & 1, mode >> 1) << 8 | float_to_ue8m0(low, mode & 1, mode >> 1);
}

EMU_CALL u32 megamoe_bf16_to_ue8m0(u32 mode, u32 pair) { return megamoe_to_ue8m0(mode, bf16_to_float(pair >> 16), bf16_to_float(pair & 0xffff)); }

EMU_CALL u32 megamoe_from_ue8m0(u32 codes) { return ue8m0_to_bf16(codes & 0xff) | ue8m0_to_bf16(codes >> 8 & 0xff) << 16; }
