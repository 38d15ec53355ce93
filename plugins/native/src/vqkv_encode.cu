// Rows that leave the window to codes, in float32 as the reference does: y = (x - mean) @ encode, then per group and
// stage the codeword with the largest y.q - |q|^2 / 2, the lowest of equals, taken off before the next stage.
#include "vqkv.cuh"

namespace kvpack {
namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS, DEPTH = 32;  // DEPTH: rows of the encode matrix staged at once

struct EncodeArguments {
  VqSide side[2];
  const void *ring[2];             // T [B, H, exact, D]
  NewRows fresh[2];
  const int32_t *source, *target;  // [B, rows]
  int heads, dim, exact, rows, code_rows;
  int in_tiles;  // the layout of the codes
  int parts;     // blocks that share a tile of rows, each with some of the groups
  int trash;  // the first code row that is none
};

// Where a row to encode lies and where its codes go; `to` -1 for padding.
template <class T> struct EncodedRow {
  const T *from;
  int to;
};
template <class T> KVPACK_D EncodedRow<T> encoded_row(const EncodeArguments &a, int values, int b, int h, int n) {
  const int64_t head = int64_t(b) * a.heads + h;
  const T *ring = static_cast<const T *>(a.ring[values]) + head * a.exact * a.dim;
  if (n >= a.rows) return {ring, -1};
  const int to = a.target[int64_t(b) * a.rows + n], source = a.source[int64_t(b) * a.rows + n];
  if (to >= a.trash) return {ring, -1};
  if (source < a.exact) return {ring + int64_t(source) * a.dim, to};
  return {new_row<T>(a.fresh[values], b, h, source - a.exact), to};
}

// x - mean of columns k0 .. k0 + DEPTH - 1 to x [DEPTH][ROWS] in shared memory, by the block.
template <class T, int ROWS>
KVPACK_D void stage_rows(float *x, const T *const *from, const float *mean, int k0) {
  for (int n = threadIdx.x; n < ROWS * DEPTH / 8; n += THREADS) {
    const int row = n % ROWS, k = n / ROWS * 8;
    const uint4 words = *reinterpret_cast<const uint4 *>(from[row] + k0 + k);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 pair = unpack2<T>(word[e]);
      x[(k + 2 * e) * ROWS + row] = __fsub_rn(pair.x, mean[k0 + k + 2 * e]);
      x[(k + 2 * e + 1) * ROWS + row] = __fsub_rn(pair.y, mean[k0 + k + 2 * e + 1]);
    }
  }
}

// -- codewords of at most WIDTH <= NARROW values: a warp has a group, a lane EACH rows, in registers

template <int EACH> KVPACK_D void load_rows_of_lane(float (&x)[EACH], const float *from) {
  if constexpr (EACH == 4) {
    const float4 word = *reinterpret_cast<const float4 *>(from);
    x[0] = word.x, x[1] = word.y, x[2] = word.z, x[3] = word.w;
  } else {
    x[0] = *from;
  }
}

template <int WIDTH> KVPACK_D void load_codeword(float (&q)[WIDTH], const float *from) {
#pragma unroll
  for (int e = 0; e < WIDTH; e += 4) {
    const float4 word = *reinterpret_cast<const float4 *>(from + e);
    q[e] = word.x, q[e + 1] = word.y, q[e + 2] = word.z, q[e + 3] = word.w;
  }
}
template <int WIDTH> KVPACK_D float closeness(const float (&y)[WIDTH], const float (&q)[WIDTH], float half) {
#pragma unroll
  for (int e = 0; e < WIDTH; ++e) half = __fmaf_rn(y[e], q[e], half);
  return half;
}

// One lookup's codewords to shared memory, by a warp: [entries up to CHUNK's multiple][WIDTH] and their halves.
constexpr int CHUNK = 8, MOST = 256;
template <int WIDTH> KVPACK_D void stage_book(float *book, float *halves, const VqSide &side, int64_t lookup) {
  const float *from = side.books + lookup * side.entries * side.width, *half = side.half + lookup * side.entries;
  const int lane = threadIdx.x & 31, padded = (side.entries + CHUNK - 1) / CHUNK * CHUNK;
  if (side.width == WIDTH && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    for (int n = 4 * lane; n < side.entries * WIDTH; n += 4 * 32) copy_async_16(book + n, from + n);
    copy_async_commit();
  } else {
    for (int n = lane; n < side.entries * WIDTH; n += 32)
      book[n] = n % WIDTH < side.width ? from[n / WIDTH * side.width + n % WIDTH] : 0;
  }
  for (int n = side.entries * WIDTH + lane; n < padded * WIDTH; n += 32) book[n] = 0;
  for (int n = lane; n < padded; n += 32) halves[n] = n < side.entries ? half[n] : -INFINITY;
}

template <int WIDTH, int EACH> struct NarrowShared {
  float x[DEPTH * 32 * EACH];
  float matrix[DEPTH * WARPS * WIDTH];
  float book[WARPS][MOST * WIDTH], half[WARPS][MOST];
  const void *from[32 * EACH];
  int to[32 * EACH];
};

template <class T, int WIDTH, int EACH>
__global__ void __launch_bounds__(THREADS) encode_narrow_kernel(EncodeArguments a) {
  constexpr int ROWS = 32 * EACH, COLUMNS = WARPS * WIDTH;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int values = blockIdx.z & 1, b = blockIdx.z >> 1, h = blockIdx.y;
  const VqSide &side = a.side[values];
  const int sections = (side.stages[0] + WARPS - 1) / WARPS;  // groups without a code need no work
  const int section = blockIdx.x % a.parts, tile = blockIdx.x / a.parts;
  if (section >= sections || side.width > WIDTH || (WIDTH == 8 && side.width <= 4)) return;
  const int group0 = section * WARPS, group = group0 + warp, set = h % side.sets;
  const bool active = group < side.stages[0];

  KVPACK_DYNAMIC_SHARED(memory);
  auto &shared = *reinterpret_cast<NarrowShared<WIDTH, EACH> *>(memory);
  const T **from = reinterpret_cast<const T **>(shared.from);
  bool some = false;
  for (int n = threadIdx.x; n < ROWS; n += THREADS) {
    const EncodedRow<T> row = encoded_row<T>(a, values, b, h, tile * ROWS + n);
    from[n] = row.from, shared.to[n] = row.to;
  }
  __syncthreads();
  for (int n = 0; n < EACH; ++n) some |= shared.to[lane * EACH + n] >= 0;
  if (!__any_sync(~0u, some)) return;  // the same for every warp
  float *book = shared.book[warp], *halves = shared.half[warp];
  if (active) stage_book<WIDTH>(book, halves, side, int64_t(set) * side.lookups + group);

  float y[EACH][WIDTH] = {};
  const float *encode = side.encode + int64_t(set) * a.dim * a.dim;
  for (int k0 = 0; k0 < a.dim; k0 += DEPTH) {
    stage_rows<T, ROWS>(shared.x, from, side.mean + h * a.dim, k0);
    for (int n = threadIdx.x; n < DEPTH * COLUMNS; n += THREADS) {
      const int k = n / COLUMNS, element = n % WIDTH, of = group0 + n % COLUMNS / WIDTH;
      const bool real = of < side.groups && element < side.width;
      shared.matrix[n] = real ? encode[int64_t(k0 + k) * a.dim + of * side.width + element] : 0;
    }
    __syncthreads();
    if (active)
#pragma unroll 8
      for (int k = 0; k < DEPTH; ++k) {
        float x[EACH], column[WIDTH];
        load_rows_of_lane<EACH>(x, shared.x + k * ROWS + lane * EACH);
        load_codeword<WIDTH>(column, shared.matrix + k * COLUMNS + warp * WIDTH);
#pragma unroll
        for (int n = 0; n < EACH; ++n)
#pragma unroll
          for (int e = 0; e < WIDTH; ++e) y[n][e] = __fmaf_rn(x[n], column[e], y[n][e]);
      }
    __syncthreads();
  }
  if (!active) return;

  int8_t *codes = side.codes + (int64_t(b) * a.heads + h) * a.code_rows * side.lookups;
  for (int stage = 0, first = 0; stage < side.stage_count && group < side.stages[stage]; ++stage) {
    if (stage) {
      __syncwarp();
      stage_book<WIDTH>(book, halves, side, int64_t(set) * side.lookups + first + group);
    }
    copy_async_wait<0>();
    __syncwarp();
    // The best of each 8 codewords first, and which of those it was at the end: a maximum costs less than a choice.
    float best[EACH];
    int chunk[EACH];
#pragma unroll
    for (int n = 0; n < EACH; ++n) best[n] = -INFINITY, chunk[n] = 0;
    for (int code = 0; code < side.entries; code += CHUNK) {
      float most[EACH], half[CHUNK];
#pragma unroll
      for (int n = 0; n < EACH; ++n) most[n] = -INFINITY;
      load_codeword<CHUNK>(half, halves + code);
#pragma unroll
      for (int c = 0; c < CHUNK; ++c) {
        float q[WIDTH];
        load_codeword<WIDTH>(q, book + (code + c) * WIDTH);
#pragma unroll
        for (int n = 0; n < EACH; ++n) most[n] = fmaxf(most[n], closeness<WIDTH>(y[n], q, half[c]));
      }
#pragma unroll
      for (int n = 0; n < EACH; ++n)
        if (most[n] > best[n]) best[n] = most[n], chunk[n] = code;
    }
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      int chosen = chunk[n];
#pragma unroll
      for (int c = CHUNK - 1; c >= 0; --c) {
        float q[WIDTH];
        load_codeword<WIDTH>(q, book + (chunk[n] + c) * WIDTH);
        if (closeness<WIDTH>(y[n], q, halves[chunk[n] + c]) == best[n]) chosen = chunk[n] + c;
      }
      float q[WIDTH];
      load_codeword<WIDTH>(q, book + chosen * WIDTH);
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) y[n][e] = __fsub_rn(y[n][e], q[e]);
      const int to = shared.to[lane * EACH + n];
      if (to >= 0)
        codes[code_place(a.in_tiles, values, to, first + group, side.lookups)] =
            int8_t(chosen - side.entries / 2);
    }
    first += side.stages[stage];
  }
}

// -- wider codewords: a block has a group of 64 rows, 4 x 4 products of rows and columns (or codewords) a thread

constexpr int WIDE_ROWS = 64, WIDE_COLUMNS = 64;
struct WideShared {
  float x[DEPTH * WIDE_ROWS], matrix[DEPTH * WIDE_COLUMNS];
  const void *from[WIDE_ROWS];
  int to[WIDE_ROWS], chosen[WIDE_ROWS];
  float y[1];  // [width][WIDE_ROWS]
};

// c += x^T matrix over `depth` rows of both, of this thread's rows 4 (thread / 16) and columns 4 (thread % 16) on.
KVPACK_D void multiply(float (&c)[4][4], const float *x, const float *matrix, int depth) {
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
#pragma unroll 8
  for (int k = 0; k < depth; ++k) {
    float left[4], right[4];
    load_codeword<4>(left, x + k * WIDE_ROWS + row);
    load_codeword<4>(right, matrix + k * WIDE_COLUMNS + column);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[n][e] = __fmaf_rn(left[n], right[e], c[n][e]);
  }
}
// matrix [DEPTH][WIDE_COLUMNS] <- from [depth][columns] with the given row stride, 0 outside.
KVPACK_D void stage_matrix(float *matrix, const float *from, int depth, int columns, int stride) {
  for (int n = threadIdx.x; n < DEPTH * WIDE_COLUMNS; n += THREADS) {
    const int k = n / WIDE_COLUMNS, column = n % WIDE_COLUMNS;
    matrix[n] = k < depth && column < columns ? from[int64_t(k) * stride + column] : 0;
  }
}

template <class T> __global__ void __launch_bounds__(THREADS, 2) encode_wide_kernel(EncodeArguments a) {
  const int values = blockIdx.z & 1, b = blockIdx.z >> 1, h = blockIdx.y;
  const VqSide &side = a.side[values];
  const int group = blockIdx.x % a.parts, tile = blockIdx.x / a.parts, set = h % side.sets;
  if (side.width <= NARROW || group >= side.stages[0]) return;
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4, width = side.width;

  KVPACK_DYNAMIC_SHARED(memory);
  auto &shared = *reinterpret_cast<WideShared *>(memory);
  const T **from = reinterpret_cast<const T **>(shared.from);
  if (threadIdx.x < WIDE_ROWS) {
    const EncodedRow<T> one = encoded_row<T>(a, values, b, h, tile * WIDE_ROWS + threadIdx.x);
    from[threadIdx.x] = one.from, shared.to[threadIdx.x] = one.to;
  }
  __syncthreads();
  const bool some = shared.to[threadIdx.x & 31] >= 0 || shared.to[32 + (threadIdx.x & 31)] >= 0;
  if (!__any_sync(~0u, some)) return;

  const float *encode = side.encode + int64_t(set) * a.dim * a.dim + group * width;
  for (int first = 0; first < width; first += WIDE_COLUMNS) {
    float c[4][4] = {};
    for (int k0 = 0; k0 < a.dim; k0 += DEPTH) {
      stage_rows<T, WIDE_ROWS>(shared.x, from, side.mean + h * a.dim, k0);
      stage_matrix(shared.matrix, encode + int64_t(k0) * a.dim + first, DEPTH, width - first, a.dim);
      __syncthreads();
      multiply(c, shared.x, shared.matrix, DEPTH);
      __syncthreads();
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if (first + column + e < width) shared.y[(first + column + e) * WIDE_ROWS + row + n] = c[n][e];
  }
  __syncthreads();

  int8_t *codes = side.codes + (int64_t(b) * a.heads + h) * a.code_rows * side.lookups;
  for (int stage = 0, first = 0; stage < side.stage_count && group < side.stages[stage]; ++stage) {
    const int64_t lookup = int64_t(set) * side.lookups + first + group;
    const float *turned = side.turned + lookup * width * side.entries, *half = side.half + lookup * side.entries;
    float best[4];
    int chosen[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) best[n] = -INFINITY, chosen[n] = 0;
    for (int code = 0; code < side.entries; code += WIDE_COLUMNS) {
      float c[4][4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float start = code + column + e < side.entries ? half[code + column + e] : -INFINITY;
#pragma unroll
        for (int n = 0; n < 4; ++n) c[n][e] = start;
      }
      for (int k0 = 0; k0 < width; k0 += DEPTH) {
        const int depth = min(width - k0, DEPTH);
        stage_matrix(shared.matrix, turned + int64_t(k0) * side.entries + code, depth, side.entries - code,
                     side.entries);
        __syncthreads();
        multiply(c, shared.y + k0 * WIDE_ROWS, shared.matrix, depth);
        __syncthreads();
      }
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (c[n][e] > best[n]) best[n] = c[n][e], chosen[n] = code + column + e;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // between the 16 threads of these rows
#pragma unroll
      for (int step = 8; step; step >>= 1) {
        const float other = __shfl_xor_sync(~0u, best[n], step);
        const int code = __shfl_xor_sync(~0u, chosen[n], step);
        if (other > best[n] || (other == best[n] && code < chosen[n])) best[n] = other, chosen[n] = code;
      }
      if (threadIdx.x % 16 == 0) shared.chosen[row + n] = chosen[n];
    }
    __syncthreads();
    const float *book = side.books + lookup * side.entries * width;
    for (int n = threadIdx.x; n < WIDE_ROWS * width; n += THREADS) {
      float &y = shared.y[n % width * WIDE_ROWS + n / width];
      y = __fsub_rn(y, book[shared.chosen[n / width] * width + n % width]);
    }
    if (threadIdx.x < WIDE_ROWS && shared.to[threadIdx.x] >= 0)
      codes[int64_t(shared.to[threadIdx.x]) * side.lookups + first + group] =
          int8_t(shared.chosen[threadIdx.x] - side.entries / 2);
    __syncthreads();
    first += side.stages[stage];
  }
}

template <class T, int WIDTH, int EACH> int encode_narrow(EncodeArguments a, int batch, void *stream) {
  a.parts = 0;
  for (const VqSide &side : a.side) {
    const int sections = (side.stages[0] + WARPS - 1) / WARPS;
    if (side.width <= WIDTH && (WIDTH == 4 || side.width > 4)) a.parts = sections > a.parts ? sections : a.parts;
  }
  if (!a.parts) return 0;
  const dim3 grid((a.rows + 32 * EACH - 1) / (32 * EACH) * a.parts, a.heads, 2 * batch);
  const size_t shared = sizeof(NarrowShared<WIDTH, EACH>);
  return launch(encode_narrow_kernel<T, WIDTH, EACH>, grid, dim3(THREADS), shared, stream, a);
}

template <class T> int encode_wide(EncodeArguments a, int batch, void *stream) {
  a.parts = 0;
  int width = 0;
  for (const VqSide &side : a.side)
    if (side.width > NARROW) {
      a.parts = side.stages[0] > a.parts ? side.stages[0] : a.parts;
      width = side.width > width ? side.width : width;
    }
  if (!a.parts) return 0;
  const dim3 grid((a.rows + WIDE_ROWS - 1) / WIDE_ROWS * a.parts, a.heads, 2 * batch);
  return launch(encode_wide_kernel<T>, grid, dim3(THREADS), sizeof(WideShared) + width * WIDE_ROWS * 4, stream, a);
}

template <class T> int encode_rows(const EncodeArguments &a, int batch, void *stream) {
  const bool few = a.rows < 128;  // then rather more blocks than more rows a lane
  int error = few ? encode_narrow<T, 4, 1>(a, batch, stream) : encode_narrow<T, 4, 4>(a, batch, stream);
  if (!error) error = few ? encode_narrow<T, 8, 1>(a, batch, stream) : encode_narrow<T, 8, 4>(a, batch, stream);
  return error ? error : encode_wide<T>(a, batch, stream);
}

}  // namespace

int vqkv_encode(const kvpack_layer &layer, const kvpack_step &step, const kvpack_vqkv &vq, const VqTables &tables,
                const NewRows &keys) {
  EncodeArguments a = {};
  a.side[0] = tables.k, a.side[1] = tables.v;
  a.ring[0] = vq.ring_k, a.ring[1] = vq.ring_v, a.fresh[0] = keys, a.fresh[1] = rows_of(layer, step, step.v);
  a.source = step.enc_src, a.target = step.enc_dst;
  a.heads = layer.num_kv_heads, a.dim = layer.head_dim;
  a.exact = vq.geometry.sinks + vq.geometry.window + vq.geometry.block;
  a.rows = step.encode, a.code_rows = vq.code_rows;
  a.in_tiles = vq.layout == KVPACK_TILES;
  a.trash = vq.code_rows - (a.in_tiles ? VQ_TILE : 1);
  const int error = layer.dtype == KVPACK_FP16 ? encode_rows<half_t>(a, step.batch, step.stream)
                                               : encode_rows<bf16_t>(a, step.batch, step.stream);
  return launched(error, "encoding");
}

}  // namespace kvpack
