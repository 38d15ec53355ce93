// IntKVAttention: a layer's step.
#include "intkv.cuh"

namespace kvpack {
namespace {

bool known_bits(int bits) { return bits == 2 || bits == 3 || bits == 4 || bits == 8; }

int check(const kvpack_layer &layer, const kvpack_intkv &kv) {
  if (int error = check_layer(layer)) return error;
  if (int error = check_geometry(layer, kv.geometry)) return error;
  if (!known_bits(kv.k_bits) || !known_bits(kv.v_bits))
    return fail(KVPACK_UNSUPPORTED, "k_bits=%d and v_bits=%d must be 2, 3, 4 or 8", kv.k_bits, kv.v_bits);
  if (kv.group < 0 || (kv.group && (kv.group % 16 || layer.head_dim % kv.group)))
    return fail(KVPACK_UNSUPPORTED, "group=%d: the kernels take 0 or a multiple of 16 that divides head_dim=%d",
                kv.group, layer.head_dim);
  if (kv.k_channel && kv.geometry.block % 16)
    return fail(KVPACK_UNSUPPORTED, "scales per channel need a block of a multiple of 16 tokens, not %d",
                kv.geometry.block);
  if (kv.pre_rope && layer.rotary_dim && layer.rotary_dim != layer.head_dim)
    return fail(KVPACK_UNSUPPORTED, "rotary_dim=%d: integer keys before RoPE are turned whole (head_dim=%d) or not",
                layer.rotary_dim, layer.head_dim);
  return KVPACK_OK;
}

int check_pointers(const kvpack_intkv &kv) {
  const void *needed[] = {kv.ring_k,   kv.ring_v,  kv.codes_k,  kv.codes_v,
                          kv.scales_k, kv.zeros_k, kv.scales_v, kv.zeros_v};
  for (const void *p : needed)
    if (!p || reinterpret_cast<uintptr_t>(p) % 16)
      return fail(KVPACK_BAD_ARGUMENT, "the states of IntKVAttention must not be null and must be 16-byte aligned");
  if (kv.mean && !kv.center) return fail(KVPACK_BAD_ARGUMENT, "IntKVAttention with a mean needs center");
  if (kv.code_rows < 1 || (kv.k_channel && kv.scale_rows < 1))
    return fail(KVPACK_BAD_ARGUMENT, "code_rows=%d and scale_rows=%d must count the trash row", kv.code_rows,
                kv.scale_rows);
  return KVPACK_OK;
}

ExactRows exact_rows(const kvpack_layer &layer, const kvpack_intkv &kv) {
  const int64_t rows = kv.geometry.sinks + kv.geometry.window + kv.geometry.block, dim = layer.head_dim;
  return {kv.ring_k, kv.ring_v, layer.num_kv_heads * rows * dim, rows * dim, dim, kv.geometry, !kv.pre_rope};
}

int decode_step(const kvpack_layer &layer, const kvpack_step &step, const kvpack_intkv &kv) {
  Carver carver = {static_cast<char *>(step.workspace)};
  const Decode scratch = carve_decode(carver, layer, step.batch, intkv_splits(layer, kv));
  if (int error = check_workspace(step, carver.used)) return error;
  if (int error = decode_begin(layer, step, exact_rows(layer, kv), scratch)) return error;
  if (int error = intkv_decode(layer, step, kv, scratch)) return error;
  const NewRows unused = rows_of(layer, step, step.k);  // the new token stays in the window
  return step.encode ? intkv_encode(layer, step, kv, unused) : KVPACK_OK;
}

int prefill_step(const kvpack_layer &layer, const kvpack_step &step, const kvpack_intkv &kv) {
  Carver carver = {static_cast<char *>(step.workspace)};
  const Many scratch = carve_many(carver, layer, step, step.live + step.length);
  if (int error = check_workspace(step, carver.used)) return error;
  const ExactRows exact = exact_rows(layer, kv);
  auto restore = [&](void *k, void *v, int rows) { return intkv_restore(layer, step, kv, k, v, rows); };
  if (int error = attend_many(layer, step, exact, scratch, restore)) return error;
  const NewRows keys = kv.pre_rope ? rows_of(layer, step, step.k) : rotated_keys(layer, step, scratch);
  if (step.encode)
    if (int error = intkv_encode(layer, step, kv, keys)) return error;
  return store_exact(layer, step, exact);
}

}  // namespace

IntSide intkv_side(const kvpack_layer &layer, const kvpack_intkv &kv, bool values) {
  const bool channel = kv.k_channel && !values;
  IntSide side = {};
  side.bits = values ? kv.v_bits : kv.k_bits;
  side.planes = side.bits == 3 ? 3 : 1;
  side.row_bytes = layer.head_dim * side.bits / 8;
  side.tokens = channel ? kv.geometry.block : 1;
  side.scales = channel ? layer.head_dim : kv.group ? layer.head_dim / kv.group : 1;
  side.scale_rows = channel ? kv.scale_rows : kv.code_rows;
  side.codes = values ? kv.codes_v : kv.codes_k;
  side.scale = values ? kv.scales_v : kv.scales_k;
  side.zero = values ? kv.zeros_v : kv.zeros_k;
  if (kv.mean && kv.center) side.center = kv.center + (values ? layer.num_kv_heads * layer.head_dim : 0);
  return side;
}

}  // namespace kvpack

using namespace kvpack;

extern "C" int kvpack_intkv_supported(const kvpack_layer *layer, const kvpack_intkv *kv) { return check(*layer, *kv); }

extern "C" size_t kvpack_intkv_workspace(const kvpack_layer *layer, const kvpack_step *step, const kvpack_intkv *kv) {
  if (check(*layer, *kv)) return 0;
  Carver carver = {nullptr};
  if (step->length == 1) carve_decode(carver, *layer, step->batch, intkv_splits(*layer, *kv));
  else carve_many(carver, *layer, *step, step->live + step->length);
  return carver.used;
}

extern "C" int kvpack_intkv_attention(const kvpack_layer *layer, const kvpack_step *given, const kvpack_intkv *kv) {
  if (int error = check(*layer, *kv)) return error;
  kvpack_step step = *given;
  if (int error = check_step(*layer, step)) return error;
  if (int error = check_pointers(*kv)) return error;
  return step.length == 1 ? decode_step(*layer, step, *kv) : prefill_step(*layer, step, *kv);
}
