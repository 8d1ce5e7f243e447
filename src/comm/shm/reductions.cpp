#include "comm/shm/algorithms.h"
#include "comm/shm/plan.h"

#include <algorithm>
#include <cstring>

namespace cohort::comm::local {

namespace {

// Functions that fold the inputs of a reduction's contributors, by ascending rank, in any kind of memory.

/// Folds the context's `fold_inputs` to its `fold_outputs`.
void fold_collected(Context& context, std::int64_t count, Stores stores = Stores::Cached) {
  const Descriptor& agreed = context.agreement.agreed;
  FoldJob job;
  if (agreed.check_finite != 0) job.non_finite = &context.non_finite;
  job.dtype = agreed.dtype;
  job.op = agreed.op;
  job.inputs = context.fold_inputs;
  job.outputs = context.fold_outputs;
  job.count = count;
  job.scales = context.contributors.scales();
  job.divisor = context.contributors.divisor();
  job.postscale = agreed.postscale;
  job.stores = stores;
  fold(job);
}

/// Collects the inputs to fold. `input_of(rank)` returns the address of a contributor's elements.
template <class InputOf>
void collect_inputs(Context& context, InputOf input_of) {
  context.fold_inputs.clear();
  for (const int rank : context.contributors.ranks()) context.fold_inputs.push_back(input_of(rank));
}

/// Folds `count` elements of all contributors to `to`.
template <class InputOf>
void fold_members(Context& context, std::int64_t count, void* to, InputOf input_of) {
  collect_inputs(context, input_of);
  context.fold_outputs.assign(1, to);
  fold_collected(context, count);
}

}  // namespace

void fold_pieces(Context& context, std::int64_t count, Stores stores) {
  const std::size_t element = size_of(context.agreement.agreed.dtype);
  const auto piece = static_cast<std::int64_t>(kPieceBytes / element);
  while (count > 0) {
    const std::int64_t now = std::min(count, piece);
    fold_collected(context, now, stores);
    count -= now;
    if (count == 0) break;
    context.throw_if_ended();
    for (const void*& input : context.fold_inputs) input = at(input, now, element);
    for (void*& output : context.fold_outputs) output = at(output, now, element);
  }
}

namespace {

/// Folds a slice of the inputs to `to`, piece by piece from the peers' memory, in place or through the kernel.
void fold_from_peers(Context& context, const Request& request, const Slice& slice, void* to) {
  constexpr std::int64_t kPiecesBetweenLooks = 64;
  const std::size_t element = size_of(request.dtype);
  const auto per_piece = static_cast<std::int64_t>(kPullPiece / element);
  for (std::int64_t begin = slice.begin, number = 1; begin < slice.end; begin += per_piece, ++number) {
    const std::int64_t count = std::min(per_piece, slice.end - begin);
    fold_members(context, count, at(to, begin - slice.begin, element), [&](int member) {
      return member == context.rank
                 ? at(request.input, begin, element)
                 : context.fetch(member, context.brought(member).input(), static_cast<std::size_t>(begin) * element,
                                 static_cast<std::size_t>(count) * element);
    });
    if (number % kPiecesBetweenLooks == 0) context.throw_if_ended();
  }
}

// all_reduce and reduce. In a reduce, only the root gets the result, and the other ranks write nothing.

/// The division of an operation's elements into chunks.
struct ChunkedBuffer {
  ChunkedBuffer(const Context& context, const Request& request)
      : element(size_of(request.dtype)),
        per_chunk(static_cast<std::int64_t>(context.plan.chunk_bytes / element)),
        total(request.input_count),
        count(static_cast<std::uint64_t>((total + per_chunk - 1) / per_chunk)) {}

  Slice of(std::uint64_t chunk) const noexcept {
    const std::int64_t begin = static_cast<std::int64_t>(chunk) * per_chunk;
    return {begin, std::min(begin + per_chunk, total)};
  }

  const std::size_t element;
  const std::int64_t per_chunk;
  const std::int64_t total;
  const std::uint64_t count;
};

}  // namespace

void reduce_inline(Context& context, const Request& request) {
  if (context.serving || !context.gets_result(context.rank)) return;
  fold_members(context, request.input_count, request.output, [&](int member) -> const void* {
    // In a reduce only this rank needs its own input, so it was not sent inline.
    return context.is_rooted() && member == context.rank ? request.input : context.inline_input(member);
  });
}

namespace {

void fold_in_place(Context& context, const Request& request, Stores stores) {
  const std::size_t element = size_of(request.dtype);
  const Slice slice =
      slice_of(request.input_count, element, context.rank, context.size, context.agreement.agreed.output_offset);
  collect_inputs(context, [&](int member) {
    // An input that no other rank can read has been copied to its rank's output by all_reduce_by_output.
    const bool readable = member == context.rank || context.mapped(member);
    return at(readable ? context.input_of(member, request) : context.output_of(member, request), slice.begin, element);
  });
  context.fold_outputs.clear();
  for (const int rank : context.agreement.active) {
    if (context.gets_result(rank)) {
      context.fold_outputs.push_back(at(context.output_of(rank, request), slice.begin, element));
    }
  }
  fold_pieces(context, slice.count(), stores);
  context.finish_round();
}

}  // namespace

void reduce_zero_copy(Context& context, const Request& request) { fold_in_place(context, request, Stores::Cached); }

// A rank whose input is not registered first copies the slices that others fold to its output, for them to read there.
void all_reduce_by_output(Context& context, const Request& request) {
  if (!context.serving && !context.mapped(context.rank)) {
    const std::size_t element = size_of(request.dtype);
    for (int step = 1; step < context.size; ++step) {
      const Slice theirs = slice_of(request.input_count, element, (context.rank + step) % context.size, context.size,
                                    context.agreement.agreed.output_offset);
      const std::size_t bytes = static_cast<std::size_t>(theirs.count()) * element;
      copy(at(request.output, theirs.begin, element), at(request.input, theirs.begin, element), bytes,
           context.stores_for(bytes));
    }
  }
  context.meet_at(&RankState::folded);
  fold_in_place(context, request, context.stores_for(request.output_bytes() / static_cast<std::size_t>(context.size)));
}

// Each rank folds its slice into its own output, and then reads the other ranks' slices from their outputs. No rank
// writes memory that a peer may still read: only the rank itself reads the input of its own slice, and it writes the
// rest of its output after all have folded.
void all_reduce_cross(Context& context, const Request& request) {
  const std::size_t element = size_of(request.dtype);
  const Slice own = slice_of(request.input_count, element, context.rank, context.size, 0);
  fold_from_peers(context, request, own, at(request.output, own.begin, element));
  context.meet_at(&RankState::folded);
  for (int step = 1; step < context.size; ++step) {
    const int rank = (context.rank + step) % context.size;  // ranks begin at different peers
    const Slice theirs = slice_of(request.input_count, element, rank, context.size, 0);
    context.pull(rank, context.brought(rank).output(), static_cast<std::size_t>(theirs.begin) * element,
                 static_cast<std::size_t>(theirs.count()) * element, at(request.output, theirs.begin, element));
  }
  context.finish_round();
}

// Needs one wait for each chunk, and no copying out.
void reduce_exchanged(Context& context, const Request& request) {
  const ChunkedBuffer buffer(context, request);
  Chunks chunks = context.next_chunks(buffer.count);
  chunks.stages = !context.is_rooted() || context.rank != context.agreement.root;
  chunks.takes = context.gets_result(context.rank);
  const auto copy_in = [&](std::uint64_t chunk, std::uint64_t number) {
    const Slice slice = buffer.of(chunk);
    const std::size_t bytes = static_cast<std::size_t>(slice.count()) * buffer.element;
    copy(context.staging(context.rank, number), at(request.input, slice.begin, buffer.element), bytes,
         context.stores_for(bytes));
  };
  const auto fold_both = [&](std::uint64_t chunk, std::uint64_t number) {
    const Slice slice = buffer.of(chunk);
    fold_members(context, slice.count(), at(request.output, slice.begin, buffer.element), [&](int member) {
      return member == context.rank ? at(request.input, slice.begin, buffer.element) : context.staging(member, number);
    });
  };
  run_one_ahead(context, chunks, copy_in, fold_both);
}

// Every rank folds its slice of each chunk. Inputs that are registered, or read through the kernel, are not copied in.
void reduce_chunked(Context& context, const Request& request, bool cross) {
  const ChunkedBuffer buffer(context, request);
  const std::size_t element = buffer.element;
  const int own_rank = context.rank;
  const bool only_mine = context.is_rooted() && own_rank == context.agreement.root;
  const bool gets_result = !context.serving && context.gets_result(own_rank);
  const auto share = [&](const Slice& chunk, int rank) {
    return slice_of(chunk.count(), element, rank, context.size, 0);
  };
  // Copies in the part of a chunk that the others need: everything but this rank's own slice.
  const auto copy_in = [&](std::uint64_t number_of, std::uint64_t number) {
    if (context.serving || context.mapped(own_rank) || cross) return;
    const Slice chunk = buffer.of(number_of);
    const Slice own = share(chunk, own_rank);
    std::byte* const to = context.staging(own_rank, number);
    const std::byte* const from = at(request.input, chunk.begin, element);
    const auto first = static_cast<std::size_t>(own.begin) * element;
    const auto last = static_cast<std::size_t>(own.end) * element;
    const std::size_t rest = static_cast<std::size_t>(chunk.count()) * element - last;
    copy(to, from, first, context.stores_for(first));
    copy(to + last, from + last, rest, context.stores_for(rest));
  };
  const auto fold_own = [&](std::uint64_t number_of, std::uint64_t number) {
    const Slice chunk = buffer.of(number_of);
    const Slice own = share(chunk, own_rank);
    const std::int64_t begin = chunk.begin + own.begin;
    collect_inputs(context, [&](int member) -> const std::byte* {
      if (member == own_rank) return at(request.input, begin, element);
      if (!cross && !context.mapped(member)) return at(context.staging(member, number), own.begin, element);
      return context.fetch(member, context.brought(member).input(), static_cast<std::size_t>(begin) * element,
                           static_cast<std::size_t>(own.count()) * element);
    });
    context.fold_outputs.clear();
    if (!only_mine) context.fold_outputs.push_back(at(context.results(own_rank, number), own.begin, element));
    if (gets_result) context.fold_outputs.push_back(at(request.output, begin, element));
    fold_collected(context, own.count());
  };
  const auto copy_out = [&](std::uint64_t number_of, std::uint64_t number) {
    if (!gets_result) return;
    const Slice chunk = buffer.of(number_of);
    for (int step = 1; step < context.size; ++step) {
      const int rank = (own_rank + step) % context.size;  // ranks begin at different peers
      const Slice theirs = share(chunk, rank);
      std::memcpy(at(request.output, chunk.begin + theirs.begin, element),
                  at(context.results(rank, number), theirs.begin, element),
                  static_cast<std::size_t>(theirs.count()) * element);
    }
  };
  context.chunks = run_three_stages(context, {context.chunks, buffer.count}, copy_in, fold_own, copy_out);
}

// reduce_scatter and reduce_scatter_v: every rank folds the part that it keeps.

void reduce_scatter_inline(Context& context, const Request& request) {
  const Slice own = kept_by(request, context.rank);
  fold_members(context, own.count(), request.output,
               [&](int member) { return at(context.inline_input(member), own.begin, size_of(request.dtype)); });
}

void reduce_scatter_direct(Context& context, const Request& request) {
  fold_from_peers(context, request, kept_by(request, context.rank), request.output);
}

// A chunk holds the same range of each rank's part.
void reduce_scatter_chunked(Context& context, const Request& request) {
  const std::size_t element = size_of(request.dtype);
  std::int64_t longest = 0;
  for (int rank = 0; rank < context.size; ++rank) longest = std::max(longest, kept_by(request, rank).count());
  const auto per_chunk = static_cast<std::int64_t>(context.layout.chunk_bytes() / element) / context.size;
  const auto range = [&](int rank, std::uint64_t chunk) {
    const Slice kept = kept_by(request, rank);
    const std::int64_t begin = kept.begin + static_cast<std::int64_t>(chunk) * per_chunk;
    return Slice{std::min(begin, kept.end), std::min(begin + per_chunk, kept.end)};
  };
  const auto copy_in = [&](std::uint64_t chunk, std::uint64_t number) {
    for (int rank = 0; rank < context.size; ++rank) {
      if (rank == context.rank) continue;
      const Slice theirs = range(rank, chunk);
      const std::size_t bytes = static_cast<std::size_t>(theirs.count()) * element;
      copy(at(context.staging(context.rank, number), rank * per_chunk, element),
           at(request.input, theirs.begin, element), bytes, context.stores_for(bytes));
    }
  };
  const auto fold_own = [&](std::uint64_t chunk, std::uint64_t number) {
    const Slice own = range(context.rank, chunk);
    if (own.count() == 0) return;  // the output may be null
    void* const to = at(request.output, static_cast<std::int64_t>(chunk) * per_chunk, element);
    fold_members(context, own.count(), to, [&](int member) -> const std::byte* {
      if (member == context.rank || context.mapped(member)) {
        return at(context.input_of(member, request), own.begin, element);
      }
      return at(context.staging(member, number), context.rank * per_chunk, element);
    });
  };
  Chunks chunks = context.next_chunks(static_cast<std::uint64_t>((longest + per_chunk - 1) / per_chunk));
  chunks.lends = context.mapped(context.rank);
  chunks.stages = !chunks.lends;
  run_one_ahead(context, chunks, copy_in, fold_own);
}

}  // namespace cohort::comm::local
