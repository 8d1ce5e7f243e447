#include "ps/placement.h"

#include "base/result.h"

#include <algorithm>

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

std::uint32_t Placement::server_of_row(std::uint64_t key, std::int64_t elements, std::int64_t dim) const noexcept {
  if (elements == 0) return server_of(key);
  __extension__ using Wide = unsigned __int128;
  const auto pieces = static_cast<std::uint64_t>(elements / dim + (elements % dim != 0 ? 1 : 0));
  return static_cast<std::uint32_t>(static_cast<Wide>(std::min(key, pieces - 1)) * servers_ / pieces);
}

}  // namespace cohort::ps
