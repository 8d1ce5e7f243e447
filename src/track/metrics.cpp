#include <cohort/track.h>

#include "base/log.h"
#include "base/result.h"
#include "sys/thread.h"
#include "track/shared_values.h"

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <system_error>
#include <thread>

namespace cohort::track {
namespace {

using Clock = std::chrono::steady_clock;

/// Kept for a disk that is full for a while.
constexpr std::size_t kMostLinesKept = 100'000;
/// Between rounds while some ranks wait for the others' end.
constexpr auto kLastRounds = std::chrono::milliseconds(20);

}  // namespace

struct Metrics::Impl {
  RunRecord* record;
  MetricsOptions options;
  std::unique_ptr<SharedValues> shared;  // in a world of several ranks
  bool alone = false;                    // in a world of one

  std::mutex mutex;
  std::condition_variable news;
  std::vector<MetricLine> lines;
  bool ending = false;

  std::mutex write_mutex;
  std::vector<MetricLine> unwritten;  // older than `lines`
  bool told = false;                  // of a record that cannot be written
  std::mutex join_mutex;
  std::thread thread;

  Impl(RunRecord* where, const MetricsOptions& wishes) : record(where), options(wishes) {
    if (options.communicator && options.communicator.size() > 1) {
      shared = std::make_unique<SharedValues>(options.communicator);
    }
    alone = options.communicator && !shared;
    options.communicator = {};  // the group is its own
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

  /// False once there will be no more.
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

}  // namespace cohort::track
