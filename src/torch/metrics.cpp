#include <cohort/torch/metrics.h>

#include "base/result.h"

#include <algorithm>
#include <set>
#include <span>

namespace cohort::metrics {

namespace {
Mean mean_of(double sum, double count) { return {.value = count > 0 ? sum / count : 0.0, .count = count}; }
}  // namespace

Averages::Averages(std::vector<std::string> names)
    : names_(std::move(names)), sums_(names_.size(), 0.0), counts_(names_.size(), 0.0) {
  if (std::set<std::string>(names_.begin(), names_.end()).size() != names_.size()) {
    raise(ErrorCode::InvalidArgument, "metrics::Averages: a name stands there twice");
  }
}

std::size_t Averages::index_of(const std::string& name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) {
    raise(ErrorCode::InvalidArgument, "metrics::Averages has no '{}' -- name it in the constructor, on all ranks",
          name);
  }
  return static_cast<std::size_t>(found - names_.begin());
}

void Averages::add(const std::string& name, double mean, std::int64_t samples) {
  const std::size_t index = index_of(name);
  if (samples < 0) raise(ErrorCode::InvalidArgument, "metrics::Averages: {} samples for '{}'", samples, name);
  if (samples == 0) return;
  sums_[index] += mean * static_cast<double>(samples);
  counts_[index] += static_cast<double>(samples);
}

std::map<std::string, Mean> Averages::local() const {
  std::map<std::string, Mean> result;
  for (std::size_t i = 0; i < names_.size(); ++i) result[names_[i]] = mean_of(sums_[i], counts_[i]);
  return result;
}

std::map<std::string, Mean> Averages::reduce(Communicator& comm) const {
  std::vector<double> values = sums_;
  values.insert(values.end(), counts_.begin(), counts_.end());
  comm.all_reduce(std::span(values)).wait();
  std::map<std::string, Mean> result;
  for (std::size_t i = 0; i < names_.size(); ++i) result[names_[i]] = mean_of(values[i], values[names_.size() + i]);
  return result;
}

void Averages::clear() {
  std::fill(sums_.begin(), sums_.end(), 0.0);
  std::fill(counts_.begin(), counts_.end(), 0.0);
}

Mean average(Communicator& comm, double mean, std::int64_t samples) {
  Averages one({"value"});
  one.add("value", mean, samples);
  return one.reduce(comm).at("value");
}

}  // namespace cohort::metrics
