#include <cohort/torch/metrics.h>

#include "base/result.h"
#include "train/checkpoint/exchange.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <span>

namespace cohort::metrics {

namespace {
Mean mean_of(double sum, double count) { return {.value = count > 0 ? sum / count : 0.0, .count = count}; }

std::map<std::string, Mean> reduce_sums(Communicator& comm, const std::vector<std::string>& names,
                                        std::vector<double> values, const std::vector<double>& counts) {
  values.insert(values.end(), counts.begin(), counts.end());
  // Tags the operation with the names, since sums of other names, or in another order, have the same size.
  const auto tag = static_cast<std::uint32_t>(std::hash<std::string>()(fmt::format("{}", names)));
  comm.all_reduce(std::span(values), {.tag = tag}).wait();
  std::map<std::string, Mean> result;
  for (std::size_t i = 0; i < names.size(); ++i) result[names[i]] = mean_of(values[i], values[names.size() + i]);
  return result;
}

std::map<std::string, Mean> average_of(Communicator& comm, const std::map<std::string, Mean>& local,
                                       std::string_view kind) {
  std::vector<std::string> names, said;
  std::vector<double> sums, counts;
  for (const auto& [name, mean] : local) {
    names.push_back(name);
    said.push_back(fmt::format("'{}{}'", name, kind));
    sums.push_back(mean.count > 0 ? mean.value * mean.count : 0.0);
    counts.push_back(mean.count);
  }
  const std::vector<std::string> all = checkpoint::gather(comm, fmt::format("[{}]", fmt::join(said, ", ")));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    raise(ErrorCode::Mismatch,
          "metrics::average: the ranks' results differ -- rank 0 has {}, rank {} {} -- report the same names on all "
          "ranks, and of the same kind",
          all[0], rank, all[rank]);
  }
  return reduce_sums(comm, names, sums, counts);
}
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
  return reduce_sums(comm, names_, sums_, counts_);
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

std::map<std::string, Mean> average(Communicator& comm, const std::map<std::string, Mean>& local) {
  return average_of(comm, local, " (Mean)");
}

std::map<std::string, double> average(Communicator& comm, const std::map<std::string, double>& local) {
  std::map<std::string, Mean> ones;
  for (const auto& [name, value] : local) ones[name] = {.value = value, .count = 1};
  std::map<std::string, double> result;
  for (const auto& [name, mean] : average_of(comm, ones, "")) result[name] = mean.value;
  return result;
}

}  // namespace cohort::metrics
