/* Named barriers, cluster barriers, and mbarriers, whose state is the word in shared memory. */
#include <string.h>
#include "state.h"

void bar_sync(Thread* thread, u32 id, u32 threads) {
  Fiber* t = fiber(thread);
  if (id > 15) fail(t, format("barrier %u; there are 0 to 15", id));
  Bar& bar = t->of->bars[id];
  if (!threads) threads = t->block;
  if (threads % 32) fail(t, format("barrier %u for %u threads, no multiple of 32", id, threads));
  if (bar.expected && bar.expected != threads) fail(t, format("barrier %u waits for %u threads, not %u", id, bar.expected, threads));
  bar.expected = threads;
  if (++bar.arrived == threads) {
    M->progress++;
    bar.expected = bar.arrived = 0;
    bar.waiters.push_back(t);
    order_together(bar.waiters, &bar.order);
    bar.waiters.pop_back();
    wake_all(bar.waiters);
    return;
  }
  bar.waiters.push_back(t);
  wait(t, BAR);
}

void bar_arrive(Thread* thread, u32 id, u32 threads) {
  Fiber* t = fiber(thread);
  if (id > 15 || !threads || threads % 32) fail(t, format("barrier %u for %u threads", id, threads));
  Bar& bar = t->of->bars[id];
  if (bar.expected && bar.expected != threads) fail(t, format("barrier %u waits for %u threads, not %u", id, bar.expected, threads));
  bar.expected = threads;
  order_release(t, bar.order);
  if (++bar.arrived == threads) {
    M->progress++;
    bar.expected = bar.arrived = 0;
    order_together(bar.waiters, &bar.order);
    wake_all(bar.waiters);
  }
}

void cluster_arrive(Thread* thread) {
  Fiber* t = fiber(thread);
  Cluster* c = t->of->cluster;
  t->cluster_phase = c->phase;
  order_release(t, c->arriving);
  if (++c->arrived == c->threads) {
    M->progress++;
    c->arrived = 0;
    c->phase++;
    c->order = std::move(c->arriving);
    c->arriving = {};
    wake_all(c->waiters);
  }
}

void cluster_wait(Thread* thread) {
  Fiber* t = fiber(thread);
  Cluster* c = t->of->cluster;
  if (c->phase == t->cluster_phase) {
    c->waiters.push_back(t);
    wait(t, CLUSTER);
  }
  order_acquire(t, c->order);
}

struct Word { /* of an mbarrier; shared memory that was never written has `foreign` set */
  s64 pending : 21, expected : 21, bytes : 20;
  u64 phase : 1, foreign : 1;
};
static_assert(sizeof(Word) == 8, "");
static const s64 MOST_COUNT = (1 << 20) - 1, MOST_BYTES = (1 << 19) - 1;

static Word load(char* at, int line, Cta* cta) {
  Word w;
  memcpy(&w, at, 8);
  if (w.foreign) fail_at(format("line %d: shared offset %d of CTA %u is no mbarrier", line, (int)(at - cta->shared - SHARED_BEGIN), cta->index));
  return w;
}

static char* barrier_at(Thread* t, u64 address, Cta** cta) {
  if (address % 8) fail(t, format("mbarrier at shared offset %d, which is not aligned to 8", (int)((address & 0xffffff) - SHARED_BEGIN)));
  return shared_of(fiber(t), address, 8, cta);
}

static void store(char* at, Word w, Cta* cta) {
  const bool flips = w.pending == 0 && w.bytes == 0;
  if (flips) w.phase ^= 1, w.pending = w.expected;
  memcpy(at, &w, 8);
  M->progress++;
  if (!flips) return;
  order_flip(at, cta);
  auto waiters = M->barrier_waiters.find(at);
  if (waiters == M->barrier_waiters.end()) return;
  std::vector<Fiber*> list;
  list.swap(waiters->second);
  M->barrier_waiters.erase(waiters);
  wake_all(list);
}

void mbarrier_init(Thread* t, u64 address, u32 count) {
  Cta* cta;
  char* at = barrier_at(t, address, &cta);
  if (count < 1 || count > MOST_COUNT) fail(t, format("mbarrier for %u arrivals", count));
  Word w{};
  w.pending = w.expected = count;
  order_init(fiber(t), at, cta);
  memcpy(at, &w, 8);
}

void mbarrier_inval(Thread* t, u64 address) {
  Cta* cta;
  char* at = barrier_at(t, address, &cta);
  load(at, t->line, cta);
  memset(at, 0xff, 8);
}

static void change(char* at, s64 arrivals, s64 bytes, int line, Cta* cta, bool drop = false) {
  Word w = load(at, line, cta);
  const std::string where = format("line %d: mbarrier at shared offset %d of CTA %u", line, (int)(at - cta->shared - SHARED_BEGIN), cta->index);
  if (arrivals > w.pending) fail_at(where + format(" gets %lld arrivals, %lld are open", (long long)arrivals, (long long)w.pending));
  if (w.bytes + bytes > MOST_BYTES || w.bytes + bytes < -MOST_BYTES) fail_at(where + " overflows its count of bytes");
  w.pending -= arrivals;
  w.bytes += bytes;
  if (drop) w.expected -= arrivals;
  store(at, w, cta);
}

u64 mbarrier_arrive(Thread* t, u64 address, u32 count, s64 expected_bytes, bool drop) {
  Cta* cta;
  char* at = barrier_at(t, address, &cta);
  const u64 phase = load(at, t->line, cta).phase;
  order_arrive(fiber(t), at, cta);
  if (expected_bytes) change(at, 0, expected_bytes, t->line, cta);
  change(at, count, 0, t->line, cta, drop);
  pause_sometimes(fiber(t));
  return phase;
}

void mbarrier_expect(Thread* t, u64 address, u32 bytes) {
  Cta* cta;
  char* at = barrier_at(t, address, &cta);
  change(at, 0, bytes, t->line, cta);
}

void mbarrier_complete(Thread* t, u64 address, u32 bytes) {
  Cta* cta;
  char* at = barrier_at(t, address, &cta);
  order_complete(fiber(t), at, cta);
  change(at, 0, -(s64)bytes, t->line, cta);
}

void complete_bytes(char* barrier, u32 bytes, int line, Cta* cta) { change(barrier, 0, -(s64)bytes, line, cta); }

void arrive_on(char* barrier, u32 count, int line, Cta* cta) {
  if (count) change(barrier, count, 0, line, cta);
  else { /* an arrival that was not counted before */
    Word w = load(barrier, line, cta);
    w.pending++;
    memcpy(barrier, &w, 8);
  }
}

/* True once the phase of this parity has ended. Hardware may say no too early, so a call that waits does at times too. */
u8 mbarrier_wait(Thread* thread, u64 address, u32 parity, bool blocks) {
  Fiber* t = fiber(thread);
  Cta* cta;
  char* at = barrier_at(t, address, &cta);
  if (load(at, t->line, cta).phase != (parity & 1)) {
    order_waited(t, at, cta);
    pause_sometimes(t);
    return 1;
  }
  if (!blocks) {
    polled(t, (u64)at, 0);
    return 0;
  }
  t->barrier = at;
  M->barrier_waiters[at].push_back(t);
  wait(t, MBARRIER);
  if (chance(16)) return 0;
  if (load(at, t->line, cta).phase == (parity & 1)) return 0;
  order_waited(t, at, cta);
  return 1;
}
