// Calls through memory that a client and a server on one host share: the layout of the segment, and its two ends. The
// server makes it; the client lays bodies into blocks, queues calls in their order, and says where the answer may be as
// long as it likes: an answer stands behind its body. So the server needs no memory for a client that does not take its
// answers. Data from the other end is copied once, then checked, then used; rows of an answer stay where they are until
// the client has copied them. Sleepers are woken: clients on a futex, the server over the socket that the two keep
// besides, which also says when one of them has gone. One thread at a time, where nothing else is said.
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

/// How long it pays to spin before sleeping: as long as recent waits, if they were short. On busy cores waits are long,
/// and a thread that has slept gets a core sooner than one that has spun. Any thread.
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
  // About what it takes to be woken up: spinning so long costs at most twice what sleeping at once would have.
  static constexpr std::chrono::nanoseconds kMost = std::chrono::microseconds(50);
  static constexpr std::chrono::nanoseconds kLeast = std::chrono::microseconds(1);
  std::atomic<std::int64_t> now_{kMost.count()};
};

inline constexpr std::size_t kSharedBlock = std::size_t{64} << 10;
inline constexpr std::uint32_t kSharedBlocks = 63;  ///< and one before them for what both ends say of the calls
inline constexpr std::size_t kSharedBytes = (kSharedBlocks + 1) * kSharedBlock;

/// A call, for both ends: how many were begun before it, and its first block.
class SharedCallId {
 public:
  SharedCallId(std::uint32_t order, std::uint32_t block) noexcept : value_(std::uint64_t{order} << 8 | block) {}
  /// Made of a value that anybody may have sent.
  explicit SharedCallId(std::uint64_t value) noexcept : value_(value & 0xFF'FFFF'FFFF) {}
  std::uint64_t value() const noexcept { return value_; }
  std::uint32_t block() const noexcept { return static_cast<std::uint32_t>(value_ & 0xFF); }
  bool operator==(const SharedCallId&) const = default;

 private:
  std::uint64_t value_;
};

class SharedCallsServer {
 public:
  /// Unavailable if there is no memory.
  static Result<SharedCallsServer> make();
  /// Over memory that a client may have filled with anything; for fuzzing.
  explicit SharedCallsServer(sys::SharedSegment segment);

  /// For the client; once.
  sys::UniqueFd take_descriptor() noexcept { return std::move(segment_.fd); }

  struct Call {
    SharedCallId id;
    std::uint8_t method = 0;
    std::string_view body;  ///< a copy, until the next call is taken
  };
  /// Calls in the order in which they were begun. Corrupt if the client's part of the memory makes no sense.
  Result<std::optional<Call>> next();
  bool any() const noexcept;

  enum class Answered { Yes, TooLong, NoSuchCall };
  /// `head`, and behind it `bytes` that `fill` writes, at a multiple of 64.
  Answered answer(SharedCallId id, std::string_view head, std::size_t bytes = 0,
                  const std::function<void(char*)>& fill = {});
  /// It comes over the socket.
  void answer_elsewhere(SharedCallId id);

  /// Lets the client ring from now on. False if calls have come meanwhile.
  bool go_to_sleep() noexcept;
  void wake_up() noexcept;
  /// There are fewer cores than processes that could spin.
  void set_crowded(bool crowded) noexcept;

 private:
  SharedControl& control() const noexcept { return *static_cast<SharedControl*>(segment_.mapping.data()); }
  char* block(std::uint32_t number) const noexcept {
    return static_cast<char*>(segment_.mapping.data()) + (number + 1) * kSharedBlock;
  }
  bool under_way(SharedCallId id) const noexcept;
  void tell(std::uint32_t number, std::uint32_t state) noexcept;

  sys::SharedSegment segment_;
  std::uint32_t taken_ = 0;  ///< calls, so far
  struct UnderWay {
    std::uint64_t id = 0;
    std::uint32_t blocks = 0;  ///< 0: none
    std::uint32_t body = 0;
  };
  std::array<UnderWay, kSharedBlocks> under_way_{};
  std::vector<char> body_;
};

class SharedCallsClient {
 public:
  /// Corrupt if it is no memory of a server.
  static Result<std::unique_ptr<SharedCallsClient>> map(const sys::UniqueFd& descriptor);

  /// True if there may be a call of so many bytes, with an answer of so many.
  static bool fits(std::size_t body, std::size_t room) noexcept { return blocks_for(body, room) <= kSharedBlocks; }
  /// Nothing if it does not fit now.
  std::optional<SharedCallId> begin(std::uint8_t method, std::string_view body, std::size_t room);
  /// True, once, if the server sleeps and has to be woken after calls were begun.
  bool has_to_ring() noexcept;

  enum class State { UnderWay, Answered, Elsewhere };
  State state(SharedCallId id) const noexcept;
  /// Answer of a call that is answered: in the shared memory, until it is freed. Corrupt if it is not where it can be.
  Result<std::string_view> answer(SharedCallId id) const;
  /// Frees a call that is not under way.
  void free(SharedCallId id) noexcept;

  /// Answers so far. Any thread, as `wait`.
  std::uint32_t answers() const noexcept;
  /// Waits until there are others than `seen`, for a while at most: first spinning, then sleeping. False if none came.
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
  std::uint64_t used_ = 0;                             ///< bits of blocks
  std::array<std::uint32_t, kSharedBlocks> blocks_{};  ///< that a call has, by its first
  SpinTime spin_;
};

// Messages of an RpcClient and an RpcServer over the connection about calls in shared memory.

inline constexpr std::uint8_t kShareMemory = 0xFF;  ///< a call: answered with a segment's descriptor, or why not
inline constexpr std::uint8_t kRing = 0xFE;         ///< there are calls in shared memory; without an answer

/// The answer to kShareMemory.
struct SharedMemory {
  std::optional<Error> refused = {};
  // If refused over TCP: the name in this host's abstract Unix namespace at which it would be different.
  std::string host = {};
  std::string unix_name = {};
};
void visit_fields(auto& m, auto& a, const SharedMemory*) { a(m.refused, m.host, codec::longest(m.unix_name, 100)); }

// Calls in shared memory are distinguished from others by the numbers that they have here.

inline constexpr std::uint64_t kShared = std::uint64_t{1} << 63;
inline bool is_shared(std::uint64_t id) noexcept { return (id & kShared) != 0; }
inline std::uint64_t number_of(SharedCallId id) noexcept { return kShared | id.value(); }

}  // namespace cohort::net
