// Decode attention over VQKV codes by tables of scores: for layers of 4-dimensional groups, one stage of values whose
// codewords are a byte a value, and codes in tiles (KVPACK_TILES). See vqkv_table.cu.
#pragma once
#include "step.cuh"

namespace kvpack {

bool vqkv_table_supported(const kvpack_layer &, const kvpack_vqkv &);
size_t vqkv_table_prepared(const kvpack_layer &, const kvpack_vqkv &);
int vqkv_table_prepare(const kvpack_layer &, const kvpack_vqkv &, void *prepared, void *stream);
int vqkv_table_splits(const kvpack_layer &);  // what Decode::splits must be, of sequences of any length
// All of a step but encoding: what decode_begin does, in a launch of its own or not, the splits, and their merge. How
// follows from the layer and the size of the batch; how a sequence is split, from its own length, too.
int vqkv_table_decode(const kvpack_layer &, const kvpack_step &, const kvpack_vqkv &, const void *prepared,
                      const ExactRows &, const Decode &);

constexpr int VQ_TILE = 16;  // code rows of a tile

KVPACK_D constexpr bool vqkv_tiled(int values, int lookups) {  // whether such tiles are permuted at all
  return values ? lookups == 32 : lookups >= 32 && lookups <= 64 && lookups % 8 == 0;
}

// Where the code of (row, lookup) is in a tile of 16 rows; plugins/vqkv/layout.py says the same. Lane l of a warp reads
// keys of rows l / 4 and l / 4 + 8, in an order in which the lanes of half a warp read different columns of the table,
// and values of the groups 8 (l % 4 / 2) + l / 4 and 16 on.
KVPACK_D constexpr int vqkv_tile_offset(int values, int row, int lookup, int lookups) {
  if (!vqkv_tiled(values, lookups)) return row * lookups + lookup;
  const int half = row / 8;
  if (values) {
    const int part = lookup / 8 % 2, pair = row % 8 / 2, phase = part ^ (pair / 2);
    return (lookup % 8 * 4 + part * 2 + pair % 2) * 16 + (phase * 2 + lookup / 16) * 4 + half * 2 + row % 2;
  }
  const int lane = row % 8 * 4 + lookup % 4, quad = lookup / 4 % 4;
  int start = lookup / 32 * 32, width = lookups - start;  // blocks of 32, then of 16, then of 8 lookups
  if (width >= 32) return start * VQ_TILE + lane * 16 + half * 8 + lookup / 16 % 2 * 4 + (quad ^ (row % 4));
  if (width >= 16 && lookup < start + 16) return start * VQ_TILE + lane * 8 + half * 4 + (quad ^ (row % 4));
  if (width >= 16) start += 16;
  return start * VQ_TILE + lane * 4 + half * 2 + (quad % 2 ^ (row % 2));
}

}  // namespace kvpack
