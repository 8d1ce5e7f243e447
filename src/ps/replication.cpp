#include "ps/replication.h"

#include "ps/journal.h"

#include <utility>

namespace cohort::ps {

void Replication::append(const Command& command) {
  ++position_;
  if (phase_ == Phase::Alone) return;
  records_.push_back(record_head(command).append(command.body));
  bytes_ += records_.back().size();
}

bool Replication::may_begin(const Holder& other, std::uint64_t copy) const noexcept {
  if (phase_ == Phase::Copying || phase_ == Phase::Near) return other == other_ && copy > copy_;
  return phase_ == Phase::Alone && (other != last_ || copy > copy_);
}

bool Replication::wants(std::uint64_t life, std::uint64_t copy) const noexcept {
  return phase_ != Phase::Alone && phase_ != Phase::Dropping && life == other_.life && copy == copy_;
}

void Replication::begin(const Holder& other, std::uint64_t copy, Pieces pieces, Time now) {
  forget();
  phase_ = Phase::Copying;
  other_ = last_ = other;
  copy_ = copy;
  first_ = 0;
  pieces_ = std::move(pieces);
  heard_ = now;
}

bool Replication::fetch(std::uint64_t received, Time now, std::optional<Time> sent) {
  if (received < first_ || received - first_ > image_.size() + (pieces_ ? 0 : records_.size())) return false;
  for (; first_ < received; ++first_) {
    std::deque<std::string>& from = image_.empty() ? records_ : image_;
    std::size_t& bytes = image_.empty() ? bytes_ : image_bytes_;
    bytes -= from.front().size();
    from.pop_front();
  }
  heard_ = now;
  if (sent) lease_ = *sent + kLease;
  return true;
}

std::string Replication::records(std::size_t bytes, std::uint64_t& count) {
  std::string some;
  count = 0;
  const auto take = [&](const std::string& record) {
    if (count > 0 && some.size() + record.size() > bytes) return false;
    some += record;
    ++count;
    return true;
  };
  for (const std::string& record : image_) {
    if (!take(record)) return some;
  }
  while (pieces_) {
    auto piece = pieces_();
    if (!piece) {
      pieces_ = nullptr;
      break;
    }
    image_bytes_ += piece->size();
    image_.push_back(*std::move(piece));
    if (!take(image_.back())) return some;
  }
  for (const std::string& record : records_) {
    if (!take(record)) break;
  }
  return some;
}

bool Replication::join() {
  if (phase_ == Phase::Copying && !pieces_ && image_.empty() && bytes_ <= kNear) {
    phase_ = Phase::Near;
    near_at_ = position_;
  }
  if (phase_ != Phase::Near || position_ - records_.size() < near_at_) return false;
  phase_ = Phase::Joining;
  return true;
}

bool Replication::joined(const Holder& other) noexcept {
  if (phase_ != Phase::Joining || other_ != other) return false;
  phase_ = Phase::Following;
  return true;
}

bool Replication::lose() {
  if (phase_ == Phase::Joining || phase_ == Phase::Following) {
    phase_ = Phase::Dropping;
    return true;
  }
  if (phase_ != Phase::Dropping) forget();
  return false;
}

bool Replication::dropped(const Holder& other) {
  if (phase_ != Phase::Dropping || other_ != other) return false;
  forget();
  return true;
}

void Replication::forget() {
  phase_ = Phase::Alone;
  other_ = {};
  pieces_ = nullptr;
  image_.clear();
  records_.clear();
  bytes_ = image_bytes_ = 0;
}

bool Replication::may_answer(std::uint64_t position, Time now) const noexcept {
  switch (phase_) {
    case Phase::Alone: return true;
    case Phase::Copying: return !is_behind();
    default: break;
  }
  return position_ - records_.size() >= position && now < lease_;
}

}  // namespace cohort::ps
