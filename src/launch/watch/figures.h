// How each rank gets on, in figures that people look at: steps and samples per second, what it waits, who the others
// wait for, its memory. Made of what the ranks report about themselves, over the last seconds. Pure: takes reports and
// the time; whatever a rank has written into its page, the figures are numbers. One thread.
//
// Who is late is known without clocks: ranks that meet wait for the last of them, so the one that waits less than the
// others is the one that they wait for, by the difference.
#pragma once

#include "launch/rank_report.h"

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

struct RankFigures {
  std::string state = "starting";  ///< "running", "waiting", "saving", "stopped", "ended" or "failed"
  std::string doing;               ///< "waiting in all_reduce(float32[10], sum), operation 17"
  std::int64_t step = 0;           ///< optimizer steps so far
  std::int64_t samples = 0;        ///< in these; 0: not known
  double steps_per_second = 0;
  double samples_per_second = 0;
  double exposed = 0;        ///< share of the time in which the program did nothing but wait for collectives
  double waited = 0;         ///< share in which it waited for ranks to come to them
  double waited_for = 0;     ///< share in which others waited for this one
  std::uint64_t memory = 0;  ///< resident, in bytes
};

class Figures {
 public:
  using Clock = std::chrono::steady_clock;
  /// What shares and rates are of, where ranks take a step as often as that.
  static constexpr std::chrono::seconds kWindow{10};

  explicit Figures(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {}

  void report(const RankReport& report, Clock::time_point now);
  /// Another process is started in its place.
  void begins_anew(int rank);
  /// `how`: its status, as text.
  void ended(int rank, bool well, std::string how);
  /// By rank.
  std::vector<RankFigures> look(Clock::time_point now) const;

 private:
  struct Waits {
    Clock::time_point at{};
    std::uint64_t waited_ns = 0;
    std::uint64_t exposed_ns = 0;
  };
  struct Steps {
    Clock::time_point at{};
    std::int64_t step = 0;
    std::int64_t samples = 0;
  };
  struct Rank {
    RankFigures figures;
    bool known = false;
    bool gone = false;
    std::uint64_t operation = 0;             ///< what it waits in,
    std::optional<Clock::time_point> since;  ///< and when it was first seen to; or it does not
    std::deque<Waits> waits;                 ///< about one a second, and the last
    std::deque<Steps> steps;                 ///< when a step was first seen, about one a second, and the last
  };
  static void add_waits(Rank& rank, const RankReport& report, Clock::time_point now);
  static void add_steps(Rank& rank, const RankReport& report, Clock::time_point now);

  std::vector<Rank> ranks_;
};

}  // namespace cohort::launch
