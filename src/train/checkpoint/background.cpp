#include "train/checkpoint/background.h"

#include "base/log.h"
#include "base/result.h"
#include "base/thread.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/exchange.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <system_error>
#include <utility>

namespace cohort::checkpoint {
namespace {

constexpr std::size_t kAlignment = 64;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

template <class Visit>
void each_span(Bundle& bundle, const Visit& visit) {
  for (TensorFile& file : bundle.files) {
    for (formats::NamedTensor& one : file.tensors) visit(one.tensor.bytes);
  }
  for (formats::NamedTensor& one : bundle.state) visit(one.tensor.bytes);
  for (formats::NamedTensor& one : bundle.random) visit(one.tensor.bytes);
  for (ShardBytes& one : bundle.shards) visit(one.bytes);
}

/// The latest background save of each folder and rank.
class LatestSaves {
 public:
  static LatestSaves& of_process() {
    static LatestSaves one;
    return one;
  }
  /// Returns the earlier save, if it may still run; null in a forked child, which lacks the save's thread.
  std::shared_ptr<PendingSave> find(const std::string& folder, int rank) {
    const std::lock_guard lock(mutex_);
    const auto found = saves_.find(key_of(folder, rank));
    return found == saves_.end() || found->second.home != ::getpid() ? nullptr : found->second.save.lock();
  }
  void note(const std::string& folder, int rank, const std::shared_ptr<PendingSave>& save) {
    const std::lock_guard lock(mutex_);
    saves_[key_of(folder, rank)] = {save, ::getpid()};
  }

 private:
  struct Latest {
    std::weak_ptr<PendingSave> save;
    pid_t home = 0;
  };
  using Key = std::pair<std::string, int>;
  static Key key_of(const std::string& folder, int rank) {
    return {std::filesystem::absolute(folder).lexically_normal().string(), rank};
  }
  std::mutex mutex_;
  std::map<Key, Latest> saves_;
};

thread_local bool in_background = false;

void wait_until_over(const PendingSave& save) {
  while (!save.wait_for(std::chrono::hours(1))) {
  }
}

}  // namespace

void wait_for_earlier_saves(const std::string& folder, int rank) {
  if (in_background) return;
  if (const auto save = LatestSaves::of_process().find(folder, rank)) wait_until_over(*save);
}

bool PendingSave::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

bool PendingSave::wait_for(std::chrono::nanoseconds limit) const {
  std::unique_lock lock(mutex_);
  return over_.wait_for(lock, limit, [&] { return done_; });
}

formats::StoredCheckpoint PendingSave::wait() {
  std::unique_lock lock(mutex_);
  over_.wait(lock, [&] { return done_; });
  told_ = true;
  if (error_) throw *error_;
  return *stored_;
}

void PendingSave::finish(std::optional<formats::StoredCheckpoint> stored, std::optional<Error> error) {
  const std::lock_guard lock(mutex_);
  stored_ = std::move(stored);
  error_ = std::move(error);
  done_ = true;
  over_.notify_all();
}

std::optional<Error> PendingSave::untold() {
  const std::lock_guard lock(mutex_);
  return std::exchange(told_, true) ? std::nullopt : error_;
}

const Bundle& BundleCopy::copy(const Bundle& from) {
  bundle_ = from;
  std::size_t bytes = 0;
  each_span(bundle_, [&](const auto& span) { bytes += aligned(span.size()); });
  if (memory_.size() < bytes) {
    memory_ = {};  // frees the old memory first
    memory_ = sys::FileBytes(bytes);
  }
  std::size_t at = 0;
  each_span(bundle_, [&](std::span<const std::byte>& span) {
    if (!span.empty()) std::memcpy(memory_.data() + at, span.data(), span.size());
    span = {memory_.data() + at, span.size()};
    at += aligned(span.size());
  });
  return bundle_;
}

BackgroundSaver::~BackgroundSaver() { wait(); }

void BackgroundSaver::wait() {
  if (!thread_.joinable()) return;
  if (home_ == ::getpid()) {
    thread_.join();
  } else {
    thread_.detach();  // a forked child has the object, but not the thread
  }
}

void BackgroundSaver::settle(Communicator& comm) {
  wait();
  agree(comm, last_ ? last_->untold() : std::nullopt);
}

void BackgroundSaver::close() {
  wait();
  if (auto error = last_ ? last_->untold() : std::nullopt) throw *std::move(error);
}

bool BackgroundSaver::needs_communicator(Communicator& comm) const {
  if (size_of(comm) == 1) return false;
  return any(comm, !side_ || side_broken_);
}

std::shared_ptr<PendingSave> BackgroundSaver::start(Communicator& comm, const Bundle& bundle) {
  const Bundle* copy = nullptr;
  agree(comm, attempt([&] { copy = &copy_.copy(bundle); }));
  auto pending = std::make_shared<PendingSave>();
  const auto earlier = LatestSaves::of_process().find(options_.path, rank_of(comm));
  LatestSaves::of_process().note(options_.path, rank_of(comm), pending);
  last_ = pending;
  home_ = ::getpid();
  try {
    thread_ = sys::start_without_signals([this, pending, earlier, copy] {
      sys::give_way();
      run(pending, earlier, *copy);
    });
  } catch (const std::system_error& error) {
    // The other ranks have begun, and must not wait for this rank until their deadline.
    const Error failed(ErrorCode::Unavailable,
                       fmt::format("cannot save a checkpoint in the background -- no thread: {} -- raise the limit on "
                                   "processes (ulimit -u)",
                                   error.what()));
    abort(failed.what());
    pending->finish(std::nullopt, failed);
  }
  return pending;
}

void BackgroundSaver::run(const std::shared_ptr<PendingSave>& pending, const std::shared_ptr<PendingSave>& earlier,
                          const Bundle& bundle) {
  in_background = true;
  if (earlier) wait_until_over(*earlier);
  std::optional<formats::StoredCheckpoint> stored;
  auto error = attempt([&] { stored = save(side_, options_, bundle); });
  if (error) {
    const ErrorCode code = error->code();
    side_broken_ = code == ErrorCode::Timeout || code == ErrorCode::PeerLost || code == ErrorCode::Aborted;
    log::error("checkpoint", "a save in the background has failed: {}", error->what());
  }
  pending->finish(std::move(stored), std::move(error));
}

void BackgroundSaver::abort(std::string_view reason) {
  if (!side_) return;
  side_broken_ = true;
  side_.abort(reason);
}

void BackgroundSaver::leave() {
  wait();
  side_ = {};
}

}  // namespace cohort::checkpoint
