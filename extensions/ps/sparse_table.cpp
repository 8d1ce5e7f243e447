#include "ps/sparse_table.h"

#include "ps/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

namespace cohort::ps {
namespace {

/// Returns a number in (0, 1), never 0 or 1.
double unit(std::uint32_t bits) noexcept { return (static_cast<double>(bits) + 0.5) * 0x1p-32; }

}  // namespace

void fill_initial(std::span<float> row, const Initializer& initializer, std::uint64_t seed,
                  std::uint64_t key) noexcept {
  const double a = initializer.a, b = initializer.b;
  if (initializer.kind == Initializer::Kind::Constant) {
    std::fill(row.begin(), row.end(), static_cast<float>(a));
    return;
  }
  const PhiloxKey by{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
  for (std::size_t at = 0; at < row.size(); at += 4) {
    const PhiloxCounter random = philox(
        {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32), static_cast<std::uint32_t>(at / 4), 0},
        by);
    double values[4];
    if (initializer.kind == Initializer::Kind::Uniform) {
      for (std::size_t i = 0; i < 4; ++i) values[i] = a + (b - a) * unit(random[i]);
    } else {
      for (std::size_t i = 0; i < 4; i += 2) {  // Box and Muller 1958
        const double radius = b * std::sqrt(-2 * std::log(unit(random[i])));
        const double angle = 2 * std::numbers::pi * unit(random[i + 1]);
        values[i] = a + radius * std::cos(angle);
        values[i + 1] = a + radius * std::sin(angle);
      }
    }
    for (std::size_t i = 0; i < 4 && at + i < row.size(); ++i) row[at + i] = static_cast<float>(values[i]);
  }
}

namespace {

constexpr std::size_t kMostPrefetched = 1024;  // the hardware prefetches the rest of a longer row

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
  // A slab of nearly a huge page is made a whole one, since the system would use small pages otherwise.
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
  slabs_.push_back(new_slab(slab_bytes_, !slabs_.empty()));  // a small table's first slab need not be a huge page
}

std::uint32_t Rows::create(std::uint64_t key, std::uint64_t hash) {
  const bool fresh = free_ == kNone;
  const std::uint32_t number = fresh ? end_ : free_;
  if (fresh) make_place(number);
  RowHeader& place = own(number).header;
  // If this throws, nothing has changed; after it the row is in the index.
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

namespace {

constexpr std::size_t kAhead = 16;  // keys whose rows are prefetched while one is processed
constexpr std::uint32_t kCandidates = 64;

std::uint64_t key_at(const void* keys, std::size_t index) noexcept {
  std::uint64_t key;
  std::memcpy(&key, static_cast<const char*>(keys) + index * sizeof key, sizeof key);
  return key;
}

/// Calls `visit(index, key, hash)` for each key, whose row has been prefetched some keys before.
template <class Visit>
void in_turn(const Rows& rows, const void* keys, std::size_t count, Visit&& visit) {
  std::uint64_t waiting[kAhead], hashes[kAhead];
  for (std::size_t i = 0; i < count + kAhead; ++i) {
    const std::size_t slot = i % kAhead;
    if (i >= kAhead) visit(i - kAhead, waiting[slot], hashes[slot]);
    if (i < count) {
      waiting[slot] = key_at(keys, i);
      hashes[slot] = mix64(waiting[slot]);
      rows.prefetch_index(hashes[slot]);
    }
    if (const std::size_t half = i - kAhead / 2; i >= kAhead / 2 && half < count) {
      rows.prefetch_row(hashes[half % kAhead]);
    }
  }
}

}  // namespace

Result<void> check(const TableOptions& options) {
  if (options.dim < 1 || options.dim > 65536)
    return fail(ErrorCode::InvalidArgument, "rows of {} floats -- 1 to 65536 are possible", options.dim);
  if (!std::isfinite(options.initializer.a) || !std::isfinite(options.initializer.b))
    return fail(ErrorCode::InvalidArgument, "an initializer with a number that is not finite");
  if (options.admission < 1 || options.admission > 1'000'000'000)
    return fail(ErrorCode::InvalidArgument, "admission by step {} -- from 1 on", options.admission);
  if (options.eviction.age.count() < 0 || options.eviction.rows < 0)
    return fail(ErrorCode::InvalidArgument, "eviction by an age of {} s, {} rows -- from 0 on",
                options.eviction.age.count(), options.eviction.rows);
  if (options.consistency.staleness < 0)
    return fail(ErrorCode::InvalidArgument, "a staleness of {} clocks -- from 0 on", options.consistency.staleness);
  if (options.consistency.staleness > 0 && options.consistency.mode != Mode::Bounded)
    return fail(ErrorCode::InvalidArgument, "a staleness of {} clocks without Bounded -- take Consistency::bounded",
                options.consistency.staleness);
  return check(options.optimizer);
}

SparseTable::SparseTable(std::string name, const TableOptions& options)
    : name_(std::move(name)),
      options_(options),
      dim_(static_cast<std::size_t>(options.dim)),
      floats_(dim_ + slots_of(options.optimizer, dim_)),
      rows_(floats_),
      gradient_(dim_) {}

TableCounts SparseTable::counts() const noexcept {
  TableCounts counts = counts_;
  counts.rows = rows_.size();
  counts.bytes = rows_.bytes() + seen_index_.bytes() + seen_.capacity() * sizeof(Seen);
  return counts;
}

bool SparseTable::expired(const RowHeader& header, std::uint32_t now) const noexcept {
  return options_.eviction.age.count() > 0 && now > header.last && now - header.last > options_.eviction.age.count();
}

void SparseTable::read(const void* keys, std::size_t count, void* out, std::uint32_t now) const {
  auto* to = static_cast<char*>(out);
  const std::size_t bytes = dim_ * sizeof(float);
  std::vector<float> fresh;
  in_turn(rows_, keys, count, [&](std::size_t index, std::uint64_t key, std::uint64_t hash) {
    const std::uint32_t number = rows_.find(key, hash);
    if (number != Rows::kNone && !expired(rows_.header(number), now)) {
      std::memcpy(to + index * bytes, rows_.floats(number), bytes);
      return;
    }
    fresh.resize(dim_);
    fill_initial(fresh, options_.initializer, options_.seed, key);
    std::memcpy(to + index * bytes, fresh.data(), bytes);
  });
}

void SparseTable::begin_row(std::uint32_t number, std::uint64_t key) {
  float* floats = rows_.own(number).floats;
  fill_initial({floats, dim_}, options_.initializer, options_.seed, key);
  begin_slots(options_.optimizer, floats + dim_, dim_);
}

void SparseTable::count_from_one(std::uint64_t key, std::uint64_t hash, std::uint32_t place) {
  seen_[place] = {key, 1};
  seen_index_.insert(hash, place, [this](std::uint32_t other) { return mix64(seen_[other].key); });
}

/// Removes a counter. The last one takes its place.
void SparseTable::drop_counter(std::uint32_t place) {
  const auto hash_of = [this](std::uint32_t one) { return mix64(seen_[one].key); };
  const auto last = static_cast<std::uint32_t>(seen_.size() - 1);
  seen_index_.erase(hash_of(place), place, hash_of);
  if (place != last) {
    const std::uint64_t moved = hash_of(last);
    seen_index_.erase(moved, last, hash_of);
    seen_[place] = seen_[last];
    seen_index_.insert(moved, place, hash_of);
  }
  seen_.pop_back();
}

/// Returns the limit on counters of keys without rows, which is finite if the number of rows is limited.
std::size_t SparseTable::most_seen() const noexcept {
  constexpr std::size_t kCountersOfARow = 4;
  const auto rows = static_cast<std::size_t>(options_.eviction.rows);
  return rows == 0 ? std::numeric_limits<std::size_t>::max() : kCountersOfARow * rows;
}

bool SparseTable::admit(std::uint64_t key, std::uint64_t hash) {
  if (options_.admission == 1) return true;
  const std::uint32_t found = seen_index_.find(hash, [&](std::uint32_t place) { return seen_[place].key == key; });
  if (found != KeyMap::kNone) {
    if (++seen_[found].count < options_.admission) return false;
    drop_counter(found);
    return true;
  }
  if (seen_.size() < most_seen()) {
    seen_.push_back({});
    count_from_one(key, hash, static_cast<std::uint32_t>(seen_.size() - 1));
    return false;
  }
  // Chooses another counter by the key alone, so that every copy of the table chooses the same one.
  const auto place = static_cast<std::uint32_t>((hash >> 24U) % seen_.size());
  const std::uint64_t theirs = mix64(seen_[place].key);
  seen_index_.erase(theirs, place, [this](std::uint32_t one) { return mix64(seen_[one].key); });
  count_from_one(key, hash, place);
  return false;
}

void SparseTable::evict(std::uint32_t number) {
  rows_.erase(number);
  ++counts_.evicted;
}

void SparseTable::make_room(std::uint32_t now) {
  if (options_.eviction.rows == 0 || rows_.size() < static_cast<std::size_t>(options_.eviction.rows)) return;
  std::uint32_t victim = Rows::kNone, met = 0;
  for (std::uint32_t looked = 0; looked < rows_.end() && met < kCandidates; ++looked) {
    hand_ = hand_ + 1 < rows_.end() ? hand_ + 1 : 0;
    if (!rows_.lives(hand_)) continue;
    ++met;
    const RowHeader& here = rows_.header(hand_);
    if (expired(here, now)) {
      victim = hand_;
      break;
    }
    if (victim == Rows::kNone) {
      victim = hand_;
      continue;
    }
    const RowHeader& so_far = rows_.header(victim);
    if (options_.eviction.victim == Eviction::Victim::LeastRecent ? here.last < so_far.last
                                                                  : here.steps < so_far.steps) {
      victim = hand_;
    }
  }
  if (victim != Rows::kNone) evict(victim);
}

/// Evicts rows past their age gradually: checks two places for each row that is stepped.
void SparseTable::sweep(std::uint32_t now) {
  if (options_.eviction.age.count() == 0) return;
  for (std::uint32_t looked = 0; looked < 2 && looked < rows_.end(); ++looked) {
    hand_ = hand_ + 1 < rows_.end() ? hand_ + 1 : 0;
    if (rows_.lives(hand_) && expired(rows_.header(hand_), now)) evict(hand_);
  }
}

std::uint32_t SparseTable::row_for(std::uint64_t key, std::uint64_t hash, std::uint32_t now, bool admitted) {
  std::uint32_t number = rows_.find(key, hash);
  if (number != Rows::kNone && expired(rows_.header(number), now)) {
    evict(number);
    number = Rows::kNone;
  }
  if (number != Rows::kNone) return number;
  if (!admitted && !admit(key, hash)) return Rows::kNone;
  make_room(now);
  number = rows_.create(key, hash);
  begin_row(number, key);
  ++counts_.created;
  return number;
}

void SparseTable::step(const KeyedRows& gradients, std::uint32_t now, std::optional<double> lr) {
  const auto* from = static_cast<const char*>(gradients.rows);
  const std::size_t bytes = dim_ * sizeof(float);
  in_turn(rows_, gradients.keys, gradients.count, [&](std::size_t index, std::uint64_t key, std::uint64_t hash) {
    sweep(now);
    const std::uint32_t number = row_for(key, hash, now, false);
    if (number == Rows::kNone) {
      ++counts_.dropped;
      return;
    }
    const auto [header, floats] = rows_.own(number);
    ++header.steps;
    header.last = std::max(now, std::uint32_t{1});
    ++counts_.steps;
    std::memcpy(gradient_.data(), from + index * bytes, bytes);  // now aligned
    ps::step(options_.optimizer, {floats, floats + dim_, dim_, header.steps}, gradient_.data(), lr);
  });
}

void SparseTable::assign(const KeyedRows& weights, std::uint32_t now) {
  const auto* from = static_cast<const char*>(weights.rows);
  const std::size_t bytes = dim_ * sizeof(float);
  for (std::size_t i = 0; i < weights.count; ++i) {
    const std::uint64_t key = key_at(weights.keys, i);
    const std::uint32_t number = row_for(key, mix64(key), now, true);
    const auto [header, floats] = rows_.own(number);
    header.steps = 0;
    header.last = std::max(now, std::uint32_t{1});
    std::memcpy(floats, from + i * bytes, bytes);
    begin_slots(options_.optimizer, floats + dim_, dim_);
  }
}

void SparseTable::erase(const void* keys, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t key = key_at(keys, i);
    const std::uint64_t hash = mix64(key);
    const std::uint32_t number = rows_.find(key, hash);
    if (number != Rows::kNone) rows_.erase(number);
    const auto counted = seen_index_.find(hash, [&](std::uint32_t place) { return seen_[place].key == key; });
    if (counted != KeyMap::kNone) drop_counter(counted);
  }
}

std::size_t SparseTable::fresh(std::size_t count, const void* keys) const {
  std::size_t fresh = 0;
  in_turn(rows_, keys, count, [&](std::size_t, std::uint64_t key, std::uint64_t hash) {
    if (rows_.find(key, hash) == Rows::kNone) ++fresh;
  });
  return fresh;
}

std::size_t SparseTable::bytes_with(std::size_t count) const {
  std::size_t more = count;
  if (options_.eviction.rows > 0) {
    const auto bound = static_cast<std::size_t>(options_.eviction.rows);
    more = std::min(more, bound > rows_.size() ? bound - rows_.size() : 0);
  }
  const std::size_t free_counters = most_seen() > seen_.size() ? most_seen() - seen_.size() : 0;
  const std::size_t seen = options_.admission == 1 ? 0 : std::min(count, free_counters);
  return rows_.bytes_with(more) + (seen == 0 ? 0 : KeyMap::bytes_for(seen_.size() + seen) + seen_index_.bytes()) +
         std::max(seen_.capacity(), 2 * (seen_.size() + seen)) * sizeof(Seen);
}

void FrozenTable::for_each(const std::function<void(const RowHeader&, const float*)>& visit) const {
  for (std::uint32_t number = 0; number < shape_.end; ++number) {
    if (rows_.lives(number)) visit(rows_.header(number), rows_.floats(number));
  }
}

void FrozenTable::for_each_seen(const std::function<void(std::uint64_t, std::uint32_t)>& visit) const {
  for (const Seen& seen : seen_) visit(seen.key, seen.count);
}

void FrozenTable::for_places(std::uint32_t first, std::uint32_t count,
                             const std::function<void(const RowHeader&, const float*)>& visit) const {
  for (std::uint32_t number = first; number < shape_.end && number - first < count; ++number)
    visit(rows_.header(number), rows_.lives(number) ? rows_.floats(number) : nullptr);
}

FrozenTable SparseTable::freeze(const Views& views) {
  frozen_seen_ = seen_.size();
  return {name_, options_, floats_, rows_.freeze(views), seen_, shape()};
}

SparseTable::Effort SparseTable::effort(std::size_t count) const noexcept {
  // Each new row may evict others.
  const bool evicts = options_.eviction.rows > 0 || options_.eviction.age.count() > 0;
  const std::size_t slabs = std::min(evicts ? 4 * count : count, rows_.frozen());
  // Visiting a row costs as much as some floats; a growing index visits all rows.
  constexpr std::size_t kMeeting = 64;
  const std::size_t met = count + (rows_.grows_with(count) ? rows_.size() : 0) +
                          (options_.admission > 1 && seen_index_.grows_with(count) ? seen_.size() : 0);
  return {met * kMeeting + count * floats_ + slabs * rows_.slab_bytes() / sizeof(float), slabs * rows_.slab_bytes()};
}

void SparseTable::restore(const RowHeader& header, const void* floats) {
  const std::uint64_t hash = mix64(header.key);
  std::uint32_t number = rows_.find(header.key, hash);
  if (number == Rows::kNone) number = rows_.create(header.key, hash);
  const Rows::Row row = rows_.own(number);
  row.header = {header.key, header.steps, std::max(header.last, std::uint32_t{1})};
  std::memcpy(row.floats, floats, floats_ * sizeof(float));
}

void SparseTable::restore_seen(std::uint64_t key, std::uint32_t count) {
  const std::uint64_t hash = mix64(key);
  const std::uint32_t found = seen_index_.find(hash, [&](std::uint32_t place) { return seen_[place].key == key; });
  if (found != KeyMap::kNone) {
    seen_[found].count = count;
    return;
  }
  seen_.push_back({key, count});
  seen_index_.insert(hash, static_cast<std::uint32_t>(seen_.size() - 1),
                     [this](std::uint32_t other) { return mix64(seen_[other].key); });
}

TableShape SparseTable::shape() const noexcept {
  return {rows_.end(), rows_.first_free(), hand_, seen_.size(), counts()};
}

bool SparseTable::end_load(const TableShape& shape) {
  if (shape.end != rows_.end() || shape.seen != seen_.size() || (shape.hand != 0 && shape.hand >= shape.end))
    return false;
  hand_ = shape.hand;
  counts_ = shape.counts;
  return rows_.end_load(shape.first_free);
}

std::uint64_t SparseTable::digest(std::uint32_t first, std::uint32_t count) const noexcept {
  std::uint64_t digest = rows_.end();
  const auto take = [&digest](const void* bytes, std::size_t size) {
    for (std::size_t at = 0; at < size; at += sizeof(std::uint32_t)) {
      std::uint32_t word;
      std::memcpy(&word, static_cast<const char*>(bytes) + at, sizeof word);
      digest = (digest ^ word) * 0x9E3779B97F4A7C15ULL;
      digest ^= digest >> 29;
    }
  };
  for (std::uint32_t number = first; number < rows_.end() && number - first < count; ++number) {
    take(&rows_.header(number), sizeof(RowHeader));
    if (rows_.lives(number)) take(rows_.floats(number), floats_ * sizeof(float));
  }
  return digest;
}

}  // namespace cohort::ps
