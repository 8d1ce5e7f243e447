#include "launch/record/private_values.h"

#include "base/env.h"

#include <algorithm>
#include <cctype>
#include <iterator>

namespace cohort::launch {
namespace {

constexpr std::string_view kPrivate[] = {
    "TOKEN",  "SECRET",     "PASSWORD", "PASSWD",      "PASSPHRASE", "PASS",      "PASSCODE", "PWD",    "KEY",
    "APIKEY", "CREDENTIAL", "CREDS",    "CREDENTIALS", "CRED",       "AUTH",      "COOKIE",   "BEARER", "JWT",
    "PAT",    "SAS",        "DSN",      "PIN",         "OTP",        "SIGNATURE", "PRIVATE"};
constexpr std::string_view kPrivateEnds[] = {"TOKEN", "SECRET", "PASSWORD", "PASSWD", "APIKEY", "JWT"};

/// Settings of libraries that know of no credentials, too many to name and different in each version.
constexpr std::string_view kPrefixes[] = {"OMP_",  "KMP_",  "GOMP_",       "MKL_",        "OPENBLAS_",
                                          "BLIS_", "NCCL_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCHINDUCTOR_"};

/// Everything else by its whole name, beside the table of variables: what a prefix such as SLURM_ or TF_ stands for is
/// not ours to know.
constexpr std::string_view kPrivateNames[] = {
    // Programs and libraries
    "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONPATH", "PYTHONHOME",
    "PYTHONSTARTUP", "PYTHONHASHSEED", "PYTHONFAULTHANDLER", "PYTHONOPTIMIZE", "PYTHONDEVMODE", "PYTHONMALLOC",
    "PYTHONWARNINGS", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONIOENCODING", "PYTHONUTF8",
    "PYTHONPYCACHEPREFIX", "MALLOC_ARENA_MAX", "MALLOC_CONF",
    // Accelerators
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE", "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUBLAS_WORKSPACE_CONFIG", "HIP_VISIBLE_DEVICES", "HIP_LAUNCH_BLOCKING",
    "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HSA_OVERRIDE_GFX_VERSION",
    // PyTorch, gloo, TensorFlow, Horovod
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_JIT", "PYTORCH_KERNEL_CACHE_PATH", "TORCH_HOME", "TORCH_LOGS", "TORCH_CPP_LOG_LEVEL",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_CUDA_ARCH_LIST", "TORCH_EXTENSIONS_DIR",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "GLOO_SOCKET_IFNAME",
    "GLOO_DEVICE_TRANSPORT", "TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS", "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS", "TF_FORCE_GPU_ALLOW_GROWTH", "TF_GPU_ALLOCATOR", "TF_DETERMINISTIC_OPS",
    "TF_CUDNN_DETERMINISTIC", "TF_XLA_FLAGS", "HOROVOD_CYCLE_TIME", "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_HIERARCHICAL_ALLGATHER", "HOROVOD_AUTOTUNE", "HOROVOD_THREAD_AFFINITY", "HOROVOD_NUM_NCCL_STREAMS",
    // Where Slurm has placed the job
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

/// Ours that hold what somebody has typed: other variables, and commands.
constexpr std::string_view kTyped[] = {"COHORT_RUN_ENV", "COHORT_RUN_SSH", "COHORT_RUN_ON_WARNING"};

constexpr const char* kHidden = "(hidden)";

template <class List>
bool has(const List& list, std::string_view name) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

/// https://user:password@host
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
         std::any_of(std::begin(kPrefixes), std::end(kPrefixes),
                     [name](auto prefix) { return name.starts_with(prefix); }) ||
         ((name.starts_with(env::kRunOptionPrefix) ||
           std::any_of(ours.begin(), ours.end(), [name](const auto& variable) { return variable.name == name; })) &&
          !has(kTyped, name));
}

/// Behind which '=' a private value begins; npos: it holds none.
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
    return has(kPrivate, part) || std::any_of(std::begin(kPrivateEnds), std::end(kPrivateEnds),
                                              [&part](std::string_view end) { return part.ends_with(end); });
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

}  // namespace cohort::launch
