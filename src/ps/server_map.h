// The processes that serve each server's rows: the primary, the backup with a copy, and an epoch that counts the
// changes. The job's store has one such map, changed by compare-and-set alone: so of two processes that would both go
// on, one does. Values and pure functions; any thread.
// Placement of keys: key -> mix64 -> one of 4,096 virtual shards -> its owner by a map with a version; likewise the
// pieces of a dense variable. Values and pure functions; any thread.
// Addresses at which servers listen, and the secret to reach them. Any thread.
#pragma once

#include "base/records.h"
#include "base/result.h"
#include "net/address.h"
#include "net/rpc.h"
#include "net/store.h"
#include "ps/protocol.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace cohort::ps {

/// A process: its server's number, and which of the processes with this number it is.
struct Holder {
  std::uint32_t server = 0;
  std::uint64_t life = 0;  ///< 0: nobody
  bool operator==(const Holder&) const = default;
};
void visit_fields(auto& m, auto& a, const Holder*) {
  a(codec::below(m.server, kMostServers, "a server beyond 1024"), m.life);
}

struct Member {
  std::uint64_t life = 0;  ///< 0: has not come yet
  std::string endpoint;
  std::string host;  ///< to be compared
};
void visit_fields(auto& m, auto& a, const Member*) {
  a(m.life, codec::longest(m.endpoint, 300), codec::longest(m.host, 1024));
}

struct Serving {
  std::uint64_t epoch = 0;
  Holder primary;
  Holder backup;
};
void visit_fields(auto& m, auto& a, const Serving*) { a(m.epoch, m.primary, m.backup); }

struct ServerMap {
  std::uint64_t version = 0;  ///< counts all changes
  std::uint32_t replicas = 0;
  std::vector<Member> members;
  std::vector<Serving> rows;  ///< by server; empty: not all have come yet

  bool formed() const noexcept { return !rows.empty(); }
  /// Returns whether the process is the latest of its number.
  bool lives(const Holder& holder) const noexcept;
  const std::string& endpoint_of(const Holder& holder) const noexcept { return members[holder.server].endpoint; }
};
void visit_fields(auto& m, auto& a, const ServerMap*) {
  a(m.version, codec::below(m.replicas, 2, "more than one replica"), codec::most(m.members, kMostServers, 1024),
    codec::most(m.rows, kMostServers));
  a.demand(m.rows.empty() || m.rows.size() == m.members.size(), "a map of other servers");
}

/// Outcome of a change. Made: it is in the map now; Already: it was there before; Refused: the map says something else.
enum class Outcome : std::uint8_t { Made, Already, Refused };

/// A process joins. When the last one has, the map is formed. Rows of which neither holder is left become its own,
/// empty: it takes the place of one of them.
Outcome enter(ServerMap& map, std::uint32_t servers, std::uint32_t number, const Member& member,
              std::uint32_t replicas);
/// The backup takes the place of the primary.
Outcome promote(ServerMap& map, std::uint32_t rows, const Holder& backup);
/// The primary goes on without a backup.
Outcome drop(ServerMap& map, std::uint32_t rows, const Holder& primary, const Holder& backup);
/// A process that has a copy becomes the backup.
Outcome add(ServerMap& map, std::uint32_t rows, const Holder& primary, const Holder& backup);
/// The process that was the backup in this epoch has no copy any more. If the primary is gone too, the rows begin anew
/// in its place.
Outcome resign(ServerMap& map, std::uint32_t rows, const Holder& backup, std::uint64_t epoch);

/// Number of servers that come before this one when rows need a backup: servers on other hosts than the primary first,
/// then by number from it on. nullopt: it is the primary.
std::optional<std::uint32_t> turn_of(const ServerMap& map, std::uint32_t rows, std::uint32_t server);

inline constexpr std::uint32_t kShards = 4096;

/// A bijection that spreads neighbouring keys over all 64 bits (Steele, Lea, Flood 2014).
constexpr std::uint64_t mix64(std::uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}
/// By the highest bits: the lowest find the row in its server's index.
constexpr std::uint32_t shard_of(std::uint64_t key) noexcept { return static_cast<std::uint32_t>(mix64(key) >> 52); }

/// Every client and server of a job has the same one: a request that comes with another version is refused.
class Placement {
 public:
  /// Shards in `servers` runs of equal length, to within one: version 1.
  static Placement even(std::uint32_t servers);

  std::uint64_t version() const noexcept { return version_; }
  std::uint32_t servers() const noexcept { return servers_; }
  std::uint32_t server_of(std::uint64_t key) const noexcept { return owners_[shard_of(key)]; }
  /// For a dense variable of this many elements the keys are pieces of `dim` floats: runs of equal length, to within
  /// one, by "div". No elements: a sparse table.
  std::uint32_t server_of_row(std::uint64_t key, std::int64_t elements, std::int64_t dim) const noexcept;

 private:
  std::uint64_t version_ = 0;
  std::uint32_t servers_ = 0;
  std::vector<std::uint16_t> owners_;
};

inline constexpr const char* kPurpose = "parameter server";

/// Address at which a server without a given endpoint listens: where the other processes of its job reach this host,
/// one of COHORT_NETWORK's addresses if that is set; outside a job, on this host alone. The system chooses the port.
Result<std::string> own_endpoint();
/// "HOST:PORT" or "@NAME".
Result<net::Endpoint> parse_endpoint(const std::string& text);
/// Returns how to reach the server: with the secret of the file, or the job's, but for Unix names. Without one: a
/// loopback address by a Unix name made from its port; elsewhere if the network is trusted.
Result<net::RpcPlace> place_of(const std::string& endpoint, const std::string& secret_file);

/// A server's place in the map of its job's store: enters it, looks at it again and again, and changes it by
/// compare-and-set. Has a thread, from construction to destruction, which tells of each map that is new. Its methods
/// may be called from any thread.
class Membership {
 public:
  struct Options {
    std::uint32_t number = 0;
    std::uint32_t servers = 1;
    std::uint32_t replicas = 0;
    std::string endpoint;
  };
  using OnMap = std::function<void(const ServerMap&)>;
  using Edit = std::function<Outcome(ServerMap&)>;

  /// Connects to the job's store and enters the map. Throws Unavailable where there is none, Mismatch.
  explicit Membership(Options options);
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  /// From now on there is a thread, and `on_map` is called there. Once.
  void start(OnMap on_map);
  const Holder& self() const noexcept { return self_; }
  /// The newest that is known.
  ServerMap map() const;
  /// Until the store has said that the change has been made, by this call or before, or that it is refused. Timeout,
  /// with the reason: it is not known.
  Result<Outcome> change(const Edit& edit, net::Deadline deadline);
  /// Does it on the thread, one after the other.
  void later(std::function<void()> task);

 private:
  void run();
  void look();
  void found(const ServerMap& map);

  const Options options_;
  OnMap on_map_;
  const std::string key_;
  Holder self_;
  Member member_;

  std::mutex store_mutex_;  // which store it is
  std::shared_ptr<store::Store> store_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::deque<std::function<void()>> tasks_;
  ServerMap map_;
  std::thread thread_;
};

}  // namespace cohort::ps
