// What lies between the attentions of a model and is best done in one pass: see kvpack.h.
#include <initializer_list>

#include "step.cuh"

namespace kvpack {
namespace {

constexpr int MOST_THREADS = 1024, GATE_THREADS = 256;

// N numbers of T from 2 N aligned bytes, and back. N is 8, or 1 where rows are not of whole 16-byte words.
template <int N, class T> KVPACK_D void load_numbers(float (&x)[N], const T *from) {
  if constexpr (N == 8) {
    const uint4 words = *reinterpret_cast<const uint4 *>(from);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 two = unpack2<T>(word[n]);
      x[2 * n] = two.x, x[2 * n + 1] = two.y;
    }
  } else {
    x[0] = to_float(*from);
  }
}
template <int N, class T> KVPACK_D void store_numbers(T *to, const float (&x)[N]) {
  if constexpr (N == 8)
    *reinterpret_cast<uint4 *>(to) =
        make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7]));
  else
    *to = from_float<T>(x[0]);
}
template <class T> KVPACK_D float rounded(float x) { return to_float(from_float<T>(x)); }

KVPACK_D float warp_sum(float x) {
#pragma unroll
  for (int n = 16; n; n >>= 1) x += __shfl_xor_sync(~0u, x, n);
  return x;
}

// A block per row. A thread's first numbers stay in registers; only rows of more than MOST_THREADS * N are read again.
template <class T, int N>
__global__ void __launch_bounds__(MOST_THREADS)
    add_rms_norm_kernel(const T *x, const T *y, const T *weight, T *sum, T *out, int columns, float epsilon) {
  __shared__ float parts[MOST_THREADS / 32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, own = threadIdx.x * N, stride = blockDim.x * N;
  const int64_t start = int64_t(blockIdx.x) * columns;
  float kept[N] = {}, scale[N] = {}, energy = 0;
  if (own < columns) load_numbers<N>(scale, weight + own);  // of no kernel before this one
  wait_for_previous_kernel();
  for (int column = own; column < columns; column += stride) {
    float a[N], b[N];
    load_numbers<N>(a, x + start + column);
    load_numbers<N>(b, y + start + column);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      a[n] = rounded<T>(a[n] + b[n]);
      energy = fmaf(a[n], a[n], energy);
      if (column == own) kept[n] = a[n];
    }
    store_numbers<N>(sum + start + column, a);
  }
  energy = warp_sum(energy);
  if (lane == 0) parts[warp] = energy;
  __syncthreads();
  energy = warp_sum(lane < int(blockDim.x >> 5) ? parts[lane] : 0);
  const float inverse = 1 / sqrtf(energy / columns + epsilon);
  for (int column = own; column < columns; column += stride) {
    if (column != own) {
      load_numbers<N>(kept, sum + start + column);
      load_numbers<N>(scale, weight + column);
    }
    float result[N];
#pragma unroll
    for (int n = 0; n < N; ++n) result[n] = rounded<T>(kept[n] * inverse) * scale[n];
    store_numbers<N>(out + start + column, result);
  }
}

KVPACK_D float activated(float x, int activation) {
  if (activation == KVPACK_SILU) return x / (1 + exp2_fast(-x * LOG2E));
  if (activation == KVPACK_GELU) return 0.5f * x * (1 + erff(x * 0.70710678f));
  return 0.5f * x * (1 + tanh_fast(0.79788456f * fmaf(0.044715f * x * x, x, x)));
}

// Grid (rows, columns / (GATE_THREADS * N)).
template <class T, int N>
__global__ void __launch_bounds__(GATE_THREADS)
    gated_activation_kernel(const T *x, T *out, int columns, int activation) {
  const int column = (blockIdx.y * GATE_THREADS + threadIdx.x) * N;
  wait_for_previous_kernel();
  if (column >= columns) return;
  const int64_t row = blockIdx.x;
  float gate[N], up[N];
  load_numbers<N>(gate, x + 2 * row * columns + column);
  load_numbers<N>(up, x + (2 * row + 1) * columns + column);
#pragma unroll
  for (int n = 0; n < N; ++n) gate[n] = rounded<T>(activated(gate[n], activation)) * up[n];
  store_numbers<N>(out + row * columns + column, gate);
}

int check(int dtype, int64_t rows, int columns, std::initializer_list<const void *> pointers) {
  if (dtype != KVPACK_FP16 && dtype != KVPACK_BF16)
    return fail(KVPACK_UNSUPPORTED, "dtype %d is neither fp16 nor bf16", dtype);
  if (rows < 0 || rows > INT32_MAX || columns < 1 || columns > 1 << 20)
    return fail(KVPACK_UNSUPPORTED, "%lld rows of %d numbers: there must be 0 to 2147483647 of 1 to 1048576",
                static_cast<long long>(rows), columns);
  for (const void *p : pointers)
    if (rows && !p) return fail(KVPACK_BAD_ARGUMENT, "the inputs and outputs must not be null");
  return KVPACK_OK;
}

// f(type, size): the layer's T, and how many numbers at a time.
template <class F> int by_width(int dtype, int columns, std::initializer_list<const void *> pointers, F &&f) {
  bool whole = columns % 8 == 0;
  for (const void *p : pointers) whole &= reinterpret_cast<uintptr_t>(p) % 16 == 0;
  if (dtype == KVPACK_FP16) return whole ? f(Type<half_t>(), Size<8>()) : f(Type<half_t>(), Size<1>());
  return whole ? f(Type<bf16_t>(), Size<8>()) : f(Type<bf16_t>(), Size<1>());
}

}  // namespace
}  // namespace kvpack

using namespace kvpack;

extern "C" int kvpack_add_rms_norm(int32_t dtype, int64_t rows, int32_t columns, float epsilon, const void *x,
                                   const void *y, const void *weight, void *sum, void *out, void *stream) {
  const std::initializer_list<const void *> pointers = {x, y, weight, sum, out};
  if (const int error = check(dtype, rows, columns, pointers)) return error;
  if (!rows) return KVPACK_OK;
  const int error = by_width(dtype, columns, pointers, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    constexpr int N = decltype(size)::value;
    const int threads = min((columns + 32 * N - 1) / (32 * N) * 32, MOST_THREADS);
    return launch_early(add_rms_norm_kernel<T, N>, dim3(unsigned(rows)), dim3(threads), 0, stream,
                        static_cast<const T *>(x), static_cast<const T *>(y), static_cast<const T *>(weight),
                        static_cast<T *>(sum), static_cast<T *>(out), columns, epsilon);
  });
  return launched(error, "add_rms_norm");
}

extern "C" int kvpack_gated_activation(int32_t dtype, int32_t activation, int64_t rows, int32_t columns, const void *x,
                                       void *out, void *stream) {
  if (const int error = check(dtype, rows, columns, {x, out})) return error;
  if (activation != KVPACK_SILU && activation != KVPACK_GELU_TANH && activation != KVPACK_GELU)
    return fail(KVPACK_UNSUPPORTED, "activation %d is not known", activation);
  if (!rows) return KVPACK_OK;
  const int error = by_width(dtype, columns, {x, out}, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    constexpr int N = decltype(size)::value, EACH = GATE_THREADS * N;
    const dim3 grid(unsigned(rows), (columns + EACH - 1) / EACH);
    return launch_early(gated_activation_kernel<T, N>, grid, dim3(GATE_THREADS), 0, stream, static_cast<const T *>(x),
                        static_cast<T *>(out), columns, activation);
  });
  return launched(error, "gated_activation");
}
