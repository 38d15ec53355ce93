// Attention of one new token to DeltaKV's code rows on sm_90, for heads of 128 and latents of 4 bits: as
// deltakv_decode.cu does it, but keys are rebuilt by wgmma, whose first operand, codes, is made in registers and whose
// second, W_K of one head, stays in shared memory. All is latency here, so there are as many warps as registers allow:
// the two halves of a team have the lower and the upper blocks of the keys of the same rows, and later each half of the
// rows' values.
#include "deltakv_tile.cuh"
#include "exact.cuh"

namespace kvpack {

#if defined(KVPACK_SM90A) || defined(KVPACK_EMULATE)
namespace {

constexpr int D = 128, ROWS = 64, TEAMS = 2, TEAM = 256, THREADS = TEAMS * TEAM, WARPS = TEAM / 32;
constexpr int MINE = ROWS / WARPS;                    // rows whose references and codes a warp fetches
constexpr int FIELDS = 2, BLOCKS = D / 8, HALF = 8;  // codes in a byte; blocks of 8 columns of the keys, of a half
constexpr int STEP_BYTES = 16 * D * 2, PIECE = 4 * STEP_BYTES;  // of W_K for 16 latents; what is copied at once
constexpr float LEAST = 1e-12f;            // keys are made in units of the scale, or of this where that is less
static_assert(WARPS == HEADS && BLOCKS == 2 * HALF);

// Shared memory, in bytes, for rows of up to 64 CHUNKS bytes of codes. `teams` is what each of them has, from 0 again.
template <int CHUNKS> struct Room {
  static constexpr int STEPS = CHUNKS * 8;                 // of 16 latents
  static constexpr int STRIDE = CHUNKS * 64 + 16;          // of staged codes: rows are four banks apart
  static constexpr int MATRIX = STEPS * STEP_BYTES;
  static constexpr int offsets = MATRIX, barriers = offsets + D * 4, masses = barriers + 64;
  static constexpr int teams = masses + TEAMS * HEADS * 16;
  static constexpr int codes = 0, named = codes + 2 * ROWS * STRIDE, scales = named + 2 * ROWS * MAX_NEIGHBORS * 8;
  static constexpr int shares = scales + 2 * ROWS * 4, positions = shares + 2 * ROWS * 4;
  static constexpr int weights = positions + 2 * ROWS * 4;
  static constexpr int factors = weights + 2 * HEADS * (ROWS + 8) * 2, scores = factors + HEADS * 4;
  static constexpr int query = scores + 2 * HEADS * (ROWS + 4) * 4;
  static constexpr int TEAM_BYTES = query + BLOCKS * 32 * 4, TOTAL = teams + TEAMS * TEAM_BYTES;
  // In the end, over the teams' parts: sums of latents and of references, and operands of the last product.
  static constexpr int LATENTS = STEPS * 16 * HEADS * 4, MEANS = D * HEADS * 4;
  static constexpr int sums = teams, means = sums + TEAMS * LATENTS, operands = means + 2 * TEAMS * MEANS;
  static constexpr int products = operands + STEPS * 32 * 16;
  static_assert(products + D * HEADS * 4 <= TOTAL);
};

// A lane of quad place q has pairs 32 i + 8 q .. + 7 of the keys, one in each block of half i; column 2 q of a block is
// the first of the pair. A rotation's halves are a pair, and of what is not rotated, too, the lower and the upper half.
KVPACK_D int pair_at(int q, int block) { return block / HALF * 32 + q * 8 + block % HALF; }
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

KVPACK_D void meet_team() {
  static_assert(TEAMS == 2);
  if (threadIdx.x < TEAM) named_barrier<1, TEAM>();
  else named_barrier<2, TEAM>();
}

// What is known of a row one tile ahead: its number and, of neighbor lane / MINE, the reference's ordinal, of
// lane % MINE, and its scale.
struct Ahead {
  int row, ordinal;
  float scale;
};
KVPACK_D int row_at(const Decoding &d, const Work &w, int first) {
  return code_row(d, w, first + w.warp * MINE + w.lane % MINE);
}
template <class T> KVPACK_D void look_up(const Decoding &d, const Work &w, Ahead &ahead) {
  const int64_t row = int64_t(w.b) * d.code_rows + ahead.row;
  const int n = w.lane / MINE;
  ahead.ordinal = -1, ahead.scale = 0;
  if (ahead.row < 0) return;
  ahead.scale = to_float(static_cast<const T *>(d.scales)[row]);
  if (n < d.neighbors)
    ahead.ordinal = d.index_bytes == 2 ? __ldg(static_cast<const int16_t *>(d.index) + row * d.neighbors + n)
                                       : __ldg(static_cast<const int32_t *>(d.index) + row * d.neighbors + n);
}
template <class T, class Sizes> KVPACK_D void stage_codes(const Decoding &d, const Work &w, int row, int buffer) {
  const int piece = w.lane % 16 * 16;
  const int8_t *codes = d.codes + int64_t(w.b) * d.code_rows * d.latents.row_bytes + piece;
  unsigned char *to = w.shared + Sizes::codes + (buffer * ROWS + w.warp * MINE + w.lane / 16) * Sizes::STRIDE + piece;
#pragma unroll
  for (int i = 0; i < MINE; i += 2) {  // half a warp for a row
    const int from = __shfl_sync(~0u, row, i + w.lane / 16);
    if (from < 0 || piece >= d.latents.row_bytes) continue;  // any bits are a code, whose row or latent does not count
    copy_async_16(to + i * Sizes::STRIDE, codes + int64_t(from) * d.latents.row_bytes);
  }
  copy_async_commit();
}
KVPACK_D float unit_of(float scale) { return fabsf(scale) > LEAST ? scale : LEAST; }
// [2, ROWS, 2] references: they are read two at a time, and where there is none, `zeros` stands in. What is read of
// them, and the rows' cosines and sines, are sent to L2.
template <class T, class Sizes>
KVPACK_D void stage_rows(const Decoding &d, const Work &w, const Ahead &ahead, const T *zeros, int buffer) {
  const int r = w.warp * MINE + w.lane % MINE, n = w.lane / MINE;
  static_assert(32 / MINE == MAX_NEIGHBORS);
  const T *reference = ahead.ordinal < 0 ? zeros : reference_of<T>(d, w, ahead.ordinal);
  reinterpret_cast<const T **>(w.shared + Sizes::named)[((buffer * 2 + n / 2) * ROWS + r) * 2 + n % 2] = reference;
  if (n < d.neighbors) {
    reference += w.h * D;
    prefetch(reference), prefetch(reference + D / 2);
    prefetch(reference + d.width / 2), prefetch(reference + d.width / 2 + D / 2);
  }
  if (n == 0) {
    const int at = buffer * ROWS + r, position = ahead.row + d.geometry.sinks;
    reinterpret_cast<int *>(w.shared + Sizes::positions)[at] = ahead.row < 0 ? -1 : position;
    reinterpret_cast<float *>(w.shared + Sizes::scales)[at] = ahead.scale;
    reinterpret_cast<float *>(w.shared + Sizes::shares)[at] = d.share / unit_of(ahead.scale);
    const int64_t turn = rope_row(d.rope, position);
    if (d.rope.half > 0) prefetch(d.rope.cos + turn), prefetch(d.rope.sin + turn);
    if (d.rope.half > 32) prefetch(d.rope.cos + turn + 32), prefetch(d.rope.sin + turn + 32);
  }
}

// A lane's part of the keys of two references of its two rows: lower halves of its pairs, then upper ones.
struct Keys { uint4 of[2][2][2]; };
template <class T>
KVPACK_D void load_keys(const T *const *named, const int (&columns)[2], Keys &keys) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const T *row = named[r * 16 + n];
#pragma unroll
      for (int i = 0; i < 2; ++i) keys.of[r][n][i] = load_streamed(reinterpret_cast<const uint4 *>(row + columns[i]));
    }
}
KVPACK_D uint32_t word_of(const uint4 &four, int n) {
  return n == 0 ? four.x : n == 1 ? four.y : n == 2 ? four.z : four.w;
}
// keys[4 block + e] += share * the references'; both are in units of the row's scale.
template <class T> KVPACK_D void add_keys(const Keys &more, const float (&share)[2], float (&keys)[32]) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float2 a = unpack2<T>(word_of(more.of[r][0][i], word)), b = unpack2<T>(word_of(more.of[r][1][i], word));
        float *key = keys + word * 8 + r * 2 + i;
        key[0] = __fmaf_rn(a.x + b.x, share[r], key[0]);
        key[4] = __fmaf_rn(a.y + b.y, share[r], key[4]);
      }
}

// A lane's part of the values of two references: dimensions 4 (8 (warp % 4) + lane / 4) .. + 3 of rows 16 step + 2 q
// and the three that are 1, 8 and 9 further, of half the rows.
struct NearValues { uint2 of[2][ROWS / 32][4]; };
template <class T> KVPACK_D void load_values(const T *const *named, int column, NearValues &values) {
#pragma unroll
  for (int step = 0; step < ROWS / 32; ++step)
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const T *row = named[(step * 16 + e / 2 * 8 + e % 2) * 2 + n];
        values.of[n][step][e] = load_streamed(reinterpret_cast<const uint2 *>(row + column));
      }
}
// Operands of rows 16 step ..; `weights`: a lane's, of its head and of rows 2 q and on.
template <class T> KVPACK_D void load_weights(const T *weights, int step, uint32_t (&x)[2]) {
  x[0] = *reinterpret_cast<const uint32_t *>(weights + step * 16);
  x[1] = *reinterpret_cast<const uint32_t *>(weights + step * 16 + 8);
}
template <class T> KVPACK_D void sum_values(const NearValues &values, const T *weights, float (&sums)[2][4]) {
#pragma unroll
  for (int step = 0; step < ROWS / 32; ++step) {
    uint32_t x[2];
    load_weights(weights, step, x);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint2(&row)[4] = values.of[n][step];
      const uint32_t low[4] = {permute<0x5410>(row[0].x, row[1].x), permute<0x7632>(row[0].x, row[1].x),
                               permute<0x5410>(row[2].x, row[3].x), permute<0x7632>(row[2].x, row[3].x)};
      const uint32_t high[4] = {permute<0x5410>(row[0].y, row[1].y), permute<0x7632>(row[0].y, row[1].y),
                                permute<0x5410>(row[2].y, row[3].y), permute<0x7632>(row[2].y, row[3].y)};
      mma_16816<T>(sums[0], low, x);
      mma_16816<T>(sums[1], high, x);
    }
  }
}

// keys += the latents of the warp's 16 rows, less the offset of their codes, times W_K of half the blocks.
template <class T, class Sizes>
KVPACK_D void multiply_keys(uint32_t matrix, uint32_t codes, float (&keys)[32]) {
  const uint64_t first = wgmma_matrix(matrix, STEP_BYTES / 2, 128);
  const uint32_t address = uint32_t(first), strides = uint32_t(first >> 32);  // adding does not carry
  uint32_t a[2][4], low = 0, high = 0;
#pragma unroll
  for (int step = 0; step < Sizes::STEPS; ++step) {
    if (step % 2 == 0) {
      const uint32_t from = codes + step / 4 * 32 + step % 4 / 2 * 4;
      low = load_shared_32(from), high = load_shared_32(from + 8 * Sizes::STRIDE);
    }
    wgmma_wait<1>();  // the other half of `a` may still be read
    uint32_t(&x)[4] = a[step % 2];
    x[0] = pair_of_codes<T>(low, step % 2, 0), x[1] = pair_of_codes<T>(high, step % 2, 0);
    x[2] = pair_of_codes<T>(low, step % 2, 8), x[3] = pair_of_codes<T>(high, step % 2, 8);
    wgmma_fence();
    wgmma_64x64x16<T>(keys, x, uint64_t(strides) << 32 | (address + step * (STEP_BYTES >> 4)));
    wgmma_commit();
  }
}

// Cosines and sines of a lane's run of pairs, `first` and on, of a row.
struct Turn { float cos[HALF], sin[HALF]; };
KVPACK_D void load_turn(const Rope &rope, int position, int first, Turn &turn) {
  const int64_t at = rope_row(rope, position) + first;
#pragma unroll
  for (int e = 0; e < HALF; e += 4) {
    float4 c = make_float4(1, 1, 1, 1), s = make_float4(0, 0, 0, 0);
    if (first < rope.half) c = load_cached(rope.cos + at + e), s = load_cached(rope.sin + at + e);
    turn.cos[e] = c.x, turn.cos[e + 1] = c.y, turn.cos[e + 2] = c.z, turn.cos[e + 3] = c.w;
    turn.sin[e] = s.x, turn.sin[e + 1] = s.y, turn.sin[e + 2] = s.z, turn.sin[e + 3] = s.w;
  }
}
// The query's operands, rotated, uint32 [BLOCKS, 32 lanes]; zeros for heads that are not.
template <class T, class Sizes> KVPACK_D void load_query(const Decoding &d, const kvpack_step &step, const Work &w) {
  const int head = w.lane / 4, past = d.past_len[w.b];
  const T *from = static_cast<const T *>(step.q) + int64_t(w.b) * step.q_row + (w.h * d.merge.group + head) * D;
  uint32_t *query = reinterpret_cast<uint32_t *>(w.shared + Sizes::query) + w.lane;
#pragma unroll
  for (int n = 0; n < BLOCKS; n += WARPS) {
    const int pair = pair_at(w.lane % 4, n + w.warp);
    uint32_t two = 0;
    if (head < d.merge.group)
      two = pack2<T>(turned(d.rope, from, dimension_at(pair, 0, d.rope.half), past),
                     turned(d.rope, from, dimension_at(pair, 1, d.rope.half), past));
    query[(n + w.warp) * 32] = two;
  }
}
// Keys of half the blocks of row number r of a lane, rotated: its operands in a product with the query.
template <class T>
KVPACK_D void turn_keys(const Turn &turn, int r, float unit, const float (&keys)[32], uint32_t (&a)[HALF]) {
#pragma unroll
  for (int block = 0; block < HALF; ++block) {
    float cos = turn.cos[block], sin = turn.sin[block];
    if constexpr (IS_HALF<T>) cos *= unit, sin *= unit;  // or numbers may be too large
    const float2 pair = turn_pair(keys[block * 4 + r * 2], keys[block * 4 + r * 2 + 1], cos, sin);
    a[block] = pack2<T>(pair.x, pair.y);
  }
}
// Parts of scores of rows lane / 4 (+ 8), heads 2 q (+ 1).
template <class T>
KVPACK_D void multiply_query(const uint32_t (&a)[2][HALF], const uint32_t *query, const float (&unit)[2],
                             float (&scores)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) scores[e] = 0;
#pragma unroll
  for (int n = 0; n < HALF; n += 2) {
    const uint32_t x[4] = {a[0][n], a[1][n], a[0][n + 1], a[1][n + 1]}, b[2] = {query[n * 32], query[n * 32 + 32]};
    mma_16816<T>(scores, x, b);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if constexpr (!IS_HALF<T>) scores[e] *= unit[e / 2];
}

// sums [EACH x 16 of the warp's latents, HEADS] += codes^T weights. `codes`, `weights`: the lane's bytes and operands,
// of rows 2 q and on.
template <class T, int EACH>
KVPACK_D void sum_latents(const unsigned char *codes, const T *weights, float (&sums)[EACH][4]) {
  static_assert(EACH == 2 || EACH == 4);
#pragma unroll
  for (int step = 0; step < ROWS / 16; ++step) {
    uint32_t words[4], x[2];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const unsigned char *from = codes + (step * 16 + e / 2 * 8 + e % 2) * Room<EACH>::STRIDE;
      if constexpr (EACH == 4) words[e] = *reinterpret_cast<const uint32_t *>(from);
      else words[e] = *reinterpret_cast<const uint16_t *>(from);
    }
    load_weights(weights, step, x);
    const uint32_t low[2] = {permute<0x5410>(words[0], words[1]), permute<0x7632>(words[0], words[1])};
    const uint32_t high[2] = {permute<0x5410>(words[2], words[3]), permute<0x7632>(words[2], words[3])};
#pragma unroll
    for (int byte = 0; byte < EACH; ++byte) {
      const int up = byte % 2 * 8;
      const uint32_t a[4] = {pair_of_codes<T>(low[byte / 2], 0, up), pair_of_codes<T>(low[byte / 2], 1, up),
                             pair_of_codes<T>(high[byte / 2], 0, up), pair_of_codes<T>(high[byte / 2], 1, up)};
      mma_16816<T>(sums[byte], a, x);
    }
  }
}

// decode_begin's work (see step.cuh) by a team; a function, not inlined, as the loop over rows would pay in registers.
template <class T>
__device__ __noinline__ void attend_exact_sm90(const Decoding &d, const ExactRows &exact, const kvpack_step &step,
                                               int pair, int team) {
  KVPACK_DYNAMIC_SHARED(shared);
  const int heads = d.merge.kv_heads;
  attend_exact<T, D, WARPS>(shared + team * attend_exact_bytes<D, WARPS>, exact, step, d.merge.decode, d.rope,
                            {d.scale, d.softcap}, heads, d.merge.group, 0, true, pair % heads, pair / heads, {team});
}

// Blocks: the splits of every KV head of every sequence; then those whose teams do decode_begin's work (see step.cuh)
// for a KV head of a sequence each, which in a batch of one the multiprocessors that are left do meanwhile.
template <class T, int CHUNKS>
__global__ void __launch_bounds__(THREADS, 1)
    decode_rows_sm90(const __grid_constant__ Decoding d, const __grid_constant__ ExactRows exact,
                     const __grid_constant__ kvpack_step step) {
  let_next_kernel_start();
  using Sizes = Room<CHUNKS>;
  constexpr int STEPS = Sizes::STEPS, EACH = CHUNKS;  // bytes of a row whose sums a lane keeps
  KVPACK_DYNAMIC_SHARED(shared);
  const int team = int(threadIdx.x) / TEAM, thread = int(threadIdx.x) % TEAM;
  const int heads = d.merge.kv_heads, split = int(blockIdx.x) % d.splits, pair = int(blockIdx.x) / d.splits;
  const int after = int(blockIdx.x) - d.splits * heads * step.batch;
  if (after >= 0) {
    const int own = after * TEAMS + team;
    if (own < heads * step.batch) attend_exact_sm90<T>(d, exact, step, own, team);
    return;
  }
  const int h = pair % heads, b = pair / heads, rows = rows_to_read(d, b), used = splits_of(d, rows);
  if (split >= used) return;
  Work w = {b, h, rows, encoded_rows(d.geometry, d.past_len[b]), thread, thread / 32, thread % 32,
            shared + Sizes::teams + team * Sizes::TEAM_BYTES};
  const int tiles = (rows + ROWS - 1) / ROWS;
  int g = w.lane / 4, q = w.lane % 4, half = w.warp / 4;
  const int begin = int(int64_t(tiles) * split / used), end = int(int64_t(tiles) * (split + 1) / used);
  const int first_row = (begin + team) * ROWS, last_row = end * ROWS, rows_on = TEAMS * ROWS;
  const T *zeros = reinterpret_cast<const T *>(d.offsets + d.merge.kv_heads * D);
  // By a shuffle the compiler knows that this is the same in a warp.
  const uint32_t matrix = shared_address(shared) + __shfl_sync(~0u, w.warp / 4, 0) * (HALF * 128);
  uint64_t *barriers = reinterpret_cast<uint64_t *>(shared + Sizes::barriers);  // W_K and W_V are there
  unsigned *done = reinterpret_cast<unsigned *>(barriers + 2);                   // teams that need W_K no more
  const auto copy_matrix = [&](const void *from, uint64_t *barrier) {
    const char *of_head = static_cast<const char *>(from) + int64_t(h) * Sizes::MATRIX;
    copy_bulk(shared, of_head, PIECE, Sizes::MATRIX / PIECE, PIECE, barrier);
  };
  const auto leave_keys = [&] {  // by a thread of a team whose warps all left: W_V takes the place of W_K
    __threadfence_block();
    if (atomicAdd(done, 1u) + 1 == TEAMS) copy_matrix(d.to_value, barriers + 1);
  };

  if (threadIdx.x == 0) {
    barrier_init(barriers, 1);
    barrier_init(barriers + 1, 1);
    *done = 0;
    fence_async();
    copy_matrix(d.to_key, barriers);
  }
  Ahead ahead;
  ahead.row = first_row < last_row ? row_at(d, w, first_row) : -1;
  int next = first_row + rows_on < last_row ? row_at(d, w, first_row + rows_on) : -1;
  look_up<T>(d, w, ahead);
  stage_codes<T, Sizes>(d, w, ahead.row, 0);
  load_query<T, Sizes>(d, step, w);
  float *offsets = reinterpret_cast<float *>(shared + Sizes::offsets);
  if (threadIdx.x < D) offsets[thread] = d.offsets[h * D + thread];
  stage_rows<T, Sizes>(d, w, ahead, zeros, 0);
  prefetch_lines(static_cast<const char *>(d.to_value) + int64_t(h) * Sizes::MATRIX, Sizes::MATRIX,
                 int(threadIdx.x) * used + split, THREADS * used);
  int row, first_pair, columns[2], value_row, value_column;  // columns: of a lane's parts of a key
  const auto find_place = [&] {  // in the loop anew, to spare registers
    w.lane = computed_here(w.lane), w.warp = computed_here(w.warp);
    g = w.lane / 4, q = w.lane % 4, half = w.warp / 4;
    row = w.warp % 4 * 16 + g, first_pair = half * 32 + q * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) columns[i] = h * D + dimension_at(first_pair, i, d.rope.half);
    value_row = half * (ROWS / 2) + q * 2, value_column = d.width / 2 + h * D + (w.warp % 4 * 8 + g) * 4;
  };
  find_place();
  const auto named_row = [&](int row, int buffer) {  // two references; the other two are ROWS further
    return reinterpret_cast<const T *const *>(w.shared + Sizes::named) + (buffer * 2 * ROWS + row) * 2;
  };
  __syncthreads();
  Keys near_keys;
  if (first_row < last_row) load_keys<T>(named_row(row, 0), columns, near_keys);
  if (first_row >= last_row && thread == 0) leave_keys();

  float sums[EACH][4] = {}, mean_sums[2][4] = {};
  float top = NOTHING, mass = 0, code_mass = 0;  // of head w.warp; the masses are of a lane's rows alone
  float *factors = reinterpret_cast<float *>(w.shared + Sizes::factors);  // [HEADS]: by which older sums shrink
  int at = first_row, buffer = 0;
#pragma unroll 1
  for (; at < last_row; at += rows_on, buffer ^= 1) {
    find_place();
    const bool more = at + rows_on < last_row;
    const unsigned char *codes = w.shared + Sizes::codes + buffer * ROWS * Sizes::STRIDE;
    const float *scales = reinterpret_cast<const float *>(w.shared + Sizes::scales) + buffer * ROWS;
    const int *positions = reinterpret_cast<const int *>(w.shared + Sizes::positions) + buffer * ROWS;
    {
      Ahead ahead;
      ahead.row = next;
      next = at + 2 * rows_on < last_row ? row_at(d, w, at + 2 * rows_on) : -1;
      look_up<T>(d, w, ahead);
      float keys[32], scores[4], unit[2], share[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unit[r] = unit_of(scales[row + r * 8]);
        share[r] = scales[(Sizes::shares - Sizes::scales) / 4 + row + r * 8];
      }
#pragma unroll
      for (int n = 0; n < HALF; ++n) {
        const float2 two = *reinterpret_cast<const float2 *>(offsets + (half * HALF + n) * 8 + q * 2);
        keys[n * 4] = keys[n * 4 + 2] = two.x, keys[n * 4 + 1] = keys[n * 4 + 3] = two.y;
      }
      add_keys<T>(near_keys, share, keys);
      if (d.neighbors > 2) {
        load_keys<T>(named_row(row + ROWS, buffer), columns, near_keys);
        add_keys<T>(near_keys, share, keys);
      }
      Turn turn;
      load_turn(d.rope, positions[row], first_pair, turn);
      copy_async_wait<0>();
      meet_team();  // all have their codes, and the older ones were read
      if (more) {
        stage_codes<T, Sizes>(d, w, ahead.row, buffer ^ 1);
        stage_rows<T, Sizes>(d, w, ahead, zeros, buffer ^ 1);
      }
      if (at == first_row) barrier_wait(barriers, 0);
      hold(keys);
      multiply_keys<T, Sizes>(matrix, shared_address(codes) + row * Sizes::STRIDE + q * 8, keys);
      wgmma_wait<0>();
      hold(keys);
      uint32_t turned[2][HALF];
      turn_keys<T>(turn, 0, unit[0], keys, turned[0]);
      load_turn(d.rope, positions[row + 8], first_pair, turn);
      turn_keys<T>(turn, 1, unit[1], keys, turned[1]);
      const uint32_t *query = reinterpret_cast<const uint32_t *>(w.shared + Sizes::query) + half * (HALF * 32);
      multiply_query<T>(turned, query + w.lane, unit, scores);
      float *parts = reinterpret_cast<float *>(w.shared + Sizes::scores);  // [2 halves, HEADS, ROWS + 4]
#pragma unroll
      for (int e = 0; e < 4; ++e)
        parts[(half * HEADS + q * 2 + e % 2) * (ROWS + 4) + row + e / 2 * 8] = scores[e];
    }
    find_place();
    NearValues values;
    load_values<T>(named_row(value_row, buffer), value_column, values);
    meet_team();

    if (!more && thread == 0) leave_keys();
    T *weights = reinterpret_cast<T *>(w.shared + Sizes::weights);  // [2, HEADS, ROWS + 8]: then times the scale
    {
      const float *parts = reinterpret_cast<const float *>(w.shared + Sizes::scores) + w.warp * (ROWS + 4) + w.lane;
      float score[2], found = top;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        score[r] = (parts[r * 32] + parts[r * 32 + HEADS * (ROWS + 4)]) * d.scale;
        if (d.softcap > 0) score[r] = d.softcap * tanh_fast(score[r] / d.softcap);
        score[r] = positions[w.lane + r * 32] >= 0 ? score[r] * LOG2E : 2 * NOTHING;
        found = fmaxf(found, score[r]);
      }
#pragma unroll
      for (int x = 16; x; x /= 2) found = fmaxf(found, __shfl_xor_sync(~0u, found, x));
      const float factor = exp2_fast(top - found);
      top = found;
      mass *= factor, code_mass *= factor;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float weight = exp2_fast(score[r] - top);  // 0 where nothing is read
        const T scaled = from_float<T>(weight * scales[w.lane + r * 32]);
        mass += weight, code_mass += to_float(scaled);
        T *to = weights + w.warp * (ROWS + 8) + w.lane + r * 32;
        *to = from_float<T>(weight);
        to[HEADS * (ROWS + 8)] = scaled;
      }
      if (w.lane == 0) factors[w.warp] = factor;
    }
    meet_team();

    find_place();
    const float2 factor = *reinterpret_cast<const float2 *>(factors + q * 2);
#pragma unroll
    for (int n = 0; n < EACH; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] *= e % 2 ? factor.y : factor.x;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) mean_sums[n][e] *= e % 2 ? factor.y : factor.x;
    const T *own_weights = weights + g * (ROWS + 8) + q * 2;
    const T *scaled = own_weights + HEADS * (ROWS + 8), *plain = own_weights + half * (ROWS / 2);
    const unsigned char *own_codes = codes + q * 2 * Sizes::STRIDE + (w.warp * 8 + g) * EACH;
    sum_values<T>(values, plain, mean_sums);
    if (d.neighbors > 2) {
      load_values<T>(named_row(value_row + ROWS, buffer), value_column, values);
      sum_values<T>(values, plain, mean_sums);
    }
    if (more) load_keys<T>(named_row(row, buffer ^ 1), columns, near_keys);
    sum_latents<T, EACH>(own_codes, scaled, sums);
  }
  if (at - team * ROWS < last_row)  // a tile less than others: checkers of races want as many barriers of every team
    for (int n = 0; n < 3; ++n) meet_team();

  // The teams' sums together, in order, as operands in two parts of 16 bits; then W_V.
  copy_async_wait<0>();
  __syncthreads();
  float4 *masses = reinterpret_cast<float4 *>(shared + Sizes::masses);  // [TEAMS, HEADS]: top, all, of codes
  float *latent_sums = reinterpret_cast<float *>(shared + Sizes::sums) + team * (STEPS * 16 * HEADS);
  float *means = reinterpret_cast<float *>(shared + Sizes::means) + (team * 2 + half) * D * HEADS;
  uint4 *operands = reinterpret_cast<uint4 *>(shared + Sizes::operands);
#pragma unroll
  for (int x = 16; x; x /= 2) {
    mass += __shfl_xor_sync(~0u, mass, x);
    code_mass += __shfl_xor_sync(~0u, code_mass, x);
  }
  if (w.lane == 0) masses[team * HEADS + w.warp] = make_float4(top, mass, code_mass, 0);
#pragma unroll
  for (int n = 0; n < EACH; ++n)
#pragma unroll
    for (int high = 0; high < 2; ++high)
      *reinterpret_cast<float2 *>(latent_sums + ((w.warp * EACH + n) * 16 + high * 8 + g) * HEADS + q * 2) =
          make_float2(sums[n][high * 2], sums[n][high * 2 + 1]);
#pragma unroll
  for (int e = 0; e < 4; ++e)
    *reinterpret_cast<float2 *>(means + ((w.warp % 4 * 8 + g) * 4 + e) * HEADS + q * 2) =
        make_float2(mean_sums[e / 2][e % 2 * 2], mean_sums[e / 2][e % 2 * 2 + 1]);
  __syncthreads();
  latent_sums = reinterpret_cast<float *>(shared + Sizes::sums);
  means = reinterpret_cast<float *>(shared + Sizes::means);
  // The largest score of a head, the mass, and how each team's sums count.
  const auto together = [&](int head, float (&shares)[TEAMS], float (&middles)[TEAMS]) {
    float most = NOTHING, all = 0;
#pragma unroll
    for (int t = 0; t < TEAMS; ++t) most = fmaxf(most, masses[t * HEADS + head].x);
#pragma unroll
    for (int t = 0; t < TEAMS; ++t) {
      const float4 one = masses[t * HEADS + head];
      shares[t] = exp2_fast(one.x - most);
      middles[t] = one.z * middle_of<T>(field_slot(0));
      all += one.y * shares[t];
    }
    return make_float2(most, all);
  };
  float shares[TEAMS], middles[TEAMS];
  const float2 total = together(g, shares, middles);
  const float less = total.y > 0 ? 1 / total.y : 0;
  const int warp = int(threadIdx.x) / 32;
  for (int step = warp; step < STEPS; step += THREADS / 32) {
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
  float parts[2][4] = {};
  const int block = warp % 8, first_step = warp / 8 * (STEPS / 2);  // of 16 dimensions; of half the latents
  const uint4 *values = reinterpret_cast<const uint4 *>(shared) + block * STEPS * 32 + w.lane;
#pragma unroll 8
  for (int step = first_step; step < first_step + STEPS / 2; ++step) {
    const uint4 x = values[step * 32], y = operands[step * 32 + w.lane];
    const uint32_t a[4] = {x.x, x.y, x.z, x.w}, high[2] = {y.x, y.y}, low[2] = {y.z, y.w};
    mma_16816<T>(parts[0], a, high);
    mma_16816<T>(parts[1], a, low);
  }
  float4 *products = reinterpret_cast<float4 *>(shared + Sizes::products) + block * 32 + w.lane;  // of the upper half
  float out[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) out[e] = parts[0][e] + parts[1][e];
  if (warp / 8 == 1) *products = make_float4(out[0], out[1], out[2], out[3]);
  __syncthreads();
  if (warp / 8 == 0) {
    const float4 other = *products;
    out[0] += other.x, out[1] += other.y, out[2] += other.z, out[3] += other.w;
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
        for (int t = 0; t < 2 * TEAMS; ++t) mean += shares[t / 2] * means[(t * D + column) * HEADS + head];
        decode.partial[slot * D + column] = out[high * 2 + e] * all.y + mean * d.share;
      }
      if (block == 0 && g == 0) decode.mass[slot] = all;
    }
  }
}

// Grid (KV heads, batch). A kernel of its own, as there is nobody to zero counters before the other one.
template <class T> __global__ void __launch_bounds__(32 * HEADS) merge_decode_sm90(const __grid_constant__ Decoding d) {
  const int h = blockIdx.x, b = blockIdx.y, used = splits_of(d, rows_to_read(d, b));
  wait_for_previous_kernel();
  merge_slots<T, D, false>(d.merge, b, h, used);
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
    to_value[start + i] = value(sum_byte(step, k, chunks), k / 8, (kv_heads + h) * D + column);
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
                        const void *prepared, const ExactRows &exact, const Decode &decode) {
  return choose(layer, [&](auto type, auto) {
    using T = typename decltype(type)::type;
    Decoding x = decoding_of(layer, step, d, decode);
    const char *matrices = static_cast<const char *>(prepared);
    x.to_key = reinterpret_cast<const uint4 *>(matrices);
    x.to_value = matrices + matrix_bytes(layer, d);
    x.offsets = reinterpret_cast<const float *>(matrices + 2 * matrix_bytes(layer, d));
    x.splits = most_splits(x);
    const int pairs = layer.num_kv_heads * step.batch;
    const bool small = chunks_of(d) == 2;
    const auto kernel = small ? decode_rows_sm90<T, 2> : decode_rows_sm90<T, 4>;
    const size_t shared = max(small ? Room<2>::TOTAL : Room<4>::TOTAL, TEAMS * int(attend_exact_bytes<D, WARPS>));
    int error = launch(kernel, dim3(x.splits * pairs + (pairs + TEAMS - 1) / TEAMS), dim3(THREADS), shared, step.stream,
                       x, exact, step);
    if (!error)
      error = launch_early(merge_decode_sm90<T>, dim3(layer.num_kv_heads, step.batch), dim3(32 * HEADS), 0, step.stream,
                           x);
    return launched(error, "deltakv_sm90_decode");
  });
}

#else  // compiled for other architectures only

bool deltakv_sm90_fits(const kvpack_layer &, const kvpack_deltakv &) { return false; }
size_t deltakv_sm90_prepared(const kvpack_layer &, const kvpack_deltakv &) { return 0; }
int deltakv_sm90_prepare(const kvpack_layer &, const kvpack_deltakv &, void *, void *) { return KVPACK_UNSUPPORTED; }
int deltakv_sm90_decode(const kvpack_layer &, const kvpack_step &, const kvpack_deltakv &, const void *,
                        const ExactRows &, const Decode &) {
  return KVPACK_UNSUPPORTED;
}

#endif
}  // namespace kvpack
