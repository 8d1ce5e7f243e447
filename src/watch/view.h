// What is shown of a run, in the terminal and on the page: what its launcher and its record say, as values and as text
// (a line of JSON about the training, then live.json). Plain data; what is read was written by another process.
#pragma once

#include "base/result.h"
#include "launch/record/live_run.h"
#include "launch/show/text.h"
#include "watch/progress.h"

#include <string>
#include <string_view>

namespace cohort::watch {

using launch::bytes_text;
using launch::duration_text;
using launch::late_rank;
using launch::LiveRank;
using launch::LiveRun;
using launch::number_text;
using launch::samples_per_second;

struct View {
  std::string place;  ///< the run's folder, or where it is watched from
  LiveRun run;
  Progress progress;
  double now = 0;  ///< by the clock of who wrote this text: another machine's may differ
};

/// Rows are ranks, or hosts where there are many: sums of samples and memory, means of shares, the latest rank.
enum class Rows { Ranks, Hosts };
inline constexpr std::size_t kManyRanks = 64;
LiveRun by_host(const LiveRun& run);
/// Those of one host alone; none if there is no such host.
LiveRun of_host(const LiveRun& run, std::size_t host);
/// The host of a rank; empty if none is known.
std::string host_of(const LiveRun& run, int rank);

std::string to_text(const View& view, Rows rows);
/// Corrupt for what is no such text.
Result<View> parse_view(std::string_view text);

}  // namespace cohort::watch
