// Numbers and products: needs struct Warp with `operands`, warp(), lane() and __syncwarp().
#pragma once

// ---- numbers, by the compiler's own half type rather than by the functions under test ----

static inline float half_float(u32 bits) { u16 b = (u16)bits; _Float16 h; memcpy(&h, &b, 2); return (float)h; }
static inline u32 half_bits(float value) { _Float16 h = (_Float16)value; u16 b; memcpy(&b, &h, 2); return b; }
static inline float small_value(u32 code, int exponent, int mantissa) {
  int bias = (1 << (exponent - 1)) - 1, e = code >> mantissa & ((1 << exponent) - 1), m = code & ((1 << mantissa) - 1);
  float v = e ? ldexpf(1.0f + ldexpf((float)m, -mantissa), e - bias) : ldexpf((float)m, 1 - bias - mantissa);
  return code >> (exponent + mantissa) & 1 ? -v : v;
}
static inline float eight_bits(u32 code, bool e5m2) {
  if (e5m2) return half_float(code << 8);  // the upper byte of a half
  return (code & 0x7f) == 0x7f ? NAN : small_value(code, 4, 3);
}
static inline u32 e4m3_pair(u32 v) { return half_bits(eight_bits(v & 0xff, false)) | half_bits(eight_bits(v >> 8 & 0xff, false)) << 16; }
static inline u32 e5m2_pair(u32 v) { return half_bits(eight_bits(v & 0xff, true)) | half_bits(eight_bits(v >> 8 & 0xff, true)) << 16; }
static inline u32 multiply_pair(u32 a, u32 b) {
  return half_bits(half_float(a & 0xffff) * half_float(b & 0xffff)) | half_bits(half_float(a >> 16) * half_float(b >> 16)) << 16;
}

// mma.sync m16n8k16 from the specification's fragment figures. Every lane shows its operands, then computes its four elements.
static inline void multiply_16(float *c, const u32 *a, u32 b0, u32 b1, bool bf16) {
  Warp &w = warp();
  u32 words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  for (int i = 0; i < 6; i++)
    for (int half = 0; half < 2; half++) {
      u32 bits = words[i] >> (16 * half) & 0xffff;
      w.operands[lane()][2 * i + half] = bf16 ? float_of(bits << 16) : half_float(bits);
    }
  __syncwarp();
  u32 group = lane() / 4, in_group = lane() % 4;
  for (int i = 0; i < 4; i++) {
    u32 row = group + 8 * (i / 2), column = 2 * in_group + i % 2;
    double sum = c[i];
    for (u32 k = 0; k < 16; k++) {
      // A: registers 0 and 1 hold rows g and g + 8 for k below 8, registers 2 and 3 for the rest; B: register k / 8, lane 4 * column + ...
      float x = w.operands[row % 8 * 4 + k % 8 / 2][2 * (row / 8 + 2 * (k / 8)) + k % 2];
      float y = w.operands[column * 4 + k % 8 / 2][2 * (4 + k / 8) + k % 2];
      sum += (double)x * y;
    }
    c[i] = (float)sum;
  }
  __syncwarp();
}
