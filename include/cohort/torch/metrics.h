// Averages of losses and scores over all ranks, weighted by samples, so that they equal those of one process. Sums and
// counts are doubles. One thread at a time per object.
#pragma once

#include <cohort/communicator.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace cohort::metrics {

/// A mean over this rank's samples or, from `reduce`, over those of all ranks.
struct Mean {
  double value = 0;  ///< 0 if there were no samples
  double count = 0;
};

/// Named means, all reduced in one collective:
///
///   cohort::metrics::Averages averages({"loss", "accuracy"});
///   averages.add("loss", loss.item<double>(), n);      // a mean over n samples
///   auto result = averages.reduce(comm);               // the same on all ranks
///   result.at("loss").value
class Averages {
 public:
  /// All ranks give the same names. Throws InvalidArgument if a name is repeated.
  explicit Averages(std::vector<std::string> names);

  /// Adds a mean over `samples` samples. With 0 samples the value is ignored, NaN too. Throws InvalidArgument for
  /// an unknown name or a negative number.
  void add(const std::string& name, double mean, std::int64_t samples);
  /// Means of this rank's values.
  std::map<std::string, Mean> local() const;
  /// Means over all ranks; collective (one all_reduce), waits. This rank's sums do not change. Throws Mismatch on every
  /// rank if the ranks gave different names, or the same in another order.
  std::map<std::string, Mean> reduce(Communicator& comm) const;
  void clear();

 private:
  std::size_t index_of(const std::string& name) const;

  std::vector<std::string> names_;
  std::vector<double> sums_;  // sums of mean * samples
  std::vector<double> counts_;
};

/// The mean of one number over all ranks, weighted by `samples`; collective, waits.
Mean average(Communicator& comm, double mean, std::int64_t samples);

/// Means over all ranks of each rank's evaluation results, such as Averages::local() or a map of the program's own;
/// weighted by counts and so exact for uneven parts. Collective, waits. Throws Mismatch on every rank if the ranks'
/// names differ, or if some ranks give plain numbers.
std::map<std::string, Mean> average(Communicator& comm, const std::map<std::string, Mean>& local);
/// The same for plain numbers: every rank has the same weight.
std::map<std::string, double> average(Communicator& comm, const std::map<std::string, double>& local);

}  // namespace cohort::metrics
