#include "ps/rows.h"

#include <algorithm>
#include <cstring>

namespace cohort::ps {
namespace {

constexpr std::size_t kMostPrefetched = 1024;  // the hardware goes on by itself where a row is longer

std::shared_ptr<std::byte[]> new_slab(std::size_t bytes, bool huge) {
  auto* const memory = static_cast<std::byte*>(::operator new[](bytes, std::align_val_t(kHugePage)));
  if (huge) wish_for_huge_pages(memory, bytes);
  return {memory, [](std::byte* slab) { ::operator delete[](slab, std::align_val_t(kHugePage)); }};
}

}  // namespace

Slabs::Slabs(std::size_t floats)
    : row_bytes_((sizeof(RowHeader) + floats * sizeof(float) + 7) / 8 * 8),
      in_slab_(static_cast<std::uint32_t>(std::max<std::size_t>(kHugePage / row_bytes_, 2))),
      slab_bytes_(in_slab_ * row_bytes_),
      inverse_(~std::uint64_t{0} / in_slab_ + 1) {
  // A whole page, or the system gives small ones.
  if (slab_bytes_ > kHugePage / 16 * 15) slab_bytes_ = std::max(slab_bytes_, kHugePage);
}

Rows::Rows(std::size_t floats) : Slabs(floats), floats_(floats), prefetched_(std::min(row_bytes_, kMostPrefetched)) {}

Slabs Rows::freeze(const Views& views) {
  if (!is_read()) copied_ = 0;
  views_ = views;
  own_.assign(slabs_.size(), false);
  frozen_ = slabs_.size();
  return *this;
}

void Rows::own_slab(std::uint32_t slab) {
  if (!is_read()) {
    views_.reset();
    return;
  }
  if (slab >= own_.size() || own_[slab]) return;
  auto copy = new_slab(slab_bytes_, slab > 0);
  const std::size_t rows = std::min<std::size_t>(in_slab_, end_ - std::size_t{slab} * in_slab_);
  std::memcpy(copy.get(), slabs_[slab].get(), rows * row_bytes_);
  slabs_[slab] = std::move(copy);
  own_[slab] = true;
  --frozen_;
  copied_ += slab_bytes_;
}

void Rows::make_place(std::uint32_t number) {
  if (slab_of(number) < slabs_.size()) return;
  slabs_.push_back(new_slab(slab_bytes_, !slabs_.empty()));  // a small table's need not be a huge page
}

std::uint32_t Rows::create(std::uint64_t key, std::uint64_t hash) {
  const bool fresh = free_ == kNone;
  const std::uint32_t number = fresh ? end_ : free_;
  if (fresh) make_place(number);
  RowHeader& place = own(number).header;
  // From here on it is in the index, or nothing has happened.
  index_.insert(hash, number, [this](std::uint32_t other) { return mix64(header(other).key); });
  if (fresh) {
    ++end_;
  } else {
    free_ = place.steps;
    --freed_;
  }
  place = {key, 0, 1};
  return number;
}

void Rows::erase(std::uint32_t number) {
  RowHeader& place = own(number).header;
  index_.erase(mix64(place.key), number, [this](std::uint32_t other) { return mix64(header(other).key); });
  place = {0, free_, 0};
  free_ = number;
  ++freed_;
}

void Rows::load(const RowHeader& header, const void* floats) {
  const std::uint32_t number = end_;
  make_place(number);
  if (header.last != 0) {
    const Row row = own(number);
    row.header = header;
    index_.insert(mix64(header.key), number, [this](std::uint32_t other) { return mix64(this->header(other).key); });
    std::memcpy(row.floats, floats, floats_ * sizeof(float));
  } else {
    own(number).header = {0, header.steps, 0};
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
