// The machine below the emulation's device functions where there is no GPU: tests/machine, whose threads are fibers. It takes the place of
// device/machine.cuh. Memory is sequentially consistent: this shows what the functions compute, not that their fences suffice. For that they are
// compiled with -fsanitize=thread: the compiler then calls a function before every access (accesses.h), which tells the machine's check of order.
#pragma once
#include <math.h>
#include <utility>

#include "../../machine/host/machine.h"

#define EMU_CALL extern "C"
#define EMU_INLINE static inline
#define EMU_FUNCTION static
#define EMU_STATE
#define EMU_LOOP

struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }

#include "accesses.h"

enum { MOST_SMS = 160, MOST_WARPS = 32 };
struct Warp {
  float operands[32][12];
  int line;                    // where lanes gather
  u32 gathering, together[32]; // those that do; by lane, whom it has met
};

static Warp warps[MOST_SMS][MOST_WARPS];

static inline u32 sm() { return running->smid; }
static inline u32 lane() { return running->lane; }
static inline u32 cluster_rank() { return running->rank; }
static inline u32 cluster_size() { return running->ranks; }
static inline u64 now() {  // whoever looks at the clock waits for others
  yield(running);
  return globaltimer(running);
}
static inline u32 thread() { return running->tid; }
static inline u32 threads() { return running->block; }
static inline u32 cluster_index() {
  const u32 *c = running->cluster, *g = running->grid, *at = running->cta;
  return at[0] / c[0] + g[0] / c[0] * (at[1] / c[1] + g[1] / c[1] * (at[2] / c[2]));
}
static inline Warp &warp() { return warps[running->smid][running->warp]; }

#ifdef __SANITIZE_THREAD__
static inline const void *shared_place(u32 a, u32 size) { return shared_at(running, a, size, false); }
#else  // without checks: these are most of the time
static inline const void *shared_place(u32 a, u32) { return running->windows[a >> 24] + (a & 0xffffff); }
#endif
template <class T> static inline T shared_load(u32 a) { T v; memcpy(&v, shared_place(a, sizeof v), sizeof v); return v; }
static inline u32 load_shared(u32 a) { return shared_load<u32>(a); }
static inline u32 load_shared16(u32 a) { return shared_load<u16>(a); }
static inline u32 load_shared8(u32 a) { return shared_load<u8>(a); }
static inline void store_shared(u32 a, uint4 v) { memcpy(shared_at(running, a, 16, true), &v, 16); }
static inline void store_shared32(u32 a, u32 v) { memcpy(shared_at(running, a, 4, true), &v, 4); }
static inline void store_shared8(u32 a, u32 v) { memcpy(shared_at(running, a, 1, true), &v, 1); }
static inline u32 shared_begin() { return 1024; }
static inline u32 shared_size() { return running->shared_bytes; }
static inline void cluster_fence() { memory_fence(running, SCOPE_CLUSTER | ACQUIRE | RELEASE); }
static inline void shared_proxy_fence() { proxy_fence(running, true, false); }
static inline void all_proxies_fence() { proxy_fence(running, true, true); }
static inline u64 global_address(const void *p) { return (u64)p; }
static inline void complete_bytes(u32 barrier, u32 bytes) { mbarrier_complete(running, barrier, bytes); }
static inline void arrive(u32 barrier) { mbarrier_arrive(running, barrier, 1, 0, false); }

// Lanes that come while the first of them waits for its next turn go on together; at another line each goes alone.
static inline u32 __activemask() {
  Warp &w = warp();
  const u32 own = 1u << lane();
  if (w.gathering && w.line != running->line) return own;
  w.line = running->line, w.gathering |= own, w.together[lane()] = 0;
  yield(running);
  if (!w.together[lane()])
    for (u32 i = 0, all = std::exchange(w.gathering, 0); i < 32; i++)
      if (all >> i & 1) w.together[i] = all;
  return w.together[lane()];
}
static inline void __syncwarp(u32 mask = ~0u) { warp_sync(running, mask); }
template <class T> static inline T __shfl_sync(u32 mask, T value, u32 source) {
  u32 words[2] = {0, 0};
  memcpy(words, &value, sizeof value);
  for (u32 i = 0; i < sizeof value / 4; i++) words[i] = shfl(running, SHFL_IDX, words[i], source, 31, mask, nullptr);
  memcpy(&value, words, sizeof value);
  return value;
}
static inline int __any_sync(u32 mask, int value) { return ballot(running, value != 0, mask) != 0; }
static inline void __syncthreads() { bar_sync(running, 0, 0); }
static inline void __threadfence() { memory_fence(running, SCOPE_GPU | ACQUIRE | RELEASE); }
static inline void __nanosleep(u32 nanoseconds) { sleep_for(running, nanoseconds); }
static inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
static inline int __popc(u32 x) { return __builtin_popcount(x); }
UNTOLD static u32 atomicAdd(u32 *p, u32 v) { tell(p, 4, true, SCOPE_GPU | ATOMIC); u32 old = *p; *p += v; return old; }
UNTOLD static u32 atomicSub(u32 *p, u32 v) { tell(p, 4, true, SCOPE_GPU | ATOMIC); u32 old = *p; *p -= v; return old; }
UNTOLD static u32 atomicAnd(u32 *p, u32 v) { tell(p, 4, true, SCOPE_GPU | ATOMIC); u32 old = *p; *p &= v; return old; }
UNTOLD static u32 atomicExch(u32 *p, u32 v) { tell(p, 4, true, SCOPE_GPU | ATOMIC); u32 old = *p; *p = v; return old; }
UNTOLD static u32 atomicCAS(u32 *p, u32 compare, u32 v) { tell(p, 4, true, SCOPE_GPU | ATOMIC); u32 old = *p; if (old == compare) *p = v; return old; }
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline void __stcg(T *p, T v) { *p = v; }

#include "products.h"
