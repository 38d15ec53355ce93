// What a team of four warps does with a tile of DeltaKV's code rows in a decode step; see deltakv_decode.cu.
#pragma once
#include "deltakv_decode.cuh"

namespace kvpack {
namespace {

constexpr int HEADS = 8;  // query heads at a time: the columns of an mma
constexpr int MAX_TEAMS = 2, SLOTS_EACH = 4;  // slots of a warp whose sums it keeps in registers
constexpr int SPLIT_ROWS = 128;               // a sequence has no more splits than that many rows fill
constexpr int BLOCKS_AT_LEAST = 128;  // of a long sequence: what a GPU of 132 processors can run at once

struct Layout {  // of shared memory, in bytes; from `query` on within a team's part
  int offsets, matrix, sums, teams, total;
  int query, codes, scores, weights, scales, references, positions, factor, means, team_bytes;
};
struct Decoding {
  LatentSlots latents;
  Layout layout;
  const uint4 *to_key;   // T [H, slots * 2, across, BLOCKS / 2, 32 lanes, 8]: fragments of W_K
  const void *to_value;  // T [H, slots * 32, D]
  const float *offsets;  // [H, segments, D], by pairs: what the middles of codes add to a key, taken away
  const void *ring, *references;
  const int8_t *codes;
  const void *scales, *index;
  int index_bytes, neighbors, code_rows, ref_rows, ring_rows, width;
  const int32_t *selected, *select_len, *past_len, *new_len;
  int select_width, splits;
  kvpack_geometry geometry;
  Rope rope;
  float scale, softcap, share;  // share: of a reference in a mean
  Merge merge;
};

// All but the layout and what was prepared.
inline Decoding decoding_of(const kvpack_layer &layer, const kvpack_step &step, const kvpack_deltakv &d,
                            const Decode &decode) {
  Decoding x = {};
  x.latents = latent_slots(d);
  x.ring = d.ring, x.references = d.references, x.codes = static_cast<const int8_t *>(d.latents);
  x.scales = d.scales, x.index = d.index, x.index_bytes = d.index_bytes, x.neighbors = d.neighbors;
  x.code_rows = d.code_rows, x.ref_rows = d.ref_rows;
  x.ring_rows = deltakv_ring_rows(d), x.width = deltakv_width(layer);
  x.selected = d.selected, x.select_len = d.select_len, x.select_width = d.select_width;
  x.past_len = step.past_len, x.new_len = step.new_len, x.geometry = d.geometry, x.rope = rope_of(layer, step);
  x.scale = layer.scale, x.softcap = layer.softcap, x.share = 1.f / d.neighbors;
  x.merge = merge_of(layer, step, decode);
  x.splits = min(decode.splits, max(BLOCKS_AT_LEAST / layer.num_kv_heads, 4));
  return x;
}
inline int most_splits(const Decoding &d) {  // of a sequence
  const int room = d.selected ? d.select_width : d.code_rows;
  return max(1, min(d.splits, (room + SPLIT_ROWS - 1) / SPLIT_ROWS));
}

struct Work {  // of a block, and a team's place in it
  int b, h, count, encoded, thread, warp, lane;
  unsigned char *shared;  // the team's part
};

KVPACK_D int rows_to_read(const Decoding &d, int b) {
  if (d.new_len[b] == 0) return 0;
  return d.selected ? min(d.select_len[b], d.select_width) : encoded_rows(d.geometry, d.past_len[b]);
}
KVPACK_D int splits_of(const Decoding &d, int rows) { return min((rows + SPLIT_ROWS - 1) / SPLIT_ROWS, d.splits); }
KVPACK_D int code_row(const Decoding &d, const Work &w, int n) {  // the n-th to read, or -1
  if (n >= w.count) return -1;
  const int row = d.selected ? __ldg(d.selected + int64_t(w.b) * d.select_width + n) : n;
  return unsigned(row) < unsigned(w.encoded) ? row : -1;
}
KVPACK_D void meet(const Work &) {  // a team; checkers of races know barriers by constant names
  static_assert(MAX_TEAMS == 2);
  if (threadIdx.x < 128) named_barrier<1, 128>();
  else named_barrier<2, 128>();
}

// A warp fetches a quarter of a tile's rows, in steps of which each waits for the one before: their numbers, one in each
// lane (twice), the ordinals of their references, and what these name. All but the last run a tile ahead.
template <class Shape> constexpr int FETCHED = Shape::ROWS / 4;  // rows of a warp
template <class Shape> constexpr int ORDINALS = FETCHED<Shape> * MAX_NEIGHBORS / 32;  // of a lane
template <class Shape> KVPACK_D int fetched_row(const Decoding &d, const Work &w, int first) {
  return code_row(d, w, first + w.warp * FETCHED<Shape> + w.lane % FETCHED<Shape>);
}
// Number i of a lane is of row lane % FETCHED and of neighbor (lane + 32 i) / FETCHED; -1: none.
template <class Shape>
KVPACK_D void fetch_ordinals(const Decoding &d, const Work &w, int row, int (&ordinals)[ORDINALS<Shape>]) {
#pragma unroll
  for (int i = 0; i < ORDINALS<Shape>; ++i) {
    const int n = (w.lane + 32 * i) / FETCHED<Shape>;
    const int64_t at = (int64_t(w.b) * d.code_rows + row) * d.neighbors + n;
    ordinals[i] = -1;
    if (row >= 0 && n < d.neighbors)
      ordinals[i] = d.index_bytes == 2 ? __ldg(static_cast<const int16_t *>(d.index) + at)
                                       : __ldg(static_cast<const int32_t *>(d.index) + at);
  }
}
template <class T> KVPACK_D const T *reference_of(const Decoding &d, const Work &w, int ordinal) {
  const int64_t sink = int64_t(w.b) * d.ring_rows + ordinal;
  const int64_t other = int64_t(w.b) * d.ref_rows + ordinal - d.geometry.sinks;
  return ordinal < d.geometry.sinks ? static_cast<const T *>(d.ring) + sink * d.width
                                    : static_cast<const T *>(d.references) + other * d.width;
}
KVPACK_D void prefetch_lines(const void *p, int bytes, int first, int step) {  // every step-th from the first on
  for (int n = first * 128; n < bytes; n += step * 128) prefetch(static_cast<const char *>(p) + n);
}
template <class T, class Shape>
KVPACK_D void prefetch_rows(const Decoding &d, const Work &w, int row, const int (&ordinals)[ORDINALS<Shape>]) {
#pragma unroll
  for (int i = 0; i < ORDINALS<Shape>; ++i) {
    if (ordinals[i] < 0) continue;
    const T *reference = reference_of<T>(d, w, ordinals[i]) + w.h * Shape::D;
    prefetch_lines(reference, Shape::D * 2, 0, 1);
    prefetch_lines(reference + d.width / 2, Shape::D * 2, 0, 1);
  }
  if (row < 0) return;
  const int part = w.lane / FETCHED<Shape>, parts = 32 / FETCHED<Shape>;
  const int64_t at = int64_t(w.b) * d.code_rows + row, turn = rope_row(d.rope, row + d.geometry.sinks);
  prefetch_lines(d.codes + at * d.latents.row_bytes, d.latents.row_bytes, part, parts);
  prefetch_lines(d.rope.cos + turn, d.rope.half * 4, part, parts);
  prefetch_lines(d.rope.sin + turn, d.rope.half * 4, part, parts);
  if (d.scales && part == 0) prefetch(static_cast<const T *>(d.scales) + at * d.latents.segments);
}
// Codes, scales, positions and the addresses of references to shared memory.
template <class T, class Shape>
KVPACK_D void stage(const Decoding &d, const Work &w, int row, const int (&ordinals)[ORDINALS<Shape>]) {
  constexpr int ROWS = Shape::ROWS, MINE = FETCHED<Shape>;
  const LatentSlots &latents = d.latents;
  const int first = w.warp * MINE, r = first + w.lane % MINE;
  for (int n = 0; n < latents.segments; ++n) {
    const int pieces = latents.bytes[n] / latents.piece;
#pragma unroll 4
    for (int i = 0; i < MINE; i += 2) {  // half a warp for a row
      const int one = i + w.lane / 16, from_row = __shfl_sync(~0u, row, one);
      if (from_row < 0) continue;  // any bits are a code, whose row does not count
      const int8_t *from =
          d.codes + (int64_t(w.b) * d.code_rows + from_row) * latents.row_bytes + latents.source[n];
      unsigned char *to = w.shared + d.layout.codes + (first + one) * latents.stride + latents.target[n];
      for (int at = w.lane % 16 * latents.piece; at < latents.bytes[n]; at += 16 * latents.piece)
        if (latents.piece == 16) copy_async_16(to + at, from + at);
        else if (latents.piece == 4) copy_async_4(to + at, from + at);
        else *reinterpret_cast<uint16_t *>(to + at) = *reinterpret_cast<const uint16_t *>(from + at);
    }
  }
  copy_async_commit();
  T *scales = reinterpret_cast<T *>(w.shared + d.layout.scales) + r;
  const T *stored = static_cast<const T *>(d.scales) + (int64_t(w.b) * d.code_rows + row) * latents.segments;
  for (int n = w.lane / MINE; n < latents.segments; n += 32 / MINE)
    scales[n * ROWS] = row < 0 || !d.scales ? from_float<T>(row < 0 ? 0 : 1) : stored[n];
  if (w.lane < MINE)
    reinterpret_cast<int *>(w.shared + d.layout.positions)[r] = row < 0 ? -1 : row + d.geometry.sinks;
  const T **named = reinterpret_cast<const T **>(w.shared + d.layout.references) + r * d.neighbors;
#pragma unroll
  for (int i = 0; i < ORDINALS<Shape>; ++i) {
    const int n = (w.lane + 32 * i) / MINE;
    if (n < d.neighbors) named[n] = ordinals[i] < 0 ? nullptr : reference_of<T>(d, w, ordinals[i]);
  }
  copy_async_wait<0>();
}

// keys += the operands of one slot, of the warp's rows, times W_K of its columns.
template <class T, class Shape, Codes CODES>
KVPACK_D void rebuild_slot(const Decoding &d, const Work &w, int row, int s, const uint4 *matrix,
                           float (&keys)[2][Shape::BLOCKS][4]) {
  const Slot &slot = d.latents.slots[s];
  const Splice splice = splice_of<T>(slot);
  const int stride = d.latents.stride;
  const unsigned char *codes =
      w.shared + d.layout.codes + row * stride + slot.offset + w.lane % 4 * (CODES == Codes::WHOLE ? 8 : 4);
  const uint16_t *scales =
      reinterpret_cast<const uint16_t *>(w.shared + d.layout.scales) + slot.segment * Shape::ROWS + row;
  matrix += s * 2 * Shape::ACROSS * (Shape::BLOCKS / 2) * 32;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int low = 0; low < 2; ++low) {
        const int r = m * 16 + low * 8;
        if constexpr (CODES == Codes::WHOLE) {
          const uint2 two = *reinterpret_cast<const uint2 *>(codes + r * stride + step * 32);
          const uint32_t real = scales[r] ? ~0u : 0;  // stale bits may be no number
          a[m][low] = permute<0x5410>(two.x, two.y) & real, a[m][low + 2] = permute<0x7632>(two.x, two.y) & real;
        } else {
          const uint32_t word = *reinterpret_cast<const uint32_t *>(codes + r * stride + step * 16);
          a[m][low] = code_pair<T, CODES>(word, splice, 0);
          a[m][low + 2] = code_pair<T, CODES>(word, splice, 8);
        }
      }
#pragma unroll
    for (int n = 0; n < Shape::BLOCKS / 2; ++n) {
      const uint4 four = matrix[(step * Shape::ACROSS * (Shape::BLOCKS / 2) + n) * 32];
      const uint32_t b[2][2] = {{four.x, four.y}, {four.z, four.w}};
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma_16816<T>(keys[m][2 * n], a[m], b[0]);
        mma_16816<T>(keys[m][2 * n + 1], a[m], b[1]);
      }
    }
  }
}
// Keys less the mean of their references, of the rows that a lane holds, in units of `unit`: the scale of the segment
// last read, or a number too small to matter if that is less.
template <class T, class Shape, bool WHOLE>
KVPACK_D void rebuild(const Decoding &d, const Work &w, const uint4 *matrix, const float *offsets,
                      float (&keys)[2][Shape::BLOCKS][4], float (&unit)[4]) {
  const int across = w.warp % Shape::ACROSS, row = w.warp / Shape::ACROSS * 32 + w.lane / 4;
  matrix += across * (Shape::BLOCKS / 2) * 32 + w.lane;
  offsets += pair_of<Shape>(across, w.lane, 0) * 2;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < Shape::BLOCKS; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) keys[m][n][e] = 0;
#pragma unroll
  for (int r = 0; r < 4; ++r) unit[r] = 0;
  int segment = -1;
#pragma unroll 1
  for (int s = 0; s < d.latents.count; ++s) {
    const Slot &slot = d.latents.slots[s];
    if (slot.segment != segment) {
      segment = slot.segment;
      const T *scales = reinterpret_cast<const T *>(w.shared + d.layout.scales) + segment * Shape::ROWS + row;
      float ratio[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float scale = to_float(scales[r * 8]), least = fmaxf(fabsf(unit[r]) * 1e-6f, 1e-30f);
        const float next = fabsf(scale) > least ? scale : least;
        ratio[r] = unit[r] / next;
        unit[r] = next;
      }
#pragma unroll
      for (int n = 0; n < Shape::BLOCKS; ++n) {
        const float2 two = *reinterpret_cast<const float2 *>(offsets + segment * Shape::D + n * 2);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            keys[m][n][e] = __fmaf_rn(keys[m][n][e], ratio[m * 2 + e / 2], e % 2 ? two.y : two.x);
      }
    }
    const Codes codes = codes_of(slot);
    if (codes == Codes::SPLICED) rebuild_slot<T, Shape, Codes::SPLICED>(d, w, row, s, matrix, keys);
    else if (!WHOLE || codes == Codes::BYTES) rebuild_slot<T, Shape, Codes::BYTES>(d, w, row, s, matrix, keys);
    else rebuild_slot<T, Shape, Codes::WHOLE>(d, w, row, s, matrix, keys);
  }
}

template <int N> struct Packed { uint32_t pair[N / 2]; };
template <int N, class T> KVPACK_D Packed<N> load_packed(const T *p) {  // N numbers, aligned to their size
  Packed<N> x;
  if constexpr (N == 8) {
    const uint4 v = __ldg(reinterpret_cast<const uint4 *>(p));
    x.pair[0] = v.x, x.pair[1] = v.y, x.pair[2] = v.z, x.pair[3] = v.w;
  } else if constexpr (N == 4) {
    const uint2 v = __ldg(reinterpret_cast<const uint2 *>(p));
    x.pair[0] = v.x, x.pair[1] = v.y;
  } else {
    x.pair[0] = __ldg(reinterpret_cast<const uint32_t *>(p));
  }
  return x;
}
template <int N> KVPACK_D void load_floats(const float *p, float (&x)[N]) {
#pragma unroll
  for (int n = 0; n < N; n += N % 4 ? 2 : 4) {
    if constexpr (N % 4) {
      const float2 v = __ldg(reinterpret_cast<const float2 *>(p + n));
      x[n] = v.x, x[n + 1] = v.y;
    } else {
      const float4 v = __ldg(reinterpret_cast<const float4 *>(p + n));
      x[n] = v.x, x[n + 1] = v.y, x[n + 2] = v.z, x[n + 3] = v.w;
    }
  }
}

// Adds the mean of the references to pairs [first, first + N) of a row's key and rotates them. WHOLE: rotation ends
// where such N pairs do.
template <class T, int N, bool WHOLE>
KVPACK_D void restore_pairs(const Decoding &d, const T *const *named, int column, int position, int first,
                            float (&x)[N], float (&y)[N]) {
  const int half = d.rope.half;
  const float part = d.share;
  const int64_t at = rope_row(d.rope, position) + first;
  if (!WHOLE && half % N) {
    for (int n = 0; n < d.neighbors; ++n)
      if (const T *reference = named[n])
#pragma unroll
        for (int e = 0; e < N; ++e) {
          x[e] += to_float(reference[column + pair_dimension(first + e, 0, half)]) * part;
          y[e] += to_float(reference[column + pair_dimension(first + e, 1, half)]) * part;
        }
#pragma unroll
    for (int e = 0; e < N; ++e)
      if (first + e < half) {
        const float2 pair = turn_pair(x[e], y[e], d.rope.cos[at + e], d.rope.sin[at + e]);
        x[e] = pair.x, y[e] = pair.y;
      }
    return;
  }
  const bool turns = first < half;
  float cos[N], sin[N];
  if (turns) {
    load_floats<N>(d.rope.cos + at, cos);
    load_floats<N>(d.rope.sin + at, sin);
  }
  const int low_at = column + (turns ? first : 2 * first), high_at = column + (turns ? first + half : 2 * first + N);
  const T *anywhere = static_cast<const T *>(d.ring);  // for rows that are not read, whose scores do not count
  const auto add = [&](int n) {  // two at a time, so that their loads are under way together
    const bool two = n + 1 < d.neighbors;
    const T *one = named[n], *other = named[two ? n + 1 : n];
    if (!one) one = other = anywhere;
    const Packed<N> low[2] = {load_packed<N>(one + low_at), load_packed<N>(other + low_at)};
    const Packed<N> high[2] = {load_packed<N>(one + high_at), load_packed<N>(other + high_at)};
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < N / 2; ++e) {
        const float weight = i == 0 || two ? part : 0;
        const float2 a = unpack2<T>(low[i].pair[e]), b = unpack2<T>(high[i].pair[e]);
        if (turns) {
          x[2 * e] += a.x * weight, x[2 * e + 1] += a.y * weight;
          y[2 * e] += b.x * weight, y[2 * e + 1] += b.y * weight;
        } else {
          x[e] += a.x * weight, y[e] += a.y * weight, x[e + N / 2] += b.x * weight, y[e + N / 2] += b.y * weight;
        }
      }
  };
  add(0);
#pragma unroll 1
  for (int n = 2; n < d.neighbors; n += 2) add(n);
  if (!turns) return;
#pragma unroll
  for (int e = 0; e < N; ++e) {
    const float2 pair = turn_pair(x[e], y[e], cos[e], sin[e]);
    x[e] = pair.x, y[e] = pair.y;
  }
}

// Keys to scores, float [ACROSS, HEADS, ROWS + 4], of each warp's columns alone.
template <class T, class Shape, bool WHOLE>
KVPACK_D void score(const Decoding &d, const Work &w, const uint32_t *query, float (&keys)[2][Shape::BLOCKS][4],
                    const float (&unit)[4]) {
  constexpr int BLOCKS = Shape::BLOCKS, PIECE = Shape::PIECE;
  const int across = w.warp % Shape::ACROSS, row = w.warp / Shape::ACROSS * 32 + w.lane / 4;
  const int *positions = reinterpret_cast<const int *>(w.shared + d.layout.positions);
  const T *const *named = reinterpret_cast<const T *const *>(w.shared + d.layout.references);
  float *scores = reinterpret_cast<float *>(w.shared + d.layout.scores) + across * HEADS * (Shape::ROWS + 4);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int low = 0; low < 2; ++low) {
      const int r = row + m * 16 + low * 8, position = positions[r];
#pragma unroll
      for (int block = 0; block < BLOCKS; block += PIECE) {
        float x[PIECE], y[PIECE];
#pragma unroll
        for (int e = 0; e < PIECE; ++e) {
          x[e] = keys[m][block + e][2 * low] * unit[m * 2 + low];
          y[e] = keys[m][block + e][2 * low + 1] * unit[m * 2 + low];
        }
        restore_pairs<T, PIECE, WHOLE>(d, named + r * d.neighbors, w.h * Shape::D, position,
                                pair_of<Shape>(across, w.lane, block), x, y);
#pragma unroll
        for (int e = 0; e < PIECE; ++e) keys[m][block + e][2 * low] = x[e], keys[m][block + e][2 * low + 1] = y[e];
      }
    }
    float sum[4] = {};
#pragma unroll
    for (int n = 0; n < BLOCKS; n += 2) {
      const float(&left)[4] = keys[m][n], (&right)[4] = keys[m][n + 1];
      const uint32_t a[4] = {pack2<T>(left[0], left[1]), pack2<T>(left[2], left[3]), pack2<T>(right[0], right[1]),
                             pack2<T>(right[2], right[3])};
      const uint32_t *q = query + (across * BLOCKS + n) * 32 + w.lane;
      const uint32_t b[2] = {q[0], q[32]};
      mma_16816<T>(sum, a, b);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      scores[(w.lane % 4 * 2 + (e & 1)) * (Shape::ROWS + 4) + row + m * 16 + (e >> 1) * 8] = sum[e];
  }
}

// Scores to weights exp2(score - largest), T [HEADS, ROWS + 8], and by which factor older sums shrink; a warp does two
// heads. stats [HEADS]: the largest score and the mass.
template <class T, class Shape>
KVPACK_D void weigh_rows(const Decoding &d, const Work &w, int heads, float2 *stats) {
  constexpr int ROWS = Shape::ROWS;
  const int *positions = reinterpret_cast<const int *>(w.shared + d.layout.positions);
  const float *scores = reinterpret_cast<const float *>(w.shared + d.layout.scores);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int head = w.warp * 2 + n;
    T *weights = reinterpret_cast<T *>(w.shared + d.layout.weights) + head * (ROWS + 8) + w.lane;
    float s[ROWS / 32], found = NOTHING, sum = 0;
#pragma unroll
    for (int e = 0; e < ROWS / 32; ++e) {
      const int r = e * 32 + w.lane;
      s[e] = 0;
#pragma unroll
      for (int a = 0; a < Shape::ACROSS; ++a) s[e] += scores[(a * HEADS + head) * (ROWS + 4) + r];
      s[e] *= d.scale;
      if (d.softcap > 0) s[e] = d.softcap * tanh_fast(s[e] / d.softcap);
      s[e] = head < heads && positions[r] >= 0 ? s[e] * LOG2E : 2 * NOTHING;
      found = fmaxf(found, s[e]);
    }
#pragma unroll
    for (int x = 16; x; x >>= 1) found = fmaxf(found, __shfl_xor_sync(~0u, found, x));
    const float2 before = stats[head];
    found = fmaxf(found, before.x);
#pragma unroll
    for (int e = 0; e < ROWS / 32; ++e) {
      const float weight = exp2_fast(s[e] - found);  // 0 where nothing is read, even if that is everywhere
      weights[e * 32] = from_float<T>(weight);
      sum += weight;
    }
#pragma unroll
    for (int x = 16; x; x >>= 1) sum += __shfl_xor_sync(~0u, sum, x);
    __syncwarp();  // all have read `before`
    if (w.lane == 0) {
      const float factor = exp2_fast(before.x - found);
      stats[head] = make_float2(found, before.y * factor + sum);
      reinterpret_cast<float *>(w.shared + d.layout.factor)[head] = factor;
    }
  }
}

template <class Shape> using RowWeights = uint32_t[Shape::ROWS / 16][2];  // the fragments of all weights

// The weights of a segment's latents, which include their scales, and what the middles of its codes make of them.
template <class T, class Shape> struct Scaled {
  RowWeights<Shape> weights;
  float less[2];
};
template <class T, class Shape>
KVPACK_D void scale_weights(const Decoding &d, const Work &w, const Slot &slot, const RowWeights<Shape> &weights,
                            Scaled<T, Shape> &scaled) {
  const T *scales = reinterpret_cast<const T *>(w.shared + d.layout.scales) + slot.segment * Shape::ROWS;
  const float middle = -middle_of<T>(slot);
  const uint32_t pair = pack2<T>(middle, middle), a[4] = {pair, pair, pair, pair};
  float sum[4] = {};
#pragma unroll
  for (int step = 0; step < Shape::ROWS / 16; ++step) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int r = step * 16 + high * 8 + w.lane % 4 * 2;
      scaled.weights[step][high] = mul2<T>(weights[step][high], *reinterpret_cast<const uint32_t *>(scales + r));
    }
    mma_16816<T>(sum, a, scaled.weights[step]);
  }
  scaled.less[0] = sum[0], scaled.less[1] = sum[1];
}

// sums [2 x 16 places of a slot, HEADS] = sums * factor + z^T weights.
template <class T, class Shape, Codes CODES>
KVPACK_D void sum_slot(const Decoding &d, const Work &w, const Slot &slot, const Scaled<T, Shape> &scaled,
                       float2 factor, float (&sums)[2][4]) {
  const Splice splice = splice_of<T>(slot);
  const int stride = d.latents.stride, row = w.lane % 4 * 2;
  const unsigned char *codes = w.shared + d.layout.codes + slot.offset + w.lane / 4 * (CODES == Codes::WHOLE ? 8 : 4);
  const uint16_t *scales =
      reinterpret_cast<const uint16_t *>(w.shared + d.layout.scales) + slot.segment * Shape::ROWS;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[m][e] = __fmaf_rn(sums[m][e], e % 2 ? factor.y : factor.x, scaled.less[e % 2]);
#pragma unroll
  for (int step = 0; step < Shape::ROWS / 16; ++step) {
    uint32_t a[2][4];
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int r = step * 16 + high * 8 + row;
      if constexpr (CODES == Codes::WHOLE) {
        uint2 x = *reinterpret_cast<const uint2 *>(codes + r * stride);
        uint2 y = *reinterpret_cast<const uint2 *>(codes + (r + 1) * stride);
        if (!scales[r]) x = make_uint2(0, 0);
        if (!scales[r + 1]) y = make_uint2(0, 0);
        a[0][2 * high] = permute<0x5410>(x.x, y.x), a[0][2 * high + 1] = permute<0x7632>(x.x, y.x);
        a[1][2 * high] = permute<0x5410>(x.y, y.y), a[1][2 * high + 1] = permute<0x7632>(x.y, y.y);
      } else {
        const uint32_t x = *reinterpret_cast<const uint32_t *>(codes + r * stride);
        const uint32_t y = *reinterpret_cast<const uint32_t *>(codes + (r + 1) * stride);
        const uint32_t both[2] = {permute<0x5410>(x, y), permute<0x7632>(x, y)};
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          a[m][2 * high] = code_pair<T, CODES>(both[m], splice, 0);
          a[m][2 * high + 1] = code_pair<T, CODES>(both[m], splice, 8);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) mma_16816<T>(sums[m], a[m], scaled.weights[step]);
  }
}

// What a lane needs of one of the references of each row, for the sum of values.
template <class Shape> struct Values { Packed<Shape::EACH> of[Shape::ROWS / 16][4]; };
template <class T, class Shape>
KVPACK_D void load_values(const Decoding &d, const Work &w, int n, Values<Shape> &values) {
  const int column = d.width / 2 + w.h * Shape::D + (w.warp * 8 + w.lane / 4) * Shape::EACH;
  const T *const *named = reinterpret_cast<const T *const *>(w.shared + d.layout.references);
#pragma unroll
  for (int step = 0; step < Shape::ROWS / 16; ++step)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const T *row = named[(step * 16 + e / 2 * 8 + w.lane % 4 * 2 + e % 2) * d.neighbors + n];
      values.of[step][e] = row ? load_packed<Shape::EACH>(row + column) : Packed<Shape::EACH>{};
    }
}
// Sums [EACH / 2 x 16 of the warp's value dimensions, HEADS] = sums * factor + (sum of the references)^T weights; they
// wait in shared memory, number n of a thread at n * 128 + thread. `first` are the values of the first reference(s).
template <class T, class Shape, int LOADED>
KVPACK_D void sum_references(const Decoding &d, const Work &w, const RowWeights<Shape> &weights, float2 factor,
                             Values<Shape> (&first)[LOADED]) {
  constexpr int EACH = Shape::EACH;
  float sums[EACH / 2][4], *kept = reinterpret_cast<float *>(w.shared + d.layout.means) + w.thread;
#pragma unroll
  for (int m = 0; m < EACH / 2; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[m][e] = kept[(m * 4 + e) * 128] * (e % 2 ? factor.y : factor.x);
  const auto add = [&](const Values<Shape> &values) {
#pragma unroll
    for (int step = 0; step < Shape::ROWS / 16; ++step)
#pragma unroll
      for (int m = 0; m < EACH / 2; ++m) {
        const Packed<EACH>(&row)[4] = values.of[step];
        const uint32_t a[4] = {
            permute<0x5410>(row[0].pair[m], row[1].pair[m]), permute<0x7632>(row[0].pair[m], row[1].pair[m]),
            permute<0x5410>(row[2].pair[m], row[3].pair[m]), permute<0x7632>(row[2].pair[m], row[3].pair[m])};
        mma_16816<T>(sums[m], a, weights[step]);
      }
  };
#pragma unroll
  for (int n = 0; n < LOADED; ++n)
    if (n < d.neighbors) add(first[n]);
#pragma unroll 1
  for (int n = LOADED; n < d.neighbors; ++n) {
    load_values<T, Shape>(d, w, n, first[0]);
    add(first[0]);
  }
#pragma unroll
  for (int m = 0; m < EACH / 2; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) kept[(m * 4 + e) * 128] = sums[m][e];
}

KVPACK_D int sum_at(int value) { return (value + value / 4) * HEADS; }  // every fourth apart: no bank conflicts
KVPACK_D void put(float *at, float x, float y, bool more) {
  float2 *two = reinterpret_cast<float2 *>(at);
  *two = more ? make_float2(two->x + x, two->y + y) : make_float2(x, y);
}

// The query's fragments, uint32 [ACROSS, BLOCKS, 32 lanes], of heads head0, ...; zeros where there is none.
template <class T, class Shape>
KVPACK_D void load_query(const Decoding &d, const Work &w, uint32_t *to, int64_t head0, int heads) {
  const uint16_t *query = static_cast<const uint16_t *>(d.merge.decode.query);
#pragma unroll
  for (int n = 0; n < Shape::D * 4; n += 128) {
    const int i = n + w.thread, lane = i % 32, block = i / 32 % Shape::BLOCKS, head = lane / 4;
    const int pair = pair_of<Shape>(i / 32 / Shape::BLOCKS, lane, block);
    uint32_t two = 0;
    if (head < heads) {
      const uint16_t *q = query + (head0 + head) * Shape::D;
      two = __ldcg(q + pair_dimension(pair, 0, d.rope.half)) | __ldcg(q + pair_dimension(pair, 1, d.rope.half)) << 16;
    }
    to[i] = two;
  }
}

}  // namespace
}  // namespace kvpack
