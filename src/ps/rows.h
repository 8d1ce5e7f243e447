// The rows of a sparse table in one process. A row is one record: header, weights, the optimizer's slots, side by side
// in slabs; an index leads from a key to its row's number. A row that is erased leaves its place to the next one. No
// memory is taken for a row but a slab's at a time. `freeze` gives what there is at that moment to be read on any
// thread: a slab of it is copied before it changes. Owns its memory; one thread at a time.
#pragma once

#include "ps/huge_pages.h"
#include "ps/key_map.h"
#include "ps/placement.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
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

/// How many views of something are read, on whatever threads.
using Views = std::shared_ptr<std::atomic<int>>;

class Rows : public Slabs {
 public:
  static constexpr std::uint32_t kNone = KeyMap::kNone;

  /// Of so many floats each.
  explicit Rows(std::size_t floats);

  /// What there is now. As long as `views` counts any, it does not change, whatever happens to the rows.
  Slabs freeze(const Views& views);
  /// Memory that slabs take which such views alone have now.
  std::size_t copied() const noexcept { return is_read() ? copied_ : 0; }
  /// How many slabs would be copied before they are written to.
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

  /// To be written to: what was read of the row before, by its address, may be of a view.
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

}  // namespace cohort::ps
