#include "launch/record/job_record.h"

#include "launch/environment.h"
#include "launch/record/git_revision.h"
#include "launch/record/private_values.h"
#include "launch/version.h"
#include "sys/hardware.h"

#include <sys/utsname.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>

namespace cohort::launch {
namespace {

/// Never the whole environment: it may hold what is not for files.
nlohmann::ordered_json environment_that_matters() {
  nlohmann::ordered_json out = nlohmann::ordered_json::object();
  for (const std::string& assignment : Environment::current().assignments()) {
    const auto equals = assignment.find('=');
    const std::string name = assignment.substr(0, equals);
    const std::string value = assignment.substr(equals + 1);
    if (is_recorded(name, value)) out[name] = value;
  }
  return out;
}

nlohmann::ordered_json to_json(const Ending& failure) {
  nlohmann::ordered_json out;
  if (failure.role == Role::Worker) {
    out["rank"] = failure.rank;
  } else {
    out["role"] = to_string(failure.role);
    out["number"] = failure.rank;
  }
  out["host"] = failure.host;
  out["pid"] = failure.pid;
  out["status"] = sys::to_string(failure.status);
  out["after_seconds"] = failure.after_seconds;
  out["last_stderr"] = failure.last_stderr;
  return out;
}

nlohmann::ordered_json to_json(const AttemptRecord& attempt, const Roles& roles) {
  nlohmann::ordered_json out = {{"start", attempt.start},
                                {"end", attempt.end},
                                {"exit_status", attempt.exit_status},
                                {"reason", attempt.reason},
                                {"logs", attempt.log_folder}};
  add_pids(out, roles, attempt.pids);
  if (attempt.failure) out["failure"] = to_json(*attempt.failure);
  return out;
}

}  // namespace

nlohmann::ordered_json host_entry(const PlannedHost& host) {
  nlohmann::ordered_json out = {{"name", host.name}, {"first_rank", host.first_rank}, {"ranks", host.ranks}};
  if (host.servers > 0) {
    out["first_server"] = host.first_server;
    out["servers"] = host.servers;
  }
  if (host.evaluator) out["evaluator"] = true;
  return out;
}

void add_pids(nlohmann::ordered_json& out, const Roles& roles, const std::vector<int>& pids) {
  const auto part = [&pids](int first, int count) {
    const auto size = static_cast<int>(pids.size());
    return std::vector<int>(pids.begin() + std::min(first, size), pids.begin() + std::min(first + count, size));
  };
  out["pids"] = part(0, roles.workers);
  if (roles.servers > 0) out["server_pids"] = part(roles.workers, roles.servers);
  if (roles.evaluator && static_cast<int>(pids.size()) == roles.all()) out["evaluator_pid"] = pids.back();
}

AttemptRecord attempt_of(const JobRecord& record) {
  AttemptRecord attempt;
  attempt.start = record.start;
  attempt.end = record.end;
  attempt.exit_status = record.exit_status.value_or(1);
  attempt.reason = record.reason;
  attempt.log_folder = record.log_folder;
  attempt.pids = record.pids;
  attempt.failure = record.failure;
  return attempt;
}

nlohmann::ordered_json to_json(const JobRecord& record) {
  nlohmann::ordered_json out;
  out["format"] = 1;
  out["job_id"] = record.job_id;
  out["command_line"] = without_secrets(record.command_line);
  out["program"] = {{"path", record.program.path}, {"arguments", without_secrets(record.program.arguments)}};
  std::error_code error;
  const std::string folder = std::filesystem::current_path(error).string();
  out["folder"] = folder;
  if (const auto revision = git_revision(folder)) {
    out["git"] = {{"commit", revision->commit}, {"branch", revision->branch}};
  }
  out["world_size"] = record.plan.world_size;
  out["hosts"] = nlohmann::ordered_json::array();
  for (const PlannedHost& host : record.plan.hosts) {
    out["hosts"].push_back(host_entry(host));
  }
  if (!record.log_folder.empty()) out["logs"] = record.log_folder;
  add_pids(out, record.plan.roles(), record.pids);
  out["threads_per_rank"] = record.threads;
  out["master_port"] = record.master_port;
  out["contained"] = false;
  out["not_contained_because"] = kNotContained;
  out["environment"] = environment_that_matters();
  utsname system{};
  ::uname(&system);
  out["versions"] = {{"cohort", kVersion},
                     {"compiler", kCompiler},
                     {"build", kBuildType},
                     {"kernel", std::string(system.release)},
                     {"machine", std::string(system.machine)}};
  out["cores"] = sys::usable_cores();
  out["user_id"] = ::getuid();
  out["start"] = record.start;
  if (!record.end.empty()) out["end"] = record.end;
  if (record.exit_status) out["exit_status"] = *record.exit_status;
  if (!record.reason.empty()) out["reason"] = record.reason;
  if (!record.output_lost.empty()) out["output_lost"] = record.output_lost;
  if (record.failure) out["failure"] = to_json(*record.failure);
  if (!record.server_failures.empty()) {
    out["server_restarts"] = nlohmann::ordered_json::array();
    for (const Ending& failure : record.server_failures) out["server_restarts"].push_back(to_json(failure));
  }
  if (record.max_restarts > 0) {
    out["max_restarts"] = record.max_restarts;
    out["attempts"] = nlohmann::ordered_json::array();
    for (const AttemptRecord& attempt : record.attempts)
      out["attempts"].push_back(to_json(attempt, record.plan.roles()));
  }
  return out;
}

}  // namespace cohort::launch
