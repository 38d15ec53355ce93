// What the plugins of tensorrt.cc are written with: errors, a node's fields, its tensors.
#pragma once
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // in the headers themselves
#include "NvInferRuntime.h"
#pragma GCC diagnostic pop
#include "node.h"

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvpack::trt {

// -- errors: exceptions in here, logged and turned into a result before TensorRT sees them

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};
inline void check(const std::string &sentence) {
  if (!sentence.empty()) throw Refused(sentence);
}

inline std::atomic<nvinfer1::ILoggerFinder *> logger_finder{nullptr};  // TensorRT's to set, see setLoggerFinder

inline void say(const char *sentence) noexcept {
  try {
    nvinfer1::ILoggerFinder *finder = logger_finder;
    nvinfer1::ILogger *logger = finder ? finder->findLogger() : nullptr;
    const std::string line = std::string("kvpack: ") + sentence;
    if (logger) logger->log(nvinfer1::ILogger::Severity::kERROR, line.c_str());
    else std::fprintf(stderr, "%s\n", line.c_str());
  } catch (...) {
  }
}

// What work() returns; `failed` when it throws.
template <class R, class Work> R guarded(R failed, Work &&work) noexcept {
  try {
    return work();
  } catch (const std::exception &error) {
    say(error.what());
  } catch (...) {
    say("unknown error");
  }
  return failed;
}

// -- attributes, as Node::visit names them, in TensorRT's fields

// Reads them. Every one must be there once, with its type and length; no other may be.
class FieldReader {
 public:
  explicit FieldReader(const nvinfer1::PluginFieldCollection *given) {
    if (!given || given->nbFields < 0 || (given->nbFields > 0 && !given->fields)) throw Refused("there are no fields");
    for (int32_t n = 0; n < given->nbFields; ++n) {
      if (!given->fields[n].name) throw Refused("a field has no name");
      fields_.push_back(given->fields[n]);
    }
  }
  void operator()(const char *name, int32_t &value) { take(name, nvinfer1::PluginFieldType::kINT32, &value); }
  void operator()(const char *name, float &value) { take(name, nvinfer1::PluginFieldType::kFLOAT32, &value); }
  void operator()(const char *name, int32_t &value, const Names &names) {
    constexpr int32_t LONGEST = 32;
    const nvinfer1::PluginField field = find(name, nvinfer1::PluginFieldType::kCHAR, 1, LONGEST);
    const char *text = static_cast<const char *>(field.data);
    const std::string word(text, strnlen(text, static_cast<size_t>(field.length)));
    for (size_t n = 0; n < names.size(); ++n)
      if (word == names[n]) {
        value = static_cast<int32_t>(n);
        return;
      }
    throw Refused(std::string(name) + " is none that kvpack knows");
  }
  void operator()(const char *name, int32_t *list, int32_t most, int32_t &count) {
    const nvinfer1::PluginField field = find(name, nvinfer1::PluginFieldType::kINT32, 1, most);
    std::memcpy(list, field.data, sizeof(int32_t) * static_cast<size_t>(field.length));
    count = field.length;
  }
  void finish() const {
    if (!fields_.empty()) throw Refused("there are fields that the op does not have, or twice");
  }

 private:
  nvinfer1::PluginField find(const char *name, nvinfer1::PluginFieldType type, int32_t least, int32_t most) {
    for (size_t n = 0; n < fields_.size(); ++n) {
      const nvinfer1::PluginField field = fields_[n];
      if (std::strcmp(field.name, name)) continue;
      if (field.type != type || field.length < least || field.length > most || !field.data)
        throw Refused("the field " + std::string(name) + " has another type or length than it must have");
      fields_.erase(fields_.begin() + static_cast<std::ptrdiff_t>(n));
      return field;
    }
    throw Refused("the field " + std::string(name) + " is missing");
  }
  template <class V> void take(const char *name, nvinfer1::PluginFieldType type, V *value) {
    std::memcpy(value, find(name, type, 1, 1).data, sizeof(V));
  }

  std::vector<nvinfer1::PluginField> fields_;
};

// Lists them; the data stay the node's.
struct FieldWriter {
  std::vector<nvinfer1::PluginField> fields;

  void operator()(const char *name, int32_t &value) {
    fields.emplace_back(name, &value, nvinfer1::PluginFieldType::kINT32, 1);
  }
  void operator()(const char *name, float &value) {
    fields.emplace_back(name, &value, nvinfer1::PluginFieldType::kFLOAT32, 1);
  }
  void operator()(const char *name, int32_t &value, const Names &names) {
    const char *word = names[static_cast<size_t>(value)];
    fields.emplace_back(name, word, nvinfer1::PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(word)));
  }
  void operator()(const char *name, int32_t *list, int32_t, int32_t &count) {
    fields.emplace_back(name, list, nvinfer1::PluginFieldType::kINT32, count);
  }
};

// -- tensors

inline nvinfer1::DataType element(Type type, nvinfer1::DataType half) {
  switch (type) {
    case Type::FLOAT: return nvinfer1::DataType::kFLOAT;
    case Type::INT8: return nvinfer1::DataType::kINT8;
    case Type::INT32: return nvinfer1::DataType::kINT32;
    default: return half;
  }
}

// The inputs of a step by their names.
class Tensors {
 public:
  explicit Tensors(const std::vector<Port> &inputs) : inputs_(inputs), tensors_(inputs.size()) {}

  void set(size_t n, const nvinfer1::Dims &dims, void *data) {
    if (dims.nbDims < 0 || dims.nbDims > nvinfer1::Dims::MAX_DIMS) throw Refused(inputs_[n].name + " has no shape");
    for (int32_t axis = 0; axis < dims.nbDims; ++axis)
      if (dims.d[axis] < 0 || dims.d[axis] > INT_MAX) throw Refused(inputs_[n].name + " has no size");
    tensors_[n] = {true, data, {dims.d, dims.d + dims.nbDims}};
  }
  Tensor &at(size_t n) { return tensors_[n]; }
  const Tensor &operator[](const char *name) const {
    for (size_t n = 0; n < inputs_.size(); ++n)
      if (inputs_[n].name == name) return tensors_[n];
    return none_;
  }

 private:
  const std::vector<Port> &inputs_;
  std::vector<Tensor> tensors_;
  const Tensor none_;
};

}  // namespace kvpack::trt
