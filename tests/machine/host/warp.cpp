/* What the lanes of a warp do together. */
#include <string.h>
#include "state.h"

bool strict_masks = true;

/* Wait until all lanes of the mask are at this instruction; of all those there are, bar.warp.sync alone orders memory. */
static Meeting* meet(Thread* thread, u32 mask, u64 value, u32 second, bool orders = false) {
  Fiber* t = fiber(thread);
  if (!(mask >> t->lane & 1)) fail(t, format("lane %u is not in the mask %#x of what it executes", t->lane, mask));
  auto& open = t->of->meetings[t->warp];
  const bool alone = mask == 1u << t->lane; /* whatever the others wait for */
  Meeting* found = nullptr;
  for (auto& m : open) {
    const u32 missing = m->mask & ~m->arrived;
    if (m->mask == mask && missing) found = m.get();
    else if (missing >> t->lane & 1 && !alone && (strict_masks || mask & ~missing))
      fail(t, format("lanes %#x wait for this one with another mask at line %d", m->arrived, m->line));
  }
  if (!found) {
    open.push_back(std::make_unique<Meeting>());
    found = open.back().get();
    found->mask = mask;
    found->line = t->line;
  }
  if (found->line != t->line) fail(t, format("lanes %#x of the warp wait at line %d instead", found->arrived, found->line));
  found->arrived |= 1u << t->lane;
  found->value[t->lane] = value;
  found->second[t->lane] = second;
  found->who[t->lane] = t;
  if (mask == ~0u) order_converge(t);
  if (found->arrived == mask) {
    if (orders) {
      std::vector<Fiber*> all;
      for (int i = 0; i < 32; i++)
        if (mask >> i & 1) all.push_back(found->who[i]);
      order_together(all);
    }
    for (int i = 0; i < 32; i++)
      if (mask >> i & 1 && found->who[i] != t) wake(found->who[i]);
    if (chance(8)) yield(t);
  } else {
    wait(t, WARP);
  }
  return found;
}

static void leave(Thread* thread, Meeting* m) {
  Fiber* t = fiber(thread);
  m->left |= 1u << t->lane;
  if (m->left != m->mask) return;
  auto& open = t->of->meetings[t->warp];
  for (auto& each : open)
    if (each.get() == m) {
      std::swap(each, open.back());
      open.pop_back();
      return;
    }
}

u32 shfl(Thread* t, int mode, u32 value, u32 b, u32 c, u32 mask, u8* inside) {
  Meeting* m = meet(t, mask, value, 0);
  const int lane = t->lane, clamp = c & 31, segment = c >> 8 & 31;
  const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
  b &= 31;
  int from = 0;
  bool ok = false;
  if (mode == SHFL_UP) from = lane - (int)b, ok = from >= most;
  else if (mode == SHFL_DOWN) from = lane + (int)b, ok = from <= most;
  else if (mode == SHFL_BFLY) from = lane ^ (int)b, ok = from <= most;
  else from = least | ((int)b & ~segment), ok = from <= most;
  if (!ok) from = lane;
  if (!(mask >> from & 1)) fail(t, format("shfl from lane %d, which is not in the mask %#x", from, mask));
  const u32 got = (u32)m->value[from];
  leave(t, m);
  if (inside) *inside = ok;
  return got;
}

u32 ballot(Thread* t, bool predicate, u32 mask) {
  Meeting* m = meet(t, mask, predicate, 0);
  u32 out = 0;
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1 && m->value[i]) out |= 1u << i;
  leave(t, m);
  return out;
}

u32 redux(Thread* t, int operation, u32 value, u32 mask) {
  Meeting* m = meet(t, mask, value, 0);
  bool first = true;
  u32 out = 0;
  for (int i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    const u32 v = (u32)m->value[i];
    if (first) out = v;
    else if (operation == REDUX_ADD) out += v;
    else if (operation == REDUX_MIN) out = (s32)v < (s32)out ? v : out;
    else if (operation == REDUX_MAX) out = (s32)v > (s32)out ? v : out;
    else if (operation == REDUX_UMIN) out = v < out ? v : out;
    else if (operation == REDUX_UMAX) out = v > out ? v : out;
    else if (operation == REDUX_AND) out &= v;
    else if (operation == REDUX_OR) out |= v;
    else out ^= v;
    first = false;
  }
  leave(t, m);
  return out;
}

u32 match_any(Thread* t, u64 value, u32 mask) {
  Meeting* m = meet(t, mask, value, 0);
  u32 out = 0;
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1 && m->value[i] == value) out |= 1u << i;
  leave(t, m);
  return out;
}

u8 elect(Thread* t, u32 mask, u32* leader) {
  leave(t, meet(t, mask, 0, 0));
  *leader = __builtin_ctz(mask);
  return t->lane == *leader;
}

void warp_sync(Thread* t, u32 mask) { leave(t, meet(t, mask, 0, 0, true)); }

/* m8n8 of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8; a lane holds elements 2 * (lane % 4) of row lane / 4. */
void ldmatrix(Thread* t, u64 address, int count, bool transposed, u32* out) {
  Meeting* m = meet(t, ~0u, address, 0);
  for (int i = 0; i < count; i++) {
    u16 pair[2];
    for (int k = 0; k < 2; k++) {
      const int row = transposed ? 2 * (t->lane % 4) + k : t->lane / 4, column = transposed ? t->lane / 4 : 2 * (t->lane % 4) + k;
      memcpy(&pair[k], shared_of(fiber(t), m->value[8 * i + row], 16) + 2 * column, 2);
    }
    out[i] = (u32)pair[1] << 16 | pair[0];
  }
  leave(t, m);
}

void stmatrix(Thread* t, u64 address, int count, bool transposed, const u32* in) {
  Meeting* m = meet(t, ~0u, address, 0);
  for (int i = 0; i < count; i++)
    for (int k = 0; k < 2; k++) {
      const int row = transposed ? 2 * (t->lane % 4) + k : t->lane / 4, column = transposed ? t->lane / 4 : 2 * (t->lane % 4) + k;
      const u16 value = (u16)(in[i] >> (16 * k));
      memcpy(shared_of(fiber(t), m->value[8 * i + row], 16) + 2 * column, &value, 2);
    }
  leave(t, m);
}
