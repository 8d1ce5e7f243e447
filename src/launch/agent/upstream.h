// Link from an agent and its parts to the supervisor: the connection, and the amount of output that is under way.
// Behind a router messages are numbered, so that they survive a change of connections. One thread.
#pragma once

#include "launch/messages.h"
#include "launch/numbered_messages.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace cohort::launch {

class Upstream {
 public:
  /// Replaces the earlier connection, if there was one; numbered messages that the supervisor may lack are sent again.
  void connect(std::unique_ptr<Channel> channel);
  bool connected() const noexcept { return channel_ != nullptr; }
  Channel& channel() noexcept { return *channel_; }
  /// Numbers all messages from now on. To be called before the first one.
  void number(int host) { numbers_.emplace(host); }

  /// Sends over the connection. Without one, numbered messages are kept for `connect`, others for `take_kept`.
  void send(Message message);
  std::vector<Message> take_kept() { return std::exchange(kept_, {}); }
  /// Takes what has come over the connection. Returns the supervisor's message; nullopt if it was none, or not new.
  Result<std::optional<Message>> take(Message message);
  /// Returns true if the supervisor keeps up with what was sent.
  bool has_room() const;

  /// Called when the supervisor has taken this much of the output. The readers of pipes bound the rest.
  void taken(std::uint64_t bytes);
  std::size_t unacknowledged() const noexcept { return unacknowledged_; }

  /// Called when the supervisor is gone: output is dropped from now on.
  void lose();
  bool lost() const noexcept { return lost_; }

 private:
  std::unique_ptr<Channel> channel_;
  std::unique_ptr<Channel> before_;  ///< may be in its handler when it is replaced
  std::optional<NumberedMessages> numbers_;
  std::vector<Message> kept_;
  std::size_t unacknowledged_ = 0;
  bool lost_ = false;
};

}  // namespace cohort::launch
