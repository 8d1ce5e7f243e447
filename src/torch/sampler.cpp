#include <cohort/torch/data.h>

#include "base/permutation.h"
#include "base/result.h"

// One header for archives only: the rest of torch/serialize is not needed.
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <deque>
#include <numeric>

namespace cohort::data {

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

// Shared by a sampler's copies: torch's DataLoader keeps a copy of its own, and `step` is called on the user's.
struct DistributedSampler::Shared {
  struct DrawnStep {
    std::int64_t end = 0;     // the cursor after it
    std::int64_t global = 0;  // samples over all ranks
    std::int64_t local = 0;   // of this one
  };

  DistributedSamplerOptions options;
  SamplerState state;
  std::int64_t drawn = 0;             // samples of this epoch handed out, over all ranks
  std::deque<DrawnStep> drawn_steps;  // and not stepped over, oldest first
  std::vector<std::int64_t> order;    // the permutation of
  std::int64_t ordered_epoch = -1;
  std::uint64_t ordered_seed = 0;
};

std::vector<std::int64_t> permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(size));
  permute(order, seed, epoch);
  return order;
}

DistributedSampler::DistributedSampler(std::int64_t size, const DistributedSamplerOptions& options)
    : shared_(std::make_shared<Shared>()) {
  if (size < 0) raise(ErrorCode::InvalidArgument, "DistributedSampler: a data set of {} samples", size);
  if (options.batch_size < 1)
    raise(ErrorCode::InvalidArgument, "DistributedSampler: batch_size is {}", options.batch_size);
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size) {
    raise(ErrorCode::InvalidArgument, "DistributedSampler: rank {} in a world of {}", options.rank, options.world_size);
  }
  shared_->options = options;
  shared_->state.seed = options.seed;
  shared_->state.size = size;
}

DistributedSampler::DistributedSampler(std::int64_t size, const Communicator& comm, DistributedSamplerOptions options)
    : DistributedSampler(size, [&] {
        options.rank = comm.rank();
        options.world_size = comm.size();
        return options;
      }()) {}

void DistributedSampler::permute() {
  if (shared_->ordered_epoch == shared_->state.epoch && shared_->ordered_seed == shared_->state.seed) return;
  if (shared_->options.shuffle) {
    shared_->order = permutation(shared_->state.size, shared_->state.seed, shared_->state.epoch);
  } else {
    shared_->order.resize(static_cast<std::size_t>(shared_->state.size));
    std::iota(shared_->order.begin(), shared_->order.end(), std::int64_t{0});
  }
  shared_->ordered_epoch = shared_->state.epoch;
  shared_->ordered_seed = shared_->state.seed;
}

std::optional<std::vector<std::int64_t>> DistributedSampler::draw(std::int64_t batch_size) {
  const std::int64_t full = batch_size * shared_->options.world_size;
  const std::int64_t left = shared_->state.size - shared_->drawn;
  if (left <= 0 || (shared_->options.remainder == Remainder::Drop && left < full)) return std::nullopt;
  permute();
  const std::int64_t fresh = std::min(full, left);
  const std::int64_t global = shared_->options.remainder == Remainder::Pad ? full : fresh;

  // Spread evenly; the first ranks get one more where it does not divide.
  const std::int64_t each = global / shared_->options.world_size;
  const std::int64_t more = global % shared_->options.world_size;
  const std::int64_t begin =
      shared_->drawn + shared_->options.rank * each + std::min<std::int64_t>(shared_->options.rank, more);
  const std::int64_t count = each + (shared_->options.rank < more ? 1 : 0);
  std::vector<std::int64_t> batch;
  batch.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = begin; i < begin + count; ++i)
    batch.push_back(shared_->order[static_cast<std::size_t>(i % shared_->state.size)]);

  shared_->drawn += fresh;
  shared_->drawn_steps.push_back({.end = shared_->drawn, .global = global, .local = count});
  return batch;
}

std::optional<std::vector<std::int64_t>> DistributedSampler::next_batch() { return draw(shared_->options.batch_size); }

void DistributedSampler::step() {
  if (shared_->drawn_steps.empty()) {
    raise(ErrorCode::InvalidArgument,
          "DistributedSampler::step without a batch drawn -- call it once after each optimizer step, not more often");
  }
  shared_->state.cursor = shared_->drawn_steps.front().end;
  shared_->drawn_steps.pop_front();
}

std::int64_t DistributedSampler::global_batch() const noexcept {
  return shared_->drawn_steps.empty() ? 0 : shared_->drawn_steps.front().global;
}

// Of the batch that a forward is for: the oldest drawn and not stepped over; -1 if there is none. `trained_at`: the
// cursor at which the model may have been trained on that one already. It does not matter as long as all that are drawn
// have equally many.
std::int64_t DistributedSampler::samples_of_batch(std::optional<std::int64_t> trained_at) const {
  const auto& steps = shared_->drawn_steps;
  if (steps.empty()) return -1;
  const bool alike = std::all_of(steps.begin(), steps.end(), [&](const Shared::DrawnStep& step) {
    return step.local == steps.front().local && step.global == steps.front().global;
  });
  if (!alike && trained_at == shared_->state.cursor) {
    raise(ErrorCode::InvalidArgument,
          "DistributedSampler: {} batches are drawn, the first of {} samples of this rank and the last of {}, and "
          "nothing says which one is trained on -- call step once after each batch",
          steps.size(), steps.front().local, steps.back().local);
  }
  return steps.front().local;
}

std::int64_t DistributedSampler::steps_from(std::int64_t cursor) const noexcept {
  const std::int64_t full = shared_->options.batch_size * shared_->options.world_size;
  const std::int64_t left = std::max<std::int64_t>(shared_->state.size - cursor, 0);
  return shared_->options.remainder == Remainder::Drop ? left / full : ceil_div(left, full);
}

std::int64_t DistributedSampler::epoch() const noexcept { return shared_->state.epoch; }
std::int64_t DistributedSampler::cursor() const noexcept { return shared_->state.cursor; }
std::int64_t DistributedSampler::size() const noexcept { return shared_->state.size; }
SamplerState DistributedSampler::state() const noexcept { return shared_->state; }
const DistributedSamplerOptions& DistributedSampler::options() const noexcept { return shared_->options; }
void DistributedSampler::next_epoch() { set_epoch(epoch() + 1); }
std::int64_t DistributedSampler::steps_left() const noexcept { return steps_from(shared_->state.cursor); }
std::int64_t DistributedSampler::steps_per_epoch() const noexcept { return steps_from(0); }

void DistributedSampler::rewind() {
  shared_->drawn = shared_->state.cursor;
  shared_->drawn_steps.clear();
}

void DistributedSampler::set_epoch(std::int64_t epoch) {
  if (epoch < 0) raise(ErrorCode::InvalidArgument, "DistributedSampler: epoch {}", epoch);
  shared_->state.epoch = epoch;
  shared_->state.cursor = 0;
  rewind();
}

void DistributedSampler::load_state(const SamplerState& state) {
  if (state.size != shared_->state.size) {
    raise(ErrorCode::InvalidArgument,
          "a sampler's position in a data set of {} samples cannot be used for one of {} -- give the data it was saved "
          "with, or "
          "start at an epoch with set_epoch",
          state.size, shared_->state.size);
  }
  if (state.epoch < 0 || state.cursor < 0 || state.cursor > state.size) {
    raise(ErrorCode::InvalidArgument, "a sampler's position is damaged: epoch {}, cursor {} of {}", state.epoch,
          state.cursor, state.size);
  }
  shared_->state = state;
  rewind();
}

void DistributedSampler::reset(OptionalSize new_size) {
  if (new_size.has_value() && static_cast<std::int64_t>(*new_size) != shared_->state.size) {
    raise(ErrorCode::InvalidArgument, "DistributedSampler of {} samples cannot be resized to {} -- make a new one",
          shared_->state.size, *new_size);
  }
  // A loop that never calls step() has no position worth keeping: its epochs follow each other like torch's.
  const bool used_up = steps_left() == 0 && shared_->state.cursor > 0;
  const bool drawn_without_steps = shared_->state.cursor == 0 && shared_->drawn > 0 && steps_from(shared_->drawn) == 0;
  if (used_up || drawn_without_steps) {
    next_epoch();
  } else {
    rewind();
  }
}

DistributedSampler::OptionalBatch DistributedSampler::next(std::size_t batch_size) {
  const auto batch = draw(static_cast<std::int64_t>(batch_size));
  if (!batch) return {};
  return std::vector<std::size_t>(batch->begin(), batch->end());
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  const auto write = [&archive](const char* key, std::int64_t value) {
    archive.write(key, at::scalar_tensor(value, at::kLong));
  };
  write("seed", static_cast<std::int64_t>(shared_->state.seed));
  write("epoch", shared_->state.epoch);
  write("cursor", shared_->state.cursor);
  write("size", shared_->state.size);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const auto read = [&archive](const char* key) {
    at::Tensor value = at::empty({}, at::kLong);
    archive.read(key, value);
    return value.item<std::int64_t>();
  };
  load_state({.seed = static_cast<std::uint64_t>(read("seed")),
              .epoch = read("epoch"),
              .cursor = read("cursor"),
              .size = read("size")});
}

}  // namespace cohort::data
