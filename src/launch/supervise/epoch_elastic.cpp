// What becomes of an elastic job's members: who fails leaves, and the others go on, in processes that they keep.
#include "base/parse.h"
#include "base/signals.h"
#include "launch/supervise/epoch.h"

#include <algorithm>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

/// "worker 3 (h2) was killed by SIGKILL".
std::string how_left(const Ending& ending) {
  const std::string who = fmt::format("worker {} ({})", ending.rank, ending.host);
  return ending.status.signal != 0 ? fmt::format("{} was {}", who, sys::to_string(ending.status))
                                   : fmt::format("{} ended with {}", who, sys::to_string(ending.status));
}

/// " (ranks 0-2 are workers 0,2-3)"; empty where the numbers are the same.
std::string numbering_of(const rendezvous::Membership& now) {
  const std::vector<int> workers = workers_of(now);
  bool same = true;
  for (std::size_t rank = 0; rank < workers.size(); ++rank) same = same && workers[rank] == static_cast<int>(rank);
  if (same) return {};
  if (workers.size() == 1) return fmt::format(" (rank 0 is worker {})", workers.front());
  return fmt::format(" (ranks 0-{} are workers {})", workers.size() - 1, to_ranges(workers));
}

}  // namespace

void Epoch::begin_elastic() {
  if (!spec_.elastic) return;
  std::vector<Elastic::Worker> workers;
  for (const PlannedHost& host : setup_.plan.hosts) {
    for (int i = 0; i < host.ranks; ++i) workers.push_back({host.first_rank + i, host.index, host.name});
  }
  worlds_.assign(workers.size(), 0);
  worlds_then_ = worlds_;
  elastic_.emplace(Elastic::Limits{spec_.elastic.least, spec_.elastic.most, spec_.elastic.most_changes, false},
                   std::move(workers));
  state_.members = {{utc_now(), elastic_->current()}};
}

void Epoch::let_failed_leave() {
  if (!elastic_ || stage_ != Stage::Running || elastic_->over()) return;
  std::vector<int> workers;
  std::string cause;
  for (; considered_ < end_.endings.size(); ++considered_) {
    const Ending& ending = end_.endings[considered_];
    if (has_ended_well(ending)) {
      elastic_->finish(ending.rank);
      continue;
    }
    cause += (cause.empty() ? "" : "; ") + how_left(ending);
    workers.push_back(ending.rank);
    spare(considered_);
  }
  if (!workers.empty()) (void)follow(elastic_->leave(workers, cause), cause);
}

void Epoch::spare(std::size_t ending) {
  end_.endings[ending].spared = true;
  fresh_leavers_.push_back(ending);
  health_->left(end_.endings[ending].rank);
}

bool Epoch::goes_on_without_ranks(AgentHandle& agent, const std::string& why) {
  if (stage_ != Stage::Running || elastic_->over() || agent.all_gone) return false;
  const std::vector<int> processes = processes_of(setup_.plan, agent.host);
  std::vector<int> lost;
  std::ranges::copy_if(processes, std::back_inserter(lost), [this](int one) { return !members_.has_ended(one); });
  if (lost.empty()) {
    say(fmt::format("{} is lost ({}), where nothing ran any more", agent.host.name, why));
  } else {
    const bool one = lost.size() == 1;
    const std::string cause = fmt::format("worker{} {} {} lost with {} host {} ({})", one ? "" : "s", to_ranges(lost),
                                          one ? "is" : "are", one ? "its" : "their", agent.host.name, why);
    if (!follow(elastic_->leave(lost, cause), cause)) return false;
  }
  agent.all_gone = true;
  AgentPool::kill(agent);  // its guard, if it lives, ends what is left
  for (const int process : lost) {
    Ending ending = ending_of(process, {});
    ending.status.signal = SIGKILL;
    ending.after_seconds = std::chrono::duration<double>(Clock::now() - started_at_).count();
    members_.end(process);
    health_->rank_ended(process, {});
    run_.process_ended(process, false, ending.status);
    end_.endings.push_back(std::move(ending));
    spare(end_.endings.size() - 1);
    if (process == 0) input_.reset();
  }
  considered_ = end_.endings.size();
  health_->host_ended(processes);
  return true;
}

bool Epoch::follow(const Elastic::Decision& decision, const std::string& cause) {
  switch (decision.kind) {
    case Elastic::Decision::Kind::Nothing: return true;
    case Elastic::Decision::Kind::Announce:
      announce_members();
      return true;
    case Elastic::Decision::Kind::Wait: {
      const auto limit = spec_.elastic.timeout.value_or(kElasticTimeout);
      say(fmt::format("{}; {}: waiting up to {} s for hosts", cause, decision.why, limit.count()));
      limits_.elastic = Timer(loop_, limit, [this, limit] {
        (void)follow(elastic_->give_up(fmt::format("no hosts have come within {} s (--elastic-timeout)", limit.count())),
                     "too few workers are left");
        look_for_failure();
      });
      return true;
    }
    case Elastic::Decision::Kind::End:
      say(fmt::format("{}; the job cannot go on: {}", cause, decision.why));
      for (const std::size_t ending : std::exchange(fresh_leavers_, {})) end_.endings[ending].spared = false;
      return false;
  }
  return false;
}

void Epoch::announce_members() {
  const rendezvous::Membership& now = elastic_->current();
  limits_.elastic = Timer();
  worlds_then_ = worlds_;
  try {
    events_.on_members(now);
  } catch (const Error& error) {
    if (!end_.stop_status) end_.stop_status = 1;
    return stop(fmt::format("the job's store does not take its new members: {}", error.what()), SIGTERM,
                {spec_.grace});
  }
  agents_.broadcast(NewMembership{now.epoch});
  run_.members_changed(now, fmt::format("{}; epoch {} goes on with {} workers{}", now.cause, now.epoch,
                                        elastic_->sizes(), numbering_of(now)));
}

void Epoch::note_worlds(const Reports& reports) {
  if (!elastic_) return;
  for (const RankReport& report : reports.ranks) {
    if (report.rank < 0 || static_cast<std::size_t>(report.rank) >= worlds_.size()) continue;
    const auto rank = static_cast<std::size_t>(report.rank);
    worlds_[rank] = report.worlds;
    if (fresh_leavers_.empty() || elastic_->waits() || report.worlds <= worlds_then_[rank]) continue;
    fresh_leavers_.clear();
    end_.doing_then.clear();  // of the failure that is over
  }
}

}  // namespace cohort::launch
