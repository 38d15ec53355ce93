// Where a model.onnx keeps its weights, read from the raw protobuf: nothing outside the engine may be opened. As
// runtime/external.py.
#pragma once

#include "kvpack_host.hpp"

namespace kvpack {

/// Walks the messages of an ONNX model down to its tensors (onnx.proto3).
class ExternalData {
 public:
  /// Every external tensor of the model `name` must lie inside a file of the engine. Throws Error.
  static void check(const Artefact &artefact, const std::string &name) {
    const std::string path = (artefact.path / name).string(), mend = std::string(": ") + Artefact::REBUILD + ".";
    std::ifstream stream(path, std::ios::binary);
    const std::string data{std::istreambuf_iterator<char>(stream), {}};
    ExternalData found;
    try {
      found.walk(data, "model", 0);
      for (const std::map<std::string, std::string> &tensor : found.tensors_) {
        const auto value = [&tensor](const char *key) { return tensor.count(key) ? tensor.at(key) : std::string(); };
        const std::string file = value("location");
        if (!artefact.has_file(file))
          throw Error(path + " takes weights from '" + file + "', which is no file of the engine" + mend);
        const int64_t size = artefact.config.at("files").at(file).at("bytes").integer();
        const int64_t start = number(value("offset")), length = number(value("length"));
        if (start < 0 || length < 0 || start > size || length > size - start)
          throw Error(path + " takes weights from beyond the end of '" + file + "'" + mend);
      }
    } catch (const std::invalid_argument &) {
      throw Error(path + " is not an ONNX model" + mend);
    }
  }

 private:
  static constexpr int DEEPEST = 100;
  std::vector<std::map<std::string, std::string>> tensors_;  // the external_data entries of each

  static int64_t number(const std::string &text) {
    if (text.empty()) return 0;
    Json value;
    value.kind = Json::Kind::number, value.text = text;
    return value.integer();
  }

  /// The message in a field of a message; "" when there is none on the way to a tensor.
  static std::string child(const std::string &kind, uint64_t field) {
    static const std::map<std::pair<std::string, uint64_t>, std::string> children{
        {{"model", 7}, "graph"},         {{"model", 25}, "function"},   {{"graph", 1}, "node"},
        {{"graph", 5}, "tensor"},        {{"graph", 15}, "sparse"},     {{"function", 7}, "node"},
        {{"function", 11}, "attribute"}, {{"node", 5}, "attribute"},    {{"attribute", 5}, "tensor"},
        {{"attribute", 6}, "graph"},     {{"attribute", 10}, "tensor"}, {{"attribute", 11}, "graph"},
        {{"attribute", 22}, "sparse"},   {{"attribute", 23}, "sparse"}, {{"sparse", 1}, "tensor"},
        {{"sparse", 2}, "tensor"},       {{"tensor", 13}, "entry"}};
    const auto found = children.find({kind, field});
    return found == children.end() ? "" : found->second;
  }

  void walk(std::string_view message, const std::string &kind, int depth) {
    if (depth > DEEPEST) throw std::invalid_argument("nested too deeply");
    std::map<std::string, std::string> entries;
    for (size_t at = 0; at < message.size();) {
      const auto [field, part] = next(message, at);
      const std::string inner = child(kind, field);
      if (inner == "entry") {
        std::array<std::string, 3> pair;  // fields 1 and 2 are key and value
        for (size_t inside = 0; inside < part.size();) {
          const auto [number, text] = next(part, inside);
          if (number < pair.size()) pair[number] = text;
        }
        if (!entries.emplace(pair[1], pair[2]).second) throw std::invalid_argument("key given twice");
      } else if (!inner.empty()) {
        walk(part, inner, depth + 1);
      }
    }
    if (!entries.empty()) tensors_.push_back(std::move(entries));
  }

  /// The number and content of the field at `at`, which moves behind it. Fields of numbers have the number 0.
  static std::pair<uint64_t, std::string_view> next(std::string_view message, size_t &at) {
    const uint64_t tag = varint(message, at);
    const auto skip = [&](uint64_t count) {
      if (count > message.size() - at) throw std::invalid_argument("field beyond its message");
      at += count;
      return message.substr(at - count, count);
    };
    switch (tag & 7) {
      case 0: varint(message, at); return {0, {}};
      case 1: skip(8); return {0, {}};
      case 2: {
        const uint64_t count = varint(message, at);
        return {tag >> 3, skip(count)};
      }
      case 5: skip(4); return {0, {}};
      default: throw std::invalid_argument("unknown wire type");
    }
  }
  static uint64_t varint(std::string_view message, size_t &at) {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (at >= message.size()) break;
      const auto byte = static_cast<unsigned char>(message[at++]);
      value |= uint64_t{byte & 127u} << shift;
      if (byte < 128) return value;
    }
    throw std::invalid_argument("no number");
  }
};

}  // namespace kvpack
