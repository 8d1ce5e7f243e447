#include "base/log.h"
#include "base/result.h"
#include "base/thread.h"
#include "telemetry/timeline.h"

#include <cohort/track.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <iterator>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace cohort::track {
namespace {

// Sends values that all ranks log to rank 0: each round takes the values that every rank has logged so far. One thread
// calls `round`, any thread may call `add`. SharedValues owns its group.

struct SharedEntry {
  MetricLine line;
  Reduce reduce = Reduce::Mean;
};

class SharedValues {
 public:
  /// Every rank of `communicator` constructs a SharedValues. Blocks, and throws what Communicator::group throws.
  explicit SharedValues(Communicator& communicator);

  void add(SharedEntry entry);

  enum class Wish {
    GoOn,
    End,   ///< end when all ranks want to end
    Leave  ///< end now
  };
  /// Runs one round of all ranks; returns the complete values on rank 0. Throws Error if the round fails. Must not be
  /// called after an error or after done().
  std::vector<MetricLine> round(Wish wish);
  bool done() const noexcept { return done_; }
  /// Removes and returns the logged values that no round has taken yet, marked as values of this rank only.
  std::vector<MetricLine> take_rest();

 private:
  std::vector<MetricLine> bring(std::size_t entries);

  Communicator group_;
  bool done_ = false;
  std::string mismatch_;  ///< set on rank 0, which then announces to the others that the next round is the last
  std::mutex mutex_;
  std::deque<SharedEntry> entries_;
};

constexpr std::size_t kMostEntriesOfARound = 4096;

/// Returns a digest that is equal if ranks have logged the same steps, names and reductions.
double digest_of(std::span<const SharedEntry> entries) {
  std::string all;
  for (const SharedEntry& entry : entries) {
    all += std::to_string(entry.line.step) + ' ' + std::to_string(static_cast<int>(entry.reduce));
    for (const auto& [name, value] : entry.line.values) all.append(" ").append(name);
    all += '\n';
  }
  // A double represents every 52-bit number exactly.
  return static_cast<double>(std::hash<std::string>()(all) >> 12);
}

double reduced(std::span<const double> of_ranks, Reduce reduce) {
  switch (reduce) {
    case Reduce::Max: return *std::max_element(of_ranks.begin(), of_ranks.end());
    case Reduce::Min: return *std::min_element(of_ranks.begin(), of_ranks.end());
    case Reduce::Sum: return std::accumulate(of_ranks.begin(), of_ranks.end(), 0.0);
    default: return std::accumulate(of_ranks.begin(), of_ranks.end(), 0.0) / static_cast<double>(of_ranks.size());
  }
}

Communicator group_of_all(Communicator& communicator) {
  std::vector<int> ranks(static_cast<std::size_t>(communicator.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return communicator.group(ranks, {.background = true});
}

SharedValues::SharedValues(Communicator& communicator) : group_(group_of_all(communicator)) {}

void SharedValues::add(SharedEntry entry) {
  const std::scoped_lock lock(mutex_);
  entries_.push_back(std::move(entry));
}

std::vector<MetricLine> SharedValues::round(Wish wish) {
  if (!mismatch_.empty()) wish = Wish::Leave;
  std::int64_t said[3] = {0, wish == Wish::GoOn ? 0 : 1, wish == Wish::Leave ? 0 : 1};
  if (mismatch_.empty()) {
    const std::scoped_lock lock(mutex_);
    said[0] = static_cast<std::int64_t>(std::min(entries_.size(), kMostEntriesOfARound));
  }
  group_.all_reduce(std::span(said), {.op = ReduceOp::Min}).wait();
  if (!mismatch_.empty()) raise(ErrorCode::Mismatch, "{}", mismatch_);
  std::vector<MetricLine> lines;
  if (said[0] > 0) lines = bring(static_cast<std::size_t>(said[0]));
  const bool more = said[0] == static_cast<std::int64_t>(kMostEntriesOfARound);
  done_ = !more && (said[1] == 1 || said[2] == 0);
  return lines;
}

std::vector<MetricLine> SharedValues::bring(std::size_t entries) {
  std::vector<SharedEntry> taken;
  {
    const std::scoped_lock lock(mutex_);
    const auto end = entries_.begin() + static_cast<std::ptrdiff_t>(entries);
    taken.assign(entries_.begin(), end);
  }
  std::vector<double> mine = {digest_of(taken)};
  for (const SharedEntry& entry : taken) {
    for (const auto& [name, value] : entry.line.values) mine.push_back(value);
  }
  const auto ranks = static_cast<std::size_t>(group_.size());
  std::vector<double> all(group_.rank() == 0 ? mine.size() * ranks : 0);
  group_.gather(std::span(mine), std::span(all)).wait();
  std::vector<MetricLine> lines;
  if (group_.rank() == 0) {
    for (std::size_t rank = 1; rank < ranks; ++rank) {
      if (all[rank * mine.size()] == mine[0]) continue;
      mismatch_ = fmt::format("rank {} has logged other steps or names than rank 0", rank);
      return lines;
    }
    std::size_t at = 1;
    std::vector<double> of_ranks(ranks);
    for (SharedEntry& entry : taken) {
      const auto value_of = [&](std::size_t rank, std::size_t i) { return all[rank * mine.size() + at + i]; };
      const std::size_t values = entry.line.values.size();
      for (std::size_t rank = 0; rank < (entry.reduce == Reduce::Each ? ranks : 0); ++rank) {
        MetricLine& line = lines.emplace_back(entry.line);
        line.rank = static_cast<int>(rank);
        for (std::size_t i = 0; i < values; ++i) line.values[i].second = value_of(rank, i);
      }
      if (entry.reduce != Reduce::Each) {
        for (std::size_t i = 0; i < values; ++i) {
          for (std::size_t rank = 0; rank < ranks; ++rank) of_ranks[rank] = value_of(rank, i);
          entry.line.values[i].second = reduced(of_ranks, entry.reduce);
        }
        lines.push_back(std::move(entry.line));
      }
      at += values;
    }
  }
  const std::scoped_lock lock(mutex_);
  entries_.erase(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(entries));
  return lines;
}

std::vector<MetricLine> SharedValues::take_rest() {
  const std::scoped_lock lock(mutex_);
  std::vector<MetricLine> lines;
  for (SharedEntry& entry : entries_) {
    entry.line.rank = group_.rank();
    lines.push_back(std::move(entry.line));
  }
  entries_.clear();
  return lines;
}

using Clock = std::chrono::steady_clock;

/// Limit on lines that are kept while the disk is full.
constexpr std::size_t kMostLinesKept = 100'000;
/// Interval of rounds while some ranks have ended and wait for the others.
constexpr auto kLastRounds = std::chrono::milliseconds(20);

}  // namespace

struct Metrics::Impl {
  RunRecord* record;
  MetricsOptions options;
  std::unique_ptr<SharedValues> shared;  // set in a world of several ranks
  bool alone = false;                    // true in a world of one

  std::mutex mutex;
  std::condition_variable news;
  std::vector<MetricLine> lines;
  bool ending = false;

  std::mutex write_mutex;
  std::vector<MetricLine> unwritten;  // older than `lines`
  bool told = false;                  // a warning of an unwritable record was given
  std::mutex join_mutex;
  std::thread thread;

  Impl(RunRecord* where, const MetricsOptions& given) : record(where), options(given) {
    if (options.communicator && options.communicator.size() > 1) {
      shared = std::make_unique<SharedValues>(options.communicator);
    }
    alone = options.communicator && !shared;
    options.communicator = {};  // `shared` has its own group
    if (record == nullptr && !shared) return;
    try {
      thread = sys::start_without_signals([this] { run(); });
    } catch (const std::system_error& error) {
      raise(ErrorCode::Unavailable, "track::Metrics: no thread -- {} -- raise the limit of threads", error.what());
    }
  }
  ~Impl() { close({}); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void close(std::optional<std::chrono::milliseconds> patience) {
    {
      const std::scoped_lock lock(mutex);
      if (patience && !ending) options.patience = *patience;
      ending = true;
    }
    news.notify_all();
    const std::scoped_lock joining(join_mutex);
    if (thread.joinable()) thread.join();
  }

  void add(std::vector<MetricLine> more) {
    const std::scoped_lock lock(mutex);
    lines.insert(lines.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  }

  void write() {
    const std::scoped_lock writing(write_mutex);
    {
      const std::scoped_lock lock(mutex);
      unwritten.insert(unwritten.end(), std::make_move_iterator(lines.begin()), std::make_move_iterator(lines.end()));
      lines.clear();
    }
    if (record == nullptr || unwritten.empty()) return unwritten.clear();
    record->write_metrics(unwritten);
    unwritten.clear();
  }

  void write_or_tell() {
    try {
      write();
      return;
    } catch (const Error& error) {
      if (!std::exchange(told, true))
        log::warn("track", "metrics are kept until they can be written: {}", error.what());
    }
    const std::scoped_lock writing(write_mutex);
    if (unwritten.size() <= kMostLinesKept) return;
    const std::size_t lost = unwritten.size() - kMostLinesKept;
    unwritten.erase(unwritten.begin(), unwritten.begin() + static_cast<std::ptrdiff_t>(lost));
    log::warn("track", "{} lines of metrics are lost: the record cannot be written", lost);
  }

  /// Runs a round; returns false if it was the last.
  bool meet(SharedValues::Wish wish) {
    try {
      add(shared->round(wish));
      if (!shared->done()) return true;
    } catch (const Error& error) {
      log::warn("track", "values of several ranks are no longer reduced, rank 0's are written: {}", error.what());
    }
    return false;
  }

  void run() {
    bool meeting = shared != nullptr;
    for (bool last = false; !last;) {
      {
        std::unique_lock lock(mutex);
        last = news.wait_for(lock, options.interval, [this] { return ending; });
      }
      if (meeting && !last) meeting = meet(SharedValues::Wish::GoOn);
      if (shared && !meeting) add(shared->take_rest());
      if (!last) write_or_tell();
    }
    const Clock::time_point until = Clock::now() + options.patience;
    while (meeting) {
      meeting = meet(Clock::now() < until ? SharedValues::Wish::End : SharedValues::Wish::Leave);
      if (meeting) std::this_thread::sleep_for(kLastRounds);
    }
    if (shared) add(shared->take_rest());
    write_or_tell();
  }
};

Metrics::Metrics(RunRecord* record, const MetricsOptions& options) : impl_(std::make_unique<Impl>(record, options)) {}
Metrics::~Metrics() = default;

void Metrics::log(std::int64_t step, std::span<const Metric> values, Reduce reduce) {
  const bool own = reduce == Reduce::No || impl_->alone;
  if (!own && !impl_->shared) {
    raise(ErrorCode::InvalidArgument, "logging step {} failed -- values of all ranks need MetricsOptions::communicator",
          step);
  }
  if (own && impl_->record == nullptr) return;
  MetricLine line{.step = step, .values = {}};
  line.values.reserve(values.size());
  for (const Metric& metric : values) line.values.emplace_back(metric.name, metric.value);
  if (own && reduce == Reduce::Each) line.rank = 0;
  const std::scoped_lock lock(impl_->mutex);
  if (impl_->ending) return;
  if (!own) return impl_->shared->add({std::move(line), reduce});
  impl_->lines.push_back(std::move(line));
}

void Metrics::flush() { impl_->write(); }
void Metrics::close(std::optional<std::chrono::milliseconds> patience) { impl_->close(patience); }

namespace timeline = status::timeline;

Span::Span(std::string_view name) noexcept
    : name_(name), begun_(timeline::on() ? timeline::Clock::now() : timeline::Clock::time_point()) {}

Span::~Span() {
  if (begun_ == timeline::Clock::time_point{}) return;
  timeline::add({status::TimelineKind::Span, name_, begun_, timeline::Clock::now(), timeline::this_thread(), 0, 0, {}});
}

}  // namespace cohort::track
