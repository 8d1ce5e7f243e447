// How far an attempt of an elastic job has trained, in the job's store. Where all are lost that had the state, those
// that come after them find nobody to get it from, and learn here that they do not begin: others had. A restart
// (`--max-restarts`) is another attempt.
#pragma once

#include <cohort/error.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace cohort::elastic {

/// Steps that somebody has ended, where their number is not known.
inline constexpr std::int64_t kSomeSteps = 0;

struct Reached {
  std::int64_t steps = kSomeSteps;
  std::string checkpoint = {};  ///< the last one that its process knew of; may be empty
};

/// Nothing: nobody has ended a step in this attempt, or this process is of no elastic job. Throws what the store
/// throws.
std::optional<Reached> reached();

/// For ranks that have come anew and hold the state after `steps`, as a checkpoint has it; -1: they do not say.
/// Unavailable if less than what was reached, which is lost with those that had it.
std::optional<Error> lost_state(const Reached& reached, std::int64_t steps);

/// Reports of the rank that writes; a thread of its own sends them to the store, so that no step waits for that.
class Progress {
 public:
  Progress() = default;
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// So many steps have ended. The first one is written at once, later ones once a second. Does nothing where there is
  /// no elastic job. One thread.
  void note(std::int64_t steps);

 private:
  void write_when_told();

  std::mutex mutex_;
  std::condition_variable told_;
  std::optional<std::int64_t> steps_;  ///< what is not written yet
  bool ends_ = false;
  std::thread writer_;
};

}  // namespace cohort::elastic
