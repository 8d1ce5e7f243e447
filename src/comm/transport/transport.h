// Bytes between ranks that do not share memory: what the algorithms between hosts are written over. Frames are queued
// and never block; a frame of an operation is matched by (peer, operation, tag) and read straight into where it was
// posted. Connections are made when a pair first needs one. All functions may be called from any thread; handlers run
// under `mutex()`, which is recursive, on whichever thread drives the transport.
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

/// How a peer was lost that has only left.
inline constexpr std::string_view kLeft = "it left the world (its communicator was destroyed)";

/// A frame on its way to a peer. It and the bytes belong to the caller, who keeps them until `done`.
struct Outgoing {
  int peer = -1;
  std::uint64_t operation = 0;
  std::uint32_t tag = 0;
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  /// It has to go where nobody can change it unnoticed, as bytes do that a program may load as code. Both ends say so.
  bool authenticated = false;
  std::atomic<bool> done{false};  ///< the system has all of it
};

/// Destination of a peer's frame. It and the memory belong to the caller, who keeps them until `done`.
struct Incoming {
  int peer = -1;
  std::uint64_t operation = 0;
  std::uint32_t tag = 0;
  std::byte* to = nullptr;
  std::size_t room = 0;   ///< a longer frame is an error of the peer
  std::size_t bytes = 0;  ///< of the frame, once it has begun to arrive
  bool authenticated = false;
  std::atomic<bool> done{false};
};

/// Receives what comes without having been posted. Called under the transport's mutex: be quick, do not wait.
class TransportEvents {
 public:
  virtual ~TransportEvents() = default;
  /// A message, in the order of the peer's calls of `message`.
  virtual void on_message(int peer, std::uint32_t tag, std::string_view bytes) = 0;
  /// The peer says why the world has ended.
  virtual void on_ended(int peer, std::string_view bytes) = 0;
  /// The peer broke the rules of the wire.
  virtual void on_broken(int peer, std::string_view why) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::recursive_mutex& mutex() noexcept = 0;
  /// True if every frame that was changed on its way is refused, also if its sender did not ask for that.
  virtual bool authenticates_all() const noexcept = 0;
  /// Begins to connect, if there is no connection: then it is noticed when the peer goes.
  virtual void connect(int peer) = 0;
  /// Begins to send. After `end` it is done at once.
  virtual void send(Outgoing& frame) = 0;
  /// Says where a frame is to go.
  virtual void receive(Incoming& frame) = 0;
  /// Sends a copy of these bytes to the peer's `on_message`.
  virtual void message(int peer, std::uint32_t tag, std::string_view bytes) = 0;

  /// Does what can be done at once. True if anything was done.
  virtual bool progress() = 0;
  /// Sleeps until there may be something to do, at most this long; then makes progress.
  virtual void sleep(std::chrono::milliseconds longest) = 0;
  /// Ends a `sleep` of another thread.
  virtual void wake() noexcept = 0;

  /// Reason why nothing will come from the peer any more, e.g. "its connection was closed"; nullopt if something may.
  virtual std::optional<std::string> lost(int peer) = 0;
  /// Peers whose frames of operations are posted and have not come, or not taken what was sent; ascending.
  virtual std::vector<int> owing() = 0;
  /// Frames kept aside of operations up to this one are of no use any more.
  virtual void forget(std::uint64_t operation) = 0;

  /// Ends all traffic of operations: memory of frames is not touched any more. Peers, also those that connect later,
  /// get `bytes`.
  virtual void end(std::string_view bytes) = 0;
  /// True once nothing is queued for peers that can still take it.
  virtual bool flushed() = 0;
  /// Informs all connected peers that this rank leaves, and closes everything.
  virtual void leave() = 0;
};

}  // namespace cohort::transport
