// The router in an agent: the agents of other hosts, its children, reach the supervisor through its connection. It
// passes on their messages undecoded and in order, and tells the supervisor what becomes of their connections. It
// buffers little, since it reads nothing from children while its own connection is full. One thread.
#pragma once

#include "launch/loop.h"
#include "launch/messages.h"
#include "net/acceptor.h"
#include "net/secret.h"

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// How often a router shows its children that it runs, and how many of these messages may be missing.
inline constexpr std::chrono::milliseconds kRouterRunsEvery{500};
inline constexpr int kMostMissing = 4;

class Router {
 public:
  /// Listens for children. Throws Unavailable if it cannot. A child's host that is silent for `host_timeout` is lost.
  Router(Loop& loop, const net::Secret& secret, std::chrono::milliseconds host_timeout);
  Router(const Router&) = delete;
  Router& operator=(const Router&) = delete;

  /// Returns the addresses at which children reach this.
  std::vector<std::string> addresses() const;
  /// Sets the connection to the supervisor, which has to outlive this or the next call.
  void connect(Channel& supervisor) noexcept { supervisor_ = &supervisor; }
  void pass_down(Relayed relayed);
  void pass_down(const RelayedToMany& relayed);
  /// Closes all connections: the supervisor is not reached through this any more.
  void close();
  bool empty() const noexcept { return children_.empty(); }
  /// To be called after each step of the loop.
  void look();

 private:
  struct Child {
    std::uint64_t connection = 0;
    std::unique_ptr<Channel> channel;
    bool silent = false;
  };

  void on_accepted(net::Acceptor::Accepted accepted);
  void on_closed(int host, std::uint64_t connection, const std::optional<Error>& error);
  void pass_up(int host, Message message);
  void tell(int host, ChildLink::State state, std::string text);
  void show_that_it_runs();

  Loop& loop_;
  const std::chrono::milliseconds host_timeout_;
  Channel* supervisor_ = nullptr;
  std::uint16_t port_ = 0;
  std::unique_ptr<net::Acceptor> acceptor_;
  Watch entrance_;
  Timer runs_;
  std::uint64_t connections_ = 0;  ///< number of the last one
  bool paused_ = false;
  std::map<int, Child> children_;                 ///< by host
  std::vector<std::unique_ptr<Channel>> closed_;  ///< may be in their handlers
};

}  // namespace cohort::launch
