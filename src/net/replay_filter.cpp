#include "net/replay_filter.h"

namespace cohort::net {

bool ReplayFilter::first_time(const Words& words) {
  const auto [place, first] = words_.insert(words);
  if (!first) return false;
  oldest_.push_back(place);
  if (words_.size() > most_) {
    words_.erase(oldest_.front());
    oldest_.pop_front();
  }
  return true;
}

}  // namespace cohort::net
