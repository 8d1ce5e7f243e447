#include "ext/mpi/packet.h"

#include <cstring>

namespace cohort::mpi {

Result<PacketHead> read_head(const std::byte* bytes, std::size_t count, int size) {
  PacketHead head;
  if (count < sizeof head || count > kMostPacket) return fail(ErrorCode::Corrupt, "a packet of {} bytes", count);
  std::memcpy(&head, bytes, sizeof head);
  if (head.mark != PacketHead().mark) return fail(ErrorCode::Corrupt, "a packet that is not of this version");
  if (head.from < 0 || head.from >= size) return fail(ErrorCode::Corrupt, "a packet of rank {} of {}", head.from, size);
  const std::size_t payload = count - sizeof head;
  const auto demand = [&](bool good) -> Result<PacketHead> {
    if (!good) return fail(ErrorCode::Corrupt, "a packet of kind {} with wrong lengths", static_cast<int>(head.kind));
    return head;
  };
  switch (head.kind) {
    case PacketKind::Whole: return demand(payload <= kMostWhole && head.total == payload && head.offset == 0);
    case PacketKind::Offer: return demand(payload == 0 && head.total > kMostWhole && head.offset == 0);
    case PacketKind::Grant: return demand(payload == 0 && head.total == 0 && head.offset == 0);
    case PacketKind::Piece:
      return demand(payload > 0 && head.offset <= head.total && payload <= head.total - head.offset);
  }
  return fail(ErrorCode::Corrupt, "a packet of an unknown kind");
}

}  // namespace cohort::mpi
