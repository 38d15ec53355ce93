// VQKVAttention: what its kernels share. A vector is the sum of codewords [d], one per lookup, of G = D / d groups,
// times the decode matrix, plus the mean. Stage s codes the first stages[s] groups; lookups are numbered by stage.
#pragma once
#include "step.cuh"
#include "vqkv_table.cuh"

namespace kvpack {

// One side (keys or values) as the kernels read it. T: the layer's 16-bit type.
struct VqSide {
  int groups, width, entries, lookups, stage_count, sets, values;
  int stages[KVPACK_MAX_STAGES];
  int8_t *codes;  // [B, H, code_rows, lookups]
  const float *books, *encode, *mean;
  const void *table;       // T [sets][stage][entries][stages[s]][width]: the codewords of one code side by side
  const uint32_t *decode;  // T [sets, D, D], the decode matrix as B fragments of mma_16816, see fragment_place
  const float *half;       // [sets, lookups, entries]: minus half of a codeword's squared norm
  const float *turned;     // [sets, lookups, width, entries]: the books transposed, where width > NARROW
};
constexpr int NARROW = 8;  // widest codeword that the encoder keeps in registers

struct VqTables {
  VqSide k, v;
  const float *query;  // [sets, D, D]: k's decode matrix transposed, for queries; post_rope only
  void *rest;          // what vqkv_table_prepare writes
  size_t bytes;
};
VqTables vqkv_tables(const kvpack_layer &, const kvpack_vqkv &, const void *prepared);  // NULL: to size (vqkv.cu)

inline bool vqkv_by_table(const kvpack_layer &layer, const kvpack_vqkv &vq) {
  return vq.layout == KVPACK_TILES && vqkv_table_supported(layer, vq);
}
// Where the code of `lookup` in code row `row` is, counted from the codes of the KV head.
KVPACK_D int64_t code_place(bool tiles, int values, int row, int lookup, int lookups) {
  if (!tiles) return int64_t(row) * lookups + lookup;
  return int64_t(row / VQ_TILE) * VQ_TILE * lookups + vqkv_tile_offset(values, row % VQ_TILE, lookup, lookups);
}

// A decode step over the codes (vqkv_decode.cu), scratch from carve_decode with this many splits.
int vqkv_splits(const kvpack_layer &, const kvpack_vqkv &);
int vqkv_decode(const kvpack_layer &, const kvpack_step &, const kvpack_vqkv &, const VqTables &, const Decode &);
// Code rows below encoded(past_len) to rows sinks + j of T [B, H, rows, D] keys (rotated) and values (vqkv_restore.cu).
int vqkv_restore(const kvpack_layer &, const kvpack_step &, const kvpack_vqkv &, const VqTables &, void *dense_k,
                 void *dense_v, int rows);
// The rows that enc_src names to codes (vqkv_encode.cu). keys: the new ones in the codec's space.
int vqkv_encode(const kvpack_layer &, const kvpack_step &, const kvpack_vqkv &, const VqTables &, const NewRows &keys);

// -- the order of columns

// pre_rope keys are decoded with the two columns of a rotated pair next to each other: column p of that order.
KVPACK_D int paired_column(int p, int half) {
  return p >= 2 * half ? p : p / 2 + (p & 1) * half;
}
// The 16-bit place of decode[k][n] among the fragments: a lane reads those of 32 rows and 8 columns at once.
KVPACK_D int fragment_place(int dim, int k, int n) {
  const int lane = n % 8 * 4 + k % 8 / 2, word = k % 32 / 8;
  return (((n / 8 * (dim / 32) + k / 32) * 32 + lane) * 4 + word) * 2 + k % 2;
}

}  // namespace kvpack
