// Both sides of a copy of a server's rows: the primary's bookkeeping, and the process that gets the copy and may take
// the primary's place.
#pragma once

#include "ps/journal.h"
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
#include <string_view>
#include <thread>

namespace cohort::net {
class RpcClient;
}

namespace cohort::ps {

inline constexpr std::chrono::milliseconds kHeartbeat(60);  ///< longest time until a fetch is answered
inline constexpr std::chrono::milliseconds kLease(250);     ///< validity of an answer that a backup has received
/// Time that a backup waits beyond the lease, since its clock may run faster.
inline constexpr std::chrono::milliseconds kLeaseMargin(25);
/// Time after which a silent process counts as gone, though its connection stands. (Busy machines pause for a second.)
inline constexpr std::chrono::milliseconds kSilence(3000);

/// Tracks, for the primary of some rows, the process that has or is getting a copy of them: the records it has not
/// received yet, and whether answers may go out. An answer that depends on the state goes out when the backup has
/// received every command in the state, and only while no backup can have taken the primary's place unnoticed (a
/// lease). Pure bookkeeping; one thread at a time.
class Replication {
 public:
  using Time = std::chrono::steady_clock::time_point;
  enum class Phase : std::uint8_t {
    Alone,      ///< no process has a copy
    Copying,    ///< a process is getting a copy; it may not take this primary's place; answers wait if it is far behind
    Near,       ///< the process has nearly all; answers wait for it from now on
    Joining,    ///< the process has all commands with answers sent; the map is being changed
    Following,  ///< the process is the backup
    Dropping,   ///< the backup is lost; until the map is changed, it may take this primary's place
  };

  Phase phase() const noexcept { return phase_; }
  const Holder& other() const noexcept { return other_; }
  /// Number of commands so far, to which answers refer.
  std::uint64_t position() const noexcept { return position_; }

  /// Takes the record, in two parts, of a command that the state is about to run.
  void append(std::string_view head, std::string_view body);

  /// Returns whether a process may begin to get a copy: false while there is a backup, while another process gets a
  /// copy, and for a message older than the latest beginning.
  bool may_begin(const Holder& other, std::uint64_t copy) const noexcept;
  /// Returns the records of the state's image, one per call; nullopt after the last.
  using Pieces = std::function<std::optional<std::string>()>;
  /// Begins a copy with these pieces of an image.
  void begin(const Holder& other, std::uint64_t copy, Pieces pieces, Time now);
  /// Returns whether this copy is the present one.
  bool wants(std::uint64_t life, std::uint64_t copy) const noexcept;
  /// Records that the process has received all records before `received`, and the answer sent at `sent`. Returns false
  /// if it cannot have received these.
  bool fetch(std::uint64_t received, Time now, std::optional<Time> sent);
  /// Returns whole records that the process has not received, of about `bytes` together.
  std::string records(std::size_t bytes, std::uint64_t& count);
  bool has_records() const noexcept { return pieces_ || !image_.empty() || !records_.empty(); }
  /// Memory of the records that the process has not received.
  std::size_t bytes() const noexcept { return bytes_ + image_bytes_; }
  /// Returns whether commands should wait until the process has received more.
  bool is_behind() const noexcept { return bytes_ > kMostKept; }
  /// Returns true, once, if the process has every command for which an answer was sent, and should become the backup.
  bool join();
  /// Called when the map names the process as the backup. Returns false if no such change is awaited.
  bool joined(const Holder& other) noexcept;
  /// Called when the process is lost. Returns true, once, if the map has to be changed (phase Dropping).
  bool lose();
  /// Called when the map does not name the backup any more. Returns false if no such change is awaited.
  bool dropped(const Holder& other);

  /// Returns whether an answer made at this position may go out.
  bool may_answer(std::uint64_t position, Time now) const noexcept;
  /// Returns whether a process gets, or has, a copy: answers may wait for it, so it is given up when it is silent.
  bool is_watched() const noexcept { return phase_ != Phase::Alone && phase_ != Phase::Dropping; }
  bool is_silent(Time now) const noexcept { return now - heard_ > kSilence; }

 private:
  static constexpr std::size_t kNear = std::size_t{1} << 20;       // bytes
  static constexpr std::size_t kMostKept = std::size_t{64} << 20;  // bytes kept; beyond this, workers wait for the copy

  void forget();

  Phase phase_ = Phase::Alone;
  Holder other_;  // empty if alone
  Holder last_;   // the latest process that began a copy
  std::uint64_t copy_ = 0;
  std::uint64_t position_ = 0;
  Pieces pieces_;                  // the image's pieces to come; null: there are none
  std::deque<std::string> image_;  // the image's pieces that have not been received
  std::size_t image_bytes_ = 0;
  std::deque<std::string> records_;  // commands that have not been received
  std::size_t bytes_ = 0;
  std::uint64_t first_ = 0;    // number of the first record that has not been received
  std::uint64_t near_at_ = 0;  // position at which answers began to wait
  Time lease_{};
  Time heard_{};
};

/// Gets and keeps a copy of the rows that another process serves: first an image, then each command, run in the same
/// order. It may have a journal of them, too. If the map says that this process is the backup, it takes the primary's
/// place when the primary is gone: after the lease if no process listens at its address any more, after kSilence if it
/// is only silent. Has two threads, from construction to destruction: one receives commands, and is never silent for
/// long; the other runs them.
class Follower {
 public:
  enum class End : std::uint8_t {
    Promoted,  ///< by the map, this process serves the rows now
    Away,      ///< this process has not been the backup, or is not any more
    Damaged,   ///< the copy differs from the primary's rows, or its journal cannot be written
  };
  struct Options {
    std::uint32_t rows = 0;  ///< number of the server whose rows are copied
    std::string secret_file;
    std::function<std::size_t()> room;  ///< returns the bytes that this process may still allocate; any thread
    std::function<void()> changed;      ///< called when `workers_gone` has changed; any thread
    std::string journal = {};           ///< the journal's file; empty: none
    std::size_t journal_tail = 0;
  };

  /// `on_end` is the last call on the Follower's thread; it is not made if the Follower is destroyed before.
  Follower(Options options, Membership& membership, std::function<void(End)> on_end);
  ~Follower();
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

  /// Memory of the copy, and of commands that have not been run yet.
  std::size_t bytes() const noexcept { return bytes_ + waiting_bytes_; }
  /// Returns whether all workers of the rows have left, as far as the copy knows.
  bool workers_gone() const noexcept { return workers_gone_; }
  /// Returns the copy, when the last call has been made.
  Journaled take() { return std::move(rows_); }
  std::uint64_t epoch() const noexcept { return epoch_; }

 private:
  using Clock = std::chrono::steady_clock;
  /// The commands of one answer, in its memory.
  struct Batch;

  void run();
  End follow();
  void give_up(const Error& error);
  /// Fetches commands until the connection is lost.
  void fetch(net::RpcClient& primary);
  std::unique_ptr<net::RpcClient> connect(net::Deadline deadline, bool anew);
  bool somebody_listens() const;
  void replay();
  void carry_out(const Batch& batch);
  bool has_all() const;
  /// Returns nullopt if the store does not answer.
  std::optional<End> promote();
  bool is_backup() const;

  const Options options_;
  Membership& membership_;
  const std::function<void(End)> on_end_;
  const std::uint64_t copy_ = static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
  Holder primary_;
  std::string endpoint_;
  Journaled rows_;  // used by the second thread until all commands have been run
  std::uint64_t received_ = 0;
  std::uint64_t epoch_ = 0;
  Clock::time_point heard_{};
  bool disowned_ = false;  // the process at the endpoint refuses to serve the rows to this one
  std::atomic<std::size_t> bytes_{0};
  std::atomic<bool> workers_gone_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> damaged_{false};
  std::atomic<std::size_t> waiting_bytes_{0};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Batch>> waiting_;  // the first batch is being run
  std::thread replaying_;
  std::thread thread_;
};

}  // namespace cohort::ps
