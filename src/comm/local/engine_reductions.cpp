// Reductions, once all ranks agree. Every function runs on all ranks, also on those that have joined, which take their
// part of the work but bring and receive nothing. Elements are folded by ascending rank on every path.
#include "comm/local/engine.h"

#include "comm/local/plan.h"

#include <algorithm>
#include <cstring>

namespace cohort::comm::local {
namespace {

std::byte* at(void* base, std::int64_t elements, std::size_t element) noexcept {
  return static_cast<std::byte*>(base) + static_cast<std::size_t>(elements) * element;
}
const std::byte* at(const void* base, std::int64_t elements, std::size_t element) noexcept {
  return static_cast<const std::byte*>(base) + static_cast<std::size_t>(elements) * element;
}

}  // namespace

// Which ranks are folded, and by what each is multiplied first.
void Engine::set_members(const Request& request) {
  scales_.clear();
  divisor_ = 0;
  if (round_.agreed.weighted != 0) {
    weights_.clear();
    for (const int rank : round_.active) weights_.push_back(round_.brought[static_cast<std::size_t>(rank)].weight);
    weigh(weights_, weighting_);
    members_.clear();
    for (const int member : weighting_.members) members_.push_back(round_.active[static_cast<std::size_t>(member)]);
    scales_ = weighting_.fractions;
    divisor_ = weighting_.divisor();
  } else {
    members_ = round_.active;
  }
  if (const double prescale = round_.agreed.prescale; prescale != 1 && is_scalable(request.dtype)) {
    scales_.resize(members_.size(), 1);
    for (double& scale : scales_) scale *= prescale;
  }
}

// Of the inputs and outputs that were set.
FoldJob Engine::job(const Request& request, std::int64_t count) noexcept {
  FoldJob result;
  if (round_.agreed.check_finite != 0) result.non_finite = &non_finite_;
  result.dtype = request.dtype;
  result.op = round_.agreed.op;
  result.inputs = fold_inputs_;
  result.outputs = fold_outputs_;
  result.count = count;
  result.scales = scales_;
  result.divisor = divisor_;
  result.postscale = round_.agreed.postscale;
  return result;
}

// --- all_reduce and reduce ---

void Engine::all_reduce_beside(const Request& request) {
  if (serving_) return;
  const bool rooted = round_.agreed.kind == Kind::Reduce;  // then nobody but this rank needs what it brings
  fold_inputs_.clear();
  for (const int member : members_) {
    fold_inputs_.push_back(rooted && member == rank_ ? request.input : payload_of(member));
  }
  fold_outputs_.assign(1, request.output);
  fold(job(request, request.input_count));
}

// Each rank folds its slice out of all ranks' memory into the memory of all who want it.
void Engine::all_reduce_zero_copy(const Request& request, Stores stores) {
  const std::size_t element = size_of(request.dtype);
  const bool rooted = round_.agreed.kind == Kind::Reduce;
  const Slice slice = slice_of(request.input_count, element, rank_, size_, round_.agreed.output_offset);
  fold_inputs_.clear();
  fold_outputs_.clear();
  for (const int member : members_) {
    // What is nobody else's to read lies in the output, where all_reduce_by_output has copied it.
    const bool readable = member == rank_ || mapped(member);
    fold_inputs_.push_back(at(readable ? input_of(member, request) : output_of(member, request), slice.begin, element));
  }
  for (const int rank : round_.active) {
    if (!rooted || rank == round_.root) fold_outputs_.push_back(at(output_of(rank, request), slice.begin, element));
  }
  fold_pieces(request, slice.count(), stores);
  finish_round();
}

// The outputs are registered, not all of the inputs: these lend theirs to the slices that other ranks fold.
void Engine::all_reduce_by_output(const Request& request) {
  if (!serving_ && !mapped(rank_)) {
    const std::size_t element = size_of(request.dtype);
    for (int step = 1; step < size_; ++step) {
      const Slice theirs =
          slice_of(request.input_count, element, (rank_ + step) % size_, size_, round_.agreed.output_offset);
      const std::size_t bytes = static_cast<std::size_t>(theirs.count()) * element;
      copy(at(request.output, theirs.begin, element), at(request.input, theirs.begin, element), bytes,
           stores_for(bytes));
    }
  }
  post(&RankState::folded, sequence_);
  wait_for_counters(&RankState::folded, sequence_);
  all_reduce_zero_copy(request, stores_for(request.output_bytes() / static_cast<std::size_t>(size_)));
}

// Each rank folds its slice, piece by piece out of what it reads from its peers, into its own output, and then reads
// the others' slices from theirs. Nobody writes what a peer may still read: a rank's own slice is read by itself alone,
// and the rest of its output is written once all have folded.
void Engine::all_reduce_cross(const Request& request) {
  const std::size_t element = size_of(request.dtype);
  const Slice own = slice_of(request.input_count, element, rank_, size_, 0);
  const auto per_piece = static_cast<std::int64_t>(kPullPiece / element);
  for (std::int64_t begin = own.begin; begin < own.end; begin += per_piece) {
    const std::int64_t count = std::min(per_piece, own.end - begin);
    const std::size_t bytes = static_cast<std::size_t>(count) * element;
    fold_inputs_.clear();
    for (const int member : members_) {
      fold_inputs_.push_back(member == rank_
                                 ? at(request.input, begin, element)
                                 : fetch(member, round_.brought[static_cast<std::size_t>(member)].input(),
                                         static_cast<std::size_t>(begin) * element, bytes, scratch_of(member)));
    }
    fold_outputs_.assign(1, at(request.output, begin, element));
    fold(job(request, count));
    if ((begin - own.begin) / per_piece % 64 == 63) throw_if_ended();
  }
  post(&RankState::folded, sequence_);
  wait_for_counters(&RankState::folded, sequence_);
  for (int step = 1; step < size_; ++step) {
    const int rank = (rank_ + step) % size_;  // not all at the same one
    const Slice theirs = slice_of(request.input_count, element, rank, size_, 0);
    pull(rank, round_.brought[static_cast<std::size_t>(rank)].output(),
         static_cast<std::size_t>(theirs.begin) * element, static_cast<std::size_t>(theirs.count()) * element,
         at(request.output, theirs.begin, element));
  }
  finish_round();
}

// Two ranks: who does not have the result alone stages all it brings, and who wants the result folds both. One wait for
// each chunk, and nothing to copy out.
void Engine::reduce_exchanged(const Request& request) {
  const bool rooted = round_.agreed.kind == Kind::Reduce;
  const bool stages = !rooted || rank_ != round_.root;
  const bool folds = !rooted || rank_ == round_.root;
  const std::size_t element = size_of(request.dtype);
  const auto per_chunk = static_cast<std::int64_t>(plan_.chunk_bytes / element);
  const std::int64_t chunks = (request.input_count + per_chunk - 1) / per_chunk;
  const auto elements_of = [&](std::int64_t begin) { return std::min(per_chunk, request.input_count - begin); };
  const auto copy_in = [&](std::uint64_t chunk, std::uint64_t number) {
    const std::int64_t begin = static_cast<std::int64_t>(chunk) * per_chunk;
    const std::size_t bytes = static_cast<std::size_t>(elements_of(begin)) * element;
    copy(layout().staging(world_.control(), rank_, number), at(request.input, begin, element), bytes,
         stores_for(bytes));
  };
  const auto fold_both = [&](std::uint64_t chunk, std::uint64_t number) {
    const std::int64_t begin = static_cast<std::int64_t>(chunk) * per_chunk;
    fold_inputs_.clear();
    for (const int member : members_) {
      fold_inputs_.push_back(member == rank_ ? at(request.input, begin, element)
                                             : layout().staging(world_.control(), member, number));
    }
    fold_outputs_.assign(1, at(request.output, begin, element));
    fold(job(request, elements_of(begin)));
  };
  const Chunks all{chunks_, static_cast<std::uint64_t>(chunks), stages, folds};
  run_one_ahead(Counters{*this}, all, copy_in, fold_both);
  chunks_ += all.count;
}

// Every rank folds its slice of each chunk. What is registered, or can be read through the kernel, is not copied in.
void Engine::reduce_staged(const Request& request, Path path) {
  const std::size_t element = size_of(request.dtype);
  const auto per_chunk = static_cast<std::int64_t>(plan_.chunk_bytes / element);
  const std::int64_t chunks = (request.input_count + per_chunk - 1) / per_chunk;
  const auto piece = [&](std::uint64_t chunk, std::uint64_t number) {
    const std::int64_t begin = static_cast<std::int64_t>(chunk) * per_chunk;
    return Chunk{begin, std::min(per_chunk, request.input_count - begin), number};
  };
  chunks_ = run_three_stages(
      Counters{*this}, {chunks_, static_cast<std::uint64_t>(chunks)},
      [&](std::uint64_t chunk, std::uint64_t number) { copy_in(request, path, piece(chunk, number)); },
      [&](std::uint64_t chunk, std::uint64_t number) { fold_own(request, path, piece(chunk, number)); },
      [&](std::uint64_t chunk, std::uint64_t number) { copy_out(request, piece(chunk, number)); });
}

// What the others need of a chunk: all but the own slice.
void Engine::copy_in(const Request& request, Path path, const Chunk& chunk) {
  if (serving_ || mapped(rank_) || path == Path::Cross) return;
  const std::size_t element = size_of(request.dtype);
  const Slice own = slice_of(chunk.count, element, rank_, size_, 0);
  std::byte* const to = layout().staging(world_.control(), rank_, chunk.number);
  const std::byte* const from = at(request.input, chunk.begin, element);
  const auto first = static_cast<std::size_t>(own.begin) * element;
  const auto last = static_cast<std::size_t>(own.end) * element;
  const std::size_t rest = static_cast<std::size_t>(chunk.count) * element - last;
  copy(to, from, first, stores_for(first));
  copy(to + last, from + last, rest, stores_for(rest));
}

void Engine::fold_own(const Request& request, Path path, const Chunk& chunk) {
  const std::size_t element = size_of(request.dtype);
  const bool rooted = round_.agreed.kind == Kind::Reduce;
  const Slice own = slice_of(chunk.count, element, rank_, size_, 0);
  const std::size_t offset = static_cast<std::size_t>(chunk.begin + own.begin) * element;
  fold_inputs_.clear();
  fold_outputs_.clear();
  for (const int member : members_) {
    if (member == rank_) {
      fold_inputs_.push_back(static_cast<const std::byte*>(request.input) + offset);
    } else if (path == Path::Cross || mapped(member)) {
      fold_inputs_.push_back(fetch(member, round_.brought[static_cast<std::size_t>(member)].input(), offset,
                                   static_cast<std::size_t>(own.count()) * element, scratch_of(member)));
    } else {
      fold_inputs_.push_back(at(layout().staging(world_.control(), member, chunk.number), own.begin, element));
    }
  }
  if (!rooted || rank_ != round_.root) {
    fold_outputs_.push_back(at(layout().results(world_.control(), rank_, chunk.number), own.begin, element));
  }
  if (!serving_ && (!rooted || rank_ == round_.root)) {
    fold_outputs_.push_back(static_cast<std::byte*>(request.output) + offset);
  }
  fold(job(request, own.count()));
}

void Engine::copy_out(const Request& request, const Chunk& chunk) {
  if (serving_ || (round_.agreed.kind == Kind::Reduce && rank_ != round_.root)) return;
  const std::size_t element = size_of(request.dtype);
  for (int step = 1; step < size_; ++step) {
    const int rank = (rank_ + step) % size_;  // not all at the same one
    const Slice theirs = slice_of(chunk.count, element, rank, size_, 0);
    std::memcpy(at(request.output, chunk.begin + theirs.begin, element),
                at(layout().results(world_.control(), rank, chunk.number), theirs.begin, element),
                static_cast<std::size_t>(theirs.count()) * element);
  }
}

// --- reduce_scatter ---

// A rank's part of every rank's input, in elements.
Slice Engine::part(const Request& request, int rank) const noexcept {
  if (request.kind == Kind::ReduceScatter) return {rank * request.output_count, (rank + 1) * request.output_count};
  return part_of(request.counts->input, rank);
}

void Engine::reduce_scatter_beside(const Request& request) {
  const Slice own = part(request, rank_);
  fold_inputs_.clear();
  for (const int member : members_) {
    fold_inputs_.push_back(at(payload_of(member), own.begin, size_of(request.dtype)));
  }
  fold_outputs_.assign(1, request.output);
  fold(job(request, own.count()));
}

// Out of the peers' memory, in place or through the kernel. They may not write it before all have done that.
void Engine::reduce_scatter_direct(const Request& request) {
  const std::size_t element = size_of(request.dtype);
  const Slice own = part(request, rank_);
  const auto per_piece = static_cast<std::int64_t>(kPullPiece / element);
  for (std::int64_t begin = own.begin; begin < own.end; begin += per_piece) {
    const std::int64_t count = std::min(per_piece, own.end - begin);
    fold_inputs_.clear();
    for (const int member : members_) {
      fold_inputs_.push_back(member == rank_ ? at(request.input, begin, element)
                                             : fetch(member, round_.brought[static_cast<std::size_t>(member)].input(),
                                                     static_cast<std::size_t>(begin) * element,
                                                     static_cast<std::size_t>(count) * element, scratch_of(member)));
    }
    fold_outputs_.assign(1, at(request.output, begin - own.begin, element));
    fold(job(request, count));
    if ((begin - own.begin) / per_piece % 64 == 63) throw_if_ended();
  }
}

// A chunk holds the same range of every rank's part.
void Engine::reduce_scatter_staged(const Request& request) {
  const std::size_t element = size_of(request.dtype);
  std::int64_t longest = 0;
  for (int rank = 0; rank < size_; ++rank) longest = std::max(longest, part(request, rank).count());
  const auto per_chunk = static_cast<std::int64_t>(layout().chunk_bytes() / element) / size_;
  const std::int64_t chunks = (longest + per_chunk - 1) / per_chunk;
  void* const control = world_.control();
  const auto elements_of = [&](int rank, std::int64_t begin) {
    return std::clamp(part(request, rank).count() - begin, std::int64_t{0}, per_chunk);
  };
  const auto copy_in = [&](std::uint64_t chunk, std::uint64_t number) {
    const std::int64_t begin = static_cast<std::int64_t>(chunk) * per_chunk;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_) continue;
      const std::size_t bytes = static_cast<std::size_t>(elements_of(rank, begin)) * element;
      copy(at(layout().staging(control, rank_, number), rank * per_chunk, element),
           at(request.input, part(request, rank).begin + begin, element), bytes, stores_for(bytes));
    }
  };
  const auto fold_part = [&](std::uint64_t chunk, std::uint64_t number) {
    const std::int64_t begin = static_cast<std::int64_t>(chunk) * per_chunk;
    const std::int64_t count = elements_of(rank_, begin);
    if (count == 0) return;  // there may be no output at all
    fold_inputs_.clear();
    for (const int member : members_) {
      const bool in_place = member == rank_ || mapped(member);
      fold_inputs_.push_back(in_place ? at(input_of(member, request), part(request, rank_).begin + begin, element)
                                      : at(layout().staging(control, member, number), rank_ * per_chunk, element));
    }
    fold_outputs_.assign(1, at(request.output, begin, element));
    fold(job(request, count));
  };
  const bool in_place = mapped(rank_);
  const Chunks all{chunks_, static_cast<std::uint64_t>(chunks), !in_place, true, in_place};
  run_one_ahead(Counters{*this}, all, copy_in, fold_part);
  chunks_ += all.count;
}

}  // namespace cohort::comm::local
