// Operations that only move data, once all ranks agree. Between hosts each byte goes once to each host that needs it.
#include "comm/hosts/engine.h"

#include "base/result.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace cohort::comm::hosts {
namespace {

constexpr std::size_t kPiece = std::size_t{256} << 10;

std::size_t pieces_of(std::size_t bytes) noexcept { return (bytes + kPiece - 1) / kPiece; }
std::size_t piece_bytes(std::size_t bytes, std::size_t piece) noexcept {
  return std::min(kPiece, bytes - piece * kPiece);
}

std::vector<std::int64_t> bytes_by_rank(const Request& request) {
  std::vector<std::int64_t> bytes = request.counts->input;
  for (std::int64_t& each : bytes) each *= static_cast<std::int64_t>(size_of(request.dtype));
  return bytes;
}

/// Where the parts of all ranks lie, in bytes: by rank one after the other, and the parts of a host's ranks together,
/// which is the same where ranks are numbered so.
struct HostParts {
  HostParts(const Layout& layout, const std::vector<std::int64_t>& of_rank)
      : begin(static_cast<std::size_t>(layout.hosts)), length(begin.size()) {
    for (std::size_t rank = 0; rank < of_rank.size(); ++rank) {
      bytes.push_back(static_cast<std::size_t>(of_rank[rank]));
      offset.push_back(total);
      total += bytes[rank];
      length[static_cast<std::size_t>(layout.host_of(static_cast<int>(rank)))] += bytes[rank];
    }
    for (std::size_t host = 0, sum = 0; host < begin.size(); sum += length[host++]) {
      begin[host] = layout.contiguous ? offset[static_cast<std::size_t>(layout.leader(static_cast<int>(host)))] : sum;
    }
  }
  /// Of the ranks here, for an operation among them.
  std::shared_ptr<const Counts> here(const Layout& layout) const {
    Counts counts;
    for (const int rank : layout.here()) {
      counts.input.push_back(static_cast<std::int64_t>(bytes[static_cast<std::size_t>(rank)]));
    }
    return std::make_shared<const Counts>(std::move(counts));
  }
  /// Calls `copy` for each part, with its place by rank and its place by host.
  template <class Copy>
  void each(const Layout& layout, const Copy& copy) const {
    for (int host = 0; host < layout.hosts; ++host) {
      std::size_t together = begin[static_cast<std::size_t>(host)];
      for (const int rank : layout.on(host)) {
        const auto r = static_cast<std::size_t>(rank);
        if (bytes[r] > 0) copy(offset[r], together, bytes[r]);
        together += bytes[r];
      }
    }
  }

  std::vector<std::size_t> bytes, offset;  // by rank
  std::vector<std::size_t> begin, length;  // by host
  std::size_t total = 0;
};

}  // namespace

std::vector<std::byte>& Engine::scratch(std::size_t which, std::size_t bytes) {
  std::vector<std::byte>& memory = scratch_[which];
  if (memory.size() < bytes) memory.resize(bytes);
  return memory;
}

void Engine::execute(const Request& request, bool serving) {
  const auto equal = [&](std::size_t bytes) {
    return std::vector<std::int64_t>(static_cast<std::size_t>(layout_.size), static_cast<std::int64_t>(bytes));
  };
  switch (request.kind) {
    case Kind::AllReduce:
    case Kind::Reduce:
    case Kind::ReduceScatter:
    case Kind::ReduceScatterV: return reduce(request, serving);
    case Kind::Broadcast: return broadcast(request, serving);
    case Kind::AllGather:
    case Kind::Split: return all_gather(request.input, request.output, equal(request.input_bytes()));
    case Kind::AllGatherV: return all_gather(request.input, request.output, bytes_by_rank(request));
    case Kind::Gather: return gather(request, equal(request.input_bytes()));
    case Kind::GatherV: return gather(request, bytes_by_rank(request));
    case Kind::Scatter: return scatter(request, equal(request.output_bytes()));
    case Kind::ScatterV: return scatter(request, bytes_by_rank(request));
    case Kind::AllToAll:
    case Kind::AllToAllV: return all_to_all(request);
    default: return;  // a barrier's round is all of it
  }
}

// Along the hosts in a chain, piece by piece: the root's host first. Small ones go to all of them directly.
void Engine::broadcast(const Request& request, bool serving) {
  const std::size_t bytes = request.output_bytes();
  if (bytes == 0) return;
  std::byte* const data = serving ? scratch(1, bytes).data() : static_cast<std::byte*>(request.output);
  const int root = round_.root;
  const int first = layout_.host_of(root);
  const bool at_root_host = layout_.host == first;
  const bool direct = bytes <= beside_bytes_;
  const int position = (layout_.host - first + layout_.hosts) % layout_.hosts;
  const bool sends = layout_.rank == root || (!at_root_host && layout_.leads());
  const bool receives = !at_root_host && layout_.leads();
  const int before =
      position <= 1 || direct ? root : layout_.leader((layout_.host + layout_.hosts - 1) % layout_.hosts);
  const std::size_t pieces = pieces_of(bytes);

  std::vector<int> next;
  if (sends && direct && layout_.rank == root) {
    for (int host = 0; host < layout_.hosts; ++host) {
      if (host != first) next.push_back(layout_.leader(host));
    }
  } else if (sends && !direct && position + 1 < layout_.hosts) {
    next.push_back(layout_.leader((layout_.host + 1) % layout_.hosts));
  }
  std::vector<transport::Incoming> in(receives ? pieces : 0);
  std::vector<transport::Outgoing> out(next.size() * pieces);
  const FrameGuard guard(world_);
  for (std::size_t piece = 0; piece < in.size(); ++piece) {
    receive(in[piece], before, tag(Step::Chain, static_cast<std::int64_t>(piece)), data + piece * kPiece,
            piece_bytes(bytes, piece));
  }
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    if (receives) wait_for(in[piece]);
    for (std::size_t i = 0; i < next.size(); ++i) {
      send(out[i * pieces + piece], next[i], tag(Step::Chain, static_cast<std::int64_t>(piece)), data + piece * kPiece,
           piece_bytes(bytes, piece));
    }
    if (layout_.locals > 1) {
      local_broadcast(at_root_host ? layout_.local_of(root) : 0, data + piece * kPiece, piece_bytes(bytes, piece));
    }
  }
  for (transport::Outgoing& frame : out) wait_for(frame);
}

// On each host to all its ranks, then the leaders exchange what their hosts have, and hand it on. `bytes` is by rank.
void Engine::all_gather(const void* input, void* output, const std::vector<std::int64_t>& bytes) {
  const HostParts parts(layout_, bytes);
  if (parts.total == 0) return;
  const std::vector<std::size_t>& begin = parts.begin;
  const std::vector<std::size_t>& length = parts.length;
  const auto hosts = static_cast<std::size_t>(layout_.hosts);
  auto* const out = static_cast<std::byte*>(output);
  std::byte* const all = layout_.contiguous ? out : scratch(1, parts.total).data();
  std::byte* const here = all + begin[static_cast<std::size_t>(layout_.host)];
  const std::size_t own = parts.bytes[static_cast<std::size_t>(layout_.rank)];
  if (layout_.locals > 1) {
    Request gather = local_request(Kind::AllGatherV, DType::UInt8);
    gather.input = input;
    gather.input_count = static_cast<std::int64_t>(own);
    gather.output = here;
    gather.output_count = static_cast<std::int64_t>(length[static_cast<std::size_t>(layout_.host)]);
    gather.counts = parts.here(layout_);
    run_local(gather);
  } else if (own > 0 && input != here) {
    std::memmove(here, input, own);
  }
  std::vector<std::vector<transport::Incoming>> in(hosts);
  std::vector<std::vector<transport::Outgoing>> sent(hosts);
  const FrameGuard guard(world_);
  const auto mine = static_cast<std::size_t>(layout_.host);
  if (layout_.leads()) {
    for (std::size_t h = 0; h < hosts; ++h) {
      if (h == mine) continue;
      in[h] = std::vector<transport::Incoming>(pieces_of(length[h]));
      for (std::size_t piece = 0; piece < in[h].size(); ++piece) {
        receive(in[h][piece], layout_.leader(static_cast<int>(h)), tag(Step::Block, static_cast<std::int64_t>(piece)),
                all + begin[h] + piece * kPiece, piece_bytes(length[h], piece));
      }
    }
    // Each begins with another host, so that not all send to one.
    for (std::size_t turn = 1; turn < hosts; ++turn) {
      const std::size_t h = (mine + turn) % hosts;
      sent[h] = std::vector<transport::Outgoing>(pieces_of(length[mine]));
      for (std::size_t piece = 0; piece < sent[h].size(); ++piece) {
        send(sent[h][piece], layout_.leader(static_cast<int>(h)), tag(Step::Block, static_cast<std::int64_t>(piece)),
             here + piece * kPiece, piece_bytes(length[mine], piece));
      }
    }
  }
  for (std::size_t turn = 1; turn < hosts; ++turn) {
    const std::size_t h = (mine + hosts - turn) % hosts;
    for (std::size_t piece = 0; piece < pieces_of(length[h]); ++piece) {
      if (layout_.leads()) wait_for(in[h][piece]);
      if (layout_.locals > 1) local_broadcast(0, all + begin[h] + piece * kPiece, piece_bytes(length[h], piece));
    }
  }
  for (auto& each : sent) {
    for (transport::Outgoing& frame : each) wait_for(frame);
  }
  if (layout_.contiguous) return;
  parts.each(layout_, [&](std::size_t by_rank, std::size_t by_host, std::size_t each) {
    std::memcpy(out + by_rank, all + by_host, each);
  });
}

// On each host to its leader, or to the root, and from the leaders to the root. `bytes` is by rank.
void Engine::gather(const Request& request, const std::vector<std::int64_t>& bytes) {
  const HostParts parts(layout_, bytes);
  if (parts.total == 0) return;
  const int root = request.root;
  const bool at_root_host = layout_.host == layout_.host_of(root);
  const bool is_root = layout_.rank == root;
  const bool takes = at_root_host ? is_root : layout_.leads();
  const std::size_t length = parts.length[static_cast<std::size_t>(layout_.host)];
  const std::size_t own = parts.bytes[static_cast<std::size_t>(layout_.rank)];
  auto* const out = static_cast<std::byte*>(request.output);
  std::byte* const all = is_root && !layout_.contiguous ? scratch(1, parts.total).data() : out;
  const auto block = [&](int host) { return all + parts.begin[static_cast<std::size_t>(host)]; };  // at the root
  std::vector<std::vector<transport::Incoming>> in(static_cast<std::size_t>(layout_.hosts));
  const FrameGuard guard(world_);
  if (is_root) {
    for (int host = 0; host < layout_.hosts; ++host) {
      if (host == layout_.host) continue;
      auto& frames = in[static_cast<std::size_t>(host)];
      const std::size_t whole = parts.length[static_cast<std::size_t>(host)];
      frames = std::vector<transport::Incoming>(pieces_of(whole));
      for (std::size_t piece = 0; piece < frames.size(); ++piece) {
        receive(frames[piece], layout_.leader(host), tag(Step::Block, static_cast<std::int64_t>(piece)),
                block(host) + piece * kPiece, piece_bytes(whole, piece));
      }
    }
  }
  const auto* here = static_cast<const std::byte*>(request.input);
  std::byte* const to = is_root ? block(layout_.host) : takes ? scratch(2, length).data() : nullptr;
  if (layout_.locals > 1) {
    Request local = local_request(Kind::GatherV, DType::UInt8);
    local.root = at_root_host ? layout_.local_of(root) : 0;
    local.input = request.input;
    local.input_count = static_cast<std::int64_t>(own);
    local.output = to;
    local.output_count = takes ? static_cast<std::int64_t>(length) : 0;
    local.counts = parts.here(layout_);
    run_local(local);
    here = to;
  } else if (is_root && own > 0 && here != to) {
    std::memmove(to, here, own);
  }
  if (!at_root_host && layout_.leads()) {
    std::vector<transport::Outgoing> frames(pieces_of(length));
    const FrameGuard inner(world_);
    for (std::size_t piece = 0; piece < frames.size(); ++piece) {
      send(frames[piece], root, tag(Step::Block, static_cast<std::int64_t>(piece)), here + piece * kPiece,
           piece_bytes(length, piece));
    }
    for (transport::Outgoing& frame : frames) wait_for(frame);
  }
  for (auto& frames : in) {
    for (transport::Incoming& frame : frames) wait_for(frame);
  }
  if (!is_root || layout_.contiguous) return;
  parts.each(layout_, [&](std::size_t by_rank, std::size_t by_host, std::size_t each) {
    std::memcpy(out + by_rank, all + by_host, each);
  });
}

// From the root to the leaders of the other hosts, and on each host to its ranks. `bytes` is by rank.
void Engine::scatter(const Request& request, const std::vector<std::int64_t>& bytes) {
  const HostParts parts(layout_, bytes);
  if (parts.total == 0) return;
  const int root = request.root;
  const bool at_root_host = layout_.host == layout_.host_of(root);
  const bool is_root = layout_.rank == root;
  const std::size_t length = parts.length[static_cast<std::size_t>(layout_.host)];
  const std::size_t own = parts.bytes[static_cast<std::size_t>(layout_.rank)];
  const auto* all = static_cast<const std::byte*>(request.input);
  if (is_root && !layout_.contiguous) {
    std::byte* const packed = scratch(1, parts.total).data();
    parts.each(layout_, [&](std::size_t by_rank, std::size_t by_host, std::size_t each) {
      std::memcpy(packed + by_host, all + by_rank, each);
    });
    all = packed;
  }
  const auto block = [&](int host) { return all + parts.begin[static_cast<std::size_t>(host)]; };
  std::vector<std::vector<transport::Outgoing>> out(static_cast<std::size_t>(layout_.hosts));
  const FrameGuard guard(world_);
  if (is_root) {
    for (int host = 0; host < layout_.hosts; ++host) {
      if (host == layout_.host) continue;
      auto& frames = out[static_cast<std::size_t>(host)];
      const std::size_t whole = parts.length[static_cast<std::size_t>(host)];
      frames = std::vector<transport::Outgoing>(pieces_of(whole));
      for (std::size_t piece = 0; piece < frames.size(); ++piece) {
        send(frames[piece], layout_.leader(host), tag(Step::Block, static_cast<std::int64_t>(piece)),
             block(host) + piece * kPiece, piece_bytes(whole, piece));
      }
    }
  }
  const std::byte* here = is_root ? block(layout_.host) : nullptr;
  if (!at_root_host && layout_.leads()) {
    std::byte* const to = layout_.locals > 1 ? scratch(2, length).data() : static_cast<std::byte*>(request.output);
    std::vector<transport::Incoming> frames(pieces_of(length));
    const FrameGuard inner(world_);
    for (std::size_t piece = 0; piece < frames.size(); ++piece) {
      receive(frames[piece], root, tag(Step::Block, static_cast<std::int64_t>(piece)), to + piece * kPiece,
              piece_bytes(length, piece));
    }
    for (transport::Incoming& frame : frames) wait_for(frame);
    here = to;
  }
  if (layout_.locals > 1) {
    const bool gives = at_root_host ? is_root : layout_.leads();
    Request local = local_request(Kind::ScatterV, DType::UInt8);
    local.root = at_root_host ? layout_.local_of(root) : 0;
    local.input = gives ? here : nullptr;
    local.input_count = gives ? static_cast<std::int64_t>(length) : 0;
    local.output = request.output;
    local.output_count = static_cast<std::int64_t>(own);
    local.counts = parts.here(layout_);
    run_local(local);
  } else if (is_root && own > 0 && here != request.output) {
    std::memmove(request.output, here, own);
  }
  for (auto& frames : out) {
    for (transport::Outgoing& frame : frames) wait_for(frame);
  }
}

// Directly between any two ranks: no byte goes a second time.
void Engine::all_to_all(const Request& request) {
  const auto ranks = static_cast<std::size_t>(layout_.size);
  const auto element = static_cast<std::int64_t>(size_of(request.dtype));
  std::vector<std::int64_t> given(ranks, request.input_count / layout_.size);
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
  const FrameGuard guard(world_);
  for (std::size_t turn = 1; turn < ranks; ++turn) {
    const std::size_t peer = (static_cast<std::size_t>(layout_.rank) + turn) % ranks;
    if (layout_.host_of(static_cast<int>(peer)) == layout_.host) continue;
    const auto comes = static_cast<std::size_t>(taken[peer] * element);
    in[peer] = std::vector<transport::Incoming>(pieces_of(comes));
    for (std::size_t piece = 0; piece < in[peer].size(); ++piece) {
      receive(in[peer][piece], static_cast<int>(peer), tag(Step::Direct, static_cast<std::int64_t>(piece)),
              output + to[peer] + piece * kPiece, piece_bytes(comes, piece));
    }
  }
  for (std::size_t turn = 1; turn < ranks; ++turn) {
    const std::size_t peer = (static_cast<std::size_t>(layout_.rank) + turn) % ranks;
    if (layout_.host_of(static_cast<int>(peer)) == layout_.host) continue;
    const auto goes = static_cast<std::size_t>(given[peer] * element);
    out[peer] = std::vector<transport::Outgoing>(pieces_of(goes));
    for (std::size_t piece = 0; piece < out[peer].size(); ++piece) {
      send(out[peer][piece], static_cast<int>(peer), tag(Step::Direct, static_cast<std::int64_t>(piece)),
           input + from[peer] + piece * kPiece, piece_bytes(goes, piece));
    }
  }
  // Beside that, on the host: its ranks' parts one after the other.
  Counts counts;
  std::size_t goes = 0;
  std::size_t comes = 0;
  for (const int rank : layout_.here()) {
    const auto r = static_cast<std::size_t>(rank);
    counts.input.push_back(given[r]);
    counts.output.push_back(taken[r]);
    goes += static_cast<std::size_t>(given[r] * element);
    comes += static_cast<std::size_t>(taken[r] * element);
  }
  if (layout_.locals == 1) {
    const auto own = static_cast<std::size_t>(layout_.rank);
    if (goes > 0) std::memcpy(output + to[own], input + from[own], goes);
  } else {
    std::vector<std::byte>& packed = scratch(1, goes);
    std::vector<std::byte>& unpacked = scratch(2, comes);
    std::size_t at = 0;
    for (const int rank : layout_.here()) {
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
    run_local(local);
    at = 0;
    for (const int rank : layout_.here()) {
      const auto r = static_cast<std::size_t>(rank);
      const auto bytes = static_cast<std::size_t>(taken[r] * element);
      if (bytes > 0) std::memcpy(output + to[r], unpacked.data() + at, bytes);
      at += bytes;
    }
  }
  for (auto& frames : in) {
    for (transport::Incoming& frame : frames) wait_for(frame);
  }
  for (auto& frames : out) {
    for (transport::Outgoing& frame : frames) wait_for(frame);
  }
}

}  // namespace cohort::comm::hosts
