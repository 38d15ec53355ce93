// From tokens to text, for engines with a byte-level tokenizer, and the tokens that end a sequence. Text to tokens is
// not here: see README.md.
#pragma once

#include "kvpack_host.hpp"

namespace kvpack {

/// The text side of an engine.
class Text {
 public:
  /// Reads the tokenizer's files of a checked engine. Throws Error.
  explicit Text(const Artefact &artefact) {
    const Json tokenizer = artefact.json_file("tokenizer.json");
    if (tokenizer.is(Json::Kind::null)) return;
    try {
      read(tokenizer);
      read_endings(artefact.json_file("generation_config.json"), artefact.json_file("tokenizer_config.json"));
    } catch (const std::invalid_argument &error) {
      throw Error((artefact.path / "tokenizer.json").string() + " or a file beside it is not understood (" +
                  error.what() + "): " + Artefact::REBUILD + ".");
    }
  }

  /// Whether tokens can be turned into text here.
  bool decodes() const { return byte_level_; }
  /// Tokens that end a sequence.
  const std::set<int64_t> &endings() const { return endings_; }

  /// The bytes that a token adds to the text: none for a special token. A character may take several tokens.
  std::string bytes(int64_t token) const {
    const auto found = pieces_.find(token);
    if (found == pieces_.end()) return "";
    std::string made;
    for (size_t at = 0; at < found->second.size();) {
      const int byte = byte_of(Json::code_point(found->second, at));
      if (byte < 0) return found->second;
      made += static_cast<char>(byte);
    }
    return made;
  }

  /// Takes from the front of `bytes` what is whole characters, and shows what can be none as U+FFFD. last: no more
  /// come.
  static std::string characters(std::string &bytes, bool last) {
    std::string made;
    size_t at = 0;
    while (at < bytes.size()) {
      const auto [length, whole] = character(std::string_view(bytes).substr(at));
      if (!whole && !last && at + length == bytes.size()) break;
      made += whole ? bytes.substr(at, length) : "\xEF\xBF\xBD";
      at += length;
    }
    bytes.erase(0, at);
    return made;
  }

 private:
  std::map<int64_t, std::string> pieces_;  // of tokens that are not special
  std::map<std::string, int64_t> ids_;
  std::set<int64_t> endings_;
  bool byte_level_ = false;

  /// How many of the first bytes are the beginning of one character, at least one, and whether they are all of it.
  static std::pair<size_t, bool> character(std::string_view bytes) {
    const auto at = [bytes](size_t n) { return static_cast<unsigned char>(bytes[n]); };
    const unsigned char first = at(0);
    if (first < 0x80) return {1, true};
    const size_t length = first < 0xC2 || first > 0xF4 ? 0 : first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    for (size_t n = 1; n < length; ++n) {
      const bool second = n == 1;  // neither longer than need be, nor half a surrogate pair, nor beyond U+10FFFF
      const int least = second && first == 0xE0 ? 0xA0 : second && first == 0xF0 ? 0x90 : 0x80;
      const int most = second && first == 0xED ? 0x9F : second && first == 0xF4 ? 0x8F : 0xBF;
      if (n == bytes.size() || at(n) < least || at(n) > most) return {n, false};
    }
    return {std::max<size_t>(length, 1), length > 0};
  }

  /// The byte that a character stands for in a byte-level vocabulary: printable ones stand for themselves, the others
  /// are numbered from 256 on.
  static int byte_of(uint32_t code) {
    static const std::map<uint32_t, int> bytes = [] {
      std::map<uint32_t, int> made;
      uint32_t next = 256;
      for (int byte = 0; byte < 256; ++byte) {
        const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
        made[printable ? static_cast<uint32_t>(byte) : next++] = byte;
      }
      return made;
    }();
    const auto found = bytes.find(code);
    return found == bytes.end() ? -1 : found->second;
  }

  void read(const Json &tokenizer) {
    const Json *decoder = tokenizer.find("decoder");
    const Json *kind = decoder ? decoder->find("type") : nullptr;
    byte_level_ = kind && kind->text == "ByteLevel";
    if (const Json *vocab = tokenizer.at("model").find("vocab"); vocab && vocab->is(Json::Kind::object))
      for (const auto &[piece, id] : vocab->members) ids_[piece] = id.integer(), pieces_[id.integer()] = piece;
    if (const Json *added = tokenizer.find("added_tokens"))
      for (const Json &entry : added->array()) {
        const int64_t id = entry.at("id").integer();
        ids_[entry.at("content").string()] = id;
        if (entry.at("special").truth()) pieces_.erase(id);
        else pieces_[id] = entry.at("content").string();
      }
  }
  void read_endings(const Json &generation, const Json &settings) {
    if (const Json *ids = generation.find("eos_token_id"); ids && !ids->is(Json::Kind::null)) {
      if (ids->is(Json::Kind::number)) endings_.insert(ids->integer());
      else
        for (const Json &id : ids->array()) endings_.insert(id.integer());
    }
    const Json *eos = settings.find("eos_token");
    if (eos && eos->is(Json::Kind::object)) eos = eos->find("content");
    if (eos && ids_.count(eos->text)) endings_.insert(ids_[eos->text]);
  }
};

}  // namespace kvpack
