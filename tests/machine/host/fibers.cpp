/* Fibers, their random order, the virtual clock, and running launches to their end. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <algorithm>
#include <map>
#include "state.h"

Machine* M;
static void* scheduler;
static std::vector<void*> stacks;
static const size_t STACK = 1 << 18;
static const u64 TICK = 20, IDLE = 1 << 20; /* nanoseconds: of a switch, and of a round in which all only poll */

#if defined(__x86_64__)
asm(R"(
.text
.globl megamoe_switch
.type megamoe_switch,@function
megamoe_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size megamoe_switch,.-megamoe_switch
)");
extern "C" void megamoe_switch(void** from, void* to);
static void* prepare(char* stack, void (*entry)()) {
  void** top = (void**)(stack + STACK - 64);
  *--top = nullptr; /* where entry would return to; keeps the stack aligned as after a call */
  *--top = (void*)entry;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  return top;
}
#else
#include <ucontext.h>
static void megamoe_switch(void** from, void* to) {
  if (!*from) *from = new ucontext_t;
  swapcontext((ucontext_t*)*from, (ucontext_t*)to);
}
static void* prepare(char* stack, void (*entry)()) {
  auto* context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = STACK;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
#endif

Thread* running;

u32 random_number() {
  M->state += 0x9E3779B97F4A7C15ull;
  u64 z = M->state;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return (u32)(z >> 33);
}

std::string format(const char* text, ...) {
  char buffer[1024];
  va_list list;
  va_start(list, text);
  vsnprintf(buffer, sizeof buffer, text, list);
  va_end(list);
  return buffer;
}

std::string place_of(Thread* thread) {
  const Fiber* t = fiber(thread);
  return format("launch %u, CTA %u, thread %u, line %d", t->of->launch->index, t->of->index, t->tid, t->line);
}

/* The fibers are abandoned where they are: their stacks hold nothing that must be released in order. */
void fail_at(const std::string& what) {
  M->fault = what;
  M->failed = true;
  if (!running) throw what;
  Fiber* t = fiber(running);
  megamoe_switch(&t->context, scheduler);
  __builtin_unreachable();
}
void fail(Thread* t, const char* what) { fail_at(place_of(t) + ": " + what); }

void wait(Fiber* t, Waiting waiting) {
  t->waiting = waiting;
  megamoe_switch(&t->context, scheduler);
}
void wake(Fiber* t) {
  t->waiting = RUNS;
  M->ready.push_back(t);
}
void wake_all(std::vector<Fiber*>& list) {
  for (Fiber* t : list) wake(t);
  list.clear();
}
void yield(Thread* t) {
  M->ready.push_back(fiber(t));
  wait(fiber(t), RUNS);
}
void pause_sometimes(Fiber* t) {
  if (--t->budget > 0) return;
  t->budget = 1 + below(200);
  yield(t);
}
u64 globaltimer(Thread*) { return M->clock += TICK; }
void sleep_for(Thread* t, u32 nanoseconds) {
  fiber(t)->until = M->clock + nanoseconds;
  M->sleepers.push_back(fiber(t));
  wait(fiber(t), SLEEP);
}

/* Begin clusters while there are SMs for their CTAs, one each. */
static void begin_clusters(Launch* launch) {
  for (; launch->begun < launch->clusters.size(); launch->begun++) {
    auto& ctas = launch->clusters[launch->begun]->ctas;
    if (launch->free_sms.size() < ctas.size()) return;
    for (Cta* cta : ctas) {
      cta->begun = true;
      for (auto& t : cta->fibers) {
        t->smid = launch->free_sms.front();
        M->ready.push_back(t.get());
      }
      launch->free_sms.pop_front();
    }
  }
}

static void finish(Fiber* t) {
  ended(t);
  M->progress++;
  t->waiting = ENDED;
  if (--t->of->left == 0) {
    ended(t->of);
    t->of->launch->left--;
    t->of->launch->free_sms.push_back(t->smid);
    begin_clusters(t->of->launch);
  }
}

static void entry() {
  Fiber* t = fiber(running);
  t->of->launch->kernel(t);
  finish(t);
  stacks.push_back(t->stack);
  t->stack = nullptr;
  megamoe_switch(&t->context, scheduler);
  __builtin_unreachable();
}

static void resume(Fiber* t) {
  Launch* launch = t->of->launch;
  if (launch->stopped) return;
  if (launch->stop_after && ++launch->steps > launch->stop_after) {
    launch->stopped = true;
    M->progress++;
    return;
  }
  if (!t->context) {
    if (stacks.empty()) {
      void* memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) fail_at("no memory for the stack of a thread");
      stacks.push_back(memory);
    }
    t->stack = stacks.back();
    stacks.pop_back();
    t->context = prepare((char*)t->stack, entry);
  }
  running = t;
  M->switches++;
  megamoe_switch(&scheduler, t->context);
  running = nullptr;
}

static Fiber* take(std::vector<Fiber*>& list, u32 at) {
  Fiber* t = list[at];
  list[at] = list.back();
  list.pop_back();
  return t;
}

/* Which thread runs next. Some seeds let warps starve for long, which uniform draws never do. */
static u32 draw() {
  u32 best = below(M->ready.size());
  for (u32 i = 1; i < M->contest; i++) {
    const u32 other = below(M->ready.size());
    if (*M->ready[other]->priority > *M->ready[best]->priority) best = other;
  }
  if (chance(2048)) *M->ready[best]->priority = random_number();
  return best;
}

static void begin(Launch* launch) {
  launch->started = true;
  order_begin(launch);
  M->progress++;
  begin_clusters(launch);
}

static bool finished() {
  for (auto& launch : M->launches)
    if (!launch->stopped && launch->left) return false;
  return true;
}

static std::string waiting() {
  static const char* names[] = {"runs", "lanes of its warp", "bar", "barrier.cluster", "mbarrier", "polls", "sleeps", "wgmma", "ended"};
  std::map<std::string, std::vector<u32>> where;
  for (auto& launch : M->launches)
    for (auto& cta : launch->ctas)
      for (auto& t : cta->fibers)
        if (t->waiting != ENDED && cta->begun && !launch->stopped)
          where[format("launch %u, CTA %u, line %d (%s)", launch->index, cta->index, t->line, names[t->waiting])].push_back(t->tid);
  std::string out;
  for (auto& [text, threads] : where) {
    out += "\n  " + text + ": threads";
    for (size_t i = 0; i < threads.size(); i++) {
      size_t last = i;
      while (last + 1 < threads.size() && threads[last + 1] == threads[last] + 1) last++;
      out += format(last > i ? " %u-%u" : " %u", threads[i], threads[last]);
      i = last;
    }
  }
  return out;
}

static void run_all() {
  u64 before = 0, idle = 0;
  while (!M->failed && !finished()) {
    M->steps++;
    for (auto& launch : M->launches)
      if (!launch->started && M->clock >= launch->start) begin(launch.get());
    if (!M->pending.empty() && (M->ready.empty() || (M->eagerness && chance(M->eagerness)))) {
      happen(below(M->pending.size()));
    } else if (!M->ready.empty()) {
      M->clock += TICK;
      resume(take(M->ready, draw()));
      if (!M->pollers.empty() && chance(64)) wake(take(M->pollers, below(M->pollers.size())));
    } else {
      /* All only poll, sleep or wait. */
      u64 next = ~0ull;
      for (Fiber* t : M->sleepers) next = std::min(next, t->until);
      for (auto& launch : M->launches)
        if (!launch->started) next = std::min(next, launch->start);
      if (M->pollers.empty() && next == ~0ull) {
        fail_at("no thread can go on; they wait here:" + waiting());
      }
      const bool moved = M->progress != before;
      before = M->progress;
      idle = moved ? 0 : idle + 1;
      if (M->pollers.empty()) M->clock = std::max(M->clock, next);
      else if (!moved) M->clock += IDLE;
      if (idle > M->most_idle) fail_at("threads poll in vain; they wait here:" + waiting());
      for (size_t i = 0; i < M->sleepers.size();)
        if (M->sleepers[i]->until <= M->clock) wake(take(M->sleepers, i));
        else i++;
      wake_all(M->pollers);
    }
  }
  while (!M->failed && !M->pending.empty()) happen(below(M->pending.size())); /* the end of a launch waits for its copies */
}

extern "C" {
struct LaunchArguments {
  void (*kernel)(Thread*);
  const char* params;
  u64 params_size;
  u32 grid[3], block, cluster[3], shared_bytes, smids;
  u64 stop_after, start;
  u32 gpu;
};

/* Returns 0, or 1 with the fault's text. `statistics`: switches, nanoseconds of virtual time, loads of what may not be seen yet. */
int machine_run(const LaunchArguments* given, u32 count, const u64* buffers, u32 buffer_count, u64 seed, u64 most_idle, Order* order,
                u64* statistics, char* text, u64 text_size) {
  Machine machine;
  M = &machine;
  M->state = seed * 0x2545F4914F6CDD1Dull + 1;
  M->eagerness = (u32[]){2, 8, 64, 0}[below(4)];
  M->contest = (u32[]){1, 2, 6, 20}[below(4)];
  M->most_idle = most_idle;
  M->order = order;
  running = nullptr;
  for (u32 i = 0; i < buffer_count; i++) M->buffers.push_back({buffers[2 * i], buffers[2 * i] + buffers[2 * i + 1], {}, {}, false});
  std::sort(M->buffers.begin(), M->buffers.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
  const u64 origin = M->clock;
  for (u32 n = 0; n < count; n++) {
    const LaunchArguments& g = given[n];
    auto launch = std::make_unique<Launch>();
    launch->kernel = g.kernel;
    launch->index = n;
    launch->gpu = g.gpu;
    launch->stop_after = g.stop_after;
    launch->start = origin + g.start;
    launch->params.resize(g.params_size + 128);
    char* params = (char*)(((u64)launch->params.data() + 127) / 128 * 128);
    memcpy(params, g.params, g.params_size);
    const u32 total = g.grid[0] * g.grid[1] * g.grid[2], per = g.cluster[0] * g.cluster[1] * g.cluster[2];
    launch->left = total;
    for (u32 i = 0; i < g.smids; i++) launch->free_sms.push_back(i);
    std::map<u32, Cluster*> clusters;
    for (u32 i = 0; i < total; i++) {
      const u32 at[3] = {i % g.grid[0], i / g.grid[0] % g.grid[1], i / g.grid[0] / g.grid[1]};
      u32 id = 0, rank = 0;
      for (int axis = 2; axis >= 0; axis--) {
        id = id * (g.grid[axis] / g.cluster[axis]) + at[axis] / g.cluster[axis];
        rank = rank * g.cluster[axis] + at[axis] % g.cluster[axis];
      }
      Cluster*& cluster = clusters[id];
      if (!cluster) {
        launch->clusters.push_back(std::make_unique<Cluster>());
        cluster = launch->clusters.back().get();
        cluster->ctas.resize(per);
        cluster->windows.resize(per);
      }
      auto cta = std::make_unique<Cta>();
      cta->launch = launch.get();
      cta->cluster = cluster;
      cta->index = i;
      cta->rank = rank;
      cta->left = g.block;
      cta->memory.assign(g.shared_bytes + 2048, (char)0xff);
      /* Window offset 0 lies at a multiple of 1024, so that swizzles see the bits that they see on the device. */
      cta->shared = (char*)(((u64)cta->memory.data() + 1023) / 1024 * 1024) - SHARED_BEGIN;
      cta->shared_end = SHARED_BEGIN + g.shared_bytes;
      cluster->ctas[rank] = cta.get();
      cluster->windows[rank] = cta->shared;
      cluster->threads += g.block;
      const u32 warps = (g.block + 31) / 32;
      cta->meetings.resize(warps);
      cta->first_warp = M->fences.size();
      M->fences.resize(M->fences.size() + warps);
      cta->written.resize(g.shared_bytes / GRANULE + 2);
      for (u32 w = 0; w < warps; w++) cta->priorities.push_back(random_number());
      cta->groups.resize((warps + 3) / 4);
      for (u32 tid = 0; tid < g.block; tid++) {
        auto t = std::make_unique<Fiber>();
        t->line = 0;
        t->tid = tid, t->lane = tid % 32, t->warp = tid / 32;
        t->block = g.block;
        memcpy(t->grid, g.grid, 12), memcpy(t->cta, at, 12), memcpy(t->cluster, g.cluster, 12);
        t->rank = rank, t->ranks = per;
        t->shared = rank << 24 | SHARED_BEGIN;
        t->smids = g.smids;
        t->params = params;
        t->windows = cluster->windows.data();
        t->shared_bytes = g.shared_bytes;
        t->of = cta.get();
        t->priority = &cta->priorities[t->warp];
        cta->fibers.push_back(std::move(t));
      }
      launch->ctas.push_back(std::move(cta));
    }
    M->launches.push_back(std::move(launch));
  }
  try {
    order_begin(nullptr);
    run_all();
    order_end();
  } catch (const std::string&) {
  }
  for (auto& launch : M->launches)
    for (auto& cta : launch->ctas)
      for (auto& t : cta->fibers)
        if (t->stack) stacks.push_back(t->stack);
  statistics[0] = M->switches;
  statistics[1] = M->clock - origin;
  statistics[2] = M->unseen_loads;
  snprintf(text, text_size, "%s", (M->failed ? M->fault : M->unseen).c_str());
  const int failed = M->failed;
  M = nullptr;
  return failed;
}
}
