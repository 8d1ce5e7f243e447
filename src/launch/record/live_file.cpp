#include "launch/record/live_file.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace cohort::launch {
namespace {

using Clock = std::chrono::steady_clock;

/// Between two writes; more where they take long, so that they take a small part of the time.
constexpr std::chrono::milliseconds kPause{250};
constexpr int kPauseShare = 20;
/// What has not changed is written all the same: by its time readers see that the launcher lives.
constexpr double kPulseSeconds = 2;

}  // namespace

LiveFile::~LiveFile() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void LiveFile::write(LiveRun run) {
  due_.store(false, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    next_ = std::move(run);
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  }
  changed_.notify_all();
}

std::optional<std::string> LiveFile::complaint() {
  const std::lock_guard lock(mutex_);
  if (!complaint_ || std::exchange(complained_, true)) return std::nullopt;
  return complaint_;
}

void LiveFile::work() {
  std::string written;
  double written_at = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || next_; });
    if (!next_) return;
    LiveRun run = *std::exchange(next_, std::nullopt);
    lock.unlock();
    const auto begin = Clock::now();
    const double time = std::exchange(run.time, 0);
    std::string text = to_json(run);
    std::optional<std::string> failed;
    if (text != written || time - written_at >= kPulseSeconds || time < written_at) {
      run.time = time;
      if (const auto done = replace_file(folder_, kLiveFile, to_json(run)); !done) failed = done.error().what();
      written = std::move(text);
      written_at = time;
    }
    const auto pause = std::max<Clock::duration>(kPause, kPauseShare * (Clock::now() - begin));
    lock.lock();
    if (failed && !complaint_) complaint_ = std::move(failed);
    changed_.wait_for(lock, pause, [this] { return closing_; });
    due_.store(true, std::memory_order_relaxed);
  }
}

}  // namespace cohort::launch
