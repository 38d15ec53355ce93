// What the ops of onnxruntime.cc are written with: the device, what an op looks like, its attributes and tensors.
#pragma once
#define ORT_API_MANUAL_INIT
#include "node.h"
#include "onnxruntime_c_api.h"

#include <cstring>
#include <string>
#include <vector>

namespace kvpack::ort {

constexpr uint32_t API_VERSION = 18;  // of ONNX Runtime 1.18, which brought what is used here
inline const OrtApi *api = nullptr;

inline OrtStatus *failed(const std::string &sentence) { return api->CreateStatus(ORT_FAIL, sentence.c_str()); }
inline OrtStatus *told(const std::string &sentence) { return sentence.empty() ? nullptr : failed(sentence); }

#define KVPACK_TRY(call)                             \
  do {                                               \
    if (OrtStatus *status_ = (call)) return status_; \
  } while (0)

#ifdef KVPACK_EMULATE
constexpr const char *PROVIDER = nullptr;  // the CPU's
inline OrtStatus *stream_of(OrtKernelContext *, void **stream) { return *stream = nullptr, nullptr; }
#else
constexpr const char *PROVIDER = "CUDAExecutionProvider";
inline OrtStatus *stream_of(OrtKernelContext *context, void **stream) {
  return api->KernelContext_GetGPUComputeStream(context, stream);
}
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
    return told(allocate(&data, bytes));
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

inline ONNXTensorElementDataType element(Type type) {
  switch (type) {
    case Type::HALF: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    case Type::BFLOAT16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
    case Type::FLOAT: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    case Type::INT8: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    case Type::INT16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16;
    default: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
  }
}

// ONNX Runtime picks among the signatures of a name by the types of a node's inputs.
struct Op : OrtCustomOp, Signature {
  explicit Op(Signature signature);
  int32_t dtype() const { return type == Type::HALF ? KVPACK_FP16 : KVPACK_BF16; }
};

// -- attributes, as Node::visit names them

struct Reader {
  const OrtKernelInfo *info;
  OrtStatus *status = nullptr;  // of the first that is wrong

  void operator()(const char *name, int32_t &value) { keep(number(name, value)); }
  void operator()(const char *name, float &value) { keep(api->KernelInfoGetAttribute_float(info, name, &value)); }
  void operator()(const char *name, int32_t &value, const Names &names) { keep(word(name, value, names)); }
  void operator()(const char *name, int32_t *list, size_t most, int32_t &count) {
    keep(numbers(name, list, most, count));
  }

 private:
  void keep(OrtStatus *found) {
    if (!status) status = found;
    else if (found) api->ReleaseStatus(found);
  }
  OrtStatus *number(const char *name, int32_t &value) {
    int64_t found;
    KVPACK_TRY(api->KernelInfoGetAttribute_int64(info, name, &found));
    return value = static_cast<int32_t>(found), nullptr;
  }
  OrtStatus *word(const char *name, int32_t &value, const Names &names) {
    size_t size = 0;
    KVPACK_TRY(api->KernelInfoGetAttribute_string(info, name, nullptr, &size));
    std::string found(size, 0);
    KVPACK_TRY(api->KernelInfoGetAttribute_string(info, name, found.data(), &size));
    for (size_t n = 0; n < names.size(); ++n)
      if (!std::strcmp(found.c_str(), names[n])) return value = static_cast<int32_t>(n), nullptr;
    return failed("kvpack does not know the " + std::string(name) + " " + found.c_str());
  }
  OrtStatus *numbers(const char *name, int32_t *list, size_t most, int32_t &count) {
    size_t size = 0;
    KVPACK_TRY(api->KernelInfoGetAttributeArray_int64(info, name, nullptr, &size));
    if (size > most) return failed(std::string(name) + " has more entries than the native kernels take");
    std::vector<int64_t> found(size);
    if (size) KVPACK_TRY(api->KernelInfoGetAttributeArray_int64(info, name, found.data(), &size));
    for (size_t n = 0; n < size; ++n) list[n] = static_cast<int32_t>(found[n]);
    return count = static_cast<int32_t>(size), nullptr;
  }
};

inline OrtStatus *read(const OrtKernelInfo *info, Node &node) {
  Reader reader{info};
  const std::string sentence = node.visit(reader);
  return reader.status ? reader.status : told(sentence);
}

// -- the tensors of a step

class Tensors {
 public:
  Tensors(const Op &op, OrtKernelContext *context) : op_(op), context_(context) {}

  // Reads every input that the node has.
  OrtStatus *load() {
    size_t given = 0;
    KVPACK_TRY(api->KernelContext_GetInputCount(context_, &given));
    inputs_.resize(op_.inputs.size());
    values_.resize(op_.inputs.size());
    for (size_t n = 0; n < given && n < inputs_.size(); ++n) {
      const OrtValue *value = nullptr;
      KVPACK_TRY(api->KernelContext_GetInput(context_, n, &value));
      if (!value) continue;
      Tensor &tensor = inputs_[n];
      tensor.given = true;
      values_[n] = value;
      OrtTensorTypeAndShapeInfo *shape;
      KVPACK_TRY(api->GetTensorTypeAndShape(value, &shape));
      size_t rank = 0;
      OrtStatus *status = api->GetDimensionsCount(shape, &rank);
      tensor.dims.resize(rank);
      if (!status) status = api->GetDimensions(shape, tensor.dims.data(), rank);
      api->ReleaseTensorTypeAndShapeInfo(shape);
      if (status) return status;
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

  const OrtValue *value(const char *name) const { return values_[op_.input(name)]; }

  OrtStatus *output(const char *name, const std::vector<int64_t> &dims, void **data) {
    OrtValue *value = nullptr;
    *data = nullptr;
    KVPACK_TRY(api->KernelContext_GetOutput(context_, op_.output(name), dims.data(), dims.size(), &value));
    return value ? api->GetTensorMutableData(value, data) : nullptr;
  }

  // Makes each state's address that of its output, with the content of its input.
  OrtStatus *renew_states(void *stream) {
    for (const std::string &name : op_.states) {
      const int at = op_.input(name);
      Tensor &state = inputs_[at];
      if (!state.given) continue;
      void *out;
      KVPACK_TRY(output((name + "_out").c_str(), state.dims, &out));
      if (!out || out == state.data) continue;
      KVPACK_TRY(told(copy(out, state.data, state.bytes(op_.inputs[at].type), stream)));
      state.data = out;
    }
    return nullptr;
  }

 private:
  const Op &op_;
  OrtKernelContext *context_;
  std::vector<Tensor> inputs_;
  std::vector<const OrtValue *> values_;
};

}  // namespace kvpack::ort
