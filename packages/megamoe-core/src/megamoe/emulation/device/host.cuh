// Functions that touch no GPU are plain C++: nvcc compiles them for the device, a host compiler for tests of every single value.
#pragma once
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define EMU_PURE __device__ __forceinline__
#else
#include <math.h>
#define EMU_PURE static inline
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

EMU_PURE u32 bits_of(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}

EMU_PURE float float_of(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
