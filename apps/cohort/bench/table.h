// The printed table, in the columns that nccl-tests made customary, and more. Belongs to the thread that prints.
#pragma once

#include "bench/row.h"

#include <cstdio>
#include <string>

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

}  // namespace cohort::app::bench
