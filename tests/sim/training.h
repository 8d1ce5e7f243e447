// The training of simulated elastic jobs: which samples each virtual rank has in a step, their gradient, and what a
// step makes of weights; and an oracle, which trains in one plain loop. Its digests are what the product's virtual
// ranks have to leave, to the bit, whoever takes part in a step. Values; any thread.
#pragma once

#include "base/permutation.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sim {

using Weights = std::vector<float>;

/// Position in the data set, of a step's first sample.
struct Position {
  std::int64_t epoch = 0, cursor = 0;
};

struct Training {
  static constexpr std::array<std::int64_t, 3> kParameters = {5, 250, 33};  ///< elements of each
  static constexpr std::size_t kWeights = 288;
  static constexpr std::int64_t kBatch = 2;     ///< samples of a virtual rank in a full step
  static constexpr std::int64_t kSamples = 61;  ///< of an epoch, whose last step is not full

  int virtual_ranks = 1;
  std::uint64_t seed = 1;

  /// Samples of a step.
  std::int64_t length(const Position& at) const { return std::min(virtual_ranks * kBatch, kSamples - at.cursor); }
  /// Samples of each virtual rank, consecutive ones of the epoch's order: the first virtual ranks have one more if they
  /// do not divide evenly, and may be the only ones that have any.
  std::vector<std::vector<std::int64_t>> parts(const Position& at) const {
    std::vector<std::int64_t> order(static_cast<std::size_t>(kSamples));
    cohort::permute(order, seed, at.epoch);
    std::vector<std::vector<std::int64_t>> all;
    for (auto next = order.begin() + at.cursor; static_cast<int>(all.size()) < virtual_ranks;) {
      const bool has_more = static_cast<std::int64_t>(all.size()) < length(at) % virtual_ranks;
      const auto end = next + length(at) / virtual_ranks + (has_more ? 1 : 0);
      all.emplace_back(next, end);
      next = end;
    }
    return all;
  }
  void advance(Position& at) const {
    at.cursor += length(at);
    if (at.cursor == kSamples) at = {at.epoch + 1, 0};
  }

  /// Gradient of a weight: the mean over these samples, of which there is at least one.
  float gradient(const std::vector<std::int64_t>& samples, std::size_t weight, float value) const {
    float sum = 0;
    for (const std::int64_t sample : samples) {
      const std::uint64_t bits =
          cohort::permutation::splitmix64(seed ^ (static_cast<std::uint64_t>(sample) << 32 | weight));
      sum += static_cast<float>(bits >> 40) * 0x1p-23F - 1 + value * 0.05F;
    }
    return sum / static_cast<float>(samples.size());
  }
  static float stepped(float weight, float average) { return weight - 0.1F * average; }

  static std::uint64_t digest(std::span<const float> weights) {
    std::uint64_t digest = 0;
    for (const float weight : weights)
      digest = cohort::permutation::splitmix64(digest ^ std::bit_cast<std::uint32_t>(weight));
    return digest;
  }

  /// Digests of the weights after 0, 1, .. steps: each weight's products of gradient and number of samples are added in
  /// the order of the tree of docs/reference/virtual-ranks.md.
  std::vector<std::uint64_t> digests(std::int64_t steps) const {
    Weights weights(kWeights, 0);
    std::vector<std::uint64_t> all = {digest(weights)};
    for (Position at; static_cast<std::int64_t>(all.size()) <= steps; advance(at)) {
      const auto samples = parts(at);
      const auto scale = static_cast<float>(1.0 / static_cast<double>(length(at)));
      for (std::size_t i = 0; i < weights.size(); ++i)
        weights[i] = stepped(weights[i], tree(samples, i, weights[i]) * scale);
      all.push_back(digest(weights));
    }
    return all;
  }

 private:
  float tree(std::span<const std::vector<std::int64_t>> samples, std::size_t weight, float value) const {
    if (samples.size() == 1)
      return samples[0].empty() ? 0 : gradient(samples[0], weight, value) * static_cast<float>(samples[0].size());
    std::size_t half = 1;
    while (2 * half < samples.size()) half *= 2;
    const float left = tree(samples.first(half), weight, value);
    return left + tree(samples.subspan(half), weight, value);
  }
};

}  // namespace sim
