// The ops of the ONNX domain "kvpack" for ONNX Runtime, over the C functions of kvpack.h.
//
// A node's attributes fill the fixed part of the op's structures when its kernel is made; a step fills in addresses and
// sizes and calls the library on the provider's stream. State inputs and outputs are meant to be bound to one buffer;
// where they are not, the state is copied first. With KVPACK_EMULATE the ops run on a CPU, as the kernels do.
#include "ort.h"

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace kvpack::ort {

// -- one kernel: a node of a loaded model

struct Attention {
  const Op &op;
  Node node;
  std::mutex preparing;
  void *prepared = nullptr;

  explicit Attention(const Op &op) : op(op), node(op.kind, op.output("selected") >= 0) {}
  ~Attention() {
    if (prepared) release(prepared);
  }

  OrtStatus *configure(const OrtKernelInfo *info) {
    KVPACK_TRY(read(info, node));
    node.layer.dtype = op.dtype();
    if (auto *deltakv = std::get_if<kvpack_deltakv>(&node.state))
      deltakv->index_bytes = static_cast<int32_t>(size_of(op.inputs[op.input("index")].type));
    return told(node.supported());
  }

  OrtStatus *compute(OrtKernelContext *context) {
    Tensors tensors(op, context);
    KVPACK_TRY(tensors.load());
    Call call(node);
    kvpack_step &step = call.step;
    KVPACK_TRY(stream_of(context, &step.stream));
    KVPACK_TRY(tensors.renew_states(step.stream));
    KVPACK_TRY(told(call.bind(node, op.name, tensors)));
    step.live = *static_cast<const int32_t *>(tensors["live"].data);
    KVPACK_TRY(tensors.output("out", {step.batch, step.length, node.query_size()}, &step.out));
    if (node.observed) {
      const int32_t width = *static_cast<const int32_t *>(tensors["select_width"].data);
      void *selected;
      KVPACK_TRY(tensors.output("selected", {step.batch, width}, &selected));
      call.observe(tensors, width, selected);
    }
    KVPACK_TRY(prepare(call));
    Scratch scratch;
    step.workspace_bytes = call.workspace();
    KVPACK_TRY(scratch.take(context, tensors.value("q"), step.workspace_bytes));
    step.workspace = scratch.data;
    return told(call.attend(prepared));
  }

 private:
  // The tables in the kernels' own form, made in the node's first step, which is never part of a captured graph.
  OrtStatus *prepare(Call &call) {
    std::lock_guard<std::mutex> lock(preparing);
    const size_t bytes = prepared ? 0 : call.prepared();
    if (!bytes) return nullptr;
    void *made;
    KVPACK_TRY(told(allocate(&made, bytes)));
    std::string sentence = call.prepare(made);
    if (sentence.empty()) sentence = finish(call.step.stream);  // other streams may read them from now on
    if (!sentence.empty()) return release(made), failed(sentence);
    prepared = made;
    return nullptr;
  }
};

struct Between {  // what lies between attentions
  const Op &op;
  Node node;

  explicit Between(const Op &op) : op(op), node(op.kind) {}

  OrtStatus *configure(const OrtKernelInfo *info) {
    node.layer.dtype = op.dtype();
    return read(info, node);
  }

  OrtStatus *compute(OrtKernelContext *context) {
    Tensors tensors(op, context);
    KVPACK_TRY(tensors.load());
    void *stream;
    KVPACK_TRY(stream_of(context, &stream));
    std::vector<int64_t> dims;
    KVPACK_TRY(told(fits(node, tensors, dims)));
    std::vector<void *> outputs(op.outputs.size());
    for (size_t n = 0; n < outputs.size(); ++n)
      KVPACK_TRY(tensors.output(op.outputs[n].name.c_str(), dims, &outputs[n]));
    return told(run(node, tensors, outputs.data(), stream));
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

Op::Op(Signature signature) : OrtCustomOp{}, Signature(std::move(signature)) {
  version = API_VERSION;
  GetName = [](const OrtCustomOp *op) { return static_cast<const Op *>(op)->name.c_str(); };
  GetExecutionProviderType = [](const OrtCustomOp *) { return PROVIDER; };
  GetInputTypeCount = [](const OrtCustomOp *op) { return static_cast<const Op *>(op)->inputs.size(); };
  GetInputType = [](const OrtCustomOp *op, size_t n) { return element(static_cast<const Op *>(op)->inputs[n].type); };
  GetOutputTypeCount = [](const OrtCustomOp *op) { return static_cast<const Op *>(op)->outputs.size(); };
  GetOutputType = [](const OrtCustomOp *op, size_t n) { return element(static_cast<const Op *>(op)->outputs[n].type); };
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
  if (Node(kind).attends()) run_by<Attention>(*this);
  else run_by<Between>(*this);
}

// -- the list of them

// All signatures of a name must have as many inputs and outputs, the same of them optional.
Signature filled(Signature op) {
  constexpr size_t INPUTS = 24, OUTPUTS = 7;
  while (op.inputs.size() < INPUTS) op.inputs.push_back({"", Type::FLOAT, true});
  while (op.outputs.size() < OUTPUTS) op.outputs.push_back({"", Type::FLOAT, true});
  return op;
}

const std::vector<std::unique_ptr<Op>> &ops() {
  static const std::vector<std::unique_ptr<Op>> all = [] {
    std::vector<std::unique_ptr<Op>> found;
    const auto add = [&](Signature op) { found.push_back(std::make_unique<Op>(std::move(op))); };
    for (Type type : {Type::HALF, Type::BFLOAT16}) {
      for (bool observed : {false, true}) add(dense(type, observed));
      add(vqkv(type));
      add(intkv(type));
      add(add_rms_norm(type));
      add(gated_activation(type));
      for (bool coded : {true, false})
        for (Type index : {Type::INT16, Type::INT32})
          for (bool raw_references : {true, false})
            for (bool selects : {false, true}) add(filled(deltakv(type, coded, index, raw_references, selects)));
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
