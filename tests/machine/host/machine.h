/* What a translated kernel calls. One fiber runs one GPU thread; calls that wait switch to other fibers. */
#pragma once
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef unsigned __int128 u128;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;

struct Thread {
  int line;           /* of the PTX, set before whatever may fail */
  u32 tid, lane, warp;
  u32 block, grid[3], cta[3];       /* threads of a CTA, CTAs of the launch, this CTA's place */
  u32 cluster[3], rank, ranks;      /* CTAs of a cluster, this CTA's place in it and their number */
  u32 shared;         /* window address of this CTA's shared memory: rank << 24 | 1024 */
  u32 smid, smids;
  const char* params;
  char* const* windows;             /* by rank in the cluster: where window offset 0 of each CTA's shared memory would lie */
  u32 shared_bytes;                 /* of a CTA, static and dynamic */
};
extern Thread* running; /* for functions that kernels call and that are not told */

/* ---- memory.cpp: checked accesses; shared addresses carry the rank of their CTA in the cluster ---- */
enum { SCOPE_CTA = 1, SCOPE_CLUSTER, SCOPE_GPU, SCOPE_SYS, ACQUIRE = 8, RELEASE = 16, ATOMIC = 32 };
/* `how`: 0 for a weak access, else its scope and what it does beside being relaxed. */
void* global_at(Thread*, u64 address, u32 size, bool write, u32 how = 0);
void* shared_at(Thread*, u64 address, u32 size, bool write, u32 how = 0);
void* generic_at(Thread*, u64 address, u32 size, bool write, u32 how = 0);
void polled(Thread*, u64 address, u64 seen); /* after a load that may be repeated until another thread stores */
void stored(Thread*);                        /* after a store or an atomic that others may wait for */
void proxy_fence(Thread*, bool shared, bool global);
void memory_fence(Thread*, u32 how);
void access_told(Thread*, u64 address, u32 size, bool write, u32 how); /* for the check of their order: what a function that a kernel calls does next */
[[noreturn]] void fail(Thread*, const char* what);

/* ---- fibers.cpp ---- */
u64 globaltimer(Thread*);
void sleep_for(Thread*, u32 nanoseconds);
void yield(Thread*);

/* ---- warp.cpp ---- */
enum { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX };
enum { REDUX_ADD, REDUX_MIN, REDUX_MAX, REDUX_UMIN, REDUX_UMAX, REDUX_AND, REDUX_OR, REDUX_XOR };
u32 shfl(Thread*, int mode, u32 value, u32 b, u32 c, u32 mask, u8* inside);
u32 ballot(Thread*, bool predicate, u32 mask);
u32 redux(Thread*, int operation, u32 value, u32 mask);
u32 match_any(Thread*, u64 value, u32 mask);
u8 elect(Thread*, u32 mask, u32* leader);
void warp_sync(Thread*, u32 mask);
extern bool strict_masks; /* lanes may not meet while others wait for them with another mask; hardware lets them, if all are missing there */
void ldmatrix(Thread*, u64 address, int count, bool transposed, u32* out);
void stmatrix(Thread*, u64 address, int count, bool transposed, const u32* in);

/* ---- barriers.cpp ---- */
void bar_sync(Thread*, u32 id, u32 threads);
void bar_arrive(Thread*, u32 id, u32 threads);
void cluster_arrive(Thread*);
void cluster_wait(Thread*);
void mbarrier_init(Thread*, u64 address, u32 count);
void mbarrier_inval(Thread*, u64 address);
u64 mbarrier_arrive(Thread*, u64 address, u32 count, s64 expected_bytes, bool drop);
void mbarrier_expect(Thread*, u64 address, u32 bytes);
void mbarrier_complete(Thread*, u64 address, u32 bytes);
u8 mbarrier_wait(Thread*, u64 address, u32 parity, bool blocks);

/* ---- copies.cpp ---- */
void cp_async(Thread*, u64 shared, u64 global, u32 size, u32 read);
void cp_async_commit(Thread*);
void cp_async_wait(Thread*, s64 groups); /* -1: all copies, committed or not */
void cp_async_arrive(Thread*, u64 barrier, bool noinc);
void bulk_load(Thread*, u64 shared, u64 global, u32 size, u64 barrier, u32 multicast);
void bulk_store(Thread*, u64 global, u64 shared, u32 size);
void bulk_to_cluster(Thread*, u64 to, u64 from, u32 size, u64 barrier);
void tensor_load(Thread*, int rank, u64 shared, u64 map, const s32* corner, u64 barrier, u32 multicast);
void tensor_store(Thread*, int rank, u64 map, const s32* corner, u64 shared);
void bulk_commit(Thread*);
void bulk_wait(Thread*, u32 groups, bool read);

/* ---- wgmma.cpp ---- */
enum { BF16, F16, E4M3, E5M2 };
struct Products {
  int n, a_type, b_type;
  u64 a, b;          /* descriptors */
  const u32* a_registers; /* four words, or null: A lies in shared memory */
  bool keep;         /* add to the accumulators */
  float a_sign, b_sign;
};
void wgmma(Thread*, const Products&, u32* const* accumulators);
void wgmma_fence(Thread*);
void wgmma_commit(Thread*);
void wgmma_wait(Thread*, u32 groups);
