// Operations between hosts that only move data, after all ranks agree.
#include "comm/hosts/moves.h"
#include "comm/hosts/trees.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

namespace cohort::comm::hosts {

// Gathers on each host to all its ranks; then the leaders exchange their hosts' parts, and distribute them on the host.
void all_gather(Context& context, const void* input, void* output, const std::vector<std::int64_t>& bytes) {
  const Layout& layout = context.layout;
  const HostParts parts(layout, bytes);
  if (parts.total == 0) return;
  const std::vector<std::size_t>& begin = parts.begin;
  const std::vector<std::size_t>& length = parts.length;
  const auto hosts = static_cast<std::size_t>(layout.hosts);
  auto* const out = static_cast<std::byte*>(output);
  std::byte* const all = layout.contiguous ? out : context.scratch(1, parts.total).data();
  std::byte* const here = all + begin[static_cast<std::size_t>(layout.host)];
  const std::size_t own = parts.bytes[static_cast<std::size_t>(layout.rank)];
  if (layout.locals > 1) {
    Request local = local_request(Kind::AllGatherV, DType::UInt8);
    local.input = input;
    local.input_count = static_cast<std::int64_t>(own);
    local.output = here;
    local.output_count = static_cast<std::int64_t>(length[static_cast<std::size_t>(layout.host)]);
    local.counts = parts.here(layout);
    context.run_local(local);
  } else if (own > 0 && input != here) {
    std::memmove(here, input, own);
  }
  if (layout.hosts > kMostFlat) {
    exchange_in_steps(context, parts, all);
    return parts.unpack(layout, all, out);
  }
  std::vector<std::vector<transport::Incoming>> in(hosts);
  std::vector<std::vector<transport::Outgoing>> sent(hosts);
  const FrameGuard guard(context.world);
  const auto mine = static_cast<std::size_t>(layout.host);
  if (layout.leads()) {
    for (std::size_t h = 0; h < hosts; ++h) {
      if (h == mine) continue;
      receive_pieces(context, in[h], layout.leader(static_cast<int>(h)), Step::Block, all + begin[h], length[h]);
    }
    // Each host begins with a different host, so that not all send to the same host.
    for (std::size_t turn = 1; turn < hosts; ++turn) {
      const std::size_t h = (mine + turn) % hosts;
      send_pieces(context, sent[h], layout.leader(static_cast<int>(h)), Step::Block, here, length[mine]);
    }
  }
  for (std::size_t turn = 1; turn < hosts; ++turn) {
    const std::size_t h = (mine + hosts - turn) % hosts;
    for (std::size_t piece = 0; piece < pieces_of(length[h]); ++piece) {
      if (layout.leads()) context.wait_for(in[h][piece]);
      if (layout.locals > 1) context.local_broadcast(0, all + begin[h] + piece * kPiece, piece_bytes(length[h], piece));
    }
  }
  for (auto& each : sent) wait_for_all(context, each);
  parts.unpack(layout, all, out);
}

namespace {

std::size_t not_asked(const std::vector<Share>& shares) {
  std::vector<std::size_t> bytes;
  bytes.reserve(shares.size());
  for (const Share& share : shares) bytes.push_back(share.bytes);
  return senders_at_once(bytes);
}

void post(Context& context, const Share& share, std::vector<transport::Incoming>& frames) {
  receive_pieces(context, frames, share.peer, Step::Block, share.to, share.bytes, share.first);
}

}  // namespace

void post_first_turns(Context& context, const std::vector<Share>& shares,
                      std::vector<std::vector<transport::Incoming>>& in) {
  const std::size_t first = not_asked(shares);
  in.resize(shares.size());
  for (std::size_t sender = 0; sender < first; ++sender) post(context, shares[sender], in[sender]);
}

void receive_in_turns(Context& context, const std::vector<Share>& shares,
                      std::vector<std::vector<transport::Incoming>>& in, std::int64_t number) {
  std::size_t next = not_asked(shares);
  std::vector<std::size_t> waiting(next);
  std::iota(waiting.begin(), waiting.end(), 0U);
  std::vector<transport::Outgoing> asked(shares.size() - next);
  const FrameGuard guard(context.world);
  const auto is_done = [&](std::size_t sender) {
    return std::all_of(in[sender].begin(), in[sender].end(),
                       [](const auto& frame) { return frame.done.load(std::memory_order_acquire); });
  };
  const auto missing = [&] {
    std::vector<int> ranks;
    for (const std::size_t sender : waiting) {
      if (!is_done(sender)) ranks.push_back(shares[sender].peer);
    }
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  };
  std::size_t asks = 0;
  while (!waiting.empty()) {
    context.wait([&] { return std::any_of(waiting.begin(), waiting.end(), is_done); }, missing);
    const auto done = std::find_if(waiting.begin(), waiting.end(), is_done);
    wait_for_all(context, in[*done]);  // checks their lengths
    waiting.erase(done);
    while (next < shares.size() && shares[next].bytes == 0) ++next;
    if (next == shares.size()) continue;
    post(context, shares[next], in[next]);
    context.send(asked[asks++], shares[next].peer, tag(Step::Turn, number), nullptr, 0);
    waiting.push_back(next++);
  }
  for (std::size_t ask = 0; ask < asks; ++ask) context.wait_for(asked[ask]);
}

namespace {

/// Bytes by host in the order in which hosts send to the root's, whose own are left out.
std::vector<std::size_t> bytes_in_turn(const Layout& layout, const HostParts& parts, int root) {
  std::vector<std::size_t> bytes;
  for (int turn = 1; turn < layout.hosts; ++turn)
    bytes.push_back(parts.length[static_cast<std::size_t>((layout.host_of(root) + turn) % layout.hosts)]);
  return bytes;
}

// Gathers on each host to its leader, or to the root, and from the leaders to the root.
void gather(Context& context, const Request& request, const std::vector<std::int64_t>& bytes) {
  const Layout& layout = context.layout;
  const HostParts parts(layout, bytes);
  if (parts.total == 0) return;
  const int root = request.root;
  const bool at_root_host = layout.host == layout.host_of(root);
  const bool is_root = layout.rank == root;
  const bool takes = at_root_host ? is_root : layout.leads();
  const bool by_tree = layout.hosts > kMostFlat;
  const std::size_t length = parts.length[static_cast<std::size_t>(layout.host)];
  const std::size_t own = parts.bytes[static_cast<std::size_t>(layout.rank)];
  auto* const out = static_cast<std::byte*>(request.output);
  std::byte* const all = is_root && !layout.contiguous ? context.scratch(1, parts.total).data() : out;
  const auto block = [&](int host) { return all + parts.begin[static_cast<std::size_t>(host)]; };  // at the root
  std::vector<Share> shares;
  std::vector<std::vector<transport::Incoming>> in;
  const FrameGuard guard(context.world);
  for (int turn = 1; turn < layout.hosts && is_root && !by_tree; ++turn) {
    const int host = (layout.host + turn) % layout.hosts;
    shares.push_back({layout.leader(host), block(host), parts.length[static_cast<std::size_t>(host)]});
  }
  post_first_turns(context, shares, in);
  const auto* here = static_cast<const std::byte*>(request.input);
  std::byte* const to = is_root ? block(layout.host) : takes ? context.scratch(2, length).data() : nullptr;
  if (layout.locals > 1) {
    Request local = local_request(Kind::GatherV, DType::UInt8);
    local.root = at_root_host ? layout.local_of(root) : 0;
    local.input = request.input;
    local.input_count = static_cast<std::int64_t>(own);
    local.output = to;
    local.output_count = takes ? static_cast<std::int64_t>(length) : 0;
    local.counts = parts.here(layout);
    context.run_local(local);
    here = to;
  } else if (is_root && own > 0 && here != to) {
    std::memmove(to, here, own);
  }
  if (by_tree) {
    if (takes) gather_by_tree(context, parts, root, here, all);
  } else if (!at_root_host && layout.leads()) {
    std::vector<transport::Outgoing> frames;
    const FrameGuard inner(context.world);
    const auto turn = static_cast<std::size_t>((layout.host - layout.host_of(root) - 1 + layout.hosts) % layout.hosts);
    if (length > 0 && turn >= senders_at_once(bytes_in_turn(layout, parts, root))) context.wait_for_turn(root, 0);
    send_pieces(context, frames, root, Step::Block, here, length);
    wait_for_all(context, frames);
  }
  receive_in_turns(context, shares, in, 0);
  if (is_root) parts.unpack(layout, all, out);
}

// Scatters from the root to the leaders of the other hosts, and on each host to its ranks.
void scatter(Context& context, const Request& request, const std::vector<std::int64_t>& bytes) {
  const Layout& layout = context.layout;
  const HostParts parts(layout, bytes);
  if (parts.total == 0) return;
  const int root = request.root;
  const bool at_root_host = layout.host == layout.host_of(root);
  const bool is_root = layout.rank == root;
  const std::size_t length = parts.length[static_cast<std::size_t>(layout.host)];
  const std::size_t own = parts.bytes[static_cast<std::size_t>(layout.rank)];
  const auto* all = static_cast<const std::byte*>(request.input);
  if (is_root && !layout.contiguous) {
    std::byte* const packed = context.scratch(1, parts.total).data();
    parts.each(layout, [&](std::size_t by_rank, std::size_t by_host, std::size_t each) {
      std::memcpy(packed + by_host, all + by_rank, each);
    });
    all = packed;
  }
  const auto block = [&](int host) { return all + parts.begin[static_cast<std::size_t>(host)]; };
  std::vector<std::vector<transport::Outgoing>> out(static_cast<std::size_t>(layout.hosts));
  const FrameGuard guard(context.world);
  const bool by_tree = layout.hosts > kMostFlat;
  if (is_root && !by_tree) {
    for (int host = 0; host < layout.hosts; ++host) {
      if (host == layout.host) continue;
      auto& frames = out[static_cast<std::size_t>(host)];
      send_pieces(context, frames, layout.leader(host), Step::Block, block(host),
                  parts.length[static_cast<std::size_t>(host)]);
    }
  }
  const std::byte* here = is_root ? block(layout.host) : nullptr;
  if (!at_root_host && layout.leads()) {
    std::byte* const to =
        layout.locals > 1 ? context.scratch(2, length).data() : static_cast<std::byte*>(request.output);
    if (by_tree) {
      scatter_by_tree(context, parts, root, nullptr, to);
    } else {
      std::vector<transport::Incoming> frames;
      const FrameGuard inner(context.world);
      receive_pieces(context, frames, root, Step::Block, to, length);
      wait_for_all(context, frames);
    }
    here = to;
  }
  if (layout.locals > 1) {
    const bool gives = at_root_host ? is_root : layout.leads();
    Request local = local_request(Kind::ScatterV, DType::UInt8);
    local.root = at_root_host ? layout.local_of(root) : 0;
    local.input = gives ? here : nullptr;
    local.input_count = gives ? static_cast<std::int64_t>(length) : 0;
    local.output = request.output;
    local.output_count = static_cast<std::int64_t>(own);
    local.counts = parts.here(layout);
    context.run_local(local);
  } else if (is_root && own > 0 && here != request.output) {
    std::memmove(request.output, here, own);
  }
  if (is_root && by_tree) scatter_by_tree(context, parts, root, all, nullptr);
  for (auto& frames : out) wait_for_all(context, frames);
}

// Operations that only move data, after all ranks agree. Each byte is sent once to each host that needs it.

std::vector<std::int64_t> bytes_by_rank(const Request& request) {
  std::vector<std::int64_t> bytes = request.counts->input;
  for (std::int64_t& each : bytes) each *= static_cast<std::int64_t>(size_of(request.dtype));
  return bytes;
}

constexpr std::size_t kLeastPiece = std::size_t{8} << 10;

/// One route of a broadcast's pieces, as seen by one rank. Piece p takes route p modulo the number of routes.
struct Route {
  int from = -1;  // -1: this rank is the root
  std::vector<int> to = {};
  std::size_t next = 0;  // piece to be sent on
};

/// Returns this rank's part of the routes from the root to all leaders; empty if it sends and receives nothing.
std::vector<Route> routes_of(const Layout& layout, int root, bool small) {
  const int first = layout.host_of(root);
  const int at = (layout.host - first + layout.hosts) % layout.hosts;
  if (layout.rank != root && (at == 0 || !layout.leads())) return {};
  std::vector<Neighbours> found(1);
  if (layout.hosts > kMostFlat) {
    found = {one_of_two_trees(0, at, layout.hosts), one_of_two_trees(1, at, layout.hosts)};
  } else if (small) {
    found[0].parent = at == 0 ? -1 : 0;
    for (int host = 1; at == 0 && host < layout.hosts; ++host) found[0].children.push_back(host);
  } else {
    found[0].parent = at - 1;
    if (at + 1 < layout.hosts) found[0].children.push_back(at + 1);
  }
  const auto rank_at = [&](int position) {
    return position <= 0 ? position == 0 ? root : -1 : layout.leader((first + position) % layout.hosts);
  };
  std::vector<Route> routes;
  for (const Neighbours& each : found) {
    Route& route = routes.emplace_back();
    route.next = routes.size() - 1;
    route.from = rank_at(each.parent);
    for (const int child : each.children) route.to.push_back(rank_at(child));
  }
  return routes;
}

// Sends the data along a chain of hosts, piece by piece, from the root's host on. Small data is sent to all directly.
// Between many hosts, each piece goes along one of two trees.
void broadcast(Context& context, const Request& request, bool serving) {
  const Layout& layout = context.layout;
  const std::size_t bytes = request.output_bytes();
  if (bytes == 0) return;
  std::byte* const data = serving ? context.scratch(1, bytes).data() : static_cast<std::byte*>(request.output);
  const int root = context.agreement.root;
  std::vector<Route> routes = routes_of(layout, root, bytes <= context.inline_bytes);
  // A tree has a piece on the way at each depth, so less data is divided into shorter pieces.
  const std::size_t size =
      layout.hosts > kMostFlat ? std::clamp(bytes / 64 / kLeastPiece * kLeastPiece, kLeastPiece, kPiece) : kPiece;
  const std::size_t pieces = pieces_of(bytes, size);
  std::vector<transport::Incoming> in(pieces);
  std::vector<std::vector<transport::Outgoing>> out(pieces);
  const FrameGuard guard(context.world);
  // Pieces of a route have consecutive numbers, as the connections of a pair are used in turn.
  const auto number = [&](std::size_t piece) {
    return tag(Step::Chain, static_cast<std::int64_t>(piece / routes.size() + piece % routes.size() * pieces));
  };
  for (std::size_t piece = 0; piece < pieces && !routes.empty(); ++piece) {
    const int from = routes[piece % routes.size()].from;
    if (from >= 0)
      context.receive(in[piece], from, number(piece), data + piece * size, piece_bytes(bytes, piece, size));
  }
  const auto owed = [&](const Route& route) {
    return route.next < pieces && route.from >= 0 && !in[route.next].done.load(std::memory_order_acquire);
  };
  const auto ready = [&](const Route& route) { return route.next < pieces && !owed(route); };
  const auto missing = [&] {
    std::vector<int> ranks;
    for (const Route& route : routes) {
      if (owed(route)) ranks.push_back(route.from);
    }
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  };
  for (std::size_t here = 0; here < pieces;) {
    if (!routes.empty()) context.wait([&] { return std::any_of(routes.begin(), routes.end(), ready); }, missing);
    std::size_t known = pieces;
    for (Route& route : routes) {
      if (ready(route)) {
        const std::size_t piece = route.next;
        if (route.from >= 0) context.wait_for(in[piece]);  // checks its length
        out[piece] = std::vector<transport::Outgoing>(route.to.size());
        for (std::size_t i = 0; i < route.to.size(); ++i) {
          context.send(out[piece][i], route.to[i], number(piece), data + piece * size, piece_bytes(bytes, piece, size));
        }
        route.next += routes.size();
      }
      known = std::min(known, route.next);
    }
    for (; here < known; ++here) {
      if (layout.locals == 1) continue;
      context.local_broadcast(layout.host == layout.host_of(root) ? layout.local_of(root) : 0, data + here * size,
                              piece_bytes(bytes, here, size));
    }
  }
  for (auto& frames : out) wait_for_all(context, frames);
}

// Sends directly between any two ranks: no byte is sent twice.
void all_to_all(Context& context, const Request& request) {
  const Layout& layout = context.layout;
  const auto ranks = static_cast<std::size_t>(layout.size);
  const auto element = static_cast<std::int64_t>(size_of(request.dtype));
  std::vector<std::int64_t> given(ranks, request.input_count / layout.size);
  std::vector<std::int64_t> taken = given;
  if (request.kind == Kind::AllToAllV) {
    given = request.counts->input;
    taken = request.counts->output;
  }
  std::vector<std::size_t> from(ranks), to(ranks);
  for (std::size_t rank = 0, a = 0, b = 0; rank < ranks; ++rank) {
    from[rank] = a;
    to[rank] = b;
    a += static_cast<std::size_t>(given[rank] * element);
    b += static_cast<std::size_t>(taken[rank] * element);
  }
  const auto* const input = static_cast<const std::byte*>(request.input);
  auto* const output = static_cast<std::byte*>(request.output);
  std::vector<std::vector<transport::Incoming>> in(ranks);
  std::vector<std::vector<transport::Outgoing>> out(ranks);
  const FrameGuard guard(context.world);
  for (std::size_t turn = 1; turn < ranks; ++turn) {
    const std::size_t peer = (static_cast<std::size_t>(layout.rank) + turn) % ranks;
    if (layout.host_of(static_cast<int>(peer)) == layout.host) continue;
    const auto comes = static_cast<std::size_t>(taken[peer] * element);
    receive_pieces(context, in[peer], static_cast<int>(peer), Step::Direct, output + to[peer], comes);
  }
  for (std::size_t turn = 1; turn < ranks; ++turn) {
    const std::size_t peer = (static_cast<std::size_t>(layout.rank) + turn) % ranks;
    if (layout.host_of(static_cast<int>(peer)) == layout.host) continue;
    const auto goes = static_cast<std::size_t>(given[peer] * element);
    send_pieces(context, out[peer], static_cast<int>(peer), Step::Direct, input + from[peer], goes);
  }
  // Meanwhile exchange within the host, whose ranks' parts are contiguous.
  Counts counts;
  std::size_t goes = 0;
  std::size_t comes = 0;
  for (const int rank : layout.here()) {
    const auto r = static_cast<std::size_t>(rank);
    counts.input.push_back(given[r]);
    counts.output.push_back(taken[r]);
    goes += static_cast<std::size_t>(given[r] * element);
    comes += static_cast<std::size_t>(taken[r] * element);
  }
  if (layout.locals == 1) {
    const auto own = static_cast<std::size_t>(layout.rank);
    if (goes > 0) std::memcpy(output + to[own], input + from[own], goes);
  } else {
    std::vector<std::byte>& packed = context.scratch(1, goes);
    std::vector<std::byte>& unpacked = context.scratch(2, comes);
    std::size_t at = 0;
    for (const int rank : layout.here()) {
      const auto r = static_cast<std::size_t>(rank);
      const auto bytes = static_cast<std::size_t>(given[r] * element);
      if (bytes > 0) std::memcpy(packed.data() + at, input + from[r], bytes);
      at += bytes;
    }
    Request local = local_request(Kind::AllToAllV, request.dtype);
    local.input = packed.data();
    local.input_count = static_cast<std::int64_t>(goes) / element;
    local.output = unpacked.data();
    local.output_count = static_cast<std::int64_t>(comes) / element;
    local.counts = std::make_shared<const Counts>(std::move(counts));
    context.run_local(local);
    at = 0;
    for (const int rank : layout.here()) {
      const auto r = static_cast<std::size_t>(rank);
      const auto bytes = static_cast<std::size_t>(taken[r] * element);
      if (bytes > 0) std::memcpy(output + to[r], unpacked.data() + at, bytes);
      at += bytes;
    }
  }
  for (auto& frames : in) wait_for_all(context, frames);
  for (auto& frames : out) wait_for_all(context, frames);
}

}  // namespace

void execute(Context& context, const Request& request, bool serving) {
  const auto equal = [&](std::size_t bytes) {
    return std::vector<std::int64_t>(static_cast<std::size_t>(context.layout.size), static_cast<std::int64_t>(bytes));
  };
  switch (request.kind) {
    case Kind::AllReduce:
    case Kind::Reduce:
    case Kind::ReduceScatter:
    case Kind::ReduceScatterV: return reduce(context, request, serving);
    case Kind::Broadcast: return broadcast(context, request, serving);
    case Kind::AllGather:
    case Kind::Split: return all_gather(context, request.input, request.output, equal(request.input_bytes()));
    case Kind::AllGatherV: return all_gather(context, request.input, request.output, bytes_by_rank(request));
    case Kind::Gather: return gather(context, request, equal(request.input_bytes()));
    case Kind::GatherV: return gather(context, request, bytes_by_rank(request));
    case Kind::Scatter: return scatter(context, request, equal(request.output_bytes()));
    case Kind::ScatterV: return scatter(context, request, bytes_by_rank(request));
    case Kind::AllToAll:
    case Kind::AllToAllV: return all_to_all(context, request);
    default: return;  // a barrier consists of its round
  }
}

}  // namespace cohort::comm::hosts
