// Decode attention over VQKV codes by tables: what is to be done, and the merge of what was done. See vqkv_table.cu.
#pragma once
#include "exact.cuh"
#include "vqkv_table.cuh"

namespace kvpack {
namespace vqkv_table {

constexpr int D = 128, GROUPS = D / 4, ENTRIES = 256, HEADS = 4;  // HEADS: query heads of a pass
constexpr int WARPS = 16, DEPTH = 2;  // of a block; tiles that a warp loads ahead
constexpr int ITEM_COST = 16;  // of starting and ending an item, in tiles

struct Args {
  Merge merge;
  kvpack_step step;
  ExactRows exact;
  Rope rope;
  Scale scale;
  const int8_t *codes_k, *codes_v;
  const unsigned char *prepared;
  const float *k_mean;
  int code_rows, blocks;       // blocks: that attend to codes, per KV head
  uint8_t first_group[2 * 8];  // of the columns of a quad
};

struct Sequence {  // its tiles are cut in `used` items of `each`
  int past, tiles, each, used, cost;  // cost: of an item
};

// As few items as leave all blocks their work if the sequences of a batch are alike, for each costs its start and end;
// but none need be longer than LONG. So they follow from the sequence's own length and the size of the batch.
KVPACK_D Sequence sequence_of(const Args &a, int b) {
  constexpr unsigned UNIT = WARPS * DEPTH, LONG = 512;
  Sequence s{};
  s.past = a.step.past_len[b];
  const int fresh = a.step.new_len[b];  // both on their way at once
  s.tiles = min(encoded_rows(a.exact.geometry, s.past), a.code_rows - VQ_TILE) / VQ_TILE * (fresh > 0);
  const unsigned splits = a.merge.decode.splits, units = (s.tiles + UNIT - 1) / UNIT;
  const unsigned fewest = max(splits / a.step.batch, 1u);
  const unsigned each = max(max((units + splits - 1) / splits, min((units + fewest - 1) / fewest, LONG / UNIT)), 1u);
  s.each = each * UNIT;
  s.used = (units + each - 1) / each;
  s.cost = ITEM_COST + s.each;
  return s;
}

// Merges items and the exact slot of a KV head of a sequence: a block makes COLUMNS columns of the result. Its part of
// the matrix is on its way before the items are done.
constexpr int COLUMNS = 32, MERGE_WARPS = 8;
template <class T> __global__ void __launch_bounds__(MERGE_WARPS * 32, 2) merge_kernel(const Args a) {
  constexpr int THREADS = MERGE_WARPS * 32, EACH = HEADS * D / THREADS;  // columns that a thread sums
  constexpr int ROWS = D / MERGE_WARPS, TOGETHER = 32 / EACH;  // matrix rows of a warp; items on their way at a time
  __shared__ float4 merged[D];                                 // of 4 heads
  __shared__ float products[MERGE_WARPS][HEADS][COLUMNS];
  __shared__ float2 shares[HEADS];  // of the exact slot, of the items' mass
  __shared__ __align__(16) float matrix[D][COLUMNS];
  const int b = blockIdx.y, h = blockIdx.x / (D / COLUMNS), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int column0 = blockIdx.x % (D / COLUMNS) * COLUMNS, column = column0 + lane;  // of the result
  const int part = threadIdx.x * EACH / D, mine = threadIdx.x * EACH % D;  // head and columns that the thread sums
  const Merge &merge = a.merge;
  const int group = merge.group, splits = merge.decode.splits, head0 = (b * merge.kv_heads + h) * group;
  const float *matrix_of_head = merge.matrix + int64_t(h % merge.matrix_sets) * D * D + column0;
  for (int n = threadIdx.x; n < D * COLUMNS / 4; n += THREADS)
    copy_async_16(&matrix[n / (COLUMNS / 4)][n % (COLUMNS / 4) * 4],
                  matrix_of_head + n / (COLUMNS / 4) * D + n % (COLUMNS / 4) * 4);
  copy_async_commit();
  const float mean = __ldg(merge.mean + h * D + column);
  const int used = sequence_of(a, b).used;
  const bool real = merge.new_len[b] > 0;
  wait_for_previous_kernel();
  for (int done = 0; done < group; done += HEADS) {
    const int64_t slot0 = int64_t(head0 + min(done + part, group - 1)) * (splits + 1);
    const float2 *mass = merge.decode.mass + slot0;
    const float *partial = merge.decode.partial + slot0 * D + mine;
    float value[TOGETHER][EACH];
    auto load = [&](int first) {
      const float *at = partial + first * D;
#pragma unroll
      for (int n = 0; n < TOGETHER; ++n) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) value[n][e] = 0;
        if (first + n < used) load_floats(value[n], at + n * D);
      }
    };
    const float2 own = lane < used ? __ldcg(mass + lane) : make_float2(NOTHING, 0), last = __ldcg(mass + splits);
    load(0);
    const int head = head0 + min(done + warp, group - 1);  // of which warp < HEADS writes the result
    const float exact = __ldcg(merge.decode.partial + (int64_t(head) * (splits + 1) + splits) * D + column);
    float top = own.x;
#pragma unroll
    for (int n = 16; n; n >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, n));
    top = fmaxf(top, last.x);
    const float weight = exp2_fast(own.x - top), last_weight = exp2_fast(last.x - top);
    float pieces = weight * own.y, sum[EACH] = {};
#pragma unroll
    for (int n = 16; n; n >>= 1) pieces += __shfl_xor_sync(~0u, pieces, n);
#pragma unroll 1
    for (int first = 0; first < used; first += TOGETHER) {
      if (first) load(first);
#pragma unroll
      for (int n = 0; n < TOGETHER; ++n) {
        const float factor = __shfl_sync(~0u, weight, first + n);
#pragma unroll
        for (int e = 0; e < EACH; ++e) sum[e] += factor * value[n][e];
      }
    }
    const float total = pieces + last_weight * last.y, scale = total > 0 ? 1 / total : 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) reinterpret_cast<float *>(merged + mine + e)[part] = sum[e] * scale;
    if (mine == 0) shares[part] = make_float2(last_weight * scale, pieces * scale);
    copy_async_wait<0>();
    __syncthreads();
    float product[HEADS] = {};
#pragma unroll 16
    for (int n = 0; n < ROWS; ++n) {
      const float4 y = merged[warp * ROWS + n];
      const float entry = matrix[warp * ROWS + n][lane];
      product[0] += y.x * entry, product[1] += y.y * entry, product[2] += y.z * entry, product[3] += y.w * entry;
    }
#pragma unroll
    for (int m = 0; m < HEADS; ++m) products[warp][m][lane] = product[m];
    __syncthreads();
    if (warp < min(HEADS, group - done)) {
      float y = shares[warp].x * exact + shares[warp].y * mean;
#pragma unroll
      for (int n = 0; n < MERGE_WARPS; ++n) y += products[n][warp][lane];
      static_cast<T *>(merge.out)[int64_t(head) * D + column] = from_float<T>(real ? y : 0);
    }
    if (done + HEADS < group) __syncthreads();
  }
}

}  // namespace vqkv_table
}  // namespace kvpack
