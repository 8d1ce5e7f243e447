// Examines hosts for `cohort doctor`: starts an agent on each just as `cohort run` does, has each start a `cohort
// doctor-host` like a job's rank, and asks these for facts about themselves and each other. Hosts and pairs are asked
// side by side, and every wait has a deadline. Nothing is left on any host. One thread.
// Which pairs of hosts measure at the same time: in each round every host is in one pair at most. Pure.
// `cohort doctor-host`: the part of `cohort doctor` on a host. Agents start it as they start a job's rank; it reads
// orders from stdin, a line of JSON each, and answers on stdout. Ends with its stdin. It leaves nothing behind.
// How findings read: a table for people, at most 80 columns wide where words allow it, and JSON for programs. Pure.
#pragma once

#include "doctor/check.h"
#include "launch/plan/plan.h"

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace cohort::doctor {

struct ExaminationOptions {
  launch::JobSpec spec = {};                                         ///< how hosts are reached
  launch::StartMethod method = launch::StartMethod::Ssh;             ///< likewise
  std::vector<launch::PlannedHost> hosts = {};                       ///< empty: this one
  std::chrono::milliseconds start_limit = std::chrono::seconds(10);  ///< for agents to come
  std::chrono::milliseconds whole_limit = std::chrono::seconds(24);
};

struct Examined {
  Checkup checkup;
  int signal = 0;  ///< that ended it early
};

/// Blocks signals and adopts orphans for this process: call it from one that does nothing else, before it has a second
/// thread. Throws cohort::Error where nothing can be examined.
Examined examine(const ExaminationOptions& options);

using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

/// Each pair of `count` hosts once; or, if not `all`, each host with its neighbours in the circle.
std::vector<Pairs> rounds_of_pairs(std::size_t count, bool all);

/// Returns the process's exit status; the caller has to end the process at once, since threads still listen.
int run_doctor_host();

/// Before every answer: programs that are asked for a version may print to our stdout.
inline constexpr char kAnswerMark[] = "cohort-doctor-host ";

enum class Colour { No, Yes };

/// Equal findings of several hosts are one row. Ends with a summary.
std::string to_table(const Checkup& checkup, const std::vector<Finding>& findings, Colour colour);
std::string to_json_report(const Checkup& checkup, const std::vector<Finding>& findings);

}  // namespace cohort::doctor
