// Divides sums with the CPU's bits (ExactSums) into pieces that fit in the scratch memory, the same on all ranks, and
// plans their steps. Pure.
#include "comm/gpu/exact_sums.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace cohort::comm::cuda {
namespace {

constexpr std::size_t kLine = ExactSums::kAlignment;
// Largest input that is sent whole to every rank, so that each folds all of it: one exchange instead of two.
constexpr std::size_t kSmall = std::size_t{64} << 10;
constexpr std::size_t kSmallOfAll = std::size_t{1} << 20;

constexpr std::size_t lines(std::size_t bytes) noexcept { return (bytes + kLine - 1) / kLine; }

bool is_small(const Request& request, int ranks) noexcept {
  const std::size_t bytes = request.input_bytes();
  const bool whole = request.kind == Kind::AllReduce || request.kind == Kind::Reduce;
  return whole && bytes <= kSmall && bytes * static_cast<std::size_t>(ranks) <= kSmallOfAll;
}

/// Returns the scratch memory for the largest slice of `bytes` bytes.
std::size_t slot_of_slice(std::size_t bytes, int ranks) noexcept {
  return (lines(bytes) / static_cast<std::size_t>(ranks) + 1) * kLine;
}

/// Returns the largest part that a rank keeps of a reduce_scatter, in elements.
std::int64_t longest_part(const Request& request, int ranks) noexcept {
  std::int64_t longest = 0;
  for (int rank = 0; rank < ranks; ++rank) longest = std::max(longest, kept_by(request, rank).count());
  return longest;
}

/// Returns the scratch memory for `bytes` bytes of an all_reduce or reduce, exchanged together.
std::size_t scratch_of_slices(std::size_t bytes, const ExactWorld& world) noexcept {
  const std::size_t flat = slot_of_slice(bytes, world.size) * static_cast<std::size_t>(world.size);
  if (world.columns == 0) return flat;
  const std::size_t slot = slot_of_slice(bytes, world.columns);
  const int hosts = static_cast<int>(world.on.size());
  return std::max(flat, slot * static_cast<std::size_t>(world.columns) +
                            slot_of_slice(slot, hosts) * static_cast<std::size_t>(hosts));
}
/// Returns the scratch memory for `bytes` bytes of each rank's part.
std::size_t scratch_of_parts(std::size_t bytes, const ExactWorld& world) noexcept {
  const std::size_t slots = static_cast<std::size_t>(world.size) + (world.columns > 0 ? world.on.size() : 0);
  return lines(bytes) * kLine * slots;
}
/// Returns the bytes of scratch memory that a whole request needs.
std::size_t scratch_of_one(const Request& request, const ExactWorld& world) noexcept {
  if (request.input_count == 0) return 0;
  if (is_small(request, world.size)) return lines(request.input_bytes() * static_cast<std::size_t>(world.size)) * kLine;
  if (request.kind == Kind::AllReduce || request.kind == Kind::Reduce)
    return scratch_of_slices(request.input_bytes(), world);
  return scratch_of_parts(static_cast<std::size_t>(longest_part(request, world.size)) * size_of(request.dtype), world);
}

/// Returns the number of elements that may be exchanged together, so that their scratch memory fits.
template <class Scratch>
std::int64_t most_of(std::size_t bytes, std::size_t element, std::size_t most, const Scratch& scratch) noexcept {
  std::size_t fitting = lines(bytes);
  while (fitting > 1 && scratch(std::min(fitting * kLine, bytes)) > most) fitting -= (fitting + 15) / 16;
  return static_cast<std::int64_t>(std::min(fitting * kLine, bytes) / element);
}

/// Returns the elements that a rank keeps in a reduce_scatter, among `count` elements of each part from `begin` on.
Slice stretch_of(const Request& request, int rank, std::int64_t begin, std::int64_t count) noexcept {
  const Slice kept = kept_by(request, rank);
  const std::int64_t first = std::min(kept.begin + begin, kept.end);
  return {first, std::min(first + count, kept.end)};
}
/// Returns the address in the rank's output of a range of elements that it keeps.
std::byte* kept_at(const Request& request, int rank, const Slice& range) noexcept {
  return at(request.output, range.begin - kept_by(request, rank).begin, size_of(request.dtype));
}

std::size_t bytes_of(const Slice& slice, std::size_t element) noexcept {
  return static_cast<std::size_t>(slice.count()) * element;
}

}  // namespace

ExactWorld::ExactWorld(int own, int ranks, std::vector<int> all) : rank(own), size(ranks), hosts(std::move(all)) {
  if (hosts.empty()) return;
  on.resize(static_cast<std::size_t>(*std::max_element(hosts.begin(), hosts.end())) + 1);
  for (int r = 0; r < size; ++r) {
    std::vector<int>& here = on[static_cast<std::size_t>(hosts[static_cast<std::size_t>(r)])];
    if (r == rank) local = static_cast<int>(here.size());
    here.push_back(r);
  }
  const auto alike = [&](const std::vector<int>& there) { return there.size() == on.front().size(); };
  if (on.size() > 1 && on.front().size() > 1 && std::all_of(on.begin(), on.end(), alike))
    columns = static_cast<int>(on.front().size());
}

FoldJob ExactFold::bound() const noexcept {
  FoldJob bound = job;
  bound.inputs = inputs;
  bound.scales = scales;
  bound.outputs = {&output, 1};
  return bound;
}

bool ExactSums::has(const Request& request) noexcept {
  return is_reduction(request.kind) && request.wire_format == WireFormat::None;
}

std::size_t ExactSums::scratch_of(std::span<const Request> requests, const ExactWorld& world,
                                  std::size_t most_at_once) {
  std::size_t all = 0;
  for (const Request& request : requests) all += std::min(scratch_of_one(request, world), 2 * most_at_once);
  return all <= most_at_once ? all : 2 * most_at_once;
}

std::vector<ExactStep> ExactSums::plan(std::span<const Request> requests, std::byte* scratch) {
  scratch_ = scratch;
  steps_.clear();
  current_ = used_ = 0;
  for (const Request& request : requests) {
    if (request.input_count == 0) continue;
    const bool columns = goes_by_columns(request);
    if (is_small(request, world_.size)) {
      add_small(request);
    } else if (columns && request.kind == Kind::AllReduce) {
      add_columns(request);
    } else if (columns) {
      add_parts_of_columns(request);
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

// Steps alternate between the two halves of the scratch memory: results of a step's folds may still be in use when the
// next step begins.
std::byte* ExactSums::take(std::size_t bytes) {
  if (used_ + bytes > most_at_once_) {
    ++current_;
    used_ = 0;
  }
  std::byte* const room = scratch_ + current_ % 2 * most_at_once_ + used_;
  used_ += bytes;
  return room;
}

// A small request is not divided. A reduce is excluded, since it folds slices on ranks that do not keep the result, and
// so needs scratch memory for longer.
bool ExactSums::goes_by_columns(const Request& request) const noexcept {
  return world_.columns > 0 && request.kind != Kind::Reduce &&
         round_.contributors.size() == static_cast<std::size_t>(world_.size);
}

void ExactSums::send(ExactStep& in, const std::byte* from, std::size_t bytes, int peer) const {
  if (bytes > 0 && peer != world_.rank) in.sends.push_back({const_cast<std::byte*>(from), bytes, peer});
}
void ExactSums::receive(ExactStep& in, std::byte* to, std::size_t bytes, int peer) const {
  if (bytes > 0 && peer != world_.rank) in.receives.push_back({to, bytes, peer});
}

void ExactSums::add_small(const Request& request) {
  const std::size_t bytes = request.input_bytes();
  const auto* const input = static_cast<const std::byte*>(request.input);
  std::byte* const room = take(scratch_of_one(request, world_));
  Rooms rooms;
  for (int rank = 0; rank < world_.size; ++rank) rooms.push_back(room + static_cast<std::size_t>(rank) * bytes);
  ExactStep& now = step(current_);
  Inputs inputs(rooms.begin(), rooms.end());
  if (request.kind == Kind::AllReduce) {
    now.gathers.push_back({input, room, bytes});
  } else if (request.root != world_.rank) {
    if (counts(world_.rank)) send(now, input, bytes, request.root);
    return;
  } else {
    inputs[static_cast<std::size_t>(world_.rank)] = input;
    for (const int rank : round_.contributors) receive(now, rooms[static_cast<std::size_t>(rank)], bytes, rank);
  }
  fold(request, inputs, rooms, static_cast<std::byte*>(request.output), request.input_count);
}

void ExactSums::add_slices(const Request& request) {
  const std::size_t element = size_of(request.dtype);
  const bool all = request.kind == Kind::AllReduce;
  const bool keeps = all || request.root == world_.rank;  // this rank keeps the result
  const auto own = static_cast<std::size_t>(world_.rank);
  for (std::int64_t begin = 0; begin < request.input_count;) {
    const std::int64_t count =
        most_of(static_cast<std::size_t>(request.input_count - begin) * element, element, most_at_once_,
                [&](std::size_t bytes) { return scratch_of_slices(bytes, world_); });
    const std::size_t slot = slot_of_slice(static_cast<std::size_t>(count) * element, world_.size);
    std::byte* const room = take(scratch_of_slices(static_cast<std::size_t>(count) * element, world_));
    Rooms rooms;
    std::vector<Slice> slices;
    for (int rank = 0; rank < world_.size; ++rank) {
      rooms.push_back(room + static_cast<std::size_t>(rank) * slot);
      slices.push_back(slice_of(count, element, rank, world_.size, 0));
    }
    const auto bytes = [&](int rank) { return bytes_of(slices[static_cast<std::size_t>(rank)], element); };
    const auto place = [&](auto* base, int rank) {
      return at(base, begin + slices[static_cast<std::size_t>(rank)].begin, element);
    };
    Inputs inputs(rooms.begin(), rooms.end());
    inputs[own] = place(request.input, world_.rank);
    ExactStep& now = step(current_);
    for (int rank = 0; rank < world_.size; ++rank) {
      if (counts(world_.rank)) send(now, place(request.input, rank), bytes(rank), rank);
      if (counts(rank)) receive(now, rooms[static_cast<std::size_t>(rank)], bytes(world_.rank), rank);
    }
    std::byte* const result = keeps ? place(request.output, world_.rank) : rooms[own];
    fold(request, inputs, rooms, result, slices[own].count());
    ExactStep& next = step(current_ + 1);
    for (int rank = 0; rank < world_.size; ++rank) {
      if (all || request.root == rank) send(next, result, bytes(world_.rank), rank);
      if (keeps) receive(next, place(request.output, rank), bytes(rank), rank);
    }
    begin += count;
  }
}

void ExactSums::add_parts(const Request& request) {
  const std::size_t element = size_of(request.dtype);
  const std::int64_t longest = longest_part(request, world_.size);
  for (std::int64_t begin = 0, count = 0; begin < longest; begin += count) {
    count = most_of(static_cast<std::size_t>(longest - begin) * element, element, most_at_once_,
                    [&](std::size_t bytes) { return scratch_of_parts(bytes, world_); });
    const std::size_t slot = lines(static_cast<std::size_t>(count) * element) * kLine;
    std::byte* const room = take(scratch_of_parts(static_cast<std::size_t>(count) * element, world_));
    const Slice own = stretch_of(request, world_.rank, begin, count);
    Rooms rooms;
    for (int rank = 0; rank < world_.size; ++rank) rooms.push_back(room + static_cast<std::size_t>(rank) * slot);
    Inputs inputs(rooms.begin(), rooms.end());
    inputs[static_cast<std::size_t>(world_.rank)] = at(request.input, own.begin, element);
    ExactStep& now = step(current_);
    for (int rank = 0; rank < world_.size; ++rank) {
      const Slice theirs = stretch_of(request, rank, begin, count);
      if (counts(world_.rank)) send(now, at(request.input, theirs.begin, element), bytes_of(theirs, element), rank);
      if (counts(rank)) receive(now, rooms[static_cast<std::size_t>(rank)], bytes_of(own, element), rank);
    }
    fold(request, inputs, rooms, kept_at(request, world_.rank, own), own.count());
  }
}

ExactFold ExactSums::sum_of(const Request& request, const std::vector<int>& ranks, const Inputs& inputs,
                            std::byte* output, std::int64_t count) const {
  ExactFold sum;
  sum.job.dtype = request.dtype;
  sum.job.op = request.op == ReduceOp::Average ? ReduceOp::Sum : request.op;
  sum.job.count = count;
  sum.output = output;
  for (const int rank : ranks) {
    const auto found = std::lower_bound(round_.contributors.begin(), round_.contributors.end(), rank);
    if (found == round_.contributors.end() || *found != rank) continue;
    const auto number = static_cast<std::size_t>(found - round_.contributors.begin());
    sum.inputs.push_back(inputs[static_cast<std::size_t>(rank)]);
    if (is_scaled(request))
      sum.scales.push_back((round_.fractions.empty() ? 1 : round_.fractions[number]) * request.prescale);
  }
  return sum;
}

ExactFold ExactSums::sum_of_hosts(const Request& request, std::byte* output, std::int64_t count) const {
  ExactFold sum;
  sum.job.dtype = request.dtype;
  sum.job.op = request.op;
  sum.job.count = count;
  sum.job.postscale = request.postscale;
  const auto contributors = static_cast<std::int64_t>(round_.contributors.size());
  if (request.op == ReduceOp::Average)
    sum.job.divisor = round_.fractions.empty() ? std::max<std::int64_t>(contributors, 1) : 1;
  sum.output = output;
  return sum;
}

ExactFold ExactSums::fold_of_all(const Request& request, const Inputs& inputs, std::byte* output,
                                 std::int64_t count) const {
  ExactFold sum = sum_of_hosts(request, output, count);
  ExactFold all = sum_of(request, round_.contributors, inputs, output, count);
  sum.inputs = std::move(all.inputs);
  sum.scales = std::move(all.scales);
  return sum;
}

void ExactSums::fold(const Request& request, const Inputs& inputs, const Rooms& rooms, std::byte* output,
                     std::int64_t count) {
  if (count == 0) return;
  std::vector<ExactFold>& folds = step(current_).folds;
  if (world_.hosts.empty()) return folds.push_back(fold_of_all(request, inputs, output, count));
  ExactFold last = sum_of_hosts(request, output, count);
  for (const std::vector<int>& there : world_.on) {
    const auto lowest = std::find_if(there.begin(), there.end(), [&](int rank) { return counts(rank); });
    if (lowest == there.end()) continue;
    ExactFold sum = sum_of(request, there, inputs, rooms[static_cast<std::size_t>(*lowest)], count);
    if (sum.inputs.size() == 1 && sum.scales.empty()) {  // the sum is that rank's input
      last.inputs.push_back(sum.inputs.front());
      continue;
    }
    last.inputs.push_back(sum.output);
    folds.push_back(std::move(sum));
  }
  folds.push_back(std::move(last));
}

// Sums with the CPU's bits on several hosts with equal numbers of ranks: first over the ranks of a host, then over the
// hosts, in columns of one rank on each host.

// Each rank of the host has a slice, divided into a part for each host. Takes two exchanges to reduce, two to gather.
void ExactSums::add_columns(const Request& request) {
  const std::size_t element = size_of(request.dtype);
  const int hosts = static_cast<int>(world_.on.size());
  const int own_host = world_.hosts[static_cast<std::size_t>(world_.rank)];
  const std::vector<int>& here = world_.on[static_cast<std::size_t>(own_host)];
  for (std::int64_t begin = 0; begin < request.input_count;) {
    const std::int64_t count =
        most_of(static_cast<std::size_t>(request.input_count - begin) * element, element, most_at_once_,
                [&](std::size_t bytes) { return scratch_of_slices(bytes, world_); });
    const std::size_t slot = slot_of_slice(static_cast<std::size_t>(count) * element, world_.columns);
    const std::size_t part_slot = slot_of_slice(slot, hosts);
    std::byte* const room = take(scratch_of_slices(static_cast<std::size_t>(count) * element, world_));
    std::byte* const part_room = room + slot * static_cast<std::size_t>(world_.columns);
    const auto slice = [&](int local) { return slice_of(count, element, local, world_.columns, 0); };
    const Slice own = slice(world_.local);
    const auto part = [&](int host) { return slice_of(own.count(), element, host, hosts, 0); };

    const std::size_t first = current_;
    Inputs inputs(static_cast<std::size_t>(world_.size));
    for (int local = 0; local < world_.columns; ++local) {
      const int rank = here[static_cast<std::size_t>(local)];
      std::byte* const from = room + static_cast<std::size_t>(local) * slot;
      inputs[static_cast<std::size_t>(rank)] = from;
      send(step(first), at(request.input, begin + slice(local).begin, element), bytes_of(slice(local), element), rank);
      receive(step(first), from, bytes_of(own, element), rank);
    }
    inputs[static_cast<std::size_t>(world_.rank)] = at(request.input, begin + own.begin, element);
    std::byte* const partial = room + static_cast<std::size_t>(world_.local) * slot;
    if (own.count() > 0) step(first).folds.push_back(sum_of(request, here, inputs, partial, own.count()));

    std::byte* const result = at(request.output, begin + own.begin, element);
    ExactFold last = sum_of_hosts(request, at(result, part(own_host).begin, element), part(own_host).count());
    for (int host = 0; host < hosts; ++host) {
      const int rank = world_.on[static_cast<std::size_t>(host)][static_cast<std::size_t>(world_.local)];
      std::byte* const from = part_room + static_cast<std::size_t>(host) * part_slot;
      last.inputs.push_back(host == own_host ? at(partial, part(host).begin, element) : from);
      send(step(first + 1), at(partial, part(host).begin, element), bytes_of(part(host), element), rank);
      receive(step(first + 1), from, bytes_of(part(own_host), element), rank);
      // Return the result after folding.
      send(step(first + 2), at(result, part(own_host).begin, element), bytes_of(part(own_host), element), rank);
      receive(step(first + 2), at(result, part(host).begin, element), bytes_of(part(host), element), rank);
    }
    if (part(own_host).count() > 0) step(first + 1).folds.push_back(std::move(last));
    for (int local = 0; local < world_.columns; ++local) {
      const int rank = here[static_cast<std::size_t>(local)];
      send(step(first + 3), result, bytes_of(own, element), rank);
      receive(step(first + 3), at(request.output, begin + slice(local).begin, element), bytes_of(slice(local), element),
              rank);
    }
    begin += count;
  }
}

// Each rank sums, over its host, the parts that the ranks of its column keep, and sends them these sums.
void ExactSums::add_parts_of_columns(const Request& request) {
  const std::size_t element = size_of(request.dtype);
  const std::int64_t longest = longest_part(request, world_.size);
  const std::size_t hosts = world_.on.size();
  const auto own_host = static_cast<std::size_t>(world_.hosts[static_cast<std::size_t>(world_.rank)]);
  const std::vector<int>& here = world_.on[own_host];
  for (std::int64_t begin = 0, count = 0; begin < longest; begin += count) {
    count = most_of(static_cast<std::size_t>(longest - begin) * element, element, most_at_once_,
                    [&](std::size_t bytes) { return scratch_of_parts(bytes, world_); });
    const std::size_t slot = lines(static_cast<std::size_t>(count) * element) * kLine;
    std::byte* const room = take(scratch_of_parts(static_cast<std::size_t>(count) * element, world_));
    std::byte* const part_room = room + slot * static_cast<std::size_t>(world_.size);
    const std::size_t first = current_;
    const Slice own = stretch_of(request, world_.rank, begin, count);
    ExactFold last = sum_of_hosts(request, kept_at(request, world_.rank, own), own.count());
    for (std::size_t host = 0; host < hosts; ++host) {
      const int keeper = world_.on[host][static_cast<std::size_t>(world_.local)];
      const Slice kept = stretch_of(request, keeper, begin, count);
      Inputs inputs(static_cast<std::size_t>(world_.size));
      for (std::size_t local = 0; local < here.size(); ++local) {
        const Slice theirs = stretch_of(request, world_.on[host][local], begin, count);
        std::byte* const from = room + (host * here.size() + local) * slot;
        inputs[static_cast<std::size_t>(here[local])] = from;
        send(step(first), at(request.input, theirs.begin, element), bytes_of(theirs, element), here[local]);
        receive(step(first), from, bytes_of(kept, element), here[local]);
      }
      inputs[static_cast<std::size_t>(world_.rank)] = at(request.input, kept.begin, element);
      std::byte* const partial = room + (host * here.size() + static_cast<std::size_t>(world_.local)) * slot;
      if (kept.count() > 0) step(first).folds.push_back(sum_of(request, here, inputs, partial, kept.count()));
      std::byte* const from = part_room + host * slot;
      last.inputs.push_back(host == own_host ? partial : from);
      send(step(first + 1), partial, bytes_of(kept, element), keeper);
      receive(step(first + 1), from, bytes_of(own, element), keeper);
    }
    if (own.count() > 0) step(first + 1).folds.push_back(std::move(last));
  }
}

}  // namespace cohort::comm::cuda
