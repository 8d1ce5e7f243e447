// The supervisor's line to one agent: a connection of its own, or numbered messages through the connection of its
// router. A line outlives its connections: a child whose router is lost comes by itself. The agent pool owns lines, and
// decides when one is lost. One thread.
#pragma once

#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/numbered_messages.h"
#include "net/address.h"

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace cohort::launch {

class AgentLine {
 public:
  /// For an agent that is connected directly.
  AgentLine() = default;
  /// For an agent that may be behind a router.
  explicit AgentLine(int host) : numbers_(std::in_place, host) {}

  /// Sends now, or, without a connection, when the agent has come again.
  void send(const Message& message);
  /// Returns the time since the agent's host was last heard.
  std::chrono::milliseconds silence() const;

  /// Sets the connection. Numbered messages that the agent may lack are sent again.
  void connect(std::unique_ptr<Channel> own);
  /// Sends through this connection of the agent's router from now on.
  void connect(Channel& router, const std::string& address);
  /// Notes that there is no connection. Calls `given_up` if none comes within `limit`.
  void disconnect(Loop& loop, std::chrono::milliseconds limit, std::function<void()> given_up);
  /// Notes that the agent will not come. Calls `given_up` now if there is no connection.
  void give_up();
  /// Returns true if the line leads through this router.
  bool leads_through(const Channel& router) const noexcept { return own_ == nullptr && router_ == &router; }
  bool direct() const noexcept { return own_ != nullptr; }
  bool is_numbered() const noexcept { return numbers_.has_value(); }
  /// The connection of its own. Requires `direct()`.
  Channel& channel() const noexcept { return *own_; }
  /// Notes whether the router has not heard the child's host for longer than usual.
  void set_silent(bool silent) noexcept { silent_ = silent; }
  const std::string& address() const noexcept { return address_; }

  /// Returns the message, if there is one that has not come before.
  Result<std::optional<Message>> take(const Relayed& relayed);
  /// Numbers an encoded message, which the caller sends to the router.
  MessageNumber number(std::string bytes) { return numbers_->add(std::move(bytes)).number; }

 private:
  void pass(Relayed relayed);

  std::unique_ptr<Channel> own_;
  Channel* router_ = nullptr;
  std::optional<NumberedMessages> numbers_;
  std::string address_;
  bool silent_ = false;
  std::function<void()> on_given_up_;
  Timer given_up_;  ///< runs while there is no connection
};

}  // namespace cohort::launch
