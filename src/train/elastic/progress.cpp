#include "train/elastic/progress.h"

#include "base/env.h"
#include "base/log.h"
#include "base/records.h"
#include "base/result.h"
#include "net/address.h"
#include "net/store.h"
#include "train/formats/checkpoint_folder.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>

namespace cohort::elastic {

void visit_fields(auto& m, auto& a, const Reached*) { a(m.steps, m.checkpoint); }

namespace {

constexpr auto kBetweenWrites = std::chrono::seconds(1);
constexpr auto kConnect = std::chrono::seconds(5);
/// Timeout of the writing thread. The process waits for that thread when it ends.
constexpr auto kReconnect = std::chrono::seconds(1);
constexpr std::size_t kLongestText = 8192;

std::string key() { return fmt::format("elastic/{}/reached", env::number(env::kRestart).value_or(0)); }

bool is_elastic() { return env::get(env::kWorker) && env::get(env::kStore); }

}  // namespace

std::optional<Reached> reached() {
  if (!is_elastic()) return std::nullopt;
  const auto bytes = store::connect_job_store(net::deadline_in(kConnect))->try_get(key());
  if (!bytes) return std::nullopt;
  return value_or_throw(codec::decode<Reached>(*bytes, {.longest_text = kLongestText, .what = "what was reached"}));
}

std::optional<Error> lost_state(const Reached& reached, std::int64_t steps) {
  const bool is_known = reached.steps != kSomeSteps && steps >= 0;
  if (is_known && steps >= reached.steps) return std::nullopt;
  const std::string how_far = reached.steps == kSomeSteps ? "" : fmt::format(" to step {}", reached.steps);
  const std::string from = steps < 0 ? "" : fmt::format(" with the state after step {}", steps);
  return Error(
      ErrorCode::Unavailable,
      fmt::format("the training is lost: others had trained{} in this attempt of the job, none of those that "
                  "had its state is left, and these ranks have come anew{} -- go on from the last checkpoint{}: "
                  "start the job again, as cohort run --max-restarts does{}",
                  how_far, from, reached.checkpoint.empty() ? "" : fmt::format(", {}", reached.checkpoint),
                  is_known ? ", or load one of that step or a later one before training" : ""));
}

Progress::~Progress() {
  if (!writer_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  told_.notify_one();
  writer_.join();
}

void Progress::note(std::int64_t steps) {
  if (!writer_.joinable()) {
    if (!is_elastic()) return;
    writer_ = std::thread([this] { write_when_told(); });
  }
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    is_first = !steps_;
    steps_ = steps;
  }
  if (is_first) told_.notify_one();
}

void Progress::write_when_told() {
  std::shared_ptr<store::Store> store;
  bool failed = false;
  std::unique_lock lock(mutex_);
  while (true) {
    told_.wait(lock, [this] { return steps_ || ends_; });
    if (!steps_ || (ends_ && failed)) return;
    const std::int64_t steps = *std::exchange(steps_, std::nullopt);
    lock.unlock();
    try {
      if (!store) store = store::connect_job_store(net::deadline_in(kReconnect));
      failed = false;
      store->set(key(), codec::encode(Reached{steps, formats::last_own_checkpoint().substr(0, kLongestText)}));
    } catch (const std::exception& error) {  // the supervisor may be gone; its agents then end this process
      failed = true;
      log::debug("elastic", "the job is not told that step {} has ended: {}", steps, error.what());
      store = nullptr;
    }
    lock.lock();
    told_.wait_for(lock, kBetweenWrites, [this] { return ends_; });
  }
}

}  // namespace cohort::elastic
