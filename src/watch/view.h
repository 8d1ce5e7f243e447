// What is shown of a run, in the terminal and on the page: what its launcher and its record say, as values and as text
// (a line of JSON about the training, then live.json). Plain data; what is read was written by another process.
#pragma once

#include "base/result.h"
#include "launch/record/live_run.h"
#include "watch/progress.h"

#include <string>
#include <string_view>

namespace cohort::watch {

using launch::LiveRank;
using launch::LiveRun;

struct View {
  std::string place;  ///< the run's folder, or where it is watched from
  LiveRun run;
  Progress progress;
};

/// Rows are ranks, or hosts where there are many: sums of samples and memory, means of shares, the latest rank.
enum class Rows { Ranks, Hosts };
inline constexpr std::size_t kManyRanks = 64;
LiveRun by_host(const LiveRun& run);
/// Those of one host alone; none if there is no such host.
LiveRun of_host(const LiveRun& run, std::size_t host);
/// The host of a rank; empty if none is known.
std::string host_of(const LiveRun& run, int rank);
/// Samples per second of all ranks.
double samples_per_second(const LiveRun& run);
/// The rank that the others wait for most, where that is at least a tenth of the time; -1: none.
int late_rank(const LiveRun& run);

std::string to_text(const View& view, Rows rows);
/// Corrupt for what is no such text.
Result<View> parse_view(std::string_view text);

/// "1:05", "2:03:04", "3 d 4 h".
std::string duration_text(double seconds);
/// "1.2G".
std::string bytes_text(double bytes);
/// Three digits: "0.31", "412", "12.3k".
std::string number_text(double value);

}  // namespace cohort::watch
