// Who serves which server's rows: for each the process that does (its primary), the one that has a copy (its backup),
// and an epoch that counts the changes. The job's store has one such map, changed by compare-and-set alone: so of two
// processes that would both go on, one does. Values and pure functions; any thread.
#pragma once

#include "base/records.h"
#include "ps/protocol.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cohort::ps {

/// A process: which server's it is, and which of those that have had this number.
struct Holder {
  std::uint32_t server = 0;
  std::uint64_t life = 0;  ///< 0: nobody
  bool operator==(const Holder&) const = default;
};
template <class M, class A>
void visit_fields(M& m, A& a, const Holder*) {
  a(codec::below(m.server, kMostServers, "a server beyond 1024"), m.life);
}

struct Member {
  std::uint64_t life = 0;  ///< 0: has not come yet
  std::string endpoint;
  std::string host;  ///< to be compared
};
template <class M, class A>
void visit_fields(M& m, A& a, const Member*) {
  a(m.life, codec::longest(m.endpoint, 300), codec::longest(m.host, 1024));
}

struct Serving {
  std::uint64_t epoch = 0;
  Holder primary;
  Holder backup;
};
template <class M, class A>
void visit_fields(M& m, A& a, const Serving*) {
  a(m.epoch, m.primary, m.backup);
}

struct ServerMap {
  std::uint64_t version = 0;  ///< counts all changes
  std::uint32_t replicas = 0;
  std::vector<Member> members;
  std::vector<Serving> rows;  ///< by server; empty: not all have come yet

  bool formed() const noexcept { return !rows.empty(); }
  /// Whether the process is the latest of its number.
  bool lives(const Holder& holder) const noexcept;
  const std::string& endpoint_of(const Holder& holder) const noexcept { return members[holder.server].endpoint; }
};
template <class M, class A>
void visit_fields(M& m, A& a, const ServerMap*) {
  a(m.version, codec::below(m.replicas, 2, "more than one replica"), codec::most(m.members, kMostServers, 1024),
    codec::most(m.rows, kMostServers));
  a.demand(m.rows.empty() || m.rows.size() == m.members.size(), "a map of other servers");
}

/// What a change found: Made, it is in the map now; Already, it was; Refused, the map says something else.
enum class Outcome : std::uint8_t { Made, Already, Refused };

/// A process comes. When the last one does, the map is formed. Rows of which neither holder is there any more become
/// its own, empty: it comes in the place of one of them.
Outcome enter(ServerMap& map, std::uint32_t servers, std::uint32_t number, const Member& member,
              std::uint32_t replicas);
/// The backup takes the place of the primary.
Outcome promote(ServerMap& map, std::uint32_t rows, const Holder& backup);
/// The primary goes on without a backup.
Outcome drop(ServerMap& map, std::uint32_t rows, const Holder& primary, const Holder& backup);
/// A process that has a copy becomes the backup.
Outcome add(ServerMap& map, std::uint32_t rows, const Holder& primary, const Holder& backup);
/// Who was the backup in this epoch has no copy any more. If the primary is gone too, the rows begin anew in its place.
Outcome resign(ServerMap& map, std::uint32_t rows, const Holder& backup, std::uint64_t epoch);

/// How many others come before this server when rows need a backup: those on other hosts than the primary first, then
/// by number from it on. nullopt: it is the primary.
std::optional<std::uint32_t> turn_of(const ServerMap& map, std::uint32_t rows, std::uint32_t server);

}  // namespace cohort::ps
