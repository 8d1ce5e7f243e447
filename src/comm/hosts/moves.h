// Parts of the operations between hosts that only move data: frames of one size, the location of all ranks' parts, and
// the phases beyond kMostFlat hosts (moves_by_steps.cpp). For the thread that runs operations; owns nothing.
#pragma once

#include "comm/hosts/context.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace cohort::comm::hosts {

// Moves data between hosts in pieces of one size, so that a piece can be forwarded while the next one arrives. Frames
// are the caller's local variables, declared before a FrameGuard.

constexpr std::size_t kPiece = std::size_t{256} << 10;

inline std::size_t pieces_of(std::size_t bytes, std::size_t piece_size = kPiece) noexcept {
  return (bytes + piece_size - 1) / piece_size;
}
inline std::size_t piece_bytes(std::size_t bytes, std::size_t piece, std::size_t piece_size = kPiece) noexcept {
  return std::min(piece_size, bytes - piece * piece_size);
}

/// Frames are numbered from `first` on.
inline void send_pieces(Context& context, std::vector<transport::Outgoing>& frames, int peer, Step step,
                        const std::byte* data, std::size_t bytes, std::int64_t first = 0) {
  frames = std::vector<transport::Outgoing>(pieces_of(bytes));
  for (std::size_t piece = 0; piece < frames.size(); ++piece) {
    context.send(frames[piece], peer, tag(step, first + static_cast<std::int64_t>(piece)), data + piece * kPiece,
                 piece_bytes(bytes, piece));
  }
}

inline void receive_pieces(Context& context, std::vector<transport::Incoming>& frames, int peer, Step step,
                           std::byte* to, std::size_t bytes, std::int64_t first = 0) {
  frames = std::vector<transport::Incoming>(pieces_of(bytes));
  for (std::size_t piece = 0; piece < frames.size(); ++piece) {
    context.receive(frames[piece], peer, tag(step, first + static_cast<std::int64_t>(piece)), to + piece * kPiece,
                    piece_bytes(bytes, piece));
  }
}

template <class Frame>
void wait_for_all(Context& context, std::vector<Frame>& frames) {
  for (Frame& frame : frames) context.wait_for(frame);
}

// Many ranks that send to one at once overflow the queue of its port in a switch; what is dropped at the end of a burst
// is sent again only after a time-out of 200 ms. So they take turns: the first ones send without being asked, each of
// the others once the receiver has all data of an earlier one.

constexpr std::size_t kSendersAtOnce = 4;
constexpr std::size_t kBytesAtOnce = std::size_t{256} << 10;  // together, more senders may send at once

/// Number of senders that are not asked. `bytes` is by sender, in the order of their turns.
inline std::size_t senders_at_once(const std::vector<std::size_t>& bytes) noexcept {
  std::size_t senders = 0;
  for (std::size_t sum = 0; senders < bytes.size(); ++senders) {
    sum += bytes[senders];
    if (senders >= kSendersAtOnce && sum > kBytesAtOnce) break;
  }
  return senders;
}

/// Data that a rank sends to this one.
struct Share {
  int peer = -1;
  std::byte* to = nullptr;
  std::size_t bytes = 0;
  std::int64_t first = 0;  ///< number of its first frame
};

/// Posts the frames of those that are not asked, `in` by share. The shares are in the order of turns.
void post_first_turns(Context& context, const std::vector<Share>& shares,
                      std::vector<std::vector<transport::Incoming>>& in);
/// Then waits for all shares, and asks the other senders, which use the same `number` in `Context::wait_for_turn`.
/// Frames of a rank that has not been asked are not posted: it does not owe them if an operation ends late.
void receive_in_turns(Context& context, const std::vector<Share>& shares,
                      std::vector<std::vector<transport::Incoming>>& in, std::int64_t number);

/// Location of all ranks' parts, in bytes, in two orders: by rank, and by host, with the parts of a host's ranks
/// together. Both orders are the same if ranks are numbered by host.
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
  /// Counts of this host's ranks, for an operation among them.
  std::shared_ptr<const Counts> here(const Layout& layout) const {
    Counts counts;
    for (const int rank : layout.here()) {
      counts.input.push_back(static_cast<std::int64_t>(bytes[static_cast<std::size_t>(rank)]));
    }
    return std::make_shared<const Counts>(std::move(counts));
  }
  /// Copies parts from the order by host to the order by rank. The two addresses are equal if the orders are.
  void unpack(const Layout& layout, const std::byte* by_host, std::byte* by_rank) const {
    if (by_host == by_rank) return;
    each(layout, [&](std::size_t rank, std::size_t host, std::size_t size) {
      std::memcpy(by_rank + rank, by_host + host, size);
    });
  }
  /// Calls `copy` for each part, with its offset by rank and its offset by host.
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

// Phases beyond kMostFlat hosts, on the ranks that move data between hosts: the root, and the other hosts' leaders.

/// Exchanges the hosts' parts, which are ordered by host in `all`. Called on all ranks; each gets all parts.
void exchange_in_steps(Context& context, const HostParts& parts, std::byte* all);
/// Brings the hosts' parts to the root, into `all` in order of hosts. Elsewhere `here` is this host's part.
void gather_by_tree(Context& context, const HostParts& parts, int root, const std::byte* here, std::byte* all);
/// Brings the hosts' parts from the root, where `all` has them in order of hosts, to `here` on the other leaders.
void scatter_by_tree(Context& context, const HostParts& parts, int root, const std::byte* all, std::byte* here);

}  // namespace cohort::comm::hosts
