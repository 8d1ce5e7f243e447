// What the matcher of sends and receives is written over: headers and payloads from rank to rank. A Channel leads to
// one peer; `Channels` are all of one kind, with the way to sleep until something comes over one of them. Shared memory
// is one kind (local/shm_channels.h), a Transport between hosts the other (hosts/transport_channels.h). All functions
// are called under the matcher's mutex, but for those that say otherwise.
#pragma once

#include "base/result.h"
#include "comm/messages/message.h"
#include "comm/messages/message_header.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace cohort::comm::messages {

using Lock = std::unique_lock<std::mutex>;

/// A header that has come. What it points to is there until it is taken.
struct Arrival {
  MessageHeader header;
  const std::byte* payload = nullptr;  ///< of Eager
};

/// A payload on its way, out or in: made by the channel that moves it. Its message and memory stay until it is
/// destroyed.
class Transfer {
 public:
  enum class Step : std::uint8_t { Still, Moved, Over };

  explicit Transfer(bool asks) noexcept : asks_sender(asks) {}
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  /// Moves what can be moved now. May give the mutex back meanwhile; then it is `busy`.
  virtual Result<Step> step(Lock& lock) = 0;

  bool busy = false;  ///< a thread moves some of it without the mutex: it may not end meanwhile
  const bool
      asks_sender;  ///< an incoming one: its sender has to be asked for it, and does not wait to be told of the end
};

class Channel {
 public:
  explicit Channel(std::size_t eager) noexcept : eager_bytes(eager) {}
  virtual ~Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// Whether something may go on now. Without the mutex.
  virtual bool stirred() const noexcept = 0;
  /// The first header that has come and has not been taken, if there is one.
  virtual bool peek(Arrival& arrival) noexcept = 0;
  virtual void take() noexcept = 0;
  /// False if there is no room: then again when something stirs. `payload`: of Eager.
  virtual bool put(const MessageHeader& header, const std::byte* payload = nullptr) = 0;

  /// An eager message of the peer has met its receive.
  virtual void note_met() = 0;
  /// How many of the eager messages to the peer are known to have met theirs.
  virtual std::uint64_t met() const noexcept = 0;

  /// A payload that was asked for.
  virtual std::unique_ptr<Transfer> send_payload(const Message& message, std::uint64_t offer) = 0;
  /// A payload that was offered and fits. It is not empty.
  virtual std::unique_ptr<Transfer> receive_payload(const Message& message, const MessageHeader& offer) = 0;

  const std::size_t eager_bytes;  ///< messages up to this size may be Eager
};

/// Any thread, but for `open`.
class Channels {
 public:
  explicit Channels(bool driven) noexcept : is_driven(driven) {}
  virtual ~Channels() = default;
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  virtual bool leads_to(int peer) const noexcept = 0;
  virtual std::unique_ptr<Channel> open(int peer) = 0;
  /// Brings in what has come, where somebody has to. True if there was anything.
  virtual bool look() = 0;
  /// What `sleep` compares with, so that no `wake` after this is missed.
  virtual std::uint32_t bell() noexcept = 0;
  /// From now on, or no more, peers wake whoever sleeps here.
  virtual void arm(bool on) noexcept = 0;
  virtual void sleep(std::uint32_t bell, std::chrono::nanoseconds longest) = 0;
  virtual void wake() noexcept = 0;

  /// Somebody has to call `look`: who waits does, and when nobody waits a thread of the communicator. Otherwise peers
  /// put headers where they are found, and a thread of the matcher looks after them when nobody waits.
  const bool is_driven;
  std::atomic<int> attended{0};  ///< threads that wait here
  std::atomic<int> asleep{0};    ///< of these
  std::size_t pending = 0;       ///< works that are waited for here; under the mutex
};

}  // namespace cohort::comm::messages
