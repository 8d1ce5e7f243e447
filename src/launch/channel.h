// Messages between supervisor and agent over one authenticated connection, driven by a Loop. Belongs to one thread.
// The handlers may destroy the Channel's owner's other parts, but not the Channel itself: note it down and do so later.
#pragma once

#include "launch/loop.h"
#include "launch/messages.h"
#include "net/secure_connection.h"

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace cohort::launch {

/// Keeps the control connection's keys apart from the store's.
net::SecureOptions control_options();

class Channel {
 public:
  using OnMessage = std::function<void(Message)>;
  /// Called once; no error means that the other end closed in good order.
  using OnClosed = std::function<void(std::optional<Error>)>;

  Channel(Loop& loop, net::SecureConnection connection, OnMessage on_message, OnClosed on_closed);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// Takes effect at once or as soon as the other end reads; messages arrive in order. Does nothing once closed.
  void send(const Message& message);
  /// Since the other host's kernel was heard last. (After `watch_link`, it answers each second.)
  std::chrono::milliseconds silence() const;
  /// Closes with PeerLost once the other end's host has been silent so long.
  void watch_link(std::chrono::milliseconds longest);
  int fd() const noexcept { return connection_.fd(); }
  bool closed() const noexcept { return closed_; }
  std::size_t unsent_bytes() const noexcept { return connection_.unsent_bytes(); }
  const std::string& peer() const noexcept { return connection_.peer(); }

 private:
  void advance();
  void update_interest();
  void close(std::optional<Error> error);

  void look_at_link(std::chrono::milliseconds longest);

  Loop& loop_;
  net::SecureConnection connection_;
  Watch watch_;
  Timer begun_;  ///< for what has come before there was a Channel
  Timer link_;
  const OnMessage on_message_;
  const OnClosed on_closed_;
  bool closed_ = false;
  bool wants_write_ = false;
};

}  // namespace cohort::launch
