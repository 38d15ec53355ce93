// A node of a graph over the C functions of kvpack.h: its attributes, and from a step's tensors to a call. Sentences
// say what was wrong, "" stands for nothing.
#pragma once
#include "op.h"
#ifndef KVPACK_EMULATE
#include <cuda_runtime_api.h>
#endif

#include <climits>
#include <cstdlib>
#include <cstring>
#include <string>
#include <variant>
#include <vector>

namespace kvpack {

constexpr int TILE_ROWS = 16;  // code rows of a tile

inline std::string checked(int code) { return code == KVPACK_OK ? "" : kvpack_last_error(); }

// -- the device: a GPU, or this CPU

#ifdef KVPACK_EMULATE
inline std::string copy(void *to, const void *from, size_t bytes, void *) {
  if (bytes) std::memcpy(to, from, bytes);
  return "";
}
inline std::string allocate(void **memory, size_t bytes) {
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *memory ? "" : "there is no memory for " + std::to_string(bytes) + " bytes";
}
inline void release(void *memory) { std::free(memory); }
inline std::string finish(void *) { return ""; }
#else
inline std::string cuda(cudaError_t error) { return error == cudaSuccess ? "" : cudaGetErrorString(error); }
inline std::string copy(void *to, const void *from, size_t bytes, void *stream) {
  return cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
}
inline std::string allocate(void **memory, size_t bytes) { return cuda(cudaMalloc(memory, bytes)); }
inline void release(void *memory) { cudaFree(memory); }
inline std::string finish(void *stream) { return cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream))); }
#endif

// -- a state's functions, by its type

using State = std::variant<kvpack_dense, kvpack_vqkv, kvpack_deltakv, kvpack_intkv>;

#define KVPACK_FUNCTIONS(op)                                                                               \
  inline int supported(const kvpack_layer &l, const kvpack_##op &s) { return kvpack_##op##_supported(&l, &s); } \
  inline size_t workspace(const kvpack_layer &l, const kvpack_step &t, const kvpack_##op &s) {             \
    return kvpack_##op##_workspace(&l, &t, &s);                                                            \
  }                                                                                                        \
  inline int attend(const kvpack_layer &l, const kvpack_step &t, const kvpack_##op &s) {                   \
    return kvpack_##op##_attention(&l, &t, &s);                                                            \
  }
KVPACK_FUNCTIONS(dense)
KVPACK_FUNCTIONS(vqkv)
KVPACK_FUNCTIONS(deltakv)
KVPACK_FUNCTIONS(intkv)
#undef KVPACK_FUNCTIONS

#define KVPACK_PREPARED(op)                                                                                         \
  inline size_t prepared(const kvpack_layer &l, const kvpack_##op &s) { return kvpack_##op##_prepared(&l, &s); }    \
  inline int prepare(const kvpack_layer &l, kvpack_##op &s, void *to, void *stream) {                               \
    return kvpack_##op##_prepare(&l, &s, to, stream);                                                               \
  }                                                                                                                 \
  inline void use(kvpack_##op &s, const void *prepared) { s.prepared = prepared; }
KVPACK_PREPARED(vqkv)
KVPACK_PREPARED(deltakv)
#undef KVPACK_PREPARED
template <class S> size_t prepared(const kvpack_layer &, const S &) { return 0; }
template <class S> int prepare(const kvpack_layer &, S &, void *, void *) { return KVPACK_OK; }
template <class S> void use(S &, const void *) {}

// -- what is fixed about a node

using Names = std::vector<const char *>;

struct Node {
  Kind kind;
  bool observed;  // DenseObservedAttention
  kvpack_layer layer{};
  State state;
  float epsilon = 0;
  int32_t activation = 0;

  explicit Node(Kind kind, bool observed = false) : kind(kind), observed(observed) {
    if (kind == Kind::VQKV) state = kvpack_vqkv{};
    if (kind == Kind::DELTAKV) state = kvpack_deltakv{};
    if (kind == Kind::INTKV) state = kvpack_intkv{};
  }

  bool attends() const { return kind != Kind::ADD_RMS_NORM && kind != Kind::GATED_ACTIVATION; }
  int64_t query_size() const { return int64_t(layer.num_heads) * layer.head_dim; }
  int64_t kv_size() const { return int64_t(layer.num_kv_heads) * layer.head_dim; }

  // Calls, for each of the op's attributes, see(name, number), see(name, number, names) where a word stands for its
  // place in names, or see(name, list, most, count).
  template <class See> std::string visit(See &&see) {
    if (kind == Kind::ADD_RMS_NORM) return see("epsilon", epsilon), "";
    if (kind == Kind::GATED_ACTIVATION)
      return see("activation", activation, Names{"silu", "gelu_tanh", "gelu"}), "";  // in the order of kvpack.h
    see("num_heads", layer.num_heads), see("num_kv_heads", layer.num_kv_heads), see("head_dim", layer.head_dim);
    see("rotary_dim", layer.rotary_dim), see("sliding_window", layer.sliding_window);
    see("scale", layer.scale), see("softcap", layer.softcap);
    return std::visit([&](auto &s) { return visit(see, s); }, state);
  }

  std::string supported() const {
    if (query_size() + 2 * kv_size() > INT_MAX) return "q, k and v are too large";
    return std::visit([&](const auto &s) { return checked(kvpack::supported(layer, s)); }, state);
  }

 private:
  template <class See> static void visit(See &&see, kvpack_geometry &geometry) {
    see("sinks", geometry.sinks), see("window", geometry.window), see("block", geometry.block);
  }
  template <class See> std::string visit(See &&see, kvpack_dense &s) {
    if (observed) visit(see, s.geometry);
    return "";
  }
  template <class See> std::string visit(See &&see, kvpack_vqkv &s) {
    visit(see, s.geometry);
    see("key_space", s.pre_rope, Names{"post_rope", "pre_rope"}), see("layout", s.layout, Names{"plain", "tiles"});
    see("sets", s.sets), see("k_groups", s.k_groups), see("v_groups", s.v_groups);
    see("k_entries", s.k_entries), see("v_entries", s.v_entries);
    see("k_stages", s.k_stages, KVPACK_MAX_STAGES, s.k_stage_count);
    see("v_stages", s.v_stages, KVPACK_MAX_STAGES, s.v_stage_count);
    return "";
  }
  template <class See> std::string visit(See &&see, kvpack_deltakv &s) {
    visit(see, s.geometry);
    see("stride", s.stride), see("neighbors", s.neighbors), see("reference_bits", s.reference_bits);
    see("hidden", s.hidden), see("selects", s.selects);
    see("latent_sizes", s.latent_sizes, KVPACK_MAX_SEGMENTS, s.segment_count);
    int32_t count = s.segment_count;
    see("latent_bits", s.latent_bits, KVPACK_MAX_SEGMENTS, count);
    return count == s.segment_count ? "" : "latent_sizes and latent_bits differ in length";
  }
  template <class See> std::string visit(See &&see, kvpack_intkv &s) {
    visit(see, s.geometry);
    see("key_space", s.pre_rope, Names{"post_rope", "pre_rope"});
    see("k_axis", s.k_channel, Names{"token", "channel"});
    see("k_bits", s.k_bits), see("v_bits", s.v_bits), see("group", s.group);
    see("rotation", s.rotation), see("mean", s.mean);
    return "";
  }
};

// -- one step of an attention node

struct Tensor {
  bool given = false;
  void *data = nullptr;
  std::vector<int64_t> dims;

  int32_t dim(size_t axis) const { return axis < dims.size() ? static_cast<int32_t>(dims[axis]) : 0; }
  int64_t rows() const {  // of the last dimension
    int64_t count = 1;
    for (size_t n = 0; n + 1 < dims.size(); ++n) count *= dims[n];
    return count;
  }
  size_t bytes(Type type) const { return dims.empty() ? size_of(type) : size_of(type) * size_t(rows() * dims.back()); }
  std::string shape() const {
    if (!given) return "none";
    std::string all;
    for (int64_t dim : dims) all += (all.empty() ? "[" : ", ") + std::to_string(dim);
    return all + "]";
  }
};

// The structures of a call. `bind` fills in all but live, out, the workspace, the stream and what `observe` does.
struct Call {
  kvpack_layer layer;
  State state;
  kvpack_step step{};

  explicit Call(const Node &node) : layer(node.layer), state(node.state) {}

  // tensors[name] is a Tensor, one not `given` where the node has none of this name.
  template <class Tensors> std::string bind(const Node &node, const std::string &op, const Tensors &tensors) {
    const Tensor &q = tensors["q"], &k = tensors["k"], &v = tensors["v"], &encode = tensors["enc_src"];
    const int64_t query = node.query_size(), kv = node.kv_size();
    const bool packed = !k.given && !v.given;
    const auto fits = [&](const Tensor &x, int64_t size) {
      return x.dims == std::vector<int64_t>{q.dim(0), q.dim(1), size};
    };
    if (!(packed ? fits(q, query + 2 * kv) : fits(q, query) && fits(k, kv) && fits(v, kv)))
      return op + " takes q, k and v [batch, length, size] of sizes " + std::to_string(query) + ", " +
             std::to_string(kv) + " and " + std::to_string(kv) + ", or all three in q of size " +
             std::to_string(query + 2 * kv) + ", and was given " + q.shape() + ", " + k.shape() + " and " + v.shape();
    step.batch = q.dim(0), step.length = q.dim(1);
    step.q = q.data, step.k = k.data, step.v = v.data;
    if (packed) {
      if (const auto *all = static_cast<const uint16_t *>(q.data)) step.k = all + query, step.v = all + query + kv;
      step.q_row = step.kv_row = static_cast<int32_t>(query + 2 * kv);
    }
    step.encode = encode.dim(1);
    point(step.past_len, tensors["past_len"]);
    point(step.new_len, tensors["new_len"]);
    point(step.enc_src, encode);
    point(step.enc_dst, tensors["enc_dst"]);
    point(step.cos, tensors["cos"]);
    point(step.sin, tensors["sin"]);
    step.rope_rows = tensors["cos"].dim(0);
    std::visit([&](auto &s) { bind(s, tensors); }, state);
    return "";
  }
  template <class Tensors> void observe(const Tensors &tensors, int32_t width, void *selected) {
    kvpack_dense &s = std::get<kvpack_dense>(state);
    point(s.select_len, tensors["select_len"]);
    s.select_width = width;
    s.selected = static_cast<int32_t *>(selected);
  }
  size_t workspace() const {
    return std::visit([&](const auto &s) { return kvpack::workspace(layer, step, s); }, state);
  }
  size_t prepared() const {
    return std::visit([&](const auto &s) { return kvpack::prepared(layer, s); }, state);
  }
  std::string prepare(void *to) {
    return std::visit([&](auto &s) { return checked(kvpack::prepare(layer, s, to, step.stream)); }, state);
  }
  std::string attend(const void *prepared) {
    std::visit([&](auto &s) { use(s, prepared); }, state);
    return std::visit([&](const auto &s) { return checked(kvpack::attend(layer, step, s)); }, state);
  }

 private:
  template <class V> static void point(V *&field, const Tensor &tensor) { field = static_cast<V *>(tensor.data); }

  template <class Tensors> static void bind(kvpack_dense &s, const Tensors &tensors) {
    point(s.k, tensors["state_k"]);
    point(s.v, tensors["state_v"]);
    s.rows = tensors["state_k"].dim(2);
  }
  template <class Tensors> static void bind(kvpack_vqkv &s, const Tensors &tensors) {
    point(s.ring_k, tensors["ring_k"]);
    point(s.ring_v, tensors["ring_v"]);
    point(s.codes_k, tensors["codes_k"]);
    point(s.codes_v, tensors["codes_v"]);
    s.code_rows = tensors["codes_k"].dim(2) * (s.layout == KVPACK_TILES ? TILE_ROWS : 1);
    point(s.k_books, tensors["k_books"]);
    point(s.k_encode, tensors["k_encode"]);
    point(s.k_decode, tensors["k_decode"]);
    point(s.k_mean, tensors["k_mean"]);
    point(s.v_books, tensors["v_books"]);
    point(s.v_encode, tensors["v_encode"]);
    point(s.v_decode, tensors["v_decode"]);
    point(s.v_mean, tensors["v_mean"]);
  }
  template <class Tensors> static void bind(kvpack_deltakv &s, const Tensors &tensors) {
    point(s.ring, tensors["ring"]);
    point(s.latents, tensors["latents"]);
    point(s.scales, tensors["scales"]);
    point(s.index, tensors["index"]);
    point(s.references, tensors["references"]);
    point(s.reference_scales, tensors["reference_scales"]);
    s.code_rows = tensors["latents"].dim(2), s.ref_rows = tensors["references"].dim(2);
    point(s.selected, tensors["selected"]);
    point(s.select_len, tensors["select_len"]);
    if (s.selects && !s.selected) s.selected = s.select_len;  // of no columns, yet not "all rows"
    s.select_width = tensors["selected"].dim(1);
    point(s.center, tensors["center"]);
    point(s.compress, tensors["compress"]);
    point(s.decompress, tensors["decompress"]);
    point(s.gate, tensors["gate"]);
    point(s.up, tensors["up"]);
    point(s.down, tensors["down"]);
  }
  template <class Tensors> static void bind(kvpack_intkv &s, const Tensors &tensors) {
    point(s.ring_k, tensors["ring_k"]);
    point(s.ring_v, tensors["ring_v"]);
    point(s.codes_k, tensors["codes_k"]);
    point(s.codes_v, tensors["codes_v"]);
    point(s.scales_k, tensors["scales_k"]);
    point(s.zeros_k, tensors["zeros_k"]);
    point(s.scales_v, tensors["scales_v"]);
    point(s.zeros_v, tensors["zeros_v"]);
    s.code_rows = tensors["codes_k"].dim(2), s.scale_rows = tensors["scales_k"].dim(2);
    point(s.center, tensors["center"]);
  }
};

// -- a step of a node between attentions

// dims: of each of its outputs.
template <class Tensors> std::string fits(const Node &node, const Tensors &tensors, std::vector<int64_t> &dims) {
  dims = tensors["x"].dims;
  if (node.kind == Kind::ADD_RMS_NORM) {
    const Tensor &weight = tensors["weight"];
    if (weight.dims.size() != 1 || dims.empty() || dims.back() != weight.dims[0] || tensors["y"].dims != dims)
      return "AddRMSNormalization takes x and y of one shape and a weight of their last dimension";
    return "";
  }
  if (dims.empty() || dims.back() % 2)
    return "GatedActivation takes gates and factors side by side, an even last dimension";
  dims.back() /= 2;
  return "";
}

// outputs: in the op's order.
template <class Tensors>
std::string run(const Node &node, const Tensors &tensors, void *const *outputs, void *stream) {
  const Tensor &x = tensors["x"];
  const int32_t dtype = node.layer.dtype;
  const int64_t columns = x.dims.back();
  if (node.kind == Kind::ADD_RMS_NORM)
    return checked(kvpack_add_rms_norm(dtype, x.rows(), static_cast<int32_t>(columns), node.epsilon, x.data,
                                       tensors["y"].data, tensors["weight"].data, outputs[0], outputs[1], stream));
  return checked(kvpack_gated_activation(dtype, node.activation, x.rows(), static_cast<int32_t>(columns / 2), x.data,
                                         outputs[0], stream));
}

}  // namespace kvpack
