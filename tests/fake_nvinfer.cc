// TensorRT's runtime and CUDA's driver in one library, without either, for tests/test_examples_cpp.py: device memory is
// the host's, and a plan is a line, "host" or "device" (where the numbers of a step are) and "S S B;..." for its
// profiles (least and most tokens, most sequences), and an ONNX model that ONNX Runtime computes. What the real ones
// forbid fails here: shapes outside the profile, tensors without an address, device tensors on the host and host values
// on the device, copies while a stream is captured.
#include "fake_nvinfer_stubs.h"  // what is not used here, made by the test from TensorRT's headers

#include <onnxruntime_cxx_api.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::map<const char *, size_t> device;  // what was allocated
bool capturing = false;
using Work = std::vector<std::function<bool()>>;
Work recorded;
int replays = 0, loaded = 0;  // told at the end, see Engine

bool on_device(const void *address, size_t nbytes) {
  const auto *place = static_cast<const char *>(address);
  auto found = device.upper_bound(place);
  if (found == device.begin()) return false;
  --found;
  return place + nbytes <= found->first + found->second;
}
int copied(void *to, const void *from, size_t nbytes, bool to_device, bool from_device) {
  if (capturing || on_device(to, nbytes) != to_device || on_device(from, nbytes) != from_device) return 1;
  std::memcpy(to, from, nbytes);
  return 0;
}

}  // namespace

#define CU extern "C" __attribute__((visibility("default"))) int
CU cuInit(unsigned) { return 0; }
CU cuDeviceGet(int *device, int) { return *device = 0; }
CU cuDevicePrimaryCtxRetain(void **context, int) { return *context = &device, 0; }
CU cuCtxSetCurrent(void *context) { return context != &device; }
CU cuMemAlloc_v2(char **address, size_t nbytes) {
  if (nbytes > 64 << 20) return 2;
  *address = new char[nbytes];
  std::memset(*address, 0xFF, nbytes);  // NaN
  device[*address] = nbytes;
  return 0;
}
CU cuMemFree_v2(char *address) {
  if (!device.erase(address)) return 1;
  delete[] address;
  return 0;
}
CU cuMemsetD8_v2(void *to, unsigned char value, size_t nbytes) {
  if (!on_device(to, nbytes)) return 1;
  std::memset(to, value, nbytes);
  return 0;
}
CU cuMemcpyDtoD_v2(void *to, const void *from, size_t nbytes) { return copied(to, from, nbytes, true, true); }
CU cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t nbytes, void *) {
  return copied(to, from, nbytes, true, false);
}
CU cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t nbytes, void *) {
  return copied(to, from, nbytes, false, true);
}
CU cuMemGetInfo_v2(size_t *free, size_t *total) { return *free = *total = 64 << 20, 0; }
CU cuStreamCreate(void **stream, unsigned) { return *stream = new char, 0; }
CU cuStreamDestroy_v2(char *stream) { return delete stream, 0; }
CU cuStreamSynchronize(void *) { return capturing; }
CU cuStreamBeginCapture_v2(void *, int) { return recorded.clear(), capturing = true, 0; }
CU cuStreamEndCapture(void *, Work **graph) { return capturing = false, *graph = new Work(recorded), 0; }
CU cuGraphInstantiateWithFlags(Work **made, Work *graph, unsigned long long) { return *made = new Work(*graph), 0; }
CU cuGraphDestroy(Work *graph) { return delete graph, 0; }
CU cuGraphExecDestroy(Work *graph) { return delete graph, 0; }
CU cuGraphLaunch(Work *graph, void *) {
  ++replays;
  for (const auto &work : *graph)
    if (!work()) return 1;
  return 0;
}
CU cuGetErrorString(int status, const char **text) {
  return *text = status == 2 ? "out of memory" : "invalid value", 0;
}

namespace nvinfer1 {
namespace {

ILogger *logger = nullptr;
bool complain(const std::string &line) {
  logger->log(ILogger::Severity::kERROR, line.c_str());
  return false;
}

struct Profile {
  int64_t least, most, batch;
};
DataType type_of(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return DataType::kFLOAT;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16: return DataType::kHALF;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8: return DataType::kINT8;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: return DataType::kINT32;
    default: return DataType::kINT64;
  }
}
struct Tensor {
  bool input = false;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<int64_t> dims;  // as set
  void *address = nullptr;
  size_t nbytes() const {
    size_t size = type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64  ? 8
                  : type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 ? 1
                  : type_of(type) == DataType::kHALF           ? 2
                                                               : 4;
    for (const int64_t dim : dims) size *= static_cast<size_t>(dim);
    return size;
  }
};
using Tensors = std::map<std::string, Tensor>;

struct Graph {
  Ort::Env env{ORT_LOGGING_LEVEL_ERROR, "fake"};
  std::unique_ptr<Ort::Session> session;
  std::vector<Profile> profiles;
  Tensors tensors;
};

bool numbers_on_host = true;
bool on_host(const std::string &name) { return numbers_on_host && (name == "live" || name == "select_width"); }

struct Context : StubExecutionContext, IExecutionContext {
  explicit Context(Graph &graph) : graph(graph), tensors(graph.tensors) { mImpl = this; }
  Graph &graph;
  Tensors tensors;
  const Profile *profile = nullptr;

  bool setOptimizationProfileAsync(int32_t number, cudaStream_t) noexcept override {
    profile = &graph.profiles.at(static_cast<size_t>(number));
    return true;
  }
  bool setInputShape(char const *name, nvinfer1::Dims const &dims) noexcept override {
    Tensor &one = tensors.at(name);
    if (!profile || !one.input) return complain("no profile, or no input");
    one.dims.assign(dims.d, dims.d + dims.nbDims);
    if (!std::strcmp(name, "tokens") &&
        (dims.d[0] > profile->batch || dims.d[1] < profile->least || dims.d[1] > profile->most))
      return complain("tokens are outside the profile");
    return true;
  }
  bool setTensorAddress(char const *name, void *data) noexcept override {
    return (tensors.at(name).address = data) != nullptr || complain("no address");
  }
  int64_t getMaxOutputSize(char const *) const noexcept override {
    return 4 * tensors.at("past_len").dims.at(0) * *static_cast<const int32_t *>(tensors.at("select_width").address);
  }
  bool enqueueV3(cudaStream_t) noexcept override {
    std::map<std::string, int32_t> values;  // of this moment, also when replayed
    for (const auto &[name, one] : tensors) {
      if (!one.address) return complain(name + " has no address");
      if (on_host(name)) values[name] = *static_cast<const int32_t *>(one.address);
      if (on_device(one.address, 1) == on_host(name)) return complain(name + " is on the wrong side");
      if (one.input && !on_host(name) && !on_device(one.address, one.nbytes())) return complain(name + " is too small");
    }
    const auto work = [this, given = tensors, values]() { return computed(given, values); };
    if (!capturing) return work();
    recorded.push_back(work);
    return true;
  }

  bool computed(const Tensors &given, std::map<std::string, int32_t> values) const {
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
    std::vector<const char *> names, outputs;
    std::vector<Ort::Value> fed;
    for (const auto &[name, one] : given) {
      if (!one.input) {
        outputs.push_back(name.c_str());
        continue;
      }
      void *data = on_host(name) ? &values.at(name) : one.address;
      names.push_back(name.c_str());
      fed.push_back(Ort::Value::CreateTensor(memory, data, one.nbytes(), one.dims.data(), one.dims.size(), one.type));
    }
    try {
      auto found =
          graph.session->Run(Ort::RunOptions{}, names.data(), fed.data(), fed.size(), outputs.data(), outputs.size());
      for (size_t n = 0; n < outputs.size(); ++n) {
        Tensor made = given.at(outputs[n]);
        made.dims = found[n].GetTensorTypeAndShapeInfo().GetShape();
        if (!on_device(made.address, made.nbytes())) return complain(std::string(outputs[n]) + " is too small");
        if (made.nbytes()) std::memcpy(made.address, found[n].GetTensorRawData(), made.nbytes());
      }
    } catch (const Ort::Exception &error) {
      return complain(error.what());
    }
    return true;
  }
};

struct Engine : StubCudaEngine, ICudaEngine {
  Engine(const char *plan, size_t size) {
    mImpl = this;
    const char *model = static_cast<const char *>(std::memchr(plan, '\n', size)) + 1;
    std::istringstream line(std::string(plan, model));
    std::string where;
    line >> where;
    numbers_on_host = where == "host";
    for (Profile one; line >> one.least >> one.most >> one.batch; line.ignore()) graph.profiles.push_back(one);
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(1);
    graph.session = std::make_unique<Ort::Session>(graph.env, model, size - static_cast<size_t>(model - plan), options);
    Ort::AllocatorWithDefaultOptions allocator;
    for (const bool input : {true, false})
      for (size_t n = 0; n < (input ? graph.session->GetInputCount() : graph.session->GetOutputCount()); ++n) {
        const auto name = input ? graph.session->GetInputNameAllocated(n, allocator)
                                : graph.session->GetOutputNameAllocated(n, allocator);
        const auto info = input ? graph.session->GetInputTypeInfo(n) : graph.session->GetOutputTypeInfo(n);
        graph.tensors[name.get()] = {input, info.GetTensorTypeAndShapeInfo().GetElementType(), {}, nullptr};
      }
  }
  ~Engine() override { std::fprintf(stderr, "fake: %d replays, %d plugin libraries\n", replays, loaded); }
  Graph graph;

  const Tensor &at(const char *name) const { return graph.tensors.at(name); }
  int32_t getNbOptimizationProfiles() const noexcept override { return static_cast<int32_t>(graph.profiles.size()); }
  int32_t getNbIOTensors() const noexcept override { return static_cast<int32_t>(graph.tensors.size()); }
  TensorIOMode getTensorIOMode(char const *name) const noexcept override {
    if (!graph.tensors.count(name)) return TensorIOMode::kNONE;
    return at(name).input ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
  }
  DataType getTensorDataType(char const *name) const noexcept override { return type_of(at(name).type); }
  TensorLocation getTensorLocation(char const *name) const noexcept override {
    return on_host(name) ? TensorLocation::kHOST : TensorLocation::kDEVICE;
  }
  IExecutionContext *createExecutionContext(ExecutionContextAllocationStrategy) noexcept override {
    return new Context(graph);
  }
};

struct Registry : StubPluginRegistry {
  PluginLibraryHandle loadLibrary(AsciiChar const *path) noexcept override {
    return std::ifstream(path) ? (++loaded, this) : nullptr;
  }
};

struct Runtime : StubRuntime, IRuntime {
  Runtime() { mImpl = this; }
  Registry registry;

  void setEngineHostCodeAllowed(bool) noexcept override {}
  IPluginRegistry &getPluginRegistry() noexcept override { return registry; }
  ICudaEngine *deserializeCudaEngine(void const *blob, std::size_t size) noexcept override {
    try {
      return new Engine(static_cast<const char *>(blob), size);
    } catch (const Ort::Exception &error) {
      complain(error.what());
      return nullptr;
    }
  }
};

}  // namespace
}  // namespace nvinfer1

extern "C" __attribute__((visibility("default"))) void *createInferRuntime_INTERNAL(void *given,
                                                                                    int32_t version) noexcept {
  nvinfer1::logger = static_cast<nvinfer1::ILogger *>(given);
  return version == NV_TENSORRT_VERSION ? static_cast<nvinfer1::IRuntime *>(new nvinfer1::Runtime) : nullptr;
}
