// Rejects replayed ClientHellos: remembers those that a listener has accepted, each proved to be made with the secret.
// Only holders of the secret make new ones, so others cannot fill it; beyond its capacity the oldest are forgotten. One
// thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <set>

namespace cohort::net {

class ReplayFilter {
 public:
  /// The random number of a ClientHello.
  using Words = std::array<std::uint8_t, 32>;

  explicit ReplayFilter(std::size_t most = std::size_t{1} << 16) : most_(most) {}

  /// False: it has been seen before, so it is a replay.
  bool first_time(const Words& words);
  bool knows(const Words& words) const { return words_.contains(words); }

 private:
  std::size_t most_;
  std::set<Words> words_;
  std::deque<std::set<Words>::const_iterator> oldest_;
};

}  // namespace cohort::net
