// The transport interface below the algorithms between hosts: moves bytes between ranks that do not share memory.
// Frames are queued and never block; a frame of an operation is matched by (peer, operation, tag) and read directly
// into the posted memory. A connection is made when a pair first needs one. All functions may be called from any
// thread; handlers run under `mutex()`, which is recursive, on the thread that drives the transport.
#pragma once

#include "base/result.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::transport {

/// Reason given for a peer that was lost because it left.
inline constexpr std::string_view kLeft = "it left the world (its communicator was destroyed)";

/// A frame to be sent to a peer. The frame and its bytes belong to the caller, who keeps them until `done`.
struct Outgoing {
  int peer = -1;
  std::uint64_t operation = 0;
  std::uint32_t tag = 0;
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  /// The frame has to be authenticated, because a program may load its bytes as code. Both ends set this.
  bool authenticated = false;
  std::atomic<bool> done{false};  ///< the system has taken the whole frame
};

/// Destination of a peer's frame. This object and the memory belong to the caller, who keeps them until `done`.
struct Incoming {
  int peer = -1;
  std::uint64_t operation = 0;
  std::uint32_t tag = 0;
  std::byte* to = nullptr;
  std::size_t room = 0;   ///< a longer frame is an error of the peer
  std::size_t bytes = 0;  ///< the frame's length, after it has begun to arrive
  bool authenticated = false;
  std::atomic<bool> done{false};
};

/// Handlers for arrivals that need no posted receive. Called under the transport's mutex: be quick, do not wait.
class TransportEvents {
 public:
  virtual ~TransportEvents() = default;
  /// Handles a message; messages arrive in the order of the peer's calls of `message`.
  virtual void on_message(int peer, std::uint32_t tag, std::string_view bytes) = 0;
  /// Handles the peer's report of why the world has ended.
  virtual void on_ended(int peer, std::string_view bytes) = 0;
  /// Handles a peer that violated the wire protocol.
  virtual void on_broken(int peer, std::string_view why) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::recursive_mutex& mutex() noexcept = 0;
  /// True if all frames are authenticated, so that any frame changed in transit is refused, even without
  /// `Outgoing::authenticated`.
  virtual bool authenticates_all() const noexcept = 0;
  /// Begins to connect, if there is no connection. The loss of the peer is noticed only over a connection.
  virtual void connect(int peer) = 0;
  /// Begins to send `frame`. After `end`, the frame is `done` immediately.
  virtual void send(Outgoing& frame) = 0;
  /// Posts memory for a frame.
  virtual void receive(Incoming& frame) = 0;
  /// Sends a copy of `bytes` to the peer's `on_message`.
  virtual void message(int peer, std::uint32_t tag, std::string_view bytes) = 0;

  /// Does what is possible without blocking. Returns true if anything was done.
  virtual bool progress() = 0;
  /// Sleeps until there may be something to do, at most for `longest`; then makes progress.
  virtual void sleep(std::chrono::milliseconds longest) = 0;
  /// Ends a `sleep` of another thread.
  virtual void wake() noexcept = 0;

  /// Returns the reason why the peer can send nothing more, e.g. "its connection was closed"; nullopt if it may still
  /// send.
  virtual std::optional<std::string> lost(int peer) = 0;
  /// Returns the peers to which there is a connection, or an attempt at one.
  virtual std::vector<int> connected() = 0;
  /// Returns the peers, in ascending order, that have not sent a posted frame of an operation, or have not taken a sent
  /// one.
  virtual std::vector<int> owing() = 0;
  /// Discards stored frames of operations up to `operation`.
  virtual void forget(std::uint64_t operation) = 0;

  /// Ends all traffic of operations; the memory of frames is not touched any more. `bytes` is sent to all peers,
  /// including those that connect later.
  virtual void end(std::string_view bytes) = 0;
  /// True if nothing is queued for reachable peers.
  virtual bool flushed() = 0;
  /// Tells all connected peers that this rank leaves, and closes all connections.
  virtual void leave() = 0;
};

}  // namespace cohort::transport
