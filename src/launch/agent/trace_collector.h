// Sends the timelines of one host's ranks to the supervisor, as text in the trace's format. Drains the rings a
// few times a second, and once more when nothing runs any more. If the supervisor does not keep up, the rings fill and
// lose their oldest events; the trace says so, and the ranks never wait. One thread.
#pragma once

#include "base/memory.h"
#include "base/result.h"
#include "launch/agent/upstream.h"
#include "launch/loop.h"
#include "telemetry/timeline.h"
#include "telemetry/trace_writer.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {

class TraceCollector {
 public:
  struct Options {
    status::HostTrace host;
    std::uint16_t epoch = 0;
    std::int64_t base_ns = 0;  ///< the same for all epochs
  };
  TraceCollector(Loop& loop, Upstream& upstream, Options options)
      : loop_(loop), upstream_(upstream), options_(std::move(options)) {}

  /// Makes the ring of a rank that is about to be started; the rank inherits the ring. Fails with Unavailable.
  Result<int> add(int rank);
  /// Starts draining regularly.
  void begin() { wait(); }
  /// Drains all that is left, when nothing writes any more.
  void finish() { drain(status::TimelineReader::Until::End); }

 private:
  struct Rank {
    sys::SharedSegment ring;
    status::TimelineReader reader;
    std::unique_ptr<status::RankTrace> trace;  ///< made when there is something to write
    std::uint64_t told_lost = 0;
    int rank = 0;
  };
  void wait();
  void drain(status::TimelineReader::Until until);
  void drain(Rank& rank, status::TimelineReader::Until until, std::string& out) const;
  void note_clocks(std::string& out);

  Loop& loop_;
  Upstream& upstream_;
  const Options options_;
  std::int64_t clocks_noted_ns_ = 0;
  std::vector<Rank> ranks_;
  Timer again_;
};

}  // namespace cohort::launch
