// An elastic job as one of its workers sees it: the job's present epoch, whether a later one has begun, and whether all
// members of an epoch have formed its world. All this is in the job's store. The supervisor writes a record there for
// each epoch, without gaps, before anything else shows that the epoch has begun. Any thread; blocks until the deadline.
#pragma once

#include "net/address.h"
#include "net/store.h"
#include "rendezvous/membership.h"

#include <cohort/error.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace cohort::rendezvous {

/// Thrown by a wait for members of an epoch when a later epoch of the job has begun.
class Superseded : public Error {
 public:
  explicit Superseded(std::uint64_t epoch);
};

/// Thrown by `init`, with code Aborted, if this process was a member of the job and is not any more.
class Removed : public Error {
 public:
  /// `cause`: why the epoch that continues without this process has begun.
  Removed(const std::string& message, ErrorContext context, std::string cause);
  const std::string& cause() const noexcept { return cause_; }

 private:
  std::string cause_;
};

/// Returns the membership of the latest epoch, `least` or later. Throws Corrupt; Unavailable if there is none.
Membership current_membership(store::Store& store, std::uint64_t least);

/// True if the worker was a member in an epoch before this one. (A worker that never was may become one later.)
bool was_member(store::Store& store, std::uint64_t epoch, int worker);

/// Returns true once the job is to end, so that nobody else may come. The waits below ask twice a second, and call
/// `raise_job_ends` if it returns true. Null: never.
using JobEnds = std::function<bool()>;
/// Throws Unavailable.
[[noreturn]] void raise_job_ends();
/// Sets whether this process's `init` gives up if the job ends. An elastic State sets this while it is between worlds.
void set_init_ends_with_job(bool ends) noexcept;
bool init_ends_with_job() noexcept;

/// Wraps the store: waits (and repeated polls) for an absent value throw Superseded when a later epoch has begun.
std::shared_ptr<store::MeetingStore> until_superseded(std::shared_ptr<store::MeetingStore> store, std::uint64_t epoch,
                                                      JobEnds ends);

/// Waits for the next epoch; returns false if none has begun by the deadline.
bool await_next_epoch(store::MeetingStore& store, std::uint64_t epoch, net::Deadline deadline, const JobEnds& ends);

/// Called by rank 0 when the world of this epoch is formed, after which former members are not needed again.
void note_formed(store::MeetingStore& store, std::uint64_t epoch);

/// For a process that is not a member of this epoch: waits until the epoch's world is formed (true) or the next epoch
/// has begun, which may include the process again (false). nullopt: neither by the deadline.
std::optional<bool> await_formed(store::MeetingStore& store, std::uint64_t epoch, net::Deadline deadline,
                                 const JobEnds& ends);

/// Returns whether the role of this process in the latest epoch (`announced` or later) is settled: it is a member, or
/// the others have formed a world without it. Also true if the store cannot be read; `init` then reports why. `store`:
/// the job's store; connected here if null.
bool is_settled(std::shared_ptr<store::Store>& store, std::uint64_t announced);

/// Returns whether this process is no member of the latest epoch (`announced` or later). Throws what the store throws.
bool is_removed(std::uint64_t announced);

/// Called once by each member that has its communicator: either all members continue with theirs, or none does. Throws
/// Superseded if none does because a later epoch has begun, or Timeout, naming the members that did not come.
void conclude(store::MeetingStore& store, const std::string& prefix, const Membership& membership, int rank,
              net::Deadline deadline, const JobEnds& ends);

// Records of the epoch in which each world of this process was last formed. Worlds differ in name and epoch.

inline constexpr std::string_view kWorld = "world";  ///< default name in `init`

/// Returns whether an `init` of this process has thrown Removed.
bool removed_from_job() noexcept;

/// Records that this process has formed the world of this epoch.
void record_formed(const Membership& membership, std::string_view world);
/// Returns the epoch of the world formed last; nullopt if there is none, or this is no elastic job.
std::optional<std::uint64_t> formed_epoch(std::string_view world = kWorld);

struct JobNews {
  std::uint64_t epoch = 0;
  bool came = false;  ///< there are members that were not in this process's world
  bool left = false;  ///< workers of this process's world are not members any more
};
/// Returns what has changed since this process formed its world; nullopt if its world belongs to the latest epoch, or
/// this is no elastic job. `announced`: the latest epoch, from status::StatusPage. Asks the job's store only if there
/// is a later epoch; if the store cannot be read, returns that workers came and left.
std::optional<JobNews> news_since_formed(std::uint64_t announced, std::string_view world = kWorld);

}  // namespace cohort::rendezvous
