// Where things lie: matrix descriptors, instruction descriptors, the cells of tcgen05.ld and st, tensor maps and the boxes they describe.
#pragma once
#include "host.cuh"

// ---- shared-memory matrix descriptors of tcgen05 ----

enum DescriptorFault { DESC_OK = 0, DESC_VERSION, DESC_SWIZZLE, DESC_BASE_OFFSET, DESC_RESERVED, DESC_LEADING_MODE };

EMU_PURE u32 desc_start(u64 d) { return (u32)(d & 0x3fff) << 4; }
EMU_PURE u32 desc_leading(u64 d) { return (u32)(d >> 16 & 0x3fff) << 4; }
EMU_PURE u32 desc_stride(u64 d) { return (u32)(d >> 32 & 0x3fff) << 4; }
EMU_PURE u32 desc_swizzle(u64 d) { return (u32)(d >> 61); }

// Bits 46-48 hold the constant 1, 49-51 a base offset, 52 the mode of the leading dimension, 53-60 zeros, 61-63 the swizzle.
EMU_PURE int descriptor_fault(u64 d) {
  u32 swizzle = desc_swizzle(d);
  if ((d >> 46 & 7) != 1) return DESC_VERSION;
  if (swizzle == 1 || swizzle == 3 || swizzle == 5 || swizzle == 7) return DESC_SWIZZLE;
  if (d >> 49 & 7) return DESC_BASE_OFFSET;
  if (d >> 52 & 1) return DESC_LEADING_MODE;
  if (d >> 53 & 0xff) return DESC_RESERVED;
  return DESC_OK;
}

// Bytes of a swizzle atom's row: 128, 64, 32; 16 without swizzle.
EMU_PURE u32 swizzle_width(u32 swizzle) { return swizzle == 2 ? 128 : swizzle == 4 ? 64 : swizzle == 6 ? 32 : 16; }

// 16-byte chunks are exchanged within a row by the row's number in the atom: address bits 4.. ^= bits 7.. .
EMU_PURE u32 swizzle_address(u32 address, u32 width) { return address ^ (address >> 3 & (width - 1) & 0x70); }

// Shared-memory address of byte `kbyte` of row `row` of a K-major operand. One instruction sees 32 bytes of K.
EMU_PURE u32 k_major_address(u64 d, u32 row, u32 kbyte) {
  u32 width = swizzle_width(desc_swizzle(d));
  if (width == 16) return desc_start(d) + (row >> 3) * desc_stride(d) + (kbyte >> 4) * desc_leading(d) + (row & 7) * 16 + (kbyte & 15);
  return swizzle_address(desc_start(d) + (row >> 3) * desc_stride(d) + (row & 7) * width + kbyte, width);
}

// Shared-memory address of element (mn, k) of an MN-major operand of `size`-byte elements.
EMU_PURE u32 mn_major_address(u64 d, u32 mn, u32 k, u32 size) {
  u32 width = swizzle_width(desc_swizzle(d)), byte = mn * size;
  if (width == 16) return desc_start(d) + (byte >> 4) * desc_stride(d) + (k >> 3) * desc_leading(d) + (k & 7) * 16 + (byte & 15);
  return swizzle_address(desc_start(d) + byte / width * desc_leading(d) + (k >> 3) * desc_stride(d) + (k & 7) * width + byte % width, width);
}

// ---- instruction descriptors of tcgen05.mma ----

enum MmaKind { KIND_F16 = 0, KIND_TF32, KIND_F8F6F4, KIND_I8, KIND_MXF8F6F4, KIND_MXF4, KIND_MXF4NVF4 };
enum IdescFault { IDESC_OK = 0, IDESC_SPARSE, IDESC_D_TYPE, IDESC_A_TYPE, IDESC_B_TYPE, IDESC_N, IDESC_M, IDESC_RESERVED, IDESC_SCALE_TYPE, IDESC_TRANSPOSE, IDESC_K96, IDESC_SCALE_ID };

EMU_PURE u32 idesc_m(u32 i) { return (i >> 24 & 0x1f) << 4; }
EMU_PURE u32 idesc_n(u32 i) { return (i >> 17 & 0x3f) << 3; }
EMU_PURE u32 idesc_a_type(u32 i) { return i >> 7 & 7; }
EMU_PURE u32 idesc_b_type(u32 i) { return i >> 10 & 7; }
EMU_PURE u32 idesc_a_mn_major(u32 i) { return i >> 15 & 1; }
EMU_PURE u32 idesc_b_mn_major(u32 i) { return i >> 16 & 1; }

EMU_PURE int narrow_type_ok(u32 type) { return type == 0 || type == 1 || type == 3 || type == 4 || type == 5; }

// What of an instruction descriptor the specification forbids for this kind, or IDESC_OK. `block` is the scale block size (0, 16, 32).
EMU_PURE int idesc_fault(u32 i, u32 kind, u32 group, u32 block) {
  u32 m = idesc_m(i), n = idesc_n(i), a = idesc_a_type(i), b = idesc_b_type(i);
  if (i >> 2 & 1) return IDESC_SPARSE;
  if (kind >= KIND_MXF8F6F4) {
    if (i >> 31) return IDESC_K96;
    if (m != 128 && !(group == 2 && m == 256)) return IDESC_M;
    if (kind == KIND_MXF8F6F4 ? !narrow_type_ok(a) : a != 1) return IDESC_A_TYPE;
    if (kind == KIND_MXF8F6F4 ? !narrow_type_ok(b) : b != 1) return IDESC_B_TYPE;
    if (kind != KIND_MXF8F6F4 && (idesc_a_mn_major(i) || idesc_b_mn_major(i))) return IDESC_TRANSPOSE;
    u32 e8m0 = i >> 23 & 1;
    if (kind == KIND_MXF4NVF4 ? block == 32 && !e8m0 : !e8m0) return IDESC_SCALE_TYPE;
    u32 a_id = i >> 29 & 3, b_id = i >> 4 & 3;
    if (kind != KIND_MXF8F6F4 && (block == 16 ? a_id | b_id : (a_id | b_id) & 1)) return IDESC_SCALE_ID;
  } else {
    u32 d = i >> 4 & 3;
    if (kind == KIND_I8 ? d != 2 : kind == KIND_TF32 ? d != 1 : d > 1) return IDESC_D_TYPE;
    if (kind == KIND_F16 || kind == KIND_I8 ? a > 1 : kind == KIND_TF32 ? a != 2 : !narrow_type_ok(a)) return IDESC_A_TYPE;
    if (kind == KIND_F16 || kind == KIND_I8 ? b > 1 : kind == KIND_TF32 ? b != 2 : !narrow_type_ok(b)) return IDESC_B_TYPE;
    if (kind == KIND_F16 && (a != b || (d == 0 && a))) return IDESC_B_TYPE;
    if (i >> 23 & 1) return IDESC_RESERVED;
    if (group == 1 ? m != 64 && m != 128 : m != 128 && m != 256) return IDESC_M;
  }
  u32 step = group == 2 || (kind == KIND_I8 && n != 8) ? 16 : 8;
  if (n < step || n > 256 || n % step) return IDESC_N;
  return IDESC_OK;
}

// TMEM lane and column (relative to d) of element (row, column) of a CTA's accumulator with `rows` rows and `columns` columns.
EMU_PURE void accumulator_cell(u32 rows, u32 columns, u32 group, u32 row, u32 column, u32 *lane, u32 *at) {
  *lane = row;
  *at = column;
  if (rows == 64 && group == 1) *lane = row / 16 * 32 + row % 16;  // 16 lanes of every sub-partition
  if (rows == 64 && group == 2) {  // the columns' second half lies in lanes 64 to 127
    u32 half = column >= columns / 2;
    *lane = row + 64 * half;
    *at = column - half * columns / 2;
  }
}

// ---- tcgen05.ld and tcgen05.st ----

enum TmemShape { SHAPE_32X32B = 0, SHAPE_16X256B, SHAPE_16X128B, SHAPE_16X64B, SHAPE_16X32BX2, SHAPE_PACKED = 8 };

// Row (within the warp's 32) and column of register `reg` of thread `lane`.
EMU_PURE void tmem_cell(u32 shape, u32 lane, u32 reg, u32 *row, u32 *column) {
  switch (shape) {
    case SHAPE_32X32B: *row = lane; *column = reg; return;
    case SHAPE_16X256B: *row = lane / 4 + 8 * (reg / 2 % 2); *column = lane % 4 * 2 + reg % 2 + 8 * (reg / 4); return;
    case SHAPE_16X128B: *row = lane / 4 + 8 * (reg % 2); *column = lane % 4 + 4 * (reg / 2); return;
    case SHAPE_16X32BX2: *row = lane % 16; *column = reg; return;  // lanes 16 to 31: at a distance that the instruction names
    default: *row = lane / 4 + 8 * (lane % 2); *column = lane / 2 % 2 + 2 * reg; return;
  }
}

// Columns that `regs` registers a thread cover.
EMU_PURE u32 tmem_columns(u32 shape, u32 regs) { return shape == SHAPE_32X32B || shape == SHAPE_16X32BX2 ? regs : 2 * regs; }

// ---- tensor maps (the 128-byte descriptors of tensor copies) ----

enum TensorType { TENSOR_U8 = 0, TENSOR_4BIT_PACKED = 11, TENSOR_4BIT_PADDED = 12, TENSOR_6BIT_PADDED = 13 };

struct TensorMap {
  u64 base;
  u64 stride[4];  // bytes, of dimensions 1 to rank - 1
  u32 size[5];
  u32 box[5];
  u32 rank, type, swizzle;  // swizzle: 0 none, 1 to 3 for rows of 32, 64, 128 bytes
};

enum TensorMapFault { MAP_OK = 0, MAP_VERSION, MAP_LAYOUT, MAP_STEPS };

// Bits read off maps that were encoded with known arguments: 0-63 address; of word 1, 0-3 version, 4-6 rank - 1, 7-10 type, 11-12 and 15-16
// interleave and fill, 13-14 swizzle, 19 wider swizzle atoms, 32-63 stride of dimension 1 / 16; words 2 and 3 the low 32 bits of the other
// strides / 16 and then 4 high bits each; words 4 to 6 sizes - 1; of word 6, 32-55 steps - 1, 56-63 box - 1; word 7 the other boxes - 1.
EMU_PURE int tensor_map_decode(const u64 *q, TensorMap *map) {
  if ((q[1] & 0xf) != 2) return MAP_VERSION;
  if (q[1] & (3u << 11 | 3u << 15 | 1u << 19)) return MAP_LAYOUT;
  if (q[6] >> 32 & 0xffffff) return MAP_STEPS;
  map->base = q[0];
  map->rank = (u32)(q[1] >> 4 & 7) + 1;
  map->type = (u32)(q[1] >> 7 & 0xf);
  map->swizzle = (u32)(q[1] >> 13 & 3);
  const u32 low[4] = {(u32)(q[1] >> 32), (u32)q[2], (u32)(q[2] >> 32), (u32)q[3]};
  const u32 size[5] = {(u32)q[4], (u32)(q[4] >> 32), (u32)q[5], (u32)(q[5] >> 32), (u32)q[6]};
  for (int i = 0; i < 4; i++) map->stride[i] = ((u64)(q[3] >> (32 + 4 * i) & 0xf) << 32 | low[i]) << 4;
  for (int i = 0; i < 5; i++) map->size[i] = size[i] + 1;
  map->box[0] = (u32)(q[6] >> 56) + 1;
  for (int i = 1; i < 5; i++) map->box[i] = (u32)(q[7] >> (8 * (i - 1)) & 0xff) + 1;
  return MAP_OK;
}

// Bits of an element in global memory and, with its padding, in shared memory.
EMU_PURE u32 tensor_global_bits(u32 type) {
  switch (type) {
    case 0: return 8;
    case 1: case 6: case 9: return 16;
    case 2: case 3: case 7: case 10: return 32;
    case 4: case 5: case 8: return 64;
    case TENSOR_4BIT_PACKED: case TENSOR_4BIT_PADDED: return 4;
    default: return 6;
  }
}

EMU_PURE u32 tensor_shared_bits(u32 type) { return type == TENSOR_4BIT_PADDED || type == TENSOR_6BIT_PADDED ? 8 : tensor_global_bits(type); }

// Bytes that a whole box takes in shared memory, padding included: what its mbarrier is told.
EMU_PURE u32 tensor_box_bytes(const TensorMap *map) {
  u32 bytes = map->box[0] * tensor_shared_bits(map->type) / 8;
  for (u32 i = 1; i < map->rank; i++) bytes *= map->box[i];
  return bytes;
}

// Address in shared memory of byte `offset` of a box that was copied to `start`.
EMU_PURE u32 tensor_shared_address(const TensorMap *map, u32 start, u32 offset) {
  return swizzle_address(start + offset, map->swizzle ? 16u << map->swizzle : 16);
}

// Where 16-byte chunk `chunk` of a box comes from: bit offset of its first element from the tensor's base. Returns how many of its elements
// lie inside the tensor, counted from the first; `*elements` is how many the chunk holds. 0 when its row lies outside.
EMU_PURE u32 tensor_chunk(const TensorMap *map, const int *at, u32 chunk, u64 *bit, u32 *elements) {
  u32 per_chunk = 128 / tensor_shared_bits(map->type), in_row = map->box[0] / per_chunk;
  long long inner = (long long)at[0] + (long long)(chunk % in_row) * per_chunk;
  u32 rest = chunk / in_row;
  int inside = 1;
  u64 offset = 0;
  for (u32 i = 1; i < map->rank; i++) {
    long long c = (long long)at[i] + rest % map->box[i];
    rest /= map->box[i];
    inside &= c >= 0 && c < (long long)map->size[i];
    offset += (u64)c * map->stride[i - 1];
  }
  *elements = per_chunk;
  *bit = offset * 8 + (u64)(inner * (long long)tensor_global_bits(map->type));
  if (!inside || inner < 0) return 0;  // a box that begins left of the tensor begins at a multiple of the chunk
  long long left = (long long)map->size[0] - inner;
  return left <= 0 ? 0 : left < per_chunk ? (u32)left : per_chunk;
}
