#include "ps/rows.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace cohort::ps {
namespace {

constexpr std::size_t kSlab = std::size_t{2} << 20;
constexpr std::size_t kMostPrefetched = 1024;  // the hardware goes on by itself where a row is longer

}  // namespace

Rows::Rows(std::size_t floats)
    : row_bytes_((sizeof(RowHeader) + floats * sizeof(float) + 7) / 8 * 8),
      floats_(floats),
      prefetched_(std::min(row_bytes_, kMostPrefetched)) {
  while ((row_bytes_ << (shift_ + 1)) <= kSlab) ++shift_;
}

void Rows::make_place(std::uint32_t number) {
  if ((number >> shift_) < slabs_.size()) return;
  slabs_.emplace_back(static_cast<std::byte*>(::operator new[](slab_bytes(), std::align_val_t(kSlabAlign))));
  // Rows are met in no order: with small pages, half of the time goes into finding the page. Not for small tables,
  // which would take two megabytes each. Only a wish.
  if (slabs_.size() > 1) (void)::madvise(slabs_.back().get(), slab_bytes(), MADV_HUGEPAGE);
}

std::uint32_t Rows::create(std::uint64_t key, std::uint64_t hash) {
  const bool fresh = free_ == kNone;
  const std::uint32_t number = fresh ? end_ : free_;
  if (fresh) make_place(number);
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

void Rows::load(const RowHeader& header, const void* floats) {
  const std::uint32_t number = end_;
  make_place(number);
  if (header.last != 0) {
    this->header(number) = header;
    index_.insert(mix64(header.key), number, [this](std::uint32_t other) { return mix64(this->header(other).key); });
    std::memcpy(this->floats(number), floats, floats_ * sizeof(float));
  } else {
    this->header(number) = {0, header.steps, 0};
    ++freed_;
  }
  ++end_;
}

bool Rows::end_load(std::uint32_t first_free) {
  std::size_t met = 0;
  for (std::uint32_t number = first_free; number != kNone; number = header(number).steps) {
    if (number >= end_ || lives(number) || ++met > freed_) return false;
  }
  free_ = first_free;
  return met == freed_;
}

std::size_t Rows::bytes_with(std::size_t more) const noexcept {
  const std::size_t fresh = more > freed_ ? more - freed_ : 0;
  const std::size_t slabs = (end_ + fresh + (std::size_t{1} << shift_) - 1) >> shift_;
  const std::size_t index = KeyMap::bytes_for(size() + more);
  return std::max(slabs, slabs_.size()) * slab_bytes() + std::max(index, index_.bytes()) +
         (index > index_.bytes() ? index_.bytes() : 0);
}

}  // namespace cohort::ps
