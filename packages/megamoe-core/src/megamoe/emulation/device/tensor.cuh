// Tensor copies that Hopper's own unit does not do: 4- and 6-bit elements (packed or padded to 16 bytes for every 16), and copies whose
// barrier lies in the other CTA of a pair, and gathered rows. And cluster launch control, which answers that there is nothing left to cancel.
#pragma once
#include "async.cuh"

EMU_INLINE uint4 chunk_load(const TensorMap &map, u64 bit, u32 inside, u32 elements) {
  u32 bits = tensor_global_bits(map.type), bytes = elements * bits / 8;
  const u8 *from = (const u8 *)(map.base + bit / 8);
  if (inside == elements && bytes == 16 && (u64)from % 16 == 0) return __ldcg((const uint4 *)from);
  u32 words[4] = {0, 0, 0, 0};
  u32 valid = inside * bits;
  for (u32 i = 0; i < bytes && 8 * i < valid; i++) {
    u32 byte = *(volatile const u8 *)(from + i);
    if (8 * i + 8 > valid) byte &= (1u << (valid - 8 * i)) - 1;
    words[i / 4] |= byte << (8 * (i % 4));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

EMU_INLINE bool map_read(u64 address, TensorMap *map, u32 line) {
  u64 q[8];
  for (int i = 0; i < 8; i++) q[i] = *(volatile const u64 *)(address + 8 * i);
  int wrong = tensor_map_decode(q, map);
  if (wrong) report(FAULT_TENSOR_MAP, line, address, wrong);
  return !wrong;
}

EMU_INLINE bool native_type(u64 address) { return (*(volatile const u64 *)(address + 8) >> 7 & 0xf) < TENSOR_4BIT_PACKED; }

// Tensor copy from global to shared memory. Returns 0 when Hopper's own instruction can do it; the caller then issues that.
// `how`, bit 0 (pair): the barrier is in the CTA of the pair that its address names. `mask`: CTAs of the cluster that receive, 0 for the caller's own.
// Bit 1 (gather4): four boxes of one row each, in column c0 and rows c1 to c4, one behind the other.
EMU_CALL u32 megamoe_tensor_load(u32 line, u32 leader, u64 address, u32 c0, u32 c1, u32 c2, u32 c3, u32 c4, u32 to, u32 barrier, u32 mask, u32 how) {
  bool alone = leader == ALONE, pair = how & 1, gather = how & 2;
  if (!alone) {
    __syncwarp();
    address = from_leader(address, leader); to = from_leader(to, leader); barrier = from_leader(barrier, leader); mask = from_leader(mask, leader);
    c0 = from_leader(c0, leader); c1 = from_leader(c1, leader); c2 = from_leader(c2, leader); c3 = from_leader(c3, leader); c4 = from_leader(c4, leader);
  }
  if (!pair && !gather && native_type(address)) return 0;
  TensorMap map;
  u32 own = cluster_rank(), first = alone ? 0 : lane(), step = alone ? 1 : 32;
  if (!mask) mask = 1u << own;
  if (map_read(address, &map, line)) {
    const int at[5] = {(int)c0, (int)c1, (int)c2, (int)c3, (int)c4};
    if (gather) map.rank = 2, map.box[1] = 1;
    u32 row_bytes = tensor_box_bytes(&map), bytes = gather ? 4 * row_bytes : row_bytes;
    for (u32 chunk = first; chunk < bytes / 16; chunk += step) {
      u64 bit;
      const int row_at[5] = {at[0], at[1 + chunk * 16 / row_bytes % 4], 0, 0, 0};
      u32 elements, inside = gather ? tensor_chunk(&map, row_at, chunk % (row_bytes / 16), &bit, &elements) : tensor_chunk(&map, at, chunk, &bit, &elements);
      uint4 value = chunk_load(map, bit, inside, elements);
      u32 place = tensor_shared_address(&map, to & 0xffffff, chunk * 16);
      for (u32 r = 0; r < 16; r++)
        if (mask >> r & 1) store_shared(shared_of(place, r), value);
    }
    cluster_fence();
    all_proxies_fence();  // a native store may read them next
    if (!alone) __syncwarp();
    if (first == 0) cluster_fence();  // releases what the other lanes wrote, too
    if (first == 0)
      for (u32 r = 0; r < 16; r++)
        if (mask >> r & 1) complete_bytes(shared_of(barrier, pair ? (r & ~1u) | (barrier >> 24 & 1) : r), bytes);
  }
  if (!alone) __syncwarp();
  return 1;
}

// Tensor copy from shared to global memory; 0 when Hopper's own instruction can do it.
EMU_CALL u32 megamoe_tensor_store(u32 line, u32 leader, u64 address, u32 c0, u32 c1, u32 c2, u32 c3, u32 c4, u32 from) {
  bool alone = leader == ALONE;
  if (!alone) {
    __syncwarp();
    address = from_leader(address, leader); from = from_leader(from, leader);
    c0 = from_leader(c0, leader); c1 = from_leader(c1, leader); c2 = from_leader(c2, leader); c3 = from_leader(c3, leader); c4 = from_leader(c4, leader);
  }
  if (native_type(address)) return 0;
  TensorMap map;
  if (map_read(address, &map, line)) {
    const int at[5] = {(int)c0, (int)c1, (int)c2, (int)c3, (int)c4};
    u32 bits = tensor_global_bits(map.type), chunks = tensor_box_bytes(&map) / 16;
    for (u32 chunk = alone ? 0 : lane(); chunk < chunks; chunk += alone ? 1 : 32) {
      u64 bit;
      u32 elements, inside = tensor_chunk(&map, at, chunk, &bit, &elements);
      u32 place = tensor_shared_address(&map, from & 0xffffff, chunk * 16);
      for (u32 i = 0; i < inside * bits / 8; i++) *(volatile u8 *)(map.base + bit / 8 + i) = (u8)load_shared8(shared_of(place + i, cluster_rank()));
    }
    __threadfence();
    all_proxies_fence();  // a native load may read them next
  }
  if (!alone) __syncwarp();
  return 1;
}

EMU_CALL void megamoe_try_cancel(u32 to, u32 barrier, u32 everywhere) {
  for (u32 r = 0; r < cluster_size(); r++)
    if (everywhere || r == cluster_rank()) {
      store_shared(shared_of(to, r), make_uint4(0, 0, 0, 0));
      cluster_fence();
      all_proxies_fence();
      complete_bytes(shared_of(barrier, r), 16);
    }
}
