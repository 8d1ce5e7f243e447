// Orders to agents, and what ranks need to find everything: rank 0's port, TensorFlow's tasks, and the contents of the
// job's store. Has the plan, and gives it to nobody to change. One thread.
#pragma once

#include "base/result.h"
#include "launch/health/server_losses.h"
#include "launch/health/verdict.h"
#include "launch/membership/membership.h"
#include "launch/plan/rank_environment.h"
#include "launch/start/agent_pool.h"
#include "launch/supervise/run_output.h"
#include "launch/supervise/supervisor.h"
#include "net/secret.h"
#include "net/served_store.h"
#include "net/store.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>

namespace cohort::launch {

/// How often a job has begun, and what of the beginnings before goes on. Shared by all epochs.
struct JobPast {
  explicit JobPast(const JobSpec& spec)
      : restarts(spec.max_restarts), servers(spec.server_restarts, spec.lost_servers) {}

  Restarts restarts;
  ServerLosses servers;
  std::optional<std::chrono::steady_clock::time_point> limit{};  ///< of the job's time, once ranks run
  // For an elastic job whose workers all begin anew.
  Membership::Past members = {};
  int workers = 0;  ///< that there were: numbers are never given again
};

class Orders {
 public:
  /// All outlive this.
  Orders(JobSetup& setup, AgentPool& agents, RunOutput& run, const net::Secret& secret, JobPast& past)
      : setup_(setup), agents_(agents), run_(run), secret_(secret), past_(past) {}

  /// Rank 0's port and the store are there. Throws cohort::Error.
  void open();
  std::uint16_t store_port() const { return store_->endpoint().tcp.port; }

  /// Each agent holds a port for each of its ranks. False: not yet, and those that do not were asked.
  bool have_ports();
  /// Takes an agent's answer. Returns whether all agents have their ports now.
  Result<bool> take_ports(AgentHandle& agent, LeasedPorts leased);

  /// The plan is what agents say that they take. Throws, also where it cannot be.
  void settle_nodes();
  /// The plan is what the job begins with.
  void note_first_plan();
  /// To all that start any.
  void give() const;
  /// So many ranks more are to be started by this agent, which runs none: it is ordered, and the plan has them.
  void start_more(AgentHandle& agent, int ranks);
  /// And one more by an agent that runs some. Returns its number.
  int start_one_more(AgentHandle& agent, int local_rank);

  /// For an elastic job whose ranks have failed, or a host of which is missing: for the hosts that there are. nullopt:
  /// they are too few.
  std::optional<Plan> plan_again(bool (*usable)(const AgentHandle&), const std::set<std::string>& barred) const;
  void take(const Plan& plan);
  /// An agent cannot be had, before anything was ordered: by a plan for the others. False: they are too few.
  bool plan_without(AgentHandle& agent, const std::set<std::string>& barred);

  /// Writes into an elastic job's store the record, and then that it counts. Throws cohort::Error.
  void write_members(rendezvous::Membership members);
  /// The members that have been told to begin anew meet in this epoch of the job's store. Throws cohort::Error.
  void announce_epoch();
  /// A server has ended while ranks run, and how: "exit code 0 after 3.1 s". Who waits for it is told.
  void server_ended(int number, const std::string& how);

 private:
  JobFacts facts_for(const AgentHandle& agent) const;
  /// Address of a host, as seen from the others.
  std::string address_of(const AgentHandle& member) const;
  std::shared_ptr<store::Store> own_store() const;

  JobSetup& setup_;
  AgentPool& agents_;
  RunOutput& run_;
  const net::Secret& secret_;
  JobPast& past_;
  std::unique_ptr<store::StoreServer> store_;
  std::optional<PortLease> port_;
  int first_ranks_ = 0;  ///< that the job had, with its spares
};

}  // namespace cohort::launch
