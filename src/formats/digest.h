// What tells whether a file's bytes are those that were written: SHA-256 by OpenSSL, and zlib's CRC-32 of each block,
// which says where they are not. In pieces. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

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

}  // namespace cohort::formats
