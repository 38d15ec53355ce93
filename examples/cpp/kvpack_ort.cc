// A host of kvpack engines on ONNX Runtime: prefills, decodes with the compressed cache in place, prints token ids.
#include "cuda.hpp"
#include "onnx_external.hpp"
#include "program.hpp"

#include <onnxruntime_cxx_api.h>

namespace kvpack {
namespace {

constexpr const char *MODEL = "model.onnx";

ONNXTensorElementDataType element(const std::string &dtype) {
  static const std::map<std::string, ONNXTensorElementDataType> types{
      {"float32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},     {"float16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},
      {"bfloat16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}, {"int8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},
      {"int16", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16},       {"int32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
      {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64}};
  return types.at(dtype);
}

struct Settings {
  bool cuda = false;
  std::string library;  // native kernels
  int64_t threads = 0;
};

class OnnxRuntime : public Backend {
 public:
  OnnxRuntime(const Artefact &artefact, const Settings &settings) : artefact_(artefact) {
    if (artefact.backend() != "onnxruntime" || !artefact.has_file(MODEL))
      throw Error(artefact.path.string() + " is an engine for '" + artefact.backend() +
                  "', not for ONNX Runtime: " + Artefact::REBUILD + " for onnxruntime.");
    const OrtApi *api = OrtGetApiBase()->GetApi(ORT_API_VERSION);
    version_ = OrtGetApiBase()->GetVersionString();
    if (!api)
      throw Error("ONNX Runtime " + version_ +
                  " is older than the headers that this program was compiled with: use 1." +
                  std::to_string(ORT_API_VERSION) + " or newer.");
    Ort::InitApi(api);
    for (const char *key : {"dtype", "kv_dtype"})
      if (!settings.cuda && artefact.config.at(key).text == "bf16")
        throw Error(artefact.path.string() +
                    " computes in bf16, which ONNX Runtime cannot do on a CPU: use --provider "
                    "cuda, or build it with --dtype fp16.");
    ExternalData::check(artefact, MODEL);
    try {
      load(settings);
    } catch (const Ort::Exception &error) {
      throw Error("ONNX Runtime " + version_ + " cannot load " + (artefact.path / MODEL).string() + " (" +
                  reason(error) + "): " + Artefact::REBUILD + ".");
    }
  }

  Memory &memory() override { return *memory_; }
  std::string name() const override { return name_; }

  void run(const Step &step, const State &state, float *logits) override {
    try {
      if (state.place() != bound_) bind(state);
      const auto values = inputs(step);
      for (const auto &[name, value] : values) binding_->BindInput(name.c_str(), value);
      const Dims dims{step.batch, 1, artefact_.vocab_size};
      const auto count = static_cast<size_t>(product(dims));
      binding_->BindOutput(artefact_.logits().c_str(),
                           Ort::Value::CreateTensor<float>(*host_, logits, count, dims.data(), 3));
      session_->Run(Ort::RunOptions{nullptr}, *binding_);
      binding_->SynchronizeOutputs();
    } catch (const Ort::Exception &error) {
      throw Error("ONNX Runtime: " + reason(error));
    }
  }

 private:
  const Artefact &artefact_;
  std::string version_, name_;
  std::unique_ptr<Ort::Env> env_;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<Ort::Session> session_;
  std::unique_ptr<Ort::IoBinding> binding_;
  std::optional<Ort::MemoryInfo> host_, place_;  // of what a step is given, and of the state
  uint64_t bound_ = 0;                           // of the state that is bound

  static std::string reason(const Ort::Exception &error) {
    const std::string text = error.what();
    return text.substr(0, text.find('\n'));
  }

  void load(const Settings &settings) {
    env_ = std::make_unique<Ort::Env>(ORT_LOGGING_LEVEL_ERROR, "kvpack");
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(static_cast<int>(settings.threads));
    // Steps have ever new shapes: an arena would keep the largest prefill, and a pattern per shape, for ever.
    options.DisableCpuMemArena();
    options.DisableMemPattern();
    host_ = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
    name_ = "ONNX Runtime " + version_ + ", CPU";
    if (settings.cuda) {
      const OrtApi &api = Ort::GetApi();
      OrtCUDAProviderOptionsV2 *cuda = nullptr;
      Ort::ThrowOnError(api.CreateCUDAProviderOptions(&cuda));
      const std::unique_ptr<OrtCUDAProviderOptionsV2, decltype(api.ReleaseCUDAProviderOptions)> owned(
          cuda, api.ReleaseCUDAProviderOptions);
      // By default CUDA's arena doubles, and its float32 products have ten bits.
      const char *const keys[] = {"arena_extend_strategy", "use_tf32"}, *const values[] = {"kSameAsRequested", "0"};
      Ort::ThrowOnError(api.UpdateCUDAProviderOptions(cuda, keys, values, 2));
      options.AppendExecutionProvider_CUDA_V2(*cuda);
      if (!settings.library.empty())
        options.RegisterCustomOpsLibrary(std::filesystem::absolute(settings.library).c_str());
      memory_ = std::make_unique<Device>();
      place_ = Ort::MemoryInfo("Cuda", OrtDeviceAllocator, 0, OrtMemTypeDefault);
      name_ =
          "ONNX Runtime " + version_ + ", CUDA, " + (settings.library.empty() ? "function bodies" : "native kernels");
    } else {
      memory_ = std::make_unique<HostMemory>();
      place_ = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
    }
    session_ = std::make_unique<Ort::Session>(*env_, (artefact_.path / MODEL).c_str(), options);
    Ort::AllocatorWithDefaultOptions allocator;
    std::map<std::string, Ort::TypeInfo> found;
    for (size_t n = 0; n < session_->GetInputCount(); ++n)
      found.emplace(session_->GetInputNameAllocated(n, allocator).get(), session_->GetInputTypeInfo(n));
    agree(artefact_.inputs, found);
    found.clear();
    for (size_t n = 0; n < session_->GetOutputCount(); ++n)
      found.emplace(session_->GetOutputNameAllocated(n, allocator).get(), session_->GetOutputTypeInfo(n));
    agree(artefact_.outputs, found);
  }

  /// The graph has the tensors of the contract, and no others, with its dtypes and fixed sizes.
  void agree(const std::vector<TensorSpec> &specs, const std::map<std::string, Ort::TypeInfo> &found) const {
    const auto refuse = [this](const std::string &name) {
      throw Error((artefact_.path / MODEL).string() + " and config.json disagree about the tensor '" + name +
                  "': " + Artefact::REBUILD + ".");
    };
    std::set<std::string> names;
    for (const TensorSpec &spec : specs) {
      names.insert(spec.name);
      const auto node = found.find(spec.name);
      if (node == found.end() || node->second.GetONNXType() != ONNX_TYPE_TENSOR) refuse(spec.name);
      const auto info = node->second.GetTensorTypeAndShapeInfo();
      const Dims shape = info.GetShape();
      if (info.GetElementType() != element(spec.dtype) || shape.size() != spec.shape.size()) refuse(spec.name);
      for (size_t axis = 0; axis < shape.size(); ++axis)  // -1: a symbol
        if (shape[axis] >= 0 && !(spec.shape[axis] == Dim{"", shape[axis]}) && spec.shape[axis].symbol != "vocab")
          refuse(spec.name);
    }
    for (const auto &entry : found)
      if (!names.count(entry.first)) refuse(entry.first);
  }

  /// The state's tensors are inputs and outputs at one address.
  void bind(const State &state) {
    binding_ = std::make_unique<Ort::IoBinding>(*session_);
    for (const State::Tensor &one : state.tensors()) {
      const size_t nbytes = static_cast<size_t>(product(one.dims)) * item_size(one.spec.dtype);
      const Ort::Value value = Ort::Value::CreateTensor(*place_, one.input, nbytes, one.dims.data(), one.dims.size(),
                                                        element(one.spec.dtype));
      binding_->BindInput(one.spec.name.c_str(), value);
      binding_->BindOutput(one.spec.alias.c_str(), value);
    }
    bound_ = state.place();
  }
  /// What the host gives a step, by the inputs' names; the memory stays the step's.
  std::vector<std::pair<std::string, Ort::Value>> inputs(const Step &step) const {
    std::vector<std::pair<std::string, Ort::Value>> made;
    for (const TensorSpec &spec : artefact_.inputs) {
      if (spec.role == "state") continue;
      const Dims dims = step.dims(spec.role);
      made.emplace_back(
          spec.name, Ort::Value::CreateTensor(*host_, const_cast<void *>(step.data(spec.role)), step.nbytes(spec.role),
                                              dims.data(), dims.size(), element(spec.dtype)));
    }
    return made;
  }
};

}  // namespace
}  // namespace kvpack

int main(int argc, char **argv) {
  using namespace kvpack;
  Settings settings;
  const std::vector<Option> own{
      {"--provider", "cpu|cuda", "where to run (default: cpu)",
       [&](auto &v) {
         if (v != "cpu" && v != "cuda") throw Error("unknown provider '" + v + "': use cpu or cuda.");
         settings.cuda = v == "cuda";
       }},
      {"--library", "FILE", "native GPU kernels, what python -m plugins build made, with --provider cuda",
       [&](auto &v) { settings.library = v; }},
      {"--threads", "N", "threads of one step (default: ONNX Runtime's choice)",
       [&](auto &v) {
         settings.threads = numeral<int64_t>(v, "--threads");
         if (settings.threads < 1 || settings.threads > INT_MAX) throw Error("--threads " + v + ": use at least 1.");
       }},
  };
  return run(argc, argv, "Run a kvpack engine on ONNX Runtime.", own, [&](const Artefact &artefact) {
    if (!settings.library.empty() && !settings.cuda)
      throw Error("the native kernels of " + settings.library +
                  " run on CUDA only: use --provider cuda, or no --library.");
    return std::make_unique<OnnxRuntime>(artefact, settings);
  });
}
