#include "launch/crew.h"

#include "base/log.h"
#include "net/socket.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace cohort::launch {
namespace {

constexpr std::size_t kMostStrangers = 64;
/// For a stranger to say who it is.
constexpr auto kHelloLimit = std::chrono::seconds(5);

}  // namespace

Crew::Crew(Loop& loop, const net::Secret& secret, Events events)
    : loop_(loop),
      secret_(secret),
      events_(std::move(events)),
      listener_(value_or_throw(net::listen_on({{"127.0.0.1", 0}, {}}))) {
  listener_watch_ = Watch(loop_, listener_.get());
  listener_watch_.on_readable([this] { accept(); });
}

void Crew::start(const std::vector<PlannedHost>& hosts) {
  const net::Endpoint here = value_or_throw(net::local_endpoint(listener_.get()));
  for (const PlannedHost& host : hosts) {
    CrewMember& member = *members_.emplace_back(std::make_unique<CrewMember>());
    member.host = host;
    member.process = value_or_throw(starter_.start({host, here}, secret_));
    member.ended = Watch(loop_, member.process.process.pidfd.get());
    member.ended.on_readable([this, &member] {
      member.ended = Watch();
      member.process_gone = true;
      events_.on_process_ended(member);
    });
  }
}

void Crew::accept() {
  while (listener_) {
    auto socket = net::accept_one(listener_.get());
    if (!socket || !*socket) return;
    strangers_.remove_if([](const Stranger& stranger) { return stranger.leaving || stranger.channel == nullptr; });
    if (strangers_.size() >= kMostStrangers) continue;  // closes it
    auto connection =
        net::SecureConnection::with_secret(std::move(**socket), net::Role::Server, secret_, control_options());
    if (!connection) continue;
    Stranger& stranger = strangers_.emplace_back();
    stranger.channel = std::make_unique<Channel>(
        loop_, *std::move(connection),
        [this, &stranger](Message message) {
          if (const auto* hello = std::get_if<Hello>(&message)) on_hello(stranger, *hello);
        },
        [&stranger](const std::optional<Error>& error) {
          if (error) log::info("launch", "a connection to the supervisor failed: {}", error->what());
          stranger.leaving = true;
        });
    stranger.limit = Timer(loop_, kHelloLimit, [&stranger] { stranger.leaving = true; });
  }
}

void Crew::on_hello(Stranger& stranger, const Hello& hello) {
  const auto found = std::find_if(members_.begin(), members_.end(),
                                  [&hello](const auto& member) { return member->host.index == hello.host_index; });
  if (hello.protocol != kProtocol || found == members_.end() || (*found)->channel != nullptr) {
    if (hello.protocol != kProtocol) {
      events_.on_unfit(
          fmt::format("the agent of {} is Cohort {} (protocol {}), this is protocol {}: install one version everywhere",
                      hello.host, hello.version, hello.protocol, kProtocol));
    }
    return;
  }
  CrewMember& member = **found;
  member.channel = std::move(stranger.channel);
  // The channel is calling us at this moment; from the next message on it talks to the agent.
  member.channel->redirect(
      [this, &member](Message message) { events_.on_message(member, std::move(message)); },
      [this, &member](const std::optional<Error>& error) { events_.on_channel_closed(member, error); });
  stranger.limit = Timer();
  if (std::all_of(members_.begin(), members_.end(), [](const auto& each) { return each->channel != nullptr; })) {
    listener_watch_ = Watch();
    listener_.reset();
  }
  events_.on_joined(member);
}

void Crew::let_go() {
  for (const auto& member : members_) member->process.lifeline.reset();
}

void Crew::broadcast(const Message& message) {
  for (const auto& member : members_) {
    if (member->channel != nullptr) member->channel->send(message);
  }
}

bool Crew::all_started() const {
  return std::all_of(members_.begin(), members_.end(), [](const auto& member) { return member->started; });
}

bool Crew::all_ended() const {
  return std::all_of(members_.begin(), members_.end(), [](const auto& member) {
    return member->process_gone && (member->all_gone || member->channel == nullptr || member->channel->closed());
  });
}

std::string Crew::missing() const {
  std::string names;
  for (const auto& member : members_) {
    if (!member->started) names += (names.empty() ? "" : ", ") + member->host.name;
  }
  return names;
}

}  // namespace cohort::launch
