// A decode step over the codes of any quantiser: a warp rebuilds tiles of rows from the codewords, in the 16-bit type
// and on its own, and attends to them with tensor cores. pre_rope keys are multiplied by the decode matrix and rotated
// in registers; for post_rope keys the query is taken to the codec's space instead. Values stay in that space until
// merge_last.
#include "vqkv_rows.cuh"

namespace kvpack {
namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS;

struct DecodeArguments {
  VqSide k, v;
  Merge merge;
  Rope rope;
  kvpack_geometry geometry;
  const int32_t *past_len;
  const float *query_matrix;
  int heads, group, splits, code_rows;
  float scale, softcap;
  int held_k, held_v;  // lookups with their tables in shared memory
  int decode_shared, codes_shared;                      // the decode matrix, the codes of a tile: there too
  unsigned decode_at, k_at, v_at, tiles_at, codes_at;   // offsets there
  unsigned k_buffer, v_buffer;                          // bytes of a warp's codes
};

// Tiles that a warp takes at once: as many as its registers hold.
template <int D> constexpr int TILES_OF = D <= 128 ? 2 : 1;
// Turns by 0 .. 31 of each pair, as two halves: a row's pairs are padded by 4, so that 8 rows meet 8 times 4 banks.
template <int D> constexpr int TURN_STRIDE = D / 2 + 4;

// Fixed shared memory: query [16][D + 8], key mean [D] (columns paired), offsets and masses of 16 heads, turns.
template <int D> struct Fixed {
  static constexpr int QUERY = 16 * (D + 8) * 2, MEAN = D * 4, CONSTANT = 16 * 4, MASS = WARPS * 16 * 8;
  static constexpr int TURNS = 16 * TILES_OF<D> * TURN_STRIDE<D> * 4;
  static constexpr int BYTES = (QUERY + MEAN + CONSTANT + MASS + TURNS + 15) / 16 * 16;
};

KVPACK_D void copy_shared(unsigned char *to, const void *from, int bytes) {  // by the block
  const unsigned char *source = static_cast<const unsigned char *>(from);
  if (bytes % 16 == 0 && reinterpret_cast<uintptr_t>(source) % 16 == 0)
    for (int n = 16 * threadIdx.x; n < bytes; n += 16 * THREADS) copy_async_16(to + n, source + n);
  else
    for (int n = 2 * threadIdx.x; n < bytes; n += 2 * THREADS)
      *reinterpret_cast<uint16_t *>(to + n) = *reinterpret_cast<const uint16_t *>(source + n);
}

// HEADS: 1 for up to 8 query heads of a KV head, 2 for up to 16.
template <class T, int D, bool PRE_ROPE, int HEADS>
__global__ void __launch_bounds__(THREADS, 1) decode_kernel(DecodeArguments a) {
  constexpr int TILES = TILES_OF<D>, ROWS = 16 * TILES, STRIDE = D + 8, PAIRS = (D / 2 + 31) / 32;
  constexpr int STEPS = PRE_ROPE ? 2 : D / 16;  // the decode matrix keeps a warp busy enough
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, eighth = lane >> 2;
  const int split = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
  const int stored = encoded_rows(a.geometry, a.past_len[b]);
  const int used = min((stored + WARPS * ROWS - 1) / (WARPS * ROWS), a.splits);
  if (split >= max(used, 1)) return;
  if (used == 0) {
    wait_for_previous_kernel();
    merge_last<T, D>(a.merge, b, h, 0);
    return;
  }
  const int piece = ((stored + used - 1) / used + ROWS - 1) / ROWS * ROWS;
  const int start = min(split * piece, stored), stop = min(start + piece, stored);

  KVPACK_DYNAMIC_SHARED(memory);
  T *query = reinterpret_cast<T *>(memory);
  float *mean = reinterpret_cast<float *>(memory + Fixed<D>::QUERY), *constant = mean + D;
  float2 *masses = reinterpret_cast<float2 *>(constant + 16);
  uint32_t *turns = reinterpret_cast<uint32_t *>(masses + WARPS * 16);
  T *tile = reinterpret_cast<T *>(memory + a.tiles_at) + warp * 16 * STRIDE;

  // Tables, before anything of this step is read.
  const int set = h % a.k.sets;
  const T *k_table = static_cast<const T *>(a.k.table) + int64_t(set) * a.k.lookups * a.k.entries * a.k.width;
  const T *v_table = static_cast<const T *>(a.v.table) + int64_t(set) * a.v.lookups * a.v.entries * a.v.width;
  const uint4 *decode = reinterpret_cast<const uint4 *>(a.k.decode + int64_t(set) * D * D / 2);
  copy_shared(memory + a.k_at, k_table, a.held_k * a.k.entries * a.k.width * 2);
  copy_shared(memory + a.v_at, v_table, a.held_v * a.v.entries * a.v.width * 2);
  if (PRE_ROPE && a.decode_shared) {
    copy_shared(memory + a.decode_at, decode, D * D * 2);
    decode = reinterpret_cast<const uint4 *>(memory + a.decode_at);
  }
  copy_async_commit();
  unsigned char *buffer = memory + a.codes_at + warp * (a.k_buffer + a.v_buffer);
  const int64_t row_head = int64_t(b) * a.heads + h;
  void *k_buffer = a.codes_shared ? buffer : nullptr, *v_buffer = a.codes_shared ? buffer + a.k_buffer : nullptr;
  const CodeStream k_codes = stream_of(a.k, gridDim.z, a.heads, row_head, a.code_rows, k_buffer);
  const CodeStream v_codes = stream_of(a.v, gridDim.z, a.heads, row_head, a.code_rows, v_buffer);
  k_codes.fetch(start + warp * ROWS, min(stop - start - warp * ROWS, ROWS));
  v_codes.fetch(start + warp * ROWS, min(stop - start - warp * ROWS, ROWS));
  const T *k_held = reinterpret_cast<const T *>(memory + a.k_at);
  const T *v_held = reinterpret_cast<const T *>(memory + a.v_at);
  const int half = a.rope.half;
  if constexpr (PRE_ROPE) {
    for (int n = threadIdx.x; n < D; n += THREADS) mean[n] = a.k.mean[h * D + paired_column(n, half)];
    // The tables may hold a scaled rotation: row 0 is the scale, taken out of the keys' part.
    for (int n = threadIdx.x; n < ROWS * D / 2; n += THREADS) {
      const int row = n / (D / 2), pair = n % (D / 2);
      float cos = 1, sin = 0;
      if (pair < half) {
        const int64_t at = rope_row(a.rope, row) + pair;
        cos = a.rope.cos[at] / a.rope.cos[pair], sin = a.rope.sin[at] / a.rope.cos[pair];
      }
      turns[row * TURN_STRIDE<D> + pair] = pack2<half_t>(cos, sin);
    }
  }
  for (int n = threadIdx.x; n < 16 * STRIDE; n += THREADS) query[n] = from_float<T>(0);
  __syncthreads();
  wait_for_previous_kernel();

  const T *asked = static_cast<const T *>(a.merge.decode.query) + int64_t(b * a.heads + h) * a.group * D;
  for (int n = threadIdx.x; n < a.group * D; n += THREADS) {
    const int head = n / D, column = n % D;
    if constexpr (PRE_ROPE) {
      query[head * STRIDE + column] = asked[head * D + paired_column(column, half)];
    } else {
      const float *matrix = a.query_matrix + int64_t(set) * D * D + column;
      float sum = 0;
#pragma unroll 8
      for (int k = 0; k < D; ++k) sum += to_float(asked[head * D + k]) * matrix[k * D];
      query[head * STRIDE + column] = from_float<T>(sum);
    }
  }
  if (!PRE_ROPE)
    for (int head = warp; head < 16; head += WARPS) {
      float sum = 0;
      if (head < a.group)
        for (int k = lane; k < D; k += 32) sum += to_float(asked[head * D + k]) * a.k.mean[h * D + k];
#pragma unroll
      for (int n = 16; n; n >>= 1) sum += __shfl_xor_sync(~0u, sum, n);
      if (lane == 0) constant[head] = sum;
    }
  copy_async_wait<0>();
  __syncthreads();

  float out[D / 16][HEADS][4] = {};  // [column, head]
  float top[HEADS], sum[HEADS];      // of head `eighth` (+ 8); the sum of this lane's rows
#pragma unroll
  for (int n = 0; n < HEADS; ++n) top[n] = NOTHING, sum[n] = 0;

  for (int row = start + warp * ROWS; row < stop; row += WARPS * ROWS) {
    const int next = row + WARPS * ROWS, next_rows = min(stop - next, ROWS);
    float cos[PAIRS], sin[PAIRS];  // of this lane's pairs at `row`, for the query
    if (PRE_ROPE && half) {
      const int64_t at = rope_row(a.rope, a.geometry.sinks + row);
#pragma unroll
      for (int n = 0; n < PAIRS; ++n) {
        const bool real = lane + 32 * n < half;
        cos[n] = real ? a.rope.cos[at + lane + 32 * n] : 1, sin[n] = real ? a.rope.sin[at + lane + 32 * n] : 0;
      }
    }
    copy_async_wait<1>();  // the keys' codes are there, the values' may be on their way
    __syncwarp();
    uint32_t keys[TILES][D / 16][4];
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      const int past = min(16 * m, stop - 1 - row);
      rebuild_rows<T, D>(tile, a.k, k_table, k_held, a.held_k, k_codes.at(row, past), min(stop - row - past, 16));
      __syncwarp();
      load_rows<T, D>(keys[m], tile);
      __syncwarp();
    }
    k_codes.fetch(next, next_rows);

    // Keys at first + r are turned by r, the query back by first: the product is the same and the turns are few. Rows
    // of the tile past the last head hold whatever they held: nothing reads what comes of them.
    const T *turned_query = query;
    if (PRE_ROPE && half) {
#pragma unroll
      for (int n = 0; n < PAIRS; ++n) {
        const int pair = lane + 32 * n;
        if (pair >= D / 2) break;
#pragma unroll 4
        for (int head = 0; head < a.group; ++head) {
          const float2 q = unpack2<T>(reinterpret_cast<const uint32_t *>(query + head * STRIDE)[pair]);
          reinterpret_cast<uint32_t *>(tile + head * STRIDE)[pair] =
              pack2<T>(q.x * cos[n] + q.y * sin[n], q.y * cos[n] - q.x * sin[n]);
        }
      }
      __syncwarp();
      turned_query = tile;
    }
    const T *query_at = turned_query + (HEADS == 2 ? lane % 16 : lane % 8) * STRIDE + lane / (8 * HEADS) % 2 * 8;

    float scores[2 * TILES][4] = {};  // [head, row]
#pragma unroll STEPS
    for (int t = 0; t < D / 16; ++t) {
      uint32_t q[4] = {};
      if constexpr (HEADS == 2) {
        ldmatrix<4, false>(q, query_at + 16 * t);
      } else {
        uint32_t pair[2];
        ldmatrix<2, false>(pair, query_at + 16 * t);
        q[0] = pair[0], q[2] = pair[1];
      }
      if constexpr (PRE_ROPE) {
        float c[TILES][2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float2 at = *reinterpret_cast<const float2 *>(mean + 16 * t + 8 * n + 2 * quad);
#pragma unroll
          for (int m = 0; m < TILES; ++m) c[m][n][0] = c[m][n][2] = at.x, c[m][n][1] = c[m][n][3] = at.y;
        }
        decode_columns<T, D, TILES>(c, keys, decode, t);
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            uint32_t key[2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const int pair = 8 * t + 4 * n + quad;
              const float2 turn = unpack2<half_t>(turns[(16 * m + 8 * r + eighth) * TURN_STRIDE<D> + pair]);
              const float x = c[m][n][2 * r], y = c[m][n][2 * r + 1];
              key[n] = pack2<T>(x * turn.x - y * turn.y, y * turn.x + x * turn.y);
            }
            mma_16816<T>(scores[2 * m + r], q, key);
          }
      } else {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const uint32_t key[2] = {keys[m][t][r], keys[m][t][2 + r]};
            mma_16816<T>(scores[2 * m + r], q, key);
          }
      }
    }
    __syncwarp();  // the tile's query is read

    uint32_t weights[TILES][HEADS][2];
    float keep[HEADS];
    bool moved = false;
#pragma unroll
    for (int hn = 0; hn < HEADS; ++hn) {
      const float offset = PRE_ROPE ? 0 : constant[eighth + 8 * hn];
      float most = NOTHING;
#pragma unroll
      for (int n = 0; n < 2 * TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float s = (scores[n][2 * hn + e] + offset) * a.scale;
          if (a.softcap > 0) s = a.softcap * tanh_fast(s / a.softcap);
          s = row + 8 * n + 2 * quad + e < stop ? s * LOG2E : NOTHING;
          scores[n][2 * hn + e] = s;
          most = fmaxf(most, s);
        }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float higher = fmaxf(top[hn], most);
      keep[hn] = exp2_fast(top[hn] - higher);
      moved |= higher > top[hn];
      top[hn] = higher;
      sum[hn] *= keep[hn];
#pragma unroll
      for (int n = 0; n < 2 * TILES; ++n) {
        const float low = exp2_fast(scores[n][2 * hn] - higher), high = exp2_fast(scores[n][2 * hn + 1] - higher);
        sum[hn] += low + high;
        weights[n / 2][hn][n % 2] = pack2<T>(low, high);
      }
    }
    if (__any_sync(~0u, moved)) {
#pragma unroll
      for (int hn = 0; hn < HEADS; ++hn) {
        const float even = __shfl_sync(~0u, keep[hn], 8 * quad), odd = __shfl_sync(~0u, keep[hn], 8 * quad + 4);
#pragma unroll
        for (int c = 0; c < D / 16; ++c) {
          out[c][hn][0] *= even, out[c][hn][1] *= odd;
          out[c][hn][2] *= even, out[c][hn][3] *= odd;
        }
      }
    }

    copy_async_wait<1>();  // the values' codes
    __syncwarp();
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      const int past = min(16 * m, stop - 1 - row);
      rebuild_rows<T, D>(tile, a.v, v_table, v_held, a.held_v, v_codes.at(row, past), min(stop - row - past, 16));
      __syncwarp();
      const T *at = tile + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
      for (int c = 0; c < D / 16; ++c) {
        uint32_t values[4];
        ldmatrix<4, true>(values, at + 16 * c);
#pragma unroll
        for (int hn = 0; hn < HEADS; ++hn) mma_16816<T>(out[c][hn], values, weights[m][hn]);
      }
      __syncwarp();
    }
    v_codes.fetch(next, next_rows);
  }
  copy_async_wait<0>();

  // The warps' parts, one after the other, on the tables' place.
#pragma unroll
  for (int hn = 0; hn < HEADS; ++hn) {
    sum[hn] += __shfl_xor_sync(~0u, sum[hn], 1);
    sum[hn] += __shfl_xor_sync(~0u, sum[hn], 2);
    if (quad == 0) masses[warp * 16 + eighth + 8 * hn] = make_float2(top[hn], sum[hn]);
  }
  __syncthreads();
  float *total = reinterpret_cast<float *>(memory + Fixed<D>::BYTES);  // [8 * HEADS][D]
  float factor[HEADS][2];
#pragma unroll
  for (int hn = 0; hn < HEADS; ++hn)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int head = 8 * hn + 2 * quad + e;
      float most = NOTHING;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) most = fmaxf(most, masses[w * 16 + head].x);
      factor[hn][e] = exp2_fast(masses[warp * 16 + head].x - most);
    }
  for (int w = 0; w < WARPS; ++w) {
    if (w == warp) {
#pragma unroll
      for (int c = 0; c < D / 16; ++c)
#pragma unroll
        for (int hn = 0; hn < HEADS; ++hn)
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            float *at = total + (8 * hn + 2 * quad + n % 2) * D + 16 * c + 8 * (n / 2) + eighth;
            const float part = out[c][hn][n] * factor[hn][n % 2];
            *at = w ? *at + part : part;
          }
    }
    __syncthreads();
  }
  const int64_t slot = int64_t(b * a.heads + h) * a.group * (a.splits + 1) + split;
  for (int n = threadIdx.x; n < a.group * D; n += THREADS)
    a.merge.decode.partial[(slot + int64_t(n / D) * (a.splits + 1)) * D + n % D] = total[n];
  for (int head = threadIdx.x; head < a.group; head += THREADS) {
    float most = NOTHING, mass = 0;
    for (int w = 0; w < WARPS; ++w) most = fmaxf(most, masses[w * 16 + head].x);
    for (int w = 0; w < WARPS; ++w) mass += exp2_fast(masses[w * 16 + head].x - most) * masses[w * 16 + head].y;
    a.merge.decode.mass[slot + int64_t(head) * (a.splits + 1)] = make_float2(most, mass);
  }
  merge_last<T, D>(a.merge, b, h, used);
}

// Gives shared memory to what is read most: the decode matrix, the tables of the first stages, the codes of a tile, and
// then the other tables stage by stage.
template <int D> unsigned place(DecodeArguments &a, bool pre_rope) {
  const unsigned limit = unsigned(shared_limit()) - 64, tiles = WARPS * 16 * (D + 8) * 2;
  const int rows = 16 * TILES_OF<D>;
  unsigned used = Fixed<D>::BYTES + tiles, bytes[2] = {};
  auto take = [&](unsigned more) {
    const bool fits = used + (more + 15) / 16 * 16 <= limit;
    if (fits) used += (more + 15) / 16 * 16;
    return fits;
  };
  a.tiles_at = Fixed<D>::BYTES, a.decode_at = used;
  a.decode_shared = pre_rope && take(D * D * 2);
  const unsigned tables = used;
  bool open[2] = {true, true};
  int *held[2] = {&a.held_k, &a.held_v};
  *held[0] = *held[1] = 0;
  a.k_buffer = (a.k.lookups * rows + 47) / 16 * 16, a.v_buffer = (a.v.lookups * rows + 47) / 16 * 16;
  for (int stage = 0; stage < KVPACK_MAX_STAGES; ++stage) {
    for (int n = 0; n < 2; ++n) {
      const VqSide &side = n ? a.v : a.k;
      open[n] = open[n] && stage < side.stage_count && side.width % 4 == 0;
      const unsigned more = open[n] ? side.stages[stage] * side.entries * side.width * 2 : 0;
      open[n] = open[n] && take(more);
      if (open[n]) bytes[n] += more, *held[n] += side.stages[stage];
    }
    if (stage == 0) a.codes_shared = take(WARPS * (a.k_buffer + a.v_buffer));
  }
  a.codes_at = tables;
  a.k_at = tables + (a.codes_shared ? WARPS * (a.k_buffer + a.v_buffer) : 0);
  a.v_at = (a.k_at + bytes[0] + 15) / 16 * 16;
  const unsigned merged = Fixed<D>::BYTES + 16 * D * 4;
  return used > merged ? used : merged;
}

}  // namespace

int vqkv_splits(const kvpack_layer &layer, const kvpack_vqkv &vq) {
  const int wanted = 132 / layer.num_kv_heads, most = (vq.code_rows + 255) / 256;  // one wave of the largest GPUs
  return max(1, min(max(wanted, 4), min(most, 64)));
}

int vqkv_decode(const kvpack_layer &layer, const kvpack_step &step, const kvpack_vqkv &vq, const VqTables &tables,
                const Decode &decode) {
  const int heads = layer.num_kv_heads, group = layer.num_heads / heads;
  DecodeArguments a = {};
  a.k = tables.k, a.v = tables.v;
  a.merge = merge_of(layer, step, decode, vq.v_decode, vq.sets, vq.v_mean);
  a.rope = rope_of(layer, step), a.geometry = vq.geometry, a.past_len = step.past_len;
  a.query_matrix = tables.query;
  a.heads = heads, a.group = group, a.splits = decode.splits, a.code_rows = vq.code_rows;
  a.scale = layer.scale, a.softcap = layer.softcap;
  const int error = choose(layer, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    constexpr int D = decltype(size)::value;
    const unsigned shared = place<D>(a, vq.pre_rope);
    auto kernel = vq.pre_rope ? (group > 8 ? decode_kernel<T, D, true, 2> : decode_kernel<T, D, true, 1>)
                              : (group > 8 ? decode_kernel<T, D, false, 2> : decode_kernel<T, D, false, 1>);
    return launch_early(kernel, dim3(decode.splits, heads, step.batch), dim3(THREADS), shared, step.stream, a);
  });
  return launched(error, "attention over codes");
}

}  // namespace kvpack
