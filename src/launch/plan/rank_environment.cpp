#include "launch/plan/rank_environment.h"

#include "base/env.h"

#include <string_view>

namespace cohort::launch {

std::vector<std::string> rank_environment(const Plan& plan, const PlannedHost& host, int rank, const JobFacts& facts) {
  std::vector<std::string> out;
  const auto set = [&out](std::string_view name, std::string_view value) {
    out.push_back(fmt::format("{}={}", name, value));
  };
  const auto number = [&set](std::string_view name, int value) { set(name, std::to_string(value)); };
  number(env::kRank, rank);
  number(env::kWorldSize, plan.world_size);
  number(env::kLocalRank, host.first_local + rank - host.first_rank);
  number(env::kLocalWorldSize, host.local_ranks);
  set(env::kMasterAddr, facts.master_address);
  number(env::kMasterPort, facts.master_port);
  number("GROUP_RANK", host.machine);
  number("GROUP_WORLD_SIZE", plan.machines);
  number("ROLE_RANK", rank);
  number("ROLE_WORLD_SIZE", plan.world_size);
  set("ROLE_NAME", "default");
  set("TORCHELASTIC_RUN_ID", facts.job_id);
  number("TORCHELASTIC_RESTART_COUNT", facts.restart);
  number("TORCHELASTIC_MAX_RESTARTS", facts.max_restarts);
  // Rank 0 opens torch's store at MASTER_PORT itself; nobody else listens there.
  set("TORCHELASTIC_USE_AGENT_STORE", "False");
  set(env::kJobId, facts.job_id);
  set(env::kRunDir, facts.run_folder);
  set(env::kStore, facts.store);
  set(env::kHost, host.name);
  number(env::kRestart, facts.restart);
  if (facts.host_timeout.count() > 0) number(env::kHostTimeout, static_cast<int>(facts.host_timeout.count()));
  // For keras.distribution.initialize(): where JAX's processes meet.
  set("KERAS_DISTRIBUTION_JOB_ADDRESSES", fmt::format("{}:{}", facts.master_address, facts.master_port));
  number("KERAS_DISTRIBUTION_NUM_PROCESSES", plan.world_size);
  number("KERAS_DISTRIBUTION_PROCESS_ID", rank);
  if (!facts.tf_workers.empty()) set(env::kTfConfig, tf_config(facts.tf_workers, rank));
  // All of them for each rank, so that LOCAL_RANK numbers them and GPUs of one host reach each other.
  if (!host.devices.empty()) set("CUDA_VISIBLE_DEVICES", fmt::format("{}", fmt::join(host.devices, ",")));
  return out;
}

std::string tf_config(const std::vector<std::string>& workers, int rank) {
  return fmt::format(R"({{"cluster": {{"worker": ["{}"]}}, "task": {{"type": "worker", "index": {}}}}})",
                     fmt::join(workers, R"(", ")"), rank);
}

std::vector<std::string> horovod_environment(const Plan& plan, const PlannedHost& host, int rank) {
  const int local_rank = host.first_local + rank - host.first_rank;
  int cross_rank = 0;
  int cross_size = 0;
  for (const PlannedHost& other : plan.hosts) {
    if (other.first_local != 0 || other.local_ranks <= local_rank) continue;
    if (other.machine < host.machine) ++cross_rank;
    ++cross_size;
  }
  return {fmt::format("HOROVOD_HOSTNAME={}", host.name),
          fmt::format("HOROVOD_RANK={}", rank),
          fmt::format("HOROVOD_SIZE={}", plan.world_size),
          fmt::format("HOROVOD_LOCAL_RANK={}", local_rank),
          fmt::format("HOROVOD_LOCAL_SIZE={}", host.local_ranks),
          fmt::format("HOROVOD_CROSS_RANK={}", cross_rank),
          fmt::format("HOROVOD_CROSS_SIZE={}", cross_size),
          "HOROVOD_CONTROLLER=gloo",
          "HOROVOD_CPU_OPERATIONS=gloo"};
}

}  // namespace cohort::launch
