// The rows of a sparse table in one process. A row is one record: header, weights, the optimizer's slots, side by side
// in slabs that never move; an index leads from a key to its row's number. A row that is erased leaves its place to the
// next one. No memory is taken for a row but a slab's at a time. Owns its memory; one thread at a time.
#pragma once

#include "ps/huge_pages.h"
#include "ps/key_map.h"
#include "ps/placement.h"

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

class Rows {
 public:
  static constexpr std::uint32_t kNone = KeyMap::kNone;

  /// Of so many floats each.
  explicit Rows(std::size_t floats);

  std::size_t size() const noexcept { return index_.size(); }
  /// Numbers of rows are below this.
  std::uint32_t end() const noexcept { return end_; }
  bool lives(std::uint32_t number) const noexcept { return header(number).last != 0; }
  std::uint32_t find(std::uint64_t key, std::uint64_t hash) const noexcept {
    return index_.find(hash, [&](std::uint32_t number) { return header(number).key == key; });
  }
  /// A row that is not there yet; its floats are not set, its header has the key alone. Throws std::bad_alloc.
  std::uint32_t create(std::uint64_t key, std::uint64_t hash);
  void erase(std::uint32_t number) noexcept;

  RowHeader& header(std::uint32_t number) noexcept { return *reinterpret_cast<RowHeader*>(place(number)); }
  const RowHeader& header(std::uint32_t number) const noexcept {
    return *reinterpret_cast<const RowHeader*>(place(number));
  }
  float* floats(std::uint32_t number) noexcept { return reinterpret_cast<float*>(place(number) + sizeof(RowHeader)); }
  const float* floats(std::uint32_t number) const noexcept {
    return reinterpret_cast<const float*>(place(number) + sizeof(RowHeader));
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

  /// Memory that is held.
  std::size_t bytes() const noexcept { return slabs_.size() * slab_bytes_ + index_.bytes(); }
  /// Memory that will be held with so many more rows, and meanwhile while the index grows.
  std::size_t bytes_with(std::size_t more) const noexcept;

 private:
  struct Free {
    void operator()(std::byte* slab) const noexcept { ::operator delete[](slab, std::align_val_t(kHugePage)); }
  };

  /// number / in_slab_: exact for 32 bits with the inverse in 64, rounded up.
  std::uint32_t slab_of(std::uint32_t number) const noexcept {
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::uint32_t>((static_cast<Wide>(inverse_) * number) >> 64);
  }
  void make_place(std::uint32_t number);
  std::byte* place(std::uint32_t number) const noexcept {
    const std::uint32_t slab = slab_of(number);
    return slabs_[slab].get() + (number - slab * in_slab_) * row_bytes_;
  }

  std::size_t row_bytes_;
  std::size_t floats_;
  std::size_t prefetched_;
  std::uint32_t in_slab_;  // rows
  std::size_t slab_bytes_;
  std::uint64_t inverse_;
  std::vector<std::unique_ptr<std::byte[], Free>> slabs_;
  std::uint32_t free_ = kNone;  // the first free place; its `steps` say the next
  std::size_t freed_ = 0;
  std::uint32_t end_ = 0;
  KeyMap index_;
};

}  // namespace cohort::ps
