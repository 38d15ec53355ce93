// What the two programs share: options, the loop, what is printed.
#pragma once

#include "kvpack_sampling.hpp"
#include "kvpack_text.hpp"

#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>

namespace kvpack {

/// An option of the command line. value: what it takes, as --help shows it; "" for none.
struct Option {
  std::string name, value, help;
  std::function<void(const std::string &)> set;
};

struct Options {
  std::string engine;
  Session::Rows prompts;
  SamplingParams sampling;
  int64_t chunk = 0;
  bool ignore_eos = false, text = false, json = false, verify = true;
};

template <class N> N numeral(const std::string &text, const std::string &option) {
  N value{};
  const char *end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end) throw Error(option + " " + text + ": give a number.");
  return value;
}

/// Token ids between commas or spaces.
inline std::vector<int64_t> token_list(const std::string &text, const std::string &where) {
  std::vector<int64_t> tokens;
  std::string word, spaced = text;
  std::replace(spaced.begin(), spaced.end(), ',', ' ');
  for (std::istringstream words(spaced); words >> word;) tokens.push_back(numeral<int64_t>(word, where));
  return tokens;
}

inline std::string file_text(const std::string &name) {
  std::ifstream stream(name, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(stream), {}};
  if (!stream) throw Error("the file " + name + " cannot be read: pass a text file of token ids.");
  return text;
}

inline std::vector<Option> common_options(Options &options) {
  const auto flag = [](bool &target, bool value) { return [&target, value](const std::string &) { target = value; }; };
  return {
      {"--engine", "DIR", "engine folder written by python -m export build", [&](auto &v) { options.engine = v; }},
      {"--tokens", "IDS", "token ids of a prompt, 1,2,3, or a file of them; repeat for a batch",
       [&](auto &v) {
         const bool list = v.find_first_not_of("0123456789, ") == std::string::npos;
         options.prompts.push_back(token_list(list ? v : file_text(v), "--tokens"));
       }},
      {"--prompt-file", "FILE", "one prompt a line, as token ids: a batch",
       [&](auto &v) {
         std::istringstream lines(file_text(v));
         for (std::string line; std::getline(lines, line);)
           options.prompts.push_back(token_list(line, "--prompt-file"));
       }},
      {"--max-tokens", "N", "default: up to the engine's limit",
       [&](auto &v) { options.sampling.max_tokens = numeral<int64_t>(v, "--max-tokens"); }},
      {"--temperature", "T", "0 is greedy (default)",
       [&](auto &v) { options.sampling.temperature = numeral<double>(v, "--temperature"); }},
      {"--top-p", "P", "1 keeps every token (default)",
       [&](auto &v) { options.sampling.top_p = numeral<double>(v, "--top-p"); }},
      {"--top-k", "K", "0 keeps every token (default)",
       [&](auto &v) { options.sampling.top_k = numeral<int64_t>(v, "--top-k"); }},
      {"--seed", "N", "draw what the Python runtime draws with it",
       [&](auto &v) { options.sampling.seed = numeral<uint64_t>(v, "--seed"); }},
      {"--ignore-eos", "", "go on past the end-of-sequence token", flag(options.ignore_eos, true)},
      {"--chunk", "N", "append prompts in steps of at most N tokens",
       [&](auto &v) {
         options.chunk = numeral<int64_t>(v, "--chunk");
         if (options.chunk < 1) throw Error("--chunk " + v + ": use at least 1.");
       }},
      {"--text", "", "print text instead of token ids", flag(options.text, true)},
      {"--json", "", "print one JSON value instead", flag(options.json, true)},
      {"--no-verify", "", "skip the SHA-256 of the engine's files", flag(options.verify, false)},
  };
}

/// Calls the options given. Returns false when they ask for help.
inline bool parse(const std::vector<Option> &options, int argc, char **argv) {
  for (int n = 1; n < argc; ++n) {
    const std::string name = argv[n];
    if (name == "--help" || name == "-h") return false;
    const auto found =
        std::find_if(options.begin(), options.end(), [&name](const Option &one) { return one.name == name; });
    if (found == options.end()) throw Error("the option " + name + " is unknown: see --help.");
    if (!found->value.empty() && n + 1 >= argc) throw Error(name + " needs a value: " + found->help + ".");
    found->set(found->value.empty() ? "" : argv[++n]);
  }
  return true;
}

/// One sequence of a batch as it is generated.
struct Completion {
  size_t prompt_tokens = 0;
  std::vector<int64_t> tokens;
  std::string text, unfinished, finish;  // unfinished: bytes of a character that is not whole yet
  int64_t left = 0;
};

/// Continues the prompts as one batch; a finished sequence costs no further cache. told: called with every token's
/// sequence, id and text, and whether it is the sequence's last.
inline std::vector<Completion> generate(const Artefact &artefact, Session &session, const Session::Rows &prompts,
                                        const SamplingParams &params, const Text &text, bool ignore_eos, int64_t chunk,
                                        const std::function<void(size_t, int64_t, const std::string &, bool)> &told) {
  session.check(prompts);
  std::vector<Completion> results(prompts.size());
  std::vector<Sampler> samplers;
  for (size_t b = 0; b < prompts.size(); ++b) {
    if (prompts[b].empty()) throw Error("prompt " + std::to_string(b) + " is empty.");
    samplers.emplace_back(params, b);
    results[b].prompt_tokens = prompts[b].size();
    // The last token needs no place in the cache, hence one more than fits.
    const int64_t room = artefact.max_length - static_cast<int64_t>(prompts[b].size()) + 1;
    results[b].left = params.max_tokens ? std::min(*params.max_tokens, room) : room;
  }
  const auto width = static_cast<size_t>(artefact.vocab_size);
  Session::Rows feeds = prompts;
  while (std::any_of(feeds.begin(), feeds.end(), [](const auto &row) { return !row.empty(); })) {
    const float *logits = session.append(feeds, chunk);
    for (size_t b = 0; b < feeds.size(); ++b) {
      if (feeds[b].empty()) continue;
      Completion &one = results[b];
      const int64_t token = samplers[b](logits + b * width, width);
      const bool ended = !ignore_eos && text.endings().count(token);
      one.tokens.push_back(token);
      if (ended) one.finish = "stop";
      else if (--one.left == 0) one.finish = "length";
      if (!ended && text.decodes()) one.unfinished += text.bytes(token);
      const std::string shown = Text::characters(one.unfinished, !one.finish.empty());
      one.text += shown;
      told(b, token, shown, !one.finish.empty());
      feeds[b].clear();
      if (one.finish.empty()) feeds[b].push_back(token);
    }
  }
  return results;
}

/// What is printed with --json.
inline std::string as_json(const std::vector<Completion> &results, bool text, double seconds, double first,
                           const Backend &backend, int64_t cache_bytes) {
  std::ostringstream out;
  size_t tokens = 0;
  out << "{\"sequences\": [";
  for (const Completion &one : results) {
    out << (tokens ? ", " : "") << "{\"tokens\": [";
    for (size_t n = 0; n < one.tokens.size(); ++n) out << (n ? ", " : "") << one.tokens[n];
    out << "], \"prompt_tokens\": " << one.prompt_tokens << ", \"finish\": \"" << one.finish << '"';
    std::string quoted;
    if (text) Json::write_string(one.text, quoted), out << ", \"text\": " << quoted;
    out << '}';
    tokens += one.tokens.size();
  }
  std::string kernels;
  Json::write_string(backend.name(), kernels);
  out << "], \"tokens\": " << tokens << ", \"seconds\": " << seconds << ", \"first_token_seconds\": " << first
      << ", \"tokens_per_second\": " << static_cast<double>(tokens) / seconds << ", \"kernels\": " << kernels
      << ", \"cache_bytes\": " << cache_bytes << "}\n";
  return out.str();
}

using Open = std::function<std::unique_ptr<Backend>(const Artefact &)>;

inline void complete(const Options &options, const Open &open) {
  if (options.engine.empty()) throw Error("there is no engine: pass --engine.");
  if (options.prompts.empty()) throw Error("there is no prompt: pass --tokens or --prompt-file.");
  options.sampling.check();
  const Artefact artefact = Artefact::open(options.engine, options.verify);
  const Text text(artefact);
  if (options.text && !text.decodes())
    throw Error(options.engine +
                " has no byte-level tokenizer, the only one that this host decodes: leave out --text.");
  const std::unique_ptr<Backend> backend = open(artefact);
  Session session(artefact, *backend, static_cast<int64_t>(options.prompts.size()));
  const bool stream = options.prompts.size() == 1 && !options.json;

  using Clock = std::chrono::steady_clock;
  const auto started = Clock::now();
  const auto since = [&started] { return std::chrono::duration<double>(Clock::now() - started).count(); };
  double first = 0;
  const auto told = [&](size_t, int64_t token, const std::string &shown, bool last) {
    if (first == 0) first = since();
    if (stream)
      std::cout << (options.text ? shown : std::to_string(token))
                << (last           ? "\n"
                    : options.text ? ""
                                   : ",")
                << std::flush;
  };
  const std::vector<Completion> results =
      generate(artefact, session, options.prompts, options.sampling, text, options.ignore_eos, options.chunk, told);
  const double seconds = since();

  if (options.json) {
    std::cout << as_json(results, text.decodes(), seconds, first, *backend, session.state().nbytes());
    return;
  }
  size_t tokens = 0;
  for (size_t b = 0; b < results.size(); ++b) {
    tokens += results[b].tokens.size();
    if (stream) continue;
    if (options.text) std::cout << "--- " << b + 1 << '\n' << results[b].text << '\n';
    else
      for (size_t n = 0; n < results[b].tokens.size(); ++n)
        std::cout << results[b].tokens[n] << (n + 1 < results[b].tokens.size() ? "," : "\n");
  }
  std::fprintf(stderr, "%zu tokens in %.2f s (%.1f tokens/s, the first after %.2f s); cache %.1f MiB; %s\n", tokens,
               seconds, static_cast<double>(tokens) / seconds, first,
               static_cast<double>(session.state().nbytes()) / (1 << 20), backend->name().c_str());
}

/// The whole program; the exit code: 0, or 2 with one sentence on stderr. own: options that only this program has.
inline int run(int argc, char **argv, const char *what, const std::vector<Option> &own, const Open &open) {
  try {
    Options options;
    std::vector<Option> known = common_options(options);
    known.insert(known.end(), own.begin(), own.end());
    if (!parse(known, argc, argv)) {
      std::cout << what << "\n\n";
      for (const Option &one : known) {
        std::string left = one.name + (one.value.empty() ? "" : " " + one.value);
        left.resize(std::max<size_t>(left.size(), 22), ' ');
        std::cout << "  " << left << one.help << '\n';
      }
      return 0;
    }
    complete(options, open);
    return 0;
  } catch (const std::exception &error) {
    std::cerr << "error: " << error.what() << "\n";
    return 2;
  }
}

}  // namespace kvpack
