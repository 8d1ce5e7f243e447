#include "ps/state.h"

#include "ps/optimizer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::ps {
namespace {

/// Unpacks a command whose body has been checked.
template <class T>
Packed<T> opened(const Command& command) {
  return *unpack<T>(command.body);
}

constexpr std::size_t kMostEarlier = 16;  // incarnations kept; a server asks about one within seconds

/// Lists how two workers' options for one table differ: "dim 8 and 16; the initializer".
std::string differences(const TableOptions& one, const TableOptions& other) {
  constexpr const char* kRules[] = {"Sgd", "Adagrad", "RowAdagrad", "Adam", "AdamW", "Ftrl"};
  std::vector<std::string> found;
  const auto differ = [&](auto member) {
    TableOptions mixed = one;
    mixed.*member = other.*member;
    return codec::encode(mixed) != codec::encode(one);
  };
  if (one.dim != other.dim) found.push_back(fmt::format("dim {} and {}", one.dim, other.dim));
  if (differ(&TableOptions::optimizer)) {
    const auto lr = [](const TableOptions& of) {
      return std::visit([](const auto& rule) { return rule.lr; }, of.optimizer);
    };
    found.push_back(fmt::format("the optimizer: {} (lr {}) and {} (lr {})", kRules[one.optimizer.index()], lr(one),
                                kRules[other.optimizer.index()], lr(other)));
  }
  if (differ(&TableOptions::initializer)) found.emplace_back("the initializer");
  if (differ(&TableOptions::consistency)) {
    found.push_back(
        fmt::format("the consistency: {} and {}", described(one.consistency), described(other.consistency)));
  }
  if (one.admission != other.admission)
    found.push_back(fmt::format("admission {} and {}", one.admission, other.admission));
  if (differ(&TableOptions::eviction)) found.emplace_back("max_age, max_rows or victim");
  if (one.seed != other.seed) found.push_back(fmt::format("seed {} and {}", one.seed, other.seed));
  return fmt::format("{}", fmt::join(found, "; "));
}

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
      return check_open(open->record, limit);
    }
    case Method::Push:
    case Method::Assign:
    case Method::Erase: return check_change(command, limit);
    default: return fail(ErrorCode::Corrupt, "a call of unknown kind {}", static_cast<int>(command.method));
  }
}

Result<void> State::check_open(const Open& open, std::size_t limit) const {
  if (open.name.empty()) return fail(ErrorCode::InvalidArgument, "a table without a name");
  if (auto ok = ps::check(open.options); !ok) return ok;
  if (const auto known = find(open.name)) {
    const Served& served = tables_[*known];
    if (codec::encode(served.table.options()) == codec::encode(open.options) && served.elements == open.elements)
      return {};
    const std::string differ = served.elements != open.elements
                                   ? fmt::format("{} and {} elements (0: a table)", served.elements, open.elements)
                                   : differences(served.table.options(), open.options);
    return fail(ErrorCode::Mismatch,
                "\"{}\" is there already, and described in another way -- {}, there and here -- say the same at all "
                "workers, or take another name",
                open.name, differ);
  }
  if (tables_.size() >= 4096) return fail(ErrorCode::Unavailable, "more than 4096 tables");
  if (bytes() + SparseTable(open.name, open.options).bytes_with(1) > limit)
    return fail(ErrorCode::Unavailable,
                "no memory for table \"{}\": it needs {} bytes, and {} of {} are taken -- more "
                "memory for the server (`memory`)",
                open.name, SparseTable(open.name, open.options).bytes_with(1), bytes(), limit);
  return {};
}

Result<void> State::check_change(const Command& command, std::size_t limit) {
  const auto change = unpack<Change>(command.body);
  if (!change) return tl::unexpected(change.error());
  const std::uint32_t number = change->record.table;
  if (number >= tables_.size()) return fail(ErrorCode::InvalidArgument, "there is no table {}", number);
  const SparseTable& table = tables_[number].table;
  const std::size_t count = change->record.count;
  const std::size_t row = command.method == Method::Erase ? 0 : table.dim() * sizeof(float);
  if (change->payload.size() != count * (sizeof(std::uint64_t) + row))
    return fail(ErrorCode::Corrupt, "{} keys and rows of {} bytes in {} bytes", count, row, change->payload.size());
  if (command.method == Method::Erase) return {};
  const bool stays = command.method == Method::Push && table.options().consistency.mode != Mode::Async;
  const std::size_t staged = stays ? change->payload.size() + sizeof(Staged) : 0;
  const std::size_t rows = stays ? count : 0;
  // The exact need is computed only if an upper bound exceeds the limit.
  if (bytes_with(number, count, rows) + staged <= limit) return {};
  count_fresh();
  if (bytes_with(number, table.fresh(count, change->payload.data()), rows) + staged <= limit) return {};
  return fail(
      ErrorCode::Unavailable,
      "no memory for {} rows of table \"{}\": {} of {} bytes are taken{} -- more servers, more memory for them, or "
      "an eviction by rows",
      count, table.name(), bytes(), limit,
      staged_bytes_ > 0 ? ", and pushes wait that need more when their clock ends" : "");
}

/// Memory after the staged pushes have been made and the table has `fresh` more rows, including the sums of a clock's
/// pushes with `rows` more.
std::size_t State::bytes_with(std::uint32_t number, std::size_t fresh, std::size_t rows) const noexcept {
  std::size_t bytes = staged_bytes_, sum = sum_.bytes();
  for (std::uint32_t i = 0; i < tables_.size(); ++i) {
    const Served& served = tables_[i];
    const std::size_t more = served.fresh + (i == number ? fresh : 0);
    bytes += more > 0 ? served.table.bytes_with(more) : served.table.counts().bytes;
    if (served.table.options().consistency.mode == Mode::Sync)
      sum = std::max(sum, KeyedSum::bytes_for(served.waiting + (i == number ? rows : 0), served.table.dim()));
  }
  return bytes + sum;
}

void State::count_fresh() {
  for (Staged& one : staged_) {
    if (std::exchange(one.counted, true)) continue;
    Served& served = tables_[one.table];
    served.fresh -= one.fresh;
    one.fresh = served.table.fresh(one.count, one.payload->data());
    served.fresh += one.fresh;
  }
}

SparseTable::Effort State::effort(const Command& command) const {
  switch (command.method) {
    case Method::Push:
    case Method::Assign:
    case Method::Erase: {
      const auto change = unpack<Change>(command.body);
      if (!change || change->record.table >= tables_.size()) return {};
      const SparseTable& table = tables_[change->record.table].table;
      if (command.method == Method::Push && table.options().consistency.mode != Mode::Async) return {};
      return table.effort(change->record.count);
    }
    case Method::Start:
    case Method::Commit:
    case Method::Leave:
    case Method::Lost: {  // this may end a clock
      SparseTable::Effort all;
      for (const Served& served : tables_) {
        if (served.waiting == 0) continue;
        const SparseTable::Effort one = served.table.effort(served.waiting);
        all.floats += 2 * one.floats;  // each is added up, then stepped
        all.copied += one.copied;
      }
      return all;
    }
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
      if (!find(open.name)) tables_.push_back({SparseTable(open.name, open.options), open.elements});
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
      tables_[change.record.table].table.assign(rows_of(change.payload, change.record.count), command.now);
      break;
    }
    case Method::Erase: {
      const auto change = opened<Change>(command);
      advance(change.record.order);
      tables_[change.record.table].table.erase(change.payload.data(), change.record.count);
      break;
    }
    case Method::Commit: {
      const auto commit = opened<Commit>(command).record;
      advance(commit.order);
      this->commit(command.worker, commit.clock + 1, command.now);
      break;
    }
    case Method::Restore: advance(opened<Restore>(command).record.order); break;
    case Method::Adopt: adopt(command); break;
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
  if (command.method == Method::Piece) return load(command.body);
  if (loading_) return fail(ErrorCode::Corrupt, "a command within an image");
  const auto sound = [&]() -> Result<void> {
    if (command.method == Method::Verify) return verify(command);
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

KeyedRows State::rows_of(std::string_view payload, std::size_t count) noexcept {
  return {payload.data(), payload.data() + count * sizeof(std::uint64_t), count};
}

Result<void> State::check_adopt(const Command& command) const {
  const auto opened = unpack<Adopt>(command.body);
  if (!opened) return tl::unexpected(opened.error());
  const Adopt& given = opened->record;
  if (auto ok = ps::check(given.options); !ok) return ok;
  if (auto ok = check_open({{}, given.name, given.options, given.elements}, ~std::size_t{0}); !ok) return ok;
  const std::size_t dim = static_cast<std::size_t>(given.options.dim);
  const std::uint64_t row = sizeof(RowHeader) + (dim + slots_of(given.options.optimizer, dim)) * sizeof(float);
  if (given.rows > kLongestMessage || given.seen > kLongestMessage ||
      opened->payload.size() != given.rows * row + given.seen * kSeenBytes)
    return fail(ErrorCode::Corrupt, "{} rows of {} bytes and {} counters in {} bytes", given.rows, row, given.seen,
                opened->payload.size());
  return {};
}

void State::adopt(const Command& command) {
  const auto opened = ps::opened<Adopt>(command);
  const Adopt& given = opened.record;
  if (!find(given.name)) tables_.push_back({SparseTable(given.name, given.options), given.elements});
  SparseTable& table = tables_[*find(given.name)].table;
  const char* at = opened.payload.data();
  for (std::uint64_t i = 0; i < given.rows; ++i) {
    RowHeader header;
    std::memcpy(&header, at, sizeof header);
    table.restore(header, at + sizeof header);
    at += sizeof header + table.floats() * sizeof(float);
  }
  for (std::uint64_t i = 0; i < given.seen; ++i, at += kSeenBytes) {
    std::uint64_t key;
    std::uint32_t count;
    std::memcpy(&key, at, sizeof key);
    std::memcpy(&count, at + sizeof key, sizeof count);
    table.restore_seen(key, count);
  }
}

void State::push(const Command& command, const Change& change, std::string_view payload) {
  SparseTable& table = tables_[change.table].table;
  if (table.options().consistency.mode == Mode::Async) {
    table.step(rows_of(payload, change.count), command.now, change.lr);
    return;
  }
  const std::int64_t clock = workers_.at(command.worker).committed;
  stage({command.worker, clock, change.table, change.lr, change.count, std::make_shared<const std::string>(payload),
         change.count});
}

void State::stage(Staged staged) {
  staged_bytes_ += staged.payload->size() + sizeof(Staged);
  tables_[staged.table].waiting += staged.count;
  tables_[staged.table].fresh += staged.fresh;
  staged_.push_back(std::move(staged));
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
  unstage([&](const Staged& one) {
    if (one.worker != worker || one.clock >= ended) return false;
    SparseTable& table = tables_[one.table].table;
    // In Sync, a push for a clock that has ended is applied at once: its worker rejoined in the middle of that clock.
    if (table.options().consistency.mode == Mode::Sync && one.clock >= settled_) return false;
    table.step(rows_of(*one.payload, one.count), now, one.lr);
    return true;
  });
}

void State::settle(std::uint32_t now) {
  const std::int64_t until = workers_.least().value_or(workers_.most());
  for (; settled_ < until; ++settled_) {
    std::int64_t next = until;  // clocks without a push are skipped
    for (const Staged& one : staged_) {
      if (tables_[one.table].table.options().consistency.mode == Mode::Sync) next = std::min(next, one.clock);
    }
    settled_ = std::max(settled_, next);
    if (settled_ >= until) return;
    step_staged(now);
  }
}

void State::step_staged(std::uint32_t now) {
  for (std::uint32_t number = 0; number < tables_.size(); ++number) {
    SparseTable& table = tables_[number].table;
    if (table.options().consistency.mode != Mode::Sync) continue;
    std::vector<const Staged*> due;
    for (const Staged& one : staged_) {
      if (one.table == number && one.clock <= settled_) due.push_back(&one);
    }
    if (due.empty()) continue;
    std::stable_sort(due.begin(), due.end(), [](const Staged* a, const Staged* b) { return a->worker < b->worker; });
    std::size_t most = 0;
    for (const Staged* one : due) most += one->count;
    sum_.begin(table.dim(), most);
    for (const Staged* one : due) {
      const KeyedRows rows = rows_of(*one->payload, one->count);
      for (std::size_t i = 0; i < rows.count; ++i) {
        std::uint64_t key;
        std::memcpy(&key, static_cast<const char*>(rows.keys) + i * sizeof key, sizeof key);
        sum_.add(key, static_cast<const char*>(rows.rows) + i * table.dim() * sizeof(float));
      }
    }
    table.step({sum_.keys().data(), sum_.sums(), sum_.size()}, now, due.front()->lr);
    unstage([&](const Staged& one) { return one.table == number && one.clock <= settled_; });
  }
}

void State::drop_staged(std::uint32_t worker) {
  const std::int64_t ended = workers_.at(worker).committed;
  unstage([&](const Staged& one) { return one.worker == worker && one.clock >= ended; });
}

const SparseTable* State::table(std::uint32_t number) const noexcept {
  return number < tables_.size() ? &tables_[number].table : nullptr;
}

std::optional<std::uint32_t> State::find(std::string_view name) const noexcept {
  for (std::uint32_t i = 0; i < tables_.size(); ++i) {
    if (tables_[i].table.name() == name) return i;
  }
  return std::nullopt;
}

bool State::may_read(std::uint32_t number, std::int64_t clock) const noexcept {
  const Consistency& rule = tables_[number].table.options().consistency;
  switch (rule.mode) {
    case Mode::Sync: return settled_ >= clock;
    case Mode::Bounded: return !workers_.least() || *workers_.least() >= clock - rule.staleness;
    case Mode::Async: break;
  }
  return true;
}

std::string State::awaited(std::uint32_t number, std::int64_t clock) const {
  const Consistency& rule = tables_[number].table.options().consistency;
  return workers_.behind(rule.mode == Mode::Bounded ? clock - rule.staleness : clock);
}

std::int64_t State::clock_of(std::uint32_t number) const noexcept {
  if (tables_[number].table.options().consistency.mode == Mode::Sync) return settled_;
  return workers_.least().value_or(workers_.most());
}

std::size_t State::bytes() const noexcept {
  std::size_t bytes = staged_bytes_ + sum_.bytes();
  for (const Served& served : tables_) bytes += served.table.counts().bytes;
  return bytes;
}

std::size_t State::copied() const noexcept {
  if (views_->load(std::memory_order_acquire) == 0) return 0;
  std::size_t bytes = frozen_staged_;
  for (const Served& served : tables_) bytes += served.table.copied();
  return bytes;
}

bool State::has_staged(std::uint32_t worker, std::int64_t clock) const noexcept {
  return std::any_of(staged_.begin(), staged_.end(),
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

}  // namespace cohort::ps
