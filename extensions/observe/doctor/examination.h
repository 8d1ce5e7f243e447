// Examines hosts for `cohort doctor`: starts an agent on each, like `cohort run`, has each agent start a `cohort
// doctor-host` like a job's rank, and asks these processes for facts about their hosts and each other. Hosts and pairs
// are asked in parallel, and every wait has a deadline. Nothing is left on any host. One thread. Also selects the pairs
// of hosts that measure at the same time: in each round every host is in at most one pair. Pure. `cohort doctor-host`
// is the part of `cohort doctor` on a host. Agents start it like a job's rank; it reads orders from stdin (one line of
// JSON each), answers on stdout, ends when its stdin ends, and leaves nothing behind. Formats findings as a table for
// people, at most 80 columns wide if words allow, and as JSON for programs. Pure.
#pragma once

#include "launch/plan/plan.h"
#include "observe/doctor/check.h"

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace cohort::doctor {

struct ExaminationOptions {
  launch::JobSpec spec = {};                                         ///< options for reaching hosts
  launch::StartMethod method = launch::StartMethod::Ssh;             ///< method of reaching hosts
  std::vector<launch::PlannedHost> hosts = {};                       ///< empty: this host
  std::chrono::milliseconds start_limit = std::chrono::seconds(10);  ///< time in which agents have to connect
  std::chrono::milliseconds whole_limit = std::chrono::seconds(24);
};

struct Examined {
  Checkup checkup;
  int signal = 0;  ///< signal that ended the examination early
};

/// Blocks signals and adopts orphans for this process: call it from a process that does nothing else, before there is a
/// second thread. Throws cohort::Error if nothing can be examined.
Examined examine(const ExaminationOptions& options);

using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

/// Rounds with each pair of `count` hosts once or, if not `all`, with each pair of neighbours in a circle.
std::vector<Pairs> rounds_of_pairs(std::size_t count, bool all);

/// Returns the process's exit status; the caller has to end the process immediately, since threads still listen.
int run_doctor_host();

/// Mark at the beginning of every answer, since programs that are run for their version may also print to our stdout.
inline constexpr char kAnswerMark[] = "cohort-doctor-host ";

enum class Colour { No, Yes };

/// Merges equal findings of several hosts into one row. Ends with a summary.
std::string to_table(const Checkup& checkup, const std::vector<Finding>& findings, Colour colour);
std::string to_json_report(const Checkup& checkup, const std::vector<Finding>& findings);

}  // namespace cohort::doctor
