#include "launch/agent/router.h"

#include "base/log.h"
#include "net/interfaces.h"
#include "net/socket.h"

#include <utility>

namespace cohort::launch {
namespace {

/// While more bytes than this wait for the supervisor, children are not read. They are read again below half of it.
constexpr std::size_t kMostPassedOn = std::size_t{4} << 20;
/// A child's host that is silent for longer is reported to the supervisor; a host that is up answers each second.
constexpr auto kChildSilent = std::chrono::milliseconds(1500);
/// More addresses than this are not passed on in invitations.
constexpr std::size_t kMostRouterAddresses = 16;

}  // namespace

Router::Router(Loop& loop, const net::Secret& secret, std::chrono::milliseconds host_timeout)
    : loop_(loop), host_timeout_(host_timeout) {
  std::vector<sys::UniqueFd> listeners;
  listeners.push_back(value_or_throw(net::listen_everywhere(0)));
  port_ = value_or_throw(net::local_endpoint(listeners.front().get())).tcp.port;
  net::Acceptor::Options accepting;
  accepting.secret = secret;
  accepting.secure = control_options();
  accepting.on_refused = [](const net::Acceptor::Refusal& refused) {
    log::info("launch", "a connection to this router failed: {}", refused.why.what());
  };
  acceptor_ = std::make_unique<net::Acceptor>(std::move(listeners), std::move(accepting));
  entrance_ = Watch(loop_, acceptor_->fd());
  entrance_.on_readable([this] {
    while (acceptor_) {
      auto accepted = acceptor_->next();
      if (!accepted) break;
      on_accepted(*std::move(accepted));
    }
  });
  show_that_it_runs();
}

std::vector<std::string> Router::addresses() const {
  std::vector<std::string> all;
  for (const std::string& address : value_or_throw(net::offered_addresses())) {
    if (all.size() < kMostRouterAddresses) all.push_back(net::to_string(net::Address{address, port_}));
  }
  return all;
}

void Router::on_accepted(net::Acceptor::Accepted accepted) {
  auto message = decode(accepted.first);
  auto* const first = message ? std::get_if<Relayed>(&*message) : nullptr;
  if (first == nullptr || supervisor_ == nullptr) return;
  const int host = first->number.host;
  const std::uint64_t connection = ++connections_;
  const auto from = net::peer_endpoint(accepted.connection.fd());
  Child& child = children_[host];
  if (child.channel) closed_.push_back(std::move(child.channel));  // the agent has come again
  child.connection = connection;
  child.silent = false;
  child.channel = std::make_unique<Channel>(
      loop_, std::move(accepted.connection), [this, host](Message up) { pass_up(host, std::move(up)); },
      [this, host, connection](const std::optional<Error>& error) { on_closed(host, connection, error); });
  child.channel->watch_link(host_timeout_);
  child.channel->pause_reading(paused_);
  tell(host, ChildLink::State::Connected, from ? from->tcp.host : std::string());
  pass_up(host, std::move(*message));
}

void Router::pass_up(int host, Message message) {
  const auto* const relayed = std::get_if<Relayed>(&message);
  if (relayed != nullptr && relayed->number.host == host && supervisor_ != nullptr) supervisor_->send(message);
}

void Router::on_closed(int host, std::uint64_t connection, const std::optional<Error>& error) {
  const auto child = children_.find(host);
  if (child == children_.end() || child->second.connection != connection) return;
  closed_.push_back(std::move(child->second.channel));
  children_.erase(child);
  tell(host, ChildLink::State::Closed, error ? error->what() : std::string());
}

void Router::tell(int host, ChildLink::State state, std::string text) {
  if (supervisor_ != nullptr) supervisor_->send(ChildLink{host, state, std::move(text)});
}

void Router::pass_down(Relayed relayed) {
  const auto child = children_.find(relayed.number.host);
  if (child != children_.end()) child->second.channel->send(std::move(relayed));
}

void Router::pass_down(const RelayedToMany& relayed) {
  for (const MessageNumber& number : relayed.numbers) pass_down(Relayed{number, relayed.bytes});
}

void Router::close() {
  supervisor_ = nullptr;
  entrance_ = Watch();
  acceptor_.reset();
  runs_ = Timer();
  for (auto& [host, child] : children_) closed_.push_back(std::move(child.channel));
  children_.clear();
}

void Router::look() {
  closed_.clear();
  if (supervisor_ == nullptr) return;
  const std::size_t waiting = supervisor_->unsent_bytes();
  if (paused_ ? waiting >= kMostPassedOn / 2 : waiting < kMostPassedOn) return;
  paused_ = !paused_;
  for (auto& [host, child] : children_) child.channel->pause_reading(paused_);
}

void Router::show_that_it_runs() {
  std::vector<int> hosts;  // (a copy: sending may find a connection closed, which ends a child, or all)
  for (const auto& [host, child] : children_) hosts.push_back(host);
  for (const int host : hosts) {
    const auto child = children_.find(host);
    if (child == children_.end()) continue;
    const bool silent = child->second.channel->silence() > kChildSilent;
    const bool changed = silent != std::exchange(child->second.silent, silent);
    child->second.channel->send(RouterRuns{});
    if (changed) tell(host, silent ? ChildLink::State::Silent : ChildLink::State::Heard, {});
  }
  if (acceptor_) runs_ = Timer(loop_, kRouterRunsEvery, [this] { show_that_it_runs(); });
}

}  // namespace cohort::launch
