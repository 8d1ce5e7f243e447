// The messages between the supervisor and one agent where they go through another agent, the router. Each end numbers
// what it sends, and keeps it until the other end has it, since a router may be lost with what is under way in it: then
// the agent connects to the supervisor itself, and both send again what the other lacks. So no message is lost, and
// none is taken twice. Which agent is whose router follows from the number of agents alone. One thread.
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

/// Agents up to this number are connected to the supervisor; more of them form a tree of two levels.
inline constexpr std::size_t kMostDirect = 16;
/// Most children of a router. So a tree has up to 64 routers with up to 4,096 agents, and more routers beyond.
inline constexpr std::size_t kMostChildren = 64;

/// Returns for each of so many agents the position of its router; -1: it is connected to the supervisor itself.
std::vector<int> routers_of(std::size_t agents);

class NumberedMessages {
 public:
  explicit NumberedMessages(int host) : host_(host) {}

  /// Numbers a message, which is kept until the other end has it. To be sent now, if there is a connection.
  Relayed add(std::string bytes);
  /// Returns the message, if there is one and it has not come before. Fails with Corrupt if it cannot be decoded, or
  /// one before it has not come.
  Result<std::optional<Message>> take(const Relayed& relayed);
  /// Returns true if an acknowledgement should be sent, since little goes to the other end that has one with it.
  bool owes_acknowledgement() const noexcept;
  /// Says what has been received.
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
  std::uint64_t said_ = 0;      ///< what the other end was last told of received_
  std::size_t bytes_since_ = 0;
};

}  // namespace cohort::launch
