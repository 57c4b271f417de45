// Life of a CTA, waits that end, and operations that take effect at once or, in delayed mode, later.
//
// Delayed: tcgen05.mma, cp and commit enter their CTA's queue, in order, and leave it one by one whenever some thread of the cluster that polls
// a barrier draws a number that says so, or when the last thread of the CTA leaves. That is what the memory model allows: in order among
// themselves, at any time until a commit's barrier is seen to complete. A kernel that does not wait reads TMEM that was not written yet.
#pragma once
#include "mma.cuh"
#include "tmem.cuh"

enum { OP_MMA = 1, OP_COPY, OP_COMMIT };

struct Commit {
  u32 barrier, mask, multicast, rank;
};

struct Operation {
  u32 what;
  Mma mma;
  Copy copy;
  Commit commit;
};
EMU_STATE Operation queued[QUEUES * QUEUE];

EMU_INLINE void commit_run(const Commit &c) {
  __threadfence();
  if (!c.multicast) arrive(c.barrier);
  else
    for (u32 r = 0; r < 16; r++)
      if (c.mask >> r & 1) arrive(shared_of(c.barrier, r));
}

EMU_INLINE void operation_run(const Operation &op, u32 first, u32 step) {
  if (op.what == OP_MMA) mma_run(op.mma, first, step);
  else if (op.what == OP_COPY) copy_run(op.copy, first, step);
  else if (first == 0) commit_run(op.commit);
}

// ---- the queue ----

EMU_INLINE Operation *queue_of(u32 key) { return &queued[(size_t)(key & (QUEUES - 1)) * QUEUE]; }

// The oldest operation of a CTA's queue by the threads of `mask`, all of which call this. Whether there was one, or someone else has the lock.
EMU_FUNCTION bool queue_step(u32 key, u32 mask) {
  Cta *cta = &ctas[key];
  u32 leader = __ffs(mask) - 1, index = __popc(mask & ((1u << lane()) - 1)), state = 0;
  if (lane() == leader && *(volatile u32 *)&cta->head != *(volatile u32 *)&cta->tail) {
    state = 1;
    if (atomicCAS(&cta->lock, 0, 1) == 0) state = *(volatile u32 *)&cta->head != *(volatile u32 *)&cta->tail ? 2 : 3;
  }
  state = __shfl_sync(mask, state, leader);
  if (state >= 2) {
    __threadfence();
    __syncwarp(mask);  // what the leader has acquired is for all
    if (state == 2) operation_run(queue_of(key)[*(volatile u32 *)&cta->head % QUEUE], index, __popc(mask));
    __threadfence();
    __syncwarp(mask);
    if (lane() == leader) {
      if (state == 2) atomicAdd(&cta->head, 1);
      __threadfence();
      atomicExch(&cta->lock, 0);
    }
    __syncwarp(mask);
  }
  return state != 0;
}

// One thread; the operation takes effect now or later. Several warps may issue.
EMU_INLINE void enqueue(const Operation &op, u32 line) {
  u32 key = cta_key(cluster_rank());
  Cta *cta = &ctas[key];
  while (atomicCAS(&cta->adding, 0, 1)) {
    if (expired(cta, line, QUEUE)) return;
    __nanosleep(100);
  }
  __threadfence();
  bool room = true;
  while (room && *(volatile u32 *)&cta->tail - *(volatile u32 *)&cta->head == QUEUE) {
    queue_step(key, 1u << lane());
    room = !expired(cta, line, QUEUE);
  }
  if (room) {
    __threadfence();  // after the last operation that was in this place
    queue_of(key)[*(volatile u32 *)&cta->tail % QUEUE] = op;
    __threadfence();
    atomicAdd(&cta->tail, 1);
  }
  __threadfence();
  atomicExch(&cta->adding, 0);
}

// ---- life of a CTA ----

// Every thread, before anything else of the kernel.
EMU_CALL void megamoe_begin(u32 shared_limit, u32 limit_ms, u32 poison, u32 delayed) {
  Cta *cta = own_cta();
  u32 count = threads();
  if (thread() == 0) {
    cta->start = now();
    cta->limit = limit_ms * 1000000ull;
    cta->live = count;
    cta->relinquished = cta->serial = cta->adding = cta->lock = cta->head = cta->tail = 0;
    cta->seed = delayed ? megamoe_seed : 0;
    __threadfence();
    atomicExch(&cta->slot, sm() + 1);
    if (shared_size() > shared_limit) report(FAULT_SHARED_LIMIT, 0, shared_size(), shared_limit);
  }
  if (poison)
    for (u32 at = thread() * 4; at < shared_size(); at += count * 4) store_shared32(shared_of(shared_begin() + at, cluster_rank()), POISON);
  shared_proxy_fence();  // the kernel's first tensor copies come after the poison
  for (u32 i = thread(); i < LANES * COLUMNS; i += count) tmem_scratch[i] = POISON;
  __threadfence();
  __syncthreads();
}

// Whether this is the last thread of its CTA to leave.
EMU_INLINE bool last_to_leave(Cta *cta) {
  __threadfence();
  return atomicSub(&cta->live, 1) == 1;
}

EMU_INLINE void leave(u32 key) {
  u32 slot = sm(), left = 0;
  for (u32 i = 0; i < COLUMNS / CHUNK; i++) {
    u32 *owner = &tmem_owner[slot * (COLUMNS / CHUNK) + i];
    if (*(volatile u32 *)owner == key + 1) {
      left |= 1u << i;
      atomicExch(owner, 0);
    }
  }
  if (left) {
    report(FAULT_TMEM_LEFTOVER, 0, left, 0);
    atomicAnd(&tmem_taken[slot], ~left);
  }
  atomicExch(&ctas[key].slot, 0);
}

// Every thread, before it leaves. `_delayed`: in delayed mode.
EMU_CALL void megamoe_end() {
  u32 key = cta_key(cluster_rank());
  if (last_to_leave(&ctas[key])) leave(key);
}

EMU_CALL void megamoe_end_delayed() {
  u32 key = cta_key(cluster_rank());
  Cta *cta = &ctas[key];
  if (!last_to_leave(cta)) return;
  while (*(volatile u32 *)&cta->head != *(volatile u32 *)&cta->tail && !expired(cta, 0, 1)) queue_step(key, 1u << lane());
  leave(key);
}

// After a barrier test that failed: whether to give up.
EMU_CALL u32 megamoe_waiting(u32 line, u32 barrier) { return __any_sync(__activemask(), expired(own_cta(), line, barrier)); }

// The same, and a draw decides whether delayed operations of the cluster make progress meanwhile.
EMU_CALL u32 megamoe_waiting_delayed(u32 line, u32 barrier) {
  Cta *cta = own_cta();
  u32 mask = __activemask(), draw = __shfl_sync(mask, random_draw(cta), __ffs(mask) - 1);
  if (draw % 4 == 0) {
    u32 key = cta_key(draw / 4 % cluster_size());
    if (*(volatile u32 *)&ctas[key].slot) queue_step(key, mask);
  }
  return __any_sync(mask, expired(cta, line, barrier));
}

// ---- the instructions ----

EMU_INLINE u32 from_leader(u32 value, u32 leader) { return __shfl_sync(~0u, value, leader); }
EMU_INLINE u64 from_leader(u64 value, u32 leader) { return __shfl_sync(~0u, value, leader); }

EMU_CALL void megamoe_mma(u32 line, u32 leader, u32 flags, u32 d, u64 a, u64 b, u32 idesc, u32 scale_a, u32 scale_b, u32 accumulate) {
  bool alone = leader == ALONE, delayed = own_cta()->seed != 0;
  if (!alone) {
    __syncwarp();
    d = from_leader(d, leader); a = from_leader(a, leader); b = from_leader(b, leader); idesc = from_leader(idesc, leader);
    scale_a = from_leader(scale_a, leader); scale_b = from_leader(scale_b, leader); accumulate = from_leader(accumulate, leader);
  }
  Mma m = {a, b, d, idesc, scale_a, scale_b, flags, line, cluster_rank(), accumulate};
  if (delayed) {
    Operation op;
    op.what = OP_MMA;
    op.mma = m;
    if (alone || lane() == leader) enqueue(op, line);
  } else if (alone) {
    mma_run(m, 0, 1);
  } else {
    mma_run(m, lane(), 32);
  }
  if (!alone) __syncwarp();
}

EMU_CALL void megamoe_copy(u32 line, u32 leader, u32 shape, u32 group, u32 to, u64 from) {
  bool alone = leader == ALONE, delayed = own_cta()->seed != 0;
  if (!alone) {
    __syncwarp();
    to = from_leader(to, leader);
    from = from_leader(from, leader);
  }
  Copy c = {from, to, shape, group, line, cluster_rank()};
  if (delayed) {
    Operation op;
    op.what = OP_COPY;
    op.copy = c;
    if (alone || lane() == leader) enqueue(op, line);
  } else if (alone) {
    copy_run(c, 0, 1);
  } else {
    copy_run(c, lane(), 32);
  }
  if (!alone) __syncwarp();
}

// One thread, after what it issued before.
EMU_CALL void megamoe_commit(u32 line, u32 barrier, u32 mask, u32 multicast) {
  Commit c = {barrier, mask, multicast, cluster_rank()};
  if (own_cta()->seed) {
    if (!multicast && barrier < 1u << 24) c.barrier = shared_of(barrier, c.rank);
    Operation op;
    op.what = OP_COMMIT;
    op.commit = c;
    enqueue(op, line);
  } else {
    commit_run(c);
  }
}
