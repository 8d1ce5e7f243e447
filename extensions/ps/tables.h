// The tables of a server, and the pushes to them that wait for the end of their clock (staged): steps them together,
// and knows the memory that they take now and will take then. The State decides which clocks have ended. One thread at
// a time, except for views.
#pragma once

#include "base/result.h"
#include "ps/key_map.h"
#include "ps/protocol.h"
#include "ps/sparse_table.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::ps {

/// A push that waits for the end of its clock.
struct Staged {
  std::uint32_t worker;
  std::int64_t clock;
  std::uint32_t table;
  std::optional<double> lr;
  std::size_t count;
  std::shared_ptr<const std::string> payload;
  std::size_t fresh;     ///< at most this many of its keys have no row yet
  bool counted = false;  ///< whether that has been looked up
};

/// A view of the tables at one moment, readable on any thread. While it exists, the tables copy what they change.
struct FrozenTables {
  struct Table {
    FrozenTable table;
    std::int64_t elements;
  };
  std::vector<Table> all;
  std::deque<Staged> staged;
  std::shared_ptr<void> in_use;  // the tables copy what they change until its end; destroyed first, as the last member
};

class Tables {
 public:
  std::size_t count() const noexcept { return all_.size(); }
  SparseTable& at(std::size_t number) { return all_[number].table; }
  const SparseTable& at(std::size_t number) const { return all_[number].table; }
  const Consistency& rule(std::size_t number) const { return at(number).options().consistency; }
  bool is_sync(std::size_t number) const { return rule(number).mode == Mode::Sync; }
  std::optional<std::uint32_t> find(std::string_view name) const noexcept;
  void add(const std::string& name, const TableOptions& options, std::int64_t elements) {
    all_.push_back({SparseTable(name, options), elements});
  }

  /// Check a change's body, and that there is memory for it: see State::check.
  Result<void> check_open(const Open& open, std::size_t limit) const;
  Result<void> check_change(Method method, std::string_view body, std::size_t limit);
  /// Checks a command with rows of a snapshot in the same way, except for memory.
  Result<void> check_adopt(std::string_view body) const;
  void adopt(std::string_view body);
  /// Returns the digest of some rows, for a command of Method::Verify: other rows for each `turn`. nullopt if there are
  /// no rows.
  std::optional<Verify> some_rows(std::uint64_t turn) const;
  Result<void> verify(std::string_view body) const;

  void stage(Staged staged);
  const std::deque<Staged>& staged() const noexcept { return staged_; }
  /// Removes the staged pushes for which `taken` returns true.
  template <class Taken>
  void unstage(Taken&& taken);
  /// Applies pushes of tables of Mode::Sync that are staged for clocks up to this one, as one step of each row.
  void step_staged(std::int64_t clock, std::uint32_t now);
  /// Cost of applying all staged pushes.
  SparseTable::Effort effort_of_staged() const;

  FrozenTables freeze();
  /// Memory of tables and staged pushes, without memory that only views hold (`copied`).
  std::size_t bytes() const noexcept;
  std::size_t copied() const noexcept;

  static KeyedRows rows_of(std::string_view payload, std::size_t count) noexcept {
    return {payload.data(), payload.data() + count * sizeof(std::uint64_t), count};
  }

 private:
  struct Served {
    SparseTable table;
    std::int64_t elements;
    std::size_t waiting = 0;  // rows of staged pushes to this table
    std::size_t fresh = 0;    // most of those rows that may not exist yet
  };

  std::size_t bytes_with(std::uint32_t table, std::size_t fresh, std::size_t rows) const noexcept;
  void count_fresh();

  std::deque<Served> all_;
  std::deque<Staged> staged_;  // in order of arrival
  std::size_t staged_bytes_ = 0;
  std::size_t frozen_staged_ = 0;  // staged pushes when the latest view was made
  Views views_ = std::make_shared<std::atomic<int>>(0);
  KeyedSum sum_;
};

template <class Taken>
void Tables::unstage(Taken&& taken) {
  std::erase_if(staged_, [&](const Staged& one) {
    if (!taken(one)) return false;
    staged_bytes_ -= one.payload->size() + sizeof(Staged);
    all_[one.table].waiting -= one.count;
    all_[one.table].fresh -= one.fresh;
    return true;
  });
}

}  // namespace cohort::ps
