// Code rows back to dense keys and values, for a step of many tokens on a past.
#include "deltakv.cuh"
#include "gemm.cuh"

namespace kvpack {
namespace {

constexpr int THREADS = TILE_THREADS;
static_assert(RESTORE_DEPTH == TILE_DEPTH);

struct Restore {
  const void *ring, *latents, *scales, *index, *references, *matrix;
  const int32_t *past_len;
  void *keys, *values;
  kvpack_geometry geometry;
  Segments segments;
  Rope rope;
  int heads, width, ring_rows, code_rows, ref_rows, neighbors, index_bytes, depth, rows;
};

// 8 values of a latent in the order of the stored codes: as many bytes as a code has bits.
struct Group {
  short byte;
  signed char bits, segment;  // 0 bits: beyond the last value
};
KVPACK_D Group group_at(const Segments &segments, int column) {
  int first = 0, byte = 0;
  for (int n = 0; n < segments.count; ++n) {
    if (column < first + segments.sizes[n])
      return {short(byte + (column - first) * segments.bits[n] / 8), static_cast<signed char>(segments.bits[n]),
              static_cast<signed char>(n)};
    first += segments.sizes[n];
    byte += segments.sizes[n] * segments.bits[n] / 8;
  }
  return {0, 0, 0};
}

template <class T, int BITS>
KVPACK_D uint4 decoded(const uint16_t *from, float scale) {
  constexpr int PER_WORD = 16 / BITS, HALF = 1 << (BITS - 1);
  uint32_t pairs[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const uint32_t word = (from[2 * n / PER_WORD] ^ 0x8080u) >> (2 * n % PER_WORD * BITS);  // bytes hold less 128
    const int low = word & (2 * HALF - 1), high = word >> BITS & (2 * HALF - 1);
    pairs[n] = pack2<T>((low - HALF + 0.5f) * scale, (high - HALF + 0.5f) * scale);
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
template <class T>
KVPACK_D uint4 decoded(const Group &group, const unsigned char *bytes, const T *scales) {
  if (group.bits == 0) return make_uint4(0, 0, 0, 0);
  if (group.bits == 16) return *reinterpret_cast<const uint4 *>(bytes + group.byte);
  const uint16_t *from = reinterpret_cast<const uint16_t *>(bytes + group.byte);  // an even number of bytes
  const float scale = to_float(scales[group.segment]);
  if (group.bits == 2) return decoded<T, 2>(from, scale);
  return group.bits == 4 ? decoded<T, 4>(from, scale) : decoded<T, 8>(from, scale);
}

// Adds the mean of the references of code row `row` to x, 8 columns of it from `column`.
template <class T>
KVPACK_D void add_mean(const Restore &p, int b, int row, int column, float (&x)[8]) {
  float near[8], sum[8] = {};
  for (int n = 0; n < p.neighbors; ++n) {
    const int64_t at = (int64_t(b) * p.code_rows + row) * p.neighbors + n;
    const int ordinal =
        p.index_bytes == 2 ? static_cast<const int16_t *>(p.index)[at] : static_cast<const int32_t *>(p.index)[at];
    const int sinks = p.geometry.sinks;
    const T *from = ordinal < sinks
                        ? static_cast<const T *>(p.ring) + (int64_t(b) * p.ring_rows + ordinal) * p.width
                        : static_cast<const T *>(p.references) + (int64_t(b) * p.ref_rows + ordinal - sinks) * p.width;
    float y[8];
    load8(from + column, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (n == 0) near[i] = y[i];
      else sum[i] += y[i] - near[i];
    }
  }
  const float share = 1 / float(p.neighbors);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] += near[i] + sum[i] * share;
}

template <int D>
struct Shape {  // one head's keys or values, of ROWS code rows
  static constexpr int DOWN = D == 256 ? 1 : 2, ACROSS = D / 16, ROWS = 64 * DOWN, STAGES = 3, PITCH = D + 8;
  static constexpr int STAGE_BYTES = (ROWS + D) * TILE_ROW_BYTES;
  static constexpr size_t TILES = STAGES * STAGE_BYTES, RESULT = ROWS * PITCH * 4;  // one takes the other's place
  static constexpr size_t SHARED = TILES > RESULT ? TILES : RESULT;
};

template <class T, int D>
__global__ void __launch_bounds__(THREADS, 2) restore_kernel(Restore p) {
  using S = Shape<D>;
  KVPACK_DYNAMIC_SHARED(memory);
  __shared__ Group groups[MAX_WIDTH / 8];
  float *result = reinterpret_cast<float *>(memory);
  const int b = blockIdx.z, part = blockIdx.x, first = blockIdx.y * S::ROWS, thread = threadIdx.x;
  const int count = encoded_rows(p.geometry, p.past_len[b]);
  if (first >= count) return;
  for (int n = thread; n < p.depth / 8; n += THREADS) groups[n] = group_at(p.segments, 8 * n);
  __syncthreads();

  const int line = thread / TILE_CHUNKS, chunk = thread % TILE_CHUNKS, steps = p.depth / TILE_DEPTH;
  const T *matrix = static_cast<const T *>(p.matrix) + int64_t(part) * D * p.depth;
  auto load = [&](int step) {
    if (step < steps) {
      unsigned char *a = memory + step % S::STAGES * S::STAGE_BYTES, *m = a + S::ROWS * TILE_ROW_BYTES;
#pragma unroll
      for (int n = 0; n < D; n += 64)
        if (D % 64 == 0 || line + n < D)
          copy_async_16(m + tile_offset(line + n, chunk),
                        matrix + (line + n) * p.depth + step * TILE_DEPTH + 8 * chunk);
      const Group group = groups[step * TILE_CHUNKS + chunk];
#pragma unroll
      for (int n = 0; n < S::ROWS; n += 64) {
        const int64_t row = int64_t(b) * p.code_rows + min(first + line + n, count - 1);
        *reinterpret_cast<uint4 *>(a + tile_offset(line + n, chunk)) =
            decoded(group, static_cast<const unsigned char *>(p.latents) + row * p.segments.bytes,
                    static_cast<const T *>(p.scales) + row * p.segments.count);
      }
    }
    copy_async_commit();
  };
  WarpTile<T, S::DOWN, S::ACROSS> product;
  product.clear();
  for (int step = 0; step < S::STAGES - 1; ++step) load(step);
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<S::STAGES - 2>();
    __syncthreads();
    load(step + S::STAGES - 1);
    const unsigned char *a = memory + step % S::STAGES * S::STAGE_BYTES;
    product.multiply(a, a + S::ROWS * TILE_ROW_BYTES, Unchanged());
  }
  copy_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < S::DOWN; ++m)
#pragma unroll
    for (int n = 0; n < S::ACROSS; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<float2 *>(result + product.row(m, i) * S::PITCH + product.column(n)) =
            make_float2(product.sums[m][n][2 * i], product.sums[m][n][2 * i + 1]);
  __syncthreads();

  const bool is_key = part < p.heads, turns = is_key && p.rope.half > 0;
  const int head = is_key ? part : part - p.heads, sinks = p.geometry.sinks;
  T *out = static_cast<T *>(is_key ? p.keys : p.values) + ((int64_t(b) * p.heads + head) * p.rows + sinks + first) * D;
  for (int n = thread; n < S::ROWS * D / 8; n += THREADS) {
    const int row = n / (D / 8), column = n % (D / 8) * 8;
    if (first + row >= count) break;
    float x[8];
    float *at = result + row * S::PITCH + column;
    load8(at, x);
    add_mean<T>(p, b, first + row, part * D + column, x);
    if (turns) {
      store8(at, x);
    } else {
      store8(out + int64_t(row) * D + column, x);
    }
  }
  if (!turns) return;
  __syncthreads();
  for (int n = thread; n < S::ROWS * D / 8; n += THREADS) {
    const int row = n / (D / 8), column = n % (D / 8) * 8;
    if (first + row >= count) break;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = turned(p.rope, result + row * S::PITCH, column + i, sinks + first + row);
    store8(out + int64_t(row) * D + column, x);
  }
}

// restore [X, depth] from decompress [values, X].
template <class T>
__global__ void __launch_bounds__(THREADS) transpose_kernel(const float *matrix, T *out, Segments segments, int width,
                                                            int depth) {
  const int n = blockIdx.x * THREADS + threadIdx.x, row = n / depth, column = n % depth;
  if (row >= width) return;
  float value = 0;
  int first = 0;
  for (int s = 0; s < segments.count; ++s) {
    const int size = segments.sizes[s], per_byte = max(8 / segments.bits[s], 1), place = column - first;
    if (place >= 0 && place < size)
      value = matrix[int64_t(first + place % per_byte * (size / per_byte) + place / per_byte) * width + row];
    first += size;
  }
  out[n] = from_float<T>(value);
}
template <class T>
__global__ void __launch_bounds__(THREADS) round_kernel(const float *x, T *out, int count) {
  const int n = blockIdx.x * THREADS + threadIdx.x;
  if (n < count) out[n] = from_float<T>(x[n]);
}

template <class T>
int prepare(const kvpack_deltakv &d, const DeltaKVTables &tables, int width, void *stream) {
  const dim3 threads(THREADS);
  int error = launch(round_kernel<T>, dim3((width + THREADS - 1) / THREADS), threads, 0, stream, d.center,
                     static_cast<T *>(tables.shift), width);
  if (error) return error;
  const int depth = restore_columns(d);
  return launch(transpose_kernel<T>, dim3((width * depth + THREADS - 1) / THREADS), threads, 0, stream, d.decompress,
                static_cast<T *>(tables.restore), segments_of(d), width, depth);
}

}  // namespace

int deltakv_restore_prepare(const kvpack_layer &layer, const kvpack_deltakv &d, const DeltaKVTables &tables,
                            void *stream) {
  const int width = deltakv_width(layer);
  const bool half = layer.dtype == KVPACK_FP16;
  return launched(half ? prepare<half_t>(d, tables, width, stream) : prepare<bf16_t>(d, tables, width, stream),
                  "making of DeltaKV tables");
}

int deltakv_restore(const kvpack_layer &layer, const kvpack_step &step, const kvpack_deltakv &d,
                    const DeltaKVTables &tables, void *dense_k, void *dense_v, int rows) {
  const int bound = step.live - d.geometry.sinks - d.geometry.window;  // of the rows there are
  if (bound <= 0) return KVPACK_OK;
  Restore p = {d.ring, d.latents, d.scales, d.index, d.references, tables.restore, step.past_len, dense_k, dense_v};
  p.geometry = d.geometry;
  p.segments = segments_of(d);
  p.rope = rope_of(layer, step);
  p.heads = layer.num_kv_heads;
  p.width = deltakv_width(layer);
  p.ring_rows = deltakv_ring_rows(d);
  p.code_rows = d.code_rows;
  p.ref_rows = d.ref_rows;
  p.neighbors = d.neighbors;
  p.index_bytes = d.index_bytes;
  p.depth = restore_columns(d);
  p.rows = rows;
  const int error = choose(layer, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    constexpr int D = decltype(size)::value;
    const dim3 grid(2 * p.heads, (bound + Shape<D>::ROWS - 1) / Shape<D>::ROWS, step.batch);
    return launch(restore_kernel<T, D>, grid, dim3(THREADS), Shape<D>::SHARED, step.stream, p);
  });
  return launched(error, "restoring of DeltaKV rows");
}

}  // namespace kvpack
