#include "ps/replication.h"

#include "ps/command_record.h"

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

void Replication::begin(const Holder& other, std::uint64_t copy, std::deque<std::string> pieces) {
  phase_ = Phase::Copying;
  other_ = last_ = other;
  copy_ = copy;
  first_ = 0;
  bytes_ = 0;
  records_ = std::move(pieces);
  pieces_ = records_.size();
}

bool Replication::fetch(std::uint64_t received, Time now, std::optional<Time> sent) {
  if (received < first_ || received > first_ + records_.size()) return false;
  for (; first_ < received; ++first_) {
    if (pieces_ > 0) {
      --pieces_;
    } else {
      bytes_ -= records_.front().size();
    }
    records_.pop_front();
  }
  heard_ = now;
  if (sent) lease_ = *sent + kLease;
  return true;
}

std::string Replication::records(std::size_t bytes, std::uint64_t& count) const {
  std::string some;
  count = 0;
  for (const std::string& record : records_) {
    if (count > 0 && some.size() + record.size() > bytes) break;
    some += record;
    ++count;
  }
  return some;
}

bool Replication::join() {
  if (phase_ == Phase::Copying && pieces_ == 0 && bytes_ <= kNear) {
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
  records_.clear();
  bytes_ = pieces_ = 0;
}

bool Replication::may_answer(std::uint64_t position, Time now) const noexcept {
  switch (phase_) {
    case Phase::Alone: return true;
    case Phase::Copying: return bytes_ <= kMostKept;
    default: break;
  }
  return position_ - records_.size() >= position && now < lease_;
}

}  // namespace cohort::ps
