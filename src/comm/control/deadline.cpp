#include "comm/control/deadline.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace cohort::comm {

Deadline::Clock::time_point Deadline::when() const noexcept { return std::min(called_ + timeout_, limit()); }

std::string Deadline::after() const {
  return called_ + timeout_ <= limit() ? fmt::format("after {} ms", timeout_.count()) : "(an operation behind it did)";
}

std::string list_missing(const std::vector<int>& missing, const std::function<std::string(int)>& described) {
  constexpr std::size_t kMostListed = 8;
  std::vector<std::string> who;
  for (const int rank : missing) {
    if (who.size() == kMostListed) {
      who.push_back(fmt::format("and {} more", missing.size() - who.size()));
      break;
    }
    who.push_back(described(rank));
  }
  return fmt::format("{}", fmt::join(who, "; "));
}

std::string timeout_text(const RunningOperation& operation, const Deadline& deadline, const std::string& missing) {
  return fmt::format(
      "{} timed out {} -- rank {} ({}), operation {} -- {} -- is it stopped, slow, or in another branch "
      "of the program? give a longer timeout if it is only slow",
      operation.text, deadline.after(), operation.rank, operation.host, operation.number, missing);
}

std::string lost_text(const RunningOperation& operation, int peer, std::string_view host, std::string_view pid,
                      std::string_view how) {
  return fmt::format(
      "{} failed -- rank {} ({}) lost rank {} ({}{}{}) in operation {} -- {} -- see the output of rank "
      "{}; form a new communicator",
      operation.text, operation.rank, operation.host, peer, host, pid.empty() ? "" : ", ", pid, operation.number, how,
      peer);
}

}  // namespace cohort::comm
