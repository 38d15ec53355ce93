// Attention of a step of several tokens: causal, tile by tile over dense keys and values, the scores never leaving
// registers (FlashAttention-2, https://arxiv.org/abs/2307.08691).
#include "step.cuh"

namespace kvpack {
namespace {

constexpr int WARPS = 4, THREADS = 32 * WARPS, KEYS = 64;
// A row's maximum follows its scores only when they exceed it by this much (log2): weights stay below 2^LAG, and most
// tiles spare the rescaling of what was summed before.
constexpr float LAG = 6;

struct Prefill {
  const void *query, *key, *value;
  void *out;
  const int32_t *past_len, *new_len;
  int64_t batch_stride, head_stride;
  int length, heads, group, window;
  float inside, outside;  // scores (log2) are product * outside or, with a softcap, tanh(product * inside) * outside
};

// A tile of rows of D numbers in shared memory. The 16-byte chunks of a row are permuted, so that the same chunk of
// eight rows in a row lies in eight different groups of banks.
template <int D>
struct Tile {
  static constexpr int CHUNKS = D / 8;
  static KVPACK_D int twist(int row) { return D == 96 ? row >> 1 & 3 : row & 7; }
  static KVPACK_D int at(int row, int chunk) { return row * D + 8 * (chunk ^ twist(row)); }
};

template <int D>
struct Shape {
  static constexpr int STRIPS = D <= 128 ? 2 : 1;  // of 16 queries per warp: two halve the reads of shared memory
  static constexpr int ROWS = 16 * STRIPS, QUERIES = ROWS * WARPS;
  static constexpr bool RESIDENT = D <= 64;  // queries stay in registers
  static constexpr size_t SHARED = size_t(QUERIES + 2 * KEYS) * D * 2;
};

// How the threads of a block share the copying of a tile: each copies its chunk of every DOWN-th row.
template <int D>
struct Share {
  static constexpr int ACROSS = D == 96 ? 4 : D / 8, DOWN = THREADS / ACROSS;
  int row = threadIdx.x / ACROSS, chunk = threadIdx.x % ACROSS;
};

// Starts the copy of a thread's share of `N` rows, `rows` being where it begins. The first `real` rows exist, the
// others become 0.
template <int D, int N, class T>
KVPACK_D void load_tile(T *tile, const T *rows, int real) {
  using S = Share<D>;
  const S share;
  const int place = share.chunk ^ Tile<D>::twist(share.row);
  tile += share.row * D;
  if (real >= N) {
#pragma unroll
    for (int r = 0; r < N; r += S::DOWN)  // twist(row + r) is twist(row) ^ twist(r): row is below DOWN
#pragma unroll
      for (int c = 0; c < D / 8; c += S::ACROSS)
        copy_async_16(tile + r * D + 8 * (c + (place ^ Tile<D>::twist(r))), rows + r * D + 8 * c);
  } else {
#pragma unroll 1
    for (int r = 0; r < N; r += S::DOWN) {
      const bool exists = share.row + r < real;
      const T *const source = exists ? rows + r * D : rows - share.row * D;  // the first row always does
#pragma unroll
      for (int c = 0; c < D / 8; c += S::ACROSS)
        copy_async_16_or_zero(tile + r * D + 8 * (c + (place ^ Tile<D>::twist(r))), source + 8 * c, exists);
    }
  }
}

KVPACK_D float squash(float x) {  // tanh, to some 1e-7
  return 1 - __fdividef(2.0f, 1 + exp2_fast(x * (2 * LOG2E)));
}

KVPACK_D float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
KVPACK_D float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// One block: a tile of queries of one head. Grid: heads, batch, query tiles, those with the most keys first.
template <class T, int D, bool CAPPED>
__global__ void __launch_bounds__(THREADS, 2) prefill_kernel(const Prefill p) {
  using S = Shape<D>;
  constexpr int STRIPS = S::STRIPS;
  KVPACK_DYNAMIC_SHARED(memory);
  T *const queries = reinterpret_cast<T *>(memory), *const keys = queries + S::QUERIES * D;
  T *const values = keys + KEYS * D;
  const int head = blockIdx.x, b = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = int(gridDim.z - 1 - blockIdx.z) * S::QUERIES;
  const int count = min(p.new_len[b], p.length), real = count - begin;  // queries of the sequence, of the tile
  const int64_t start = ((int64_t(b) * p.heads + head) * p.length + begin) * D;
  const int out_row = p.heads * D;
  T *const out = static_cast<T *>(p.out) + (int64_t(b) * p.length + begin) * out_row + head * D;
  const int room = min(p.length - begin, S::QUERIES);
  if (real <= 0) {
    for (int n = threadIdx.x; n < room * Tile<D>::CHUNKS; n += THREADS)
      *reinterpret_cast<uint4 *>(out + n / Tile<D>::CHUNKS * out_row + n % Tile<D>::CHUNKS * 8) =
          make_uint4(0, 0, 0, 0);
    return;
  }
  // Key row r and query s: visible when r <= s + ahead and, with a window, r > s + ahead - window.
  const int past = p.past_len[b];
  const int ahead = p.window ? min(past, p.window) : past;
  const int total = ahead + count, last = ahead + begin + min(real, S::QUERIES) - 1;
  const int low = p.window ? max(ahead + begin - p.window + 1, 0) / KEYS : 0;
  const T *const key = static_cast<const T *>(p.key), *const value = static_cast<const T *>(p.value);
  const Share<D> share;
  const int own = share.row * D + 8 * share.chunk;

  int tile = last / KEYS;
  int64_t at = b * p.batch_stride + head / p.group * p.head_stride + int64_t(tile) * KEYS * D + own;
  load_tile<D, S::QUERIES>(queries, static_cast<const T *>(p.query) + start + own, real);
  load_tile<D, KEYS>(keys, key + at, total - tile * KEYS);
  copy_async_commit();

  // Where this lane's rows are for ldmatrix; chunk 2 n of a row is at ^ 16 n.
  const int row_a = lane & 15, row_b = (lane & 7) + (lane >> 4) * 8;
  const int at_a = 8 * (Tile<D>::twist(row_a) ^ lane >> 4), at_b = 8 * (Tile<D>::twist(row_b) ^ (lane >> 3 & 1));
  const T *const query_rows = queries + (warp * S::ROWS + row_a) * D;
  const T *const key_rows = keys + row_b * D, *const value_rows = values + row_a * D;
  const int mine = begin + ahead + warp * S::ROWS;  // the last key row that the warp's first query sees

  float sum[STRIPS][D / 8][4] = {}, most[STRIPS][2], mass[STRIPS][2] = {};
#pragma unroll
  for (int i = 0; i < STRIPS; ++i) most[i][0] = most[i][1] = NOTHING;
  uint32_t held[S::RESIDENT ? D / 16 : 1][STRIPS][4];
  if constexpr (S::RESIDENT) {
    copy_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int c = 0; c < D / 16; ++c)
#pragma unroll
      for (int i = 0; i < STRIPS; ++i) ldmatrix<4, false>(held[c][i], query_rows + i * 16 * D + (at_a ^ 16 * c));
  }

  for (; tile >= low; --tile) {
    const int top = tile * KEYS;
    const bool visible = top <= mine + S::ROWS - 1 && (!p.window || top + KEYS - 1 > mine - p.window);
    copy_async_wait<0>();
    __syncthreads();  // the keys are here, and nobody reads the old values any more
    load_tile<D, KEYS>(values, value + at, total - top);
    copy_async_commit();

    float score[STRIPS][KEYS / 8][4];
    if (visible) {
#pragma unroll
      for (int i = 0; i < STRIPS; ++i)
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) score[i][n][0] = score[i][n][1] = score[i][n][2] = score[i][n][3] = 0;
#pragma unroll
      for (int c = 0; c < D / 16; ++c) {
        uint32_t q[STRIPS][4];
#pragma unroll
        for (int i = 0; i < STRIPS; ++i) {
          if constexpr (S::RESIDENT) {
#pragma unroll
            for (int e = 0; e < 4; ++e) q[i][e] = held[c][i][e];
          } else {
            ldmatrix<4, false>(q[i], query_rows + i * 16 * D + (at_a ^ 16 * c));
          }
        }
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
          uint32_t k[4];
          ldmatrix<4, false>(k, key_rows + n * 16 * D + (at_b ^ 16 * c));
          const uint32_t left[2] = {k[0], k[1]}, right[2] = {k[2], k[3]};
#pragma unroll
          for (int i = 0; i < STRIPS; ++i) {
            mma_16816<T>(score[i][2 * n], q[i], left);
            mma_16816<T>(score[i][2 * n + 1], q[i], right);
          }
        }
      }
    }
    copy_async_wait<0>();
    __syncthreads();  // the values are here, and nobody reads the keys any more
    at -= KEYS * D;
    if (tile > low) load_tile<D, KEYS>(keys, key + at, KEYS);
    copy_async_commit();
    if (!visible) continue;

    if constexpr (CAPPED) {
#pragma unroll
      for (int i = 0; i < STRIPS; ++i)
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) score[i][n][e] = squash(score[i][n][e] * p.inside);
    }
    if (top + KEYS - 1 > mine || (p.window && top <= mine + S::ROWS - 1 - p.window)) {
      const int window = p.window ? p.window : total;
#pragma unroll
      for (int i = 0; i < STRIPS; ++i)
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int behind = mine + i * 16 + lane / 4 + e / 2 * 8 - (top + n * 8 + lane % 4 * 2 + e % 2);
            if (behind < 0 || behind >= window) score[i][n][e] = -INFINITY;
          }
    }
    float peak[STRIPS][2];
    bool rises = false;
#pragma unroll
    for (int i = 0; i < STRIPS; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        peak[i][r] = -INFINITY;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
          peak[i][r] = fmaxf(peak[i][r], fmaxf(score[i][n][2 * r], score[i][n][2 * r + 1]));
        peak[i][r] = quad_max(peak[i][r]);
        rises |= (peak[i][r] - most[i][r]) * p.outside > LAG;
      }
    if (__any_sync(~0u, rises)) {
#pragma unroll
      for (int i = 0; i < STRIPS; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float now = fmaxf(most[i][r], peak[i][r]), less = exp2_fast((most[i][r] - now) * p.outside);
          most[i][r] = now;
          mass[i][r] *= less;
#pragma unroll
          for (int n = 0; n < D / 8; ++n) sum[i][n][2 * r] *= less, sum[i][n][2 * r + 1] *= less;
        }
    }
#pragma unroll
    for (int i = 0; i < STRIPS; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float shift = most[i][r] * p.outside;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            score[i][n][e] = exp2_fast(fmaf(score[i][n][e], p.outside, -shift));
            mass[i][r] += score[i][n][e];
          }
      }
#pragma unroll
    for (int c = 0; c < KEYS / 16; ++c) {
      uint32_t weight[STRIPS][4];
#pragma unroll
      for (int i = 0; i < STRIPS; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          weight[i][e] = pack2<T>(score[i][2 * c + e / 2][e % 2 * 2], score[i][2 * c + e / 2][e % 2 * 2 + 1]);
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t v[4];
        ldmatrix<4, true>(v, value_rows + c * 16 * D + (at_a ^ 16 * n));
        const uint32_t left[2] = {v[0], v[1]}, right[2] = {v[2], v[3]};
#pragma unroll
        for (int i = 0; i < STRIPS; ++i) {
          mma_16816<T>(sum[i][2 * n], weight[i], left);
          mma_16816<T>(sum[i][2 * n + 1], weight[i], right);
        }
      }
    }
  }

  // The output passes through the warp's own rows of the query tile, for whole-chunk writes.
#pragma unroll
  for (int i = 0; i < STRIPS; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp * S::ROWS + i * 16 + r * 8 + lane / 4;
      const float whole = quad_sum(mass[i][r]), share = row < real ? 1 / whole : 0;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<uint32_t *>(queries + Tile<D>::at(row, n) + lane % 4 * 2) =
            pack2<T>(sum[i][n][2 * r] * share, sum[i][n][2 * r + 1] * share);
    }
  __syncwarp();
#pragma unroll 4
  for (int n = lane; n < S::ROWS * Tile<D>::CHUNKS; n += 32) {
    const int row = warp * S::ROWS + n / Tile<D>::CHUNKS, chunk = n % Tile<D>::CHUNKS;
    if (row < room)
      *reinterpret_cast<uint4 *>(out + row * out_row + 8 * chunk) =
          *reinterpret_cast<const uint4 *>(queries + Tile<D>::at(row, chunk));
  }
}

}  // namespace

int prefill_attention(const kvpack_layer &layer, const kvpack_step &step, const void *query, const void *k,
                      const void *v, int64_t batch_stride, int64_t head_stride) {
  Prefill p = {query, k, v, step.out, step.past_len, step.new_len, batch_stride, head_stride};
  p.length = step.length;
  p.heads = layer.num_heads;
  p.group = layer.num_heads / layer.num_kv_heads;
  p.window = layer.sliding_window;
  p.inside = layer.softcap ? layer.scale / layer.softcap : 1;
  p.outside = (layer.softcap ? layer.softcap : layer.scale) * LOG2E;
  return choose(layer, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    constexpr int D = decltype(size)::value;
    const dim3 grid(p.heads, step.batch, (p.length + Shape<D>::QUERIES - 1) / Shape<D>::QUERIES);
    const auto kernel = layer.softcap ? prefill_kernel<T, D, true> : prefill_kernel<T, D, false>;
    return launched(launch(kernel, grid, dim3(THREADS), Shape<D>::SHARED, step.stream, p), "prefill attention");
  });
}

}  // namespace kvpack
