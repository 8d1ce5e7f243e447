// live.json: how far a run is, rank by rank, as the launcher writes it while the run goes on and whoever shows the run
// reads it. Plain data and its two directions; docs/reference/run-record.md has the fields. What is read was written by
// another process, maybe of another build: unknown fields are passed over, missing ones have their defaults.
#pragma once

#include "base/result.h"
#include "launch/watch/figures.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

inline constexpr const char* kLiveFile = "live.json";

struct LiveHost {
  std::string name;
  int first_rank = 0;
  int ranks = 0;
};

struct LiveRank {
  RankFigures figures;
  std::string line;  ///< the last that it printed
};

/// A process of another role than the ranks'.
struct LiveOther {
  std::string name;  ///< "server 0", "evaluator"
  std::string host;
  std::string state;  ///< as a rank's
  std::uint64_t memory = 0;
  std::string line;
  int restarts = 0;  ///< how often it has been started again, alone
};

/// Something that the launcher has said.
struct LiveNotice {
  double time = 0;
  std::string text;
};

/// Times are seconds since 1970.
struct LiveRun {
  double time = 0;  ///< when this was so
  std::string job;
  std::string program;
  std::string state = "starting";  ///< "running", "ending", "ended"
  double start = 0;                ///< of the ranks; 0: not yet
  std::optional<int> exit_status;
  std::string reason;  ///< why it ended, if not by itself
  int restarts = 0;    ///< that there have been
  std::string logs;    ///< folder; empty: none
  std::vector<LiveHost> hosts;
  std::vector<LiveNotice> notices;  ///< the last few
  std::vector<LiveRank> ranks;
  int first_rank = 0;  ///< of these: where they are a part
  std::vector<LiveOther> others;
};

std::string to_json(const LiveRun& run);
/// Corrupt for what is no such text.
Result<LiveRun> parse_live_run(std::string_view text);

/// Seconds since 1970.
double seconds_now();

}  // namespace cohort::launch
