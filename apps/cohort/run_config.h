// Where the value of each option of `cohort run` comes from: the command line, else its environment variable, else the
// file of --config, else its default. Reads environment and file; changes nothing. One thread.
#pragma once

#include <CLI/CLI.hpp>

#include <optional>
#include <string>
#include <vector>

namespace cohort::app {

struct RunSetting {
  std::string option;               ///< "--start-timeout"
  std::vector<std::string> values;  ///< several only for options that may be repeated
  std::string origin;               ///< "command line", "COHORT_RUN_GRACE", "job.toml:3", "default"
};

struct RunWords {
  std::vector<std::string> words;    ///< for CLI11: the given ones, and those from elsewhere as "--option=value"
  std::vector<RunSetting> settings;  ///< of every option that may be set from elsewhere, in the order of the help
  std::vector<std::string> remarks;  ///< for the user, e.g. on a variable that is no option's
};

/// `words` as `prepare_run_arguments` gives them. Throws cohort::Error (InvalidArgument, Io), with the option, the
/// variable or the line that was probably meant.
RunWords add_configuration(const CLI::App& run_command, std::vector<std::string> words);

/// "COHORT_RUN_START_TIMEOUT"; nullopt for an option that only the command line has (--help, --owner, ...).
std::optional<std::string> variable_of(const CLI::Option& option);

/// A file that --config would take, with the origin of each value beside it.
std::string show_config(const CLI::App& run_command, const RunWords& configured);

/// "; --grace is from job.toml:3" where `message` speaks of an option that was not given on the command line.
std::string origin_hint(const std::string& message, const std::vector<RunSetting>& settings);

}  // namespace cohort::app
