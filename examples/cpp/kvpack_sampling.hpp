// From logits to a token, as runtime/sampling.py: the same seed gives the same tokens there and here.
//
// The generator is numpy's default (PCG64 seeded by a SeedSequence), and sums are made in numpy's order. What is left
// is the last bit of exp(), which numpy computes by itself on some processors: a token differs where a draw falls on
// it.
#pragma once

#include "kvpack_host.hpp"

#include <limits>
#include <numeric>
#include <random>

namespace kvpack {

/// How to continue a prompt. max_tokens: none means up to the engine's limit. temperature: 0 is greedy. top_k: 0 keeps
/// every token. top_p: 1 keeps every token. seed: none draws one from the system.
struct SamplingParams {
  std::optional<int64_t> max_tokens;
  double temperature = 0;
  int64_t top_k = 0;
  double top_p = 1;
  std::optional<uint64_t> seed;

  /// Throws Error.
  void check() const {
    if (max_tokens && *max_tokens < 1)
      throw Error("max_tokens is " + std::to_string(*max_tokens) + ": use at least 1.");
    if (!(temperature >= 0 && temperature < std::numeric_limits<double>::infinity()))
      throw Error("temperature is " + std::to_string(temperature) + ": use 0 (greedy) or more.");
    if (top_k < 0) throw Error("top_k is " + std::to_string(top_k) + ": use 0 (all tokens) or more.");
    if (!(top_p > 0 && top_p <= 1))
      throw Error("top_p is " + std::to_string(top_p) + ": it must be above 0 and at most 1.");
  }
};

/// numpy.random.default_rng([seed, index]): a permuted congruential generator, PCG XSL RR 128/64 (O'Neill 2014).
class Pcg64 {
 public:
  Pcg64(uint64_t seed, uint64_t index) {
    std::vector<uint32_t> entropy;  // each number in words of 32 bits, at least one
    for (uint64_t number : {seed, index}) {
      do entropy.push_back(static_cast<uint32_t>(number));
      while (number >>= 32);
    }
    const std::array<uint64_t, 4> words = spread(entropy);
    increment_ = (Wide{words[2]} << 64 | words[3]) << 1 | 1;
    advance();
    state_ += Wide{words[0]} << 64 | words[1];
    advance();
  }
  /// Uniform in [0, 1), of 53 bits.
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  __extension__ using Wide = unsigned __int128;
  Wide state_ = 0, increment_ = 0;

  void advance() { state_ = state_ * (Wide{0x2360ED051FC65DA4} << 64 | 0x4385DF649FCCF645) + increment_; }
  uint64_t next() {
    advance();
    const auto folded = static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_);
    const auto turn = static_cast<int>(state_ >> 122);
    return folded >> turn | folded << (-turn & 63);
  }

  /// SeedSequence: a pool of four words into which the entropy is hashed, and what is generated from it.
  static std::array<uint64_t, 4> spread(const std::vector<uint32_t> &entropy) {
    constexpr size_t POOL = 4;
    uint32_t factor = 0x43b0d7e5;
    const auto hashed = [&factor](uint32_t value) {
      value ^= factor;
      factor *= 0x931e8875;
      value *= factor;
      return value ^ value >> 16;
    };
    const auto mixed = [](uint32_t x, uint32_t y) {
      const uint32_t result = 0xca01f9dd * x - 0x4973f715 * y;
      return result ^ result >> 16;
    };
    std::array<uint32_t, POOL> pool{};
    for (size_t n = 0; n < POOL; ++n) pool[n] = hashed(n < entropy.size() ? entropy[n] : 0);
    for (size_t from = 0; from < POOL; ++from)
      for (size_t to = 0; to < POOL; ++to)
        if (from != to) pool[to] = mixed(pool[to], hashed(pool[from]));
    for (size_t from = POOL; from < entropy.size(); ++from)
      for (uint32_t &word : pool) word = mixed(word, hashed(entropy[from]));

    std::array<uint64_t, 4> made{};
    uint32_t other = 0x8b51f9dd;
    for (size_t n = 0; n < 2 * made.size(); ++n) {
      uint32_t value = pool[n % POOL] ^ other;
      other *= 0x58f38ded;
      value *= other;
      value ^= value >> 16;
      made[n / 2] |= uint64_t{value} << 32 * (n % 2);
    }
    return made;
  }
};

/// The sum in numpy's order: by halves down to 128 numbers, those in eight sums side by side.
inline double pairwise_sum(const double *values, size_t count) {
  if (count < 8) return std::accumulate(values, values + count, -0.0);
  if (count > 128) {
    const size_t half = count / 2 - count / 2 % 8;
    return pairwise_sum(values, half) + pairwise_sum(values + half, count - half);
  }
  std::array<double, 8> sums;
  std::copy_n(values, 8, sums.begin());
  size_t at = 8;
  for (; at + 8 <= count; at += 8)
    for (size_t n = 0; n < 8; ++n) sums[n] += values[at + n];
  double sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  for (; at < count; ++at) sum += values[at];
  return sum;
}

/// Draws the tokens of one sequence. What it draws depends on (seed, index) and the logits, not on the batch.
class Sampler {
 public:
  Sampler(const SamplingParams &params, uint64_t index)
      : params_(params), random_(params.seed ? *params.seed : entropy(), index) {
    params.check();
  }

  /// logits: float32 [V]. Ties go to the lower token.
  int64_t operator()(const float *logits, size_t count) {
    if (params_.temperature == 0) return largest(logits, count);
    candidates(logits, count);
    std::partial_sum(weights_.begin(), weights_.end(), weights_.begin());
    const double draw = random_.uniform() * weights_.back();
    const auto found = static_cast<size_t>(std::upper_bound(weights_.begin(), weights_.end(), draw) - weights_.begin());
    return tokens_[std::min(found, tokens_.size() - 1)];
  }

 private:
  SamplingParams params_;
  Pcg64 random_;
  std::vector<int64_t> tokens_;  // that may be drawn, most probable first ...
  std::vector<double> weights_;  // ... and their unnormalised weights
  std::vector<double> scaled_;

  static uint64_t entropy() {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
  }
  static int64_t largest(const float *logits, size_t count) {  // the first NaN, if there is one, as numpy's argmax
    size_t best = 0;
    for (size_t n = 1; n < count && !std::isnan(logits[best]); ++n)
      if (logits[n] > logits[best] || std::isnan(logits[n])) best = n;
    return static_cast<int64_t>(best);
  }

  /// Temperature comes first, then top-k, then top-p (the smallest set whose probability reaches top_p).
  void candidates(const float *logits, size_t count) {
    scaled_.assign(logits, logits + count);
    const double top = *std::max_element(scaled_.begin(), scaled_.end());
    for (double &value : scaled_) value = (value - top) / params_.temperature;
    tokens_.clear(), weights_.clear();
    const auto kept = static_cast<size_t>(params_.top_k);
    if (kept > 0 && kept < count) keep_best(kept);
    else tokens_.resize(count), std::iota(tokens_.begin(), tokens_.end(), 0);
    for (const int64_t token : tokens_) weights_.push_back(std::exp(scaled_[static_cast<size_t>(token)]));
    const double total = pairwise_sum(weights_.data(), weights_.size());
    if (!std::isfinite(total)) throw Error("the logits of a step are not numbers, so that no token can be drawn.");
    if (params_.top_p < 1) drop((1 - params_.top_p) / static_cast<double>(weights_.size()) * total);

    std::vector<size_t> order(tokens_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [this](size_t a, size_t b) { return weights_[a] > weights_[b]; });
    std::vector<int64_t> tokens;
    std::vector<double> weights;
    for (const size_t n : order) tokens.push_back(tokens_[n]), weights.push_back(weights_[n]);
    if (params_.top_p < 1) {
      double reached = 0;
      size_t used = 0;
      while (used < weights.size() && (reached += weights[used]) < params_.top_p * total) ++used;
      tokens.resize(std::min(used + 1, tokens.size())), weights.resize(tokens.size());
    }
    tokens_ = std::move(tokens), weights_ = std::move(weights);
  }
  /// The `kept` best tokens in their order; of those tied at the end the lower ones.
  void keep_best(size_t kept) {
    std::vector<double> sorted = scaled_;
    const auto place = sorted.begin() + static_cast<std::ptrdiff_t>(kept) - 1;
    std::nth_element(sorted.begin(), place, sorted.end(), std::greater<>());
    const double cut = *place;
    size_t ties =
        kept - static_cast<size_t>(std::count_if(scaled_.begin(), scaled_.end(), [cut](double v) { return v > cut; }));
    for (size_t n = 0; n < scaled_.size(); ++n)
      if (scaled_[n] > cut || (scaled_[n] == cut && ties > 0 && ties--)) tokens_.push_back(static_cast<int64_t>(n));
  }
  /// Tokens of less than `least` are outside the nucleus even all together: they are not sorted.
  void drop(double least) {
    size_t used = 0;
    for (size_t n = 0; n < tokens_.size(); ++n)
      if (weights_[n] >= least) tokens_[used] = tokens_[n], weights_[used++] = weights_[n];
    tokens_.resize(used), weights_.resize(used);
  }
};

}  // namespace kvpack
