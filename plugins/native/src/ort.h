// What the ops of onnxruntime.cc are written with: the device, what an op looks like, its attributes and tensors.
#pragma once
#define ORT_API_MANUAL_INIT
#include "kvpack.h"
#include "onnxruntime_c_api.h"
#ifndef KVPACK_EMULATE
#include <cuda_runtime_api.h>
#endif

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace kvpack::ort {

constexpr uint32_t API_VERSION = 18;  // of ONNX Runtime 1.18, which brought what is used here
constexpr int TILE_ROWS = 16;         // code rows of a tile
inline const OrtApi *api = nullptr;

using Type = ONNXTensorElementDataType;
constexpr Type FLOAT = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr Type INT8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
constexpr Type INT16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16;
constexpr Type INT32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
constexpr Type HALF = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr Type BFLOAT16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;

inline OrtStatus *failed(const char *sentence) { return api->CreateStatus(ORT_FAIL, sentence); }
inline OrtStatus *checked(int code) { return code == KVPACK_OK ? nullptr : failed(kvpack_last_error()); }

#define KVPACK_TRY(call)                             \
  do {                                               \
    if (OrtStatus *status_ = (call)) return status_; \
  } while (0)

// -- the device: the provider's GPU, or this CPU

#ifdef KVPACK_EMULATE
constexpr const char *PROVIDER = nullptr;  // the CPU's
inline OrtStatus *stream_of(OrtKernelContext *, void **stream) { return *stream = nullptr, nullptr; }
inline OrtStatus *copy(void *to, const void *from, size_t bytes, void *) {
  return std::memcpy(to, from, bytes), nullptr;
}
inline OrtStatus *allocate(void **memory, size_t bytes) {
  return *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256), nullptr;
}
inline void release(void *memory) { std::free(memory); }
inline OrtStatus *finish(void *) { return nullptr; }
#else
constexpr const char *PROVIDER = "CUDAExecutionProvider";
inline OrtStatus *cuda(cudaError_t error) { return error == cudaSuccess ? nullptr : failed(cudaGetErrorString(error)); }
inline OrtStatus *stream_of(OrtKernelContext *context, void **stream) {
  return api->KernelContext_GetGPUComputeStream(context, stream);
}
inline OrtStatus *copy(void *to, const void *from, size_t bytes, void *stream) {
  return cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
}
inline OrtStatus *allocate(void **memory, size_t bytes) { return cuda(cudaMalloc(memory, bytes)); }
inline void release(void *memory) { cudaFree(memory); }
inline OrtStatus *finish(void *stream) { return cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream))); }
#endif

// Memory for the time of one launch, from the provider's arena in the order of the stream.
class Scratch {
 public:
  ~Scratch() {
#ifdef KVPACK_EMULATE
    release(data);
#else
    if (allocator && data) allocator->Free(allocator, data);
    if (allocator) api->ReleaseAllocator(allocator);
#endif
  }
  OrtStatus *take(OrtKernelContext *context, const OrtValue *neighbour, size_t bytes) {
    if (!bytes) return nullptr;
#ifdef KVPACK_EMULATE
    (void)context, (void)neighbour;
    return allocate(&data, bytes);
#else
    const OrtMemoryInfo *where;
    KVPACK_TRY(api->GetTensorMemoryInfo(neighbour, &where));
    KVPACK_TRY(api->KernelContext_GetAllocator(context, where, &allocator));
    return api->KernelContext_GetScratchBuffer(context, where, bytes, &data);
#endif
  }
  void *data = nullptr;

 private:
  OrtAllocator *allocator = nullptr;
};

// -- what the ops look like

struct Port {
  std::string name;  // "" for one that only fills up the list
  Type type;
  bool optional = false;
  bool host = false;  // lives in host memory
};

enum class Kind { DENSE, VQKV, DELTAKV, INTKV, ADD_RMS_NORM, GATED_ACTIVATION };

// One signature of an op: ONNX Runtime picks among those of a name by the types of a node's inputs.
struct Op : OrtCustomOp {
  Kind kind;
  std::string name;
  Type type;
  std::vector<Port> inputs, outputs;
  std::vector<std::string> states;

  Op(Kind kind, const char *name, Type type);
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
  void add_host(const char *each, bool optional = false) { inputs.push_back({each, INT32, optional, true}); }
  int32_t dtype() const { return type == HALF ? KVPACK_FP16 : KVPACK_BF16; }
  int input(const char *wanted) const { return find(inputs, wanted); }
  int output(const char *wanted) const { return find(outputs, wanted); }

 private:
  static int find(const std::vector<Port> &ports, const std::string &wanted) {
    for (size_t n = 0; n < ports.size(); ++n)
      if (ports[n].name == wanted) return static_cast<int>(n);
    return -1;
  }
};

// -- attributes

inline OrtStatus *read(const OrtKernelInfo *info, const char *name, int32_t &value) {
  int64_t found;
  KVPACK_TRY(api->KernelInfoGetAttribute_int64(info, name, &found));
  value = static_cast<int32_t>(found);
  return nullptr;
}

inline OrtStatus *read(const OrtKernelInfo *info, const char *name, float &value) {
  return api->KernelInfoGetAttribute_float(info, name, &value);
}

inline OrtStatus *read(const OrtKernelInfo *info, const char *name, std::string &value) {
  size_t size = 0;
  KVPACK_TRY(api->KernelInfoGetAttribute_string(info, name, nullptr, &size));
  value.resize(size);
  KVPACK_TRY(api->KernelInfoGetAttribute_string(info, name, value.data(), &size));
  value.resize(std::strlen(value.c_str()));
  return nullptr;
}

template <int MOST>
OrtStatus *read(const OrtKernelInfo *info, const char *name, int32_t (&list)[MOST], int32_t &count) {
  size_t size = 0;
  KVPACK_TRY(api->KernelInfoGetAttributeArray_int64(info, name, nullptr, &size));
  if (size > MOST) return failed((std::string(name) + " has more entries than the native kernels take").c_str());
  std::vector<int64_t> found(size);
  if (size) KVPACK_TRY(api->KernelInfoGetAttributeArray_int64(info, name, found.data(), &size));
  for (size_t n = 0; n < size; ++n) list[n] = static_cast<int32_t>(found[n]);
  count = static_cast<int32_t>(size);
  return nullptr;
}

inline OrtStatus *read(const OrtKernelInfo *info, const char *name, const char *yes, int32_t &value) {
  std::string found;
  KVPACK_TRY(read(info, name, found));
  value = found == yes;
  return nullptr;
}

template <class V, class... Rest>
OrtStatus *read_all(const OrtKernelInfo *info, const char *name, V &value, Rest &&...rest) {
  KVPACK_TRY(read(info, name, value));
  if constexpr (sizeof...(rest) > 0) return read_all(info, std::forward<Rest>(rest)...);
  return nullptr;
}

inline OrtStatus *read(const OrtKernelInfo *info, kvpack_layer &layer) {
  return read_all(info, "num_heads", layer.num_heads, "num_kv_heads", layer.num_kv_heads, "head_dim", layer.head_dim,
                  "rotary_dim", layer.rotary_dim, "sliding_window", layer.sliding_window, "scale", layer.scale,
                  "softcap", layer.softcap);
}

inline OrtStatus *read(const OrtKernelInfo *info, kvpack_geometry &geometry) {
  return read_all(info, "sinks", geometry.sinks, "window", geometry.window, "block", geometry.block);
}

// -- the tensors of a step

struct Tensor {
  const OrtValue *value = nullptr;
  void *data = nullptr;
  std::vector<int64_t> dims;
  size_t bytes = 0;
  int32_t dim(size_t axis) const { return axis < dims.size() ? static_cast<int32_t>(dims[axis]) : 0; }
  int64_t rows() const {  // of the last dimension
    int64_t count = 1;
    for (size_t n = 0; n + 1 < dims.size(); ++n) count *= dims[n];
    return count;
  }
};

inline size_t size_of(Type type) { return type == INT8 ? 1 : type == FLOAT || type == INT32 ? 4 : 2; }

class Tensors {
 public:
  Tensors(const Op &op, OrtKernelContext *context) : op_(op), context_(context) {}

  // Reads every input that the node has.
  OrtStatus *load() {
    size_t given = 0;
    KVPACK_TRY(api->KernelContext_GetInputCount(context_, &given));
    inputs_.resize(op_.inputs.size());
    for (size_t n = 0; n < given && n < inputs_.size(); ++n) {
      const OrtValue *value = nullptr;
      KVPACK_TRY(api->KernelContext_GetInput(context_, n, &value));
      if (!value) continue;
      Tensor &tensor = inputs_[n];
      tensor.value = value;
      OrtTensorTypeAndShapeInfo *shape;
      KVPACK_TRY(api->GetTensorTypeAndShape(value, &shape));
      size_t rank = 0;
      OrtStatus *status = api->GetDimensionsCount(shape, &rank);
      tensor.dims.resize(rank);
      if (!status) status = api->GetDimensions(shape, tensor.dims.data(), rank);
      api->ReleaseTensorTypeAndShapeInfo(shape);
      if (status) return status;
      tensor.bytes = size_of(op_.inputs[n].type);
      for (int64_t dim : tensor.dims) tensor.bytes *= static_cast<size_t>(dim);
      KVPACK_TRY(api->GetTensorMutableData(const_cast<OrtValue *>(value), &tensor.data));
    }
    return nullptr;
  }

  // By the op's own name of an input; one without data where the node does not have it.
  const Tensor &operator[](const char *name) const {
    static const Tensor none;
    const int n = op_.input(name);
    return n < 0 ? none : inputs_[n];
  }

  OrtStatus *output(const char *name, const std::vector<int64_t> &dims, void **data) {
    OrtValue *value = nullptr;
    *data = nullptr;
    KVPACK_TRY(api->KernelContext_GetOutput(context_, op_.output(name), dims.data(), dims.size(), &value));
    return value ? api->GetTensorMutableData(value, data) : nullptr;
  }

  // Makes each state's address that of its output, with the content of its input.
  OrtStatus *renew_states(void *stream) {
    for (const std::string &name : op_.states) {
      Tensor &state = inputs_[op_.input(name.c_str())];
      if (!state.value) continue;
      void *out;
      KVPACK_TRY(output((name + "_out").c_str(), state.dims, &out));
      if (!out || out == state.data) continue;
      KVPACK_TRY(copy(out, state.data, state.bytes, stream));
      state.data = out;
    }
    return nullptr;
  }

 private:
  const Op &op_;
  OrtKernelContext *context_;
  std::vector<Tensor> inputs_;
};

template <class V> void point(V *&field, const Tensor &tensor) { field = static_cast<V *>(tensor.data); }

}  // namespace kvpack::ort
