// Latents z = f(x) - f(m) of rows x and the means m of their references, in float32: codes must not hang on rounding.
#include "deltakv_encode.cuh"

namespace kvpack {
namespace {

struct Product {  // out [rows, columns] = or += rows [rows, depth] @ matrix [depth, columns]; 0 past the depth of a row
  const float *rows;
  int depth, row_pitch;
  const float *matrix;
  int columns;
  float *out;
  int out_pitch, adds;
};

// Every sum is one chain over the columns in order, whatever the tiles: a row's latents depend on nothing else.
template <int ROWS, int EACH>  // ROWS by ROWS per block, EACH by EACH per thread
__global__ void __launch_bounds__(ENCODE_THREADS, 2) product_kernel(Encode p, Product x, int first, int chunk) {
  constexpr int DEPTH = 2048 / ROWS, PITCH = ROWS + 4, VECTOR = EACH < 4 ? EACH : 4, SIDE = ROWS / EACH;
  static_assert(SIDE * SIDE == ENCODE_THREADS);
  __shared__ __align__(16) float left[2][DEPTH * PITCH], right[2][DEPTH * PITCH];
  const int b = blockIdx.z, first_row = blockIdx.y * ROWS, first_column = blockIdx.x * ROWS;
  const int thread = threadIdx.x, down = thread / SIDE, across = thread % SIDE;
  if (code_row(p, b, first + first_row) < 0) return;  // padding comes last
  const float *rows = x.rows + int64_t(b) * chunk * x.row_pitch;

  float4 next[2];  // of the rows, which are kept transposed
  auto load = [&](int k, int stage) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int piece = thread + n * ENCODE_THREADS, row = min(first_row + piece / (DEPTH / 4), chunk - 1);
      next[n] = *reinterpret_cast<const float4 *>(rows + int64_t(row) * x.row_pitch + k + piece % (DEPTH / 4) * 4);
      const int line = piece / (ROWS / 4), column = piece % (ROWS / 4) * 4;
      const bool real = first_column + column < x.columns && k + line < x.depth;
      copy_async_16_or_zero(right[stage] + line * PITCH + column,
                            x.matrix + (real ? int64_t(k + line) * x.columns + first_column + column : 0), real);
    }
    copy_async_commit();
  };
  auto keep = [&](int stage) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int piece = thread + n * ENCODE_THREADS;
      float *column = left[stage] + piece % (DEPTH / 4) * 4 * PITCH + piece / (DEPTH / 4);
      column[0] = next[n].x;
      column[PITCH] = next[n].y;
      column[2 * PITCH] = next[n].z;
      column[3 * PITCH] = next[n].w;
    }
    copy_async_wait<0>();
  };
  auto pick = [&](const float *line, int thread_place, float (&part)[EACH]) {
#pragma unroll
    for (int n = 0; n < EACH; n += VECTOR) {
      const float *from = line + n * SIDE + thread_place * VECTOR;
      if constexpr (VECTOR == 4) {
        const float4 four = *reinterpret_cast<const float4 *>(from);
        part[n] = four.x, part[n + 1] = four.y, part[n + 2] = four.z, part[n + 3] = four.w;
      } else {
        const float2 two = *reinterpret_cast<const float2 *>(from);
        part[n] = two.x, part[n + 1] = two.y;
      }
    }
  };

  float sums[EACH][EACH] = {};
  load(0, 0);
  keep(0);
  __syncthreads();
  for (int k = 0; k < x.depth; k += DEPTH) {
    const int stage = k / DEPTH % 2;
    const bool more = k + DEPTH < x.depth;
    if (more) load(k + DEPTH, stage ^ 1);
#pragma unroll(EACH < 4 ? 8 : 2)
    for (int d = 0; d < DEPTH; ++d) {
      float a[EACH], c[EACH];
      pick(left[stage] + d * PITCH, down, a);
      pick(right[stage] + d * PITCH, across, c);
#pragma unroll
      for (int m = 0; m < EACH; ++m)
#pragma unroll
        for (int n = 0; n < EACH; ++n) sums[m][n] = __fmaf_rn(a[m], c[n], sums[m][n]);
    }
    if (more) keep(stage ^ 1);
    __syncthreads();
  }
#pragma unroll
  for (int m = 0; m < EACH; ++m) {
    const int row = first_row + m / VECTOR * VECTOR * SIDE + down * VECTOR + m % VECTOR;
    if (row >= chunk) continue;
    float *out = x.out + (int64_t(b) * chunk + row) * x.out_pitch;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int column = first_column + n / VECTOR * VECTOR * SIDE + across * VECTOR + n % VECTOR;
      if (column < x.columns) out[column] = x.adds ? out[column] + sums[m][n] : sums[m][n];
    }
  }
}

// units[0] = silu(units[0]) * units[1] - silu(units[2]) * units[3], and zeros up to the pitch; a warp per row.
__global__ void __launch_bounds__(ENCODE_THREADS) unit_kernel(Encode p, int first, int chunk) {
  const int b = blockIdx.y, place = blockIdx.x * ENCODE_WARPS + threadIdx.x / 32;
  if (place >= chunk || code_row(p, b, first + place) < 0) return;
  const int64_t at = (int64_t(b) * chunk + place) * p.pitch;
  auto silu = [](float x) { return x / (1 + expf(-x)); };
  for (int n = threadIdx.x % 32; n < p.pitch; n += 32) {
    float difference = 0;
    if (n < p.hidden)
      difference = silu(p.units[0][at + n]) * p.units[1][at + n] - silu(p.units[2][at + n]) * p.units[3][at + n];
    p.units[0][at + n] = difference;
  }
}

}  // namespace

int make_latents(const kvpack_step &step, const kvpack_deltakv &d, const Encode &p, int first, int chunk) {
  const int here = min(chunk, p.count - first), side = p.count <= FEW_ROWS ? 32 : 128;
  auto multiply = [&](const Product &x) {
    const dim3 grid((x.columns + side - 1) / side, (here + side - 1) / side, step.batch);
    return launch(side == 32 ? product_kernel<32, 2> : product_kernel<128, 8>, grid, dim3(ENCODE_THREADS), 0,
                  step.stream, p, x, first, chunk);
  };
  const int values = p.segments.values;
  int error = multiply({p.residual, p.width, p.width, d.compress, values, p.latent, values, 0});
  if (!p.hidden) return error;
  for (int n = 0; n < 4 && !error; ++n)
    error = multiply({p.centered[n / 2], p.width, p.width, n % 2 ? d.up : d.gate, p.hidden, p.units[n], p.pitch, 0});
  if (!error)
    error = launch(unit_kernel, warp_per_row(here, step.batch), dim3(ENCODE_THREADS), 0, step.stream, p, first, chunk);
  return error ? error : multiply({p.units[0], p.hidden, p.pitch, d.down, values, p.latent, values, 1});
}

}  // namespace kvpack
