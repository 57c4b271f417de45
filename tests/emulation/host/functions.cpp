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
  megamoe_fault = Fault();
  megamoe_seed = seed;
}

void emulation_fault(void *record) { memcpy(record, &megamoe_fault, sizeof megamoe_fault); }

// Tensor memory as kernels see it: address and bytes of its cells, then of where refused accesses go.
void emulation_memory(u64 *out) {
  out[0] = (u64)tmem_cells, out[1] = sizeof tmem_cells, out[2] = (u64)tmem_scratch, out[3] = sizeof tmem_scratch;
}
}
