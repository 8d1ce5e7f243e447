// The printed table, in the columns that nccl-tests made customary, and more. Belongs to the thread that prints.
// The rows of a benchmark as curves. Pure; any thread.
#pragma once

#include "bench/measure.h"

#include <nlohmann/json_fwd.hpp>

#include <cstdio>
#include <string>
#include <vector>

namespace cohort::app::bench {

class Table {
 public:
  explicit Table(std::FILE* stream) : stream_(stream) {}

  void header(const nlohmann::json& machine);
  void world(const nlohmann::json& world, const std::string& kind, int cores);
  /// With a new heading whenever collective, ranks or memory change.
  void row(const Row& row);
  /// How the machine was used meanwhile; in cores.
  void footer(double others, double stolen);

 private:
  void heading(const Row& row);
  std::FILE* stream_;
  std::string heading_;
  std::int64_t wrong_ = 0;
};

/// SVG: for each collective a panel of times over sizes, and one of bus bandwidths if there is one collective only;
/// both axes logarithmic, a curve for each number of ranks, kind of memory, type and reduction.
std::string draw(const std::vector<Row>& rows, const nlohmann::json& machine);

}  // namespace cohort::app::bench
