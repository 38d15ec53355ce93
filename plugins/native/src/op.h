// What the ops of the domain "kvpack" look like to a graph: the one list that onnxruntime.cc and tensorrt.cc, the
// library's faces, are made from.
#pragma once
#include "kvpack.h"

#include <initializer_list>
#include <string>
#include <vector>

namespace kvpack {

enum class Kind { DENSE, VQKV, DELTAKV, INTKV, ADD_RMS_NORM, GATED_ACTIVATION };
enum class Type { HALF, BFLOAT16, FLOAT, INT8, INT16, INT32 };

inline size_t size_of(Type type) {
  return type == Type::INT8 ? 1 : type == Type::FLOAT || type == Type::INT32 ? 4 : 2;
}

struct Port {
  std::string name;  // "" for one that only fills up the list
  Type type;
  bool optional = false;
  bool host = false;  // a number that the host reads
};

// One signature of an op. type: of activations and exact rows.
struct Signature {
  Kind kind;
  std::string name;
  Type type;
  std::vector<Port> inputs = {}, outputs = {};
  std::vector<std::string> states = {};

  void add(std::initializer_list<const char *> names, Type type, bool optional = false) {
    for (const char *each : names) inputs.push_back({each, type, optional});
  }
  void add_states(std::initializer_list<const char *> names, Type type, bool optional = false) {
    add(names, type, optional);
    for (const char *each : names) {
      states.push_back(each);
      outputs.push_back({std::string(each) + "_out", type, optional});
    }
  }
  void add_host(const char *each, bool optional = false) { inputs.push_back({each, Type::INT32, optional, true}); }
  int input(const std::string &wanted) const { return find(inputs, wanted); }
  int output(const std::string &wanted) const { return find(outputs, wanted); }

 private:
  static int find(const std::vector<Port> &ports, const std::string &wanted) {
    for (size_t n = 0; n < ports.size(); ++n)
      if (ports[n].name == wanted) return static_cast<int>(n);
    return -1;
  }
};

inline Signature attention(Kind kind, const char *name, Type type) {
  Signature op{kind, name, type};
  op.add({"q"}, type);
  op.add({"k", "v"}, type, true);
  op.outputs.push_back({"out", type});
  return op;
}

inline void add_lengths(Signature &op, bool optional = false) {
  op.add({"past_len", "new_len"}, Type::INT32, optional);
  op.add_host("live", optional);
}

inline Signature dense(Type type, bool observed) {
  Signature op = attention(Kind::DENSE, observed ? "DenseObservedAttention" : "DenseAttention", type);
  op.add_states({"state_k", "state_v"}, type);
  add_lengths(op);
  op.add({"cos", "sin"}, Type::FLOAT, true);
  if (observed) {
    op.add({"select_len"}, Type::INT32);
    op.add_host("select_width");
    op.outputs.push_back({"selected", Type::INT32});
  }
  return op;
}

inline Signature vqkv(Type type) {
  Signature op = attention(Kind::VQKV, "VQKVAttention", type);
  op.add_states({"ring_k", "ring_v"}, type);
  op.add_states({"codes_k", "codes_v"}, Type::INT8);
  add_lengths(op);
  op.add({"enc_src", "enc_dst"}, Type::INT32);
  op.add({"cos", "sin"}, Type::FLOAT, true);
  op.add({"k_books", "k_encode", "k_decode", "k_mean", "v_books", "v_encode", "v_decode", "v_mean"}, Type::FLOAT);
  return op;
}

inline Signature intkv(Type type) {
  Signature op = attention(Kind::INTKV, "IntKVAttention", type);
  op.add_states({"ring_k", "ring_v"}, type);
  op.add_states({"codes_k"}, Type::INT8);
  op.add_states({"scales_k", "zeros_k"}, type);
  op.add_states({"codes_v"}, Type::INT8);
  op.add_states({"scales_v", "zeros_v"}, type);
  add_lengths(op);
  op.add({"enc_src", "enc_dst"}, Type::INT32);
  op.add({"cos", "sin", "center"}, Type::FLOAT, true);
  return op;
}

// Its states depend on the configuration, so that a place in the list means one thing or another: all but q are
// optional.
inline Signature deltakv(Type type, bool coded, Type index, bool raw_references, bool selects) {
  Signature op = attention(Kind::DELTAKV, "DeltaKVAttention", type);
  op.add_states({"ring"}, type, true);
  op.add_states({"latents"}, coded ? Type::INT8 : type, true);
  if (coded) op.add_states({"scales"}, type, true);
  op.add_states({"index"}, index, true);
  op.add_states({"references"}, raw_references ? type : Type::INT8, true);
  if (!raw_references) op.add_states({"reference_scales"}, type, true);
  add_lengths(op, true);
  op.add({"enc_src", "enc_dst"}, Type::INT32, true);
  if (selects) op.add({"selected", "select_len"}, Type::INT32, true);
  op.add({"cos", "sin", "center", "compress", "decompress", "gate", "up", "down"}, Type::FLOAT, true);
  return op;
}

inline Signature add_rms_norm(Type type) {
  Signature op{Kind::ADD_RMS_NORM, "AddRMSNormalization", type};
  op.add({"x", "y", "weight"}, type);
  op.outputs = {{"sum", type}, {"out", type}};
  return op;
}

inline Signature gated_activation(Type type) {
  Signature op{Kind::GATED_ACTIVATION, "GatedActivation", type};
  op.add({"x"}, type);
  op.outputs = {{"out", type}};
  return op;
}

}  // namespace kvpack
