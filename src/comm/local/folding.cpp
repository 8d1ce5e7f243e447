#include "comm/local/folding.h"

#include "comm/local/plan.h"

#include <algorithm>

namespace cohort::comm::local {

void fold_collected(Context& context, std::int64_t count, Stores stores) {
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

}  // namespace cohort::comm::local
