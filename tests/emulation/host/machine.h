// The machine below the emulation's device functions, on the host: threads are fibers of one process, a warp's meetings are explicit.
//
// Fibers switch where threads may wait for each other and nowhere else, so memory is sequentially consistent: this shows what the functions
// compute, not that their fences suffice. Clusters have up to four CTAs of up to 512 threads.
#pragma once
#include <math.h>
#include <ucontext.h>

#include <map>
#include <set>
#include <vector>

#define EMU_CALL extern "C"
#define EMU_INLINE static inline
#define EMU_FUNCTION static
#define EMU_STATE
#define EMU_LOOP

struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }

enum { MOST_CTAS = 4, MOST_THREADS = 512, SHARED = 256 * 1024, STACK = 256 * 1024 };

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  int function = -1;  // -1: not in a call
  bool done = false;
  u64 arguments[24];
  u64 result[2];
};

struct Barrier { int count, pending; long long bytes; int phase; };

struct Warp {
  u32 arrived = 0;
  u64 met[32] = {};  // how many meetings each lane has had
  u64 shown[32];
  float operands[32][12];
};

struct Machine {
  int ctas = 1, count = 0, shared_bytes = 0;
  u64 clock = 0;
  u8 shared[MOST_CTAS][SHARED];
  Fiber fibers[MOST_CTAS * MOST_THREADS];
  Warp warps[MOST_CTAS * MOST_THREADS / 32];
  int at_barrier[MOST_CTAS] = {};
  u64 barrier_meeting[MOST_CTAS] = {};
  std::map<u32, Barrier> barriers;
  ucontext_t scheduler;
  int current = 0;
};
static Machine machine;

static inline void yield_fiber() { swapcontext(&machine.fibers[machine.current].context, &machine.scheduler); }

static inline u32 thread() { return machine.current % machine.count; }
static inline u32 threads() { return machine.count; }
static inline u32 lane() { return thread() % 32; }
static inline u32 cluster_rank() { return machine.current / machine.count; }
static inline u32 cluster_size() { return machine.ctas; }
static inline u32 cluster_index() { return 0; }
static inline u32 sm() { return 3 + cluster_rank(); }
static inline u64 now() { return machine.clock += 10000; }  // every look at the clock takes 10 us
static inline u32 shared_begin() { return 1024; }
static inline u32 shared_size() { return machine.shared_bytes; }
static inline Warp &warp() { return machine.warps[machine.current / 32]; }

static inline u8 *shared_at(u32 address) { return &machine.shared[address >> 24][address & 0xffffff]; }
template <class T> static inline T shared_load(u32 a) { T v; memcpy(&v, shared_at(a), sizeof v); return v; }
static inline u32 load_shared(u32 a) { return shared_load<u32>(a); }
static inline u32 load_shared16(u32 a) { return shared_load<u16>(a); }
static inline u32 load_shared8(u32 a) { return shared_load<u8>(a); }
static inline void store_shared(u32 a, uint4 v) { memcpy(shared_at(a), &v, 16); }
static inline void store_shared32(u32 a, u32 v) { memcpy(shared_at(a), &v, 4); }
static inline void store_shared8(u32 a, u32 v) { *shared_at(a) = (u8)v; }
static inline void cluster_fence() {}
static inline void shared_proxy_fence() {}
static inline void all_proxies_fence() {}
static inline u64 global_address(const void *p) { return (u64)p; }

// ---- barriers in shared memory ----

static inline void barrier_settle(Barrier &b) {
  if (b.pending == 0 && b.bytes == 0) { b.phase ^= 1; b.pending = b.count; }
}
static inline void arrive(u32 barrier) { Barrier &b = machine.barriers.at(barrier); b.pending--; barrier_settle(b); }
static inline void complete_bytes(u32 barrier, u32 bytes) { Barrier &b = machine.barriers.at(barrier); b.bytes -= bytes; barrier_settle(b); }

// ---- a warp's meetings ----

static inline void __syncwarp(u32 mask = 0xffffffff) {
  Warp &w = warp();
  u64 met = w.met[lane()];
  w.arrived |= 1u << lane();
  if ((w.arrived & mask) == mask) {
    w.arrived &= ~mask;
    for (u32 i = 0; i < 32; i++) w.met[i] += mask >> i & 1;
  }
  while (w.met[lane()] == met) yield_fiber();
}
template <class T> static inline T __shfl_sync(u32 mask, T value, u32 source) {
  Warp &w = warp();
  memcpy(&w.shown[lane()], &value, sizeof value);
  __syncwarp(mask);
  memcpy(&value, &w.shown[source % 32], sizeof value);
  __syncwarp(mask);
  return value;
}
static inline u32 __activemask() { return 1u << lane(); }  // each thread waits for itself
static inline int __any_sync(u32 mask, int value) {
  int any = 0;
  for (u32 i = 0; i < 32; i++)
    if (mask >> i & 1) any |= __shfl_sync(mask, value, i);
  return any;
}
static inline void __syncthreads() {
  u32 cta = cluster_rank();
  u64 meeting = machine.barrier_meeting[cta];
  if (++machine.at_barrier[cta] == machine.count) { machine.at_barrier[cta] = 0; machine.barrier_meeting[cta]++; return; }
  while (machine.barrier_meeting[cta] == meeting) yield_fiber();
}
static inline void __threadfence() {}
static inline void __nanosleep(u32) { yield_fiber(); }
static inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
static inline int __popc(u32 x) { return __builtin_popcount(x); }
static inline u32 atomicAdd(u32 *p, u32 v) { u32 old = *p; *p += v; return old; }
static inline u32 atomicSub(u32 *p, u32 v) { u32 old = *p; *p -= v; return old; }
static inline u32 atomicAnd(u32 *p, u32 v) { u32 old = *p; *p &= v; return old; }
static inline u32 atomicExch(u32 *p, u32 v) { u32 old = *p; *p = v; return old; }
static inline u32 atomicCAS(u32 *p, u32 compare, u32 v) { u32 old = *p; if (old == compare) *p = v; return old; }
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline void __stcg(T *p, T v) { *p = v; }

#include "products.h"
