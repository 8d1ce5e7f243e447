#include "launch/job_record.h"

#include "launch/environment.h"
#include "launch/git_revision.h"
#include "launch/version.h"
#include "sys/cpus.h"

#include <sys/utsname.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <cctype>
#include <filesystem>

namespace cohort::launch {
namespace {

/// Never the whole environment: it may hold what is not for files.
constexpr std::string_view kPrefixes[] = {
    "COHORT_",     "OMP_",         "KMP_", "GOMP_",    "MKL_",    "OPENBLAS_", "TORCH_",          "CUDA_",
    "NCCL_",       "GLOO_",        "TF_",  "HOROVOD_", "PYTHON",  "SLURM_",    "LD_LIBRARY_PATH", "LD_PRELOAD",
    "VIRTUAL_ENV", "CONDA_PREFIX", "HIP_", "ROCR_",    "MASTER_", "PYTORCH"};
constexpr std::string_view kPrivate[] = {"TOKEN",  "SECRET",     "PASSWORD",    "PASSWD", "PASSPHRASE", "KEY",
                                         "APIKEY", "CREDENTIAL", "CREDENTIALS", "AUTH",   "COOKIE"};
constexpr const char* kHidden = "(hidden)";

/// https://user:password@host
bool has_password(std::string_view value) {
  const auto scheme = value.find("://");
  if (scheme == std::string_view::npos) return false;
  const std::string_view rest = value.substr(scheme + 3);
  const auto at = rest.substr(0, rest.find('/')).find('@');
  return at != std::string_view::npos && rest.substr(0, at).find(':') != std::string_view::npos;
}

/// A command line without what its words give away: --api-key=X, TOKEN=X, --password X.
std::vector<std::string> without_secrets(const std::vector<std::string>& words) {
  std::vector<std::string> out;
  bool hide = false;
  for (const std::string& word : words) {
    const auto equals = word.find('=');
    const bool option = word.starts_with("--");
    if ((hide && !option) || has_password(word)) {
      out.emplace_back(kHidden);
    } else if (equals != std::string::npos && looks_private(word.substr(0, equals))) {
      out.push_back(word.substr(0, equals + 1) + kHidden);
    } else {
      out.push_back(word);
    }
    hide = option && equals == std::string::npos && looks_private(word);
  }
  return out;
}

nlohmann::ordered_json environment_that_matters() {
  nlohmann::ordered_json out = nlohmann::ordered_json::object();
  for (const std::string& assignment : Environment::current().assignments()) {
    const auto equals = assignment.find('=');
    const std::string name = assignment.substr(0, equals);
    bool wanted = false;
    for (const auto prefix : kPrefixes) wanted = wanted || name.starts_with(prefix);
    const std::string value = assignment.substr(equals + 1);
    if (wanted && !looks_private(name) && !has_password(value)) out[name] = value;
  }
  return out;
}

nlohmann::ordered_json to_json(const Ending& failure) {
  return {{"rank", failure.rank},
          {"host", failure.host},
          {"pid", failure.pid},
          {"status", sys::to_string(failure.status)},
          {"after_seconds", failure.after_seconds},
          {"last_stderr", failure.last_stderr}};
}

nlohmann::ordered_json to_json(const AttemptRecord& attempt) {
  nlohmann::ordered_json out = {
      {"start", attempt.start},   {"end", attempt.end},         {"exit_status", attempt.exit_status},
      {"reason", attempt.reason}, {"logs", attempt.log_folder}, {"pids", attempt.pids}};
  if (attempt.failure) out["failure"] = to_json(*attempt.failure);
  return out;
}

}  // namespace

bool looks_private(std::string_view name) {
  std::string part;
  const auto matches = [&part] {
    for (const std::string_view word : kPrivate) {
      if (part == word) return true;
    }
    return part.ends_with("TOKEN") || part.ends_with("SECRET") || part.ends_with("PASSWORD");
  };
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      part += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
      continue;
    }
    if (matches()) return true;
    part.clear();
  }
  return matches();
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
    out["hosts"].push_back({{"name", host.name}, {"first_rank", host.first_rank}, {"ranks", host.ranks}});
  }
  if (!record.log_folder.empty()) out["logs"] = record.log_folder;
  out["pids"] = record.pids;
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
  if (record.failure) out["failure"] = to_json(*record.failure);
  if (record.max_restarts > 0) {
    out["max_restarts"] = record.max_restarts;
    out["attempts"] = nlohmann::ordered_json::array();
    for (const AttemptRecord& attempt : record.attempts) out["attempts"].push_back(to_json(attempt));
  }
  return out;
}

}  // namespace cohort::launch
