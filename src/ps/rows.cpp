#include "ps/rows.h"

#include <algorithm>
#include <cstring>

namespace cohort::ps {
namespace {

constexpr std::size_t kMostPrefetched = 1024;  // the hardware goes on by itself where a row is longer

}  // namespace

Rows::Rows(std::size_t floats)
    : row_bytes_((sizeof(RowHeader) + floats * sizeof(float) + 7) / 8 * 8),
      floats_(floats),
      prefetched_(std::min(row_bytes_, kMostPrefetched)),
      in_slab_(static_cast<std::uint32_t>(std::max<std::size_t>(kHugePage / row_bytes_, 2))),
      slab_bytes_(in_slab_ * row_bytes_),
      inverse_(~std::uint64_t{0} / in_slab_ + 1) {
  // A whole page, or the system gives small ones.
  if (slab_bytes_ > kHugePage / 16 * 15) slab_bytes_ = std::max(slab_bytes_, kHugePage);
}

void Rows::make_place(std::uint32_t number) {
  if (slab_of(number) < slabs_.size()) return;
  slabs_.emplace_back(static_cast<std::byte*>(::operator new[](slab_bytes_, std::align_val_t(kHugePage))));
  // Not for small tables, which would take two megabytes each.
  if (slabs_.size() > 1) wish_for_huge_pages(slabs_.back().get(), slab_bytes_);
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
  const std::size_t slabs = (end_ + fresh + in_slab_ - 1) / in_slab_;
  const std::size_t index = KeyMap::bytes_for(size() + more);
  return std::max(slabs, slabs_.size()) * slab_bytes_ + std::max(index, index_.bytes()) +
         (index > index_.bytes() ? index_.bytes() : 0);
}

}  // namespace cohort::ps
