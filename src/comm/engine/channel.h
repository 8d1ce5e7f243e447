// Interface beneath the matcher of sends and receives: the members of a world, messages, the headers that two ranks
// exchange about them, and channels.
#pragma once

#include "base/records.h"
#include "base/result.h"
#include "comm/api/request.h"
#include "comm/engine/pending_work.h"
#include "telemetry/status_page.h"

#include <cohort/collective_options.h>
#include <cohort/dtype.h>
#include <cohort/error.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace cohort::comm::messages {

// The members of a world, and its end, as far as sends and receives need them. Any thread.
class Members {
 public:
  virtual ~Members() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  virtual const std::string& host_name(int rank) const noexcept = 0;
  /// The rank's process, as "pid 12"; empty if the rank is in this process or its pid means nothing here.
  virtual std::string pid_text(int rank) const = 0;
  /// True if there are more ranks than cores.
  virtual bool crowded() const noexcept = 0;
  /// Status in which this rank reports the message for which it waits.
  virtual status::LaneStatus& messages() const noexcept = 0;

  virtual bool ended() const noexcept = 0;
  /// Ends the world and records the reason, unless the world has ended already.
  virtual void end(ErrorCode code, int peer, std::uint64_t sequence, std::string_view text) = 0;
  /// If the world has ended, reports that to all threads that need to know it; none of them accesses the memory of
  /// messages afterwards.
  virtual void tell_if_ended() = 0;
  /// The error that ended the world, as this rank reports it for operation `sequence`; `doing` describes the operation.
  virtual Error recorded(const std::string& doing, std::uint64_t sequence) const = 0;
  /// Reason why nothing will come from a peer any more; nullopt if messages may still come.
  virtual std::optional<std::string> lost(int rank) const = 0;
};

// Headers that two ranks exchange about a message. A small message comes with its payload. A larger one is offered, and
// then its receiver reads the payload, asks for it, or refuses it. Plain data; both ends have the same build.

enum class HeaderKind : std::uint8_t {
  None = 0,
  Eager,      ///< a message with its payload: its send is over
  Offer,      ///< a message whose payload is still at its sender
  Grant,      ///< answer: the sender may send the offered payload
  Done,       ///< answer: the offered payload has been received
  Refused,    ///< answer: the offered or eager (offer 0) message does not fit its receive
  OfChannel,  ///< a header for the channel itself, which the matcher does not see
};
inline constexpr int kHeaderKinds = 7;

struct MessageHeader {
  HeaderKind kind = HeaderKind::Eager;
  DType dtype = DType::Float32;     ///< type of the sent elements
  DType expected = DType::Float32;  ///< Refused: the type that the receive expects
  std::int32_t tag = 0;
  std::int64_t count = 0;  ///< number of elements sent
  std::int64_t expected_count = 0;
  std::uint64_t offer = 0;    ///< the sender's number of this offer, or of the offer that is answered
  std::uint64_t address = 0;  ///< Offer: address of the payload in the sender's process

  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count) * size_of(dtype); }
};

/// Fields sent between processes that share no memory: all except the address.
void visit_fields(auto& m, auto& archive, const MessageHeader*) {
  archive(codec::below(m.kind, kHeaderKinds, "a message header of unknown kind"),
          codec::below(m.dtype, kDTypeCount, "a type that does not exist"),
          codec::below(m.expected, kDTypeCount, "a type that does not exist"), m.tag, m.count, m.expected_count,
          m.offer);
  archive.demand(m.kind != HeaderKind::None && m.count >= 0 && m.expected_count >= 0, "an empty message header");
}
inline constexpr std::size_t kHeaderBytes = 31;

/// Reads the header at the beginning of `bytes`. After an Eager one, the rest is its payload, at most `longest` bytes.
Result<MessageHeader> read_header(std::string_view bytes, std::size_t longest);

// A send or receive as it was called, and its Work if it is not over when the call returns. All members of the Work
// except `done` are protected by the matcher's mutex.
struct Message {
  Kind kind = Kind::Send;
  DType dtype = DType::Float32;
  std::int32_t peer = 0;  ///< kAnySource: not known yet
  std::int32_t tag = 0;
  const std::byte* from = nullptr;  ///< send: the data
  std::byte* to = nullptr;          ///< receive: the memory for the data
  std::int64_t count = 0;           ///< elements
  std::chrono::milliseconds timeout{0};
  std::uint64_t number = 0;  ///< number among the sends and receives of its rank, from 1

  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count) * size_of(dtype); }
  /// The peer as errors and the status page name it: -1 if it is not known.
  int named_peer() const noexcept { return peer == kAnySource ? -1 : peer; }
};

/// Text for errors: "send(float32[4], to rank 1, tag 0)".
std::string to_string(const Message& message);
/// The error of either side of a refused message, with the types and counts that were sent and expected.
Error refusal_of(const Members& members, const Message& own, const MessageHeader& header);

class Transfer;

class MessageWork final : public PendingWork {
 public:
  /// `owner` keeps the matcher alive.
  MessageWork(Carrier& matcher, std::shared_ptr<void> owner, const Message& own, Clock::time_point called_at)
      : PendingWork(matcher, std::move(owner)), message(own), any_source(own.peer == kAnySource), called(called_at) {}
  ~MessageWork() override;

  std::optional<int> source() const noexcept override {
    return any_source ? std::optional<int>(message.peer) : std::nullopt;
  }

  Clock::time_point deadline() const noexcept { return called + message.timeout; }

  Message message;  ///< constant, except that a receive from any source sets the peer once
  const bool any_source;
  const Clock::time_point called;
  Clock::time_point met{};             ///< when the peer's side came; set for observers only
  std::uint64_t offer = 0;             ///< the sender's number of the message, if it was offered
  std::unique_ptr<Transfer> transfer;  ///< transfer of the payload
  std::optional<Error> refusal;        ///< the error with which the work ends after the peer has been sent the refusal
};

// Interface beneath the matcher of sends and receives: headers and payloads from rank to rank. A Channel leads to one
// peer. `Channels` are all channels of one kind; a thread can sleep on them until something comes over one of them.
// Shared memory is one kind (shm/local_communicator.h), a Transport between hosts the other
// (hosts/hosts_communicator.h). All functions are called under the matcher's mutex, unless they say otherwise.

using Lock = std::unique_lock<std::mutex>;

/// A header that has come. The payload is valid until `Channel::take`.
struct Arrival {
  MessageHeader header;
  const std::byte* payload = nullptr;  ///< Eager: the payload
};

/// The transfer of a payload, sent or received, made by the channel that carries it. The message and its memory outlive
/// the transfer.
class Transfer {
 public:
  enum class Step : std::uint8_t { Still, Moved, Over };

  explicit Transfer(bool asks) noexcept : asks_sender(asks) {}
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  /// Moves as much as can be moved now. May unlock the mutex meanwhile; then the transfer is `busy`.
  virtual Result<Step> step(Lock& lock) = 0;

  bool busy = false;       ///< a thread moves data without the mutex: the transfer may not end meanwhile
  const bool asks_sender;  ///< receive: a Grant asks the sender for the payload, and the sender does not wait for Done
};

class Channel {
 public:
  explicit Channel(std::size_t eager) noexcept : eager_bytes(eager) {}
  virtual ~Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// True if messages may progress now. Called without the mutex.
  virtual bool stirred() const noexcept = 0;
  /// Gets the first header that has come and has not been taken. Returns false if there is none.
  virtual bool peek(Arrival& arrival) noexcept = 0;
  virtual void take() noexcept = 0;
  /// Sends a header. Returns false if there is no space: try again when `stirred`. `payload`: only for Eager.
  virtual bool put(const MessageHeader& header, const std::byte* payload = nullptr) = 0;

  /// Called when an eager message of the peer has met its receive.
  virtual void note_met() = 0;
  /// Number of the eager messages to the peer that are known to have met their receives.
  virtual std::uint64_t met() const noexcept = 0;

  /// Begins to send a payload that the peer has asked for.
  virtual std::unique_ptr<Transfer> send_payload(const Message& message, std::uint64_t offer) = 0;
  /// Begins to receive a payload that was offered and fits. The payload is not empty.
  virtual std::unique_ptr<Transfer> receive_payload(const Message& message, const MessageHeader& offer) = 0;

  const std::size_t eager_bytes;  ///< messages up to this size may be Eager
};

/// The channels of one kind. Any thread, except `open`.
class Channels {
 public:
  explicit Channels(bool driven) noexcept : is_driven(driven) {}
  virtual ~Channels() = default;
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  virtual bool leads_to(int peer) const noexcept = 0;
  virtual std::unique_ptr<Channel> open(int peer) = 0;
  /// Receives what has come, if these channels are driven. Returns true if there was anything.
  virtual bool look() = 0;
  /// The value to pass to `sleep`, so that it misses no `wake` after this call.
  virtual std::uint32_t bell() noexcept = 0;
  /// Sets whether peers wake threads that sleep here.
  virtual void arm(bool on) noexcept = 0;
  virtual void sleep(std::uint32_t bell, std::chrono::nanoseconds longest) = 0;
  virtual void wake() noexcept = 0;

  /// True if `look` has to be called: by waiting threads or, if no thread waits, by a thread of the communicator.
  /// False if peers put headers directly into this rank's memory; a thread of the matcher handles these if no thread
  /// waits.
  const bool is_driven;
  std::atomic<int> attended{0};  ///< threads that wait here
  std::atomic<int> asleep{0};    ///< threads that sleep here, among those that wait
  std::size_t pending = 0;       ///< works of these channels that are not over; under the mutex
};

}  // namespace cohort::comm::messages
