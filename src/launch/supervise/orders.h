// Orders to agents, and the data by which ranks find each other: rank 0's port, TensorFlow's tasks, and the contents of
// the job's store. Only this part changes the plan. One thread.
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

/// How often a job has begun, and what an epoch takes over from earlier ones. Shared by all epochs.
struct JobPast {
  explicit JobPast(const JobSpec& spec)
      : restarts(spec.max_restarts), servers(spec.server_restarts, spec.lost_servers) {}

  Restarts restarts;
  ServerLosses servers;
  std::optional<std::chrono::steady_clock::time_point> limit{};  ///< end of the job's time; set when ranks run
  // State for an elastic job whose workers all begin anew.
  Membership::Past members = {};
  int workers = 0;  ///< number of workers so far, since numbers are never reused
};

class Orders {
 public:
  /// All arguments outlive this.
  Orders(JobSetup& setup, AgentPool& agents, RunOutput& run, const net::Secret& secret, JobPast& past)
      : setup_(setup), agents_(agents), run_(run), secret_(secret), past_(past) {}

  /// Takes rank 0's port and opens the store. Throws cohort::Error.
  void open();
  std::uint16_t store_port() const { return store_->endpoint().tcp.port; }

  /// Returns true if each agent holds the ports for its ranks; otherwise asks the agents for them.
  bool have_ports();
  /// Takes an agent's answer. Returns whether all agents have their ports now.
  Result<bool> take_ports(AgentHandle& agent, LeasedPorts leased);

  /// Makes the plan from the ranks that agents say they take. Throws, also if no plan is possible.
  void settle_nodes();
  /// Notes the plan as the one that the job begins with.
  void note_first_plan();
  /// Sends StartJob to every agent that has processes to start.
  void give() const;
  /// Makes an agent that runs no ranks start `ranks` more of them, and adds them to the plan.
  void start_more(AgentHandle& agent, int ranks);
  /// Makes an agent that already runs ranks start one more. Returns its number.
  int start_one_more(AgentHandle& agent, int local_rank);

  /// Returns a plan over the usable hosts, for an elastic job whose ranks have failed or which lacks a host; nullopt if
  /// the hosts are too few.
  std::optional<Plan> plan_again(bool (*usable)(const AgentHandle&), const std::set<std::string>& barred) const;
  void take(const Plan& plan);
  /// Makes a plan without an agent that failed before anything was ordered. Returns false if the others are too few.
  bool plan_without(AgentHandle& agent, const std::set<std::string>& barred);

  /// Writes the membership record into an elastic job's store, and then marks it as valid. Throws cohort::Error.
  void write_members(rendezvous::Membership members);
  /// Publishes the epoch in which the members that were told to begin anew meet. Throws cohort::Error.
  void announce_epoch();
  /// Tells the processes that wait for a server that it has ended, and how: "exit code 0 after 3.1 s".
  void server_ended(int number, const std::string& how);

 private:
  JobFacts facts_for(const AgentHandle& agent) const;
  /// Returns the address of a host, as seen from the other hosts.
  std::string address_of(const AgentHandle& member) const;
  std::shared_ptr<store::Store> own_store() const;

  JobSetup& setup_;
  AgentPool& agents_;
  RunOutput& run_;
  const net::Secret& secret_;
  JobPast& past_;
  std::unique_ptr<store::StoreServer> store_;
  std::optional<PortLease> port_;
  int first_ranks_ = 0;  ///< number of ranks at the start, spares included
};

}  // namespace cohort::launch
