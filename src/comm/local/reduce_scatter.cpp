// reduce_scatter and reduce_scatter_v: every rank folds what it keeps.
#include "comm/local/folding.h"
#include "comm/local/reductions.h"

#include <algorithm>

namespace cohort::comm::local {

void reduce_scatter_inline(Context& context, const Request& request) {
  const Slice own = kept_by(request, context.rank);
  fold_members(context, own.count(), request.output,
               [&](int member) { return at(context.inline_input(member), own.begin, size_of(request.dtype)); });
}

void reduce_scatter_direct(Context& context, const Request& request) {
  fold_from_peers(context, request, kept_by(request, context.rank), request.output);
}

// A chunk holds the same range of what every rank keeps.
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
    if (own.count() == 0) return;  // there may be no output at all
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
