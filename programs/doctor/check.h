// Findings of `cohort doctor`, and the table of rows that they belong to. Plain data. To add a row: a line in kRows
// (check.cpp), a section in docs/reference/doctor.md (a test compares), a check in one of check_*.cpp, and a test that
// breaks the very thing.
// Checks: the facts' meaning for a job. Pure functions that look at nothing but the collected facts, so that each of
// them is tested with facts made up. A file for each family of rows.
#pragma once

#include "doctor/facts.h"
#include "launch/start/starter.h"
#include "rendezvous/detect.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::doctor {

enum class Level { Ok, Warning, Failed };
std::string_view level_name(Level level);

struct Finding {
  std::string row;  ///< id of one in the table
  Level level = Level::Ok;
  std::vector<std::string> hosts;  ///< where; empty: the command's own environment
  std::string to;                  ///< not empty: it is about the way from `hosts` to this one
  std::string found;
  std::string effect;  ///< on a job; empty: as the table says
  std::string fix;     ///< a command, mostly
};

struct Row {
  std::string_view id;
  std::string_view title;   ///< at most 16 characters
  std::string_view effect;  ///< on a job if it is not in order
};
/// In the order in which they are shown.
std::span<const Row> rows();
/// Throws Internal if there is none.
const Row& row(std::string_view id);

inline constexpr std::int64_t kMiB = std::int64_t{1} << 20;

/// One host, as far as it could be examined.
struct HostState {
  std::string name;  ///< as it was asked for
  bool here = false;
  int slots = 1;
  std::string trouble;  ///< the row that says why it could not be examined; empty: it has been
  std::string why;
  std::string fix;
  std::string printed;       ///< by its shell, before the agent
  double start_seconds = 0;  ///< until its agent was there
  std::optional<HostFacts> facts;
  std::optional<double> clock_offset;  ///< seconds that its clock is ahead of this host's
  double clock_error = 0;              ///< that the measurement may be wrong by
  std::optional<bool> same_folder;     ///< a file made here is seen there
};

/// All that is known.
struct Checkup {
  std::string here;
  launch::StartMethod method = launch::StartMethod::Ssh;
  bool starter_local = false;           ///< every host is this one
  bool several_hosts = false;           ///< the job has more than one
  rendezvous::Environment environment;  ///< of the command
  bool launcher_alive = false;          ///< a launcher's process is among the command's ancestors
  std::vector<NameFacts> names_here;    ///< if this host is none of them
  std::vector<HostState> hosts;
  struct Probe {
    int from = 0;
    ProbeFacts facts;
  };
  std::vector<Probe> probes;
  std::vector<int> silent;  ///< hosts that did not say what became of their probes
  std::vector<SpeedFacts> speeds;
};

std::vector<Finding> judge(const Checkup& checkup);

/// One about one host, or with an empty name about the command's own environment. A row in order needs no `fix`.
void add(std::vector<Finding>& out, std::string row, Level level, const std::string& host, std::string found,
         std::string fix = {}, std::string effect = {});

// The families.
void check_environment(const Checkup& checkup, std::vector<Finding>& out);
void check_starts(const Checkup& checkup, std::vector<Finding>& out);
void check_names(const Checkup& checkup, std::vector<Finding>& out);
void check_software(const Checkup& checkup, std::vector<Finding>& out);
void check_networks(const Checkup& checkup, std::vector<Finding>& out);
void check_machines(const Checkup& checkup, std::vector<Finding>& out);
void check_limits(const Checkup& checkup, std::vector<Finding>& out);
void check_folders(const Checkup& checkup, std::vector<Finding>& out);

/// The address by which a job's ranks on `from` reach `to`: of those offered the first that works; nullptr if none.
const ProbeFacts* chosen_way(const Checkup& checkup, int from, int to);

/// "1.5 GiB".
std::string size_text(std::int64_t bytes);

}  // namespace cohort::doctor
