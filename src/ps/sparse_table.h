// The rows of a sparse table in one process. A row is one record: header, weights, the optimizer's slots, side by side
// in slabs; an index leads from a key to its row's number. A row that is erased leaves its place to the next one. No
// memory is taken for a row but a slab's at a time. `freeze` gives a view of the moment, to be read on any thread: a
// slab of it is copied before it changes. Owns its memory; one thread at a time.
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
  std::uint32_t last = 0;  ///< when the last step was, seconds since 1970; 0: there is no row here
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
  /// number / in_slab_: exact for 32 bits with the inverse in 64, rounded up.
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

/// Number of views of something that are being read, on any threads.
using Views = std::shared_ptr<std::atomic<int>>;

class Rows : public Slabs {
 public:
  static constexpr std::uint32_t kNone = KeyMap::kNone;

  /// Rows of this many floats each.
  explicit Rows(std::size_t floats);

  /// The present rows. As long as `views` counts any, the result does not change, whatever happens to the rows.
  Slabs freeze(const Views& views);
  /// Memory of slabs that only such views hold now.
  std::size_t copied() const noexcept { return is_read() ? copied_ : 0; }
  /// Number of slabs that would be copied before they are written to.
  std::size_t frozen() const noexcept { return is_read() ? frozen_ : 0; }
  std::size_t slab_bytes() const noexcept { return slab_bytes_; }

  std::size_t size() const noexcept { return index_.size(); }
  /// Numbers of rows are below this.
  std::uint32_t end() const noexcept { return end_; }
  std::uint32_t find(std::uint64_t key, std::uint64_t hash) const noexcept {
    return index_.find(hash, [&](std::uint32_t number) { return header(number).key == key; });
  }
  /// A row that is not there yet; its floats are not set, its header has the key alone. Throws std::bad_alloc.
  std::uint32_t create(std::uint64_t key, std::uint64_t hash);
  void erase(std::uint32_t number);

  /// A row to be written to: an address read before may belong to a view.
  struct Row {
    RowHeader& header;
    float* floats;
  };
  Row own(std::uint32_t number) {
    if (views_) own_slab(slab_of(number));
    std::byte* const at = place(number);
    return {*reinterpret_cast<RowHeader*>(at), reinterpret_cast<float*>(at + sizeof(RowHeader))};
  }

  /// The first free place, and how many there are: `steps` of each says the next.
  std::uint32_t first_free() const noexcept { return free_; }
  /// From an image: the next place, a row's or a free one; then which is the first free one. False: the free ones are
  /// no chain from there. The floats of a free place are not read.
  void load(const RowHeader& header, const void* floats);
  bool end_load(std::uint32_t first_free);

  void prefetch_index(std::uint64_t hash) const noexcept { index_.prefetch(hash); }
  /// After `prefetch_index`, some time before the row is used.
  void prefetch_row(std::uint64_t hash) const noexcept {
    const std::uint32_t number = index_.guess(hash);
    if (number == kNone) return;
    const std::byte* row = place(number);
    for (std::size_t line = 0; line < prefetched_; line += 64) __builtin_prefetch(row + line);
    __builtin_prefetch(row + prefetched_ - 1);  // rows do not begin with a line
  }

  bool grows_with(std::size_t more) const noexcept { return index_.grows_with(more); }
  /// Memory that is held.
  std::size_t bytes() const noexcept { return slabs_.size() * slab_bytes_ + index_.bytes(); }
  /// Memory that will be held with so many more rows, and meanwhile while the index grows.
  std::size_t bytes_with(std::size_t more) const noexcept;

 private:
  bool is_read() const noexcept { return views_ && views_->load(std::memory_order_acquire) > 0; }
  void make_place(std::uint32_t number);
  void own_slab(std::uint32_t slab);

  std::size_t floats_;
  std::size_t prefetched_;
  Views views_;                 // null: none have a slab
  std::vector<bool> own_;       // with views: by slab, whether none of them has it
  std::size_t frozen_ = 0;      // with views: slabs that they have
  std::size_t copied_ = 0;      // with views: bytes of those that they alone have
  std::uint32_t free_ = kNone;  // the first free place; its `steps` say the next
  std::size_t freed_ = 0;
  std::uint32_t end_ = 0;
  KeyMap index_;
};

// A sparse table in one process: its rows, their initial values, optimizer steps and eviction. Its state is a function
// of the calls that change it, their order and the times passed to them, so a log of them makes the same table again;
// reading changes nothing. Keys and floats of messages need not be aligned. One thread at a time.

/// InvalidArgument, saying which option and why.
Result<void> check(const TableOptions& options);
/// Text as in Python: "Bounded(4)".
std::string described(const Consistency& consistency);

/// Keys, and the floats of as many rows, one after the other.
struct KeyedRows {
  const void* keys = nullptr;
  const void* rows = nullptr;
  std::size_t count = 0;
};

/// The part of a table's image beside its rows and counters.
struct TableShape {
  std::uint32_t end = 0;         ///< places of rows
  std::uint32_t first_free = 0;  ///< of them
  std::uint32_t hand = 0;        ///< position at which eviction goes on
  std::uint64_t seen = 0;
  TableCounts counts;
};

/// Bytes in a snapshot of the counter of a key that is not admitted yet.
inline constexpr std::size_t kSeenBytes = sizeof(std::uint64_t) + sizeof(std::uint32_t);

/// A table as it was at a moment, to be read on any thread.
class FrozenTable {
 public:
  const std::string& name() const noexcept { return name_; }
  const TableOptions& options() const noexcept { return options_; }
  const TableShape& shape() const noexcept { return shape_; }
  /// Floats per row.
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

  /// Copies the rows, or the initial values of absent ones. Creates none.
  void read(const void* keys, std::size_t count, void* out, std::uint32_t now) const;
  /// One step of each; a key may come several times. Throws std::bad_alloc, and then some have been stepped: see
  /// `bytes_with`.
  void step(const KeyedRows& gradients, std::uint32_t now, std::optional<double> lr = std::nullopt);
  /// The weights as given, the slots as they begin.
  void assign(const KeyedRows& weights, std::uint32_t now);
  /// Erases the keys that have rows.
  void erase(const void* keys, std::size_t count);

  /// Memory that will be held at most after steps of so many keys without a row.
  std::size_t bytes_with(std::size_t count) const;
  /// Number of the keys that have no row.
  std::size_t fresh(std::size_t count, const void* keys) const;

  /// Floats per row.
  std::size_t floats() const noexcept { return floats_; }
  /// The table as it is now; as long as `views` counts any, the result does not change. Takes as long as copying the
  /// counters.
  FrozenTable freeze(const Views& views);
  /// Memory held by views alone.
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
  /// Replaces the key's row. The floats need not be aligned.
  void restore(const RowHeader& header, const void* floats);
  void restore_seen(std::uint64_t key, std::uint32_t count);

  /// From an image the same table is made again, to its order: a new one takes all places and counters, then its shape.
  /// False: it cannot be.
  TableShape shape() const noexcept;
  void load_place(const RowHeader& header, const void* floats) { rows_.load(header, floats); }
  bool end_load(const TableShape& shape);
  /// Digest of the rows at these places.
  std::uint64_t digest(std::uint32_t first, std::uint32_t count) const noexcept;

 private:
  using Seen = FrozenTable::Seen;

  bool expired(const RowHeader& header, std::uint32_t now) const noexcept;
  void begin_row(std::uint32_t number, std::uint64_t key);
  /// Number of the key's row, made if it was not there; kNone: not admitted.
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
  std::size_t frozen_seen_ = 0;  // counters that the latest view has
  std::vector<float> gradient_;
  std::uint32_t hand_ = 0;
  TableCounts counts_;
};

// Values of a row before its first step. A function of seed, key and position: the same on every server, at every time,
// and after the row has been evicted and comes back. (Normal values go through the C library's log and cos; their last
// bit may differ from one C library to another.) Pure; any thread.

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
