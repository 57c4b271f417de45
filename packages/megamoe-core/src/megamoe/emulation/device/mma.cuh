// tcgen05.mma: checks, then either a whole warp with mma.sync, or any number of threads with sums in double precision.
//
// One instruction multiplies 32 bytes of K: 8 TF32, 16 half, 32 byte-sized, 64 four-bit elements a row. Products are exact in both ways.
// mma.sync adds them in float32 (in its own order), the other way adds in double and rounds once.
#pragma once
#include "state.cuh"

struct Mma {
  u64 a, b;  // shared-memory descriptors; a is a TMEM address when flags say so
  u32 d, idesc, scale_a, scale_b, flags, line, rank;
  u32 accumulate;  // bit 0: D is added to; bit 1: the opcode's disabled-lanes operand is not zero
};

// How the rewriter packs what it knows of the opcode.
EMU_INLINE u32 mma_kind(const Mma &m) { return m.flags & 15; }
EMU_INLINE u32 mma_group(const Mma &m) { return m.flags >> 4 & 3; }
EMU_INLINE u32 mma_a_in_tmem(const Mma &m) { return m.flags >> 6 & 1; }
EMU_INLINE u32 mma_block(const Mma &m) { return m.flags >> 8; }

// Everything about one CTA's half of the work that does not depend on the row and column.
struct Part {
  u32 slot, rank, key, rows, columns, kind, format_a, format_b, blocks;
};

EMU_INLINE int element_format(u32 kind, u32 type) {
  if (kind == KIND_F16) return type ? FMT_BF16 : FMT_F16;
  if (kind == KIND_TF32) return FMT_TF32;
  if (kind == KIND_I8) return type ? FMT_S8 : FMT_U8;
  return kind >= KIND_MXF4 ? FMT_E2M1 : (int)type;
}

EMU_INLINE u32 elements_of_k(u32 kind) { return kind == KIND_TF32 ? 8 : kind == KIND_F16 ? 16 : kind >= KIND_MXF4 ? 64 : 32; }

// Byte of the K slab in which element k begins, and its shift there. Narrow elements of the 8-bit kinds are padded: 16 of them in 16 bytes.
EMU_INLINE void element_place(u32 kind, int format, u32 k, u32 *byte, u32 *shift) {
  u32 bit;
  if (kind == KIND_TF32) bit = 32 * k;
  else if (kind == KIND_F16) bit = 16 * k;
  else if (kind >= KIND_MXF4) bit = 4 * k;
  else bit = k / 16 * 128 + k % 16 * (format == FMT_E2M1 ? 4 : format == FMT_E2M3 || format == FMT_E3M2 ? 6 : 8);
  *byte = bit / 8;
  *shift = bit % 8;
}

EMU_INLINE u32 element_bytes(u32 kind) { return kind == KIND_TF32 ? 4 : kind == KIND_F16 ? 2 : 1; }

// Code of element (row, k) of an operand in shared memory; bits above the element's own may be anything.
EMU_INLINE u32 shared_element(u64 descriptor, u32 mn_major, u32 kind, int format, u32 row, u32 k, u32 rank) {
  u32 byte, shift;
  if (mn_major) {
    u32 size = element_bytes(kind), address = shared_of(mn_major_address(descriptor, row, k, size), rank);
    return size == 4 ? load_shared(address) : size == 2 ? load_shared16(address) : load_shared8(address);
  }
  element_place(kind, format, k, &byte, &shift);
  if (kind == KIND_TF32) return load_shared(shared_of(k_major_address(descriptor, row, byte), rank));
  if (kind == KIND_F16) return load_shared16(shared_of(k_major_address(descriptor, row, byte), rank));
  u32 code = load_shared8(shared_of(k_major_address(descriptor, row, byte), rank)) >> shift;
  if (shift > 2 && format != FMT_E2M1) code |= load_shared8(shared_of(k_major_address(descriptor, row, byte + 1), rank)) << (8 - shift);
  return code;
}

// Row of an A operand in TMEM: lane = row, 8 columns of packed elements.
EMU_INLINE u32 tmem_row(const Part &p, u32 group, u32 row) {
  u32 row_lane, column;
  accumulator_cell(p.rows, p.columns, group, row, 0, &row_lane, &column);
  return row_lane;
}

EMU_INLINE u32 operand_a(const Mma &m, const Part &p, u32 row, u32 k) {
  if (!mma_a_in_tmem(m)) return shared_element(m.a, idesc_a_mn_major(m.idesc), p.kind, p.format_a, row, k, p.rank);
  u32 byte, shift;
  element_place(p.kind, p.format_a, k, &byte, &shift);
  u32 column = ((u32)m.a & 0xffff) + byte / 4;
  u64 word = __ldcg(cell(p.slot, tmem_row(p, mma_group(m), row), column));
  return (u32)(word >> (8 * (byte % 4) + shift));
}

// B of a pair lies half in each CTA.
EMU_INLINE u32 operand_b(const Mma &m, const Part &p, u32 column, u32 k) {
  u32 rank = m.rank, row = column;
  if (mma_group(m) == 2) {
    u32 half = column >= p.columns / 2;
    row -= half * p.columns / 2;
    rank = (m.rank & ~1u) | half;
  }
  return shared_element(m.b, idesc_b_mn_major(m.idesc), p.kind, p.format_b, row, k, rank);
}

// The 32-bit word with the scales of a row of A or a column of B: lane r % 32 of the reader's own sub-partition, a column for every 32 rows.
EMU_INLINE u32 scale_word(u32 slot, u32 reader, u32 address, u32 row) {
  return __ldcg(cell(slot, row % 32 + (reader & ~31u), (address & 0x1ff) + row / 32));
}

EMU_INLINE float scale_value(const Mma &m, u32 word, u32 id, u32 block) {
  u32 code = word >> (8 * (id + block)) & 0xff;
  return m.idesc >> 23 & 1 ? ue8m0_to_float(code) : e4m3_to_float(code & 0x7f);
}

// ---- any number of threads ----

EMU_FUNCTION void mma_by_threads(const Mma &m, const Part &p, u32 first, u32 step) {
  u32 elements = elements_of_k(p.kind), group = mma_group(m), per_block = p.blocks ? elements / p.blocks : elements;
  for (u32 i = first; i < p.rows * p.columns; i += step) {
    u32 row = i / p.columns, column = i % p.columns, to_lane, to_column;
    accumulator_cell(p.rows, p.columns, group, row, column, &to_lane, &to_column);
    u32 *to = cell(p.slot, to_lane + (m.d >> 16), (m.d & 0xffff) + to_column);
    u32 words[2] = {0, 0};
    if (p.blocks) {
      words[0] = scale_word(p.slot, to_lane, m.scale_a, row);
      words[1] = scale_word(p.slot, to_lane, m.scale_b, column);
    }
    double sum = 0;
    int whole = 0;
    for (u32 block = 0; block < (p.blocks ? p.blocks : 1); block++) {
      double part = 0;
      for (u32 k = block * per_block; k < (block + 1) * per_block; k++) {
        float x = element_to_float(operand_a(m, p, row, k), p.format_a), y = element_to_float(operand_b(m, p, column, k), p.format_b);
        if (p.kind == KIND_I8) whole += (int)x * (int)y;
        else part += (double)x * y;
      }
      if (p.blocks)
        part *= (double)scale_value(m, words[0], m.idesc >> 29 & 3, block) * scale_value(m, words[1], m.idesc >> 4 & 3, block);
      sum += part;
    }
    if ((m.idesc >> 13 & 1) != (m.idesc >> 14 & 1)) { sum = -sum; whole = -whole; }  // negate A, negate B
    if (p.kind == KIND_I8) {
      __stcg(to, (u32)(whole + (m.accumulate & 1 ? (int)__ldcg(to) : 0)));
    } else {
      if (m.accumulate & 1) sum += float_of(__ldcg(to));
      __stcg(to, bits_of((float)sum));
    }
  }
}

// ---- a whole warp with mma.sync ----

EMU_INLINE u32 halves(u32 low, u32 high) { return low | high << 16; }
// A byte of two E2M1 codes as halves: the code's bits moved to a half's exponent are 2^-14 of its value.
EMU_INLINE u32 e2m1_pair(u32 byte) {
  u32 x = (byte & 0xf) | (byte & 0xf0) << 12;
  return multiply_pair((x & 0x00070007) << 9 | (x & 0x00080008) << 12, 0x74007400);
}
EMU_INLINE u32 six_bit_half(u32 code, int format) {  // E2M3 and E3M2 likewise: moved to a half, then times 2^14 or 2^12
  u32 sign = (code & 0x20) << 10, magnitude = code & 0x1f;
  return sign | magnitude << (format == FMT_E2M3 ? 7 : 8);
}

// A 32-bit word of K (1, 2 or 4 pairs of elements) as pairs of halves. PAIRS: 1 half, 2 byte-sized, 4 four-bit.
template <int PAIRS> EMU_INLINE void widen(u32 word, int format, u32 *pairs) {
  if (PAIRS == 1) pairs[0] = word;
  if (PAIRS == 2) {
    pairs[0] = format == FMT_E5M2 ? e5m2_pair(word & 0xffff) : e4m3_pair(word & 0xffff);
    pairs[1] = format == FMT_E5M2 ? e5m2_pair(word >> 16) : e4m3_pair(word >> 16);
  }
  if (PAIRS == 4)
    for (int i = 0; i < 4; i++) pairs[i] = e2m1_pair(word >> (8 * i) & 0xff);
}

// Elements 4w to 4w + 3 of a padded narrow operand.
template <class Fetch> EMU_INLINE void widen_narrow(Fetch fetch, u32 w, int format, u32 *pairs) {
  u32 codes[4];
  for (u32 i = 0; i < 4; i++) codes[i] = fetch(4 * w + i);
  for (int i = 0; i < 2; i++) {
    u32 low = codes[2 * i], high = codes[2 * i + 1];
    if (format == FMT_E2M1) pairs[i] = e2m1_pair((low & 0xf) | (high & 0xf) << 4);
    else pairs[i] = multiply_pair(halves(six_bit_half(low, format), six_bit_half(high, format)), format == FMT_E2M3 ? 0x74007400 : 0x6c006c00);
  }
}

EMU_INLINE bool padded(u32 kind, int format) { return kind != KIND_F16 && kind < KIND_MXF4 && format >= FMT_E2M3; }

// Word w (0 to 7) of row `row` of A, of column `column` of B.
template <int PAIRS> EMU_INLINE void fetch_a(const Mma &m, const Part &p, u32 row, u32 w, u32 *pairs) {
  if (PAIRS == 2 && (padded(p.kind, p.format_a) || (idesc_a_mn_major(m.idesc) && !mma_a_in_tmem(m)))) {
    auto one = [&](u32 k) { return operand_a(m, p, row, k); };
    if (padded(p.kind, p.format_a)) { widen_narrow(one, w, p.format_a, pairs); return; }
    widen<PAIRS>((one(4 * w) & 0xff) | (one(4 * w + 1) & 0xff) << 8 | (one(4 * w + 2) & 0xff) << 16 | one(4 * w + 3) << 24, p.format_a, pairs);
    return;
  }
  u32 word;
  if (mma_a_in_tmem(m)) word = __ldcg(cell(p.slot, tmem_row(p, mma_group(m), row), ((u32)m.a & 0xffff) + w));
  else if (PAIRS == 1 && idesc_a_mn_major(m.idesc)) word = halves(operand_a(m, p, row, 2 * w), operand_a(m, p, row, 2 * w + 1));
  else word = load_shared(shared_of(k_major_address(m.a, row, 4 * w), p.rank));
  widen<PAIRS>(word, p.format_a, pairs);
}

template <int PAIRS> EMU_INLINE void fetch_b(const Mma &m, const Part &p, u32 column, u32 w, u32 *pairs) {
  if (PAIRS == 2 && (padded(p.kind, p.format_b) || idesc_b_mn_major(m.idesc))) {
    auto one = [&](u32 k) { return operand_b(m, p, column, k); };
    if (padded(p.kind, p.format_b)) { widen_narrow(one, w, p.format_b, pairs); return; }
    widen<PAIRS>((one(4 * w) & 0xff) | (one(4 * w + 1) & 0xff) << 8 | (one(4 * w + 2) & 0xff) << 16 | one(4 * w + 3) << 24, p.format_b, pairs);
    return;
  }
  u32 word;
  if (PAIRS == 1 && idesc_b_mn_major(m.idesc)) {
    word = halves(operand_b(m, p, column, 2 * w), operand_b(m, p, column, 2 * w + 1));
  } else {
    u32 rank = m.rank, row = column;
    if (mma_group(m) == 2) {
      u32 half = column >= p.columns / 2;
      row -= half * p.columns / 2;
      rank = (m.rank & ~1u) | half;
    }
    word = load_shared(shared_of(k_major_address(m.b, row, 4 * w), rank));
  }
  widen<PAIRS>(word, p.format_b, pairs);
}

EMU_INLINE float scaled(float value, u32 a, u32 b) { return a == 0xff || b == 0xff ? float_of(0x7fffffff) : ldexpf(value, (int)a + (int)b - 254); }

// All 32 lanes. SCALE: 0 none, 1 and 2 that many UE8M0 blocks, 4 four UE4M3 blocks (multiplied into the halves: at most 6 significant bits).
template <int PAIRS, int SCALE> EMU_INLINE void mma_by_warp(const Mma &m, const Part &p) {
  u32 g = lane() >> 2, t = lane() & 3, group = mma_group(m), id_a = m.idesc >> 29 & 3, id_b = m.idesc >> 4 & 3;
  bool bf16 = p.format_a == FMT_BF16;
  EMU_LOOP
  for (u32 top = 0; top < p.rows; top += 16) {  // the same bounds in every lane: mma.sync needs the warp together
    const u32 row = top + g;
    u32 a[PAIRS][4];  // rows g and g + 8, words t and t + 4
    for (int i = 0; i < 4; i++) {
      u32 pairs[PAIRS];
      fetch_a<PAIRS>(m, p, row + 8 * (i & 1), t + 4 * (i >> 1), pairs);
      for (int j = 0; j < PAIRS; j++) a[j][i] = pairs[j];
    }
    u32 lanes[2], unused, scale_a[2] = {0, 0};
    for (int h = 0; h < 2; h++) {
      accumulator_cell(p.rows, p.columns, group, row + 8 * h, 0, &lanes[h], &unused);
      if (SCALE) scale_a[h] = scale_word(p.slot, lanes[h], m.scale_a, row + 8 * h);
    }
    if (SCALE == 4)
      for (int i = 0; i < 4; i++) {
        u32 byte = scale_a[i & 1] >> (8 * ((i >> 1) * 2 + (t >> 1))) & 0xff, factor = e4m3_pair(byte | byte << 8);
        for (int j = 0; j < PAIRS; j++) a[j][i] = multiply_pair(a[j][i], factor);
      }
  EMU_LOOP
    for (u32 column = 0; column < p.columns; column += 8) {
      u32 b[2][PAIRS];
      fetch_b<PAIRS>(m, p, column + g, t, b[0]);
      fetch_b<PAIRS>(m, p, column + g, t + 4, b[1]);
      float2 *to[2];
      for (int h = 0; h < 2; h++) {
        u32 to_lane, to_column;
        accumulator_cell(p.rows, p.columns, group, row + 8 * h, column + 2 * t, &to_lane, &to_column);
        to[h] = (float2 *)cell(p.slot, to_lane + (m.d >> 16), (m.d & 0xffff) + to_column);
      }
      float d[4] = {0, 0, 0, 0};
      if (m.accumulate & 1) {
        float2 x = __ldcg(to[0]), y = __ldcg(to[1]);
        d[0] = x.x; d[1] = x.y; d[2] = y.x; d[3] = y.y;
      }
      if (SCALE == 0 || SCALE == 4) {
        if (SCALE == 4) {
          u32 word = scale_word(p.slot, lanes[0], m.scale_b, column + g);
          for (int i = 0; i < 2; i++) {
            u32 byte = word >> (16 * i + 8 * (t >> 1)) & 0xff, factor = e4m3_pair(byte | byte << 8);
            for (int j = 0; j < PAIRS; j++) b[i][j] = multiply_pair(b[i][j], factor);
          }
        }
        for (int j = 0; j < PAIRS; j++) multiply_16(d, a[j], b[0][j], b[1][j], bf16);
      } else {
        u32 word[2];
        for (int i = 0; i < 2; i++) word[i] = scale_word(p.slot, lanes[0], m.scale_b, column + 2 * t + i);
        for (int block = 0; block < SCALE; block++) {
          float c[4] = {0, 0, 0, 0};
          if (SCALE == 1) {
            for (int j = 0; j < PAIRS; j++) multiply_16(c, a[j], b[0][j], b[1][j], false);
          } else {
            for (int j = 0; j + 1 < PAIRS; j += 2) {  // words t are the first block, words t + 4 the second
              u32 half[4] = {a[j][2 * block], a[j][2 * block + 1], a[j + 1][2 * block], a[j + 1][2 * block + 1]};
              multiply_16(c, half, b[block][j], b[block][j + 1], false);
            }
          }
          for (int i = 0; i < 4; i++)
            d[i] += scaled(c[i], scale_a[i >> 1] >> (8 * (id_a + block)) & 0xff, word[i & 1] >> (8 * (id_b + block)) & 0xff);
        }
      }
      __stcg(to[0], make_float2(d[0], d[1]));
      __stcg(to[1], make_float2(d[2], d[3]));
    }
  }
}

// ---- checks and the choice of the way ----

EMU_INLINE bool mma_allowed(const Mma &m, Part *p) {
  u32 kind = mma_kind(m), group = mma_group(m), n = idesc_n(m.idesc);
  int wrong = idesc_fault(m.idesc, kind, group, mma_block(m));
  if (wrong) { report(FAULT_IDESC, m.line, m.idesc, wrong); return false; }
  if (!mma_a_in_tmem(m) && (wrong = descriptor_fault(m.a))) { report(FAULT_DESCRIPTOR, m.line, m.a, wrong); return false; }
  if ((wrong = descriptor_fault(m.b))) { report(FAULT_DESCRIPTOR, m.line, m.b, wrong); return false; }
  bool half_sums = kind < KIND_MXF8F6F4 && (m.idesc >> 4 & 3) == 0;
  bool narrow_mn = (idesc_a_mn_major(m.idesc) || idesc_b_mn_major(m.idesc)) && kind != KIND_F16 && kind != KIND_TF32 &&
                   (padded(kind, element_format(kind, idesc_a_type(m.idesc))) || padded(kind, element_format(kind, idesc_b_type(m.idesc))));
  bool masked = m.accumulate & 2;  // some output lanes are disabled
  if (half_sums || narrow_mn || masked) { report(FAULT_NOT_EMULATED, m.line, m.idesc, 0); return false; }
  if (group == 2 && (m.rank & 1)) { report(FAULT_MMA_PAIR, m.line, m.rank, 0); return false; }
  p->kind = kind;
  p->rows = idesc_m(m.idesc) / group;
  p->columns = n;
  p->format_a = element_format(kind, idesc_a_type(m.idesc));
  p->format_b = element_format(kind, idesc_b_type(m.idesc));
  p->blocks = mma_block(m) ? elements_of_k(kind) / mma_block(m) : 0;
  return true;
}

EMU_INLINE bool mma_part(const Mma &m, Part *p, u32 half) {
  u32 group = mma_group(m), width = p->rows == 64 && group == 2 ? p->columns / 2 : p->columns;
  p->rank = group == 2 ? (m.rank & ~1u) | half : m.rank;
  p->slot = slot_of(p->rank, m.line);
  p->key = cta_key(p->rank);
  if (p->slot == SLOTS || !columns_owned(p->slot, p->key, m.d & 0xffff, width, m.line)) return false;
  if (p->blocks && !(columns_owned(p->slot, p->key, m.scale_a & 0x1ff, (p->rows + 31) / 32, m.line) &&
                     columns_owned(p->slot, p->key, m.scale_b & 0x1ff, (p->columns + 31) / 32, m.line))) return false;
  if (mma_a_in_tmem(m) && !columns_owned(p->slot, p->key, (u32)m.a & 0xffff, 8, m.line)) return false;
  u32 last_lane = p->rows == 64 && group == 1 ? 112 : p->rows == 64 ? 128 : p->rows;
  if ((m.d >> 16) + last_lane > LANES) { report(FAULT_TMEM_BOUNDS, m.line, m.d, 0); return false; }
  u32 end = shared_begin() + shared_size();
  bool inside = desc_start(m.b) < end && (mma_a_in_tmem(m) || desc_start(m.a) < end);
  if (inside && !mma_a_in_tmem(m) && !idesc_a_mn_major(m.idesc)) inside = k_major_address(m.a, p->rows - 1, 31) < end;
  if (inside && !idesc_b_mn_major(m.idesc)) inside = k_major_address(m.b, p->columns / group - 1, 31) < end;
  if (!inside) report(FAULT_SHARED_BOUNDS, m.line, m.a, m.b);
  return inside;
}

// `first` of `step` threads that all call this; 32 of 32 are a converged warp.
EMU_FUNCTION void mma_run(const Mma &m, u32 first, u32 step) {
  Part p;
  if (!mma_allowed(m, &p)) return;
  bool plain = !(m.idesc >> 13 & 3) && p.kind != KIND_TF32 && p.kind != KIND_I8 && !(p.kind == KIND_MXF4NVF4 && p.blocks == 4 && m.idesc >> 23 & 1);
  EMU_LOOP
  for (u32 half = 0; half < mma_group(m); half++) {
    bool allowed = mma_part(m, &p, half);
    if (step == 32) allowed = !__any_sync(~0u, !allowed);  // lanes may have waited, or given up, at different times
    if (!allowed) return;
    if (step != 32 || !plain) mma_by_threads(m, p, first, step);
    else if (p.kind == KIND_F16) mma_by_warp<1, 0>(m, p);
    else if (p.kind == KIND_F8F6F4) mma_by_warp<2, 0>(m, p);
    else if (p.kind == KIND_MXF8F6F4) mma_by_warp<2, 1>(m, p);
    else if (p.blocks == 2) mma_by_warp<4, 2>(m, p);
    else mma_by_warp<4, 4>(m, p);
  }
  __threadfence();
}
