#include "base/env.h"
#include "base/hardware.h"
#include "base/parse.h"
#include "base/process.h"
#include "base/result.h"
#include "cohort/commands.h"
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

constexpr const char* kCommandLine = "command line";

std::string truth(const std::string& value, const std::string& origin) {
  if (const auto said = parse_truth(value)) return *said ? "true" : "false";
  raise(ErrorCode::InvalidArgument, "{}: true or false is wanted, not '{}'", origin, value);
}

using Given = std::map<const RunOption*, std::vector<std::string>>;

std::vector<std::string> names_of_all() {
  std::vector<std::string> names = {"--help", "--help-all"};
  for (const RunOption& option : run_options()) {
    for (std::string& name : option.all_names()) names.push_back(std::move(name));
  }
  return names;
}

[[noreturn]] void refuse(const std::string& name) {
  if (const std::string foreign = foreign_option(name); !foreign.empty())
    raise(ErrorCode::InvalidArgument, "`cohort run` has no option {}: it is {}", name, foreign);
  const std::string meant = closest(name, names_of_all());
  raise(ErrorCode::InvalidArgument, "`cohort run` has no option {}{}; options of the program come after its name", name,
        meant.empty() ? "" : "; did you mean " + meant + "?");
}

/// The command line's words, from the first on.
class Words {
 public:
  Words(const std::vector<std::string>& words, RunSettings& out, Given& given)
      : words_(words), out_(out), given_(given) {}

  void read() {
    for (; next_ < words_.size(); ++next_) {
      const std::string& word = words_[next_];
      if (word == "--") {
        ++next_;
        break;
      }
      if (word.size() < 2 || word[0] != '-') break;  // the program
      if (word == "--help" || word == "-h") {
        out_.help = true;
      } else if (word == "--help-all") {
        out_.help_all = true;
      } else if (word.starts_with("--") || word.starts_with("-np")) {
        read_long(word);
      } else {
        read_short(word);
      }
    }
    out_.program.assign(words_.begin() + static_cast<std::ptrdiff_t>(next_), words_.end());
  }

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
    auto& values = given_[&option];
    if (!values.empty() && option.kind != RunOption::Kind::Repeatable && !option.is_flag())
      raise(ErrorCode::InvalidArgument, "{} is given twice, with {} and {}",
            option.name() == "--np" ? "-np" : option.name(), values.back(), value);
    values.push_back(std::move(value));
  }

  const std::vector<std::string>& words_;
  RunSettings& out_;
  Given& given_;
  std::size_t next_ = 0;
};

struct Source {
  std::vector<std::string> values;
  std::string origin;
};

std::map<const RunOption*, Source> from_file(const std::string& path) {
  std::map<const RunOption*, Source> out;
  for (const launch::ConfigEntry& entry : value_or_throw(launch::read_config(path))) {
    const std::string origin = fmt::format("{}:{}", path, entry.line);
    std::string key = entry.key;
    std::replace(key.begin(), key.end(), '_', '-');
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
    const bool repeatable = option->kind == RunOption::Kind::Repeatable;
    if (entry.is_list && !repeatable && key != "ranks") {
      raise(ErrorCode::InvalidArgument, "{}: {} takes one value, not a list", origin, entry.key);
    }
    if (const auto before = out.find(option); before != out.end()) {
      raise(ErrorCode::InvalidArgument, "{}: {} is the option that {} has set already", origin, entry.key,
            before->second.origin);
    }
    Source source{entry.values, origin};
    if (option->is_flag()) source.values = {truth(entry.values.front(), origin + ": " + entry.key)};
    if (entry.is_list && !repeatable) source.values = {fmt::format("{}", fmt::join(entry.values, ","))};
    out[option] = std::move(source);
  }
  return out;
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
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string meant = closest(name, known);
    remarks.push_back(fmt::format("the environment variable {} is no option's{}", name,
                                  meant.empty() ? "" : "; did you mean " + meant + "?"));
  }
  return remarks;
}

RunSettings read_settings(const std::vector<std::string>& words) {
  RunSettings out;
  Given given;
  Words(words, out, given).read();
  const launch::Environment environment = launch::Environment::current();
  const auto variable = [&environment](const RunOption& option) -> std::optional<std::string> {
    if (option.only_on_command_line()) return std::nullopt;
    const auto value = environment.find(option.variable());
    return value && !value->empty() ? value : std::nullopt;
  };
  const RunOption* const config = run_option("--config");
  const auto said = given.find(config);
  const auto path = said != given.end() ? said->second.back() : variable(*config);
  const auto file = path && !out.help ? from_file(*path) : std::map<const RunOption*, Source>();

  for (const RunOption& option : run_options()) {
    const bool repeatable = option.kind == RunOption::Kind::Repeatable;
    std::vector<Source> sources;  // the weakest first
    if (const auto found = file.find(&option); found != file.end()) sources.push_back(found->second);
    if (const auto value = variable(option)) {
      const std::string name = option.variable();
      auto values = repeatable ? split(*value, ';') : std::vector{option.is_flag() ? truth(*value, name) : *value};
      std::erase(values, "");
      sources.push_back({std::move(values), name});
    }
    RunSetting setting{&option};
    setting.elsewhere = !sources.empty();
    if (const auto found = given.find(&option); found != given.end()) {
      sources.push_back({found->second, kCommandLine});
      if (!repeatable) setting.elsewhere = false;
    }
    setting.given = !sources.empty();
    if (!setting.given) {
      setting.origin = "default";
      if (option.is_flag()) setting.values = {"false"};
      if (!option.standard.empty()) setting.values = {std::string(option.standard)};
    }
    // What may be repeated adds up, and the strongest comes last, which counts.
    if (!repeatable && sources.size() > 1) sources.erase(sources.begin(), sources.end() - 1);
    for (const Source& source : sources) {
      setting.values.insert(setting.values.end(), source.values.begin(), source.values.end());
      setting.origin += (setting.origin.empty() ? "" : ", ") + source.origin;
    }
    out.settings.push_back(std::move(setting));
  }
  out.remarks = remarks_on(environment);
  return out;
}

std::string RunSettings::origin_of(std::string_view option) const {
  for (const RunSetting& setting : settings) {
    if (setting.elsewhere && setting.option->name() == option)
      return fmt::format("; {} is from {}", option, setting.origin);
  }
  return {};
}

RunChoices choices_of(const RunSettings& settings) {
  RunChoices choices;
  for (const RunSetting& setting : settings.settings) {
    const RunOption& option = *setting.option;
    if (!setting.given) continue;
    for (const std::string& value : setting.values) {
      try {
        set_option(option, value, choices);
      } catch (const Error& error) {
        throw Error(error.code(), error.what() + settings.origin_of(option.name()));
      }
    }
  }
  return choices;
}

std::string show_config(const RunSettings& settings) {
  std::vector<std::pair<std::string, std::string>> lines;
  std::size_t width = 0;
  for (const RunSetting& setting : settings.settings) {
    const RunOption& option = *setting.option;
    if (option.only_on_command_line()) continue;
    const std::string key = option.name().substr(2);
    std::string value;
    if (option.kind == RunOption::Kind::Repeatable) {
      for (const std::string& each : setting.values) value += (value.empty() ? "" : ", ") + launch::toml_text(each);
      value = "[" + value + "]";
    } else if (!setting.values.empty()) {
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
    {"-npernode", "mpirun", "--per-node N"},
    {"-ppn", "mpiexec", "--per-node N"},
    {"-genv", "mpiexec", "--env NAME=VALUE"},
    {"-machinefile", "mpirun", "--hostfile FILE"},
    {"--machinefile", "mpirun", "--hostfile FILE"},
    {"-hostfile", "mpirun", "--hostfile FILE"},
    {"--host", "mpirun", "-H HOST:N,..."},
    {"-host", "mpirun", "-H HOST:N,..."},
    {"--oversubscribe", "mpirun", "leave it out: there may be more ranks than cores"},
    {"--allow-run-as-root", "mpirun", "leave it out: root may start jobs"},
    {"--bind-to", "mpirun", "--bind core, or none"},
    {"-bind-to", "mpirun", "--bind core, or none"},
    {"--map-by", "mpirun", "leave it out: hosts are filled in the order of their list; --bind core shares out cores"},
    {"-map-by", "mpirun", "leave it out: hosts are filled in the order of their list; --bind core shares out cores"},
    {"--tag-output", "mpirun", "leave it out: lines have their rank in front (--prefix)"},
    {"--mca", "mpirun", "--env OMPI_MCA_NAME=VALUE; only COHORT_TRANSPORT=mpi uses MPI"},
    {"-mca", "mpirun", "--env OMPI_MCA_NAME=VALUE; only COHORT_TRANSPORT=mpi uses MPI"},
    {"--wdir", "mpirun", "leave it out: ranks start in the folder that this command is in"},
    {"-wdir", "mpirun", "leave it out: ranks start in the folder that this command is in"},
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
  std::replace(name.begin(), name.end(), '_', '-');
  for (const Foreign& foreign : kForeign) {
    if (foreign.name == name) return std::string(foreign.whose) + "'s; here: " + std::string(foreign.here);
  }
  return {};
}

namespace {

using Starter = launch::HostOptions::Starter;

void set_hosts(launch::RunOptions& job, const RunChoices& choices, const RunSettings& settings) {
  launch::HostChoice choice = value_or_throw(launch::choose_hosts(choices.hosts, launch::Environment::current()));
  if (!choice.note.empty() && !job.quiet) std::fprintf(stderr, "cohort: %s\n", choice.note.c_str());
  job.hosts = std::move(choice.hosts);
  job.others.server_hosts = std::move(choice.server_hosts);
  job.remote.method = choice.method;
  job.remote.components = std::move(choice.components);
  if (choices.hosts.starter == Starter::Hand) {
    if (choices.secret_file.empty()) {
      raise(ErrorCode::InvalidArgument,
            "--starter hand: --secret-file FILE is wanted; `cohort secret FILE` makes one{}",
            settings.origin_of("--starter"));
    }
    if (job.max_restarts > 0) {
      raise(ErrorCode::InvalidArgument, "--starter hand: --max-restarts has nobody who starts the agents again{}{}",
            settings.origin_of("--starter"), settings.origin_of("--max-restarts"));
    }
    job.remote.secret_file = choices.secret_file;
    job.remote.port = choices.listen;
  } else if (!choices.secret_file.empty() || choices.listen != 0) {
    raise(ErrorCode::InvalidArgument, "--secret-file and --listen are for --starter hand and --nnodes{}{}",
          settings.origin_of("--secret-file"), settings.origin_of("--listen"));
  }
}

/// For the launchers of a job that people start one after the other.
constexpr auto kStartTimeoutByHand = std::chrono::seconds(300);

bool names_hosts(const RunChoices& choices) {
  return !choices.hosts.list.empty() || !choices.hosts.file.empty() || choices.hosts.nodes != 0;
}

int usable_gpus() {
  const rendezvous::GpuClaim said = rendezvous::gpus_claimed(rendezvous::current_environment());
  return said.claim.empty() ? sys::gpus_here() : said.gpus;
}

/// -np, or what torchrun calls it: a number, `cpu`, `gpu`, or `auto`, which are GPUs where there are any.
int processes_wanted(const RunChoices& choices) {
  if (choices.processes && !choices.per_node.empty()) {
    raise(ErrorCode::InvalidArgument, "-np {} and --nproc-per-node {}: give one",
          *choices.processes == 0 ? "auto" : std::to_string(*choices.processes), choices.per_node);
  }
  const bool hosts = !choices.hosts.list.empty() || !choices.hosts.file.empty();
  const bool a_rank = env::get(env::kLocalRank).has_value();  // torchrun's variables were for what started it
  std::string wanted = choices.per_node;
  if (wanted.empty() && !choices.processes && !hosts && !a_rank) wanted = env::text("PET_NPROC_PER_NODE");
  if (wanted.empty()) return choices.processes.value_or(0);
  const std::string shown = choices.per_node.empty() ? "PET_NPROC_PER_NODE=" + wanted : "--nproc-per-node " + wanted;
  if (hosts) raise(ErrorCode::InvalidArgument, "{}: with -H or --hostfile it is --per-node {}", shown, wanted);
  if (wanted == "cpu") return 0;
  if (wanted != "gpu" && wanted != "auto") {
    try {
      return processes_of(wanted);
    } catch (const Error& error) {
      raise(ErrorCode::InvalidArgument, "{}: {}", shown, error.what());
    }
  }
  if (const int gpus = usable_gpus(); gpus > 0) return gpus;
  if (wanted == "auto") return 0;
  raise(ErrorCode::InvalidArgument,
        "{}: there is no GPU here (CUDA_VISIBLE_DEVICES, /dev/nvidia0, /sys/class/kfd) -- give a number, or cpu",
        shown);
}

/// Where this command is one of several launchers of one job.
void set_nodes(launch::RunOptions& job, const RunChoices& choices) {
  launch::NodeOptions node_options = choices.nodes;
  const std::string secret_file = !choices.secret_file.empty() ? choices.secret_file : env::text(env::kSecretFile);
  node_options.has_secret = !secret_file.empty();
  node_options.has_hosts = names_hosts(choices);
  job.node = value_or_throw(launch::choose_node(node_options, rendezvous::current_environment()));
  if (!job.node || job.node->count == 1) return;
  if (job.owner_pid) {
    raise(
        ErrorCode::InvalidArgument,
        "{}: the process that starts this job for itself is one of several, each of which would start one -- start it "
        "once, or as ranks without a launcher; COHORT_ALONE=1 if each job is meant to be its own",
        job.node->source);
  }
  if (choices.hosts.starter != Starter::Auto || choices.listen != 0 || choices.hosts.per_node != 0) {
    raise(ErrorCode::InvalidArgument,
          "{}: this command is started on each host itself: --starter, --listen and --per-node have no meaning there",
          job.node->source);
  }
  job.remote.secret_file = secret_file;
  const int ranks = job.processes != 0 ? job.processes : sys::usable_cores();
  if (static_cast<long long>(ranks) * job.node->count > launch::kMostProcesses) {
    raise(ErrorCode::InvalidArgument, "-np {} on {} nodes: more than {} processes are not started at once", ranks,
          job.node->count, launch::kMostProcesses);
  }
  job.processes = 0;  // as many as the nodes have
  for (int node = 0; node < job.node->count; ++node) {
    const bool here = node == std::max(0, job.node->rank);
    job.hosts.push_back({here ? sys::host_name() : fmt::format("node {}", node), ranks, here});
  }
}

/// Where the process that this command belongs to has agents started.
void set_agents(launch::RunOptions& job, const RunChoices& choices) {
  if (!job.invitation_fd || names_hosts(choices) || choices.processes)
    raise(ErrorCode::InvalidArgument,
          "--agents: --invitation-fd is wanted, and neither hosts nor a number of processes");
  if (::fcntl(*job.invitation_fd, F_SETFD, FD_CLOEXEC) != 0)
    raise(ErrorCode::InvalidArgument, "--invitation-fd {}: {}", *job.invitation_fd, errno_text(errno));
  job.remote.method = launch::StartMethod::Owner;
  job.processes = 0;  // as many as they take
  for (int agent = 0; agent < choices.agents; ++agent) job.hosts.push_back({fmt::format("agent {}", agent), 1, false});
}

/// MPI connects only what its own launcher has started, and here `cohort run` starts the ranks.
void refuse_mpi(const launch::RunOptions& job) {
  if (job.hosts.size() < 2 || env::text(env::kTransport) != "mpi") return;
  raise(ErrorCode::InvalidArgument,
        "COHORT_TRANSPORT=mpi: `cohort run` starts the ranks itself, and MPI knows only those of its own launcher -- "
        "start them by it, without `cohort run`: COHORT_TRANSPORT=mpi mpirun -np 4 ./train, or srun");
}

launch::RunOptions job_of(RunChoices choices, const RunSettings& settings,
                          const std::vector<std::string>& command_line) {
  if (settings.program.empty()) {
    raise(ErrorCode::InvalidArgument, "no program to run; for example: cohort run -np 4 ./train");
  }
  narrow_networks(choices.network);
  launch::RunOptions job = std::move(choices.job);
  job.processes = processes_wanted(choices);
  job.program.program = settings.program.front();
  job.program.arguments.assign(settings.program.begin() + 1, settings.program.end());
  job.command_line = command_line;
  const bool server_hosts = !choices.hosts.servers.empty();
  if (server_hosts && job.others.colocated)
    raise(ErrorCode::InvalidArgument, "--servers colocated and --server-hosts: one of them says where servers run{}{}",
          settings.origin_of("--servers"), settings.origin_of("--server-hosts"));
  const bool servers = job.others.colocated || job.others.servers > 0 || server_hosts;
  if (job.server_program && !servers)
    raise(ErrorCode::InvalidArgument,
          "--server-program: how many servers? --servers N or colocated, or --server-hosts, says it{}",
          settings.origin_of("--server-program"));
  if ((job.server_restarts > 0 || job.lost_servers > 0) && !servers) {
    const char* const option = job.server_restarts > 0 ? "--server-restarts" : "--lost-servers";
    raise(ErrorCode::InvalidArgument,
          "{}: there are no servers -- --servers N or colocated, or --server-hosts, says how many{}", option,
          settings.origin_of(option));
  }
  if (choices.agents > 0 && (servers || job.others.evaluator))
    raise(ErrorCode::InvalidArgument,
          "--agents: --servers and --evaluator are not for jobs whose agents the owner starts");
  if (choices.agents > 0) {
    set_agents(job, choices);
    job.start_timeout = choices.start_timeout.value_or(job.start_timeout);
    return job;
  }
  set_nodes(job, choices);
  const bool only_one = job.node && job.node->count == 1;
  if (only_one) job.node.reset();
  if (server_hosts && job.node)
    raise(
        ErrorCode::InvalidArgument,
        "--server-hosts: a launcher on each node starts servers on these nodes -- leave it out, or start the job from "
        "one of them by -H{}",
        settings.origin_of("--server-hosts"));
  // One that is to be the only one is that in an allocation of several nodes, too.
  const bool asks_for_hosts =
      names_hosts(choices) || server_hosts || choices.hosts.per_node != 0 || choices.hosts.starter != Starter::Auto;
  if (!job.node && (!only_one || asks_for_hosts)) set_hosts(job, choices, settings);
  if (choices.start_timeout)
    job.start_timeout = *choices.start_timeout;
  else if (job.node && !job.node->step)
    job.start_timeout = kStartTimeoutByHand;
  refuse_mpi(job);
  if (env::get(env::kKubeflowServer) && std::find(job.track.begin(), job.track.end(), "kubeflow") == job.track.end())
    job.track.emplace_back("kubeflow");
  return job;
}

}  // namespace

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
      launch::capture({value_or_throw(launch::own_command()), "trace", "merge", run_folder}, std::chrono::hours(1));
  std::string text = merged ? merged->text : merged.error().what();
  while (text.ends_with('\n')) text.pop_back();
  if (!merged || merged->status != 0)
    fmt::print(stderr, "cohort: the ranks' traces could not be merged: {}\n",
               text.substr(text.starts_with("cohort: ") ? 8 : 0));
  else if (!quiet)
    fmt::print(stderr, "cohort: {} -- open it in ui.perfetto.dev\n", text);
}

}  // namespace

void run(const std::vector<std::string>& words, int& exit_status) {
  const RunSettings settings = read_settings(words);
  for (const std::string& remark : settings.remarks) std::fprintf(stderr, "cohort: %s\n", remark.c_str());
  if (settings.help_all) throw CLI::CallForAllHelp();
  if (settings.help) throw CLI::CallForHelp();
  const RunChoices choices = choices_of(settings);
  if (choices.check_build) return print_build();
  if (choices.show_config) {
    std::fputs(show_config(settings).c_str(), stdout);
    return;
  }
  launch::RunOptions job = job_of(choices, settings, sys::own_arguments());
  job.on_trace = [quiet = job.quiet](const std::string& run_folder) { merge_trace_of(run_folder, quiet); };
  launch::check_places(job);
  exit_status = launch::kCannotStartStatus;  // what it throws means that nothing was started
  if (choices.dry_run) {
    std::fputs(launch::describe_job(job).c_str(), stdout);
    exit_status = 0;
    return;
  }
  exit_status = job.node ? launch::run_node(job) : launch::run_job(job);
}

}  // namespace cohort::app
