#include "ps/state.h"

#include <algorithm>
#include <utility>

namespace cohort::ps {
namespace {

/// Unpacks a command whose body has been checked.
template <class T>
Packed<T> opened(const Command& command) {
  return *unpack<T>(command.body);
}

constexpr std::size_t kMostEarlier = 16;  // incarnations kept; a server asks about one within seconds

}  // namespace

Result<void> State::may_join(const Hello& hello) const {
  if (workers_.count() == 0) return {};
  if (hello.workers != workers_.count()) {
    return fail(ErrorCode::Mismatch, "worker {} on {} says that there are {} workers; the first one said {}",
                hello.worker, hello.host, hello.workers, workers_.count());
  }
  const Worker& known = workers_.at(hello.worker);
  if (hello.incarnation == 0 || hello.incarnation > std::max(known.incarnation, known.banned)) return {};
  if (hello.incarnation < known.incarnation || hello.incarnation <= known.banned) {
    return fail(ErrorCode::Aborted, "worker {} was taken for lost, or has been started again since -- connect anew",
                hello.worker);
  }
  if (hello.nonce != known.nonce) {
    return fail(ErrorCode::Mismatch, "two processes, on {} and on {}, say that they are worker {} -- give each its own",
                known.host, hello.host, hello.worker);
  }
  return {};
}

Result<void> State::check(const Command& command, std::size_t limit) {
  const auto whole = [&](const auto& packed) -> Result<void> {
    if (!packed) return tl::unexpected(packed.error());
    if (!packed->payload.empty()) return fail(ErrorCode::Corrupt, "message is longer than its fields");
    return {};
  };
  switch (command.method) {
    case Method::Start: return whole(unpack<Start>(command.body));
    case Method::Leave: return whole(unpack<Leave>(command.body));
    case Method::Restore: return whole(unpack<Restore>(command.body));
    case Method::Commit: {
      const auto commit = unpack<Commit>(command.body);
      if (auto ok = whole(commit); !ok) return ok;
      if (backup_workers() > 0) {
        return fail(ErrorCode::InvalidArgument,
                    "the tables have backup workers, and worker {} ends a clock without having opened any -- all "
                    "workers have to open them before they end a clock",
                    command.worker);
      }
      const std::int64_t ended = workers_.at(command.worker).committed;
      if (commit->record.clock != ended)
        return fail(ErrorCode::Corrupt, "worker {} ends clock {} after it has ended {}", command.worker,
                    commit->record.clock, ended);
      return {};
    }
    case Method::Propose: return check_propose(command);
    case Method::Conclude: return check_conclude(command);
    case Method::Open: {
      const auto open = unpack<Open>(command.body);
      if (auto ok = whole(open); !ok) return ok;
      if (auto ok = tables_.check_open(open->record, limit); !ok) return ok;
      return check_backup_workers(open->record.name, open->record.options);
    }
    case Method::Push:
    case Method::Assign:
    case Method::Erase: return tables_.check_change(command.method, command.body, limit);
    default: return fail(ErrorCode::Corrupt, "a call of unknown kind {}", static_cast<int>(command.method));
  }
}

Result<void> State::check_adopt(const Command& command) const {
  if (auto ok = tables_.check_adopt(command.body); !ok) return ok;
  const Adopt given = opened<Adopt>(command).record;
  return check_backup_workers(given.name, given.options);
}

SparseTable::Effort State::effort(const Command& command) const {
  switch (command.method) {
    case Method::Push:
    case Method::Assign:
    case Method::Erase: {
      const auto change = unpack<Change>(command.body);
      if (!change || change->record.table >= tables_.count()) return {};
      const SparseTable& table = tables_.at(change->record.table);
      if (command.method == Method::Push && table.options().consistency.mode != Mode::Async) return {};
      return table.effort(change->record.count);
    }
    case Method::Start:
    case Method::Commit:
    case Method::Propose:
    case Method::Conclude:
    case Method::Leave:
    case Method::Lost: return tables_.effort_of_staged();  // this may end a clock
    default: return {};
  }
}

void State::run(const Command& command) {
  const auto advance = [&](const Order& order) {
    Worker& worker = workers_.at(command.worker);
    worker.mark = order.sequence;
    // The worker has these answers, so their refusals are not needed any more.
    worker.refused.erase(worker.refused.begin(), worker.refused.upper_bound(order.acknowledged));
  };
  switch (command.method) {
    case Method::Joined: {
      const auto hello = opened<Hello>(command).record;
      introduced_ = hello;
      if (workers_.count() == 0) workers_.expect(hello.workers);
      Worker& worker = workers_.at(command.worker);
      withdraw(command.worker);
      const bool first = worker.phase == Worker::Phase::Expected;
      worker.earlier[worker.incarnation] = worker.committed;
      while (worker.earlier.size() > kMostEarlier) worker.earlier.erase(worker.earlier.begin());
      worker = Worker{.phase = first ? Worker::Phase::Expected : Worker::Phase::Joined,
                      .incarnation = hello.incarnation,
                      .nonce = hello.nonce,
                      .committed = worker.committed,
                      .banned = worker.banned,
                      .earlier = std::move(worker.earlier),
                      .host = hello.host};
      break;
    }
    case Method::Start: {
      const auto start = opened<Start>(command).record;
      advance(start.order);
      Worker& worker = workers_.at(command.worker);
      if (worker.phase == Worker::Phase::Joined) worker.barrier = workers_.latest_barrier();
      worker.phase = Worker::Phase::Live;
      worker.committed = std::max(worker.committed, start.clock);
      settle(command.now);
      break;
    }
    case Method::Open: {
      const auto open = opened<Open>(command).record;
      advance(open.order);
      if (!tables_.find(open.name)) tables_.add(open.name, open.options, open.elements);
      break;
    }
    case Method::Push: {
      const auto change = opened<Change>(command);
      advance(change.record.order);
      push(command, change.record, change.payload);
      break;
    }
    case Method::Assign: {
      const auto change = opened<Change>(command);
      advance(change.record.order);
      tables_.at(change.record.table).assign(Tables::rows_of(change.payload, change.record.count), command.now);
      break;
    }
    case Method::Erase: {
      const auto change = opened<Change>(command);
      advance(change.record.order);
      tables_.at(change.record.table).erase(change.payload.data(), change.record.count);
      break;
    }
    case Method::Commit: {
      const auto commit = opened<Commit>(command).record;
      advance(commit.order);
      this->commit(command.worker, commit.clock + 1, command.now);
      break;
    }
    case Method::Propose: {
      const auto ended = opened<Commit>(command).record;
      advance(ended.order);
      propose(command.worker, ended.clock, command.now);
      break;
    }
    case Method::Conclude: {
      const auto told = opened<Conclude>(command).record;
      advance(told.order);
      conclude(command.worker, told, command.now);
      break;
    }
    case Method::Restore: advance(opened<Restore>(command).record.order); break;
    case Method::Adopt: tables_.adopt(command.body); break;
    case Method::Leave: {
      advance(opened<Leave>(command).record.order);
      withdraw(command.worker);
      workers_.at(command.worker).phase = Worker::Phase::Gone;
      settle(command.now);
      break;
    }
    case Method::Lost: {
      const auto decided = opened<Settled>(command).record;
      if (backup_workers() == 0) commit(command.worker, decided.committed, command.now);
      withdraw(command.worker);
      Worker& worker = workers_.at(command.worker);
      worker.phase = Worker::Phase::Gone;
      settle(command.now);
      break;
    }
    case Method::Settle: fence(opened<Settle>(command).record); break;
    case Method::Barrier: {
      std::uint64_t& number_reached = workers_.at(command.worker).barrier;
      number_reached = std::max(number_reached, opened<Barrier>(command).record.number);
      break;
    }
    case Method::Refused: {
      const auto refused = opened<Order>(command);
      advance(refused.record);
      if (const auto answer = unpack<Answer>(refused.payload); answer && answer->record.error)
        workers_.at(command.worker).refused.emplace(refused.record.sequence, *answer->record.error);
      break;
    }
    default: break;
  }
}

Result<void> State::replay(const Command& command) {
  if (command.method == Method::Piece)
    return image_.load(command.body, {introduced_, workers_, settled_, quorum_, tables_});
  if (image_.loading()) return fail(ErrorCode::Corrupt, "a command within an image");
  const auto sound = [&]() -> Result<void> {
    if (command.method == Method::Verify) return tables_.verify(command.body);
    if (command.method == Method::Joined) {
      const auto hello = unpack<Hello>(command.body);
      if (!hello) return tl::unexpected(hello.error());
      if (hello->record.worker != command.worker || hello->record.incarnation != command.incarnation)
        return fail(ErrorCode::Corrupt, "it is another worker that has joined");
      return may_join(hello->record);
    }
    if (command.worker >= workers_.count()) return fail(ErrorCode::Corrupt, "there is no worker {}", command.worker);
    if (is_change(command.method)) {
      const auto order = order_of(command.body);
      if (!order) return tl::unexpected(order.error());
      const auto verdict = workers_.judge({command.worker, command.incarnation, *order});
      if (!verdict) return tl::unexpected(verdict.error());
      if (*verdict != Workers::Verdict::New) return fail(ErrorCode::Corrupt, "a change that has been made before");
      return check(command, ~std::size_t{0});
    }
    const auto known = [](const auto& opened) -> Result<void> {
      if (!opened) return tl::unexpected(opened.error());
      return {};
    };
    switch (command.method) {
      case Method::Barrier: return known(unpack<Barrier>(command.body));
      case Method::Lost: return known(unpack<Settled>(command.body));
      case Method::Refused: return known(unpack<Order>(command.body));
      case Method::Adopt: return check_adopt(command);
      case Method::Settle: {
        const auto asked = unpack<Settle>(command.body);
        if (asked && asked->record.worker >= workers_.count()) return fail(ErrorCode::Corrupt, "a worker beyond all");
        return known(asked);
      }
      default: return fail(ErrorCode::Corrupt, "a command of unknown kind {}", static_cast<int>(command.method));
    }
  };
  if (auto ok = sound(); !ok) return fail(ErrorCode::Corrupt, "{}", ok.error().what());
  run(command);
  return {};
}

void State::push(const Command& command, const Change& change, std::string_view payload) {
  SparseTable& table = tables_.at(change.table);
  if (table.options().consistency.mode == Mode::Async) {
    table.step(Tables::rows_of(payload, change.count), command.now, change.lr);
    return;
  }
  const std::int64_t clock = workers_.at(command.worker).committed;
  if (clock < settled_ && backup_workers() > 0) return;  // the push comes too late
  tables_.stage({command.worker, clock, change.table, change.lr, change.count,
                 std::make_shared<const std::string>(payload), change.count});
}

void State::commit(std::uint32_t number, std::int64_t clocks, std::uint32_t now) {
  Worker& worker = workers_.at(number);
  if (clocks <= worker.committed) return;
  worker.committed = clocks;
  make_committed(number, now);
  settle(now);
}

void State::make_committed(std::uint32_t worker, std::uint32_t now) {
  const std::int64_t ended = workers_.at(worker).committed;
  tables_.unstage([&](const Staged& one) {
    if (one.worker != worker || one.clock >= ended) return false;
    SparseTable& table = tables_.at(one.table);
    // In Sync, a push for a clock that has ended is applied at once: its worker rejoined in the middle of that clock.
    if (table.options().consistency.mode == Mode::Sync && one.clock >= settled_) return false;
    table.step(Tables::rows_of(*one.payload, one.count), now, one.lr);
    return true;
  });
}

void State::settle(std::uint32_t now) {
  if (backup_workers() > 0) return seek_quorum(now);
  const std::int64_t until = workers_.least().value_or(workers_.most());
  for (; settled_ < until; ++settled_) {
    std::int64_t next = until;  // clocks without a push are skipped
    for (const Staged& one : tables_.staged()) {
      if (tables_.is_sync(one.table)) next = std::min(next, one.clock);
    }
    settled_ = std::max(settled_, next);
    if (settled_ >= until) return;
    tables_.step_staged(settled_, now);
  }
}

bool State::may_read(std::uint32_t number, std::int64_t clock) const noexcept {
  const Consistency& rule = tables_.rule(number);
  switch (rule.mode) {
    case Mode::Sync: return settled_ >= clock;
    case Mode::Bounded: return !workers_.least() || *workers_.least() >= clock - rule.staleness;
    case Mode::Async: break;
  }
  return true;
}

bool State::is_due(Method method, std::string_view body) const {
  switch (method) {
    case Method::Barrier: return workers_.past_barrier(unpack<Barrier>(body)->record.number);
    case Method::Await: return settled_ > unpack<Await>(body)->record.clock;
    case Method::Snapshot: return settled_ >= unpack<Snapshot>(body)->record.clock;
    default: break;
  }
  const Pull asked = unpack<Pull>(body)->record;
  return may_read(asked.table, asked.clock);
}

std::string State::awaited(Method method, std::string_view body) const {
  if (method == Method::Barrier) {
    const auto number = unpack<Barrier>(body)->record.number;
    return fmt::format("barrier {} waits for {}", number, workers_.not_at_barrier(number));
  }
  if (method == Method::Await) {
    const std::int64_t clock = unpack<Await>(body)->record.clock;
    const std::int64_t backups = backup_workers();
    return fmt::format(
        "clock {}{} waits for {}", clock,
        backups > 0 ? fmt::format(", with {} backup workers,", backups) : ", ended long ago by this worker,",
        workers_.behind(clock + 1));
  }
  if (method == Method::Snapshot) {
    const std::int64_t clock = unpack<Snapshot>(body)->record.clock;
    return fmt::format("a snapshot at clock {} waits for {}", clock, workers_.behind(clock));
  }
  const Pull asked = unpack<Pull>(body)->record;
  const Consistency& rule = tables_.rule(asked.table);
  return fmt::format("table \"{}\" at clock {} waits for {}", tables_.at(asked.table).name(), asked.clock,
                     workers_.behind(rule.mode == Mode::Bounded ? asked.clock - rule.staleness : asked.clock));
}

std::int64_t State::clock_of(std::uint32_t number) const noexcept {
  if (tables_.is_sync(number)) return settled_;
  return workers_.least().value_or(workers_.most());
}

bool State::has_staged(std::uint32_t worker, std::int64_t clock) const noexcept {
  return std::any_of(tables_.staged().begin(), tables_.staged().end(),
                     [&](const Staged& one) { return one.worker == worker && one.clock >= clock; });
}

std::int64_t State::ended(const Settle& asked) const {
  const Worker& worker = workers_.at(asked.worker);
  if (asked.incarnation == worker.incarnation) return worker.committed;
  const auto found = worker.earlier.find(asked.incarnation);
  return found == worker.earlier.end() ? 0 : found->second;
}

void State::fence(const Settle& asked) {
  Worker& worker = workers_.at(asked.worker);
  worker.banned = std::max(worker.banned, asked.incarnation);
  if (worker.incarnation == asked.incarnation) worker.fenced = true;
}

std::shared_ptr<const FrozenState> State::freeze() {
  return std::make_shared<const FrozenState>(FrozenState{introduced_, workers_, settled_, quorum_, tables_.freeze()});
}

// ---- clocks that end without some workers ----

// SyncOptions::backup_workers: the first server decides whose pushes of a clock count: those of the workers that have
// ended it when only the backup workers have not. Workers tell the others.
//   A worker ends its clock only at the first server, when all servers have its pushes. So all have the quorum's
//   pushes. Before a worker sends anything at a clock, it tells all servers whose pushes counted before. So no server
//   is more than one clock behind the first server, and only the last decision has to be kept.

std::int64_t State::backup_workers() const noexcept {
  return tables_.count() == 0 ? 0 : tables_.rule(0).backup_workers;
}

Result<void> State::check_backup_workers(const std::string& name, const TableOptions& options) const {
  const std::int64_t wanted = options.consistency.backup_workers;
  if ((wanted == 0 && backup_workers() == 0) || tables_.find(name)) return {};
  if (wanted >= workers_.count()) {
    return fail(ErrorCode::InvalidArgument,
                "table \"{}\" has {} backup workers, and there are {} workers -- one at least has to count", name,
                wanted, workers_.count());
  }
  if (tables_.count() > 0) {
    const Consistency& one = tables_.rule(0);
    if (one.mode == options.consistency.mode && one.backup_workers == wanted) return {};
    return fail(
        ErrorCode::InvalidArgument,
        "table \"{}\" is {}, and \"{}\" is {} -- with backup workers all tables have to be Sync with as many: a "
        "late worker's pushes are dropped from all or from none",
        name, described(options.consistency), tables_.at(0).name(), described(one));
  }
  if (workers_.most() > 0) {
    return fail(ErrorCode::InvalidArgument,
                "table \"{}\" has backup workers, and a worker has ended a clock already -- open it before any does",
                name);
  }
  return {};
}

Concluded State::concluded(std::uint32_t number) const {
  const Worker& worker = workers_.at(number);
  return {{settled_, quorum_}, worker.committed, worker.late};
}

Result<void> State::check_propose(const Command& command) const {
  const auto ended = unpack<Commit>(command.body);
  if (!ended) return tl::unexpected(ended.error());
  const Worker& worker = workers_.at(command.worker);
  if (!ended->payload.empty() || !decides() || backup_workers() == 0 || ended->record.clock != worker.committed ||
      worker.committed > settled_) {
    return fail(ErrorCode::Corrupt, "worker {} ends clock {} after it has ended {}", command.worker,
                ended->record.clock, worker.committed);
  }
  return {};
}

Result<void> State::check_conclude(const Command& command) const {
  const auto told = unpack<Conclude>(command.body);
  if (!told) return tl::unexpected(told.error());
  const Quorum& quorum = told->record.quorum;
  if (!told->payload.empty() || backup_workers() == 0 || quorum.clocks > settled_ + (decides() ? 0 : 1) ||
      (!quorum.workers.empty() && quorum.workers.back() >= workers_.count()) ||
      told->record.clock < workers_.at(command.worker).committed) {
    return fail(ErrorCode::Corrupt, "worker {} goes on at clock {} of {}, after {} of {}", command.worker,
                told->record.clock, quorum.clocks, workers_.at(command.worker).committed, settled_);
  }
  return {};
}

void State::propose(std::uint32_t number, std::int64_t clock, std::uint32_t now) {
  Worker& worker = workers_.at(number);
  worker.late = clock < settled_;
  worker.committed = worker.late ? settled_ : clock + 1;
  seek_quorum(now);
}

void State::conclude(std::uint32_t number, const Conclude& told, std::uint32_t now) {
  if (told.quorum.clocks > settled_) {
    quorum_ = told.quorum.workers;
    end_clock(now);
  }
  workers_.at(number).committed = told.clock;
  // Pushes of an earlier process of this worker can no longer be in any quorum.
  tables_.unstage([&](const Staged& one) { return one.worker == number; });
}

void State::seek_quorum(std::uint32_t now) {
  if (!decides()) return;
  std::vector<std::uint32_t> ended;
  bool awaited = false;
  for (std::uint32_t number = 0; number < workers_.count(); ++number) {
    if (workers_.at(number).committed > settled_) {
      ended.push_back(number);
    } else {
      awaited = awaited || workers_.holds_others(number);
    }
  }
  const std::int64_t enough = static_cast<std::int64_t>(workers_.count()) - backup_workers();
  if (ended.empty() || (awaited && static_cast<std::int64_t>(ended.size()) < enough)) return;
  quorum_ = std::move(ended);
  end_clock(now);
}

void State::end_clock(std::uint32_t now) {
  tables_.unstage([&](const Staged& one) {
    return one.clock <= settled_ && !std::binary_search(quorum_.begin(), quorum_.end(), one.worker);
  });
  tables_.step_staged(settled_, now);
  ++settled_;
}

void State::withdraw(std::uint32_t number) {
  if (backup_workers() == 0) {
    const std::int64_t ended = workers_.at(number).committed;
    return tables_.unstage([&](const Staged& one) { return one.worker == number && one.clock >= ended; });
  }
  // The worker may be in a quorum that this server does not know yet. Otherwise the next quorum drops its pushes.
  if (!decides()) return;
  Worker& worker = workers_.at(number);
  worker.committed = std::min(worker.committed, settled_);
  tables_.unstage([&](const Staged& one) { return one.worker == number; });
}

}  // namespace cohort::ps
