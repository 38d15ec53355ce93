// Decode attention over VQKV codes by tables: what is to be done, and the merge of what was done. See vqkv_table.cu.
#pragma once
#include "vqkv_table.cuh"

namespace kvpack {
namespace vqkv_table {

constexpr int D = 128, GROUPS = D / 4, ENTRIES = 256, HEADS = 4;  // HEADS: query heads of a pass
constexpr int WARPS = 16, DEPTH = 2;  // of a block; tiles that a warp loads ahead
constexpr int ITEM_COST = 16;  // of starting and ending an item, in tiles

struct Args {
  Merge merge;
  const int8_t *codes_k, *codes_v;
  const unsigned char *prepared;
  const float *k_mean;
  const int32_t *past_len;
  kvpack_geometry geometry;
  int batch, sets, code_rows;
  float scale;                 // to log2 units
  uint8_t first_group[2 * 8];  // of the columns of a quad
};

struct Sequence {  // its tiles are cut in `used` items of `each`
  int tiles, each, used, cost;  // cost: of an item
};

KVPACK_D Sequence sequence_of(const Args &a, int b) {
  constexpr int UNIT = WARPS * DEPTH;
  Sequence s{};
  const int past = a.past_len[b], fresh = a.merge.new_len[b];  // both on their way at once
  s.tiles = min(encoded_rows(a.geometry, past), a.code_rows - VQ_TILE) / VQ_TILE * (fresh > 0);
  const int splits = a.merge.decode.splits;
  s.each = max((s.tiles + splits * UNIT - 1) / (splits * UNIT), 1) * UNIT;
  s.used = (s.tiles + s.each - 1) / s.each;
  s.cost = ITEM_COST + s.each;
  return s;
}

// A block merges the items and the exact slot of a KV head of a sequence. Its part of the matrix is on its way before
// the items are done.
template <class T> __global__ void __launch_bounds__(HEADS * D, 2) merge_kernel(const Args a) {
  constexpr int PARTS = HEADS * D / 32, ROWS = D / PARTS, TOGETHER = 16;  // a warp has ROWS rows of the matrix
  __shared__ float4 merged[D];  // of 4 heads
  __shared__ float4 products[PARTS][HEADS][D / 4];
  const int h = blockIdx.x, b = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int part = threadIdx.x / D, column = threadIdx.x % D;  // head and column that the thread merges
  const Merge &merge = a.merge;
  const int group = merge.group, splits = merge.decode.splits, head0 = (b * merge.kv_heads + h) * group;
  const float4 *matrix = reinterpret_cast<const float4 *>(merge.matrix + (int64_t(h % a.sets) * D + warp * ROWS) * D);
  float4 entries[ROWS];  // of columns 4 lane .. 4 lane + 3
#pragma unroll
  for (int n = 0; n < ROWS; ++n) entries[n] = __ldg(matrix + n * (D / 4) + lane);
  const float mean = __ldg(merge.mean + h * D + column);
  const int used = sequence_of(a, b).used;
  const bool real = merge.new_len[b] > 0;
  wait_for_previous_kernel();
  for (int done = 0; done < group; done += HEADS) {
    const int head = head0 + min(done + part, group - 1);
    const float *partial = merge.decode.partial + int64_t(head) * (splits + 1) * D + column;
    const float2 *mass = merge.decode.mass + int64_t(head) * (splits + 1);
    float value[TOGETHER];
    auto load = [&](int first) {
#pragma unroll
      for (int n = 0; n < TOGETHER; ++n) value[n] = first + n < used ? __ldcg(partial + (first + n) * D) : 0;
    };
    const float2 own = lane < used ? __ldcg(mass + lane) : make_float2(NOTHING, 0), last = __ldcg(mass + splits);
    load(0);
    const float exact = __ldcg(partial + splits * D);
    float top = own.x;
#pragma unroll
    for (int n = 16; n; n >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, n));
    top = fmaxf(top, last.x);
    const float weight = exp2_fast(own.x - top), last_weight = exp2_fast(last.x - top);
    float pieces = weight * own.y, sum = 0;
#pragma unroll
    for (int n = 16; n; n >>= 1) pieces += __shfl_xor_sync(~0u, pieces, n);
    for (int first = 0; first < used; first += TOGETHER) {
      if (first) load(first);
#pragma unroll
      for (int n = 0; n < TOGETHER; ++n) sum += __shfl_sync(~0u, weight, first + n) * value[n];
    }
    const float total = pieces + last_weight * last.y, scale = total > 0 ? 1 / total : 0;
    reinterpret_cast<float *>(merged + column)[part] = sum * scale;
    __syncthreads();
    float4 product[HEADS] = {};
#pragma unroll
    for (int n = 0; n < ROWS; ++n) {
      const float4 y = merged[warp * ROWS + n];
      const float of_head[HEADS] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int m = 0; m < HEADS; ++m) {
        product[m].x += of_head[m] * entries[n].x, product[m].y += of_head[m] * entries[n].y;
        product[m].z += of_head[m] * entries[n].z, product[m].w += of_head[m] * entries[n].w;
      }
    }
#pragma unroll
    for (int m = 0; m < HEADS; ++m) products[warp][m][lane] = product[m];
    __syncthreads();
    float y = (last_weight * exact + pieces * mean) * scale;
    const float *of_part = reinterpret_cast<const float *>(products[0][part]) + column;
#pragma unroll
    for (int n = 0; n < PARTS; ++n) y += of_part[n * HEADS * D];
    if (done + part < group)
      static_cast<T *>(merge.out)[int64_t(head) * D + column] = from_float<T>(real ? y : 0);
  }
}

}  // namespace vqkv_table
}  // namespace kvpack
