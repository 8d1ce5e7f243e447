#include "launch/plan/rank_environment.h"

#include "base/env.h"

#include <cohort/cluster_spec.h>

#include <map>
#include <string_view>
#include <utility>

namespace cohort::launch {
namespace {

class Assignments {
 public:
  void set(std::string_view name, std::string_view value) { all_.push_back(fmt::format("{}={}", name, value)); }
  void set(std::string_view name, int value) { set(name, std::to_string(value)); }
  std::vector<std::string> take() { return std::move(all_); }

  /// What every process of a job is told.
  void set_job(const Plan& plan, const PlannedHost& host, int process, const JobFacts& facts) {
    const Roles roles = plan.roles();
    set(env::kRole, to_string(roles.role_of(process)));
    set(env::kRoleNumber, roles.number_of(process));
    set(env::kWorkers, plan.world_size);
    set(env::kServers, plan.servers);
    set(env::kJobId, facts.job_id);
    set(env::kRunDir, facts.run_folder);
    set(env::kStore, facts.store);
    set(env::kHost, host.name);
    set(env::kRestart, facts.restart);
    if (facts.host_timeout.count() > 0) set(env::kHostTimeout, static_cast<int>(facts.host_timeout.count()));
    if (!facts.tf_addresses.empty()) set(env::kTfConfig, tf_config(roles, facts.tf_addresses, process));
  }

 private:
  std::vector<std::string> all_;
};

}  // namespace

std::vector<std::string> rank_environment(const Plan& plan, const PlannedHost& host, int rank, const JobFacts& facts) {
  Assignments out;
  out.set(env::kRank, rank);
  out.set(env::kWorldSize, plan.world_size);
  out.set(env::kLocalRank, host.first_local + rank - host.first_rank);
  out.set(env::kLocalWorldSize, host.local_ranks);
  out.set(env::kMasterAddr, facts.master_address);
  out.set(env::kMasterPort, facts.master_port);
  out.set("GROUP_RANK", host.machine);
  out.set("GROUP_WORLD_SIZE", plan.machines);
  out.set("ROLE_RANK", rank);
  out.set("ROLE_WORLD_SIZE", plan.world_size);
  out.set("ROLE_NAME", "default");
  out.set("TORCHELASTIC_RUN_ID", facts.job_id);
  out.set("TORCHELASTIC_RESTART_COUNT", facts.restart);
  out.set("TORCHELASTIC_MAX_RESTARTS", facts.max_restarts);
  // Rank 0 opens torch's store at MASTER_PORT itself; nobody else listens there.
  out.set("TORCHELASTIC_USE_AGENT_STORE", "False");
  out.set_job(plan, host, rank, facts);
  // For keras.distribution.initialize(): where JAX's processes meet.
  out.set("KERAS_DISTRIBUTION_JOB_ADDRESSES", fmt::format("{}:{}", facts.master_address, facts.master_port));
  out.set("KERAS_DISTRIBUTION_NUM_PROCESSES", plan.world_size);
  out.set("KERAS_DISTRIBUTION_PROCESS_ID", rank);
  // All of them for each rank, so that LOCAL_RANK numbers them and GPUs of one host reach each other.
  if (!host.devices.empty()) out.set("CUDA_VISIBLE_DEVICES", fmt::format("{}", fmt::join(host.devices, ",")));
  return out.take();
}

std::vector<std::string> other_environment(const Plan& plan, const PlannedHost& host, int process,
                                           const JobFacts& facts) {
  Assignments out;
  out.set_job(plan, host, process, facts);
  if (plan.roles().role_of(process) == Role::Server) {
    out.set(env::kServerRestart, 0);
    out.set(env::kServersMayDie, facts.servers_may_die ? 1 : 0);
  }
  return out.take();
}

void remove_rank_variables(Environment& environment) {
  // Of a plan of one rank: what ranks are told and other processes are not.
  Environment ranks(rank_environment({1, 0, false, 1, {}}, {}, 0, {}));
  for (const std::string& of_all : other_environment({1, 1, false, 1, {}}, {}, 1, {}))
    ranks.remove(of_all.substr(0, of_all.find('=')));
  for (const auto& [name, value] : ranks.variables()) environment.remove(name);
  for (const std::string& of_horovod : horovod_environment({1, 0, false, 1, {}}, {}, 0))
    environment.remove(of_horovod.substr(0, of_horovod.find('=')));
}

std::string tf_config(const Roles& roles, const std::vector<std::string>& addresses, int process) {
  const bool chief = roles.servers > 0;
  const auto task_of = [&](int one) -> std::pair<const char*, int> {
    if (roles.role_of(one) == Role::Evaluator) return {"evaluator", 0};
    if (roles.role_of(one) == Role::Server) return {"ps", roles.number_of(one)};
    if (!chief) return {"worker", one};
    return one == 0 ? std::pair("chief", 0) : std::pair("worker", one - 1);
  };
  std::map<std::string, std::vector<std::string>> jobs;
  for (std::size_t i = 0; i < addresses.size(); ++i) jobs[task_of(static_cast<int>(i)).first].push_back(addresses[i]);
  const auto [type, index] = task_of(process);
  return ClusterSpec(jobs).to_tf_config(type, index);
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
