// Stands in for the kernels behind the ops of ONNX Runtime: notes in `recorded` what each call was given, marks the first
// byte of every state, and gives zeros. REAL_DENSE leaves the dense op to the emulated kernels. 13 tokens are an error.
#include "kvpack.h"

#include <cstring>
#include <string>
#include <vector>

namespace {
std::string notes, sentence = "nothing";

template <class... Rest> void note(const char *name, long long value, Rest... rest) {
  notes += std::string("\"") + name + "\": " + std::to_string(value) + ", ";
  if constexpr (sizeof...(rest) > 0) note(rest...);
}
void list(const char *name, const int32_t *values, int count) {
  notes += std::string("\"") + name + "\": [";
  for (int n = 0; n < count; ++n) notes += (n ? ", " : "") + std::to_string(values[n]);
  notes += "], ";
}
void firsts(std::initializer_list<const float *> tables) {  // each table's first number, -1 without a table
  std::vector<int32_t> found;
  for (const float *table : tables) found.push_back(table ? int32_t(table[0]) : -1);
  list("firsts", found.data(), int(found.size()));
}
void mark(std::initializer_list<void *> states) {
  for (void *state : states)
    if (state) *static_cast<signed char *>(state) = 77;
}
void geometry(const kvpack_geometry &g) { note("sinks", g.sinks, "window", g.window, "block", g.block); }
// The bits of the first number of the first token and of the last of the last.
void ends(const char *name, const kvpack_step *s, const void *x, int row, int size) {
  const uint16_t *at = static_cast<const uint16_t *>(x);
  const int32_t bits[2] = {at[0], at[(s->batch * s->length - 1) * (row ? row : size) + size - 1]};
  list(name, bits, 2);
}
void common(const char *op, const kvpack_layer *l, const kvpack_step *s) {
  notes += std::string("{\"op\": \"") + op + "\", ";
  note("num_heads", l->num_heads, "num_kv_heads", l->num_kv_heads, "head_dim", l->head_dim, "rotary_dim", l->rotary_dim,
       "sliding_window", l->sliding_window, "dtype", l->dtype, "scale", (long long)(l->scale * 1e6), "softcap",
       (long long)(l->softcap * 1e6), "batch", s->batch, "length", s->length, "live", s->live, "encode", s->encode,
       "rope_rows", s->rope_rows, "rope", s->cos && s->sin, "workspace", (long long)s->workspace_bytes, "aligned",
       s->workspace && (size_t)s->workspace % 64 == 0, "past", s->past_len[0], "new", s->new_len[0], "q_row", s->q_row,
       "kv_row", s->kv_row);
  const int q_size = l->num_heads * l->head_dim, kv_size = l->num_kv_heads * l->head_dim;
  ends("q", s, s->q, s->q_row, q_size), ends("k", s, s->k, s->kv_row, kv_size), ends("v", s, s->v, s->kv_row, kv_size);
}
int finish(const kvpack_layer *l, const kvpack_step *s) {
  notes += "\"end\": 0}\n";
  if (s->length == 13) return sentence = "13 tokens bring no luck", KVPACK_UNSUPPORTED;
  std::memset(s->out, 0, size_t(s->batch) * s->length * l->num_heads * l->head_dim * 2);
  return KVPACK_OK;
}
int supported(const kvpack_layer *l) {
  if (l->head_dim % 32 == 0) return KVPACK_OK;
  return sentence = "head_dim " + std::to_string(l->head_dim) + " is odd", KVPACK_UNSUPPORTED;
}
}  // namespace

extern "C" {
KVPACK_API const char *recorded() {
  static std::string told;
  told.swap(notes), notes.clear();
  return told.c_str();
}

#define KVPACK_RECORDED(op)                                                                                  \
  KVPACK_API size_t kvpack_##op##_workspace(const kvpack_layer *, const kvpack_step *, const kvpack_##op *) { \
    return 640;                                                                                              \
  }                                                                                                          \
  KVPACK_API int kvpack_##op##_supported(const kvpack_layer *l, const kvpack_##op *) { return supported(l); }
#define KVPACK_PREPARED(op)                                                                           \
  KVPACK_API size_t kvpack_##op##_prepared(const kvpack_layer *, const kvpack_##op *) { return 320; } \
  KVPACK_API int kvpack_##op##_prepare(const kvpack_layer *, const kvpack_##op *, void *p, void *) {  \
    return std::memset(p, 5, 320), notes += "{\"op\": \"prepare\"}\n", KVPACK_OK;                     \
  }

#ifndef REAL_DENSE
KVPACK_API int kvpack_add_rms_norm(int32_t dtype, int64_t rows, int32_t columns, float epsilon, const void *x,
                                   const void *, const void *, void *sum, void *out, void *) {
  notes += "{\"op\": \"add_rms_norm\", ";
  note("dtype", dtype, "rows", rows, "columns", columns, "epsilon", (long long)(epsilon * 1e6));
  notes += "\"end\": 0}\n";
  return std::memcpy(sum, x, size_t(rows) * columns * 2), std::memset(out, 0, size_t(rows) * columns * 2), KVPACK_OK;
}
KVPACK_API int kvpack_gated_activation(int32_t dtype, int32_t activation, int64_t rows, int32_t columns, const void *,
                                       void *out, void *) {
  notes += "{\"op\": \"gated_activation\", ";
  note("dtype", dtype, "activation", activation, "rows", rows, "columns", columns);
  notes += "\"end\": 0}\n";
  return std::memset(out, 0, size_t(rows) * columns * 2), KVPACK_OK;
}
KVPACK_RECORDED(dense)
KVPACK_API int32_t kvpack_abi(void) { return KVPACK_ABI; }
KVPACK_API const char *kvpack_last_error(void) { return sentence.c_str(); }
KVPACK_API int kvpack_dense_attention(const kvpack_layer *l, const kvpack_step *s, const kvpack_dense *d) {
  common("dense", l, s), geometry(d->geometry), mark({d->k, d->v});
  note("rows", d->rows, "select_width", d->select_width, "observed", d->selected != nullptr);
  if (d->selected)
    for (int n = 0; n < s->batch * d->select_width; ++n) d->selected[n] = d->select_len[n / d->select_width];
  return finish(l, s);
}
#endif
KVPACK_RECORDED(vqkv)
KVPACK_PREPARED(vqkv)
KVPACK_RECORDED(deltakv)
KVPACK_PREPARED(deltakv)
KVPACK_RECORDED(intkv)

KVPACK_API int kvpack_vqkv_attention(const kvpack_layer *l, const kvpack_step *s, const kvpack_vqkv *v) {
  common("vqkv", l, s), geometry(v->geometry), mark({v->ring_k, v->ring_v, v->codes_k, v->codes_v});
  note("pre_rope", v->pre_rope, "layout", v->layout, "sets", v->sets, "k_groups", v->k_groups, "v_groups", v->v_groups,
       "k_entries", v->k_entries, "v_entries", v->v_entries, "code_rows", v->code_rows, "prepared",
       static_cast<const char *>(v->prepared)[319]);
  list("k_stages", v->k_stages, v->k_stage_count), list("v_stages", v->v_stages, v->v_stage_count);
  firsts({v->k_books, v->k_encode, v->k_decode, v->k_mean, v->v_books, v->v_encode, v->v_decode, v->v_mean});
  return finish(l, s);
}
KVPACK_API int kvpack_deltakv_attention(const kvpack_layer *l, const kvpack_step *s, const kvpack_deltakv *d) {
  common("deltakv", l, s), geometry(d->geometry);
  mark({d->ring, d->latents, d->scales, d->index, d->references, d->reference_scales});
  note("stride", d->stride, "neighbors", d->neighbors, "reference_bits", d->reference_bits, "hidden", d->hidden, "selects",
       d->selects, "index_bytes", d->index_bytes, "code_rows", d->code_rows, "ref_rows", d->ref_rows, "select_width",
       d->select_width, "selected", d->selected ? d->selected[0] : -1, "select_len", d->select_len ? d->select_len[0] : -1,
       "scales", d->scales != nullptr, "reference_scales", d->reference_scales != nullptr, "prepared",
       static_cast<const char *>(d->prepared)[319]);
  list("latent_sizes", d->latent_sizes, d->segment_count), list("latent_bits", d->latent_bits, d->segment_count);
  firsts({d->center, d->compress, d->decompress, d->gate, d->up, d->down});
  return finish(l, s);
}
KVPACK_API int kvpack_intkv_attention(const kvpack_layer *l, const kvpack_step *s, const kvpack_intkv *i) {
  common("intkv", l, s), geometry(i->geometry);
  mark({i->ring_k, i->ring_v, i->codes_k, i->codes_v, i->scales_k, i->zeros_k, i->scales_v, i->zeros_v});
  note("pre_rope", i->pre_rope, "k_bits", i->k_bits, "v_bits", i->v_bits, "k_channel", i->k_channel, "group", i->group,
       "rotation", i->rotation, "mean", i->mean, "code_rows", i->code_rows, "scale_rows", i->scale_rows, "center",
       i->center ? int(i->center[0]) : -1);
  return finish(l, s);
}
}
