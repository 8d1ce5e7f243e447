// The traces of a run, one of each host, with what they say of their clocks; read from the run's folder or named one by
// one. Texts are read when they are wanted, since they may be large. Plain data; the caller's thread.
#pragma once

#include "sys/files.h"
#include "track/trace/host_clock.h"

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace cohort::track {

struct HostPiece {
  std::filesystem::path file;
  std::string host;  ///< empty: the trace does not say
  HostClock clock;
  std::map<std::uint32_t, std::string> processes;  ///< of ranks, as their tracks call them
  std::uint64_t damaged = 0;
  bool torn = false;

  /// A time of the trace, in nanoseconds since the beginning of all.
  std::int64_t common_ns(std::int64_t time_ns, std::int64_t zero_ns) const noexcept;
};

struct TraceSet {
  std::vector<HostPiece> pieces;
  std::int64_t zero_ns = 0;  ///< of the common clock: where the earliest trace begins

  const HostPiece* of_rank(std::uint32_t rank) const;
};

/// `run` is a run's folder, or one host's trace. Throws Unavailable where there is none, Io, and Corrupt, naming the
/// file, for what is no trace of Cohort's.
TraceSet open_traces(const std::filesystem::path& run);
sys::FileBytes read_trace(const HostPiece& piece);
/// What of them is less than whole, for people.
std::vector<std::string> remarks_on(const TraceSet& set);

}  // namespace cohort::track
