// What moves between hosts in pieces of one size, so that a piece can be handed on while the next one comes. Frames
// lie in the caller's memory, before a FrameGuard. For the thread that runs operations.
#pragma once

#include "comm/hosts/context.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cohort::comm::hosts {

constexpr std::size_t kPiece = std::size_t{256} << 10;

inline std::size_t pieces_of(std::size_t bytes) noexcept { return (bytes + kPiece - 1) / kPiece; }
inline std::size_t piece_bytes(std::size_t bytes, std::size_t piece) noexcept {
  return std::min(kPiece, bytes - piece * kPiece);
}

inline void send_pieces(Context& context, std::vector<transport::Outgoing>& frames, int peer, Step step,
                        const std::byte* data, std::size_t bytes) {
  frames = std::vector<transport::Outgoing>(pieces_of(bytes));
  for (std::size_t piece = 0; piece < frames.size(); ++piece) {
    context.send(frames[piece], peer, tag(step, static_cast<std::int64_t>(piece)), data + piece * kPiece,
                 piece_bytes(bytes, piece));
  }
}

inline void receive_pieces(Context& context, std::vector<transport::Incoming>& frames, int peer, Step step,
                           std::byte* to, std::size_t bytes) {
  frames = std::vector<transport::Incoming>(pieces_of(bytes));
  for (std::size_t piece = 0; piece < frames.size(); ++piece) {
    context.receive(frames[piece], peer, tag(step, static_cast<std::int64_t>(piece)), to + piece * kPiece,
                    piece_bytes(bytes, piece));
  }
}

template <class Frame>
void wait_for_all(Context& context, std::vector<Frame>& frames) {
  for (Frame& frame : frames) context.wait_for(frame);
}

}  // namespace cohort::comm::hosts
