// DenseAttention: an uncompressed cache, whole or a sliding window of it; see plugins/dense.
#include "flash.cuh"

namespace kvpack {
namespace {

// -- decode: the rows of a (sequence, KV head) are cut into pieces, a block each; see Decode in step.cuh

constexpr int PIECE_ROWS = 128;    // no piece is smaller, unless there are fewer rows
constexpr int MAX_PIECES = 64;     // of one KV head: the last block of it reads them all
constexpr int MAX_BLOCKS = 4096;   // more only where there are more (sequence, KV head) pairs
constexpr int BUFFERS = 3;         // tiles in flight or in use, of each warp
template <int D> constexpr int WARPS = D > 128 ? 2 : 6;
template <int D> constexpr int BLOCKS_PER_SM = D > 128 ? 3 : 2;  // by shared memory on sm_90, so registers must fit too

int most_pieces(const kvpack_layer &layer, int rows) {
  const int blocks = layer.head_dim > 128 ? 384 : 256;  // one wave at batch 1 on an H200
  const int pieces = max(min(blocks / layer.num_kv_heads, MAX_PIECES), 16);
  return max(min(pieces, (rows + PIECE_ROWS - 1) / PIECE_ROWS), 1);
}

// Grid (pieces or fewer, H, B). window: of the ring that the rows are, 0: row = position.
template <class T, int D>
__global__ void __launch_bounds__(32 * WARPS<D>, BLOCKS_PER_SM<D>)
    dense_decode_kernel(const T *__restrict__ k, const T *__restrict__ v, int rows, const int32_t *past_len,
                        Merge merge, Scale scale, int window) {
  constexpr int TILE = TILE_SIZE<D>, STEP = WARPS<D> * TILE_ROWS;
  KVPACK_DYNAMIC_SHARED(shared);
  T *query = reinterpret_cast<T *>(shared), *tiles = query + TILE;
  const int warp = threadIdx.x >> 5, h = blockIdx.y, b = blockIdx.z, group = merge.group;
  T *buffers = tiles + warp * BUFFERS * TILE, *const buffers_end = buffers + BUFFERS * TILE;
  const int past = past_len[b], stored = merge.new_len[b] > 0 ? min(past, rows) : 0;
  const int hole = window && past >= window ? past % window : -1;  // its token has left the window
  // Pieces are as long as each other, in whole rounds of the warps; their number follows from `stored` alone.
  const int wanted = max(min((stored + PIECE_ROWS - 1) / PIECE_ROWS, merge.decode.splits), 1);
  const int length = max(((stored + wanted - 1) / wanted + STEP - 1) / STEP * STEP, STEP);
  const int used = (stored + length - 1) / length;
  const int64_t start = (int64_t(b) * merge.kv_heads + h) * rows * D;
  k += start;
  v += start;
  if (int(blockIdx.x) >= max(used, 1)) {
    wait_for_previous_kernel();
    return;
  }
  bool have_query = false;
  for (int piece = blockIdx.x; piece < max(used, 1); piece += gridDim.x) {
    const int first = piece * length + warp * TILE_ROWS, end = min(piece * length + length, stored);
    auto seen = [&](int row) {  // bits of the tile from `row`
      uint32_t bits = row + TILE_ROWS <= end ? 0xFFFFu : row < end ? (1u << (end - row)) - 1 : 0;
      if (uint32_t(hole - row) < uint32_t(TILE_ROWS)) bits &= ~(1u << (hole - row));
      return bits;
    };
    // Keys and values of a warp's tiles pass through its buffers in turn: K0 V0 K1 V1 ..., three ahead.
    auto copy = [&](T *to, const T *from, int row) {
      if (row < end) copy_rows<T, D>(to, seen(row), from + int64_t(row) * D);
      copy_async_commit();
    };
    T *buffer = buffers;
    copy(buffer, k, first);
    copy(buffer + TILE, v, first);
    copy(buffer + 2 * TILE, k, first + STEP);
    if (!have_query) {  // all before this needs nothing of the previous kernel
      have_query = true;
      wait_for_previous_kernel();
      const T *q = static_cast<const T *>(merge.decode.query) + (int64_t(b) * merge.kv_heads + h) * group * D;
      for (int item = threadIdx.x; item < TILE_ROWS * D / 8; item += WARPS<D> * 32) {
        const int head = item / (D / 8), d = item % (D / 8) * 8;
        const uint4 zero = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4 *>(query + head * TILE_STRIDE<D> + d) =
            head < group ? *reinterpret_cast<const uint4 *>(q + head * D + d) : zero;
      }
      __syncthreads();
    }
    Running<D> running;
    for (int row = first; row < end; row += STEP) {
      const uint32_t visible = seen(row);
      float s[2][4];
      copy_async_wait<2>();
      __syncwarp();
      multiply_keys<T, D>(s, query, buffer);
      __syncwarp();
      copy(buffer, v, row + STEP);
      buffer = buffer + TILE == buffers_end ? buffers : buffer + TILE;
      if (visible) weigh_keys<D>(running, s, visible, scale);
      copy_async_wait<2>();
      __syncwarp();
      if (visible) add_values<T, D>(running, s, buffer);
      __syncwarp();
      copy(buffer, k, row + 2 * STEP);
      buffer = buffer + TILE == buffers_end ? buffers : buffer + TILE;
    }
    copy_async_wait<0>();
    if (used) {
      __syncthreads();
      combine_warps<D, WARPS<D>>(running, reinterpret_cast<float *>(tiles), merge.decode,
                                 (b * merge.kv_heads + h) * group, group, piece);
    }
    merge_last<T, D, false>(merge, b, h, used);
  }
}

int decode(const kvpack_layer &layer, const kvpack_step &step, const kvpack_dense &dense, const Decode &scratch) {
  return choose(layer, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    constexpr int D = decltype(size)::value;
    static_assert(BUFFERS * TILE_SIZE<D> * sizeof(T) >= (16 * D + 32) * sizeof(float));
    const size_t shared = (1 + BUFFERS * WARPS<D>) * TILE_SIZE<D> * sizeof(T);
    const int pairs = layer.num_kv_heads * step.batch, blocks = (MAX_BLOCKS + pairs - 1) / pairs;
    const dim3 grid(min(scratch.splits, blocks), layer.num_kv_heads, step.batch);
    const int error = launch_early(dense_decode_kernel<T, D>, grid, dim3(32 * WARPS<D>), shared, step.stream,
                                   static_cast<const T *>(dense.k), static_cast<const T *>(dense.v), dense.rows,
                                   step.past_len, merge_of(layer, step, scratch), Scale{layer.scale, layer.softcap},
                                   layer.sliding_window);
    return launched(error, "dense_decode");
  });
}

// -- a step

struct Scratch {
  Decode decode;  // of one token
  Many many;      // of many; only a sliding window's rows are copied, the whole cache is attended to where it is
  void *select;
  size_t bytes;
};

Scratch carve(const kvpack_layer &layer, const kvpack_step &step, const kvpack_dense &dense, void *base) {
  Carver carver{static_cast<char *>(base)};
  Scratch scratch{};
  if (step.length == 1) {
    scratch.decode = carve_decode(carver, layer, step.batch, most_pieces(layer, dense.rows));
  } else {
    const int window = layer.sliding_window;
    scratch.many = carve_many(carver, layer, step, window ? min(window, step.live) + step.length : 0);
  }
  if (dense.selected) scratch.select = carver.take<char>(select_scratch(layer, step, dense));
  scratch.bytes = carver.used;
  return scratch;
}

ExactRows exact_rows(const kvpack_layer &layer, const kvpack_dense &dense) {
  const int64_t head = int64_t(dense.rows) * layer.head_dim;
  const kvpack_geometry whole{dense.rows - 1, 0, 0}, sliding{0, layer.sliding_window, 0};  // the last row is the trash
  return {dense.k, dense.v, head * layer.num_kv_heads, head, layer.head_dim, layer.sliding_window ? sliding : whole, 1};
}

int attend(const kvpack_layer &layer, const kvpack_step &step, const kvpack_dense &dense, const Scratch &scratch) {
  const ExactRows exact = exact_rows(layer, dense);
  if (step.length == 1) {
    if (const int code = decode_append(layer, step, exact, scratch.decode)) return code;
    return decode(layer, step, dense, scratch.decode);
  }
  const Many &many = scratch.many;
  if (layer.sliding_window) {
    auto restore = [](void *, void *, int) { return int(KVPACK_OK); };  // every old row is an exact one
    if (const int code = attend_many(layer, step, exact, many, restore)) return code;
    return store_exact(layer, step, exact);
  }
  // The cache itself is what to attend to, once it holds the new tokens.
  if (const int code = rotate_queries(layer, step, many.query)) return code;
  if (const int code = store_exact(layer, step, exact)) return code;
  return prefill_attention(layer, step, many.query, dense.k, dense.v, exact.batch_stride, exact.head_stride);
}

int check_dense(const kvpack_layer &layer, kvpack_step &step, const kvpack_dense &dense) {
  if (const int code = check_step(layer, step)) return code;
  if (dense.rows < 1 || (layer.sliding_window && dense.rows != layer.sliding_window))
    return fail(KVPACK_BAD_ARGUMENT, "rows=%d: it must be >= 1, and the sliding window (%d) where there is one",
                dense.rows, layer.sliding_window);
  if (!dense.k || !dense.v || reinterpret_cast<uintptr_t>(dense.k) % 16 || reinterpret_cast<uintptr_t>(dense.v) % 16)
    return fail(KVPACK_BAD_ARGUMENT, "the states must not be null and must be 16-byte aligned");
  if (dense.selected && layer.sliding_window)
    return fail(KVPACK_UNSUPPORTED, "a layer with a sliding window of %d cannot observe", layer.sliding_window);
  if (dense.selected && (!dense.select_len || dense.select_width < 0))
    return fail(KVPACK_BAD_ARGUMENT, "`selected` needs select_len and a select_width (%d) >= 0", dense.select_width);
  return KVPACK_OK;
}

}  // namespace
}  // namespace kvpack

using namespace kvpack;

extern "C" size_t kvpack_dense_workspace(const kvpack_layer *layer, const kvpack_step *step,
                                         const kvpack_dense *dense) {
  return carve(*layer, *step, *dense, nullptr).bytes;
}

extern "C" int kvpack_dense_attention(const kvpack_layer *layer, const kvpack_step *given, const kvpack_dense *dense) {
  kvpack_step step = *given;
  if (const int code = check_dense(*layer, step, *dense)) return code;
  const Scratch scratch = carve(*layer, step, *dense, step.workspace);
  if (const int code = check_workspace(step, scratch.bytes)) return code;
  if (const int code = attend(*layer, step, *dense, scratch)) return code;
  return dense->selected ? select_rows(*layer, step, *dense, scratch.decode.query, scratch.select) : KVPACK_OK;
}

extern "C" int kvpack_dense_supported(const kvpack_layer *layer, const kvpack_dense *) { return check_layer(*layer); }
