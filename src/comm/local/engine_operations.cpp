// What the engine does once all ranks agree. Every function runs on all ranks, also on those that have joined, which
// take their part of the work but bring and receive nothing.
#include "comm/local/engine.h"

#include "comm/local/slices.h"
#include "comm/local/waiting.h"

#include <algorithm>
#include <cstring>

namespace cohort::comm::local {
namespace {

// Between pieces the engine looks whether the world has ended.
constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

std::byte* at(void* base, std::int64_t elements, std::size_t element) noexcept {
  return static_cast<std::byte*>(base) + static_cast<std::size_t>(elements) * element;
}
const std::byte* at(const void* base, std::int64_t elements, std::size_t element) noexcept {
  return static_cast<const std::byte*>(base) + static_cast<std::size_t>(elements) * element;
}

void copy(void* to, const void* from, std::size_t bytes) noexcept {
  if (to != from && bytes > 0) std::memmove(to, from, bytes);
}

}  // namespace

void Engine::execute(const Operation& operation, CollectiveEvent* event) {
  // Where a broadcast's data is small but comes from another rank than announced, it is not beside the announcement.
  const bool small = is_small(operation) && (operation.kind != Kind::Broadcast || round_.root == round_.agreed.root);
  bool zero_copy = false;
  switch (operation.kind) {
    case Kind::AllReduce:
      zero_copy = !small && all_mapped(true);
      if (small)
        all_reduce_small(operation);
      else if (zero_copy)
        all_reduce_zero_copy(operation);
      else
        all_reduce_staged(operation);
      break;
    case Kind::ReduceScatter:
      zero_copy = !small && all_mapped(false);
      if (small)
        reduce_scatter_small(operation);
      else if (zero_copy)
        reduce_scatter_zero_copy(operation);
      else
        reduce_scatter_staged(operation);
      break;
    case Kind::AllGather:
      zero_copy = !small && all_mapped(false);
      if (small)
        all_gather_small(operation);
      else if (zero_copy)
        all_gather_zero_copy(operation);
      else
        all_gather_staged(operation);
      break;
    case Kind::Broadcast:
      zero_copy = !small && mapped(round_.root);
      if (small)
        broadcast_small(operation);
      else if (zero_copy)
        broadcast_zero_copy(operation);
      else
        broadcast_staged(operation);
      break;
    default: break;  // a barrier is done when all have come
  }
  if (event != nullptr) event->zero_copy = zero_copy;
}

// --- all_reduce ---

// Which active ranks are folded, as positions in round_.active.
Weighting Engine::members() const {
  Weighting result;
  if (round_.agreed.weighted != 0) {
    std::vector<double> weights;
    for (const int rank : round_.active) weights.push_back(round_.brought[static_cast<std::size_t>(rank)].weight);
    return weigh(weights);
  }
  for (std::size_t i = 0; i < round_.active.size(); ++i) result.members.push_back(static_cast<int>(i));
  return result;
}

void Engine::all_reduce_small(const Operation& operation) {
  if (serving()) return;
  const Weighting weighting = members();
  fold_inputs_.clear();
  for (const int member : weighting.members) {
    fold_inputs_.push_back(payload_of(round_.active[static_cast<std::size_t>(member)]));
  }
  void* const output = operation.output;
  fold({operation.dtype,
        operation.op,
        fold_inputs_,
        {&output, 1},
        operation.count,
        weighting.fractions,
        weighting.divisor()});
}

void Engine::all_reduce_zero_copy(const Operation& operation) {
  const std::size_t element = size_of(operation.dtype);
  const Slice slice = slice_of(operation.count, element, rank_, size_, round_.agreed.output_offset);
  const Weighting weighting = members();
  fold_inputs_.clear();
  fold_outputs_.clear();
  for (const int member : weighting.members) {
    fold_inputs_.push_back(
        at(input_of(round_.active[static_cast<std::size_t>(member)], operation), slice.begin, element));
  }
  for (const int rank : round_.active) fold_outputs_.push_back(at(output_of(rank, operation), slice.begin, element));
  fold_pieces({operation.dtype, operation.op, fold_inputs_, fold_outputs_, slice.count(), weighting.fractions,
               weighting.divisor()});
  post(&RankState::finished, sequence_);
  wait_for_counters(&RankState::finished, sequence_);
}

// Per chunk: copy in what the others need, fold the own slice, copy out what the others folded. Copying in runs one
// chunk ahead. A buffer is used again two chunks later, when the counters show that nobody needs it any more.
void Engine::all_reduce_staged(const Operation& operation) {
  const std::size_t element = size_of(operation.dtype);
  const auto per_chunk = static_cast<std::int64_t>(layout_.chunk_bytes() / element);
  const std::int64_t chunks = (operation.count + per_chunk - 1) / per_chunk;
  const std::uint64_t base = chunks_;
  void* const control = control_.data();
  const Weighting weighting = members();
  const auto elements_of = [&](std::int64_t chunk) { return std::min(per_chunk, operation.count - chunk * per_chunk); };
  const auto copy_in = [&](std::int64_t chunk) {
    const std::uint64_t number = base + static_cast<std::uint64_t>(chunk);
    if (!serving() && !mapped(rank_)) {
      if (number >= 2) wait_for_counters(&RankState::reduced, number - 1);
      const Slice own = slice_of(elements_of(chunk), element, rank_, size_, 0);
      std::byte* const to = layout_.staging(control, rank_, number);
      const std::byte* const from = at(operation.input, chunk * per_chunk, element);
      const auto first = static_cast<std::size_t>(own.begin) * element;
      const auto last = static_cast<std::size_t>(own.end) * element;
      std::memcpy(to, from, first);
      std::memcpy(to + last, from + last, static_cast<std::size_t>(elements_of(chunk)) * element - last);
    }
    post(&RankState::staged, number + 1);
  };

  copy_in(0);
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const std::uint64_t number = base + static_cast<std::uint64_t>(chunk);
    if (chunk + 1 < chunks) copy_in(chunk + 1);
    wait_for_counters(&RankState::staged, number + 1);
    if (number >= 2) wait_for_counters(&RankState::copied, number - 1);
    const std::int64_t count = elements_of(chunk);
    const Slice own = slice_of(count, element, rank_, size_, 0);
    fold_inputs_.clear();
    fold_outputs_.clear();
    for (const int member : weighting.members) {
      const int rank = round_.active[static_cast<std::size_t>(member)];
      const std::byte* from = nullptr;
      if (rank == rank_)
        from = at(operation.input, chunk * per_chunk, element);
      else if (mapped(rank))
        from = at(input_of(rank, operation), chunk * per_chunk, element);
      else
        from = layout_.staging(control, rank, number);
      fold_inputs_.push_back(at(from, own.begin, element));
    }
    fold_outputs_.push_back(at(layout_.results(control, rank_, number), own.begin, element));
    if (!serving()) fold_outputs_.push_back(at(operation.output, chunk * per_chunk + own.begin, element));
    fold({operation.dtype, operation.op, fold_inputs_, fold_outputs_, own.count(), weighting.fractions,
          weighting.divisor()});
    post(&RankState::reduced, number + 1);
    wait_for_counters(&RankState::reduced, number + 1);
    for (int step = 1; step < size_ && !serving(); ++step) {
      const int rank = (rank_ + step) % size_;  // not all at the same one
      const Slice theirs = slice_of(count, element, rank, size_, 0);
      std::memcpy(at(operation.output, chunk * per_chunk + theirs.begin, element),
                  at(layout_.results(control, rank, number), theirs.begin, element),
                  static_cast<std::size_t>(theirs.count()) * element);
    }
    post(&RankState::copied, number + 1);
  }
  chunks_ += static_cast<std::uint64_t>(chunks);
}

// --- reduce_scatter ---

void Engine::reduce_scatter_small(const Operation& operation) {
  const std::size_t element = size_of(operation.dtype);
  fold_inputs_.clear();
  for (int rank = 0; rank < size_; ++rank)
    fold_inputs_.push_back(at(payload_of(rank), rank_ * operation.count, element));
  void* const output = operation.output;
  fold({operation.dtype, operation.op, fold_inputs_, {&output, 1}, operation.count});
}

void Engine::reduce_scatter_zero_copy(const Operation& operation) {
  const std::size_t element = size_of(operation.dtype);
  fold_inputs_.clear();
  fold_outputs_.assign(1, operation.output);
  for (int rank = 0; rank < size_; ++rank) {
    fold_inputs_.push_back(at(input_of(rank, operation), rank_ * operation.count, element));
  }
  fold_pieces({operation.dtype, operation.op, fold_inputs_, fold_outputs_, operation.count});
  post(&RankState::finished, sequence_);
  wait_for_counters(&RankState::finished, sequence_);
}

// A chunk holds the same range of every rank's part.
void Engine::reduce_scatter_staged(const Operation& operation) {
  const std::size_t element = size_of(operation.dtype);
  const auto per_chunk = static_cast<std::int64_t>(layout_.chunk_bytes() / element) / size_;
  const std::int64_t chunks = (operation.count + per_chunk - 1) / per_chunk;
  const std::uint64_t base = chunks_;
  void* const control = control_.data();
  const auto copy_in = [&](std::int64_t chunk) {
    const std::uint64_t number = base + static_cast<std::uint64_t>(chunk);
    if (!mapped(rank_)) {
      if (number >= 2) wait_for_counters(&RankState::reduced, number - 1);
      const std::int64_t count = std::min(per_chunk, operation.count - chunk * per_chunk);
      for (int part = 0; part < size_; ++part) {
        if (part == rank_) continue;
        std::memcpy(at(layout_.staging(control, rank_, number), part * per_chunk, element),
                    at(operation.input, part * operation.count + chunk * per_chunk, element),
                    static_cast<std::size_t>(count) * element);
      }
    }
    post(&RankState::staged, number + 1);
  };

  copy_in(0);
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const std::uint64_t number = base + static_cast<std::uint64_t>(chunk);
    if (chunk + 1 < chunks) copy_in(chunk + 1);
    wait_for_counters(&RankState::staged, number + 1);
    fold_inputs_.clear();
    for (int rank = 0; rank < size_; ++rank) {
      const bool in_place = rank == rank_ || mapped(rank);
      fold_inputs_.push_back(in_place
                                 ? at(input_of(rank, operation), rank_ * operation.count + chunk * per_chunk, element)
                                 : at(layout_.staging(control, rank, number), rank_ * per_chunk, element));
    }
    void* const output = at(operation.output, chunk * per_chunk, element);
    fold({operation.dtype,
          operation.op,
          fold_inputs_,
          {&output, 1},
          std::min(per_chunk, operation.count - chunk * per_chunk)});
    state(rank_).copied.value.store(number + 1);
    post(&RankState::reduced, number + 1);
  }
  chunks_ += static_cast<std::uint64_t>(chunks);
  if (mapped(rank_)) wait_for_counters(&RankState::reduced, chunks_);
}

// --- all_gather ---

void Engine::all_gather_small(const Operation& operation) {
  const std::size_t bytes = operation.input_bytes;
  for (int rank = 0; rank < size_; ++rank) {
    copy(static_cast<std::byte*>(operation.output) + static_cast<std::size_t>(rank) * bytes, payload_of(rank), bytes);
  }
}

void Engine::all_gather_zero_copy(const Operation& operation) {
  const std::size_t bytes = operation.input_bytes;
  for (int step = 0; step < size_; ++step) {
    const int rank = (rank_ + step) % size_;
    copy_pieces(static_cast<std::byte*>(operation.output) + static_cast<std::size_t>(rank) * bytes,
                input_of(rank, operation), bytes);
  }
  post(&RankState::finished, sequence_);
  wait_for_counters(&RankState::finished, sequence_);
}

void Engine::all_gather_staged(const Operation& operation) {
  const std::size_t bytes = operation.input_bytes;
  const std::size_t per_chunk = layout_.chunk_bytes();
  const std::size_t chunks = (bytes + per_chunk - 1) / per_chunk;
  const std::uint64_t base = chunks_;
  void* const control = control_.data();
  const auto input = static_cast<const std::byte*>(operation.input);
  const auto output = static_cast<std::byte*>(operation.output);
  const auto copy_in = [&](std::size_t chunk) {
    const std::uint64_t number = base + chunk;
    if (!mapped(rank_)) {
      if (number >= 2) wait_for_counters(&RankState::reduced, number - 1);
      std::memcpy(layout_.staging(control, rank_, number), input + chunk * per_chunk,
                  std::min(per_chunk, bytes - chunk * per_chunk));
    }
    post(&RankState::staged, number + 1);
  };

  copy_in(0);
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    const std::uint64_t number = base + chunk;
    if (chunk + 1 < chunks) copy_in(chunk + 1);
    wait_for_counters(&RankState::staged, number + 1);
    for (int step = 0; step < size_; ++step) {
      const int rank = (rank_ + step) % size_;
      const bool in_place = rank == rank_ || mapped(rank);
      const std::byte* const from =
          in_place ? input_of(rank, operation) + chunk * per_chunk : layout_.staging(control, rank, number);
      copy(output + static_cast<std::size_t>(rank) * bytes + chunk * per_chunk, from,
           std::min(per_chunk, bytes - chunk * per_chunk));
    }
    state(rank_).copied.value.store(number + 1);
    post(&RankState::reduced, number + 1);
  }
  chunks_ += chunks;
  if (mapped(rank_)) wait_for_counters(&RankState::reduced, chunks_);
}

// --- broadcast ---

void Engine::broadcast_small(const Operation& operation) {
  if (serving() || rank_ == round_.root) return;
  copy(operation.output, payload_of(round_.root), operation.output_bytes);
}

void Engine::broadcast_zero_copy(const Operation& operation) {
  if (rank_ != round_.root && !serving()) {
    copy_pieces(static_cast<std::byte*>(operation.output), input_of(round_.root, operation), operation.output_bytes);
  }
  post(&RankState::finished, sequence_);
  if (rank_ == round_.root) wait_for_counters(&RankState::finished, sequence_);
}

void Engine::broadcast_staged(const Operation& operation) {
  const std::size_t bytes = operation.output_bytes;
  const std::size_t per_chunk = layout_.chunk_bytes();
  const std::size_t chunks = (bytes + per_chunk - 1) / per_chunk;
  void* const control = control_.data();
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    const std::uint64_t number = chunks_ + chunk;
    const std::size_t length = std::min(per_chunk, bytes - chunk * per_chunk);
    if (rank_ == round_.root) {
      if (number >= 2) wait_for_counters(&RankState::reduced, number - 1);
      std::memcpy(layout_.staging(control, rank_, number),
                  static_cast<const std::byte*>(operation.input) + chunk * per_chunk, length);
      post(&RankState::staged, number + 1);
    } else {
      state(rank_).staged.value.store(number + 1);
      wait_for_all([&](int rank) { return rank != round_.root || state(rank).staged.value.load() >= number + 1; });
      if (!serving()) {
        std::memcpy(static_cast<std::byte*>(operation.output) + chunk * per_chunk,
                    layout_.staging(control, round_.root, number), length);
      }
    }
    state(rank_).copied.value.store(number + 1);
    post(&RankState::reduced, number + 1);
  }
  chunks_ += chunks;
}

// --- common ---

void Engine::run_alone(const Operation& operation) {
  if (operation.kind == Kind::Barrier || operation.kind == Kind::Broadcast) return;
  if (operation.weight && *operation.weight == 0) {
    std::memset(operation.output, 0, operation.output_bytes);
  } else {
    copy(operation.output, operation.input, operation.output_bytes);
  }
}

bool Engine::all_mapped(bool outputs_too) const noexcept {
  return std::all_of(round_.active.begin(), round_.active.end(), [&](int rank) {
    return mapped(rank) && (!outputs_too || round_.brought[static_cast<std::size_t>(rank)].output_segment != 0);
  });
}

const std::byte* Engine::payload_of(int rank) const noexcept { return state(rank).slots[sequence_ % 2].payload; }

const std::byte* Engine::input_of(int rank, const Operation& operation) {
  if (rank == rank_) return static_cast<const std::byte*>(operation.input);
  return remote(rank, round_.brought[static_cast<std::size_t>(rank)].input(), operation.input_bytes);
}

std::byte* Engine::output_of(int rank, const Operation& operation) {
  if (rank == rank_) return static_cast<std::byte*>(operation.output);
  return remote(rank, round_.brought[static_cast<std::size_t>(rank)].output(), operation.output_bytes);
}

// A peer's memory. Its announcement may still be in the peer's queue, which it empties while it waits.
std::byte* Engine::remote(int rank, const Location& location, std::size_t bytes) {
  std::byte* found = nullptr;
  std::optional<Error> failed;
  const auto try_once = [&] {
    auto address = mesh_->address(rank, location, bytes);
    if (address && !*address) {
      const auto got = mesh_->receive(rank, round_.brought[static_cast<std::size_t>(rank)].announcements);
      if (!got) {
        failed = got.error();
        return true;
      }
      address = mesh_->address(rank, location, bytes);
    }
    if (!address) {
      failed = address.error();
    } else if (*address) {
      found = static_cast<std::byte*>(**address);
    }
    return failed.has_value() || found != nullptr;
  };
  if (!try_once()) {
    wait_for_all([&](int other) { return other != rank || found != nullptr || failed.has_value() || try_once(); });
  }
  if (failed) end_world(failed->code(), rank, failed->what());
  return found;
}

void Engine::fold_pieces(FoldJob job) {
  const std::size_t element = size_of(job.dtype);
  const auto piece = static_cast<std::int64_t>(kPieceBytes / element);
  std::int64_t rest = job.count;
  while (rest > 0) {
    job.count = std::min(rest, piece);
    fold(job);
    rest -= job.count;
    if (rest == 0) break;
    throw_if_ended();
    for (const void*& input : fold_inputs_) input = at(input, job.count, element);
    for (void*& output : fold_outputs_) output = at(output, job.count, element);
  }
}

void Engine::copy_pieces(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes && to != from; done += kPieceBytes) {
    if (done > 0) throw_if_ended();
    std::memcpy(to + done, from + done, std::min(kPieceBytes, bytes - done));
  }
}

}  // namespace cohort::comm::local
