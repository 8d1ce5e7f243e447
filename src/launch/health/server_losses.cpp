#include "launch/health/server_losses.h"

#include <fmt/format.h>

#include <utility>

namespace cohort::launch {

void ServerLosses::begin_epoch() {
  lost_ = 0;
  again_.clear();
  awaited_.clear();
}

void ServerLosses::recall(int process, Ending& ending) const {
  const auto found = again_.find(process);
  if (found == again_.end()) return;
  const Ending& before = found->second;
  ending.restarts = before.restarts + 1;
  ending.first_cause = before.restarts == 0 ? sys::to_string(before.status) : before.first_cause;
}

ServerLosses::Decision ServerLosses::after(int process, const Ending& ending, int running) {
  const std::string lost =
      fmt::format("{} on {} is lost ({})", ending.name(), ending.host, sys::to_string(ending.status));
  // A wrong option is wrong after a restart, too.
  for (const ErrorCode hopeless : {ErrorCode::InvalidArgument, ErrorCode::Mismatch})
    if (ending.cause.code == static_cast<int>(hopeless)) return {};
  if (restarts_ < most_restarts_) {
    awaited_.insert(process);
    again_.insert_or_assign(process, ending);
    return {Outcome::Again, fmt::format("{}; it is started again ({} of {} times, --server-restarts)", lost,
                                        ++restarts_, most_restarts_)};
  }
  if (lost_ < most_lost_ && running > 1)
    return {Outcome::Without, fmt::format("{}; the job goes on without it ({} of {} that may be, --lost-servers)", lost,
                                          ++lost_, most_lost_)};
  return {};
}

// Lost servers are not started again on other hosts: servers with copies there replace them.
std::optional<std::string> ServerLosses::after_host(const std::string& host, const std::string& why,
                                                    const std::vector<int>& lost, const std::string& names,
                                                    int running) {
  const int count = static_cast<int>(lost.size());
  if (lost_ + count > most_lost_ || running <= count) return std::nullopt;
  lost_ += count;
  for (const int process : lost) awaited_.erase(process);
  if (count == 0) return fmt::format("{} is lost ({}), where nothing ran any more", host, why);
  return fmt::format(
      "{} on {} {} lost with {} host ({}); the job goes on without ({} of {} that may be, --lost-servers)", names, host,
      count == 1 ? "is" : "are", count == 1 ? "its" : "their", why, lost_, most_lost_);
}

std::optional<Ending> ServerLosses::settle(int process) {
  if (awaited_.erase(process) == 0) return std::nullopt;
  return again_.at(process);
}

}  // namespace cohort::launch
