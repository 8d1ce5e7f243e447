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
      const std::int64_t ended = workers_.at(command.worker).committed;
      if (commit->record.clock != ended)
        return fail(ErrorCode::Corrupt, "worker {} ends clock {} after it has ended {}", command.worker,
                    commit->record.clock, ended);
      return {};
    }
    case Method::Open: {
      const auto open = unpack<Open>(command.body);
      if (auto ok = whole(open); !ok) return ok;
      return tables_.check_open(open->record, limit);
    }
    case Method::Push:
    case Method::Assign:
    case Method::Erase: return tables_.check_change(command.method, command.body, limit);
    default: return fail(ErrorCode::Corrupt, "a call of unknown kind {}", static_cast<int>(command.method));
  }
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
      drop_staged(command.worker);
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
    case Method::Restore: advance(opened<Restore>(command).record.order); break;
    case Method::Adopt: tables_.adopt(command.body); break;
    case Method::Leave: {
      advance(opened<Leave>(command).record.order);
      drop_staged(command.worker);
      workers_.at(command.worker).phase = Worker::Phase::Gone;
      settle(command.now);
      break;
    }
    case Method::Lost: {
      const auto decided = opened<Settled>(command).record;
      commit(command.worker, decided.committed, command.now);
      drop_staged(command.worker);
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
  if (command.method == Method::Piece) return image_.load(command.body, {introduced_, workers_, settled_, tables_});
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
      case Method::Adopt: return tables_.check_adopt(command.body);
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

void State::drop_staged(std::uint32_t number) {
  const std::int64_t ended = workers_.at(number).committed;
  tables_.unstage([&](const Staged& one) { return one.worker == number && one.clock >= ended; });
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
    return fmt::format("clock {}, ended long ago by this worker, waits for {}", clock, workers_.behind(clock + 1));
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
  return std::make_shared<const FrozenState>(FrozenState{introduced_, workers_, settled_, tables_.freeze()});
}

}  // namespace cohort::ps
