#include "launch/watch/verdict.h"

#include <cohort/exit_status.h>

#include "launch/rank_report.h"
#include "sys/signals.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace cohort::launch {
namespace {

/// "asked to end by SIGUSR1; all 4 ranks have saved and ended".
std::string requeue_reason(const JobEnd& end, std::ptrdiff_t ranks) {
  int signal = 0;
  for (const Ending& ending : end.endings) signal = std::max(signal, static_cast<int>(ending.last.preempted_by));
  const int all = end.roles.workers;
  const std::string who = ranks == all ? ranks == 1 ? "the rank has" : fmt::format("all {} ranks have", ranks)
                                       : fmt::format("{} of {} ranks {}", ranks, all, ranks == 1 ? "has" : "have");
  if (signal == 0) return fmt::format("{} ended", who);
  return fmt::format("asked to end by {}; {} saved and ended", sys::signal_name(signal), who);
}

/// The ranks that had ended with 0, where the first that failed says that it has lost another: nobody else was lost.
/// One that had left its world may have taken longer to end than the other to fail; then it has to be the one that is
/// named.
std::vector<int> missed_by(const Ending& failure, const std::vector<Ending>& endings) {
  std::vector<int> ranks;
  if (failure.role != Role::Worker || !follows_another(failure)) return ranks;
  for (const Ending& ending : endings) {
    if (ending.role != Role::Worker || !ending.status.success() || !ending.before_stop) continue;
    const bool named = failure.cause.code == static_cast<int>(ErrorCode::PeerLost) && failure.cause.peer == ending.rank;
    if (named || ending.after_seconds <= failure.after_seconds) ranks.push_back(ending.rank);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

}  // namespace

Verdict judge(const JobEnd& end) {
  Verdict verdict;
  verdict.status = end.stop_status.value_or(0);
  verdict.reason = end.start_failure.empty() ? end.stop_reason : end.start_failure;
  const auto failure = first_failure(end.endings);
  const int ranks = end.roles.workers;
  const auto of_ranks = [&end](auto condition) {
    return static_cast<int>(std::count_if(end.endings.begin(), end.endings.end(), [&](const Ending& ending) {
      return ending.role == Role::Worker && condition(ending);
    }));
  };
  const int good = of_ranks([](const Ending& ending) { return ending.status.success(); });
  const int saved = of_ranks(asks_for_requeue);
  const bool by_themselves = !end.stop_status || end.told_to_end;
  // A server that lost what it had makes of the ranks' saving nothing to go on from.
  if (by_themselves && saved > 0 && saved + good == ranks && !failure) {
    verdict.status = kRequeueStatus;
    verdict.requeue = true;
    verdict.reason = requeue_reason(end, saved);
    verdict.text = fmt::format("cohort: {}, after {:.1f} s; exit status {} asks for a requeue\n", verdict.reason,
                               end.seconds, kRequeueStatus);
  } else if (!end.start_failure.empty()) {
    verdict.text = "cohort: " + end.start_failure + "\n";
  } else if (!end.stop_status && failure) {
    verdict.status = failure->status.shell_status();
    PostMortem post_mortem;
    post_mortem.first = *failure;
    post_mortem.world_size = ranks;
    post_mortem.ended_well =
        of_ranks([](const Ending& ending) { return ending.before_stop && ending.status.success(); });
    post_mortem.missed = missed_by(*failure, end.endings);
    if (end.early) post_mortem.running = ranks - of_ranks([](const Ending&) { return true; });
    post_mortem.others = folded(end.doing_then, end.roles, end.roles.process_of(failure->role, failure->rank));
    post_mortem.log_folder = end.log_folder;
    post_mortem.colour = end.colour;
    verdict.text = to_string(post_mortem);
    const std::string cause = sys::to_string(failure->status);
    verdict.breakdown = Breakdown{fmt::format("{} on {} failed after {:.1f} s: {}", failure->name(), failure->host,
                                              failure->after_seconds, cause),
                                  cause, failure->after_seconds};
    verdict.post_mortem = std::move(post_mortem);
  } else if (!end.stop_status && of_ranks(has_ended_well) != ranks) {
    verdict.status = 1;
    verdict.reason = "the job ended without word from all ranks";
    verdict.text = "cohort: " + verdict.reason + "\n";
  } else if (end.stop_status && !end.quiet) {
    verdict.text = fmt::format("cohort: {}, after {:.1f} s{}\n", end.stop_reason.empty() ? "ended" : end.stop_reason,
                               end.seconds, end.log_folder.empty() ? "" : "; logs in " + end.log_folder);
    if (end.stuck) {
      verdict.breakdown = Breakdown{fmt::format("{}, after {:.1f} s", end.stop_reason, end.seconds),
                                    "the job did not go on", end.seconds};
    }
  }
  return verdict;
}

// (Workers of parameter servers need no world.)
std::string doubt_about(const JobEnd& end, const Verdict& verdict) {
  const int ranks = end.roles.workers;
  const bool joined = std::any_of(end.endings.begin(), end.endings.end(), [](const Ending& ending) {
    return ending.role == Role::Worker && (ending.last.worlds > 0 || !ending.last.groups.empty());
  });
  if (verdict.status != 0 || ranks < 2 || end.roles.servers > 0 || joined) return {};
  return fmt::format(
      "{0} ranks ended without joining a world of Cohort's: {0} independent runs? (cohort::join, cohort.init and "
      "init_process_group form one; worlds of other libraries are not seen)",
      ranks);
}

}  // namespace cohort::launch
