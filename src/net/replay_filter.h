// The first words of peers that a listener has heard, each proved to be made with the secret: they count once. Whoever
// says them again has them from the wire. Only holders of the secret make new ones, so strangers cannot fill it; of
// more than it has room for the oldest are forgotten. One thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <set>

namespace cohort::net {

class ReplayFilter {
 public:
  /// The random number in them.
  using Words = std::array<std::uint8_t, 32>;

  explicit ReplayFilter(std::size_t most = std::size_t{1} << 16) : most_(most) {}

  /// False: somebody has said them before.
  bool first_time(const Words& words);
  bool knows(const Words& words) const { return words_.contains(words); }

 private:
  std::size_t most_;
  std::set<Words> words_;
  std::deque<std::set<Words>::const_iterator> oldest_;
};

}  // namespace cohort::net
