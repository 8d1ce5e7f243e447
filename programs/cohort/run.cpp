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

// Where the value of each option of `cohort run` comes from: the command line, else its environment variable, else the
// file of --config, else its default. Reads environment and file; changes nothing. One thread.

struct RunSetting {
  std::vector<std::string> values = {};  ///< several only for options that may be repeated
  std::string origin = {};               ///< "command line", "COHORT_RUN_GRACE", "job.toml:3"
  bool elsewhere = false;                ///< not by the command line
};
using RunSettings = std::map<const RunOption*, RunSetting>;  ///< of those that are given

constexpr const char* kCommandLine = "command line";

bool is_repeatable(const RunOption& option) { return option.kind == RunOption::Kind::Repeatable; }

/// What may be repeated adds up; else what comes last counts.
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

/// The words after `cohort run`: -np is one word, torchrun's --node_rank is --node-rank, and from the program on
/// nothing is an option. CLI11 would read -np as -n p, and the program's options as ours.
class Words {
 public:
  explicit Words(const std::vector<std::string>& words) : words_(words) {
    for (; next_ < words.size(); ++next_) {
      const std::string& word = words[next_];
      if (word == "--") {
        ++next_;
        break;
      }
      if (word.size() < 2 || word[0] != '-') break;  // the program
      if (word == "--help" || word == "-h") {
        help = true;
      } else if (word == "--help-all") {
        help_all = true;
      } else if (word.starts_with("--") || word.starts_with("-np")) {
        read_long(word);
      } else {
        read_short(word);
      }
    }
    program.assign(words.begin() + static_cast<std::ptrdiff_t>(next_), words.end());
  }

  std::map<const RunOption*, std::vector<std::string>> given;
  std::vector<std::string> program;  ///< with its arguments
  bool help = false, help_all = false;

 private:
  void read_long(std::string word) {
    // -np is one word to everyone who comes from MPI, also as -np4 and -nproc.
    if (word[1] != '-') {
      const bool number = word.size() > 3 && word[3] >= '0' && word[3] <= '9';
      word = number ? "--np=" + word.substr(3) : "-" + word;
      if (run_option(word.substr(0, word.find('='))) == nullptr) refuse(word.substr(1, word.find('=') - 1));
    }
    const auto equals = std::min(word.find('='), word.size());
    // torchrun takes --node_rank and --node-rank.
    std::replace(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(equals), '_', '-');
    const std::string name = word.substr(0, equals);
    const RunOption* const option = run_option(name);
    if (option == nullptr) refuse(name);
    if (equals < word.size()) {
      const std::string value = word.substr(equals + 1);
      note(*option, option->is_flag() ? truth(value, name) : value);
    } else {
      note(*option, option->is_flag() ? "true" : value_behind(name));
    }
  }

  /// "-qm" is two flags, "-n4" one option and its value.
  void read_short(const std::string& word) {
    for (std::size_t at = 1; at < word.size(); ++at) {
      const RunOption* const option = run_option(std::string("-") + word[at]);
      if (option == nullptr || !foreign_option(word.substr(0, word.find('='))).empty())
        refuse(word.substr(0, word.find('=')));
      if (option->is_flag()) {
        note(*option, "true");
        continue;
      }
      note(*option, at + 1 < word.size() ? word.substr(at + 1 + (word[at + 1] == '=' ? 1 : 0)) : value_behind(word));
      return;
    }
  }

  std::string value_behind(const std::string& name) {
    if (++next_ == words_.size()) raise(ErrorCode::InvalidArgument, "{} wants a value", name);
    return words_[next_];
  }

  void note(const RunOption& option, std::string value) {
    auto& values = given[&option];
    if (!values.empty() && !is_repeatable(option) && !option.is_flag())
      raise(ErrorCode::InvalidArgument, "{} is given twice, with {} and {}",
            option.name() == "--np" ? "-np" : option.name(), values.back(), value);
    values.push_back(std::move(value));
  }

  const std::vector<std::string>& words_;
  std::size_t next_ = 0;
};

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

/// Those that were probably meant for an option, and are no option's.
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
  // The weakest first.
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

/// What they say, all at once. Throws Error (InvalidArgument) with the option, its value and where it is from.
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
    // An option without a value is shown too, and --config does not belong into a file.
    const bool comment = value.empty() || key == "config";
    lines.emplace_back((comment ? "# " : "") + key + (value.empty() ? "" : " = " + value), setting.origin);
    width = std::max(width, lines.back().first.size());
  }
  std::string text = "[run]\n";
  for (const auto& [line, origin] : lines)
    text += fmt::format("{:<{}}  # {}\n", line, std::min<std::size_t>(width, 48), origin);
  return text;
}

// Options of other launchers, for those who type them by habit: what does the same here.

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
    {"--log-dir", "torchrun", "--output-dir DIR; logs are kept without it, too"},
    {"--redirects", "torchrun", "leave it out: each rank has its logs, and --ranks says which are shown"},
    {"--tee", "torchrun", "leave it out: each rank has its logs, and --ranks says which are shown"},
    {"--local-ranks-filter", "torchrun", "--ranks 0,3-5"},
    {"--num-proc", "horovodrun", "-np N"},
    {"--output-filename", "horovodrun", "--output-dir DIR"},
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
  // For the help and the completion; read_settings reads the words.
  static std::vector<std::string> unread;
  for (const RunPart& part : run_parts()) {
    for (const RunOption* row : part.options) {
      const RunOption& option = *row;
      const std::string names(option.names), help(option.help);
      CLI::Option* const added = option.is_flag() ? command->add_flag(names, help)
                                                  : command->add_option(names, unread, help)
                                                        ->expected(1)
                                                        ->type_name(option.shown_type())
                                                        ->default_str(std::string(option.standard));
      added->group(std::string(part.title));
      if (option.name() == "--config") {
        command->set_help_all_flag("--help-all", "Print all options, by topic")->group(std::string(part.title));
        command->get_option("--help")->group(std::string(part.title));
      }
    }
  }
  command->add_option("PROGRAM", unread, "Program or .py file, and its arguments")->type_name("");
  set_run_help(*command);
}

namespace {

/// trace.pftrace of what a job's hosts have recorded.
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

}  // namespace

void run(const std::vector<std::string>& typed, int& exit_status) {
  const Words words(typed);
  if (words.help_all) throw CLI::CallForAllHelp();
  if (words.help) throw CLI::CallForHelp();
  const RunSettings settings = read_settings(words);
  const launch::JobSpec spec = spec_of(settings, words.program);
  if (spec.check_build) return print_build();
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
    raise(ErrorCode::InvalidArgument, "--invitation-fd {}: {}", *spec.invitation_fd, errno_text(errno));
  exit_status = launch::kCannotStartStatus;  // what it throws means that nothing was started
  if (spec.dry_run) {
    std::fputs(launch::describe_job(spec, std::move(plan)).c_str(), stdout);
    exit_status = 0;
    return;
  }
  const auto on_trace = [&spec](const std::string& run_folder) { merge_trace_of(run_folder, spec.quiet); };
  exit_status = (plan.node ? launch::run_node : launch::run_job)(spec, std::move(plan), on_trace);
}

}  // namespace cohort::app
