// Attention of one new token to DeltaKV's code rows on sm_90, for heads of 128 and latents of 4 bits: as
// deltakv_decode.cu does it, but keys are rebuilt by wgmma, whose first operand, codes, is made in registers and whose
// second, W_K of one head, stays in shared memory. While that runs, and while a tile's sums are made, what the next
// step needs is on its way to registers.
#include "deltakv_tile.cuh"

namespace kvpack {

#if defined(KVPACK_SM90A) || defined(KVPACK_EMULATE)
namespace {

using Shape = Tile<128>;
constexpr int D = 128, ROWS = Shape::ROWS, TEAMS = 2, THREADS = TEAMS * 128;
constexpr int FIELDS = 2, BLOCKS = D / 8;  // codes in a byte; blocks of 8 columns of the keys
constexpr int STEP_BYTES = 16 * D * 2;     // of W_K for 16 latents
constexpr float LEAST = 1e-12f;            // keys are made in units of the scale, or of this where that is less

// Shared memory, in bytes, for rows of up to 64 CHUNKS bytes of codes. `teams` is what each of them has, from 0 again.
template <int CHUNKS> struct Room {
  static constexpr int STEPS = CHUNKS * 8, EACH = CHUNKS * 2;  // of 16 latents; bytes of a row whose sums a lane keeps
  static constexpr int STRIDE = CHUNKS * 64 + 16;              // of staged codes: rows are four banks apart
  static constexpr int MATRIX = STEPS * STEP_BYTES;
  static constexpr int offsets = MATRIX, barriers = offsets + D * 4, masses = barriers + 64;
  static constexpr int teams = masses + TEAMS * 4 * HEADS * 8 + TEAMS * HEADS * 4;
  static constexpr int codes = 0, named = codes + 2 * ROWS * STRIDE, scales = named + 2 * ROWS * MAX_NEIGHBORS * 8;
  static constexpr int positions = scales + 2 * ROWS * 4, weights = positions + 2 * ROWS * 4;
  static constexpr int tops = weights + 2 * HEADS * (ROWS + 8) * 2, query = tops + 4 * HEADS * 4;
  static constexpr int TEAM = query + BLOCKS * 32 * 4, TOTAL = teams + TEAMS * TEAM;
  // In the end, over the teams' parts: sums of latents and of references, and operands of the last product.
  static constexpr int LATENTS = STEPS * 16 * HEADS * 4, MEANS = D * HEADS * 4;
  static constexpr int sums = teams, means = sums + TEAMS * LATENTS, operands = means + TEAMS * MEANS;
  static_assert(operands + STEPS * 32 * 16 <= TOTAL);
};

// A lane of quad place q has pairs 32 i + 8 q .. + 7 of the keys, i 0 and 1, one in each block; column 2 q of a block
// is the first of the pair. A rotation's halves are a pair, and of what is not rotated, too, the lower and the upper half.
KVPACK_D int pair_at(int q, int block) { return block / 8 * 32 + q * 8 + block % 8; }
KVPACK_D int dimension_at(int pair, int second, int half) {
  return pair < half ? pair + second * half : pair + (second ? D / 2 : half);
}
// The byte of a row that gives number k of a step's 16 latents, for keys and for sums; there, k / 8 is its field.
KVPACK_D int key_byte(int step, int k) { return step / 4 * 32 + k % 8 / 2 * 8 + step % 4 / 2 * 4 + k % 2 * 2 + k / 8; }
KVPACK_D int sum_byte(int step, int k, int each) { return step / each * each * 8 + k % 8 * each + step % each; }

KVPACK_D Slot field_slot(int field) { return {0, 0, SLOT, uint8_t(field * 4), 4, 0}; }
template <class T> KVPACK_D uint32_t pair_of_codes(uint32_t word, int field, int up) {
  const Splice splice = splice_of<T>(field_slot(field));
  const int right = splice.shift + up;
  return and_xor(right < 0 ? word << -right : word >> right, splice.mask, splice.rest);  // nothing wraps round
}

// What is known of a row one tile ahead: its number and its references' ordinals, of lane % 16, and its scale.
struct Ahead {
  int row, ordinals[ORDINALS<Shape>];
  float scale;
};
template <class T> KVPACK_D void look_up(const Decoding &d, const Work &w, Ahead &ahead) {
  fetch_ordinals<Shape>(d, w, ahead.row, ahead.ordinals);
  ahead.scale = ahead.row < 0 ? 0 : to_float(static_cast<const T *>(d.scales)[int64_t(w.b) * d.code_rows + ahead.row]);
}
template <class T, class Sizes> KVPACK_D void stage_codes(const Decoding &d, const Work &w, int row, int buffer) {
  const int piece = w.lane % 16 * 16;
  const int8_t *codes = d.codes + int64_t(w.b) * d.code_rows * d.latents.row_bytes + piece;
  unsigned char *to = w.shared + Sizes::codes + (buffer * ROWS + w.warp * 16 + w.lane / 16) * Sizes::STRIDE + piece;
#pragma unroll
  for (int i = 0; i < 16; i += 2) {  // half a warp for a row
    const int from = __shfl_sync(~0u, row, i + w.lane / 16);
    if (from < 0 || piece >= d.latents.row_bytes) continue;  // any bits are a code, whose row or latent does not count
    copy_async_16(to + i * Sizes::STRIDE, codes + int64_t(from) * d.latents.row_bytes);
  }
  copy_async_commit();
}
// [2, ROWS, 2] references: they are read two at a time, and where there is none, `zeros` stands in.
template <class T, class Sizes>
KVPACK_D void stage_rows(const Decoding &d, const Work &w, const Ahead &ahead, const T *zeros, int buffer) {
  const int r = buffer * ROWS + w.warp * 16 + w.lane % 16;
  const T **named = reinterpret_cast<const T **>(w.shared + Sizes::named) + (r + buffer * ROWS) * 2;
#pragma unroll
  for (int i = 0; i < ORDINALS<Shape>; ++i) {
    named[i * ROWS * 2 + w.lane / 16] = ahead.ordinals[i] < 0 ? zeros : reference_of<T>(d, w, ahead.ordinals[i]);
  }
  if (w.lane < 16) {
    reinterpret_cast<int *>(w.shared + Sizes::positions)[r] = ahead.row < 0 ? -1 : ahead.row + d.geometry.sinks;
    reinterpret_cast<float *>(w.shared + Sizes::scales)[r] = ahead.scale;
  }
  __syncwarp();
}

// A lane's part of the keys of two references of its two rows: lower halves of both its runs of pairs, then upper ones.
struct Keys { uint4 of[2][2][4]; };
template <class T>
KVPACK_D void load_keys(const T *const *named, const int (&columns)[4], Keys &keys) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const T *row = named[r * 16 + n];
#pragma unroll
      for (int i = 0; i < 4; ++i) keys.of[r][n][i] = load_streamed(reinterpret_cast<const uint4 *>(row + columns[i]));
    }
}
KVPACK_D uint32_t word_of(const uint4 &four, int n) {
  return n == 0 ? four.x : n == 1 ? four.y : n == 2 ? four.z : four.w;
}
// keys[8 i + e] += share * the references'; both are in units of the row's scale.
template <class T> KVPACK_D void add_keys(const Keys &more, const float (&share)[2], float (&keys)[64]) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float2 a = unpack2<T>(word_of(more.of[r][0][i], word)), b = unpack2<T>(word_of(more.of[r][1][i], word));
        float *key = keys + (i % 2 * 8 + word * 2) * 4 + r * 2 + i / 2;
        key[0] = __fmaf_rn(a.x + b.x, share[r], key[0]);
        key[4] = __fmaf_rn(a.y + b.y, share[r], key[4]);
      }
}

// A lane's part of the values of a reference: dimensions 4 (8 warp + lane / 4) .. + 3 of rows 16 step + 2 q and the
// three that are 1, 8 and 9 further.
struct ValuePart { uint2 of[ROWS / 16][4]; };
template <class T> KVPACK_D void load_value(const T *const *named, int column, ValuePart &value) {
#pragma unroll
  for (int step = 0; step < ROWS / 16; ++step)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const T *row = named[(step * 16 + e / 2 * 8 + e % 2) * 2];
      value.of[step][e] = load_streamed(reinterpret_cast<const uint2 *>(row + column));
    }
}
template <class T>
KVPACK_D void sum_value(const ValuePart &value, const uint32_t (&weights)[ROWS / 16][2], float (&sums)[2][4]) {
#pragma unroll
  for (int step = 0; step < ROWS / 16; ++step) {
    const uint2(&row)[4] = value.of[step];
    const uint32_t low[4] = {permute<0x5410>(row[0].x, row[1].x), permute<0x7632>(row[0].x, row[1].x),
                             permute<0x5410>(row[2].x, row[3].x), permute<0x7632>(row[2].x, row[3].x)};
    const uint32_t high[4] = {permute<0x5410>(row[0].y, row[1].y), permute<0x7632>(row[0].y, row[1].y),
                              permute<0x5410>(row[2].y, row[3].y), permute<0x7632>(row[2].y, row[3].y)};
    mma_16816<T>(sums[0], low, weights[step]);
    mma_16816<T>(sums[1], high, weights[step]);
  }
}

// keys += the latents of the warp's 16 rows, less the offset of their codes, times W_K.
template <class T, class Sizes>
KVPACK_D void multiply_keys(const Work &w, uint32_t matrix, const unsigned char *codes, float (&keys)[64]) {
  const uint64_t first = wgmma_matrix(matrix, STEP_BYTES / 2, 128);
  uint32_t a[2][2][4];
#pragma unroll
  for (int series = 0; series < Sizes::STEPS / 2; ++series) {
    const unsigned char *from = codes + series / 2 * 32 + series % 2 * 4;
    const uint32_t low = *reinterpret_cast<const uint32_t *>(from);
    const uint32_t high = *reinterpret_cast<const uint32_t *>(from + 8 * Sizes::STRIDE);
    wgmma_wait<1>();  // the other half of `a` may still be read
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t(&x)[4] = a[series % 2][n];
      x[0] = pair_of_codes<T>(low, n, 0), x[1] = pair_of_codes<T>(high, n, 0);
      x[2] = pair_of_codes<T>(low, n, 8), x[3] = pair_of_codes<T>(high, n, 8);
    }
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < 2; ++n)
      wgmma_64x128x16<T>(keys, a[series % 2][n], first + (series * 2 + n) * (STEP_BYTES >> 4));
    wgmma_commit();
  }
}

// Cosines and sines of a lane's two runs of pairs of a row.
struct Turn { float cos[16], sin[16]; };
KVPACK_D void load_turn(const Rope &rope, int position, int q, Turn &turn) {
  const int64_t at = rope_row(rope, position) + q * 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool turns = i * 32 + q * 8 < rope.half;
#pragma unroll
    for (int e = 0; e < 8; e += 4) {
      float4 c = make_float4(1, 1, 1, 1), s = make_float4(0, 0, 0, 0);
      if (turns) c = load_cached(rope.cos + at + i * 32 + e), s = load_cached(rope.sin + at + i * 32 + e);
      float *cos = turn.cos + i * 8 + e, *sin = turn.sin + i * 8 + e;
      cos[0] = c.x, cos[1] = c.y, cos[2] = c.z, cos[3] = c.w;
      sin[0] = s.x, sin[1] = s.y, sin[2] = s.z, sin[3] = s.w;
    }
  }
}
// The query's operands, uint32 [BLOCKS, 32 lanes]; zeros for heads that are not.
template <class Sizes> KVPACK_D void load_query_sm90(const Decoding &d, const Work &w) {
  const int lane = computed_here(w.lane), head = lane / 4, head0 = (w.b * d.merge.kv_heads + w.h) * d.merge.group;
  const uint16_t *from = static_cast<const uint16_t *>(d.merge.decode.query) + int64_t(head0 + head) * D;
  uint32_t *query = reinterpret_cast<uint32_t *>(w.shared + Sizes::query) + lane;
#pragma unroll
  for (int n = 0; n < BLOCKS; n += 4) {
    const int pair = pair_at(lane % 4, n + w.warp);
    uint32_t two = 0;
    if (head < d.merge.group)
      two = __ldcg(from + dimension_at(pair, 0, d.rope.half)) | __ldcg(from + dimension_at(pair, 1, d.rope.half)) << 16;
    query[(n + w.warp) * 32] = two;
  }
}
// Keys rotated and multiplied with the query: scores of rows lane / 4 (+ 8), heads 2 q (+ 1).
template <class T>
KVPACK_D void multiply_query(const Turn (&turn)[2], const float (&unit)[2], const uint32_t *query, int lane,
                             const float (&keys)[64], float (&scores)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) scores[e] = 0;
#pragma unroll
  for (int n = 0; n < BLOCKS; n += 2) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int block = n + i / 2, r = i % 2;
      float cos = turn[r].cos[block], sin = turn[r].sin[block];
      if constexpr (IS_HALF<T>) cos *= unit[r], sin *= unit[r];  // or numbers may be too large
      const float2 pair = turn_pair(keys[block * 4 + r * 2], keys[block * 4 + r * 2 + 1], cos, sin);
      a[i] = pack2<T>(pair.x, pair.y);
    }
    const uint32_t b[2] = {query[n * 32 + lane], query[n * 32 + 32 + lane]};
    mma_16816<T>(scores, a, b);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if constexpr (!IS_HALF<T>) scores[e] *= unit[e / 2];
}

// sums [EACH x 16 of the warp's latents, HEADS] += codes^T weights, of half the rows. `codes`: the lane's bytes of rows
// 2 q and on.
template <class T, class Sizes>
KVPACK_D void sum_latents(int half, const unsigned char *codes, const uint32_t (&weights)[ROWS / 16][2],
                          float (&sums)[Sizes::EACH][4]) {
  constexpr int WORDS = Sizes::EACH / 4;
#pragma unroll
  for (int step = half * (ROWS / 32); step < (half + 1) * (ROWS / 32); ++step) {
    uint32_t words[4][WORDS];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const unsigned char *from = codes + (step * 16 + e / 2 * 8 + e % 2) * Sizes::STRIDE;
      if constexpr (WORDS == 2) {
        const uint2 two = *reinterpret_cast<const uint2 *>(from);
        words[e][0] = two.x, words[e][1] = two.y;
      } else {
        words[e][0] = *reinterpret_cast<const uint32_t *>(from);
      }
    }
#pragma unroll
    for (int n = 0; n < WORDS; ++n) {
      const uint32_t low[2] = {permute<0x5410>(words[0][n], words[1][n]), permute<0x7632>(words[0][n], words[1][n])};
      const uint32_t high[2] = {permute<0x5410>(words[2][n], words[3][n]), permute<0x7632>(words[2][n], words[3][n])};
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const int up = byte % 2 * 8;
        const uint32_t a[4] = {pair_of_codes<T>(low[byte / 2], 0, up), pair_of_codes<T>(low[byte / 2], 1, up),
                               pair_of_codes<T>(high[byte / 2], 0, up), pair_of_codes<T>(high[byte / 2], 1, up)};
        mma_16816<T>(sums[n * 4 + byte], a, weights[step]);
      }
    }
  }
}

template <class T, int CHUNKS>
__global__ void __launch_bounds__(THREADS, 1) decode_rows_sm90(const __grid_constant__ Decoding d) {
  using Sizes = Room<CHUNKS>;
  constexpr int EACH = Sizes::EACH, STEPS = Sizes::STEPS;
  KVPACK_DYNAMIC_SHARED(shared);
  const int split = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
  const int rows = rows_to_read(d, b), used = splits_of(d, rows);
  if (split >= max(used, 1)) return;
  if (used == 0) {
    wait_for_previous_kernel();
    merge_last<T, D, false>(d.merge, b, h, 0);
    return;
  }
  const int team = int(threadIdx.x) / 128, thread = int(threadIdx.x) % 128;
  const Work w = {b, h, rows, encoded_rows(d.geometry, d.past_len[b]), thread, thread / 32, thread % 32,
                  shared + Sizes::teams + team * Sizes::TEAM};
  const int tiles = (rows + ROWS - 1) / ROWS, g = w.lane / 4, q = w.lane % 4;
  const int begin = int(int64_t(tiles) * split / used), end = int(int64_t(tiles) * (split + 1) / used);
  const int first_row = (begin + team) * ROWS, last_row = end * ROWS, rows_on = TEAMS * ROWS;
  const T *zeros = reinterpret_cast<const T *>(d.offsets + d.merge.kv_heads * D);
  uint64_t *barriers = reinterpret_cast<uint64_t *>(shared + Sizes::barriers);  // W_K and W_V are there
  unsigned *done = reinterpret_cast<unsigned *>(barriers + 2);                   // teams that need W_K no more
  const auto copy_matrix = [&](const void *from, uint64_t *barrier) {
    const char *of_head = static_cast<const char *>(from) + int64_t(h) * Sizes::MATRIX;
    barrier_expect(barrier, Sizes::MATRIX);
    for (int n = 0; n < Sizes::MATRIX; n += 16384) copy_bulk(shared + n, of_head + n, 16384, barrier);
  };
  const auto leave_keys = [&] {  // by a thread of a team whose warps all left: W_V takes the place of W_K
    __threadfence();
    if (atomicAdd(done, 1u) + 1 == TEAMS) copy_matrix(d.to_value, barriers + 1);
  };

  if (threadIdx.x == 0) {
    barrier_init(barriers, 1);
    barrier_init(barriers + 1, 1);
    *done = 0;
    fence_barriers();
    copy_matrix(d.to_key, barriers);
  }
  Ahead ahead;
  ahead.row = first_row < last_row ? fetched_row<Shape>(d, w, first_row) : -1;
  int next = first_row + rows_on < last_row ? fetched_row<Shape>(d, w, first_row + rows_on) : -1;
  look_up<T>(d, w, ahead);
  stage_codes<T, Sizes>(d, w, ahead.row, 0);
  if (team == 0) reinterpret_cast<float *>(shared + Sizes::offsets)[thread] = d.offsets[h * D + thread];
  prefetch_lines(static_cast<const char *>(d.to_value) + int64_t(h) * Sizes::MATRIX, Sizes::MATRIX,
                 int(threadIdx.x) * used + split, THREADS * used);
  stage_rows<T, Sizes>(d, w, ahead, zeros, 0);
  int columns[4];  // of a lane's parts of a key
#pragma unroll
  for (int i = 0; i < 4; ++i) columns[i] = h * D + dimension_at(i % 2 * 32 + q * 8, i / 2, d.rope.half);
  const int value_column = d.width / 2 + h * D + (w.warp * 8 + g) * 4;
  const auto named_row = [&](int row, int buffer) {  // two references; the other two are ROWS further
    return reinterpret_cast<const T *const *>(w.shared + Sizes::named) + (buffer * 2 * ROWS + row) * 2;
  };
  Keys near_keys;
  if (first_row < last_row) load_keys<T>(named_row(w.warp * 16 + g, 0), columns, near_keys);
  __syncthreads();
  if (first_row >= last_row && thread == 0) leave_keys();

  float sums[EACH][4] = {}, mean_sums[2][4] = {};
  float top[2] = {NOTHING, NOTHING}, mass[2] = {}, code_mass[2] = {};  // of heads 2 q and 2 q + 1
  int buffer = 0;
#pragma unroll 1
  for (int at = first_row; at < last_row; at += rows_on, buffer ^= 1) {
    const bool more = at + rows_on < last_row;
    const unsigned char *codes = w.shared + Sizes::codes + buffer * ROWS * Sizes::STRIDE;
    const int row = w.warp * 16 + g;
    ahead.row = next;
    next = at + 2 * rows_on < last_row ? fetched_row<Shape>(d, w, at + 2 * rows_on) : -1;
    if (more) look_up<T>(d, w, ahead);

    float scale[2], scores[4];
    int position[2];
    {
      float keys[64], unit[2], share[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scale[r] = reinterpret_cast<const float *>(w.shared + Sizes::scales)[buffer * ROWS + row + r * 8];
        position[r] = reinterpret_cast<const int *>(w.shared + Sizes::positions)[buffer * ROWS + row + r * 8];
        unit[r] = fabsf(scale[r]) > LEAST ? scale[r] : LEAST;
        share[r] = d.share / unit[r];
      }
#pragma unroll
      for (int n = 0; n < BLOCKS; ++n) {
        const float2 two = *reinterpret_cast<const float2 *>(shared + Sizes::offsets + (n * 8 + q * 2) * 4);
        keys[n * 4] = keys[n * 4 + 2] = two.x, keys[n * 4 + 1] = keys[n * 4 + 3] = two.y;
      }
      add_keys<T>(near_keys, share, keys);
      if (d.neighbors > 2) {
        load_keys<T>(named_row(row + ROWS, buffer), columns, near_keys);
        add_keys<T>(near_keys, share, keys);
      }
      Turn turn[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) load_turn(d.rope, position[r], q, turn[r]);
      copy_async_wait<0>();
      __syncwarp();
      if (at == first_row) barrier_wait(barriers, 0);
      hold(keys);
      multiply_keys<T, Sizes>(w, shared_address(shared), codes + row * Sizes::STRIDE + q * 8, keys);
      if (at == first_row) {
        wait_for_previous_kernel();
        load_query_sm90<Sizes>(d, w);
        meet(w);
      }
      wgmma_wait<0>();
      hold(keys);
      multiply_query<T>(turn, unit, reinterpret_cast<const uint32_t *>(w.shared + Sizes::query), w.lane, keys, scores);
    }

    ValuePart value;
    load_value<T>(named_row(q * 2, buffer), value_column, value);
    float found[2] = {2 * NOTHING, 2 * NOTHING};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[e] *= d.scale;
      if (d.softcap > 0) scores[e] = d.softcap * tanh_fast(scores[e] / d.softcap);
      scores[e] = position[e / 2] >= 0 ? scores[e] * LOG2E : 2 * NOTHING;
      found[e % 2] = fmaxf(found[e % 2], scores[e]);
    }
    float *tops = reinterpret_cast<float *>(w.shared + Sizes::tops);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int x = 4; x < 32; x *= 2) found[e] = fmaxf(found[e], __shfl_xor_sync(~0u, found[e], x));
      if (g == 0) tops[w.warp * HEADS + q * 2 + e] = found[e];
    }
    meet(w);

    if (!more && thread == 0) leave_keys();
    float factor[2];
    T *weights = reinterpret_cast<T *>(w.shared + Sizes::weights);  // [2, HEADS, ROWS + 8]: then times the scale
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float before = top[e];
#pragma unroll
      for (int n = 0; n < 4; ++n) top[e] = fmaxf(top[e], tops[n * HEADS + q * 2 + e]);
      factor[e] = exp2_fast(before - top[e]);
      mass[e] *= factor[e], code_mass[e] *= factor[e];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float weight = exp2_fast(scores[r * 2 + e] - top[e]);  // 0 where nothing is read
        const T scaled = from_float<T>(weight * scale[r]);
        mass[e] += weight, code_mass[e] += to_float(scaled);
        T *to = weights + (q * 2 + e) * (ROWS + 8) + row + r * 8;
        *to = from_float<T>(weight);
        to[HEADS * (ROWS + 8)] = scaled;
      }
    }
    if (more) {
      stage_codes<T, Sizes>(d, w, ahead.row, buffer ^ 1);
      stage_rows<T, Sizes>(d, w, ahead, zeros, buffer ^ 1);
      load_keys<T>(named_row(row, buffer ^ 1), columns, near_keys);
    }
    meet(w);

    uint32_t plain[ROWS / 16][2], scaled[ROWS / 16][2];
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
      const T *from = weights + g * (ROWS + 8) + n * 8 + q * 2;
      plain[n / 2][n % 2] = *reinterpret_cast<const uint32_t *>(from);
      scaled[n / 2][n % 2] = *reinterpret_cast<const uint32_t *>(from + HEADS * (ROWS + 8));
    }
#pragma unroll
    for (int n = 0; n < EACH; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] *= factor[e % 2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) mean_sums[n][e] *= factor[e % 2];
    const unsigned char *own_codes = codes + q * 2 * Sizes::STRIDE + (w.warp * 8 + g) * EACH;
    sum_latents<T, Sizes>(0, own_codes, scaled, sums);
    sum_value<T>(value, plain, mean_sums);
    load_value<T>(named_row(q * 2, buffer) + 1, value_column, value);
    sum_latents<T, Sizes>(1, own_codes, scaled, sums);
    sum_value<T>(value, plain, mean_sums);
    for (int n = 2; n < d.neighbors; ++n) {
      load_value<T>(named_row(q * 2 + ROWS, buffer) + n % 2, value_column, value);
      sum_value<T>(value, plain, mean_sums);
    }
  }
  if (first_row >= last_row) wait_for_previous_kernel();

  // The teams' sums together, in order, as operands in two parts of 16 bits; then W_V.
  __syncthreads();
  float2 *masses = reinterpret_cast<float2 *>(shared + Sizes::masses);  // [TEAMS, 4 warps, HEADS]: all, and of codes
  float *tops = reinterpret_cast<float *>(masses + TEAMS * 4 * HEADS);  // [TEAMS, HEADS]
  float *latent_sums = reinterpret_cast<float *>(shared + Sizes::sums) + team * (STEPS * 16 * HEADS);
  float *means = reinterpret_cast<float *>(shared + Sizes::means) + team * D * HEADS;
  uint4 *operands = reinterpret_cast<uint4 *>(shared + Sizes::operands);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int x = 4; x < 32; x *= 2) {
      mass[e] += __shfl_xor_sync(~0u, mass[e], x);
      code_mass[e] += __shfl_xor_sync(~0u, code_mass[e], x);
    }
    if (g == 0) masses[(team * 4 + w.warp) * HEADS + q * 2 + e] = make_float2(mass[e], code_mass[e]);
    if (g == 0 && w.warp == 0) tops[team * HEADS + q * 2 + e] = top[e];
  }
#pragma unroll
  for (int n = 0; n < EACH; ++n)
#pragma unroll
    for (int high = 0; high < 2; ++high)
      *reinterpret_cast<float2 *>(latent_sums + ((w.warp * EACH + n) * 16 + high * 8 + g) * HEADS + q * 2) =
          make_float2(sums[n][high * 2], sums[n][high * 2 + 1]);
#pragma unroll
  for (int e = 0; e < 4; ++e)
    *reinterpret_cast<float2 *>(means + ((w.warp * 8 + g) * 4 + e) * HEADS + q * 2) =
        make_float2(mean_sums[e / 2][e % 2 * 2], mean_sums[e / 2][e % 2 * 2 + 1]);
  __syncthreads();
  latent_sums = reinterpret_cast<float *>(shared + Sizes::sums);
  means = reinterpret_cast<float *>(shared + Sizes::means);
  // The largest score of a head, the mass, and how each team's sums count.
  const auto together = [&](int head, float (&shares)[TEAMS], float (&middles)[TEAMS]) {
    float most = NOTHING, all = 0;
    for (int t = 0; t < TEAMS; ++t) most = fmaxf(most, tops[t * HEADS + head]);
    for (int t = 0; t < TEAMS; ++t) {
      float2 sum = make_float2(0, 0);
      for (int n = 0; n < 4; ++n) {
        const float2 one = masses[(t * 4 + n) * HEADS + head];
        sum.x += one.x, sum.y += one.y;
      }
      shares[t] = exp2_fast(tops[t * HEADS + head] - most);
      middles[t] = sum.y * middle_of<T>(field_slot(0));
      all += sum.x * shares[t];
    }
    return make_float2(most, all);
  };
  float shares[TEAMS], middles[TEAMS];
  const float2 total = together(g, shares, middles);
  const float less = total.y > 0 ? 1 / total.y : 0;
  for (int step = int(threadIdx.x) / 32; step < STEPS; step += THREADS / 32) {
    float y[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      y[e] = 0;
#pragma unroll
      for (int t = 0; t < TEAMS; ++t) {
        const int place = (t * STEPS + step) * 16 + e / 2 * 8 + q * 2 + e % 2;
        y[e] += shares[t] * (latent_sums[place * HEADS + g] - middles[t]);
      }
      y[e] *= less;
    }
    const uint32_t low = pack2<T>(y[0], y[1]), high = pack2<T>(y[2], y[3]);
    const float2 a = unpack2<T>(low), c = unpack2<T>(high);
    operands[step * 32 + w.lane] =
        make_uint4(low, high, pack2<T>(y[0] - a.x, y[1] - a.y), pack2<T>(y[2] - c.x, y[3] - c.y));
  }
  __syncthreads();
  barrier_wait(barriers + 1, 0);
  float out[4] = {};
  const int block = int(threadIdx.x) / 32;  // of 16 dimensions
  const uint4 *matrix = reinterpret_cast<const uint4 *>(shared) + block * STEPS * 32 + w.lane;
#pragma unroll 8
  for (int step = 0; step < STEPS; ++step) {
    const uint4 x = matrix[step * 32], y = operands[step * 32 + w.lane];
    const uint32_t a[4] = {x.x, x.y, x.z, x.w}, high[2] = {y.x, y.y}, low[2] = {y.z, y.w};
    mma_16816<T>(out, a, high);
    mma_16816<T>(out, a, low);
  }
  const Decode &decode = d.merge.decode;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int head = q * 2 + e;
    if (head >= d.merge.group) break;
    const float2 all = together(head, shares, middles);
    const int64_t slot = (int64_t(b * d.merge.kv_heads + h) * d.merge.group + head) * (decode.splits + 1) + split;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int column = block * 16 + high * 8 + g;
      float mean = 0;
#pragma unroll
      for (int t = 0; t < TEAMS; ++t) mean += shares[t] * means[(t * D + column) * HEADS + head];
      decode.partial[slot * D + column] = out[high * 2 + e] * all.y + mean * d.share;
    }
    if (block == 0 && g == 0) decode.mass[slot] = all;
  }
  merge_last<T, D, false>(d.merge, b, h, used);
}

// -- preparation: W_K as wgmma reads it, W_V in fragments, what the middles of codes add to a key, and zeros

template <class T>
__global__ void prepare_sm90(const float *decompress, int latents, int kv_heads, int half, int chunks, T *to_key,
                             T *to_value) {
  const int steps = chunks * 8, each = latents / FIELDS, thread = int(threadIdx.x), h = blockIdx.y;
  const int64_t width = int64_t(2) * kv_heads * D, start = (int64_t(h) * steps + blockIdx.x) * 16 * D;
  const auto value = [&](int byte, int field, int64_t dimension) {
    return from_float<T>(byte < each ? decompress[(field * each + byte) * width + dimension] : 0.f);
  };
  for (int i = thread; i < 16 * D; i += int(blockDim.x)) {
    {  // a block for each step: [2, D / 8, 8, 8]
      const int step = blockIdx.x, k = i / (8 * D) * 8 + i % 8, column = i / 8 % D;
      const int pair = pair_at(column % 8 / 2, column / 8);
      to_key[start + i] = value(key_byte(step, k), step % 2, h * D + dimension_at(pair, column % 2, half));
    }
    // [D / 16, steps, 32 lanes, 8]
    const int at = int(blockIdx.x) * 16 * D + i, e = at % 8, lane = at / 8 % 32, step = at / 256 % steps;
    const int k = lane % 4 * 2 + e % 2 + e / 4 * 8, column = at / 256 / steps * 16 + lane / 4 + e / 2 % 2 * 8;
    to_value[start + i] = value(sum_byte(step, k, chunks * 2), k / 8, (kv_heads + h) * D + column);
  }
}
template <class T>
__global__ void prepare_sm90_offsets(const float *decompress, int latents, int kv_heads, int half, float *offsets,
                                     T *zeros) {
  const int h = blockIdx.x, column = threadIdx.x, pair = pair_at(column % 8 / 2, column / 8);
  const int64_t width = int64_t(2) * kv_heads * D, dimension = h * D + dimension_at(pair, column % 2, half);
  float sum = 0;
  for (int n = 0; n < latents; ++n) sum += to_float(from_float<T>(decompress[n * width + dimension]));
  offsets[h * D + column] = -middle_of<T>(field_slot(0)) * sum;
  for (int n = column; n < 2 * D; n += D) zeros[h * 2 * D + n] = from_float<T>(0);
}

int chunks_of(const kvpack_deltakv &d) { return d.latent_sizes[0] <= 256 ? 2 : 4; }
int64_t matrix_bytes(const kvpack_layer &layer, const kvpack_deltakv &d) {
  return int64_t(layer.num_kv_heads) * chunks_of(d) * 8 * STEP_BYTES;
}

}  // namespace

bool deltakv_sm90_fits(const kvpack_layer &layer, const kvpack_deltakv &d) {
  return device_is_sm90() && layer.head_dim == D && layer.num_heads / layer.num_kv_heads <= HEADS &&
         layer.rotary_dim / 2 % 8 == 0 && d.segment_count == 1 && d.latent_bits[0] == 4 && d.latent_sizes[0] <= 512 &&
         d.latent_sizes[0] % 32 == 0;
}

size_t deltakv_sm90_prepared(const kvpack_layer &layer, const kvpack_deltakv &d) {
  return 2 * matrix_bytes(layer, d) + layer.num_kv_heads * D * (4 + 2 * 2);
}

int deltakv_sm90_prepare(const kvpack_layer &layer, const kvpack_deltakv &d, void *prepared, void *stream) {
  return choose(layer, [&](auto type, auto) {
    using T = typename decltype(type)::type;
    const int heads = layer.num_kv_heads, half = layer.rotary_dim / 2, latents = d.latent_sizes[0];
    T *to_key = static_cast<T *>(prepared), *to_value = to_key + matrix_bytes(layer, d) / 2;
    float *offsets = reinterpret_cast<float *>(to_value + matrix_bytes(layer, d) / 2);
    int error = launch(prepare_sm90<T>, dim3(chunks_of(d) * 8, heads), dim3(256), 0, stream, d.decompress, latents,
                       heads, half, chunks_of(d), to_key, to_value);
    if (!error)
      error = launch(prepare_sm90_offsets<T>, dim3(heads), dim3(D), 0, stream, d.decompress, latents, heads, half,
                     offsets, reinterpret_cast<T *>(offsets + heads * D));
    return launched(error, "deltakv_sm90_prepare");
  });
}

int deltakv_sm90_decode(const kvpack_layer &layer, const kvpack_step &step, const kvpack_deltakv &d,
                        const void *prepared, const Decode &decode) {
  return choose(layer, [&](auto type, auto) {
    using T = typename decltype(type)::type;
    Decoding x = decoding_of(layer, step, d, decode);
    const char *matrices = static_cast<const char *>(prepared);
    x.to_key = reinterpret_cast<const uint4 *>(matrices);
    x.to_value = matrices + matrix_bytes(layer, d);
    x.offsets = reinterpret_cast<const float *>(matrices + 2 * matrix_bytes(layer, d));
    const dim3 grid(most_splits(x), layer.num_kv_heads, step.batch);
    const bool small = chunks_of(d) == 2;
    const auto kernel = small ? decode_rows_sm90<T, 2> : decode_rows_sm90<T, 4>;
    const size_t shared = small ? Room<2>::TOTAL : Room<4>::TOTAL;
    return launched(launch_early(kernel, grid, dim3(THREADS), shared, step.stream, x), "deltakv_sm90_decode");
  });
}

#else  // compiled for other architectures only

bool deltakv_sm90_fits(const kvpack_layer &, const kvpack_deltakv &) { return false; }
size_t deltakv_sm90_prepared(const kvpack_layer &, const kvpack_deltakv &) { return 0; }
int deltakv_sm90_prepare(const kvpack_layer &, const kvpack_deltakv &, void *, void *) { return KVPACK_UNSUPPORTED; }
int deltakv_sm90_decode(const kvpack_layer &, const kvpack_step &, const kvpack_deltakv &, const void *,
                        const Decode &) {
  return KVPACK_UNSUPPORTED;
}

#endif
}  // namespace kvpack
