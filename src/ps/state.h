// What a parameter server has: tables, workers, and pushes whose clock has not ended. It changes by commands alone, and
// is a function of them, their order and the times that they bring. So a journal of commands is a server's memory, and
// what it has read is not in it. No I/O; one thread at a time.
#pragma once

#include "base/result.h"
#include "ps/keyed_sum.h"
#include "ps/protocol.h"
#include "ps/sparse_table.h"
#include "ps/workers.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::ps {

struct Command {
  std::uint32_t now = 0;  ///< seconds since 1970
  Method method = Method::Push;
  std::uint32_t worker = 0;
  std::uint64_t incarnation = 0;
  std::string_view body = {};
};

class State {
 public:
  const Workers& workers() const noexcept { return workers_; }
  /// What the latest worker that has joined said, of the servers too.
  const std::optional<Hello>& introduced() const noexcept { return introduced_; }
  /// Clocks whose pushes have been made in tables of Mode::Sync.
  std::int64_t settled() const noexcept { return settled_; }
  /// For how many workers no clock waits: the same for all tables.
  std::int64_t backup_workers() const noexcept;
  /// At which a worker that comes again begins.
  std::int64_t next_clock() const noexcept { return backup_workers() > 0 ? settled_ : workers_.most(); }
  /// With backup workers: whose pushes of the last settled clock counted.
  Concluded concluded(std::uint32_t worker) const;

  /// Whether a worker may come so: InvalidArgument, Mismatch, Aborted.
  Result<void> may_join(const Hello& hello) const;
  /// Whether the body of a change is whole, its table known, and memory enough: else why it is refused. `limit`: bytes
  /// that tables and waiting pushes may take.
  Result<void> check(const Command& command, std::size_t limit) const;
  /// The same for rows of a snapshot, but their memory.
  Result<void> check_adopt(const Command& command) const;
  /// Of a change that came in its turn: its number counts from now on. Never fails for what `check` let pass.
  void run(const Command& command);

  /// A command from a journal, or for a copy: as `run`, but that it is looked at first. Corrupt if it could not have
  /// been written, or if rows are not what a command of Method::Verify says.
  Result<void> replay(const Command& command);

  /// Calls `take` with the pieces of an image, bodies of Method::Piece: a new state that replays them is this one.
  void image(const std::function<void(std::string piece)>& take) const;
  /// Whether an image has begun, and not ended.
  bool loading() const noexcept { return loading_; }
  /// What some rows have to be, for a command of Method::Verify: others each time. nullopt: there are none.
  std::optional<Verify> some_rows(std::uint64_t turn) const;

  /// The table of this number; nullptr.
  const SparseTable* table(std::uint32_t number) const noexcept;
  std::optional<std::uint32_t> find(std::string_view name) const noexcept;

  /// Whether a worker at this clock may read the table.
  bool may_read(std::uint32_t table, std::int64_t clock) const noexcept;
  /// Whom it waits for.
  std::string awaited(std::uint32_t table, std::int64_t clock) const;
  /// All pushes of earlier clocks are in the table.
  std::int64_t clock_of(std::uint32_t table) const noexcept;

  std::size_t bytes() const noexcept;

  /// For snapshots.
  std::uint32_t tables() const noexcept { return static_cast<std::uint32_t>(tables_.size()); }
  std::int64_t elements(std::uint32_t table) const noexcept { return tables_[table].elements; }

  /// Whether there are pushes of a worker's clocks from this one on that wait for their end.
  bool has_staged(std::uint32_t worker, std::int64_t clock) const noexcept;
  /// How many clocks this incarnation had ended, after a command of Method::Settle.
  std::int64_t ended(const Settle& asked) const;

 private:
  struct Served {
    SparseTable table;
    std::int64_t elements;
    std::size_t waiting = 0;  // rows of its staged pushes
  };
  struct Staged {
    std::uint32_t worker;
    std::int64_t clock;
    std::uint32_t table;
    std::optional<double> lr;
    std::size_t count;
    std::string payload;
  };

  Result<void> load(std::string_view piece);
  Result<void> check_change(const Command& command, std::size_t limit) const;
  void adopt(const Command& command);
  Result<void> check_open(const Open& open, std::size_t limit) const;
  void push(const Command& command, const Change& change, std::string_view payload);
  Result<void> verify(const Command& command) const;
  void commit(std::uint32_t worker, std::int64_t clocks, std::uint32_t now);
  void fence(const Settle& asked);
  void stage(Staged staged);
  void drop_staged(std::uint32_t worker);
  /// A worker that is lost, has left, or comes again: what it has pushed, but not ended, is dropped.
  void withdraw(std::uint32_t worker);
  /// Takes out those for which `taken` says true.
  template <class Taken>
  void unstage(Taken&& taken);
  /// Makes those staged pushes of a worker that its ended clocks allow, in tables that wait for nobody.
  void make_committed(std::uint32_t worker, std::uint32_t now);
  void settle(std::uint32_t now);
  /// What is staged of clocks up to `settled_`, as one step of each row.
  void step_staged(std::uint32_t now);

  // state_quorum.cpp: with backup workers
  bool decides() const noexcept { return introduced_ && introduced_->server == 0; }
  Result<void> check_backup_workers(const Open& open) const;
  Result<void> check_propose(const Command& command) const;
  Result<void> check_conclude(const Command& command) const;
  void propose(std::uint32_t worker, std::int64_t clock, std::uint32_t now);
  void conclude(std::uint32_t worker, const Conclude& told, std::uint32_t now);
  void seek_quorum(std::uint32_t now);
  void end_clock(std::uint32_t now);

  static KeyedRows rows_of(std::string_view payload, std::size_t count) noexcept;

  Workers workers_;
  std::optional<Hello> introduced_;
  bool loading_ = false;
  std::deque<Served> tables_;
  std::deque<Staged> staged_;  // in the order in which they came
  std::size_t staged_bytes_ = 0;
  std::int64_t settled_ = 0;
  std::vector<std::uint32_t> quorum_;  // with backup workers: of the last settled clock
  KeyedSum sum_;
};

template <class Taken>
void State::unstage(Taken&& taken) {
  std::erase_if(staged_, [&](const Staged& one) {
    if (!taken(one)) return false;
    staged_bytes_ -= one.payload.size() + sizeof(Staged);
    tables_[one.table].waiting -= one.count;
    return true;
  });
}

}  // namespace cohort::ps
