// From codes to rows, by a warp: codes fetched ahead, sums of codewords as a tile, products with the decode matrix.
#pragma once
#include "vqkv.cuh"

namespace kvpack {

// Codes of one side on their way to a warp, a tile ahead: to its buffer of ROWS rows in shared memory, or into L2 where
// there is no room for one.
struct CodeStream {
  const int8_t *codes, *begin, *end;  // of this KV head; of the whole tensor
  int8_t *buffer;                     // 16-byte aligned, with 32 bytes to spare; NULL: none
  int lookups;

  KVPACK_D void fetch(int row, int rows) const {  // one group of asynchronous copies
    const int lane = threadIdx.x & 31, bytes = max(rows, 0) * lookups;
    const int8_t *from = codes + int64_t(row) * lookups;
    if (!buffer) {
      for (int n = 128 * lane; n < bytes; n += 128 * 32) prefetch(from + n);
      return;
    }
    const int skip = int(reinterpret_cast<uintptr_t>(from) % 16);
    for (int n = 16 * lane; n < (bytes ? skip + bytes : 0); n += 16 * 32) {
      const int8_t *chunk = from - skip + n;
      if (chunk >= begin && chunk + 16 <= end) {
        copy_async_16(buffer + n, chunk);
      } else {
        for (int e = 0; e < 16; ++e)
          if (chunk + e >= from && chunk + e < from + bytes) buffer[n + e] = chunk[e];
      }
    }
    copy_async_commit();
  }
  // Where row `row + past` is, after fetch(row, ..).
  KVPACK_D const int8_t *at(int row, int past) const {
    const int8_t *from = codes + int64_t(row) * lookups;
    return (buffer ? buffer + reinterpret_cast<uintptr_t>(from) % 16 : from) + past * lookups;
  }
};
KVPACK_D CodeStream stream_of(const VqSide &side, int batch, int heads, int64_t head, int code_rows, void *buffer) {
  const int64_t each = int64_t(code_rows) * side.lookups;
  return {side.codes + head * each, side.codes, side.codes + batch * heads * each, static_cast<int8_t *>(buffer),
          side.lookups};
}

// Sums of the codewords of 16 code rows to tile T [16][D + 8] in shared memory. table: of the head's set, in global
// memory; `resident`, in shared memory, has a copy of its first `held` lookups. codes: the first row's; rows past
// `rows` (at least 1) repeat the last one. Loads come in batches, before the stores that they could not overtake.
template <class T, int D, bool IN_TILES = false>
KVPACK_D void rebuild_rows(T *tile, const VqSide &side, const T *table, const T *resident, int held,
                           const int8_t *codes, int rows) {
  constexpr int PARTS = D / 4, LANES = PARTS < 32 ? PARTS : 32, ABREAST = 32 / LANES, BATCH = 8;
  const int lane = threadIdx.x & 31, abreast = lane / LANES, zero = side.entries / 2;
  if (abreast >= ABREAST) return;
#pragma unroll 1
  for (int part = lane % LANES; part < PARTS; part += LANES) {
#pragma unroll 1
    for (int first_row = 0; first_row < 16; first_row += BATCH * ABREAST) {
      auto code = [&](int n, int lookup) {  // of row n of the batch
        const int row = min(first_row + n * ABREAST + abreast, rows - 1);
        return codes[code_place(IN_TILES, side.values, row, lookup, side.lookups)] + zero;
      };
      auto gather = [&](uint2(&word)[BATCH], int stage, int first, int column) {  // of the codewords of one stage
        const int stride = side.stages[stage] * side.width, group = column / side.width;
        int place[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; ++n) place[n] = code(n, first + group) * stride + column;
        const int64_t start = int64_t(first) * side.entries * side.width;
        if (first + side.stages[stage] <= held) {
          const uint32_t book = shared_address(resident + start);
#pragma unroll
          for (int n = 0; n < BATCH; ++n) word[n] = load_shared_64(book + 2 * place[n]);
        } else {
#pragma unroll
          for (int n = 0; n < BATCH; ++n) word[n] = __ldg(reinterpret_cast<const uint2 *>(table + start + place[n]));
        }
      };
      uint2 *to = reinterpret_cast<uint2 *>(tile + (first_row + abreast) * (D + 8) + 4 * part);
      constexpr int STEP = ABREAST * (D + 8) / 4;
      uint2 word[BATCH] = {};
      if (side.width % 4 == 0) {
        const int group = 4 * part / side.width;
        if (side.stage_count == 1 || group >= side.stages[1]) {
          if (group < side.stages[0]) gather(word, 0, 0, 4 * part);
        } else {
          float4 sum[BATCH];
#pragma unroll
          for (int n = 0; n < BATCH; ++n) sum[n] = make_float4(0, 0, 0, 0);
          for (int stage = 0, first = 0; stage < side.stage_count && group < side.stages[stage]; ++stage) {
            gather(word, stage, first, 4 * part);
#pragma unroll
            for (int n = 0; n < BATCH; ++n) {
              const float2 low = unpack2<T>(word[n].x), high = unpack2<T>(word[n].y);
              sum[n].x += low.x, sum[n].y += low.y, sum[n].z += high.x, sum[n].w += high.y;
            }
            first += side.stages[stage];
          }
#pragma unroll
          for (int n = 0; n < BATCH; ++n)
            word[n] = make_uint2(pack2<T>(sum[n].x, sum[n].y), pack2<T>(sum[n].z, sum[n].w));
        }
#pragma unroll
        for (int n = 0; n < BATCH; ++n) to[n * STEP] = word[n];
      } else {  // a codeword is no whole number of parts: value by value
#pragma unroll 1
        for (int n = 0; n < BATCH; ++n) {
          for (int e = 0; e < 4; ++e) {
            const int group = (4 * part + e) / side.width, rest = 4 * part + e - group * side.width;
            float sum = 0;
            for (int stage = 0, first = 0; stage < side.stage_count && group < side.stages[stage]; ++stage) {
              const T *book = table + int64_t(first) * side.entries * side.width;
              sum += to_float(book[(code(n, first + group) * side.stages[stage] + group) * side.width + rest]);
              first += side.stages[stage];
            }
            reinterpret_cast<T *>(to + n * STEP)[e] = from_float<T>(sum);
          }
        }
      }
    }
  }
}

// A tile's rows as A fragments of mma_16816: for each 16 columns rows 0-7 and 8-15 of the first 8, then of the last.
template <class T, int D> KVPACK_D void load_rows(uint32_t (&rows)[D / 16][4], const T *tile) {
  const int lane = threadIdx.x & 31;
  const T *at = tile + (lane % 8 + lane / 8 % 2 * 8) * (D + 8) + lane / 16 * 8;
#pragma unroll
  for (int step = 0; step < D / 16; ++step) ldmatrix<4, false>(rows[step], at + 16 * step);
}

// c += rows @ columns 16 t .. 16 t + 15 of the decode matrix, for TILES tiles of 16 rows.
template <class T, int D, int TILES>
KVPACK_D void decode_columns(float (&c)[TILES][2][4], const uint32_t (&rows)[TILES][D / 16][4], const uint4 *decode,
                             int t) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int two = 0; two < D / 32; ++two)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint4 b = decode[((2 * t + n) * (D / 32) + two) * 32 + lane];
      const uint32_t low[2] = {b.x, b.y}, high[2] = {b.z, b.w};
#pragma unroll
      for (int m = 0; m < TILES; ++m) {
        mma_16816<T>(c[m][n], rows[m][2 * two], low);
        mma_16816<T>(c[m][n], rows[m][2 * two + 1], high);
      }
    }
}

}  // namespace kvpack
