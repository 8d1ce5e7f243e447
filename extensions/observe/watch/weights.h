// Compares the weights of two runs by the digests in their records (RunRecord::write_weights). Pure except for reading
// the files; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace cohort::watch {

struct WeightsComparison {
  std::size_t steps = 0;  ///< steps of which both runs have digests
  std::int64_t first = 0, last = 0;
  std::optional<std::int64_t> equal_until;  ///< the last step before `differ` at which they are equal
  std::optional<std::int64_t> differ;       ///< the first step at which they are not
  std::vector<std::string> names;           ///< what differs at that step, in the first run's order
  std::vector<std::string> missing;         ///< what only one of the runs has at that step
  std::size_t tensors = 0;                  ///< how many both runs have at that step
};

/// Compares two records, or the records in two runs' folders. Steps that were repeated count as they were last. Throws
/// Unavailable if there is no record or one has no digests, and InvalidArgument if they have no step in common, or no
/// tensor at the first step that differs.
WeightsComparison compare_weights(const std::filesystem::path& one, const std::filesystem::path& other);

std::string to_text(const WeightsComparison& comparison);
std::string to_json(const WeightsComparison& comparison);

}  // namespace cohort::watch
