// Reductions, once all ranks agree: each element is folded over the ranks of each host by ascending number, then over
// the hosts by ascending number, whatever the way. Every function runs on all ranks, also on those that have joined.
#include "comm/hosts/sums.h"
#include "base/result.h"
#include "comm/kernels/bfloat16.h"

#include <algorithm>
#include <cstring>

namespace cohort::comm::hosts {
void scale_by(double factor, DType dtype, const void* from, void* to, std::int64_t count) {
  FoldJob job;
  job.dtype = dtype;
  job.inputs = {&from, 1};
  job.outputs = {&to, 1};
  job.count = count;
  job.scales = {&factor, 1};
  fold(job);
}

void fold_hosts(const Request& request, const std::vector<const void*>& partials, void* to, std::int64_t count,
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

std::byte* destination(const Context& context, const Request& request, std::int64_t begin) noexcept {
  const bool takes =
      request.kind == Kind::AllReduce || (request.kind == Kind::Reduce && request.root == context.layout.rank);
  return takes && request.output != nullptr ? at(request.output, begin, size_of(request.dtype)) : nullptr;
}

void place(const Context& context, const Request& request, std::int64_t begin, std::int64_t count,
           const std::byte* result) {
  if (request.kind != Kind::ReduceScatter && request.kind != Kind::ReduceScatterV) return;
  const std::size_t element = size_of(request.dtype);
  const Slice part = kept_by(request, context.layout.rank);
  const std::int64_t first = std::max(begin, part.begin);
  const std::int64_t last = std::min(begin + count, part.end);
  if (first >= last) return;
  std::memcpy(at(request.output, first - part.begin, element), at(result, first - begin, element),
              static_cast<std::size_t>(last - first) * element);
}

namespace {

// Through the leaders. Where ranks are left out, or weighted halves: rare, so it is simple.
void reduce_gathered(Context& context, const Request& request, const Contributors& contributors, bool serving) {
  const Layout& layout = context.layout;
  const std::size_t element = size_of(request.dtype);
  const auto locals = static_cast<std::size_t>(layout.locals);
  const auto hosts = static_cast<std::size_t>(layout.hosts);
  std::size_t most = 1;  // ranks on a host: chunks are the same everywhere
  for (const std::vector<int>& there : layout.ranks) most = std::max(most, there.size());
  const auto per_chunk =
      static_cast<std::int64_t>(std::max<std::size_t>(64, context.tuner.piece_bytes() / element / most));
  std::vector<bool> brings(hosts, false);
  for (const int rank : contributors.ranks()) brings[static_cast<std::size_t>(layout.host_of(rank))] = true;
  for (std::int64_t begin = 0, number = 0; begin < request.input_count; begin += per_chunk, ++number) {
    const std::int64_t count = std::min(per_chunk, request.input_count - begin);
    const std::size_t bytes = static_cast<std::size_t>(count) * element;
    std::vector<std::byte>& all = context.scratch(1, bytes * locals);
    std::vector<std::byte>& own = context.scratch(2, bytes);
    std::vector<std::byte>& whole = context.scratch(3, bytes);
    std::vector<std::byte>& partials = context.scratch(4, bytes * hosts);
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
      gather.output = layout.leads() ? all.data() : nullptr;
      gather.output_count = layout.leads() ? count * layout.locals : 0;
      context.run_local(gather);
      inputs = all.data();
    }
    if (layout.leads()) {
      std::byte* const mine = partials.data() + static_cast<std::size_t>(layout.host) * bytes;
      if (brings[static_cast<std::size_t>(layout.host)]) {
        std::vector<const void*> folded;
        std::vector<double> scales;
        for (std::size_t i = 0; i < contributors.ranks().size(); ++i) {
          const int rank = contributors.ranks()[i];
          if (layout.host_of(rank) != layout.host) continue;
          folded.push_back(inputs + static_cast<std::size_t>(layout.local_of(rank)) * bytes);
          if (!contributors.scales().empty()) scales.push_back(contributors.scales()[i]);
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
      std::vector<transport::Outgoing> out(hosts);
      std::vector<transport::Incoming> in(hosts);
      const FrameGuard guard(context.world);
      std::vector<const void*> sums;
      for (std::size_t h = 0; h < hosts; ++h) {
        const int host = static_cast<int>(h);
        if (brings[h]) sums.push_back(partials.data() + h * bytes);
        if (host == layout.host) continue;
        const int peer = layout.leader(host);
        if (brings[h]) context.receive(in[h], peer, tag(Step::Partial, number), partials.data() + h * bytes, bytes);
        if (brings[static_cast<std::size_t>(layout.host)])
          context.send(out[h], peer, tag(Step::Partial, number), mine, bytes);
      }
      for (std::size_t h = 0; h < hosts; ++h) {
        if (static_cast<int>(h) == layout.host) continue;
        if (brings[h]) context.wait_for(in[h]);
        if (brings[static_cast<std::size_t>(layout.host)]) context.wait_for(out[h]);
      }
      // As large sums are rounded on their way, so that the way makes no difference.
      if (request.bf16_wire)
        round_to_bfloat16(reinterpret_cast<float*>(partials.data()), bytes * hosts / sizeof(float));
      fold_hosts(request, sums, whole.data(), count, contributors.divisor());
      if (request.bf16_wire && layout.hosts > 2) {
        round_to_bfloat16(reinterpret_cast<float*>(whole.data()), static_cast<std::size_t>(count));
      }
    }
    if (locals > 1) context.local_broadcast(0, whole.data(), bytes);
    if (serving) continue;
    if (std::byte* const to = destination(context, request, begin)) {
      std::memcpy(to, whole.data(), bytes);
    } else {
      place(context, request, begin, count, whole.data());
    }
  }
}

}  // namespace

void reduce(Context& context, const Request& request, bool serving) {
  Contributors& contributors = context.memory.contributors;
  contributors.set(context.agreement);
  const bool halves = request.dtype == DType::Float16 || request.dtype == DType::BFloat16;
  // Weighted halves are multiplied and folded in float32 before the host's sum is rounded, which the local world does
  // not do for factors that differ by rank.
  const bool own_factors = context.agreement.agreed.weighted != 0 && !contributors.scales().empty();
  if (contributors.count() < context.layout.size || (own_factors && halves))
    return reduce_gathered(context, request, contributors, serving);
  if (goes_by_parts(context, request)) return reduce_parts(context, request, contributors);
  reduce_striped(context, request, contributors);
}

}  // namespace cohort::comm::hosts
