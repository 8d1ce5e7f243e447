#include "launch/job_record.h"

#include "launch/environment.h"
#include "launch/version.h"
#include "sys/cpus.h"

#include <sys/utsname.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <filesystem>

namespace cohort::launch {
namespace {

/// Never the whole environment: it may hold what is not for files.
constexpr std::string_view kPrefixes[] = {
    "COHORT_", "OMP_",     "MKL_",   "OPENBLAS_", "TORCH_",          "CUDA_",       "NCCL_",
    "GLOO_",   "HOROVOD_", "PYTHON", "SLURM_",    "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"};
constexpr std::string_view kPrivate[] = {"TOKEN", "SECRET", "PASSWORD", "KEY"};

nlohmann::ordered_json environment_that_matters() {
  nlohmann::ordered_json out = nlohmann::ordered_json::object();
  for (const std::string& assignment : Environment::current().assignments()) {
    const auto equals = assignment.find('=');
    const std::string name = assignment.substr(0, equals);
    bool wanted = false;
    for (const auto prefix : kPrefixes) wanted = wanted || name.starts_with(prefix);
    for (const auto word : kPrivate) wanted = wanted && name.find(word) == std::string::npos;
    if (wanted) out[name] = assignment.substr(equals + 1);
  }
  return out;
}

}  // namespace

nlohmann::ordered_json to_json(const JobRecord& record) {
  nlohmann::ordered_json out;
  out["format"] = 1;
  out["job_id"] = record.job_id;
  out["command_line"] = record.command_line;
  out["program"] = {{"path", record.program.path}, {"arguments", record.program.arguments}};
  std::error_code error;
  out["folder"] = std::filesystem::current_path(error).string();
  out["world_size"] = record.plan.world_size;
  out["hosts"] = nlohmann::ordered_json::array();
  for (const PlannedHost& host : record.plan.hosts) {
    out["hosts"].push_back({{"name", host.name}, {"first_rank", host.first_rank}, {"ranks", host.ranks}});
  }
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
  if (record.failure) {
    out["failure"] = {{"rank", record.failure->rank},
                      {"host", record.failure->host},
                      {"pid", record.failure->pid},
                      {"status", sys::to_string(record.failure->status)},
                      {"after_seconds", record.failure->after_seconds},
                      {"last_stderr", record.failure->last_stderr}};
  }
  return out;
}

}  // namespace cohort::launch
