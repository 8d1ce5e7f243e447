#include "base/env.h"
#include "base/parse.h"
#include "cluster/detect.h"
#include "cluster/slips.h"
#include "launch/plan/nodes.h"
#include "launch/start/hosts.h"
#include "launch/supervise/dry_run.h"
#include "launch/supervise/supervisor.h"
#include "sys/cpus.h"
#include "sys/gpus.h"
#include "sys/process.h"

#include "commands.h"
#include "host_options.h"
#include "run_config.h"
#include "run_help.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>

namespace cohort::app {
namespace {

using launch::PrefixStyle;
using launch::ProgramRequest;

struct Options {
  std::string processes;  ///< empty: not said
  std::string run_folder;
  std::vector<std::string> environment;
  std::string prefix = "rank";
  std::string collapse = "auto";
  std::string ranks;
  std::string output_folder;
  int max_restarts = 0;
  std::string bind = "none";
  std::string config;
  double timeout = 0;
  std::optional<double> start_timeout;
  double grace = 5;
  double preempt_grace = 30;
  double output_timeout = 10;
  double stall_timeout = 1800;
  double deadlock_timeout = 10;
  double stopped_timeout = 60;
  bool module = false;
  bool no_python = false;
  bool as_horovod = false;
  bool no_logs = false;
  launch::HostWishes hosts;
  launch::NodeWishes nodes;
  std::string per_node;
  std::string starter = "auto";
  std::string ssh = "ssh";
  std::string remote_cohort;
  std::string network;
  std::string secret_file;
  int listen = 0;
  double host_timeout = 3;
  int owner = 0;
  std::string owner_folder;
  bool quiet = false;
  bool json = false;
  bool dry_run = false;
  bool show_config = false;
  bool check_build = false;
  std::vector<std::string> program;
};

std::chrono::milliseconds milliseconds_of(double seconds, const char* option) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9) {
    raise(ErrorCode::InvalidArgument, "{} {}: a number of seconds from 0 to 1e9 is wanted", option, seconds);
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

/// Of limits that are looked after once a second.
std::chrono::seconds seconds_of(double seconds, const char* option) {
  return std::chrono::ceil<std::chrono::seconds>(milliseconds_of(seconds, option));
}

int processes_of(const std::string& text) {
  if (text == "auto") return 0;
  const auto number = parse_integer<long long>(text);
  if (!number) raise(ErrorCode::InvalidArgument, "-np {}: a number or 'auto' (one process per core) is wanted", text);
  if (*number < 1) raise(ErrorCode::InvalidArgument, "-np {}: at least one process is needed", text);
  if (*number > 65536)
    raise(ErrorCode::InvalidArgument, "-np {}: more than 65536 processes are not started at once", text);
  return static_cast<int>(*number);
}

std::vector<std::string> environment_of(const std::vector<std::string>& wishes) {
  std::vector<std::string> out;
  for (const std::string& wish : wishes) {
    const auto equals = wish.find('=');
    if (equals == 0 || wish.empty()) raise(ErrorCode::InvalidArgument, "--env {}: NAME=VALUE or NAME is wanted", wish);
    if (equals != std::string::npos) {
      out.push_back(wish);
    } else if (const char* value = std::getenv(wish.c_str())) {
      out.push_back(wish + "=" + value);
    } else {
      raise(ErrorCode::InvalidArgument, "--env {}: it is not set here; give a value with --env {}=VALUE", wish, wish);
    }
  }
  return out;
}

void set_hosts(launch::RunOptions& job, const Options& options) {
  using Starter = launch::HostWishes::Starter;
  launch::HostWishes wishes = options.hosts;
  for (const auto& [value, name] : {std::pair(wishes.nodes, "--nodes"), std::pair(wishes.per_node, "--per-node")}) {
    if (value < 0 || value > launch::kMostProcesses)
      raise(ErrorCode::InvalidArgument, "{} {}: a number from 1 to {} is wanted", name, value, launch::kMostProcesses);
  }
  wishes.starter = starter_of(options.starter);
  launch::HostChoice choice = value_or_throw(launch::choose_hosts(wishes, launch::Environment::current()));
  job.hosts = std::move(choice.hosts);
  job.remote.way = choice.way;
  job.remote.components = std::move(choice.components);
  job.remote.remote_cohort = options.remote_cohort;
  job.remote.ssh = ssh_command(options.ssh);
  if (wishes.starter == Starter::Hand) {
    if (options.secret_file.empty())
      raise(ErrorCode::InvalidArgument, "--starter hand: --secret-file FILE is wanted; `cohort secret FILE` makes one");
    if (job.max_restarts > 0)
      raise(ErrorCode::InvalidArgument, "--starter hand: --max-restarts has nobody who starts the agents again");
    if (options.listen < 0 || options.listen > 65535)
      raise(ErrorCode::InvalidArgument, "--listen {}: a port from 1 to 65535 is wanted", options.listen);
    job.remote.secret_file = options.secret_file;
    job.remote.port = static_cast<std::uint16_t>(options.listen);
  } else if (!options.secret_file.empty() || options.listen != 0) {
    raise(ErrorCode::InvalidArgument, "--secret-file and --listen are for --starter hand and --nnodes");
  }
}

/// For the launchers of a job that people start one after the other.
constexpr auto kStartTimeoutByHand = std::chrono::seconds(300);

bool names_hosts(const Options& options) {
  return !options.hosts.list.empty() || !options.hosts.file.empty() || options.hosts.nodes != 0;
}

int usable_gpus() {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible != nullptr && *visible == '\0') return 0;
  const cluster::GpuClaim said = cluster::gpus_claimed(cluster::current_environment());
  return said.claim.empty() ? sys::gpus_here() : said.gpus;
}

/// -np, or what torchrun calls it: a number, `cpu`, `gpu`, or `auto`, which are GPUs where there are any.
std::string processes_wanted(const Options& options) {
  if (!options.processes.empty() && !options.per_node.empty())
    raise(ErrorCode::InvalidArgument, "-np {} and --nproc-per-node {}: give one", options.processes, options.per_node);
  const bool hosts = !options.hosts.list.empty() || !options.hosts.file.empty();
  const bool a_rank = env::get(env::kLocalRank).has_value();  // torchrun's variables were for what started it
  std::string wanted = options.per_node;
  if (wanted.empty() && options.processes.empty() && !hosts && !a_rank)
    wanted = env::get("PET_NPROC_PER_NODE").value_or("");
  if (wanted.empty()) return options.processes.empty() ? "auto" : options.processes;
  const std::string shown = options.per_node.empty() ? "PET_NPROC_PER_NODE=" + wanted : "--nproc-per-node " + wanted;
  if (hosts) raise(ErrorCode::InvalidArgument, "{}: with -H or --hostfile it is --per-node {}", shown, wanted);
  if (wanted == "cpu") return "auto";
  if (wanted != "gpu" && wanted != "auto") return wanted;
  const int gpus = usable_gpus();
  if (gpus > 0) return std::to_string(gpus);
  if (wanted == "auto") return wanted;
  raise(ErrorCode::InvalidArgument,
        "{}: there is no GPU here (CUDA_VISIBLE_DEVICES, /dev/nvidia0, /sys/class/kfd) -- give a number, or cpu",
        shown);
}

/// Where this command is one of several launchers of one job.
void set_nodes(launch::RunOptions& job, const Options& options) {
  launch::NodeWishes wishes = options.nodes;
  const std::string secret_file =
      !options.secret_file.empty() ? options.secret_file : env::get(env::kSecretFile).value_or("");
  wishes.has_secret = !secret_file.empty();
  wishes.has_hosts = names_hosts(options);
  job.node = value_or_throw(launch::choose_node(wishes, cluster::current_environment()));
  if (!job.node || job.node->count == 1) return;
  if (job.owner_pid) {
    raise(
        ErrorCode::InvalidArgument,
        "{}: the process that starts this job for itself is one of several, each of which would start one -- start it "
        "once, or as ranks without a launcher; COHORT_ALONE=1 if each job is meant to be its own",
        job.node->source);
  }
  if (starter_of(options.starter) != launch::HostWishes::Starter::Auto || options.listen != 0 ||
      options.hosts.per_node != 0) {
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

/// MPI connects only what its own launcher has started, and here `cohort run` starts the ranks.
void refuse_mpi(const launch::RunOptions& job) {
  if (job.hosts.size() < 2 || env::get(env::kTransport).value_or("") != "mpi") return;
  raise(ErrorCode::InvalidArgument,
        "COHORT_TRANSPORT=mpi: `cohort run` starts the ranks itself, and MPI knows only those of its own launcher -- "
        "start them by it, without `cohort run`: COHORT_TRANSPORT=mpi mpirun -np 4 ./train, or srun");
}

launch::RunOptions job_of(const Options& options, const std::vector<std::string>& command_line) {
  if (options.program.empty()) {
    raise(ErrorCode::InvalidArgument, "no program to run; for example: cohort run -np 4 ./train");
  }
  narrow_networks(options.network);
  launch::RunOptions job;
  job.processes = processes_of(processes_wanted(options));
  job.program.program = options.program.front();
  job.program.arguments.assign(options.program.begin() + 1, options.program.end());
  if (options.module) job.program.python = ProgramRequest::Python::Module;
  if (options.no_python) job.program.python = ProgramRequest::Python::Never;
  job.run_folder = options.run_folder;
  job.environment = environment_of(options.environment);
  if (options.bind == "core") job.bind = launch::Binding::Core;
  job.prefix = options.prefix == "none"   ? PrefixStyle::None
               : options.prefix == "full" ? PrefixStyle::Full
                                          : PrefixStyle::Rank;
  job.collapse = options.collapse == "always"  ? launch::Collapse::Always
                 : options.collapse == "never" ? launch::Collapse::Never
                                               : launch::Collapse::Auto;
  job.shown_ranks = options.ranks;
  job.output_folder = options.output_folder;
  if (options.max_restarts < 0 || options.max_restarts > 1'000'000) {
    raise(ErrorCode::InvalidArgument, "--max-restarts {}: a number from 0 to 1000000 is wanted", options.max_restarts);
  }
  job.max_restarts = options.max_restarts;
  if (options.timeout > 0) job.timeout = milliseconds_of(options.timeout, "--timeout");
  job.grace = milliseconds_of(options.grace, "--grace");
  job.preempt_grace = milliseconds_of(options.preempt_grace, "--preempt-grace");
  job.health.stall = seconds_of(options.stall_timeout, "--stall-timeout");
  job.health.deadlock = seconds_of(options.deadlock_timeout, "--deadlock-timeout");
  job.health.stopped_end = seconds_of(options.stopped_timeout, "--stopped-timeout");
  job.output_timeout = milliseconds_of(options.output_timeout, "--output-timeout");
  job.quiet = options.quiet;
  job.json = options.json;
  job.as_horovod = options.as_horovod;
  job.keep_logs = !options.no_logs;
  if (options.owner != 0) job.owner_pid = options.owner;
  job.owner_folder = options.owner_folder;
  job.command_line = command_line;
  set_nodes(job, options);
  const bool only_one = job.node && job.node->count == 1;
  if (only_one) job.node.reset();
  // One that is to be the only one is that in an allocation of several nodes, too.
  const bool asks_for_hosts = names_hosts(options) || options.hosts.per_node != 0 || options.starter != "auto";
  if (!job.node && (!only_one || asks_for_hosts)) set_hosts(job, options);
  job.start_timeout = options.start_timeout         ? milliseconds_of(*options.start_timeout, "--start-timeout")
                      : job.node && !job.node->step ? std::chrono::milliseconds(kStartTimeoutByHand)
                                                    : launch::RunOptions().start_timeout;
  job.host_timeout = milliseconds_of(options.host_timeout, "--host-timeout");
  if (options.host_timeout < 1 || options.host_timeout > 3600) {
    raise(ErrorCode::InvalidArgument, "--host-timeout {}: from 1 s, since hosts are asked once a second, to 3600 s",
          options.host_timeout);
  }
  refuse_mpi(job);
  return job;
}

void run(const Options& options, const CLI::App& command, int& exit_status) {
  if (options.check_build) return print_build();
  const std::vector<std::string> command_line = sys::own_arguments();
  if (options.show_config) {
    const std::vector<std::string> words(command_line.begin() + std::min<std::ptrdiff_t>(2, std::ssize(command_line)),
                                         command_line.end());
    const RunWords configured = add_configuration(command, prepare_run_arguments(command, words));
    std::fputs(show_config(command, configured).c_str(), stdout);
    return;
  }
  const launch::RunOptions job = job_of(options, command_line);
  if (options.dry_run) {
    exit_status = launch::kCannotStartStatus;
    std::fputs(launch::describe_job(job).c_str(), stdout);
    exit_status = 0;
    return;
  }
  exit_status = launch::kCannotStartStatus;  // what it throws means that nothing was started
  exit_status = job.node ? launch::run_node(job) : launch::run_job(job);
}

bool takes_value(const CLI::Option& option) { return option.get_items_expected_min() > 0; }

}  // namespace

void add_run(CLI::App& app, int& exit_status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("run", "Run a program as N processes that form one world");
  command->add_option("-n,--np,--nproc", options->processes, "Processes (also -np N), or 'auto': one per usable core")
      ->type_name("N")
      ->default_str("auto");
  command->add_option("-H,--hosts", options->hosts.list, "Hosts and their slots; the first are filled first [this one]")
      ->type_name("A:4,B:4");
  command->add_option("--hostfile", options->hosts.file, "A file of them: lines of HOST, HOST:N or HOST slots=N")
      ->type_name("FILE");
  command->add_option("--nodes", options->hosts.nodes, "Only the first so many hosts [all]")->type_name("N");
  command
      ->add_option("--nnodes", options->nodes.count,
                   "This command is started on each of so many hosts, and they make one job: with --node-rank, "
                   "--master and --secret-file; -np counts on each. In a step of srun's with one task per node it is "
                   "found out")
      ->type_name("N");
  command
      ->add_option("--node-rank", options->nodes.rank,
                   "Which of them this is; 0 supervises, and shows the output of all")
      ->type_name("R");
  command->add_option("--master", options->nodes.master, "The host of node rank 0, and where it listens [port 29500]")
      ->type_name("HOST[:PORT]");
  command->add_option("--master-addr", options->nodes.master_addr, "The same, as torchrun has it")->type_name("HOST");
  command->add_option("--master-port", options->nodes.master_port, "The same, as torchrun has it")->type_name("PORT");
  command
      ->add_option(
          "--rdzv-endpoint", options->nodes.endpoint,
          "As --master [port 29400], for launchers that were not told which they are: 0 is the one on HOST, the "
          "others are numbered as they come")
      ->type_name("HOST[:PORT]");
  command
      ->add_option("--rdzv-backend", options->nodes.backend, "c10d or static, as torchrun has it: without any effect")
      ->type_name("NAME");
  command->add_option("--rdzv-id", options->nodes.id, "A name of the job: a launcher with another one is turned away")
      ->type_name("ID");
  command->add_flag("--standalone", options->nodes.standalone,
                    "The job is on this host alone, also in a step or an allocation of several");
  command
      ->add_option(
          "--nproc-per-node", options->per_node,
          "Processes on each host: as -np with --nnodes and on one host; cpu: one per usable core; gpu: one per "
          "GPU; auto: that, or one per core where there is none")
      ->type_name("N");
  command->add_option("--per-node", options->hosts.per_node, "Slots of each host [as the list says, else 1]")
      ->type_name("N");
  command
      ->add_option("--starter", options->starter,
                   "How other hosts are reached: auto (srun within a Slurm allocation, else ssh), ssh, slurm, mpirun; "
                   "hand: `cohort agent --join` is run there; local: every host is this one, to try")
      ->check(CLI::IsMember({"auto", "ssh", "slurm", "mpirun", "hand", "local"}))
      ->capture_default_str()
      ->type_name("HOW");
  command->add_option("--ssh", options->ssh, "The ssh command, with options of yours: \"ssh -p 2222\"")
      ->capture_default_str()
      ->type_name("COMMAND");
  command->add_option("--remote-cohort", options->remote_cohort, "Path of `cohort` on other hosts [as here]")
      ->type_name("PATH");
  command
      ->add_option("--network", options->network,
                   "Networks that hosts use with each other: names of interfaces, or networks as 10.0.0.0/8 [all]")
      ->type_name("NAME or CIDR[,...]");
  command
      ->add_option("--secret-file", options->secret_file,
                   "With --nnodes and --starter hand: the secret that all have [COHORT_SECRET_FILE]")
      ->type_name("FILE");
  command->add_option("--listen", options->listen, "With --starter hand: the port that agents come to [any]")
      ->type_name("PORT");
  command
      ->add_option("--host-timeout", options->host_timeout,
                   "A host from which nothing comes so long is lost, to ranks, too")
      ->type_name("SECONDS")
      ->capture_default_str();
  command->add_flag("-m,--module", options->module, "PROGRAM is a Python module");
  command->add_flag("--no-python", options->no_python, "Execute PROGRAM itself, also if it ends in .py");
  command->add_flag("--as-horovod", options->as_horovod,
                    "`import horovod.torch` is Cohort's, and HOROVOD_RANK, HOROVOD_SIZE, ... are set");
  command->add_option("--run-dir", options->run_folder, "The run's folder [runs/<UTC time>-<program>-<id>]")
      ->type_name("DIR");
  command
      ->add_option("--env", options->environment,
                   "Set a variable for the workers, or insist that it is set; repeatable")
      ->type_name("NAME[=VALUE]")
      ->expected(1)
      ->allow_extra_args(false)  // else it would swallow the "--" after it
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--bind", options->bind, "Bind each rank to a share of the cores of its host: core, or none")
      ->check(CLI::IsMember({"core", "none"}))
      ->capture_default_str()
      ->type_name("HOW");
  command
      ->add_option("--prefix", options->prefix,
                   "What stands before each line: none, rank (host:rank), full (time, host:rank, stream)")
      ->check(CLI::IsMember({"none", "rank", "full"}))
      ->capture_default_str()
      ->type_name("STYLE");
  command->add_option("--ranks", options->ranks, "Show only these ranks' output; the logs have all [all]")
      ->type_name("0,3-5");
  command
      ->add_option("--collapse", options->collapse,
                   "Show a line that several ranks print within 0.2 s once, as [0-3] | LINE: auto (on a terminal), "
                   "always, never")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str()
      ->type_name("WHEN");
  command->add_option("--output-dir", options->output_folder, "The folder of the logs [logs in the run's folder]")
      ->type_name("DIR");
  command
      ->add_option("--max-restarts", options->max_restarts,
                   "Start all ranks again when one fails, at most so many times")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--timeout", options->timeout, "End the job after so many seconds [never]")->type_name("SECONDS");
  command->add_option("--start-timeout", options->start_timeout, "For all ranks to be running; by --nnodes 300")
      ->type_name("SECONDS")
      ->default_str("30");
  command->add_option("--grace", options->grace, "Between asking ranks to end and killing them")
      ->type_name("SECONDS")
      ->capture_default_str();
  command
      ->add_option("--preempt-grace", options->preempt_grace,
                   "For ranks that save when SIGTERM asks them to (cohort::Preemption), instead of --grace")
      ->type_name("SECONDS")
      ->capture_default_str();
  command
      ->add_option("--output-timeout", options->output_timeout,
                   "Once the job is over, for a reader that does not read (a pager) to go on")
      ->type_name("SECONDS")
      ->capture_default_str();
  command
      ->add_option("--stall-timeout", options->stall_timeout,
                   "End the job when ranks have waited so long for one that is elsewhere; 0: never")
      ->type_name("SECONDS")
      ->capture_default_str();
  command
      ->add_option("--deadlock-timeout", options->deadlock_timeout,
                   "End the job when ranks have waited only for each other so long; 0: never")
      ->type_name("SECONDS")
      ->capture_default_str();
  command
      ->add_option("--stopped-timeout", options->stopped_timeout,
                   "End the job when a rank has been stopped (SIGSTOP) so long; 0: never")
      ->type_name("SECONDS")
      ->capture_default_str();
  command->add_flag("--no-logs", options->no_logs, "Keep no logs of the ranks' output in the run's folder");
  command
      ->add_option("--owner", options->owner, "End the job when the process PID, which has started this command, ends")
      ->type_name("PID");
  command
      ->add_option("--owner-folder", options->owner_folder,
                   "A private folder (0700) of the owner, removed if the owner has ended before it could do so")
      ->type_name("DIR");
  command->add_option("--config", options->config, "Take options from the table [run] of this TOML file")
      ->type_name("FILE");
  command->add_flag("--show-config", options->show_config,
                    "Print the value of each option and where it is from, and end");
  command->add_flag("--check-build", options->check_build, "Print what this build and this machine have, and end");
  command->add_flag("--dry-run", options->dry_run,
                    "Print the plan, the command and the environment of each rank; start nothing");
  command->add_flag("-q,--quiet", options->quiet, "Print only what the ranks print, and failures");
  command->add_flag("--json", options->json,
                    "Write everything to stdout as JSON, one event a line: start, output, notice, rank_ended, failure, "
                    "restart, end");
  command->add_option("PROGRAM", options->program, "Program or .py file, and its arguments")->type_name("");
  set_run_help(*command);
  command->callback([options, command, &exit_status] { run(*options, *command, exit_status); });
}

std::vector<std::string> prepare_run_arguments(const CLI::App& run_command, const std::vector<std::string>& words) {
  std::vector<std::string> own;
  std::size_t next = 0;
  for (; next < words.size(); ++next) {
    std::string word = words[next];
    if (word == "--") {
      ++next;
      break;
    }
    if (word.size() < 2 || word[0] != '-') break;  // the program
    // -np is one word to everyone who comes from MPI; CLI11 would read -n p.
    if (word == "-np" || word == "-nproc" || word.starts_with("-np=") || word.starts_with("-nproc=")) word = "-" + word;
    if (word.starts_with("-np") && word.size() > 3 && word[3] >= '0' && word[3] <= '9') word = "--np=" + word.substr(3);
    const auto equals = word.find('=');
    // torchrun takes --node_rank and --node-rank.
    if (word.starts_with("--"))
      std::replace(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(std::min(equals, word.size())), '_', '-');
    const std::string name = word.substr(0, equals);
    const CLI::Option* option = run_command.get_option_no_throw(name.starts_with("--") ? name : name.substr(0, 2));
    // ("-npernode" is not -n with the value "pernode".)
    const std::string foreign = option == nullptr || name.size() > 2 ? foreign_option(name) : std::string();
    if (!foreign.empty() && run_command.get_option_no_throw(name) == nullptr)
      raise(ErrorCode::InvalidArgument, "`cohort run` has no option {}: it is {}", name, foreign);
    if (option == nullptr) {
      const std::string meant = closest(name, option_names(run_command));
      raise(ErrorCode::InvalidArgument, "`cohort run` has no option {}{}; options of the program come after its name",
            name, meant.empty() ? "" : "; did you mean " + meant + "?");
    }
    own.push_back(word);
    const bool value_inside = equals != std::string::npos || (!name.starts_with("--") && name.size() > 2);
    if (takes_value(*option) && !value_inside) {
      if (++next == words.size()) raise(ErrorCode::InvalidArgument, "{} wants a value", name);
      own.push_back(words[next]);
    }
  }
  if (next < words.size()) {
    own.emplace_back("--");
    own.insert(own.end(), words.begin() + static_cast<std::ptrdiff_t>(next), words.end());
  }
  return own;
}

}  // namespace cohort::app
