#include "ps/rows.h"

#include <sys/mman.h>

#include <algorithm>

namespace cohort::ps {
namespace {

constexpr std::size_t kSlab = std::size_t{2} << 20;
constexpr std::size_t kMostPrefetched = 1024;  // the hardware goes on by itself where a row is longer

}  // namespace

Rows::Rows(std::size_t floats)
    : row_bytes_((sizeof(RowHeader) + floats * sizeof(float) + 7) / 8 * 8),
      prefetched_(std::min(row_bytes_, kMostPrefetched)) {
  while ((row_bytes_ << (shift_ + 1)) <= kSlab) ++shift_;
}

std::uint32_t Rows::create(std::uint64_t key, std::uint64_t hash) {
  const bool fresh = free_ == kNone;
  const std::uint32_t number = fresh ? end_ : free_;
  if (fresh && (number >> shift_) == slabs_.size()) {
    slabs_.emplace_back(static_cast<std::byte*>(::operator new[](slab_bytes(), std::align_val_t(kSlabAlign))));
    // Rows are met in no order: with small pages, half of the time goes into finding the page. Not for small tables,
    // which would take two megabytes each. Only a wish.
    if (slabs_.size() > 1) (void)::madvise(slabs_.back().get(), slab_bytes(), MADV_HUGEPAGE);
  }
  // From here on it is in the index, or nothing has happened.
  index_.insert(hash, number, [this](std::uint32_t other) { return mix64(header(other).key); });
  if (fresh) {
    ++end_;
  } else {
    free_ = header(number).steps;
    --freed_;
  }
  header(number) = {key, 0, 1};
  return number;
}

void Rows::erase(std::uint32_t number) noexcept {
  index_.erase(mix64(header(number).key), number, [this](std::uint32_t other) { return mix64(header(other).key); });
  header(number) = {0, free_, 0};
  free_ = number;
  ++freed_;
}

std::size_t Rows::bytes_with(std::size_t more) const noexcept {
  const std::size_t fresh = more > freed_ ? more - freed_ : 0;
  const std::size_t slabs = (end_ + fresh + (std::size_t{1} << shift_) - 1) >> shift_;
  const std::size_t index = KeyMap::bytes_for(size() + more);
  return std::max(slabs, slabs_.size()) * slab_bytes() + std::max(index, index_.bytes()) +
         (index > index_.bytes() ? index_.bytes() : 0);
}

}  // namespace cohort::ps
