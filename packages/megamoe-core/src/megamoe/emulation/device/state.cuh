// What an emulated device keeps: tensor memory, one record a CTA, and the first fault.
#pragma once
#include "layout.cuh"
#include "machine.cuh"
#include "numbers.cuh"

enum { SLOTS = 160, LANES = 128, COLUMNS = 512, CHUNK = 32, CTAS = 1 << 16, QUEUES = 2048, QUEUE = 64 };
static const u32 POISON = 0xffffffff;  // NaN as float, as two halves and as two bfloat16, 255 (NaN) as E4M3 and UE8M0
static const u32 ALONE = 0xffffffff;   // instead of an elected lane: the calling thread acts by itself

enum FaultCode {
  FAULT_TIMEOUT = 1, FAULT_TMEM_BOUNDS, FAULT_TMEM_ALLOC_SIZE, FAULT_TMEM_RELINQUISHED, FAULT_TMEM_DEALLOC, FAULT_TMEM_LEFTOVER,
  FAULT_SUB_PARTITION, FAULT_DESCRIPTOR, FAULT_IDESC, FAULT_SHARED_LIMIT, FAULT_SHARED_BOUNDS, FAULT_TENSOR_MAP, FAULT_NOT_EMULATED, FAULT_MMA_PAIR, FAULT_TMEM_ALIGNMENT
};

// Read by the host after a launch; the first fault stays.
struct Fault { u32 claimed, code, line, cta; u64 first, second; };
extern "C" {
EMU_STATE Fault megamoe_fault = {0, 0, 0, 0, 0, 0};
}

// Of delayed mode; the host may write another one between launches.
extern "C" {
EMU_STATE u32 megamoe_seed = 1;
}

// TMEM belongs to an SM, so its image does: [%smid][lane][column].
EMU_STATE alignas(256) u32 tmem_cells[SLOTS * LANES * COLUMNS];
EMU_STATE u32 tmem_taken[SLOTS];                    // a bit for every 32 columns
EMU_STATE u32 tmem_owner[SLOTS * COLUMNS / CHUNK];  // 1 + key of the CTA that holds these columns

struct Cta {
  u64 start, limit;         // ns
  u32 slot;                 // 1 + %smid while it runs
  u32 live;                 // threads that have not left
  u32 relinquished;
  u32 seed;                 // 0: operations take effect at once
  u32 serial;               // random numbers drawn
  u32 adding;               // held while an operation enters its queue
  u32 lock, head, tail;     // its queue of delayed operations; the lock is held while one takes effect
};
EMU_STATE Cta ctas[CTAS];

// A number that no two running CTAs of a launch share, and that a CTA can tell for its peers in the cluster.
EMU_INLINE u32 cta_key(u32 rank) { return (cluster_index() * cluster_size() + rank) & (CTAS - 1); }
EMU_INLINE Cta *own_cta() { return &ctas[cta_key(cluster_rank())]; }

EMU_INLINE void report(u32 code, u32 line, u64 first, u64 second) {
  if (atomicCAS(&megamoe_fault.claimed, 0, 1)) return;
  megamoe_fault.line = line;
  megamoe_fault.cta = cta_key(cluster_rank());
  megamoe_fault.first = first;
  megamoe_fault.second = second;
  __threadfence();
  atomicExch(&megamoe_fault.code, code);
}

// Whether waiting any longer is in vain: this CTA's time is over, or another one's was.
EMU_INLINE bool expired(Cta *cta, u32 line, u64 what) {
  if (*(volatile u32 *)&megamoe_fault.code == FAULT_TIMEOUT) return true;
  if (now() - *(volatile u64 *)&cta->start < *(volatile u64 *)&cta->limit) return false;
  report(FAULT_TIMEOUT, line, what, 0);
  return true;
}

EMU_INLINE u32 random_draw(Cta *cta) {
  u32 x = cta->seed * 0x9e3779b9u + cta_key(cluster_rank()) * 0x85ebca6bu + atomicAdd(&cta->serial, 1) * 0xc2b2ae35u;
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// ---- tensor memory ----

EMU_INLINE u32 *cell(u32 slot, u32 row, u32 column) { return tmem_cells + ((size_t)slot * LANES + row) * COLUMNS + column; }

// Reports columns [first, first + count) unless the CTA with this key holds them all.
EMU_INLINE bool columns_owned(u32 slot, u32 key, u32 first, u32 count, u32 line) {
  bool held = first + count <= COLUMNS;
  for (u32 chunk = first / CHUNK; held && chunk <= (first + count - 1) / CHUNK; chunk++)
    held = *(volatile u32 *)&tmem_owner[slot * (COLUMNS / CHUNK) + chunk] == key + 1;
  if (!held) report(FAULT_TMEM_BOUNDS, line, first, count);
  return held;
}

// The SM of a CTA of this cluster; SLOTS when it is gone or never came.
EMU_INLINE u32 slot_of(u32 rank, u32 line) {
  if (rank == cluster_rank()) return sm();
  volatile Cta *peer = &ctas[cta_key(rank)];
  while (!peer->slot) {
    if (expired(own_cta(), line, rank)) return SLOTS;
    __nanosleep(100);
  }
  return peer->slot - 1;
}

EMU_INLINE u32 shared_of(u32 address, u32 rank) { return (address & 0xffffff) | rank << 24; }
