// Rows that leave the window to integer codes, in float32 as the reference does, and rows for prefill attention back
// from codes. A warp has a row at a time, a lane its columns lane + 32 n.
#include "intkv.cuh"

namespace kvpack {
namespace {

constexpr int WARPS = 8;

struct EncodeArguments {
  IntSide side[2];
  const void *ring[2];             // T [B, H, exact, D]
  NewRows fresh[2];
  const int32_t *source, *target;  // [B, rows]
  int heads, exact, rows, code_rows, rotation;
};

// The row x - center, rotated.
template <class T, int D>
KVPACK_D void load_row(float (&y)[D / 32], const T *from, const float *center, int rotation) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < D / 32; ++n) {
    const int column = lane + 32 * n;
    y[n] = center ? __fsub_rn(to_float(from[column]), center[column]) : to_float(from[column]);
  }
  if (rotation) hadamard_row<D>(y);
}

struct Steps {
  float scale, zero;
};
// Scale and zero of values from low to high, as they are stored.
template <class T> KVPACK_D Steps steps_of(float low, float high, int bits, T *scale, T *zero) {
  *scale = from_float<T>(__fdiv_rn(__fsub_rn(high, low), float((1 << bits) - 1)));
  *zero = from_float<T>(low);
  return {to_float(*scale), to_float(*zero)};
}
KVPACK_D int code_of(float y, const Steps &steps, int bits) {
  const float step = steps.scale > 0 ? __fdiv_rn(__fsub_rn(y, steps.zero), steps.scale) : 0;
  return __float2int_rn(fminf(fmaxf(step, 0), float((1 << bits) - 1)));
}

// Codes of a row, a byte each in shared memory, to `side`'s packing.
template <int D> KVPACK_D void pack_row(int8_t *to, const uint8_t *codes, const IntSide &side) {
  const int words = side.row_bytes / side.planes, each = D / words;
  for (int word = threadIdx.x & 31; word < words; word += 32) {
    uint32_t bits = 0;
    for (int n = 0; n < each; ++n) bits |= uint32_t(codes[n * words + word]) << (side.bits * n);
    for (int n = 0; n < side.planes; ++n) to[n * words + word] = int8_t(int(bits >> (8 * n) & 255) - 128);
  }
}

// Lowest and highest of the columns that share a scale with those of this lane. group: a multiple of 16.
template <int D>
KVPACK_D void range_of(float (&low)[D / 32], float (&high)[D / 32], const float (&y)[D / 32], int group) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < D / 32; ++n) {
    low[n] = high[n] = y[n];
#pragma unroll
    for (int step = 1; step < 16; step <<= 1) {
      low[n] = fminf(low[n], __shfl_xor_sync(~0u, low[n], step));
      high[n] = fmaxf(high[n], __shfl_xor_sync(~0u, high[n], step));
    }
  }
  if (group == 16) return;
  float part_low[D / 16], part_high[D / 16];  // of every 16 columns
#pragma unroll
  for (int n = 0; n < D / 16; ++n) {
    part_low[n] = __shfl_sync(~0u, low[n / 2], n % 2 * 16);
    part_high[n] = __shfl_sync(~0u, high[n / 2], n % 2 * 16);
  }
#pragma unroll
  for (int n = 0; n < D / 32; ++n) {
    const int mine = (lane + 32 * n) / group;
#pragma unroll
    for (int m = 0; m < D / 16; ++m)
      if (16 * m / group == mine) low[n] = fminf(low[n], part_low[m]), high[n] = fmaxf(high[n], part_high[m]);
  }
}

// Grid (units, H, 2 B). A unit is what shares scales along tokens, or a row of each warp.
template <class T, int D> __global__ void __launch_bounds__(32 * WARPS) encode_kernel(EncodeArguments a) {
  __shared__ uint8_t all_codes[WARPS][D];
  __shared__ float lows[WARPS][D], highs[WARPS][D];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int values = blockIdx.z & 1, b = blockIdx.z >> 1, h = blockIdx.y;
  const IntSide &side = a.side[values];
  const bool together = side.tokens > 1;
  const int count = together ? side.tokens : WARPS, first = blockIdx.x * count, trash = a.code_rows - 1;
  if (first >= a.rows) return;
  const int64_t head = int64_t(b) * a.heads + h;
  const int32_t *source = a.source + int64_t(b) * a.rows, *target = a.target + int64_t(b) * a.rows;
  const float *center = side.center ? side.center + h * D : nullptr;
  T *scale = static_cast<T *>(side.scale) + head * side.scale_rows * side.scales;
  T *zero = static_cast<T *>(side.zero) + head * side.scale_rows * side.scales;
  int8_t *to = side.codes + head * a.code_rows * side.row_bytes;
  auto row_of = [&](int n) {
    const int from = source[n];
    return from < a.exact ? static_cast<const T *>(a.ring[values]) + (head * a.exact + from) * D
                          : new_row<T>(a.fresh[values], b, h, from - a.exact);
  };
  float y[D / 32], low[D / 32], high[D / 32];
  Steps steps[D / 32];
  if (together) {
    if (target[first] >= trash) return;
#pragma unroll
    for (int n = 0; n < D / 32; ++n) low[n] = INFINITY, high[n] = -INFINITY;
    for (int row = warp; row < count; row += WARPS) {
      load_row<T, D>(y, row_of(first + row), center, a.rotation);
#pragma unroll
      for (int n = 0; n < D / 32; ++n) low[n] = fminf(low[n], y[n]), high[n] = fmaxf(high[n], y[n]);
    }
#pragma unroll
    for (int n = 0; n < D / 32; ++n) lows[warp][lane + 32 * n] = low[n], highs[warp][lane + 32 * n] = high[n];
    __syncthreads();
    const int64_t at = int64_t(target[first] / side.tokens) * side.scales;
#pragma unroll
    for (int n = 0; n < D / 32; ++n) {
      const int column = lane + 32 * n;
      for (int w = 0; w < WARPS; ++w) {
        low[n] = fminf(low[n], lows[w][column]);
        high[n] = fmaxf(high[n], highs[w][column]);
      }
      T stored[2];
      steps[n] = steps_of(low[n], high[n], side.bits, stored, stored + 1);
      if (warp == 0) scale[at + column] = stored[0], zero[at + column] = stored[1];
    }
  }
  for (int row = first + warp; row < min(first + count, a.rows); row += WARPS) {
    const int place = target[row];
    if (place >= trash) continue;
    load_row<T, D>(y, row_of(row), center, a.rotation);
    if (!together) {
      const int group = D / side.scales;
      range_of<D>(low, high, y, group);
#pragma unroll
      for (int n = 0; n < D / 32; ++n) {
        const int column = lane + 32 * n;
        T stored[2];
        steps[n] = steps_of(low[n], high[n], side.bits, stored, stored + 1);
        if (column % group == 0) {
          const int64_t at = int64_t(place) * side.scales + column / group;
          scale[at] = stored[0], zero[at] = stored[1];
        }
      }
    }
    uint8_t *codes = all_codes[warp];
#pragma unroll
    for (int n = 0; n < D / 32; ++n) codes[lane + 32 * n] = uint8_t(code_of(y[n], steps[n], side.bits));
    __syncwarp();
    pack_row<D>(to + int64_t(place) * side.row_bytes, codes, side);
    __syncwarp();
  }
}

// -- back from codes

struct RestoreArguments {
  IntSide side[2];
  Rope rope;  // of keys: half 0 where they are stored rotated
  kvpack_geometry geometry;
  const int32_t *past_len;
  void *dense[2];
  int heads, rows, code_rows, rotation;
};

KVPACK_D int unpacked(const int8_t *row, const IntSide &side, int words, int column) {
  const int shift = column / words * side.bits, byte = shift >> 3;
  const int8_t *at = row + byte * words + column % words;
  int bits = (at[0] + 128) >> (shift & 7);
  if ((shift & 7) + side.bits > 8) bits |= (at[words] + 128) << (8 - (shift & 7));
  return bits & ((1 << side.bits) - 1);
}

// Grid (rows / WARPS, 2 H, B).
template <class T, int D> __global__ void __launch_bounds__(32 * WARPS) restore_kernel(RestoreArguments a) {
  __shared__ float whole[WARPS][D];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int values = blockIdx.y % 2, h = blockIdx.y / 2, b = blockIdx.z, j = blockIdx.x * WARPS + warp;
  const IntSide &side = a.side[values];
  if (j >= encoded_rows(a.geometry, a.past_len[b])) return;  // warps work alone
  const int64_t head = int64_t(b) * a.heads + h, at = (head * side.scale_rows + j / side.tokens) * side.scales;
  const int8_t *codes = side.codes + (head * a.code_rows + j) * side.row_bytes;
  const T *scale = static_cast<const T *>(side.scale) + at, *zero = static_cast<const T *>(side.zero) + at;
  const int words = side.row_bytes / side.planes, group = D / side.scales;
  float y[D / 32];
#pragma unroll
  for (int n = 0; n < D / 32; ++n) {
    const int column = lane + 32 * n;
    y[n] = unpacked(codes, side, words, column) * to_float(scale[column / group]) + to_float(zero[column / group]);
  }
  if (a.rotation) hadamard_row<D>(y);
  if (side.center)
#pragma unroll
    for (int n = 0; n < D / 32; ++n) y[n] += side.center[h * D + lane + 32 * n];
  T *out = static_cast<T *>(a.dense[values]) + (head * a.rows + a.geometry.sinks + j) * D;
  if (values || !a.rope.half) {
#pragma unroll
    for (int n = 0; n < D / 32; ++n) out[lane + 32 * n] = from_float<T>(y[n]);
    return;
  }
#pragma unroll
  for (int n = 0; n < D / 32; ++n) whole[warp][lane + 32 * n] = y[n];
  __syncwarp();
  for (int column = lane; column < D; column += 32)
    out[column] = from_float<T>(turned(a.rope, whole[warp], column, a.geometry.sinks + j));
}

}  // namespace

int intkv_encode(const kvpack_layer &layer, const kvpack_step &step, const kvpack_intkv &kv, const NewRows &keys) {
  EncodeArguments a = {};
  a.side[0] = intkv_side(layer, kv, false), a.side[1] = intkv_side(layer, kv, true);
  a.ring[0] = kv.ring_k, a.ring[1] = kv.ring_v, a.fresh[0] = keys, a.fresh[1] = rows_of(layer, step, step.v);
  a.source = step.enc_src, a.target = step.enc_dst;
  a.heads = layer.num_kv_heads, a.exact = kv.geometry.sinks + kv.geometry.window + kv.geometry.block;
  a.rows = step.encode, a.code_rows = kv.code_rows, a.rotation = kv.rotation;
  const int error = choose(layer, [&](auto type, auto size) {
    const dim3 grid((a.rows + WARPS - 1) / WARPS, a.heads, 2 * step.batch);
    return launch(encode_kernel<typename decltype(type)::type, decltype(size)::value>, grid, dim3(32 * WARPS), 0,
                  step.stream, a);
  });
  return launched(error, "encoding");
}

int intkv_restore(const kvpack_layer &layer, const kvpack_step &step, const kvpack_intkv &kv, void *dense_k,
                  void *dense_v, int rows) {
  RestoreArguments a = {};
  a.side[0] = intkv_side(layer, kv, false), a.side[1] = intkv_side(layer, kv, true);
  a.rope = rope_of(layer, step), a.geometry = kv.geometry, a.past_len = step.past_len;
  if (!kv.pre_rope) a.rope.half = 0;
  a.dense[0] = dense_k, a.dense[1] = dense_v;
  a.heads = layer.num_kv_heads, a.rows = rows, a.code_rows = kv.code_rows, a.rotation = kv.rotation;
  const int beyond = step.live - kv.geometry.sinks - kv.geometry.window;  // of the longest sequence
  const int most = beyond / kv.geometry.block * kv.geometry.block;
  if (most <= 0) return KVPACK_OK;
  const int error = choose(layer, [&](auto type, auto size) {
    const dim3 grid((most + WARPS - 1) / WARPS, 2 * a.heads, step.batch);
    return launch(restore_kernel<typename decltype(type)::type, decltype(size)::value>, grid, dim3(32 * WARPS), 0,
                  step.stream, a);
  });
  return launched(error, "rebuilding rows from codes");
}

}  // namespace kvpack
