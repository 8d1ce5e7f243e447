// Lets a rank that enters a round wake those that sleep. The interface is small so that a core with a cheaper way can
// take the place of messages. A RoundAnnouncer belongs to the engine's thread; only `Wakeup` is shared.
#pragma once

#include <cohort/communicator.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace cohort::named {

/// Wakes an engine's sleeping thread for users' requests, peers' announcements and the clock. Any thread may notify.
///
/// Requests come in bursts. After a round the thread lingers: requests do not wake it then, so that many of them are
/// found together, unless somebody waits for one.
class Wakeup {
 public:
  /// Wakes the engine's thread: a peer has begun a round, or the engine ends.
  void notify();
  /// A request has come that nobody waits for yet.
  void request();
  /// Somebody waits for a request until `relax`: there is no lingering meanwhile.
  void urge() {
    ++urgent_;
    if (lingering_) end_lingering();
  }
  void relax() noexcept { --urgent_; }

  /// Returns once it has been notified since the last return, or at `limit`.
  void wait_until(std::chrono::steady_clock::time_point limit);
  /// The same, for a moment, unless somebody is in a hurry; requests do not end it.
  void linger(std::chrono::nanoseconds moment);

 private:
  void end_lingering();

  std::mutex mutex_;
  std::condition_variable changed_;
  bool notified_ = false;
  bool requested_ = false;
  // Both sides write theirs and then read the other's, in sequential order: one of them sees it.
  std::atomic<bool> lingering_{false};
  std::atomic<int> urgent_{0};
};

class RoundAnnouncer {
 public:
  virtual ~RoundAnnouncer() = default;
  /// Tells all peers that this rank has entered round `round`, from 1. Never waits: they may take it only after the
  /// round.
  virtual void ring(std::uint64_t round) = 0;
  /// The highest round that a peer has rung for so far; 0 before the first. Throws what ended the communicator.
  virtual std::uint64_t heard() = 0;
  /// Every rank calls it, in the same round, as the last call. Ends the communicator if a peer does not come by
  /// `limit`.
  virtual void close(std::chrono::milliseconds limit) = 0;
};

/// Over `send` and `recv`: one receive from each peer is always outstanding, which also notices that a peer dies.
class MessageRoundAnnouncer final : public RoundAnnouncer {
 public:
  /// `wakeup` is notified whenever something has come.
  MessageRoundAnnouncer(Communicator comm, std::shared_ptr<Wakeup> wakeup);
  ~MessageRoundAnnouncer() override;
  MessageRoundAnnouncer(const MessageRoundAnnouncer&) = delete;
  MessageRoundAnnouncer& operator=(const MessageRoundAnnouncer&) = delete;

  void ring(std::uint64_t round) override;
  std::uint64_t heard() override;
  void close(std::chrono::milliseconds limit) override;

 private:
  struct Ring {
    std::uint64_t round = 0;
    Work send;
  };
  struct Peer {
    int rank = 0;
    bool closed = false;
    std::uint64_t incoming = 0;
    Work receive;
    std::deque<Ring> rings;  // that are not over: where the peer has not looked for long, several
  };
  void listen(Peer& peer);
  void take(Peer& peer);

  Communicator comm_;
  const std::shared_ptr<Wakeup> wakeup_;
  std::vector<std::unique_ptr<Peer>> peers_;  // their addresses are with the receives
  std::uint64_t heard_ = 0;
};

}  // namespace cohort::named
