// A send or receive that was not over at once: what its caller waits for, and what the channels keep of it. Everything
// but `done` belongs to the channels' mutex; the outcome does not change once it is done.
#pragma once

#include "comm/request.h"
#include "comm/work_state.h"

#include <cohort/collective_options.h>
#include <cohort/error.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

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

class ChannelWork final : public WorkState {
 public:
  using Clock = std::chrono::steady_clock;

  /// `owner` keeps the channels alive.
  ChannelWork(Channels& channels, std::shared_ptr<void> owner, const Message& message, Clock::time_point called)
      : message_(message),
        any_source_(message.peer == kAnySource),
        called_(called),
        channels_(channels),
        owner_(std::move(owner)) {}

  void wait() override;
  bool wait_for(std::chrono::nanoseconds limit) override;
  bool done() const noexcept override { return done_.load(std::memory_order_acquire); }
  const std::optional<Error>& outcome() const noexcept override { return outcome_; }
  void on_done(std::function<void()> callback) override;
  std::optional<int> source() const noexcept override {
    return any_source_ ? std::optional<int>(message_.peer) : std::nullopt;
  }
  bool at_home() const noexcept override;

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

  std::atomic<bool> done_{false};
  std::optional<Error> outcome_;  // written before done_
  std::vector<std::function<void()>> callbacks_;
  Channels& channels_;
  const std::shared_ptr<void> owner_;
};

}  // namespace cohort::comm::local
