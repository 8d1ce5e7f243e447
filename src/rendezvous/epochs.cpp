#include "rendezvous/epochs.h"

#include "base/env.h"
#include "base/log.h"
#include "base/parse.h"
#include "base/result.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace cohort::rendezvous {
namespace {

constexpr std::string_view kFormed = "formed";

/// Interval at which a wait asks whether the job ends.
constexpr std::chrono::milliseconds kAskWhetherItEnds{500};

/// Waits like the store, and throws Unavailable if the job ends.
store::Store::Gathered await_all(store::MeetingStore& store, std::span<const std::string> keys,
                                 std::span<const std::string> unless, net::Deadline deadline, const JobEnds& ends) {
  while (true) {
    const net::Deadline until = ends ? std::min(deadline, net::deadline_in(kAskWhetherItEnds)) : deadline;
    auto found = store.get_all(keys, unless, until);
    if (found.ended || (!keys.empty() && found.missing().empty())) return found;
    if (ends && ends()) raise_job_ends();
    if (until == deadline) return found;
  }
}

/// Waits for one of the keys.
std::optional<store::Store::Found> await_any(store::MeetingStore& store, std::span<const std::string> keys,
                                             net::Deadline deadline, const JobEnds& ends) {
  return await_all(store, {}, keys, deadline, ends).ended;
}

class EndingWithEpoch final : public store::MeetingStore {
 public:
  EndingWithEpoch(std::shared_ptr<MeetingStore> store, std::uint64_t epoch, JobEnds ends)
      : store_(std::move(store)), epoch_(epoch), next_(membership_key(epoch + 1)), ends_(std::move(ends)) {}

  void set(std::string_view key, std::string_view value) override { store_->set(key, value); }
  Gathered get_all(std::span<const std::string> keys, std::span<const std::string> unless, Deadline deadline) override {
    std::vector<std::string> or_next(unless.begin(), unless.end());
    or_next.push_back(next_);
    Gathered found = await_all(*store_, keys, or_next, deadline, ends_);  // ranks of one host call this repeatedly
    if (found.ended && found.ended->index == unless.size()) throw Superseded(epoch_);
    return found;
  }
  std::int64_t add(std::string_view key, std::int64_t amount) override { return store_->add(key, amount); }
  std::optional<std::string> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                             std::string_view desired) override {
    return store_->compare_and_set(key, expected, desired);
  }
  bool delete_key(std::string_view key) override { return store_->delete_key(key); }
  std::string name() const override { return store_->name(); }
  void leave_will(std::string_view key, std::string_view value) override { store_->leave_will(key, value); }
  void withdraw_will(std::string_view key) override { store_->withdraw_will(key); }

 private:
  const std::shared_ptr<MeetingStore> store_;
  const std::uint64_t epoch_;
  const std::string next_;
  const JobEnds ends_;
};

/// Key that is set once the world of an epoch is formed.
std::string formed_key(std::uint64_t epoch) { return fmt::format("job/formed/{}", epoch); }

std::string ready_key(const std::string& prefix, int rank) { return fmt::format("{}/ready/{}", prefix, rank); }

std::atomic<bool> ends_with_job{false};

}  // namespace

void set_init_ends_with_job(bool ends) noexcept { ends_with_job = ends; }
bool init_ends_with_job() noexcept { return ends_with_job; }
void raise_job_ends() { raise(ErrorCode::Unavailable, "the job is to end, and forms no other world"); }

Superseded::Superseded(std::uint64_t epoch)
    : Error(ErrorCode::Aborted, fmt::format("an epoch of the job after {} has begun", epoch)) {}

Membership current_membership(store::Store& store, std::uint64_t least) {
  const auto text = store.try_get(store::kEpochKey);
  const auto said = parse_integer<std::uint64_t>(text.value_or("0"));
  if (!said) raise(ErrorCode::Corrupt, "the job's store says that its epoch is '{}', which is no number", *text);
  const std::uint64_t epoch = std::max(*said, least);
  const auto bytes = store.try_get(membership_key(epoch));
  if (!bytes) {
    raise(ErrorCode::Unavailable,
          "the job's store has no membership of epoch {}, although this process was started in an elastic job "
          "(COHORT_WORKER is set) -- start it by `cohort run`",
          epoch);
  }
  Membership membership = value_or_throw(decode_membership(*bytes));
  if (membership.epoch != epoch) {
    raise(ErrorCode::Corrupt, "the job's store has the membership of epoch {} as that of epoch {}", membership.epoch,
          epoch);
  }
  return membership;
}

bool was_member(store::Store& store, std::uint64_t epoch, int worker) {
  while (epoch-- > 0) {
    const auto bytes = store.try_get(membership_key(epoch));
    const auto membership = bytes ? decode_membership(*bytes) : fail(ErrorCode::Unavailable, "none");
    if (membership && place_of(*membership, worker)) return true;
  }
  return false;
}

std::shared_ptr<store::MeetingStore> until_superseded(std::shared_ptr<store::MeetingStore> store, std::uint64_t epoch,
                                                      JobEnds ends) {
  return std::make_shared<EndingWithEpoch>(std::move(store), epoch, std::move(ends));
}

bool await_next_epoch(store::MeetingStore& store, std::uint64_t epoch, net::Deadline deadline, const JobEnds& ends) {
  const std::string keys[] = {membership_key(epoch + 1)};
  return await_any(store, keys, deadline, ends).has_value();
}

void note_formed(store::MeetingStore& store, std::uint64_t epoch) { store.set(formed_key(epoch), ""); }

std::optional<bool> await_formed(store::MeetingStore& store, std::uint64_t epoch, net::Deadline deadline,
                                 const JobEnds& ends) {
  const std::string keys[] = {membership_key(epoch + 1), formed_key(epoch)};
  const auto found = await_any(store, keys, deadline, ends);
  return found ? std::optional(found->index == 1) : std::nullopt;
}

bool is_settled(std::shared_ptr<store::Store>& store, std::uint64_t announced) {
  const auto worker = env::number(env::kWorker);
  if (!worker) return true;
  try {
    if (!store) store = store::connect_job_store(net::deadline_in(std::chrono::seconds(5)));
    const Membership now = current_membership(*store, announced);
    return place_of(now, *worker) || store->try_get(formed_key(now.epoch));
  } catch (const Error& error) {
    log::debug("world", "who is in epoch {} cannot be read: {}", announced, error.what());
    return true;
  }
}

bool is_removed(std::uint64_t announced) {
  const auto worker = env::number(env::kWorker);
  if (!worker) return false;
  const auto store = store::connect_job_store(net::deadline_in(std::chrono::seconds(2)));
  return !place_of(current_membership(*store, announced), *worker);
}

// Members learn of the next epoch at different times but must decide alike, so one value, set once, decides for all.
void conclude(store::MeetingStore& store, const std::string& prefix, const Membership& membership, int rank,
              net::Deadline deadline, const JobEnds& ends) {
  const std::string outcome = prefix + "/outcome";
  const int size = static_cast<int>(membership.members.size());
  store.set(ready_key(prefix, rank), "");
  if (store.add(prefix + "/ready", 1) == size) (void)store.compare_and_set(outcome, std::nullopt, kFormed);
  std::string decided;
  std::optional<store::Store::Found> found;
  std::optional<Error> ended;
  try {
    const std::string keys[] = {outcome, membership_key(membership.epoch + 1)};
    found = await_any(store, keys, deadline, ends);
    if (found && found->index == 0) decided = found->value;
  } catch (const Error& error) {
    if (!(ends && ends())) throw;
    ended = error;
  }
  if (decided.empty()) decided = store.compare_and_set(outcome, std::nullopt, "given up").value_or("");
  if (decided == kFormed) return;
  if (ended) throw Error(*ended);
  if (found) throw Superseded(membership.epoch);
  std::vector<std::string> ready;
  for (int other = 0; other < size; ++other) ready.push_back(ready_key(prefix, other));
  std::string missing;
  for (const int other : store.get_all(ready, {}, net::deadline_in({})).missing()) {
    if (missing.size() >= 300) break;
    const Member& member = membership.members[static_cast<std::size_t>(other)];
    missing +=
        fmt::format("{}rank {} (worker {} on {})", missing.empty() ? "" : ", ", other, member.worker, member.host);
  }
  raise(ErrorCode::Timeout,
        "the world of epoch {} was not formed in time: {} did not come, and the job's supervisor began no later epoch "
        "-- see the output of those",
        membership.epoch, missing.empty() ? "a rank that has given up" : missing);
}

namespace {

std::atomic<bool> removed{false};
std::mutex formed_mutex;
std::map<std::string, Membership, std::less<>> formed_last;

std::optional<Membership> formed_membership(std::string_view world) {
  const std::lock_guard lock(formed_mutex);
  const auto found = formed_last.find(world);
  return found == formed_last.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace

Removed::Removed(const std::string& message, ErrorContext context, std::string cause)
    : Error(ErrorCode::Aborted, message, std::move(context)), cause_(std::move(cause)) {
  removed = true;
}

bool removed_from_job() noexcept { return removed; }

void record_formed(const Membership& membership, std::string_view world) {
  const std::lock_guard lock(formed_mutex);
  formed_last.insert_or_assign(std::string(world), membership);
}

std::optional<std::uint64_t> formed_epoch(std::string_view world) {
  const auto mine = formed_membership(world);
  return mine ? std::optional(mine->epoch) : std::nullopt;
}

std::optional<JobNews> news_since_formed(std::uint64_t announced, std::string_view world) {
  const auto mine = formed_membership(world);
  if (!mine || announced <= mine->epoch) return std::nullopt;
  try {
    const auto store = store::connect_job_store(net::deadline_in(std::chrono::seconds(5)));
    const Membership now = current_membership(*store, announced);
    const auto has_others = [](const Membership& one, const Membership& other) {
      return std::any_of(one.members.begin(), one.members.end(),
                         [&](const Member& member) { return !place_of(other, member.worker); });
    };
    return JobNews{now.epoch, has_others(now, *mine), has_others(*mine, now)};
  } catch (const Error& error) {
    log::warn("world", "epoch {} of the job has begun, and who is in it cannot be read: {}", announced, error.what());
    return JobNews{announced, true, true};
  }
}

}  // namespace cohort::rendezvous
