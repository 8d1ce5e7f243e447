#include "base/log.h"
#include "cluster/host_identity.h"
#include "formats/checkpoint_folder.h"
#include "net/rpc.h"
#include "ps/journal.h"
#include "ps/place.h"
#include "ps/placement.h"
#include "ps/settlement.h"
#include "ps/snapshot.h"
#include "ps/state.h"
#include "sys/shared_memory.h"

#include <cohort/ps.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <list>
#include <map>
#include <utility>

namespace cohort::ps {
namespace {

using net::RpcServer;
using std::chrono::milliseconds;

std::uint32_t seconds_now() { return static_cast<std::uint32_t>(::time(nullptr)); }

std::string answer_of(const Error& error) { return pack(Answer{.error = error}); }
template <class T>
std::string answer_of(const T& record) {
  return pack(Answer{}).append(codec::encode(record));
}

}  // namespace

class Server::Impl final : RpcServer::Service {
 public:
  explicit Impl(const ServerOptions& options)
      : patience_(options.patience),
        limit_(options.memory != 0 ? options.memory : sys::available_memory() / 10 * 9),
        secret_file_(options.secret_file),
        journal_(remember(options.journal)),
        server_(served_at(options), *this),
        endpoint_(net::to_string(server_.endpoint())) {}

  const std::string& endpoint() const noexcept { return endpoint_; }
  bool workers_gone() const noexcept { return workers_gone_; }

 private:
  using ClientPtr = RpcServer::ClientPtr;

  struct Session {
    std::uint32_t worker = 0;
    std::uint64_t incarnation = 0;
  };
  /// A call that waits for other workers.
  struct Parked {
    ClientPtr client;
    std::uint64_t id = 0;
    Method method = Method::Pull;
    std::string body;
    std::shared_ptr<void> limit;
  };
  /// A worker that comes again before it is settled what its earlier process has done.
  struct Waiting {
    ClientPtr client;
    std::uint64_t id = 0;
    Hello hello;
  };

  static RpcServer::Options served_at(const ServerOptions& options) {
    const net::RpcPlace place = value_or_throw(place_of(options.endpoint, options.secret_file));
    return {.name = "parameter server",
            .endpoint = place.endpoints.front(),
            .secret = place.secret,
            .secure = place.secure,
            .shared_memory = options.shared_memory,
            .host = cluster::host_identity().id};
  }

  std::optional<Journal> remember(const std::string& path) {
    if (path.empty()) return std::nullopt;
    return value_or_throw(Journal::open(path, [this](const Command& command) -> Result<void> {
      if (auto done = state_.replay(command); !done) return done;
      if (command.method == Method::Joined) known_ = unpack<Hello>(command.body)->record;
      return {};
    }));
  }

  // ---- calls ----

  Result<void> on_call(const ClientPtr& client, const RpcServer::Call& call) override {
    if (call.method < static_cast<int>(Method::Hello) || call.method > static_cast<int>(Method::Leave))
      return fail(ErrorCode::Corrupt, "a call of unknown kind {}", call.method);
    const auto method = static_cast<Method>(call.method);
    if (method == Method::Hello) return hello(client, call);
    if (method == Method::Settle) return settle(client, call);
    const auto session = sessions_.find(client);
    if (session == sessions_.end()) return fail(ErrorCode::Corrupt, "a call without a greeting");
    switch (method) {
      case Method::Pull: return pull(client, call);
      case Method::Barrier: return barrier(client, session->second, call);
      case Method::Snapshot: return snapshot(client, call);
      case Method::Stats: return stats(client, call);
      case Method::Ping: server_.answer(client, call.id, pack(Answer{})); return {};
      default: return change(client, session->second, call);
    }
  }

  Result<void> hello(const ClientPtr& client, const RpcServer::Call& call) {
    auto opened = unpack<Hello>(call.body);
    if (!opened) return tl::unexpected(opened.error());
    if (const auto may = agrees(opened->record); !may) {
      server_.answer(client, call.id, answer_of(may.error()));
      return {};
    }
    expect_again();
    const Hello& greeting = opened->record;
    if (greeting.incarnation == 0) {
      welcome(client, call.id, greeting);
      return {};
    }
    const bool known = state_.workers().count() > 0;
    const Worker* worker = known ? &state_.workers().at(greeting.worker) : nullptr;
    if (known && worker->incarnation == greeting.incarnation) {
      if (worker->fenced || worker->phase == Worker::Phase::Gone) {
        server_.answer(client, call.id,
                       answer_of(Error(ErrorCode::Aborted,
                                       fmt::format("worker {} was taken for lost -- connect anew", greeting.worker))));
        return {};
      }
      begin_session(client, greeting);
      welcome(client, call.id, greeting);
      return {};
    }
    if (known && (worker->phase == Worker::Phase::Live || worker->phase == Worker::Phase::Joined)) {
      waiting_.push_back({client, call.id, greeting});
      decide(greeting.worker, worker->incarnation);
      return {};
    }
    join(client, call.id, greeting);
    return {};
  }

  Result<void> agrees(const Hello& greeting) const {
    if (greeting.placement != kPlacement)
      return fail(ErrorCode::Mismatch, "worker {} has version {} of the placement, and the server {}", greeting.worker,
                  greeting.placement, kPlacement);
    if (known_ && (known_->server != greeting.server || known_->servers.size() != greeting.servers.size()))
      return fail(ErrorCode::Mismatch,
                  "worker {} on {} takes this for parameter server {} of {}; the first worker said {} of {} -- all "
                  "workers have to name the same servers in the same order",
                  greeting.worker, greeting.host, greeting.server, greeting.servers.size(), known_->server,
                  known_->servers.size());
    return state_.may_join(greeting);
  }

  void join(const ClientPtr& client, std::uint64_t id, const Hello& greeting) {
    known_ = greeting;
    if (const auto done = note(
            {.method = Method::Joined, .worker = greeting.worker, .incarnation = greeting.incarnation}, pack(greeting));
        !done) {
      server_.answer(client, id, answer_of(done.error()));
      return;
    }
    begin_session(client, greeting);
    welcome(client, id, greeting);
  }

  /// After the journal has been read: those that were there should come again.
  void expect_again() {
    if (std::exchange(met_, true)) return;
    for (std::uint32_t i = 0; i < state_.workers().count(); ++i) be_patient(i, state_.workers().at(i).incarnation);
  }

  void begin_session(const ClientPtr& client, const Hello& greeting) {
    for (auto at = sessions_.begin(); at != sessions_.end(); ++at) {
      if (at->second.worker != greeting.worker || at->first == client) continue;
      const ClientPtr before = at->first;
      sessions_.erase(at);
      server_.close(before);
      break;
    }
    sessions_[client] = {greeting.worker, greeting.incarnation};
    patience_timers_.erase(greeting.worker);
  }

  void welcome(const ClientPtr& client, std::uint64_t id, const Hello& greeting) {
    Welcome welcome;
    if (state_.workers().count() > 0) {
      const Worker& worker = state_.workers().at(greeting.worker);
      welcome.incarnation = std::max(worker.incarnation, worker.banned);
      welcome.mark = worker.mark;
      welcome.clock = worker.phase == Worker::Phase::Expected ? 0 : state_.workers().most();
      welcome.barrier = worker.phase == Worker::Phase::Expected ? 0 : state_.workers().latest_barrier();
    }
    server_.answer(client, id, answer_of(welcome));
  }

  Result<void> settle(const ClientPtr& client, const RpcServer::Call& call) {
    const auto opened = unpack<Settle>(call.body);
    if (!opened) return tl::unexpected(opened.error());
    if (opened->record.worker >= state_.workers().count()) {
      if (state_.workers().count() > 0) return fail(ErrorCode::Corrupt, "no worker {}", opened->record.worker);
      server_.answer(client, call.id,
                     answer_of(Error(ErrorCode::Unavailable, "this server does not know any worker yet")));
      return {};
    }
    if (const auto done = note({.method = Method::Settle, .worker = opened->record.worker}, std::string(call.body));
        !done) {
      server_.answer(client, call.id, answer_of(done.error()));
      return {};
    }
    server_.answer(client, call.id, answer_of(Settled{state_.ended(opened->record)}));
    const Worker& worker = state_.workers().at(opened->record.worker);
    if (worker.incarnation == opened->record.incarnation && worker.phase == Worker::Phase::Live)
      decide(opened->record.worker, worker.incarnation);
    return {};
  }

  Result<void> pull(const ClientPtr& client, const RpcServer::Call& call) {
    const auto opened = unpack<Pull>(call.body);
    if (!opened) return tl::unexpected(opened.error());
    const Pull& asked = opened->record;
    if (state_.table(asked.table) == nullptr) return fail(ErrorCode::Corrupt, "there is no table {}", asked.table);
    if (opened->payload.size() != asked.count * sizeof(std::uint64_t))
      return fail(ErrorCode::Corrupt, "{} keys in {} bytes", asked.count, opened->payload.size());
    if (asked.count * state_.table(asked.table)->dim() * sizeof(float) > kLongestMessage - 4096)
      return fail(ErrorCode::Corrupt, "{} rows are more than an answer may have", asked.count);
    if (state_.may_read(asked.table, asked.clock)) {
      answer_pull(client, call.id, *opened);
    } else {
      park(client, call, asked.wait_ms);
    }
    return {};
  }

  void answer_pull(const ClientPtr& client, std::uint64_t id, const Packed<Pull>& asked) {
    const SparseTable& table = *state_.table(asked.record.table);
    const std::size_t bytes = asked.record.count * table.dim() * sizeof(float);
    const std::string head =
        pack(Answer{.clock = state_.clock_of(asked.record.table), .version = table.counts().steps});
    server_.answer(client, id, head, bytes,
                   [&](char* rows) { table.read(asked.payload.data(), asked.record.count, rows, seconds_now()); });
  }

  Result<void> barrier(const ClientPtr& client, const Session& session, const RpcServer::Call& call) {
    const auto opened = unpack<Barrier>(call.body);
    if (!opened) return tl::unexpected(opened.error());
    if (const auto done = note({.method = Method::Barrier, .worker = session.worker}, std::string(call.body)); !done) {
      server_.answer(client, call.id, answer_of(done.error()));
      return {};
    }
    if (state_.workers().past_barrier(opened->record.number)) {
      server_.answer(client, call.id, pack(Answer{}));
    } else {
      park(client, call, opened->record.wait_ms);
    }
    return {};
  }

  Result<void> snapshot(const ClientPtr& client, const RpcServer::Call& call) {
    const auto opened = unpack<Snapshot>(call.body);
    if (!opened) return tl::unexpected(opened.error());
    if (!is_snapshot_file(opened->record.file) || opened->record.file.find('/') != std::string::npos)
      return fail(ErrorCode::Corrupt, "a snapshot in a file {}", opened->record.file);
    if (state_.settled() >= opened->record.clock) {
      answer_snapshot(client, call.id, opened->record);
    } else {
      park(client, call, opened->record.wait_ms);
    }
    return {};
  }

  void answer_snapshot(const ClientPtr& client, std::uint64_t id, const Snapshot& asked) {
    auto written = write_snapshot(state_, asked.folder, asked.file);
    if (!written) return server_.answer(client, id, answer_of(written.error()));
    server_.answer(client, id, answer_of(Written{written->bytes, written->sha256, written->crc32}));
  }

  /// The rows of a snapshot that are this server's, each part a change of its own: made again, it changes nothing.
  Result<void> restore(const std::string& folder) {
    const auto stored = formats::read_checkpoint(folder);
    if (!stored) return tl::unexpected(stored.error());
    const Placement placement = Placement::even(static_cast<std::uint32_t>(known_->servers.size()));
    SnapshotReader reader;
    reader.is_mine = [&](const Adopt& table, std::uint64_t key) {
      return placement.server_of_row(key, table.elements, table.options.dim) == known_->server;
    };
    reader.adopt = [&](const std::string& body) -> Result<void> {
      Command command{0, Method::Adopt, 0, 0, body};
      if (auto ok = state_.check_adopt(command); !ok) return ok;
      if (state_.bytes() + 2 * body.size() > limit_)
        return fail(ErrorCode::Unavailable, "no memory for the snapshot: {} of {} bytes are taken", state_.bytes(),
                    limit_);
      return note(command, {});
    };
    bool any = false;
    for (const auto& [name, digest] : stored->manifest.files) {
      if (!is_snapshot_file(name)) continue;
      any = true;
      const auto bytes = formats::read_checkpoint_file(*stored, name);
      if (!bytes) return tl::unexpected(bytes.error());
      if (auto done = read_snapshot(bytes->text(), name, reader); !done) return done;
    }
    if (!any) return fail(ErrorCode::Unavailable, "{} has no rows of parameter servers", folder);
    return {};
  }

  Result<void> stats(const ClientPtr& client, const RpcServer::Call& call) {
    const auto opened = unpack<Stats>(call.body);
    if (!opened) return tl::unexpected(opened.error());
    const SparseTable* table = state_.table(opened->record.table);
    if (table == nullptr) return fail(ErrorCode::Corrupt, "there is no table {}", opened->record.table);
    server_.answer(client, call.id, answer_of(table->counts()));
    return {};
  }

  Result<void> change(const ClientPtr& client, const Session& session, const RpcServer::Call& call) {
    const auto order = order_of(call.body);
    if (!order) return tl::unexpected(order.error());
    Command command{seconds_now(), static_cast<Method>(call.method), session.worker, session.incarnation, call.body};
    const auto verdict = state_.workers().judge({session.worker, session.incarnation, *order});
    if (!verdict) {
      server_.answer(client, call.id, answer_of(verdict.error()));
      return {};
    }
    state_.forget_refused(session.worker, order->acknowledged);
    if (*verdict == Workers::Verdict::New) {
      Result<void> done = state_.check(command, limit_);
      if (done && command.method == Method::Restore) done = restore(unpack<Restore>(command.body)->record.folder);
      if (!done && done.error().code() == ErrorCode::Corrupt && command.method != Method::Restore) return done;
      if (done) {
        done = note(command, {});
      } else {  // so that it is refused again when it is sent again
        done = note({.method = Method::Refused, .worker = session.worker, .incarnation = session.incarnation},
                    pack(*order).append(answer_of(done.error())));
      }
      if (!done) {
        server_.answer(client, call.id, answer_of(done.error()));
        return {};
      }
    }
    server_.answer(client, call.id, made(command, order->sequence));
    return {};
  }

  /// What a change that has been made, now or before, is answered with.
  std::string made(const Command& command, std::uint64_t sequence) {
    const auto& refused = state_.workers().at(command.worker).refused;
    if (const auto found = refused.find(sequence); found != refused.end()) return answer_of(found->second);
    if (command.method != Method::Open) return pack(Answer{});
    const auto open = unpack<Open>(command.body);
    const auto number = open ? state_.find(open->record.name) : std::nullopt;
    return answer_of(Opened{number.value_or(0)});
  }

  // ---- changes ----

  /// Every change that the state has comes this way: noted first, then made. An empty `body`: the command has one.
  Result<void> note(Command command, const std::string& body) {
    command.now = seconds_now();
    if (!body.empty()) command.body = body;
    if (broken_) return tl::unexpected(*broken_);
    if (journal_) {
      if (auto written = journal_->append(command); !written) {
        broken_ =
            Error(ErrorCode::Io, fmt::format("this server makes no changes any more: {}", written.error().what()));
        return tl::unexpected(*broken_);
      }
    }
    state_.run(command);
    if (command.method != Method::Push) wake();
    return {};
  }

  void park(const ClientPtr& client, const RpcServer::Call& call, std::uint32_t wait_ms) {
    const auto at = parked_.insert(
        parked_.end(), {client, call.id, static_cast<Method>(call.method), std::string(call.body), nullptr});
    at->limit = server_.after(milliseconds(wait_ms), [this, at] {
      const Parked late = std::move(*at);
      parked_.erase(at);
      server_.answer(late.client, late.id, answer_of(Error(ErrorCode::Timeout, why_late(late))));
    });
  }

  std::string why_late(const Parked& late) const {
    std::string why;
    if (late.method == Method::Barrier) {
      const auto number = unpack<Barrier>(late.body)->record.number;
      why = fmt::format("barrier {} waits for {}", number, state_.workers().not_at_barrier(number));
    } else if (late.method == Method::Snapshot) {
      const std::int64_t clock = unpack<Snapshot>(late.body)->record.clock;
      why = fmt::format("a snapshot at clock {} waits for {}", clock, state_.workers().behind(clock));
    } else {
      const Pull asked = unpack<Pull>(late.body)->record;
      why = fmt::format("table \"{}\" at clock {} waits for {}", state_.table(asked.table)->name(), asked.clock,
                        state_.awaited(asked.table, asked.clock));
    }
    for (const auto& settlement : settlements_) {
      if (const std::string trouble = settlement->trouble(); !trouble.empty())
        why += fmt::format("; worker {} is lost, and whether its last clock counts is not known: {}",
                           settlement->question().worker, trouble);
    }
    return why;
  }

  /// Answers what need not wait any more.
  void wake() {
    workers_gone_ = state_.workers().count() > 0 && !state_.workers().least();
    for (auto at = parked_.begin(); at != parked_.end();) {
      const auto here = at++;
      if (here->method == Method::Barrier) {
        if (!state_.workers().past_barrier(unpack<Barrier>(here->body)->record.number)) continue;
        server_.answer(here->client, here->id, pack(Answer{}));
      } else if (here->method == Method::Snapshot) {
        const auto asked = unpack<Snapshot>(here->body);
        if (state_.settled() < asked->record.clock) continue;
        answer_snapshot(here->client, here->id, asked->record);
      } else {
        const auto asked = *unpack<Pull>(here->body);
        if (!state_.may_read(asked.record.table, asked.record.clock)) continue;
        answer_pull(here->client, here->id, asked);
      }
      parked_.erase(here);
    }
  }

  // ---- workers that are lost ----

  void on_gone(const ClientPtr& client) override {
    parked_.remove_if([&](const Parked& one) { return one.client == client; });
    waiting_.remove_if([&](const Waiting& one) { return one.client == client; });
    const auto found = sessions_.find(client);
    if (found == sessions_.end()) return;
    const Session session = found->second;
    sessions_.erase(found);
    be_patient(session.worker, session.incarnation);
  }

  void be_patient(std::uint32_t number, std::uint64_t incarnation) {
    patience_timers_[number] = server_.after(patience_, [this, number, incarnation] {
      const Worker& worker = state_.workers().at(number);
      if (worker.incarnation != incarnation) return;
      if (worker.phase == Worker::Phase::Live || worker.phase == Worker::Phase::Joined) decide(number, incarnation);
    });
  }

  void decide(std::uint32_t number, std::uint64_t incarnation) {
    for (const auto& settlement : settlements_) {
      if (settlement->question().worker == number && settlement->question().incarnation == incarnation) return;
    }
    const Settle question{number, incarnation};
    if (!note({.method = Method::Settle, .worker = number}, pack(question))) return;
    std::vector<net::RpcPlace> others;
    for (std::size_t i = 0; i < known_->servers.size(); ++i) {
      if (i == known_->server) continue;
      auto place = place_of(known_->servers[i], secret_file_);
      if (!place) {
        log::error("ps", "parameter server {}: {}", i, place.error().what());
        return;
      }
      others.push_back(*std::move(place));
    }
    if (others.empty()) {
      lost(question, state_.ended(question));
      return;
    }
    settlements_.push_back(std::make_unique<Settlement>(question, state_.ended(question), std::move(others)));
    look_at_settlements();
  }

  void look_at_settlements() {
    for (auto at = settlements_.begin(); at != settlements_.end();) {
      const auto here = at++;
      const auto ended = (*here)->result();
      if (!ended) continue;
      const Settle question = (*here)->question();
      settlements_.erase(here);
      lost(question, *ended);
    }
    looking_ = settlements_.empty() ? nullptr : server_.after(milliseconds(10), [this] { look_at_settlements(); });
  }

  void lost(const Settle& question, std::int64_t ended) {
    log::warn("ps", "worker {} on {} is lost at clock {}; {}", question.worker,
              state_.workers().at(question.worker).host, ended,
              state_.has_staged(question.worker, ended) ? "its pushes after that are dropped" : "the others go on");
    (void)note({.method = Method::Lost, .worker = question.worker, .incarnation = question.incarnation},
               pack(Settled{ended}));
    for (const ClientPtr& client : clients_of(question.worker)) server_.close(client);
    std::list<Waiting> come;
    for (auto at = waiting_.begin(); at != waiting_.end();) {
      const auto here = at++;
      if (here->hello.worker == question.worker) come.splice(come.end(), waiting_, here);
    }
    for (const Waiting& one : come) {
      if (const auto may = agrees(one.hello); !may) {
        server_.answer(one.client, one.id, answer_of(may.error()));
      } else {
        join(one.client, one.id, one.hello);
      }
    }
  }

  std::vector<ClientPtr> clients_of(std::uint32_t worker) const {
    std::vector<ClientPtr> clients;
    for (const auto& [client, session] : sessions_) {
      if (session.worker == worker) clients.push_back(client);
    }
    return clients;
  }

  const milliseconds patience_;
  const std::size_t limit_;
  const std::string secret_file_;
  State state_;
  std::optional<Hello> known_;  // what the first, and the latest, worker said of the servers
  std::optional<Error> broken_;
  std::map<ClientPtr, Session> sessions_;
  std::list<Parked> parked_;
  std::list<Waiting> waiting_;
  std::map<std::uint32_t, std::shared_ptr<void>> patience_timers_;
  std::list<std::unique_ptr<Settlement>> settlements_;
  std::shared_ptr<void> looking_;
  std::atomic<bool> workers_gone_{false};
  bool met_ = false;
  std::optional<Journal> journal_;
  RpcServer server_;  // after all that its thread uses
  const std::string endpoint_;
};

Server::Server(const ServerOptions& options) : impl_(std::make_unique<Impl>(options)) {}
Server::~Server() = default;
const std::string& Server::endpoint() const noexcept { return impl_->endpoint(); }
bool Server::workers_gone() const { return impl_->workers_gone(); }

}  // namespace cohort::ps
