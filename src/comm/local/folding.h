// How the algorithms fold: what each of a reduction's contributors brings, by ascending rank, wherever it lies.
#pragma once

#include "comm/kernels/fold.h"
#include "comm/local/context.h"
#include "comm/slices.h"

#include <cstddef>
#include <cstdint>

namespace cohort::comm::local {

/// Folds the context's inputs and outputs.
void fold_collected(Context& context, std::int64_t count, Stores stores = Stores::Cached);

/// What is to be folded: `input_of(rank)` is where a member's elements lie.
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

/// The same in pieces, of what has been collected: between them it is looked whether the world has ended.
void fold_pieces(Context& context, std::int64_t count, Stores stores = Stores::Cached);

/// Folds a slice of the inputs to `to`, piece by piece out of the peers' memory, in place or through the kernel.
void fold_from_peers(Context& context, const Request& request, const Slice& slice, void* to);

}  // namespace cohort::comm::local
