// all_gather, gather and scatter between more than kMostFlat hosts, so that a host connects to only tens of others.
#include "comm/hosts/moves.h"
#include "comm/hosts/trees.h"

#include <array>
#include <bit>

namespace cohort::comm::hosts {
namespace {

// Exchanges. In the step of distance d, a host gets what the host d behind it has: that host's own part, and those at
// multiples of 2d behind it. The longest distance comes first, while there is little to send, and half of the data
// comes from the next host.

struct HostPart {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// The bytes of a frame: a piece of a large part, or several small parts, copied together.
struct Batch {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::vector<HostPart> copied = {};

  void pack() const {
    std::byte* to = data;
    for (const HostPart& part : copied) to = std::copy_n(part.data, part.bytes, to);
  }
  void unpack() const {
    const std::byte* from = data;
    for (const HostPart& part : copied) {
      std::copy_n(from, part.bytes, part.data);
      from += part.bytes;
    }
  }
};

constexpr std::size_t kSmallPart = std::size_t{8} << 10;
constexpr std::size_t kMostBatch = std::size_t{64} << 10;  // the transport stores early frames of this size

/// Divides parts into batches. Both ends divide alike. Small parts are copied into `copies`.
std::vector<Batch> batches_of(const std::vector<HostPart>& parts, std::vector<std::byte>& copies) {
  std::size_t small = 0;
  for (const HostPart& part : parts) small += part.bytes <= kSmallPart ? part.bytes : 0;
  if (copies.size() < small) copies.resize(small);
  std::byte* next = copies.data();
  std::vector<Batch> batches;
  for (const HostPart& part : parts) {
    if (part.bytes > kSmallPart) {
      for (std::size_t piece = 0; piece < pieces_of(part.bytes); ++piece) {
        batches.push_back({part.data + piece * kPiece, piece_bytes(part.bytes, piece)});
      }
    } else if (part.bytes > 0) {
      const bool fits =
          !batches.empty() && !batches.back().copied.empty() && batches.back().bytes + part.bytes <= kMostBatch;
      if (!fits) batches.push_back({next, 0});
      batches.back().copied.push_back(part);
      batches.back().bytes += part.bytes;
      next += part.bytes;
    }
  }
  return batches;
}

}  // namespace

void exchange_in_steps(Context& context, const HostParts& parts, std::byte* all) {
  const Layout& layout = context.layout;
  const auto host_at = [&](int position) { return (layout.host + position) % layout.hosts; };
  const auto part_at = [&](int position) {
    const auto host = static_cast<std::size_t>(host_at(position));
    return HostPart{all + parts.begin[host], parts.length[host]};
  };
  for (int distance = static_cast<int>(std::bit_floor(static_cast<unsigned>(layout.hosts - 1))); distance > 0;
       distance /= 2) {
    std::vector<HostPart> had, comes;
    for (int position = 0; position + distance < layout.hosts; position += 2 * distance) {
      had.push_back(part_at(position));
      comes.push_back(part_at(position + distance));
    }
    const std::vector<Batch> in = batches_of(comes, context.scratch(3, 0));
    std::vector<transport::Incoming> frames_in(in.size());
    std::vector<transport::Outgoing> frames_out;
    const FrameGuard guard(context.world);
    if (layout.leads()) {
      const std::vector<Batch> out = batches_of(had, context.scratch(4, 0));
      frames_out = std::vector<transport::Outgoing>(out.size());
      for (std::size_t i = 0; i < in.size(); ++i) {
        context.receive(frames_in[i], layout.leader(host_at(distance)), tag(Step::Block, static_cast<std::int64_t>(i)),
                        in[i].data, in[i].bytes);
      }
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i].pack();
        context.send(frames_out[i], layout.leader(host_at(layout.hosts - distance)),
                     tag(Step::Block, static_cast<std::int64_t>(i)), out[i].data, out[i].bytes);
      }
    }
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (layout.leads()) context.wait_for(frames_in[i]);
      if (layout.locals > 1) context.local_broadcast(0, in[i].data, in[i].bytes);
      in[i].unpack();
    }
    wait_for_all(context, frames_out);
  }
}

namespace {

// Gather and scatter, along radix_tree. A slab has a slice of each host's part, so that a host that passes data on
// needs bounded memory. Two slabs are on the way at once.

constexpr std::size_t kSlice = std::size_t{64} << 10;
constexpr std::size_t kMostSlab = std::size_t{16} << 20;

/// Positions whose slices go over one connection.
struct Stream {
  int peer = -1;
  int begin = 0;
  int end = 0;
  std::int64_t frames = 0;  // number of frames so far, the same at both ends
};

struct Slab {
  std::size_t number = 0;
  std::vector<std::byte> bytes;      // the slices of this position and of those below it
  std::vector<std::size_t> offsets;  // of each slice; then the end of the last one
  std::vector<Share> shares;         // by source
  std::vector<std::vector<transport::Incoming>> in;
  std::vector<std::vector<transport::Outgoing>> out;
};

/// Progress of a gather or scatter on a rank that takes part between hosts.
struct Relay {
  Context& context;
  const HostParts& parts;
  const int first;         // the root's host
  const int at;            // this host's position
  const int end;           // the first position behind those below this one
  const std::size_t most;  // bytes of a slice
  std::size_t slabs = 0;
  std::vector<Stream> up = {}, down = {};
  std::vector<Stream> beside = {};  // what the parent gathers, in the order of turns
  std::size_t turn = 0;             // this host's
  std::array<Slab, 2> memory = {};

  Relay(Context& in, const HostParts& of, int root);
  std::size_t host_at(int position) const noexcept {
    return static_cast<std::size_t>((first + position) % context.layout.hosts);
  }
  std::size_t slice_bytes(int position, std::size_t slab) const noexcept {
    const std::size_t length = parts.length[host_at(position)];
    return position == 0 ? 0 : std::min(length - std::min(length, slab * most), most);
  }
  /// Calls `copy(place in the slab, host, offset in its part, bytes)` for slices of positions before `until`.
  template <class Copy>
  void each_slice(Slab& slab, int until, const Copy& copy) const {
    for (int position = at; position < until; ++position) {
      const auto i = static_cast<std::size_t>(position - at);
      const std::size_t bytes = slab.offsets[i + 1] - slab.offsets[i];
      if (bytes > 0) copy(slab.bytes.data() + slab.offsets[i], host_at(position), slab.number * most, bytes);
    }
  }
  /// True if the parent asks for this host's data of a slab.
  bool is_asked(std::size_t slab) const;
  template <class Put, class Take>
  void run(std::vector<Stream>& sources, std::vector<Stream>& sinks, const Put& put, const Take& take);
};

Relay::Relay(Context& in, const HostParts& of, int root)
    : context(in),
      parts(of),
      first(in.layout.host_of(root)),
      at((in.layout.host - first + in.layout.hosts) % in.layout.hosts),
      end(radix_end(at, in.layout.hosts)),
      most(std::min(kSlice, kMostSlab / static_cast<std::size_t>(in.layout.hosts))) {
  const Layout& layout = in.layout;
  for (int position = 1; position < layout.hosts; ++position) {
    slabs = std::max(slabs, (parts.length[host_at(position)] + most - 1) / most);
  }
  const auto rank_at = [&](int position) {
    return position == 0 ? root : layout.leader(static_cast<int>(host_at(position)));
  };
  const Neighbours found = radix_tree(at, layout.hosts);
  if (found.parent >= 0) {
    up.push_back({rank_at(found.parent), at, end});
    for (const int child : radix_tree(found.parent, layout.hosts).children) {
      if (child == at) turn = beside.size();
      beside.push_back({rank_at(child), child, radix_end(child, layout.hosts)});
    }
  }
  for (const int child : found.children) down.push_back({rank_at(child), child, radix_end(child, layout.hosts)});
}

bool Relay::is_asked(std::size_t slab) const {
  if (turn < kSendersAtOnce) return false;
  std::vector<std::size_t> bytes(beside.size());
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (int position = beside[i].begin; position < beside[i].end; ++position) bytes[i] += slice_bytes(position, slab);
  }
  return bytes[turn] > 0 && turn >= senders_at_once(bytes);
}

template <class Put, class Take>
void Relay::run(std::vector<Stream>& sources, std::vector<Stream>& sinks, const Put& put, const Take& take) {
  const FrameGuard guard(context.world);
  const auto stream = [&](const Slab& slab, const Stream& of) {
    const std::size_t begin = slab.offsets[static_cast<std::size_t>(of.begin - at)];
    return std::pair(begin, slab.offsets[static_cast<std::size_t>(of.end - at)] - begin);
  };
  for (std::size_t number = 0; number <= slabs; ++number) {
    if (number < slabs) {
      Slab& slab = memory[number % 2];
      for (auto& frames : slab.out) wait_for_all(context, frames);
      slab.number = number;
      slab.offsets.assign(1, 0);
      for (int position = at; position < end; ++position) {
        slab.offsets.push_back(slab.offsets.back() + slice_bytes(position, number));
      }
      if (slab.bytes.size() < slab.offsets.back()) slab.bytes.resize(slab.offsets.back());
      slab.out.resize(sinks.size());
      slab.shares.clear();
      for (Stream& source : sources) {
        const auto [begin, bytes] = stream(slab, source);
        slab.shares.push_back({source.peer, slab.bytes.data() + begin, bytes, source.frames});
        source.frames += static_cast<std::int64_t>(pieces_of(bytes));
      }
      post_first_turns(context, slab.shares, slab.in);
      put(slab);
    }
    if (number == 0) continue;
    Slab& slab = memory[(number - 1) % 2];
    receive_in_turns(context, slab.shares, slab.in, static_cast<std::int64_t>(slab.number));
    take(slab);
    if (&sinks == &up && is_asked(slab.number))
      context.wait_for_turn(sinks.front().peer, static_cast<std::int64_t>(slab.number));
    for (std::size_t i = 0; i < sinks.size(); ++i) {
      const auto [begin, bytes] = stream(slab, sinks[i]);
      send_pieces(context, slab.out[i], sinks[i].peer, Step::Block, slab.bytes.data() + begin, bytes, sinks[i].frames);
      sinks[i].frames += static_cast<std::int64_t>(slab.out[i].size());
    }
  }
  for (Slab& slab : memory) {
    for (auto& frames : slab.out) wait_for_all(context, frames);
  }
}

}  // namespace

void gather_by_tree(Context& context, const HostParts& parts, int root, const std::byte* here, std::byte* all) {
  Relay relay(context, parts, root);
  const auto put = [&](Slab& slab) {
    relay.each_slice(slab, relay.at + 1, [&](std::byte* slice, std::size_t, std::size_t offset, std::size_t bytes) {
      std::memcpy(slice, here + offset, bytes);
    });
  };
  const auto take = [&](Slab& slab) {
    if (relay.at != 0) return;
    relay.each_slice(slab, relay.end, [&](std::byte* slice, std::size_t host, std::size_t offset, std::size_t bytes) {
      std::memcpy(all + parts.begin[host] + offset, slice, bytes);
    });
  };
  relay.run(relay.down, relay.up, put, take);
}

void scatter_by_tree(Context& context, const HostParts& parts, int root, const std::byte* all, std::byte* here) {
  Relay relay(context, parts, root);
  std::reverse(relay.down.begin(), relay.down.end());  // those with most below them first
  const auto put = [&](Slab& slab) {
    if (relay.at != 0) return;
    relay.each_slice(slab, relay.end, [&](std::byte* slice, std::size_t host, std::size_t offset, std::size_t bytes) {
      std::memcpy(slice, all + parts.begin[host] + offset, bytes);
    });
  };
  const auto take = [&](Slab& slab) {
    relay.each_slice(slab, relay.at + 1, [&](std::byte* slice, std::size_t, std::size_t offset, std::size_t bytes) {
      std::memcpy(here + offset, slice, bytes);
    });
  };
  relay.run(relay.up, relay.down, put, take);
}

}  // namespace cohort::comm::hosts
