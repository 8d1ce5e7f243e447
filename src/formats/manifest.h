// manifest.json, the last file of a checkpoint to be written: where training stood, and every other file's size and
// digests. It carries its own digest and has exactly one form, so that no byte of it can change unnoticed. Versions 1
// and 2 are read, and written again as they were; new ones are of version 2. Values; any thread.
#pragma once

#include "base/result.h"
#include "formats/digest.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace cohort::formats {

/// The same type as cohort::CheckpointValue.
using ManifestValue = std::variant<bool, std::int64_t, double, std::string>;

struct SamplerPosition {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
  std::int64_t cursor = 0;
  std::int64_t size = 0;
};

inline constexpr int kManifestVersion = 2;

struct Manifest {
  int version = kManifestVersion;
  std::int64_t generation = 0;
  std::int64_t step = 0;
  std::int64_t epoch = 0;
  int world_size = 1;
  std::string created;  ///< "2026-11-21T09:00:00Z"
  std::string program;  ///< "cohort 0.1.0, libtorch 2.13.0"
  std::optional<SamplerPosition> sampler;
  std::map<std::string, ManifestValue> values;
  std::string place;               ///< "rank0", "shared" or "local": who wrote the files where; empty in version 1
  std::vector<std::string> hosts;  ///< by rank, the host that has its part; only where the place is "local"
  std::map<std::string, FileDigest> files;
};

/// The present time, as `created` has it.
std::string utc_now();
/// InvalidArgument for text that is not UTF-8.
Result<std::string> to_json(const Manifest& manifest);
/// Corrupt, naming `name`, if one byte is not as to_json wrote it, or a field is missing or of another type;
/// InvalidArgument if a newer Cohort wrote it.
Result<Manifest> parse_manifest(std::string_view text, const std::string& name);

}  // namespace cohort::formats
