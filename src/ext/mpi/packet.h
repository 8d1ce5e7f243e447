// What goes over MPI between two ranks of a world: packets, each with a head that says whose it is and which it is of
// those from this sender. Plain layouts and pure functions; heads come from other processes and are checked in full.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <cstdint>

namespace cohort::mpi {

enum class PacketKind : std::uint32_t {
  Whole = 1,  ///< a frame
  Offer,      ///< a frame of `total` bytes, to be asked for by its number
  Grant,      ///< the frame `id` has a place now
  Piece,      ///< bytes of the frame `id`, from `offset` on
};

struct PacketHead {
  std::uint32_t mark = 0x434D5031;  ///< "CMP1"
  PacketKind kind = PacketKind::Whole;
  std::uint64_t world = 0;   ///< the world's number
  std::uint64_t number = 0;  ///< of this sender's packets to this receiver in this world, from 0
  std::int32_t from = 0;     ///< rank in that world
  std::uint32_t tag = 0;
  std::uint64_t operation = 0;
  std::uint64_t id = 0;
  std::uint64_t offset = 0;
  std::uint64_t total = 0;  ///< of the frame
};
static_assert(sizeof(PacketHead) == 64);

inline constexpr std::size_t kMostPayload = std::size_t{128} << 10;
inline constexpr std::size_t kMostPacket = sizeof(PacketHead) + kMostPayload;
inline constexpr std::size_t kMostWhole = std::size_t{64} << 10;  ///< longer frames wait until they have a place

/// The head of a packet of `size` ranks; Corrupt if it is none.
Result<PacketHead> read_head(const std::byte* bytes, std::size_t count, int size);

}  // namespace cohort::mpi
