// Attention of the query heads of one KV head to cached rows, 16 at a time, by warps that do not wait for each other.
// The query is padded to 16 rows. Tiles lie in shared memory, every row padded by 16 bytes against bank conflicts.
#pragma once
#include "step.cuh"

namespace kvpack {

constexpr int TILE_ROWS = 16;
template <int D> constexpr int TILE_STRIDE = D + 8;                      // elements from row to row
template <int D> constexpr int TILE_SIZE = TILE_ROWS * TILE_STRIDE<D>;  // elements

struct Scale {  // of scores, into log2 units
  float scale, softcap;
  KVPACK_D float operator()(float product) const {
    const float score = product * scale;
    return (softcap > 0 ? softcap * tanh_fast(score / softcap) : score) * LOG2E;
  }
};

// One warp's sums, not normalised. As in an mma's result, a lane has query rows lane / 4 and lane / 4 + 8, and of each
// 8 columns two, from lane % 4 * 2; `sum` is over the lane's own columns only.
template <int D> struct Running {
  float out[D / 8][4] = {};
  float top[2] = {NOTHING, NOTHING}, sum[2] = {};
};

// How the lanes of a warp share the copying of a tile: each copies its 16 bytes of every DOWN-th row.
template <int D> struct Share {
  static constexpr int ACROSS = D == 96 ? 4 : D / 8, DOWN = 32 / ACROSS;
  int row = (threadIdx.x & 31) / ACROSS, column = (threadIdx.x & 31) % ACROSS * 8;
};

// Starts to copy the rows of a tile whose bit in `real` is set, and clears the others. row(n) is where row n starts,
// if it is real.
template <class T, int D, class F> KVPACK_D void copy_some_rows(T *tile, uint32_t real, F &&row, const T *readable) {
  using S = Share<D>;
  const S share;
#pragma unroll 1
  for (int r = share.row; r < TILE_ROWS; r += S::DOWN) {
    const bool take = real >> r & 1;
    const T *from = take ? row(r) + share.column : readable;
#pragma unroll
    for (int c = 0; c < D; c += S::ACROSS * 8)
      copy_async_16_or_zero(tile + r * TILE_STRIDE<D> + share.column + c, take ? from + c : readable, take);
  }
}
// The same for 16 rows without gaps between them.
template <class T, int D> KVPACK_D void copy_rows(T *tile, uint32_t real, const T *rows) {
  using S = Share<D>;
  if (real != 0xFFFF) return copy_some_rows<T, D>(tile, real, [&](int n) { return rows + n * D; }, rows);
  const S share;
  tile += share.row * TILE_STRIDE<D> + share.column;
  rows += share.row * D + share.column;
#pragma unroll
  for (int r = 0; r < TILE_ROWS; r += S::DOWN)
#pragma unroll
    for (int c = 0; c < D; c += S::ACROSS * 8) copy_async_16(tile + r * TILE_STRIDE<D> + c, rows + r * D + c);
}

// query . key: rows of the query by 8 keys, twice.
template <class T, int D> KVPACK_D void multiply_keys(float (&s)[2][4], const T *query, const T *key) {
  const int lane = threadIdx.x & 31;
  query += lane % 16 * TILE_STRIDE<D> + lane / 16 * 8;
  key += (lane % 8 + lane / 16 * 8) * TILE_STRIDE<D> + lane / 8 % 2 * 8;
#pragma unroll
  for (int n = 0; n < 4; ++n) s[0][n] = s[1][n] = 0;
#pragma unroll
  for (int k = 0; k < D; k += 16) {
    uint32_t a[4], b[2][2];
    ldmatrix<4, false>(a, query + k);
    ldmatrix<4, false>(b[0], key + k);
    mma_16816<T>(s[0], a, b[0]);
    mma_16816<T>(s[1], a, b[1]);
  }
}

// Products into weights exp2(score - top), the sums so far rescaled to the new top. Rows without a bit weigh nothing.
template <int D> KVPACK_D void weigh_keys(Running<D> &running, float (&s)[2][4], uint32_t visible, const Scale &scale) {
  const int column = (threadIdx.x & 3) * 2;
  float top[2] = {running.top[0], running.top[1]};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float &x = s[n >> 2][n & 3];
    x = visible >> (column + (n >> 2) * 8 + (n & 1)) & 1 ? scale(x) : NOTHING;
    top[n >> 1 & 1] = fmaxf(top[n >> 1 & 1], x);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
    top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
  }
  if (__any_sync(~0u, top[0] != running.top[0] || top[1] != running.top[1])) {
    const float keep[2] = {exp2_fast(running.top[0] - top[0]), exp2_fast(running.top[1] - top[1])};
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) running.out[n][e] *= keep[e >> 1];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      running.sum[r] *= keep[r];
      running.top[r] = top[r];
    }
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float &x = s[n >> 2][n & 3];
    x = exp2_fast(x - top[n >> 1 & 1]);
    running.sum[n >> 1 & 1] += x;
  }
}

// sums += weights . value
template <class T, int D> KVPACK_D void add_values(Running<D> &running, const float (&s)[2][4], const T *value) {
  const int lane = threadIdx.x & 31;
  const uint32_t a[4] = {pack2<T>(s[0][0], s[0][1]), pack2<T>(s[0][2], s[0][3]), pack2<T>(s[1][0], s[1][1]),
                         pack2<T>(s[1][2], s[1][3])};
  value += lane % 16 * TILE_STRIDE<D> + lane / 16 * 8;
#pragma unroll
  for (int n = 0; n < D / 16; ++n) {
    uint32_t b[2][2];
    ldmatrix<4, true>(b[0], value + n * 16);
    mma_16816<T>(running.out[2 * n], a, b[0]);
    mma_16816<T>(running.out[2 * n + 1], a, b[1]);
  }
}

// Warps that work together, the whole block or one of two parts of it; `number`: of the team in the block.
template <int WARPS> struct Team {
  int number = 0, thread = int(threadIdx.x) - number * WARPS * 32;
  KVPACK_D void sync() const {
    if (number == 0) named_barrier<0, WARPS * 32>();
    else named_barrier<1, WARPS * 32>();
  }
};

// The sums of all warps of a team, in their order, into one slot of each query head from `head0` (b * Hq + h * g).
// shared: WARPS * (16 * D + 32) floats that nobody needs any more.
template <int D, int WARPS>
KVPACK_D void combine_warps(Running<D> &running, float *shared, const Decode &decode, int head0, int group, int slot,
                            const Team<WARPS> &team = {}) {
  const int lane = threadIdx.x & 31, warp = team.thread >> 5, row = lane >> 2, column = (lane & 3) * 2;
  float *tops = shared + WARPS * 16 * D, *sums = tops + WARPS * 16;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    running.sum[r] += __shfl_xor_sync(~0u, running.sum[r], 1);
    running.sum[r] += __shfl_xor_sync(~0u, running.sum[r], 2);
    const int head = row + 8 * r;
    if (head < group) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<float2 *>(shared + (warp * group + head) * D + n * 8 + column) =
            make_float2(running.out[n][2 * r], running.out[n][2 * r + 1]);
      tops[warp * 16 + head] = running.top[r];
      sums[warp * 16 + head] = running.sum[r];
    }
  }
  team.sync();
  for (int item = team.thread; item < group * D; item += WARPS * 32) {
    const int head = item / D, d = item % D;
    float top = NOTHING, sum = 0, out = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w * 16 + head]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float weight = exp2_fast(tops[w * 16 + head] - top);
      sum += weight * sums[w * 16 + head];
      out += weight * shared[(w * group + head) * D + d];
    }
    const int64_t at = int64_t(head0 + head) * (decode.splits + 1) + slot;
    decode.partial[at * D + d] = out;
    if (d == 0) decode.mass[at] = make_float2(top, sum);
  }
}

}  // namespace kvpack
