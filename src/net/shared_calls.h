// Calls through memory that a client and a server on one host share: the layout of the segment, and its two ends. The
// server creates the segment; the client writes bodies into blocks, queues calls in order, and reserves space for the
// answer behind the body. So the server needs no memory for a client that does not take its answers. Data from the
// other end is copied once, then checked, then used; rows of an answer stay in the segment until the client has copied
// them. A sleeping client is woken by a futex, a sleeping server over the socket that the two ends keep open, which
// also shows when the other end has gone. One thread at a time, unless stated otherwise.
#pragma once

#include "base/memory.h"
#include "base/records.h"
#include "base/result.h"
#include "base/unique_fd.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::net {

struct SharedControl;

/// Adapts how long to spin before sleeping: longer after short waits, shorter after long ones. On busy cores waits are
/// long, and a thread that has slept gets a core sooner than one that has spun. Any thread.
class SpinTime {
 public:
  std::chrono::nanoseconds now() const noexcept {
    return std::chrono::nanoseconds(now_.load(std::memory_order_relaxed));
  }
  void waited(std::chrono::nanoseconds time) noexcept {
    const std::int64_t spun = now_.load(std::memory_order_relaxed);
    now_.store(time <= kMost ? std::min(2 * spun, kMost.count()) : std::max(spun / 2, kLeast.count()),
               std::memory_order_relaxed);
  }

 private:
  // About the time that a wakeup takes, so spinning that long costs at most twice as much as sleeping immediately.
  static constexpr std::chrono::nanoseconds kMost = std::chrono::microseconds(50);
  static constexpr std::chrono::nanoseconds kLeast = std::chrono::microseconds(1);
  std::atomic<std::int64_t> now_{kMost.count()};
};

inline constexpr std::size_t kSharedBlock = std::size_t{64} << 10;
inline constexpr std::uint32_t kSharedBlocks = 63;  ///< these follow one block with the control data of both ends
inline constexpr std::size_t kSharedBytes = (kSharedBlocks + 1) * kSharedBlock;

/// Identifies a call at both ends, by its first block and the number of calls begun before it.
class SharedCallId {
 public:
  SharedCallId(std::uint32_t order, std::uint32_t block) noexcept : value_(std::uint64_t{order} << 8 | block) {}
  /// Makes an ID from an untrusted value.
  explicit SharedCallId(std::uint64_t value) noexcept : value_(value & 0xFF'FFFF'FFFF) {}
  std::uint64_t value() const noexcept { return value_; }
  std::uint32_t block() const noexcept { return static_cast<std::uint32_t>(value_ & 0xFF); }
  bool operator==(const SharedCallId&) const = default;

 private:
  std::uint64_t value_;
};

class SharedCallsServer {
 public:
  /// Creates the segment. Fails with Unavailable if there is no memory.
  static Result<SharedCallsServer> make();
  /// Uses a segment that a client may have filled with anything; for fuzzing.
  explicit SharedCallsServer(sys::SharedSegment segment);

  /// Returns the segment's descriptor, to be sent to the client. Call once.
  sys::UniqueFd take_descriptor() noexcept { return std::move(segment_.fd); }

  struct Call {
    SharedCallId id;
    std::uint8_t method = 0;
    std::string_view body;  ///< a copy, valid until the next call is taken
  };
  /// Returns the next call, in the order in which calls were begun. Corrupt if the client's part of the memory is
  /// invalid.
  Result<std::optional<Call>> next();
  bool any() const noexcept;

  enum class Answered { Yes, TooLong, NoSuchCall };
  /// Answers with `head`, followed at a multiple of 64 by `bytes` bytes that `fill` writes.
  Answered answer(SharedCallId id, std::string_view head, std::size_t bytes = 0,
                  const std::function<void(char*)>& fill = {});
  /// Marks the call as answered over the socket.
  void answer_elsewhere(SharedCallId id);

  /// Makes the client send a wakeup for further calls. Returns false if calls have arrived meanwhile.
  bool go_to_sleep() noexcept;
  void wake_up() noexcept;
  /// Tells the client whether there are fewer cores than processes that could spin.
  void set_crowded(bool crowded) noexcept;

 private:
  SharedControl& control() const noexcept { return *static_cast<SharedControl*>(segment_.mapping.data()); }
  char* block(std::uint32_t number) const noexcept {
    return static_cast<char*>(segment_.mapping.data()) + (number + 1) * kSharedBlock;
  }
  bool under_way(SharedCallId id) const noexcept;
  void tell(std::uint32_t number, std::uint32_t state) noexcept;

  sys::SharedSegment segment_;
  std::uint32_t taken_ = 0;  ///< number of calls taken so far
  struct UnderWay {
    std::uint64_t id = 0;
    std::uint32_t blocks = 0;  ///< 0: no call is under way here
    std::uint32_t body = 0;
  };
  std::array<UnderWay, kSharedBlocks> under_way_{};
  std::vector<char> body_;
};

class SharedCallsClient {
 public:
  /// Maps the segment. Fails with Corrupt if it is not a server's segment.
  static Result<std::unique_ptr<SharedCallsClient>> map(const sys::UniqueFd& descriptor);

  /// True if the segment can hold a call of `body` bytes with an answer of up to `room` bytes.
  static bool fits(std::size_t body, std::size_t room) noexcept { return blocks_for(body, room) <= kSharedBlocks; }
  /// Begins a call. Returns nullopt if there is not enough free space now.
  std::optional<SharedCallId> begin(std::uint8_t method, std::string_view body, std::size_t room);
  /// Returns true, once, if the server sleeps and has to be woken because calls were begun.
  bool has_to_ring() noexcept;

  enum class State { UnderWay, Answered, Elsewhere };
  State state(SharedCallId id) const noexcept;
  /// Returns the answer of a call in state Answered, in the shared memory; valid until the call is freed. Corrupt if
  /// the server gives an impossible length.
  Result<std::string_view> answer(SharedCallId id) const;
  /// Frees a call that is not under way.
  void free(SharedCallId id) noexcept;

  /// Number of answers so far. Any thread may call this and `wait`.
  std::uint32_t answers() const noexcept;
  /// Waits until `answers()` differs from `seen`, at most for `limit`: first spinning, then sleeping. Returns false if
  /// no answer came.
  bool wait(std::uint32_t seen, std::chrono::nanoseconds limit) noexcept;

 private:
  explicit SharedCallsClient(sys::Mapping mapping) : mapping_(std::move(mapping)) {}
  static std::uint32_t blocks_for(std::size_t body, std::size_t room) noexcept;
  SharedControl& control() const noexcept { return *static_cast<SharedControl*>(mapping_.data()); }
  char* block(std::uint32_t number) const noexcept {
    return static_cast<char*>(mapping_.data()) + (number + 1) * kSharedBlock;
  }

  sys::Mapping mapping_;
  std::uint32_t begun_ = 0;
  std::uint64_t used_ = 0;                             ///< one bit per block in use
  std::array<std::uint32_t, kSharedBlocks> blocks_{};  ///< number of a call's blocks, by its first block
  SpinTime spin_;
};

// Messages of an RpcClient and an RpcServer over the connection about calls in shared memory.

inline constexpr std::uint8_t kShareMemory = 0xFF;  ///< a call; its answer is a segment's descriptor or an error
inline constexpr std::uint8_t kRing = 0xFE;         ///< wakes the server for calls in shared memory; has no answer

/// The answer to kShareMemory.
struct SharedMemory {
  std::optional<Error> refused = {};
  // If refused because the connection is TCP: the abstract Unix name on `host` where the server grants shared memory.
  std::string host = {};
  std::string unix_name = {};
};
void visit_fields(auto& m, auto& a, const SharedMemory*) { a(m.refused, m.host, codec::longest(m.unix_name, 100)); }

// Numbers of calls in shared memory have the bit kShared, which distinguishes them from calls over the connection.

inline constexpr std::uint64_t kShared = std::uint64_t{1} << 63;
inline bool is_shared(std::uint64_t id) noexcept { return (id & kShared) != 0; }
inline std::uint64_t number_of(SharedCallId id) noexcept { return kShared | id.value(); }

}  // namespace cohort::net
