#include "base/env.h"
#include "base/parse.h"
#include "cluster/detect.h"
#include "cluster/slips.h"
#include "launch/plan/plan.h"
#include "launch/start/hosts.h"
#include "launch/supervise/supervisor.h"
#include "sys/cpus.h"
#include "sys/gpus.h"
#include "sys/process.h"

#include "commands.h"
#include "host_options.h"
#include "run_help.h"
#include "run_settings.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <utility>

namespace cohort::app {
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
  const cluster::GpuClaim said = cluster::gpus_claimed(cluster::current_environment());
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
  launch::NodeWishes wishes = choices.nodes;
  const std::string secret_file = !choices.secret_file.empty() ? choices.secret_file : env::text(env::kSecretFile);
  wishes.has_secret = !secret_file.empty();
  wishes.has_hosts = names_hosts(choices);
  job.node = value_or_throw(launch::choose_node(wishes, cluster::current_environment()));
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
  // For the help and the completion; run_settings.h reads the words.
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
