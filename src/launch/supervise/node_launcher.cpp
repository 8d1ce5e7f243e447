#include "base/env.h"
#include "base/log.h"
#include "launch/agent/agent.h"
#include "launch/plan/rank_environment.h"
#include "launch/start/invitation.h"
#include "launch/supervise/supervisor.h"
#include "net/interfaces.h"
#include "net/socket.h"
#include "rendezvous/detect.h"

#include <fcntl.h>
#include <unistd.h>

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <optional>
#include <thread>
#include <utility>

namespace cohort::launch {
namespace {

/// Time to tell node 0 that nothing can be started here.
constexpr auto kTellingTime = std::chrono::seconds(10);
constexpr auto kLookAgain = std::chrono::milliseconds(200);

/// The endpoint at which the launchers of a job meet, and the secret that admits them.
struct Place {
  net::Secret secret;
  std::vector<net::Endpoint> supervisor;
  std::string shown;
  std::optional<PortLease> port;  ///< port of node 0, if nobody has chosen one
};

/// Determines which node this is, if no option says it: on the host of the meeting endpoint, the first launcher to come
/// is node 0, and holds the port.
std::optional<PortLease> settle_rank(NodeRole& role, net::Deadline deadline) {
  auto here = net::is_local_host(role.master->host, deadline);
  // A name may become known only a while after the hosts are up, as in pods.
  while (!here && !net::passed(deadline)) {
    std::this_thread::sleep_for(kLookAgain);
    here = net::is_local_host(role.master->host, deadline);
  }
  if (!value_or_throw(std::move(here))) return std::nullopt;
  auto port = PortLease::of(role.master->port);
  if (!port) return std::nullopt;
  role.rank = 0;
  return *std::move(port);
}

Place place_by_hand(const NodeRole& role) {
  if (role.secret_file.empty()) {
    raise(ErrorCode::InvalidArgument,
          "{}: the launchers of one job prove a secret to each other, and none is given -- make one with `cohort "
          "secret FILE`, copy it to each node and name it there with --secret-file FILE or COHORT_SECRET_FILE{}",
          role.source, role.described ? "" : "; or start from one host, which needs none: `cohort run -H a:2,b:2 ...`");
  }
  return {
      value_or_throw(net::Secret::from_file(role.secret_file)), {{*role.master, {}}}, net::to_string(*role.master), {}};
}

Place place_in_step(const NodeRole& role, net::Deadline deadline) {
  std::optional<rendezvous::InitOffer> mine;
  std::optional<PortLease> port;
  if (role.rank == 0) {
    port = value_or_throw(PortLease::take(std::hash<std::string>{}(role.step->job)));
    mine = rendezvous::InitOffer{value_or_throw(net::Secret::generate()), {}};
    for (std::string& address : value_or_throw(net::offered_addresses()))
      mine->addresses.push_back({std::move(address), port->port()});
    if (mine->addresses.empty()) mine->addresses.push_back({"127.0.0.1", port->port()});
  }
  const auto offer = value_or_throw(meet_in_step(*role.step, rendezvous::current_environment(), mine, deadline));
  Place place{*offer.secret, {}, "task 0 of the step", std::move(port)};
  for (const net::Address& address : offer.addresses) place.supervisor.push_back({address, {}});
  return place;
}

JobResult run_agent_of_node(const JobSpec& spec, const Plan& plan, AgentOptions agent, Place place) {
  agent.supervisor = std::move(place.supervisor);
  agent.secret = place.secret;
  agent.host_index = plan.node->rank;
  agent.elsewhere = true;
  agent.patient = true;
  agent.host_timeout = spec.host_timeout;
  agent.connect_timeout = start_timeout_of(spec, plan);
  agent.nodes = plan.node->count;
  agent.nodes_id = plan.node->id;
  agent.place = place.shown;
  agent.quiet = spec.quiet || spec.json || plan.node->step.has_value();  // srun already shows node 0's output
  agent.lifeline_fd = -1;                                                // stdin need not be a lifeline
  return {run_agent(agent)};
}

Place place_of(const JobSpec& spec, const Plan& plan) {
  return plan.node->step ? place_in_step(*plan.node, net::deadline_in(start_timeout_of(spec, plan)))
                         : place_by_hand(*plan.node);
}

/// Returns the options of this node's agent, including the order of what to start.
AgentOptions agent_of(const JobSpec& spec, const Plan& plan) {
  const JobSetup setup = set_up_job(spec, plan);
  const PlannedHost& here = setup.plan.hosts[static_cast<std::size_t>(std::max(0, plan.node->rank))];
  AgentOptions agent;
  agent.ranks = here.ranks;
  agent.own = order_for(setup, here, {});
  return agent;
}

/// Tells node 0 that this node cannot do its part, so that the others need not wait.
JobResult tell_why_not(JobSpec spec, const Plan& plan, const std::string& why) {
  fmt::print(stderr, "cohort: {}\n", why);
  spec.start_timeout = std::min<std::chrono::milliseconds>(start_timeout_of(spec, plan), kTellingTime);
  spec.quiet = true;
  AgentOptions agent;
  agent.ranks = 1;
  agent.own.emplace();
  agent.unable = why;
  try {
    (void)run_agent_of_node(spec, plan, std::move(agent), place_of(spec, plan));
  } catch (const Error& error) {
    log::info("launch", "node 0 is not told: {}", error.what());
  }
  return {kCannotStartStatus};
}

}  // namespace

JobResult run_node(const JobSpec& spec, Plan plan) {
  NodeRole& role = *plan.node;
  std::optional<PortLease> lease;
  if (role.rank == kRankAsTheyCome) lease = settle_rank(role, net::deadline_in(start_timeout_of(spec, plan)));
  if (role.rank != 0) {
    std::optional<AgentOptions> agent;
    try {
      agent = agent_of(spec, plan);
    } catch (const Error& error) {
      return tell_why_not(spec, plan, error.what());
    }
    return run_agent_of_node(spec, plan, *std::move(agent), place_of(spec, plan));
  }
  (void)set_up_job(spec, plan);  // reports what cannot be started here before anybody waits
  const Place place = place_of(spec, plan);
  role.secret = place.secret;
  role.port = place.supervisor.front().tcp.port;
  if (!role.step) {
    role.join = fmt::format(
        "cohort run --nnodes {} {} --secret-file FILE -np N ...",
        role.least > 0 ? fmt::format("{}:{}", role.least, role.count) : std::to_string(role.count),
        lease ? "--rdzv-endpoint " + place.shown
              : fmt::format("--node-rank R --master-addr {} --master-port {}", role.master->host, role.master->port));
  }
  return run_job(spec, std::move(plan));
}

}  // namespace cohort::launch
