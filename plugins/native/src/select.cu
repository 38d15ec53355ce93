// DenseObservedAttention's choice of code rows in a decode step: those with the largest softmax probability of any
// head, the lower of equals.
//
// Three kernels: the scores of every stored row (keys are read once) and each head's softmax denominator; the largest
// probability of any head per code row; the k largest of these by radix selection. Every sum has a fixed order and
// only integers are added atomically, so that the result depends on the sequence alone. Chosen rows are written in
// ascending order, not by rank: attention over a set has no order, and neighbours are read together.
#include "step.cuh"

namespace kvpack {
namespace {

constexpr int WARPS = 4, THREADS = 32 * WARPS, CHUNK = 512;  // rows that share a partial denominator
constexpr int RANK_THREADS = 256, RANK_ROWS = 4 * RANK_THREADS;
// A probability, as any float below 2, has 30 bits: three digits, the first of which begins at bit FIRST.
constexpr int DIGIT = 10, BINS = 1 << DIGIT, FIRST = 2 * DIGIT, PICK_THREADS = BINS;
constexpr int BLOCKS = 2048;  // of a grid at most: more work is looped over

struct Select {
  const void *query, *key;
  const int32_t *past_len, *select_len;
  int32_t *selected;
  kvpack_geometry geometry;
  int kv_heads, group, rows, width, chunks;
  int64_t stride;         // of `score` and `chance`: rows, rounded up to whole vectors
  float inside, outside;  // a score is product * inside, with a softcap tanh of it, then * outside; log2 units
  int capped;
  float *score;        // [B, Hq, stride]
  float2 *partial;     // [B, Hq, chunks]: the largest score, and the sum of exp2(score - it)
  float2 *norm;        // [B, Hq]: the same of the whole sequence, the sum inverted
  uint32_t *chance;    // [B, stride]: the bits of the largest probability of each code row; order as numbers do
  unsigned *counter;   // [B, H], zero at the start
  unsigned *histogram; // [B, BINS] of the first digit, zero at the start
};

// The largest score and the sum of exp2(score - it) of two sets of rows together; (NOTHING, 0) is the empty set.
KVPACK_D float2 join(float2 a, float2 b) {
  const float top = fmaxf(a.x, b.x);
  return make_float2(top, a.y * exp2_fast(a.x - top) + b.y * exp2_fast(b.x - top));
}
template <int FROM> KVPACK_D float2 join_lanes(float2 a) {  // over lanes FROM, 2 FROM .. 16 apart
#pragma unroll
  for (int n = FROM; n < 32; n *= 2)
    a = join(a, make_float2(__shfl_xor_sync(~0u, a.x, n), __shfl_xor_sync(~0u, a.y, n)));
  return a;
}

// Grid: chunks (looped over), KV heads, batch. A warp scores 16 rows at a time for all heads of the group, up to
// 8 * TILES. Keys come straight from memory as fragments: a lane's 16 bytes are columns 8 (lane % 4) .. of 32, which an
// mma takes for columns 2 (lane % 4), + 1, + 8, + 9 of two times 16; the query's columns are permuted alike.
template <class T, int D, int TILES>
__global__ void __launch_bounds__(THREADS) select_scores_kernel(const Select p) {
  __shared__ float2 found[WARPS][8 * TILES];
  __shared__ bool last;
  let_next_kernel_start();
  const int h = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int count = p.past_len[b] + 1, used = (count + CHUNK - 1) / CHUNK;  // the new token's row included
  const int heads = p.kv_heads * p.group;
  const int64_t first = int64_t(b) * heads + h * p.group;  // query head
  const T *const key = static_cast<const T *>(p.key) + (int64_t(b) * p.kv_heads + h) * p.rows * D + lane % 4 * 8;
  if (int(blockIdx.x) >= used) return;
  uint4 query[TILES][D / 32];
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      const int head = t * 8 + lane / 4;
      const T *const row = static_cast<const T *>(p.query) + (first + min(head, p.group - 1)) * D + lane % 4 * 8;
      query[t][c] = *reinterpret_cast<const uint4 *>(row + 32 * c);
    }
  for (int chunk = blockIdx.x; chunk < used; chunk += gridDim.x) {
    float2 total[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; ++t) total[t][0] = total[t][1] = make_float2(NOTHING, 0);
#pragma unroll 1
    for (int row = chunk * CHUNK + warp * 16; row < min((chunk + 1) * CHUNK, count); row += 16 * WARPS) {
      const int mine[2] = {row + lane / 4, row + lane / 4 + 8};
      uint4 k[2][D / 32];
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int c = 0; c < D / 32; ++c)
          k[r][c] = load_streamed(reinterpret_cast<const uint4 *>(key + int64_t(min(mine[r], count - 1)) * D + 32 * c));
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        float product[4] = {};
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
          const uint32_t left[4] = {k[0][c].x, k[1][c].x, k[0][c].y, k[1][c].y};
          const uint32_t right[4] = {k[0][c].z, k[1][c].z, k[0][c].w, k[1][c].w};
          mma_16816<T>(product, left, {query[t][c].x, query[t][c].y});
          mma_16816<T>(product, right, {query[t][c].z, query[t][c].w});
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at = mine[e / 2], head = t * 8 + lane % 4 * 2 + e % 2;
          float score = product[e] * p.inside;
          if (p.capped) score = tanh_fast(score) * p.outside;
          if (at < count) total[t][e % 2] = join(total[t][e % 2], make_float2(score, 1));
          if (at < count && head < p.group) p.score[(first + head) * p.stride + at] = score;
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 all = join_lanes<4>(total[t][e]);
        if (lane < 4) found[warp][t * 8 + lane * 2 + e] = all;
      }
    __syncthreads();
    if (threadIdx.x < p.group) {
      float2 all = found[0][threadIdx.x];
      for (int w = 1; w < WARPS; ++w) all = join(all, found[w][threadIdx.x]);
      __stcg(p.partial + (first + threadIdx.x) * p.chunks + chunk, all);
      __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(p.counter + b * p.kv_heads + h, 1u) + 1 == unsigned(used);
    __syncthreads();
    if (!last) continue;
    __threadfence();
    for (int head = warp; head < p.group; head += WARPS) {
      float2 all = make_float2(NOTHING, 0);
      for (int n = lane; n < used; n += 32) all = join(all, __ldcg(p.partial + (first + head) * p.chunks + n));
      all = join_lanes<1>(all);
      if (lane == 0) p.norm[first + head] = make_float2(all.x, 1 / all.y);
    }
  }
}

// The largest probability of each code row. Grid: pieces of RANK_ROWS rows (looped over), batch.
__global__ void __launch_bounds__(RANK_THREADS) select_chances_kernel(const Select p) {
  KVPACK_DYNAMIC_SHARED(memory);
  float2 *const norm = reinterpret_cast<float2 *>(memory);
  __shared__ unsigned histogram[BINS];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int b = blockIdx.y, heads = p.kv_heads * p.group;
  const int count = encoded_rows(p.geometry, p.past_len[b]);
  if (int(blockIdx.x) * RANK_ROWS >= count) return;
  for (int n = threadIdx.x; n < heads; n += RANK_THREADS) norm[n] = p.norm[int64_t(b) * heads + n];
  for (int n = threadIdx.x; n < BINS; n += RANK_THREADS) histogram[n] = 0;
  __syncthreads();
  const float *const score = p.score + int64_t(b) * heads * p.stride + p.geometry.sinks;
  for (int start = blockIdx.x * RANK_ROWS; start < count; start += gridDim.x * RANK_ROWS) {
    float most[4] = {};
#pragma unroll 4
    for (int head = 0; head < heads; ++head)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int row = min(start + n * RANK_THREADS + int(threadIdx.x), count - 1);
        most[n] = fmaxf(most[n], exp2_fast(score[head * p.stride + row] - norm[head].x) * norm[head].y);
      }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int row = start + n * RANK_THREADS + int(threadIdx.x);
      if (row >= count) continue;
      const uint32_t bits = bits_as<uint32_t>(most[n]);
      p.chance[b * p.stride + row] = bits;
      atomicAdd(&histogram[bits >> FIRST], 1u);
    }
  }
  __syncthreads();
  for (int n = threadIdx.x; n < BINS; n += RANK_THREADS)
    if (histogram[n]) atomicAdd(p.histogram + b * BINS + n, histogram[n]);
}

KVPACK_D unsigned scan_warp(unsigned x) {  // the sum of this lane's and the lower ones'
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 1; n < 32; n *= 2) {
    const unsigned below = __shfl_up_sync(~0u, x, n);
    if (lane >= n) x += below;
  }
  return x;
}
// The sum of the threads' below this one; `sums` holds one number a warp.
KVPACK_D unsigned scan_block(unsigned x, unsigned *sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned mine = scan_warp(x);
  if (lane == 31) sums[warp] = mine;
  __syncthreads();
  if (warp == 0) sums[lane] = scan_warp(sums[lane]);
  __syncthreads();
  const unsigned before = warp ? sums[warp - 1] : 0;
  __syncthreads();
  return before + mine - x;
}

// The `count` largest of a sequence's chances, in ascending order of their rows. Grid: batch. Their smallest is found
// digit by digit; few rows share its first digit as a rule, and they are kept aside when this is read off.
__global__ void __launch_bounds__(PICK_THREADS) select_pick_kernel(const Select p) {
  constexpr int RUNS = PICK_THREADS / 32, KEPT = 8192;
  __shared__ unsigned histogram[BINS], sums[RUNS], larger_in[RUNS], equal_in[RUNS], digit, left, kept;
  __shared__ uint32_t keep[KEPT];  // of a row: the chance without its first digit, and from bit FIRST its run
  wait_for_previous_kernel();
  const int b = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = encoded_rows(p.geometry, p.past_len[b]);
  const int count = max(min(min(p.select_len[b], rows), p.width), 0);
  int32_t *const selected = p.selected + int64_t(b) * p.width;
  for (int n = count + threadIdx.x; n < p.width; n += PICK_THREADS) selected[n] = 0;  // unread, but a valid row
  if (count == 0) return;
  // Every warp has a run of rows to itself. visit: f(chance, run) over the rows of this thread.
  const int run = (rows + 4 * PICK_THREADS - 1) / (4 * PICK_THREADS) * 128;
  const int first = min(warp * run, rows), last = min(first + run, rows);
  const uint32_t *const chance = p.chance + b * p.stride;
  const auto visit = [=](auto &&f) {
    constexpr int VECTORS = 4;  // loads in flight
    for (int start = first + 4 * lane; start < last; start += 128 * VECTORS) {
      uint4 bits[VECTORS];
#pragma unroll
      for (int n = 0; n < VECTORS; ++n)
        if (start + 128 * n < last) bits[n] = *reinterpret_cast<const uint4 *>(chance + start + 128 * n);
#pragma unroll
      for (int n = 0; n < VECTORS; ++n) {
        const int row = start + 128 * n;
        if (row < last) f(bits[n].x, warp);
        if (row + 1 < last) f(bits[n].y, warp);
        if (row + 2 < last) f(bits[n].z, warp);
        if (row + 3 < last) f(bits[n].w, warp);
      }
    }
  };
  histogram[threadIdx.x] = p.histogram[b * BINS + threadIdx.x];
  if (threadIdx.x == 0) kept = 0;
  if (threadIdx.x < RUNS) larger_in[threadIdx.x] = equal_in[threadIdx.x] = 0;
  __syncthreads();
  uint32_t smallest = 0;
  unsigned wanted = count;  // how many to take of the rows that share the digits found so far
  bool all_kept = false;
  const auto visit_kept = [&](auto &&f) {
    for (int n = threadIdx.x; n < int(kept); n += PICK_THREADS)
      f(smallest >> FIRST << FIRST | (keep[n] & ((1u << FIRST) - 1)), keep[n] >> FIRST);
  };
#pragma unroll 1
  for (int shift = FIRST; shift >= 0; shift -= DIGIT) {
    if (shift < FIRST) {
      const int above = shift + DIGIT;
      const auto tally = [&](uint32_t bits, int) {
        if (bits >> above == smallest >> above) atomicAdd(&histogram[bits >> shift & (BINS - 1)], 1u);
      };
      histogram[threadIdx.x] = 0;
      __syncthreads();
      if (all_kept)
        visit_kept(tally);
      else
        visit(tally);
      __syncthreads();
    }
    const int bin = BINS - 1 - threadIdx.x;  // the largest first
    const unsigned here = histogram[bin], before = scan_block(here, sums);
    if (before < wanted && wanted <= before + here) {
      digit = bin;
      left = wanted - before;
    }
    __syncthreads();
    smallest |= digit << shift;
    wanted = left;
    if (shift == FIRST && histogram[digit] <= KEPT) {
      all_kept = true;
      unsigned larger = 0;
      visit([&](uint32_t bits, int where) {
        larger += bits >> FIRST > digit;
        if (bits >> FIRST == digit) keep[atomicAdd(&kept, 1u)] = (bits & ((1u << FIRST) - 1)) | where << FIRST;
      });
      if (larger) atomicAdd(&larger_in[warp], larger);
    }
    __syncthreads();
  }
  // How many each run has: the chosen of a run are written where those of the runs before it end.
  const auto settle = [&](uint32_t bits, int where) {
    if (bits > smallest) atomicAdd(&larger_in[where], 1u);
    if (bits == smallest) atomicAdd(&equal_in[where], 1u);
  };
  if (all_kept)
    visit_kept(settle);
  else
    visit(settle);
  __syncthreads();
  const unsigned larger = lane < warp ? larger_in[lane] : 0, equal = lane < warp ? equal_in[lane] : 0;
  unsigned larger_before = __shfl_sync(~0u, scan_warp(larger), 31);
  unsigned equal_before = __shfl_sync(~0u, scan_warp(equal), 31);
  uint4 next = {};
  if (first + 4 * lane < last) next = *reinterpret_cast<const uint4 *>(chance + first + 4 * lane);
  for (int start = first; start < last; start += 128) {
    const int row = start + 4 * lane;
    const uint32_t bits[4] = {next.x, next.y, next.z, next.w};
    if (row + 128 < last) next = *reinterpret_cast<const uint4 *>(chance + row + 128);
    unsigned both = 0;  // larger ones in the low half, equal ones in the high half
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (row + n < last) both += unsigned(bits[n] > smallest) | unsigned(bits[n] == smallest) << 16;
    const unsigned upto = scan_warp(both), all = __shfl_sync(~0u, upto, 31);
    unsigned larger_here = larger_before + ((upto - both) & 0xFFFF), equal_here = equal_before + ((upto - both) >> 16);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (row + n >= last || bits[n] < smallest) continue;
      const bool tie = bits[n] == smallest;
      if (!tie || equal_here < wanted) selected[larger_here + min(equal_here, wanted)] = row + n;
      tie ? ++equal_here : ++larger_here;
    }
    larger_before += all & 0xFFFF;
    equal_before += all >> 16;
  }
}

// All code rows, for a step of several tokens.
__global__ void select_all_kernel(int32_t *selected, int width) {
  for (int n = blockIdx.x * blockDim.x + threadIdx.x; n < width; n += gridDim.x * blockDim.x)
    selected[int64_t(blockIdx.y) * width + n] = n;
}

Select carve(Carver &carver, const kvpack_layer &layer, const kvpack_step &step, const kvpack_dense &dense) {
  Select p = {};
  p.kv_heads = layer.num_kv_heads;
  p.group = layer.num_heads / layer.num_kv_heads;
  p.rows = dense.rows;
  p.chunks = (dense.rows + CHUNK - 1) / CHUNK;
  p.stride = (int64_t(dense.rows) + 31) / 32 * 32;
  const size_t batch = step.batch, heads = batch * layer.num_heads;
  p.counter = carver.take<unsigned>(batch * (layer.num_kv_heads + BINS));
  p.histogram = p.counter + batch * layer.num_kv_heads;
  p.norm = carver.take<float2>(heads);
  p.partial = carver.take<float2>(heads * p.chunks);
  p.chance = carver.take<uint32_t>(batch * p.stride);
  p.score = carver.take<float>(heads * p.stride);
  return p;
}

int pieces(int most, int others) { return max(1, min(most, BLOCKS / others)); }

}  // namespace

size_t select_scratch(const kvpack_layer &layer, const kvpack_step &step, const kvpack_dense &dense) {
  Carver carver = {nullptr};
  if (step.length == 1) carve(carver, layer, step, dense);
  return carver.used;
}

int select_rows(const kvpack_layer &layer, const kvpack_step &step, const kvpack_dense &dense, const void *query,
                void *scratch) {
  if (dense.select_width == 0) return KVPACK_OK;
  if (step.length > 1) {
    const dim3 grid(pieces((dense.select_width + 255) / 256, step.batch), step.batch);
    const int error = launch(select_all_kernel, grid, dim3(256), 0, step.stream, dense.selected, dense.select_width);
    return launched(error, "selection of all rows");
  }
  Carver carver = {static_cast<char *>(scratch)};
  Select p = carve(carver, layer, step, dense);
  p.query = query;
  p.key = dense.k;
  p.past_len = step.past_len;
  p.select_len = dense.select_len;
  p.selected = dense.selected;
  p.geometry = dense.geometry;
  p.width = dense.select_width;
  p.capped = layer.softcap != 0;
  p.inside = p.capped ? layer.scale / layer.softcap : layer.scale * LOG2E;
  p.outside = layer.softcap * LOG2E;
  const size_t cleared = size_t(step.batch) * (layer.num_kv_heads + BINS) * sizeof(unsigned);
  if (const int error = launched(clear_async(p.counter, cleared, step.stream), "clearing of the selection's counters"))
    return error;
  const int scored = choose(layer, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    constexpr int D = decltype(size)::value;
    const dim3 grid(pieces(p.chunks, step.batch * p.kv_heads), p.kv_heads, step.batch);
    const auto kernel = p.group > 8 ? select_scores_kernel<T, D, 2> : select_scores_kernel<T, D, 1>;
    return launched(launch(kernel, grid, dim3(THREADS), 0, step.stream, p), "scores for the selection");
  });
  if (scored) return scored;
  const dim3 grid(pieces((dense.rows + RANK_ROWS - 1) / RANK_ROWS, step.batch), step.batch);
  const size_t norms = layer.num_heads * sizeof(float2);
  int error = launch_early(select_chances_kernel, grid, dim3(RANK_THREADS), norms, step.stream, p);
  if (error) return launched(error, "probabilities for the selection");
  error = launch_early(select_pick_kernel, dim3(step.batch), dim3(PICK_THREADS), 0, step.stream, p);
  return launched(error, "selection");
}

}  // namespace kvpack
