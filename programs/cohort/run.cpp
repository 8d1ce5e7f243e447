#include "base/env.h"
#include "base/hardware.h"
#include "base/parse.h"
#include "base/process.h"
#include "base/result.h"
#include "cohort/commands.h"
#include "launch/plan/job_spec.h"
#include "launch/plan/plan.h"
#include "launch/plan/program.h"
#include "launch/processes.h"
#include "launch/start/hosts.h"
#include "launch/start/starter.h"
#include "launch/supervise/supervisor.h"
#include "rendezvous/detect.h"
#include "shared/run_options.h"
#include "shared/sync.h"
#include "shared/words.h"

#include <fmt/format.h>

#include <fcntl.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::app {
namespace {

// Finds each option's value for `cohort run`: on the command line, else in its environment variable, else in the file
// of --config, else its default. Reads environment and file; changes nothing. One thread.

struct RunSetting {
  std::vector<std::string> values = {};  ///< several only for options that may be repeated
  std::string origin = {};               ///< "command line", "COHORT_RUN_GRACE", "job.toml:3"
};
using RunSettings = std::map<const RunOption*, RunSetting>;  ///< has only the options that are given

constexpr const char* kCommandLine = "command line";

/// Adds values of repeatable options; for other options, the last value counts.
void put(RunSettings& settings, const RunOption& option, std::vector<std::string> values, const std::string& origin) {
  RunSetting& setting = settings[&option];
  if (!option.is_repeatable()) setting = {};
  setting.values.insert(setting.values.end(), values.begin(), values.end());
  setting.origin += (setting.origin.empty() ? "" : ", ") + origin;
}

/// For a key or a variable that belongs to no option, names the option that was probably meant.
std::string hint(const std::string& option, const std::string& text, const std::vector<std::string>& known) {
  if (const std::string foreign = foreign_option(option); !foreign.empty()) return ": it " + foreign;
  const std::string meant = closest(text, known);
  return meant.empty() ? "" : "; did you mean " + meant + "?";
}

void read_file(const std::string& path, RunSettings& settings) {
  for (const launch::ConfigEntry& entry : value_or_throw(launch::read_config(path))) {
    const std::string origin = fmt::format("{}:{}", path, entry.line);
    std::string key = entry.key;
    std::ranges::replace(key, '_', '-');
    const RunOption* const option = run_option("--" + key);
    if (option == nullptr || option->only_on_command_line() || key == "config") {
      std::vector<std::string> names;
      for (const RunOption& each : run_options()) {
        if (!each.only_on_command_line()) names.push_back(each.name().substr(2));
      }
      raise(ErrorCode::InvalidArgument, "{}: `cohort run` has no option '{}'{}", origin, entry.key,
            key == "config" ? " in a file" : hint("--" + key, key, names));
    }
    if (entry.is_list && !option->is_repeatable() && key != "ranks")
      raise(ErrorCode::InvalidArgument, "{}: {} takes one value, not a list", origin, entry.key);
    if (const auto before = settings.find(option); before != settings.end()) {
      raise(ErrorCode::InvalidArgument, "{}: {} is the option that {} has set already", origin, entry.key,
            before->second.origin);
    }
    std::vector<std::string> values = entry.values;
    if (option->is_flag()) values = {truth(values.front(), origin + ": " + entry.key)};
    if (entry.is_list && !option->is_repeatable()) values = {fmt::format("{}", fmt::join(values, ","))};
    put(settings, *option, std::move(values), origin);
  }
}

/// Remarks on variables that belong to no option, but were probably meant for one.
void remark_on(const launch::Environment& environment) {
  std::vector<std::string> known;
  for (const RunOption& option : run_options()) {
    if (!option.only_on_command_line()) known.push_back(option.variable());
  }
  for (const std::string& assignment : environment.assignments()) {
    const std::string name = assignment.substr(0, assignment.find('='));
    if (!name.starts_with(env::kRunOptionPrefix) || name == env::kRunDir) continue;
    if (std::ranges::find(known, name) != known.end()) continue;
    std::string option = name.substr(env::kRunOptionPrefix.size());
    std::ranges::transform(option, option.begin(), [](unsigned char c) { return std::tolower(c); });
    fmt::print(stderr, "cohort: the environment variable {} is no option's{}\n", name, hint(option, name, known));
  }
}

/// Throws Error (InvalidArgument, Io), with the option, the variable or the line that was probably meant.
RunSettings read_settings(const Words& words) {
  RunSettings settings;
  const launch::Environment environment = launch::Environment::current();
  const auto variable = [&environment](const RunOption& option) -> std::optional<std::string> {
    if (option.only_on_command_line()) return std::nullopt;
    const auto value = environment.find(option.variable());
    return value && !value->empty() ? value : std::nullopt;
  };
  // Sources are read in ascending order of precedence.
  const RunOption* const config = run_option("--config");
  const auto said = words.given.find(config);
  const auto path = said != words.given.end() ? said->second.back() : variable(*config);
  if (path) read_file(*path, settings);
  for (const RunOption& option : run_options()) {
    if (const auto value = variable(option)) {
      const std::string name = option.variable();
      auto values =
          option.is_repeatable() ? split(*value, ';') : std::vector{option.is_flag() ? truth(*value, name) : *value};
      std::erase(values, "");
      put(settings, option, std::move(values), name);
    }
  }
  for (const auto& [option, values] : words.given) put(settings, *option, values, kCommandLine);
  remark_on(environment);
  return settings;
}

/// The job that the settings describe. Throws Error (InvalidArgument) with the option, its value and its origin.
launch::JobSpec spec_of(const RunSettings& settings, const std::vector<std::string>& program) {
  launch::JobSpec spec;
  for (const auto& [option, setting] : settings) {
    if (setting.origin != kCommandLine) spec.origins[option->name()] = setting.origin;
    for (const std::string& value : setting.values) {
      try {
        set_option(*option, value, spec);
      } catch (const Error& error) {
        throw Error(error.code(), error.what() + spec.origin_of(option->name()));
      }
    }
  }
  if (!program.empty()) {
    spec.program.program = program.front();
    spec.program.arguments.assign(program.begin() + 1, program.end());
  }
  const auto& track = spec.track;
  if (env::get(env::kKubeflowServer) && spec.agents == 0 && std::ranges::find(track, "kubeflow") == track.end())
    spec.track.emplace_back("kubeflow");
  spec.command_line = sys::own_arguments();
  return spec;
}

/// Returns a file that --config would take, with the origin of each value beside it.
std::string show_config(const RunSettings& settings) {
  std::vector<std::pair<std::string, std::string>> lines;
  std::size_t width = 0;
  for (const RunOption& option : run_options()) {
    if (option.only_on_command_line()) continue;
    const auto given = settings.find(&option);
    RunSetting setting{{option.is_flag() ? "false" : std::string(option.standard)}, "default"};
    if (given != settings.end()) setting = given->second;
    const std::string key = option.name().substr(2);
    std::string value;
    if (option.is_repeatable()) {
      std::erase(setting.values, "");
      for (const std::string& each : setting.values) value += (value.empty() ? "" : ", ") + launch::toml_text(each);
      value = "[" + value + "]";
    } else if (!setting.values.empty() && (given != settings.end() || !setting.values.back().empty())) {
      value = option.is_flag() ? setting.values.back() : launch::toml_text(setting.values.back());
    }
    // Comments out options without a value, and --config, which cannot be in a file.
    const bool comment = value.empty() || key == "config";
    lines.emplace_back((comment ? "# " : "") + key + (value.empty() ? "" : " = " + value), setting.origin);
    width = std::max(width, lines.back().first.size());
  }
  std::string text = "[run]\n";
  for (const auto& [line, origin] : lines)
    text += fmt::format("{:<{}}  # {}\n", line, std::min<std::size_t>(width, 48), origin);
  return text;
}

}  // namespace

void add_run(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand("run", "Run a program as N processes that form one world");
  // These are only for the help and the completion; read_words reads the arguments.
  add_options(*command, run_parts());
  command->add_option("PROGRAM", "Program or .py file, and its arguments")->type_name("...");
  set_run_help(*command);
}

namespace {

/// Merges the traces of a job's hosts into trace.json.
void merge_trace_of(const std::string& run_folder, bool quiet) {
  const auto merged =
      launch::capture({launch::own_command().value_or("cohort"), "trace", "merge", run_folder}, std::chrono::hours(1));
  std::string text = merged ? merged->text : merged.error().what();
  while (text.ends_with('\n')) text.pop_back();
  if (!merged || merged->status != 0)
    fmt::print(stderr, "cohort: the ranks' traces could not be merged: {}\n",
               text.substr(text.starts_with("cohort: ") ? 8 : 0));
  else if (!quiet)
    fmt::print(stderr, "cohort: {} -- open it in ui.perfetto.dev\n", text);
}

/// Copies files to the other hosts, for --sync.
void sync_hosts(const launch::JobSpec& spec, const launch::Plan& plan) {
  SyncRequest request{.ssh = launch::ssh_command(spec),
                      .hosts = {},
                      .excludes = spec.sync_excludes,
                      .program = spec.program.program,
                      .quiet = spec.quiet};
  for (const launch::PlannedHost& host : plan.hosts) {
    if (!host.local) request.hosts.push_back(host.name);
  }
  if (plan.method != launch::StartMethod::Ssh || plan.node || !spec.elastic.script.empty()) {
    raise(ErrorCode::InvalidArgument,
          "--sync copies by ssh to the hosts of -H or --hostfile; other ones share a file system, or are given the "
          "folder "
          "by another way{}",
          spec.origin_of("--sync"));
  }
  if (!request.hosts.empty()) sync(request);
}

}  // namespace

void run(const std::vector<std::string>& typed, int& exit_status) {
  CLI::App parser("", "run");
  add_options(parser, run_parts());
  const Words words = read_words(parser, run_parts(), typed, "options of the program come after its name");
  // An owner passes on words of its user as options, and writes "--" before the program.
  if (words.given.contains(run_option("--owner")) && !words.separated && !words.program.empty())
    raise(ErrorCode::InvalidArgument, "'{}' is no option of `cohort run`: the program is given otherwise",
          words.program.front());
  const RunSettings settings = read_settings(words);
  const launch::JobSpec spec = spec_of(settings, words.program);
  if (spec.show_config) {
    std::fputs(show_config(settings).c_str(), stdout);
    return;
  }
  if (spec.program.program.empty())
    raise(ErrorCode::InvalidArgument, "no program to run; for example: cohort run -np 4 ./train");
  narrow_networks(spec.network);
  launch::Plan plan = launch::plan_of(spec);
  // Reports a wrong value with the status for wrong use, before anything is started.
  if (!spec.shares.empty()) (void)value_or_throw(launch::shares_by_rank(plan, spec.shares));
  if (!launch::says_itself(plan.method) || spec.dry_run) (void)launch::shown_ranks(spec, plan);
  if (!plan.note.empty() && !spec.quiet) std::fprintf(stderr, "cohort: %s\n", plan.note.c_str());
  if (spec.invitation_fd && ::fcntl(*spec.invitation_fd, F_SETFD, FD_CLOEXEC) != 0)
    raise(ErrorCode::InvalidArgument, "--agents: descriptor {}: {}", *spec.invitation_fd, errno_text(errno));
  exit_status = launch::kCannotStartStatus;  // an exception means that nothing was started
  if (spec.dry_run) {
    std::fputs(launch::describe_job(spec, std::move(plan)).c_str(), stdout);
    exit_status = 0;
    return;
  }
  if (spec.sync) sync_hosts(spec, plan);
  const launch::JobResult result = (plan.node ? launch::run_node : launch::run_job)(spec, std::move(plan));
  if (!result.traced.empty()) merge_trace_of(result.traced, spec.quiet);
  exit_status = result.status;
}

}  // namespace cohort::app
