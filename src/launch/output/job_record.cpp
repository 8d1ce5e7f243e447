#include "launch/output/job_record.h"

#include "base/env.h"
#include "base/hardware.h"
#include "base/process.h"
#include "launch/processes.h"
#include "launch/version.h"
#include "rendezvous/identity.h"

#include <sys/utsname.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <system_error>

namespace cohort::launch {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kBranches = "refs/heads/";

std::string first_line(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return {};
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
  return line;
}

bool is_commit(std::string_view text) {
  return (text.size() == 40 || text.size() == 64) &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

/// Returns the repository's own folder: .git, or the folder that a file of that name gives (worktrees, submodules).
fs::path repository_of(fs::path folder) {
  std::error_code error;
  while (true) {
    const fs::path git = folder / ".git";
    if (fs::is_directory(git, error)) return git;
    const std::string line = first_line(git);
    if (line.starts_with("gitdir: ")) return (folder / line.substr(8)).lexically_normal();
    if (!folder.has_relative_path()) return {};
    folder = folder.parent_path();
  }
}

std::string packed(const fs::path& file, const std::string& name) {
  std::error_code error;
  if (!fs::is_regular_file(file, error)) return {};
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    const auto space = line.find(' ');
    if (space != std::string::npos && line.substr(space + 1) == name) return line.substr(0, space);
  }
  return {};
}

}  // namespace

std::optional<GitRevision> git_revision(const std::string& folder) {
  const fs::path repository = repository_of(folder);
  if (repository.empty()) return std::nullopt;
  GitRevision revision;
  std::string head = first_line(repository / "HEAD");
  if (head.starts_with("ref: ")) {
    const std::string name = head.substr(5);
    if (name.starts_with(kBranches)) revision.branch = name.substr(kBranches.size());
    // A worktree has its own HEAD; its branches are in the main repository.
    const std::string common = first_line(repository / "commondir");
    const fs::path root = common.empty() ? repository : (repository / common).lexically_normal();
    head = first_line(root / name);
    if (head.empty()) head = packed(root / "packed-refs", name);
  }
  if (!is_commit(head)) return std::nullopt;
  revision.commit = head;
  return revision;
}

namespace {

constexpr std::string_view kPrivate[] = {
    "TOKEN",  "SECRET",     "PASSWORD", "PASSWD",      "PASSPHRASE", "PASS",      "PASSCODE", "PWD",    "KEY",
    "APIKEY", "CREDENTIAL", "CREDS",    "CREDENTIALS", "CRED",       "AUTH",      "COOKIE",   "BEARER", "JWT",
    "PAT",    "SAS",        "DSN",      "PIN",         "OTP",        "SIGNATURE", "PRIVATE"};
constexpr std::string_view kPrivateEnds[] = {"TOKEN", "SECRET", "PASSWORD", "PASSWD", "APIKEY", "JWT"};

/// Settings of libraries that handle no credentials; they are too many to list, and differ by version.
constexpr std::string_view kPrefixes[] = {"OMP_",  "KMP_",  "GOMP_",       "MKL_",        "OPENBLAS_",
                                          "BLIS_", "NCCL_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCHINDUCTOR_"};

/// Other recorded variables by their whole names, beside the table of variables: a prefix such as SLURM_ or TF_ may
/// also cover private ones.
constexpr std::string_view kPrivateNames[] = {
    // Programs and libraries.
    "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONPATH", "PYTHONHOME",
    "PYTHONSTARTUP", "PYTHONHASHSEED", "PYTHONFAULTHANDLER", "PYTHONOPTIMIZE", "PYTHONDEVMODE", "PYTHONMALLOC",
    "PYTHONWARNINGS", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONIOENCODING", "PYTHONUTF8",
    "PYTHONPYCACHEPREFIX", "MALLOC_ARENA_MAX", "MALLOC_CONF",
    // Accelerators.
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE", "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUBLAS_WORKSPACE_CONFIG", "HIP_VISIBLE_DEVICES", "HIP_LAUNCH_BLOCKING",
    "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HSA_OVERRIDE_GFX_VERSION",
    // PyTorch, gloo, TensorFlow, Horovod.
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_JIT", "PYTORCH_KERNEL_CACHE_PATH", "TORCH_HOME", "TORCH_LOGS", "TORCH_CPP_LOG_LEVEL",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_CUDA_ARCH_LIST", "TORCH_EXTENSIONS_DIR",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "GLOO_SOCKET_IFNAME",
    "GLOO_DEVICE_TRANSPORT", "TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS", "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS", "TF_FORCE_GPU_ALLOW_GROWTH", "TF_GPU_ALLOCATOR", "TF_DETERMINISTIC_OPS",
    "TF_CUDNN_DETERMINISTIC", "TF_XLA_FLAGS", "HOROVOD_CYCLE_TIME", "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_HIERARCHICAL_ALLGATHER", "HOROVOD_AUTOTUNE", "HOROVOD_THREAD_AFFINITY", "HOROVOD_NUM_NCCL_STREAMS",
    // Slurm's placement of the job.
    "SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_QOS",
    "SLURM_JOB_ACCOUNT", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NNODES",
    "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_GPUS", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_RESTART_COUNT", "SLURM_NTASKS", "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_CPU_BIND",
    "SLURM_MEM_BIND", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE", "SLURM_GPUS", "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_DISTRIBUTION", "SLURM_MPI_TYPE", "SLURM_STEP_ID",
    "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST", "SLURM_HET_SIZE",
    "SLURM_THREADS_PER_CORE"};

/// Our variables whose values users type: other variables, and commands.
constexpr std::string_view kTyped[] = {"COHORT_RUN_ENV", "COHORT_RUN_SSH", "COHORT_RUN_ON_WARNING"};

constexpr const char* kHidden = "(hidden)";

template <class List>
bool has(const List& list, std::string_view name) {
  return std::ranges::find(list, name) != std::end(list);
}

/// Returns true for values such as https://user:password@host.
bool has_password(std::string_view value) {
  const auto scheme = value.find("://");
  if (scheme == std::string_view::npos) return false;
  const std::string_view rest = value.substr(scheme + 3);
  const auto at = rest.substr(0, rest.find('/')).find('@');
  return at != std::string_view::npos && rest.substr(0, at).find(':') != std::string_view::npos;
}

bool changes_a_run(std::string_view name) {
  const auto ours = env::variables();
  return has(kPrivateNames, name) ||
         std::ranges::any_of(kPrefixes, [name](auto prefix) { return name.starts_with(prefix); }) ||
         ((name.starts_with(env::kRunOptionPrefix) ||
           std::ranges::any_of(ours, [name](const auto& variable) { return variable.name == name; })) &&
          !has(kTyped, name));
}

/// Returns where a private value begins, behind its '='; npos: the argument has none.
std::size_t private_part(std::string_view word) {
  std::size_t begin = 0;
  for (auto equals = word.find('='); equals != std::string_view::npos; equals = word.find('=', begin)) {
    if (looks_private(word.substr(begin, equals - begin))) return equals + 1;
    begin = equals + 1;
  }
  return std::string_view::npos;
}

}  // namespace

bool looks_private(std::string_view name) {
  std::string part;
  const auto matches = [&part] {
    return has(kPrivate, part) ||
           std::ranges::any_of(kPrivateEnds, [&part](std::string_view end) { return part.ends_with(end); });
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

bool is_recorded(std::string_view name, std::string_view value) {
  return changes_a_run(name) && !looks_private(name) && !has_password(value);
}

std::vector<std::string> without_secrets(const std::vector<std::string>& words) {
  std::vector<std::string> out;
  bool hide = false;
  for (const std::string& word : words) {
    const auto private_from = private_part(word);
    const bool option = word.starts_with("--");
    if ((hide && !option) || has_password(word)) {
      out.emplace_back(kHidden);
    } else if (private_from != std::string::npos) {
      out.push_back(word.substr(0, private_from) + kHidden);
    } else {
      out.push_back(word);
    }
    hide = option && word.find('=') == std::string::npos && looks_private(word);
  }
  return out;
}

namespace {

/// Returns the recorded variables. The whole environment is never recorded: it may hold secrets.
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
  add_ending(out, failure);
  out["after_seconds"] = failure.after_seconds;
  out["last_stderr"] = failure.last_stderr;
  return out;
}

nlohmann::ordered_json to_json(const Attempt& attempt, const Roles& roles) {
  nlohmann::ordered_json out = {{"start", attempt.start},
                                {"end", attempt.end},
                                {"exit_status", attempt.exit_status.value_or(1)},
                                {"reason", attempt.reason},
                                {"logs", attempt.log_folder}};
  add_pids(out, roles, attempt.pids);
  if (attempt.failure) out["failure"] = to_json(*attempt.failure);
  return out;
}

}  // namespace

nlohmann::ordered_json to_json(const TimesReport& times) {
  const auto seconds = [](std::uint64_t ns) { return static_cast<double>(ns) / 1e9; };
  return {
      {"steps", times.steps},           {"seconds", seconds(times.steps_ns)}, {"operations", times.operations},
      {"bytes", times.bytes},           {"busy", seconds(times.busy_ns)},     {"waited", seconds(times.waited_ns)},
      {"wire", seconds(times.wire_ns)}, {"wire_bytes", times.wire_bytes},     {"exposed", seconds(times.exposed_ns)}};
}

void add_process(nlohmann::ordered_json& out, Role role, int number) {
  if (role != Role::Worker) out["role"] = to_string(role);
  out[role == Role::Worker ? "rank" : "number"] = number;
}

void add_ending(nlohmann::ordered_json& out, const Ending& ending) {
  add_process(out, ending.role, ending.rank);
  out["host"] = ending.host;
  out["pid"] = ending.pid;
  out["status"] = sys::to_string(ending.status);
}

nlohmann::ordered_json host_entries(const Plan& plan) {
  auto all = nlohmann::ordered_json::array();
  for (const PlannedHost& host : plan.hosts) {
    auto& out = all.emplace_back();
    out = {{"name", host.name}, {"first_rank", host.first_rank}, {"ranks", host.ranks}};
    if (host.servers > 0) {
      out["first_server"] = host.first_server;
      out["servers"] = host.servers;
    }
    if (host.evaluator) out["evaluator"] = true;
  }
  return all;
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

std::vector<int> workers_of(const rendezvous::Membership& membership) {
  std::vector<int> workers;
  for (const rendezvous::Member& member : membership.members) workers.push_back(member.worker);
  return workers;
}

void RunState::note(const std::string& text) {
  constexpr std::size_t kMost = 20;
  if (notices.size() >= kMost) notices.erase(notices.begin());
  notices.push_back({seconds_now(), text});
}

nlohmann::ordered_json to_json(const RunState& record) {
  nlohmann::ordered_json out;
  out["format"] = 1;
  out["job_id"] = record.job_id;
  out["command_line"] = without_secrets(record.command_line);
  out["program"] = {{"path", record.program.path}, {"arguments", without_secrets(record.program.arguments)}};
  std::error_code error;
  const std::string folder = std::filesystem::current_path(error).string();
  out["folder"] = folder;
  out["host"] = sys::host_name();
  const sys::ProcessId launcher = sys::own_process();
  out["launcher"] = {
      {"pid", launcher.pid}, {"start_time", launcher.start_time}, {"host_id", rendezvous::host_identity().id}};
  if (const auto revision = git_revision(folder)) {
    out["git"] = {{"commit", revision->commit}, {"branch", revision->branch}};
  }
  out["world_size"] = record.plan.world_size;
  out["hosts"] = host_entries(record.plan);
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
  if (!record.trained.empty()) {
    out["trained"] = nlohmann::ordered_json::array();
    for (const Ending& one : record.trained)
      out["trained"].push_back({{"rank", one.rank}, {"host", one.host}, {"times", to_json(one.last.times)}});
  }
  if (!record.server_failures.empty()) {
    out["server_restarts"] = nlohmann::ordered_json::array();
    for (const Ending& failure : record.server_failures) out["server_restarts"].push_back(to_json(failure));
  }
  if (!record.members.empty()) {
    out["members"] = nlohmann::ordered_json::array();
    for (const MembersChange& change : record.members) {
      nlohmann::ordered_json one = {{"time", change.time},
                                    {"epoch", change.now.epoch},
                                    {"workers", workers_of(change.now)},
                                    {"cause", change.now.cause}};
      if (change.form_ms) one["form_ms"] = *change.form_ms;
      out["members"].push_back(std::move(one));
    }
  }
  if (record.max_restarts > 0) {
    out["max_restarts"] = record.max_restarts;
    out["attempts"] = nlohmann::ordered_json::array();
    for (const Attempt& attempt : record.attempts) out["attempts"].push_back(to_json(attempt, record.plan.roles()));
  }
  return out;
}

}  // namespace cohort::launch
