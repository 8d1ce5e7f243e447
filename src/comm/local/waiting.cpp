#include "comm/local/waiting.h"

#include "base/result.h"
#include "comm/control/operation.h"
#include "transport/transport.h"

#include <fmt/format.h>

#include <algorithm>

namespace cohort::comm::local {
namespace {

constexpr auto kKept = std::chrono::seconds(3);
constexpr auto kSliceOfServer = std::chrono::milliseconds(2);
constexpr auto kLook = std::chrono::milliseconds(10);

}  // namespace

void Waiter::serve(Waiters& waiters, std::function<void()> meanwhile) {
  waiters_ = &waiters;
  meanwhile_ = std::move(meanwhile);
  slice_ = kSliceOfServer;
}

// --- what messages say ---

std::string Waiter::doing() const {
  if (sequence == 0) return "forming the world";
  if (const OperationLabel* const label = world.label()) return label->doing();
  return to_string(world.state(world.rank()).slots[sequence % 2].descriptor);
}

// What a rank that is waited for did not do.
std::string Waiter::omission(int rank) const {
  const Slot* const slots = world.state(rank).slots;
  const std::uint64_t begun = world.state(rank).begun();
  if (world.label() != nullptr) {
    return begun >= sequence ? fmt::format("did not finish its part of operation {}", number())
                             : fmt::format("did not come to operation {}, or to a later step of it", number());
  }
  if (begun >= sequence) return fmt::format("came to operation {} but did not finish it", sequence);
  if (begun == 0) return fmt::format("did not come to operation {}; it has brought nothing yet", sequence);
  return fmt::format("did not come to operation {}; its last was operation {}, {}", sequence, begun,
                     to_string(slots[begun % 2].descriptor));
}

void Waiter::end_world(ErrorCode code, int peer, const std::string& text) {
  world.record(code, peer, number(), text);
  throw world.recorded(doing(), number());
}

void Waiter::end_lost(int rank, const std::string& how) {
  end_world(ErrorCode::PeerLost, world.name(rank),
            lost_text(running(), world.name(rank), world.host(), world.pid_text(rank),
                      fmt::format("{}; it {}", how, omission(rank))));
}

// --- looking after peers ---

void Waiter::attend() {
  if (world.ended()) throw_if_ended();
  meanwhile();
  const auto now = Clock::now();
  if (now - attended_ < kLook) return;
  attended_ = now;
  for (int rank = 0; rank < world.size(); ++rank) {
    // Who leaves in order has done its part.
    if (const auto how = world.lost(rank); how && *how != transport::kLeft) end_lost(rank, *how);
  }
}

// Ends the world if a rank that is waited for has died, or if the deadline has passed.
void Waiter::look_after(const std::function<std::vector<int>()>& missing_now) {
  Deadline& deadline = waiters_->deadline;
  deadline.begin_now();
  const std::vector<int> missing = missing_now();
  for (const int rank : missing) {
    const auto how = world.lost(rank);
    if (!how) continue;
    const std::vector<int> still = missing_now();  // it may have done its part and then gone
    if (std::find(still.begin(), still.end(), rank) == still.end()) continue;
    end_lost(rank, *how);
  }
  if (missing.empty() || Clock::now() < deadline.when()) return;
  // Who is kept by another host is not late: those who wait for that host know more, and tell.
  const bool kept = std::all_of(missing.begin(), missing.end(),
                                [&](int rank) { return world.state(rank).away.load(std::memory_order_relaxed) != 0; });
  if (kept && Clock::now() < deadline.when() + kKept) return;
  const auto described = [&](int rank) {
    const std::string pid = world.pid_text(rank);
    return fmt::format("rank {}{} {}", world.name(rank), pid.empty() ? "" : " (" + pid + ")", omission(rank));
  };
  end_world(ErrorCode::Timeout, world.name(missing.front()),
            timeout_text(running(), deadline, list_missing(missing, described)));
}

}  // namespace cohort::comm::local
