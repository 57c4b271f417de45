/* Checked memory: global accesses lie in registered buffers, shared ones in the CTA's memory, all aligned. */
#include <algorithm>
#include "state.h"

Machine::Buffer* buffer_of(u64 address, u64 size) {
  auto next = std::upper_bound(M->buffers.begin(), M->buffers.end(), address, [](u64 a, auto& b) { return a < b.begin; });
  if (next == M->buffers.begin()) return nullptr;
  --next;
  return address + size <= next->end ? &*next : nullptr;
}

void check_global(Thread* t, u64 address, u64 size, u32 alignment) {
  if (address % alignment) fail(t, format("global address %#llx is not aligned to %u bytes", (unsigned long long)address, alignment));
  if (!buffer_of(address, size))
    fail(t, format("%llu bytes at global address %#llx lie in no buffer of the launch", (unsigned long long)size, (unsigned long long)address));
}

void* global_at(Thread* t, u64 address, u32 size, bool write, u32 how) {
  check_global(t, address, size, size);
  if (write) {
    M->progress++;
    generic_write(fiber(t), (void*)address, size, nullptr);
  }
  pause_sometimes(fiber(t));
  return order_access(fiber(t), (void*)address, size, write, how, nullptr);
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

void* shared_at(Thread* t, u64 address, u32 size, bool write, u32 how) {
  if (address % size) fail(t, format("shared offset %d is not aligned to %u bytes", (int)((address & 0xffffff) - SHARED_BEGIN), size));
  Cta* cta;
  char* at = shared_of(fiber(t), address, size, &cta);
  if (write) generic_write(fiber(t), at, size, cta);
  pause_sometimes(fiber(t));
  return order_access(fiber(t), at, size, write, how, cta);
}

void* generic_at(Thread* t, u64 address, u32 size, bool write, u32 how) {
  return address >> 32 ? global_at(t, address, size, write, how) : shared_at(t, address, size, write, how);
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

/* ---- order between the generic and the asynchronous proxy ---- */

/* The records of some bytes; none where no buffer has any. */
static Written* records(const void* at, u32 size, Cta* shared, bool make, u32* count) {
  const u64 address = (u64)at;
  u64 begin;
  std::vector<Written>* all;
  if (shared) {
    begin = (u64)shared->shared + SHARED_BEGIN, all = &shared->written;
  } else {
    Machine::Buffer* buffer = buffer_of(address, size);
    if (!buffer || (buffer->written.empty() && !make)) return nullptr;
    if (buffer->written.empty()) buffer->written.resize(buffer->end / GRANULE - buffer->begin / GRANULE + 1);
    begin = buffer->begin, all = &buffer->written;
  }
  const u64 first = address / GRANULE - begin / GRANULE;
  *count = (u32)((address + size - 1) / GRANULE - address / GRANULE) + 1;
  return &(*all)[first];
}

void generic_write(Fiber* t, const void* at, u32 size, Cta* shared) {
  u32 count = 0;
  Written* w = records(at, size, shared, true, &count);
  M->now++;
  for (u32 i = 0; i < count; i++) w[i] = {M->now, t->of->first_warp + t->warp, t->line};
}

void async_write(const void* at, u32 size, Cta* shared) {
  u32 count = 0;
  Written* w = records(at, size, shared, false, &count);
  for (u32 i = 0; w && i < count; i++) w[i].time = 0;
}

/* Seen is what the warp that wrote it, or one of those that read now, has fenced since. */
std::vector<u32> unseen(Fiber* t, const void* at, u32 size, Cta* shared, u32 warps) {
  u32 count = 0;
  std::vector<u32> found;
  Written* w = records(at, size, shared, false, &count);
  if (!w) return found;
  const u32 own = t->of->first_warp + t->warp / warps * warps;
  auto fenced = [&](u32 warp) { return shared ? M->fences[warp].shared : M->fences[warp].global; };
  for (u32 i = 0; i < count; i++) {
    if (!w[i].time || fenced(w[i].warp) > w[i].time) continue;
    bool seen = false;
    for (u32 k = 0; k < warps; k++) seen |= fenced(own + k) > w[i].time;
    if (seen) continue;
    if (!M->unseen_loads++)
      M->unseen = place_of(t) + format(": the asynchronous proxy reads what line %d wrote, and there is no fence.proxy.async between", w[i].line);
    found.push_back(i * GRANULE);
  }
  return found;
}

void async_read(Fiber* t, const void* at, u32 size, Cta* shared, u32 warps) {
  if (!unseen(t, at, size, shared, warps).empty()) fail_at(M->unseen);
}

void proxy_fence(Thread* thread, bool shared, bool global) {
  Fiber* t = fiber(thread);
  ProxyFences& f = M->fences[t->of->first_warp + t->warp];
  M->now++;
  if (shared) {
    f.shared = M->now;
    order_proxy_fence(t);
  }
  if (global) f.global = M->now;
}
