// What the primary of some rows knows of the process that has, or is getting, a copy of them: the records that it has
// not had yet, and whether answers may go out. An answer that says what the state is, or that it has changed, goes
// when a backup has received every command that is in the state; and only while no backup can have taken the primary's
// place without its knowing (a lease). Pure bookkeeping; one thread at a time.
#pragma once

#include "ps/server_map.h"
#include "ps/state.h"

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>

namespace cohort::ps {

inline constexpr std::chrono::milliseconds kHeartbeat(60);  ///< a fetch is answered within
inline constexpr std::chrono::milliseconds kLease(250);     ///< for which an answer that a backup has had holds
/// A backup waits so much longer than the lease: its clock may run faster.
inline constexpr std::chrono::milliseconds kLeaseMargin(25);
/// Of who says nothing, though its connection stands. Busy machines have pauses of a second.
inline constexpr std::chrono::milliseconds kSilence(3000);

class Replication {
 public:
  using Time = std::chrono::steady_clock::time_point;
  enum class Phase : std::uint8_t {
    Alone,      ///< nobody has a copy
    Copying,    ///< somebody is getting one: it may not take this primary's place; answers wait if it is far behind
    Near,       ///< has nearly all; answers wait for it from now on
    Joining,    ///< has all that answers have gone out for; the map is being told
    Following,  ///< is the backup
    Dropping,   ///< is lost; the map is being told, and until then it may take this primary's place
  };

  Phase phase() const noexcept { return phase_; }
  const Holder& other() const noexcept { return other_; }
  /// Commands so far, as answers refer to them.
  std::uint64_t position() const noexcept { return position_; }

  /// A command that the state is about to have.
  void append(const Command& command);

  /// Whether somebody may begin to get a copy: not while there is a backup, or another process gets one, nor by what
  /// was said before the latest beginning and comes late.
  bool may_begin(const Holder& other, std::uint64_t copy) const noexcept;
  /// Records of the state's image, one after the other, until there are no more.
  using Pieces = std::function<std::optional<std::string>()>;
  /// From these on.
  void begin(const Holder& other, std::uint64_t copy, Pieces pieces, Time now);
  /// Whether it is this copy that is wanted.
  bool wants(std::uint64_t life, std::uint64_t copy) const noexcept;
  /// It has received all records before `received`, and the answer that was sent at `sent`, and asks for more. False:
  /// those are not records that it can have had.
  bool fetch(std::uint64_t received, Time now, std::optional<Time> sent);
  /// Whole records for it, about so many bytes of those that it has not received.
  std::string records(std::size_t bytes, std::uint64_t& count);
  bool has_records() const noexcept { return pieces_ || !image_.empty() || !records_.empty(); }
  /// Memory that records take which it has not received.
  std::size_t bytes() const noexcept { return bytes_ + image_bytes_; }
  /// Whether commands should wait until it has received more.
  bool is_behind() const noexcept { return bytes_ > kMostKept; }
  /// True, once: it has every command that an answer has gone out for, and should become the backup.
  bool join();
  /// The map has been told: it is the backup. False: that is not what is waited for.
  bool joined(const Holder& other) noexcept;
  /// It is lost. True, once: the map has to be told (phase Dropping).
  bool lose();
  /// The map has been told. False: that is not what is waited for.
  bool dropped(const Holder& other);

  /// Whether an answer may go out that was made at this position.
  bool may_answer(std::uint64_t position, Time now) const noexcept;
  /// Whether somebody gets, or has, a copy: answers may wait for it, so it is given up when it says nothing.
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

}  // namespace cohort::ps
