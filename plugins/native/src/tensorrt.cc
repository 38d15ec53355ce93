// The ops of the domain "kvpack" as TensorRT plugins (IPluginV3) of the namespace "kvpack", over the C functions of
// kvpack.h. A library with this in it is for IPluginRegistry::loadLibrary.
//
// A plugin's inputs are the op's in their order, absent ones null, without the numbers that the host reads: those are
// shape inputs. `live`, read in steps of many tokens alone, is taken to be what the states have room for; select_width
// is the last shape input, and the second dimension of `selected`. int16 indices of DeltaKV, which TensorRT has not,
// are int8 of twice the columns, or int32. Every state's output is an alias of its input; where TensorRT gives it
// memory of its own, the state is copied first.
#include "tensorrt.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace kvpack::trt {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginTensorDesc;

constexpr const char *NAMESPACE = "kvpack", *VERSION = "1";
constexpr int32_t OK = 0, FAILED = 1;
constexpr size_t ALIGNMENT = 256;  // of a workspace

#if NV_TENSORRT_MAJOR * 100 + NV_TENSORRT_MINOR < 1003
#error "kvpack's plugins need TensorRT 10.3 or newer, whose plugins may write their inputs"
#endif

// The op of a node; its 16-bit tensors are of q's type.
Signature signature(const Node &node) {
  switch (node.kind) {
    case Kind::DENSE: return dense(Type::HALF, node.observed);
    case Kind::VQKV: return vqkv(Type::HALF);
    case Kind::INTKV: return intkv(Type::HALF);
    case Kind::ADD_RMS_NORM: return add_rms_norm(Type::HALF);
    case Kind::GATED_ACTIVATION: return gated_activation(Type::HALF);
    default: {
      const auto &s = std::get<kvpack_deltakv>(node.state);
      return deltakv(Type::HALF, s.latent_bits[0] != 16, Type::INT32, s.reference_bits == 16, s.selects);
    }
  }
}

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  explicit Plugin(const Node &node) : node_(node), op_(signature(node)) {
    for (const Port &port : op_.inputs)
      if (!port.host) inputs_.push_back(port);
  }
  Plugin(const Plugin &) = delete;
  Plugin &operator=(const Plugin &) = delete;
  ~Plugin() override {
    if (prepared_) release(prepared_);
  }

  // -- what it is

  nvinfer1::IPluginCapability *getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore *>(this);
      case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2 *>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime *>(this);
    }
    return nullptr;
  }
  nvinfer1::IPluginV3 *clone() noexcept override {
    return guarded<nvinfer1::IPluginV3 *>(nullptr, [&] { return new Plugin(node_); });
  }
  const char *getPluginName() const noexcept override { return op_.name.c_str(); }
  const char *getPluginVersion() const noexcept override { return VERSION; }
  const char *getPluginNamespace() const noexcept override { return NAMESPACE; }
  const PluginFieldCollection *getFieldsToSerialize() noexcept override {
    return guarded<const PluginFieldCollection *>(nullptr, [&] {
      FieldWriter writer;
      node_.visit(writer);
      fields_ = std::move(writer.fields);
      collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
      return &collection_;
    });
  }

  // -- building

  int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(op_.outputs.size()); }

  int32_t getAliasedInput(int32_t output) noexcept override {
    return guarded(-1, [&] { return output < 0 || output >= getNbOutputs() ? -1 : state_of(output); });
  }

  int32_t configurePlugin(const DynamicPluginTensorDesc *in, int32_t inputs, const DynamicPluginTensorDesc *,
                          int32_t outputs) noexcept override {
    return guarded(FAILED, [&] {
      expect(inputs, outputs);
      Node node = node_;
      set_type(node, in[0].desc.type);
      if (node.attends()) check(node.supported());
      return OK;
    });
  }

  int32_t getOutputDataTypes(DataType *types, int32_t outputs, const DataType *given,
                             int32_t inputs) const noexcept override {
    return guarded(FAILED, [&] {
      expect(inputs, outputs);
      for (int32_t n = 0; n < outputs; ++n) {
        const int32_t state = state_of(n);
        types[n] = state >= 0 ? given[state] : element(op_.outputs[n].type, given[0]);
      }
      return OK;
    });
  }

  int32_t getOutputShapes(const DimsExprs *in, int32_t inputs, const DimsExprs *numbers, int32_t count, DimsExprs *out,
                          int32_t outputs, nvinfer1::IExprBuilder &builder) noexcept override {
    return guarded(FAILED, [&] {
      expect(inputs, outputs);
      for (int32_t n = 0; n < outputs; ++n) out[n] = in[std::max(state_of(n), 0)];
      if (node_.kind == Kind::GATED_ACTIVATION) {
        if (in[0].nbDims < 1) throw Refused("GatedActivation takes no scalar");
        auto &last = out[0].d[in[0].nbDims - 1];
        last = builder.operation(nvinfer1::DimensionOperation::kFLOOR_DIV, *last, *builder.constant(2));
      }
      if (!node_.attends()) return OK;
      if (in[0].nbDims != 3) throw Refused(op_.name + " takes q [batch, length, size]");
      out[0].d[2] = builder.constant(node_.query_size());
      if (node_.observed) {
        if (count < 1 || numbers[count - 1].nbDims != 1)
          throw Refused(op_.name + " needs the shape input select_width");
        DimsExprs &selected = out[op_.output("selected")];
        selected.nbDims = 2;
        selected.d[0] = in[0].d[0], selected.d[1] = numbers[count - 1].d[0];
      }
      return OK;
    });
  }

  bool supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc *tensors, int32_t inputs,
                                 int32_t outputs) noexcept override {
    return guarded(false, [&] {
      expect(inputs, outputs);
      if (at < 0 || at >= inputs + outputs) return false;
      const bool is_input = at < inputs;
      const Port &port = is_input ? inputs_[at] : op_.outputs[at - inputs];
      if (is_input && !present(at, last_of(tensors[0].desc.dims))) return true;  // a null input has no type
      const PluginTensorDesc &desc = tensors[at].desc;
      if (desc.format != nvinfer1::TensorFormat::kLINEAR) return false;
      const DataType half = tensors[0].desc.type;
      if (half != DataType::kHALF && half != DataType::kBF16) return false;
      const int32_t state = is_input ? -1 : state_of(at - inputs);
      if (state >= 0) return desc.type == tensors[state].desc.type;
      return desc.type == element(port.type, half) || (port.name == "index" && desc.type == DataType::kINT8);
    });
  }

  size_t getWorkspaceSize(const DynamicPluginTensorDesc *in, int32_t inputs, const DynamicPluginTensorDesc *out,
                          int32_t outputs) const noexcept override {
    return guarded<size_t>(0, [&]() -> size_t {
      expect(inputs, outputs);
      if (!node_.attends()) return 0;
      Tensors tensors(inputs_);
      for (int32_t n = 0; n < inputs; ++n)
        if (present(n, last_of(in[0].max))) tensors.set(n, in[n].max, nullptr);
      Call call = bind(tensors, in[0].desc.type, 0);
      int32_t selected;  // an address that is not read
      if (node_.observed)
        call.observe(tensors, static_cast<int32_t>(out[op_.output("selected")].max.d[1]), &selected);
      const size_t many = call.workspace();
      call.step.length = 1;  // any size up to the largest may come, and one token takes another path
      return std::max(many, call.workspace()) + ALIGNMENT;
    });
  }

  // -- running

  nvinfer1::IPluginV3 *attachToContext(nvinfer1::IPluginResourceContext *) noexcept override { return clone(); }

  int32_t onShapeChange(const PluginTensorDesc *in, int32_t inputs, const PluginTensorDesc *,
                        int32_t outputs) noexcept override {
    return guarded(FAILED, [&] {
      expect(inputs, outputs);
      given_ = inputs;
      if (!node_.attends() || prepared_) return OK;
      Node node = node_;
      set_type(node, in[0].type);
      if (const size_t bytes = Call(node).prepared()) check(allocate(&prepared_, bytes));
      return OK;
    });
  }

  int32_t enqueue(const PluginTensorDesc *in, const PluginTensorDesc *out, const void *const *data,
                  void *const *results, void *workspace, cudaStream_t stream) noexcept override {
    return guarded(FAILED, [&] {
      if (!given_) throw Refused("the plugin was not told any shapes");
      Tensors tensors(inputs_);
      for (int32_t n = 0; n < given_; ++n)
        if (present(n, last_of(in[0].dims))) tensors.set(n, in[n].dims, const_cast<void *>(data[n]));
      if (!node_.attends()) return between(tensors, in[0].type, results, stream);
      for (int32_t n = 0; n < getNbOutputs(); ++n) {
        const int32_t state = state_of(n);
        if (state < 0 || !results[n] || results[n] == data[state]) continue;
        Tensor &tensor = tensors.at(state);
        const Type type = in[state].type == DataType::kINT8 ? Type::INT8 : inputs_[state].type;
        check(copy(results[n], data[state], tensor.bytes(type), stream));
        tensor.data = results[n];
      }
      Call call = bind(tensors, in[0].type, in[index_at()].type == DataType::kINT8 ? 2 : 4);
      call.step.stream = stream;
      call.step.out = results[0];
      if (node_.observed) {
        const int32_t selected = op_.output("selected");
        call.observe(tensors, static_cast<int32_t>(out[selected].dims.d[1]), results[selected]);
      }
      prepare(call, tensors);
      const size_t past = reinterpret_cast<uintptr_t>(workspace) % ALIGNMENT;
      call.step.workspace = static_cast<char *>(workspace) + (past ? ALIGNMENT - past : 0);
      call.step.workspace_bytes = call.workspace();
      check(call.attend(prepared_));
      return OK;
    });
  }

 private:
  static int64_t last_of(const nvinfer1::Dims &dims) {
    return dims.nbDims < 1 || dims.nbDims > nvinfer1::Dims::MAX_DIMS ? 0 : dims.d[dims.nbDims - 1];
  }
  static void set_type(Node &node, DataType type) {
    if (type != DataType::kHALF && type != DataType::kBF16) throw Refused("kvpack computes in fp16 and bf16 alone");
    node.layer.dtype = type == DataType::kHALF ? KVPACK_FP16 : KVPACK_BF16;
  }

  // Whether the node has input n, by its attributes and the last dimension of q: TensorRT does not say of a null input.
  bool present(size_t n, int64_t size) const {
    const std::string &name = inputs_[n].name;
    if (name == "k" || name == "v") return size != node_.query_size() + 2 * node_.kv_size();
    if (name == "cos" || name == "sin") return node_.layer.rotary_dim > 0;
    if (const auto *s = std::get_if<kvpack_intkv>(&node_.state); s && name == "center") return s->mean;
    if (name == "gate" || name == "up" || name == "down") return std::get<kvpack_deltakv>(node_.state).hidden > 0;
    return true;
  }
  // The input that an output is the new state of; -1: none.
  int32_t state_of(int32_t output) const {
    const std::string &name = op_.outputs[output].name;
    for (size_t n = 0; n < inputs_.size(); ++n)
      if (name == inputs_[n].name + "_out") return static_cast<int32_t>(n);
    return -1;
  }
  size_t index_at() const {
    for (size_t n = 0; n < inputs_.size(); ++n)
      if (inputs_[n].name == "index") return n;
    return 0;
  }
  // Throws unless there are that many; only inputs at the end of the list that the node does not have may be left out.
  void expect(int32_t inputs, int32_t outputs) const {
    const int32_t most = static_cast<int32_t>(inputs_.size());
    bool enough = inputs > 0 && inputs <= most && outputs == getNbOutputs();
    for (int32_t n = std::max(inputs, 0); enough && n < most; ++n) enough = !present(n, 0);
    if (!enough)
      throw Refused(op_.name + " has " + std::to_string(most) + " inputs beside shape inputs and " +
                    std::to_string(getNbOutputs()) + " outputs, not " + std::to_string(inputs) + " and " +
                    std::to_string(outputs));
  }

  Call bind(const Tensors &tensors, DataType type, int32_t index_bytes) const {
    Node node = node_;
    set_type(node, type);
    if (auto *s = std::get_if<kvpack_deltakv>(&node.state); s && index_bytes) s->index_bytes = index_bytes;
    Call call(node);
    check(call.bind(node, op_.name, tensors));
    for (const Port &port : inputs_) {  // all but tables have a row for each sequence
      const Tensor &tensor = tensors[port.name.c_str()];
      if (port.type != Type::FLOAT && tensor.given && tensor.dim(0) != call.step.batch)
        throw Refused(op_.name + " takes as many sequences in " + port.name + " as in q, " +
                      std::to_string(call.step.batch) + ", and was given " + tensor.shape());
    }
    if (tensors["enc_src"].dims != tensors["enc_dst"].dims) throw Refused("enc_src and enc_dst differ in shape");
    const int64_t live = std::visit([](const auto &s) { return room(s); }, call.state);
    call.step.live = static_cast<int32_t>(std::min<int64_t>(live, INT_MAX - call.step.length));
    return call;
  }
  // Tokens that a sequence can have stored.
  static int64_t room(const kvpack_dense &s) { return s.rows; }
  template <class S> static int64_t room(const S &s) {
    return int64_t(s.geometry.sinks) + s.geometry.window + s.geometry.block + s.code_rows;
  }

  // The tables in the kernels' own form: launched before the first step, and again should the tables have moved.
  void prepare(Call &call, const Tensors &tensors) {
    if (!prepared_) return;
    std::vector<const void *> sources;
    for (const Port &port : inputs_)
      if (port.type == Type::FLOAT) sources.push_back(tensors[port.name.c_str()].data);
    if (sources == sources_) return;
    sources_.clear();
    check(call.prepare(prepared_));
    sources_ = std::move(sources);
  }

  // A step of what lies between attentions.
  int32_t between(const Tensors &tensors, DataType type, void *const *results, void *stream) const {
    Node node = node_;
    set_type(node, type);
    std::vector<int64_t> dims;
    check(fits(node, tensors, dims));
    check(run(node, tensors, results, stream));
    return OK;
  }

  Node node_;
  const Signature op_;
  std::vector<Port> inputs_;  // without shape inputs
  std::vector<nvinfer1::PluginField> fields_;
  PluginFieldCollection collection_{};
  int32_t given_ = 0;  // inputs of the node in this network
  void *prepared_ = nullptr;
  std::vector<const void *> sources_;  // of which the tables in there were made
};

class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit Creator(Kind kind, bool observed = false) : node_(kind, observed), name_(signature(node_).name) {
    FieldWriter writer;
    node_.visit(writer);
    fields_ = std::move(writer.fields);
    for (nvinfer1::PluginField &field : fields_) field.data = nullptr, field.length = 1;
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  const char *getPluginName() const noexcept override { return name_.c_str(); }
  const char *getPluginVersion() const noexcept override { return VERSION; }
  const char *getPluginNamespace() const noexcept override { return NAMESPACE; }
  const PluginFieldCollection *getFieldNames() noexcept override { return &collection_; }

  nvinfer1::IPluginV3 *createPlugin(const char *, const PluginFieldCollection *fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    return guarded<nvinfer1::IPluginV3 *>(nullptr, [&] {
      Node node(node_.kind, node_.observed);
      FieldReader reader(fields);
      check(node.visit(reader));
      reader.finish();
      if (auto *s = std::get_if<kvpack_deltakv>(&node.state)) s->index_bytes = sizeof(int32_t);
      if (node.attends()) check(node.supported());
      return new Plugin(node);
    });
  }

 private:
  Node node_;  // what fields_ points to
  const std::string name_;
  std::vector<nvinfer1::PluginField> fields_;
  PluginFieldCollection collection_{};
};

}  // namespace kvpack::trt

// What IPluginRegistry::loadLibrary calls.
extern "C" KVPACK_API void setLoggerFinder(nvinfer1::ILoggerFinder *finder) { kvpack::trt::logger_finder = finder; }

extern "C" KVPACK_API nvinfer1::IPluginCreatorInterface *const *getCreators(int32_t &count) {
  using namespace kvpack;
  static trt::Creator dense(Kind::DENSE), observed(Kind::DENSE, true), vqkv(Kind::VQKV), deltakv(Kind::DELTAKV),
      intkv(Kind::INTKV), norm(Kind::ADD_RMS_NORM), gate(Kind::GATED_ACTIVATION);
  static nvinfer1::IPluginCreatorInterface *const all[] = {&dense, &observed, &vqkv, &deltakv, &intkv, &norm, &gate};
  count = sizeof(all) / sizeof(all[0]);
  return all;
}
