#include "base/env.h"
#include "base/hardware.h"
#include "base/parse.h"
#include "base/process.h"
#include "base/signals.h"
#include "launch/agent/worker.h"
#include "launch/plan/rank_environment.h"
#include "launch/start/starter.h"
#include "launch/supervise/stopping.h"
#include "launch/supervise/supervisor.h"
#include "net/secret.h"
#include "rendezvous/json_variables.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

namespace cohort::launch {

std::string absolute_path(const std::string& path) {
  std::error_code error;
  std::filesystem::path whole = std::filesystem::absolute(path, error);
  if (error) raise(ErrorCode::Io, "{}: {}", path, error.message());
  whole = whole.lexically_normal();
  return whole.filename().empty() ? whole.parent_path().string() : whole.string();
}

namespace {

/// Cohort's package `horovod` lies beside the command, so any Python that runs the program finds it.
void put_horovod_first(Environment& environment) {
  const std::filesystem::path command = value_or_throw(sys::own_executable());
  const std::filesystem::path folder = command.parent_path().parent_path() / "share/cohort/as-horovod";
  std::error_code error;
  if (!std::filesystem::exists(folder / "horovod/__init__.py", error)) {
    raise(ErrorCode::Unavailable,
          "--as-horovod: there is no {}/horovod -- the command {} was installed without the Python package -- install "
          "it with `pip install .` in a clone of Cohort",
          folder.string(), command.string());
  }
  const auto others = environment.find("PYTHONPATH");
  environment.set("PYTHONPATH", others && !others->empty() ? folder.string() + ":" + *others : folder.string());
}

/// A cluster that is already described has tasks other than these ranks, or other addresses.
void refuse_other_cluster(const Environment& environment) {
  const auto text = environment.find(std::string(env::kTfConfig));
  if (!text || text->empty()) return;
  const auto config = rendezvous::parse_tf_config(*text);
  if (config && config->cluster.empty()) return;
  std::size_t tasks = 0;
  if (config) {
    for (const auto& [type, job] : config->cluster) tasks += job.tasks.size();
  }
  raise(ErrorCode::InvalidArgument,
        "--tf-config: TF_CONFIG is set already, {} -- this command describes its own ranks in it -- unset TF_CONFIG, "
        "or leave out --tf-config",
        config ? fmt::format("to task {} {} of a cluster of {}", config->task_type, config->task_index, tasks)
               : std::string(config.error().what()));
}

}  // namespace

JobSetup set_up_job(const JobSpec& spec, Plan plan) {
  JobSetup setup{spec, std::move(plan)};
  setup.environment = Environment::current();
  // These options are meant only for this command: a job that a rank starts must not write into this job's folders.
  setup.environment.remove_run_options();
  for (const std::string_view name : {env::kWorker, env::kServerRestart})
    setup.environment.remove(name);  // an outer job's
  for (const std::string& assignment : spec.environment) {
    setup.environment.set(assignment);
    setup.chosen.push_back(assignment.substr(0, assignment.find('=')));
  }
  value_or_throw(env::check(setup.environment.variables()));  // reported once here, and not by every rank
  if (!spec.shares.empty())
    setup.environment.set(env::kShares, value_or_throw(shares_by_rank(setup.plan, spec.shares)));
  if (!setup.environment.find("PYTHONUNBUFFERED")) setup.environment.set("PYTHONUNBUFFERED", "1");
  if (spec.tf_config) refuse_other_cluster(setup.environment);
  if (spec.as_horovod && setup.plan.method != StartMethod::Owner) put_horovod_first(setup.environment);
  setup.program = value_or_throw(resolve_program(spec.program, setup.environment));
  const auto runs = [&setup](Role role, const std::optional<ProgramRequest>& request) {
    if (!request) return;
    Program program = value_or_throw(resolve_program(*request, setup.environment));
    setup.programs.push_back({role, std::move(program.path), std::move(program.arguments)});
  };
  runs(Role::Server, spec.server_program);
  runs(Role::Evaluator, spec.evaluator);
  // COHORT_ALONE makes a process a job of its own. It is meant for this command, not for its ranks, which are several.
  if (setup.plan.world_size > 1 && std::ranges::find(setup.chosen, env::kAlone) == setup.chosen.end())
    setup.environment.remove(env::kAlone);
  // TensorFlow's operations wait for other tasks' ones. If each occupied a thread, none might be left to answer.
  if (spec.tf_config && setup.plan.servers > 0 && !setup.environment.find(env::kTfInterOpThreads))
    setup.environment.set(env::kTfInterOpThreads, std::to_string(setup.plan.world_size + 1));
  int ranks = 0;      // on this host
  int processes = 0;  // processes of all roles on this host
  for (const PlannedHost& host : setup.plan.hosts) {
    if (!host.local) continue;
    ranks += host.ranks;
    processes += host.processes();
  }

  setup.ignored = sys::ignored_signals();
  // A host with too few cores is reported before anything is started.
  if (spec.bind == Binding::Core && ranks > 0) value_or_throw(share_cores(sys::cores_of_process(), ranks));

  const auto [before, now] = sys::raise_open_files_limit();
  setup.open_files = before;
  // Each process needs five descriptors: two pipes, two logs and a pidfd.
  const auto needed = 5 * static_cast<std::uint64_t>(processes) + 5 * setup.plan.hosts.size() + 64;
  if (now != 0 && needed > now) {
    raise(ErrorCode::Unavailable,
          "{} processes on one host need {} open files and the limit is {}; raise it (ulimit -Hn {}) or start fewer",
          processes, needed, now, needed);
  }
  return setup;
}

std::vector<int> shown_ranks(const JobSpec& spec, const Plan& plan) {
  if (spec.shown_ranks.empty()) return {};
  auto ranks = parse_ranges(spec.shown_ranks, plan.world_size);
  if (!ranks) raise(ErrorCode::InvalidArgument, "--ranks {}", ranks.error().what());
  return *std::move(ranks);
}

const std::string& program_of(const JobSetup& setup, int process) {
  for (const RoleProgram& program : setup.programs) {
    if (process >= 0 && program.role == setup.plan.roles().role_of(process)) return program.path;
  }
  return setup.program.path;
}

StartJob order_for(const JobSetup& setup, const PlannedHost& host, const JobFacts& facts) {
  StartJob job;
  job.path = setup.program.path;
  job.arguments = setup.program.arguments;
  job.environment = setup.environment.assignments();
  // Reading the clock twice is cheap compared with an operation between hosts, and shows at the end what steps cost.
  if (setup.plan.machines > 1 && !setup.environment.find(env::kTimes))
    job.environment.push_back(fmt::format("{}=1", env::kTimes));
  char* folder = ::get_current_dir_name();
  if (folder != nullptr) job.folder = folder;
  std::free(folder);  // NOLINT: get_current_dir_name allocates with malloc
  if (host.local) {
    job.log_folder = facts.log_folder;
  } else {
    job.elsewhere = true;  // the supervisor keeps its output here
    job.run_folder = facts.run_folder;
    Environment travels;
    for (const std::string& assignment : job.environment) {
      const std::string name = assignment.substr(0, assignment.find('='));
      if (!belongs_to_host(name) || std::ranges::find(setup.chosen, name) != setup.chosen.end())
        travels.set(assignment);
    }
    job.environment = travels.assignments();
  }
  job.input = InputReader::worth_reading(0) && !(host.local && InputReader::may_be_given(0));
  job.open_files = setup.open_files;
  job.bind_to_cores = setup.spec.bind == Binding::Core;
  job.trace = setup.spec.trace;
  job.programs = setup.programs;
  job.servers_again = setup.spec.server_restarts > 0;
  job.ignored = setup.ignored;
  job.elastic = setup.plan.least > 0;
  const Roles roles = setup.plan.roles();
  for (const int process : processes_of(setup.plan, host)) {
    const bool is_rank = roles.is_rank(process);
    job.workers.push_back({process,
                           is_rank ? rank_environment(setup.plan, host, process, facts)
                                   : other_environment(setup.plan, host, process, facts),
                           roles.role_of(process), roles.number_of(process)});
    if (setup.spec.as_horovod && is_rank) {
      auto more = horovod_environment(setup.plan, host, process);
      auto& all = job.workers.back().environment;
      all.insert(all.end(), more.begin(), more.end());
    }
  }
  return job;
}

namespace {

/// Stands for values that are known only when the job starts.
constexpr std::string_view kLater = "(chosen at the start)";
constexpr std::array kChosenLater = {env::kMasterPort,
                                     env::kStore,
                                     env::kJobId,
                                     env::kRunDir,
                                     env::kTfConfig,
                                     std::string_view("TORCHELASTIC_RUN_ID"),
                                     std::string_view("KERAS_DISTRIBUTION_JOB_ADDRESSES")};

struct Known {
  bool folder = false;
  bool elsewhere = false;  ///< rank 0 is on another host, whose address is not known
};

std::string shown(const std::string& assignment, const Known& known) {
  const auto equals = assignment.find('=');
  const std::string name = assignment.substr(0, equals);
  const bool later =
      (std::ranges::find(kChosenLater, name) != kChosenLater.end() && !(name == env::kRunDir && known.folder)) ||
      (name == env::kMasterAddr && known.elsewhere);
  return name + "=" + (later ? std::string(kLater) : shell_quoted(assignment.substr(equals + 1)));
}

/// Formats a table whose columns are as wide as their longest entry.
std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line = " ";
    for (std::size_t i = 0; i < row.size(); ++i) line += fmt::format(" {:<{}} ", row[i], widths[i]);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace

std::string describe_job(const JobSpec& spec, Plan plan) {
  const JobSetup setup = set_up_job(spec, std::move(plan));
  JobFacts facts;
  facts.run_folder = spec.run_folder.empty() ? std::string() : absolute_path(spec.run_folder);
  facts.master_address = "127.0.0.1";
  if (setup.plan.least > 0) facts.elastic = patience_of(setup.spec.elastic);
  facts.servers_may_die = spec.server_restarts > 0 || spec.lost_servers > 0;
  if (spec.tf_config)
    facts.tf_addresses.assign(static_cast<std::size_t>(setup.plan.world_size + setup.plan.servers), "127.0.0.1:1");

  const Known known{!facts.run_folder.empty(), goes_elsewhere(setup.plan)};
  const Roles roles = setup.plan.roles();
  std::vector<std::vector<std::string>> rows = {{roles.others() > 0 ? "process" : "rank", "host", "local rank"}};
  const bool bound = spec.bind == Binding::Core;
  if (bound) rows.front().push_back("processors");
  std::vector<std::vector<std::string>> own;  // variables that each rank has beyond the command's
  std::vector<std::vector<std::string>> other_rows;
  std::string of_others;  // environment of the other roles
  int threads = 1;
  std::string folder;
  for (const PlannedHost& host : setup.plan.hosts) {
    const StartJob job = order_for(setup, host, facts);
    folder = job.folder;
    if (host.local && host.ranks > 0) threads = threads_of(sys::usable_cores(), host.ranks);
    const auto shares = bound && host.local && host.ranks > 0
                            ? value_or_throw(share_cores(sys::cores_of_process(), host.ranks))
                            : std::vector<std::vector<int>>();
    for (std::size_t i = 0; i < job.workers.size(); ++i) {
      const WorkerPlan& worker = job.workers[i];
      const bool is_rank = worker.role == Role::Worker;
      std::string name = is_rank && roles.others() == 0 ? std::to_string(worker.rank) : roles.name_of(worker.rank);
      std::vector<std::string> additions;
      for (const std::string& assignment : worker.environment) additions.push_back(shown(assignment, known));
      if (!is_rank) of_others += fmt::format("  {}\n    {}\n", name, fmt::join(additions, " "));
      auto& row = (is_rank ? rows : other_rows).emplace_back();
      row = {std::move(name), host.name, is_rank ? std::to_string(i) : "-"};
      if (bound) row.push_back(!is_rank ? "-" : host.local ? to_ranges(shares[i]) : "(there)");
      if (is_rank) own.push_back(std::move(additions));
    }
  }

  std::vector<std::string> common;
  const Environment before = Environment::current();
  for (const std::string& assignment : setup.environment.assignments()) {
    const auto equals = assignment.find('=');
    if (before.find(assignment.substr(0, equals)) != assignment.substr(equals + 1)) {
      common.push_back(shown(assignment, known));
    }
  }
  for (const std::string_view count : env::kThreadCounts) {
    if (setup.environment.find(count)) continue;
    common.push_back(known.elsewhere ? fmt::format("{}=(cores / ranks of its host)", count)
                                     : fmt::format("{}={}", count, threads));
  }
  common.push_back(fmt::format("{}={}", env::kSecretFd, kWorkerSecretFd));
  common.push_back(fmt::format("{}={}", env::kStatusFd, kWorkerStatusFd));
  if (spec.trace) common.push_back(fmt::format("{}={}", env::kTimelineFd, kWorkerTimelineFd));
  std::vector<std::vector<std::string>> differs(own.size());
  for (std::size_t i = 0; i < own.front().size(); ++i) {
    const bool same = std::ranges::all_of(own, [&](const auto& rank) { return rank[i] == own[0][i]; });
    if (same) common.push_back(own[0][i]);
    for (std::size_t rank = 0; rank < own.size() && !same; ++rank) differs[rank].push_back(own[rank][i]);
  }

  rows.insert(rows.end(), other_rows.begin(), other_rows.end());
  std::string text = to_string(setup.plan) + "; nothing is started\n\n" + table(rows);
  // argv[0] is the name as typed; the executed file is the path.
  const auto command = [](const std::string& path, const std::vector<std::string>& arguments) {
    std::string words = shell_quoted(path);
    for (std::size_t i = 1; i < arguments.size(); ++i) words += " " + shell_quoted(arguments[i]);
    return words;
  };
  const std::string whose = roles.others() > 0 && setup.programs.empty() ? "process" : "rank";
  text += fmt::format("\ncommand of each {}, in {}\n  {}", whose, folder,
                      command(setup.program.path, setup.program.arguments));
  for (const RoleProgram& program : setup.programs) {
    text += fmt::format("\ncommand of {} {}\n  {}", program.role == Role::Server ? "each" : "the",
                        to_string(program.role), command(program.path, program.arguments));
  }
  if (known.elsewhere) {
    text += "\n\nagents of other hosts";
    for (const PlannedHost& host : setup.plan.hosts) {
      if (host.local) continue;
      text += "\n ";
      for (const std::string& word : remote_command(spec, setup.plan.method, host)) text += " " + shell_quoted(word);
    }
  }
  text += "\n\nenvironment, over the one of this command\n";
  text += own.size() > 1 ? "  all ranks\n" : "  rank 0\n";
  for (const std::string& assignment : common) text += "    " + assignment + "\n";
  for (std::size_t rank = 0; rank < own.size() && own.size() > 1; ++rank)
    text += fmt::format("  rank {}\n    {}\n", rank, fmt::join(differs[rank], " "));
  return text + of_others;
}

}  // namespace cohort::launch
