// The one table of the options of `cohort run`: names, type, default, help, and the member of JobSpec that it sets. The
// command line (words.h), the environment and files (run.cpp), the help, docs/reference/run.md, `cohort help
// environment`, the completion and other commands that start jobs take them from it. Also parses lists as people type
// them: 1,2,4. Any thread.
#pragma once

#include "base/parse.h"
#include "launch/plan/job_spec.h"
#include "launch/start/hosts.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
}

namespace cohort::app {

struct RunOption {
  enum class Kind {
    Value,        ///< one value; the last source counts
    Repeatable,   ///< values of all sources add up
    Flag,         ///< "true" or "false"
    CommandFlag,  ///< a flag only of this command, so not in variables or files
    CommandValue  ///< a value only of this command, so not in variables or files
  };

  std::string_view names;  ///< in CLI11's form: "-n,--np,--nproc"
  std::string_view type;   ///< placeholder of the value in the help
  std::string_view standard;
  std::string_view help;
  void (*set)(launch::JobSpec&, const std::string& value);
  Kind kind = Kind::Value;
  std::string_view choices = {};  ///< "auto,ssh"
  bool common = false;            ///< shown by --help; --help-all shows all

  bool is_flag() const noexcept { return kind == Kind::Flag || kind == Kind::CommandFlag; }
  bool is_repeatable() const noexcept { return kind == Kind::Repeatable; }
  bool only_on_command_line() const noexcept { return kind == Kind::CommandFlag || kind == Kind::CommandValue; }
  /// The only allowed values.
  std::vector<std::string> allowed() const;
  /// "HOW:{auto,ssh}"
  std::string shown_type() const;
  /// The first long name: "--np".
  std::string name() const;
  /// All names, with their dashes.
  std::vector<std::string> all_names() const;
  /// "COHORT_RUN_NP"
  std::string variable() const;
};

/// A topic of the help.
struct RunPart {
  std::string_view title;  ///< "" for options that are not shown
  std::vector<const RunOption*> options;
};

/// The options, in the order of the help.
std::span<const RunOption> run_options() noexcept;
std::vector<RunPart> run_parts();
/// The option of this name (with dashes), or nullptr if there is none.
const RunOption* run_option(std::string_view name) noexcept;

/// Throws Error (InvalidArgument) with the option, the value and the expected form.
void set_option(const RunOption& option, const std::string& value, launch::JobSpec& spec);

/// Options that another command shares with `cohort run`.
struct SharedOptions {
  launch::JobSpec spec = {};
  std::map<std::string, std::string> given = {};  ///< values by name, for a `cohort run` that the command starts
};
/// Adds these options with their variables. If the short name is given instead of the long one, the other names are
/// left out. `shared` has to outlive `command`.
void add_shared_options(CLI::App& command, std::initializer_list<std::string_view> names, SharedOptions& shared);

/// The hosts that the options name, for commands that cannot wait for agents that people start by hand.
launch::Plan hosts_of(const launch::JobSpec& spec);

/// Sets COHORT_NETWORK for this process and its children. Throws InvalidArgument, naming this host's interfaces, if
/// `networks` is no list of networks, or matches none of this host's addresses. Does nothing if `networks` is empty.
void narrow_networks(const std::string& networks);

/// Parts of `text`, including empty ones; "" has one part.
inline std::vector<std::string> split(std::string_view text, char at = ',') {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(at, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

/// Returns nullopt if a part is no number from 1 to `most`.
inline std::optional<std::vector<int>> numbers_in(std::string_view text, int most) {
  std::vector<int> numbers;
  for (const std::string& part : split(text)) {
    const auto number = parse_integer<int>(part);
    if (!number || *number < 1 || *number > most) return std::nullopt;
    numbers.push_back(*number);
  }
  return numbers;
}

}  // namespace cohort::app
