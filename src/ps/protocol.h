// Messages between clients and servers of a parameter server: records with bounds (base/records.h), followed by keys
// and rows as they lie in memory. `pack` and `unpack` put the two together. Pure; any thread.
#pragma once

#include "base/records.h"

#include <cohort/ps_options.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::ps {

namespace optim {
void visit_fields(auto& m, auto& a, const Sgd*) { a(m.lr, m.momentum, m.dampening, m.weight_decay, m.nesterov); }
void visit_fields(auto& m, auto& a, const Adagrad*) {
  a(m.lr, m.lr_decay, m.weight_decay, m.initial_accumulator_value, m.eps);
}
void visit_fields(auto& m, auto& a, const RowAdagrad*) { a(m.lr, m.initial_accumulator_value, m.eps); }
void visit_fields(auto& m, auto& a, const Adam*) { a(m.lr, m.beta1, m.beta2, m.eps, m.weight_decay); }
void visit_fields(auto& m, auto& a, const AdamW*) { a(m.lr, m.beta1, m.beta2, m.eps, m.weight_decay); }
void visit_fields(auto& m, auto& a, const Ftrl*) { a(m.lr, m.beta, m.l1, m.l2); }
}  // namespace optim

void visit_fields(auto& m, auto& a, const Initializer*) {
  a(codec::below(m.kind, 3, "an initializer of an unknown kind"), m.a, m.b);
}
void visit_fields(auto& m, auto& a, const Consistency*) {
  // One number, whose meaning depends on the mode, as in messages and snapshots from before backup workers.
  std::int64_t number = m.mode == Mode::Sync ? m.backup_workers : m.staleness;
  a(codec::below(m.mode, 3, "an unknown consistency"), number);
  if constexpr (!std::is_const_v<std::remove_reference_t<decltype(m)>>)
    (m.mode == Mode::Sync ? m.backup_workers : m.staleness) = number;
}
void visit_fields(auto& m, auto& a, const Eviction*) {
  std::int64_t age = m.age.count();
  a(age, m.rows, codec::below(m.victim, 2, "an unknown way to evict"));
  if constexpr (!std::is_const_v<std::remove_reference_t<decltype(m)>>) m.age = std::chrono::seconds(age);
}
void visit_fields(auto& m, auto& a, const TableOptions*) {
  a(m.dim, m.initializer, m.optimizer, m.admission, m.eviction, m.seed, m.consistency);
}

inline constexpr std::uint64_t kPlacement = 1;  ///< version of the placement map
inline constexpr std::size_t kLongestMessage = std::size_t{16} << 20;
inline constexpr std::size_t kMostKeys = std::size_t{1} << 20;  ///< of a message
inline constexpr std::size_t kMostServers = 1024;
inline constexpr std::uint32_t kMostWorkers = 65536;

enum class Method : std::uint8_t {
  Hello = 1,
  Pull,
  Stats,
  Ping,
  Snapshot,
  Barrier,
  // Between servers.
  Settle,
  Locate,  ///< of workers too
  Follow,
  Fetch,
  // Changes of the state: each has the number of its order.
  Start,
  Open,
  Push,
  Assign,
  Erase,
  Commit,
  Restore,
  Leave,
  Refused,  ///< in the journal alone: something that was refused when it came
  Joined,   ///< likewise: a worker that was let in
  Lost,     ///< likewise: a worker that is taken for lost
  Adopt,    ///< likewise: rows of a snapshot
  Piece,    ///< likewise: of the image of a state, from which a new one begins
  Verify,   ///< likewise: what some rows have to be by then
  // With backup workers, in place of Commit.
  Await,     ///< of the first server
  Propose,   ///< a change, likewise
  Conclude,  ///< a change
};
/// True for calls of workers and servers; other methods stand in journals alone.
constexpr bool is_call(Method method) noexcept {
  return (method >= Method::Hello && method <= Method::Leave) ||
         (method >= Method::Await && method <= Method::Conclude);
}
/// Has the number of its order.
constexpr bool is_change(Method method) noexcept {
  return (method >= Method::Start && method <= Method::Leave) || method == Method::Propose ||
         method == Method::Conclude;
}

/// The first call of a connection. Without an incarnation: only what is known is asked.
struct Hello {
  std::uint32_t worker = 0;
  std::uint32_t workers = 1;
  std::uint64_t incarnation = 0;
  std::uint64_t nonce = 0;  ///< tells two processes apart that say they are the same worker
  std::uint32_t server = 0;
  std::uint64_t placement = 0;       ///< version of the map
  std::uint64_t epoch = 0;           ///< the latest of this server's rows that the worker has heard of
  std::vector<std::string> servers;  ///< all of them, as the client reaches them
  std::string host;                  ///< of the worker, for messages
};
void visit_fields(auto& m, auto& a, const Hello*) {
  a(codec::below(m.worker, kMostWorkers, "a worker beyond 65536"), m.workers, m.incarnation, m.nonce,
    codec::below(m.server, kMostServers, "a server beyond 1024"), m.placement, m.epoch,
    codec::most(m.servers, kMostServers, 300), codec::longest(m.host, 300));
  a.demand(m.workers >= 1 && m.workers <= kMostWorkers && m.worker < m.workers, "a worker that is not one of them");
  a.demand(m.server < m.servers.size(), "a server that is not one of them");
}

struct Welcome {
  std::uint64_t incarnation = 0;  ///< the latest that this server knows of the worker
  std::uint64_t mark = 0;         ///< of this incarnation: the last change that has been made
  std::int64_t clock = 0;         ///< at which a new incarnation has to begin at least
  std::uint64_t barrier = 0;      ///< the latest to which any worker has come
  std::uint64_t epoch = 0;        ///< of the server's rows; 0: nobody takes its place if it dies
};
void visit_fields(auto& m, auto& a, const Welcome*) { a(m.incarnation, m.mark, m.clock, m.barrier, m.epoch); }

/// Position of a change in the order of the worker's changes on this server.
struct Order {
  std::uint64_t sequence = 0;      ///< from 1, without gaps
  std::uint64_t acknowledged = 0;  ///< up to here the worker has had the answers
};
void visit_fields(auto& m, auto& a, const Order*) {
  a(m.sequence, m.acknowledged);
  a.demand(m.sequence > m.acknowledged, "a change that has been acknowledged before it came");
}

struct Start {
  Order order;
  std::int64_t clock = 0;
};
void visit_fields(auto& m, auto& a, const Start*) {
  a(m.order, m.clock);
  a.demand(m.clock >= 0 && m.clock < (std::int64_t{1} << 62), "a clock that nobody reaches");
}

struct Open {
  Order order;
  std::string name;
  TableOptions options;
  std::int64_t elements = 0;  ///< of a dense variable; 0: a sparse table
};
void visit_fields(auto& m, auto& a, const Open*) {
  a(m.order, codec::longest(m.name, 512), m.options, m.elements);
  a.demand(m.elements >= 0, "a variable of fewer than no elements");
}

/// A push, an assignment or keys to be erased; keys and rows follow the record.
struct Change {
  Order order;
  std::uint32_t table = 0;
  std::uint32_t count = 0;
  std::optional<double> lr = {};
};
void visit_fields(auto& m, auto& a, const Change*) {
  a(m.order, m.table, m.count, m.lr);
  a.demand(m.count <= kMostKeys, "more keys than a message may have");
  a.demand(!m.lr || (*m.lr >= 0 && std::isfinite(*m.lr)), "a learning rate that is none");
}

/// The end of the worker's clock: `clock` is the one that ends. With Method::Propose: unless it comes too late.
struct Commit {
  Order order;
  std::int64_t clock = 0;
};
void visit_fields(auto& m, auto& a, const Commit*) { a(m.order, m.clock); }

/// The workers whose pushes count; with backup workers, as the first server has decided once enough had ended the
/// clock.
struct Quorum {
  std::int64_t clocks = 0;                  ///< that have ended
  std::vector<std::uint32_t> workers = {};  ///< pushes of these count in the last clock; ascending; empty: all
};
void visit_fields(auto& m, auto& a, const Quorum*) {
  a(m.clocks, codec::most(m.workers, kMostWorkers));
  a.demand(m.clocks >= 0 && m.clocks < (std::int64_t{1} << 62) && (m.workers.empty() || m.clocks > 0),
           "a clock that has not ended");
  a.demand(std::adjacent_find(m.workers.begin(), m.workers.end(), std::greater_equal<>()) == m.workers.end(),
           "workers that do not ascend");
}

/// Is answered when the clock has ended.
struct Await {
  std::int64_t clock = 0;  ///< below 0: at once
  std::uint32_t wait_ms = 0;
};
void visit_fields(auto& m, auto& a, const Await*) { a(m.clock, m.wait_ms); }
/// Its answer.
struct Concluded {
  Quorum quorum;
  std::int64_t clock = 0;  ///< at which the worker goes on
  bool late = false;       ///< whether its latest pushes have been dropped
};
void visit_fields(auto& m, auto& a, const Concluded*) { a(m.quorum, m.clock, m.late); }

/// Sent by a worker to tell a server the first server's decision, before anything else of the clock at which the worker
/// goes on.
struct Conclude {
  Order order;
  std::int64_t clock = 0;  ///< at which it goes on
  Quorum quorum;
};
void visit_fields(auto& m, auto& a, const Conclude*) {
  a(m.order, m.clock, m.quorum);
  a.demand(m.clock >= 0 && m.clock <= m.quorum.clocks, "a clock beyond those that have ended");
  a.demand(m.quorum.workers.empty() == (m.quorum.clocks == 0), "an ended clock in which nobody counts");
}

/// Rows of a snapshot that are the server's; the worker's clock does not change.
struct Restore {
  Order order;
  std::string folder;  ///< a checkpoint, as the server sees it
};
void visit_fields(auto& m, auto& a, const Restore*) { a(m.order, m.folder); }

/// Rows and counters of a table, as they lie in a snapshot; they follow the record.
struct Adopt {
  std::string name;
  TableOptions options;
  std::int64_t elements = 0;
  std::uint64_t rows = 0;
  std::uint64_t seen = 0;
};
void visit_fields(auto& m, auto& a, const Adopt*) {
  a(codec::longest(m.name, 512), m.options, m.elements, m.rows, m.seen);
  a.demand(!m.name.empty() && m.elements >= 0, "a table without a name");
}

struct Leave {
  Order order;
};
void visit_fields(auto& m, auto& a, const Leave*) { a(m.order); }

/// Keys follow the record.
struct Pull {
  std::uint32_t table = 0;
  std::uint32_t count = 0;
  std::int64_t clock = 0;     ///< the worker's
  std::uint32_t wait_ms = 0;  ///< how long the answer may have to wait for other workers
};
void visit_fields(auto& m, auto& a, const Pull*) {
  a(m.table, m.count, m.clock, m.wait_ms);
  a.demand(m.count <= kMostKeys, "more keys than a message may have");
}

struct Barrier {
  std::uint64_t number = 0;
  std::uint32_t wait_ms = 0;
};
void visit_fields(auto& m, auto& a, const Barrier*) { a(m.number, m.wait_ms); }

struct Settle {
  std::uint32_t worker = 0;
  std::uint64_t incarnation = 0;
  std::uint32_t server = 0;  ///< the one asked: a process may serve several
};
void visit_fields(auto& m, auto& a, const Settle*) {
  a(m.worker, m.incarnation, codec::below(m.server, kMostServers, "a server beyond 1024"));
}
/// State that a server holds of a worker from which it accepts nothing any more.
struct Settled {
  std::int64_t committed = 0;
};
void visit_fields(auto& m, auto& a, const Settled*) { a(m.committed); }

/// The server's part, as a file in a folder that it sees, once all clocks before `clock` have been made.
struct Snapshot {
  std::string folder;
  std::string file;
  std::int64_t clock = 0;
  std::uint32_t wait_ms = 0;
};
void visit_fields(auto& m, auto& a, const Snapshot*) { a(m.folder, codec::longest(m.file, 200), m.clock, m.wait_ms); }
/// Its answer.
struct Written {
  std::string file;  ///< another name, where the server is not the first that serves the rows
  std::uint64_t bytes = 0;
  std::string sha256;
  std::string crc32;
};
void visit_fields(auto& m, auto& a, const Written*) {
  a(codec::longest(m.file, 300), m.bytes, m.sha256, codec::longest(m.crc32, std::size_t{8} << 20));
}

/// Asks which process serves a server's rows now.
struct Locate {
  std::uint32_t server = 0;
};
void visit_fields(auto& m, auto& a, const Locate*) { a(codec::below(m.server, kMostServers, "a server beyond 1024")); }
struct Located {
  std::uint64_t epoch = 0;
  std::string endpoint;
};
void visit_fields(auto& m, auto& a, const Located*) { a(m.epoch, codec::longest(m.endpoint, 300)); }

/// A process is about to have a copy of a server's state, from now on until its connection ends.
struct Follow {
  std::uint32_t server = 0;
  std::uint32_t by = 0;    ///< the number of the process that follows
  std::uint64_t life = 0;  ///< which process of that number
  std::uint64_t copy = 0;  ///< which of its copies: a later one has a higher number
};
void visit_fields(auto& m, auto& a, const Follow*) {
  a(codec::below(m.server, kMostServers, "a server beyond 1024"),
    codec::below(m.by, kMostServers, "a server beyond 1024"), m.life, m.copy);
}
/// Records (journal.h) from this one on, those before have come: first the pieces of an image, then commands as
/// they are made. Is answered within kHeartbeat.
struct Fetch {
  std::uint32_t server = 0;
  std::uint64_t life = 0;
  std::uint64_t copy = 0;  ///< as Follow said
  std::uint64_t position = 0;
  std::uint64_t room = 0;                  ///< bytes that the copy may still grow by
  std::uint64_t most = ~std::uint64_t{0};  ///< bytes of records to be sent now, about; 0: none
};
void visit_fields(auto& m, auto& a, const Fetch*) {
  a(codec::below(m.server, kMostServers, "a server beyond 1024"), m.life, m.copy, m.position, m.room, m.most);
}
struct Fetched {
  std::uint64_t count = 0;
};
void visit_fields(auto& m, auto& a, const Fetched*) { a(m.count); }

/// A digest of some rows of a table, by their places.
struct Verify {
  std::uint32_t table = 0;
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  std::uint64_t digest = 0;
};
void visit_fields(auto& m, auto& a, const Verify*) { a(m.table, m.first, m.count, m.digest); }

/// The answer to Open.
struct Opened {
  std::uint32_t table = 0;
};
void visit_fields(auto& m, auto& a, const Opened*) { a(m.table); }

struct Stats {
  std::uint32_t table = 0;
};
void visit_fields(auto& m, auto& a, const Stats*) { a(m.table); }

/// The answer to Stats; what a table has gone through.
struct TableCounts {
  std::uint64_t rows = 0;
  std::uint64_t bytes = 0;
  std::uint64_t created = 0;  ///< since the table was made; rows that came back count again
  std::uint64_t evicted = 0;  ///< by age or by number
  std::uint64_t dropped = 0;  ///< gradients of keys that were not admitted
  std::uint64_t steps = 0;    ///< of rows
};
void visit_fields(auto& m, auto& a, const TableCounts*) {
  a(m.rows, m.bytes, m.created, m.evicted, m.dropped, m.steps);
}

/// The beginning of every answer; the requested record follows.
struct Answer {
  std::optional<Error> error = {};
  std::int64_t clock = 0;     ///< of what was read: every push of earlier clocks is in it
  std::uint64_t version = 0;  ///< of the table on this server: steps so far
};
void visit_fields(auto& m, auto& a, const Answer*) { a(m.error, m.clock, m.version); }

/// Returns the order of a change: every change begins with it.
inline Result<Order> order_of(std::string_view body) {
  codec::Reader in(body);
  const auto text = in.text(std::size_t{1} << 20);
  if (!text) return tl::unexpected(text.error());
  return codec::decode<Order>(text->substr(0, 2 * sizeof(std::uint64_t)));
}

inline void append_bytes(std::string& to, const void* bytes, std::size_t size) {
  to.append(static_cast<const char*>(bytes), size);
}

/// A record and what follows it.
template <class T>
struct Packed {
  T record;
  std::string_view payload;
};
/// `packed`: a string whose memory may be used again.
template <class T>
std::string pack(const T& record, std::size_t room = 0, std::string packed = {}) {
  const std::string bytes = codec::encode(record);
  packed.clear();
  packed.reserve(sizeof(std::uint32_t) + bytes.size() + room);
  const auto size = static_cast<std::uint32_t>(bytes.size());
  packed.append(reinterpret_cast<const char*>(&size), sizeof size).append(bytes);
  return packed;
}
/// Corrupt if it is not that. The payload lies in `bytes`.
template <class T>
Result<Packed<T>> unpack(std::string_view bytes) {
  codec::Reader in(bytes);
  const auto text = in.text(std::size_t{1} << 20);
  if (!text) return tl::unexpected(text.error());
  auto record = codec::decode<T>(*text);
  if (!record) return tl::unexpected(record.error());
  return Packed<T>{*std::move(record), in.rest()};
}

}  // namespace cohort::ps
