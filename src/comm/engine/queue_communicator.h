// A Communicator over a queue: checks that it is used in the process that formed it, and passes operations on to the
// queue. Planes derive classes that form groups and allocate memory. One thread at a time; any thread may call `abort`.
#pragma once

#include "comm/api/communicator_impl.h"
#include "comm/api/request.h"
#include "comm/engine/queue.h"

#include <cohort/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <vector>

namespace cohort::comm {

class QueueCommunicator : public CommunicatorImpl {
 public:
  ~QueueCommunicator() override;

  const rendezvous::Placement& placement() const noexcept override { return placement_; }
  std::chrono::milliseconds timeout() const noexcept override { return timeout_; }

  void check_home() const override;
  Work start(const Request& request) override;
  Work start_group(std::vector<Request> requests) override;
  int join(const BarrierOptions& options) override;
  std::shared_ptr<CommunicatorImpl> split(const SplitOptions& options) override;
  std::shared_ptr<CommunicatorImpl> group(std::span<const int> ranks, const GroupOptions& options) override;
  void abort(std::string_view reason) override;
  void set_observer(Observer* observer) noexcept override { queue_->set_observer(observer); }
  const std::shared_ptr<Queue>& queue() const noexcept override { return queue_; }

 protected:
  QueueCommunicator(rendezvous::Placement placement, std::chrono::milliseconds timeout, std::shared_ptr<Queue> queue)
      : placement_(std::move(placement)), timeout_(timeout), queue_(std::move(queue)) {}

  /// Returns the request with the communicator's timeout, if the request has none.
  Request timed(Request request) const;
  /// Forms the group of the ranks that give this color; returns null if the color is kNoColor. `listed`: the group's
  /// ranks, if they were given as a list.
  virtual std::shared_ptr<CommunicatorImpl> form_group(int color, int key, std::span<const int> listed,
                                                       std::chrono::milliseconds timeout, bool background) = 0;
  /// Returns what `form` returns. If it throws, ends the world, since other members of the group wait for this rank.
  template <class Form>
  std::shared_ptr<CommunicatorImpl> form_for_all(const Form& form) {
    try {
      return form();
    } catch (const std::exception& error) {
      queue_->abort(error.what());
      throw;
    }
  }

  const rendezvous::Placement placement_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<Queue> queue_;
};

// Exchange of the data that ranks need to form groups: every rank's description, with `color` and `key`, is sent to
// all. Backends add the addresses by which ranks meet. A rank that cannot prepare its description puts the reason into
// it, so that no rank waits for one that has left, and all throw the same error. Pure; any thread.

/// The beginning of every backend's description.
struct GroupInfoHead {
  static constexpr std::int32_t kPrepared = -1;
  std::int32_t color = 0;
  std::int32_t key = 0;
  std::int32_t failure = kPrepared;  // or the ErrorCode of the failure
  std::uint32_t entry_length = 0;
  char entry[180] = {};  // the entry by which ranks of the host meet this one, or the text of the failure
  void set_entry(std::string_view text) noexcept {
    entry_length = static_cast<std::uint32_t>(std::min(text.size(), sizeof entry));
    std::memcpy(entry, text.data(), entry_length);
  }
  std::string_view entry_text() const noexcept { return {entry, std::min<std::size_t>(entry_length, sizeof entry)}; }
  void fail(ErrorCode code, std::string_view why) noexcept {
    failure = static_cast<std::int32_t>(code);
    set_entry(why);
  }
};

/// Runs `work`, which fills in `own`, and records a failure there.
template <class Work>
void prepare(GroupInfoHead& own, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    own.fail(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    own.fail(ErrorCode::Unavailable, "out of memory");
  }
}

/// Throws if a rank could not prepare its description. `name_of`: gives a rank's number in messages.
template <class Info, class NameOf>
void check_prepared(const std::vector<Info>& infos, const NameOf& name_of) {
  for (std::size_t rank = 0; rank < infos.size(); ++rank) {
    const GroupInfoHead& info = infos[rank];
    if (info.failure == GroupInfoHead::kPrepared) continue;
    const bool known = info.failure >= 0 && info.failure <= static_cast<std::int32_t>(ErrorCode::Internal);
    ErrorContext context;
    context.peer = name_of(static_cast<int>(rank));
    throw Error(known ? static_cast<ErrorCode>(info.failure) : ErrorCode::Corrupt,
                fmt::format("no group is formed: rank {} failed -- {}", context.peer, info.entry_text()), context);
  }
}

/// Returns the operation that gathers all ranks' `own` in `infos`, which has one element for each rank. `listed`: the
/// ranks of a group that was given as a list; all of them have to give the same list.
template <class Info>
Request exchange_of(const Info& own, std::vector<Info>& infos, std::span<const int> listed,
                    std::chrono::milliseconds timeout) {
  Request exchange;
  exchange.kind = Kind::Split;
  exchange.dtype = DType::UInt8;
  exchange.input = &own;
  exchange.input_count = sizeof own;
  exchange.output = infos.data();
  exchange.output_count = static_cast<std::int64_t>(infos.size() * sizeof own);
  exchange.timeout = timeout;
  if (!listed.empty()) exchange.counts = std::make_shared<const Counts>(Counts{{listed.begin(), listed.end()}, {}});
  return exchange;
}

/// Returns the ranks of this color, in the order of their keys, then of their numbers.
template <class Info>
std::vector<int> members_of(const std::vector<Info>& infos, int color) {
  std::vector<int> members;
  for (std::size_t rank = 0; rank < infos.size(); ++rank) {
    if (infos[rank].color == color) members.push_back(static_cast<int>(rank));
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return infos[static_cast<std::size_t>(a)].key < infos[static_cast<std::size_t>(b)].key;
  });
  return members;
}

}  // namespace cohort::comm
