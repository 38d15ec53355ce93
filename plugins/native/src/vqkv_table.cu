// Decode attention over VQKV codes in tiles, for groups of 4 dimensions.
//
// Keys: a score is a sum over lookups of q'.codeword, q' = decode matrix q. For 4 query heads of a KV head a table has
// these products as 4 halves, so that one 8-byte lookup serves them all, and costs the same for any stage. A row of the
// table is a code, a column a lookup: as lanes that are served together read different columns, no two hit a bank. An
// mma with a selection matrix sums the lookups in float32: its result is laid out as the next mma wants it.
// Values: a codeword is 4 bytes b, each of which stands for the half b * 257: one permute decodes a dimension of two
// rows. Weights times values is an mma with values on the left, so that its 8 columns are 4 heads twice: once for each
// half of the lanes, which read different groups. The two lanes that read the same group at once have a copy each.
#include <cmath>

#include "vqkv_table_tile.cuh"

namespace kvpack {
namespace {

using namespace vqkv_table;

constexpr int MOST_SPLITS = 32, TARGET_BLOCKS = 128;
constexpr unsigned DECODE_BYTES = D * D * 2, VALUE_BYTES = ENTRIES * D;

// Tables of a set in `prepared`, in this order: the key codewords of one or two blocks of 32 columns, halves, as they
// are turned into products in place; key_decode as B fragments of mma_16816; value codewords, bytes.
__host__ __device__ constexpr size_t set_bytes(int extra) {
  return key_tables(extra) * TABLE_BYTES + DECODE_BYTES + VALUE_BYTES;
}

// The lookup of a column of the tables; a column that has none repeats another.
__host__ __device__ inline int column_lookup(int column, int extra) {
  if (column < 32) return column;
  const int n = column - 32;
  switch (extra) {
    case 1: return 32 + n % 8;
    case 2: return 32 + n % 16;
    case 3: return n < 16 ? column : 48 + n % 8;
    default: return column;
  }
}

// -- the kernel

// f(Size<N>()) || f(Size<N + 1>()) || .. around a ring of SIZE: a loop whose counter is a constant from the start.
template <int SIZE, int N, int LEFT = SIZE, class F> KVPACK_D bool any_slot(F &&f) {
  if constexpr (LEFT == 0) return false;
  else return f(Size<N>()) || any_slot<SIZE, (N + 1) % SIZE, LEFT - 1>(f);
}

template <class T, int EXTRA> struct Block {
  static constexpr int TABLES = key_tables(EXTRA), BUFFERS = buffers(EXTRA);
  static constexpr int TILE_K = VQ_TILE * (32 + 8 * EXTRA), TILE_V = VQ_TILE * 32;
  const Args &a;
  const Shared &s;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int set = -1;    // whose values are in the table
  int stored = 0;  // items whose sums were stored

  // Items first .. last - 1 of KV head h of sequence b.
  KVPACK_D void run(const Sequence &sequence, int b, int h, int first, int last) {
    const int group = a.merge.group, heads = a.merge.kv_heads, head0 = (b * heads + h) * group;
    const int64_t tiles = int64_t(b * heads + h) * (a.code_rows / VQ_TILE);  // before; a lane's part of the first:
    const unsigned char *codes_k = reinterpret_cast<const unsigned char *>(a.codes_k) + tiles * TILE_K + lane * 16;
    const unsigned char *codes_v = reinterpret_cast<const unsigned char *>(a.codes_v) + tiles * TILE_V + lane * 16;
    const int end = min(last * sequence.each, sequence.tiles), start = first * sequence.each + warp;
    for (int done = 0; done < group; done += HEADS) {
      const int heads_now = min(group - done, HEADS);
      KeyCodes<EXTRA> keys[DEPTH] = {};
      uint4 values[DEPTH] = {};
      int next = start;  // tile whose keys are loaded next
      auto load_keys = [&](KeyCodes<EXTRA> &to) {
        if (next < end) to.load(codes_k + int64_t(next) * TILE_K, lane);
        next += WARPS;
      };
      auto load_values = [&](uint4 &to, auto back) {  // of the tile whose keys were loaded `back` tiles ago
        const int tile = next - decltype(back)::value * WARPS;
        if (tile < end) to = load_streamed(reinterpret_cast<const uint4 *>(codes_v + int64_t(tile) * TILE_V));
      };
      any_slot<DEPTH, 0>([&](auto slot) {
        constexpr int n = decltype(slot)::value;
        load_keys(keys[n]);
        if (n < DEPTH - 1) load_values(values[n], Size<1>());
        return false;
      });
      make_tables(b, h, head0 + done, heads_now);

      const Scorer<EXTRA> scorer(lane);
      constexpr uint32_t value_table = TABLES_AT + TABLES * TABLE_BYTES;
      const uint32_t place = ((lane >> 1 & 1) * 8 + (lane >> 2)) * 8 + (lane & 1) * 4;
      for (int item = first; item <= last; ++item) {
        const int stop = min((item + 1) * sequence.each, sequence.tiles);
        const int count = (stop - item * sequence.each - warp + WARPS - 1) / WARPS;
        Running running(lane);
        int tile = 0;
        // A tile; whether it was the last. Values of the tile before are weighed beside the scores of this one. The
        // order keeps many lookups in flight.
        auto attend = [&](auto slot, auto first_tile) {
          constexpr int n = decltype(slot)::value;
          constexpr bool FIRST = decltype(first_tile)::value;
          float score[2][4];
          uint2 low[scorer.HALF], high[scorer.HALF];
          uint32_t x[2][4], y[2][4];
          uint4 &before = values[(n + DEPTH - 1) % DEPTH];
          scorer.template load<0>(low, keys[n]);
          if constexpr (!FIRST) running.load(x, before.x, before.y, place, value_table);
          if constexpr (EXTRA < 3) scorer.template load<1>(high, keys[n]);
          scorer.sum(score[0], running.from, low);
          if constexpr (EXTRA >= 3) scorer.template load<1>(high, keys[n]);
          load_keys(keys[n]);
          if constexpr (!FIRST) running.load(y, before.z, before.w, place, value_table);
          load_values(before, Size<2>());
          if constexpr (!FIRST) running.template add<0>(x);
          scorer.sum(score[1], running.from, high);
          if constexpr (!FIRST) running.template add<1>(y);
          running.weigh(score, lane);
          if (++tile < count) return false;
          running.load(x, values[n].x, values[n].y, place, value_table);
          running.load(y, values[n].z, values[n].w, place, value_table);
          running.template add<0>(x);
          running.template add<1>(y);
          return true;
        };
        if (item < last && count > 0 && !attend(Size<0>(), Size<1>()))
          while (!any_slot<DEPTH, 1 % DEPTH>([&](auto slot) { return attend(slot, Size<0>()); })) {}
        if (item > first) {  // merge the item before: its sums have come meanwhile
          barrier_wait(s.stored, stored - 1);
          merge_warps(s, a.merge.decode, (stored - 1) % BUFFERS, head0 + done, heads_now, item - 1, lane, warp);
          if constexpr (BUFFERS == 1) __syncthreads();
        }
        if (item < last) {
          store_sums(s, running, stored++ % BUFFERS, lane, warp);
          __syncwarp();
          if (lane == 0) barrier_arrive(s.stored);
        }
      }
    }
  }

  KVPACK_D void make_tables(int b, int h, int head, int heads) {
    const int now = h % a.sets;
    const unsigned char *tables = a.prepared + now * set_bytes(EXTRA);
    const uint4 *decode = reinterpret_cast<const uint4 *>(tables + TABLES * TABLE_BYTES);
    __syncthreads();  // the tables are not in use
    if (now != set) {
      const uint4 *from = decode + DECODE_BYTES / 16;
      uint4 *to = reinterpret_cast<uint4 *>(s.values);
#pragma unroll 4
      for (unsigned n = threadIdx.x; n < VALUE_BYTES / 16; n += WARPS * 32) {
        const uint4 x = __ldg(from + n);
        to[2 * n] = make_uint4(x.x, x.x, x.y, x.y);
        to[2 * n + 1] = make_uint4(x.z, x.z, x.w, x.w);
      }
      set = now;
    }
    const Codewords<TABLES> codewords(tables, lane, warp);
    const Query query(decode, a.k_mean + h * D, lane, warp);
    wait_for_previous_kernel();
    query.store(s, a.scale, static_cast<const T *>(a.merge.decode.query) + head * D, heads, lane, warp);
    __syncthreads();
    codewords.multiply(s, a.first_group, lane, warp);
    __syncthreads();
  }
};

// Persistent blocks: all items of all sequences and KV heads in a row, each block takes its share of their cost. What
// an item gives depends on its sequence alone. The plan is in shared memory: the loop over tiles needs the registers.
template <class T, int EXTRA> __global__ void __launch_bounds__(32 * WARPS, 1) vqkv_table_kernel(const Args a) {
  let_next_kernel_start();
  KVPACK_DYNAMIC_SHARED(memory);
  const Shared s(memory, EXTRA);
  const int lane = threadIdx.x & 31, heads = a.merge.kv_heads;
  if (threadIdx.x == 0) barrier_init(s.stored, WARPS);
  auto sequence_of_lane = [&](int base) { return base + lane < a.batch ? sequence_of(a, base + lane) : Sequence{}; };
  Sequence mine = sequence_of_lane(0);
  int total = 0, least = 1 << 30, most = 1;  // cost; of an item
  for (int base = 0;; mine = sequence_of_lane(base)) {
    total += heads * mine.used * mine.cost;
    if (mine.used) least = min(least, mine.cost), most = max(most, mine.cost);
    if ((base += 32) >= a.batch) break;
  }
  total = __reduce_add_sync(~0u, total);
  least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
  int share = (total + gridDim.x - 1) / gridDim.x;
  if (least == most) share = (share + most - 1) / most * most;  // whole items: fewer blocks that work on two heads
  const int from = min(int64_t(share) * blockIdx.x, int64_t(total)), to = min(int64_t(from) + share, int64_t(total));

  Block<T, EXTRA> block{a, s};
  int end = 0;  // of the sequences before
  for (int base = 0; base < a.batch && end < to; base += 32) {
    if (a.batch > 32) mine = sequence_of_lane(base);
    const int cost = heads * mine.used * mine.cost;
    int start = cost;
#pragma unroll
    for (int n = 1; n < 32; n <<= 1) {
      const int other = __shfl_up_sync(~0u, start, n);
      if (lane >= n) start += other;
    }
    start += end - cost;
    end = __shfl_sync(~0u, start + cost, 31);
    uint32_t left = __ballot_sync(~0u, start < to && start + cost > from);
    if (threadIdx.x < 32) {
      const int last = min((to - start + mine.cost - 1) / max(mine.cost, 1), heads * mine.used);
      s.plan[lane] = {mine, max(from - start + mine.cost - 1, 0) / max(mine.cost, 1), last};
    }
    __syncthreads();
    for (; left; left &= left - 1) {
      const Shared::Plan &plan = s.plan[__ffs(left) - 1];
      for (int item = plan.first; item < plan.last;) {
        const Sequence sequence = plan.sequence;
        const int h = item / sequence.used, first = item - h * sequence.used;
        const int count = min(sequence.used - first, plan.last - item);
        block.run(sequence, base + __ffs(left) - 1, h, first, first + count);
        item += count;
      }
    }
    __syncthreads();
  }
  wait_for_previous_kernel();  // in every block
}

// -- tables in global memory

struct Books {
  const float *k_books, *k_decode, *v_books;
  unsigned char *prepared;
  int lookups, extra;
  uint8_t first_group[2 * 8];
};

// Row n of the decode matrix is divided by a power of two near its largest entry, and codewords multiplied, so that
// neither leaves the range of half_t.
KVPACK_D float row_scale(const float *decode, int row) {
  float largest = 0;
  for (int n = 0; n < D; ++n) largest = fmaxf(largest, fabsf(decode[row * D + n]));
  int exponent;
  frexpf(largest, &exponent);
  return largest > 0 ? ldexpf(1, exponent) : 1;
}

KVPACK_D unsigned char nearest_byte(float x) {  // b of the half b * 257 that is nearest to x
  const int code = bits_as<uint16_t>(from_float<half_t>(x)) >> 8;
  int best = code;
  float least = INFINITY;
  for (int n = -1; n <= 1; ++n) {
    const int magnitude = min(max((code & 127) + n, 0), 0x7B), b = (code & 128) | magnitude;
    const float distance = fabsf(to_float(bits_as<half_t>(uint16_t(b * 257))) - x);
    if (distance < least) least = distance, best = b;
  }
  return (unsigned char)best;
}

// Grid (any, sets). Every table is in the order in which the decode kernel reads it; codes are stored less 128.
__global__ void prepare_kernel(Books books) {
  const int set = blockIdx.y, tables = key_tables(books.extra);
  unsigned char *out = books.prepared + set * set_bytes(books.extra);
  const float *decode = books.k_decode + int64_t(set) * D * D;
  const int step = gridDim.x * blockDim.x, thread = blockIdx.x * blockDim.x + threadIdx.x;
  half_t *keys = reinterpret_cast<half_t *>(out), *matrix = reinterpret_cast<half_t *>(out + tables * TABLE_BYTES);
  // [8 rows][pair of quads of columns][lane][quad][4 dimensions]
  for (int n = thread; n < tables * int(TABLE_BYTES) / 8; n += step) {
    const int chunk = n / 256, lane = n / 2 % 32, quad = n / 64 % 4 * 2 + n % 2, table = chunk / (ENTRIES / 8);
    const int code = (chunk % (ENTRIES / 8) * 8 + lane / 4) ^ 128, column = table * 32 + quad * 4 + lane % 4;
    const int lookup = column_lookup(column, books.extra), group = books.first_group[column / 4] + lane % 4;
    const float *book = books.k_books + ((int64_t(set) * books.lookups + lookup) * ENTRIES + code) * 4;
    for (int d = 0; d < 4; ++d) keys[4 * n + d] = from_float<half_t>(book[d] * row_scale(decode, 4 * group + d));
  }
  // [8 rows of the decode matrix][32 columns][lane][column / 8][2]
  for (int row = thread; row < D; row += step) {
    const float scale = row_scale(decode, row);
    for (int n = 0; n < D; ++n) {
      const int lane = row % 8 * 4 + n % 8 / 2;
      matrix[(((row / 8 * (D / 32) + n / 32) * 32 + lane) * 4 + n % 32 / 8) * 2 + n % 2] =
          from_float<half_t>(decode[row * D + n] / scale);
    }
  }
  unsigned char *values = out + tables * TABLE_BYTES + DECODE_BYTES;
  for (int n = thread; n < int(VALUE_BYTES); n += step) {
    const int row = n / D, group = n % D / 4;
    values[n] = nearest_byte(books.v_books[((int64_t(set) * GROUPS + group) * ENTRIES + (row ^ 128)) * 4 + n % 4]);
  }
}

int lookups_of(const kvpack_vqkv &vq) {
  int sum = 0;
  for (int n = 0; n < vq.k_stage_count; ++n) sum += vq.k_stages[n];
  return sum;
}
int extra_of(const kvpack_vqkv &vq) { return (lookups_of(vq) - GROUPS) / 8; }

void fill_groups(uint8_t (&first_group)[2 * 8], const kvpack_vqkv &vq) {
  for (int quad = 0; quad < 2 * 8; ++quad) {
    int lookup = column_lookup(4 * quad, extra_of(vq)), stage = 0;
    while (stage < vq.k_stage_count - 1 && lookup >= vq.k_stages[stage]) lookup -= vq.k_stages[stage++];
    first_group[quad] = uint8_t(lookup);
  }
}

}  // namespace

bool vqkv_table_supported(const kvpack_layer &layer, const kvpack_vqkv &vq) {
  const int lookups = lookups_of(vq), group = layer.num_heads / max(layer.num_kv_heads, 1);
  bool quads = vq.k_stage_count >= 1 && vq.k_stages[0] == GROUPS;
  for (int n = 1; n < vq.k_stage_count; ++n) quads = quads && vq.k_stages[n] % 4 == 0;
  return layer.head_dim == D && !vq.pre_rope && vq.layout == KVPACK_TILES && vq.k_groups == GROUPS &&
         vq.v_groups == GROUPS && vq.k_entries == ENTRIES && vq.v_entries == ENTRIES && vq.v_stage_count == 1 &&
         vq.v_stages[0] == GROUPS && quads && lookups <= 2 * GROUPS && lookups % 8 == 0 && layer.softcap == 0 &&
         vq.geometry.block % VQ_TILE == 0 && group >= 1 && group <= 16 && shared_bytes(extra_of(vq)) <= shared_limit();
}

size_t vqkv_table_prepared(const kvpack_layer &, const kvpack_vqkv &vq) { return vq.sets * set_bytes(extra_of(vq)); }

int vqkv_table_prepare(const kvpack_layer &, const kvpack_vqkv &vq, void *prepared, void *stream) {
  Books books{vq.k_books, vq.k_decode, vq.v_books, static_cast<unsigned char *>(prepared),
              lookups_of(vq), extra_of(vq), {}};
  fill_groups(books.first_group, vq);
  return launched(launch(prepare_kernel, dim3(32, vq.sets), dim3(256), 0, stream, books), "vqkv_table_prepare");
}

int vqkv_table_splits(const kvpack_layer &layer) {
  return min(max(TARGET_BLOCKS / layer.num_kv_heads, 4), MOST_SPLITS);
}

size_t vqkv_table_workspace(const kvpack_layer &, const kvpack_step &, const kvpack_vqkv &) { return 0; }

int vqkv_table_decode(const kvpack_layer &layer, const kvpack_step &step, const kvpack_vqkv &vq, const void *prepared,
                      const Decode &decode, void *) {
  Args a{};
  a.merge = merge_of(layer, step, decode, vq.v_decode, vq.sets, vq.v_mean);
  a.codes_k = vq.codes_k, a.codes_v = vq.codes_v;
  a.prepared = static_cast<const unsigned char *>(prepared);
  a.k_mean = vq.k_mean, a.past_len = step.past_len;
  a.geometry = vq.geometry;
  a.batch = step.batch, a.sets = vq.sets, a.code_rows = vq.code_rows;
  a.scale = layer.scale * LOG2E;
  fill_groups(a.first_group, vq);
  const int most = step.batch * layer.num_kv_heads * min(decode.splits, vq.code_rows / (VQ_TILE * WARPS * DEPTH) + 1);
  const int extra = extra_of(vq);
  auto start = [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    const int error = launch_early(vqkv_table_kernel<T, decltype(size)::value>, dim3(min(most, multiprocessors())),
                                   dim3(32 * WARPS), shared_bytes(extra), step.stream, a);
    return error ? error
                 : launch_early(merge_kernel<T>, dim3(layer.num_kv_heads, step.batch), dim3(HEADS * D), 0, step.stream,
                                a);
  };
  auto start_as = [&](auto type) {
    switch (extra) {
      case 0: return start(type, Size<0>());
      case 1: return start(type, Size<1>());
      case 2: return start(type, Size<2>());
      case 3: return start(type, Size<3>());
      default: return start(type, Size<4>());
    }
  };
  const int error = layer.dtype == KVPACK_FP16 ? start_as(Type<half_t>()) : start_as(Type<bf16_t>());
  return launched(error, "vqkv_table_decode");
}

}  // namespace kvpack
