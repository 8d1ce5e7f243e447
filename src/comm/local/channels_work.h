// A send or receive that was not over at once: what its caller waits for, and what the channels keep of it. Everything
// but `done` belongs to the channels' mutex.
#pragma once

#include "comm/control/pending_work.h"
#include "comm/request.h"

#include <cohort/collective_options.h>
#include <cohort/error.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace cohort::comm::local {

class Channels;

/// A send or receive as it was asked for.
struct Message {
  Kind kind = Kind::Send;
  DType dtype = DType::Float32;
  std::int32_t peer = 0;       ///< kAnySource: not known yet
  std::int32_t peer_name = 0;  ///< as messages call it
  std::int32_t tag = 0;
  const std::byte* from = nullptr;  ///< of a send
  std::byte* to = nullptr;          ///< of a receive
  std::int64_t count = 0;           ///< elements
  std::chrono::milliseconds timeout{0};
  std::shared_ptr<Claim> claim = {};  ///< where it is posted with another host's ranks as well
  std::uint64_t number = 0;           ///< among the sends and receives of its rank, from 1

  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count) * size_of(dtype); }
  /// Whether a message with this tag may become its. Then no other place has it any more.
  bool takes(std::int32_t of) const noexcept { return tag == of && (!claim || claim->take(kWithinHost)); }
  bool lies_elsewhere() const noexcept { return claim && claim->owner() != 0 && claim->owner() != kWithinHost; }
};

/// "send(float32[4], to rank 1, tag 0)".
std::string to_string(const Message& message);

class ChannelWork final : public PendingWork {
 public:
  /// `owner` keeps the channels alive.
  ChannelWork(Carrier& channels, std::shared_ptr<void> owner, const Message& message, Clock::time_point called)
      : PendingWork(channels, std::move(owner)),
        message_(message),
        any_source_(message.peer == kAnySource),
        called_(called) {}

  std::optional<int> source() const noexcept override {
    return any_source_ ? std::optional<int>(message_.peer) : std::nullopt;
  }

 private:
  friend class Channels;
  Clock::time_point deadline() const noexcept { return called_ + message_.timeout; }

  Message message_;  // only the peer changes, once
  const bool any_source_;
  const Clock::time_point called_;
  Clock::time_point met_{};  // when the peer's side had come; taken for observers only
  // A payload that is on its way:
  std::uint64_t peers_number_ = 0;  // of the message in its lane
  std::uint64_t address_ = 0;       // at the sender
  std::size_t moved_ = 0;           // bytes
  bool busy_ = false;               // a thread copies some of it without the mutex: it may not end meanwhile
  std::optional<Error> refusal_;    // with which it ends once the peer has been told
};

}  // namespace cohort::comm::local
