#include "ps/placement.h"

#include "base/result.h"

namespace cohort::ps {

Placement Placement::even(std::uint32_t servers) {
  if (servers < 1 || servers > kShards) {
    raise(ErrorCode::InvalidArgument, "a placement over {} parameter servers -- 1 to {} are possible", servers,
          kShards);
  }
  Placement placement;
  placement.version_ = 1;
  placement.servers_ = servers;
  placement.owners_.resize(kShards);
  for (std::uint32_t shard = 0; shard < kShards; ++shard)
    placement.owners_[shard] = static_cast<std::uint16_t>(std::uint64_t{shard} * servers / kShards);
  return placement;
}

std::uint32_t Placement::server_of_piece(std::uint64_t piece, std::uint64_t pieces) const noexcept {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint32_t>(static_cast<Wide>(piece) * servers_ / pieces);
}

}  // namespace cohort::ps
