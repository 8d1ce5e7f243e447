// Both sides of a copy of a server's rows: the primary's bookkeeping, and the process that gets the copy and may take
// the primary's place.
#pragma once

#include "ps/server_map.h"
#include "ps/state.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace cohort::net {
class RpcClient;
}

namespace cohort::ps {

inline constexpr std::chrono::milliseconds kHeartbeat(60);  ///< a fetch is answered within
inline constexpr std::chrono::milliseconds kLease(250);     ///< for which an answer that a backup has had holds
/// A backup waits longer than the lease by this margin: its clock may run faster.
inline constexpr std::chrono::milliseconds kLeaseMargin(25);
/// Time after which a process that says nothing counts as gone, though its connection stands. Busy machines have pauses
/// of a second.
inline constexpr std::chrono::milliseconds kSilence(3000);

/// Tracks, for the primary of some rows, the process that has or is getting a copy of them: the records it has not
/// received yet, and whether answers may go out. An answer that reports the state, or that it has changed, goes out
/// when a backup has received every command in the state, and only while no backup can have taken the primary's place
/// without its knowing (a lease). Pure bookkeeping; one thread at a time.
class Replication {
 public:
  using Time = std::chrono::steady_clock::time_point;
  enum class Phase : std::uint8_t {
    Alone,      ///< nobody has a copy
    Copying,    ///< somebody is getting one: it may not take this primary's place; answers wait if it is far behind
    Near,       ///< has nearly all; answers wait for it from now on
    Joining,    ///< has all commands with answers sent; the map is being changed
    Following,  ///< is the backup
    Dropping,   ///< is lost; the map is being changed, and until then it may take this primary's place
  };

  Phase phase() const noexcept { return phase_; }
  const Holder& other() const noexcept { return other_; }
  /// Commands so far, as answers refer to them.
  std::uint64_t position() const noexcept { return position_; }

  /// A command that the state is about to have.
  void append(const Command& command);

  /// Returns whether a process may begin to get a copy: not while there is a backup, or another process gets one, nor
  /// by a late message from before the latest beginning.
  bool may_begin(const Holder& other, std::uint64_t copy) const noexcept;
  /// Records of the state's image, one after the other, until there are no more.
  using Pieces = std::function<std::optional<std::string>()>;
  /// From these on.
  void begin(const Holder& other, std::uint64_t copy, Pieces pieces, Time now);
  /// Returns whether this copy is the one that is wanted.
  bool wants(std::uint64_t life, std::uint64_t copy) const noexcept;
  /// It has received all records before `received`, and the answer sent at `sent`, and asks for more. False: it cannot
  /// have received these.
  bool fetch(std::uint64_t received, Time now, std::optional<Time> sent);
  /// Whole records that it has not received, about `bytes` of them.
  std::string records(std::size_t bytes, std::uint64_t& count);
  bool has_records() const noexcept { return pieces_ || !image_.empty() || !records_.empty(); }
  /// Memory that records take which it has not received.
  std::size_t bytes() const noexcept { return bytes_ + image_bytes_; }
  /// Returns whether commands should wait until it has received more.
  bool is_behind() const noexcept { return bytes_ > kMostKept; }
  /// True, once: it has every command that an answer has gone out for, and should become the backup.
  bool join();
  /// The map has been changed: it is the backup. False: no such change is awaited.
  bool joined(const Holder& other) noexcept;
  /// It is lost. True, once: the map has to be changed (phase Dropping).
  bool lose();
  /// The map has been changed. False: no such change is awaited.
  bool dropped(const Holder& other);

  /// Returns whether an answer made at this position may go out.
  bool may_answer(std::uint64_t position, Time now) const noexcept;
  /// Returns whether a process gets, or has, a copy: answers may wait for it, so it is given up when it says nothing.
  bool is_watched() const noexcept { return phase_ != Phase::Alone && phase_ != Phase::Dropping; }
  bool is_silent(Time now) const noexcept { return now - heard_ > kSilence; }

 private:
  static constexpr std::size_t kNear = std::size_t{1} << 20;       // bytes
  static constexpr std::size_t kMostKept = std::size_t{64} << 20;  // beyond it, workers wait for the copy

  void forget();

  Phase phase_ = Phase::Alone;
  Holder other_;  // nobody if alone
  Holder last_;   // to begin
  std::uint64_t copy_ = 0;
  std::uint64_t position_ = 0;
  Pieces pieces_;                  // of the image, those to come; null: there are none
  std::deque<std::string> image_;  // and those that it has not received
  std::size_t image_bytes_ = 0;
  std::deque<std::string> records_;  // commands that it has not received
  std::size_t bytes_ = 0;
  std::uint64_t first_ = 0;    // the number of the first of all these, among all that it gets
  std::uint64_t near_at_ = 0;  // the position at which answers began to wait
  Time lease_{};
  Time heard_{};
};

/// Gets a copy of the rows that another process serves and keeps it: an image first, then each command, carried out in
/// the same order. Once the map says that this process is the backup, it takes the primary's place when that is gone:
/// at once after the lease if nobody listens there any more, after kSilence if it only says nothing. Has two threads,
/// from construction to destruction: one gets the commands, and is never silent for long; the other carries them out.
class Follower {
 public:
  enum class End : std::uint8_t {
    Promoted,  ///< this process serves the rows now, by the map
    Away,      ///< it has not been the backup, or is not any more
    Damaged,   ///< its copy is not what the primary has
  };
  struct Options {
    std::uint32_t rows = 0;  ///< whose
    std::string secret_file;
    std::function<std::size_t()> room;  ///< bytes that this process may still take; any thread
    std::function<void()> changed;      ///< `workers_gone` has; any thread
  };

  /// `on_end` is called on its thread, as the last thing there, unless it is destroyed before.
  Follower(Options options, Membership& membership, std::function<void(End)> on_end);
  ~Follower();
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

  /// Memory that the copy takes, and commands that have not been carried out yet.
  std::size_t bytes() const noexcept { return bytes_ + waiting_bytes_; }
  /// Returns whether all workers of the rows have left, as far as the copy knows.
  bool workers_gone() const noexcept { return workers_gone_; }
  /// After End::Promoted.
  State take() { return std::move(state_); }
  std::uint64_t epoch() const noexcept { return epoch_; }

 private:
  using Clock = std::chrono::steady_clock;
  /// Commands that lie in an answer.
  struct Batch;

  void run();
  End follow();
  /// Until the connection is lost.
  void fetch(net::RpcClient& primary);
  std::unique_ptr<net::RpcClient> connect(net::Deadline deadline, bool anew);
  bool somebody_listens() const;
  void replay();
  void carry_out(const Batch& batch);
  bool has_all() const;
  /// nullopt: the store does not answer.
  std::optional<End> promote();
  bool is_backup() const;

  const Options options_;
  Membership& membership_;
  const std::function<void(End)> on_end_;
  const std::uint64_t copy_ = static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
  Holder primary_;
  std::string endpoint_;
  State state_;  // the second thread's, until it has all
  std::uint64_t received_ = 0;
  std::uint64_t epoch_ = 0;
  Clock::time_point heard_{};
  bool disowned_ = false;  // the process there says that it does not serve the rows to this one
  std::atomic<std::size_t> bytes_{0};
  std::atomic<bool> workers_gone_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> damaged_{false};
  std::atomic<std::size_t> waiting_bytes_{0};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Batch>> waiting_;  // the first is being carried out
  std::thread replaying_;
  std::thread thread_;
};

}  // namespace cohort::ps
