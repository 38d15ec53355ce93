// VQKVAttention: a layer's step, and the tables in the form that its kernels read.
#include "vqkv.cuh"

namespace kvpack {
namespace {

// -- tables

template <class T> __global__ void lay_out_books(VqSide side, T *table) {
  const int64_t each = int64_t(side.lookups) * side.entries * side.width, count = side.sets * each;
  for (int64_t n = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; n < count; n += int64_t(gridDim.x) * blockDim.x) {
    const int element = n % side.width, code = n / side.width % side.entries;
    const int lookup = n / (side.width * side.entries) % side.lookups;
    int first = 0, stage = 0;
    while (first + side.stages[stage] <= lookup) first += side.stages[stage++];
    const int64_t row = int64_t(first) * side.entries + int64_t(code) * side.stages[stage] + lookup - first;
    table[n / each * each + row * side.width + element] = from_float<T>(side.books[n]);
  }
}

// paired: pairs of columns that RoPE turns together, 0 where columns keep their order.
template <class T> __global__ void lay_out_decode(const float *matrix, T *fragments, int sets, int dim, int paired) {
  const int count = sets * dim * dim;
  for (int n = blockIdx.x * blockDim.x + threadIdx.x; n < count; n += gridDim.x * blockDim.x) {
    const int column = n % dim, k = n / dim % dim, start = n / (dim * dim) * dim * dim;
    fragments[start + fragment_place(dim, k, column)] =
        from_float<T>(matrix[start + k * dim + paired_column(column, paired)]);
  }
}

__global__ void transpose_decode(const float *matrix, float *out, int sets, int dim) {
  const int count = sets * dim * dim;
  for (int n = blockIdx.x * blockDim.x + threadIdx.x; n < count; n += gridDim.x * blockDim.x) {
    const int column = n % dim, row = n / dim % dim, start = n / (dim * dim) * dim * dim;
    out[n] = matrix[start + column * dim + row];
  }
}

__global__ void measure_books(VqSide side, float *half, float *turned) {
  const int64_t count = int64_t(side.sets) * side.lookups * side.entries;
  for (int64_t n = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; n < count; n += int64_t(gridDim.x) * blockDim.x) {
    const float *book = side.books + n * side.width;
    float sum = 0;
    for (int e = 0; e < side.width; ++e) {
      sum = __fmaf_rn(book[e], book[e], sum);
      if (turned) turned[(n / side.entries * side.width + e) * side.entries + n % side.entries] = book[e];
    }
    half[n] = -0.5f * sum;
  }
}

VqSide side_of(const kvpack_vqkv &vq, int dim, bool values) {
  VqSide side = {};
  side.values = values, side.sets = vq.sets;
  side.groups = values ? vq.v_groups : vq.k_groups, side.entries = values ? vq.v_entries : vq.k_entries;
  side.stage_count = values ? vq.v_stage_count : vq.k_stage_count;
  side.width = dim / side.groups;
  for (int n = 0; n < side.stage_count; ++n) {
    side.stages[n] = values ? vq.v_stages[n] : vq.k_stages[n];
    side.lookups += side.stages[n];
  }
  side.codes = values ? vq.codes_v : vq.codes_k;
  side.books = values ? vq.v_books : vq.k_books, side.encode = values ? vq.v_encode : vq.k_encode;
  side.mean = values ? vq.v_mean : vq.k_mean;
  return side;
}

void carve_side(Carver &carver, VqSide &side, int dim) {
  const size_t words = size_t(side.sets) * side.lookups * side.entries;
  side.table = carver.take<uint16_t>(words * side.width);
  side.decode = carver.take<uint32_t>(size_t(side.sets) * dim * dim / 2);
  side.half = carver.take<float>(words);
  side.turned = side.width > NARROW ? carver.take<float>(words * side.width) : nullptr;
}

int prepare_side(const kvpack_layer &layer, const VqSide &side, const float *decode, int paired, void *stream) {
  const dim3 grid(256), threads(256);
  int error = choose(layer, [&](auto type, auto) {
    using T = typename decltype(type)::type;
    T *table = static_cast<T *>(const_cast<void *>(side.table));
    T *fragments = reinterpret_cast<T *>(const_cast<uint32_t *>(side.decode));
    const int failed = launch(lay_out_books<T>, grid, threads, 0, stream, side, table);
    return failed ? failed
                  : launch(lay_out_decode<T>, grid, threads, 0, stream, decode, fragments, side.sets, layer.head_dim,
                           paired);
  });
  if (!error)
    error = launch(measure_books, grid, threads, 0, stream, side, const_cast<float *>(side.half),
                   const_cast<float *>(side.turned));
  return launched(error, "laying out codebooks");
}

// -- checks

int check_side(const kvpack_layer &layer, const char *name, int groups, int entries, int count, const int *stages) {
  if (groups < 1 || layer.head_dim % groups)
    return fail(KVPACK_UNSUPPORTED, "%s_groups=%d does not divide head_dim=%d", name, groups, layer.head_dim);
  if (entries < 2 || entries > 256)
    return fail(KVPACK_UNSUPPORTED, "%s_entries=%d: the kernels take 2 to 256 codewords", name, entries);
  if (count < 1 || count > KVPACK_MAX_STAGES)
    return fail(KVPACK_UNSUPPORTED, "%d stages of %s: the kernels take 1 to %d", count, name, KVPACK_MAX_STAGES);
  for (int n = 0; n < count; ++n)
    if (stages[n] < 1 || stages[n] > (n ? stages[n - 1] : groups))
      return fail(KVPACK_UNSUPPORTED, "%s_stages must be non-increasing numbers from 1 to %d", name, groups);
  return KVPACK_OK;
}

int check(const kvpack_layer &layer, const kvpack_vqkv &vq) {
  if (int error = check_layer(layer)) return error;
  if (int error = check_geometry(layer, vq.geometry)) return error;
  if (int error = check_side(layer, "k", vq.k_groups, vq.k_entries, vq.k_stage_count, vq.k_stages)) return error;
  if (int error = check_side(layer, "v", vq.v_groups, vq.v_entries, vq.v_stage_count, vq.v_stages)) return error;
  if (vq.sets != 1 && vq.sets != layer.num_kv_heads)
    return fail(KVPACK_UNSUPPORTED, "%d sets of tables: the kernels take 1 or one per KV head", vq.sets);
  if (vq.layout == KVPACK_PLAIN) return KVPACK_OK;
  if (vq.layout != KVPACK_TILES) return fail(KVPACK_UNSUPPORTED, "layout %d of the codes is unknown", vq.layout);
  if (vq.geometry.block % VQ_TILE)
    return fail(KVPACK_UNSUPPORTED, "codes in tiles need a block of a multiple of %d, not %d", VQ_TILE,
                vq.geometry.block);
  if (!vqkv_by_table(layer, vq))
    return fail(KVPACK_UNSUPPORTED, "codes in tiles are for the table kernel alone, which does not take this layer");
  return KVPACK_OK;
}

int check_pointers(const kvpack_step &step, const kvpack_vqkv &vq) {
  const void *needed[] = {vq.ring_k, vq.ring_v, vq.codes_k, vq.codes_v, vq.k_books, vq.k_encode, vq.k_decode, vq.k_mean,
                          vq.v_books, vq.v_encode, vq.v_decode, vq.v_mean, vq.prepared};
  for (const void *p : needed)
    if (!p) return fail(KVPACK_BAD_ARGUMENT, "a state or a table of VQKVAttention is NULL");
  if (vq.code_rows < 1) return fail(KVPACK_BAD_ARGUMENT, "code_rows=%d must count the trash row", vq.code_rows);
  if (step.encode && (!step.enc_src || !step.enc_dst))
    return fail(KVPACK_BAD_ARGUMENT, "encode=%d needs enc_src and enc_dst", step.encode);
  return KVPACK_OK;
}

// -- scratch

Decode carve_step(Carver &carver, const kvpack_layer &layer, const kvpack_step &step, const kvpack_vqkv &vq) {
  const int splits = vqkv_by_table(layer, vq) ? vqkv_table_splits(layer) : vqkv_splits(layer, vq);
  return carve_decode(carver, layer, step.batch, splits);
}

ExactRows exact_rows(const kvpack_layer &layer, const kvpack_vqkv &vq) {
  const int64_t rows = vq.geometry.sinks + vq.geometry.window + vq.geometry.block, dim = layer.head_dim;
  return {vq.ring_k, vq.ring_v, layer.num_kv_heads * rows * dim, rows * dim, dim, vq.geometry, !vq.pre_rope};
}

int decode_step(const kvpack_layer &layer, const kvpack_step &step, const kvpack_vqkv &vq, const VqTables &tables) {
  Carver carver = {static_cast<char *>(step.workspace)};
  const Decode decode = carve_step(carver, layer, step, vq);
  if (int error = check_workspace(step, carver.used)) return error;
  const ExactRows exact = exact_rows(layer, vq);
  int error;
  if (vqkv_by_table(layer, vq)) {
    error = vqkv_table_decode(layer, step, vq, tables.rest, exact, decode);
  } else {
    error = decode_begin(layer, step, exact, decode);
    if (!error) error = vqkv_decode(layer, step, vq, tables, decode);
  }
  if (error) return error;
  const NewRows unused = rows_of(layer, step, step.k);  // the new token stays in the window
  return step.encode ? vqkv_encode(layer, step, vq, tables, unused) : KVPACK_OK;
}

int prefill_step(const kvpack_layer &layer, const kvpack_step &step, const kvpack_vqkv &vq, const VqTables &tables) {
  Carver carver = {static_cast<char *>(step.workspace)};
  const Many scratch = carve_many(carver, layer, step, step.live + step.length);
  if (int error = check_workspace(step, carver.used)) return error;
  const ExactRows exact = exact_rows(layer, vq);
  auto restore = [&](void *k, void *v, int rows) { return vqkv_restore(layer, step, vq, tables, k, v, rows); };
  if (int error = attend_many(layer, step, exact, scratch, restore)) return error;
  const NewRows keys = vq.pre_rope ? rows_of(layer, step, step.k) : rotated_keys(layer, step, scratch);
  if (step.encode)
    if (int error = vqkv_encode(layer, step, vq, tables, keys)) return error;
  return store_exact(layer, step, exact);
}

}  // namespace

VqTables vqkv_tables(const kvpack_layer &layer, const kvpack_vqkv &vq, const void *prepared) {
  VqTables tables = {side_of(vq, layer.head_dim, false), side_of(vq, layer.head_dim, true)};
  Carver carver = {static_cast<char *>(const_cast<void *>(prepared))};
  carve_side(carver, tables.k, layer.head_dim);
  carve_side(carver, tables.v, layer.head_dim);
  if (!vq.pre_rope) tables.query = carver.take<float>(size_t(vq.sets) * layer.head_dim * layer.head_dim);
  if (vqkv_by_table(layer, vq)) tables.rest = carver.take<char>(vqkv_table_prepared(layer, vq));
  tables.bytes = carver.used;
  return tables;
}

}  // namespace kvpack

using namespace kvpack;

int kvpack_vqkv_supported(const kvpack_layer *layer, const kvpack_vqkv *vq) { return check(*layer, *vq); }

size_t kvpack_vqkv_prepared(const kvpack_layer *layer, const kvpack_vqkv *vq) {
  return check(*layer, *vq) ? 0 : vqkv_tables(*layer, *vq, nullptr).bytes;
}

int kvpack_vqkv_prepare(const kvpack_layer *layer, const kvpack_vqkv *vq, void *prepared, void *stream) {
  if (int error = check(*layer, *vq)) return error;
  if (!prepared) return fail(KVPACK_BAD_ARGUMENT, "there is no room for the prepared tables");
  const VqTables tables = vqkv_tables(*layer, *vq, prepared);
  const int paired = vq->pre_rope ? layer->rotary_dim / 2 : 0;
  if (int error = prepare_side(*layer, tables.k, vq->k_decode, paired, stream)) return error;
  if (int error = prepare_side(*layer, tables.v, vq->v_decode, 0, stream)) return error;
  if (tables.query) {
    const int error = launch(transpose_decode, dim3(256), dim3(256), 0, stream, vq->k_decode,
                             const_cast<float *>(tables.query), vq->sets, layer->head_dim);
    if (error) return launched(error, "transposing the decode matrix");
  }
  if (vqkv_by_table(*layer, *vq)) return vqkv_table_prepare(*layer, *vq, tables.rest, stream);
  return KVPACK_OK;
}

size_t kvpack_vqkv_workspace(const kvpack_layer *layer, const kvpack_step *step, const kvpack_vqkv *vq) {
  if (check(*layer, *vq)) return 0;
  Carver carver = {nullptr};
  if (step->length == 1) carve_step(carver, *layer, *step, *vq);
  else carve_many(carver, *layer, *step, step->live + step->length);
  return carver.used;
}

int kvpack_vqkv_attention(const kvpack_layer *layer, const kvpack_step *given, const kvpack_vqkv *vq) {
  if (int error = check(*layer, *vq)) return error;
  kvpack_step step = *given;
  if (int error = check_step(*layer, step)) return error;
  if (int error = check_pointers(step, *vq)) return error;
  const VqTables tables = vqkv_tables(*layer, *vq, vq->prepared);
  return step.length == 1 ? decode_step(*layer, step, *vq, tables) : prefill_step(*layer, step, *vq, tables);
}
