#include "comm/local/waiting.h"

#include "base/result.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace cohort::comm::local {
namespace {

constexpr auto kKept = std::chrono::seconds(3);

}  // namespace

void Waiter::end_world(ErrorCode code, int peer, const std::string& text) {
  world_.record(code, peer, number(), text);
  throw world_.recorded(doing(), number());
}

void Waiter::end_lost(int rank, const std::string& how) {
  const std::string pid = world_.pid_text(rank);
  end_world(
      ErrorCode::PeerLost, world_.name(rank),
      fmt::format("{} failed -- rank {} ({}) lost rank {} ({}{}) in operation {} -- {}; it {} -- see the output of "
                  "rank {}; the communicator has to be formed anew",
                  doing(), world_.name(world_.rank()), world_.host(), world_.name(rank), world_.host(),
                  pid.empty() ? "" : ", " + pid, number(), how, omission(rank), world_.name(rank)));
}

// Ends the world if a rank that is waited for has died, or if the deadline has passed.
void Waiter::look_after(const std::function<std::vector<int>()>& missing_now) {
  if (called_ == Clock::time_point{}) called_ = Clock::now();
  const std::vector<int> missing = missing_now();
  for (const int rank : missing) {
    const auto how = world_.lost(rank);
    if (!how) continue;
    const std::vector<int> still = missing_now();  // it may have done its part and then gone
    if (std::find(still.begin(), still.end(), rank) == still.end()) continue;
    end_lost(rank, *how);
  }
  const auto limit = Clock::time_point(Clock::duration(waiting_limit_.load(std::memory_order_relaxed)));
  const auto deadline = called_ + timeout_;
  if (missing.empty() || Clock::now() < std::min(deadline, limit)) return;
  // Who is kept by another host is not late: those who wait for that host know more, and tell.
  const bool kept = std::all_of(missing.begin(), missing.end(),
                                [&](int rank) { return world_.state(rank).away.load(std::memory_order_relaxed) != 0; });
  if (kept && Clock::now() < std::min(deadline, limit) + kKept) return;
  std::vector<std::string> who;
  for (const int rank : missing) {
    const std::string pid = world_.pid_text(rank);
    who.push_back(fmt::format("rank {}{} {}", world_.name(rank), pid.empty() ? "" : " (" + pid + ")", omission(rank)));
    if (who.size() == 8 && missing.size() > 8) {
      who.push_back(fmt::format("and {} more", missing.size() - who.size()));
      break;
    }
  }
  const std::string after =
      deadline <= limit ? fmt::format("after {} ms", timeout_.count()) : std::string("(an operation behind it did)");
  end_world(
      ErrorCode::Timeout, world_.name(missing.front()),
      fmt::format("{} timed out {} -- rank {} ({}), operation {} -- {} -- is it stopped, slow, or in another branch "
                  "of the program? give a longer timeout if it is only slow",
                  doing(), after, world_.name(world_.rank()), world_.host(), number(), fmt::join(who, "; ")));
}

}  // namespace cohort::comm::local
