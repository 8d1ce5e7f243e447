// Messages between clients and servers of a parameter server: a record with bounds (base/records.h), followed by keys
// and rows as they lie in memory. `pack` joins the two, `unpack` separates them. Pure; any thread.
#pragma once

#include "base/records.h"

#include <cohort/ps_options.h>

#include <cmath>
#include <cstdint>
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
  a(codec::below(m.mode, 3, "an unknown consistency"), m.staleness);
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
inline constexpr std::size_t kMostKeys = std::size_t{1} << 20;  ///< keys of one message
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
  Locate,  ///< workers send it too
  Follow,
  Fetch,
  // Changes of the state: each carries its number in the worker's order.
  Start,
  Open,
  Push,
  Assign,
  Erase,
  Commit,
  Restore,
  Leave,
  Refused,  ///< a command, not a call: a change was refused
  Joined,   ///< a command: a worker was let in
  Lost,     ///< a command: a worker is taken for lost
  Adopt,    ///< a command: takes over rows of a snapshot
  Piece,    ///< a command: a piece of a state's image, with which a new state begins
  Verify,   ///< a command: the digest that some rows must have now
  Await,    ///< a call, sent to the first server only
};
/// True for calls of workers and servers; the other methods are commands only (journals, copies).
constexpr bool is_call(Method method) noexcept {
  return (method >= Method::Hello && method <= Method::Leave) || method == Method::Await;
}
/// True for changes, which carry their number in the worker's order.
constexpr bool is_change(Method method) noexcept { return method >= Method::Start && method <= Method::Leave; }

/// The first call of a connection. With incarnation 0 it only asks what the server knows of the worker.
struct Hello {
  std::uint32_t worker = 0;
  std::uint32_t workers = 1;
  std::uint64_t incarnation = 0;
  std::uint64_t nonce = 0;  ///< distinguishes two processes that claim to be the same worker
  std::uint32_t server = 0;
  std::uint64_t placement = 0;       ///< version of the map
  std::uint64_t epoch = 0;           ///< latest epoch of this server's rows that the worker knows
  std::vector<std::string> servers;  ///< addresses of all servers, as the client reaches them
  std::string host;                  ///< the worker's, for messages
};
void visit_fields(auto& m, auto& a, const Hello*) {
  a(codec::below(m.worker, kMostWorkers, "a worker beyond 65536"), m.workers, m.incarnation, m.nonce,
    codec::below(m.server, kMostServers, "a server beyond 1024"), m.placement, m.epoch,
    codec::most(m.servers, kMostServers, 300), codec::longest(m.host, 300));
  a.demand(m.workers >= 1 && m.workers <= kMostWorkers && m.worker < m.workers, "a worker that is not one of them");
  a.demand(m.server < m.servers.size(), "a server that is not one of them");
}

struct Welcome {
  std::uint64_t incarnation = 0;  ///< the worker's latest incarnation that this server knows
  std::uint64_t mark = 0;         ///< number of this incarnation's last change that has been made
  std::int64_t clock = 0;         ///< the lowest clock at which a new incarnation may begin
  std::uint64_t barrier = 0;      ///< the latest that any worker has reached
  std::uint64_t epoch = 0;        ///< epoch of the server's rows; 0: no process takes its place if it dies
};
void visit_fields(auto& m, auto& a, const Welcome*) { a(m.incarnation, m.mark, m.clock, m.barrier, m.epoch); }

/// Position of a change in the order of the worker's changes on this server.
struct Order {
  std::uint64_t sequence = 0;      ///< number of the change, from 1 without gaps
  std::uint64_t acknowledged = 0;  ///< the worker has received the answers up to this number
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
  std::int64_t elements = 0;  ///< size of a dense variable; 0 for a sparse table
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

/// Ends the worker's clock number `clock`.
struct Commit {
  Order order;
  std::int64_t clock = 0;
};
void visit_fields(auto& m, auto& a, const Commit*) { a(m.order, m.clock); }

/// Asks the first server how many clocks all workers have ended. Answered when this clock is one of them.
struct Await {
  std::int64_t clock = 0;
  std::uint32_t wait_ms = 0;
};
void visit_fields(auto& m, auto& a, const Await*) { a(m.clock, m.wait_ms); }
/// The answer to Await.
struct Ended {
  std::int64_t clocks = 0;
};
void visit_fields(auto& m, auto& a, const Ended*) { a(m.clocks); }

/// Restores the server's rows from a snapshot. The worker's clock does not change.
struct Restore {
  Order order;
  std::string folder;  ///< a checkpoint's path, as the server sees it
};
void visit_fields(auto& m, auto& a, const Restore*) { a(m.order, m.folder); }

/// Takes over rows and counters of a table. They follow the record, in the form that they have in a snapshot.
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
  std::int64_t clock = 0;     ///< the worker's clock
  std::uint32_t wait_ms = 0;  ///< longest time that the answer may wait for other workers
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
  std::uint32_t server = 0;  ///< the server that is asked: one process may serve the rows of several
};
void visit_fields(auto& m, auto& a, const Settle*) {
  a(m.worker, m.incarnation, codec::below(m.server, kMostServers, "a server beyond 1024"));
}
/// The answer to Settle: clocks ended by an incarnation from which the server accepts nothing any more.
struct Settled {
  std::int64_t committed = 0;
};
void visit_fields(auto& m, auto& a, const Settled*) { a(m.committed); }

/// Writes the server's part of a snapshot to a file in a folder that the server sees, when all clocks before `clock`
/// have been made.
struct Snapshot {
  std::string folder;
  std::string file;
  std::int64_t clock = 0;
  std::uint32_t wait_ms = 0;
};
void visit_fields(auto& m, auto& a, const Snapshot*) { a(m.folder, codec::longest(m.file, 200), m.clock, m.wait_ms); }
/// The answer to Snapshot.
struct Written {
  std::string file;  ///< differs from the requested name if this is not the first process that serves the rows
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

/// Asks for a copy of a server's state. The sender has the copy, or gets it, until its connection ends.
struct Follow {
  std::uint32_t server = 0;
  std::uint32_t by = 0;    ///< the number of the process that follows
  std::uint64_t life = 0;  ///< which of the processes that have had this number
  std::uint64_t copy = 0;  ///< number of this copy: a later copy has a higher one
};
void visit_fields(auto& m, auto& a, const Follow*) {
  a(codec::below(m.server, kMostServers, "a server beyond 1024"),
    codec::below(m.by, kMostServers, "a server beyond 1024"), m.life, m.copy);
}
/// Asks for records (journal.h) from `position` on, and confirms those before it: first the pieces of an image, then
/// commands as they are made. Answered within kHeartbeat.
struct Fetch {
  std::uint32_t server = 0;
  std::uint64_t life = 0;
  std::uint64_t copy = 0;  ///< the same as in Follow
  std::uint64_t position = 0;
  std::uint64_t room = 0;                  ///< bytes that the copy may still grow by
  std::uint64_t most = ~std::uint64_t{0};  ///< approximate limit on bytes of records in the answer; 0: none
};
void visit_fields(auto& m, auto& a, const Fetch*) {
  a(codec::below(m.server, kMostServers, "a server beyond 1024"), m.life, m.copy, m.position, m.room, m.most);
}
struct Fetched {
  std::uint64_t count = 0;
};
void visit_fields(auto& m, auto& a, const Fetched*) { a(m.count); }

/// Digest of `count` rows of a table, from place `first` on.
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

/// The answer to Stats: counts of what has happened to a table.
struct TableCounts {
  std::uint64_t rows = 0;
  std::uint64_t bytes = 0;
  std::uint64_t created = 0;  ///< rows created since the table was made; a row created again counts again
  std::uint64_t evicted = 0;  ///< rows evicted by age or by number
  std::uint64_t dropped = 0;  ///< gradients of keys that were not admitted
  std::uint64_t steps = 0;    ///< steps of single rows
};
void visit_fields(auto& m, auto& a, const TableCounts*) {
  a(m.rows, m.bytes, m.created, m.evicted, m.dropped, m.steps);
}

/// The beginning of every answer; the requested record follows.
struct Answer {
  std::optional<Error> error = {};
  std::int64_t clock = 0;     ///< clock of the rows that were read: they include every push of earlier clocks
  std::uint64_t version = 0;  ///< number of the table's steps on this server so far
};
void visit_fields(auto& m, auto& a, const Answer*) { a(m.error, m.clock, m.version); }

/// Returns the order of a change, with which each change's record begins.
inline Result<Order> order_of(std::string_view body) {
  codec::Reader in(body);
  const auto text = in.text(std::size_t{1} << 20);
  if (!text) return tl::unexpected(text.error());
  return codec::decode<Order>(text->substr(0, 2 * sizeof(std::uint64_t)));
}

inline void append_bytes(std::string& to, const void* bytes, std::size_t size) {
  to.append(static_cast<const char*>(bytes), size);
}

/// A record and the bytes that follow it.
template <class T>
struct Packed {
  T record;
  std::string_view payload;
};
/// Returns the record as bytes. `room`: bytes that will be appended. `packed`: a string whose memory is reused.
template <class T>
std::string pack(const T& record, std::size_t room = 0, std::string packed = {}) {
  const std::string bytes = codec::encode(record);
  packed.clear();
  packed.reserve(sizeof(std::uint32_t) + bytes.size() + room);
  const auto size = static_cast<std::uint32_t>(bytes.size());
  packed.append(reinterpret_cast<const char*>(&size), sizeof size).append(bytes);
  return packed;
}
/// Separates a record from its payload, which stays in `bytes`. Fails with Corrupt if `bytes` do not begin with a T.
template <class T>
Result<Packed<T>> unpack(std::string_view bytes) {
  codec::Reader in(bytes);
  const auto text = in.text(std::size_t{1} << 20);
  if (!text) return tl::unexpected(text.error());
  auto record = codec::decode<T>(*text);
  if (!record) return tl::unexpected(record.error());
  return Packed<T>{*std::move(record), in.rest()};
}

// Answers of servers.
inline std::string answer_of(const Error& error) { return pack(Answer{.error = error}); }
template <class T>
std::string answer_of(const T& record) {
  return pack(Answer{}).append(codec::encode(record));
}

}  // namespace cohort::ps
