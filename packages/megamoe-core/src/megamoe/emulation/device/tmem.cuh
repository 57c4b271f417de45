// tcgen05.alloc, dealloc, relinquish_alloc_permit, and the addresses and checks of tcgen05.ld and st; tcgen05.cp.
#pragma once
#include "state.cuh"

EMU_INLINE void poison_columns(u32 slot, u32 first, u32 count, u32 index, u32 step) {
  for (u32 i = index; i < LANES * count / 4; i += step)
    __stcg((uint4 *)cell(slot, i / (count / 4), first) + i % (count / 4), make_uint4(POISON, POISON, POISON, POISON));
}

// A whole warp. Writes the address of the columns to shared memory at `to`; waits while they are taken.
EMU_CALL void megamoe_tmem_alloc(u32 line, u32 to, u32 columns) {
  __syncwarp();
  Cta *cta = own_cta();
  u32 slot = sm(), base = COLUMNS;
  bool legal = columns >= 32 && columns <= 512 && !(columns & (columns - 1));
  if (lane() == 0) {
    if (!legal) report(FAULT_TMEM_ALLOC_SIZE, line, columns, 0);
    else if (cta->relinquished) report(FAULT_TMEM_RELINQUISHED, line, columns, 0);
    u32 chunks = columns / CHUNK, wanted = (u32)((1ull << chunks) - 1);
    while (legal && base == COLUMNS) {
      u32 taken = atomicAdd(&tmem_taken[slot], 0);
      for (u32 at = 0; at + chunks <= COLUMNS / CHUNK; at++)
        if (!(taken & wanted << at)) {
          if (atomicCAS(&tmem_taken[slot], taken, taken | wanted << at) == taken) base = at * CHUNK;
          break;
        }
      if (base == COLUMNS && expired(cta, line, columns)) break;
      if (base == COLUMNS) __nanosleep(200);
    }
    for (u32 i = 0; base < COLUMNS && i < chunks; i++) atomicExch(&tmem_owner[slot * (COLUMNS / CHUNK) + base / CHUNK + i], cta_key(cluster_rank()) + 1);
  }
  base = __shfl_sync(~0u, base, 0);
  if (base < COLUMNS) poison_columns(slot, base, columns, lane(), 32);
  __threadfence();
  if (lane() == 0) store_shared32(to, base);
  __syncwarp();
}

EMU_CALL void megamoe_tmem_dealloc(u32 line, u32 address, u32 columns) {
  __syncwarp();
  if (lane() == 0) {
    u32 slot = sm(), first = address & 0xffff, chunks = columns / CHUNK, key = cta_key(cluster_rank());
    bool legal = columns >= 32 && columns <= 512 && !(columns & (columns - 1)) && first % CHUNK == 0 && first + columns <= COLUMNS;
    for (u32 i = 0; legal && i < chunks; i++) legal = tmem_owner[slot * (COLUMNS / CHUNK) + first / CHUNK + i] == key + 1;
    if (legal) {
      for (u32 i = 0; i < chunks; i++) atomicExch(&tmem_owner[slot * (COLUMNS / CHUNK) + first / CHUNK + i], 0);
      __threadfence();
      atomicAnd(&tmem_taken[slot], ~((u32)((1ull << chunks) - 1) << first / CHUNK));
    } else {
      report(FAULT_TMEM_DEALLOC, line, address, columns);
    }
  }
  __syncwarp();
}

EMU_CALL void megamoe_tmem_relinquish(u32 line) {
  __syncwarp();
  if (lane() == 0) atomicExch(&own_cta()->relinquished, 1);
}

EMU_STATE u32 tmem_scratch[LANES * COLUMNS];  // where an access that a check refused goes, full of poison

// Global address of register 0 of tcgen05.ld or st for this thread; the rewriter adds the constant distances of the other registers.
// `form` is a shape, plus SHAPE_PACKED where a register holds the lower halves of two columns. `split`: columns from the lower 16 threads' first
// to the upper ones' (16x32bx2).
EMU_CALL u64 megamoe_tmem_address(u32 line, u32 address, u32 form, u32 registers, u32 split) {
  __syncwarp();
  u32 shape = form & ~SHAPE_PACKED, halves = form & SHAPE_PACKED ? 2 : 1;
  u32 warp = thread() / 32 % 4, row = address >> 16, column = address & 0xffff, to_row, to_column;
  // A warp reaches its own 32 lanes whatever the address says, so that 0 is a common way to write it; another warp's lanes are a mistake.
  bool legal = row < LANES && (row < 32 || row / 32 == warp) && (shape == SHAPE_32X32B ? row % 32 == 0 : row % 16 == 0);
  if (!legal) report(FAULT_SUB_PARTITION, line, address, warp);
  legal &= columns_owned(sm(), cta_key(cluster_rank()), column, halves * tmem_columns(shape, registers) + split, line);
  // The rewriter moves 4 registers of 32x32b, 2 of 16x256b at once.
  u32 width = halves == 2 ? 1 : shape == SHAPE_32X32B && registers % 4 == 0 ? 4 : shape == SHAPE_16X256B ? 2 : 1;
  if (legal && column % width) { report(FAULT_TMEM_ALIGNMENT, line, column, width); legal = false; }
  tmem_cell(shape, lane(), 0, &to_row, &to_column);
  to_column = halves * to_column + (lane() / 16) * split;
  u32 *to = legal ? cell(sm(), row % 32 + 32 * warp + to_row, column + to_column) : tmem_scratch + to_row * COLUMNS + to_column;
  return global_address(to);
}

// ---- tcgen05.cp: shared memory to TMEM ----

enum CopyShape { COPY_32X128B_X4 = 0, COPY_128X128B, COPY_128X256B, COPY_64X128B_02_13, COPY_64X128B_01_23 };

struct Copy {
  u64 from;
  u32 to, shape, group, line, rank;
};

EMU_FUNCTION void copy_run(const Copy &c, u32 first, u32 step) {
  u32 columns = c.shape == COPY_128X256B ? 8 : 4, rows = c.shape == COPY_32X128B_X4 ? 32 : c.shape >= COPY_64X128B_02_13 ? 64 : 128;
  int wrong = descriptor_fault(c.from);
  if (wrong) { report(FAULT_DESCRIPTOR, c.line, c.from, wrong); return; }
  for (u32 half = 0; half < c.group; half++) {
    u32 rank = c.group == 2 ? (c.rank & ~1u) | half : c.rank, slot = slot_of(rank, c.line);
    if (slot == SLOTS || !columns_owned(slot, cta_key(rank), c.to & 0x1ff, columns, c.line)) return;
    for (u32 i = first; i < rows * columns; i += step) {
      u32 row = i / columns, word = i % columns, value = load_shared(shared_of(k_major_address(c.from, row, 4 * word), rank));
      u32 column = (c.to & 0x1ff) + word;
      if (rows == 128) {
        __stcg(cell(slot, row, column), value);
      } else if (rows == 32) {
        for (u32 part = 0; part < 4; part++) __stcg(cell(slot, row + 32 * part, column), value);
      } else {
        u32 low = c.shape == COPY_64X128B_02_13 ? row / 32 : row / 32 * 2, other = c.shape == COPY_64X128B_02_13 ? 2 : 1;
        __stcg(cell(slot, row % 32 + 32 * low, column), value);
        __stcg(cell(slot, row % 32 + 32 * (low + other), column), value);
      }
    }
  }
  __threadfence();
}
