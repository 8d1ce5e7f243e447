// What became of operations that compiled programs asked for (named_calls), for Horovod's timeline: kept while one is
// written, and fetched by its thread. Any thread may call.
#pragma once

#include "train/named/handle.h"
#include "train/named/request.h"

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace cohort::python {

class NamedRecords {
 public:
  using Clock = std::chrono::steady_clock;

  /// Operations of one call, by kind and name; nothing where nobody keeps records.
  class Call {
   public:
    bool kept() const noexcept { return !asked_.empty(); }
    void add(named::Kind kind, std::string name) { asked_.emplace_back(kind, std::move(name)); }
    /// The operations, once all of them are done; none: they were over at once.
    void end(const std::vector<named::Handle>& handles) const;

   private:
    Clock::time_point began_ = Clock::now();
    std::vector<std::pair<named::Kind, std::string>> asked_;
  };

  static bool on() noexcept;
};

}  // namespace cohort::python
