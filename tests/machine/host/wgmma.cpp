/* Products of a warpgroup: done in order at a random time, while accumulators hold no numbers until they are waited for. */
#include "arithmetic.h"
#include "state.h"

static const u32 POISON = 0xffbadbad; /* a NaN */

void wgmma_fence(Thread* t) { fiber(t)->fenced = true; }

static Group& group_of(Fiber* t) { return t->of->groups[t->tid / GROUP_THREADS]; }

static void check_order(Fiber* t, u64 descriptor, int rows);

static void list(Group& g) {
  if (g.listed) return;
  for (auto& op : g.ops)
    if (!op->done) {
      if (op->joined != GROUP_THREADS) return;
      g.listed = true;
      Pending p;
      p.kind = Pending::PRODUCT, p.group = &g;
      M->pending.push_back(std::move(p));
      return;
    }
}

void wgmma(Thread* thread, const Products& what, u32* const* accumulators) {
  Fiber* t = fiber(thread);
  Group& g = group_of(t);
  if (!t->fenced) fail(t, "wgmma without wgmma.fence since registers were last used");
  const u64 number = t->issued++;
  order_converge(t);
  if (number == g.first + g.ops.size()) {
    g.ops.push_back(std::make_unique<Op>());
    Op& op = *g.ops.back();
    op.what = what, op.line = t->line, op.cta = t->of;
    op.values.resize(GROUP_THREADS), op.places.resize(GROUP_THREADS);
    if (what.a_registers) op.a.resize(4 * GROUP_THREADS);
  }
  Op& op = *g.ops[number - g.first];
  const Products& o = op.what;
  if (op.line != t->line || (o.a != what.a && !what.a_registers) || o.b != what.b || o.keep != what.keep)
    fail(t, format("threads of the warpgroup give different descriptors, or one of them is at line %d", op.line));
  const u32 lane = t->tid % GROUP_THREADS;
  if (what.a_registers) memcpy(&op.a[4 * lane], what.a_registers, 16);
  auto& places = op.places[lane];
  places.assign(accumulators, accumulators + what.n / 2);
  Op* before = nullptr; /* the last product under way into the same accumulators */
  for (u64 i = t->waited; i < number; i++)
    if (g.ops[i - g.first]->places[lane][0] == places[0]) before = g.ops[i - g.first].get();
  if (!before)
    for (u32* p : places) op.values[lane].push_back(*p);
  else if (before->done) op.values[lane] = before->values[lane];
  for (u32* p : places) *p = POISON;
  if (++op.joined == GROUP_THREADS) {
    if (!what.a_registers) check_order(t, o.a, 64);
    check_order(t, o.b, o.n);
    list(g);
    wake_all(g.waiters);
  }
  pause_sometimes(t);
}

/* Where 16 bytes of a K-major operand lie: half a row of the 32 bytes that a product takes. */
static u32 offset_of(Cta* cta, u64 descriptor, int row, int half, int line) {
  static const u32 masks[4] = {0, 0x70, 0x30, 0x10}, pitches[4] = {16, 128, 64, 32};
  const u32 mode = descriptor >> 62, start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
            stride = (descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 49 & 7) fail_at(format("line %d: wgmma descriptor with a base offset", line));
  u32 at = start + row / 8 * stride + row % 8 * pitches[mode] + half * (mode ? 16 : leading);
  at ^= at >> 3 & masks[mode];
  if (at < SHARED_BEGIN || at + 16 > cta->shared_end)
    fail_at(format("line %d: wgmma reads shared offset %d, outside the CTA's memory", line, (int)(at - SHARED_BEGIN)));
  return at;
}

static void check_order(Fiber* t, u64 descriptor, int rows) {
  for (int r = 0; r < rows; r++)
    for (int half = 0; half < 2; half++)
      async_read(t, t->of->shared + offset_of(t->of, descriptor, r, half, t->line), 16, t->of, GROUP_THREADS / 32);
}

static void decode(Cta* cta, u64 descriptor, int rows, int type, float* out, int line) {
  const int element = type <= F16 ? 2 : 1;
  static float e4m3[256], e5m2[256];
  if (!e4m3[1])
    for (int i = 0; i < 256; i++) e4m3[i] = from_e4m3(i), e5m2[i] = from_e5m2(i);
  for (int r = 0; r < rows; r++)
    for (int half = 0; half < 2; half++) {
      const u8* from = (const u8*)cta->shared + offset_of(cta, descriptor, r, half, line);
      float* to = out + r * (32 / element) + half * (16 / element);
      for (int i = 0; i < 16 / element; i++) {
        u16 two;
        memcpy(&two, from + 2 * (element == 2 ? i : 0), 2);
        to[i] = type == BF16 ? from_bf16(two) : type == F16 ? from_f16(two) : type == E4M3 ? e4m3[from[i]] : e5m2[from[i]];
      }
    }
}

/* Where accumulator `at` of a thread lies: m64nN in four warps of 16 rows. */
static inline int row_of(int lane, int at) { return lane / 32 * 16 + lane % 32 / 4 + at % 4 / 2 * 8; }
static inline int column_of(int lane, int at) { return at / 4 * 8 + lane % 4 * 2 + at % 2; }

static void decode_registers(const Op& op, float* out) { /* A from registers: four words a thread, K of 32 bytes */
  const int type = op.what.a_type, element = type <= F16 ? 2 : 1, per = 4 / element;
  for (int lane = 0; lane < GROUP_THREADS; lane++)
    for (int word = 0; word < 4; word++)
      for (int i = 0; i < per; i++) {
        const int row = lane / 32 * 16 + lane % 32 / 4 + word % 2 * 8, column = lane % 4 * per + word / 2 * (16 / element) + i;
        const u32 code = op.a[4 * lane + word] >> (8 * element * i);
        out[row * (32 / element) + column] = type == BF16   ? from_bf16((u16)code)
                                             : type == F16  ? from_f16((u16)code)
                                             : type == E4M3 ? from_e4m3((u8)code)
                                                            : from_e5m2((u8)code);
      }
}

static void perform(Group& g, u64 index) {
  Op& op = *g.ops[index];
  const Products& o = op.what;
  const int k = o.b_type <= F16 ? 16 : 32, n = o.n;
  static float a[64 * 32], b[256 * 32], turned[32 * 256], product[64 * 256];
  if (op.a.empty()) decode(op.cta, o.a, 64, o.a_type, a, op.line);
  else decode_registers(op, a);
  decode(op.cta, o.b, n, o.b_type, b, op.line);
  for (int j = 0; j < n; j++)
    for (int i = 0; i < k; i++) turned[i * n + j] = b[j * k + i] * (o.a_sign * o.b_sign);
  for (int r = 0; r < 64; r++) {
    float* to = product + r * n;
    for (int j = 0; j < n; j++) to[j] = 0;
    for (int i = 0; i < k; i++) {
      const float factor = a[r * k + i];
      const float* column = turned + i * n;
      for (int j = 0; j < n; j++) to[j] += factor * column[j];
    }
  }
  for (int lane = 0; lane < GROUP_THREADS; lane++) {
    auto& values = op.values[lane];
    for (int i = 0; i < n / 2; i++) {
      const float sum = (o.keep ? f(values[i]) : 0.0f) + product[row_of(lane, i) * n + column_of(lane, i)];
      values[i] = canonical(sum);
    }
    for (u64 i = index + 1; i < g.ops.size(); i++) { /* the next product into them goes on from here */
      Op& next = *g.ops[i];
      if (next.places[lane].empty() || next.places[lane][0] != op.places[lane][0]) continue;
      next.values[lane] = values;
      break;
    }
  }
  op.done = true;
  M->progress++;
}

/* The first product that is not done, once all threads have issued it. */
static bool advance(Group& g) {
  for (u64 i = 0; i < g.ops.size(); i++)
    if (!g.ops[i]->done) {
      if (g.ops[i]->joined != GROUP_THREADS) return false;
      perform(g, i);
      return true;
    }
  return false;
}

bool products_happen(Group* g) {
  g->listed = false;
  advance(*g);
  for (auto& op : g->ops)
    if (!op->done) return g->listed = op->joined == GROUP_THREADS;
  return false;
}

void wgmma_commit(Thread* t) { fiber(t)->groups.push_back(fiber(t)->issued); }

void wgmma_wait(Thread* thread, u32 groups) {
  Fiber* t = fiber(thread);
  Group& g = group_of(t);
  if (chance(4)) yield(t);
  t->fenced = false;
  if (t->groups.size() <= groups) return;
  const u64 target = t->groups[t->groups.size() - 1 - groups];
  t->groups.erase(t->groups.begin(), t->groups.end() - groups);
  const u32 lane = t->tid % GROUP_THREADS;
  while (t->waited < target && !g.ops[target - 1 - g.first]->done)
    if (!advance(g)) {
      g.waiters.push_back(t);
      wait(t, PRODUCTS);
    }
  for (; t->waited < target; t->waited++) {
    Op& op = *g.ops[t->waited - g.first];
    bool used = false; /* by a later product */
    for (u64 i = t->waited + 1; i < t->issued && !used; i++) used = g.ops[i - g.first]->places[lane][0] == op.places[lane][0];
    if (!used)
      for (size_t i = 0; i < op.places[lane].size(); i++) *op.places[lane][i] = op.values[lane][i];
    op.taken++;
  }
  while (!g.ops.empty() && g.ops.front()->taken == GROUP_THREADS) g.ops.pop_front(), g.first++;
}
