// Where the value of each option of `cohort run` comes from: the command line, else its environment variable, else the
// file of --config, else its default. Reads environment and file; changes nothing. One thread.
#pragma once

#include "run_options.h"

#include <string>
#include <string_view>
#include <vector>

namespace cohort::app {

struct RunSetting {
  const RunOption* option = nullptr;
  std::vector<std::string> values = {};  ///< several only for options that may be repeated
  std::string origin = {};               ///< "command line", "COHORT_RUN_GRACE", "job.toml:3", "default"
  bool given = false;                    ///< not the default
  bool elsewhere = false;                ///< not by the command line
};

struct RunSettings {
  std::vector<RunSetting> settings;  ///< of every option, in the order of the help
  std::vector<std::string> program;  ///< with its arguments
  std::vector<std::string> remarks;  ///< for the user, e.g. on a variable that is no option's
  bool help = false;
  bool help_all = false;  ///< the command line asks for it

  /// "; --grace is from job.toml:3", for errors, where the command line has not given the option; else empty.
  std::string origin_of(std::string_view option) const;
};

/// The words after `cohort run`: -np is one word, torchrun's --node_rank is --node-rank, and from the program on
/// nothing is an option. Throws Error (InvalidArgument, Io), with the option, the variable or the line that was
/// probably meant.
RunSettings read_settings(const std::vector<std::string>& words);

/// What they say, all at once. Throws Error (InvalidArgument) with the option, its value and where it is from.
RunChoices choices_of(const RunSettings& settings);

/// A file that --config would take, with the origin of each value beside it.
std::string show_config(const RunSettings& settings);

}  // namespace cohort::app
