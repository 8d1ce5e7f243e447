// `cohort doctor --run`: tests whether hosts can train together. First come the findings of `cohort doctor`, and then
// one job; its ranks compare results of collectives with those that each rank computes by itself, and train a small
// network. The output is computed from values, so that tests can pass results of faulty hosts.
#pragma once

#include "launch/step_costs.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

namespace cohort::app::trial {

enum class Level { Ok, Warning, Failed };

/// Result of a check.
struct Line {
  Level level = Level::Ok;
  std::string what;     ///< the collective, or the host or link: "h1 to h2"
  std::string title;    ///< title for a host or link: "speed"; else empty
  std::string found;    ///< result in words
  std::string fix;      ///< empty if nothing is wrong
  double seconds = -1;  ///< duration; -1: part of another check
};

std::string to_string(const Line& line);

/// Lines for the report of `cohort doctor --json`: one line for all sound checks, and one for each other finding.
std::vector<Line> lines_of_doctor(const nlohmann::json& report, double seconds);
/// Line for rank 0's event of a check, with the host of each rank; `wrong` has the ranks with wrong results.
Line line_of_check(const nlohmann::json& event, const std::vector<std::string>& hosts);
/// Warnings for hosts that compute clearly slower than the others.
std::vector<Line> slow_hosts(const std::vector<launch::RankTimes>& ranks);
/// The report's last line, which names the host or link at fault.
std::string verdict_of(const std::vector<Line>& lines, std::size_t hosts, double seconds);

/// Adds the command that `cohort doctor --run` becomes.
void add_doctor_run(CLI::App& app, int& exit_status);
/// Adds `cohort bench trial`, which is a rank of the job.
void add_trial(CLI::App& bench);

}  // namespace cohort::app::trial
