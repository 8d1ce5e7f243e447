// Kubernetes' ways to number pods, each of which runs one process. (Kubeflow's PyTorchJob, TrainJob and MPIJob are in
// launchers_described.cpp.)
#include "base/env.h"
#include "cluster/launchers.h"

#include <algorithm>

namespace cohort::cluster {
namespace {

void one_for_each_pod(Detected& detected) {
  detected.local_rank = 0;
  detected.local_size = 1;
  detected.node_rank = detected.rank;
  detected.nodes = detected.size;
}

Result<void> meet_at(const Environment& environment, Detected& detected, std::string_view host, std::string_view port) {
  one_for_each_pod(detected);
  const auto number = port_of(environment, port);
  if (!number) return tl::unexpected(number.error());
  detected.address = {*find(environment, host), *number};
  return {};
}

}  // namespace

Result<void> complete_leader_worker_set(const Environment& environment, Detected& detected) {
  return meet_at(environment, detected, "LWS_LEADER_ADDRESS", env::kMasterPort);
}

// Names that others may use, too.
bool is_jax_job(const Environment& environment) { return find(environment, "PROCESS_ID") != nullptr; }

Result<void> complete_jax_job(const Environment& environment, Detected& detected) {
  return meet_at(environment, detected, "COORDINATOR_ADDRESS", "COORDINATOR_PORT");
}

// "HOST:PORT", or a host with its port in a variable of its own.
Result<void> complete_jax_trainer(const Environment& environment, Detected& detected) {
  const std::string& text = *find(environment, "JAX_COORDINATOR_ADDRESS");
  if (text.find(':') == std::string::npos)
    return meet_at(environment, detected, "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT");
  one_for_each_pod(detected);
  auto address = net::parse_address(text);
  if (!address || address->port == 0) {
    return fail(ErrorCode::InvalidArgument, "JAX_COORDINATOR_ADDRESS='{}' is not HOST:PORT -- correct it", text);
  }
  detected.address = *std::move(address);
  return {};
}

// The control plane numbers the pods of an Indexed Job; how many there are, and where the first one is, the job's
// author says. Whoever gives RANK too has said it all.
bool is_indexed_job(const Environment& environment) { return find(environment, env::kRank) == nullptr; }

Result<void> complete_indexed_job(const Environment&, Detected& detected) {
  one_for_each_pod(detected);
  return {};
}

// The plugins `env` and `svc` of a Volcano job: VC_TASK_INDEX, and VC_<TASK>_HOSTS with VC_<TASK>_NUM for each task.
bool is_volcano(const Environment& environment) {
  return std::any_of(environment.begin(), environment.end(), [](const auto& variable) {
    return variable.first.starts_with("VC_") && variable.first.ends_with("_HOSTS") && !variable.second.empty();
  });
}

Result<Detected> read_volcano(const Environment& environment) {
  const auto rank = number(environment, "VC_TASK_INDEX", 0);
  if (!rank) return tl::unexpected(rank.error());
  std::string names;
  const std::string* list = nullptr;
  for (const auto& [name, value] : environment) {
    if (!name.starts_with("VC_") || !name.ends_with("_HOSTS") || value.empty()) continue;
    if (list != nullptr) {
      return fail(ErrorCode::InvalidArgument,
                  "VC_TASK_INDEX={} counts the pods of one task, and this Volcano job has several ({}, {}): which of "
                  "them are ranks? -- set RANK, WORLD_SIZE and MASTER_ADDR for those, or COHORT_ALONE=1 for others",
                  **rank, names, name);
    }
    names = name;
    list = &value;
  }
  Detected detected;
  detected.launcher = "Volcano";
  for (std::string_view rest = *list; !rest.empty();) {
    const std::string_view host = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), host.size() + 1));
    if (!host.empty()) detected.hosts.emplace_back(host);
  }
  detected.rank = **rank;
  detected.size = static_cast<int>(detected.hosts.size());
  const std::string count_name = names.substr(0, names.size() - 5) + "NUM";
  const auto count = number(environment, count_name, 1);
  if (!count) return tl::unexpected(count.error());
  if (*count && **count != detected.size) {
    return fail(ErrorCode::InvalidArgument, "{}={} but {} names {} hosts (Volcano) -- correct one of them", count_name,
                **count, names, detected.size);
  }
  if (detected.rank >= detected.size) {
    return fail(ErrorCode::InvalidArgument,
                "VC_TASK_INDEX={} but {} names {} hosts (Volcano): tasks count from 0 -- correct one of them",
                detected.rank, names, detected.size);
  }
  detected.source = fmt::format("VC_TASK_INDEX={}, {} hosts in {} (Volcano)", detected.rank, detected.size, names);
  one_for_each_pod(detected);
  if (detected.size == 1) return detected;
  const auto port = port_of(environment, env::kMasterPort);
  if (!port) return tl::unexpected(port.error());
  detected.meeting = Meeting::Address;
  detected.address = {detected.hosts.front(), *port};
  return detected;
}

}  // namespace cohort::cluster
