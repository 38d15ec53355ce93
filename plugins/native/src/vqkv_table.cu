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
constexpr int TEAMS = 2, TEAM_WARPS = WARPS / TEAMS;  // of a block that attends to exact rows

// Tables of a set in `prepared`, in this order: the key codewords of one or two blocks of 32 columns, halves, which lie
// where their products will; value codewords, bytes; key_decode as B fragments of mma_16816.
__host__ __device__ constexpr size_t set_bytes(int extra) {
  return key_tables(extra) * TABLE_BYTES + VALUE_BYTES + DECODE_BYTES;
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
  const int h;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int stored = 0;  // items whose sums were stored
  int made = 0;    // how often tables were made

  KVPACK_D const unsigned char *tables() const { return a.prepared + h % a.merge.matrix_sets * set_bytes(EXTRA); }
  // By one thread: starts copying the codewords of keys; those of values, which stay.
  KVPACK_D void load_keys() const {
    for (int part = 0; part < KEY_PARTS; ++part)
      copy_bulk(s.keys + part * PART_BYTES, tables() + part * PART_BYTES, PART_BYTES, TABLES, TABLE_BYTES,
                s.keys_came + part);
  }
  KVPACK_D void load_values() const {
    copy_bulk(s.values + VALUE_BYTES, tables() + TABLES * TABLE_BYTES, VALUE_BYTES, 1, 0, s.values_came);
  }

  // The block's items of sequence b.
  KVPACK_D void run(const Shared::Plan &plan, int b) {
    const int group = a.merge.group, heads = a.merge.kv_heads, head0 = (b * heads + h) * group;
    const int64_t tiles = int64_t(b * heads + h) * (a.code_rows / VQ_TILE);  // before; a lane's part of the first:
    const unsigned char *codes_k = reinterpret_cast<const unsigned char *>(a.codes_k) + tiles * TILE_K + lane * 16;
    const unsigned char *codes_v = reinterpret_cast<const unsigned char *>(a.codes_v) + tiles * TILE_V + lane * 16;
    const int end = min(plan.last * plan.each, plan.tiles), start = plan.first * plan.each + warp;
    const int first = plan.first, last = plan.last, each = plan.each, all = plan.tiles, past = plan.past;
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
      make_tables(b, done, heads_now, past);

      const Scorer<EXTRA> scorer(lane);
      constexpr uint32_t value_table = TABLES_AT + TABLES * TABLE_BYTES;
      const uint32_t place = ((lane >> 1 & 1) * 8 + (lane >> 2)) * 8 + (lane & 1) * 4;
      for (int item = first; item <= last; ++item) {
        const int stop = min((item + 1) * each, all);
        const int count = (stop - item * each - warp + WARPS - 1) / WARPS;
        vqkv_table::Running running(lane);
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
          barrier_arrive(s.stored);
        }
      }
    }
  }

  // For query heads done .. done + heads - 1 of the KV head's.
  KVPACK_D void make_tables(int b, int done, int heads, int past) {
    const uint4 *decode = reinterpret_cast<const uint4 *>(tables() + TABLES * TABLE_BYTES + VALUE_BYTES);
    const Query query(decode, a.k_mean + h * D, lane, warp);
    const int part = threadIdx.x / D, d = threadIdx.x % D;
    const T *q = static_cast<const T *>(a.step.q) + int64_t(b) * a.step.q_row + (h * a.merge.group + done) * D;
    const T x = from_float<T>(part < heads ? turned(a.rope, q + part * D, d, past) : 0);
    if (made) {
      fence_async();
      __syncthreads();  // the tables are not in use
      if (threadIdx.x == 0) load_keys();
    }
    reinterpret_cast<T *>(s.rotated)[part * QUERY_STRIDE + d] = x;
    __syncthreads();
    query.template store<T>(s, a.scale.scale * LOG2E, lane, warp);
    constexpr int EACH = VALUE_BYTES / 16 / (WARPS * 32);
    uint4 values[EACH] = {};
    uint4 *table = reinterpret_cast<uint4 *>(s.values);
    if (!made) {
      barrier_wait(s.values_came, 0);
#pragma unroll
      for (int n = 0; n < EACH; ++n) values[n] = table[VALUE_BYTES / 16 + n * WARPS * 32 + threadIdx.x];
    }
    __syncthreads();
    if (!made)  // every codeword twice
#pragma unroll
      for (int n = 0; n < EACH; ++n) {
        uint4 *to = table + 2 * (n * WARPS * 32 + threadIdx.x);
        to[0] = make_uint4(values[n].x, values[n].x, values[n].y, values[n].y);
        to[1] = make_uint4(values[n].z, values[n].z, values[n].w, values[n].w);
      }
    make_products<TABLES>(s, a.first_group, made++, lane, warp);
    __syncthreads();
  }
};

// The first a.blocks * KV heads blocks attend to the codes: those of a KV head share the items of all sequences by
// their cost. What an item gives depends on its sequence and the size of the batch alone. The plan is in shared memory,
// too: the loop over tiles needs the registers. Each team of the blocks after them does decode_begin's work for a KV
// head of a sequence.
template <class T, int EXTRA> __global__ void __launch_bounds__(32 * WARPS, 1) vqkv_table_kernel(const Args a) {
  let_next_kernel_start();
  KVPACK_DYNAMIC_SHARED(memory);
  const int lane = threadIdx.x & 31, heads = a.merge.kv_heads, batch = a.step.batch;
  const int after = int(blockIdx.x) - heads * a.blocks;
  if (after >= 0) {
    const Team<TEAM_WARPS> team{int(threadIdx.x) / (TEAM_WARPS * 32)};
    const int pair = after * TEAMS + team.number;
    if (pair < batch * heads)
      attend_exact<T, D, TEAM_WARPS, 1>(memory + team.number * attend_exact_bytes<D, TEAM_WARPS>, a.exact, a.step,
                                        a.merge.decode, a.rope, a.scale, heads, a.merge.group, 0, true, pair % heads,
                                        pair / heads, team);
    return;
  }
  const Shared s(memory, EXTRA);
  Block<T, EXTRA> block{a, s, int(blockIdx.x) / a.blocks};
  if (threadIdx.x == 0) {
    barrier_init(s.stored, WARPS * 32);
    barrier_init(s.values_came, 1);
    for (int part = 0; part < KEY_PARTS; ++part) barrier_init(s.keys_came + part, 1);
    fence_async();
    block.load_values();
    block.load_keys();
  }
  auto sequence_of_lane = [&](int base) { return base + lane < batch ? sequence_of(a, base + lane) : Sequence{}; };
  Sequence mine = sequence_of_lane(0);
  int total = mine.used * mine.cost;  // of a KV head
  for (int base = 32; base < batch; base += 32) {
    const Sequence one = sequence_of_lane(base);
    total += one.used * one.cost;
  }
  total = __reduce_add_sync(~0u, total);
  const unsigned number = blockIdx.x % a.blocks;
  const int from = unsigned(total) * number / a.blocks, to = unsigned(total) * (number + 1) / a.blocks;
  for (int base = 0, end = 0; base < batch && end < to; base += 32) {
    if (base) mine = sequence_of_lane(base);
    const int cost = mine.used * mine.cost;
    int start = cost;
#pragma unroll
    for (int n = 1; n < 32; n <<= 1) {
      const int other = __shfl_up_sync(~0u, start, n);
      if (lane >= n) start += other;
    }
    start += end - cost;
    end = __shfl_sync(~0u, start + cost, 31);
    const unsigned each = max(mine.cost, 1);
    const int first = (unsigned(max(from - start, 0)) + each - 1) / each;
    const int last = min(int((unsigned(max(to - start, 0)) + each - 1) / each), mine.used);
    uint32_t left = __ballot_sync(~0u, first < last);  // sequences that the block has items of
    if (!left) continue;
    if (base) __syncthreads();
    if (threadIdx.x < 32) s.plan[lane] = {mine.past, mine.tiles, mine.each, first, last};
    int n = __ffs(left) - 1;
    Shared::Plan plan = {__shfl_sync(~0u, mine.past, n), __shfl_sync(~0u, mine.tiles, n),
                         __shfl_sync(~0u, mine.each, n), __shfl_sync(~0u, first, n), __shfl_sync(~0u, last, n)};
    for (;;) {
      block.run(plan, base + n);
      left &= left - 1;
      if (!left) break;
      n = __ffs(left) - 1;
      plan = s.plan[n];
    }
  }
  if (!block.made) {
    __syncthreads();  // the barriers are there, and copies must have come before the block ends
    barrier_wait(s.values_came, 0);
    for (int part = 0; part < KEY_PARTS; ++part) barrier_wait(s.keys_came + part, 0);
  }
  wait_for_previous_kernel();  // in every block, so that the merge comes after decode_begin, too
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
  half_t *keys = reinterpret_cast<half_t *>(out);
  half_t *matrix = reinterpret_cast<half_t *>(out + tables * TABLE_BYTES + VALUE_BYTES);
  // [8 rows][pair of quads of columns][lane][quad][4 dimensions]
  for (int n = thread; n < tables * int(TABLE_BYTES) / 8; n += step) {
    const int chunk = n / 256, lane = n / 2 % 32, quad = n / 64 % 4 * 2 + n % 2, table = chunk / (ENTRIES / 8);
    const int place = chunk * 256 + (n / 64 % 2 * 4 + lane / 8) * 32 + n / 128 % 2 * 16 + lane % 8 * 2 + n % 2;
    const int code = (chunk % (ENTRIES / 8) * 8 + lane / 4) ^ 128, column = table * 32 + quad * 4 + lane % 4;
    const int lookup = column_lookup(column, books.extra), group = books.first_group[column / 4] + lane % 4;
    const float *book = books.k_books + ((int64_t(set) * books.lookups + lookup) * ENTRIES + code) * 4;
    for (int d = 0; d < 4; ++d) keys[4 * place + d] = from_float<half_t>(book[d] * row_scale(decode, 4 * group + d));
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
  unsigned char *values = out + tables * TABLE_BYTES;
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

int vqkv_table_decode(const kvpack_layer &layer, const kvpack_step &step, const kvpack_vqkv &vq, const void *prepared,
                      const ExactRows &exact, const Decode &decode) {
  Args a{};
  a.merge = merge_of(layer, step, decode, vq.v_decode, vq.sets, vq.v_mean);
  a.step = step, a.exact = exact, a.rope = rope_of(layer, step), a.scale = {layer.scale, layer.softcap};
  a.codes_k = vq.codes_k, a.codes_v = vq.codes_v;
  a.prepared = static_cast<const unsigned char *>(prepared);
  a.k_mean = vq.k_mean, a.code_rows = vq.code_rows;
  fill_groups(a.first_group, vq);
  const int extra = extra_of(vq), units = multiprocessors(), pairs = layer.num_kv_heads * step.batch;
  const int most = step.batch * min(decode.splits, vq.code_rows / (VQ_TILE * WARPS * DEPTH) + 1);  // items of a KV head
  a.blocks = min(most, max(units / layer.num_kv_heads, 1));
  // A launch is saved where the multiprocessors that codes leave, however many there are, can attend to the exact rows
  // meanwhile, one KV head of a sequence a team: in a batch of one, as a rule.
  const int others = (pairs + TEAMS - 1) / TEAMS, coders = a.blocks * layer.num_kv_heads;
  const int full = layer.num_kv_heads * min(step.batch * decode.splits, max(units / layer.num_kv_heads, 1));
  const bool folded = full + others <= units;
  if (!folded)
    if (int error = decode_begin(layer, step, exact, decode)) return error;
  const dim3 grid(folded ? coders + others : coders), merges(layer.num_kv_heads * (D / COLUMNS), step.batch);
  auto start = [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    static_assert(shared_bytes(0) >= TEAMS * attend_exact_bytes<D, TEAM_WARPS>);
    auto table = vqkv_table_kernel<T, decltype(size)::value>;
    const dim3 threads(32 * WARPS);
    const int error = folded ? launch(table, grid, threads, shared_bytes(extra), step.stream, a)
                             : launch_early(table, grid, threads, shared_bytes(extra), step.stream, a);
    return error ? error : launch_early(merge_kernel<T>, merges, dim3(MERGE_WARPS * 32), 0, step.stream, a);
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
