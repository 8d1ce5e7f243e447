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
  std::string folder;  ///< folder of the checkpoints; need not exist yet
  /// Checkpoints up to this generation are left out, e.g. those evaluated before a restart.
  std::int64_t after_generation = 0;
  std::chrono::milliseconds look_every = std::chrono::seconds(1);  ///< pause between two looks at the folder
  /// How long `next` waits for a checkpoint before it throws Timeout; default: without limit.
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// A checkpoint with a sound manifest. Loading the checkpoint compares its files with the manifest.
struct FollowedCheckpoint {
  std::string folder;  ///< the checkpoint's path, e.g. "run/checkpoints/checkpoint-000007-step-1200"
  std::int64_t generation = 0;
  std::int64_t step = 0;
  std::int64_t epoch = 0;
};

///   cohort::CheckpointFollower checkpoints({.folder = "run/checkpoints"});
///   while (checkpoints.next()) {
///     const auto info = folder.load_latest(*net, nullptr);  // may be an even newer one; damaged ones are skipped
///     ... evaluate ...
///   }
///
/// SIGTERM means that training is over: `cohort run` sends it to the evaluator when the ranks have ended, and then
/// allows --evaluator-grace for the remaining work. While a follower lives, SIGTERM does not end the process.
class CheckpointFollower {
 public:
  /// Throws InvalidArgument for an empty folder name or a pause that is not positive.
  explicit CheckpointFollower(CheckpointFollowerOptions options);
  CheckpointFollower(CheckpointFollower&&) noexcept;
  CheckpointFollower& operator=(CheckpointFollower&&) = delete;
  ~CheckpointFollower();

  /// Waits for a checkpoint newer than the one returned before, and returns the newest: a follower slower than the
  /// training skips some. Returns nullopt if training is over and there is no newer checkpoint. Throws Timeout, and Io
  /// if the folder cannot be read.
  std::optional<FollowedCheckpoint> next();
  /// Like `next`, but waits for `limit` at most: `came` is false if neither a checkpoint nor the end of training came
  /// in that time.
  struct Look {
    bool came = false;
    std::optional<FollowedCheckpoint> checkpoint;
  };
  Look next_within(std::chrono::milliseconds limit);
  /// True if SIGTERM has come.
  bool training_is_over() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cohort
