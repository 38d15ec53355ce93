// DeltaKVAttention: what the layer must be like, and the order of a step.
#include "deltakv.cuh"

namespace kvpack {
namespace {

// Whether the kernels cover a layer.
int check(const kvpack_layer &layer, const kvpack_deltakv &d) {
  int error = check_layer(layer);
  if (!error) error = check_geometry(layer, d.geometry);
  if (error) return error;
  if (d.hidden < 0 || d.hidden % 8)
    return fail(KVPACK_UNSUPPORTED, "hidden=%d must be a multiple of 8 for the native kernels", d.hidden);
  if (d.reference_bits != 16)
    return fail(KVPACK_UNSUPPORTED, "reference_bits=%d has no native kernels, only reference_bits=16 has",
                d.reference_bits);
  if (d.neighbors < 1 || d.neighbors > MAX_NEIGHBORS)
    return fail(KVPACK_UNSUPPORTED, "neighbors=%d must be 1 to %d for the native kernels", d.neighbors, MAX_NEIGHBORS);
  if (d.stride < 1 || d.geometry.sinks < d.neighbors)
    return fail(KVPACK_BAD_ARGUMENT, "stride=%d must be at least 1 and sinks=%d at least neighbors=%d", d.stride,
                d.geometry.sinks, d.neighbors);
  if (d.index_bytes != 2 && d.index_bytes != 4)
    return fail(KVPACK_BAD_ARGUMENT, "index_bytes=%d must be 2 or 4", d.index_bytes);
  const int width = deltakv_width(layer);
  if (width > MAX_WIDTH)
    return fail(KVPACK_UNSUPPORTED, "%d KV heads of %d are %d numbers per token, the native kernels take up to %d",
                layer.num_kv_heads, layer.head_dim, width, MAX_WIDTH);
  if (d.segment_count < 1 || d.segment_count > KVPACK_MAX_SEGMENTS)
    return fail(KVPACK_BAD_ARGUMENT, "%d latent segments must be 1 to %d", d.segment_count, KVPACK_MAX_SEGMENTS);
  for (int n = 0; n < d.segment_count; ++n) {
    const int size = d.latent_sizes[n], bits = d.latent_bits[n];
    if (bits != 2 && bits != 4 && bits != 8 && (bits != 16 || d.segment_count > 1))
      return fail(KVPACK_BAD_ARGUMENT, "a latent segment of %d bits: there are those of 2, 4, 8 and, alone, 16", bits);
    if (size < 8 || size % 8)
      return fail(KVPACK_UNSUPPORTED, "latents=%dx%d: segments must be multiples of 8 values for the native kernels",
                  size, bits);
  }
  if (latent_values(d) > width)
    return fail(KVPACK_BAD_ARGUMENT, "%d latent values must be at most %d", latent_values(d), width);
  return deltakv_decode_supported(layer, d);
}

int check_addresses(const kvpack_step &step, const kvpack_deltakv &d) {
  if (!d.ring || !d.latents || (!d.scales && d.latent_bits[0] < 16) || !d.index || !d.references || !d.center ||
      !d.compress || !d.decompress || (d.hidden && (!d.gate || !d.up || !d.down)))
    return fail(KVPACK_BAD_ARGUMENT, "a state or table of DeltaKVAttention has no address");
  if (!d.prepared) return fail(KVPACK_BAD_ARGUMENT, "kvpack_deltakv_prepare has to make the tables first");
  if (d.code_rows < 1 || d.ref_rows < 1)
    return fail(KVPACK_BAD_ARGUMENT, "code_rows=%d and ref_rows=%d must be positive", d.code_rows, d.ref_rows);
  if (d.selects && step.length == 1 && (!d.selected || !d.select_len) && d.select_width > 0)
    return fail(KVPACK_BAD_ARGUMENT, "a layer that selects needs the selected rows");
  return KVPACK_OK;
}

DeltaKVTables carve_tables(Carver &carver, const kvpack_layer &layer, const kvpack_deltakv &d) {
  const size_t width = deltakv_width(layer);
  DeltaKVTables tables;
  tables.shift = carver.take<uint16_t>(width);
  tables.restore = carver.take<uint16_t>(width * restore_columns(d));
  tables.decode = carver.take<char>(deltakv_decode_prepared(layer, d));
  return tables;
}

ExactRows exact_rows(const kvpack_layer &layer, const kvpack_deltakv &d) {
  const int width = deltakv_width(layer);
  uint16_t *keys = static_cast<uint16_t *>(d.ring);
  return {keys, keys + width / 2, int64_t(deltakv_ring_rows(d)) * width, layer.head_dim, width, d.geometry, 0};
}

struct Scratch {  // a step attends first and encodes then, in the same memory
  Many many;
  Decode decode;
  void *attention, *encode;
  size_t bytes;
};
Scratch carve(char *base, const kvpack_layer &layer, const kvpack_step &step, const kvpack_deltakv &d) {
  Carver carver{base};
  Scratch s = {};
  s.encode = base;
  if (step.length == 1) {
    s.decode = carve_decode(carver, layer, step.batch, DELTAKV_SPLITS);
    s.attention = carver.take<char>(deltakv_decode_workspace(layer, step, d));
  } else {
    s.many = carve_many(carver, layer, step, step.live + step.length);
  }
  s.bytes = carver.used;
  const size_t encode = deltakv_encode_workspace(layer, step, d);
  if (encode > s.bytes) s.bytes = encode;
  return s;
}

}  // namespace
}  // namespace kvpack

using namespace kvpack;

int kvpack_deltakv_supported(const kvpack_layer *layer, const kvpack_deltakv *d) { return check(*layer, *d); }

size_t kvpack_deltakv_prepared(const kvpack_layer *layer, const kvpack_deltakv *d) {
  Carver carver{nullptr};
  carve_tables(carver, *layer, *d);
  return carver.used;
}

int kvpack_deltakv_prepare(const kvpack_layer *layer, const kvpack_deltakv *d, void *prepared, void *stream) {
  int error = check(*layer, *d);
  if (error) return error;
  if (!d->center || !d->decompress || !prepared)
    return fail(KVPACK_BAD_ARGUMENT, "the tables to prepare have no address");
  Carver carver{static_cast<char *>(prepared)};
  const DeltaKVTables tables = carve_tables(carver, *layer, *d);
  error = deltakv_restore_prepare(*layer, *d, tables, stream);
  return error ? error : deltakv_decode_prepare(*layer, *d, tables.decode, stream);
}

size_t kvpack_deltakv_workspace(const kvpack_layer *layer, const kvpack_step *step, const kvpack_deltakv *d) {
  return carve(nullptr, *layer, *step, *d).bytes;
}

int kvpack_deltakv_attention(const kvpack_layer *layer, const kvpack_step *given, const kvpack_deltakv *d) {
  kvpack_step step = *given;
  int error = check(*layer, *d);
  if (!error) error = check_step(*layer, step);
  if (!error) error = check_addresses(step, *d);
  if (error) return error;
  char *base = static_cast<char *>(step.workspace);
  const Scratch s = carve(base, *layer, step, *d);
  error = check_workspace(step, s.bytes);
  if (error) return error;
  Carver carver{static_cast<char *>(const_cast<void *>(d->prepared))};
  const DeltaKVTables tables = carve_tables(carver, *layer, *d);
  const ExactRows exact = exact_rows(*layer, *d);
  if (step.length == 1) {
    error = deltakv_decode(*layer, step, *d, tables.decode, exact, s.decode, s.attention);
  } else {
    auto restore = [&](void *k, void *v, int rows) { return deltakv_restore(*layer, step, *d, tables, k, v, rows); };
    error = attend_many(*layer, step, exact, s.many, restore);
  }
  if (!error && step.encode) error = deltakv_encode(*layer, step, *d, tables, s.encode);
  if (!error && step.length > 1) error = store_exact(*layer, step, exact);
  return error;
}
