// Tiles of stored integer rows in shared memory, for tensor cores: a byte per code, code - 2^(bits - 1) + 128, whatever
// the width it is stored with; the number less 128 is exact in half precision.
#pragma once
#include "intkv.cuh"

namespace kvpack {

template <int D> constexpr int TILES = D > 128 ? 1 : 2;  // of 16 rows, that a warp takes at once
template <int D> constexpr int ROWS = 16 * TILES<D>;
template <int D> constexpr int BYTE_STRIDE = D + 16;       // of rows
template <int D> constexpr int SCALE_STRIDE = D / 16 + 1;  // of rows of scales, uint2

// Two bytes c + 128, in bits 0-7 and 16-23, as a pair of numbers c.
KVPACK_D uint32_t whole_pair(uint32_t x) { return sub2<half_t>((x & 0x00FF00FFu) | 0x64006400u, 0x64806480u); }
KVPACK_D uint32_t both(float x) { return pack2<half_t>(x, x); }

// Code n of each of the four words whose bytes are in planes p.
template <int BITS> KVPACK_D uint32_t four_codes(const uint32_t *p, int stride, int n) {
  constexpr uint32_t EACH = 0x01010101u, MASK = ((1u << BITS) - 1) * EACH;
  const int shift = BITS * n % 8, plane = BITS * n / 8;
  if (shift + BITS <= 8) return (p[plane * stride] >> shift) & MASK;
  const uint32_t low = ((1u << (8 - shift)) - 1) * EACH;
  return ((p[plane * stride] >> shift) & low) | ((p[(plane + 1) * stride] << (8 - shift)) & MASK & ~low);
}

template <int WORDS> KVPACK_D void copy_words(uint32_t *to, const uint32_t *from) {  // 4 aligned, or 1
  if constexpr (WORDS == 4) *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from);
  else *to = *from;
}

// Stored rows to a tile of bytes code - 2^(BITS - 1) + 128, by a warp.
template <int D, int BITS> KVPACK_D void spread_codes(unsigned char *tile, const unsigned char *raw) {
  constexpr int PLANES = BITS == 3 ? 3 : 1, PLANE = D * BITS / 8 / PLANES, CODES = D / PLANE;
  constexpr int WORDS = PLANE % 16 ? 1 : 4, ITEMS = PLANE / 4 / WORDS;
  constexpr uint32_t OFFSET = (128u - (1u << (BITS - 1))) * 0x01010101u;
#pragma unroll 2
  for (int item = threadIdx.x & 31; item < ROWS<D> * ITEMS; item += 32) {
    const int row = item / ITEMS, at = item % ITEMS * 4 * WORDS;
    alignas(16) uint32_t p[PLANES][WORDS];
#pragma unroll
    for (int n = 0; n < PLANES; ++n) {
      copy_words<WORDS>(p[n], reinterpret_cast<const uint32_t *>(raw + row * PLANES * PLANE + n * PLANE + at));
#pragma unroll
      for (int w = 0; w < WORDS; ++w) p[n][w] ^= 0x80808080u;
    }
#pragma unroll
    for (int n = 0; n < CODES; ++n) {
      alignas(16) uint32_t bytes[WORDS];
#pragma unroll
      for (int w = 0; w < WORDS; ++w) bytes[w] = four_codes<BITS>(&p[0][w], WORDS, n) + OFFSET;
      copy_words<WORDS>(reinterpret_cast<uint32_t *>(tile + row * BYTE_STRIDE<D> + n * PLANE + at), bytes);
    }
  }
}
template <int D> KVPACK_D void spread(unsigned char *tile, const unsigned char *raw, int bits) {
  if (bits == 4) spread_codes<D, 4>(tile, raw);
  else if (bits == 8) spread_codes<D, 8>(tile, raw);
  else if (bits == 3) spread_codes<D, 3>(tile, raw);
  else spread_codes<D, 2>(tile, raw);
}

KVPACK_D void copy_raw(unsigned char *to, const int8_t *from, int bytes, bool aligned) {  // starts it, by a warp
  const int lane = threadIdx.x & 31;
  if (aligned)
    for (int n = 16 * lane; n < bytes; n += 16 * 32) copy_async_16(to + n, from + n);
  else
    for (int n = 4 * lane; n < bytes; n += 4 * 32) copy_async_4(to + n, from + n);
  copy_async_commit();
}

// Of a scale and a zero: what multiplies a code less half of the range, and what is added.
KVPACK_D float middle(float scale, float zero, int bits) { return zero + scale * float(1 << (bits - 1)); }

// Scales of keys for load_keys, by a warp. Each uint2 is a pair of scales and a pair of middles. Where channels have
// one: [16 rows][16 columns][half][quad], of the columns of a pair; else [row][16 columns].
template <class T, int D>
KVPACK_D void load_key_scales(uint2 *to, const IntSide &side, int head, int row, int stop) {
  const int lane = threadIdx.x & 31;
  const int64_t start = int64_t(head) * side.scale_rows * side.scales;
  const T *scale = static_cast<const T *>(side.scale) + start, *zero = static_cast<const T *>(side.zero) + start;
  if (side.tokens > 1) {
    for (int n = lane; n < D / 2 * TILES<D>; n += 32) {
      const int column = n / 8 % (D / 16) * 16 + n / 4 % 2 + n % 4 * 4, first_row = row + n / (D / 2) * 16;
      if (first_row >= stop) break;
      const int64_t at = int64_t(first_row / side.tokens) * D;
      const float low = to_float(scale[at + column]), high = to_float(scale[at + column + 2]);
      const float first = middle(low, to_float(zero[at + column]), side.bits);
      const float second = middle(high, to_float(zero[at + column + 2]), side.bits);
      to[n] = make_uint2(pack2<half_t>(low, high), pack2<half_t>(first, second));
    }
    return;
  }
  for (int n = lane; n < D * TILES<D>; n += 32) {
    const int r = n / (D / 16), t = n % (D / 16);
    uint2 words = make_uint2(0, 0);
    if (row + r < stop) {
      const int64_t at = int64_t(row + r) * side.scales + t * side.scales / (D / 16);
      words.x = both(to_float(scale[at]));
      words.y = both(middle(to_float(scale[at]), to_float(zero[at]), side.bits));
    }
    to[r * SCALE_STRIDE<D> + t] = words;
  }
}
// The same of values: [16 rows][16 columns][two rows], of a pair of rows.
template <class T, int D>
KVPACK_D void load_value_scales(uint2 *to, const IntSide &side, int head, int row, int stop) {
  const int64_t start = int64_t(head) * side.scale_rows * side.scales;
  const T *scale = static_cast<const T *>(side.scale) + start, *zero = static_cast<const T *>(side.zero) + start;
  for (int n = threadIdx.x & 31; n < D / 2 * TILES<D>; n += 32) {
    const int t = n / 8 % (D / 16), r = n / (D / 2) * 16 + n % 8 * 2, group = t * side.scales / (D / 16);
    float scales[2] = {}, middles[2] = {};
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (row + r + e < stop) {
        const int64_t at = int64_t(row + r + e) * side.scales + group;
        scales[e] = to_float(scale[at]);
        middles[e] = middle(scales[e], to_float(zero[at]), side.bits);
      }
    to[n] = make_uint2(pack2<half_t>(scales[0], scales[1]), pack2<half_t>(middles[0], middles[1]));
  }
}

// Fetches the scales of the rows from `row` into L2, by a warp.
template <class T, int D> KVPACK_D void fetch_pair_scales(const IntSide &side, int head, int row, int stop) {
  const int64_t start = (int64_t(head) * side.scale_rows + row / side.tokens) * side.scales;
  const int count = (min(stop - row, ROWS<D>) + side.tokens - 1) / side.tokens * side.scales;
  for (int n = 64 * (threadIdx.x & 31); n < count; n += 64 * 32) {
    prefetch(static_cast<const T *>(side.scale) + start + n);
    prefetch(static_cast<const T *>(side.zero) + start + n);
  }
}

// The Hadamard matrix of 16 columns over MIX, or only the order of columns undone: B fragments of two times 8 columns.
// Over MIX, so that the factor of its product is of the size of a scale.
constexpr float MIX = 8;
KVPACK_D uint4 mixer_of(int rotation) {
  const int quad = threadIdx.x & 3, eighth = (threadIdx.x & 31) >> 2;
  uint32_t words[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    float entry[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int from = (n & 1) + 2 * e + 4 * quad, to = n / 2 * 8 + eighth;
      entry[e] = rotation ? (__popc(from & to) & 1 ? -1 : 1) / MIX : from == to;
    }
    words[n] = pack2<half_t>(entry[0], entry[1]);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Sums and differences across blocks of 16 columns.
template <int D> KVPACK_D void mix_blocks(uint32_t (&c)[D / 16][2][2]) {
#pragma unroll
  for (int step = 1; step < HADAMARD<D> / 16; step <<= 1)
#pragma unroll
    for (int t = 0; t < D / 16; ++t)
      if (!(t & step))
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          uint32_t &low = c[t][n >> 1][n & 1], &high = c[t | step][n >> 1][n & 1];
          const uint32_t sum = sum2(low, high);
          high = sub2<half_t>(low, high);
          low = sum;
        }
}

// Numbers of 16 rows from 16 m and 32 columns from 32 t, as A fragments: k = 8 u + 2 quad + e is column
// u + 2 e + 4 quad of 16.
template <int D, bool WHOLE>
KVPACK_D void load_keys(uint32_t (&keys)[2][4], const unsigned char *tile, const uint2 *scales, bool channel, int m,
                        int t) {
  const int lane = threadIdx.x & 31, quad = lane & 3, eighth = lane >> 2;
  uint32_t words[4];
  ldmatrix<4, false>(words, tile + (16 * m + lane % 16) * BYTE_STRIDE<D> + 16 * (2 * t + lane / 16));
#pragma unroll
  for (int two = 0; two < 2; ++two)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        uint32_t pair = whole_pair(words[2 * two + r] >> (8 * u));
        if (!WHOLE) {
          const int block = 2 * t + two, row = 16 * m + 8 * r + eighth;
          const uint2 s = scales[channel ? m * (D / 2) + block * 8 + u * 4 + quad : row * SCALE_STRIDE<D> + block];
          pair = fma2<half_t>(pair, s.x, s.y);
        }
        keys[two][2 * u + r] = pair;
      }
}

}  // namespace kvpack
