// The rows of a sparse table in one process. A row is one record: header, weights and the optimizer's slots, side by
// side in a slab; an index maps a key to its row's number. A new row takes the place of an erased one. Memory is
// allocated by the slab. `freeze` returns a view of one moment, readable on any thread: a slab in use by a view is
// copied before it changes. Owns its memory; one thread at a time.
#pragma once

#include "base/result.h"
#include "ps/key_map.h"
#include "ps/protocol.h"
#include "ps/server_map.h"

#include <cohort/ps_options.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace cohort::ps {

struct RowHeader {
  std::uint64_t key = 0;
  std::uint32_t steps = 0;
  std::uint32_t last = 0;  ///< time of the last step, seconds since 1970; 0: there is no row at this place
};
static_assert(sizeof(RowHeader) == 16);

/// Rows by their numbers, in slabs.
class Slabs {
 public:
  explicit Slabs(std::size_t floats);

  const RowHeader& header(std::uint32_t number) const noexcept {
    return *reinterpret_cast<const RowHeader*>(place(number));
  }
  const float* floats(std::uint32_t number) const noexcept {
    return reinterpret_cast<const float*>(place(number) + sizeof(RowHeader));
  }
  bool lives(std::uint32_t number) const noexcept { return header(number).last != 0; }

 protected:
  /// Returns number / in_slab_: exact for 32-bit numbers, since the inverse has 64 bits and is rounded up.
  std::uint32_t slab_of(std::uint32_t number) const noexcept {
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::uint32_t>((static_cast<Wide>(inverse_) * number) >> 64);
  }
  std::byte* place(std::uint32_t number) const noexcept {
    const std::uint32_t slab = slab_of(number);
    return slabs_[slab].get() + (number - slab * in_slab_) * row_bytes_;
  }

  std::size_t row_bytes_;
  std::uint32_t in_slab_;  // rows
  std::size_t slab_bytes_;
  std::uint64_t inverse_;
  std::vector<std::shared_ptr<std::byte[]>> slabs_;
};

/// Counts the views of a state or table that are in use, on any threads.
using Views = std::shared_ptr<std::atomic<int>>;

class Rows : public Slabs {
 public:
  static constexpr std::uint32_t kNone = KeyMap::kNone;

  /// Makes rows of this many floats each.
  explicit Rows(std::size_t floats);

  /// Returns a view of the present rows. As long as `views` is above 0, the view does not change when the rows do.
  Slabs freeze(const Views& views);
  /// Memory of slabs that only views hold now.
  std::size_t copied() const noexcept { return is_read() ? copied_ : 0; }
  /// Number of slabs that would be copied before they are written to.
  std::size_t frozen() const noexcept { return is_read() ? frozen_ : 0; }
  std::size_t slab_bytes() const noexcept { return slab_bytes_; }

  std::size_t size() const noexcept { return index_.size(); }
  /// All rows' numbers are below this.
  std::uint32_t end() const noexcept { return end_; }
  std::uint32_t find(std::uint64_t key, std::uint64_t hash) const noexcept {
    return index_.find(hash, [&](std::uint32_t number) { return header(number).key == key; });
  }
  /// Creates the row of an absent key, with only the key set in its header; its floats are not set. Throws
  /// std::bad_alloc.
  std::uint32_t create(std::uint64_t key, std::uint64_t hash);
  void erase(std::uint32_t number);

  /// A row's address for writing. (An address for reading may lie in memory that belongs to a view.)
  struct Row {
    RowHeader& header;
    float* floats;
  };
  Row own(std::uint32_t number) {
    if (views_) own_slab(slab_of(number));
    std::byte* const at = place(number);
    return {*reinterpret_cast<RowHeader*>(at), reinterpret_cast<float*>(at + sizeof(RowHeader))};
  }

  /// Number of the first free place; `steps` of each free place is the number of the next.
  std::uint32_t first_free() const noexcept { return free_; }
  /// Rebuild the rows from an image: `load` appends the next place, a row's or a free one (whose floats are not read);
  /// `end_load` sets the first free place. Returns false if the free places are not one chain from there.
  void load(const RowHeader& header, const void* floats);
  bool end_load(std::uint32_t first_free);

  void prefetch_index(std::uint64_t hash) const noexcept { index_.prefetch(hash); }
  /// Prefetches the row. To be called after `prefetch_index`, some time before the row is used.
  void prefetch_row(std::uint64_t hash) const noexcept {
    const std::uint32_t number = index_.guess(hash);
    if (number == kNone) return;
    const std::byte* row = place(number);
    for (std::size_t line = 0; line < prefetched_; line += 64) __builtin_prefetch(row + line);
    __builtin_prefetch(row + prefetched_ - 1);  // a row need not begin at a cache line's start
  }

  bool grows_with(std::size_t more) const noexcept { return index_.grows_with(more); }
  /// Memory that the rows hold.
  std::size_t bytes() const noexcept { return slabs_.size() * slab_bytes_ + index_.bytes(); }
  /// Memory that the rows will hold with this many more, including both copies of the index while it grows.
  std::size_t bytes_with(std::size_t more) const noexcept;

 private:
  bool is_read() const noexcept { return views_ && views_->load(std::memory_order_acquire) > 0; }
  void make_place(std::uint32_t number);
  void own_slab(std::uint32_t slab);

  std::size_t floats_;
  std::size_t prefetched_;
  Views views_;                 // null: no view has a slab
  std::vector<bool> own_;       // with views: by slab, whether no view has it
  std::size_t frozen_ = 0;      // with views: slabs that the latest view still shares
  std::size_t copied_ = 0;      // with views: bytes of slabs that only views have
  std::uint32_t free_ = kNone;  // the first free place; its `steps` is the next one
  std::size_t freed_ = 0;
  std::uint32_t end_ = 0;
  KeyMap index_;
};

// A sparse table in one process: its rows, their initial values, optimizer steps and eviction. Its state is a function
// of the calls that change it, their order and the times passed to them, so replaying a log of these calls gives the
// same table; reading changes nothing. Keys and floats of messages need not be aligned. One thread at a time.

/// Fails with InvalidArgument, naming the option and what is wrong with it.
Result<void> check(const TableOptions& options);

/// `count` keys, and the floats of `count` rows, one after the other.
struct KeyedRows {
  const void* keys = nullptr;
  const void* rows = nullptr;
  std::size_t count = 0;
};

/// The part of a table's image other than its rows and counters.
struct TableShape {
  std::uint32_t end = 0;         ///< number of places, of rows and free ones
  std::uint32_t first_free = 0;  ///< number of the first free place
  std::uint32_t hand = 0;        ///< place at which eviction continues
  std::uint64_t seen = 0;
  TableCounts counts;
};

/// Bytes that the counter of a key that is not admitted yet takes in a snapshot.
inline constexpr std::size_t kSeenBytes = sizeof(std::uint64_t) + sizeof(std::uint32_t);

/// A view of a table at one moment, readable on any thread.
class FrozenTable {
 public:
  const std::string& name() const noexcept { return name_; }
  const TableOptions& options() const noexcept { return options_; }
  const TableShape& shape() const noexcept { return shape_; }
  /// Floats per row.
  std::size_t floats() const noexcept { return floats_; }
  /// Visit all rows, and all counters of keys that are not admitted yet.
  void for_each(const std::function<void(const RowHeader&, const float*)>& visit) const;
  void for_each_seen(const std::function<void(std::uint64_t key, std::uint32_t count)>& visit) const;
  /// Visits places in order, also free ones (whose floats are passed as null).
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
  /// `options`: `check` has accepted them.
  SparseTable(std::string name, const TableOptions& options);

  const std::string& name() const noexcept { return name_; }
  const TableOptions& options() const noexcept { return options_; }
  std::size_t dim() const noexcept { return dim_; }
  TableCounts counts() const noexcept;

  /// Copies the keys' rows to `out`, or the initial values of absent rows, without creating these.
  void read(const void* keys, std::size_t count, void* out, std::uint32_t now) const;
  /// Steps each key's row; a key may appear several times. If it throws std::bad_alloc, some rows have been stepped:
  /// see `bytes_with`.
  void step(const KeyedRows& gradients, std::uint32_t now, std::optional<double> lr = std::nullopt);
  /// Sets the rows' weights, and resets their slots.
  void assign(const KeyedRows& weights, std::uint32_t now);
  /// Erases the keys that have rows.
  void erase(const void* keys, std::size_t count);

  /// Upper bound of the table's memory after steps of this many keys without a row.
  std::size_t bytes_with(std::size_t count) const;
  /// Returns how many of the keys have no row.
  std::size_t fresh(std::size_t count, const void* keys) const;

  /// Floats per row.
  std::size_t floats() const noexcept { return floats_; }
  /// Returns a view of the table, which does not change as long as `views` is above 0. Takes as long as copying the
  /// counters.
  FrozenTable freeze(const Views& views);
  /// Memory that only views hold.
  std::size_t copied() const noexcept {
    return rows_.copied() + (rows_.frozen() + rows_.copied() > 0 ? frozen_seen_ * sizeof(Seen) : 0);
  }
  /// Cost of a step or assignment of this many keys: roughly how many floats are worked through or copied, and the
  /// memory of the copies made for views.
  struct Effort {
    std::size_t floats = 0;
    std::size_t copied = 0;
  };
  Effort effort(std::size_t count) const noexcept;
  /// For snapshots.
  /// Replace a key's row, or counter. The floats need not be aligned.
  void restore(const RowHeader& header, const void* floats);
  void restore_seen(std::uint64_t key, std::uint32_t count);

  /// Rebuild a table from its image, in the same order: a new table loads all places and counters, then its shape.
  /// `end_load` returns false if the shape does not fit them.
  TableShape shape() const noexcept;
  void load_place(const RowHeader& header, const void* floats) { rows_.load(header, floats); }
  bool end_load(const TableShape& shape);
  /// Digest of the rows at these places.
  std::uint64_t digest(std::uint32_t first, std::uint32_t count) const noexcept;

 private:
  using Seen = FrozenTable::Seen;

  bool expired(const RowHeader& header, std::uint32_t now) const noexcept;
  void begin_row(std::uint32_t number, std::uint64_t key);
  /// Returns the number of the key's row, creating it if absent; kNone if the key is not admitted.
  std::uint32_t row_for(std::uint64_t key, std::uint64_t hash, std::uint32_t now, bool admitted);
  void count_from_one(std::uint64_t key, std::uint64_t hash, std::uint32_t place);
  void drop_counter(std::uint32_t place);
  std::size_t most_seen() const noexcept;
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
  std::size_t frozen_seen_ = 0;  // number of counters in the latest view
  std::vector<float> gradient_;
  std::uint32_t hand_ = 0;
  TableCounts counts_;
};

// Values of a row before its first step: a function of seed, key and position, so they are the same on every server, at
// any time, and after the row has been evicted and comes back. (Normal values use the C library's log and cos; their
// last bit may differ between C libraries.) Pure; any thread.

void fill_initial(std::span<float> row, const Initializer& initializer, std::uint64_t seed, std::uint64_t key) noexcept;

// Random numbers that are a function of a key and a counter: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel
// random numbers: as easy as 1, 2, 3"). Pure; any thread.

using PhiloxCounter = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

inline PhiloxCounter philox(PhiloxCounter counter, PhiloxKey key) noexcept {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t first = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t second = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<std::uint32_t>(second >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(second),
               static_cast<std::uint32_t>(first >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(first)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

}  // namespace cohort::ps
