// The emulation's device functions for kernels that tests/machine runs.
#define EMULATION_MACHINE "on_machine.h"
#include "host.cuh"

#include "async.cuh"
#include "tensor.cuh"
#include "warp.cuh"

extern "C" {

// Before a launch.
void emulation_start(u32 bytes, u32 seed) {
  shared_bytes = bytes;
  memset(shared_base, 0, sizeof shared_base);
  memset(tmem_cells, 0, sizeof tmem_cells);
  memset(ctas, 0, sizeof ctas);
  memset(tmem_taken, 0, sizeof tmem_taken);
  memset(tmem_owner, 0, sizeof tmem_owner);
  megamoe_fault = Fault();
  megamoe_seed = seed;
}

// Before every call: who calls.
void emulation_enter(Thread *t) {
  if (!shared_base[t->smid] && shared_bytes) shared_base[t->smid] = (char *)shared_at(t, t->shared, 1, false) - 1024;
  self = t;
}

void emulation_fault(void *record) { memcpy(record, &megamoe_fault, sizeof megamoe_fault); }

// Tensor memory as kernels see it: address and bytes of its cells, then of where refused accesses go.
void emulation_memory(u64 *out) {
  out[0] = (u64)tmem_cells, out[1] = sizeof tmem_cells, out[2] = (u64)tmem_scratch, out[3] = sizeof tmem_scratch;
}

// fns.b32: position of the n-th set bit at or above the base (n > 0), at or below it (n < 0), of the base itself (0).
u32 find_nth_set(u32 mask, u32 base, int n) {
  if (n == 0) return mask >> base & 1 ? base : ~0u;
  int step = n > 0 ? 1 : -1, count = n > 0 ? n : -n;
  for (int at = (int)base; at >= 0 && at < 32; at += step)
    if (mask >> at & 1 && --count == 0) return (u32)at;
  return ~0u;
}
}
