// A sparse table in one process: which rows are there, how they begin, are stepped, and go. What it does is a function
// of the calls that change it, their order and the times that they bring, so a log of them makes the same table again;
// reading changes nothing. Keys and floats of messages need not be aligned. One thread at a time.
#pragma once

#include "base/result.h"
#include "ps/keyed_sum.h"
#include "ps/protocol.h"
#include "ps/rows.h"

#include <cohort/ps_options.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::ps {

/// InvalidArgument, saying which option and why.
Result<void> check(const TableOptions& options);
/// As Python has it: "Bounded(4)".
std::string described(const Consistency& consistency);

/// Keys, and the floats of so many rows behind each other.
struct KeyedRows {
  const void* keys = nullptr;
  const void* rows = nullptr;
  std::size_t count = 0;
};

/// What an image has of a table beside its rows and counters.
struct TableShape {
  std::uint32_t end = 0;         ///< places of rows
  std::uint32_t first_free = 0;  ///< of them
  std::uint32_t hand = 0;        ///< where eviction goes on
  std::uint64_t seen = 0;
  TableCounts counts;
};

/// Of the counter of a key that is not admitted yet, in a snapshot.
inline constexpr std::size_t kSeenBytes = sizeof(std::uint64_t) + sizeof(std::uint32_t);

/// A table as it was at a moment, to be read on any thread.
class FrozenTable {
 public:
  const std::string& name() const noexcept { return name_; }
  const TableOptions& options() const noexcept { return options_; }
  const TableShape& shape() const noexcept { return shape_; }
  /// Of a row.
  std::size_t floats() const noexcept { return floats_; }
  /// All rows, and all counters of keys that are not admitted yet.
  void for_each(const std::function<void(const RowHeader&, const float*)>& visit) const;
  void for_each_seen(const std::function<void(std::uint64_t key, std::uint32_t count)>& visit) const;
  /// Rows by their places, free ones too (`floats` is null).
  void for_places(std::uint32_t first, std::uint32_t count,
                  const std::function<void(const RowHeader&, const float*)>& visit) const;

 private:
  friend class SparseTable;
  struct Seen {
    std::uint64_t key;
    std::uint32_t count;
  };

  std::string name_;
  TableOptions options_;
  std::size_t floats_;
  Slabs rows_;
  std::vector<Seen> seen_;
  TableShape shape_;
  FrozenTable(std::string name, const TableOptions& options, std::size_t floats, Slabs rows, std::vector<Seen> seen,
              const TableShape& shape)
      : name_(std::move(name)),
        options_(options),
        floats_(floats),
        rows_(std::move(rows)),
        seen_(std::move(seen)),
        shape_(shape) {}
};

class SparseTable {
 public:
  /// `options` have been checked.
  SparseTable(std::string name, const TableOptions& options);

  const std::string& name() const noexcept { return name_; }
  const TableOptions& options() const noexcept { return options_; }
  std::size_t dim() const noexcept { return dim_; }
  TableCounts counts() const noexcept;

  /// Copies of the rows, or what they begin as. Creates none.
  void read(const void* keys, std::size_t count, void* out, std::uint32_t now) const;
  /// One step of each; a key may come several times. Throws std::bad_alloc, and then some have been stepped: see
  /// `bytes_with`.
  void step(const KeyedRows& gradients, std::uint32_t now, std::optional<double> lr = std::nullopt);
  /// The weights as given, the slots as they begin.
  void assign(const KeyedRows& weights, std::uint32_t now);
  /// Those that are there.
  void erase(const void* keys, std::size_t count);

  /// Memory that will be held at most after steps of so many keys without a row.
  std::size_t bytes_with(std::size_t count) const;
  /// How many of the keys have none.
  std::size_t fresh(std::size_t count, const void* keys) const;

  /// Of a row.
  std::size_t floats() const noexcept { return floats_; }
  /// As it is now; as long as `views` counts any, that does not change. Takes as long as copying the counters.
  FrozenTable freeze(const Views& views);
  /// Memory that views alone have.
  std::size_t copied() const noexcept {
    return rows_.copied() + (rows_.frozen() + rows_.copied() > 0 ? frozen_seen_ * sizeof(Seen) : 0);
  }
  /// Of a step or assignment of so many keys: how many floats are worked through or copied, about, and the memory of
  /// what is copied for views.
  struct Effort {
    std::size_t floats = 0;
    std::size_t copied = 0;
  };
  Effort effort(std::size_t count) const noexcept;
  /// For snapshots.
  /// In place of what there is of the key. The floats need not be aligned.
  void restore(const RowHeader& header, const void* floats);
  void restore_seen(std::uint64_t key, std::uint32_t count);

  /// From an image the same table is made again, to its order: a new one takes all places and counters, then its shape.
  /// False: it cannot be.
  TableShape shape() const noexcept;
  void load_place(const RowHeader& header, const void* floats) { rows_.load(header, floats); }
  bool end_load(const TableShape& shape);
  /// Of the rows at these places.
  std::uint64_t digest(std::uint32_t first, std::uint32_t count) const noexcept;

 private:
  using Seen = FrozenTable::Seen;

  bool expired(const RowHeader& header, std::uint32_t now) const noexcept;
  void begin_row(std::uint32_t number, std::uint64_t key);
  /// Number of the key's row, made if it was not there; kNone: not admitted.
  std::uint32_t row_for(std::uint64_t key, std::uint64_t hash, std::uint32_t now, bool admitted);
  bool admit(std::uint64_t key, std::uint64_t hash);
  void make_room(std::uint32_t now);
  void sweep(std::uint32_t now);
  void evict(std::uint32_t number);

  const std::string name_;
  const TableOptions options_;
  const std::size_t dim_;
  const std::size_t floats_;
  Rows rows_;
  KeyMap seen_index_;
  std::vector<Seen> seen_;
  std::size_t frozen_seen_ = 0;  // counters that the latest view has
  std::vector<float> gradient_;
  std::uint32_t hand_ = 0;
  TableCounts counts_;
};

}  // namespace cohort::ps
