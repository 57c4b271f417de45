// The emulation's device functions for kernels that tests/machine runs.
#define EMULATION_MACHINE "host_machine.h"
#include "host.cuh"

#include "async.cuh"
#include "tensor.cuh"
#include "warp.cuh"

extern "C" {

// Before a launch.
void emulation_start(u32 seed) {
  memset(tmem_cells, 0, sizeof tmem_cells);
  memset(ctas, 0, sizeof ctas);
  memset(tmem_taken, 0, sizeof tmem_taken);
  memset(tmem_owner, 0, sizeof tmem_owner);
  memset(warps, 0, sizeof warps);
  megamoe_fault = Fault();
  megamoe_seed = seed;
  strict_masks = false;  // lanes that poll a barrier go on together, as many as there are
}

// After it.
void emulation_end(void *record) {
  memcpy(record, &megamoe_fault, sizeof megamoe_fault);
  strict_masks = true;
}

// Address and bytes of each part of the emulation's state. Kernels touch the first two themselves: tensor memory, and where refused accesses go.
void emulation_memory(u64 *out) {
#define PART(name) *out++ = (u64)&name, *out++ = sizeof name;
  PART(tmem_cells) PART(tmem_scratch) PART(tmem_taken) PART(tmem_owner) PART(ctas) PART(queued) PART(megamoe_fault)
}
}
