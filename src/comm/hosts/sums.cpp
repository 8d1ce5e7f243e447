// Reductions, after all ranks agree. With every method, each element is folded over the ranks of each host by ascending
// number, then over the hosts in the order of `order_over`. Every function runs on all ranks, also on those that have
// joined.
#include "base/result.h"
#include "comm/hosts/context.h"
#include "comm/kernels/codecs.h"

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
                std::int64_t divisor, FoldOrder order) {
  void* const outputs[] = {to};
  FoldJob job;
  job.dtype = request.dtype;
  job.op = divisor > 0 ? request.op : within_host(request.op);
  job.inputs = partials;
  job.outputs = outputs;
  job.count = count;
  job.divisor = request.op == ReduceOp::Average ? divisor : 0;
  job.postscale = divisor > 0 ? request.postscale : 1;
  job.order = order;
  fold(job);
}

float unit_of(const Request& request, std::int64_t divisor) noexcept {
  const double all = request.op == ReduceOp::Average && divisor > 0 ? static_cast<double>(divisor) : 1;
  return request.postscale == 0 ? 1 : static_cast<float>(all / request.postscale);
}

void encode_sum(const Request& request, const float* values, std::byte* to, std::int64_t begin, std::size_t count,
                std::int64_t divisor) {
  float* const residual = request.residual == nullptr ? nullptr : request.residual + begin;
  encode(request.wire_format, values, to, count, residual, unit_of(request, divisor));
}

void encode_result(const Request& request, float* values, std::byte* to, std::int64_t begin, std::size_t count) {
  std::vector<float> lost;
  if (request.residual != nullptr) lost.resize(count);
  encode(request.wire_format, values, to, count, lost.empty() ? nullptr : lost.data());
  decode(request.wire_format, to, values, count);
  for (std::size_t i = 0; i < lost.size(); ++i) request.residual[begin + static_cast<std::int64_t>(i)] += lost[i];
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

/// A chunk of a sum that goes through the leaders.
struct Gathered {
  const Request& request;
  const Contributors& contributors;
  const std::vector<bool>& brings;  // by host
  std::int64_t number;
  std::int64_t count;
};

// Called by leaders: sums the hosts' sums of a chunk. `partials` is by host, and this host's sum is in its place. A
// wire format rounds them as large sums are rounded between hosts, so that both paths give the same result; residuals
// stay as they are.
void sum_gathered(Context& context, const Gathered& chunk, std::byte* partials, std::byte* whole) {
  const Layout& layout = context.layout;
  const auto hosts = static_cast<std::size_t>(layout.hosts);
  const auto own = static_cast<std::size_t>(layout.host);
  const std::size_t bytes = static_cast<std::size_t>(chunk.count) * size_of(chunk.request.dtype);
  std::vector<transport::Outgoing> out(hosts);
  std::vector<transport::Incoming> in(hosts);
  const FrameGuard guard(context.world);
  std::vector<const void*> sums;
  for (std::size_t h = 0; h < hosts; ++h) {
    std::byte* const theirs = partials + h * bytes;
    if (chunk.brings[h]) sums.push_back(theirs);
    if (h == own) continue;
    const int peer = layout.leader(static_cast<int>(h));
    if (chunk.brings[h]) context.receive(in[h], peer, tag(Step::Partial, chunk.number), theirs, bytes);
    if (chunk.brings[own]) context.send(out[h], peer, tag(Step::Partial, chunk.number), partials + own * bytes, bytes);
  }
  for (std::size_t h = 0; h < hosts; ++h) {
    if (h == own) continue;
    if (chunk.brings[h]) context.wait_for(in[h]);
    if (chunk.brings[own]) context.wait_for(out[h]);
  }
  if (chunk.request.wire_format != WireFormat::None) {
    for (std::size_t h = 0; h < hosts; ++h)
      round_trip(chunk.request.wire_format, reinterpret_cast<float*>(partials + h * bytes),
                 static_cast<std::size_t>(chunk.count));
  }
  fold_hosts(chunk.request, sums, whole, chunk.count, chunk.contributors.divisor());
}

// Does the same for more hosts. `mine` is this host's sum.
void sum_gathered_by_levels(Context& context, const Gathered& chunk, std::byte* mine, std::byte* whole) {
  if (chunk.request.wire_format != WireFormat::None && chunk.brings[static_cast<std::size_t>(context.layout.host)])
    round_trip(chunk.request.wire_format, reinterpret_cast<float*>(mine), static_cast<std::size_t>(chunk.count));
  LevelSum::Options options;
  options.request = &chunk.request;
  options.partial = mine;
  options.result = whole;
  options.count = chunk.count;
  options.number = chunk.number;
  options.divisor = chunk.contributors.divisor();
  options.brings = &chunk.brings;
  context.memory.gathered.begin(context, options);
  for (int stage = 0; stage < 2 * context.levels.count(); ++stage) context.memory.gathered.advance(context);
}

// Reduces through the leaders, if ranks are left out or 16-bit floats are weighted. Rare, so kept simple.
void reduce_gathered(Context& context, const Request& request, const Contributors& contributors, bool serving) {
  const Layout& layout = context.layout;
  const std::size_t element = size_of(request.dtype);
  const auto locals = static_cast<std::size_t>(layout.locals);
  const auto hosts = static_cast<std::size_t>(layout.hosts);
  const bool by_levels = layout.hosts > Levels::kRadix;
  std::size_t most = 1;  // most ranks on a host, so that chunks are the same everywhere
  for (const std::vector<int>& there : layout.ranks) most = std::max(most, there.size());
  const auto scaled = static_cast<std::int64_t>(block_of(request.wire_format));
  const auto per_chunk =
      (static_cast<std::int64_t>(std::max<std::size_t>(64, context.tuner.piece_bytes() / element / most)) + scaled -
       1) /
      scaled * scaled;
  std::vector<bool> brings(hosts, false);
  for (const int rank : contributors.ranks()) brings[static_cast<std::size_t>(layout.host_of(rank))] = true;
  for (std::int64_t begin = 0, number = 0; begin < request.input_count; begin += per_chunk, ++number) {
    const std::int64_t count = std::min(per_chunk, request.input_count - begin);
    const std::size_t bytes = static_cast<std::size_t>(count) * element;
    std::vector<std::byte>& all = context.scratch(1, bytes * locals);
    std::vector<std::byte>& own = context.scratch(2, bytes);
    std::vector<std::byte>& whole = context.scratch(3, bytes);
    std::vector<std::byte>& partials = context.scratch(4, by_levels ? bytes : bytes * hosts);
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
      std::byte* const mine = partials.data() + (by_levels ? 0 : static_cast<std::size_t>(layout.host) * bytes);
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
      const Gathered part{request, contributors, brings, number, count};
      if (by_levels) {
        sum_gathered_by_levels(context, part, mine, whole.data());
      } else {
        sum_gathered(context, part, partials.data(), whole.data());
      }
      if (request.wire_format != WireFormat::None && layout.hosts > 2)
        round_trip(request.wire_format, reinterpret_cast<float*>(whole.data()), static_cast<std::size_t>(count));
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

// Large reduce_scatters over hosts with equal numbers of ranks: each rank gets its output directly from the ranks of
// its stripe. So a host sends only what the other hosts keep: (H-1)/H of the input in each direction, half of an
// all_reduce or less. Sums have the same bits as those of stripes.cpp.

constexpr std::size_t kLeastFrame = std::size_t{4} << 10;
constexpr std::size_t kWhole = std::size_t{16} << 10;  // parts up to this size are not divided
// Most chunks begun and not folded, if a host has several ranks.
constexpr std::int64_t kAheadOfMany = 3;

/// Progress of a reduce_scatter. All parts are divided into chunks of the same length, which are processed in order.
struct Parts {
  Context& context;
  const Layout& layout;
  const Request& request;
  const Contributors& contributors;
  std::size_t element = 0;
  std::vector<Slice> kept = {};  // by rank, the part of the input that the rank keeps
  std::int64_t per_chunk = 0;    // elements of each part
  std::int64_t chunks = 0;
  std::int64_t begun = 0;
  std::int64_t ahead = 0;    // limit of chunks that are begun and not folded
  std::int64_t at_once = 0;  // chunks whose memory is in use; few, so that it stays in the cache
  std::vector<const void*> partials = {};

  /// The part of a chunk that a rank keeps.
  Slice of(std::int64_t chunk, int rank) const noexcept {
    const Slice& all = kept[static_cast<std::size_t>(rank)];
    const std::int64_t begin = std::min(all.begin + chunk * per_chunk, all.end);
    return {begin, std::min(begin + per_chunk, all.end)};
  }
  Chunk& chunk_at(std::int64_t chunk) const noexcept {
    return *context.memory.chunks[static_cast<std::size_t>(chunk % at_once)];
  }

  Parts(Context& in, const Request& asked, const Contributors& who);
  void run();
  void finish_sending(Chunk& chunk);
  void sum_chunk(Chunk& chunk, std::int64_t number) const;
  void begin_chunk();
  void fold_chunk(std::int64_t number);
};

/// Waits until the system has taken all sent frames of the chunk, before its memory is reused.
void Parts::finish_sending(Chunk& chunk) {
  for (std::size_t h = 0; h < chunk.sends.size(); ++h) {
    if (chunk.sends[h]) context.wait_for(chunk.out[h]);
  }
  chunk.sends.clear();
}

/// Sums the inputs of this host's ranks, for each host's rank of this stripe.
void Parts::sum_chunk(Chunk& chunk, std::int64_t number) const {
  const double scale = contributors.scale(static_cast<std::size_t>(layout.rank));
  if (layout.locals == 1 && scale == 1) {
    for (int host = 0; host < layout.hosts; ++host) {
      chunk.sums[static_cast<std::size_t>(host)] = at(request.input, of(number, layout.leader(host)).begin, element);
    }
    return;
  }
  // Order the ranks by stripe, so that the data that each local rank sums is contiguous.
  std::vector<std::int64_t> shares;
  std::int64_t total = 0;
  for (int local = 0; local < layout.stripes; ++local) {
    const std::int64_t before = total;
    for (int host = 0; host < layout.hosts; ++host) {
      total += of(number, layout.on(host)[static_cast<std::size_t>(local)]).count();
    }
    shares.push_back(total - before);
  }
  chunk.packed_bytes.resize(static_cast<std::size_t>(total) * element);
  std::byte* to = chunk.packed_bytes.data();
  for (int local = 0; local < layout.stripes; ++local) {
    for (int host = 0; host < layout.hosts; ++host) {
      const Slice part = of(number, layout.on(host)[static_cast<std::size_t>(local)]);
      const std::byte* const from = at(request.input, part.begin, element);
      const std::size_t bytes = static_cast<std::size_t>(part.count()) * element;
      if (layout.locals == 1) {
        scale_by(scale, request.dtype, from, to, part.count());
      } else if (bytes > 0) {
        std::memcpy(to, from, bytes);
      }
      to += bytes;
    }
  }
  const std::byte* sum = chunk.packed_bytes.data();
  if (layout.locals > 1) {
    const std::int64_t own = shares[static_cast<std::size_t>(layout.local)];
    chunk.sum_bytes.resize(static_cast<std::size_t>(own) * element);
    Request here = local_request(Kind::ReduceScatterV, request.dtype);
    here.op = within_host(request.op);
    here.prescale = context.agreement.agreed.prescale;
    here.input = chunk.packed_bytes.data();
    here.input_count = total;
    here.output = chunk.sum_bytes.data();
    here.output_count = own;
    here.counts = std::make_shared<const Counts>(Counts{std::move(shares), {}});
    context.with_neighbours([&] { local::reduce_scatter_part(context.local, here, std::nullopt); });
    sum = chunk.sum_bytes.data();
  }
  for (int host = 0; host < layout.hosts; ++host) {
    chunk.sums[static_cast<std::size_t>(host)] = sum;
    sum +=
        static_cast<std::size_t>(of(number, layout.on(host)[static_cast<std::size_t>(layout.local)]).count()) * element;
  }
}

/// Sums the next chunk of all parts on this host, and begins to send the sums to this stripe's ranks on other hosts.
void Parts::begin_chunk() {
  const std::int64_t number = begun++;
  Chunk& chunk = chunk_at(number);
  finish_sending(chunk);  // the previous chunk in this memory
  const auto hosts = static_cast<std::size_t>(layout.hosts);
  if (chunk.out.size() != hosts) {
    chunk.out = std::vector<transport::Outgoing>(hosts);
    chunk.in = std::vector<transport::Incoming>(hosts);
    chunk.sums.resize(hosts);
  }
  chunk.sends.assign(hosts, false);
  sum_chunk(chunk, number);
  const std::size_t own_bytes = static_cast<std::size_t>(of(number, layout.rank).count()) * element;
  chunk.raw_bytes.resize(own_bytes * hosts);
  // Each host begins with the host after it, so that not all send to the same host.
  for (int step = 1; step < layout.hosts; ++step) {
    const int host = (layout.host + step) % layout.hosts;
    const auto h = static_cast<std::size_t>(host);
    const int peer = layout.on(host)[static_cast<std::size_t>(layout.local)];
    const std::size_t bytes = static_cast<std::size_t>(of(number, peer).count()) * element;
    if (own_bytes > 0) {
      context.receive(chunk.in[h], peer, tag(Step::Raw, number), chunk.raw_bytes.data() + h * own_bytes, own_bytes);
    }
    chunk.sends[h] = bytes > 0;
    if (bytes > 0) context.send(chunk.out[h], peer, tag(Step::Raw, number), chunk.sums[h], bytes);
  }
}

void Parts::fold_chunk(std::int64_t number) {
  const Slice own = of(number, layout.rank);
  if (own.count() == 0) return;
  Chunk& chunk = chunk_at(number);
  partials.clear();
  for (std::size_t h = 0; h < chunk.in.size(); ++h) {
    if (static_cast<int>(h) == layout.host) {
      partials.push_back(chunk.sums[h]);
      continue;
    }
    context.wait_for(chunk.in[h]);
    partials.push_back(chunk.raw_bytes.data() + h * static_cast<std::size_t>(own.count()) * element);
  }
  const std::int64_t begin = own.begin - kept[static_cast<std::size_t>(layout.rank)].begin;
  fold_hosts(request, partials, at(request.output, begin, element), own.count(), contributors.divisor());
}

Parts::Parts(Context& in, const Request& asked, const Contributors& who)
    : context(in), layout(in.layout), request(asked), contributors(who) {
  element = size_of(request.dtype);
  std::int64_t longest = 0;
  for (int rank = 0; rank < layout.size; ++rank) {
    kept.push_back(kept_by(request, rank));
    longest = std::max(longest, kept.back().count());
  }
  // A host has as many bytes in transit as with the blocks of an all_reduce.
  const bool alone = layout.locals == 1;
  const auto frames = static_cast<std::size_t>(layout.stripes * (layout.hosts - 1));
  const std::size_t bytes =
      std::max(kLeastFrame, context.tuner.block_bytes(request.input_bytes(), context.pieces_doubled) / frames /
                                local::kLine * local::kLine);
  const bool whole = static_cast<std::size_t>(longest) * element <= kWhole;
  per_chunk = whole ? std::max<std::int64_t>(longest, 1) : static_cast<std::int64_t>(bytes / element);
  chunks = (longest + per_chunk - 1) / per_chunk;
  ahead = alone ? context.tuner.ahead(context.pieces_doubled, context.on_the_way) : kAheadOfMany;
  at_once = ahead + 1;
  while (context.memory.chunks.size() < static_cast<std::size_t>(at_once))
    context.memory.chunks.push_back(std::make_unique<Chunk>());
}

void Parts::run() {
  const auto since = Context::Clock::now();
  for (std::int64_t number = 0; number < chunks; ++number) {
    while (begun < chunks && begun - number < ahead) begin_chunk();
    fold_chunk(number);
  }
  for (const auto& chunk : context.memory.chunks) finish_sending(*chunk);
  const auto hosts = static_cast<std::size_t>(layout.hosts);
  context.tuner.learn(request.input_bytes() / hosts * (hosts - 1) / static_cast<std::size_t>(layout.stripes),
                      Context::Clock::now() - since);
}

/// True if the reduce_scatter runs by parts; the same on all ranks. False if one host keeps most of the output, since
/// all others would send to it simultaneously.
bool goes_by_parts(const Context& context, const Request& request) {
  const Layout& layout = context.layout;
  if (request.kind != Kind::ReduceScatter && request.kind != Kind::ReduceScatterV) return false;
  if (layout.size != layout.hosts * layout.stripes || request.wire_format != WireFormat::None) return false;
  if (layout.hosts > Levels::kRadix) return false;  // each rank would send to all of its stripe
  if (context.agreement.agreed.weighted != 0 && !context.memory.contributors.scales().empty()) return false;
  if (request.kind == Kind::ReduceScatter) return true;
  std::vector<std::int64_t> keeps(static_cast<std::size_t>(layout.hosts), 0);
  for (int rank = 0; rank < layout.size; ++rank) {
    keeps[static_cast<std::size_t>(layout.host_of(rank))] += request.counts->input[static_cast<std::size_t>(rank)];
  }
  return *std::max_element(keeps.begin(), keeps.end()) * layout.hosts <= 2 * request.input_count;
}

/// Runs a reduce_scatter by parts, directly into the outputs.
void reduce_parts(Context& context, const Request& request, const Contributors& contributors) {
  Parts(context, request, contributors).run();
}

}  // namespace

void reduce(Context& context, const Request& request, bool serving) {
  Contributors& contributors = context.memory.contributors;
  contributors.set(context.agreement);
  const bool halves = request.dtype == DType::Float16 || request.dtype == DType::BFloat16;
  // Weighted 16-bit floats are multiplied and folded in float32 before the host's sum is rounded. The local world does
  // not support that for factors that differ by rank.
  const bool own_factors = context.agreement.agreed.weighted != 0 && !contributors.scales().empty();
  if (contributors.count() < context.layout.size || (own_factors && halves))
    return reduce_gathered(context, request, contributors, serving);
  if (goes_by_parts(context, request)) return reduce_parts(context, request, contributors);
  reduce_striped(context, request, contributors);
}

}  // namespace cohort::comm::hosts
