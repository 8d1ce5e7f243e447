// Large reduce_scatters over hosts that have equally many ranks: what each rank keeps goes straight to it, from the
// ranks of its column. So a host's wire carries what the others keep and nothing else: (H-1)/H of the input each way,
// half of an all_reduce, or less. Sums are the same to the bit as those of engine_columns.cpp.
#include "comm/hosts/elements.h"
#include "comm/hosts/engine.h"

#include <algorithm>
#include <cstring>

namespace cohort::comm::hosts {
namespace {

constexpr std::size_t kLeastFrame = std::size_t{4} << 10;
constexpr std::size_t kWhole = std::size_t{16} << 10;  // parts up to this are not cut
constexpr std::size_t kLine = 64;

}  // namespace

/// How far a reduce_scatter has come. All parts are cut into stretches of the same length, which go one after the
/// other.
struct Engine::Parts {
  const Request& request;
  const Members& members;
  std::size_t element = 0;
  std::vector<Slice> kept = {};  // by rank, of the input
  std::int64_t per_stretch = 0;  // elements of each part
  std::int64_t stretches = 0;
  std::int64_t begun = 0;
  std::int64_t at_once = 0;  // whose memory is in use: few, so that it stays in the cache

  /// What a rank keeps of a stretch.
  Slice of(std::int64_t stretch, int rank) const noexcept {
    const Slice& all = kept[static_cast<std::size_t>(rank)];
    const std::int64_t begin = std::min(all.begin + stretch * per_stretch, all.end);
    return {begin, std::min(begin + per_stretch, all.end)};
  }
};

/// Whether it goes this way, alike on all ranks. Where one host keeps most, all others would send to that one at once.
bool Engine::goes_by_parts(const Request& request) const {
  if (request.kind != Kind::ReduceScatter && request.kind != Kind::ReduceScatterV) return false;
  if (layout_.size != layout_.hosts * layout_.columns || request.bf16_wire) return false;
  if (request.kind == Kind::ReduceScatter) return true;
  std::vector<std::int64_t> keeps(static_cast<std::size_t>(layout_.hosts), 0);
  for (int rank = 0; rank < layout_.size; ++rank) {
    keeps[static_cast<std::size_t>(layout_.host_of(rank))] += request.counts->input[static_cast<std::size_t>(rank)];
  }
  return *std::max_element(keeps.begin(), keeps.end()) * layout_.hosts <= 2 * request.input_count;
}

void Engine::reduce_parts(const Request& request, const Members& members) {
  Parts way{.request = request, .members = members};
  way.element = size_of(request.dtype);
  std::int64_t longest = 0;
  for (int rank = 0; rank < layout_.size; ++rank) {
    const std::int64_t begin = way.kept.empty() ? 0 : way.kept.back().end;
    const std::int64_t count = request.kind == Kind::ReduceScatter
                                   ? request.output_count
                                   : request.counts->input[static_cast<std::size_t>(rank)];
    way.kept.push_back({begin, begin + count});
    longest = std::max(longest, count);
  }
  // On the way of a host at once, as much as of the blocks of an all_reduce.
  const bool alone = layout_.locals == 1;
  const auto frames = static_cast<std::size_t>(layout_.columns * (layout_.hosts - 1));
  const std::size_t bytes =
      std::max(kLeastFrame, tuner_.block_bytes(request.input_bytes(), pieces_doubled_) / frames / kLine * kLine);
  const bool whole = static_cast<std::size_t>(longest) * way.element <= kWhole;
  way.per_stretch = whole ? std::max<std::int64_t>(longest, 1) : static_cast<std::int64_t>(bytes / way.element);
  way.stretches = (longest + way.per_stretch - 1) / way.per_stretch;
  const std::int64_t ahead = alone ? tuner_.ahead(pieces_doubled_) : kBlocksAhead + 1;
  way.at_once = ahead + 1;
  while (stretches_.size() < static_cast<std::size_t>(way.at_once)) stretches_.push_back(std::make_unique<Stretch>());
  const auto since = Clock::now();
  for (std::int64_t number = 0; number < way.stretches; ++number) {
    while (way.begun < way.stretches && way.begun - number < ahead) begin_stretch(way);
    fold_stretch(way, number);
  }
  for (const auto& stretch : stretches_) finish_sending(*stretch);
  const auto hosts = static_cast<std::size_t>(layout_.hosts);
  tuner_.learn(request.input_bytes() / hosts * (hosts - 1) / static_cast<std::size_t>(layout_.columns),
               Clock::now() - since);
}

/// This host's sums of the next stretch of all parts, and on their way what ranks of this column keep elsewhere.
void Engine::begin_stretch(Parts& way) {
  const std::int64_t number = way.begun++;
  Stretch& stretch = stretch_at(way, number);
  finish_sending(stretch);  // of the one before in its place
  const auto hosts = static_cast<std::size_t>(layout_.hosts);
  if (stretch.out.size() != hosts) {
    stretch.out = std::vector<transport::Outgoing>(hosts);
    stretch.in = std::vector<transport::Incoming>(hosts);
    stretch.sums.resize(hosts);
  }
  stretch.sends.assign(hosts, false);
  sum_stretch(way, stretch, number);
  const std::size_t own_bytes = static_cast<std::size_t>(way.of(number, layout_.rank).count()) * way.element;
  stretch.raw_bytes.resize(own_bytes * hosts);
  // Each begins with the host after its own, so that not all send to the same one.
  for (int step = 1; step < layout_.hosts; ++step) {
    const int host = (layout_.host + step) % layout_.hosts;
    const auto h = static_cast<std::size_t>(host);
    const int peer = layout_.on(host)[static_cast<std::size_t>(layout_.local)];
    const std::size_t bytes = static_cast<std::size_t>(way.of(number, peer).count()) * way.element;
    if (own_bytes > 0) {
      receive(stretch.in[h], peer, tag(Step::Raw, number), stretch.raw_bytes.data() + h * own_bytes, own_bytes);
    }
    stretch.sends[h] = bytes > 0;
    if (bytes > 0) send(stretch.out[h], peer, tag(Step::Raw, number), stretch.sums[h], bytes);
  }
}

/// What this host's ranks bring together, for each host's rank of this column.
void Engine::sum_stretch(const Parts& way, Stretch& stretch, std::int64_t number) {
  const Request& request = way.request;
  const double scale = way.members.scales.empty() ? 1 : way.members.scales[static_cast<std::size_t>(layout_.rank)];
  if (layout_.locals == 1 && scale == 1) {
    for (int host = 0; host < layout_.hosts; ++host) {
      stretch.sums[static_cast<std::size_t>(host)] =
          at(request.input, way.of(number, layout_.leader(host)).begin, way.element);
    }
    return;
  }
  // One column's ranks after the other's, so that what each local rank is to sum lies together.
  std::vector<std::int64_t> shares;
  std::int64_t total = 0;
  for (int local = 0; local < layout_.columns; ++local) {
    const std::int64_t before = total;
    for (int host = 0; host < layout_.hosts; ++host) {
      total += way.of(number, layout_.on(host)[static_cast<std::size_t>(local)]).count();
    }
    shares.push_back(total - before);
  }
  stretch.packed_bytes.resize(static_cast<std::size_t>(total) * way.element);
  std::byte* to = stretch.packed_bytes.data();
  for (int local = 0; local < layout_.columns; ++local) {
    for (int host = 0; host < layout_.hosts; ++host) {
      const Slice part = way.of(number, layout_.on(host)[static_cast<std::size_t>(local)]);
      const std::byte* const from = at(request.input, part.begin, way.element);
      const std::size_t bytes = static_cast<std::size_t>(part.count()) * way.element;
      if (layout_.locals == 1) {
        scale_by(scale, request.dtype, from, to, part.count());
      } else if (bytes > 0) {
        std::memcpy(to, from, bytes);
      }
      to += bytes;
    }
  }
  const std::byte* sum = stretch.packed_bytes.data();
  if (layout_.locals > 1) {
    const std::int64_t own = shares[static_cast<std::size_t>(layout_.local)];
    stretch.sum_bytes.resize(static_cast<std::size_t>(own) * way.element);
    Request here = local_request(Kind::ReduceScatterV, request.dtype);
    here.op = within_host(request.op);
    here.prescale = round_.agreed.prescale;
    here.input = stretch.packed_bytes.data();
    here.input_count = total;
    here.output = stretch.sum_bytes.data();
    here.output_count = own;
    here.counts = std::make_shared<const Counts>(Counts{std::move(shares), {}});
    with_neighbours([&] { local_.reduce_scatter_part(here, std::nullopt); });
    sum = stretch.sum_bytes.data();
  }
  for (int host = 0; host < layout_.hosts; ++host) {
    stretch.sums[static_cast<std::size_t>(host)] = sum;
    sum += static_cast<std::size_t>(way.of(number, layout_.on(host)[static_cast<std::size_t>(layout_.local)]).count()) *
           way.element;
  }
}

Engine::Stretch& Engine::stretch_at(const Parts& way, std::int64_t number) noexcept {
  return *stretches_[static_cast<std::size_t>(number % way.at_once)];
}

void Engine::fold_stretch(const Parts& way, std::int64_t number) {
  const Slice own = way.of(number, layout_.rank);
  if (own.count() == 0) return;
  Stretch& stretch = stretch_at(way, number);
  partials_.clear();
  for (std::size_t h = 0; h < stretch.in.size(); ++h) {
    if (static_cast<int>(h) == layout_.host) {
      partials_.push_back(stretch.sums[h]);
      continue;
    }
    wait_for(stretch.in[h]);
    partials_.push_back(stretch.raw_bytes.data() + h * static_cast<std::size_t>(own.count()) * way.element);
  }
  const std::int64_t begin = own.begin - way.kept[static_cast<std::size_t>(layout_.rank)].begin;
  fold_hosts(way.request, partials_, at(way.request.output, begin, way.element), own.count(), way.members.divisor);
}

/// Until the system has all that was sent of a stretch, its memory is not used again.
void Engine::finish_sending(Stretch& stretch) {
  for (std::size_t h = 0; h < stretch.sends.size(); ++h) {
    if (stretch.sends[h]) wait_for(stretch.out[h]);
  }
  stretch.sends.clear();
}

}  // namespace cohort::comm::hosts
