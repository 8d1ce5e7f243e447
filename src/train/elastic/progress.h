// Records in the job's store how far an attempt of an elastic job has trained. If all ranks that had the state are
// lost, new ranks learn here that others had trained, and do not start over. A restart (`--max-restarts`) is another
// attempt.
#pragma once

#include <cohort/error.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace cohort::elastic {

/// Stands for an unknown number of steps that some rank has ended.
inline constexpr std::int64_t kSomeSteps = 0;

struct Reached {
  std::int64_t steps = kSomeSteps;
  std::string checkpoint = {};  ///< the last checkpoint that the reporting process knew of; may be empty
};

/// Returns nullopt if no rank has ended a step in this attempt, or this process is not in an elastic job. Throws the
/// store's errors.
std::optional<Reached> reached();

/// For new ranks, which hold the state after `steps` steps, as from a checkpoint; -1: unknown. Returns Unavailable if
/// earlier ranks had reached a later step, whose state is lost.
std::optional<Error> lost_state(const Reached& reached, std::int64_t steps);

/// Sends the writing rank's reports to the store, from a separate thread, so that no step waits for the store.
class Progress {
 public:
  Progress() = default;
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Reports that `steps` steps have ended. The first report is sent immediately, later ones once a second. Does
  /// nothing outside of elastic jobs. One thread.
  void note(std::int64_t steps);

 private:
  void write_when_told();

  std::mutex mutex_;
  std::condition_variable told_;
  std::optional<std::int64_t> steps_;  ///< the report that is not sent yet
  bool ends_ = false;
  std::thread writer_;
};

}  // namespace cohort::elastic
