// A send or receive as it was asked for, and the Work of one that was not over at once. Everything of the Work but
// `done` belongs to the matcher's mutex.
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

namespace cohort::comm::messages {

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
  std::optional<Error> refusal_;        // with which it ends once the peer has been told
};

}  // namespace cohort::comm::messages
