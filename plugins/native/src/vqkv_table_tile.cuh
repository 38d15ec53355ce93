// Decode attention over VQKV codes by tables: making a table, and what a warp does with tiles. See vqkv_table.cu.
#pragma once
#include "vqkv_table_merge.cuh"

namespace kvpack {
namespace vqkv_table {

constexpr unsigned TABLE_BYTES = ENTRIES * 256;  // of 32 columns of keys, or of both copies of the values
constexpr unsigned TABLES_AT = 2048;  // shared address of the tables: known when compiled, so that no lookup adds it

// Lookups beyond 32 come by eights: `extra`. They have a table of their own.
__host__ __device__ constexpr int key_tables(int extra) { return extra ? 2 : 1; }
// Sums of an item are merged beside the work on the next, where there is space for both.
__host__ __device__ constexpr int buffers(int extra) { return extra ? 1 : 2; }

constexpr int QUERY_STRIDE = D + 8;  // rows are 16 bytes apart in banks
constexpr int KEY_PARTS = 4;  // in which codewords of keys come
constexpr unsigned PART_BYTES = TABLE_BYTES / KEY_PARTS;

// A block's shared memory. Nothing is static there: the first three and the barriers are before TABLES_AT.
struct Shared {
  struct Plan {
    int past, tiles, each, first, last;  // of a sequence: items first .. last - 1 are the block's
  } *plan;                       // [32], of as many sequences
  float *offset;                 // [HEADS]: q.mean
  uint64_t *stored;              // barrier: a phase ends when all warps' sums of an item are stored
  uint64_t *values_came;         // barrier: a phase ends when the values' codewords have come
  uint64_t *keys_came;           // [KEY_PARTS]
  unsigned char *keys, *values;  // tables
  float2 *mass;                  // [buffers][WARPS][HEADS]
  float *sums;                   // [buffers][WARPS][HEADS][D]
  uint16_t *query;               // half [HEADS][D]: q' in log2 units, where sums will be
  uint16_t *rotated;             // T [HEADS][QUERY_STRIDE]: q, after it
  KVPACK_D Shared(unsigned char *memory, int extra)
      : plan((Plan *)memory), offset((float *)(plan + 32)), stored((uint64_t *)(offset + HEADS)),
        values_came(stored + 1), keys_came(stored + 2), keys(memory + (TABLES_AT - shared_address(memory))),
        values(keys + key_tables(extra) * TABLE_BYTES), mass((float2 *)(values + TABLE_BYTES)),
        sums((float *)(mass + buffers(extra) * WARPS * HEADS)), query((uint16_t *)sums), rotated(query + HEADS * D) {}
};
static_assert(32 * sizeof(Shared::Plan) + HEADS * 4 + (2 + KEY_PARTS) * 8 <= TABLES_AT - 1024);
constexpr size_t shared_bytes(int extra) {  // the first shared address is 1024
  return TABLES_AT - 1024 + (key_tables(extra) + 1) * TABLE_BYTES + buffers(extra) * WARPS * HEADS * (D * 4 + 8);
}

// -- making the table

template <class T> KVPACK_D uint32_t as_halves(const T *two) {
  const uint32_t pair = *reinterpret_cast<const uint32_t *>(two);
  if constexpr (std::is_same_v<T, half_t>) return pair;
  const float2 x = unpack2<T>(pair);
  return pack2<half_t>(x.x, x.y);
}

// q' and q.mean, times a scale, of 4 heads. A warp does 8 rows of the decode matrix.
struct Query {
  static_assert(WARPS == D / 8 && WARPS >= HEADS);
  uint4 fragment[D / 32];
  float mean[D / 32];
  KVPACK_D Query(const uint4 *decode, const float *k_mean, int lane, int warp) {
#pragma unroll
    for (int n = 0; n < D / 32; ++n)
      fragment[n] = __ldg(decode + (warp * (D / 32) + n) * 32 + lane), mean[n] = __ldg(k_mean + 32 * n + lane);
  }
  template <class T> KVPACK_D void store(const Shared &s, float scale, int lane, int warp) const {
    const int row = lane >> 2, column = lane & 3;
    const T *q = reinterpret_cast<const T *>(s.rotated);
    float own[D / 32] = {};  // of head `warp`
    uint32_t left[D / 16][4] = {};
#pragma unroll
    for (int n = 0; n < D / 16; ++n)
      if (row < HEADS) {
        const T *at = q + row * QUERY_STRIDE + 16 * n + 2 * column;
        left[n][0] = as_halves(at), left[n][2] = as_halves(at + 8);
      }
    if (warp < HEADS)
#pragma unroll
      for (int n = 0; n < D / 32; ++n) own[n] = to_float(q[warp * QUERY_STRIDE + 32 * n + lane]);
    float c[4][4] = {}, sum = 0;  // sums apart: this is all latency
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      const uint4 &f = fragment[n / 2];
      const uint32_t right[2] = {n % 2 ? f.z : f.x, n % 2 ? f.w : f.y};
      mma_16816<half_t>(c[n % 4], left[n], right);
    }
    if (row < HEADS)
      reinterpret_cast<uint32_t *>(s.query)[(row * D + 8 * warp) / 2 + column] =
          pack2<half_t>((c[0][0] + c[1][0] + (c[2][0] + c[3][0])) * scale,
                        (c[0][1] + c[1][1] + (c[2][1] + c[3][1])) * scale);
#pragma unroll
    for (int n = 0; n < D / 32; ++n) sum += own[n] * mean[n];
#pragma unroll
    for (int n = 16; n; n >>= 1) sum += __shfl_xor_sync(~0u, sum, n);
    if (warp < HEADS && lane == 0) s.offset[warp] = sum * scale;
  }
};

// Codewords to products with q', in place. A warp does 8 rows of 16 columns at a time: codewords on the right of the
// mma, on its left the query's 4 dimensions of 4 columns, a row for a head and column. first_group: of each 4 columns.
// turn: how often codewords came before.
template <int TABLES>
KVPACK_D void make_products(const Shared &s, const uint8_t (&first_group)[16], int turn, int lane, int warp) {
  constexpr int BLOCKS = 2, CHUNKS = ENTRIES / 8 * BLOCKS / WARPS;  // halves of a row; of a warp in one of them
  static_assert(CHUNKS == KEY_PARTS);
  const int row = lane >> 2, column = lane & 3, block = warp % BLOCKS;
  const bool mine = row >> 1 == column;
#pragma unroll
  for (int table = 0; table < TABLES; ++table) {
    uint32_t left[4][4] = {};
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) {
      const int group = first_group[table * 8 + block * 4 + quad] + column;
      const uint16_t *q = s.query + (row & 1) * 2 * D + group * 4;
      const uint2 first = *reinterpret_cast<const uint2 *>(q), second = *reinterpret_cast<const uint2 *>(q + D);
      if (mine) left[quad][0] = first.x, left[quad][1] = second.x, left[quad][2] = first.y, left[quad][3] = second.y;
    }
    unsigned char *half = s.keys + table * TABLE_BYTES + warp / BLOCKS * 2048 + block * 128;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      if (table == 0) barrier_wait(s.keys_came + chunk, turn);
      unsigned char *at = half + chunk * PART_BYTES;
      uint4 loaded[2];
#pragma unroll
      for (int n = 0; n < 2; ++n)
        loaded[n] = *reinterpret_cast<const uint4 *>(at + (n * 4 + lane / 8) * 256 + lane % 8 * 16);
      __syncwarp();
      uint32_t word[4][2];  // of 4 columns each: two rows
#pragma unroll
      for (int quad = 0; quad < 4; ++quad) {
        const uint4 &both = loaded[quad / 2];
        const uint32_t right[2] = {quad % 2 ? both.z : both.x, quad % 2 ? both.w : both.y};
        float c[4] = {};
        mma_16816<half_t>(c, left[quad], right);
        word[quad][0] = pack2<half_t>(c[0], c[2]);
        word[quad][1] = pack2<half_t>(c[1], c[3]);
      }
      // Word `step` becomes the one of quad (step ^ column): then no two lanes store to a bank.
      auto exchange = [&](uint32_t &x, uint32_t &y, bool really) {
        const uint32_t old = x;
        x = really ? y : x;
        y = really ? old : y;
      };
      uint32_t *memory = reinterpret_cast<uint32_t *>(at) + row;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        exchange(word[0][n], word[1][n], column & 1);
        exchange(word[2][n], word[3][n], column & 1);
        exchange(word[0][n], word[2][n], column & 2);
        exchange(word[1][n], word[3][n], column & 2);
#pragma unroll
        for (int step = 0; step < 4; ++step) memory[(2 * column + n) * 64 + (step ^ column) * 8] = word[step][n];
      }
    }
  }
}

// -- a warp's tiles

template <int EXTRA> struct KeyCodes {  // of rows l / 4 and l / 4 + 8
  uint4 main;
  uint2 middle;     // EXTRA 2, 3
  uint32_t narrow;  // EXTRA 1, 3
  uint4 wide;       // EXTRA 4
  KVPACK_D void load(const unsigned char *at, int lane) {  // at: of the lane's part of `main`
    main = load_streamed(reinterpret_cast<const uint4 *>(at));
    at += 512;
    if constexpr (EXTRA == 4) wide = load_streamed(reinterpret_cast<const uint4 *>(at));
    if constexpr (EXTRA == 2 || EXTRA == 3) middle = load_streamed(reinterpret_cast<const uint2 *>(at - lane * 8));
    if constexpr (EXTRA == 3) at += 256;
    if constexpr (EXTRA == 1 || EXTRA == 3) narrow = load_streamed(reinterpret_cast<const uint32_t *>(at - lane * 12));
  }
};

// Byte CODE of `codes` is the row, byte PLACE of `places` (below 128) the place in half a row of 256 bytes.
template <int CODE, int PLACE> KVPACK_D uint32_t table_address(uint32_t codes, uint32_t places) {
  constexpr uint32_t zero = 8 | (4 + PLACE);  // the byte's sign
  return permute<(4 + PLACE) | CODE << 4 | zero << 8 | zero << 12>(codes, places);
}

// Products of 4 heads with one key each of rows l / 4, from a block of 16 or 8 columns.
template <int CODE, int PLACE> KVPACK_D uint2 product(uint32_t codes, uint32_t places, uint32_t table) {
  return load_shared_64(table_address<CODE, PLACE>(codes, places) + table);
}

template <int EXTRA> struct Scorer {
  static constexpr int HALF = 8 + 2 * EXTRA;  // products of a lane with each of its two keys
  uint32_t places, narrow;  // places of 4 steps in a block of 16 columns, of 2 in one of 8
  uint32_t select[4];       // of an mma: row n sums head n % 4

  KVPACK_D Scorer(int lane) : places(0), narrow(0) {
    const int row = lane >> 2, column = lane & 3;
    for (int n = 0; n < 4; ++n) places |= uint32_t(8 * (4 * (n ^ (row & 3)) + column)) << (8 * n);
    for (int n = 0; n < 2; ++n) narrow |= uint32_t(8 * (4 * ((row & 2) | (n ^ (row & 1))) + column)) << (8 * n);
    for (int n = 0; n < 4; ++n) {  // rows 8-15 are not used: they differ so that a register is kept for each
      const int head = (row + n % 2) & 3;
      const uint32_t one = head & 1 ? 0x3C000000 : 0x3C00;
      select[n] = head / 2 == n / 2 ? one : 0;
    }
  }
  KVPACK_D void load_16(uint2 *products, uint32_t codes, uint32_t table) const {
    products[0] = product<0, 0>(codes, places, table);
    products[1] = product<1, 1>(codes, places, table);
    products[2] = product<2, 2>(codes, places, table);
    products[3] = product<3, 3>(codes, places, table);
  }
  // Of row l / 4 (HIGH 0) or l / 4 + 8.
  template <int HIGH> KVPACK_D void load(uint2 (&products)[HALF], const KeyCodes<EXTRA> &codes) const {
    constexpr uint32_t table = TABLES_AT, more = table + TABLE_BYTES;
    load_16(products, HIGH ? codes.main.z : codes.main.x, table);
    load_16(products + 4, HIGH ? codes.main.w : codes.main.y, table + 128);
    if constexpr (EXTRA == 4) {
      load_16(products + 8, HIGH ? codes.wide.z : codes.wide.x, more);
      load_16(products + 12, HIGH ? codes.wide.w : codes.wide.y, more + 128);
    }
    if constexpr (EXTRA == 2 || EXTRA == 3) load_16(products + 8, HIGH ? codes.middle.y : codes.middle.x, more);
    if constexpr (EXTRA == 1 || EXTRA == 3) {
      products[HALF - 2] = product<2 * HIGH, 0>(codes.narrow, narrow, more + (EXTRA == 3 ? 128 : 0));
      products[HALF - 1] = product<2 * HIGH + 1, 1>(codes.narrow, narrow, more + (EXTRA == 3 ? 128 : 0));
    }
  }
  // Of 8 rows the scores of rows 2 (l % 4) and the next, of head l / 4 % 4, counted from `from`. Products are added in
  // twos as halves.
  KVPACK_D void sum(float (&score)[4], const float (&from)[4], const uint2 (&products)[HALF]) const {
#pragma unroll
    for (int n = 0; n < HALF; n += 2) {
      const uint32_t right[2] = {sum2(products[n].x, products[n + 1].x), sum2(products[n].y, products[n + 1].y)};
      if (n) mma_16816<half_t>(score, select, right);
      else mma_16816_from(score, from, select, right);
    }
  }
};

// Copies of a value that the compiler takes for different ones: the four registers in a row that an mma wants are then
// kept, not made anew for each.
template <class V> KVPACK_D V own_copy(V x, int lane) { return __shfl_sync(~0u, x, lane); }

// Softmax and the weighted sum of values. Row n = l / 4 of an mma with scores is head n % 4; lane l has a weight for
// the rows of its columns where n / 4 == l % 4 / 2, else the score NOTHING.
struct Running {
  float largest = 0, limit = NOTHING;  // limit: scores above `largest` + this make it rise
  float from[4];                       // what scores are counted from: -largest
  float mass = 0;
  float sum[4][4] = {};        // [16 groups x 2 dimensions] of mma columns 2 (l % 4), 2 (l % 4) + 1, see store_sums
  uint32_t weight[2][2];       // of rows of the lane's own columns, of the columns l % 4 ^ 2

  KVPACK_D Running(int lane) { count_from(lane); }
  KVPACK_D void count_from(int lane) {
#pragma unroll
    for (int n = 0; n < 4; ++n) from[n] = own_copy(lane >> 4 == (lane >> 1 & 1) ? -largest : NOTHING, lane);
  }
  KVPACK_D void weigh(float (&score)[2][4], int lane) {
    float high = fmaxf(fmaxf(score[0][0], score[0][1]), fmaxf(score[1][0], score[1][1]));
    if (__any_sync(~0u, high > limit)) {
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 16));
      const bool first = limit < 0;
      const float rise = first ? high : fmaxf(high, 0.f), factor = first ? 1 : exp2_fast(-rise);
      largest += rise;
      count_from(lane);
      limit = 8;
      mass *= factor;
#pragma unroll
      for (int n = 0; n < 2; ++n) score[n][0] -= rise, score[n][1] -= rise;
      const int head = (lane & 1) * 2;
      const float even = __shfl_sync(~0u, factor, head * 4), odd = __shfl_sync(~0u, factor, head * 4 + 4);
#pragma unroll
      for (int n = 0; n < 4; ++n) sum[n][0] *= even, sum[n][1] *= odd, sum[n][2] *= even, sum[n][3] *= odd;
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float even = exp2_fast(score[n][0]), odd = exp2_fast(score[n][1]);
      mass += even + odd;
      weight[0][n] = pack2<half_t>(even, odd);
      weight[1][n] = __shfl_xor_sync(~0u, weight[0][n], 18);
    }
  }
  // Codewords of 4 rows of two groups, 16 apart.
  KVPACK_D static void load(uint32_t (&x)[2][4], uint32_t low, uint32_t high, uint32_t place, uint32_t table) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t codes = n ? high : low, at = table + 128 * n;
      x[n][0] = load_shared_32(table_address<0, 0>(codes, place) + at);
      x[n][1] = load_shared_32(table_address<1, 0>(codes, place) + at);
      x[n][2] = load_shared_32(table_address<2, 0>(codes, place) + at);
      x[n][3] = load_shared_32(table_address<3, 0>(codes, place) + at);
    }
  }
  template <int PHASE> KVPACK_D void add(const uint32_t (&x)[2][4]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t first[4] = {permute<0x4400>(x[n][0], x[n][1]), permute<0x5511>(x[n][0], x[n][1]),
                                 permute<0x4400>(x[n][2], x[n][3]), permute<0x5511>(x[n][2], x[n][3])};
      mma_16816<half_t>(sum[2 * n], first, weight[PHASE]);
      const uint32_t second[4] = {permute<0x6622>(x[n][0], x[n][1]), permute<0x7733>(x[n][0], x[n][1]),
                                  permute<0x6622>(x[n][2], x[n][3]), permute<0x7733>(x[n][2], x[n][3])};
      mma_16816<half_t>(sum[2 * n + 1], second, weight[PHASE]);
    }
  }
};

// Where group `group` of a head is among its sums, so that neither stores nor loads of them conflict.
KVPACK_D int sum_place(int head, int group) { return head * GROUPS + (group ^ (group >> 3 & 1) * 2 ^ (head >> 1) * 4); }

KVPACK_D void store_sums(const Shared &s, Running &r, int buffer, int lane, int warp) {
  const int row = lane >> 2, column = lane & 3;
  float mass = r.mass;
  mass += __shfl_xor_sync(~0u, mass, 1);
  mass += __shfl_xor_sync(~0u, mass, 2);
  mass += __shfl_xor_sync(~0u, mass, 16);
  warp += buffer * WARPS;
  if (lane < 16 && column == 0) s.mass[warp * HEADS + row] =
      make_float2(r.limit < 0 ? NOTHING : r.largest, mass);
  float4 *sums = reinterpret_cast<float4 *>(s.sums) + warp * HEADS * GROUPS;
#pragma unroll
  for (int block = 0; block < 2; ++block)
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
      sums[sum_place((column & 1) * 2 + odd, 16 * block + (column >> 1) * 8 + row)] =
          make_float4(r.sum[2 * block][odd], r.sum[2 * block][2 + odd], r.sum[2 * block + 1][odd],
                      r.sum[2 * block + 1][2 + odd]);
}

// The warps' sums to slot `split` of the query heads from head0 on.
KVPACK_D void merge_warps(const Shared &s, const Decode &decode, int buffer, int head0, int heads, int split, int lane,
                          int warp) {
  for (int part = warp; part < HEADS * D / 32; part += WARPS) {
    const int head = part / (D / 32), d = part % (D / 32) * 32 + lane;
    if (head >= heads) continue;
    const float2 mine = lane < WARPS ? s.mass[(buffer * WARPS + lane) * HEADS + head] : make_float2(NOTHING, 0);
    float largest = mine.x;
#pragma unroll
    for (int n = 16; n; n >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, n));
    const float factor = exp2_fast(mine.x - largest);
    float mass = factor * mine.y, sum = 0;
#pragma unroll
    for (int n = 16; n; n >>= 1) mass += __shfl_xor_sync(~0u, mass, n);
    const float *sums = s.sums + (buffer * WARPS * HEADS * GROUPS + sum_place(head, d / 4)) * 4 + d % 4;
#pragma unroll
    for (int n = 0; n < WARPS; ++n) sum += __shfl_sync(~0u, factor, n) * sums[n * HEADS * D];
    const int64_t slot = int64_t(head0 + head) * (decode.splits + 1) + split;
    decode.partial[slot * D + d] = sum;
    if (d == 0) decode.mass[slot] = make_float2(largest + s.offset[head], mass);
  }
}

}  // namespace vqkv_table
}  // namespace kvpack
