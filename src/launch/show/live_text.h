// Figures of a run as people read them, and the run in one line: below the output of `cohort run`, and wherever a run
// is shown. Pure; any thread.
#pragma once

#include "launch/record/live_run.h"

#include <string>
#include <string_view>

namespace cohort::launch {

/// "1:05", "2:03:04", "3 d 4 h".
std::string duration_text(double seconds);
/// "1.2G".
std::string bytes_text(double bytes);
/// Three digits: "0.31", "412", "12.3k".
std::string number_text(double value);
/// "22%"; "-" for next to nothing.
std::string percent_text(double share);

/// Samples per second of all ranks.
double samples_per_second(const LiveRun& run);
/// The rank that the others wait for most, where that is at least a tenth of the time; -1: none.
int late_rank(const LiveRun& run);
/// "running 1:23", "ended with status 1 1:23".
std::string state_text(const LiveRun& run, double now);
/// "servers: 3 running, 1 failed, 1.2G; evaluator: running"; empty: there are only ranks.
std::string others_text(const LiveRun& run);
/// The launcher writes live.json every 2 s while it lives.
bool is_silent(const LiveRun& run, double now);
/// "step 1200  412 samples/s".
std::string steps_text(const LiveRun& run);
/// "running 1:23  step 1200  412 samples/s  late: rank 3 (22%)". `progress`: what is known better than from the ranks.
std::string summary(const LiveRun& run, double now, std::string_view progress = {});

}  // namespace cohort::launch
