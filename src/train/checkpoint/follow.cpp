#include <cohort/checkpoint_follower.h>

#include "base/result.h"
#include "base/signals.h"
#include "train/formats/checkpoint_folder.h"

#include <algorithm>
#include <csignal>
#include <thread>
#include <utility>

namespace cohort {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Between two looks at whether the process is told to end.
constexpr milliseconds kSlice{20};

}  // namespace

struct CheckpointFollower::State {
  CheckpointFollowerOptions options;
  sys::SignalLatch told;
  Clock::time_point waiting_since = Clock::now();
  Clock::time_point look_at = Clock::now();

  std::optional<FollowedCheckpoint> look() {
    const auto list = value_or_throw(formats::list_checkpoints(options.folder));
    if (list.sound.empty()) return std::nullopt;
    const formats::StoredCheckpoint& newest = list.sound.back();
    const formats::Manifest& manifest = newest.manifest;
    if (manifest.generation <= options.after_generation) return std::nullopt;
    options.after_generation = manifest.generation;
    waiting_since = Clock::now();
    return FollowedCheckpoint{newest.folder, manifest.generation, manifest.step, manifest.epoch};
  }
};

CheckpointFollower::CheckpointFollower(CheckpointFollowerOptions options) {
  if (options.folder.empty()) raise(ErrorCode::InvalidArgument, "a CheckpointFollower needs the name of a folder");
  if (options.look_every <= milliseconds(0))
    raise(ErrorCode::InvalidArgument, "a CheckpointFollower looks every {} ms -- give a time above 0",
          options.look_every.count());
  state_ = std::make_unique<State>(State{std::move(options), value_or_throw(sys::SignalLatch::create({SIGTERM}))});
}

CheckpointFollower::CheckpointFollower(CheckpointFollower&&) noexcept = default;
CheckpointFollower::~CheckpointFollower() = default;

bool CheckpointFollower::training_is_over() const noexcept { return state_->told.received() != 0; }

CheckpointFollower::Look CheckpointFollower::next_within(milliseconds limit) {
  State& state = *state_;
  const auto end = Clock::now() + limit;
  while (true) {
    // In this order: what was saved before the word that it is over is seen after it.
    const bool over = training_is_over();
    if (over || Clock::now() >= state.look_at) {
      state.look_at = Clock::now() + state.options.look_every;
      if (auto found = state.look()) {
        state.look_at = Clock::now();  // who asks again has used it
        return {true, std::move(found)};
      }
      if (over) {
        state.told.keep_handlers();  // it may be told once more on its way out
        return {true, std::nullopt};
      }
    }
    const auto now = Clock::now();
    if (state.options.timeout && now - state.waiting_since >= *state.options.timeout) {
      raise(ErrorCode::Timeout,
            "no checkpoint newer than generation {} has come into {} within {:g} s -- is it the training's folder, and "
            "does the training save?",
            state.options.after_generation, state.options.folder,
            std::chrono::duration<double>(*state.options.timeout).count());
    }
    if (now >= end) return {};
    std::this_thread::sleep_until(std::min(now + kSlice, end));
  }
}

std::optional<FollowedCheckpoint> CheckpointFollower::next() {
  while (true) {
    Look look = next_within(std::chrono::hours(1));
    if (look.came) return std::move(look.checkpoint);
  }
}

}  // namespace cohort
