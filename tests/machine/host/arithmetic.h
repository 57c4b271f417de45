/* Arithmetic of PTX on the bits of its registers. */
#pragma once
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "machine.h"

static inline float f(u32 bits) { float v; memcpy(&v, &bits, 4); return v; }
static inline u32 bits(float v) { u32 b; memcpy(&b, &v, 4); return b; }
static inline double d(u64 bits) { double v; memcpy(&v, &bits, 8); return v; }
static inline u64 bits(double v) { u64 b; memcpy(&b, &v, 8); return b; }

static const u32 NAN_BITS = 0x7fffffff; /* as the GPU writes it */
static inline u32 canonical(float v) { return v != v ? NAN_BITS : bits(v); }
static inline float flushed(float v) { return fabsf(v) < 1.17549435e-38f ? copysignf(0.0f, v) : v; }

static inline float max_number(float a, float b) { return a != a ? b : b != b ? a : a == b ? (signbit(a) ? b : a) : a > b ? a : b; }
static inline float min_number(float a, float b) { return a != a ? b : b != b ? a : a == b ? (signbit(a) ? a : b) : a < b ? a : b; }
static inline float max_nan(float a, float b) { return a != a || b != b ? f(NAN_BITS) : max_number(a, b); }
static inline float min_nan(float a, float b) { return a != a || b != b ? f(NAN_BITS) : min_number(a, b); }

template <class T> static inline T smaller(T a, T b) { return a < b ? a : b; }
template <class T> static inline T larger(T a, T b) { return a > b ? a : b; }
template <class T> static inline T left(T a, u32 by) { return by >= 8 * sizeof(T) ? 0 : (T)(a << by); }
template <class T> static inline T right(T a, u32 by) { /* arithmetic for signed types */
  const u32 most = 8 * sizeof(T) - 1;
  return by > most ? ((T)-1 < 0 ? (T)(a >> most) : 0) : (T)(a >> by);
}
template <class T> static inline T quotient(T a, T b) { return b == 0 || (b == (T)-1 && (T)-1 < 0) ? (b == 0 ? (T)-1 : (T)(0 - a)) : (T)(a / b); }
template <class T> static inline T remainder_of(T a, T b) { return b == 0 ? a : b == (T)-1 && (T)-1 < 0 ? 0 : (T)(a % b); }

static inline u32 permute(u32 a, u32 b, u32 selector) {
  const u64 both = a | (u64)b << 32;
  u32 out = 0;
  for (int i = 0; i < 4; i++) {
    const u32 pick = selector >> (4 * i) & 15;
    u32 byte = (u32)(both >> (8 * (pick & 7))) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << (8 * i);
  }
  return out;
}
static inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 out = 0;
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return out;
}
static inline u32 shf_left(u32 low, u32 high, u32 by) { return by == 0 ? high : by >= 32 ? low : high << by | low >> (32 - by); }
static inline u32 shf_right(u32 low, u32 high, u32 by) { return by == 0 ? low : by >= 32 ? high : low >> by | high << (32 - by); }
template <class T> static inline T field(T value, u32 from, u32 length) { /* bfe */
  const u32 width = 8 * sizeof(T);
  from &= 255, length &= 255;
  if (length == 0) return 0;
  const bool is_signed = (T)-1 < 0;
  const u32 sign_at = from + length - 1 < width - 1 ? from + length - 1 : width - 1;
  const T sign = is_signed && (value >> sign_at & 1) ? (T)-1 : 0;
  if (from >= width) return sign;
  const u32 have = length < width - from ? length : width - from;
  const u64 mask = have >= 64 ? ~0ull : (1ull << have) - 1;
  return (T)(((u64)(value >> from) & mask) | ((u64)sign & ~mask));
}
static inline u32 insert_field(u32 a, u32 b, u32 from, u32 length) { /* bfi: a into b */
  from &= 255, length &= 255;
  if (from >= 32 || length == 0) return b;
  const u32 mask = (length >= 32 ? ~0u : (1u << length) - 1) << from;
  return (b & ~mask) | (a << from & mask);
}
/* fns: position of the n-th set bit at or above the base (n > 0), at or below it (n < 0), of the base itself (0). */
static inline u32 find_nth_set(u32 mask, u32 base, u32 n) {
  if (n == 0) return mask >> base & 1 ? base : ~0u;
  const int step = (s32)n > 0 ? 1 : -1;
  int count = abs((s32)n);
  for (int at = (int)base; at >= 0 && at < 32; at += step)
    if (mask >> at & 1 && --count == 0) return (u32)at;
  return ~0u;
}
static inline u32 reversed(u32 v) { u32 out = 0; for (int i = 0; i < 32; i++) out |= (v >> i & 1) << (31 - i); return out; }

/* ---- narrow floating point ---- */
static inline u16 to_bf16(float v) {
  const u32 b = bits(v);
  return v != v ? 0x7fff : (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
static inline float from_bf16(u16 v) { return f((u32)v << 16); }
static inline u16 to_f16(float v) { if (v != v) return 0x7fff; _Float16 h = (_Float16)v; u16 b; memcpy(&b, &h, 2); return b; }
static inline float from_f16(u16 v) { _Float16 h; memcpy(&h, &v, 2); return (float)h; }
/* Nearest even into a format with `mantissa` bits and this bias; what is larger than `largest` becomes it. */
static inline u8 to_fp8(float v, int mantissa, int bias, float largest, u8 largest_code) {
  const u8 sign = signbit(v) ? 128 : 0;
  float a = fabsf(v);
  if (a != a) return 127;
  int exponent = a == 0 ? 1 - bias : ilogbf(a < 3e38f ? a : 3e38f);
  if (exponent < 1 - bias) exponent = 1 - bias;
  const float step = ldexpf(1.0f, exponent - mantissa);
  a = rintf(a / step) * step; /* a power of two: exact, but for the rounding itself */
  if (a >= largest) return sign | largest_code;
  if (a < ldexpf(1.0f, 1 - bias)) return sign | (u8)(a / ldexpf(1.0f, 1 - bias - mantissa));
  exponent = ilogbf(a);
  return sign | (u8)((exponent + bias) << mantissa) | (u8)((a / ldexpf(1.0f, exponent) - 1.0f) * (1 << mantissa));
}
static inline u8 to_e4m3(float v) { return to_fp8(v, 3, 7, 448.0f, 0x7e); }
static inline u8 to_e5m2(float v) { return to_fp8(v, 2, 15, 57344.0f, 0x7b); }
static inline float from_e5m2(u8 v) { return from_f16((u16)(v << 8)); }
static inline float from_e4m3(u8 v) {
  const int exponent = v >> 3 & 15, mantissa = v & 7;
  const float magnitude = (v & 127) == 127 ? f(NAN_BITS) : exponent ? ldexpf(8.0f + mantissa, exponent - 10) : ldexpf((float)mantissa, -9);
  return v & 128 ? -magnitude : magnitude;
}
static inline u16 pair(u8 high, u8 low) { return (u16)(high << 8 | low); }
static inline u32 pair(u16 high, u16 low) { return (u32)high << 16 | low; }
