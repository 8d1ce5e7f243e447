// Interface beneath the matcher of sends and receives: the members of a world, messages and what two ranks report to
// each other about them, and the channels that carry both.
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

// Members of a world, as far as sends and receives have to know, and how it ends. Any thread.
class Members {
 public:
  virtual ~Members() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  virtual const std::string& host_name(int rank) const noexcept = 0;
  /// "pid 12"; empty if the rank is in this process or its pid means nothing here.
  virtual std::string pid_text(int rank) const = 0;
  /// More ranks than cores.
  virtual bool crowded() const noexcept = 0;
  /// Status in which this rank reports the message that it waits for.
  virtual status::LaneStatus& messages() const noexcept = 0;

  virtual bool ended() const noexcept = 0;
  /// Writes down why the world ends, unless it has ended.
  virtual void end(ErrorCode code, int peer, std::uint64_t sequence, std::string_view text) = 0;
  /// Reports the world's end, if it has ended, to all who need it. Then nobody touches the memory of messages any more.
  virtual void tell_if_ended() = 0;
  /// The first cause, as this rank reports it while it was `doing` operation `sequence`.
  virtual Error recorded(const std::string& doing, std::uint64_t sequence) const = 0;
  /// Reason why nothing will come from a peer any more; nullopt if something may.
  virtual std::optional<std::string> lost(int rank) const = 0;
};

// Headers that two ranks exchange about a message. A small message comes with its payload. A larger one is offered, and
// then its receiver reads the payload, or asks for it, or refuses it. Plain data; both ends are of one build.

enum class HeaderKind : std::uint8_t {
  None = 0,
  Eager,      ///< a message with its payload: its send is over
  Offer,      ///< a message whose payload is still at its sender
  Grant,      ///< back: the offered payload may come
  Done,       ///< back: what was offered has been received
  Refused,    ///< back: what was offered, or an eager message (offer 0), does not fit its receive
  OfChannel,  ///< for the channel itself: the matcher does not see it
};
inline constexpr int kHeaderKinds = 7;

struct MessageHeader {
  HeaderKind kind = HeaderKind::Eager;
  DType dtype = DType::Float32;     ///< as sent
  DType expected = DType::Float32;  ///< of Refused: by the receive
  std::int32_t tag = 0;
  std::int64_t count = 0;  ///< elements, as sent
  std::int64_t expected_count = 0;
  std::uint64_t offer = 0;    ///< the sender's number of the offer that it is or that it answers
  std::uint64_t address = 0;  ///< of an offer: where the payload lies, in the sender's process

  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count) * size_of(dtype); }
};

/// Fields between processes that share no memory: all but the address.
void visit_fields(auto& m, auto& archive, const MessageHeader*) {
  archive(codec::below(m.kind, kHeaderKinds, "a message header of unknown kind"),
          codec::below(m.dtype, kDTypeCount, "a type that does not exist"),
          codec::below(m.expected, kDTypeCount, "a type that does not exist"), m.tag, m.count, m.expected_count,
          m.offer);
  archive.demand(m.kind != HeaderKind::None && m.count >= 0 && m.expected_count >= 0, "an empty message header");
}
inline constexpr std::size_t kHeaderBytes = 31;

/// The header at the beginning of `bytes`; behind it is its payload, if it is Eager, of at most `longest` bytes.
Result<MessageHeader> read_header(std::string_view bytes, std::size_t longest);

// A send or receive as it was asked for, and the Work of one that was not over at once. Everything of the Work but
// `done` belongs to the matcher's mutex.
struct Message {
  Kind kind = Kind::Send;
  DType dtype = DType::Float32;
  std::int32_t peer = 0;  ///< kAnySource: not known yet
  std::int32_t tag = 0;
  const std::byte* from = nullptr;  ///< of a send
  std::byte* to = nullptr;          ///< of a receive
  std::int64_t count = 0;           ///< elements
  std::chrono::milliseconds timeout{0};
  std::uint64_t number = 0;  ///< among the sends and receives of its rank, from 1

  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count) * size_of(dtype); }
  /// The peer as errors and the status page have it: -1 if it is not known.
  int named_peer() const noexcept { return peer == kAnySource ? -1 : peer; }
};

/// "send(float32[4], to rank 1, tag 0)".
std::string to_string(const Message& message);

class Transfer;

class MessageWork final : public PendingWork {
 public:
  /// `owner` keeps the matcher alive.
  MessageWork(Carrier& matcher, std::shared_ptr<void> owner, const Message& message, Clock::time_point called)
      : PendingWork(matcher, std::move(owner)),
        message_(message),
        any_source_(message.peer == kAnySource),
        called_(called) {}
  ~MessageWork() override;

  std::optional<int> source() const noexcept override {
    return any_source_ ? std::optional<int>(message_.peer) : std::nullopt;
  }

 private:
  friend class Matcher;
  Clock::time_point deadline() const noexcept { return called_ + message_.timeout; }

  Message message_;  // only the peer changes, once
  const bool any_source_;
  const Clock::time_point called_;
  Clock::time_point met_{};             // when the peer's side had come; taken for observers only
  std::uint64_t offer_ = 0;             // the sender's number of the message, if it was offered
  std::unique_ptr<Transfer> transfer_;  // of its payload
  std::optional<Error> refusal_;        // with which it ends once the peer has the report
};

// Interface beneath the matcher of sends and receives: headers and payloads from rank to rank. A Channel leads to one
// peer; `Channels` are all of one kind, and can sleep until something comes over one of them. Shared memory is one kind
// (shm/local_communicator.h), a Transport between hosts the other (hosts/hosts_communicator.h). All functions are
// called under the matcher's mutex, but for those that say otherwise.

using Lock = std::unique_lock<std::mutex>;

/// A header that has come. The memory it points to is there until it is taken.
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
      asks_sender;  ///< an incoming one: its sender has to be asked for it, and does not wait for a report of the end
};

class Channel {
 public:
  explicit Channel(std::size_t eager) noexcept : eager_bytes(eager) {}
  virtual ~Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// True if something may go on now. Without the mutex.
  virtual bool stirred() const noexcept = 0;
  /// The first header that has come and has not been taken, if there is one.
  virtual bool peek(Arrival& arrival) noexcept = 0;
  virtual void take() noexcept = 0;
  /// False if it does not fit: then again when something stirs. `payload`: of Eager.
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
  /// The value that `sleep` compares with, so that no `wake` after this is missed.
  virtual std::uint32_t bell() noexcept = 0;
  /// Makes peers wake threads that sleep here from now on, or no longer.
  virtual void arm(bool on) noexcept = 0;
  virtual void sleep(std::uint32_t bell, std::chrono::nanoseconds longest) = 0;
  virtual void wake() noexcept = 0;

  /// Somebody has to call `look`: waiting threads do, and when nobody waits a thread of the communicator. Otherwise
  /// peers put headers where they are found, and a thread of the matcher looks after them when nobody waits.
  const bool is_driven;
  std::atomic<int> attended{0};  ///< threads that wait here
  std::atomic<int> asleep{0};    ///< of these
  std::size_t pending = 0;       ///< works that are waited for here; under the mutex
};

}  // namespace cohort::comm::messages
