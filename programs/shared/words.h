// Reads the command lines of `cohort run` and `cohort submit`, as people and other launchers write them, before CLI11
// sees them. Each spelling is in one table. Pure; any thread.
#pragma once

#include "shared/run_options.h"

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::app {

/// The arguments behind the command.
struct Words {
  std::map<const RunOption*, std::vector<std::string>> given;
  std::vector<std::string> program;  ///< with its arguments, as typed
  bool separated = false;            ///< the program stood after "--"
};

/// Adds these options of `cohort run`; their values are texts.
void add_options(CLI::App& command, const std::vector<RunPart>& parts);

/// Reads the arguments with `parser`, which has the command's name and its options, including `parts`. `advice`: end of
/// the error for an unknown option. Throws InvalidArgument, and CLI::CallForHelp or CallForAllHelp if the arguments ask
/// for help.
Words read_words(CLI::App& parser, const std::vector<RunPart>& parts, const std::vector<std::string>& typed,
                 std::string_view advice);

/// "is torchrun's; here: -np N" for another launcher's option that `cohort run` has under a different name, or lacks;
/// "was removed; now: ..." for an option that it had; empty for other words.
std::string foreign_option(std::string_view word);

/// "true" or "false" for a flag's value. Throws InvalidArgument with `origin`.
std::string truth(const std::string& value, const std::string& origin);

}  // namespace cohort::app
