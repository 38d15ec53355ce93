// Rows for prefill attention from codes: a warp rebuilds 16 rows at a time, multiplies them by the decode matrix with
// tensor cores and, for pre_rope keys, rotates them.
#include "vqkv_rows.cuh"

namespace kvpack {
namespace {

constexpr int WARPS = 4;

struct RestoreArguments {
  VqSide side[2];
  Rope rope;  // of keys: half 0 where they are stored rotated
  kvpack_geometry geometry;
  const int32_t *past_len;
  void *dense[2];
  int heads, rows, code_rows;
};

template <class T, int D, bool IN_TILES>
__global__ void __launch_bounds__(32 * WARPS, 2) restore_kernel(RestoreArguments a) {
  constexpr int STRIDE = D + 8;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, eighth = lane >> 2;
  const int values = blockIdx.y % 2, h = blockIdx.y / 2, b = blockIdx.z;
  const VqSide &side = a.side[values];
  const int half = values ? 0 : a.rope.half, set = h % side.sets;
  const int stored = encoded_rows(a.geometry, a.past_len[b]), first = (blockIdx.x * WARPS + warp) * 16;
  if (first >= stored) return;  // warps work alone

  KVPACK_DYNAMIC_SHARED(memory);
  T *tile = reinterpret_cast<T *>(memory) + warp * 16 * STRIDE;
  const T *table = static_cast<const T *>(side.table) + int64_t(set) * side.lookups * side.entries * side.width;
  const int8_t *codes = side.codes + (int64_t(b * a.heads + h) * a.code_rows + first) * side.lookups;
  rebuild_rows<T, D, IN_TILES>(tile, side, table, table, 0, codes, min(stored - first, 16));
  __syncwarp();
  uint32_t rows[1][D / 16][4];
  load_rows<T, D>(rows[0], tile);
  __syncwarp();
  const uint4 *decode = reinterpret_cast<const uint4 *>(side.decode + int64_t(set) * D * D / 2);
#pragma unroll
  for (int t = 0; t < D / 16; ++t) {
    float c[1][2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        c[0][n][e] = side.mean[h * D + paired_column(16 * t + 8 * n + 2 * quad + e % 2, half)];
    decode_columns<T, D, 1>(c, rows, decode, t);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int column = 16 * t + 8 * n + 2 * quad, row = eighth + 8 * r;
        float2 pair = make_float2(c[0][n][2 * r], c[0][n][2 * r + 1]);
        if (column < 2 * half) {
          const int64_t at = rope_row(a.rope, a.geometry.sinks + first + row) + column / 2;
          pair = turn_pair(pair.x, pair.y, a.rope.cos[at], a.rope.sin[at]);
        }
        tile[row * STRIDE + paired_column(column, half)] = from_float<T>(pair.x);
        tile[row * STRIDE + paired_column(column + 1, half)] = from_float<T>(pair.y);
      }
  }
  __syncwarp();
  T *out = static_cast<T *>(a.dense[values]) + (int64_t(b * a.heads + h) * a.rows + a.geometry.sinks + first) * D;
  for (int n = lane; n < 2 * D; n += 32) {
    const int row = n / (D / 8), column = n % (D / 8) * 8;
    if (first + row < stored)
      *reinterpret_cast<uint4 *>(out + row * D + column) =
          *reinterpret_cast<const uint4 *>(tile + row * STRIDE + column);
  }
}

}  // namespace

int vqkv_restore(const kvpack_layer &layer, const kvpack_step &step, const kvpack_vqkv &vq, const VqTables &tables,
                 void *dense_k, void *dense_v, int rows) {
  RestoreArguments a = {};
  a.side[0] = tables.k, a.side[1] = tables.v;
  a.rope = rope_of(layer, step), a.geometry = vq.geometry, a.past_len = step.past_len;
  if (!vq.pre_rope) a.rope.half = 0;
  a.dense[0] = dense_k, a.dense[1] = dense_v;
  a.heads = layer.num_kv_heads, a.rows = rows, a.code_rows = vq.code_rows;
  const int beyond = step.live - vq.geometry.sinks - vq.geometry.window;  // of the longest sequence
  const int most = beyond / vq.geometry.block * vq.geometry.block;
  if (most <= 0) return KVPACK_OK;
  const int error = choose(layer, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    constexpr int D = decltype(size)::value;
    auto kernel = vq.layout == KVPACK_TILES ? restore_kernel<T, D, true> : restore_kernel<T, D, false>;
    const dim3 grid((most + 16 * WARPS - 1) / (16 * WARPS), 2 * a.heads, step.batch);
    return launch(kernel, grid, dim3(32 * WARPS), WARPS * 16 * (D + 8) * 2, step.stream, a);
  });
  return launched(error, "rebuilding rows from codes");
}

}  // namespace kvpack
