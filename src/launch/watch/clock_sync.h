// How far another host's clock is ahead of this one's, by messages there and back: each tells that the other's moment
// lies between two of ours, so the shortest of several says most, and its half is what the answer may be wrong by. Asks
// a round of times one after the other. Pure: who sends and who reads the clock is the caller's. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace cohort::launch {

struct ClockOffset {
  std::int64_t there_ns = 0;        ///< when, by the other clock
  std::int64_t offset_ns = 0;       ///< the other clock minus this one
  std::int64_t uncertainty_ns = 0;  ///< it cannot be wrong by more
};

class ClockSync {
 public:
  struct Ports {
    std::function<std::int64_t()> now;        ///< this clock, in nanoseconds
    std::function<void(std::uint64_t)> send;  ///< asks for the other's, under this number
    std::function<void(const ClockOffset&)> found;
  };
  static constexpr int kQuestions = 16;
  /// Where none of these was answered soon, as on a busy host: until one is.
  static constexpr int kMostQuestions = 160;
  static constexpr std::int64_t kSoon = 50'000;  ///< half of there and back

  explicit ClockSync(Ports ports) : ports_(std::move(ports)) {}

  /// Begins a round, if none is under way.
  void begin();
  /// The other's answer. What was not asked is ignored.
  void answer(std::uint64_t number, std::int64_t there_ns);
  /// Nothing more comes: what is known of the round counts.
  void end();

 private:
  void ask();

  Ports ports_;
  std::uint64_t number_ = 0;
  int asked_ = 0;  ///< in this round; 0: none is under way
  std::int64_t asked_ns_ = 0;
  std::optional<ClockOffset> best_;
};

}  // namespace cohort::launch
