// The ops of the ONNX domain "kvpack" for ONNX Runtime, over the C functions of kvpack.h.
//
// A node's attributes fill the fixed part of the op's structures when its kernel is made; a step fills in addresses and
// sizes and calls the library on the provider's stream. State inputs and outputs are meant to be bound to one buffer;
// where they are not, the state is copied first. With KVPACK_EMULATE the ops run on a CPU, as the kernels do.
#include "ort.h"
#include "ort_elementwise.h"

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace kvpack::ort {

// -- one kernel: a node of a loaded model

struct Attention {
  const Op &op;
  kvpack_layer layer{};
  kvpack_dense dense{};
  kvpack_vqkv vqkv{};
  kvpack_deltakv deltakv{};
  kvpack_intkv intkv{};
  std::mutex preparing;
  void *prepared = nullptr;

  explicit Attention(const Op &op) : op(op) {}
  ~Attention() {
    if (prepared) release(prepared);
  }

  OrtStatus *configure(const OrtKernelInfo *info) {
    KVPACK_TRY(read(info, layer));
    layer.dtype = op.dtype();
    switch (op.kind) {
      case Kind::DENSE: {
        if (op.output("selected") >= 0) KVPACK_TRY(read(info, dense.geometry));
        return checked(kvpack_dense_supported(&layer, &dense));
      }
      case Kind::VQKV: {
        kvpack_vqkv &s = vqkv;
        KVPACK_TRY(read(info, s.geometry));
        KVPACK_TRY(read(info, "key_space", "pre_rope", s.pre_rope));
        KVPACK_TRY(read(info, "layout", "tiles", s.layout));
        KVPACK_TRY(read_all(info, "sets", s.sets, "k_groups", s.k_groups, "v_groups", s.v_groups, "k_entries",
                            s.k_entries, "v_entries", s.v_entries));
        KVPACK_TRY(read(info, "k_stages", s.k_stages, s.k_stage_count));
        KVPACK_TRY(read(info, "v_stages", s.v_stages, s.v_stage_count));
        return checked(kvpack_vqkv_supported(&layer, &s));
      }
      case Kind::DELTAKV: {
        kvpack_deltakv &s = deltakv;
        KVPACK_TRY(read(info, s.geometry));
        KVPACK_TRY(read_all(info, "stride", s.stride, "neighbors", s.neighbors, "reference_bits", s.reference_bits,
                            "hidden", s.hidden, "selects", s.selects));
        KVPACK_TRY(read(info, "latent_sizes", s.latent_sizes, s.segment_count));
        KVPACK_TRY(read(info, "latent_bits", s.latent_bits, s.segment_count));
        s.index_bytes = static_cast<int32_t>(size_of(op.inputs[op.input("index")].type));
        return checked(kvpack_deltakv_supported(&layer, &s));
      }
      case Kind::INTKV: {
        kvpack_intkv &s = intkv;
        KVPACK_TRY(read(info, s.geometry));
        KVPACK_TRY(read(info, "key_space", "pre_rope", s.pre_rope));
        KVPACK_TRY(read(info, "k_axis", "channel", s.k_channel));
        KVPACK_TRY(read_all(info, "k_bits", s.k_bits, "v_bits", s.v_bits, "group", s.group, "rotation", s.rotation,
                            "mean", s.mean));
        return checked(kvpack_intkv_supported(&layer, &s));
      }
      default: return nullptr;
    }
  }

  OrtStatus *compute(OrtKernelContext *context) {
    Tensors tensors(op, context);
    KVPACK_TRY(tensors.load());
    kvpack_step step{};
    KVPACK_TRY(stream_of(context, &step.stream));
    KVPACK_TRY(tensors.renew_states(step.stream));
    const Tensor &q = tensors["q"], &live = tensors["live"], &encode = tensors["enc_src"];
    KVPACK_TRY(bind(step, tensors));
    step.encode = encode.dim(1);
    step.live = *static_cast<const int32_t *>(live.data);
    point(step.past_len, tensors["past_len"]);
    point(step.new_len, tensors["new_len"]);
    point(step.enc_src, encode);
    point(step.enc_dst, tensors["enc_dst"]);
    point(step.cos, tensors["cos"]);
    point(step.sin, tensors["sin"]);
    step.rope_rows = tensors["cos"].dim(0);
    KVPACK_TRY(tensors.output("out", {step.batch, step.length, layer.num_heads * layer.head_dim}, &step.out));
    Scratch scratch;
    switch (op.kind) {
      case Kind::DENSE: {
        kvpack_dense state = dense;
        KVPACK_TRY(bind(state, tensors, step.batch));
        step.workspace_bytes = kvpack_dense_workspace(&layer, &step, &state);
        KVPACK_TRY(scratch.take(context, q.value, step.workspace_bytes));
        step.workspace = scratch.data;
        return checked(kvpack_dense_attention(&layer, &step, &state));
      }
      case Kind::VQKV: {
        kvpack_vqkv state = vqkv;
        bind(state, tensors);
        KVPACK_TRY(prepare(kvpack_vqkv_prepared, kvpack_vqkv_prepare, state, step.stream));
        step.workspace_bytes = kvpack_vqkv_workspace(&layer, &step, &state);
        KVPACK_TRY(scratch.take(context, q.value, step.workspace_bytes));
        step.workspace = scratch.data;
        return checked(kvpack_vqkv_attention(&layer, &step, &state));
      }
      case Kind::DELTAKV: {
        kvpack_deltakv state = deltakv;
        bind(state, tensors);
        KVPACK_TRY(prepare(kvpack_deltakv_prepared, kvpack_deltakv_prepare, state, step.stream));
        step.workspace_bytes = kvpack_deltakv_workspace(&layer, &step, &state);
        KVPACK_TRY(scratch.take(context, q.value, step.workspace_bytes));
        step.workspace = scratch.data;
        return checked(kvpack_deltakv_attention(&layer, &step, &state));
      }
      case Kind::INTKV: {
        kvpack_intkv state = intkv;
        bind(state, tensors);
        step.workspace_bytes = kvpack_intkv_workspace(&layer, &step, &state);
        KVPACK_TRY(scratch.take(context, q.value, step.workspace_bytes));
        step.workspace = scratch.data;
        return checked(kvpack_intkv_attention(&layer, &step, &state));
      }
      default: return nullptr;
    }
  }

 private:
  static std::string numbers(int32_t a, int32_t b, int32_t c) {
    return std::to_string(a) + ", " + std::to_string(b) + " and " + std::to_string(c);
  }
  static std::string shape(const Tensor &x) {
    if (!x.value) return "none";
    std::string all;
    for (int64_t dim : x.dims) all += (all.empty() ? "[" : ", ") + std::to_string(dim);
    return all + "]";
  }

  // q, k and v, each a tensor or side by side in q.
  OrtStatus *bind(kvpack_step &step, const Tensors &tensors) {
    const Tensor &q = tensors["q"], &k = tensors["k"], &v = tensors["v"];
    const int32_t query = layer.num_heads * layer.head_dim, kv = layer.num_kv_heads * layer.head_dim;
    const bool packed = !k.value && !v.value;
    const auto fits = [&](const Tensor &x, int32_t size) {
      return x.dims == std::vector<int64_t>{q.dim(0), q.dim(1), size};
    };
    if (!(packed ? fits(q, query + 2 * kv) : fits(q, query) && fits(k, kv) && fits(v, kv)))
      return failed((op.name + " takes q, k and v [batch, length, size] of sizes " + numbers(query, kv, kv) +
                     ", or all three in q of size " + std::to_string(query + 2 * kv) + ", and was given " +
                     shape(q) + ", " + shape(k) + " and " + shape(v)).c_str());
    step.batch = q.dim(0), step.length = q.dim(1);
    step.q = q.data, step.k = k.data, step.v = v.data;
    if (!packed) return nullptr;
    const uint16_t *all = static_cast<const uint16_t *>(q.data);
    step.k = all + query, step.v = all + query + kv;
    step.q_row = step.kv_row = query + 2 * kv;
    return nullptr;
  }

  OrtStatus *bind(kvpack_dense &state, Tensors &tensors, int64_t batch) {
    point(state.k, tensors["state_k"]);
    point(state.v, tensors["state_v"]);
    state.rows = tensors["state_k"].dim(2);
    if (op.output("selected") < 0) return nullptr;
    point(state.select_len, tensors["select_len"]);
    state.select_width = *static_cast<const int32_t *>(tensors["select_width"].data);
    void *selected;
    KVPACK_TRY(tensors.output("selected", {batch, state.select_width}, &selected));
    state.selected = static_cast<int32_t *>(selected);
    return nullptr;
  }

  void bind(kvpack_vqkv &state, const Tensors &tensors) {
    point(state.ring_k, tensors["ring_k"]);
    point(state.ring_v, tensors["ring_v"]);
    point(state.codes_k, tensors["codes_k"]);
    point(state.codes_v, tensors["codes_v"]);
    state.code_rows = tensors["codes_k"].dim(2) * (state.layout == KVPACK_TILES ? TILE_ROWS : 1);
    point(state.k_books, tensors["k_books"]);
    point(state.k_encode, tensors["k_encode"]);
    point(state.k_decode, tensors["k_decode"]);
    point(state.k_mean, tensors["k_mean"]);
    point(state.v_books, tensors["v_books"]);
    point(state.v_encode, tensors["v_encode"]);
    point(state.v_decode, tensors["v_decode"]);
    point(state.v_mean, tensors["v_mean"]);
  }

  void bind(kvpack_deltakv &state, const Tensors &tensors) {
    point(state.ring, tensors["ring"]);
    point(state.latents, tensors["latents"]);
    point(state.scales, tensors["scales"]);
    point(state.index, tensors["index"]);
    point(state.references, tensors["references"]);
    point(state.reference_scales, tensors["reference_scales"]);
    state.code_rows = tensors["latents"].dim(2), state.ref_rows = tensors["references"].dim(2);
    point(state.selected, tensors["selected"]);
    point(state.select_len, tensors["select_len"]);
    if (state.selects && !state.selected) state.selected = state.select_len;  // of no columns, yet not "all rows"
    state.select_width = tensors["selected"].dim(1);
    point(state.center, tensors["center"]);
    point(state.compress, tensors["compress"]);
    point(state.decompress, tensors["decompress"]);
    point(state.gate, tensors["gate"]);
    point(state.up, tensors["up"]);
    point(state.down, tensors["down"]);
  }

  void bind(kvpack_intkv &state, const Tensors &tensors) {
    point(state.ring_k, tensors["ring_k"]);
    point(state.ring_v, tensors["ring_v"]);
    point(state.codes_k, tensors["codes_k"]);
    point(state.codes_v, tensors["codes_v"]);
    point(state.scales_k, tensors["scales_k"]);
    point(state.zeros_k, tensors["zeros_k"]);
    point(state.scales_v, tensors["scales_v"]);
    point(state.zeros_v, tensors["zeros_v"]);
    state.code_rows = tensors["codes_k"].dim(2), state.scale_rows = tensors["scales_k"].dim(2);
    point(state.center, tensors["center"]);
  }

  // The tables in the kernels' own form, made in the node's first step, which is never part of a captured graph.
  template <class State>
  OrtStatus *prepare(size_t (*size)(const kvpack_layer *, const State *),
                     int (*make)(const kvpack_layer *, const State *, void *, void *), State &state, void *stream) {
    std::lock_guard<std::mutex> lock(preparing);
    const size_t bytes = prepared ? 0 : size(&layer, &state);
    if (bytes) {
      void *made;
      KVPACK_TRY(allocate(&made, bytes));
      OrtStatus *status = checked(make(&layer, &state, made, stream));
      if (!status) status = finish(stream);  // other streams may read them from now on
      if (status) return release(made), status;
      prepared = made;
    }
    state.prepared = prepared;
    return nullptr;
  }
};

// Lets K, made from an Op, be the kernel of an op's nodes.
template <class K> void run_by(OrtCustomOp &op) {
  op.CreateKernelV2 = [](const OrtCustomOp *op, const OrtApi *, const OrtKernelInfo *info,
                         void **kernel) -> OrtStatus * {
    auto made = std::make_unique<K>(*static_cast<const Op *>(op));
    KVPACK_TRY(made->configure(info));
    *kernel = made.release();
    return nullptr;
  };
  op.KernelComputeV2 = [](void *kernel, OrtKernelContext *context) {
    return static_cast<K *>(kernel)->compute(context);
  };
  op.KernelDestroy = [](void *kernel) { delete static_cast<K *>(kernel); };
}

Op::Op(Kind kind, const char *name, Type type) : OrtCustomOp{}, kind(kind), name(name), type(type) {
  version = API_VERSION;
  GetName = [](const OrtCustomOp *op) { return static_cast<const Op *>(op)->name.c_str(); };
  GetExecutionProviderType = [](const OrtCustomOp *) { return PROVIDER; };
  GetInputTypeCount = [](const OrtCustomOp *op) { return static_cast<const Op *>(op)->inputs.size(); };
  GetInputType = [](const OrtCustomOp *op, size_t n) { return static_cast<const Op *>(op)->inputs[n].type; };
  GetOutputTypeCount = [](const OrtCustomOp *op) { return static_cast<const Op *>(op)->outputs.size(); };
  GetOutputType = [](const OrtCustomOp *op, size_t n) { return static_cast<const Op *>(op)->outputs[n].type; };
  GetInputCharacteristic = [](const OrtCustomOp *op, size_t n) {
    return static_cast<const Op *>(op)->inputs[n].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  };
  GetOutputCharacteristic = [](const OrtCustomOp *op, size_t n) {
    return static_cast<const Op *>(op)->outputs[n].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  };
  GetInputMemoryType = [](const OrtCustomOp *op, size_t n) {
    return static_cast<const Op *>(op)->inputs[n].host ? OrtMemTypeCPUInput : OrtMemTypeDefault;
  };
  GetVariadicInputMinArity = GetVariadicOutputMinArity = [](const OrtCustomOp *) { return 1; };
  GetVariadicInputHomogeneity = GetVariadicOutputHomogeneity = [](const OrtCustomOp *) { return 1; };
  GetStartVersion = [](const OrtCustomOp *) { return 1; };
  GetEndVersion = [](const OrtCustomOp *) { return 1; };
  if (kind == Kind::ADD_RMS_NORM) run_by<AddRMSNormalization>(*this);
  else if (kind == Kind::GATED_ACTIVATION) run_by<GatedActivation>(*this);
  else run_by<Attention>(*this);
}

// -- the list of them

void add_common(Op &op) {
  op.add({"q"}, op.type);
  op.add({"k", "v"}, op.type, true);
  op.outputs.push_back({"out", op.type});
}

void add_lengths(Op &op, bool optional = false) {
  op.add({"past_len", "new_len"}, INT32, optional);
  op.add_host("live", optional);
}

std::unique_ptr<Op> dense(Type type, bool observed) {
  auto op = std::make_unique<Op>(Kind::DENSE, observed ? "DenseObservedAttention" : "DenseAttention", type);
  add_common(*op);
  op->add_states({"state_k", "state_v"}, type);
  add_lengths(*op);
  op->add({"cos", "sin"}, FLOAT, true);
  if (observed) {
    op->add({"select_len"}, INT32);
    op->add_host("select_width");
    op->outputs.push_back({"selected", INT32});
  }
  return op;
}

std::unique_ptr<Op> vqkv(Type type) {
  auto op = std::make_unique<Op>(Kind::VQKV, "VQKVAttention", type);
  add_common(*op);
  op->add_states({"ring_k", "ring_v"}, type);
  op->add_states({"codes_k", "codes_v"}, INT8);
  add_lengths(*op);
  op->add({"enc_src", "enc_dst"}, INT32);
  op->add({"cos", "sin"}, FLOAT, true);
  op->add({"k_books", "k_encode", "k_decode", "k_mean", "v_books", "v_encode", "v_decode", "v_mean"}, FLOAT);
  return op;
}

std::unique_ptr<Op> intkv(Type type) {
  auto op = std::make_unique<Op>(Kind::INTKV, "IntKVAttention", type);
  add_common(*op);
  op->add_states({"ring_k", "ring_v"}, type);
  op->add_states({"codes_k"}, INT8);
  op->add_states({"scales_k", "zeros_k"}, type);
  op->add_states({"codes_v"}, INT8);
  op->add_states({"scales_v", "zeros_v"}, type);
  add_lengths(*op);
  op->add({"enc_src", "enc_dst"}, INT32);
  op->add({"cos", "sin", "center"}, FLOAT, true);
  return op;
}

// Its states depend on the configuration, so that a place in the list means one thing or another; all signatures of a
// name must have as many inputs and outputs, the same of them optional.
std::unique_ptr<Op> deltakv(Type type, bool coded, Type index, bool raw_references, bool selects) {
  constexpr size_t INPUTS = 24, OUTPUTS = 7;
  auto op = std::make_unique<Op>(Kind::DELTAKV, "DeltaKVAttention", type);
  add_common(*op);
  op->add_states({"ring"}, type, true);
  op->add_states({"latents"}, coded ? INT8 : type, true);
  if (coded) op->add_states({"scales"}, type, true);
  op->add_states({"index"}, index, true);
  op->add_states({"references"}, raw_references ? type : INT8, true);
  if (!raw_references) op->add_states({"reference_scales"}, type, true);
  add_lengths(*op, true);
  op->add({"enc_src", "enc_dst"}, INT32, true);
  if (selects) op->add({"selected", "select_len"}, INT32, true);
  op->add({"cos", "sin", "center", "compress", "decompress", "gate", "up", "down"}, FLOAT, true);
  while (op->inputs.size() < INPUTS) op->inputs.push_back({"", FLOAT, true});
  while (op->outputs.size() < OUTPUTS) op->outputs.push_back({"", FLOAT, true});
  return op;
}

std::unique_ptr<Op> add_rms_norm(Type type) {
  auto op = std::make_unique<Op>(Kind::ADD_RMS_NORM, "AddRMSNormalization", type);
  op->add({"x", "y", "weight"}, type);
  op->outputs = {{"sum", type}, {"out", type}};
  return op;
}

std::unique_ptr<Op> gated_activation(Type type) {
  auto op = std::make_unique<Op>(Kind::GATED_ACTIVATION, "GatedActivation", type);
  op->add({"x"}, type);
  op->outputs = {{"out", type}};
  return op;
}

const std::vector<std::unique_ptr<Op>> &ops() {
  static const std::vector<std::unique_ptr<Op>> all = [] {
    std::vector<std::unique_ptr<Op>> found;
    for (Type type : {HALF, BFLOAT16}) {
      for (bool observed : {false, true}) found.push_back(dense(type, observed));
      found.push_back(vqkv(type));
      found.push_back(intkv(type));
      found.push_back(add_rms_norm(type));
      found.push_back(gated_activation(type));
      for (bool coded : {true, false})
        for (Type index : {INT16, INT32})
          for (bool raw_references : {true, false})
            for (bool selects : {false, true}) found.push_back(deltakv(type, coded, index, raw_references, selects));
    }
    return found;
  }();
  return all;
}

}  // namespace kvpack::ort

// What `SessionOptions.register_custom_ops_library` calls. The domain lives as long as the process.
extern "C" KVPACK_API OrtStatus *ORT_API_CALL RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  using namespace kvpack::ort;
  static std::mutex once;
  static OrtCustomOpDomain *domain = nullptr;
  std::lock_guard<std::mutex> lock(once);
  if (!api) api = base->GetApi(API_VERSION);
  if (!api) return base->GetApi(1)->CreateStatus(ORT_FAIL, "kvpack's operators need ONNX Runtime 1.18 or newer");
  if (!domain) {
    OrtCustomOpDomain *made;
    KVPACK_TRY(api->CreateCustomOpDomain("kvpack", &made));
    for (const std::unique_ptr<Op> &op : ops()) KVPACK_TRY(api->CustomOpDomain_Add(made, op.get()));
    domain = made;
  }
  return api->AddCustomOpDomain(options, domain);
}
