// For a process beside the training, as `cohort run --evaluator` starts it: waits for the training's checkpoints, one
// after another, until training is over. One thread at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace cohort {

struct CheckpointFollowerOptions {
  std::string folder;  ///< of the checkpoints; it need not be there yet
  /// Checkpoints up to this generation are left out, e.g. those evaluated before a restart.
  std::int64_t after_generation = 0;
  std::chrono::milliseconds look_every = std::chrono::seconds(1);  ///< at the folder
  /// For the next checkpoint to come, before `next` throws Timeout; default: without end.
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// A checkpoint with a sound manifest. Its files are compared with it when the checkpoint is loaded.
struct FollowedCheckpoint {
  std::string folder;  ///< its path, e.g. "run/checkpoints/checkpoint-000007-step-1200"
  std::int64_t generation = 0;
  std::int64_t step = 0;
  std::int64_t epoch = 0;
};

///   cohort::CheckpointFollower checkpoints({.folder = "run/checkpoints"});
///   while (checkpoints.next()) {
///     const auto info = folder.load_latest(*net, nullptr);  // may be a newer one yet; loading passes over damaged
///     ones
///     ... evaluate ...
///   }
///
/// SIGTERM says that training is over; so `cohort run` ends an evaluator once the ranks have ended, and gives it
/// --evaluator-grace for what is left to do. While a follower lives, SIGTERM ends the process no more.
class CheckpointFollower {
 public:
  /// Throws InvalidArgument for an empty name of a folder or a pause that is not positive.
  explicit CheckpointFollower(CheckpointFollowerOptions options);
  CheckpointFollower(CheckpointFollower&&) noexcept;
  CheckpointFollower& operator=(CheckpointFollower&&) = delete;
  ~CheckpointFollower();

  /// The newest checkpoint, once it is newer than the one before: a follower slower than the training leaves some out.
  /// nullopt: training is over, and there is none newer. Throws Timeout, and Io if the folder cannot be read.
  std::optional<FollowedCheckpoint> next();
  /// The same, for `limit` at the longest: `came` is false where neither a checkpoint nor the end came meanwhile.
  struct Look {
    bool came = false;
    std::optional<FollowedCheckpoint> checkpoint;
  };
  Look next_within(std::chrono::milliseconds limit);
  /// SIGTERM has come.
  bool training_is_over() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cohort
