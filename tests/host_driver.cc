// Calls examples/cpp/kvpack_host.hpp and kvpack_sampling.hpp for tests/test_examples_cpp.py: what is on stdin in, text
// out.
#include "kvpack_sampling.hpp"

#include <cstdio>
#include <iostream>
#include <iterator>
#include <sstream>

using namespace kvpack;

namespace {

template <class N> std::vector<N> numbers(std::istream &line, size_t count) {
  std::vector<N> read(count);
  for (N &value : read) {
    std::string word;  // streams read no NaN
    if constexpr (std::is_floating_point_v<N>) line >> word, value = std::strtof(word.c_str(), nullptr);
    else line >> value;
  }
  return read;
}
template <class V> void show(const char *name, const V &values) {
  std::cout << name;
  for (const auto value : values) std::cout << ' ' << value;
  std::cout << '\n';
}

// "sinks window block stride fraction count  max_length current padded  B past... new..." a line.
void steps(const std::string &text) {
  std::istringstream lines(text);
  for (std::string each; std::getline(lines, each);) {
    std::istringstream line(each);
    Geometry geometry;
    line >> geometry.sinks >> geometry.window >> geometry.block >> geometry.stride >> geometry.select_fraction >>
        geometry.select_count;
    const auto given = numbers<int64_t>(line, 4);
    const auto batch = static_cast<size_t>(given[3]);
    const auto past = numbers<int64_t>(line, batch), fresh = numbers<int64_t>(line, batch);
    std::vector<std::vector<int64_t>> rows;
    int64_t needed = 0;
    for (size_t b = 0; b < batch; ++b) {
      needed = std::max(needed, past[b] + fresh[b]);
      rows.emplace_back(static_cast<size_t>(fresh[b]), static_cast<int64_t>(b) + 1);
    }
    const int64_t capacity = capacity_for(needed, given[0], given[1]);
    const Sizes sizes = state_sizes(capacity, geometry, given[3]);
    const Step step = Step::make(rows, past, geometry, capacity, sizes.at("code_rows") - 1, given[2]);
    show("sizes", std::vector<int64_t>{capacity, sizes.at("rows"), sizes.at("code_rows"), sizes.at("code_tiles"),
                                       sizes.at("ref_rows")});
    show("tokens", step.tokens), show("logit_index", step.logit_index);
    show("past_len", step.past_len), show("new_len", step.new_len), show("live", std::vector<int32_t>{step.live});
    show("enc_src", step.enc_src), show("enc_dst", step.enc_dst);
    show("select_len", step.select_len), show("select_width", std::vector<int32_t>{step.select_width});
  }
}

// "temperature top_k top_p seed index draws V logits..." a line.
void draws(const std::string &text) {
  std::istringstream lines(text);
  for (std::string each; std::getline(lines, each);) {
    std::istringstream line(each);
    SamplingParams params;
    uint64_t seed = 0;
    line >> params.temperature >> params.top_k >> params.top_p >> seed;
    params.seed = seed;
    const auto given = numbers<uint64_t>(line, 3);
    const auto logits = numbers<float>(line, given[2]);
    Sampler sampler(params, given[0]);
    for (uint64_t n = 0; n < given[1]; ++n) try {
        std::cout << sampler(logits.data(), logits.size()) << ' ';
      } catch (const Error &error) {
        std::cout << error.what();
      }
    std::cout << '\n';
  }
}

// Computes nothing; fails when it is told to.
struct Idle : Backend {
  HostMemory host;
  bool fails = false;
  std::set<uint64_t> places;
  std::vector<int64_t> widths;
  Memory &memory() override { return host; }
  std::string name() const override { return "idle"; }
  void run(const Step &step, const State &state, float *logits) override {
    if (fails) throw Error("told to");
    places.insert(state.place());
    widths.push_back(step.width);
    std::fill_n(logits, step.batch, 0.0f);
  }
};

// What sessions of an engine say when steps fail and sequences are too long.
void sessions(const std::string &engine) {
  const Artefact artefact = Artefact::open(engine);
  Idle backend;
  const auto attempt = [](Session &session, size_t count) {
    try {
      session.append({std::vector<int64_t>(count, 1)});
      std::cout << session.lengths()[0] << '\n';
    } catch (const Error &error) {
      std::cout << error.what() << '\n';
    }
  };
  for (int n = 0; n < 3; ++n) {  // at one address, one after the other
    Session session(artefact, backend, 1);
    attempt(session, 3);
  }
  std::cout << backend.places.size() << " places\n";
  backend.widths.clear();
  Session(artefact, backend, 1).append({std::vector<int64_t>(7, 1)}, 3);
  Session(artefact, backend, 1).append({std::vector<int64_t>(2, 1)}, 1);
  show("widths", backend.widths);
  Session session(artefact, backend, 1);
  attempt(session, 30);
  attempt(session, static_cast<size_t>(artefact.max_length) - 29);
  backend.fails = true;
  attempt(session, 2);
  backend.fails = false;
  attempt(session, 2);
  session.reset();
  attempt(session, 2);
}

}  // namespace

int main(int, char **argv) {
  const std::string what = argv[1], text{std::istreambuf_iterator<char>(std::cin), {}};
  if (what == "sha256") {
    Sha256 digest;
    for (size_t at = 0; at < text.size(); at += 100)
      digest.update(text.data() + at, std::min<size_t>(100, text.size() - at));
    std::cout << digest.hex();
  } else if (what == "json") {  // a document a line
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line); std::cout << '\n') try {
        std::string canonical;
        Json::parse(line).write(canonical);
        std::cout << canonical;
      } catch (const std::invalid_argument &error) {
        std::cout << "error: " << error.what();
      }
  } else if (what == "uniform") {  // "seed index" a line
    std::istringstream pairs(text);
    for (uint64_t seed, index; pairs >> seed >> index;) {
      Pcg64 random(seed, index);
      for (int n = 0; n < 5; ++n) std::printf("%a ", random.uniform());
      std::printf("\n");
    }
  } else if (what == "sum") {
    std::istringstream line(text);
    const std::vector<double> values{std::istream_iterator<double>(line), {}};
    std::printf("%a", pairwise_sum(values.data(), values.size()));
  } else if (what == "steps") {
    steps(text);
  } else if (what == "draws") {
    draws(text);
  } else if (what == "sessions") {
    sessions(text);
  } else {
    return 1;
  }
}
