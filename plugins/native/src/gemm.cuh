// The product of two tiles of 16-bit numbers in shared memory by a block of 8 warps: C [M, N] += A [M, K] B [N, K]^T,
// in steps of TILE_DEPTH columns. Both tiles are rows of TILE_DEPTH numbers, 64 bytes.
#pragma once
#include "device.cuh"

namespace kvpack {

constexpr int TILE_DEPTH = 32, TILE_CHUNKS = TILE_DEPTH / 8, TILE_ROW_BYTES = TILE_DEPTH * 2;
constexpr int TILE_WARPS_DOWN = 4, TILE_WARPS_ACROSS = 2, TILE_THREADS = 32 * TILE_WARPS_DOWN * TILE_WARPS_ACROSS;

// Byte offset of a 16-byte chunk. Chunks are permuted so that one chunk of 8 consecutive rows lies in different banks.
KVPACK_D int tile_offset(int row, int chunk) { return row * TILE_ROW_BYTES + 16 * (chunk ^ (row >> 1 & 3)); }

// What is done to every pair of operands before the product: `by` reads something for a column of the tiles' depth.
struct Unchanged {
  KVPACK_D uint32_t by(int) const { return 0; }
  KVPACK_D uint32_t operator()(uint32_t pair, uint32_t) const { return pair; }
};

// The part of C of one warp: 16 DOWN rows from `first_row`, 8 ACROSS columns from `first_column`.
template <class T, int DOWN, int ACROSS>
struct WarpTile {
  static_assert(ACROSS % 2 == 0);
  float sums[DOWN][ACROSS][4];

  KVPACK_D void clear() {
#pragma unroll
    for (int m = 0; m < DOWN; ++m)
#pragma unroll
      for (int n = 0; n < ACROSS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0;
  }
  static KVPACK_D int first_row() { return int(threadIdx.x / 32) % TILE_WARPS_DOWN * 16 * DOWN; }
  static KVPACK_D int first_column() { return int(threadIdx.x / 32) / TILE_WARPS_DOWN * 8 * ACROSS; }
  // Row and column of sums[m][n][2 i], whose right neighbour is sums[m][n][2 i + 1].
  static KVPACK_D int row(int m, int i) { return first_row() + 16 * m + 8 * i + int(threadIdx.x % 32) / 4; }
  static KVPACK_D int column(int n) { return first_column() + 8 * n + int(threadIdx.x % 4) * 2; }

  template <class Change>
  KVPACK_D void multiply(const unsigned char *a, const unsigned char *b, const Change &change) {
    const int lane = threadIdx.x % 32;
    // 16 rows further the chunks are permuted alike, and 2 chunks further is 32 bytes further or back.
    const int a_line = tile_offset(first_row() + lane % 16, lane / 16);
    const int b_line = tile_offset(first_column() + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < TILE_DEPTH / 16; ++step) {
      const uint32_t low = change.by(16 * step + lane % 4 * 2), high = change.by(16 * step + lane % 4 * 2 + 8);
      uint32_t left[DOWN][4], right[2][4];  // two columns' worth at a time, the next ones on their way
#pragma unroll
      for (int m = 0; m < DOWN; ++m) {
        ldmatrix<4, false>(left[m], a + (a_line ^ 32 * step) + 16 * m * TILE_ROW_BYTES);
#pragma unroll
        for (int i = 0; i < 4; ++i) left[m][i] = change(left[m][i], i < 2 ? low : high);
      }
      ldmatrix<4, false>(right[0], b + (b_line ^ 32 * step));
#pragma unroll
      for (int n = 0; n < ACROSS; n += 2) {
        if (n + 2 < ACROSS)
          ldmatrix<4, false>(right[n / 2 % 2 ^ 1], b + (b_line ^ 32 * step) + 8 * (n + 2) * TILE_ROW_BYTES);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t pair[2] = {change(right[n / 2 % 2][2 * i], low), change(right[n / 2 % 2][2 * i + 1], high)};
#pragma unroll
          for (int m = 0; m < DOWN; ++m) mma_16816<T>(sums[m][n + i], left[m], pair);
        }
      }
    }
  }
};

}  // namespace kvpack
