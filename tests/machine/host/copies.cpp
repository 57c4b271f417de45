/* Copies that take effect at a random time between their issue and the wait that must see them. */
#include <string.h>
#include <algorithm>
#include "state.h"

static const u32 CHUNK = 16;

static void list_copies(Fiber* t) {
  if (t->listed_copies) return;
  t->listed_copies = true;
  Pending p;
  p.kind = Pending::COPIES, p.fiber = t;
  M->pending.push_back(std::move(p));
}
static void list_stores(Fiber* t) {
  if (t->listed_stores) return;
  t->listed_stores = true;
  Pending p;
  p.kind = Pending::STORES, p.fiber = t;
  M->pending.push_back(std::move(p));
}

/* ---- cp.async ---- */

static void perform(Fiber* t, const Copy& c) {
  generic_write(t, c.to, c.size, t->of);
  if (c.read) memcpy(c.to, c.from, c.read);
  memset(c.to + c.read, 0, c.size - c.read);
}

void cp_async(Thread* thread, u64 shared, u64 global, u32 size, u32 read) {
  Fiber* t = fiber(thread);
  if (shared % size) fail(t, format("cp.async of %u bytes to shared offset %d", size, (int)((shared & 0xffffff) - SHARED_BEGIN)));
  if (read > size) fail(t, format("cp.async reads %u of %u bytes", read, size));
  char* to = shared_of(t, shared, size);
  if (read) {
    if (global % size) fail(t, format("cp.async of %u bytes from %#llx", size, (unsigned long long)global));
    check_global(t, global, read, 1);
  }
  if (read) order_copy(t, (void*)global, read, false, nullptr, CP_ASYNC);
  order_copy(t, to, size, true, t->of, CP_ASYNC);
  order_copies_next(t);
  memset(to, 0xff, size);
  t->copies.push_back({to, (const char*)global, size, read, t->copy_group});
  if (!t->copies.back().from) t->copies.back().from = to; /* reads nothing */
  list_copies(t);
  pause_sometimes(t);
}

void cp_async_commit(Thread* t) {
  fiber(t)->copy_group++;
  order_copies_commit(fiber(t));
}

/* Let an item happen, and if it is an arrival, all before it. */
static void happen_at(Fiber* t, size_t at) {
  auto& list = t->copies;
  if (list[at].from) {
    perform(t, list[at]);
    list.erase(list.begin() + at);
    return;
  }
  std::vector<Copy> first(list.begin(), list.begin() + at + 1);
  list.erase(list.begin(), list.begin() + at + 1);
  for (auto& c : first)
    if (c.from) perform(t, c);
    else arrive_on(c.to, 1, t->line, t->of);
}

bool copies_happen(Fiber* t) {
  if (!t->copies.empty()) happen_at(t, below(t->copies.size()));
  return t->listed_copies = !t->copies.empty();
}

void cp_async_wait(Thread* thread, s64 groups) {
  Fiber* t = fiber(thread);
  if (chance(4)) yield(t);
  for (size_t i = 0; i < t->copies.size();)
    if (groups < 0 || (s64)t->copies[i].group < (s64)t->copy_group - groups) happen_at(t, i), i = 0;
    else i++;
  order_copies_wait(t, groups);
}

void cp_async_arrive(Thread* thread, u64 barrier, bool noinc) {
  Fiber* t = fiber(thread);
  char* at = shared_of(t, barrier, 8);
  if (!noinc) arrive_on(at, 0, t->line, t->of);
  order_copies_arrive(t, at);
  t->copies.push_back({at, nullptr, 0, 0, ~0u});
  list_copies(t);
}

/* ---- bulk loads ---- */

static void send(Thread* thread, Pending&& p) {
  for (size_t i = 0; i < p.pieces.size(); i++) memset(p.pieces[i].first, 0xff, p.sizes[i]);
  p.kind = Pending::LOAD, p.fiber = fiber(thread), p.line = thread->line;
  M->pending.push_back(std::move(p));
  pause_sometimes(fiber(thread));
}

/* What a load may not see yet arrives as poison: a box may reach over what nobody uses. */
static void hide(Pending& p, char* to, const std::vector<u32>& offsets, u32 size, Cta* owner) {
  static const char poison[GRANULE] = {-1, -1, -1, -1};
  for (u32 offset : offsets) {
    p.pieces.push_back({to + offset, poison});
    p.sizes.push_back(size - offset < GRANULE ? size - offset : GRANULE);
    p.owners.push_back(owner);
  }
}

static void check_line(Thread* t, u64 address, u32 size, const char* what) {
  if (address % 16 || size % 16 || !size) fail(t, format("bulk copy of %u bytes %s %#llx: not aligned to 16", size, what, (unsigned long long)address));
}

static std::vector<u32> receivers(Thread* t, u64 shared, u32 multicast) {
  if (!multicast) return {(u32)shared >> 24};
  std::vector<u32> ranks;
  for (u32 r = 0; r < 16; r++)
    if (multicast >> r & 1) {
      if (r >= t->ranks) fail(t, format("multicast %#x in a cluster of %u", multicast, t->ranks));
      ranks.push_back(r);
    }
  return ranks;
}
static u64 in_rank(u64 shared, u32 rank) { return (shared & 0xffffff) | rank << 24; }

void bulk_load(Thread* t, u64 shared, u64 global, u32 size, u64 barrier, u32 multicast) {
  check_line(t, global, size, "from");
  check_line(t, shared, size, "to");
  check_global(t, global, size, 16);
  Pending p;
  for (u32 rank : receivers(t, shared, multicast)) {
    Cta* cta;
    p.pieces.push_back({shared_of(fiber(t), in_rank(shared, rank), size, &cta), (const char*)global});
    p.sizes.push_back(size);
    p.owners.push_back(cta);
    char* to = p.pieces.back().first;
    hide(p, to, unseen(fiber(t), (void*)global, size, nullptr), size, cta);
    Cta* owner = cta;
    char* at = shared_of(fiber(t), multicast ? in_rank(barrier, rank) : barrier, 8, &cta);
    hide(p, to, order_copy(fiber(t), (void*)global, size, false, nullptr, BULK_LOAD, at, cta), size, owner);
    order_copy(fiber(t), to, size, true, owner, BULK_LOAD, at, cta);
    p.barriers.push_back({at, size});
    p.ctas.push_back(cta);
  }
  send(t, std::move(p));
}

void bulk_to_cluster(Thread* t, u64 to, u64 from, u32 size, u64 barrier) {
  check_line(t, from, size, "from");
  check_line(t, to, size, "to");
  Pending p;
  Cta* cta;
  p.pieces.push_back({shared_of(fiber(t), to, size, &cta), shared_of(fiber(t), from, size)});
  async_read(fiber(t), p.pieces[0].second, size, fiber(t)->of);
  p.sizes.push_back(size);
  p.owners.push_back(cta);
  p.barriers.push_back({shared_of(fiber(t), barrier, 8, &cta), size});
  p.ctas.push_back(cta);
  send(t, std::move(p));
}

static void perform(Pending& p) {
  for (size_t i = 0; i < p.pieces.size(); i++) {
    async_write(p.pieces[i].first, p.sizes[i], p.owners[i]);
    if (p.pieces[i].second) memcpy(p.pieces[i].first, p.pieces[i].second, p.sizes[i]);
    else memset(p.pieces[i].first, 0, p.sizes[i]);
  }
  for (size_t i = 0; i < p.barriers.size(); i++) {
    if (p.ctas[i]->left == 0) fail_at(format("line %d: CTA %u has ended while a bulk copy into its memory was under way", p.line, p.ctas[i]->index));
    complete_bytes(p.barriers[i].first, p.barriers[i].second, p.line, p.ctas[i]);
  }
}

/* ---- tensors ---- */

struct Map { /* of a tensor, as its 128 bytes say */
  int rank;
  u32 size, swizzle, box[5];
  u64 address, stride[5], extent[5];
};

static Map decode(Thread* t, u64 at, int rank) {
  if (at % 64) fail(t, "tensor map that is not aligned to 64 bytes");
  u64 q[16];
  memcpy(q, (void*)at, 128);
  static const u32 sizes[16] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};
  Map m{};
  m.rank = (int)(q[1] >> 4 & 7) + 1;
  m.size = sizes[q[1] >> 7 & 15];
  m.swizzle = q[1] >> 13 & 3;
  m.address = q[0];
  if (m.rank != rank) fail(t, format("tensor map of rank %d, not %d", m.rank, rank));
  m.stride[0] = m.size;
  for (int i = 0; i < 4; i++) m.stride[i + 1] = 16 * (q[1 + (i + 1) / 2] >> (i % 2 ? 0 : 32) & 0xffffffff);
  for (int i = 0; i < 5; i++) m.extent[i] = 1 + (q[4 + i / 2] >> (i % 2 ? 32 : 0) & 0xffffffff);
  m.box[0] = 1 + (q[6] >> 56);
  for (int i = 0; i < 4; i++) m.box[i + 1] = 1 + (q[7] >> (8 * i) & 255);
  return m;
}

/* Every run of up to 16 bytes of a box in shared memory, with where it lies in the tensor: `use(offset, address, bytes inside)`. */
template <class F> static u32 walk(Thread* t, const Map& m, const s32* corner, u64 shared, F use) {
  static const u32 masks[4] = {0, 0x10, 0x30, 0x70};
  const u32 row = m.box[0] * m.size;
  if (shared % 128) fail(t, format("box at shared offset %d, which is not aligned to 128", (int)((shared & 0xffffff) - SHARED_BEGIN)));
  if (row % 16) fail(t, format("box rows of %u bytes", row));
  u32 rows = 1;
  for (int d = 1; d < m.rank; d++) rows *= m.box[d];
  for (u32 index = 0; index < rows; index++) {
    u32 rest = index;
    u64 address = m.address;
    bool inside = true;
    for (int d = 1; d < m.rank; d++) {
      const s64 c = (s64)corner[d] + rest % m.box[d];
      rest /= m.box[d];
      inside &= c >= 0 && (u64)c < m.extent[d];
      address += c * m.stride[d];
    }
    for (u32 at = 0; at < row; at += CHUNK) {
      u64 to = (shared & 0xffffff) + index * row + at;
      to ^= to >> 3 & masks[m.swizzle];
      const s64 first = (s64)corner[0] + at / m.size;
      const u32 elements = CHUNK / m.size;
      if (first < 0 && first > -(s64)elements) fail(t, "box that begins inside a run of 16 bytes before its tensor");
      s64 have = (s64)m.extent[0] - first;
      have = !inside || first < 0 || have < 0 ? 0 : have > elements ? elements : have;
      use(to, address + first * m.size, (u32)have * m.size);
    }
  }
  return rows * row;
}

void tensor_load(Thread* t, int rank, u64 shared, u64 map, const s32* corner, u64 barrier, u32 multicast) {
  const Map m = decode(t, map, rank);
  Pending p;
  const auto ranks = receivers(t, shared, multicast);
  const u32 bytes = walk(t, m, corner, shared, [&](u64 to, u64 address, u32 have) {
    if (have) check_global(t, address, have, m.size);
    for (u32 r : ranks) {
      Cta* owner;
      char* place = shared_of(fiber(t), in_rank(to, r), CHUNK, &owner);
      if (have) {
        p.pieces.push_back({place, (const char*)address}), p.sizes.push_back(have), p.owners.push_back(owner);
        hide(p, place, unseen(fiber(t), (void*)address, have, nullptr), have, owner);
      }
      Cta* counts;
      const char* at = shared_of(fiber(t), multicast ? in_rank(barrier, r) : barrier, 8, &counts);
      if (have) hide(p, place, order_copy(fiber(t), (void*)address, have, false, nullptr, BULK_LOAD, at, counts), have, owner);
      order_copy(fiber(t), place, CHUNK, true, owner, BULK_LOAD, at, counts);
      if (have < CHUNK) p.pieces.push_back({place + have, nullptr}), p.sizes.push_back(CHUNK - have), p.owners.push_back(owner);
    }
  });
  for (u32 r : ranks) {
    Cta* cta;
    p.barriers.push_back({shared_of(fiber(t), multicast ? in_rank(barrier, r) : barrier, 8, &cta), bytes});
    p.ctas.push_back(cta);
  }
  send(t, std::move(p));
}

/* ---- bulk stores ---- */

static void advance(Store& s) {
  if (!s.read) {
    s.box.resize(s.pieces.size() * s.bytes);
    for (size_t i = 0; i < s.pieces.size(); i++) memcpy(&s.box[i * s.bytes], s.pieces[i].second, s.bytes);
    s.read = true;
  } else {
    for (size_t i = 0; i < s.pieces.size(); i++) {
      memcpy(s.pieces[i].first, &s.box[i * s.bytes], s.bytes);
      async_write(s.pieces[i].first, s.bytes, nullptr);
    }
    s.written = true;
    M->progress++;
  }
}

void bulk_store(Thread* thread, u64 global, u64 shared, u32 size) {
  Fiber* t = fiber(thread);
  check_line(t, global, size, "to");
  check_line(t, shared, size, "from");
  check_global(t, global, size, 16);
  Store s;
  s.line = t->line, s.group = t->store_group, s.bytes = size;
  s.pieces.push_back({(char*)global, shared_of(t, shared, size)});
  async_read(t, s.pieces[0].second, size, t->of);
  order_copy(t, s.pieces[0].second, size, false, t->of, BULK_STORE);
  order_copy(t, s.pieces[0].first, size, true, nullptr, BULK_STORE);
  t->stores.push_back(std::move(s));
  list_stores(t);
  pause_sometimes(t);
}

void tensor_store(Thread* thread, int rank, u64 map, const s32* corner, u64 shared) {
  Fiber* t = fiber(thread);
  const Map m = decode(t, map, rank);
  Store s;
  s.line = t->line, s.group = t->store_group, s.bytes = m.size;
  walk(t, m, corner, shared, [&](u64 from, u64 address, u32 have) {
    if (have) check_global(t, address, have, m.size);
    const char* place = shared_of(t, in_rank(from, t->rank), CHUNK);
    async_read(t, place, CHUNK, t->of);
    order_copy(t, place, CHUNK, false, t->of, BULK_STORE);
    if (have) order_copy(t, (void*)address, have, true, nullptr, BULK_STORE);
    for (u32 i = 0; i < have; i += m.size) s.pieces.push_back({(char*)address + i, place + i});
  });
  t->stores.push_back(std::move(s));
  list_stores(t);
  pause_sometimes(t);
}

void bulk_commit(Thread* t) {
  fiber(t)->store_group++;
  order_stores_commit(fiber(t));
}

static void drop_written(Fiber* t) {
  t->stores.erase(std::remove_if(t->stores.begin(), t->stores.end(), [](auto& s) { return s.written; }), t->stores.end());
}

bool stores_happen(Fiber* t) {
  if (!t->stores.empty()) advance(t->stores[below(t->stores.size())]);
  drop_written(t);
  return t->listed_stores = !t->stores.empty();
}

void bulk_wait(Thread* thread, u32 groups, bool read) {
  Fiber* t = fiber(thread);
  if (chance(4)) yield(t);
  for (auto& s : t->stores)
    if ((s64)s.group < (s64)t->store_group - groups)
      while (read ? !s.read : !s.written) advance(s);
  drop_written(t);
  order_stores_wait(t, groups, read);
}

/* ---- all that is pending ---- */

void happen(u32 index) {
  Pending& p = M->pending[index];
  bool more = false;
  if (p.kind == Pending::LOAD) {
    Pending mine = std::move(p);
    M->pending[index] = std::move(M->pending.back());
    M->pending.pop_back();
    M->progress++;
    perform(mine);
    return;
  }
  Fiber* t = p.fiber;
  Group* g = p.group;
  more = p.kind == Pending::COPIES ? copies_happen(t) : p.kind == Pending::STORES ? stores_happen(t) : products_happen(g);
  M->progress++;
  if (!more) {
    if (index + 1 != M->pending.size()) M->pending[index] = std::move(M->pending.back());
    M->pending.pop_back();
  }
}

/* ---- the end of threads ---- */

void ended(Fiber* t) {
  if (t->waited != t->issued) fail(t, "ends with wgmma that it has not waited for");
}

void ended(Cta* cta) {
  for (auto& t : cta->fibers) {
    for (auto& s : t->stores)
      if (!s.read) fail(t.get(), format("CTA ends while the bulk store of line %d reads its memory", s.line));
    if (!t->copies.empty()) fail(t.get(), "CTA ends with cp.async under way");
  }
  M->progress++;
}
