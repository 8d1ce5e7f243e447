// An elastic job as one of its workers sees it: which epoch the job is in, that a later one has begun, and whether all
// members of one have formed its world. All of it is in the job's store, where the supervisor writes the record of each
// epoch before anything else says that it has begun, and leaves no number out. Any thread; blocks until the deadline.
#pragma once

#include "net/address.h"
#include "net/store.h"
#include "rendezvous/membership.h"

#include <cohort/error.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace cohort::rendezvous {

/// A later epoch of the job has begun, so what waits for this one's members waits in vain.
class Superseded : public Error {
 public:
  explicit Superseded(std::uint64_t epoch);
};

/// Thrown by `join`, with code Aborted: this process was a member of the job and is none any more.
class Removed : public Error {
 public:
  /// `cause`: of the epoch that goes on without it.
  Removed(const std::string& message, ErrorContext context, std::string cause);
  const std::string& cause() const noexcept { return cause_; }

 private:
  std::string cause_;
};

/// Membership of the latest epoch, which is not before `least`. Throws Corrupt, and Unavailable if the job has none.
Membership current_membership(store::Store& store, std::uint64_t least);

/// True if the worker was in an earlier epoch than this one: a worker that is in none yet may be in a later one.
bool was_member(store::Store& store, std::uint64_t epoch, int worker);

/// The same store, whose waits (and polls, for callers that repeat them) end with Superseded when a later epoch has
/// begun. A value that is there counts first.
std::shared_ptr<store::MeetingStore> until_superseded(std::shared_ptr<store::MeetingStore> store, std::uint64_t epoch);

/// False if no epoch after this one has begun by the deadline.
bool await_next_epoch(store::MeetingStore& store, std::uint64_t epoch, net::Deadline deadline);

/// Called by rank 0 once a world of it is formed: processes that are no members any more are not needed again.
void note_formed(store::MeetingStore& store, std::uint64_t epoch);

/// For a process that is no member of it any more: false if another epoch begins, which may have it as a member again,
/// before a world of this one is formed. The deadline counts as that.
bool await_formed(store::MeetingStore& store, std::uint64_t epoch, net::Deadline deadline);

/// Whether this process knows what becomes of it in the latest epoch, which is not before `announced`: it is a member,
/// or the others have formed a world without it. Where that cannot be read, `join` says why.
bool is_settled(std::uint64_t announced);

/// Has to be called once, by each member that has its communicator: all of them go on with it, or none. Superseded:
/// nobody does, since a later epoch has begun. Throws Timeout, naming the members that did not come.
void conclude(store::MeetingStore& store, const std::string& prefix, const Membership& membership, int rank,
              net::Deadline deadline);

// This process's knowledge of its job since it last formed a world of it. Worlds of one process have names: one may be
// of an earlier epoch than another.

inline constexpr std::string_view kWorld = "world";  ///< what `join` calls it by default

/// A `join` of it has ended with Removed.
bool removed_from_job() noexcept;

/// It has formed the world of this epoch.
void note_joined(const Membership& membership, std::string_view world);
/// The epoch of the world that it formed last; nothing: none, or this is no elastic job.
std::optional<std::uint64_t> joined_epoch(std::string_view world = kWorld);

struct JobNews {
  std::uint64_t epoch = 0;
  bool came = false;  ///< workers that were not in this process's world
  bool left = false;  ///< workers that were
};
/// `announced`: the latest epoch, as status::StatusPage has it. Nothing: this process's world is of it, or this is no
/// elastic job. Asks the job's store only if it is not; if that cannot be read, some came and some left.
std::optional<JobNews> news_since_joined(std::uint64_t announced, std::string_view world = kWorld);

}  // namespace cohort::rendezvous
