// Operations that only move data, once all ranks agree. Between hosts each byte goes once to each host that needs it.
#include "comm/hosts/moves.h"

#include "comm/hosts/pieces.h"
#include "comm/hosts/sums.h"

#include <cstring>
#include <memory>
#include <utility>

namespace cohort::comm::hosts {
namespace {

std::vector<std::int64_t> bytes_by_rank(const Request& request) {
  std::vector<std::int64_t> bytes = request.counts->input;
  for (std::int64_t& each : bytes) each *= static_cast<std::int64_t>(size_of(request.dtype));
  return bytes;
}

// Along the hosts in a chain, piece by piece: the root's host first. Small ones go to all of them directly.
void broadcast(Context& context, const Request& request, bool serving) {
  const Layout& layout = context.layout;
  const std::size_t bytes = request.output_bytes();
  if (bytes == 0) return;
  std::byte* const data = serving ? context.scratch(1, bytes).data() : static_cast<std::byte*>(request.output);
  const int root = context.agreement.root;
  const int first = layout.host_of(root);
  const bool at_root_host = layout.host == first;
  const bool direct = bytes <= context.inline_bytes;
  const int position = (layout.host - first + layout.hosts) % layout.hosts;
  const bool sends = layout.rank == root || (!at_root_host && layout.leads());
  const bool receives = !at_root_host && layout.leads();
  const int before = position <= 1 || direct ? root : layout.leader((layout.host + layout.hosts - 1) % layout.hosts);
  const std::size_t pieces = pieces_of(bytes);

  std::vector<int> next;
  if (sends && direct && layout.rank == root) {
    for (int host = 0; host < layout.hosts; ++host) {
      if (host != first) next.push_back(layout.leader(host));
    }
  } else if (sends && !direct && position + 1 < layout.hosts) {
    next.push_back(layout.leader((layout.host + 1) % layout.hosts));
  }
  std::vector<transport::Incoming> in;
  std::vector<transport::Outgoing> out(next.size() * pieces);
  const FrameGuard guard(context.world);
  if (receives) receive_pieces(context, in, before, Step::Chain, data, bytes);
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    if (receives) context.wait_for(in[piece]);
    for (std::size_t i = 0; i < next.size(); ++i) {
      context.send(out[i * pieces + piece], next[i], tag(Step::Chain, static_cast<std::int64_t>(piece)),
                   data + piece * kPiece, piece_bytes(bytes, piece));
    }
    if (layout.locals > 1) {
      context.local_broadcast(at_root_host ? layout.local_of(root) : 0, data + piece * kPiece,
                              piece_bytes(bytes, piece));
    }
  }
  wait_for_all(context, out);
}

// Directly between any two ranks: no byte goes a second time.
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
    receive_pieces(context, in[peer], static_cast<int>(peer), Step::DeviceOp, output + to[peer], comes);
  }
  for (std::size_t turn = 1; turn < ranks; ++turn) {
    const std::size_t peer = (static_cast<std::size_t>(layout.rank) + turn) % ranks;
    if (layout.host_of(static_cast<int>(peer)) == layout.host) continue;
    const auto goes = static_cast<std::size_t>(given[peer] * element);
    send_pieces(context, out[peer], static_cast<int>(peer), Step::DeviceOp, input + from[peer], goes);
  }
  // Beside that, on the host: its ranks' parts one after the other.
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
    default: return;  // a barrier's round is all of it
  }
}

}  // namespace cohort::comm::hosts
