// The way of an agent, and of all that it owns, to its supervisor: the connection, and how much output is on its way
// there. One thread.
#pragma once

#include "launch/messages.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace cohort::launch {

class Upstream {
 public:
  /// In the place of the connection before, if there was one.
  void connect(std::unique_ptr<Channel> channel) { channel_ = std::move(channel); }
  bool connected() const noexcept { return channel_ != nullptr; }
  Channel& channel() noexcept { return *channel_; }

  /// Once there is a connection; what is said before is for `take_kept`.
  void send(Message message);
  std::vector<Message> take_kept() { return std::exchange(kept_, {}); }
  /// The supervisor takes what was sent before.
  bool has_room() const;

  /// The supervisor has taken so much of the output; what it has not is bounded by whoever reads it.
  void taken(std::uint64_t bytes);
  std::size_t unacknowledged() const noexcept { return unacknowledged_; }

  /// It is gone: output goes nowhere any more.
  void lose();
  bool lost() const noexcept { return lost_; }

 private:
  std::unique_ptr<Channel> channel_;
  std::vector<Message> kept_;
  std::size_t unacknowledged_ = 0;
  bool lost_ = false;
};

}  // namespace cohort::launch
