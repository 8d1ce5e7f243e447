// What tells whether a file's bytes are those that were written: SHA-256 by OpenSSL, and zlib's CRC-32 of each block,
// which says where they are not. In pieces. Not thread-safe.
// manifest.json, the last file of a checkpoint to be written: where training stood, and every other file's size and
// digests. It carries its own digest and has exactly one form, so that no byte of it can change unnoticed. Versions 1
// and 2 are read, and written again as they were; new ones are of version 2. Values; any thread.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace cohort::formats {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  void update(std::span<const std::byte> bytes);
  /// 64 hexadecimal digits. Nothing may be added afterwards.
  std::string finish();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

std::string sha256(std::span<const std::byte> bytes);

/// Bytes that have a CRC-32 of their own; a file's last block may be shorter.
inline constexpr std::size_t kBlockBytes = std::size_t{1} << 20;

struct FileDigest {
  std::uint64_t bytes = 0;
  std::string sha256;  ///< 64 hexadecimal digits
  std::string crc32;   ///< 8 hexadecimal digits for each block; empty in checkpoints of version 1

  bool operator==(const FileDigest&) const = default;
};

/// A FileDigest of bytes as they come.
class FileDigester {
 public:
  void update(std::span<const std::byte> bytes);
  /// Nothing may be added afterwards.
  FileDigest finish();

 private:
  void end_block();
  Sha256 sha256_;
  std::string blocks_;
  std::uint64_t size_ = 0;
  std::uint32_t crc_ = 0;
  std::size_t in_block_ = 0;
};

FileDigest digest_of(std::span<const std::byte> bytes);

/// "bytes 1048576 to 2097151 and 2 more places": the blocks whose CRC-32 differs. Empty if there are none, or if one of
/// the two has no blocks. Both are of the same number of bytes.
std::string differing_bytes(const FileDigest& written, const FileDigest& found);

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
