// Large reduce_scatters over hosts that have equally many ranks: what each rank keeps goes straight to it, from the
// ranks of its stripe. So a host's wire carries what the others keep and nothing else: (H-1)/H of the input each way,
// half of an all_reduce, or less. Sums are the same to the bit as those of stripes.cpp.
#include "comm/hosts/sums.h"

#include <algorithm>
#include <cstring>

namespace cohort::comm::hosts {
namespace {

constexpr std::size_t kLeastFrame = std::size_t{4} << 10;
constexpr std::size_t kWhole = std::size_t{16} << 10;  // parts up to this are not cut
// Chunks that have begun, where ranks of a host have to meet.
constexpr std::int64_t kAheadOfMany = 3;

/// How far a reduce_scatter has come. All parts are cut into chunks of the same length, which go one after the
/// other.
struct Parts {
  Context& context;
  const Layout& layout;
  const Request& request;
  const Contributors& contributors;
  std::size_t element = 0;
  std::vector<Slice> kept = {};  // by rank, of the input
  std::int64_t per_chunk = 0;    // elements of each part
  std::int64_t chunks = 0;
  std::int64_t begun = 0;
  std::int64_t at_once = 0;  // whose memory is in use: few, so that it stays in the cache
  std::vector<const void*> partials = {};

  /// What a rank keeps of a chunk.
  Slice of(std::int64_t chunk, int rank) const noexcept {
    const Slice& all = kept[static_cast<std::size_t>(rank)];
    const std::int64_t begin = std::min(all.begin + chunk * per_chunk, all.end);
    return {begin, std::min(begin + per_chunk, all.end)};
  }
  Chunk& at(std::int64_t chunk) const noexcept {
    return *context.memory.chunks[static_cast<std::size_t>(chunk % at_once)];
  }
};

/// Until the system has all that was sent of a chunk, its memory is not used again.
void finish_sending(Context& context, Chunk& chunk) {
  for (std::size_t h = 0; h < chunk.sends.size(); ++h) {
    if (chunk.sends[h]) context.wait_for(chunk.out[h]);
  }
  chunk.sends.clear();
}

/// What this host's ranks bring together, for each host's rank of this stripe.
void sum_chunk(const Parts& way, Chunk& chunk, std::int64_t number) {
  const Request& request = way.request;
  const double scale = way.contributors.scale(static_cast<std::size_t>(way.layout.rank));
  if (way.layout.locals == 1 && scale == 1) {
    for (int host = 0; host < way.layout.hosts; ++host) {
      chunk.sums[static_cast<std::size_t>(host)] =
          at(request.input, way.of(number, way.layout.leader(host)).begin, way.element);
    }
    return;
  }
  // One stripe's ranks after the other's, so that what each local rank is to sum lies together.
  std::vector<std::int64_t> shares;
  std::int64_t total = 0;
  for (int local = 0; local < way.layout.stripes; ++local) {
    const std::int64_t before = total;
    for (int host = 0; host < way.layout.hosts; ++host) {
      total += way.of(number, way.layout.on(host)[static_cast<std::size_t>(local)]).count();
    }
    shares.push_back(total - before);
  }
  chunk.packed_bytes.resize(static_cast<std::size_t>(total) * way.element);
  std::byte* to = chunk.packed_bytes.data();
  for (int local = 0; local < way.layout.stripes; ++local) {
    for (int host = 0; host < way.layout.hosts; ++host) {
      const Slice part = way.of(number, way.layout.on(host)[static_cast<std::size_t>(local)]);
      const std::byte* const from = at(request.input, part.begin, way.element);
      const std::size_t bytes = static_cast<std::size_t>(part.count()) * way.element;
      if (way.layout.locals == 1) {
        scale_by(scale, request.dtype, from, to, part.count());
      } else if (bytes > 0) {
        std::memcpy(to, from, bytes);
      }
      to += bytes;
    }
  }
  const std::byte* sum = chunk.packed_bytes.data();
  if (way.layout.locals > 1) {
    const std::int64_t own = shares[static_cast<std::size_t>(way.layout.local)];
    chunk.sum_bytes.resize(static_cast<std::size_t>(own) * way.element);
    Request here = local_request(Kind::ReduceScatterV, request.dtype);
    here.op = within_host(request.op);
    here.prescale = way.context.agreement.agreed.prescale;
    here.input = chunk.packed_bytes.data();
    here.input_count = total;
    here.output = chunk.sum_bytes.data();
    here.output_count = own;
    here.counts = std::make_shared<const Counts>(Counts{std::move(shares), {}});
    way.context.with_neighbours([&] { local::reduce_scatter_part(way.context.local, here, std::nullopt); });
    sum = chunk.sum_bytes.data();
  }
  for (int host = 0; host < way.layout.hosts; ++host) {
    chunk.sums[static_cast<std::size_t>(host)] = sum;
    sum += static_cast<std::size_t>(
               way.of(number, way.layout.on(host)[static_cast<std::size_t>(way.layout.local)]).count()) *
           way.element;
  }
}

/// This host's sums of the next chunk of all parts, and on their way what ranks of this stripe keep elsewhere.
void begin_chunk(Parts& way) {
  const std::int64_t number = way.begun++;
  Chunk& chunk = way.at(number);
  finish_sending(way.context, chunk);  // of the one before in its place
  const auto hosts = static_cast<std::size_t>(way.layout.hosts);
  if (chunk.out.size() != hosts) {
    chunk.out = std::vector<transport::Outgoing>(hosts);
    chunk.in = std::vector<transport::Incoming>(hosts);
    chunk.sums.resize(hosts);
  }
  chunk.sends.assign(hosts, false);
  sum_chunk(way, chunk, number);
  const std::size_t own_bytes = static_cast<std::size_t>(way.of(number, way.layout.rank).count()) * way.element;
  chunk.raw_bytes.resize(own_bytes * hosts);
  // Each begins with the host after its own, so that not all send to the same one.
  for (int step = 1; step < way.layout.hosts; ++step) {
    const int host = (way.layout.host + step) % way.layout.hosts;
    const auto h = static_cast<std::size_t>(host);
    const int peer = way.layout.on(host)[static_cast<std::size_t>(way.layout.local)];
    const std::size_t bytes = static_cast<std::size_t>(way.of(number, peer).count()) * way.element;
    if (own_bytes > 0) {
      way.context.receive(chunk.in[h], peer, tag(Step::Raw, number), chunk.raw_bytes.data() + h * own_bytes, own_bytes);
    }
    chunk.sends[h] = bytes > 0;
    if (bytes > 0) way.context.send(chunk.out[h], peer, tag(Step::Raw, number), chunk.sums[h], bytes);
  }
}

void fold_chunk(Parts& way, std::int64_t number) {
  const Slice own = way.of(number, way.layout.rank);
  if (own.count() == 0) return;
  Chunk& chunk = way.at(number);
  way.partials.clear();
  for (std::size_t h = 0; h < chunk.in.size(); ++h) {
    if (static_cast<int>(h) == way.layout.host) {
      way.partials.push_back(chunk.sums[h]);
      continue;
    }
    way.context.wait_for(chunk.in[h]);
    way.partials.push_back(chunk.raw_bytes.data() + h * static_cast<std::size_t>(own.count()) * way.element);
  }
  const std::int64_t begin = own.begin - way.kept[static_cast<std::size_t>(way.layout.rank)].begin;
  fold_hosts(way.request, way.partials, at(way.request.output, begin, way.element), own.count(),
             way.contributors.divisor());
}

}  // namespace

/// Whether it goes this way, alike on all ranks. Where one host keeps most, all others would send to that one at once.
bool goes_by_parts(const Context& context, const Request& request) {
  const Layout& layout = context.layout;
  if (request.kind != Kind::ReduceScatter && request.kind != Kind::ReduceScatterV) return false;
  if (layout.size != layout.hosts * layout.stripes || request.bf16_wire) return false;
  if (request.kind == Kind::ReduceScatter) return true;
  std::vector<std::int64_t> keeps(static_cast<std::size_t>(layout.hosts), 0);
  for (int rank = 0; rank < layout.size; ++rank) {
    keeps[static_cast<std::size_t>(layout.host_of(rank))] += request.counts->input[static_cast<std::size_t>(rank)];
  }
  return *std::max_element(keeps.begin(), keeps.end()) * layout.hosts <= 2 * request.input_count;
}

void reduce_parts(Context& context, const Request& request, const Contributors& contributors) {
  const Layout& layout = context.layout;
  Parts way{.context = context, .layout = layout, .request = request, .contributors = contributors};
  way.element = size_of(request.dtype);
  std::int64_t longest = 0;
  for (int rank = 0; rank < layout.size; ++rank) {
    way.kept.push_back(kept_by(request, rank));
    longest = std::max(longest, way.kept.back().count());
  }
  // On the way of a host at once, as much as of the blocks of an all_reduce.
  const bool alone = layout.locals == 1;
  const auto frames = static_cast<std::size_t>(layout.stripes * (layout.hosts - 1));
  const std::size_t bytes =
      std::max(kLeastFrame, context.tuner.block_bytes(request.input_bytes(), context.pieces_doubled) / frames /
                                local::kLine * local::kLine);
  const bool whole = static_cast<std::size_t>(longest) * way.element <= kWhole;
  way.per_chunk = whole ? std::max<std::int64_t>(longest, 1) : static_cast<std::int64_t>(bytes / way.element);
  way.chunks = (longest + way.per_chunk - 1) / way.per_chunk;
  const std::int64_t ahead = alone ? context.tuner.ahead(context.pieces_doubled) : kAheadOfMany;
  way.at_once = ahead + 1;
  while (context.memory.chunks.size() < static_cast<std::size_t>(way.at_once))
    context.memory.chunks.push_back(std::make_unique<Chunk>());
  const auto since = Context::Clock::now();
  for (std::int64_t number = 0; number < way.chunks; ++number) {
    while (way.begun < way.chunks && way.begun - number < ahead) begin_chunk(way);
    fold_chunk(way, number);
  }
  for (const auto& chunk : context.memory.chunks) finish_sending(context, *chunk);
  const auto hosts = static_cast<std::size_t>(layout.hosts);
  context.tuner.learn(request.input_bytes() / hosts * (hosts - 1) / static_cast<std::size_t>(layout.stripes),
                      Context::Clock::now() - since);
}

}  // namespace cohort::comm::hosts
