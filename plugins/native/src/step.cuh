// What every op's step shares: splits and their merge, the exact rows, rotation, prefill attention. B batch, S new
// tokens, H KV heads, Hq query heads, g = Hq / H, D head dimension, T the 16-bit type of activations and states.
#pragma once
#include "device.cuh"
#include "kvpack.h"

namespace kvpack {

// -- host: errors and checks (step.cu)

int fail(int code, const char *format, ...);     // sets kvpack_last_error; returns code
int launched(int error, const char *what);       // of a launch: KVPACK_OK, or fails with KVPACK_CUDA
int check_layer(const kvpack_layer &);           // dtype, head_dim in {64, 96, 128, 256}, group 1 .. 16, rotary_dim
int check_step(const kvpack_layer &, kvpack_step &);  // the layer, pointers and sizes; fills in absent row strides
int check_workspace(const kvpack_step &, size_t needed);             // enough of it, and aligned
int check_geometry(const kvpack_layer &, const kvpack_geometry &);   // of a compressed layer

// Cuts the workspace into 256-byte aligned pieces; with a null base it only counts.
struct Carver {
  char *base;
  size_t used = 0;
  template <class V> V *take(size_t count) {
    const size_t start = used;
    used += (count * sizeof(V) + 255) / 256 * 256;
    return base ? reinterpret_cast<V *>(base + start) : nullptr;
  }
};

// f(type, size) with `typename decltype(type)::type` the layer's T and `decltype(size)::value` its D, once checked.
template <class V> struct Type { using type = V; };
template <int N> struct Size { static constexpr int value = N; };
template <class F> int choose(const kvpack_layer &layer, F &&f) {
  const bool half = layer.dtype == KVPACK_FP16;
  switch (layer.head_dim) {
    case 64: return half ? f(Type<half_t>(), Size<64>()) : f(Type<bf16_t>(), Size<64>());
    case 96: return half ? f(Type<half_t>(), Size<96>()) : f(Type<bf16_t>(), Size<96>());
    case 128: return half ? f(Type<half_t>(), Size<128>()) : f(Type<bf16_t>(), Size<128>());
    default: return half ? f(Type<half_t>(), Size<256>()) : f(Type<bf16_t>(), Size<256>());
  }
}

// -- new tokens

// Rows of new keys or values: row s of head h of sequence b is at rows + b * batch_stride + h * head_stride
// + (past_len[b] + s) * row_stride, in elements of T, past_len[b] counting as 0 where there is no past_len.
struct NewRows {
  const void *rows;
  int64_t batch_stride, head_stride, row_stride;
  const int32_t *past_len;
};
// Those of step.k or step.v.
inline NewRows rows_of(const kvpack_layer &layer, const kvpack_step &step, const void *rows) {
  return {rows, int64_t(step.length) * step.kv_row, layer.head_dim, step.kv_row, nullptr};
}
template <class T> KVPACK_D const T *new_row(const NewRows &x, int b, int h, int s) {
  return static_cast<const T *>(x.rows) + b * x.batch_stride + h * x.head_stride +
         ((x.past_len ? x.past_len[b] : 0) + s) * x.row_stride;
}

// -- the exact rows of a cache: sinks, then a ring of window + block rows

// Row r of head h of sequence b is at k (or v) + b * batch_stride + h * head_stride + r * row_stride, in elements of T,
// every row 16-byte aligned. A block of 0 means that nothing is ever encoded: an uncompressed cache, whole with
// {rows, 0, 0} or a sliding window of w tokens with {0, w, 0}.
struct ExactRows {
  void *k, *v;
  int64_t batch_stride, head_stride, row_stride;
  kvpack_geometry geometry;
  int rotated;  // keys are stored after RoPE
};

KVPACK_D int encoded_rows(const kvpack_geometry &g, int stored) {  // code rows once `stored` tokens are in the cache
  return g.block ? unsigned(max(stored - g.sinks - g.window, 0)) / unsigned(g.block) * g.block : 0;
}
KVPACK_D int exact_row(const kvpack_geometry &g, int position) {  // the row that holds `position`
  const int ring = g.window + g.block;
  return position < g.sinks || !ring ? position : g.sinks + (position - g.sinks) % ring;
}
// The position that is read in exact row `row` after `stored` tokens, -1 when there is none (or its codes are read).
KVPACK_D int exact_position(const kvpack_geometry &g, int row, int stored) {
  if (row < g.sinks) return row < stored ? row : -1;
  const int ring = g.window + g.block, last = stored - g.sinks - 1;
  const int back = (last - (row - g.sinks)) % ring;
  const int position = last - (back < 0 ? back + ring : back);
  return position < encoded_rows(g, stored) ? -1 : position + g.sinks;
}

// -- rotation, in float32 and the same to the last bit everywhere

struct Rope {  // a layer's tables, float [rows, half]; half 0: none
  const float *cos, *sin;
  int rows, half;
};
inline Rope rope_of(const kvpack_layer &layer, const kvpack_step &step) {
  return {step.cos, step.sin, step.rope_rows, layer.rotary_dim / 2};
}
KVPACK_D float2 turn_pair(float first, float second, float cos, float sin) {
  return make_float2(__fmaf_rn(-second, sin, __fmul_rn(first, cos)), __fmaf_rn(first, sin, __fmul_rn(second, cos)));
}
KVPACK_D int64_t rope_row(const Rope &rope, int position) {  // where `position` starts in the tables
  return int64_t(max(min(position, rope.rows - 1), 0)) * rope.half;
}
// Element i of x [D], anywhere in memory, rotated at `position`.
template <class T> KVPACK_D float turned(const Rope &rope, const T *x, int i, int position) {
  if (i >= 2 * rope.half) return to_float(x[i]);
  const int n = i < rope.half ? i : i - rope.half;
  const int64_t at = rope_row(rope, position) + n;
  const float2 pair = turn_pair(to_float(x[n]), to_float(x[n + rope.half]), rope.cos[at], rope.sin[at]);
  return i < rope.half ? pair.x : pair.y;
}

// -- a decode step (S == 1)

// Scratch. A sequence's rows are cut in at most `splits` pieces. Slot n < splits of (b, query head) holds piece n, slot
// `splits` the exact rows and the new token. Scores s are in log2 units: q.k * scale, softcap, then * LOG2E.
struct Decode {
  void *query;        // T [B, Hq, D], rotated, not scaled
  float *partial;     // [B, Hq, splits + 1, D]: sum of exp2(s - m) v
  float2 *mass;       // [B, Hq, splits + 1]: m, the largest s, and the sum of exp2(s - m); NOTHING and 0 for no rows
  unsigned *counter;  // [B, H], zeroed by decode_begin
  int splits;
};
Decode carve_decode(Carver &, const kvpack_layer &, int batch, int splits);

// One launch: rotates q into `query`; attends to the exact rows that are read at past_len and to the new token, into
// slot `splits`; stores the new token in its exact row; zeroes the counters. A sequence of new_len 0 stores nothing.
// A kernel after it may be started with launch_early: it calls wait_for_previous_kernel before it touches what this one
// writes or step.out, in every block, and may read anything else before.
int decode_begin(const kvpack_layer &, const kvpack_step &, const ExactRows &, const Decode &);
// The same, attending to the new token alone.
int decode_append(const kvpack_layer &, const kvpack_step &, const ExactRows &, const Decode &);

// What merge_last needs. The merged sum over slots 0 .. used - 1, y [D], counts as y @ matrix[h % matrix_sets]
// (float [matrix_sets, D, D], row-major; NULL: identity) + their mass * mean[h] (float [H, D]; NULL: 0).
struct Merge {
  Decode decode;
  const int32_t *new_len;
  void *out;  // T [B, Hq, 1, D]
  int kv_heads, group;
  const float *matrix;
  int matrix_sets;
  const float *mean;
};
inline Merge merge_of(const kvpack_layer &layer, const kvpack_step &step, const Decode &decode,
                      const float *matrix = nullptr, int matrix_sets = 1, const float *mean = nullptr) {
  return {decode, step.new_len, step.out, layer.num_kv_heads, layer.num_heads / layer.num_kv_heads,
          matrix, matrix_sets, mean};
}

// Called by all threads of a one-dimensional block of whole warps that has written the partials of (b, KV head h,
// split): when all `used` splits of (b, h) are in, the last block merges them and the exact slot in order and writes
// out, 0 where new_len[b] is 0. With `used` 0 one block, and only one, calls it. It uses no
// shared memory, and only the caller's __syncthreads separates this from what the block does next.
// TRANSFORM false: there is neither a matrix nor a mean.
template <class T, int D, bool TRANSFORM = true>
KVPACK_D void merge_last(const Merge &merge, int b, int h, int used);

// -- a step of many tokens

// query: T [B, Hq, S, D] <- step.q, RoPE at past_len[b] + s.
int rotate_queries(const kvpack_layer &, const kvpack_step &, void *query);
// Sinks, tail and new tokens to their rows of T [B, H, N, D] keys (rotated) and values. Row = position - first(b), with
// first(b) = max(0, past_len[b] - sliding_window) on a sliding-window layer, else 0.
int restore_exact(const kvpack_layer &, const kvpack_step &, const ExactRows &, void *dense_k, void *dense_v, int rows);
// Causal attention of query T [B, Hq, S, D] into step.out; tokens at or past new_len give 0. Row r of k and v is at
// b * batch_stride + h * head_stride + r * D (elements); row = position - first(b). (prefill.cu)
int prefill_attention(const kvpack_layer &, const kvpack_step &, const void *query, const void *k, const void *v,
                      int64_t batch_stride, int64_t head_stride);
// The exact rows after the step.
int store_exact(const kvpack_layer &, const kvpack_step &, const ExactRows &);

// Scratch of such a step: T [B, Hq, S, D] rotated queries and, where there are `rows`, all rows that are attended to,
// [B, H, rows, D] twice.
struct Many {
  void *query, *k, *v;
  int rows;
};
Many carve_many(Carver &, const kvpack_layer &, const kvpack_step &, int rows);
// The rotated new keys in there, once they were attended to, of a layer without a sliding window.
inline NewRows rotated_keys(const kvpack_layer &layer, const kvpack_step &step, const Many &scratch) {
  const int64_t head = int64_t(scratch.rows) * layer.head_dim;
  return {scratch.k, head * layer.num_kv_heads, head, layer.head_dim, step.past_len};
}
// Its attention. restore(k, v, rows): writes the compressed rows to where restore_exact leaves room for them.
template <class Restore>
int attend_many(const kvpack_layer &layer, const kvpack_step &step, const ExactRows &exact, const Many &scratch,
                Restore &&restore) {
  if (int error = rotate_queries(layer, step, scratch.query)) return error;
  if (int error = restore_exact(layer, step, exact, scratch.k, scratch.v, scratch.rows)) return error;
  if (step.live)
    if (int error = restore(scratch.k, scratch.v, scratch.rows)) return error;
  const int64_t head = int64_t(scratch.rows) * layer.head_dim;
  return prefill_attention(layer, step, scratch.query, scratch.k, scratch.v, head * layer.num_kv_heads, head);
}

// -- DenseObservedAttention (select.cu): fills d.selected. query: T [B, Hq, D] as Decode::query when S == 1 (not read
// otherwise). When it is called the new token is already in row past_len[b] of d.k.
size_t select_scratch(const kvpack_layer &, const kvpack_step &, const kvpack_dense &);
int select_rows(const kvpack_layer &, const kvpack_step &, const kvpack_dense &, const void *query, void *scratch);

// -- merging

struct Weights {  // of one query head's slots: the largest score, the mass of the pieces and of all, of the exact slot
  float top, pieces, exact, total;
};
KVPACK_D Weights weigh(const float2 *mass, int used, int exact_slot) {  // by a whole warp
  const int lane = threadIdx.x & 31;
  const float2 last = __ldcg(mass + exact_slot);
  float top = last.x, pieces = 0;
  for (int slot = lane; slot < used; slot += 32) top = fmaxf(top, __ldcg(mass + slot).x);
#pragma unroll
  for (int n = 16; n; n >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, n));
  for (int slot = lane; slot < used; slot += 32) {
    const float2 one = __ldcg(mass + slot);
    pieces += exp2_fast(one.x - top) * one.y;
  }
#pragma unroll
  for (int n = 16; n; n >>= 1) pieces += __shfl_xor_sync(~0u, pieces, n);
  const float exact = exp2_fast(last.x - top);
  return {top, pieces, exact, pieces + exact * last.y};
}

KVPACK_D void load_floats(float (&to)[1], const float *from) { to[0] = __ldcg(from); }
KVPACK_D void load_floats(float (&to)[4], const float *from) {
  const float4 four = __ldcg(reinterpret_cast<const float4 *>(from));
  to[0] = four.x;
  to[1] = four.y;
  to[2] = four.z;
  to[3] = four.w;
}
KVPACK_D void load_floats(float (&to)[2], const float *from) {
  const float2 two = __ldcg(reinterpret_cast<const float2 *>(from));
  to[0] = two.x;
  to[1] = two.y;
}

// Merges slots 0 .. used - 1 and the exact one of (b, KV head h), all of which are there; see merge_last.
template <class T, int D, bool TRANSFORM> KVPACK_D void merge_slots(const Merge &merge, int b, int h, int used) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const bool multiply = TRANSFORM && merge.matrix && used;
  const int group = merge.group, splits = merge.decode.splits, head0 = (b * merge.kv_heads + h) * group;
  T *out = static_cast<T *>(merge.out) + int64_t(head0) * D;
  if (merge.new_len[b] == 0) {
    for (int n = threadIdx.x; n < group * D; n += blockDim.x) out[n] = from_float<T>(0);
    return;
  }
  constexpr int EACH = D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 1, CHUNKS = D / (32 * EACH);  // columns of a lane; of a warp
  constexpr int TOGETHER = 32 / EACH < 16 ? 32 / EACH : 16;  // partials on their way at a time: this is all latency
  for (int item = warp; item < group * CHUNKS; item += warps) {
    const int head = item / CHUNKS, column = (item % CHUNKS * 32 + lane) * EACH;
    const float2 *mass = merge.decode.mass + int64_t(head0 + head) * (splits + 1);
    float *partial = merge.decode.partial + int64_t(head0 + head) * (splits + 1) * D + column;
    float sum[EACH] = {}, value[TOGETHER][EACH];
    auto load = [&](int first) {
#pragma unroll
      for (int n = 0; n < TOGETHER; ++n)
        if (first + n < used) load_floats(value[n], partial + int64_t(first + n) * D);
    };
    load(0);
    const Weights weights = weigh(mass, used, splits);
    for (int first = 0; first < used; first += TOGETHER) {
      if (first) load(first);
      const int slot = first + lane % TOGETHER;
      const float mine = slot < used ? exp2_fast(__ldcg(mass + slot).x - weights.top) : 0;
#pragma unroll
      for (int n = 0; n < TOGETHER; ++n) {
        const float weight = __shfl_sync(~0u, mine, n);
#pragma unroll
        for (int e = 0; e < EACH; ++e)
          if (first + n < used) sum[e] += weight * value[n][e];
      }
    }
    const float scale = weights.total > 0 ? 1 / weights.total : 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      float rest = weights.exact * __ldcg(partial + int64_t(splits) * D + e);
      if (TRANSFORM && merge.mean) rest += weights.pieces * merge.mean[h * D + column + e];
      if (!multiply) {
        out[head * D + column + e] = from_float<T>((sum[e] + rest) * scale);
      } else {  // a column is read and written by one lane alone
        partial[e] = sum[e] * scale;
        partial[int64_t(splits) * D + e] = rest * scale;
      }
    }
  }
  if (!multiply) return;
  __syncthreads();
  // A warp makes 8 columns of 4 heads at a time, a quarter of the rows to each 8 lanes.
  const float *matrix = merge.matrix + int64_t(h % merge.matrix_sets) * D * D;
  const float *sums = merge.decode.partial + int64_t(head0) * (splits + 1) * D;
  const int part = lane >> 3;
  for (int head = 0; head < group; head += 4)
    for (int column = warp * 8 + (lane & 7); column < D; column += warps * 8) {
      float sum[4] = {};
#pragma unroll 4
      for (int row = 4 * part; row < D; row += 16) {
        float entry[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) entry[n] = matrix[(row + n) * D + column];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int64_t slot = int64_t(min(head + n, group - 1)) * (splits + 1);
          const float4 y = *reinterpret_cast<const float4 *>(sums + slot * D + row);
          sum[n] += y.x * entry[0] + y.y * entry[1] + y.z * entry[2] + y.w * entry[3];
        }
      }
      float mine = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        sum[n] += __shfl_xor_sync(~0u, sum[n], 8);
        sum[n] += __shfl_xor_sync(~0u, sum[n], 16);
        if (n == part) mine = sum[n];
      }
      if (head + part < group) {
        const int64_t slot = int64_t(head + part) * (splits + 1) + splits;
        out[(head + part) * D + column] = from_float<T>(mine + sums[slot * D + column]);
      }
    }
}

template <class T, int D, bool TRANSFORM> KVPACK_D void merge_last(const Merge &merge, int b, int h, int used) {
  __threadfence();
  __syncthreads();
  bool last = used == 0;
  if (used && threadIdx.x == 0)
    last = atomicAdd(merge.decode.counter + b * merge.kv_heads + h, 1u) + 1 == unsigned(used);
  if (!__syncthreads_or(last)) return;
  __threadfence();
  merge_slots<T, D, TRANSFORM>(merge, b, h, used);
}

}  // namespace kvpack
