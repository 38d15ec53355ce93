// The references that a row may be nearest to, by products of 16-bit numbers.
#include "deltakv_encode.cuh"

namespace kvpack {
namespace {

// -- the references among the rows, and the sinks side by side; a warp per row

template <class T>
__global__ void __launch_bounds__(ENCODE_THREADS) reference_kernel(Encode p) {
  const int b = blockIdx.y, lane = threadIdx.x % 32;
  const int e = blockIdx.x * ENCODE_WARPS + threadIdx.x / 32 - p.geometry.sinks;  // the sinks come first
  if (!encodes(p, b)) return;
  Token<T> token;
  T *row;
  if (e < 0) {
    const int position = e + p.geometry.sinks, past = p.past_len[b];
    token = token_at<T>(p, b, position < past ? position : p.ring_rows + position - past);
    row = static_cast<T *>(p.sinks) + (int64_t(b) * p.geometry.sinks + position) * p.width;
  } else {
    const int code = code_row(p, b, e);
    if (code < 0 || code % p.stride) return;
    token = token_at<T>(p, b, p.source[int64_t(b) * p.count + e]);
    row = static_cast<T *>(p.references) + (int64_t(b) * p.ref_rows + code / p.stride) * p.width;
  }
  for (int column = 8 * lane; column < p.width; column += 256)
    *reinterpret_cast<uint4 *>(row + column) = *reinterpret_cast<const uint4 *>(part_of(token, p, column));
}

// -- squared length of every reference beside the shift; a warp per reference

template <class T>
__global__ void __launch_bounds__(ENCODE_THREADS) energy_kernel(Encode p) {
  const int b = blockIdx.y, lane = threadIdx.x % 32;
  if (!encodes(p, b)) return;
  const int stored = encoded_rows(p.geometry, p.past_len[b] + p.new_len[b]);
  const int known = p.geometry.sinks + (stored + p.stride - 1) / p.stride;
  const uint4 *shift = static_cast<const uint4 *>(p.shift);
  const int warp = blockIdx.x * ENCODE_WARPS + threadIdx.x / 32;
  for (int ordinal = warp; ordinal < known; ordinal += gridDim.x * ENCODE_WARPS) {
    const uint4 *row = reinterpret_cast<const uint4 *>(reference_at<T>(p, b, ordinal));
    float sum = 0;
#pragma unroll 4
    for (int n = lane; n < p.width / 8; n += 32) {
      const uint4 x = row[n], s = shift[n];
      const uint32_t pairs[4] = {difference2<T>(x.x, s.x), difference2<T>(x.y, s.y), difference2<T>(x.z, s.z),
                                 difference2<T>(x.w, s.w)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 y = unpack2<T>(pairs[i]);
        sum = __fmaf_rn(y.y, y.y, __fmaf_rn(y.x, y.x, sum));
      }
    }
#pragma unroll
    for (int n = 16; n; n >>= 1) sum += __shfl_xor_sync(~0u, sum, n);
    if (lane == 0) p.energy[int64_t(b) * p.ordinals + ordinal] = sum;
  }
}

// -- candidates: the references nearest to each row, by products of 16-bit numbers

// Distances are |r - s|^2 - 2 (x - s).(r - s), up to what a row has in common, with s the rounded centre: a large mean
// takes no digits then. The differences are rounded to T, which is why there are more candidates than neighbours.
template <class T>
struct Shift {
  const T *shift;  // of the tiles' first column
  KVPACK_D uint32_t by(int column) const { return *reinterpret_cast<const uint32_t *>(shift + column); }
  KVPACK_D uint32_t operator()(uint32_t pair, uint32_t by) const { return difference2<T>(pair, by); }
};

template <int DOWN>
struct Nearest {  // 64 DOWN rows against 128 references at a time
  static constexpr int ACROSS = 8, ROWS = 64 * DOWN, COLUMNS = 16 * ACROSS, STAGES = 4;
  static constexpr int STAGE_BYTES = (ROWS + COLUMNS) * TILE_ROW_BYTES;
  static constexpr int PITCH = COLUMNS + 8;  // floats of a row of distances, which take the tiles' place
  static constexpr int SCORE_BYTES = ROWS * PITCH * 4;
  static constexpr int TILES_BYTES = STAGES * STAGE_BYTES > SCORE_BYTES ? STAGES * STAGE_BYTES : SCORE_BYTES;
  static size_t shared(int width) { return TILES_BYTES + ROWS * (CANDIDATES * sizeof(Candidate) + 4) + width * 2; }
};

template <class T, int DOWN>
__global__ void __launch_bounds__(ENCODE_THREADS, 2) nearest_kernel(Encode p) {
  using Shape = Nearest<DOWN>;
  KVPACK_DYNAMIC_SHARED(memory);
  Candidate *lists = reinterpret_cast<Candidate *>(memory + Shape::TILES_BYTES);  // [ROWS, CANDIDATES]
  int *own = reinterpret_cast<int *>(lists + Shape::ROWS * CANDIDATES);           // code rows
  T *shift = reinterpret_cast<T *>(own + Shape::ROWS);
  float *scores = reinterpret_cast<float *>(memory);
  __shared__ int newest;

  const int b = blockIdx.z, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int first_row = (gridDim.x - 1 - blockIdx.x) * Shape::ROWS;  // those with most references start first
  const int sinks = p.geometry.sinks, steps = p.width / TILE_DEPTH;
  if (thread == 0) newest = -1;
  __syncthreads();
  if (thread < Shape::ROWS) {
    own[thread] = code_row(p, b, first_row + thread);
    if (own[thread] >= 0) atomicMax(&newest, own[thread]);
  }
  for (int n = thread; n < Shape::ROWS * CANDIDATES; n += ENCODE_THREADS) lists[n] = {FAR, NOBODY};
  for (int n = thread; n < p.width / 8; n += ENCODE_THREADS)
    reinterpret_cast<uint4 *>(shift)[n] = static_cast<const uint4 *>(p.shift)[n];
  __syncthreads();
  if (newest < 0) return;
  const int known = sinks + newest / p.stride + 1, tiles = (known + Shape::COLUMNS - 1) / Shape::COLUMNS;

  // A thread copies one chunk of every 64th row of both tiles.
  const int line = thread / TILE_CHUNKS, chunk = thread % TILE_CHUNKS;
  Token<T> token[DOWN];
#pragma unroll
  for (int m = 0; m < DOWN; ++m) {
    const int e = first_row + line + 64 * m;
    token[m] = token_at<T>(p, b, code_row(p, b, e) >= 0 ? p.source[int64_t(b) * p.count + e] : 0);
  }
  for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    const int first = tile * Shape::COLUMNS;
    const T *reference[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
      reference[n] = reference_at<T>(p, b, min(first + line + 64 * n, known - 1)) + 8 * chunk;
    auto load = [&](int step) {
      if (step < steps) {
        unsigned char *a = memory + step % Shape::STAGES * Shape::STAGE_BYTES, *r = a + Shape::ROWS * TILE_ROW_BYTES;
        const int column = step * TILE_DEPTH;
#pragma unroll
        for (int m = 0; m < DOWN; ++m)
          copy_async_16(a + tile_offset(line + 64 * m, chunk), part_of(token[m], p, column) + 8 * chunk);
#pragma unroll
        for (int n = 0; n < 2; ++n)
          copy_async_16(r + tile_offset(line + 64 * n, chunk), reference[n] + column);
      }
      copy_async_commit();
    };
    WarpTile<T, DOWN, Shape::ACROSS> product;
    product.clear();
    for (int step = 0; step < Shape::STAGES - 1; ++step) load(step);
    for (int step = 0; step < steps; ++step) {
      copy_async_wait<Shape::STAGES - 2>();
      __syncthreads();
      load(step + Shape::STAGES - 1);
      const unsigned char *a = memory + step % Shape::STAGES * Shape::STAGE_BYTES;
      product.multiply(a, a + Shape::ROWS * TILE_ROW_BYTES, Shift<T>{shift + step * TILE_DEPTH});
    }
    copy_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < DOWN; ++m)
#pragma unroll
      for (int n = 0; n < Shape::ACROSS; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          *reinterpret_cast<float2 *>(scores + product.row(m, i) * Shape::PITCH + product.column(n)) =
              make_float2(product.sums[m][n][2 * i], product.sums[m][n][2 * i + 1]);
    __syncthreads();

    float energy[Shape::COLUMNS / 32];
#pragma unroll
    for (int n = 0; n < Shape::COLUMNS / 32; ++n)
      energy[n] = p.energy[int64_t(b) * p.ordinals + min(first + lane + 32 * n, known - 1)];
    for (int row = warp; row < Shape::ROWS; row += ENCODE_WARPS) {
      const int code = own[row];
      if (code < 0 || code % p.stride == 0) continue;  // a reference names itself
      const int allowed = sinks + code / p.stride;     // the newest reference at or before the row
      Candidate mine = lane < CANDIDATES ? lists[row * CANDIDATES + lane] : Candidate{FAR, NOBODY};
      float worst = __shfl_sync(~0u, mine.distance, CANDIDATES - 1);
#pragma unroll
      for (int n = 0; n < Shape::COLUMNS / 32; ++n) {
        const int ordinal = first + lane + 32 * n;
        const float distance = energy[n] - 2 * scores[row * Shape::PITCH + lane + 32 * n];
        uint32_t better = __ballot_sync(~0u, ordinal <= allowed && distance < worst);
        while (better) {
          const int from = __ffs(better) - 1;
          better &= better - 1;
          insert(mine, of_lane({distance, ordinal}, from));
          worst = __shfl_sync(~0u, mine.distance, CANDIDATES - 1);
        }
      }
      if (lane < CANDIDATES) lists[row * CANDIDATES + lane] = mine;
    }
    __syncthreads();
  }
  for (int n = thread; n < Shape::ROWS * CANDIDATES; n += ENCODE_THREADS) {
    const int e = first_row + n / CANDIDATES;
    if (e < p.count)
      p.found[((int64_t(b) * p.count + e) * p.splits + blockIdx.y) * CANDIDATES + n % CANDIDATES] = lists[n];
  }
}

template <class T>
int find(const kvpack_step &step, const Encode &p) {
  const int batch = step.batch;
  const dim3 threads(ENCODE_THREADS);
  int error = launch(reference_kernel<T>, warp_per_row(p.count + p.geometry.sinks, batch), threads, 0, step.stream, p);
  if (error) return error;
  const int lines = min((p.ordinals + ENCODE_WARPS - 1) / ENCODE_WARPS, 1024);
  error = launch(energy_kernel<T>, dim3(lines, batch), threads, 0, step.stream, p);
  if (error) return error;
  const bool few = p.count <= FEW_ROWS;
  const int rows = few ? Nearest<1>::ROWS : Nearest<2>::ROWS;
  return launch(few ? nearest_kernel<T, 1> : nearest_kernel<T, 2>, dim3((p.count + rows - 1) / rows, p.splits, batch),
                threads, few ? Nearest<1>::shared(p.width) : Nearest<2>::shared(p.width), step.stream, p);
}

}  // namespace

int find_candidates(const kvpack_layer &layer, const kvpack_step &step, const Encode &p) {
  return layer.dtype == KVPACK_FP16 ? find<half_t>(step, p) : find<bf16_t>(step, p);
}

}  // namespace kvpack
