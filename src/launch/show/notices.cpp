#include "launch/show/notices.h"

#include "sys/signals.h"

#include <fmt/format.h>

#include <algorithm>

namespace cohort::launch {

std::string to_string(const StartNotice& notice) {
  std::string text = to_string(notice.plan);
  if (notice.launchers) {
    const int ranks = notice.plan.hosts.front().ranks;
    const bool same = std::all_of(notice.plan.hosts.begin(), notice.plan.hosts.end(),
                                  [ranks](const PlannedHost& host) { return host.ranks == ranks; });
    text += same ? fmt::format(", -np {} of a launcher on each", ranks) : ", a launcher on each with its own -np";
  }
  if (notice.cores > 0)
    text += fmt::format(", more than the {} core{} here", notice.cores, notice.cores == 1 ? "" : "s");
  if (notice.bound) text += ", each bound to its share of the cores";
  if (notice.threads > 0) text += fmt::format(", {} thread{} each", notice.threads, notice.threads == 1 ? "" : "s");
  if (!notice.run_folder.empty()) text += ", run " + notice.run_folder;
  return text;
}

std::string to_string(const UnreadNotice& notice) {
  return fmt::format("the job is over and its output has not been read for {:g} s, so the rest of it is not shown{}",
                     notice.seconds,
                     notice.log_folder.empty() ? "" : "; the complete logs are in " + notice.log_folder);
}

std::string to_string(const StopNotice& notice) {
  std::string who = "what the ranks have started is still running";
  if (notice.ranks > 0)
    who = fmt::format("{} rank{} still running", notice.ranks, notice.ranks == 1 ? "" : "s");
  else if (!notice.others.empty())
    who = notice.others + " still running";
  return fmt::format("{}{}, {:.0f} s until {}{}", notice.reason.empty() ? "" : notice.reason + "; ", who,
                     notice.seconds_left, sys::signal_name(notice.next_signal),
                     notice.at_terminal ? "; Ctrl-C again: now" : "");
}

}  // namespace cohort::launch
