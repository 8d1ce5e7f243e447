// What agents send of their ranks' timelines, in the run's folder: trace/host-N.pftrace, one for each host, appended to
// as it comes, with what is known of the host's clock among it. `track/trace` makes one trace of them. What cannot be
// written is told once, and the job goes on. One thread.
#pragma once

#include "launch/watch/clock_sync.h"
#include "status/trace_encoder.h"
#include "sys/unique_fd.h"

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

class TracePieces {
 public:
  /// No host's file gets longer: viewers have their limits, and so have disks.
  static constexpr std::uint64_t kMostBytes = std::uint64_t{2} << 30;

  TracePieces(std::string run_folder, std::function<void(std::string)> on_trouble);

  /// `base_ns`: as TracePiece has it.
  void keep(const status::HostTrace& host, std::int64_t base_ns, std::string_view packets);
  void keep_offset(const status::HostTrace& host, const ClockOffset& offset);

 private:
  struct File {
    sys::UniqueFd fd;
    std::uint64_t bytes = 0;
    std::optional<std::int64_t> base_ns = {};
    std::vector<ClockOffset> early = {};  ///< that came before it
  };
  File& file(const status::HostTrace& host);
  void write(File& file, const status::HostTrace& host, std::string_view bytes);
  std::string path_of(const status::HostTrace& host) const;

  const std::string folder_;
  const std::function<void(std::string)> on_trouble_;
  std::map<int, File> files_;  ///< by the host's index
};

}  // namespace cohort::launch
