// Findings of `cohort doctor`, and the table of rows that they belong to. Plain data. To add a row: a line in kRows
// (check.cpp), a section in docs/reference/doctor.md (a test compares), a check in one of check_*.cpp, and a test that
// breaks what the row checks. Checks decide what facts mean for a job. They are pure functions of the collected facts,
// so that made-up facts can test each. Each family of rows has one file.
#pragma once

#include "launch/start/starter.h"
#include "observe/doctor/facts.h"
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
  std::string row;  ///< id of a row in the table
  Level level = Level::Ok;
  std::vector<std::string> hosts;  ///< hosts concerned; empty: the command's own environment
  std::string to;                  ///< if set, the finding is about the network from `hosts` to this host
  std::string found;
  std::string effect;  ///< effect on a job; empty: the effect in the table
  std::string fix;     ///< usually a command
};

struct Row {
  std::string_view id;
  std::string_view title;   ///< at most 16 characters
  std::string_view effect;  ///< effect on a job if the check fails
};
/// The table's rows, in the order in which they are shown.
std::span<const Row> rows();
/// The row with this id; throws Internal if there is none.
const Row& row(std::string_view id);

inline constexpr std::int64_t kMiB = std::int64_t{1} << 20;

/// State of one host, as far as it could be examined.
struct HostState {
  std::string name;  ///< as given by the user
  bool here = false;
  int slots = 1;
  std::string trouble;  ///< id of the row that says why the host could not be examined; empty: it was examined
  std::string why;
  std::string fix;
  std::string printed;       ///< output of the host's shell before the agent's
  double start_seconds = 0;  ///< time until the host's agent answered
  std::optional<HostFacts> facts;
  std::optional<double> clock_offset;  ///< seconds by which the host's clock is ahead of this host's
  double clock_error = 0;              ///< possible error of that measurement
  std::optional<bool> same_folder;     ///< true if a file made here is visible there
};

/// All facts, the input of the checks.
struct Checkup {
  std::string here;
  launch::StartMethod method = launch::StartMethod::Ssh;
  bool starter_local = false;           ///< every host in the list is this host
  bool several_hosts = false;           ///< the job has more than one host
  rendezvous::Environment environment;  ///< environment of the command
  bool launcher_alive = false;          ///< a launcher's process is among the command's ancestors
  std::vector<NameFacts> names_here;    ///< set if this host is not among the job's hosts
  std::vector<HostState> hosts;
  struct Probe {
    int from = 0;
    ProbeFacts facts;
  };
  std::vector<Probe> probes;
  std::vector<int> silent;  ///< hosts that did not report their probes
  std::vector<SpeedFacts> speeds;
};

std::vector<Finding> judge(const Checkup& checkup);

/// Adds a finding about one host, or, with an empty name, about the command's own environment. A sound row needs no
/// `fix`.
void add(std::vector<Finding>& out, std::string row, Level level, const std::string& host, std::string found,
         std::string fix = {}, std::string effect = {});

// The checks, by family of rows.
void check_environment(const Checkup& checkup, std::vector<Finding>& out);
void check_starts(const Checkup& checkup, std::vector<Finding>& out);
void check_names(const Checkup& checkup, std::vector<Finding>& out);
void check_software(const Checkup& checkup, std::vector<Finding>& out);
void check_networks(const Checkup& checkup, std::vector<Finding>& out);
void check_machines(const Checkup& checkup, std::vector<Finding>& out);
void check_limits(const Checkup& checkup, std::vector<Finding>& out);
void check_folders(const Checkup& checkup, std::vector<Finding>& out);

/// The address by which a job's ranks on `from` reach `to`: the first of the offered addresses that works; nullptr if
/// there is none.
const ProbeFacts* chosen_way(const Checkup& checkup, int from, int to);

/// "1.5 GiB".
std::string size_text(std::int64_t bytes);

}  // namespace cohort::doctor
