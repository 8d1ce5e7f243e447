#include "launch/supervise/orders.h"

#include "launch/plan/plan.h"
#include "launch/start/hosts.h"
#include "rendezvous/place.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>
#include <vector>

namespace cohort::launch {
namespace {

/// Time limit of connecting to the job's store, which is in this process.
constexpr auto kStoreTime = std::chrono::seconds(10);

/// Returns true if the agent's address is known.
bool is_there(const AgentHandle& agent) { return agent.host.local || AgentPool::is_connected(agent); }

/// Returns the number of tasks that a host has in TF_CONFIG's cluster.
int tasks_of(const PlannedHost& host) { return host.ranks + host.servers; }

}  // namespace

void Orders::open() {
  port_ = value_or_throw(PortLease::take(std::hash<std::string>{}(run_.state().job_id)));
  store::StoreServerOptions options;
  options.secret = secret_;
  options.expected = static_cast<std::size_t>(setup_.plan.world_size) + 8 * setup_.plan.hosts.size();
  if (goes_elsewhere(setup_.plan)) options.endpoint = agents_.open_endpoint();
  store_ = std::make_unique<store::StoreServer>(options);
  run_.state().master_port = port_->port();
  if (!says_itself(setup_.plan.method)) first_ranks_ = setup_.plan.world_size;
}

bool Orders::have_ports() {
  if (!setup_.spec.tf_config) return true;
  for (const auto& member : agents_.members()) member->channel->send(LeasePorts{tasks_of(member->host)});
  return false;
}

Result<bool> Orders::take_ports(AgentHandle& agent, LeasedPorts leased) {
  const auto wanted = static_cast<std::size_t>(tasks_of(agent.host));
  if (leased.ports.size() > wanted) return false;
  agent.ports = std::move(leased.ports);
  if (agent.ports.size() < wanted)
    return fail(ErrorCode::Unavailable, "--tf-config: {}: {}", agent.host.name, leased.why);
  return std::ranges::all_of(agents_.members(), [](const auto& member) {
    return member->ports.size() == static_cast<std::size_t>(tasks_of(member->host));
  });
}

void Orders::settle_nodes() {
  Plan whole = setup_.plan;
  whole.hosts.clear();
  int ranks = 0;
  if (whole.method == StartMethod::Owner) agents_.sort_by_host();
  for (const auto& member : agents_.members()) {
    whole.hosts.push_back(member->host);
    ranks += member->host.slots;
  }
  check_first_ranks(setup_.spec, ranks);
  setup_.plan = value_or_throw(make_plan(std::move(whole), ranks, setup_.spec));
  for (std::size_t i = 0; i < setup_.plan.hosts.size(); ++i) agents_.members()[i]->host = setup_.plan.hosts[i];
}

void Orders::note_first_plan() {
  first_ranks_ = std::max(first_ranks_, setup_.plan.world_size);
  const auto first = std::ranges::find_if(agents_.members(), [](const auto& member) { return !member->lost; });
  run_.state().master_port = facts_for(**first).master_port;
}

JobFacts Orders::facts_for(const AgentHandle& agent) const {
  JobFacts facts;
  facts.job_id = run_.state().job_id;
  facts.run_folder = run_.folder().path;
  // Even for local agents, the address is the one that other hosts see, so that servers here know where to listen.
  const std::string here = agent.host.local ? address_of(agent) : AgentPool::own_address(agent).host;
  facts.store = net::to_string(net::Address{here, store_port()});
  // Takes rank 0's host, as seen from the other hosts; in an elastic job, the first host whose address is known.
  const auto found = std::ranges::find_if(agents_.members(), [](const auto& member) { return is_there(*member); });
  const AgentHandle& first = found != agents_.members().end() ? **found : agent;
  facts.master_port = first.host.local ? port_->port() : first.free_port;
  facts.master_address = address_of(first);
  // Addresses are in the order of the plan's Roles: all ranks, then all servers.
  std::vector<std::string> servers;
  for (const auto& member : agents_.members()) {
    for (std::size_t i = 0; i < member->ports.size(); ++i) {
      const bool is_rank = i < static_cast<std::size_t>(member->host.ranks);
      (is_rank ? facts.tf_addresses : servers)
          .push_back(net::to_string(net::Address{address_of(*member), static_cast<std::uint16_t>(member->ports[i])}));
    }
  }
  facts.tf_addresses.insert(facts.tf_addresses.end(), servers.begin(), servers.end());
  facts.log_folder = run_.state().log_folder;
  facts.restart = past_.restarts.done();
  facts.max_restarts = past_.restarts.most();
  facts.first_worker = past_.workers;
  const JobSpec& spec = setup_.spec;
  if (setup_.plan.least > 0) facts.elastic = patience_of(spec.elastic);
  facts.servers_may_die = spec.server_restarts > 0 || spec.lost_servers > 0;
  if (spec.host_timeout != kHostTimeout)
    facts.host_timeout = std::chrono::ceil<std::chrono::seconds>(spec.host_timeout);
  return facts;
}

std::string Orders::address_of(const AgentHandle& member) const {
  for (const auto& other : agents_.members()) {
    if (member.host.local && !other->host.local && is_there(*other)) return AgentPool::own_address(*other).host;
  }
  return AgentPool::agent_address(member).host;
}

void Orders::give() const {
  for (const auto& each : agents_.members()) {
    if (each->host.processes() > 0) each->channel->send(order_for(setup_, each->host, facts_for(*each)));
  }
}

void Orders::start_more(AgentHandle& agent, int ranks) {
  Plan& plan = setup_.plan;
  PlannedHost host = agent.host;
  host.first_rank = plan.world_size;
  host.ranks = host.local_ranks = ranks;
  host.machine = plan.machines++;
  plan.world_size += ranks;
  plan.hosts.push_back(host);
  agent.host = std::move(host);
  agent.started = agent.all_gone = false;
  agent.channel->send(order_for(setup_, agent.host, facts_for(agent)));
}

int Orders::start_one_more(AgentHandle& agent, int local_rank) {
  Plan& plan = setup_.plan;
  PlannedHost host = agent.host;
  host.first_rank = plan.world_size;
  host.ranks = 1;
  host.first_local = local_rank;
  host.local_ranks = std::max(host.local_ranks, local_rank + 1);
  ++plan.world_size;
  plan.hosts.push_back(host);
  agent.channel->send(StartMore{order_for(setup_, host, facts_for(agent)).workers.front()});
  return host.first_rank;
}

std::optional<Plan> Orders::plan_again(bool (*usable)(const AgentHandle&), const std::set<std::string>& barred) const {
  const JobSpec& spec = setup_.spec;
  Plan plan = setup_.plan;
  plan.hosts.clear();
  std::vector<int> agents;  // by position in plan.hosts
  int slots = 0;
  for (const auto& member : agents_.members()) {
    if (!usable(*member) || barred.contains(member->host.name)) continue;
    PlannedHost host = member->host;
    host.part_of.clear();
    // (Later orders may have had fewer ranks than the first.)
    for (const PlannedHost& before : setup_.plan.hosts) {
      if (before.index == host.index) host.slots = std::max(host.slots, before.ranks);
    }
    host.slots = std::min(host.slots, kMostProcesses - slots);
    slots += host.slots;
    agents.push_back(host.index);
    plan.hosts.push_back(std::move(host));
  }
  const int most = plan.method == StartMethod::Launcher ? slots : std::min(slots, first_ranks_);
  if (most < plan.least) return std::nullopt;
  plan.spares = std::clamp(most - (first_ranks_ - spec.elastic.spares), 0, spec.elastic.spares);
  Plan next = value_or_throw(make_plan(std::move(plan), most, spec));
  for (PlannedHost& host : next.hosts) host.index = agents[static_cast<std::size_t>(host.index)];
  return next;
}

void Orders::take(const Plan& plan) {
  for (const auto& member : agents_.members()) member->host.ranks = member->host.local_ranks = 0;
  for (const PlannedHost& host : plan.hosts) agents_.members()[static_cast<std::size_t>(host.index)]->host = host;
  setup_.plan = plan;
}

bool Orders::plan_without(AgentHandle& agent, const std::set<std::string>& barred) {
  agent.lost = true;
  const auto plan = plan_again([](const AgentHandle& member) { return !member.lost; }, barred);
  agent.lost = plan.has_value();
  if (!plan) return false;
  agent.all_gone = agent.started = true;
  AgentPool::kill(agent);
  take(*plan);
  return true;
}

std::shared_ptr<store::Store> Orders::own_store() const {
  return store::connect_tcp_store("127.0.0.1", store_port(), secret_, net::deadline_in(kStoreTime));
}

void Orders::write_members(rendezvous::Membership members) {
  past_.members.next_epoch = members.epoch + 1;
  for (rendezvous::Member& member : members.members) member.worker += past_.workers;
  const auto store = own_store();
  store->set(rendezvous::membership_key(members.epoch), rendezvous::encode(members));
  store->set(store::kEpochKey, std::to_string(members.epoch));
}

void Orders::announce_epoch() { own_store()->set(store::kEpochKey, std::to_string(past_.restarts.done())); }

void Orders::server_ended(int number, const std::string& how) {
  const int epoch = past_.restarts.done();
  store_->set_if_absent(rendezvous::ended_key(epoch, number), how);
  store_->set_if_absent(rendezvous::server_key(epoch, number), std::string(rendezvous::kEndedBefore));
}

}  // namespace cohort::launch
