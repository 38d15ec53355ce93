// What decode_begin does (see step.cuh), by a team of warps: attention to the exact rows and the new token.
#pragma once
#include "flash.cuh"

namespace kvpack {

template <int D, int WARPS> constexpr size_t attend_exact_bytes = (1 + 2 * WARPS) * TILE_SIZE<D> * 2;

// KV head h of sequence b. attend: whether to the exact rows, too. shared: attend_exact_bytes. TOGETHER: rows whose
// cosines and sines are on their way at a time, which matters where keys are stored before RoPE.
template <class T, int D, int WARPS, int TOGETHER = 8>
KVPACK_D void attend_exact(unsigned char *shared, const ExactRows &exact, const kvpack_step &step, const Decode &decode,
                           const Rope &rope, const Scale &scale, int kv_heads, int group, int window, bool attend,
                           int h, int b, const Team<WARPS> &team = {}) {
  constexpr int STRIDE = TILE_STRIDE<D>;
  static_assert(2 * TILE_SIZE<D> * sizeof(T) >= (16 * D + 32) * sizeof(float));
  const int lane = threadIdx.x & 31, warp = team.thread >> 5;
  T *const query = reinterpret_cast<T *>(shared);
  T *const keys = query + (1 + 2 * warp) * TILE_SIZE<D>;  // a tile of each warp
  T *const values = keys + TILE_SIZE<D>;
  const int pair = b * kv_heads + h, head0 = pair * group;
  const int past = step.past_len[b], rows = exact.geometry.sinks + exact.geometry.window + exact.geometry.block;
  const bool real = step.new_len[b] > 0;
  const int64_t start = b * exact.batch_stride + h * exact.head_stride;
  const int64_t fresh = int64_t(b) * step.kv_row + h * D;
  const T *new_key = static_cast<const T *>(step.k) + fresh, *new_value = static_cast<const T *>(step.v) + fresh;
  if (team.thread == 0) decode.counter[pair] = 0;

  // Row n < old is exact row n, row `old` the new token. A lane knows the position of one row of the tile, -1 when it
  // is not to be seen.
  const int old = attend ? rows : 0, tiles = real ? old / TILE_ROWS + 1 : 0;
  auto position_of = [&](int tile) {
    const int row = tile * TILE_ROWS + lane % TILE_ROWS;
    const int position = row < old ? exact_position(exact.geometry, row, past) : row == old ? past : -1;
    return window && position <= past - window ? -1 : position;
  };
  auto copy = [&](int tile, uint32_t visible, T *to, const void *from, const T *fresh) {
    auto start_of = [&](int n) {
      const int row = tile * TILE_ROWS + n;
      return row < old ? static_cast<const T *>(from) + start + row * exact.row_stride : fresh;
    };
    if (tile < tiles && visible) copy_some_rows<T, D>(to, visible, start_of, fresh);
    copy_async_commit();
  };
  int tile = warp, position = position_of(tile);
  uint32_t visible = __ballot_sync(~0u, position >= 0) & 0xFFFF;
  copy(tile, visible, keys, exact.k, new_key);
  copy(tile, visible, values, exact.v, new_value);

  const T *q = static_cast<const T *>(step.q) + int64_t(b) * step.q_row + h * group * D;
  for (int n = team.thread; n < TILE_ROWS * D; n += WARPS * 32) {
    const int head = n / D, d = n % D;
    T x = from_float<T>(0);
    if (head < group) {
      x = from_float<T>(turned(rope, q + head * D, d, past));
      static_cast<T *>(decode.query)[int64_t(head0 + head) * D + d] = x;
    }
    query[head * STRIDE + d] = x;
  }
  team.sync();

  Running<D> running;
  while (tile < tiles) {
    float s[2][4];
    copy_async_wait<1>();
    __syncwarp();
    if (visible) {
      const uint32_t turn = exact.rotated ? visible & __ballot_sync(~0u, tile * TILE_ROWS + lane == old) : visible;
#pragma unroll 1
      for (int first = 0; first < TILE_ROWS; first += TOGETHER) {
        if (!(turn >> first & ((1u << TOGETHER) - 1))) continue;
        int64_t at[TOGETHER];
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) at[n] = rope_row(rope, __shfl_sync(~0u, position, first + n));
        for (int i = lane; i < rope.half; i += 32) {
          float2 angle[TOGETHER];
#pragma unroll
          for (int n = 0; n < TOGETHER; ++n) angle[n] = make_float2(rope.cos[at[n] + i], rope.sin[at[n] + i]);
#pragma unroll
          for (int n = 0; n < TOGETHER; ++n) {
            if (!(turn >> (first + n) & 1)) continue;
            T *row = keys + (first + n) * STRIDE;
            const float2 two = turn_pair(to_float(row[i]), to_float(row[i + rope.half]), angle[n].x, angle[n].y);
            row[i] = from_float<T>(two.x);
            row[i + rope.half] = from_float<T>(two.y);
          }
        }
      }
      __syncwarp();
      multiply_keys<T, D>(s, query, keys);
      __syncwarp();
    }
    const uint32_t seen = visible;
    tile += WARPS;
    position = position_of(tile);
    visible = __ballot_sync(~0u, position >= 0) & 0xFFFF;
    copy(tile, visible, keys, exact.k, new_key);
    if (seen) weigh_keys<D>(running, s, seen, scale);
    copy_async_wait<1>();
    __syncwarp();
    if (seen) add_values<T, D>(running, s, values);
    __syncwarp();
    copy(tile, visible, values, exact.v, new_value);
  }
  copy_async_wait<0>();
  team.sync();
  float *const free = reinterpret_cast<float *>(query + TILE_SIZE<D>);
  combine_warps<D, WARPS>(running, free, decode, head0, group, decode.splits, team);

  const int row = exact_row(exact.geometry, past);
  if (real && row < rows)  // never a row that was read: it is empty, encoded, or has left the sliding window
    for (int d = team.thread; d < D; d += WARPS * 32) {
      const int64_t at = start + row * exact.row_stride + d;
      static_cast<T *>(exact.k)[at] = exact.rotated ? from_float<T>(turned(rope, new_key, d, past)) : new_key[d];
      static_cast<T *>(exact.v)[at] = new_value[d];
    }
}

}  // namespace kvpack
