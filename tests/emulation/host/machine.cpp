// The emulation's device functions on the host's machine, called by number for one thread at a time.
#define EMULATION_MACHINE "machine.h"
#include "async.cuh"
#include "tensor.cuh"
#include "warp.cuh"

static float real(u64 bits) { return float_of((u32)bits); }

static void call(Fiber &f) {
  const u64 *a = f.arguments;
  u64 *r = f.result;
  r[0] = r[1] = 0;
  switch (f.function) {
    case 0: megamoe_begin(a[0], a[1], a[2], a[3]); break;
    case 1: megamoe_end(); break;
    case 2: megamoe_end_delayed(); break;
    case 3: r[0] = megamoe_waiting(a[0], a[1]); break;
    case 4: r[0] = megamoe_waiting_delayed(a[0], a[1]); break;
    case 5: megamoe_tmem_alloc(a[0], a[1], a[2]); break;
    case 6: megamoe_tmem_dealloc(a[0], a[1], a[2]); break;
    case 7: megamoe_tmem_relinquish(a[0]); break;
    case 8: r[0] = megamoe_tmem_address(a[0], a[1], a[2], a[3], a[4]); break;
    case 9: megamoe_mma(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]); break;
    case 10: megamoe_copy(a[0], a[1], a[2], a[3], a[4], a[5]); break;
    case 11: megamoe_commit(a[0], a[1], a[2], a[3]); break;
    case 12: r[0] = megamoe_tensor_load(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]); break;
    case 13: r[0] = megamoe_tensor_store(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]); break;
    case 14: megamoe_try_cancel(a[0], a[1], a[2]); break;
    case 15: {
      Four d = megamoe_mma_sync(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], real(a[10]), real(a[11]), real(a[12]), real(a[13]),
                                a[14], a[15], a[16], a[17], a[18], a[19]);
      memcpy(r, &d, 16);
      break;
    }
    case 16: megamoe_stmatrix_b8(a[0], a[1], a[2]); break;
    case 17: r[0] = megamoe_ldmatrix_b4(a[0], a[1]); break;
    case 18: r[0] = bits_of(megamoe_redux(a[0], real(a[1]), a[2])); break;
    case 19: r[0] = megamoe_to_narrow(a[0], a[1], real(a[2]), real(a[3])); break;
    case 20: r[0] = megamoe_from_narrow(a[0], a[1], a[2]); break;
    case 21: r[0] = megamoe_to_ue8m0(a[0], real(a[1]), real(a[2])); break;
    case 22: r[0] = megamoe_bf16_to_ue8m0(a[0], a[1]); break;
    case 23: r[0] = megamoe_from_ue8m0(a[0]); break;
  }
}

static void entry() {
  Fiber &f = machine.fibers[machine.current];
  call(f);
  f.done = true;
  swapcontext(&f.context, &machine.scheduler);
}

extern "C" {

void machine_start(int ctas, int count, int shared_bytes, u32 seed) {
  machine.ctas = ctas, machine.count = count, machine.shared_bytes = shared_bytes, machine.clock = 0;
  machine.barriers.clear();
  for (Warp &w : machine.warps) w = Warp();
  for (Fiber &f : machine.fibers) f.function = -1;
  for (int i = 0; i < MOST_CTAS; i++) machine.at_barrier[i] = 0, machine.barrier_meeting[i] = 0;
  memset(machine.shared, 0, sizeof machine.shared);
  memset(tmem_cells, 0, sizeof tmem_cells);
  memset(::ctas, 0, sizeof ::ctas);
  memset(tmem_taken, 0, sizeof tmem_taken);
  memset(tmem_owner, 0, sizeof tmem_owner);
  megamoe_fault = Fault();
  megamoe_seed = seed;
}

// Thread `index` of the cluster begins a call.
void machine_call(int index, int function, int n, const u64 *arguments) {
  Fiber &f = machine.fibers[index];
  f.function = function;
  f.done = false;
  memcpy(f.arguments, arguments, n * sizeof(u64));
  f.stack.resize(STACK);
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.data();
  f.context.uc_stack.ss_size = STACK;
  f.context.uc_link = nullptr;
  makecontext(&f.context, entry, 0);
}

// Every thread that is in a call goes on until it waits or is done, again and again until one is done (or for a while, in case they wait for
// a thread that is in none). Fills `finished` with those that are, and returns how many.
int machine_step(int *finished) {
  int n = 0;
  for (int round = 0; n == 0 && round < 100; round++) {
    for (int i = 0; i < machine.ctas * machine.count; i++) {
      if (machine.fibers[i].function < 0) continue;
      machine.current = i;
      swapcontext(&machine.scheduler, &machine.fibers[i].context);
      if (machine.fibers[i].done) {
        machine.fibers[i].function = -1;
        finished[n++] = i;
      }
    }
  }
  return n;
}

const u64 *machine_result(int index) { return machine.fibers[index].result; }
u8 *machine_shared(u32 address) { return shared_at(address); }
void machine_fault(void *record) { memcpy(record, &megamoe_fault, sizeof megamoe_fault); }

void barrier_init(u32 barrier, int count) { machine.barriers[barrier] = {count, count, 0, 0}; }
void barrier_arrive(u32 barrier) { arrive(barrier); }
void barrier_complete(u32 barrier, int bytes) { complete_bytes(barrier, bytes); }
void barrier_expect(u32 barrier, int bytes) {
  Barrier &b = machine.barriers.at(barrier);
  b.bytes += bytes;
  b.pending--;
  barrier_settle(b);
}
int barrier_passed(u32 barrier, int parity) { return machine.barriers.count(barrier) && machine.barriers[barrier].phase != parity; }
}
