/* What happens before what, and data races.

Actors are threads and, for what copies do on their own, one each for: the copies that complete on an mbarrier (a phase is a time), a
thread's cp.async, the writes and the reads of its bulk stores. An actor's clock says up to which time of every other actor all has happened
before. A thread's time goes on whenever others may learn of what it did: the PTX model's release patterns. Acquire patterns learn. Both must
have scopes that reach the other; a CTA is reached by cta, its cluster by cluster, a GPU by gpu, other GPUs by sys. What reaches a word stays with it over atomics and
ends with other stores. The access itself checks all that may conflict with it: two to the same bytes, one of them a write, not both of them
strong with scopes that reach, and neither before the other. It is no race

- to write what is there already;
- to write shared memory that lanes of a warp have read before they converged (shfl, vote, wgmma, ...), for one that knows of the convergence:
  PTX does not say so, but a warp's accesses to shared memory happen in order, and libraries rely on it. It does not hold for what they write;
- to read, in an interval that was said to be loose, what is written at the same time: such words arrive as poison.

Bulk and tensor copies may write over what threads and cp.async have accessed in shared memory, and read what those have written, only if a
proxy fence lies between, too: behind the access and before the copy, in any thread on the way. So a thread has a second clock, of what such
fences came behind. It becomes the first one at a fence, and others learn both. What lanes have read before their warp converged is behind
every later fence of the warp. Any other change of the proxy needs no more than the wait for a copy. Copies from global memory are left to
memory.cpp, which asks for a fence of the warp that wrote or reads.

The products of wgmma, ldmatrix, stmatrix and copies from shared memory to shared memory are left out. So is what is read of a buffer that no
other run knows before the first write to it. */
#include <string.h>
#include <algorithm>
#include "state.h"

static const u32 SCOPES = 7;

static u32 at(const Clock& clock, u32 who) { return who < clock->size() ? (*clock)[who] : 0; }

static void join(std::vector<u32>& into, const std::vector<u32>& other) {
  if (into.size() < other.size()) into.resize(other.size());
  u32* a = into.data();
  const u32* b = other.data();
  for (size_t i = 0, n = other.size(); i < n; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
}
static void reach(std::vector<u32>& clock, u32 who, u32 time) {
  if (who >= clock.size()) clock.resize(M->order->places.size());
  clock[who] = std::max(clock[who], time);
}

/* A clock that others may hold, to be changed. */
static std::vector<u32>& own(Clock& clock) {
  if (clock.use_count() > 1) clock = std::make_shared<std::vector<u32>>(*clock);
  return *clock;
}

static bool within(const std::vector<u32>& part, const std::vector<u32>& whole) {
  const size_t n = std::min(part.size(), whole.size());
  bool all = std::all_of(part.begin() + n, part.end(), [](u32 time) { return !time; });
  for (size_t i = 0; i < n; i++) all &= part[i] <= whole[i];
  return all;
}
/* What is fenced seldom changes: most clocks stay as they are, or become one that is there already. */
static void join_fenced(Clock& into, const Clock& other) {
  if (!other || other == into || within(*other, *into)) return;
  if (within(*into, *other)) into = other;
  else join(own(into), *other);
}

static u32 new_actor(u32 gpu, u32 cta, u32 thread, const char* what, bool async = false) {
  M->order->places.push_back({gpu, cta, thread, what, async, 0});
  return M->order->places.size() - 1;
}

/* The least scope with which one reaches the other. */
static u32 distance(u32 gpu, u32 cta, const Place& p) {
  const auto& clusters = M->order->clusters;
  return p.gpu != gpu ? SCOPE_SYS : p.cta == cta ? SCOPE_CTA : clusters[p.cta] == clusters[cta] ? SCOPE_CLUSTER : SCOPE_GPU;
}
static u32 distance(const Actor& a, u32 who) { return distance(a.gpu, a.cta, M->order->places[who]); }

static bool knows(const Actor& a, u32 who, u32 time) { return who == a.who || who == a.strong || at(a.clock, who) >= time; }

static bool knows(const Actor& a, const Access& x) {
  if (knows(a, x.who, x.time)) return true;
  const u32 warp = M->order->places[x.who].warp;
  return x.converged && (warp == a.warp ? a.converged : at(a.clock, warp)) >= x.converged;
}

/* Whether a proxy fence lies between an access that it knows and now. */
static bool fenced(const Actor& a, const Access& x) {
  return at(a.fenced, x.who) >= x.time || (x.converged && at(a.fenced, M->order->places[x.who].warp) >= x.converged);
}

/* Clocks that have been joined already: many threads have the same. */
struct Had {
  std::vector<const void*> list;
  bool operator()(const Clock& clock) {
    if (!clock || std::find(list.begin(), list.end(), clock.get()) != list.end()) return true;
    list.push_back(clock.get());
    return false;
  }
};

static void learn(Actor& a, const Release& r, Had& known, Had& fenced) {
  if (knows(a, r.who, r.time)) return;
  std::vector<u32>& clock = own(a.clock);
  if (!known(r.known)) join(clock, *r.known);
  reach(clock, r.who, r.time);
  if (!fenced(r.fenced)) join_fenced(a.fenced, r.fenced);
}
static void learn(Actor& a, const Release& r) {
  Had known, fenced;
  learn(a, r, known, fenced);
}

/* Threads of a CTA that learn the same from the same get one clock. */
struct Learned { Clock before, after, fenced_before, fenced_after; u64 version = 0; u32 cta, scope; };
static Learned learned[64];

/* A relaxed load learns of the stores themselves, which know nothing. */
static void learn(Actor& a, const Releases& all, u32 scope, bool acquires = true) {
  auto wanted = [&](const Release& r) { return (acquires || !r.known) && std::min(r.scope, scope) >= distance(a, r.who) && !knows(a, r.who, r.time); };
  if (std::none_of(all.list.begin(), all.list.end(), wanted)) return;
  scope |= acquires ? 0 : 8;
  Learned& l = learned[((u64)a.clock.get() / 64 ^ all.version) % 64];
  if (l.before == a.clock && l.fenced_before == a.fenced && l.version == all.version && l.cta == a.cta && l.scope == scope) {
    a.clock = l.after, a.fenced = l.fenced_after;
    return;
  }
  l.before = a.clock, l.fenced_before = a.fenced, l.version = all.version, l.cta = a.cta, l.scope = scope;
  scope &= 7;
  Had known, fenced;
  for (const Release& r : all.list)
    if (wanted(r)) learn(a, r, known, fenced);
    else if ((r.who == a.who || r.who == a.strong) && (acquires || !r.known)) { /* which the others learn */
      reach(own(a.clock), r.who, r.time);
      join_fenced(a.fenced, r.fenced);
    }
  l.after = a.clock, l.fenced_after = a.fenced;
}

static void add(Releases& all, const Release& r) {
  all.version = ++M->order->versions;
  for (Release& old : all.list)
    if (old.who == r.who && old.scope == r.scope) {
      if (old.time < r.time) old = r;
      return;
    }
  all.list.push_back(r);
}

/* What else it has done goes into its clock before others learn of it. */
static void settle(Actor& a, std::vector<u32>& clock) {
  reach(clock, a.strong, a.stores);
  reach(clock, a.warp, a.converged);
}
static void settle_fenced(const Actor& a, Clock& fenced) {
  for (auto [who, time] : {std::pair(a.who, a.fenced_time), {a.strong, a.fenced_stores}, {a.warp, a.fenced_converged}})
    if (at(fenced, who) < time) reach(own(fenced), who, time);
}
static Release release(Actor& a, u32 scope) {
  settle_fenced(a, a.fenced);
  if (at(a.clock, a.strong) < a.stores || at(a.clock, a.warp) < a.converged) settle(a, own(a.clock));
  return {a.who, a.time++, a.clock, scope, a.fenced};
}

/* ---- accesses ---- */

static std::string name(const Access& x) {
  const Place& p = M->order->places[x.who];
  const char* scopes[] = {"weak", "strong (cta)", "strong (cluster)", "strong (gpu)", "strong (sys)"};
  u32 cta = 0;
  for (auto& [key, id] : M->order->ctas)
    if (id == p.cta) cta = key.second;
  std::string what = format("%s %s of line %u by ", scopes[x.scope], x.write ? "write" : "read", x.line);
  if (p.what) what += std::string(p.what) + " of ";
  return what + format("GPU %u, CTA %u, thread %u", p.gpu, cta, p.thread);
}

static void race(const Access& old, const Access& now, u64 address, Cta* shared, bool same = false, const char* how = "") {
  auto& races = M->order->races;
  const Place &a = M->order->places[old.who], &b = M->order->places[now.who];
  const char* between = a.gpu != b.gpu ? ", between GPUs" : a.cta != b.cta ? ", between CTAs" : "";
  const std::string key = format("\n  lines %u and %u%s%s: ", old.line, now.line, between, how);
  auto next = races.lower_bound(key); /* one of a kind */
  if (races.size() > 40 || (next != races.end() && next->compare(0, key.size(), key) == 0)) return;
  const std::string where = shared ? format("shared offset %d", (int)(address - (u64)shared->shared - SHARED_BEGIN)) : format("@%#llx", (unsigned long long)address);
  const std::string text = key + name(old) + "; " + name(now) + "; at " + where;
  if (!same) {
    races.insert(text);
    return;
  }
  u32 before;
  memcpy(&before, (void*)address, GRANULE);
  M->order->same.push_back({address, old.bytes & now.bytes, before, text});
}

/* After a write, before anything else happens. */
static void check_same() {
  for (auto& s : M->order->same) {
    u32 after, mask = 0;
    memcpy(&after, (void*)s.at, GRANULE);
    for (u32 i = 0; i < GRANULE; i++) mask |= s.bytes >> i & 1 ? 255u << 8 * i : 0;
    if ((after ^ s.before) & mask) M->order->races.insert(s.race);
  }
  M->order->same.clear();
}

static bool is_loose(u64 address) {
  const auto& loose = M->order->loose;
  return std::any_of(loose.begin(), loose.end(), [&](auto& l) { return l.begin <= address && address < l.end; });
}

static bool reaches(const Access& x, const Access& y) {
  const Place& a = M->order->places[x.who];
  return std::min(x.scope, y.scope) >= distance(a.gpu, a.cta, M->order->places[y.who]);
}

/* Whether an earlier access is to be forgotten for one of `a`, or of a copy that it issues. `hidden`: what is read is poison. */
static bool settled(const Actor& a, const Access& old, const Access& now, u64 address, Cta* shared, bool& hidden) {
  const u32 common = old.bytes & now.bytes;
  if (!common) return false;
  const auto& places = M->order->places;
  const bool covers = common == old.bytes;
  if (old.who == now.who) return covers && (now.write || !old.write);
  if (knows(a, old)) {
    if (shared && places[now.who].async && !places[old.who].async && (old.write | now.write) && !fenced(a, old))
      race(old, now, address, shared, false, ", without a proxy fence");
    return covers && (now.write || (!old.write && now.who == a.who));
  }
  if (!(old.write | now.write) || reaches(old, now)) return false;
  if (!(old.write & now.write) && !shared && is_loose(address)) {
    hidden |= !now.write;
    return covers && now.write;
  }
  const bool same = old.write && now.who == a.who && !now.scope;
  race(old, now, address, shared, same && now.write);
  return !(same && now.write);
}

static bool touch(const Actor& a, Cell& cell, const Access& now, u64 address, Cta* shared) {
  bool hidden = false;
  if (!cell.first.who) {
    cell.first = now;
    return hidden;
  }
  Order& o = *M->order;
  if (!cell.more) {
    if (settled(a, cell.first, now, address, shared, hidden)) {
      cell.first = now;
      return hidden;
    }
    if (o.free_lists.empty()) {
      o.free_lists.push_back(o.lists.size());
      o.lists.emplace_back();
    }
    cell.more = o.free_lists.back();
    o.free_lists.pop_back();
    o.lists[cell.more].push_back(now);
    return hidden;
  }
  auto& list = o.lists[cell.more];
  size_t kept = 0;
  for (size_t i = 0; i < list.size(); i++)
    if (!settled(a, list[i], now, address, shared, hidden)) list[kept++] = list[i];
  list.resize(kept);
  if (settled(a, cell.first, now, address, shared, hidden)) cell.first = now;
  else list.push_back(now);
  if (list.empty()) {
    o.free_lists.push_back(cell.more);
    cell.more = 0;
  }
  return hidden;
}

/* Offsets of what is hidden. */
static std::vector<u32> touch(const Actor& a, const void* to, u32 size, Access now, Cta* shared) {
  std::vector<u32> hidden;
  check_same();
  const u64 address = (u64)to;
  std::vector<Cell>* cells;
  u64 begin;
  if (shared) {
    cells = &shared->cells, begin = (u64)shared->shared + SHARED_BEGIN;
    if (cells->empty()) cells->resize((shared->shared_end - SHARED_BEGIN) / GRANULE + 2);
  } else {
    Machine::Buffer* buffer = buffer_of(address, size);
    if (!buffer) return hidden;
    cells = &buffer->cells, begin = buffer->begin;
    if (cells->empty()) {
      if (!now.write && !buffer->kept) return hidden;
      cells->resize(buffer->end / GRANULE - buffer->begin / GRANULE + 1);
    }
  }
  const u64 first = address / GRANULE, last = (address + size - 1) / GRANULE;
  for (u64 g = first; g <= last; g++) {
    now.bytes = 15;
    if (g == first) now.bytes &= 15 << address % GRANULE;
    if (g == last) now.bytes &= 15 >> (GRANULE - 1 - (address + size - 1) % GRANULE);
    if (touch(a, (*cells)[g - begin / GRANULE], now, g * GRANULE, shared)) hidden.push_back(g == first ? 0 : g * GRANULE - address);
  }
  return hidden;
}

void* order_access(Fiber* t, void* to, u32 size, bool write, u32 how, Cta* shared) {
  static u64 poison[4] = {~0ull, ~0ull, ~0ull, ~0ull};
  if (!t->actor) return to;
  Actor& a = *t->actor;
  const u32 scope = how & SCOPES;
  Order& o = *M->order;
  if (!scope) {
    if (write && !shared) o.words.erase((u64)to);
    const u32 converged = shared && !write ? a.converged + 1 : 0;
    const bool hidden = !touch(a, to, size, {a.who, a.time, (u32)t->line, write, 0, 0, converged}, shared).empty();
    return hidden ? memset(poison, 0xff, sizeof poison) : to;
  }
  const bool reads = !write || how & ATOMIC;
  if (reads) {
    auto found = o.words.find((u64)to);
    if (found != o.words.end()) {
      learn(a, found->second, scope, how & ACQUIRE);
      for (const Release& r : found->second.list) {
        if (!r.known || knows(a, r.who, r.time)) continue;
        const u32 both = std::min(r.scope, scope);
        auto same = std::find_if(a.seen.begin(), a.seen.end(), [&](auto& s) { return s.who == r.who && s.scope == both; });
        if (same == a.seen.end()) same = a.seen.insert(same, r);
        else if (same->time < r.time) *same = r; /* another word may still hold an older one */
        same->scope = both;
      }
    }
  }
  const bool alone = write && !(how & RELEASE); /* a fence before it is no fence behind it */
  if (alone) touch(a, to, size, {a.strong, ++a.stores, (u32)t->line, write, scope, 0, 0}, shared);
  else touch(a, to, size, {a.who, a.time, (u32)t->line, write, scope, 0, 0}, shared);
  if (!write) return to;
  Releases& here = o.words[(u64)to];
  if (!(how & ATOMIC)) {
    here.list.erase(std::remove_if(here.list.begin(), here.list.end(), [&](auto& r) { return r.who != a.who && r.who != a.strong; }),
                    here.list.end());
    here.version = ++o.versions;
  }
  for (u32 s = SCOPE_CTA; s <= SCOPE_SYS; s++)
    if (a.fences[s].who) {
      Release r = a.fences[s];
      r.scope = std::min(s, scope);
      add(here, r);
    }
  if (alone) add(here, {a.strong, a.stores, nullptr, scope});
  else add(here, release(a, scope));
  return to;
}

void access_told(Thread* thread, u64 address, u32 size, bool write, u32 how) {
  Fiber* t = fiber(thread);
  if (!t->actor || !buffer_of(address, size)) return;
  pause_sometimes(t);
  order_access(t, (void*)address, size, write, how, nullptr);
}

void memory_fence(Thread* thread, u32 how) {
  Fiber* t = fiber(thread);
  if (!t->actor) return;
  Actor& a = *t->actor;
  const u32 scope = how & SCOPES;
  if (how & ACQUIRE) {
    for (const Release& r : a.seen)
      if (std::min(r.scope, scope) >= distance(a, r.who)) learn(a, r);
    a.seen.clear();
  }
  if (how & RELEASE) a.fences[scope] = release(a, scope);
}

void order_proxy_fence(Fiber* t) {
  if (!t->actor) return;
  Actor& a = *t->actor;
  a.fenced = a.clock, a.fenced_time = a.time++, a.fenced_stores = a.stores, a.fenced_converged = a.converged;
}

/* ---- copies ---- */

static Phase& phase_of(const char* barrier, Cta* cta) {
  const u32 id = cta->fibers[0]->actor->cta;
  Phase& p = M->order->barriers[{id, (u64)(barrier - cta->shared)}];
  if (!p.who) p.who = new_actor(cta->launch->gpu, id, 0, "copies that complete on an mbarrier", true);
  return p;
}

std::vector<u32> order_copy(Fiber* t, const void* to, u32 size, bool write, Cta* shared, Copying kind, const char* barrier, Cta* of) {
  if (!t->actor) return {};
  Actor& a = *t->actor;
  Access x{0, 0, (u32)t->line, write, 0, 0, 0};
  if (kind == BULK_LOAD) {
    const Phase& p = phase_of(barrier, of);
    x.who = p.who, x.time = p.number;
  } else if (kind == CP_ASYNC) {
    if (!a.copies) a.copies = new_actor(a.gpu, a.cta, t->tid, "cp.async");
    x.who = a.copies, x.time = a.copied + 1;
  } else {
    for (u32* who : {&a.targets, &a.sources})
      if (!*who) *who = new_actor(a.gpu, a.cta, t->tid, "a bulk store", true);
    x.who = write ? a.targets : a.sources, x.time = a.group;
  }
  if (kind != CP_ASYNC) settle_fenced(a, a.fenced); /* it asks for its own accesses, too */
  return touch(a, to, size, x, shared);
}

void order_copies_next(Fiber* t) {
  if (t->actor) t->actor->copied++;
}
void order_copies_commit(Fiber* t) {
  if (t->actor) t->actor->committed.push_back(t->actor->copied);
}
void order_copies_wait(Fiber* t, s64 groups) {
  if (!t->actor || !t->actor->copies) return;
  Actor& a = *t->actor;
  if (groups < 0) learn(a, {a.copies, a.copied, nullptr, SCOPE_SYS});
  else if ((s64)a.committed.size() > groups) learn(a, {a.copies, a.committed[a.committed.size() - 1 - groups], nullptr, SCOPE_SYS});
}
void order_copies_arrive(Fiber* t, char* barrier) {
  if (!t->actor) return;
  Actor& a = *t->actor;
  auto& arrived = phase_of(barrier, t->of).arrived;
  if (a.copies) add(arrived, {a.copies, a.copied, nullptr, SCOPE_SYS});
  add(arrived, release(a, SCOPE_SYS)); /* PTX does not name it a release; it comes behind the thread's accesses to shared memory all the same */
}
void order_stores_commit(Fiber* t) {
  if (t->actor) t->actor->group++;
}
void order_stores_wait(Fiber* t, u32 groups, bool read) {
  if (!t->actor || !t->actor->targets || t->actor->group <= groups + 1) return;
  Actor& a = *t->actor;
  const u32 time = a.group - 1 - groups;
  learn(a, {a.sources, time, nullptr, SCOPE_SYS});
  if (!read) learn(a, {a.targets, time, nullptr, SCOPE_SYS});
}

/* ---- warps and barriers ---- */

void order_converge(Fiber* t) {
  if (t->actor) t->actor->converged++;
}

void order_release(Fiber* t, Releases& to) {
  if (t->actor) add(to, release(*t->actor, SCOPE_SYS));
}
void order_acquire(Fiber* t, const Releases& from) {
  if (t->actor) learn(*t->actor, from, SCOPE_SYS);
}

void order_together(const std::vector<Fiber*>& all, Releases* others) {
  if (!M->order || all.empty()) return;
  auto clock = std::make_shared<std::vector<u32>>(*all[0]->actor->clock);
  clock->resize(M->order->places.size());
  Clock fenced = all[0]->actor->fenced;
  Had had, had_fenced;
  auto take = [&](const Clock& its, const Clock& its_fenced) {
    if (!had(its)) join(*clock, *its);
    if (!had_fenced(its_fenced)) join_fenced(fenced, its_fenced);
  };
  for (Fiber* t : all) take(t->actor->clock, t->actor->fenced);
  for (Fiber* t : all) settle_fenced(*t->actor, fenced);
  if (others)
    for (const Release& r : others->list) take(r.known, r.fenced), reach(*clock, r.who, r.time);
  for (Fiber* t : all) {
    reach(*clock, t->actor->who, t->actor->time++);
    settle(*t->actor, *clock);
    t->actor->clock = clock, t->actor->fenced = fenced;
  }
  if (others) *others = {};
}

void order_init(Fiber* t, char* barrier, Cta* cta) {
  if (!t->actor) return;
  Phase& p = phase_of(barrier, cta);
  p.arrived = p.done = {};
  p.init_who = t->actor->who, p.init_time = t->actor->time;
}
static void check_init(Fiber* t, const Phase& p, char* barrier, Cta* cta) {
  if (p.init_who && !knows(*t->actor, p.init_who, p.init_time))
    race({p.init_who, p.init_time, 0, 1, 0, 15, 0}, {t->actor->who, t->actor->time, (u32)t->line, 0, 0, 15, 0}, (u64)barrier, cta);
}
void order_arrive(Fiber* t, char* barrier, Cta* cta) {
  if (!t->actor) return;
  Phase& p = phase_of(barrier, cta);
  check_init(t, p, barrier, cta);
  add(p.arrived, release(*t->actor, SCOPE_SYS));
}
void order_complete(Fiber* t, char* barrier, Cta* cta) {
  if (!t->actor) return;
  Phase& p = phase_of(barrier, cta);
  check_init(t, p, barrier, cta);
  for (u32 s = SCOPE_CTA; s <= SCOPE_SYS; s++)
    if (t->actor->fences[s].who) add(p.arrived, t->actor->fences[s]);
}
void order_flip(char* barrier, Cta* cta) {
  if (!M->order) return;
  Phase& p = phase_of(barrier, cta);
  p.done = std::move(p.arrived);
  p.arrived = {};
  add(p.done, {p.who, p.number++, nullptr, SCOPE_SYS});
}
void order_waited(Fiber* t, char* barrier, Cta* cta) {
  if (!t->actor) return;
  Phase& p = phase_of(barrier, cta);
  check_init(t, p, barrier, cta);
  learn(*t->actor, p.done, SCOPE_SYS);
}

/* ---- runs ---- */

void order_begin(Launch* launch) {
  if (!M->order) return;
  Order& o = *M->order;
  if (!launch) { /* the run begins */
    o.races.clear();
    for (auto& buffer : M->buffers) {
      buffer.kept = std::any_of(o.kept.begin(), o.kept.end(), [&](auto& k) { return k.begin <= buffer.begin && buffer.begin < k.end; });
      auto found = o.cells.find(buffer.begin);
      if (found == o.cells.end()) continue;
      if (found->second.size() == buffer.end / GRANULE - buffer.begin / GRANULE + 1) buffer.cells = std::move(found->second);
      o.cells.erase(found);
    }
    return;
  }
  const u32 gpu = launch->gpu;
  if (o.ended.size() <= gpu) o.ended.resize(gpu + 1);
  if (!o.ended[gpu]) o.ended[gpu] = std::make_shared<std::vector<u32>>();
  for (auto& cta : launch->ctas) {
    auto& actors = o.actors[{gpu, cta->index}];
    const u32 id = o.ctas.emplace(std::make_pair(gpu, cta->index), o.ctas.size()).first->second;
    if (o.clusters.size() <= id) o.clusters.resize(id + 1);
    o.clusters[id] = (u64)gpu << 32 | cta->cluster->ctas[0]->index;
    for (auto& t : cta->fibers) {
      if (actors.size() <= t->tid) {
        actors.push_back(std::make_unique<Actor>());
        Actor& a = *actors.back();
        a.gpu = gpu, a.cta = id, a.who = new_actor(gpu, id, t->tid, nullptr), a.strong = new_actor(gpu, id, t->tid, nullptr);
        a.warp = t->lane ? actors[t->tid - t->lane]->warp : new_actor(gpu, id, t->tid, nullptr);
        o.places[a.who].warp = a.warp;
      }
      t->actor = actors[t->tid].get();
      t->actor->clock = t->actor->fenced = o.ended[gpu]; /* the end of a launch is behind all of it, in all proxies */
      t->actor->seen.clear();
      for (auto& fence : t->actor->fences) fence = {};
    }
  }
}

void order_end() {
  if (!M->order) return;
  check_same();
  Order& o = *M->order;
  for (auto& launch : M->launches) {
    if (!launch->started) continue;
    auto clock = std::make_shared<std::vector<u32>>(*o.ended[launch->gpu]);
    clock->resize(o.places.size());
    const void* had = nullptr;
    for (auto& cta : launch->ctas) {
      for (auto& t : cta->fibers) {
        Actor& a = *t->actor;
        if (a.clock.get() != had) join(*clock, *a.clock);
        had = a.clock.get();
        reach(*clock, a.who, a.time++), settle(a, *clock);
        if (a.copies) reach(*clock, a.copies, a.copied);
        if (a.targets) reach(*clock, a.targets, a.group), reach(*clock, a.sources, a.group), a.group++;
      }
    }
    for (auto& [key, phase] : o.barriers)
      if (phase.who && o.places[phase.who].gpu == launch->gpu) reach(*clock, phase.who, phase.number++);
    o.ended[launch->gpu] = clock;
  }
  auto kept = [&](u64 address) {
    return std::any_of(o.kept.begin(), o.kept.end(), [&](auto& k) { return k.begin <= address && address < k.end; });
  };
  for (auto it = o.words.begin(); it != o.words.end();)
    if (kept(it->first)) ++it;
    else it = o.words.erase(it);
  for (auto& buffer : M->buffers)
    if (!buffer.cells.empty() && kept(buffer.begin)) o.cells[buffer.begin] = std::move(buffer.cells);
  for (auto& l : learned) l = {};
  if (o.races.empty()) return;
  std::string text = "data races:";
  for (auto& each : o.races) text += each;
  M->fault = M->failed ? M->fault + "\n" + text : text;
  M->failed = true;
}

extern "C" {
Order* order_new(const u64* kept, u32 count, const u64* loose, u32 loose_count) {
  auto* o = new Order;
  for (u32 i = 0; i < count; i++) o->kept.push_back({kept[2 * i], kept[2 * i] + kept[2 * i + 1]});
  for (u32 i = 0; i < loose_count; i++) o->loose.push_back({loose[2 * i], loose[2 * i] + loose[2 * i + 1]});
  return o;
}
void order_free(Order* o) { delete o; }
}
