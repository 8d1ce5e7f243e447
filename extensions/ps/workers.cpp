#include "ps/state.h"

#include <algorithm>

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

}  // namespace cohort::ps
