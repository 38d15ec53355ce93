// What a host of a kvpack engine has to know, without Python: copy this header into a service.
//
// It reads an engine folder and refuses one that is damaged (Artefact), tells what every step is given (Step,
// Geometry), and owns the cache (State, Session). What computes a step is a Backend: kvpack_ort.cc has one for ONNX
// Runtime, kvpack_trt.cc one for TensorRT. C++17 and the standard library only.
//
// The counterpart in Python: runtime/artefact.py, plugins/geometry.py, plugins/contract.py, runtime/session.py.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <charconv>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvpack {

/// One sentence with the file or values at fault and the mend. Programs print it and exit with 2.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// -- JSON

/// A JSON value. Numbers stay as they were written. Stricter than RFC 8259 only in refusing a key given twice.
class Json {
 public:
  enum class Kind { null, boolean, number, string, array, object };

  Kind kind = Kind::null;
  bool boolean = false;
  std::string text;  // a string in UTF-8, or a number as written
  std::vector<Json> items;
  std::map<std::string, Json> members;  // in the order of their bytes, which is that of their code points

  /// Throws std::invalid_argument when `source` is not JSON in UTF-8.
  static Json parse(std::string_view source) {
    Parser parser{source};
    Json value = parser.value(0);
    parser.space();
    if (parser.at != source.size()) throw std::invalid_argument("text after the value");
    return value;
  }

  bool is(Kind other) const { return kind == other; }
  const Json *find(const std::string &key) const {
    const auto found = members.find(key);
    return kind == Kind::object && found != members.end() ? &found->second : nullptr;
  }
  /// A member. Throws std::invalid_argument when there is none, as those below when the value is of another kind.
  const Json &at(const std::string &key) const {
    if (const Json *value = find(key)) return *value;
    throw std::invalid_argument("the key '" + key + "' is missing");
  }
  const std::string &string() const {
    expect(Kind::string, "a string");
    return text;
  }
  const std::vector<Json> &array() const {
    expect(Kind::array, "a list");
    return items;
  }
  const std::map<std::string, Json> &object() const {
    expect(Kind::object, "an object");
    return members;
  }
  bool truth() const {
    expect(Kind::boolean, "true or false");
    return boolean;
  }
  double number() const {
    expect(Kind::number, "a number");
    return converted<double>("a number");
  }
  int64_t integer() const {
    expect(Kind::number, "an integer");
    return converted<int64_t>("an integer");
  }

  /// Canonical JSON in ASCII: sorted keys, no spaces. What config.json's digest is taken of.
  void write(std::string &out) const {
    switch (kind) {
      case Kind::null: out += "null"; return;
      case Kind::boolean: out += boolean ? "true" : "false"; return;
      case Kind::number: out += text; return;
      case Kind::string: write_string(text, out); return;
      case Kind::array: {
        const char *separator = "[";
        for (const Json &item : items) out += separator, item.write(out), separator = ",";
        out += items.empty() ? "[]" : "]";
        return;
      }
      case Kind::object: {
        const char *separator = "{";
        for (const auto &[key, value] : members) {
          out += separator, write_string(key, out), out += ':', value.write(out);
          separator = ",";
        }
        out += members.empty() ? "{}" : "}";
        return;
      }
    }
  }

  /// Appends `text`, which must be UTF-8, as a JSON string in ASCII.
  static void write_string(std::string_view text, std::string &out) {
    const auto unit = [&out](uint32_t code) {
      static const char digits[] = "0123456789abcdef";
      out += "\\u";
      for (int shift = 12; shift >= 0; shift -= 4) out += digits[code >> shift & 15];
    };
    out += '"';
    for (size_t at = 0; at < text.size();) {
      const uint32_t code = code_point(text, at);
      switch (code) {
        case '"': out += "\\\""; break;
        case '\\': out += "\\\\"; break;
        case '\n': out += "\\n"; break;
        case '\r': out += "\\r"; break;
        case '\t': out += "\\t"; break;
        case '\b': out += "\\b"; break;
        case '\f': out += "\\f"; break;
        default:
          if (code >= 32 && code < 127) out += static_cast<char>(code);
          else if (code < 0x10000) unit(code);
          else unit(0xD800 + ((code - 0x10000) >> 10)), unit(0xDC00 + ((code - 0x10000) & 0x3FF));
      }
    }
    out += '"';
  }

  /// The code point that begins at `at`, which moves behind it. Throws std::invalid_argument when it is not UTF-8.
  static uint32_t code_point(std::string_view text, size_t &at) {
    static constexpr uint32_t LEAST[] = {0, 0x80, 0x800, 0x10000};
    const auto first = static_cast<unsigned char>(text[at++]);
    if (first < 0x80) return first;
    const int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
    uint32_t code = first & (0x3Fu >> more);
    bool good = first >= 0xC0 && first < 0xF8 && text.size() - at >= static_cast<size_t>(more);
    for (int n = 0; good && n < more; ++n) {
      const auto next = static_cast<unsigned char>(text[at++]);
      good = (next & 0xC0) == 0x80;
      code = code << 6 | (next & 0x3Fu);
    }
    if (!good || code < LEAST[more] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000))
      throw std::invalid_argument("not UTF-8");
    return code;
  }

  static void append_utf8(uint32_t code, std::string &out) {
    if (code < 0x80) {
      out += static_cast<char>(code);
      return;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    out += static_cast<char>((0xFF00u >> (more + 1) & 0xFF) | code >> 6 * more);
    for (int n = more - 1; n >= 0; --n) out += static_cast<char>(0x80 | (code >> 6 * n & 0x3F));
  }

 private:
  void expect(Kind wanted, const char *what) const {
    if (kind != wanted) throw std::invalid_argument(std::string("there is something else where ") + what + " must be");
  }
  template <class N> N converted(const char *what) const {
    N value{};
    const char *end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc{} || stop != end) throw std::invalid_argument(text + " is not " + what);
    return value;
  }

  struct Parser {
    static constexpr int DEEPEST = 200;
    std::string_view source;
    size_t at = 0;

    [[noreturn]] static void fail(const char *what) { throw std::invalid_argument(what); }
    void space() {
      while (at < source.size() && std::strchr(" \t\n\r", source[at]) && source[at]) ++at;
    }
    bool take(char wanted) {
      const bool found = at < source.size() && source[at] == wanted;
      at += found;
      return found;
    }
    bool word(std::string_view wanted) {
      const bool found = source.substr(at, wanted.size()) == wanted;
      if (found) at += wanted.size();
      return found;
    }
    Json value(int depth) {
      if (depth > DEEPEST) fail("nested too deeply");
      space();
      Json made;
      if (take('{')) {
        made.kind = Kind::object;
        space();
        for (bool first = true; !take('}'); first = false) {
          if (!first && !take(',')) fail("no comma between two members");
          space();
          if (!take('"')) fail("no key");
          std::string key = quoted();
          space();
          if (!take(':')) fail("no colon behind a key");
          if (!made.members.emplace(std::move(key), value(depth + 1)).second) fail("a key given twice");
          space();
        }
      } else if (take('[')) {
        made.kind = Kind::array;
        space();
        for (bool first = true; !take(']'); first = false) {
          if (!first && !take(',')) fail("no comma between two items");
          made.items.push_back(value(depth + 1));
          space();
        }
      } else if (take('"')) {
        made.kind = Kind::string;
        made.text = quoted();
      } else if (word("true")) {
        made.kind = Kind::boolean;
        made.boolean = true;
      } else if (word("false")) {
        made.kind = Kind::boolean;
      } else if (!word("null")) {
        made.kind = Kind::number;
        made.text = numeral();
      }
      return made;
    }
    std::string numeral() {
      const size_t start = at;
      const auto digits = [this] {
        const size_t first = at;
        while (at < source.size() && source[at] >= '0' && source[at] <= '9') ++at;
        if (at == first) fail("no value");
      };
      take('-');
      if (!take('0')) digits();
      if (take('.')) digits();
      if (take('e') || take('E')) {
        if (!take('-')) take('+');
        digits();
      }
      return std::string(source.substr(start, at - start));
    }
    std::string quoted() {  // behind the opening quote
      std::string made;
      for (;;) {
        if (at >= source.size()) fail("a string without an end");
        if (take('"')) return made;
        if (take('\\')) {
          if (at >= source.size()) fail("a string without an end");
          const char escape = source[at++];
          if (escape == 'u') {
            append_utf8(escaped(), made);
            continue;
          }
          static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
          const char *found = escape ? std::strchr(from, escape) : nullptr;
          if (!found) fail("an unknown escape");
          made += to[found - from];
        } else {
          const size_t start = at;
          if (code_point(source, at) < 32) fail("a control character in a string");
          made += source.substr(start, at - start);
        }
      }
    }
    uint32_t escaped() {  // behind \u
      const uint32_t high = unit();
      if (high < 0xD800 || high >= 0xE000) return high;
      if (high >= 0xDC00 || !word("\\u")) fail("half a surrogate pair");
      const uint32_t low = unit();
      if (low < 0xDC00 || low >= 0xE000) fail("half a surrogate pair");
      return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
    }
    uint32_t unit() {
      uint32_t code = 0;
      const std::string_view digits = source.substr(at, 4);
      const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
      if (error != std::errc{} || stop != digits.data() + 4) fail("an unknown escape");
      at += 4;
      return code;
    }
  };
};

// -- SHA-256 (FIPS 180-4)

class Sha256 {
 public:
  void update(const void *data, size_t count) {
    const auto *bytes = static_cast<const unsigned char *>(data);
    length_ += count;
    while (count > 0) {
      const size_t part = std::min(count, block_.size() - filled_);
      std::memcpy(block_.data() + filled_, bytes, part);
      filled_ += part, bytes += part, count -= part;
      if (filled_ == block_.size()) compress(), filled_ = 0;
    }
  }
  /// The digest of what was given so far, 64 hexadecimal digits. Ends the computation.
  std::string hex() {
    const uint64_t bits = length_ * 8;
    const unsigned char one = 0x80, zero = 0;
    update(&one, 1);
    while (filled_ != 56) update(&zero, 1);
    unsigned char size[8];
    for (int n = 0; n < 8; ++n) size[n] = static_cast<unsigned char>(bits >> (56 - 8 * n));
    update(size, 8);
    std::string text;
    for (const uint32_t word : state_)
      for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
    return text;
  }

 private:
  // The first 32 bits of the fractional parts of the square roots of the first 8 primes and of the cube roots of the
  // first 64.
  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  static constexpr std::array<uint32_t, 64> ROUND{
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  std::array<unsigned char, 64> block_{};
  size_t filled_ = 0;
  uint64_t length_ = 0;

  static uint32_t turned(uint32_t word, int by) { return word >> by | word << (32 - by); }
  void compress() {
    uint32_t w[64];
    for (size_t n = 0; n < 16; ++n)
      w[n] = static_cast<uint32_t>(block_[4 * n]) << 24 | static_cast<uint32_t>(block_[4 * n + 1]) << 16 |
             static_cast<uint32_t>(block_[4 * n + 2]) << 8 | block_[4 * n + 3];
    for (size_t n = 16; n < 64; ++n) {
      const uint32_t low = turned(w[n - 15], 7) ^ turned(w[n - 15], 18) ^ w[n - 15] >> 3;
      const uint32_t high = turned(w[n - 2], 17) ^ turned(w[n - 2], 19) ^ w[n - 2] >> 10;
      w[n] = w[n - 16] + low + w[n - 7] + high;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (size_t n = 0; n < 64; ++n) {
      const uint32_t first =
          h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + ROUND[n] + w[n];
      const uint32_t second = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    const std::array<uint32_t, 8> worked{a, b, c, d, e, f, g, h};
    for (size_t n = 0; n < 8; ++n) state_[n] += worked[n];
  }
};

// -- geometry: where each position of a sequence lives in a compressed cache

/// Sizes of the exact part of the cache, in tokens. Every quantity follows from the number of stored tokens alone.
///
/// sinks: first tokens, exact for ever. window: most recent tokens guaranteed exact, the current one included.
/// block: rows encoded together. stride: every stride-th code row, the first one included, has a reference row; 0:
/// none. select_fraction, select_count: code rows that a decode step reads, as a part of those there are or as a
/// number; 0 and 0: all of them.
struct Geometry {
  static constexpr int64_t SELECT_STEP = 32;  // the room for selected rows is rounded up to this many

  int64_t sinks = 4, window = 128, block = 32, stride = 0;
  double select_fraction = 0;
  int64_t select_count = 0;

  int64_t ring() const { return window + block; }
  /// Rows of the exact state: sinks, then a circular buffer of recent tokens.
  int64_t dense_rows() const { return sinks + ring(); }
  bool selects() const { return select_fraction > 0 || select_count > 0; }

  /// Code rows once `stored` tokens are in the cache; code row j is position sinks + j.
  int64_t encoded(int64_t stored) const { return std::max<int64_t>(stored - sinks - window, 0) / block * block; }
  /// Reference rows then; row r is code row r * stride.
  int64_t references(int64_t stored) const { return stride ? (encoded(stored) + stride - 1) / stride : 0; }
  /// Code rows that a decode step over `stored` tokens reads.
  int64_t selected(int64_t stored) const {
    const int64_t rows = encoded(stored);
    if (select_count) return std::min(rows, select_count);
    if (select_fraction > 0) return static_cast<int64_t>(std::ceil(select_fraction * static_cast<double>(rows) - 1e-9));
    return rows;
  }
  /// Row of the exact state that holds `position`.
  int64_t slot(int64_t position) const { return position < sinks ? position : sinks + (position - sinks) % ring(); }

  static Geometry from_json(const Json &entry) {
    Geometry made;
    for (const auto &[key, value] : entry.object()) {
      if (key == "sinks") made.sinks = value.integer();
      else if (key == "window") made.window = value.integer();
      else if (key == "block") made.block = value.integer();
      else if (key == "stride") made.stride = value.integer();
      else if (key == "select_fraction") made.select_fraction = value.number();
      else if (key == "select_count") made.select_count = value.integer();
      else throw std::invalid_argument("the geometry has the unknown key '" + key + "'");
    }
    constexpr int64_t MOST = INT32_MAX / 4;
    const auto within = [](int64_t value, int64_t least) { return value >= least && value <= MOST; };
    if (!within(made.sinks, 0) || !within(made.window, 1) || !within(made.block, 1) || !within(made.stride, 0) ||
        !within(made.select_count, 0) || !(made.select_fraction >= 0 && made.select_fraction < 1))
      throw std::invalid_argument("sinks, window, block, stride or the selection of the geometry is out of range");
    return made;
  }
};

// -- the tensor contract

using Dims = std::vector<int64_t>;
using Sizes = std::map<std::string, int64_t>;  // of the symbols in a shape

inline size_t item_size(const std::string &dtype) {
  static const std::map<std::string, size_t> sizes{{"int8", 1},    {"float16", 2}, {"bfloat16", 2}, {"int16", 2},
                                                   {"float32", 4}, {"int32", 4},   {"int64", 8}};
  const auto found = sizes.find(dtype);
  if (found == sizes.end()) throw std::invalid_argument("the dtype '" + dtype + "' is unknown");
  return found->second;
}

/// The product of sizes that are not negative. Throws Error above 2^56.
inline int64_t product(Dims::const_iterator first, Dims::const_iterator last) {
  int64_t result = 1;
  for (; first != last; ++first) {
    if (*first > 0 && result > (int64_t{1} << 56) / *first)
      throw Error("a tensor of this engine is too large for any memory.");
    result *= *first;
  }
  return result;
}
inline int64_t product(const Dims &dims) { return product(dims.begin(), dims.end()); }

/// A size in a shape: a number, or a symbol ("batch", "rows", ...).
struct Dim {
  std::string symbol;
  int64_t size = 0;
  bool operator==(const Dim &other) const { return symbol == other.symbol && size == other.size; }
};

/// One input or output of the graph. alias: of a state input, the output that is written to the same memory.
struct TensorSpec {
  std::string name, role, dtype;
  std::vector<Dim> shape;
  std::string alias;

  /// The axis along which the tensor grows with the sequence; none when its size is fixed.
  std::optional<size_t> row_axis() const {
    for (size_t axis = 0; axis < shape.size(); ++axis)
      if (row_symbols().count(shape[axis].symbol)) return axis;
    return std::nullopt;
  }
  Dims dims(const Sizes &sizes) const {
    Dims made;
    for (const Dim &dim : shape) made.push_back(dim.symbol.empty() ? dim.size : sizes.at(dim.symbol));
    return made;
  }
  int64_t nbytes(const Sizes &sizes) const { return product(dims(sizes)) * static_cast<int64_t>(item_size(dtype)); }

  static const std::set<std::string> &row_symbols() {
    static const std::set<std::string> symbols{"rows", "code_rows", "code_tiles", "ref_rows"};
    return symbols;
  }
  static TensorSpec from_json(const Json &entry) {
    TensorSpec made;
    for (const auto &[key, value] : entry.object()) {
      if (key == "name") made.name = value.string();
      else if (key == "role") made.role = value.string();
      else if (key == "dtype") made.dtype = value.string();
      else if (key == "alias") made.alias = value.is(Json::Kind::null) ? "" : value.string();
      else if (key != "shape") throw std::invalid_argument("unknown key '" + key + "'");
    }
    for (const char *key : {"name", "role", "dtype"}) entry.at(key);
    for (const Json &dim : entry.at("shape").array())
      made.shape.push_back(dim.is(Json::Kind::string) ? Dim{dim.text, 0} : Dim{"", dim.integer()});
    return made;
  }
};

/// Inputs that the host fills at every step, by role.
struct HostInput {
  std::string dtype;
  std::vector<std::string> shape;
};
inline const std::map<std::string, HostInput> &host_inputs() {
  static const std::map<std::string, HostInput> inputs{
      {"tokens", {"int64", {"batch", "sequence"}}},
      {"past_len", {"int32", {"batch"}}},
      {"new_len", {"int32", {"batch"}}},
      {"live", {"int32", {}}},
      {"logit_index", {"int64", {"batch", "picks"}}},
      {"enc_src", {"int32", {"batch", "encode"}}},
      {"enc_dst", {"int32", {"batch", "encode"}}},
      {"select_len", {"int32", {"batch"}}},
      {"select_width", {"int32", {}}},
  };
  return inputs;
}

constexpr int64_t LIVE_STEP = 32;       // `live` is the longest past rounded up to this many tokens
constexpr int64_t CAPACITY_STEP = 256;  // capacities are rounded up to this many tokens
constexpr int64_t TILE_ROWS = 16;       // code rows of a tile

/// Rows of `symbol` that hold data once `stored` tokens are in the cache (the trash row not counted).
inline int64_t row_count(const std::string &symbol, int64_t stored, const std::optional<Geometry> &geometry) {
  if (symbol == "rows") return stored;
  if (!geometry) throw std::invalid_argument(symbol + " needs a geometry");
  if (symbol == "ref_rows") return geometry->references(stored);
  return geometry->encoded(stored) / (symbol == "code_tiles" ? TILE_ROWS : 1);
}

/// Sizes of the symbols that a state's shape may contain; the last row along each is the trash row.
inline Sizes state_sizes(int64_t capacity, const std::optional<Geometry> &geometry, int64_t batch = 1) {
  Sizes sizes{{"batch", batch}};
  for (const std::string &symbol : TensorSpec::row_symbols())
    if (geometry || symbol == "rows") sizes[symbol] = row_count(symbol, capacity, geometry) + 1;
  return sizes;
}

/// Tokens for which a session with room for `current` allocates once it needs `tokens`: a quarter more, in steps.
inline int64_t capacity_for(int64_t tokens, int64_t max_length, int64_t current = 0) {
  if (tokens <= current) return current;
  const int64_t wanted = std::max(tokens, current * 5 / 4);
  return std::max(tokens, std::min((wanted + CAPACITY_STEP - 1) / CAPACITY_STEP * CAPACITY_STEP, max_length));
}

// -- the engine folder

/// A checked engine folder.
struct Artefact {
  std::filesystem::path path;
  Json config;
  std::vector<TensorSpec> inputs, outputs;
  std::optional<Geometry> geometry;
  int64_t max_length = 0, vocab_size = 0;

  static constexpr int FORMAT = 2;
  static constexpr const char *REBUILD = "rebuild the engine with `python -m export build`";

  /// Checks everything before anything is parsed by others. verify = false skips only the SHA-256 of the files.
  /// Throws Error.
  static Artefact open(const std::filesystem::path &folder, bool verify = true) {
    if (!std::filesystem::is_directory(folder))
      throw Error(folder.string() + " is not an engine folder: pass the folder that `python -m export build` wrote.");
    Artefact made;
    made.path = folder;
    made.read_config();
    made.check_files(verify);
    made.check_contract();
    return made;
  }

  bool has_file(const std::string &name) const { return config.at("files").find(name); }
  std::string backend() const {
    const Json *name = config.at("target").find("backend");
    return name && name->is(Json::Kind::string) ? name->text : "";
  }
  std::vector<TensorSpec> states() const {
    std::vector<TensorSpec> found;
    for (const TensorSpec &spec : inputs)
      if (spec.role == "state") found.push_back(spec);
    return found;
  }
  std::string logits() const {
    for (const TensorSpec &spec : outputs)
      if (spec.role == "logits") return spec.name;
    throw std::logic_error("no logits");
  }
  /// A file of the engine that holds JSON; null where there is none.
  Json json_file(const std::string &name) const {
    if (!has_file(name)) return {};
    try {
      return Json::parse(content(path / name));
    } catch (const std::invalid_argument &error) {
      throw Error((path / name).string() + " cannot be read (" + error.what() + "): " + REBUILD + ".");
    }
  }

 private:
  std::string config_name() const { return (path / "config.json").string(); }
  [[noreturn]] void refuse(const std::string &what) const {
    throw Error(config_name() + ": " + what + "; " + REBUILD + ".");
  }

  static std::string content(const std::filesystem::path &file) {
    std::ifstream stream(file, std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(stream), {}};
    if (!stream) throw Error(file.string() + " cannot be read: check its permissions.");
    return text;
  }
  static std::string sha256(const std::filesystem::path &file) {
    std::ifstream stream(file, std::ios::binary);
    Sha256 digest;
    std::vector<char> part(1 << 20);
    while (stream.read(part.data(), static_cast<std::streamsize>(part.size())) || stream.gcount() > 0)
      digest.update(part.data(), static_cast<size_t>(stream.gcount()));
    if (!stream.eof()) throw Error(file.string() + " cannot be read: check its permissions.");
    return digest.hex();
  }
  static uint64_t regular_size(const std::filesystem::path &file) {
    namespace fs = std::filesystem;
    std::error_code error;
    const fs::file_status status = fs::symlink_status(file, error);
    if (!fs::exists(status)) throw Error(file.string() + " is missing: " + REBUILD + ".");
    if (!fs::is_regular_file(status)) {
      const char *kind = fs::is_symlink(status) ? "a symbolic link" : "not a regular file";
      throw Error(file.string() + " is " + kind + ", which an engine may not contain: copy the real file there.");
    }
    if (const auto links = fs::hard_link_count(file); links > 1)
      throw Error(file.string() + " is one of " + std::to_string(links) +
                  " hard links to the same file: copy it instead of linking.");
    return fs::file_size(file);
  }

  void read_config() {
    constexpr uint64_t LIMIT = 16 << 20;
    const std::string name = config_name();
    if (regular_size(name) > LIMIT)
      throw Error(name + " is larger than 16 MiB, so it is no engine configuration: " + REBUILD + ".");
    try {
      config = Json::parse(content(name));
    } catch (const std::invalid_argument &) {
      throw Error(name + " is not valid JSON: " + REBUILD + ".");
    }
    if (!config.is(Json::Kind::object)) throw Error(name + " does not hold a JSON object: " + REBUILD + ".");
    const Json *format = config.find("format");
    if (!format || !format->is(Json::Kind::number) || format->text != std::to_string(FORMAT)) {
      std::string found = "no format";
      if (format) found = "format ", format->write(found);
      throw Error(name + " has " + found + " and this host reads format " + std::to_string(FORMAT) + ": " + REBUILD +
                  ".");
    }
    const Json *digest = config.find("digest");
    Json body = config;
    body.members.erase("digest");
    std::string canonical;
    body.write(canonical);
    Sha256 computed;
    computed.update(canonical.data(), canonical.size());
    if (!digest || digest->text != computed.hex())
      throw Error(name + " was changed after the build (its digest does not match): " + REBUILD + ".");
    std::set<std::string> required{"format",   "kvpack", "model",   "method",      "dtype",  "kv_dtype", "limits",
                                   "geometry", "inputs", "outputs", "fixed_bytes", "target", "files",    "digest"};
    for (const auto &[key, value] : config.members)
      if (!required.erase(key) && key != "nodes")
        throw Error(name + " has the unknown key '" + key + "': " + REBUILD + ".");
    if (!required.empty()) throw Error(name + " lacks the key '" + *required.begin() + "': " + REBUILD + ".");
  }

  void check_files(bool verify) const {
    // A stray file of one of these kinds could be picked up by a loader, so it must be listed.
    static const std::set<std::string> loadable{".onnx", ".data",  ".plan", ".safetensors", ".so",
                                                ".dll",  ".jinja", ".json", ".model",       ".bin"};
    const Json &files = config.at("files");
    if (!files.is(Json::Kind::object) || files.members.empty())
      throw Error(config_name() + " lists no files: " + REBUILD + ".");
    for (const auto &[name, entry] : files.members) {
      if (name.empty() || name == "." || name == ".." || name == "config.json" ||
          name.find_first_of(std::string("/\\\0", 3)) != std::string::npos)
        throw Error(config_name() + " lists '" + name + "', which is not a plain file name: " + REBUILD + ".");
      const Json *digest = entry.find("sha256"), *bytes = entry.find("bytes");
      if (entry.members.size() != 2 || !digest || !bytes)
        throw Error(config_name() + " has no size and SHA-256 for '" + name + "': " + REBUILD + ".");
    }
    for (const auto &found : std::filesystem::directory_iterator(path)) {
      const std::string name = found.path().filename().string();
      std::string kind = found.path().extension().string();
      for (char &letter : kind) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
      if (!files.find(name) && name != "config.json" && name != "report.json" && loadable.count(kind))
        throw Error(found.path().string() + " is not listed in config.json: delete it, or " + REBUILD + ".");
    }
    for (const auto &[name, entry] : files.members) {
      const std::string size = std::to_string(regular_size(path / name)), &listed = entry.at("bytes").text;
      if (size != listed)
        throw Error((path / name).string() + " has " + size + " bytes, not " + listed + ": copy it again or " +
                    REBUILD + ".");
    }
    for (const auto &[name, entry] : files.members)
      if (verify && sha256(path / name) != entry.at("sha256").text)
        throw Error((path / name).string() + " is damaged (its SHA-256 does not match): copy it again or " + REBUILD +
                    ".");
  }

  void read_contract() {
    for (const Json &entry : config.at("inputs").array()) inputs.push_back(TensorSpec::from_json(entry));
    for (const Json &entry : config.at("outputs").array()) outputs.push_back(TensorSpec::from_json(entry));
    if (!config.at("geometry").is(Json::Kind::null)) geometry = Geometry::from_json(config.at("geometry"));
    max_length = config.at("limits").at("max_length").integer();
    vocab_size = config.at("model").at("vocab_size").integer();
    config.at("target").object();
    int64_t least = config.at("fixed_bytes").integer();
    for (const char *key : {"num_layers", "num_kv_heads", "head_dim"})
      least = std::min(least, config.at("model").at(key).integer());
    if (const Json *nodes = config.find("nodes"))
      for (const Json &node : nodes->array()) {
        node.at("op").string(), node.at("attributes").object();
        if (node.members.size() != 2) throw std::invalid_argument("an entry of the nodes has an unknown key");
      }
    if (least < 0 || max_length < 1 || max_length > INT32_MAX - 2 * LIVE_STEP || vocab_size < 1 ||
        vocab_size > INT32_MAX)
      throw std::invalid_argument("limits or model sizes are out of range");
  }

  /// Roles, dtypes, shapes and the alias table, so that a session may bind without looking.
  void check_contract() {
    try {
      read_contract();
    } catch (const std::invalid_argument &error) {
      refuse(std::string("the tensor contract is malformed (") + error.what() + ")");
    }
    std::set<std::string> names, roles;
    for (const std::vector<TensorSpec> *side : {&inputs, &outputs}) {
      names.clear();
      for (const TensorSpec &spec : *side)
        if (!names.insert(spec.name).second) refuse("two tensors of the contract have the same name");
    }
    for (const TensorSpec &spec : inputs) {
      if (spec.role == "state") continue;
      const auto known = host_inputs().find(spec.role);
      if (known == host_inputs().end()) refuse("the input role '" + spec.role + "' is unknown to this host");
      if (!roles.insert(spec.role).second) refuse("two inputs have the same role");
      std::vector<Dim> shape;
      for (const std::string &symbol : known->second.shape) shape.push_back({symbol, 0});
      if (spec.dtype != known->second.dtype || spec.shape != shape)
        refuse("'" + spec.name + "' must be " + known->second.dtype + " of " + std::to_string(shape.size()) +
               " dimensions");
    }
    for (const char *role : {"tokens", "past_len", "new_len"})
      if (!roles.count(role)) refuse(std::string("no input has the role '") + role + "'");
    for (const auto &[first, second] : {std::pair("enc_src", "enc_dst"), std::pair("select_len", "select_width")})
      if (roles.count(first) != roles.count(second) || (roles.count(first) && !geometry))
        refuse(std::string(first) + ", " + second + " and a geometry must come together");

    std::map<std::string, const TensorSpec *> written;
    size_t logits_count = 0;
    for (const TensorSpec &spec : outputs) {
      if (spec.role == "state") {
        written[spec.name] = &spec;
      } else if (spec.role == "logits") {
        ++logits_count;
        const bool vocab =
            spec.shape.size() == 3 && (spec.shape[2] == Dim{"", vocab_size} || spec.shape[2] == Dim{"vocab", 0});
        if (spec.dtype != "float32" || !vocab || !(spec.shape[0] == Dim{"batch", 0}) ||
            !(spec.shape[1] == Dim{"picks", 0}))
          refuse("the logits are not float32 [batch, picks, " + std::to_string(vocab_size) + "]");
      } else if (spec.role != "selected") {
        refuse("an output is neither the logits nor a state");
      } else if (spec.dtype != "int32" || spec.shape != std::vector<Dim>{{"batch", 0}, {"selected", 0}}) {
        refuse("'" + spec.name + "' must be int32 [batch, selected]");
      }
    }
    if (logits_count != 1) refuse("there must be one output 'logits', float32 [batch, picks, vocab]");
    static const std::set<std::string> dtypes{"float16", "bfloat16", "float32", "int8", "int16", "int32"};
    for (const TensorSpec &spec : states()) {
      if (!dtypes.count(spec.dtype)) refuse("the state '" + spec.name + "' has the dtype '" + spec.dtype + "'");
      bool sound = !spec.shape.empty() && spec.shape[0] == Dim{"batch", 0};
      for (const Dim &dim : spec.shape)
        sound &= dim.symbol.empty() ? dim.size >= 1 && dim.size <= INT32_MAX
                                    : dim.symbol == "batch" || dim.symbol == "rows" ||
                                          (geometry && TensorSpec::row_symbols().count(dim.symbol));
      if (!sound) refuse("the state '" + spec.name + "' has a shape that no session can allocate");
      const auto target = written.find(spec.alias);
      if (target == written.end())
        refuse("the state '" + spec.name + "' has no output of its own to alias (alias '" + spec.alias + "')");
      if (target->second->dtype != spec.dtype || target->second->shape != spec.shape)
        refuse("the state '" + spec.name + "' and its alias '" + spec.alias + "' differ in dtype or shape");
      written.erase(target);
    }
    if (!written.empty()) refuse("the state output '" + written.begin()->first + "' is the alias of no input");
  }
};

// -- the cache

/// Where caches live. Addresses are the host's or a device's.
class Memory {
 public:
  virtual ~Memory() = default;
  /// Zeroed memory; nullptr when there is no room.
  virtual void *allocate(size_t nbytes) = 0;
  virtual void release(void *address) = 0;
  virtual void copy(void *to, const void *from, size_t nbytes) = 0;
  virtual size_t free_bytes() { return SIZE_MAX; }
};

class HostMemory : public Memory {
 public:
  void *allocate(size_t nbytes) override { return std::calloc(std::max<size_t>(nbytes, 1), 1); }
  void release(void *address) override { std::free(address); }
  void copy(void *to, const void *from, size_t nbytes) override { std::memcpy(to, from, nbytes); }
};

/// The state tensors of `batch` sequences with room for `capacity` tokens each (0: nothing is allocated yet).
///
/// Unused rows are zero, never uninitialised: the graph masks them, and a masked NaN would still be a NaN.
class State {
 public:
  struct Tensor {
    TensorSpec spec;
    Dims dims;
    void *input = nullptr, *output = nullptr;  // one address, unless the engine does not write in place
  };

  State(const Artefact &artefact, int64_t batch, Memory &memory, bool in_place = true)
      : geometry_(artefact.geometry), batch_(batch), memory_(memory), in_place_(in_place) {
    for (TensorSpec &spec : artefact.states()) tensors_.push_back({std::move(spec), {}});
  }
  ~State() { release(); }
  State(const State &) = delete;
  State &operator=(const State &) = delete;

  int64_t capacity() const { return capacity_; }
  const std::vector<Tensor> &tensors() const { return tensors_; }
  /// A number that changes when the tensors move, and that no other State has: what was bound by another is stale.
  uint64_t place() const { return place_; }
  /// Bytes as allocated, all sequences together.
  int64_t nbytes() const { return capacity_ ? bytes(capacity_) : 0; }
  /// The code row that padding writes to.
  int64_t trash() const { return geometry_ ? row_count("code_rows", capacity_, geometry_) : 0; }
  /// Whether a step never overwrites a stored row, so that a failed one leaves the cache valid.
  bool append_only() const {
    return std::all_of(tensors_.begin(), tensors_.end(),
                       [](const Tensor &one) { return one.spec.row_axis().has_value(); });
  }

  /// Moves to new buffers of `capacity` tokens, keeping the rows that `stored` tokens use. Throws Error when there is
  /// no memory: then all is as before, or, where the memory had less than it said, nothing is left and the capacity is
  /// 0.
  void allocate(int64_t capacity, int64_t stored) {
    int64_t largest = 0;  // is there twice while it moves
    if (capacity_)
      for (const Tensor &one : tensors_) largest = std::max(largest, one.spec.nbytes(sizes(capacity)));
    if (static_cast<size_t>(std::max<int64_t>(bytes(capacity) - nbytes() + largest, 0)) > memory_.free_bytes())
      no_room(capacity);
    for (Tensor &one : tensors_) {
      const Dims dims = one.spec.dims(sizes(capacity));
      const auto nbytes = static_cast<size_t>(one.spec.nbytes(sizes(capacity)));
      void *input = memory_.allocate(nbytes), *output = in_place_ ? input : memory_.allocate(nbytes);
      if (!input || !output) {
        if (input) memory_.release(input);
        if (output && output != input) memory_.release(output);
        release();
        no_room(capacity);
      }
      if (capacity_) take(one, input, dims, stored);
      free(one);
      one.dims = dims, one.input = input, one.output = output;
    }
    capacity_ = capacity;
    place_ = ++places_;
  }
  /// After a step: what it wrote is what the next one reads.
  void swap() {
    for (Tensor &one : tensors_) std::swap(one.input, one.output);
  }

 private:
  std::optional<Geometry> geometry_;
  int64_t batch_, capacity_ = 0;
  Memory &memory_;
  bool in_place_;
  uint64_t place_ = 0;
  static inline std::atomic<uint64_t> places_{0};
  std::vector<Tensor> tensors_;

  Sizes sizes(int64_t capacity) const { return state_sizes(capacity, geometry_, batch_); }
  int64_t bytes(int64_t capacity) const {
    int64_t sum = 0;
    for (const Tensor &one : tensors_) sum += one.spec.nbytes(sizes(capacity));
    return in_place_ ? sum : 2 * sum;
  }
  [[noreturn]] void no_room(int64_t capacity) const {
    throw Error("there is no memory for a cache of " + std::to_string(capacity) + " tokens x " +
                std::to_string(batch_) + " sequences: close other sessions, or use fewer or shorter sequences.");
  }
  /// Copies the rows that `stored` tokens use to a buffer that may have more of them.
  void take(const Tensor &one, void *to, const Dims &dims, int64_t stored) {
    const size_t axis = one.spec.row_axis().value_or(0);
    const auto place = dims.begin() + static_cast<std::ptrdiff_t>(axis);
    const int64_t row = product(place + 1, dims.end()) * static_cast<int64_t>(item_size(one.spec.dtype));
    const int64_t rows = one.spec.row_axis() ? row_count(one.spec.shape[axis].symbol, stored, geometry_) : *place;
    for (int64_t slab = 0; rows > 0 && slab < product(dims.begin(), place); ++slab)
      memory_.copy(static_cast<char *>(to) + slab * dims[axis] * row,
                   static_cast<const char *>(one.input) + slab * one.dims[axis] * row, static_cast<size_t>(rows * row));
  }
  void free(Tensor &one) {
    if (one.input) memory_.release(one.input);
    if (one.output && one.output != one.input) memory_.release(one.output);
    one.input = one.output = nullptr;
  }
  void release() {
    for (Tensor &one : tensors_) free(one);
    capacity_ = 0;
  }
};

// -- a step

/// What the host gives a step, by role, and the sizes of it: B sequences, S tokens of the longest of them (the others
/// are padded behind), E rows to encode.
struct Step {
  int64_t batch = 0, width = 0, encode = 0;
  std::vector<int64_t> tokens, logit_index;                              // [B, S], [B, 1]
  std::vector<int32_t> past_len, new_len, enc_src, enc_dst, select_len;  // [B], [B], [B, E], [B, E], [B]
  int32_t live = 0, select_width = 0;

  /// padded: the least S, where a backend does not take less. capacity, trash: the state's.
  static Step make(const std::vector<std::vector<int64_t>> &rows, const std::vector<int64_t> &lengths,
                   const std::optional<Geometry> &geometry, int64_t capacity, int64_t trash, int64_t padded = 1) {
    Step made;
    made.batch = static_cast<int64_t>(rows.size());
    made.width = padded;
    int64_t longest = 0;
    for (size_t b = 0; b < rows.size(); ++b) {
      const auto count = static_cast<int64_t>(rows[b].size());
      made.width = std::max(made.width, count);
      longest = std::max(longest, lengths[b]);
      made.past_len.push_back(static_cast<int32_t>(lengths[b]));
      made.new_len.push_back(static_cast<int32_t>(count));
      made.logit_index.push_back(std::max<int64_t>(count - 1, 0));
    }
    for (const std::vector<int64_t> &row : rows) {
      made.tokens.insert(made.tokens.end(), row.begin(), row.end());
      made.tokens.resize(made.tokens.size() + static_cast<size_t>(made.width) - row.size(), 0);
    }
    made.live = static_cast<int32_t>(std::min((longest + LIVE_STEP - 1) / LIVE_STEP * LIVE_STEP, capacity));
    if (geometry) {
      made.schedule(*geometry, trash);
      made.selection(*geometry);
    }
    return made;
  }

  /// The tensor of a role: its address (never null) and dimensions.
  const void *data(const std::string &role) const {
    static const int64_t nothing = 0;
    const void *found = role == "tokens"         ? static_cast<const void *>(tokens.data())
                        : role == "past_len"     ? past_len.data()
                        : role == "new_len"      ? new_len.data()
                        : role == "live"         ? static_cast<const void *>(&live)
                        : role == "logit_index"  ? static_cast<const void *>(logit_index.data())
                        : role == "enc_src"      ? enc_src.data()
                        : role == "enc_dst"      ? enc_dst.data()
                        : role == "select_len"   ? select_len.data()
                        : role == "select_width" ? static_cast<const void *>(&select_width)
                                                 : nullptr;
    return found ? found : &nothing;
  }
  Dims dims(const std::string &role) const {
    const Sizes sizes{{"batch", batch}, {"sequence", width}, {"picks", 1}, {"encode", encode}};
    Dims made;
    for (const std::string &symbol : host_inputs().at(role).shape) made.push_back(sizes.at(symbol));
    return made;
  }
  size_t nbytes(const std::string &role) const {
    return static_cast<size_t>(product(dims(role))) * item_size(host_inputs().at(role).dtype);
  }

 private:
  /// Which rows are encoded. enc_src: indices into the old exact rows followed by the new tokens. enc_dst: code rows.
  void schedule(const Geometry &geometry, int64_t trash) {
    for (size_t b = 0; b < past_len.size(); ++b)
      encode = std::max(encode, geometry.encoded(past_len[b] + new_len[b]) - geometry.encoded(past_len[b]));
    for (size_t b = 0; b < past_len.size(); ++b) {
      const int64_t past = past_len[b], first = geometry.encoded(past), last = geometry.encoded(past + new_len[b]);
      for (int64_t row = first; row < first + encode; ++row) {
        const int64_t position = row + geometry.sinks;
        const int64_t source = position < past ? geometry.slot(position) : geometry.dense_rows() + position - past;
        enc_src.push_back(row < last ? static_cast<int32_t>(source) : 0);
        enc_dst.push_back(static_cast<int32_t>(row < last ? row : trash));
      }
    }
  }
  /// How many code rows are read, and how many there is room for.
  void selection(const Geometry &geometry) {
    const int64_t room = geometry.encoded(live);
    int64_t most = 0;
    for (const int32_t past : past_len) {
      const int64_t count = width == 1 ? geometry.selected(past) : geometry.encoded(past);
      select_len.push_back(static_cast<int32_t>(count));
      most = std::max(most, count);
    }
    const int64_t step = Geometry::SELECT_STEP, rounded = (most + step - 1) / step * step;
    select_width = static_cast<int32_t>(width == 1 ? std::min(rounded, room) : room);
  }
};

/// What computes steps.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual Memory &memory() = 0;
  /// What computes, for people.
  virtual std::string name() const = 0;
  /// Whether a state's output may have the address of its input.
  virtual bool in_place() const { return true; }
  /// The most tokens of a sequence that one step takes.
  virtual int64_t most_tokens() const { return INT32_MAX; }
  /// The most sequences of a session.
  virtual int64_t most_sequences() const { return INT32_MAX; }
  /// The S that a step of `tokens` tokens must have, at least `tokens`.
  virtual int64_t padded(int64_t tokens) const { return tokens; }
  /// Computes a step over the state, which it updates, and writes the logits of the last new token of each sequence,
  /// float32 [B, V]. Throws Error.
  virtual void run(const Step &step, const State &state, float *logits) = 0;
};

/// One cache and the lengths of its sequences. One thread at a time may use it.
class Session {
 public:
  using Rows = std::vector<std::vector<int64_t>>;  // tokens of each sequence; may be empty

  /// Throws Error when the backend does not take so many sequences.
  Session(const Artefact &artefact, Backend &backend, int64_t batch)
      : artefact_(artefact),
        backend_(backend),
        lengths_(checked(batch), 0),
        logits_(lengths_.size() * static_cast<size_t>(artefact.vocab_size)),
        state_(artefact, batch, backend.memory(), backend.in_place()) {}

  /// Tokens stored per sequence.
  const std::vector<int64_t> &lengths() const { return lengths_; }
  const State &state() const { return state_; }
  /// Forget every token, keep the memory.
  void reset() {
    std::fill(lengths_.begin(), lengths_.end(), 0);
    broken_ = false;
  }

  /// Appends tokens[b] to sequence b and returns the logits behind its last one, float32 [B, V]; those of a sequence
  /// that was given none mean nothing. Valid until the next call. Prompts longer than `chunk` tokens (0: as many as the
  /// backend takes) are appended in several steps. Throws Error before anything is written, or when a step fails; steps
  /// before it stay, see lengths().
  const float *append(const Rows &tokens, int64_t chunk = 0) {
    const int64_t longest = check(tokens);
    const int64_t part = std::min(chunk > 0 ? chunk : INT32_MAX, backend_.most_tokens());
    const auto [needed, stored] = std::pair(longest_after(tokens), *std::max_element(lengths_.begin(), lengths_.end()));
    if (needed > state_.capacity()) grow(capacity_for(needed, artefact_.max_length, state_.capacity()), stored);
    if (longest <= part) return step(tokens, logits_);
    std::vector<float> some(logits_.size());
    for (int64_t start = 0; start < longest; start += part) {
      Rows rows(tokens.size());
      for (size_t b = 0; b < tokens.size(); ++b) {
        const auto count = static_cast<int64_t>(tokens[b].size());
        rows[b].assign(tokens[b].begin() + std::min(start, count), tokens[b].begin() + std::min(start + part, count));
      }
      // A last token is not left to a decode step, which may read a selection only.
      const float *found = step(rows, some, std::min<int64_t>(part, 2));
      const auto width = static_cast<size_t>(artefact_.vocab_size);
      for (size_t b = 0; b < rows.size(); ++b)
        if (!rows[b].empty()) std::copy_n(found + b * width, width, logits_.data() + b * width);
    }
    return logits_.data();
  }

  /// Throws what `append` would throw about these tokens, and does nothing else. Returns the most of a sequence.
  int64_t check(const Rows &tokens) const {
    if (broken_) throw Error("this session lost its cache in a failed step: reset it.");
    if (tokens.size() != lengths_.size())
      throw Error(std::to_string(tokens.size()) + " token lists were given to a session of batch " +
                  std::to_string(lengths_.size()) + ".");
    int64_t longest = 0;
    for (size_t b = 0; b < tokens.size(); ++b) {
      const auto count = static_cast<int64_t>(tokens[b].size());
      longest = std::max(longest, count);
      for (const int64_t token : tokens[b])
        if (token < 0 || token >= artefact_.vocab_size)
          throw Error("token " + std::to_string(token) + " of sequence " + std::to_string(b) +
                      " is outside the vocabulary of " + std::to_string(artefact_.vocab_size) + ".");
      if (count > artefact_.max_length - lengths_[b])
        throw Error("sequence " + std::to_string(b) + " holds " + std::to_string(lengths_[b]) + " tokens and " +
                    std::to_string(count) + " more exceed the engine's limit of " +
                    std::to_string(artefact_.max_length) +
                    ": shorten the prompt or export with a larger --max-length.");
    }
    if (longest == 0) throw Error("there are no tokens to append: the prompt is empty.");
    return longest;
  }

 private:
  const Artefact &artefact_;
  Backend &backend_;
  std::vector<int64_t> lengths_;
  std::vector<float> logits_;
  State state_;
  bool broken_ = false;

  size_t checked(int64_t batch) const {
    const int64_t most = backend_.most_sequences();
    if (batch >= 1 && batch <= most) return static_cast<size_t>(batch);
    throw Error(artefact_.path.string() + " takes 1 to " + std::to_string(most) + " sequences at once, not " +
                std::to_string(batch) + ": use fewer, or build it with a larger --batch.");
  }
  int64_t longest_after(const Rows &tokens) const {
    int64_t most = 0;
    for (size_t b = 0; b < tokens.size(); ++b)
      most = std::max(most, lengths_[b] + static_cast<int64_t>(tokens[b].size()));
    return most;
  }
  void grow(int64_t capacity, int64_t stored) {
    try {
      state_.allocate(capacity, stored);
    } catch (const Error &) {
      broken_ = state_.capacity() == 0 && stored > 0;
      throw;
    }
  }
  const float *step(const Rows &rows, std::vector<float> &logits, int64_t least = 1) {
    size_t most = 0;
    for (const std::vector<int64_t> &row : rows) most = std::max(most, row.size());
    const int64_t width = backend_.padded(std::max(static_cast<int64_t>(most), least));
    const Step made = Step::make(rows, lengths_, artefact_.geometry, state_.capacity(), state_.trash(), width);
    const int64_t past = *std::max_element(lengths_.begin(), lengths_.end());
    try {
      backend_.run(made, state_, logits.data());
    } catch (const Error &error) {
      broken_ = past > 0 && backend_.in_place() && !state_.append_only();
      throw Error("appending " + std::to_string(most) + " tokens to " + std::to_string(past) + " failed (" +
                  error.what() + "): " + (broken_ ? "reset the session." : "the session is as before."));
    }
    if (!backend_.in_place()) state_.swap();
    for (size_t b = 0; b < rows.size(); ++b) lengths_[b] += static_cast<int64_t>(rows[b].size());
    return logits.data();
  }
};

}  // namespace kvpack
