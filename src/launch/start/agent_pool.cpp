#include "launch/start/agent_pool.h"

#include "base/log.h"
#include "base/process.h"
#include "launch/start/hosts.h"
#include "net/http.h"
#include "net/interfaces.h"
#include "net/socket.h"

#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <map>

namespace cohort::launch {
namespace {

/// Pending connections beyond this number, plus some for each host, are dropped.
constexpr std::size_t kMostPending = 128;
/// Commands that may start agents at the same time: more would meet sshd's limits and slow down this host.
constexpr std::size_t kMostStarting = 64;
/// Attempts to start an agent by a command that fails for a transient reason.
constexpr int kMostStarts = 3;
/// Time for a command to end after its agent, allowed twice: `srun` may wait long for a step that was killed.
constexpr auto kPartingTime = std::chrono::seconds(5);
/// Longest normal silence, since the kernel of a host that is up answers each second.
constexpr auto kSilent = std::chrono::milliseconds(1500);
/// Time for a child to connect to the supervisor itself, after its router has lost it, or after the router is lost.
/// Supervisor and child see that at about the same time.
constexpr auto kChildComes = std::chrono::milliseconds(500);
constexpr auto kChildrenCome = std::chrono::milliseconds(2000);
/// An agent that waits longer for its router is invited to the supervisor.
constexpr auto kRouterComes = std::chrono::seconds(5);
/// Number of missing hosts that a message names.
constexpr std::size_t kMostNamed = 4;

sys::UniqueFd listen(bool elsewhere, std::uint16_t port, StartMethod method) {
  if (!elsewhere) return value_or_throw(net::listen_on({{"127.0.0.1", port}, {}}));
  auto listener = net::listen_everywhere(port);
  if (!listener && method == StartMethod::Launcher) {
    raise(listener.error().code(),
          "node rank 0 cannot listen at port {}: {} -- does another job, or a second launcher of node rank 0, use it? "
          "Name another one with --master-port, or in --rdzv-endpoint HOST:PORT, on all nodes",
          port, listener.error().what());
  }
  return value_or_throw(std::move(listener));
}

}  // namespace

AgentPool::AgentPool(Loop& loop, const net::Secret& secret, const JobSpec& spec, const Plan& plan, int input_fd)
    : loop_(loop),
      secret_(secret),
      spec_(spec),
      method_(plan.method),
      node_(plan.node),
      may_grow_(plan.may_grow || plan.least > 0),
      input_fd_(input_fd) {
  std::vector<sys::UniqueFd> listeners;
  listeners.push_back(listen(goes_elsewhere(plan), node_ ? node_->port : spec_.listen, method_));
  here_ = value_or_throw(net::local_endpoint(listeners.front().get()));
  net::Acceptor::Options accepting;
  accepting.secret = secret;
  accepting.secure = control_options();
  accepting.on_refused = [this](const net::Acceptor::Refusal& refused) {
    log::info("launch", "a connection to the supervisor failed: {}", refused.why.what());
    // The peer has proved that it has the secret, so it is one of ours.
    if (refused.proven && refused.why.code() == ErrorCode::Corrupt) on_nonsense(refused.peer);
  };
  acceptor_.emplace(std::move(listeners), std::move(accepting));
  entrance_ = Watch(loop_, acceptor_->fd());
  entrance_.on_readable([this] {
    while (acceptor_) {
      auto accepted = acceptor_->next();
      if (!accepted) break;
      on_accepted(*std::move(accepted));
    }
  });
}

std::optional<AgentEvent> AgentPool::next_event() {
  if (events_.empty()) return std::nullopt;
  AgentEvent event = std::move(events_.front());
  events_.pop_front();
  if (std::holds_alternative<agent_event::ChannelClosed>(event.what)) event.agent->closed = true;
  return event;
}

void AgentPool::start(const std::vector<PlannedHost>& hosts) {
  for (const PlannedHost& host : hosts) {
    AgentHandle& member = *members_.emplace_back(std::make_unique<AgentHandle>());
    member.host = host;
  }
  acceptor_->set_most_pending(kMostPending + 8 * members_.size());
  for (const auto& member : members_) {
    if (member->host.local)
      start_local(*member);
    else if (!comes_by_itself(method_))
      to_start_.push_back(member.get());
  }
  if (!may_grow_) {
    const std::vector<int> routers = routers_of(to_start_.size());
    for (std::size_t i = 0; i < routers.size(); ++i) {
      if (routers[i] >= 0) to_start_[i]->router = to_start_[static_cast<std::size_t>(routers[i])];
    }
    std::stable_partition(to_start_.begin(), to_start_.end(),
                          [](const AgentHandle* member) { return member->router == nullptr; });
  }
  start_remote();
}

AgentHandle& AgentPool::add(PlannedHost host) {
  host.index = static_cast<int>(members_.size());
  AgentHandle& member = *members_.emplace_back(std::make_unique<AgentHandle>());
  member.host = std::move(host);
  acceptor_->set_most_pending(kMostPending + 8 * members_.size());
  try {
    if (member.host.local) start_local(member);
  } catch (const Error&) {
    member.process_gone = member.all_gone = true;
    throw;
  }
  if (!member.host.local && !comes_by_itself(method_)) to_start_.push_back(&member);
  start_remote();
  return member;
}

bool AgentPool::await_again(AgentHandle& member) {
  if (!acceptor_ || !comes_by_itself(method_) || method_ == StartMethod::Owner || member.host.local) return false;
  member.channel = nullptr;
  member.given_up = member.closed = false;
  return true;
}

void AgentPool::start_local(AgentHandle& member) {
  const int input = member.host.index == 0 ? input_fd_ : -1;
  member.process =
      value_or_throw(start_local_agent(member.host, {{"127.0.0.1", here_.tcp.port}, {}}, secret_, input, held_fd_));
  watch(member);
}

void AgentPool::watch(AgentHandle& member) {
  member.ended = Watch(loop_, member.process.process.pidfd.get());
  member.ended.on_readable([this, &member] { on_process_ended(member); });
}

void AgentPool::start_remote() {
  for (; !over_ && starting_ < kMostStarting && !to_start_.empty(); to_start_.pop_front()) {
    AgentHandle& member = *to_start_.front();
    if (auto started = start_remote(member); !started) {
      over_ = true;
      return note(&member, agent_event::Unfit{started.error().what()});
    }
    ++starting_;
  }
}

Result<void> AgentPool::start_remote(AgentHandle& member) {
  auto process = start_remote_agent(spec_, method_, member.host);
  if (!process) return tl::unexpected(process.error());
  ++member.starts;
  member.invited = Timer();
  member.remote.reset();  // refers to the old process
  member.process = *std::move(process);
  RemoteStart::Events events;
  events.on_announced = [this, &member] { invite(member); };
  events.on_unfit = [this, &member](std::string why) { note(&member, agent_event::Unfit{std::move(why)}); };
  events.on_complaint = [this, &member](std::string line) { note(&member, agent_event::Complaint{std::move(line)}); };
  member.remote = std::make_unique<RemoteStart>(loop_, member.process, std::move(events));
  watch(member);
  return {};
}

void AgentPool::invite(AgentHandle& member) {
  Invitation invitation = invitation_for(member.host.index);
  invitation.routes = std::ranges::any_of(members_, [&](const auto& other) { return other->router == &member; });
  if (AgentHandle* const router = member.router; router != nullptr) {
    const bool waits = router->channel == nullptr && !router->process_gone;
    if (waits && !member.invited) {
      member.invited = Timer(loop_, kRouterComes, [this, &member] { invite(member); });
      return;
    }
    invitation.router = router->routes;
  }
  member.invited = Timer();
  member.remote->invite(invitation);
}

Invitation AgentPool::invitation_for(int index) const {
  Invitation invitation{secret_, index, {}, spec_.host_timeout};
  for (const std::string& address : value_or_throw(net::offered_addresses()))
    invitation.supervisor.push_back({{address, here_.tcp.port}, {}});
  if (invitation.supervisor.empty()) invitation.supervisor.push_back({{"127.0.0.1", here_.tcp.port}, {}});
  return invitation;
}

bool AgentPool::somebody_is_silent() const {
  return std::ranges::any_of(members_, [](const auto& member) {
    return !member->host.local && member->channel != nullptr && member->channel->silence() > kSilent &&
           !member->given_up;
  });
}

bool AgentPool::start_again(AgentHandle& member) {
  if (over_ || member.channel != nullptr || member.starts >= kMostStarts || !is_transient(failed_start(member)))
    return false;
  if (!start_remote(member)) return false;  // the failure of the last command says why
  log::info("launch", "{} is started again on {}", start_method_name(method_), member.host.name);
  member.process_gone = false;
  member.exit_status.reset();
  return true;
}

void AgentPool::on_process_ended(AgentHandle& member) {
  member.ended = Watch();
  member.parting = Timer();
  member.process_gone = true;
  sys::ChildProcess& process = member.process.process;
  member.exit_status = sys::peek_exit_status(process.pid);
  ::waitpid(process.pid, nullptr, 0);
  process.pidfd.reset();
  if (member.remote) {
    member.remote->drain();
    if (start_again(member)) return;
    if (member.channel == nullptr) --starting_;
  }
  if (member.line) member.line->give_up();
  note(&member, agent_event::ProcessEnded{});
  start_remote();
}

void AgentPool::on_nonsense(const std::string& peer) {
  note(nullptr, agent_event::Unfit{fmt::format("what the agent at {} says is not understood: it is of another version "
                                               "of Cohort; this is {}; install one version everywhere",
                                               peer, own_announcement().version)});
}

void AgentPool::on_accepted(net::Acceptor::Accepted accepted) {
  auto message = decode(accepted.first);
  if (!message) return on_nonsense(accepted.connection.peer());
  if (auto* const hello = std::get_if<Hello>(&*message))
    return on_hello(nullptr, std::move(accepted.connection), std::move(*hello));
  const auto* const relayed = std::get_if<Relayed>(&*message);
  AgentHandle* const child = relayed != nullptr ? child_of(relayed->number.host) : nullptr;
  if (child == nullptr) return;  // its agent ends when it sees that
  if (child->process_gone) return;
  log::info("launch", "the agent of {} is connected without its router", child->host.name);
  if (!child->line) child->line = std::make_unique<AgentLine>(child->host.index);
  child->line->connect(make_channel(*child, std::move(accepted.connection)));
  child->line->channel().watch_link(spec_.host_timeout);
  on_relayed(*child, *relayed);
}

std::unique_ptr<Channel> AgentPool::make_channel(AgentHandle& member, net::SecureConnection connection) {
  return std::make_unique<Channel>(
      loop_, std::move(connection), [this, &member](Message message) { on_message(member, std::move(message)); },
      [this, &member](std::optional<Error> error) { on_closed(member, std::move(error)); });
}

void AgentPool::on_message(AgentHandle& member, Message message) {
  if (const auto* const relayed = std::get_if<Relayed>(&message)) return on_relayed(member, *relayed);
  if (const auto* const link = std::get_if<ChildLink>(&message)) return on_child_link(member, *link);
  note(&member, agent_event::Said{std::move(message)});
}

void AgentPool::on_closed(AgentHandle& member, std::optional<Error> error) {
  if (std::exchange(member.given_up, true)) return;
  note(&member, agent_event::ChannelClosed{std::move(error)});
  for (const auto& child : members_) {
    if (child->router == &member && child->line && child->line->leads_through(member.line->channel()))
      await(*child, kChildrenCome, fmt::format("its router, {}, is lost", member.host.name));
  }
}

AgentHandle* AgentPool::child_of(int host) const {
  const auto at = static_cast<std::size_t>(host);  // the hosts of a tree do not change
  AgentHandle* const child = at < members_.size() ? members_[at].get() : nullptr;
  const bool known = child != nullptr && child->router != nullptr && !child->given_up;
  return known && (!child->line || child->line->is_numbered()) ? child : nullptr;
}

void AgentPool::on_relayed(AgentHandle& through, const Relayed& relayed) {
  AgentHandle* const child = child_of(relayed.number.host);
  if (child == nullptr || !child->line || (child->router != &through && child != &through)) return;
  auto message = child->line->take(relayed);
  if (!message) return on_closed(*child, message.error());
  if (!*message) return;
  if (child->channel != nullptr) return note(child, agent_event::Said{*std::move(*message)});
  if (auto* const hello = std::get_if<Hello>(&**message)) on_hello(child, std::nullopt, std::move(*hello));
}

void AgentPool::on_child_link(AgentHandle& router, const ChildLink& link) {
  AgentHandle* const child = child_of(link.host);
  if (child == nullptr || child->router != &router) return;
  if (link.state == ChildLink::State::Connected) {
    if (!child->line) child->line = std::make_unique<AgentLine>(child->host.index);
    if (!child->line->direct()) child->line->connect(router.line->channel(), link.text);
  } else if (!child->line || !child->line->leads_through(router.line->channel())) {
    return;
  } else if (link.state == ChildLink::State::Closed) {
    await(*child, kChildComes, net::as_line(link.text));
  } else {
    child->line->set_silent(link.state == ChildLink::State::Silent);
  }
}

void AgentPool::await(AgentHandle& child, std::chrono::milliseconds limit, const std::string& why) {
  child.line->disconnect(loop_, limit, [this, &child, why] {
    on_closed(child, why.empty() ? std::nullopt : std::optional<Error>(Error(ErrorCode::PeerLost, why)));
  });
  if (child.process_gone) child.line->give_up();
}

void AgentPool::on_hello(AgentHandle* child, std::optional<net::SecureConnection> connection, Hello hello) {
  for (std::string* const text : {&hello.host, &hello.version, &hello.build, &hello.nodes_id})
    *text = net::as_line(*text);  // for messages
  const auto refuse = [&](std::string why) {
    const Message refused(Refused{std::move(why)});
    // A fresh socket takes this small message immediately.
    if (connection)
      static_cast<void>(connection->queue(encode(refused)));
    else
      child->line->send(refused);
  };
  Announcement there;
  there.protocol = hello.protocol;
  there.version = hello.version;
  there.build = hello.build;
  there.host = hello.host;
  there.path = fmt::format("pid {}", hello.pid);
  if (std::string why = difference(own_announcement(), there); !why.empty()) {
    refuse(why);
    return note(nullptr, agent_event::Unfit{std::move(why)});
  }
  if (std::string why = objection(hello); !why.empty()) return refuse(std::move(why));
  const bool late = hello.nodes > 0 && late_ones_come_;
  if (late) add({name_for(hello, static_cast<int>(members_.size())), hello.ranks, false});
  const auto found = late ? std::prev(members_.end()) : std::ranges::find_if(members_, [&hello](const auto& member) {
    if (hello.host_index < 0 && hello.nodes > 0) return member->channel == nullptr && !member->host.local;
    return hello.host_index >= 0 ? member->host.index == hello.host_index : same_host(member->host.name, hello.host);
  });
  // An agent started by hand on the launcher's own host may come before the launcher's own agent.
  const bool known = found != members_.end() && (child == nullptr || child == found->get());
  const bool taken = known && ((*found)->channel != nullptr || (hello.host_index < 0 && (*found)->host.local));
  if (!known || taken) {
    return refuse(fmt::format("{} {}; the job's hosts: {}", hello.host,
                              known ? "is there already" : "is none of the job's",
                              names_of([](const AgentHandle&) { return true; })));
  }
  AgentHandle& member = **found;
  if (hello.nodes > 0 && !late) {
    member.host.name = name_for(hello, member.host.index);
    member.host.slots = hello.ranks;
  } else if (method_ == StartMethod::Owner) {
    member.host.name = member.host.part_of = hello.host;
    member.host.slots = hello.ranks;
    member.host.devices = hello.devices;
  }
  if (connection) {
    member.line = std::make_unique<AgentLine>();
    member.line->connect(make_channel(member, *std::move(connection)));
    if (!member.host.local) member.line->channel().watch_link(spec_.host_timeout);
  }
  member.channel = member.line.get();
  member.free_port = hello.free_port;
  for (const std::string& text : hello.router) {
    if (const auto address = net::parse_address(text)) member.routes.push_back({*address, {}});
  }
  for (const auto& other : members_) {
    if (other->router == &member && other->invited) invite(*other);
  }
  if (member.remote) {
    member.remote->set_joined();
    if (!member.process_gone) --starting_;
  }
  // (A child whose router is lost comes again.)
  const bool tree = std::ranges::any_of(members_, [](const auto& other) { return other->router != nullptr; });
  if (all_joined() && !may_grow_ && !tree) close_entrance();
  note(&member, agent_event::Joined{});
  start_remote();
}

std::string AgentPool::objection(const Hello& hello) const {
  const bool launchers = method_ == StartMethod::Launcher;
  std::string number;
  if (hello.ranks < 1 || hello.ranks > kMostProcesses)
    number = fmt::format("{} wants {} ranks", hello.host, hello.ranks);
  if (method_ == StartMethod::Owner && hello.nodes == 0) return number;
  if (hello.nodes == 0 && !(launchers && hello.host_index < 0)) return {};
  if (!launchers)
    return fmt::format("{} is a launcher of its own, and this job was started without --nnodes", hello.host);
  if (hello.nodes == 0) return "this job has a launcher on each node: `cohort run --nnodes`, and not `cohort agent`";
  if (hello.nodes != node_->count) {
    return fmt::format("{} was started with --nnodes {}, and node rank 0 with {}", hello.host, hello.nodes,
                       node_->count);
  }
  if (hello.nodes_id != node_->id) {
    const auto said = [](const std::string& id) { return id.empty() ? "none" : id; };
    return fmt::format("{} is of another job: --rdzv-id there is {}, and that of node rank 0 is {}", hello.host,
                       said(hello.nodes_id), said(node_->id));
  }
  if (!number.empty()) return number;
  if (late_ones_come_) {
    const auto there = std::ranges::count_if(members_, [](const auto& one) { return is_usable(*one); });
    return there < node_->count ? std::string() : fmt::format("the job has its {} nodes", there);
  }
  const auto taken = std::ranges::find_if(members_, [&hello](const auto& member) {
    return member->host.index == hello.host_index && (member->channel != nullptr || member->host.local);
  });
  if (taken != members_.end())
    return fmt::format("node rank {} is {} already; each node has a --node-rank of its own", hello.host_index,
                       (*taken)->host.name);
  return {};
}

// Distinguishes nodes that are on the same host.
std::string AgentPool::name_for(const Hello& hello, int index) const {
  const bool known = std::ranges::any_of(members_, [&](const auto& one) {
    return one->host.name == hello.host && (one->host.local || !late_ones_come_ || is_usable(*one));
  });
  return known ? fmt::format("{} (node {})", hello.host, index) : hello.host;
}

void AgentPool::drop_lifelines() {
  for (const auto& member : members_) kill(*member);
}

void AgentPool::kill(AgentHandle& member) {
  member.process.lifeline.reset();
  // An ssh that has no connection, or whose host is gone, does not read its stdin. (It is not reaped before its end.)
  if (member.remote && !member.process_gone) ::kill(member.process.process.pid, SIGTERM);
}

net::Address AgentPool::own_address(const AgentHandle& member) {
  if (member.host.local) return {"127.0.0.1", 0};
  if (!member.line->direct() && member.router->line) return own_address(*member.router);
  return member.line->channel().own_address();
}

net::Address AgentPool::agent_address(const AgentHandle& member) {
  if (member.host.local) return {"127.0.0.1", 0};
  if (!member.line->direct()) return {member.line->address(), 0};
  return member.line->channel().peer_address();
}

FailedStart AgentPool::failed_start(const AgentHandle& member) const {
  FailedStart failed;
  failed.method = method_;
  failed.host = member.host.name;
  failed.command = remote_cohort(spec_);
  failed.ssh.clear();
  for (const std::string& word : spec_.ssh) failed.ssh += (failed.ssh.empty() ? "" : " ") + shell_quoted(word);
  if (member.remote == nullptr) return failed;
  failed.announced = member.remote->announced();
  if (member.process_gone) failed.status = member.exit_status;
  failed.noise = member.remote->noise();
  failed.complaints = member.remote->complaints();
  return failed;
}

std::string AgentPool::why_not(const AgentHandle& member) const {
  if (method_ == StartMethod::Launcher && node_->join.empty())
    return fmt::format("{} has not come: is `cohort run` every task's command, and does a firewall stand between?",
                       member.host.name);
  if (method_ == StartMethod::Owner) return fmt::format("{} has not come", member.host.name);
  if (comes_by_itself(method_)) return fmt::format("nobody has come as {}; {}", member.host.name, invitation());
  if (member.remote == nullptr) return fmt::format("the start of {} has to wait for others", member.host.name);
  return explain(failed_start(member));
}

std::string AgentPool::names_of(bool (*wanted)(const AgentHandle&)) const {
  std::string text;
  for (const auto& member : members_) {
    if (wanted(*member)) text += (text.empty() ? "" : ", ") + member->host.name;
  }
  return text;
}

std::string AgentPool::invitation() const {
  const bool launchers = method_ == StartMethod::Launcher;
  if (!comes_by_itself(method_) || method_ == StartMethod::Owner || all_joined() || (launchers && node_->join.empty()))
    return {};
  const std::string missing =
      names_of([](const AgentHandle& member) { return member.channel == nullptr && !member.host.local; });
  std::string addresses;
  for (const std::string& address : value_or_throw(net::offered_addresses()))
    addresses += (addresses.empty() ? "" : ",") + net::to_string(net::Address{address, here_.tcp.port});
  if (launchers) return fmt::format("waiting at {} for {}; on each: {}", addresses, missing, node_->join);
  return fmt::format("waiting for {}; on each: cohort agent --join {} --secret-file FILE --name HOST", missing,
                     addresses);
}

std::string AgentPool::how_ended(const AgentHandle& member) const {
  const auto& status = member.exit_status;
  return fmt::format("{}: {}", start_method_name(method_), status ? sys::to_string(*status) : "unknown status");
}

net::Endpoint AgentPool::open_endpoint() const {
  net::Endpoint endpoint = here_;
  endpoint.tcp.port = 0;
  return endpoint;
}

bool AgentPool::all_joined() const {
  return std::ranges::all_of(members_, [](const auto& member) { return member->channel != nullptr || member->lost; });
}

void AgentPool::broadcast(const Message& message, bool (*wanted)(const AgentHandle&)) {
  std::map<AgentHandle*, RelayedToMany> by_router;
  for (const auto& member : members_) {
    if (member->channel == nullptr || (wanted != nullptr && !wanted(*member))) continue;
    AgentHandle* const router = member->router;
    if (router == nullptr || !router->line || !member->line->leads_through(router->line->channel())) {
      member->channel->send(message);
      continue;
    }
    RelayedToMany& many = by_router[router];
    if (many.bytes.empty()) many.bytes = encode(message);
    many.numbers.push_back(member->line->number(many.bytes));
  }
  for (auto& [router, many] : by_router) router->line->channel().send(std::move(many));
}

Invitation AgentPool::invitation_for_owner() const { return invitation_for(0); }

void AgentPool::finish() {
  for (const auto& member : members_) {
    // A guard that was stopped with its agent does not see that its lifeline is gone.
    if (member->host.local && member->lost && !member->process_gone) end_command(*member, SIGKILL);
    if (member->channel == nullptr || (method_ == StartMethod::Launcher && !member->host.local)) continue;
    member->channel->send(Finish{});
    if (member->remote && !member->process_gone) end_command(*member, SIGTERM);
  }
}

void AgentPool::send_exit_status(int status) {
  if (method_ != StartMethod::Launcher) return;
  for (const auto& member : members_) {
    if (!member->host.local && member->channel != nullptr) member->channel->send(Finish{status});
  }
}

void AgentPool::close_entrance() {
  entrance_ = Watch();
  acceptor_.reset();
}

void AgentPool::drop_missing() {
  std::erase_if(members_, [](const auto& member) { return member->channel == nullptr; });
  if (!may_grow_) close_entrance();
}

void AgentPool::sort_by_host() {
  std::map<std::string, int> first;
  for (const auto& member : members_) first.emplace(member->host.part_of, member->host.index);
  const auto place = [&first](const auto& member) {
    return std::pair(first[member->host.part_of], member->host.index);
  };
  std::ranges::sort(members_, [&](const auto& a, const auto& b) { return place(a) < place(b); });
}

void AgentPool::begin_again() {
  over_ = false;
  for (const auto& member : members_)
    member->started = member->all_gone = member->host.processes() == 0 || !is_usable(*member);
}

void AgentPool::end_command(AgentHandle& member, int signal) {
  member.parting = Timer(loop_, kPartingTime, [this, &member, signal] {
    if (member.process_gone) return;
    if (signal == SIGTERM)
      note(&member, agent_event::Complaint{
                        fmt::format("nothing of the job is left there, and its {} has not ended after {} s; ending it",
                                    start_method_name(method_), kPartingTime.count())});
    ::kill(member.process.process.pid, signal);
    if (signal != SIGKILL) end_command(member, SIGKILL);
  });
}

bool AgentPool::all_started() const {
  return std::ranges::all_of(members_, [](const auto& member) { return member->started; });
}

namespace {

/// Agents that come by themselves are not processes of ours.
bool has_process(const AgentHandle& member) {
  return (member.host.local || member.remote != nullptr) && !member.process_gone;
}

}  // namespace

bool AgentPool::is_usable(const AgentHandle& member) { return is_connected(member) && !member.lost; }

bool AgentPool::nothing_runs() const {
  return std::ranges::all_of(members_, [](const auto& member) {
    return member->all_gone || !(has_process(*member) || is_connected(*member));
  });
}

bool AgentPool::can_go_on() const {
  return std::ranges::all_of(members_, [](const auto& member) { return member->all_gone && is_connected(*member); });
}

bool AgentPool::all_ended() const {
  return std::ranges::all_of(members_, [](const auto& member) {
    return !has_process(*member) && (member->all_gone || !is_connected(*member));
  });
}

std::string AgentPool::missing() const {
  std::string names = names_of([](const AgentHandle& member) { return !member.started; });
  std::size_t told = 0;
  for (const auto& member : members_) {
    if (member->channel != nullptr || member->host.local || member->lost) continue;
    if (++told == kMostNamed + 1) return names + "; ...";
    names += (told == 1 ? ": " : "; ") + why_not(*member);
  }
  return names;
}

}  // namespace cohort::launch
