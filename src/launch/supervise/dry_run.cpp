#include "launch/supervise/dry_run.h"

#include "base/env.h"
#include "base/parse.h"
#include "launch/agent/worker.h"
#include "launch/supervise/job_setup.h"
#include "sys/hardware.h"
#include "sys/process.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

namespace cohort::launch {
namespace {

/// What is known only once the job starts.
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
  bool elsewhere = false;  ///< then rank 0's address is not
};

std::string shown(const std::string& assignment, const Known& known) {
  const auto equals = assignment.find('=');
  const std::string name = assignment.substr(0, equals);
  const bool later = (std::find(kChosenLater.begin(), kChosenLater.end(), name) != kChosenLater.end() &&
                      !(name == env::kRunDir && known.folder)) ||
                     (name == env::kMasterAddr && known.elsewhere);
  return name + "=" + (later ? std::string(kLater) : shell_quoted(assignment.substr(equals + 1)));
}

/// Columns as wide as their longest entry.
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

std::string describe_job(const RunOptions& options) {
  const JobSetup setup = set_up_job(options);
  shown_ranks(options, setup.plan);  // a wrong one is told here, too
  JobFacts facts;
  facts.run_folder = options.run_folder.empty() ? std::string() : absolute_path(options.run_folder);
  facts.master_address = "127.0.0.1";
  facts.servers_may_die = options.server_restarts > 0 || options.lost_servers > 0;
  if (options.tf_config)
    facts.tf_addresses.assign(static_cast<std::size_t>(setup.plan.world_size + setup.plan.servers), "127.0.0.1:1");

  const Known known{!facts.run_folder.empty(), goes_elsewhere(setup.plan)};
  const Roles roles = setup.plan.roles();
  std::vector<std::vector<std::string>> rows = {{roles.others() > 0 ? "process" : "rank", "host", "local rank"}};
  const bool bound = setup.bind == Binding::Core;
  if (bound) rows.front().push_back("processors");
  std::vector<std::vector<std::string>> own;  // of each rank, over the command's
  std::vector<std::vector<std::string>> other_rows;
  std::string of_others;  // their environment
  int threads = 1;
  std::string folder;
  for (const PlannedHost& host : setup.plan.hosts) {
    const StartJob job = order_for(setup, host, facts);
    folder = job.folder;
    if (host.local && host.ranks > 0) threads = threads_of(sys::usable_cores(), host.ranks);
    const auto shares = bound && host.local && host.ranks > 0
                            ? value_or_throw(share_cores(sys::cores_of_process(), host.ranks))
                            : std::vector<std::vector<int>>();
    for (const WorkerPlan& worker : job.workers) {
      if (worker.role == Role::Worker) continue;
      const std::string name = roles.name_of(worker.rank);
      other_rows.push_back({name, host.name, "-"});
      if (bound) other_rows.back().push_back("-");
      of_others += fmt::format("  {}\n   ", name);
      for (const std::string& assignment : worker.environment) of_others += " " + shown(assignment, known);
      of_others += "\n";
    }
    for (int local = 0; local < host.ranks; ++local) {
      const int rank = host.first_rank + local;
      rows.push_back(
          {roles.others() > 0 ? roles.name_of(rank) : std::to_string(rank), host.name, std::to_string(local)});
      if (bound)
        rows.back().push_back(host.local ? to_ranges(shares[static_cast<std::size_t>(local)]) : std::string("(there)"));
      std::vector<std::string> additions;
      for (const std::string& assignment : job.workers[static_cast<std::size_t>(local)].environment) {
        additions.push_back(shown(assignment, known));
      }
      own.push_back(std::move(additions));
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
  if (setup.trace) common.push_back(fmt::format("{}={}", env::kTimelineFd, kWorkerTimelineFd));
  std::vector<std::vector<std::string>> differs(own.size());
  for (std::size_t i = 0; i < own.front().size(); ++i) {
    const bool same = std::all_of(own.begin(), own.end(), [&](const auto& rank) { return rank[i] == own[0][i]; });
    if (same && own.size() > 1) common.push_back(own[0][i]);
    for (std::size_t rank = 0; rank < own.size() && (!same || own.size() == 1); ++rank) {
      differs[rank].push_back(own[rank][i]);
    }
  }

  rows.insert(rows.end(), other_rows.begin(), other_rows.end());
  std::string text = to_string(setup.plan) + "; nothing is started\n\n" + table(rows);
  // argv[0] is the name as it was typed; what is executed is the file.
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
    const std::string path =
        options.remote.remote_cohort.empty() ? value_or_throw(sys::own_executable()) : options.remote.remote_cohort;
    for (const PlannedHost& host : setup.plan.hosts) {
      if (host.local) continue;
      text += "\n ";
      for (const std::string& word : remote_command(options.remote, host.name, path)) text += " " + shell_quoted(word);
    }
  }
  text += "\n\nenvironment, over the one of this command\n";
  if (own.size() > 1) {
    text += "  all ranks\n";
    for (const std::string& assignment : common) text += "    " + assignment + "\n";
  }
  for (std::size_t rank = 0; rank < own.size(); ++rank) {
    text += fmt::format("  rank {}\n", rank);
    if (own.size() == 1) {
      for (const std::string& assignment : common) text += "    " + assignment + "\n";
      for (const std::string& assignment : differs[rank]) text += "    " + assignment + "\n";
    } else {
      text += fmt::format("    {}\n", fmt::join(differs[rank], " "));
    }
  }
  return text + of_others;
}

}  // namespace cohort::launch
