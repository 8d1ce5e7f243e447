// The part of State for clocks that end without some of the workers (SyncOptions::backup_workers). The first server
// decides whose pushes of a clock count: those of the workers that have ended it when only the backup workers have not.
// Workers tell the others.
//   A worker ends its clock only at the first server, when all servers have its pushes. So all have the quorum's
//   pushes. Before a worker sends anything at a clock, it tells all servers whose pushes counted before. So no server
//   is more than one clock behind the first server, and only the last decision has to be kept.

#include "ps/state.h"

#include <algorithm>
#include <utility>

namespace cohort::ps {
namespace {

bool holds(const Worker& worker) noexcept {
  return worker.phase == Worker::Phase::Expected || worker.phase == Worker::Phase::Live;
}

std::string name(std::uint32_t number, const Worker& worker) {
  if (worker.phase == Worker::Phase::Expected) return fmt::format("worker {} (has not come yet)", number);
  return fmt::format("worker {} on {}", number, worker.host);
}

constexpr std::size_t kMostNamed = 4;

}  // namespace

bool Workers::holds_others(std::uint32_t worker) const noexcept { return holds(all_[worker]); }

std::optional<std::int64_t> Workers::least() const noexcept {
  std::optional<std::int64_t> least;
  for (const Worker& worker : all_) {
    if (holds(worker) && (!least || worker.committed < *least)) least = worker.committed;
  }
  return least;
}

std::int64_t Workers::most() const noexcept {
  std::int64_t most = 0;
  for (const Worker& worker : all_) most = std::max(most, worker.committed);
  return most;
}

std::uint64_t Workers::latest_barrier() const noexcept {
  std::uint64_t latest = 0;
  for (const Worker& worker : all_) latest = std::max(latest, worker.barrier);
  return latest;
}

bool Workers::past_barrier(std::uint64_t number) const noexcept {
  return std::all_of(all_.begin(), all_.end(),
                     [&](const Worker& worker) { return !holds(worker) || worker.barrier >= number; });
}

std::string Workers::behind(std::int64_t clocks) const {
  std::string names;
  std::size_t named = 0, found = 0;
  for (std::uint32_t i = 0; i < count(); ++i) {
    if (!holds(all_[i]) || all_[i].committed >= clocks) continue;
    if (++found > kMostNamed) continue;
    names += fmt::format("{}{} at clock {}{}", named++ == 0 ? "" : ", ", name(i, all_[i]), all_[i].committed,
                         all_[i].fenced ? " (its connection is lost)" : "");
  }
  if (found > named) names += fmt::format(" and {} more", found - named);
  return names;
}

std::string Workers::not_at_barrier(std::uint64_t number) const {
  std::string names;
  for (std::uint32_t i = 0; i < count(); ++i) {
    if (holds(all_[i]) && all_[i].barrier < number) names += (names.empty() ? "" : ", ") + name(i, all_[i]);
  }
  return names;
}

Result<Workers::Verdict> Workers::judge(const Author& author) const {
  const Worker& worker = all_[author.worker];
  if (author.incarnation != worker.incarnation || worker.fenced || worker.phase == Worker::Phase::Gone) {
    return fail(ErrorCode::Aborted,
                "worker {} was taken for lost by its parameter servers, or has been started again: what it sends does "
                "not count any more -- connect again",
                author.worker);
  }
  if (author.order.sequence <= worker.mark) return Verdict::Made;
  if (author.order.sequence != worker.mark + 1) {
    return fail(ErrorCode::Corrupt,
                "worker {} sends its change {}, and the server knows its changes up to {}: the server has been started "
                "again with an older state -- start all again from a snapshot",
                author.worker, author.order.sequence, worker.mark);
  }
  return Verdict::New;
}

std::int64_t State::backup_workers() const noexcept {
  return tables_.empty() ? 0 : tables_.front().table.options().consistency.backup_workers;
}

Result<void> State::check_backup_workers(const Open& open) const {
  const std::int64_t wanted = open.options.consistency.backup_workers;
  if (wanted == 0 && backup_workers() == 0) return {};
  if (wanted >= workers_.count()) {
    return fail(ErrorCode::InvalidArgument,
                "table \"{}\" has {} backup workers, and there are {} workers -- one at least has to count", open.name,
                wanted, workers_.count());
  }
  if (!tables_.empty()) {
    const SparseTable& first = tables_.front().table;
    const Consistency& one = first.options().consistency;
    if (one.mode == open.options.consistency.mode && one.backup_workers == wanted) return {};
    return fail(
        ErrorCode::InvalidArgument,
        "table \"{}\" is {}, and \"{}\" is {} -- with backup workers all tables have to be Sync with as many: a "
        "late worker's pushes are dropped from all or from none",
        open.name, described(open.options.consistency), first.name(), described(one));
  }
  if (workers_.most() > 0) {
    return fail(ErrorCode::InvalidArgument,
                "table \"{}\" has backup workers, and a worker has ended a clock already -- open it before any does",
                open.name);
  }
  return {};
}

Concluded State::concluded(std::uint32_t number) const {
  const Worker& worker = workers_.at(number);
  return {{settled_, quorum_}, worker.committed, worker.late};
}

Result<void> State::check_propose(const Command& command) const {
  const auto ended = unpack<Commit>(command.body);
  if (!ended) return tl::unexpected(ended.error());
  const Worker& worker = workers_.at(command.worker);
  if (!ended->payload.empty() || !decides() || backup_workers() == 0 || ended->record.clock != worker.committed ||
      worker.committed > settled_) {
    return fail(ErrorCode::Corrupt, "worker {} ends clock {} after it has ended {}", command.worker,
                ended->record.clock, worker.committed);
  }
  return {};
}

Result<void> State::check_conclude(const Command& command) const {
  const auto told = unpack<Conclude>(command.body);
  if (!told) return tl::unexpected(told.error());
  const Quorum& quorum = told->record.quorum;
  if (!told->payload.empty() || backup_workers() == 0 || quorum.clocks > settled_ + (decides() ? 0 : 1) ||
      (!quorum.workers.empty() && quorum.workers.back() >= workers_.count()) ||
      told->record.clock < workers_.at(command.worker).committed) {
    return fail(ErrorCode::Corrupt, "worker {} goes on at clock {} of {}, after {} of {}", command.worker,
                told->record.clock, quorum.clocks, workers_.at(command.worker).committed, settled_);
  }
  return {};
}

void State::propose(std::uint32_t number, std::int64_t clock, std::uint32_t now) {
  Worker& worker = workers_.at(number);
  worker.late = clock < settled_;
  worker.committed = worker.late ? settled_ : clock + 1;
  seek_quorum(now);
}

void State::conclude(std::uint32_t number, const Conclude& told, std::uint32_t now) {
  if (told.quorum.clocks > settled_) {
    quorum_ = told.quorum.workers;
    end_clock(now);
  }
  workers_.at(number).committed = told.clock;
  // Pushes of an earlier process of this worker can no longer be in any quorum.
  unstage([&](const Staged& one) { return one.worker == number; });
}

void State::seek_quorum(std::uint32_t now) {
  if (!decides()) return;
  std::vector<std::uint32_t> ended;
  bool awaited = false;
  for (std::uint32_t number = 0; number < workers_.count(); ++number) {
    if (workers_.at(number).committed > settled_) {
      ended.push_back(number);
    } else {
      awaited = awaited || workers_.holds_others(number);
    }
  }
  const std::int64_t enough = static_cast<std::int64_t>(workers_.count()) - backup_workers();
  if (ended.empty() || (awaited && static_cast<std::int64_t>(ended.size()) < enough)) return;
  quorum_ = std::move(ended);
  end_clock(now);
}

void State::end_clock(std::uint32_t now) {
  unstage([&](const Staged& one) {
    return one.clock <= settled_ && !std::binary_search(quorum_.begin(), quorum_.end(), one.worker);
  });
  step_staged(now);
  ++settled_;
}

void State::withdraw(std::uint32_t number) {
  if (backup_workers() == 0) return drop_staged(number);
  // The worker may be in a quorum that this server does not know yet. Otherwise the next quorum drops its pushes.
  if (!decides()) return;
  Worker& worker = workers_.at(number);
  worker.committed = std::min(worker.committed, settled_);
  unstage([&](const Staged& one) { return one.worker == number; });
}

}  // namespace cohort::ps
