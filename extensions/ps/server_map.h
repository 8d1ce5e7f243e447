// ServerMap: the processes that serve each server's rows (the primary, the backup with a copy), and an epoch that
// counts the changes. The job's store has one, changed only by compare-and-set, so of two processes that both want to
// serve the rows only one does. Values and pure functions; any thread.
// Placement: the server of each key (by mix64 one of 4,096 virtual shards, whose owners a versioned map has) and of
// each piece of a dense variable. Values and pure functions; any thread.
// own_endpoint, place_of: addresses at which servers listen, and the secret to reach them. Any thread.
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

/// A process: its server's number, and which of the processes that have had this number.
struct Holder {
  std::uint32_t server = 0;
  std::uint64_t life = 0;  ///< 0: no process
  bool operator==(const Holder&) const = default;
};
void visit_fields(auto& m, auto& a, const Holder*) {
  a(codec::below(m.server, kMostServers, "a server beyond 1024"), m.life);
}

struct Member {
  std::uint64_t life = 0;  ///< 0: has not joined yet
  std::string endpoint;
  std::string host;  ///< the host's identity; compared only
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
  std::vector<Serving> rows;  ///< by server; empty until all servers have joined

  bool formed() const noexcept { return !rows.empty(); }
  /// Returns whether the process is the latest one with its server's number.
  bool lives(const Holder& holder) const noexcept;
  const std::string& endpoint_of(const Holder& holder) const noexcept { return members[holder.server].endpoint; }
};
void visit_fields(auto& m, auto& a, const ServerMap*) {
  a(m.version, codec::below(m.replicas, 2, "more than one replica"), codec::most(m.members, kMostServers, 1024),
    codec::most(m.rows, kMostServers));
  a.demand(m.rows.empty() || m.rows.size() == m.members.size(), "a map of other servers");
}

/// Outcome of a change. Made: the map has it now; Already: the map had it before; Refused: it contradicts the map.
enum class Outcome : std::uint8_t { Made, Already, Refused };

/// Adds a process. The map is formed when the last server has joined. If neither holder of some rows is left, the
/// latest process of the primary's server becomes their primary, with the rows of its journal, if any.
Outcome enter(ServerMap& map, std::uint32_t servers, std::uint32_t number, const Member& member,
              std::uint32_t replicas);
// Changes by a process whose server has another process by now are refused.
/// The backup takes the place of the primary.
Outcome promote(ServerMap& map, std::uint32_t rows, const Holder& backup);
/// The primary continues without a backup.
Outcome drop(ServerMap& map, std::uint32_t rows, const Holder& primary, const Holder& backup);
/// A process that has a copy becomes the backup.
Outcome add(ServerMap& map, std::uint32_t rows, const Holder& primary, const Holder& backup);
/// The process that was the backup in this epoch has no copy any more. If the primary is gone too, the latest process
/// of its server becomes the primary, as in `enter`.
Outcome resign(ServerMap& map, std::uint32_t rows, const Holder& backup, std::uint64_t epoch);

/// Returns how many servers come before this one when rows need a backup: first those on other hosts than the primary's
/// server, then by number, from that server's on. nullopt if this is the primary's server.
std::optional<std::uint32_t> turn_of(const ServerMap& map, std::uint32_t rows, std::uint32_t server);

inline constexpr std::uint32_t kShards = 4096;

/// A bijection that spreads neighbouring keys over all 64 bits (Steele, Lea, Flood 2014).
constexpr std::uint64_t mix64(std::uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}
/// Returns the shard, from the highest bits: the lowest ones find the row in its server's index.
constexpr std::uint32_t shard_of(std::uint64_t key) noexcept { return static_cast<std::uint32_t>(mix64(key) >> 52); }

/// Every client and server of a job has the same placement: requests with another version are refused.
class Placement {
 public:
  /// Version 1: divides the shards into `servers` runs whose lengths differ by one at most.
  static Placement even(std::uint32_t servers);

  std::uint64_t version() const noexcept { return version_; }
  std::uint32_t servers() const noexcept { return servers_; }
  std::uint32_t server_of(std::uint64_t key) const noexcept { return owners_[shard_of(key)]; }
  /// Returns the server of a row. For a dense variable of this many elements, keys are pieces of `dim` floats, in runs
  /// whose lengths differ by one at most. 0 elements: a sparse table.
  std::uint32_t server_of_row(std::uint64_t key, std::int64_t elements, std::int64_t dim) const noexcept;

 private:
  std::uint64_t version_ = 0;
  std::uint32_t servers_ = 0;
  std::vector<std::uint16_t> owners_;
};

inline constexpr const char* kPurpose = "parameter server";

/// Address at which a server without a given endpoint listens, that is the one at which other processes of its job
/// reach this host (one of COHORT_NETWORK's addresses if that is set); outside a job, loopback. The system chooses the
/// port.
Result<std::string> own_endpoint();
/// Parses "HOST:PORT" or "@NAME".
Result<net::Endpoint> parse_endpoint(const std::string& text);
/// Returns how to reach the server: with the secret of the file, or the job's; Unix names need none. Without a secret,
/// a loopback address is reached by a Unix name made from its port; other addresses only if the network is trusted.
Result<net::RpcPlace> place_of(const std::string& endpoint, const std::string& secret_file);

/// A server's membership in the map of its job's store: enters the map, polls it, and changes it by compare-and-set.
/// Its thread, which `start` starts, reports each new map. Any thread may call its methods.
class Membership {
 public:
  struct Options {
    std::uint32_t number = 0;
    std::uint32_t servers = 1;
    std::uint32_t replicas = 0;
    bool journals = false;
    std::string endpoint;
  };
  using OnMap = std::function<void(const ServerMap&)>;
  using Edit = std::function<Outcome(ServerMap&)>;

  /// Connects to the job's store and enters the map. Throws Unavailable if there is no store, or Mismatch.
  explicit Membership(Options options);
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  /// Starts the thread, which calls `on_map` for each new map. May be called once.
  void start(OnMap on_map);
  const Holder& self() const noexcept { return self_; }
  /// The newest known map.
  ServerMap map() const;
  /// Blocks until the change has been made, by this call or before, or is refused. Fails with Timeout, and the reason,
  /// if the outcome is not known.
  Result<Outcome> change(const Edit& edit, net::Deadline deadline);
  /// Runs the tasks on the thread, one after the other.
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

  std::mutex store_mutex_;  // guards `store_`
  std::shared_ptr<store::Store> store_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::deque<std::function<void()>> tasks_;
  ServerMap map_;
  std::thread thread_;
};

/// Throws Mismatch if the job's first server had other options. Servers without replicas, which enter no map, call it,
/// too.
void require_same_options(store::Store& store, const Membership::Options& options);

}  // namespace cohort::ps
