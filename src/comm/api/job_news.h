// What has become of an elastic job since this process formed its world last. Any thread.
#pragma once

#include <cstdint>
#include <optional>

namespace cohort::comm {

struct JobNews {
  std::uint64_t epoch = 0;
  bool came = false;  ///< workers that were not in this process's world
  bool left = false;  ///< workers that were
};

/// Nothing: no later epoch has been announced, or this is no elastic job. Asks the job's store only if one has been; if
/// that cannot be read, some came and some left.
std::optional<JobNews> job_news();

/// The epoch of the world that this process formed last; nothing: none, or this is no elastic job.
std::optional<std::uint64_t> joined_epoch();

}  // namespace cohort::comm
