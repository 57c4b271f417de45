// Number formats: codes to float and float to codes, with every rounding case of the PTX specification.
#pragma once
#include "host.cuh"

// Codes as in the instruction descriptor of tcgen05.mma kind::f8f6f4 and kind::mxf8f6f4 (E2M1 of kind::mxf4 is 1 there: see mma.cuh).
enum Format { FMT_E4M3 = 0, FMT_E5M2 = 1, FMT_E2M3 = 3, FMT_E3M2 = 4, FMT_E2M1 = 5, FMT_F16 = 16, FMT_BF16 = 17, FMT_TF32 = 18, FMT_S8 = 19, FMT_U8 = 20 };

EMU_PURE float power_of_two(int exponent) {  // exact for -149 to 127
  if (exponent >= -126) return float_of((u32)(exponent + 127) << 23);
  return float_of(exponent < -149 ? 0 : 1u << (exponent + 149));
}

// A float with `exponent` exponent bits and `mantissa` mantissa bits, without infinities or NaN.
EMU_PURE float small_to_float(u32 code, int exponent, int mantissa) {
  int bias = (1 << (exponent - 1)) - 1;
  u32 magnitude = code & ((1u << (exponent + mantissa)) - 1), sign = code >> (exponent + mantissa) & 1;
  u32 e = magnitude >> mantissa, m = magnitude & ((1u << mantissa) - 1);
  float value = e ? (float)(m + (1u << mantissa)) * power_of_two((int)e - bias - mantissa) : (float)m * power_of_two(1 - bias - mantissa);
  return sign ? -value : value;
}

EMU_PURE float e4m3_to_float(u32 code) {
  return (code & 0x7f) == 0x7f ? float_of(0x7fffffff) : small_to_float(code, 4, 3);
}

EMU_PURE float e5m2_to_float(u32 code) {
  u32 magnitude = code & 0x7f;
  if (magnitude > 0x7c) return float_of(0x7fffffff);
  if (magnitude == 0x7c) return float_of(code & 0x80 ? 0xff800000 : 0x7f800000);
  return small_to_float(code, 5, 2);
}

EMU_PURE float ue8m0_to_float(u32 code) { return code == 0xff ? float_of(0x7fffffff) : power_of_two((int)code - 127); }

EMU_PURE float f16_to_float(u32 code) {
  u32 magnitude = code & 0x7fff, sign = (code & 0x8000) << 16;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  return small_to_float(code, 5, 10);
}

EMU_PURE float bf16_to_float(u32 code) { return float_of(code << 16); }

EMU_PURE float element_to_float(u32 code, int format) {
  switch (format) {
    case FMT_E4M3: return e4m3_to_float(code & 0xff);
    case FMT_E5M2: return e5m2_to_float(code & 0xff);
    case FMT_E2M3: return small_to_float(code & 0x3f, 2, 3);
    case FMT_E3M2: return small_to_float(code & 0x3f, 3, 2);
    case FMT_E2M1: return small_to_float(code & 0xf, 2, 1);
    case FMT_F16: return f16_to_float(code & 0xffff);
    case FMT_BF16: return bf16_to_float(code & 0xffff);
    case FMT_TF32: return float_of(code & 0xffffe000);
    case FMT_S8: return (float)(int8_t)code;
    default: return (float)(code & 0xff);
  }
}

// Nearest, ties to even, saturating (.rn.satfinite) to a format without infinities; NaN gives the largest positive value.
EMU_PURE u32 float_to_small(float value, int exponent, int mantissa, int relu) {
  int bias = (1 << (exponent - 1)) - 1;
  u32 bits = bits_of(value), sign = bits >> 31, magnitude = bits & 0x7fffffff;
  u32 largest = (1u << (exponent + mantissa)) - 1;
  if (magnitude > 0x7f800000) return largest;
  if (relu && sign) return 0;
  int e = (int)(magnitude >> 23) - 127;
  if (e < 1 - bias) e = 1 - bias;  // below the smallest normal number the spacing stays
  // In units of the spacing at exponent e the value is at most 2^(mantissa + 1), so this float division by a power of two is exact.
  float scaled = float_of(magnitude) * power_of_two(mantissa - e);
  u32 code = largest;
  if (e <= (int)((1u << exponent) - 1) - bias) {
    float floor_part = (float)(u32)scaled, rest = scaled - floor_part;
    u32 units = (u32)scaled;
    units += rest > 0.5f || (rest == 0.5f && (units & 1));
    code = (u32)(e + bias - 1) * (1u << mantissa) + units;  // a carry moves on into the exponent by itself
    if (code > largest) code = largest;
  }
  return code | sign << (exponent + mantissa);
}

// .rz truncates the magnitude to a power of two, .rp rounds it up; the sign is not looked at. What is too large becomes the largest power with
// .satfinite, else NaN.
EMU_PURE u32 float_to_ue8m0(float value, int up, int satfinite) {
  u32 magnitude = bits_of(value) & 0x7fffffff, e = magnitude >> 23, m = magnitude & 0x7fffff;
  if (magnitude > 0x7f800000) return 0xff;
  if (up && m && !(e == 0 && m <= 0x400000)) e++;
  return e > 254 && satfinite ? 254 : e;
}

EMU_PURE u32 ue8m0_to_bf16(u32 code) { return code == 0xff ? 0x7fff : code == 0 ? 0x0040 : code << 7; }
