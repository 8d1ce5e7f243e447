#include "comm/cuda/exact_sums.h"

#include <algorithm>

namespace cohort::comm::cuda {
namespace {

constexpr std::size_t kLine = ExactSums::kAlignment;
// Up to here every rank is sent everything, and folds it all: one exchange instead of two.
constexpr std::size_t kSmall = std::size_t{64} << 10;
constexpr std::size_t kSmallOfAll = std::size_t{1} << 20;

constexpr std::size_t lines(std::size_t bytes) noexcept { return (bytes + kLine - 1) / kLine; }

bool is_small(const Request& request, int ranks) noexcept {
  const std::size_t bytes = request.input_bytes();
  const bool whole = request.kind == Kind::AllReduce || request.kind == Kind::Reduce;
  return whole && bytes <= kSmall && bytes * static_cast<std::size_t>(ranks) <= kSmallOfAll;
}

/// Room for the largest slice of so many bytes.
std::size_t slot_of_slice(std::size_t bytes, int ranks) noexcept {
  return (lines(bytes) / static_cast<std::size_t>(ranks) + 1) * kLine;
}

/// The most that one rank keeps of a reduce_scatter, in elements.
std::int64_t longest_part(const Request& request, int ranks) noexcept {
  std::int64_t longest = 0;
  for (int rank = 0; rank < ranks; ++rank) longest = std::max(longest, kept_by(request, rank).count());
  return longest;
}

/// Of a whole request that is exchanged at once.
std::size_t scratch_of_one(const Request& request, int ranks) {
  const auto all = static_cast<std::size_t>(ranks);
  if (request.input_count == 0) return 0;
  if (is_small(request, ranks)) return lines(request.input_bytes() * all) * kLine;
  if (request.kind == Kind::AllReduce || request.kind == Kind::Reduce)
    return slot_of_slice(request.input_bytes(), ranks) * all;
  return lines(static_cast<std::size_t>(longest_part(request, ranks)) * size_of(request.dtype)) * kLine * all;
}

}  // namespace

FoldJob ExactFold::bound() const noexcept {
  FoldJob bound = job;
  bound.inputs = inputs;
  bound.scales = scales;
  bound.outputs = {&output, 1};
  return bound;
}

bool ExactSums::has(const Request& request) noexcept { return is_reduction(request.kind) && !request.bf16_wire; }

std::size_t ExactSums::scratch_of(std::span<const Request> requests, int ranks, std::size_t most_at_once) {
  std::size_t all = 0;
  for (const Request& request : requests) all += std::min(scratch_of_one(request, ranks), 2 * most_at_once);
  return all <= most_at_once ? all : 2 * most_at_once;
}

std::vector<ExactStep> ExactSums::plan(std::span<const Request> requests, std::byte* scratch) {
  scratch_ = scratch;
  steps_.clear();
  current_ = used_ = 0;
  for (const Request& request : requests) {
    if (request.input_count == 0) continue;
    if (is_small(request, world_.size)) {
      add_small(request);
    } else if (request.kind == Kind::AllReduce || request.kind == Kind::Reduce) {
      add_slices(request);
    } else {
      add_parts(request);
    }
  }
  return std::move(steps_);
}

ExactStep& ExactSums::step(std::size_t number) {
  if (steps_.size() <= number) steps_.resize(number + 1);
  return steps_[number];
}

bool ExactSums::counts(int rank) const noexcept {
  return std::binary_search(round_.contributors.begin(), round_.contributors.end(), rank);
}

// Steps take turns with its two halves: what has been folded may still lie there when the next step begins.
std::byte* ExactSums::take(std::size_t bytes) {
  if (used_ + bytes > most_at_once_) {
    ++current_;
    used_ = 0;
  }
  std::byte* const room = scratch_ + current_ % 2 * most_at_once_ + used_;
  used_ += bytes;
  return room;
}

void ExactSums::add_small(const Request& request) {
  const std::size_t bytes = request.input_bytes();
  const auto* const input = static_cast<const std::byte*>(request.input);
  std::byte* const room = take(scratch_of_one(request, world_.size));
  std::vector<std::byte*> rooms;
  for (int rank = 0; rank < world_.size; ++rank) rooms.push_back(room + static_cast<std::size_t>(rank) * bytes);
  ExactStep& now = step(current_);
  std::vector<const std::byte*> inputs(rooms.begin(), rooms.end());
  if (request.kind == Kind::AllReduce) {
    now.gathers.push_back({input, room, bytes});
  } else if (request.root != world_.rank) {
    if (counts(world_.rank)) now.sends.push_back({const_cast<std::byte*>(input), bytes, request.root});
    return;
  } else {
    inputs[static_cast<std::size_t>(world_.rank)] = input;
    for (const int rank : round_.contributors) {
      if (rank != world_.rank) now.receives.push_back({rooms[static_cast<std::size_t>(rank)], bytes, rank});
    }
  }
  fold(request, inputs, rooms, static_cast<std::byte*>(request.output), request.input_count);
}

void ExactSums::add_slices(const Request& request) {
  const std::size_t element = size_of(request.dtype);
  const auto ranks = static_cast<std::size_t>(world_.size);
  const bool all = request.kind == Kind::AllReduce;
  const bool keeps = all || request.root == world_.rank;  // the result
  // As much as fits in with the borders of slices.
  const auto most = static_cast<std::int64_t>((most_at_once_ / kLine - ranks) * (kLine / element));
  for (std::int64_t begin = 0; begin < request.input_count;) {
    const std::int64_t rest = request.input_count - begin;
    const bool fits = slot_of_slice(static_cast<std::size_t>(rest) * element, world_.size) * ranks <= most_at_once_;
    const std::int64_t count = fits ? rest : most;
    const std::size_t slot = slot_of_slice(static_cast<std::size_t>(count) * element, world_.size);
    std::byte* const room = take(slot * ranks);
    std::vector<std::byte*> rooms;
    std::vector<Slice> slices;
    for (int rank = 0; rank < world_.size; ++rank) {
      rooms.push_back(room + static_cast<std::size_t>(rank) * slot);
      slices.push_back(slice_of(count, element, rank, world_.size, 0));
    }
    const auto bytes_of = [&](int rank) {
      return static_cast<std::size_t>(slices[static_cast<std::size_t>(rank)].count()) * element;
    };
    const auto place = [&](const void* base, int rank) {
      return const_cast<std::byte*>(at(base, begin + slices[static_cast<std::size_t>(rank)].begin, element));
    };
    const auto own = static_cast<std::size_t>(world_.rank);
    std::vector<const std::byte*> inputs(rooms.begin(), rooms.end());
    inputs[own] = place(request.input, world_.rank);
    ExactStep& now = step(current_);
    for (int rank = 0; rank < world_.size; ++rank) {
      if (rank == world_.rank) continue;
      if (counts(world_.rank) && bytes_of(rank) > 0)
        now.sends.push_back({place(request.input, rank), bytes_of(rank), rank});
      if (counts(rank) && bytes_of(world_.rank) > 0)
        now.receives.push_back({rooms[static_cast<std::size_t>(rank)], bytes_of(world_.rank), rank});
    }
    std::byte* const result = keeps ? place(request.output, world_.rank) : rooms[own];
    fold(request, inputs, rooms, result, slices[own].count());
    ExactStep& next = step(current_ + 1);
    for (int rank = 0; rank < world_.size; ++rank) {
      if (rank == world_.rank) continue;
      if ((all || request.root == rank) && bytes_of(world_.rank) > 0)
        next.sends.push_back({result, bytes_of(world_.rank), rank});
      if (keeps && bytes_of(rank) > 0) next.receives.push_back({place(request.output, rank), bytes_of(rank), rank});
    }
    begin += count;
  }
}

void ExactSums::add_parts(const Request& request) {
  const std::size_t element = size_of(request.dtype);
  const auto ranks = static_cast<std::size_t>(world_.size);
  const std::int64_t longest = longest_part(request, world_.size);
  const auto most = static_cast<std::int64_t>(most_at_once_ / ranks / kLine * (kLine / element));
  for (std::int64_t begin = 0; begin < longest; begin += most) {
    const std::int64_t stretch = std::min(most, longest - begin);
    // What a rank keeps of it.
    const auto of = [&](int rank) {
      const Slice kept = kept_by(request, rank);
      const std::int64_t first = std::min(kept.begin + begin, kept.end);
      return Slice{first, std::min(first + stretch, kept.end)};
    };
    const std::size_t slot = lines(static_cast<std::size_t>(stretch) * element) * kLine;
    std::byte* const room = take(slot * ranks);
    const Slice own = of(world_.rank);
    const std::size_t own_bytes = static_cast<std::size_t>(own.count()) * element;
    std::vector<std::byte*> rooms;
    for (int rank = 0; rank < world_.size; ++rank) rooms.push_back(room + static_cast<std::size_t>(rank) * slot);
    std::vector<const std::byte*> inputs(rooms.begin(), rooms.end());
    inputs[static_cast<std::size_t>(world_.rank)] = at(request.input, own.begin, element);
    ExactStep& now = step(current_);
    for (int rank = 0; rank < world_.size; ++rank) {
      if (rank == world_.rank) continue;
      const Slice theirs = of(rank);
      const std::size_t bytes = static_cast<std::size_t>(theirs.count()) * element;
      if (counts(world_.rank) && bytes > 0)
        now.sends.push_back({const_cast<std::byte*>(at(request.input, theirs.begin, element)), bytes, rank});
      if (counts(rank) && own_bytes > 0)
        now.receives.push_back({rooms[static_cast<std::size_t>(rank)], own_bytes, rank});
    }
    const std::int64_t kept_before = own.begin - kept_by(request, world_.rank).begin;
    if (own_bytes > 0) fold(request, inputs, rooms, at(request.output, kept_before, element), own.count());
  }
}

void ExactSums::fold(const Request& request, const std::vector<const std::byte*>& inputs,
                     const std::vector<std::byte*>& rooms, std::byte* output, std::int64_t count) {
  if (count == 0) return;
  std::vector<ExactFold>& folds = step(current_).folds;
  const bool scaled = !round_.fractions.empty() || request.prescale != 1;
  const auto scale = [&](std::size_t i) {
    return (round_.fractions.empty() ? 1 : round_.fractions[i]) * request.prescale;
  };
  ExactFold last;
  last.job.dtype = request.dtype;
  last.job.op = request.op;
  last.job.count = count;
  last.job.postscale = request.postscale;
  const auto contributors = static_cast<std::int64_t>(round_.contributors.size());
  if (request.op == ReduceOp::Average)
    last.job.divisor = round_.fractions.empty() ? std::max<std::int64_t>(contributors, 1) : 1;
  last.output = output;
  if (world_.hosts.empty()) {
    for (std::size_t i = 0; i < round_.contributors.size(); ++i) {
      last.inputs.push_back(inputs[static_cast<std::size_t>(round_.contributors[i])]);
      if (scaled) last.scales.push_back(scale(i));
    }
    folds.push_back(std::move(last));
    return;
  }
  const int hosts = *std::max_element(world_.hosts.begin(), world_.hosts.end()) + 1;
  for (int host = 0; host < hosts; ++host) {
    ExactFold here;
    for (std::size_t i = 0; i < round_.contributors.size(); ++i) {
      const auto rank = static_cast<std::size_t>(round_.contributors[i]);
      if (world_.hosts[rank] != host) continue;
      if (here.inputs.empty()) here.output = rooms[rank];
      here.inputs.push_back(inputs[rank]);
      if (scaled) here.scales.push_back(scale(i));
    }
    if (here.inputs.empty()) continue;
    if (here.inputs.size() == 1 && !scaled) {  // its sum is what it brings
      last.inputs.push_back(here.inputs.front());
      continue;
    }
    here.job.dtype = request.dtype;
    here.job.op = request.op == ReduceOp::Average ? ReduceOp::Sum : request.op;
    here.job.count = count;
    last.inputs.push_back(here.output);
    folds.push_back(std::move(here));
  }
  folds.push_back(std::move(last));
}

}  // namespace cohort::comm::cuda
