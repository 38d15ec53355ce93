// What every op's step shares; see step.cuh.
#include "step.cuh"

#include <cstdarg>
#include <cstdio>

#include "exact.cuh"

namespace kvpack {
namespace {

thread_local char message[512] = "";

// -- a decode step

template <int D> constexpr int BEGIN_WARPS = D > 128 ? 4 : 11;  // 11 tiles hold 4 sinks, a window of 128 and a block

// A block does one KV head of one sequence. attend: whether to the exact rows, too.
template <class T, int D>
__global__ void __launch_bounds__(32 * BEGIN_WARPS<D>)
    decode_begin_kernel(ExactRows exact, kvpack_step step, Decode decode, Rope rope, Scale scale, int group, int window,
                        int attend) {
  let_next_kernel_start();
  KVPACK_DYNAMIC_SHARED(shared);
  attend_exact<T, D, BEGIN_WARPS<D>>(shared, exact, step, decode, rope, scale, gridDim.x, group, window, attend,
                                     blockIdx.x, blockIdx.y);
}

int begin(const kvpack_layer &layer, const kvpack_step &step, const ExactRows &exact, const Decode &decode,
          bool attend) {
  return choose(layer, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    constexpr int D = decltype(size)::value, WARPS = BEGIN_WARPS<D>;
    const size_t shared = attend_exact_bytes<D, WARPS>;
    const int error = launch(decode_begin_kernel<T, D>, dim3(layer.num_kv_heads, step.batch), dim3(32 * WARPS), shared,
                             step.stream, exact, step, decode, rope_of(layer, step), Scale{layer.scale, layer.softcap},
                             layer.num_heads / layer.num_kv_heads, layer.sliding_window, int(attend));
    return launched(error, "decode_begin");
  });
}

// -- a step of many tokens: a warp per row of D numbers

constexpr int ROW_WARPS = 4;

template <class T> KVPACK_D void copy_row(T *to, const T *from, int size) {  // rows are 16-byte aligned
  for (int n = threadIdx.x & 31; n < size / 8; n += 32)
    reinterpret_cast<uint4 *>(to)[n] = reinterpret_cast<const uint4 *>(from)[n];
}
template <class T> KVPACK_D void turn_row(T *to, const T *from, int size, const Rope &rope, int position) {
  for (int n = threadIdx.x & 31; n < size; n += 32) to[n] = from_float<T>(turned(rope, from, n, position));
}

// Grid (S / ROW_WARPS, Hq, B).
template <class T, int D> __global__ void rotate_queries_kernel(kvpack_step step, Rope rope, T *query) {
  const int s = blockIdx.x * ROW_WARPS + (threadIdx.x >> 5), head = blockIdx.y, b = blockIdx.z;
  if (s >= step.length) return;
  const T *from = static_cast<const T *>(step.q) + (int64_t(b) * step.length + s) * step.q_row + head * D;
  turn_row(query + ((int64_t(b) * gridDim.y + head) * step.length + s) * D, from, D, rope, step.past_len[b] + s);
}

// Grid ((exact rows + S) / ROW_WARPS, H, B).
template <class T, int D>
__global__ void restore_exact_kernel(ExactRows exact, kvpack_step step, NewRows new_k, NewRows new_v, Rope rope,
                                     T *dense_k, T *dense_v, int rows, int window) {
  const int item = blockIdx.x * ROW_WARPS + (threadIdx.x >> 5), h = blockIdx.y, b = blockIdx.z;
  const int old = exact.geometry.sinks + exact.geometry.window + exact.geometry.block, past = step.past_len[b];
  const int position = item < old ? exact_position(exact.geometry, item, past) : past + item - old;
  const int row = position - (window ? max(past - window, 0) : 0);
  if (position < 0 || position >= past + step.new_len[b] || row < 0 || row >= rows) return;
  const int64_t to = ((int64_t(b) * gridDim.y + h) * rows + row) * D;
  const int64_t at = b * exact.batch_stride + h * exact.head_stride + item * exact.row_stride;
  const T *k = item < old ? static_cast<const T *>(exact.k) + at : new_row<T>(new_k, b, h, item - old);
  const T *v = item < old ? static_cast<const T *>(exact.v) + at : new_row<T>(new_v, b, h, item - old);
  if (item < old && exact.rotated) copy_row(dense_k + to, k, D); else turn_row(dense_k + to, k, D, rope, position);
  copy_row(dense_v + to, v, D);
}

// Grid (S / ROW_WARPS, H, B).
template <class T, int D>
__global__ void store_exact_kernel(ExactRows exact, kvpack_step step, NewRows new_k, NewRows new_v, Rope rope) {
  const int s = blockIdx.x * ROW_WARPS + (threadIdx.x >> 5), h = blockIdx.y, b = blockIdx.z;
  const int count = step.new_len[b], position = step.past_len[b] + s;
  const int ring = exact.geometry.window + exact.geometry.block;
  const int row = exact_row(exact.geometry, position);
  if (s >= count || row >= exact.geometry.sinks + ring) return;
  if (position >= exact.geometry.sinks && s < count - ring) return;  // a later token takes the row
  const int64_t to = b * exact.batch_stride + h * exact.head_stride + row * exact.row_stride;
  const T *key = new_row<T>(new_k, b, h, s);
  T *to_k = static_cast<T *>(exact.k) + to;
  if (exact.rotated) turn_row(to_k, key, D, rope, position); else copy_row(to_k, key, D);
  copy_row(static_cast<T *>(exact.v) + to, new_row<T>(new_v, b, h, s), D);
}

unsigned row_blocks(int64_t rows) { return unsigned((rows + ROW_WARPS - 1) / ROW_WARPS); }

bool aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

int fail(int code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  return code;
}

int launched(int error, const char *what) {
#ifndef KVPACK_EMULATE
  if (error) return fail(KVPACK_CUDA, "%s: %s", what, cudaGetErrorString(cudaError_t(error)));
#endif
  return error ? fail(KVPACK_CUDA, "%s: CUDA error %d", what, error) : KVPACK_OK;
}

int check_layer(const kvpack_layer &layer) {
  const int d = layer.head_dim;
  if (layer.dtype != KVPACK_FP16 && layer.dtype != KVPACK_BF16)
    return fail(KVPACK_UNSUPPORTED, "dtype %d is neither fp16 nor bf16", layer.dtype);
  if (d != 64 && d != 96 && d != 128 && d != 256)
    return fail(KVPACK_UNSUPPORTED, "head_dim %d is not 64, 96, 128 or 256", d);
  if (layer.num_kv_heads < 1 || layer.num_heads < 1 || layer.num_heads % layer.num_kv_heads)
    return fail(KVPACK_BAD_ARGUMENT, "%d query heads do not divide among %d KV heads", layer.num_heads,
                layer.num_kv_heads);
  if (layer.num_heads / layer.num_kv_heads > 16)
    return fail(KVPACK_UNSUPPORTED, "%d query heads per KV head are more than 16",
                layer.num_heads / layer.num_kv_heads);
  if (layer.rotary_dim < 0 || layer.rotary_dim > d || layer.rotary_dim % 2)
    return fail(KVPACK_BAD_ARGUMENT, "rotary_dim %d is not an even number from 0 to head_dim %d", layer.rotary_dim, d);
  if (layer.sliding_window < 0 || !(layer.softcap >= 0))
    return fail(KVPACK_BAD_ARGUMENT, "sliding_window %d or softcap %g is negative", layer.sliding_window,
                layer.softcap);
  return KVPACK_OK;
}

int check_geometry(const kvpack_layer &layer, const kvpack_geometry &geometry) {
  if (layer.sliding_window)
    return fail(KVPACK_UNSUPPORTED, "a layer with a sliding window of %d is never compressed", layer.sliding_window);
  if (geometry.sinks < 0 || geometry.window < 1 || geometry.block < 1)
    return fail(KVPACK_BAD_ARGUMENT, "sinks=%d, window=%d, block=%d: sinks must be >= 0, the others >= 1",
                geometry.sinks, geometry.window, geometry.block);
  return KVPACK_OK;
}

int check_step(const kvpack_layer &layer, kvpack_step &step) {
  if (const int code = check_layer(layer)) return code;
  if (step.batch < 1 || step.length < 1 || step.live < 0 || step.encode < 0)
    return fail(KVPACK_BAD_ARGUMENT, "batch=%d, length=%d, live=%d, encode=%d: batch and length must be >= 1, none < 0",
                step.batch, step.length, step.live, step.encode);
  if (step.batch > 65535 || layer.num_heads + layer.num_kv_heads > 65535)
    return fail(KVPACK_UNSUPPORTED, "a batch of %d or %d heads is more than a grid takes", step.batch, layer.num_heads);
  if (!step.q || !step.k || !step.v || !step.out || !step.past_len || !step.new_len)
    return fail(KVPACK_BAD_ARGUMENT, "q, k, v, out, past_len and new_len must not be null");
  if (!aligned(step.q) || !aligned(step.k) || !aligned(step.v) || !aligned(step.out))
    return fail(KVPACK_BAD_ARGUMENT, "q, k, v and out must be 16-byte aligned");
  const int q_size = layer.num_heads * layer.head_dim, kv_size = layer.num_kv_heads * layer.head_dim;
  if (!step.q_row) step.q_row = q_size;
  if (!step.kv_row) step.kv_row = kv_size;
  if (step.q_row < q_size || step.kv_row < kv_size || step.q_row % 8 || step.kv_row % 8)
    return fail(KVPACK_BAD_ARGUMENT, "q_row=%d and kv_row=%d must be multiples of 8 and at least %d and %d", step.q_row,
                step.kv_row, q_size, kv_size);
  if (step.encode && (!step.enc_src || !step.enc_dst))
    return fail(KVPACK_BAD_ARGUMENT, "enc_src and enc_dst must not be null when %d rows are to be encoded",
                step.encode);
  if (layer.rotary_dim && (!step.cos || !step.sin || step.rope_rows < 1))
    return fail(KVPACK_BAD_ARGUMENT, "rotary_dim %d needs cos and sin tables", layer.rotary_dim);
  return KVPACK_OK;
}

Many carve_many(Carver &carver, const kvpack_layer &layer, const kvpack_step &step, int rows) {
  Many scratch = {};
  const size_t size = size_t(step.batch) * layer.head_dim;
  scratch.rows = rows;
  scratch.query = carver.take<uint16_t>(size * layer.num_heads * step.length);
  scratch.k = carver.take<uint16_t>(size * layer.num_kv_heads * rows);
  scratch.v = carver.take<uint16_t>(size * layer.num_kv_heads * rows);
  return scratch;
}

int check_workspace(const kvpack_step &step, size_t needed) {
  if (!needed) return KVPACK_OK;
  if (!step.workspace || step.workspace_bytes < needed)
    return fail(KVPACK_WORKSPACE, "the workspace has %zu bytes, %zu are needed",
                step.workspace ? step.workspace_bytes : 0, needed);
  if (reinterpret_cast<uintptr_t>(step.workspace) % 256)
    return fail(KVPACK_WORKSPACE, "the workspace is not 256-byte aligned");
  return KVPACK_OK;
}

Decode carve_decode(Carver &carver, const kvpack_layer &layer, int batch, int splits) {
  const size_t heads = size_t(batch) * layer.num_heads, slots = heads * (splits + 1);
  Decode decode{};
  decode.query = carver.take<uint16_t>(heads * layer.head_dim);
  decode.partial = carver.take<float>(slots * layer.head_dim);
  decode.mass = carver.take<float2>(slots);
  decode.counter = carver.take<unsigned>(size_t(batch) * layer.num_kv_heads);
  decode.splits = splits;
  return decode;
}

int decode_begin(const kvpack_layer &layer, const kvpack_step &step, const ExactRows &exact, const Decode &decode) {
  return begin(layer, step, exact, decode, true);
}
int decode_append(const kvpack_layer &layer, const kvpack_step &step, const ExactRows &exact, const Decode &decode) {
  return begin(layer, step, exact, decode, false);
}

int rotate_queries(const kvpack_layer &layer, const kvpack_step &step, void *query) {
  return choose(layer, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    const dim3 grid(row_blocks(step.length), layer.num_heads, step.batch);
    const int error = launch(rotate_queries_kernel<T, decltype(size)::value>, grid, dim3(32 * ROW_WARPS), 0,
                             step.stream, step, rope_of(layer, step), static_cast<T *>(query));
    return launched(error, "rotate_queries");
  });
}

int restore_exact(const kvpack_layer &layer, const kvpack_step &step, const ExactRows &exact, void *dense_k,
                  void *dense_v, int rows) {
  return choose(layer, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    const int64_t old = int64_t(exact.geometry.sinks) + exact.geometry.window + exact.geometry.block;
    const dim3 grid(row_blocks(old + step.length), layer.num_kv_heads, step.batch);
    const int error = launch(restore_exact_kernel<T, decltype(size)::value>, grid, dim3(32 * ROW_WARPS), 0, step.stream,
                             exact, step, rows_of(layer, step, step.k), rows_of(layer, step, step.v),
                             rope_of(layer, step), static_cast<T *>(dense_k), static_cast<T *>(dense_v), rows,
                             layer.sliding_window);
    return launched(error, "restore_exact");
  });
}

int store_exact(const kvpack_layer &layer, const kvpack_step &step, const ExactRows &exact) {
  return choose(layer, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    const dim3 grid(row_blocks(step.length), layer.num_kv_heads, step.batch);
    const int error = launch(store_exact_kernel<T, decltype(size)::value>, grid, dim3(32 * ROW_WARPS), 0, step.stream,
                             exact, step, rows_of(layer, step, step.k), rows_of(layer, step, step.v),
                             rope_of(layer, step));
    return launched(error, "store_exact");
  });
}

}  // namespace kvpack

extern "C" const char *kvpack_last_error(void) { return kvpack::message; }
extern "C" int32_t kvpack_abi(void) { return KVPACK_ABI; }
