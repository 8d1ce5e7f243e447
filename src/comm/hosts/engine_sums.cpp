// Reductions, once all ranks agree: each element is folded over the ranks of each host by ascending number, then over
// the hosts by ascending number, whatever the way. Every function runs on all ranks, also on those that have joined.
#include "comm/hosts/engine.h"

#include "base/result.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace cohort::comm::hosts {
namespace {

const std::byte* at(const void* base, std::int64_t elements, std::size_t element) noexcept {
  return static_cast<const std::byte*>(base) + static_cast<std::size_t>(elements) * element;
}
std::byte* at(void* base, std::int64_t elements, std::size_t element) noexcept {
  return static_cast<std::byte*>(base) + static_cast<std::size_t>(elements) * element;
}

ReduceOp within_host(ReduceOp op) noexcept { return op == ReduceOp::Average ? ReduceOp::Sum : op; }

}  // namespace

Engine::Members Engine::members_of(const Request& request) const {
  Members members;
  const auto ranks = static_cast<std::size_t>(layout_.size);
  if (round_.agreed.weighted == 0) {
    members.folded.assign(ranks, false);
    for (const int rank : round_.active) members.folded[static_cast<std::size_t>(rank)] = true;
    members.count = static_cast<std::int64_t>(round_.active.size());
    members.divisor = members.count;
  } else {
    std::vector<double> weights;
    for (const int rank : round_.active) weights.push_back(round_.brought[static_cast<std::size_t>(rank)].weight);
    const Weighting weighting = weigh(weights);
    members.folded.assign(ranks, false);
    if (!weighting.fractions.empty()) members.scales.assign(ranks, 1);
    for (std::size_t i = 0; i < weighting.members.size(); ++i) {
      const auto rank = static_cast<std::size_t>(round_.active[static_cast<std::size_t>(weighting.members[i])]);
      members.folded[rank] = true;
      if (!weighting.fractions.empty()) members.scales[rank] = weighting.fractions[i];
    }
    members.count = static_cast<std::int64_t>(weighting.members.size());
    members.divisor = weighting.fractions.empty() ? std::max<std::int64_t>(members.count, 1) : 1;
  }
  members.everyone = members.count == layout_.size;
  if (round_.agreed.prescale != 1 && is_scalable(request.dtype)) {
    members.scales.resize(ranks, 1);
    for (double& scale : members.scales) scale *= round_.agreed.prescale;
  }
  return members;
}

/// The hosts' sums to the result.
void Engine::fold_hosts(const Request& request, const std::vector<const void*>& partials, void* to, std::int64_t count,
                        std::int64_t divisor) {
  void* const outputs[] = {to};
  FoldJob job;
  job.dtype = request.dtype;
  job.op = request.op;
  job.inputs = partials;
  job.outputs = outputs;
  job.count = count;
  job.divisor = request.op == ReduceOp::Average ? divisor : 0;
  job.postscale = request.postscale;
  fold(job);
}

void Engine::reduce(const Request& request, bool serving) {
  const Members members = members_of(request);
  const bool halves = request.dtype == DType::Float16 || request.dtype == DType::BFloat16;
  // Weighted halves are multiplied and folded in float32 before the host's sum is rounded, which the local world does
  // not do for factors that differ by rank.
  const bool own_factors = round_.agreed.weighted != 0 && !members.scales.empty();
  if (!members.everyone || (own_factors && halves)) return reduce_gathered(request, members, serving);
  reduce_columns(request, members);
}

/// Where the result of an element goes directly; null: it is put together aside.
std::byte* Engine::destination(const Request& request, std::int64_t begin) const noexcept {
  const bool takes = request.kind == Kind::AllReduce || (request.kind == Kind::Reduce && request.root == layout_.rank);
  return takes && request.output != nullptr ? at(request.output, begin, size_of(request.dtype)) : nullptr;
}

/// Takes what this rank is to have of a finished chunk that was put together aside.
void Engine::place(const Request& request, std::int64_t begin, std::int64_t count, const std::byte* result) const {
  if (request.kind != Kind::ReduceScatter && request.kind != Kind::ReduceScatterV) return;
  const std::size_t element = size_of(request.dtype);
  const Slice part = request.kind == Kind::ReduceScatter
                         ? Slice{layout_.rank * request.output_count, (layout_.rank + 1) * request.output_count}
                         : local::part_of(request.counts->input, layout_.rank);
  const std::int64_t first = std::max(begin, part.begin);
  const std::int64_t last = std::min(begin + count, part.end);
  if (first >= last) return;
  std::memcpy(at(request.output, first - part.begin, element), at(result, first - begin, element),
              static_cast<std::size_t>(last - first) * element);
}

// --- by columns ---

// A pipeline: while a chunk is on the wire, the next is reduced on the host and the one before is gathered there.
void Engine::reduce_columns(const Request& request, const Members& members) {
  const std::size_t element = size_of(request.dtype);
  const auto per_chunk = static_cast<std::int64_t>(chunk_bytes_ / element);
  const std::int64_t chunks = (request.input_count + per_chunk - 1) / per_chunk;
  constexpr std::int64_t kAhead = 2;  // begun before one is waited for
  const std::size_t kept = static_cast<std::size_t>(kAhead) + 3;
  while (chunks_.size() < kept) chunks_.push_back(std::make_unique<Chunk>());
  const auto of = [&](std::int64_t number) -> Chunk& { return *chunks_[static_cast<std::size_t>(number) % kept]; };
  const auto finish_sending = [&](Chunk& chunk) {
    for (std::size_t h = 0; h < chunk.raw_out.size(); ++h) {
      if (static_cast<int>(h) == layout_.host) continue;
      wait_for(chunk.raw_out[h]);
      if (layout_.hosts > 2) wait_for(chunk.folded_out[h]);
    }
    chunk.raw_out.clear();
  };
  for (std::int64_t step = 0; step < chunks + kAhead + 1; ++step) {
    if (step < chunks) {
      Chunk& chunk = of(step);
      finish_sending(chunk);
      chunk.number = step;
      chunk.begin = step * per_chunk;
      chunk.count = std::min(per_chunk, request.input_count - chunk.begin);
      begin_chunk(request, members, chunk);
    }
    if (step >= kAhead && step - kAhead < chunks) fold_chunk(request, members, of(step - kAhead));
    if (step >= kAhead + 1) deliver_chunk(request, of(step - kAhead - 1));
  }
  for (const auto& chunk : chunks_) finish_sending(*chunk);
}

/// This host's sum of the column's slice, and on its way.
void Engine::begin_chunk(const Request& request, const Members& members, Chunk& chunk) {
  const std::size_t element = size_of(request.dtype);
  const auto hosts = static_cast<std::size_t>(layout_.hosts);
  const bool carries = layout_.local < layout_.columns;
  chunk.slice = carries ? local::slice_of(chunk.count, element, layout_.local, layout_.columns, 0) : Slice{};
  const std::byte* input = at(request.input, chunk.begin, element);
  // Factors that differ by rank come first; one for all is the local world's, but where there is none.
  const bool own_factor = round_.agreed.weighted != 0 || layout_.locals == 1;
  const double scale = members.scales.empty() ? 1 : members.scales[static_cast<std::size_t>(layout_.rank)];
  if (own_factor && scale != 1) {
    chunk.whole_bytes.resize(static_cast<std::size_t>(chunk.count) * element);
    const void* const from[] = {input};
    void* const to[] = {chunk.whole_bytes.data()};
    const double scales[] = {scale};
    FoldJob job;
    job.dtype = request.dtype;
    job.inputs = from;
    job.outputs = to;
    job.count = chunk.count;
    job.scales = scales;
    fold(job);
    input = chunk.whole_bytes.data();
  }
  chunk.partial = input;
  const std::size_t bytes = static_cast<std::size_t>(chunk.slice.count()) * element;
  if (layout_.locals > 1) {
    chunk.partial_bytes.resize(bytes);
    chunk.partial = chunk.partial_bytes.data();
    chunk.shares.clear();
    for (int local = 0; local < layout_.locals; ++local) {
      chunk.shares.push_back(
          local < layout_.columns ? local::slice_of(chunk.count, element, local, layout_.columns, 0).count() : 0);
    }
    Request here = local_request(Kind::ReduceScatterV, request.dtype);
    here.op = within_host(request.op);
    here.prescale = own_factor ? 1 : round_.agreed.prescale;
    here.input = input;
    here.input_count = chunk.count;
    here.output = chunk.partial_bytes.data();
    here.output_count = chunk.slice.count();
    here.counts = std::make_shared<const Counts>(Counts{chunk.shares, {}});
    run_local(here);
  }
  if (!carries) return;
  chunk.raw_out = std::vector<Outgoing>(hosts);
  chunk.raw_in = std::vector<Incoming>(hosts);
  chunk.folded_out = std::vector<Outgoing>(hosts);
  chunk.folded_in = std::vector<Incoming>(hosts);
  const auto part = [&](int host) {  // of the slice, that this host folds
    return layout_.hosts == 2 ? Slice{0, chunk.slice.count()}
                              : local::slice_of(chunk.slice.count(), element, host, layout_.hosts, 0);
  };
  const Slice own = part(layout_.host);
  const std::size_t own_bytes = static_cast<std::size_t>(own.count()) * element;
  chunk.raw_bytes.resize(own_bytes * hosts);
  for (int host = 0; host < layout_.hosts; ++host) {
    if (host == layout_.host) continue;
    const auto h = static_cast<std::size_t>(host);
    const int peer = layout_.on(host)[static_cast<std::size_t>(layout_.local)];
    const Slice theirs = part(host);
    receive(chunk.raw_in[h], peer, tag(Step::Raw, chunk.number), chunk.raw_bytes.data() + h * own_bytes, own_bytes);
    send(chunk.raw_out[h], peer, tag(Step::Raw, chunk.number), at(chunk.partial, theirs.begin, element),
         static_cast<std::size_t>(theirs.count()) * element);
  }
}

/// Folds what came of the hosts. With two hosts both fold all; with more the owners send what they folded.
void Engine::fold_chunk(const Request& request, const Members& members, Chunk& chunk) {
  if (chunk.slice.count() == 0 && layout_.local >= layout_.columns) return;
  const std::size_t element = size_of(request.dtype);
  const std::size_t bytes = static_cast<std::size_t>(chunk.slice.count()) * element;
  std::byte* const direct = layout_.locals == 1 ? destination(request, chunk.begin) : nullptr;
  if (direct == nullptr) chunk.result_bytes.resize(bytes);
  chunk.result = direct != nullptr ? direct : chunk.result_bytes.data();
  const bool two = layout_.hosts == 2;
  const auto part = [&](int host) {
    return two ? Slice{0, chunk.slice.count()} : local::slice_of(chunk.slice.count(), element, host, layout_.hosts, 0);
  };
  const Slice own = part(layout_.host);
  const std::size_t own_bytes = static_cast<std::size_t>(own.count()) * element;
  std::vector<const void*> partials;
  for (int host = 0; host < layout_.hosts; ++host) {
    const auto h = static_cast<std::size_t>(host);
    if (host == layout_.host) {
      partials.push_back(at(chunk.partial, own.begin, element));
      continue;
    }
    wait_for(chunk.raw_in[h]);
    wait_for(chunk.raw_out[h]);  // the result may go where the input lies
    partials.push_back(chunk.raw_bytes.data() + h * own_bytes);
  }
  fold_hosts(request, partials, at(chunk.result, own.begin, element), own.count(), members.divisor);
  if (two) return;
  for (int host = 0; host < layout_.hosts; ++host) {
    if (host == layout_.host) continue;
    const auto h = static_cast<std::size_t>(host);
    const int peer = layout_.on(host)[static_cast<std::size_t>(layout_.local)];
    const Slice theirs = part(host);
    receive(chunk.folded_in[h], peer, tag(Step::Folded, chunk.number), at(chunk.result, theirs.begin, element),
            static_cast<std::size_t>(theirs.count()) * element);
    send(chunk.folded_out[h], peer, tag(Step::Folded, chunk.number), at(chunk.result, own.begin, element), own_bytes);
  }
}

/// The finished slices of all columns to all ranks of the host.
void Engine::deliver_chunk(const Request& request, Chunk& chunk) {
  const std::size_t element = size_of(request.dtype);
  if (layout_.hosts > 2 && layout_.local < layout_.columns) {
    for (int host = 0; host < layout_.hosts; ++host) {
      if (host != layout_.host) wait_for(chunk.folded_in[static_cast<std::size_t>(host)]);
    }
  }
  std::byte* whole = destination(request, chunk.begin);
  if (layout_.locals > 1) {
    if (whole == nullptr) {
      chunk.whole_bytes.resize(static_cast<std::size_t>(chunk.count) * element);
      whole = chunk.whole_bytes.data();
    }
    Request here = local_request(Kind::AllGatherV, request.dtype);
    here.input = chunk.result_bytes.data();
    here.input_count = chunk.slice.count();
    here.output = whole;
    here.output_count = chunk.count;
    here.counts = std::make_shared<const Counts>(Counts{chunk.shares, {}});
    run_local(here);
  } else if (whole == nullptr) {
    whole = chunk.result;
  }
  place(request, chunk.begin, chunk.count, whole);
}

// --- through the leaders ---

// Where ranks are left out, or weighted halves: rare, so it is simple.
void Engine::reduce_gathered(const Request& request, const Members& members, bool serving) {
  const std::size_t element = size_of(request.dtype);
  const auto locals = static_cast<std::size_t>(layout_.locals);
  const auto hosts = static_cast<std::size_t>(layout_.hosts);
  std::size_t most = 1;  // ranks on a host: chunks are the same everywhere
  for (const std::vector<int>& there : layout_.ranks) most = std::max(most, there.size());
  const auto per_chunk = static_cast<std::int64_t>(std::max<std::size_t>(64, chunk_bytes_ / element / most));
  std::vector<bool> brings(hosts, false);
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (members.folded[static_cast<std::size_t>(rank)]) brings[static_cast<std::size_t>(layout_.host_of(rank))] = true;
  }
  for (std::int64_t begin = 0, number = 0; begin < request.input_count; begin += per_chunk, ++number) {
    const std::int64_t count = std::min(per_chunk, request.input_count - begin);
    const std::size_t bytes = static_cast<std::size_t>(count) * element;
    std::vector<std::byte>& all = scratch(1, bytes * locals);
    std::vector<std::byte>& own = scratch(2, bytes);
    std::vector<std::byte>& whole = scratch(3, bytes);
    std::vector<std::byte>& partials = scratch(4, bytes * hosts);
    if (serving) {
      std::memset(own.data(), 0, bytes);
    } else {
      std::memcpy(own.data(), at(request.input, begin, element), bytes);
    }
    const std::byte* inputs = own.data();
    if (locals > 1) {
      Request gather = local_request(Kind::Gather, request.dtype);
      gather.input = own.data();
      gather.input_count = count;
      gather.output = layout_.leads() ? all.data() : nullptr;
      gather.output_count = layout_.leads() ? count * layout_.locals : 0;
      run_local(gather);
      inputs = all.data();
    }
    if (layout_.leads()) {
      std::byte* const mine = partials.data() + static_cast<std::size_t>(layout_.host) * bytes;
      if (brings[static_cast<std::size_t>(layout_.host)]) {
        std::vector<const void*> folded;
        std::vector<double> scales;
        for (std::size_t i = 0; i < locals; ++i) {
          const auto rank = static_cast<std::size_t>(layout_.here()[i]);
          if (!members.folded[rank]) continue;
          folded.push_back(inputs + i * bytes);
          if (!members.scales.empty()) scales.push_back(members.scales[rank]);
        }
        void* const to[] = {mine};
        FoldJob job;
        job.dtype = request.dtype;
        job.op = within_host(request.op);
        job.inputs = folded;
        job.outputs = to;
        job.count = count;
        job.scales = scales;
        fold(job);
      }
      std::vector<Outgoing> out(hosts);
      std::vector<Incoming> in(hosts);
      std::vector<const void*> sums;
      for (std::size_t h = 0; h < hosts; ++h) {
        const int host = static_cast<int>(h);
        if (brings[h]) sums.push_back(partials.data() + h * bytes);
        if (host == layout_.host) continue;
        const int peer = layout_.leader(host);
        if (brings[h]) receive(in[h], peer, tag(Step::Partial, number), partials.data() + h * bytes, bytes);
        if (brings[static_cast<std::size_t>(layout_.host)]) send(out[h], peer, tag(Step::Partial, number), mine, bytes);
      }
      for (std::size_t h = 0; h < hosts; ++h) {
        if (static_cast<int>(h) == layout_.host) continue;
        if (brings[h]) wait_for(in[h]);
        if (brings[static_cast<std::size_t>(layout_.host)]) wait_for(out[h]);
      }
      fold_hosts(request, sums, whole.data(), count, members.divisor);
    }
    if (locals > 1) local_broadcast(0, whole.data(), bytes);
    if (serving) continue;
    if (std::byte* const to = destination(request, begin)) {
      std::memcpy(to, whole.data(), bytes);
    } else {
      place(request, begin, count, whole.data());
    }
  }
}

}  // namespace cohort::comm::hosts
