// A decode step over integer codes: warps take tiles of rows to tensor cores, each on its own. Keys, queries and
// weights are in half precision whatever the layer's type.
//
// WHOLE: a row has one scale. Codes are multiplied as whole numbers and scales applied to what comes out: to a key once
// it is rotated, to the weight of a value. Otherwise numbers are scaled first. Keys before RoPE are multiplied by the
// Hadamard matrix of 16 columns with tensor cores and mixed across blocks of 16 columns by sums and differences; for
// keys after RoPE the query is rotated instead. Values stay in the rotated space to the end.
#include "intkv_tile.cuh"

namespace kvpack {
namespace {

constexpr int WARPS = 4, THREADS = 32 * WARPS, HEADS = 8;  // query heads taken at once
template <int D> constexpr int BLOCKS_PER_SM = D > 128 ? 2 : D > 64 ? 3 : 4;
template <int D> constexpr int TURN_STRIDE = D / 2 + 4;  // of turns, words: two cosines and two sines by turns

struct DecodeArguments {
  IntSide k, v;
  Merge merge;
  Rope rope;
  kvpack_geometry geometry;
  const int32_t *past_len;
  int heads, group, splits, code_rows, rotation;
  float scale, softcap;
  unsigned raw_k, raw_v, warp_bytes;  // of each warp's part of shared memory: the codes as stored, and all
};

// Shared memory, in bytes: of the block, then of each warp.
template <int D, bool PRE_ROPE, bool WHOLE> struct Layout {
  static constexpr unsigned QUERY = 0, CENTER = QUERY + HEADS * (D + 8) * 2, CONSTANT = CENTER + D * 2;
  static constexpr unsigned MASS = CONSTANT + HEADS * 8, MIXER = MASS + WARPS * HEADS * 16, TURNS = MIXER + 32 * 16;
  static constexpr unsigned FREE = TURNS + (PRE_ROPE ? ROWS<D> * TURN_STRIDE<D> * 4 : 0);
  static constexpr unsigned SUMS = HEADS * D * 4, TILE = ROWS<D> * BYTE_STRIDE<D>;
  // The sums of the warps lie on the first warp's tile if they fit.
  static constexpr unsigned TOTAL = FREE, WARP = FREE + (SUMS <= TILE ? 0 : SUMS);
  static constexpr unsigned TURNED = TILE, SCALES = TURNED + (PRE_ROPE ? HEADS * (D + 8) * 2 : 0);
  static constexpr unsigned RAW = SCALES + (WHOLE ? 2 * 8 : SCALE_STRIDE<D> * 8) * ROWS<D>;
  static_assert(WARP % 16 == 0 && TURNED % 16 == 0 && SCALES % 16 == 0 && RAW % 16 == 0);
};

template <class T, int D, bool PRE_ROPE, bool WHOLE>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM<D>) decode_kernel(DecodeArguments a) {
  using L = Layout<D, PRE_ROPE, WHOLE>;
  constexpr int STRIDE = D + 8, SIZE = HADAMARD<D>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, eighth = lane >> 2;
  const int split = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
  const int stored = encoded_rows(a.geometry, a.past_len[b]);
  const int used = min((stored + WARPS * ROWS<D> - 1) / (WARPS * ROWS<D>), a.splits);
  if (split >= used) {
    wait_for_previous_kernel();
    if (split == 0) merge_last<T, D>(a.merge, b, h, 0);
    return;
  }
  // Pieces are of whole tiles; the last ones may be empty.
  const int piece = ((stored + used - 1) / used + ROWS<D> - 1) / ROWS<D> * ROWS<D>;
  const int start = min(split * piece, stored), stop = min(start + piece, stored);

  KVPACK_DYNAMIC_SHARED(memory);
  half_t *query = reinterpret_cast<half_t *>(memory + L::QUERY);
  uint32_t *center = reinterpret_cast<uint32_t *>(memory + L::CENTER);  // pairs
  float2 *constant = reinterpret_cast<float2 *>(memory + L::CONSTANT);
  float4 *masses = reinterpret_cast<float4 *>(memory + L::MASS);
  float *total = reinterpret_cast<float *>(memory + L::TOTAL);
  uint4 *mixer = reinterpret_cast<uint4 *>(memory + L::MIXER);
  uint32_t *turns = reinterpret_cast<uint32_t *>(memory + L::TURNS);
  unsigned char *own = memory + L::WARP + warp * a.warp_bytes, *tile = own;
  half_t *turned_query = reinterpret_cast<half_t *>(own + L::TURNED);
  float2 *row_scales = reinterpret_cast<float2 *>(own + L::SCALES);  // WHOLE: of keys, then of values
  uint2 *pair_scales = reinterpret_cast<uint2 *>(own + L::SCALES);
  unsigned char *raw_k = own + L::RAW, *raw_v = raw_k + a.raw_k;

  const int head = b * a.heads + h;
  // Weights of values times the range of the codes, so that they do not vanish in half precision.
  const float lift = WHOLE ? float(1 << a.v.bits) : 1;
  auto copy_codes = [&](unsigned char *to, const IntSide &side, int row) {
    const int8_t *codes = side.codes + (int64_t(head) * a.code_rows + row) * side.row_bytes;
    copy_raw(to, codes, max(min(stop - row, ROWS<D>), 0) * side.row_bytes, side.row_bytes % 16 == 0);
  };
  float next[2][2];  // WHOLE: scale and zero of keys and of values in row `lane` of the next tiles
  auto fetch_scales = [&](int row) {
    const bool real = lane < ROWS<D> && row + lane < stop;
    const int64_t at = int64_t(head) * a.code_rows + row + lane;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const IntSide &side = n ? a.v : a.k;
      next[n][0] = real ? to_float(static_cast<const T *>(side.scale)[at]) : 0;
      next[n][1] = real ? to_float(static_cast<const T *>(side.zero)[at]) : 0;
    }
  };
  auto place_scales = [&]() {
    if (lane >= ROWS<D>) return;
    row_scales[lane] = make_float2(next[0][0], middle(next[0][0], next[0][1], a.k.bits));
    row_scales[ROWS<D> + lane] = make_float2(next[1][0] * lift, middle(next[1][0], next[1][1], a.v.bits));
  };
  const int first_row = start + warp * ROWS<D>;
  copy_codes(raw_k, a.k, first_row);
  copy_codes(raw_v, a.v, first_row);
  if constexpr (WHOLE) {
    fetch_scales(first_row);
    place_scales();
  }

  constexpr int half = PRE_ROPE ? D / 2 : 0;
  if constexpr (PRE_ROPE) {
    for (int n = threadIdx.x; n < half; n += THREADS) {
      const float *from = a.k.center + h * D + 2 * n;
      center[n] = a.k.center ? pack2<half_t>(from[0], from[1]) : 0;
    }
    // The tables may hold a scaled rotation: row 0 is the scale, taken out of the keys' part.
    for (int n = threadIdx.x; n < ROWS<D> * D / 4; n += THREADS) {
      const int row = n / (D / 4), pair = n % (D / 4) * 2;
      const int64_t at = rope_row(a.rope, row) + pair;
      const float one = 1 / a.rope.cos[pair], two = 1 / a.rope.cos[pair + 1];
      uint32_t *to = turns + row * TURN_STRIDE<D> + pair;
      to[0] = pack2<half_t>(a.rope.cos[at] * one, a.rope.cos[at + 1] * two);
      to[1] = pack2<half_t>(a.rope.sin[at] * one, a.rope.sin[at + 1] * two);
    }
    for (int n = lane; n < HEADS * (D + 8); n += 32) turned_query[n] = from_float<half_t>(0);
    if (warp == 0) mixer[lane] = mixer_of(a.rotation);
  }
  wait_for_previous_kernel();

  for (int head0 = 0; head0 < a.group; head0 += HEADS) {
    const int count = min(a.group - head0, HEADS);
    const T *asked = static_cast<const T *>(a.merge.decode.query) + int64_t(head * a.group + head0) * D;
    for (int m = warp; m < HEADS; m += WARPS) {
      float q[D / 32];
#pragma unroll
      for (int n = 0; n < D / 32; ++n) q[n] = m < count ? to_float(asked[m * D + lane + 32 * n]) : 0;
      float offset = 0, sum = 0;
      if (!PRE_ROPE) {
        if (a.k.center)
#pragma unroll
          for (int n = 0; n < D / 32; ++n) offset += q[n] * a.k.center[h * D + lane + 32 * n];
        if (a.rotation) hadamard_row<D>(q);
#pragma unroll
        for (int n = 0; n < D / 32; ++n) sum += q[n];
#pragma unroll
        for (int n = 16; n; n >>= 1) {
          offset += __shfl_xor_sync(~0u, offset, n);
          sum += __shfl_xor_sync(~0u, sum, n);
        }
        if (lane == 0) constant[m] = make_float2(offset, sum);
      }
#pragma unroll
      for (int n = 0; n < D / 32; ++n) {
        const int column = lane + 32 * n, in = column % 16;  // in the order of load_keys, unless it is undone there
        const int place = PRE_ROPE ? column : column - in + in % 2 * 8 + in / 4 * 2 + in / 2 % 2;
        query[m * STRIDE + place] = from_float<half_t>(q[n]);
      }
    }
    __syncthreads();

    float out[D / 16][4] = {};  // [column, head]
    float top = NOTHING, sum = 0, middles = 0;  // of head `eighth`: the sums of this lane's rows
    for (int row = first_row; row < stop; row += WARPS * ROWS<D>) {
      const int after = row + WARPS * ROWS<D>, following = after < stop || head0 + HEADS >= a.group ? after : first_row;
      // Keys at row + r are turned by r, the query back by row: the product is the same and the turns are few.
      float2 turn[PRE_ROPE ? (D / 2 + 31) / 32 : 1];
      if constexpr (PRE_ROPE) {
        const int64_t at = rope_row(a.rope, a.geometry.sinks + row) + lane;
#pragma unroll
        for (int n = 0; 32 * n < half; ++n)
          if (lane + 32 * n < half) turn[n] = make_float2(a.rope.cos[at + 32 * n], a.rope.sin[at + 32 * n]);
      }
      const half_t *query_at = (PRE_ROPE ? turned_query : query) + lane % 8 * STRIDE + lane / 8 % 2 * 8;
      auto load_query = [&](uint32_t (&q)[4], int t) {
        uint32_t pair[2];
        ldmatrix<2, false>(pair, query_at + 16 * t);
        q[0] = pair[0], q[2] = pair[1], q[1] = q[3] = 0;
      };

      copy_async_wait<1>();
      __syncwarp();
      spread<D>(tile, raw_k, a.k.bits);
      if constexpr (PRE_ROPE)
#pragma unroll
        for (int n = 0; 32 * n < half; ++n)
          if (lane + 32 * n < half)
            for (int m = 0; m < count; ++m) {
              const int at = m * STRIDE + lane + 32 * n;
              const float x = to_float(query[at]), y = to_float(query[at + half]);
              turned_query[at] = from_float<half_t>(x * turn[n].x + y * turn[n].y);
              turned_query[at + half] = from_float<half_t>(y * turn[n].x - x * turn[n].y);
            }
      if (!WHOLE) {
        load_key_scales<T, D>(pair_scales, a.k, head, row, stop);
        fetch_pair_scales<T, D>(a.k, head, following, stop);
        fetch_pair_scales<T, D>(a.v, head, following, stop);
      }
      __syncwarp();
      copy_codes(raw_k, a.k, following);
      float scores[TILES<D>][2][4] = {};  // [head, row] of each 8 rows
#pragma unroll
      for (int m = 0; m < TILES<D>; ++m) {
        if (row + 16 * m >= stop) continue;
        if constexpr (PRE_ROPE) {
          uint32_t c[D / 16][2][2] = {};  // [columns][columns][row]: pairs
          const uint4 words = mixer[lane];
          const uint32_t mix[2][2] = {{words.x, words.y}, {words.z, words.w}};
#pragma unroll
          for (int t = 0; t < D / 32; ++t) {
            uint32_t keys[2][4];
            load_keys<D, WHOLE>(keys, tile, pair_scales, a.k.tokens > 1, m, t);
#pragma unroll
            for (int two = 0; two < 2; ++two)
#pragma unroll
              for (int n = 0; n < 2; ++n) mma_16816_half(c[2 * t + two][n], keys[two], mix[n]);
          }
          if (a.rotation) mix_blocks<D>(c);
          uint32_t factor[2], raise[2];  // raise: the middle, the same in every column, lands in the first of each SIZE
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float2 s = WHOLE ? row_scales[16 * m + 8 * r + eighth] : make_float2(1, 0);
            factor[r] = both(a.rotation ? s.x * (HADAMARD_SCALE<D> * MIX) : s.x);
            raise[r] = pack2<half_t>(WHOLE && quad == 0 ? s.y / HADAMARD_SCALE<D> : 0, 0);
          }
#pragma unroll
          for (int t = 0; t < D / 32; ++t) {
            uint32_t keys[2][2][2];  // [first or second of a pair][row][n]
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const int column = 16 * t + 8 * n;
              const uint32_t low = center[column / 2 + quad], high = center[(column + half) / 2 + quad];
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                const uint2 by = *reinterpret_cast<const uint2 *>(
                    turns + (16 * m + 8 * r + eighth) * TURN_STRIDE<D> + column + 2 * quad);
                uint32_t x = fma2<half_t>(c[t][n][r], factor[r], low);
                uint32_t y = fma2<half_t>(c[t + D / 32][n][r], factor[r], high);
                if (WHOLE && column % SIZE == 0) x = sum2(x, raise[r]);
                if (WHOLE && (column + half) % SIZE == 0) y = sum2(y, raise[r]);
                keys[0][r][n] = fma2<half_t>(y, by.y ^ 0x80008000u, mul2<half_t>(x, by.x));
                keys[1][r][n] = fma2<half_t>(x, by.y, mul2<half_t>(y, by.x));
              }
            }
#pragma unroll
            for (int part = 0; part < 2; ++part) {
              uint32_t q[4];
              load_query(q, t + part * (D / 32));
#pragma unroll
              for (int r = 0; r < 2; ++r) mma_16816<half_t>(scores[m][r], q, keys[part][r]);
            }
          }
        } else {
#pragma unroll
          for (int t = 0; t < D / 32; ++t) {
            uint32_t keys[2][4];
            load_keys<D, WHOLE>(keys, tile, pair_scales, a.k.tokens > 1, m, t);
#pragma unroll
            for (int two = 0; two < 2; ++two) {
              uint32_t q[4];
              load_query(q, 2 * t + two);
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                const uint32_t key[2] = {keys[two][r], keys[two][2 + r]};
                mma_16816<half_t>(scores[m][r], q, key);
              }
            }
          }
        }
      }

      // Weights, the sums so far rescaled to the new top.
      float highest = top;
      const float2 more = PRE_ROPE ? make_float2(0, 0) : constant[eighth];
#pragma unroll
      for (int n = 0; n < 4 * TILES<D>; ++n) {
        const int in = 8 * (n >> 1) + 2 * quad + (n & 1);
        float &s = scores[n >> 2][n >> 1 & 1][n & 1];
        if (!PRE_ROPE && WHOLE) s = s * row_scales[in].x + row_scales[in].y * more.y;
        s = (s + more.x) * a.scale;
        if (a.softcap > 0) s = a.softcap * tanh_fast(s / a.softcap);
        s = row + in < stop ? s * LOG2E : NOTHING;
        highest = fmaxf(highest, s);
      }
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      if (__any_sync(~0u, highest > top)) {
        const float keep = exp2_fast(top - highest);
        const float even = __shfl_sync(~0u, keep, 8 * quad), odd = __shfl_sync(~0u, keep, 8 * quad + 4);
#pragma unroll
        for (int t = 0; t < D / 16; ++t) {
          out[t][0] *= even, out[t][1] *= odd;
          out[t][2] *= even, out[t][3] *= odd;
        }
        top = highest, sum *= keep, middles *= keep;
      }
      uint32_t weights[TILES<D>][2];
#pragma unroll
      for (int n = 0; n < 2 * TILES<D>; ++n) {
        float weight[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          weight[e] = exp2_fast(scores[n >> 1][n & 1][e] - top);
          sum += weight[e];
          if constexpr (WHOLE) {
            const float2 s = row_scales[ROWS<D> + 8 * n + 2 * quad + e];
            middles += weight[e] * s.y;
            weight[e] *= s.x;
          }
        }
        weights[n >> 1][n & 1] = pack2<half_t>(weight[0], weight[1]);
      }

      if constexpr (WHOLE) fetch_scales(following);
      copy_async_wait<1>();
      __syncwarp();  // the keys' tile is read, too
      spread<D>(tile, raw_v, a.v.bits);
      if (!WHOLE) load_value_scales<T, D>(pair_scales, a.v, head, row, stop);
      __syncwarp();
      copy_codes(raw_v, a.v, following);
#pragma unroll
      for (int m = 0; m < TILES<D>; ++m) {
        if (row + 16 * m >= stop) continue;
#pragma unroll
        for (int t = 0; t < D / 32; ++t) {  // of a pair of bytes of two rows each: columns 2 eighth and 2 eighth + 1
          uint32_t words[4];
          ldmatrix<4, true>(words, tile + (16 * m + lane % 16) * BYTE_STRIDE<D> + 16 * (2 * t + lane / 16));
#pragma unroll
          for (int two = 0; two < 2; ++two) {
            uint32_t values[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              values[n] = whole_pair(words[2 * two + n / 2] >> (8 * (n & 1)));
              if (!WHOLE) {
                const uint2 s = pair_scales[m * (D / 2) + (2 * t + two) * 8 + n / 2 * 4 + quad];
                values[n] = fma2<half_t>(values[n], s.x, s.y);
              }
            }
            mma_16816<half_t>(out[2 * t + two], values, weights[m]);
          }
        }
      }
      if constexpr (WHOLE) place_scales();
      __syncwarp();
    }

    // The warps' sums, one after the other.
#pragma unroll
    for (int n = 1; n < 4; n <<= 1) {
      sum += __shfl_xor_sync(~0u, sum, n);
      middles += __shfl_xor_sync(~0u, middles, n);
    }
    if (quad == 0) masses[warp * HEADS + eighth] = make_float4(top, sum, middles, 0);
    __syncthreads();
    float most[2] = {NOTHING, NOTHING};  // of heads 2 quad and 2 quad + 1, which `out` has
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
#pragma unroll
      for (int e = 0; e < 2; ++e) most[e] = fmaxf(most[e], masses[w * HEADS + 2 * quad + e].x);
    float factor[2], raise[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float4 mine = masses[warp * HEADS + 2 * quad + e];
      factor[e] = exp2_fast(mine.x - most[e]) / lift;
      raise[e] = WHOLE ? mine.z * lift : 0;
    }
    for (int w = 0; w < WARPS; ++w) {
      if (w == warp)
#pragma unroll
        for (int t = 0; t < D / 16; ++t)
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            float &to = total[(2 * quad + n % 2) * D + 16 * t + 2 * eighth + n / 2];
            const float part = (out[t][n] + raise[n % 2]) * factor[n % 2];
            to = w ? to + part : part;
          }
      __syncthreads();
    }
    for (int m = warp; m < count; m += WARPS) {
      float y[D / 32];
#pragma unroll
      for (int n = 0; n < D / 32; ++n) y[n] = total[m * D + lane + 32 * n];
      if (a.rotation) hadamard_row<D>(y);
      const int64_t slot = int64_t(head * a.group + head0 + m) * (a.splits + 1) + split;
#pragma unroll
      for (int n = 0; n < D / 32; ++n) a.merge.decode.partial[slot * D + lane + 32 * n] = y[n];
      float highest = NOTHING, mass = 0;
      for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, masses[w * HEADS + m].x);
      for (int w = 0; w < WARPS; ++w) mass += exp2_fast(masses[w * HEADS + m].x - highest) * masses[w * HEADS + m].y;
      if (lane == 0) a.merge.decode.mass[slot] = make_float2(highest, mass);
    }
    __syncthreads();
  }
  copy_async_wait<0>();
  merge_last<T, D>(a.merge, b, h, used);
}

template <class T, int D, bool PRE_ROPE, bool WHOLE>
int start(DecodeArguments a, int splits, int batch, void *stream) {
  using L = Layout<D, PRE_ROPE, WHOLE>;
  a.raw_k = ROWS<D> * a.k.row_bytes, a.raw_v = ROWS<D> * a.v.row_bytes;
  a.warp_bytes = L::RAW + a.raw_k + a.raw_v;
  return launch_early(decode_kernel<T, D, PRE_ROPE, WHOLE>, dim3(splits, a.heads, batch), dim3(THREADS),
                      L::WARP + WARPS * a.warp_bytes, stream, a);
}

}  // namespace

int intkv_splits(const kvpack_layer &layer, const kvpack_intkv &kv) {
  const int dim = layer.head_dim;
  const int blocks = dim > 128 ? BLOCKS_PER_SM<256> : dim > 64 ? BLOCKS_PER_SM<128> : BLOCKS_PER_SM<64>;
  const int wanted = 132 * blocks / layer.num_kv_heads;  // one wave of the largest GPUs
  const int most = (kv.code_rows + 127) / 128;
  return max(1, min(min(max(wanted, 4), 128), most));
}

int intkv_decode(const kvpack_layer &layer, const kvpack_step &step, const kvpack_intkv &kv, const Decode &decode) {
  DecodeArguments a = {};
  a.k = intkv_side(layer, kv, false), a.v = intkv_side(layer, kv, true);
  a.merge = merge_of(layer, step, decode, nullptr, 1, a.v.center);
  a.rope = rope_of(layer, step), a.geometry = kv.geometry, a.past_len = step.past_len;
  a.heads = layer.num_kv_heads, a.group = layer.num_heads / a.heads, a.splits = decode.splits;
  a.code_rows = kv.code_rows, a.rotation = kv.rotation, a.scale = layer.scale, a.softcap = layer.softcap;
  const bool turned = kv.pre_rope && layer.rotary_dim;  // without RoPE both key spaces are one
  const bool whole = !kv.k_channel && !kv.group && (!turned || kv.rotation);
  const int error = choose(layer, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    constexpr int D = decltype(size)::value;
    auto kernel = turned ? (whole ? start<T, D, true, true> : start<T, D, true, false>)
                         : (whole ? start<T, D, false, true> : start<T, D, false, false>);
    return kernel(a, decode.splits, step.batch, step.stream);
  });
  return launched(error, "attention over integer codes");
}

}  // namespace kvpack
