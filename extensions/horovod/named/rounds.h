// Lets a rank that enters a round wake sleeping ranks. The interface is small, so that a core with a cheaper mechanism
// can replace the messages. A RoundAnnouncer belongs to the engine's thread; only `Wakeup` is shared.
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
/// Requests come in bursts. After a round the thread lingers: requests do not wake it then, so that it finds many of
/// them together, unless a thread waits for a request.
class Wakeup {
 public:
  /// Wakes the engine's thread: a peer has begun a round, or the engine ends.
  void notify();
  /// Notes a new request that nobody waits for yet.
  void request();
  /// Notes that a thread waits for a request, until `relax`. The engine does not linger meanwhile.
  void urge() {
    ++urgent_;
    if (lingering_) end_lingering();
  }
  void relax() noexcept { --urgent_; }

  /// Blocks until a notification or request since the last return, or until `limit`.
  void wait_until(std::chrono::steady_clock::time_point limit);
  /// Blocks for `moment`; only a notification or `urge` ends the wait early, not a request.
  void linger(std::chrono::nanoseconds moment);

 private:
  void end_lingering();

  std::mutex mutex_;
  std::condition_variable changed_;
  bool notified_ = false;
  bool requested_ = false;
  // Each side writes its variable, then reads the other's, in sequential order, so at least one sees the other's write.
  std::atomic<bool> lingering_{false};
  std::atomic<int> urgent_{0};
};

class RoundAnnouncer {
 public:
  virtual ~RoundAnnouncer() = default;
  /// Tells all peers that this rank has entered round `round`, from 1. Never waits; peers may receive this only after
  /// the round.
  virtual void ring(std::uint64_t round) = 0;
  /// Returns the highest round that a peer has announced; 0 if none has. Throws the error that ended the communicator.
  virtual std::uint64_t heard() = 0;
  /// Every rank makes this its last call, in the same round. Ends the communicator if a peer does not call within
  /// `limit`.
  virtual void close(std::chrono::milliseconds limit) = 0;
};

/// Uses `send` and `recv`. One receive from each peer is always outstanding, which also detects that a peer dies.
class MessageRoundAnnouncer final : public RoundAnnouncer {
 public:
  /// `wakeup` is notified of every message received.
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
    std::deque<Ring> rings;  // unfinished sends; several if the peer has not received for long
  };
  void listen(Peer& peer);
  void take(Peer& peer);

  Communicator comm_;
  const std::shared_ptr<Wakeup> wakeup_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by pointer, since receives hold their addresses
  std::uint64_t heard_ = 0;
};

}  // namespace cohort::named
