#include "ps/server_map.h"

#include <algorithm>

namespace cohort::ps {

bool ServerMap::lives(const Holder& holder) const noexcept {
  return holder.life != 0 && members[holder.server].life == holder.life;
}

Outcome enter(ServerMap& map, std::uint32_t servers, std::uint32_t number, const Member& member,
              std::uint32_t replicas) {
  if (map.members.empty()) map.members.resize(servers);
  if (map.members.size() != servers || number >= servers) return Outcome::Refused;
  if (map.members[number].life == member.life) return Outcome::Already;
  map.members[number] = member;
  if (!map.formed()) {
    const auto all =
        std::all_of(map.members.begin(), map.members.end(), [](const Member& one) { return one.life != 0; });
    if (!all) return Outcome::Made;
    map.replicas = servers < 2 ? 0 : replicas;
    for (std::uint32_t i = 0; i < servers; ++i) map.rows.push_back({1, {i, map.members[i].life}, {}});
    return Outcome::Made;
  }
  for (Serving& rows : map.rows) {
    if (map.lives(rows.primary) || map.lives(rows.backup)) continue;
    if (rows.primary.server == number || rows.backup.server == number)
      rows = {rows.epoch + 1, {number, member.life}, {}};
  }
  return Outcome::Made;
}

Outcome promote(ServerMap& map, std::uint32_t rows, const Holder& backup) {
  Serving& serving = map.rows[rows];
  if (serving.primary == backup) return Outcome::Already;
  if (serving.backup != backup) return Outcome::Refused;
  serving = {serving.epoch + 1, backup, {}};
  return Outcome::Made;
}

Outcome drop(ServerMap& map, std::uint32_t rows, const Holder& primary, const Holder& backup) {
  Serving& serving = map.rows[rows];
  if (serving.primary != primary || (serving.backup.life != 0 && serving.backup != backup)) return Outcome::Refused;
  // Another epoch also if there is none: an earlier change that makes it the backup may still be on its way.
  serving = {serving.epoch + 1, primary, {}};
  return Outcome::Made;
}

Outcome add(ServerMap& map, std::uint32_t rows, const Holder& primary, const Holder& backup) {
  Serving& serving = map.rows[rows];
  if (serving.primary != primary || !map.lives(backup) || backup.server == primary.server) return Outcome::Refused;
  if (serving.backup == backup) return Outcome::Already;
  if (serving.backup.life != 0) return Outcome::Refused;
  serving = {serving.epoch + 1, primary, backup};
  return Outcome::Made;
}

Outcome resign(ServerMap& map, std::uint32_t rows, const Holder& backup, std::uint64_t epoch) {
  Serving& serving = map.rows[rows];
  if (serving.backup != backup || serving.epoch != epoch) return Outcome::Already;
  const std::uint32_t server = serving.primary.server;
  serving = {serving.epoch + 1, {server, map.members[server].life}, {}};
  return Outcome::Made;
}

std::optional<std::uint32_t> turn_of(const ServerMap& map, std::uint32_t rows, std::uint32_t server) {
  const Holder& primary = map.rows[rows].primary;
  if (server == primary.server) return std::nullopt;
  const auto count = static_cast<std::uint32_t>(map.members.size());
  const auto key = [&](std::uint32_t one) {
    return std::pair(map.members[one].host == map.members[primary.server].host, (one + count - primary.server) % count);
  };
  std::uint32_t before = 0;
  for (std::uint32_t one = 0; one < count; ++one) {
    if (one != primary.server && key(one) < key(server)) ++before;
  }
  return before;
}

}  // namespace cohort::ps
