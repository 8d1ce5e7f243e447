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

#include <fmt/format.h>

#include <fcntl.h>

#include <algorithm>
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

// Sources of each option's value for `cohort run`: the command line, else its environment variable, else the file of
// --config, else its default. Reads environment and file; changes nothing. One thread.

struct RunSetting {
  std::vector<std::string> values = {};  ///< several only for options that may be repeated
  std::string origin = {};               ///< "command line", "COHORT_RUN_GRACE", "job.toml:3"
  bool elsewhere = false;                ///< true: not from the command line
};
using RunSettings = std::map<const RunOption*, RunSetting>;  ///< of the given options

constexpr const char* kCommandLine = "command line";

bool is_repeatable(const RunOption& option) { return option.kind == RunOption::Kind::Repeatable; }

/// Adds values of repeatable options; for other options the last one counts.
void put(RunSettings& settings, const RunOption& option, std::vector<std::string> values, const std::string& origin) {
  RunSetting& setting = settings[&option];
  if (!is_repeatable(option)) setting = {};
  setting.values.insert(setting.values.end(), values.begin(), values.end());
  setting.origin += (setting.origin.empty() ? "" : ", ") + origin;
  setting.elsewhere = setting.elsewhere || origin != kCommandLine;
}

std::string truth(const std::string& value, const std::string& origin) {
  if (const auto said = parse_truth(value)) return *said ? "true" : "false";
  raise(ErrorCode::InvalidArgument, "{}: true or false is wanted, not '{}'", origin, value);
}

[[noreturn]] void refuse(const std::string& name) {
  if (const std::string foreign = foreign_option(name); !foreign.empty())
    raise(ErrorCode::InvalidArgument, "`cohort run` has no option {}: it is {}", name, foreign);
  std::vector<std::string> names = {"--help", "--help-all"};
  for (const RunOption& option : run_options()) {
    for (std::string& one : option.all_names()) names.push_back(std::move(one));
  }
  const std::string meant = closest(name, names);
  raise(ErrorCode::InvalidArgument, "`cohort run` has no option {}{}; options of the program come after its name", name,
        meant.empty() ? "" : "; did you mean " + meant + "?");
}

void add_options(CLI::App& command) {
  for (const RunPart& part : run_parts()) {
    for (const RunOption* row : part.options) {
      const RunOption& option = *row;
      const std::string names(option.names), help(option.help), title(part.title);
      if (option.is_flag())
        command.add_flag(names, help)->group(title);
      else
        command.add_option(names, help)
            ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
            ->type_name(option.shown_type())
            ->default_str(std::string(option.standard))
            ->group(title);
      if (option.name() == "--config") {
        command.set_help_all_flag("--help-all", "Print all options, by topic")->group(title);
        command.get_option("--help")->group(title);
      }
    }
  }
}

/// A word as CLI11 takes it. To CLI11 alone, -np is -n with the value p, but it is one word to everyone who comes from
/// MPI (also as -np4 and -nproc), as other launchers' options are that it would read as several of ours (-mca);
/// torchrun's --node_rank is an unknown option; the value of `-n=4` begins with =; that of `--run-dir=` is the next
/// word.
std::vector<std::string> spelled(const std::string& word) {
  if (word.size() < 2 || word[0] != '-' || word == "--") return {word};
  const auto equals = std::min(word.find('='), word.size());
  std::string name = word.substr(0, equals);
  if (name.size() > 3 && name.starts_with("-np") && name[3] >= '0' && name[3] <= '9') return {"--np", word.substr(3)};
  if (name.starts_with("--"))
    std::ranges::replace(name, '_', '-');
  else if (name.starts_with("-np") && run_option("-" + name) != nullptr)
    name.insert(0, "-");
  else if (name.starts_with("-np") || !foreign_option(name).empty())
    return {"--" + word};  // no launcher's option
  const RunOption* const option = run_option(name.starts_with("--") ? name : std::string("-") + name.back());
  if (option == nullptr) return {word};
  if (equals == word.size()) return {name};
  std::string value = word.substr(equals + 1);
  if (!option->is_flag()) return {name, value};
  return {name.starts_with("--") ? name + "=" + (value.empty() ? " " : value) : "--" + word};
}

/// The words after `cohort run`.
struct Words {
  std::map<const RunOption*, std::vector<std::string>> given;
  std::vector<std::string> program;  ///< with its arguments
};

/// Throws CLI::CallForHelp and CallForAllHelp if the words ask for help.
Words read_words(const std::vector<std::string>& typed) {
  CLI::App parser;
  add_options(parser);
  parser.prefix_command();  // from the program on nothing is an option
  std::vector<std::string> words;
  std::vector<std::size_t> origins;  // in `typed`
  for (std::size_t at = 0; at < typed.size(); ++at) {
    // Horovod's option of two words.
    if (at + 2 < typed.size() && (typed[at] == "--blacklist-cooldown-range") && parse_integer<int>(typed[at + 1]) &&
        parse_integer<int>(typed[at + 2])) {
      for (std::string& word : std::vector{typed[at], typed[at + 1] + "," + typed[at + 2]}) {
        words.push_back(std::move(word));
        origins.push_back(at);
      }
      at += 2;
      continue;
    }
    for (std::string& word : spelled(typed[at])) {
      words.push_back(std::move(word));
      origins.push_back(at);
    }
  }
  try {
    parse_words(parser, words);
  } catch (const CLI::ArgumentMismatch&) {
    raise(ErrorCode::InvalidArgument, "{} wants a value", words.back());
  }
  std::vector<std::string> rest = parser.remaining();
  if (!rest.empty() && rest.front() == "--") {
    rest.erase(rest.begin());
  } else if (!rest.empty() && rest.front().size() > 1 && rest.front()[0] == '-') {
    std::string name = rest.front().substr(rest.front().starts_with("---") ? 2 : 0);
    if (name.starts_with("--")) std::ranges::replace(name, '_', '-');
    refuse(name.substr(0, name.find('=')));
  }
  Words read;
  if (!rest.empty())
    read.program.assign(typed.begin() + static_cast<std::ptrdiff_t>(origins[words.size() - rest.size()]), typed.end());
  for (const RunOption& option : run_options()) {
    std::vector<std::string> values = parser.get_option(option.name())->results();
    if (values.empty()) continue;
    if (values.size() > 1 && !is_repeatable(option) && !option.is_flag())
      raise(ErrorCode::InvalidArgument, "{} is given twice, with {} and {}",
            option.name() == "--np" ? "-np" : option.name(), values[0], values[1]);
    for (std::string& value : values) {
      if (option.is_flag()) value = truth(value, option.name());
    }
    read.given[&option] = std::move(values);
  }
  return read;
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
      const std::string meant = key == "config" ? "" : closest(key, names);
      raise(ErrorCode::InvalidArgument, "{}: `cohort run` has no option '{}'{}{}", origin, entry.key,
            key == "config" ? " in a file" : "", meant.empty() ? "" : "; did you mean " + meant + "?");
    }
    if (entry.is_list && !is_repeatable(*option) && key != "ranks")
      raise(ErrorCode::InvalidArgument, "{}: {} takes one value, not a list", origin, entry.key);
    if (const auto before = settings.find(option); before != settings.end()) {
      raise(ErrorCode::InvalidArgument, "{}: {} is the option that {} has set already", origin, entry.key,
            before->second.origin);
    }
    std::vector<std::string> values = entry.values;
    if (option->is_flag()) values = {truth(values.front(), origin + ": " + entry.key)};
    if (entry.is_list && !is_repeatable(*option)) values = {fmt::format("{}", fmt::join(values, ","))};
    put(settings, *option, std::move(values), origin);
  }
}

/// Remarks on variables that belong to no option, but were probably meant for one.
std::vector<std::string> remarks_on(const launch::Environment& environment) {
  std::vector<std::string> known, remarks;
  for (const RunOption& option : run_options()) {
    if (!option.only_on_command_line()) known.push_back(option.variable());
  }
  for (const std::string& assignment : environment.assignments()) {
    const std::string name = assignment.substr(0, assignment.find('='));
    if (!name.starts_with(env::kRunOptionPrefix) || name == env::kRunDir) continue;
    if (std::ranges::find(known, name) != known.end()) continue;
    const std::string meant = closest(name, known);
    remarks.push_back(fmt::format("the environment variable {} is no option's{}", name,
                                  meant.empty() ? "" : "; did you mean " + meant + "?"));
  }
  return remarks;
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
          is_repeatable(option) ? split(*value, ';') : std::vector{option.is_flag() ? truth(*value, name) : *value};
      std::erase(values, "");
      put(settings, option, std::move(values), name);
    }
  }
  for (const auto& [option, values] : words.given) put(settings, *option, values, kCommandLine);
  for (const std::string& remark : remarks_on(environment)) std::fprintf(stderr, "cohort: %s\n", remark.c_str());
  return settings;
}

/// The job that the settings describe. Throws Error (InvalidArgument) with the option, its value and its origin.
launch::JobSpec spec_of(const RunSettings& settings, const std::vector<std::string>& program) {
  launch::JobSpec spec;
  for (const auto& [option, setting] : settings) {
    if (setting.elsewhere) spec.origins[option->name()] = setting.origin;
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

/// A file that --config would take, with the origin of each value beside it.
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
    if (is_repeatable(option)) {
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

// Options of other launchers that people may type by habit, with our equivalents.

struct Foreign {
  std::string_view name;  ///< with - for _
  std::string_view whose;
  std::string_view here;
};

constexpr Foreign kForeign[] = {
    {"--rdzv-conf", "torchrun", "leave it out: --start-timeout SECONDS is how long launchers wait for each other"},
    {"--local-addr", "torchrun", "--network NAME or ADDRESS/BITS"},
    {"--role", "torchrun", "leave it out: all ranks run one program"},
    {"--monitor-interval", "torchrun", "leave it out: the end of a rank is seen at once"},
    {"--log-dir", "torchrun", "--run-dir DIR: the logs are in DIR/logs; they are kept without it, too"},
    {"--redirects", "torchrun", "leave it out: each rank has its logs, and --ranks says which are shown"},
    {"--tee", "torchrun", "leave it out: each rank has its logs, and --ranks says which are shown"},
    {"--local-ranks-filter", "torchrun", "--ranks 0,3-5"},
    {"--num-proc", "horovodrun", "-np N"},
    {"--check-build", "horovodrun", "cohort doctor --build"},
    {"--output-filename", "horovodrun", "--run-dir DIR: the logs are in DIR/logs"},
    {"--ssh-port", "horovodrun", "--ssh 'ssh -p PORT'"},
    {"--network-interfaces", "horovodrun", "--network NAME"},
    {"--gloo", "horovodrun", "leave it out: Cohort moves the data itself"},
    {"--mpi", "horovodrun", "--env COHORT_TRANSPORT=mpi"},
    {"--verbose", "horovodrun and mpirun", "COHORT_LOG=debug `cohort run` ..."},
    {"-v", "mpirun", "COHORT_LOG=debug `cohort run` ..."},
    {"-x", "mpirun", "--env NAME[=VALUE]; ranks have the whole environment without it"},
    {"-c", "mpirun", "-np N"},
    {"-N", "mpirun and srun", "--per-node N for ranks of each host, --nodes N for hosts"},
    {"--npernode", "mpirun", "--per-node N"},
    {"-ppn", "mpiexec", "--per-node N"},
    {"-genv", "mpiexec", "--env NAME=VALUE"},
    {"--machinefile", "mpirun", "--hostfile FILE"},
    {"--hostfile", "mpirun", "--hostfile FILE"},
    {"--host", "mpirun", "-H HOST:N,..."},
    {"--oversubscribe", "mpirun", "leave it out: there may be more ranks than cores"},
    {"--allow-run-as-root", "mpirun", "leave it out: root may start jobs"},
    {"--bind-to", "mpirun", "--bind core, or none"},
    {"--map-by", "mpirun", "leave it out: hosts are filled in the order of their list; --bind core shares out cores"},
    {"--tag-output", "mpirun", "leave it out: lines have their rank in front (--prefix)"},
    {"--mca", "mpirun", "--env OMPI_MCA_NAME=VALUE; only COHORT_TRANSPORT=mpi uses MPI"},
    {"--wdir", "mpirun", "leave it out: ranks start in the folder that this command is in"},
    {"--ntasks", "srun", "-np N"},
    {"--ntasks-per-node", "srun", "--per-node N"},
    {"--label", "srun", "leave it out: lines have their rank in front (--prefix)"},
    {"--num-processes", "accelerate launch", "-np N"},
    {"--num-machines", "accelerate launch", "-H a,b, or --nodes N of a list"},
    {"--num-cpu-threads-per-process", "accelerate launch", "--env OMP_NUM_THREADS=N"},
};

}  // namespace

std::string foreign_option(std::string_view word) {
  std::string name(word.substr(0, word.find('=')));
  std::ranges::replace(name, '_', '-');
  name.erase(0, name.find_first_not_of('-'));  // mpirun takes its long ones with one, too
  for (const Foreign& foreign : kForeign) {
    if (foreign.name.substr(foreign.name.find_first_not_of('-')) == name)
      return std::string(foreign.whose) + "'s; here: " + std::string(foreign.here);
  }
  return {};
}

void add_run(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand("run", "Run a program as N processes that form one world");
  // For the help and the completion; read_words reads the words.
  add_options(*command);
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
  const Words words = read_words(typed);
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
