#include "base/env.h"
#include "cluster/detect.h"
#include "launch/agent.h"
#include "launch/job_setup.h"
#include "launch/port_lease.h"
#include "launch/step_meeting.h"
#include "launch/supervisor.h"
#include "net/interfaces.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace cohort::launch {
namespace {

/// Where the launchers of a job meet, and what lets them in.
struct Place {
  net::Secret secret;
  std::vector<net::Endpoint> supervisor;
  std::string shown;
  std::optional<PortLease> port;  ///< of node 0, where nobody has chosen one
};

Place place_by_hand(const NodeRole& role, const std::string& secret_file) {
  if (secret_file.empty()) {
    raise(
        ErrorCode::InvalidArgument,
        "{}: the launchers of one job prove a secret to each other, and none is given -- make one with `cohort secret "
        "FILE`, copy it to each node and name it there with --secret-file FILE or COHORT_SECRET_FILE; or start from "
        "one host, which needs none: `cohort run -H a:2,b:2 ...`",
        role.source);
  }
  return {value_or_throw(net::Secret::from_file(secret_file)), {{*role.master, {}}}, net::to_string(*role.master), {}};
}

Place place_in_step(const NodeRole& role, net::Deadline deadline) {
  std::optional<comm::JoinOffer> mine;
  std::optional<PortLease> port;
  if (role.rank == 0) {
    port = value_or_throw(PortLease::take(std::hash<std::string>{}(role.step->job)));
    mine = comm::JoinOffer{value_or_throw(net::Secret::generate()), {}};
    for (std::string& address : value_or_throw(net::offered_addresses()))
      mine->addresses.push_back({std::move(address), port->port()});
    if (mine->addresses.empty()) mine->addresses.push_back({"127.0.0.1", port->port()});
  }
  const auto offer = value_or_throw(meet_in_step(*role.step, cluster::current_environment(), mine, deadline));
  Place place{*offer.secret, {}, "task 0 of the step", std::move(port)};
  for (const net::Address& address : offer.addresses) place.supervisor.push_back({address, {}});
  return place;
}

int run_agent_of_node(const RunOptions& options, const JobSetup& setup, Place place) {
  const PlannedHost& here = setup.plan.hosts[static_cast<std::size_t>(options.node->rank)];
  AgentOptions agent;
  agent.supervisor = std::move(place.supervisor);
  agent.secret = place.secret;
  agent.host_index = options.node->rank;
  agent.elsewhere = true;
  agent.patient = true;
  agent.host_timeout = options.host_timeout;
  agent.connect_timeout = options.start_timeout;
  agent.nodes = options.node->count;
  agent.ranks = here.ranks;
  agent.own = order_for(setup, here, {});
  agent.place = place.shown;
  agent.quiet = options.quiet || options.json || options.node->step.has_value();  // srun shows what node 0 says
  // stdin may be anything; the connection alone is the lifeline. This pipe ends with us.
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) raise(ErrorCode::Unavailable, "pipe: {}", errno_text(errno));
  agent.lifeline_fd = ends[0];
  return run_agent(agent);
}

}  // namespace

int run_node(RunOptions options) {
  const NodeRole& role = *options.node;
  const JobSetup setup = set_up_job(options);  // what cannot be started here is told before anybody waits
  Place place = role.step ? place_in_step(role, net::deadline_in(options.start_timeout))
                          : place_by_hand(role, options.remote.secret_file);
  if (role.rank > 0) return run_agent_of_node(options, setup, std::move(place));
  options.remote.way = Way::Launcher;
  options.remote.secret = place.secret;
  options.remote.port = place.supervisor.front().tcp.port;
  if (!role.step) {
    options.remote.join = fmt::format("cohort run --nnodes {} --node-rank R --master {} --secret-file FILE -np N ...",
                                      role.count, place.shown);
  }
  return run_job(options);
}

}  // namespace cohort::launch
