// The one table of the options of `cohort run`: names, type, default, help, and what a value sets. The command line,
// the environment and files (run_settings.h), the help, docs/reference/run.md, `cohort env`, the completion and other
// commands that start jobs (host_options.h) have them from it. Plain data; any thread.
#pragma once

#include "launch/plan/plan.h"
#include "launch/start/hosts.h"
#include "launch/supervise/supervisor.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::app {

/// What the options say. What a job is made of besides is found out from these, in run.cpp.
struct RunChoices {
  launch::RunOptions job;
  std::optional<int> processes;  ///< of -np; 0: auto
  std::string per_node;          ///< of --nproc-per-node; empty: not said
  launch::HostOptions hosts;
  launch::NodeWishes nodes;
  std::string network;
  std::string secret_file;
  std::uint16_t listen = 0;
  int agents = 0;  ///< so many come by themselves, by --owner's doing; 0: none do
  std::optional<std::chrono::milliseconds> start_timeout;
  bool show_config = false;
  bool check_build = false;
  bool dry_run = false;
};

struct RunOption {
  enum class Kind {
    Value,        ///< one value; the last source counts
    Repeatable,   ///< values of all sources add up
    Flag,         ///< "true" or "false"
    CommandFlag,  ///< a flag of this one command: neither variable nor file
    CommandValue  ///< likewise a value
  };

  std::string_view names;  ///< as CLI11 takes them: "-n,--np,--nproc"
  std::string_view type;   ///< what stands for the value in the help
  std::string_view standard;
  std::string_view help;
  void (*set)(RunChoices&, const std::string& value);
  Kind kind = Kind::Value;
  std::string_view choices = {};  ///< "auto,ssh"
  bool common = false;            ///< in --help; the others are in --help-all

  bool is_flag() const noexcept { return kind == Kind::Flag || kind == Kind::CommandFlag; }
  bool only_on_command_line() const noexcept { return kind == Kind::CommandFlag || kind == Kind::CommandValue; }
  /// The only values.
  std::vector<std::string> allowed() const;
  /// "HOW:{auto,ssh}"
  std::string shown_type() const;
  /// "--np": the first long one.
  std::string name() const;
  /// Each with its dashes.
  std::vector<std::string> all_names() const;
  /// "COHORT_RUN_NP"
  std::string variable() const;
};

/// A topic of the help.
struct RunPart {
  std::string_view title;  ///< of options that are not shown: ""
  std::vector<const RunOption*> options;
};

/// In the order of the help.
std::span<const RunOption> run_options() noexcept;
std::vector<RunPart> run_parts();
/// nullptr if there is none of this name, which has its dashes.
const RunOption* run_option(std::string_view name) noexcept;

/// Throws Error (InvalidArgument) with the option, the value and what is wanted.
void set_option(const RunOption& option, const std::string& value, RunChoices& choices);
/// A number of processes, 0 for "auto". Throws what is wanted.
int processes_of(const std::string& text);

}  // namespace cohort::app
