#include "ps/primary.h"

#include "base/log.h"
#include "ps/snapshot.h"

#include <algorithm>
#include <ctime>
#include <future>
#include <thread>
#include <utility>

namespace cohort::ps {

using std::chrono::milliseconds;

namespace {

constexpr std::size_t kMuchWork = std::size_t{8} << 20;  // floats that a change works through in some milliseconds
constexpr milliseconds kLooksForMemory(20);

std::uint32_t seconds_now() { return static_cast<std::uint32_t>(::time(nullptr)); }

}  // namespace

Primary::Primary(net::RpcServer& rpc, Options options, Journaled rows)
    : rpc_(rpc),
      options_(std::move(options)),
      kept_(std::make_shared<State>(std::move(rows.state))),
      state_(*kept_),
      backup_(rpc, std::move(rows.journal), options_.membership, options_.rows.value_or(0), options_.changed,
              [this] { return workers_gone(); }),
      snapshots_(rpc, options_.aside, backup_),
      epoch_(options_.epoch),
      self_(std::make_shared<Primary*>(this)) {}

Primary::~Primary() {
  *self_ = nullptr;
  std::vector<ClientPtr> clients;
  for (const auto& [client, session] : sessions_) clients.push_back(client);
  sessions_.clear();
  if (const ClientPtr other = backup_.release()) clients.push_back(other);
  for (const Late& late : std::exchange(late_, {})) clients.push_back(late.client);
  for (const Waiting& waiting : std::exchange(waiting_, {})) clients.push_back(waiting.client);
  for (const ClientPtr& client : clients) rpc_.close(client);
  // The end of the journal may have to wait for the disk.
  if (auto journal = backup_.take_journal())
    options_.aside([kept = std::make_shared<std::optional<Journal>>(std::move(journal))] { kept->reset(); });
}

// ---- calls ----

Result<void> Primary::on_call(const ClientPtr& client, const Call& call) {
  if (static_cast<Method>(call.method) == Method::Ping) {
    rpc_.answer(client, call.id, pack(Answer{}));
    return {};
  }
  return in_turn(client, call, [this, client](const Call& now) { return serve(client, now); });
}

Result<void> Primary::in_turn(const ClientPtr& client, const Call& call,
                              std::function<Result<void>(const Call&)> serve) {
  if (!must_wait() && late_.empty()) return serve(call);
  late_.push_back({client, call.method, call.id, std::string(call.body), std::move(serve)});
  late_bytes_ += call.body.size();
  return {};
}

void Primary::go_on() {
  while (!must_wait() && !late_.empty()) {
    const Late late = std::move(late_.front());
    late_.pop_front();
    late_bytes_ -= late.body.size();
    if (!late.serve({late.method, late.id, late.body})) rpc_.close(late.client);
  }
}

Result<void> Primary::serve(const ClientPtr& client, const Call& call) {
  const auto found = sessions_.find(client);
  if (found == sessions_.end()) return {};  // its worker has connected again
  const Session session = found->second;
  switch (static_cast<Method>(call.method)) {
    case Method::Pull: return pull(client, call);
    case Method::Barrier: return barrier(client, session, call);
    case Method::Await: return await(client, call);
    case Method::Snapshot: return snapshot(client, call);
    case Method::Stats: return stats(client, call);
    default: return change(client, session, call);
  }
}

Result<void> Primary::hello(const ClientPtr& client, const Call& call, const Hello& greeting) {
  return in_turn(client, call, [this, client, greeting](const Call& now) { return greet(client, now, greeting); });
}

Result<void> Primary::settle(const ClientPtr& client, const Call& call, const Settle& asked) {
  return in_turn(client, call, [this, client, asked](const Call& now) { return settle_now(client, now, asked); });
}

Result<void> Primary::greet(const ClientPtr& client, const Call& call, const Hello& greeting) {
  if (const auto may = agrees(greeting); !may) {
    answer(client, call.id, answer_of(may.error()));
    return {};
  }
  expect_again();
  if (greeting.incarnation == 0) {
    welcome(client, call.id, greeting);
    return {};
  }
  const bool known = state_.workers().count() > 0;
  const Worker* worker = known ? &state_.workers().at(greeting.worker) : nullptr;
  if (known && worker->incarnation == greeting.incarnation) {
    if (worker->fenced || worker->phase == Worker::Phase::Gone) {
      answer(client, call.id,
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

Result<void> Primary::agrees(const Hello& greeting) const {
  const auto& known = state_.introduced();
  if (greeting.placement != kPlacement)
    return fail(ErrorCode::Mismatch, "worker {} has version {} of the placement, and the server {}", greeting.worker,
                greeting.placement, kPlacement);
  if (known && (known->server != greeting.server || known->servers.size() != greeting.servers.size()))
    return fail(ErrorCode::Mismatch,
                "worker {} on {} takes this for parameter server {} of {}; the first worker said {} of {} -- all "
                "workers have to name the same servers in the same order",
                greeting.worker, greeting.host, greeting.server, greeting.servers.size(), known->server,
                known->servers.size());
  return state_.may_join(greeting);
}

void Primary::join(const ClientPtr& client, std::uint64_t id, const Hello& greeting) {
  if (const auto done = note({.method = Method::Joined, .worker = greeting.worker, .incarnation = greeting.incarnation},
                             pack(greeting));
      !done) {
    answer(client, id, answer_of(done.error()));
    return;
  }
  begin_session(client, greeting);
  welcome(client, id, greeting);
}

/// Called after the journal has been read: gives workers that were connected time to connect again.
void Primary::expect_again() {
  if (std::exchange(met_, true)) return;
  for (std::uint32_t i = 0; i < state_.workers().count(); ++i)
    be_patient(i, state_.workers().at(i).incarnation, options_.patience);
}

void Primary::begin_session(const ClientPtr& client, const Hello& greeting) {
  for (auto at = sessions_.begin(); at != sessions_.end(); ++at) {
    if (at->second.worker != greeting.worker || at->first == client) continue;
    const ClientPtr before = at->first;
    sessions_.erase(at);
    rpc_.close(before);
    break;
  }
  sessions_[client] = {greeting.worker, greeting.incarnation};
  patience_timers_.erase(greeting.worker);
}

void Primary::welcome(const ClientPtr& client, std::uint64_t id, const Hello& greeting) {
  Welcome welcome;
  if (state_.workers().count() > 0) {
    const Worker& worker = state_.workers().at(greeting.worker);
    welcome.incarnation = std::max(worker.incarnation, worker.banned);
    welcome.mark = worker.mark;
    welcome.clock = worker.phase == Worker::Phase::Expected ? 0 : state_.workers().most();
    welcome.barrier = worker.phase == Worker::Phase::Expected ? 0 : state_.workers().latest_barrier();
  }
  welcome.epoch = epoch_;
  answer(client, id, answer_of(welcome));
}

Result<void> Primary::settle_now(const ClientPtr& client, const Call& call, const Settle& asked) {
  if (asked.worker >= state_.workers().count()) {
    if (state_.workers().count() > 0) return fail(ErrorCode::Corrupt, "no worker {}", asked.worker);
    answer(client, call.id, answer_of(Error(ErrorCode::Unavailable, "this server does not know any worker yet")));
    return {};
  }
  if (const auto done = note({.method = Method::Settle, .worker = asked.worker}, std::string(call.body)); !done) {
    answer(client, call.id, answer_of(done.error()));
    return {};
  }
  answer(client, call.id, answer_of(Settled{state_.ended(asked)}));
  const Worker& worker = state_.workers().at(asked.worker);
  if (worker.incarnation == asked.incarnation && worker.phase == Worker::Phase::Live)
    decide(asked.worker, worker.incarnation);
  return {};
}

Result<void> Primary::pull(const ClientPtr& client, const Call& call) {
  const auto opened = unpack<Pull>(call.body);
  if (!opened) return tl::unexpected(opened.error());
  const Pull& asked = opened->record;
  if (asked.table >= state_.tables().count()) return fail(ErrorCode::Corrupt, "there is no table {}", asked.table);
  if (opened->payload.size() != asked.count * sizeof(std::uint64_t))
    return fail(ErrorCode::Corrupt, "{} keys in {} bytes", asked.count, opened->payload.size());
  if (asked.count * state_.tables().at(asked.table).dim() * sizeof(float) > kLongestMessage - 4096)
    return fail(ErrorCode::Corrupt, "{} rows are more than an answer may have", asked.count);
  if (state_.may_read(asked.table, asked.clock)) {
    answer_pull(client, call.id, *opened);
  } else {
    serve_or_park(client, call, asked.wait_ms);
  }
  return {};
}

void Primary::answer_pull(const ClientPtr& client, std::uint64_t id, const Packed<Pull>& asked) {
  const SparseTable& table = state_.tables().at(asked.record.table);
  const std::size_t bytes = asked.record.count * table.dim() * sizeof(float);
  const std::string head = pack(Answer{.clock = state_.clock_of(asked.record.table), .version = table.counts().steps});
  backup_.answer(client, id, head, bytes,
                 [&](char* rows) { table.read(asked.payload.data(), asked.record.count, rows, seconds_now()); });
}

Result<void> Primary::barrier(const ClientPtr& client, const Session& session, const Call& call) {
  const auto opened = unpack<Barrier>(call.body);
  if (!opened) return tl::unexpected(opened.error());
  if (const auto done = note({.method = Method::Barrier, .worker = session.worker}, std::string(call.body)); !done) {
    answer(client, call.id, answer_of(done.error()));
    return {};
  }
  serve_or_park(client, call, opened->record.wait_ms);
  return {};
}

Result<void> Primary::await(const ClientPtr& client, const Call& call) {
  const auto opened = unpack<Await>(call.body);
  if (!opened) return tl::unexpected(opened.error());
  serve_or_park(client, call, opened->record.wait_ms);
  return {};
}

Result<void> Primary::snapshot(const ClientPtr& client, const Call& call) {
  const auto opened = unpack<Snapshot>(call.body);
  if (!opened) return tl::unexpected(opened.error());
  if (!is_snapshot_file(opened->record.file))
    return fail(ErrorCode::Corrupt, "a snapshot in a file {}", opened->record.file);
  serve_or_park(client, call, opened->record.wait_ms);
  return {};
}

void Primary::answer_snapshot(const ClientPtr& client, std::uint64_t id, const Snapshot& asked) {
  // The name differs from an earlier primary's, since that one may still be writing its file.
  const std::string file = epoch_ > 1 ? fmt::format("ps-{}-{}", epoch_, asked.file.substr(3)) : asked.file;
  snapshots_.write(client, id, asked.folder, file, state_);
}

/// Restores this server's rows from a snapshot. Each part is a change of its own, which changes nothing if it is made
/// again. Calls wait until all parts have been made.
void Primary::restore(const ClientPtr& client, const Call& call, const Command& command) {
  restoring_ = true;
  const Hello& known = *state_.introduced();
  options_.aside([client, id = call.id, command = command, body = std::string(call.body), self = self_, &rpc = rpc_,
                  server = known.server,
                  placement = Placement::even(static_cast<std::uint32_t>(known.servers.size()))]() mutable {
    command.body = body;
    SnapshotReader reader;
    reader.is_mine = [&](const Adopt& table, std::uint64_t key) {
      return placement.server_of_row(key, table.elements, table.options.dim) == server;
    };
    reader.adopt = [&](const std::string& part) -> Result<void> {
      while (true) {
        std::promise<std::optional<Result<void>>> done;
        rpc.post([&] {
          done.set_value(*self != nullptr ? (*self)->adopt(part) : fail(ErrorCode::Aborted, "it serves no rows"));
        });
        if (const auto result = done.get_future().get()) return *result;
        std::this_thread::sleep_for(kStillWorking);
      }
    };
    const Result<void> done = read_rows(unpack<Restore>(body)->record.folder, reader);
    rpc.post([client, id, command = command, body, self, done]() mutable {
      command.body = body;
      if (*self != nullptr) (*self)->restored(client, id, command, done);
    });
  });
}

/// Returns nullopt if the rows cannot be taken now.
std::optional<Result<void>> Primary::adopt(const std::string& body) {
  if (working_ || backup_.is_behind()) return std::nullopt;
  const Command command{0, Method::Adopt, 0, 0, body};
  if (auto ok = state_.tables().check_adopt(body); !ok) return ok;
  if (const std::size_t bytes = state_.tables().bytes() + 2 * body.size(); bytes > limit()) {
    if (bytes <= limit() + transient()) return std::nullopt;
    return fail(ErrorCode::Unavailable, "no memory for the snapshot: {} of {} bytes are taken", state_.tables().bytes(),
                limit());
  }
  return note(command, {});
}

void Primary::restored(const ClientPtr& client, std::uint64_t id, const Command& command, const Result<void>& done) {
  if (working_) {  // a worker has been lost meanwhile
    looks_for_memory_ = rpc_.after(
        kStillWorking, [this, client, id, command = command, body = std::string(command.body), done]() mutable {
          command.body = body;
          restored(client, id, command, done);
        });
    return;
  }
  restoring_ = false;
  if (const auto order = order_of(command.body); order) answer_change(client, id, command, *order, done);
  go_on();
}

Result<void> Primary::stats(const ClientPtr& client, const Call& call) {
  const auto opened = unpack<Stats>(call.body);
  if (!opened) return tl::unexpected(opened.error());
  const std::uint32_t table = opened->record.table;
  if (table >= state_.tables().count()) return fail(ErrorCode::Corrupt, "there is no table {}", table);
  answer(client, call.id, answer_of(state_.tables().at(table).counts()));
  return {};
}

Result<void> Primary::change(const ClientPtr& client, const Session& session, const Call& call) {
  if (call.body.size() > kLongestMessage - kRecordHead - 4096)
    return fail(ErrorCode::Corrupt, "a change of {} bytes is more than may be passed on", call.body.size());
  const auto order = order_of(call.body);
  if (!order) return tl::unexpected(order.error());
  Command command{seconds_now(), static_cast<Method>(call.method), session.worker, session.incarnation, call.body};
  const auto verdict = state_.workers().judge({session.worker, session.incarnation, *order});
  if (!verdict) {
    // The missing changes are those that a broken server refused without recording them.
    const bool behind_a_gap = verdict.error().code() == ErrorCode::Corrupt;
    answer(client, call.id, answer_of(broken_ && behind_a_gap ? *broken_ : verdict.error()));
    return {};
  }
  if (*verdict == Workers::Verdict::New) {
    const Result<void> checked = state_.check(command, limit());
    if (waits_for_memory(command, checked)) {
      short_ = true;
      late_.push_front({client, call.method, call.id, std::string(call.body),
                        [this, client](const Call& now) { return serve(client, now); }});
      late_bytes_ += call.body.size();
      looks_for_memory_ = rpc_.after(kLooksForMemory, [this] {
        short_ = false;
        go_on();
      });
      return {};
    }
    if (!checked && checked.error().code() == ErrorCode::Corrupt) return checked;
    if (checked && command.method == Method::Restore) {
      restore(client, call, command);
    } else {
      answer_change(client, call.id, command, *order, checked);
    }
    return {};
  }
  answer(client, call.id, made(command, order->sequence));
  return {};
}

/// Makes a change if `may` allows it, or else refuses it, and answers.
void Primary::answer_change(const ClientPtr& client, std::uint64_t id, const Command& command, const Order& order,
                            const Result<void>& may) {
  Result<void> done;
  if (may) {
    done = note(command, {});
  } else {  // recorded, so that the change is refused again if it is sent again
    done = note({.method = Method::Refused, .worker = command.worker, .incarnation = command.incarnation},
                pack(order).append(answer_of(may.error())));
  }
  if (!done) return answer(client, id, answer_of(done.error()));
  if (!working_) return answer(client, id, made(command, order.sequence));
  then_ = [this, client, id] { answer(client, id, broken_ ? answer_of(*broken_) : pack(Answer{})); };
}

/// Returns whether a change has to wait for memory that will become free without a change (`transient`).
bool Primary::waits_for_memory(const Command& command, const Result<void>& checked) {
  const std::size_t later = transient();
  if (later == 0) return false;
  if (!checked) return checked.error().code() == ErrorCode::Unavailable && state_.check(command, limit() + later);
  return state_.tables().copied() > 0 && state_.effort(command).copied > options_.room();
}

/// Returns the answer to a change that has been made, now or earlier.
std::string Primary::made(const Command& command, std::uint64_t sequence) {
  const auto& refused = state_.workers().at(command.worker).refused;
  if (const auto found = refused.find(sequence); found != refused.end()) return answer_of(found->second);
  if (command.method != Method::Open) return pack(Answer{});
  const auto open = unpack<Open>(command.body);
  const auto number = open ? state_.tables().find(open->record.name) : std::nullopt;
  return answer_of(Opened{number.value_or(0)});
}

// ---- changes ----

Result<void> Primary::note(Command command, const std::string& body) {
  command.now = seconds_now();
  if (!body.empty()) command.body = body;
  if (broken_) return tl::unexpected(*broken_);
  if (auto done = kept(backup_.append(command)); !done) return done;
  if (state_.effort(command).floats <= kMuchWork) {
    state_.run(command);
    noted(command.method);
    return {};
  }
  known_bytes_ = state_.tables().bytes();
  working_ = true;
  options_.aside([state = kept_, command, body = std::string(command.body), self = self_, &rpc = rpc_]() mutable {
    command.body = body;
    std::optional<Error> failed;
    try {
      state->run(command);
    } catch (const std::exception& error) {  // out of memory
      failed = Error(ErrorCode::Unavailable, fmt::format("this server makes no changes any more: {}", error.what()));
    }
    state.reset();
    rpc.post([self, method = command.method, failed] {
      if (*self != nullptr) (*self)->worked(method, failed);
    });
  });
  return {};
}

/// Makes no more changes once the journal cannot take them.
Result<void> Primary::kept(const Result<void>& done) {
  if (done) return {};
  broken_ = Error(ErrorCode::Io, fmt::format("this server makes no changes any more: {}", done.error().what()));
  return tl::unexpected(*broken_);
}

void Primary::worked(Method method, const std::optional<Error>& failed) {
  working_ = false;
  if (failed) broken_ = failed;
  noted(method);
  if (const auto then = std::exchange(then_, nullptr)) then();
  go_on();
}

void Primary::noted(Method method) {
  (void)kept(backup_.look_after(state_));
  if (method != Method::Push) wake();
}

void Primary::afterwards(std::function<void()> then) {
  if (working_) {
    then_ = std::move(then);
  } else {
    then();
  }
}

/// Returns the bytes that the state may take, in this process and in the copy's.
std::size_t Primary::limit() const {
  const std::size_t room = std::min(options_.room(), backup_.room());
  const std::size_t bytes = state_.tables().bytes();
  return room < ~bytes ? bytes + room : ~std::size_t{0};
}

void Primary::serve_or_park(const ClientPtr& client, const Call& call, std::uint32_t wait_ms) {
  Parked one{client, call.id, static_cast<Method>(call.method), std::string(call.body), nullptr};
  if (state_.is_due(one.method, one.body)) return serve_due(one);
  limit_parked(parked_.insert(parked_.end(), std::move(one)), milliseconds(wait_ms));
}

void Primary::serve_due(const Parked& call) {
  switch (call.method) {
    case Method::Barrier: return answer(call.client, call.id, pack(Answer{}));
    case Method::Await: return answer(call.client, call.id, answer_of(Ended{state_.settled()}));
    case Method::Snapshot: return answer_snapshot(call.client, call.id, unpack<Snapshot>(call.body)->record);
    default: return answer_pull(call.client, call.id, *unpack<Pull>(call.body));
  }
}

void Primary::limit_parked(std::list<Parked>::iterator at, milliseconds wait) {
  at->limit = rpc_.after(wait, [this, at] {
    if (working_) return limit_parked(at, kStillWorking);
    const Parked late = std::move(*at);
    parked_.erase(at);
    answer(late.client, late.id, answer_of(Error(ErrorCode::Timeout, why_late(late))));
  });
}

std::string Primary::why_late(const Parked& late) const {
  std::string why = state_.awaited(late.method, late.body);
  for (const auto& settlement : settlements_) {
    if (const std::string trouble = settlement->trouble(); !trouble.empty())
      why += fmt::format("; worker {} is lost, and whether its last clock counts is not known: {}",
                         settlement->question().worker, trouble);
  }
  return why;
}

void Primary::wake() {
  if (options_.changed) options_.changed();
  for (auto at = parked_.begin(); at != parked_.end();) {
    const auto here = at++;
    if (!state_.is_due(here->method, here->body)) continue;
    serve_due(*here);
    parked_.erase(here);
  }
}

// ---- workers that are lost ----

void Primary::on_gone(const ClientPtr& client) {
  parked_.remove_if([&](const Parked& one) { return one.client == client; });
  waiting_.remove_if([&](const Waiting& one) { return one.client == client; });
  std::erase_if(late_, [&](const Late& one) {
    if (one.client == client) late_bytes_ -= one.body.size();
    return one.client == client;
  });
  backup_.on_gone(client);
  const auto found = sessions_.find(client);
  if (found == sessions_.end()) return;
  const Session session = found->second;
  sessions_.erase(found);
  be_patient(session.worker, session.incarnation, options_.patience);
}

void Primary::be_patient(std::uint32_t number, std::uint64_t incarnation, milliseconds time) {
  patience_timers_[number] = rpc_.after(time, [this, number, incarnation] {
    // A worker that has connected again meanwhile waits among the calls.
    if (must_wait()) return be_patient(number, incarnation, kStillWorking);
    const Worker& worker = state_.workers().at(number);
    if (worker.incarnation != incarnation) return;
    if (worker.phase == Worker::Phase::Live || worker.phase == Worker::Phase::Joined) decide(number, incarnation);
  });
}

void Primary::decide(std::uint32_t number, std::uint64_t incarnation) {
  for (const auto& settlement : settlements_) {
    if (settlement->question().worker == number && settlement->question().incarnation == incarnation) return;
  }
  const Settle question{number, incarnation, 0};
  if (!note({.method = Method::Settle, .worker = number}, pack(question))) return;
  const Hello& known = *state_.introduced();
  std::vector<std::uint32_t> others;
  for (std::uint32_t i = 0; i < known.servers.size(); ++i) {
    if (i != known.server) others.push_back(i);
  }
  if (others.empty()) {
    lost(question, state_.ended(question));
    return;
  }
  settlements_.push_back(std::make_unique<Settlement>(
      question, state_.ended(question), std::move(others),
      [place_of = options_.place_of, known](std::uint32_t server) { return place_of(known, server); }));
  look_at_settlements();
}

void Primary::look_at_settlements() {
  for (auto at = settlements_.begin(); at != settlements_.end() && !working_;) {
    const auto here = at++;
    const auto ended = (*here)->result();
    if (!ended) continue;
    const Settle question = (*here)->question();
    settlements_.erase(here);
    lost(question, *ended);
  }
  looking_ = settlements_.empty() ? nullptr : rpc_.after(milliseconds(10), [this] { look_at_settlements(); });
}

void Primary::lost(const Settle& question, std::int64_t ended) {
  log::warn("ps", "worker {} on {} is lost at clock {}; {}", question.worker, state_.workers().at(question.worker).host,
            ended,
            state_.has_staged(question.worker, ended) ? "its pushes after that are dropped" : "the others go on");
  (void)note({.method = Method::Lost, .worker = question.worker, .incarnation = question.incarnation},
             pack(Settled{ended}));
  afterwards([this, worker = question.worker] { let_in(worker); });
}

/// Lets the worker's new process in, when everything that an earlier one has done is settled.
void Primary::let_in(std::uint32_t worker) {
  for (const ClientPtr& client : clients_of(worker)) rpc_.close(client);
  std::list<Waiting> come;
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    const auto here = at++;
    if (here->hello.worker == worker) come.splice(come.end(), waiting_, here);
  }
  for (const Waiting& one : come) {
    if (const auto may = agrees(one.hello); !may) {
      answer(one.client, one.id, answer_of(may.error()));
    } else {
      join(one.client, one.id, one.hello);
    }
  }
}

std::vector<Primary::ClientPtr> Primary::clients_of(std::uint32_t worker) const {
  std::vector<ClientPtr> clients;
  for (const auto& [client, session] : sessions_) {
    if (session.worker == worker) clients.push_back(client);
  }
  return clients;
}

}  // namespace cohort::ps
