// The emulation's plain functions behind a C interface, so that tests can go through every value.
#include "layout.cuh"
#include "numbers.cuh"

extern "C" {

void to_float(int format, int n, const uint32_t *codes, float *out) {
  for (int i = 0; i < n; i++) out[i] = element_to_float(codes[i], format);
}

void ue8m0(int n, const uint32_t *codes, float *out) {
  for (int i = 0; i < n; i++) out[i] = ue8m0_to_float(codes[i]);
}

void to_small(int exponent, int mantissa, int relu, int n, const float *values, uint32_t *out) {
  for (int i = 0; i < n; i++) out[i] = float_to_small(values[i], exponent, mantissa, relu);
}

void to_ue8m0(int up, int satfinite, int n, const float *values, uint32_t *out) {
  for (int i = 0; i < n; i++) out[i] = float_to_ue8m0(values[i], up, satfinite);
}

void ue8m0_bf16(int n, const uint32_t *codes, uint32_t *out) {
  for (int i = 0; i < n; i++) out[i] = ue8m0_to_bf16(codes[i]);
}

void k_major(uint64_t descriptor, int rows, uint32_t *out) {
  for (int r = 0; r < rows; r++)
    for (int b = 0; b < 32; b++) out[32 * r + b] = k_major_address(descriptor, r, b);
}

void mn_major(uint64_t descriptor, int mn, int k, int size, uint32_t *out) {
  for (int m = 0; m < mn; m++)
    for (int j = 0; j < k; j++) out[k * m + j] = mn_major_address(descriptor, m, j, size);
}

int descriptor_legal(uint64_t descriptor) { return descriptor_fault(descriptor); }
int idesc_legal(uint32_t idesc, int kind, int group, int block) { return idesc_fault(idesc, kind, group, block); }

void cells(int shape, int registers, uint32_t *rows, uint32_t *columns) {
  for (int lane = 0; lane < 32; lane++)
    for (int reg = 0; reg < registers; reg++) tmem_cell(shape, lane, reg, &rows[lane * registers + reg], &columns[lane * registers + reg]);
}

void accumulator(int rows, int columns, int group, uint32_t *lanes, uint32_t *at) {
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) accumulator_cell(rows, columns, group, r, c, &lanes[r * columns + c], &at[r * columns + c]);
}

int tensor_map(const uint64_t *words, uint64_t *base, uint64_t *strides, uint32_t *sizes, uint32_t *boxes, uint32_t *rest) {
  TensorMap map;
  int fault = tensor_map_decode(words, &map);
  if (fault) return fault;
  *base = map.base;
  memcpy(strides, map.stride, sizeof map.stride);
  memcpy(sizes, map.size, sizeof map.size);
  memcpy(boxes, map.box, sizeof map.box);
  rest[0] = map.rank, rest[1] = map.type, rest[2] = map.swizzle, rest[3] = tensor_box_bytes(&map);
  return 0;
}

void tensor_chunks(const uint64_t *words, const int *at, uint32_t start, int n, uint64_t *bits, uint32_t *inside, uint32_t *places) {
  TensorMap map;
  uint32_t elements;
  if (tensor_map_decode(words, &map)) return;
  for (int i = 0; i < n; i++) {
    inside[i] = tensor_chunk(&map, at, i, &bits[i], &elements);
    places[i] = tensor_shared_address(&map, start, 16 * i);
  }
}
}
