// Messages between the supervisor and an agent that go through another agent, its router. Each end numbers what it
// sends, and keeps it until the other end has it, since messages that are in a router are lost with it. The agent then
// connects to the supervisor itself, and both ends send again what the other lacks. So no message is lost, and none is
// taken twice. Which agent is whose router follows only from the number of agents. One thread.
#pragma once

#include "base/result.h"
#include "launch/messages.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// Up to this many agents are connected to the supervisor itself; more agents form a tree of two levels.
inline constexpr std::size_t kMostDirect = 16;
/// Most children of a router. So a tree has up to 64 routers with up to 4,096 agents, and more routers beyond.
inline constexpr std::size_t kMostChildren = 64;

/// Returns, for this number of agents, the position of each one's router; -1: it is connected to the supervisor.
std::vector<int> routers_of(std::size_t agents);

class NumberedMessages {
 public:
  explicit NumberedMessages(int host) : host_(host) {}

  /// Numbers a message, and keeps it until the other end has it. The caller sends it, if there is a connection.
  Relayed add(std::string bytes);
  /// Returns the message, if there is one and it is new. Fails with Corrupt if it cannot be decoded, or if an earlier
  /// message is missing.
  Result<std::optional<Message>> take(const Relayed& relayed);
  /// Returns true if an acknowledgement should be sent, since few messages go to the other end that would carry one.
  bool owes_acknowledgement() const noexcept;
  /// Returns a message that only says what has been received.
  Relayed acknowledgement();
  /// Returns what is to be sent over a new connection: an acknowledgement, then all that the other end may lack.
  std::vector<Relayed> again();
  /// Size of the messages that the other end may lack.
  std::size_t kept_bytes() const noexcept { return kept_bytes_; }

 private:
  MessageNumber number(std::uint64_t number);

  const int host_;
  std::deque<std::string> kept_;
  std::size_t kept_bytes_ = 0;
  std::uint64_t sent_ = 0;      ///< number of the last message
  std::uint64_t received_ = 0;  ///< number of the last message from the other end
  std::uint64_t said_ = 0;      ///< the value of received_ that the other end was last told
  std::size_t bytes_since_ = 0;
};

}  // namespace cohort::launch
