/* The machine's own state: launches, clusters, CTAs, fibers, and what is on its way. */
#pragma once
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>
#include "machine.h"
#include "order.h"

enum Waiting { RUNS, WARP, BAR, CLUSTER, MBARRIER, POLL, SLEEP, PRODUCTS, ENDED };
const u32 SHARED_BEGIN = 1024, SHARED_MOST = 232448 + 1024;
const int GROUP_THREADS = 128;

struct Cta;
struct Fiber;
struct Op;

const u32 GRANULE = 4;
struct Written { /* by the generic proxy: so many bytes of memory */
  u32 time = 0, warp = 0; /* 0: not, or the asynchronous proxy has written it since */
  int line = 0;
};

struct ProxyFences { u32 shared = 0, global = 0; }; /* times of a warp's latest fence.proxy.async */

struct Meeting { /* of the lanes of a warp at one instruction */
  u32 mask, arrived = 0, left = 0;
  int line;
  u64 value[32];
  u32 second[32];
  Fiber* who[32];
};

struct Copy { /* cp.async, or the arrival behind those before it */
  char* to;
  const char* from; /* null: an arrival on the barrier `to` */
  u32 size, read, group;
};

struct Store { /* bulk store: its source is read, then its target written, each at its own time */
  int line;
  std::vector<char> box; /* what was read */
  std::vector<std::pair<char*, const char*>> pieces; /* to, from; `bytes` each */
  u32 bytes, group;
  bool read = false, written = false;
};

struct Fiber : Thread {
  Cta* of;
  Actor* actor = nullptr;  /* null: order is not checked */
  void* stack = nullptr;
  void* context = nullptr;
  Waiting waiting = RUNS;
  u64 until = 0;            /* SLEEP */
  char* barrier = nullptr;  /* MBARRIER */
  u32 bar = 0;
  u64 poll_address = 0, poll_value = 0;
  int budget = 1;
  u32* priority;            /* of its warp */
  Meeting* meeting = nullptr;
  u32 cluster_phase = 0;
  std::vector<Copy> copies;
  u32 copy_group = 0;
  std::vector<Store> stores;
  u32 store_group = 0;
  bool listed_copies = false, listed_stores = false;
  u64 issued = 0;                 /* wgmma of this thread */
  std::vector<u64> groups;        /* ends of its committed groups that were not waited for */
  u64 waited = 0;                 /* wgmma whose results it has */
  bool fenced = false;
};

struct Op { /* one wgmma of a warpgroup */
  Products what;
  int line, joined = 0, taken = 0;
  bool done = false;
  Cta* cta;
  std::vector<std::vector<u32>> values; /* accumulators by thread */
  std::vector<std::vector<u32*>> places;
  std::vector<u32> a;
};

struct Group { /* warpgroup */
  std::deque<std::unique_ptr<Op>> ops;
  u64 first = 0; /* number of ops[0] */
  std::vector<Fiber*> waiters;
  bool listed = false;
};

struct Bar { u32 expected = 0, arrived = 0; std::vector<Fiber*> waiters; Releases order; };

struct Launch;
struct Cluster {
  u32 arrived = 0, threads = 0, phase = 0, ended = 0;
  std::vector<Fiber*> waiters;
  std::vector<Cta*> ctas;
  std::vector<char*> windows;
  Releases arriving, order;
};

struct Cta {
  Launch* launch;
  Cluster* cluster;
  u32 index, rank, left;
  bool begun = false;
  std::vector<char> memory;
  char* shared; /* of window offset 0 */
  u32 shared_end;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::vector<std::unique_ptr<Meeting>>> meetings; /* by warp */
  u32 first_warp; /* its warps' places in M->fences */
  std::vector<Written> written;
  std::vector<Cell> cells;                                       /* of its shared memory */
  std::vector<u32> priorities;                                   /* by warp */
  std::deque<Group> groups;
  Bar bars[16];
};

struct Launch {
  void (*kernel)(Thread*);
  u32 index, left, gpu;
  u64 steps = 0, stop_after; /* 0: never */
  u64 start;                 /* time of its start */
  bool started = false, stopped = false;
  std::vector<char> params;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::unique_ptr<Cluster>> clusters; /* the first `begun` of them have begun */
  u32 begun = 0;
  std::deque<u32> free_sms;
};

struct Pending { /* what may happen at any time from now on */
  enum Kind { LOAD, COPIES, STORES, PRODUCT } kind;
  Fiber* fiber = nullptr;
  Group* group = nullptr;
  Cta* cta = nullptr;
  int line = 0;
  std::vector<std::pair<char*, const char*>> pieces; /* LOAD: to, from (null: zeros) */
  std::vector<u32> sizes;
  std::vector<Cta*> owners; /* of the shared memory that pieces go to */
  std::vector<std::pair<char*, u32>> barriers; /* complete_tx */
  std::vector<Cta*> ctas;
};

struct Machine {
  u64 state; /* of the random numbers */
  u64 clock = 1'000'000'000, progress = 0, steps = 0, switches = 0;
  u32 eagerness;            /* one in so many steps is a pending copy or product; 0: only when no thread can run */
  u32 contest;              /* threads that are drawn for a step; the one of the warp with the highest priority runs */
  u64 most_idle;
  std::vector<std::unique_ptr<Launch>> launches;
  std::vector<Fiber*> ready, pollers, sleepers;
  std::vector<Pending> pending;
  std::unordered_map<char*, std::vector<Fiber*>> barrier_waiters;
  struct Buffer { u64 begin, end; std::vector<Written> written; std::vector<Cell> cells; bool kept = false; };
  std::vector<Buffer> buffers;
  std::vector<ProxyFences> fences;
  Order* order = nullptr;
  u32 now = 0; /* counts writes and fences */
  std::string fault, unseen; /* the latter: the first load of what may not be seen yet */
  u64 unseen_loads = 0;
  bool failed = false;
};
extern Machine* M;

u32 random_number();
static inline u32 below(u32 n) { return n ? random_number() % n : 0; }
static inline bool chance(u32 one_in) { return random_number() % one_in == 0; }

void wait(Fiber*, Waiting);   /* switch away until woken */
void wake(Fiber*);
void wake_all(std::vector<Fiber*>&);
void pause_sometimes(Fiber*); /* let others run, now and then */
void happen(u32 index);       /* let one pending thing happen */
char* shared_of(Fiber*, u64 address, u32 size, Cta** whose = nullptr);
void complete_bytes(char* barrier, u32 bytes, int line, Cta*);
void arrive_on(char* barrier, u32 count, int line, Cta*);
void ended(Fiber*);           /* checks of a thread that leaves */
void ended(Cta*);
bool copies_happen(Fiber*);
bool stores_happen(Fiber*);
bool products_happen(Group*);
void check_global(Thread*, u64 address, u64 size, u32 alignment);
Machine::Buffer* buffer_of(u64 address, u64 size);
/* order.cpp; addresses are of this process, and nothing happens where order is not checked. */
void order_begin(Launch*);
void order_end();
void* order_access(Fiber*, void* at, u32 size, bool write, u32 how, Cta* shared); /* where to access instead: poison */
enum Copying { BULK_LOAD, CP_ASYNC, BULK_STORE };
/* Offsets of granules that arrive as poison. */
std::vector<u32> order_copy(Fiber*, const void* at, u32 size, bool write, Cta* shared, Copying, const char* barrier = nullptr, Cta* of = nullptr);
void order_copies_next(Fiber*); /* cp.async: the accesses of one have been told */
void order_copies_commit(Fiber*);
void order_copies_wait(Fiber*, s64 groups);
void order_copies_arrive(Fiber*, char* barrier);
void order_stores_commit(Fiber*);
void order_stores_wait(Fiber*, u32 groups, bool read);
void order_together(const std::vector<Fiber*>&, Releases* others = nullptr); /* all of them are at a barrier */
void order_converge(Fiber*); /* all lanes of its warp come here */
void order_release(Fiber*, Releases&);
void order_acquire(Fiber*, const Releases&);
void order_proxy_fence(Fiber*); /* for shared memory */
void order_init(Fiber*, char* barrier, Cta*);
void order_arrive(Fiber*, char* barrier, Cta*);
void order_complete(Fiber*, char* barrier, Cta*); /* relaxed: what it releases is what fences before it do */
void order_flip(char* barrier, Cta*);
void order_waited(Fiber*, char* barrier, Cta*);
/* Order between the proxies; addresses are of this process. A warp's number counts from that of all launches' first one. */
void generic_write(Fiber*, const void* at, u32 size, Cta* shared);
void async_write(const void* at, u32 size, Cta* shared);
void async_read(Fiber*, const void* at, u32 size, Cta* shared, u32 warps = 1);
/* Offsets of granules that the asynchronous proxy may not see yet. */
std::vector<u32> unseen(Fiber*, const void* at, u32 size, Cta* shared, u32 warps = 1);
std::string format(const char*, ...);
std::string place_of(Thread*);
[[noreturn]] void fail_at(const std::string& what);
static inline Fiber* fiber(Thread* t) { return static_cast<Fiber*>(t); }
[[noreturn]] static inline void fail(Thread* t, const std::string& what) { fail(t, what.c_str()); }
