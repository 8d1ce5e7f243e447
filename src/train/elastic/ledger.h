// Records which samples a training has used, as JSON lines written by rank 0, with which an auditor can check that each
// sample was used exactly once. Every rank counts, since rank 0 may be lost at any moment. One thread.
//
//   {"world": 2, "size": 3, "step": 128, "samplers": {"sampler": [0, 4096]}}      this world begins after that step;
//                                                  what worlds before it did beyond these positions counts for nothing
//                                                  ("restart": n, too, of the job's n-th restart)
//   {"world": 2, "sampler": "sampler", "epoch": 0, "samples": [4096, 6144], "steps": [129, 192]}
//                             positions in the epoch's order, the second one excluded; steps from 1, both included
//
// A line is written when its 64 steps, its epoch or its world are over. A new rank 0 writes the lines of the last two
// steps again, since it does not know whether the old rank 0 had written them.
#pragma once

#include <cohort/elastic.h>

#include "base/unique_fd.h"

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::elastic {

class Ledger {
 public:
  using Positions = std::map<std::string, SamplePosition>;

  /// Writes all steps that have ended. Call it before another rank gets the state, since no other rank knows these
  /// samples if this rank is lost later. `file`: empty on all ranks but 0, or if no ledger is wanted. Throws Io.
  void open(const std::filesystem::path& file);
  /// Begins a world after `step`, at these positions.
  void enter(std::uint64_t world, int size, std::int64_t step, const Positions& positions);
  /// Notes that step number `step` has ended, and has moved the samplers to these positions.
  void step(std::int64_t step, const Positions& positions);
  /// Writes the open lines, at the end of a training.
  void finish();

 private:
  struct Range {
    std::uint64_t world = 0;
    std::int64_t epoch = 0, from = 0, to = 0, first_step = 0, last_step = 0;
    std::int64_t closed_at = 0;  ///< step
  };
  struct Sampler {
    SamplePosition position;
    std::optional<Range> open;
    std::vector<Range> closed;  ///< closed in the latest two steps, so rank 0 may not have written them
  };
  void move(const std::string& name, Sampler& sampler, const SamplePosition& to, std::int64_t step);
  void close(const std::string& name, Sampler& sampler);
  void write(const std::string& name, const Range& range);
  void append(const std::string& line);

  std::map<std::string, Sampler> samplers_;
  std::uint64_t world_ = 0;
  std::int64_t steps_ = 0;
  bool entered_ = false;
  std::filesystem::path file_;
  sys::UniqueFd fd_;
};

}  // namespace cohort::elastic
