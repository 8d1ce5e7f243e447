#include "rendezvous/launchers.h"

#include "base/env.h"
#include "base/parse.h"
#include "base/process.h"
#include "rendezvous/detect.h"
#include "rendezvous/host_list.h"
#include "rendezvous/json_variables.h"

#include <fmt/format.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <numeric>
#include <string_view>
#include <tuple>

extern char** environ;

namespace cohort::rendezvous {

Environment current_environment() {
  Environment result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    if (equals + 1 == text.size() && text != "CUDA_VISIBLE_DEVICES=") continue;
    result.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  add_resource_config(result);
  return result;
}

std::vector<SizeClaim> size_claims(const Environment& environment) {
  std::vector<SizeClaim> claims;
  for (const Launcher& row : launchers()) {
    if (!recognised(environment, row)) continue;
    if (row.read == nullptr) {  // the size counts even if other variables are missing
      const auto size = possible_number(environment, row.size, 1);
      if (size) claims.push_back({std::string(row.name), fmt::format("{}={}", row.size, *size), *size});
    } else if (const auto detected = read(environment, row)) {
      claims.push_back({std::string(row.name), detected->source, detected->size});
    }
  }
  return claims;
}

Result<void> refuse_unmeant_world_of_one(const Environment& environment, int size, const std::string& source) {
  if (size != 1) return {};
  for (const SizeClaim& claim : size_claims(environment)) {
    if (claim.size <= 1) continue;
    return fail(ErrorCode::InvalidArgument,
                "this would be a world of one ({}), but {}{} says that {} processes were meant -- let all of them "
                "form one world: leave rank and world size to the launcher; to run singly on purpose, set "
                "COHORT_ALONE=1",
                source, claim.claim,
                claim.claim.find("(" + claim.launcher + ")") == std::string::npos ? " (" + claim.launcher + ")" : "",
                claim.size);
  }
  return {};
}

Result<Detected> detect(const Environment& environment) {
  const auto alone = env::flag(env::kAlone, environment);
  if (!alone) return tl::unexpected(alone.error());
  Detected detected;
  if (*alone) {
    detected.alone = true;
    detected.source = "COHORT_ALONE=1";
    return detected;
  }
  detected.source = "no launcher";
  for (const Launcher& row : launchers()) {
    if (!recognised(environment, row)) continue;
    auto said = read(environment, row);
    if (!said) return said;
    detected = *std::move(said);
    break;
  }
  if (detected.launcher.empty()) {
    if (const std::string* const rank = find(environment, env::kRank)) {
      return fail(ErrorCode::InvalidArgument, "RANK={} is set and WORLD_SIZE is not -- set both or neither", *rank);
    }
  }
  if (detected.role != Role::Worker) return detected;  // its world, if any, is meant to have one process
  detected.number = detected.rank;
  detected.workers = detected.size;
  if (detected.elastic) return detected;
  if (auto meant = refuse_unmeant_world_of_one(environment, detected.size, detected.source); !meant) {
    return tl::unexpected(meant.error());
  }
  note_warning(environment, detected);
  return detected;
}

Result<Detected> detect_rank(const Environment& environment) {
  auto detected = detect(environment);
  if (!detected || detected->role != Role::Server) return detected;
  return fail(ErrorCode::InvalidArgument,
              "{}: a parameter server is no rank and forms no world -- let the program ask cohort::role() "
              "(cohort.role()), and call init as a worker only; COHORT_ALONE=1 makes of it a world of one",
              detected->source);
}

namespace {

// `cohort run` also sets torchrun's variables, with its own job's name, for programs that ask whether torchrun started
// them. A torchrun that is a worker of `cohort run` is the inner launcher; it sets RANK again, and a different name.
bool is_torchrun(const Environment& environment) {
  const std::string* const ours = find(environment, env::kJobId);
  return ours == nullptr || *ours != *find(environment, "TORCHELASTIC_RUN_ID");
}

// True if RANK and WORLD_SIZE were set by hand. In a Kubernetes pod they number the pods, not the processes. If they
// equal a launcher's numbers, scripts have set them for torch.distributed's programs, and the launcher's own meeting
// place is safer. But if MASTER_ADDR is loopback and there are several hosts, the numbers are equal only by chance.
bool is_by_hand(const Environment& environment) {
  if (is_kubeflow_pod(environment)) return false;
  const std::string* const rank = find(environment, env::kRank);
  const std::string* const size = find(environment, env::kWorldSize);
  for (const Launcher& row : launchers()) {
    if (row.meeting != Meeting::Launcher || rank == nullptr || !recognised(environment, row)) continue;
    if (meets_at_loopback(environment)) {
      const auto said = read(environment, row);
      if (said && (said->nodes.value_or(1) > 1 || said->local_size.value_or(said->size) < said->size)) continue;
    }
    const std::string* const other_rank = find(environment, row.rank);
    const std::string* const other_size = find(environment, row.size);
    if (other_rank != nullptr && other_size != nullptr && *rank == *other_rank && *size == *other_size) return false;
  }
  return true;
}

// A program under horovodrun may have copied Horovod's numbers to RANK and WORLD_SIZE, and set MASTER_ADDR.
bool is_horovod(const Environment& environment) {
  if (find(environment, env::kMasterAddr) == nullptr) return true;
  const auto same = [&](std::string_view ours, std::string_view theirs) {
    const std::string* const value = find(environment, ours);
    return value != nullptr && *value == *find(environment, theirs);
  };
  return !(same(env::kRank, "HOROVOD_RANK") && same(env::kWorldSize, "HOROVOD_SIZE"));
}

void complete_horovod(const Environment& environment, Detected& detected) {
  const std::string* const address = find(environment, "HOROVOD_GLOO_RENDEZVOUS_ADDR");
  const std::string* const port = find(environment, "HOROVOD_GLOO_RENDEZVOUS_PORT");
  if (address != nullptr && port != nullptr) detected.job = fmt::format("{}:{}", *address, *port);
}

// Joins the variables that are set, each equal in all processes of a job, into the job's name.
std::string joined(const Environment& environment, std::initializer_list<std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) {
    const std::string* const value = find(environment, name);
    if (value != nullptr) text += fmt::format("{}={}\n", name, *value);
  }
  return text;
}

// OMPI_COMM_WORLD_NODE_RANK is not used: it is the rank within the node over all jobs, not the node's number.
void complete_open_mpi(const Environment& environment, Detected& detected) {
  detected.job = joined(environment, {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"});
  // The allocation's number of nodes, which may be larger than the job's.
  const std::string* const nodes = find(environment, "OMPI_MCA_orte_num_nodes");
  if (nodes != nullptr && *nodes == "1") detected.nodes = 1;
}

// srun also sets PMI's variables for its tasks. Hydra's include the local size, Slurm's do not.
bool is_hydra(const Environment& environment) {
  const std::string* const rank = find(environment, "SLURM_PROCID");
  const std::string* const size = find(environment, "SLURM_STEP_NUM_TASKS");
  return find(environment, "MPI_LOCALNRANKS") != nullptr || rank == nullptr || size == nullptr ||
         find(environment, "PMI_RANK") == nullptr || *rank != *find(environment, "PMI_RANK") ||
         *size != *find(environment, "PMI_SIZE");
}

Detected read_pmi_port(const Environment& environment) {
  raise(ErrorCode::InvalidArgument,
        "PMI_ID={} and PMI_PORT={} say that mpiexec started this process, but not how many there are (PMI_SIZE) "
        "-- start without -pmi-port",
        *find(environment, "PMI_ID"), *find(environment, "PMI_PORT"));
}
bool is_pmi_port(const Environment& environment) { return find(environment, "PMI_SIZE") == nullptr; }

// Tasks of srun belong to Slurm's row.
bool is_pmix(const Environment& environment) {
  return find(environment, "SLURM_STEP_ID") == nullptr || !find(environment, "PMIX_NAMESPACE")->starts_with("slurm.");
}

void complete_pmix(const Environment& environment, Detected& detected) {
  detected.job = joined(environment, {"PMIX_NAMESPACE"});
}

void complete_jsm(const Environment& environment, Detected& detected) {
  detected.job = joined(environment, {"LSB_JOBID", "JSM_NAMESPACE_ID", "PMIX_NAMESPACE"});
}

// The batch script, the shell of salloc and the like run in steps with the highest 32-bit numbers.
bool is_slurm_task(const Environment& environment) {
  const auto step = parse_integer<std::uint32_t>(*find(environment, "SLURM_STEP_ID"));
  return step && *step < 0xfffffff0U;
}

template <class A, class B>
[[noreturn]] void disagree(std::string_view first, const A& one, std::string_view second, const B& other,
                           std::string_view launcher) {
  raise(ErrorCode::InvalidArgument, "{}={} but {}={} ({}): they contradict each other -- correct or unset one", first,
        one, second, other, launcher);
}

void complete_slurm(const Environment& environment, Detected& detected) {
  constexpr std::string_view kName = "Slurm";
  detected.job = joined(environment, {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"});
  const auto node = number(environment, "SLURM_NODEID", 0);
  const auto nodes = number(environment, "SLURM_STEP_NUM_NODES", 1);
  detected.node_rank = node;
  detected.nodes = nodes;
  if (node && nodes && *node >= *nodes) disagree("SLURM_NODEID", *node, "SLURM_STEP_NUM_NODES", *nodes, kName);
  if (const std::string* const text = find(environment, "SLURM_STEP_TASKS_PER_NODE")) {
    const auto counts = parse_slurm_counts(*text);
    if (!counts) raise(ErrorCode::InvalidArgument, "SLURM_STEP_TASKS_PER_NODE: {}", counts.error().what());
    if (std::accumulate(counts->begin(), counts->end(), std::int64_t{0}) != detected.size)
      disagree("SLURM_STEP_TASKS_PER_NODE", *text, "SLURM_STEP_NUM_TASKS", detected.size, kName);
    if (nodes && counts->size() != static_cast<std::size_t>(*nodes))
      disagree("SLURM_STEP_TASKS_PER_NODE", *text, "SLURM_STEP_NUM_NODES", *nodes, kName);
    if (node) {
      if (static_cast<std::size_t>(*node) >= counts->size())
        disagree("SLURM_NODEID", *node, "SLURM_STEP_TASKS_PER_NODE", *text, kName);
      detected.local_size = (*counts)[static_cast<std::size_t>(*node)];
    }
  } else if (nodes && *nodes == 1) {
    detected.local_size = detected.size;
  }
  // The names are only for messages, so a spelling that only Slurm's controller understands is skipped.
  if (const std::string* const text = find(environment, "SLURM_STEP_NODELIST")) {
    auto hosts = parse_slurm_hosts(*text);
    if (hosts && nodes && hosts->size() != static_cast<std::size_t>(*nodes))
      disagree("SLURM_STEP_NODELIST", *text, "SLURM_STEP_NUM_NODES", *nodes, kName);
    if (hosts) detected.hosts = *std::move(hosts);
  }
}

constexpr std::string_view kPmix = "PMIx";

constexpr Launcher kLaunchers[] = {
    {.name = "torchrun",
     .markers = {"TORCHELASTIC_RUN_ID", "WORLD_SIZE"},
     .rank = "RANK",
     .size = "WORLD_SIZE",
     .local_rank = "LOCAL_RANK",
     .local_size = "LOCAL_WORLD_SIZE",
     .meeting = Meeting::Master,
     .is_it = is_torchrun},
    {.name = "cohort run",
     .markers = {"COHORT_STORE", "WORLD_SIZE"},
     .rank = "RANK",
     .size = "WORLD_SIZE",
     .local_rank = "LOCAL_RANK",
     .local_size = "LOCAL_WORLD_SIZE",
     .meeting = Meeting::JobStore,
     .complete = complete_cohort_run},
    {.name = "cohort run, beside the ranks",
     .markers = {env::kStore, env::kRole},
     .is_it = is_beside_ranks,
     .read = read_beside_ranks},
    {.name = "Horovod",
     .markers = {"HOROVOD_RANK", "HOROVOD_SIZE"},
     .rank = "HOROVOD_RANK",
     .size = "HOROVOD_SIZE",
     .local_rank = "HOROVOD_LOCAL_RANK",
     .local_size = "HOROVOD_LOCAL_SIZE",
     .meeting = Meeting::Launcher,
     .is_it = is_horovod,
     .complete = complete_horovod},
    {.name = "Indexed Job",
     .markers = {"JOB_COMPLETION_INDEX", "WORLD_SIZE"},
     .rank = "JOB_COMPLETION_INDEX",
     .size = "WORLD_SIZE",
     .meeting = Meeting::Master,
     .is_it = is_indexed_job,
     .complete = complete_indexed_job},
    {.name = "env://",
     .markers = {"WORLD_SIZE", {}},
     .rank = "RANK",
     .size = "WORLD_SIZE",
     .local_rank = "LOCAL_RANK",
     .local_size = "LOCAL_WORLD_SIZE",
     .meeting = Meeting::Master,
     .is_it = is_by_hand},
    {.name = "Open MPI",
     .markers = {"OMPI_COMM_WORLD_SIZE", {}},
     .rank = "OMPI_COMM_WORLD_RANK",
     .size = "OMPI_COMM_WORLD_SIZE",
     .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
     .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE",
     .meeting = Meeting::Launcher,
     .complete = complete_open_mpi},
    {.name = "MVAPICH2",
     .markers = {"MV2_COMM_WORLD_SIZE", {}},
     .rank = "MV2_COMM_WORLD_RANK",
     .size = "MV2_COMM_WORLD_SIZE",
     .local_rank = "MV2_COMM_WORLD_LOCAL_RANK",
     .local_size = "MV2_COMM_WORLD_LOCAL_SIZE",
     .meeting = Meeting::Launcher},
    {.name = "MPI (PMI)",
     .markers = {"PMI_SIZE", {}},
     .rank = "PMI_RANK",
     .size = "PMI_SIZE",
     .local_rank = "MPI_LOCALRANKID",
     .local_size = "MPI_LOCALNRANKS",
     .meeting = Meeting::Launcher,
     .is_it = is_hydra},
    {.name = "MPI (PMI port)", .markers = {"PMI_ID", "PMI_PORT"}, .is_it = is_pmi_port, .read = read_pmi_port},
    {.name = "LSF (jsrun)",
     .markers = {"JSM_NAMESPACE_SIZE", {}},
     .rank = "JSM_NAMESPACE_RANK",
     .size = "JSM_NAMESPACE_SIZE",
     .local_rank = "JSM_NAMESPACE_LOCAL_RANK",
     .local_size = "JSM_NAMESPACE_LOCAL_SIZE",
     .meeting = Meeting::Launcher,
     .complete = complete_jsm},
    // The variables do not give the sizes; with_pmix_keys adds them, named like PMIx's keys.
    {.name = kPmix,
     .markers = {"PMIX_NAMESPACE", "PMIX_RANK"},
     .rank = "PMIX_RANK",
     .size = kPmixJobSize,
     .local_size = kPmixLocalSize,
     .meeting = Meeting::Launcher,
     .is_it = is_pmix,
     .complete = complete_pmix},
    {.name = "Slurm",
     .markers = {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"},
     .rank = "SLURM_PROCID",
     .size = "SLURM_STEP_NUM_TASKS",
     .local_rank = "SLURM_LOCALID",
     .meeting = Meeting::Launcher,
     .is_it = is_slurm_task,
     .complete = complete_slurm},
    {.name = "TF_CONFIG", .markers = {"TF_CONFIG", {}}, .read = read_tf_config},
    {.name = "DMLC (ps-lite)", .markers = {"DMLC_ROLE", "DMLC_NUM_WORKER"}, .read = read_dmlc},
    {.name = "Kubeflow", .markers = {"PET_NNODES", {}}, .is_it = is_kubeflow_pod, .read = read_kubeflow},
    {.name = "Kubeflow MPIJob", .markers = {"K_MPI_JOB_ROLE", {}}, .read = read_mpijob_launcher},
    {.name = "LeaderWorkerSet",
     .markers = {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE"},
     .rank = "LWS_WORKER_INDEX",
     .size = "LWS_GROUP_SIZE",
     .meeting = Meeting::Address,
     .complete = complete_leader_worker_set},
    {.name = "Kubeflow (JAX)",
     .markers = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"},
     .rank = "JAX_PROCESS_ID",
     .size = "JAX_NUM_PROCESSES",
     .meeting = Meeting::Address,
     .complete = complete_jax_trainer},
    {.name = "JAXJob",
     .markers = {"COORDINATOR_ADDRESS", "NUM_PROCESSES"},
     .rank = "PROCESS_ID",
     .size = "NUM_PROCESSES",
     .meeting = Meeting::Address,
     .is_it = is_jax_job,
     .complete = complete_jax_job},
    {.name = "Volcano", .markers = {"VC_TASK_INDEX", {}}, .is_it = is_volcano, .read = read_volcano},
    {.name = "SageMaker", .markers = {"SM_CURRENT_HOST", {}}, .is_it = is_sagemaker, .read = read_sagemaker},
};

[[noreturn]] void out_of_range(std::string_view first, int one, std::string_view second, int other,
                               std::string_view row, std::string_view why) {
  raise(ErrorCode::InvalidArgument, "{}={} but {}={} ({}): {} -- correct one of them", first, one, second, other, row,
        why);
}

// Throws if rank and sizes contradict each other.
void check(const Launcher& row, const Detected& detected) {
  const auto& [local_rank, local_size] = std::tie(detected.local_rank, detected.local_size);
  const std::string_view size_name = row.local_size.empty() ? "its local size" : row.local_size;
  if (detected.rank >= detected.size)
    out_of_range(row.rank, detected.rank, row.size, detected.size, row.name, "ranks count from 0");
  if (local_rank && local_size && *local_rank >= *local_size)
    out_of_range(row.local_rank, *local_rank, size_name, *local_size, row.name, "local ranks count from 0");
  if (local_size && *local_size > detected.size)
    out_of_range(size_name, *local_size, row.size, detected.size, row.name,
                 "a host cannot have more ranks than the world");
  if (local_rank && *local_rank > detected.rank)
    out_of_range(row.local_rank, *local_rank, row.rank, detected.rank, row.name,
                 "a local rank is never above the rank");
}

}  // namespace

std::span<const Launcher> launchers() { return kLaunchers; }

bool needs_pmix_keys(const Environment& environment) {
  for (const Launcher& row : kLaunchers) {
    if (recognised(environment, row)) return row.name == kPmix && find(environment, kPmixJobSize) == nullptr;
  }
  return false;
}

const std::string* find(const Environment& environment, std::string_view name) {
  if (name.empty()) return nullptr;
  const auto found = environment.find(name);
  return found == environment.end() || found->second.empty() ? nullptr : &found->second;
}

std::uint16_t port_of(const Environment& environment, std::string_view name) {
  const std::string* const text = find(environment, name);
  if (text == nullptr) return std::uint16_t{29500};
  const auto port = parse_integer<std::uint16_t>(*text);
  if (!port || *port == 0)
    raise(ErrorCode::InvalidArgument, "{}='{}' is not a port from 1 to 65535 -- correct it", name, *text);
  return *port;
}

std::optional<int> possible_number(const Environment& environment, std::string_view name, int least) {
  const std::string* const text = find(environment, name);
  const auto value = text == nullptr ? std::nullopt : parse_integer<int>(*text);
  return value && *value >= least ? value : std::nullopt;
}

std::optional<int> number(const Environment& environment, std::string_view name, int least) {
  const auto value = possible_number(environment, name, least);
  if (const std::string* const text = find(environment, name); text != nullptr && !value) {
    raise(ErrorCode::InvalidArgument, "{}='{}' is not a number from {} -- correct or unset it", name, *text, least);
  }
  return value;
}

bool meets_at_loopback(const Environment& environment) {
  const std::string* const address = find(environment, env::kMasterAddr);
  return address != nullptr && net::is_loopback_name(*address);
}

bool recognised(const Environment& environment, const Launcher& launcher) {
  for (const std::string_view marker : launcher.markers) {
    if (!marker.empty() && find(environment, marker) == nullptr) return false;
  }
  return launcher.is_it == nullptr || launcher.is_it(environment);
}

namespace {

Detected read_numbers(const Environment& environment, const Launcher& row) {
  const auto rank = number(environment, row.rank, 0);
  const auto size = number(environment, row.size, 1);
  const auto local_rank = number(environment, row.local_rank, 0);
  const auto local_size = number(environment, row.local_size, 1);
  if (!rank || !size) {
    raise(ErrorCode::InvalidArgument, "{} is set and {} is not ({}) -- set both or neither", size ? row.size : row.rank,
          size ? row.rank : row.size, row.name);
  }
  Detected detected;
  detected.launcher = row.name;
  detected.rank = *rank;
  detected.size = *size;
  detected.local_rank = local_rank;
  detected.local_size = local_size;
  detected.meeting = row.meeting;
  detected.source = fmt::format("{}={}, {}={} ({})", row.rank, *rank, row.size, *size, row.name);
  if (row.complete != nullptr) row.complete(environment, detected);
  check(row, detected);
  return detected;
}

}  // namespace

Result<Detected> read(const Environment& environment, const Launcher& row) {
  return result_of([&] { return row.read != nullptr ? row.read(environment) : read_numbers(environment, row); });
}

namespace {

// Names of daemons, truncated to 15 bytes as in the kernel.
constexpr std::array<std::string_view, 9> kDaemons = {"hydra_pmi_proxy", "pmi_proxy", "mpispawn",   "orted", "prted",
                                                      "prterun",         "mpirun",    "slurmstepd", "jsmd"};
constexpr int kMostAncestors = 256;

}  // namespace

std::optional<std::string> launcher_process() {
  pid_t pid = ::getppid();
  for (int i = 0; i < kMostAncestors && pid > 1; ++i) {
    const auto stat = sys::process_stat(pid);
    if (!stat) return std::nullopt;
    std::string name;
    std::getline(std::ifstream(fmt::format("/proc/{}/comm", pid)), name);
    if (std::find(kDaemons.begin(), kDaemons.end(), name) != kDaemons.end())
      return fmt::format("{} {} {}", name, pid, stat->start_ticks);
    pid = stat->parent;
  }
  return std::nullopt;
}

}  // namespace cohort::rendezvous
