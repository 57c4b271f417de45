/* Checked memory: global accesses lie in registered buffers, shared ones in the CTA's memory, all aligned. */
#include <algorithm>
#include "state.h"

static const Machine::Buffer* find(u64 address, u64 size) {
  auto next = std::upper_bound(M->buffers.begin(), M->buffers.end(), address, [](u64 a, auto& b) { return a < b.begin; });
  if (next == M->buffers.begin()) return nullptr;
  --next;
  return address + size <= next->end ? &*next : nullptr;
}

void check_global(Thread* t, u64 address, u64 size, u32 alignment) {
  if (address % alignment) fail(t, format("global address %#llx is not aligned to %u bytes", (unsigned long long)address, alignment));
  if (!find(address, size))
    fail(t, format("%llu bytes at global address %#llx lie in no buffer of the launch", (unsigned long long)size, (unsigned long long)address));
}

void* global_at(Thread* t, u64 address, u32 size, bool write) {
  check_global(t, address, size, size);
  if (write) M->progress++;
  pause_sometimes(fiber(t));
  return (void*)address;
}

char* shared_of(Fiber* t, u64 address, u32 size, Cta** whose) {
  const u32 rank = (u32)address >> 24, offset = (u32)address & 0xffffff;
  if (address >> 32 || rank >= t->of->cluster->ctas.size()) fail(t, format("%#llx is no shared address", (unsigned long long)address));
  Cta* cta = t->of->cluster->ctas[rank];
  if (offset < SHARED_BEGIN || offset + size > cta->shared_end)
    fail(t, format("%u bytes at shared offset %d lie outside the %u bytes of the CTA", size, (int)(offset - SHARED_BEGIN),
                   cta->shared_end - SHARED_BEGIN));
  if (cta->left == 0) fail(t, format("shared memory of CTA %u, which has ended", cta->index));
  if (whose) *whose = cta;
  return cta->shared + offset;
}

void* shared_at(Thread* t, u64 address, u32 size, bool write) {
  if (address % size) fail(t, format("shared offset %d is not aligned to %u bytes", (int)((address & 0xffffff) - SHARED_BEGIN), size));
  char* at = shared_of(fiber(t), address, size);
  pause_sometimes(fiber(t));
  return at;
}

void* generic_at(Thread* t, u64 address, u32 size, bool write) {
  return address >> 32 ? global_at(t, address, size, write) : shared_at(t, address, size, write);
}

void polled(Thread* thread, u64 address, u64 seen) {
  Fiber* t = fiber(thread);
  if (t->poll_address == address && t->poll_value == seen) {
    M->pollers.push_back(t);
    wait(t, POLL);
    return;
  }
  t->poll_address = address, t->poll_value = seen;
  pause_sometimes(t);
}

void stored(Thread* t) {
  M->progress++;
  pause_sometimes(fiber(t));
}
