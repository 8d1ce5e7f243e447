// Zip archives of stored (not compressed) entries, the only kind that torch writes. No library is used: torch wants
// each entry's data aligned to 64 bytes, and a strict reader of one method is smaller than checks around a lenient one.
// Zip64 from 4 GiB on. Format: PKWARE's APPNOTE 6.3. Not thread-safe; owns no bytes.
#pragma once

#include "base/result.h"
#include "train/formats/tensor.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::formats {

struct ZipEntry {
  std::string name;
  std::uint64_t offset = 0;  ///< offset of the data in the archive
  std::uint64_t size = 0;
  std::uint32_t crc = 0;
  bool stored = true;  ///< false: the entry is compressed, and only its name can be read
};

class ZipReader {
 public:
  /// Reads the directory. Returns Corrupt unless the archive is one piece from byte 0 to its end, all entries are
  /// stored, plain and within it without overlap, names are unique, and local headers agree with the directory.
  static Result<ZipReader> parse(std::span<const std::byte> bytes, std::string name);

  const std::vector<ZipEntry>& entries() const noexcept { return entries_; }
  const ZipEntry* find(std::string_view name) const noexcept;
  /// Returns a view of the entry's data; Corrupt if its CRC-32 is wrong or the entry is compressed.
  Result<std::span<const std::byte>> read(const ZipEntry& entry) const;

 private:
  std::span<const std::byte> bytes_;
  std::string name_;
  std::vector<ZipEntry> entries_;
  std::map<std::string, std::size_t, std::less<>> index_;
};

enum class Zip64 : std::uint8_t { WhereNeeded, Always };

class ZipWriter {
 public:
  explicit ZipWriter(Sink sink, Zip64 zip64 = Zip64::WhereNeeded) : sink_(std::move(sink)), zip64_(zip64) {}

  /// Adds an entry. Its data begins at a multiple of 64 bytes (padded by an extra field, as by torch's writer).
  Result<void> add(const std::string& name, std::span<const std::byte> data);
  /// Writes the directory; nothing may be added afterwards.
  Result<void> finish();

 private:
  struct Record {
    ZipEntry entry;
    std::uint64_t header = 0;  ///< offset of the local header
  };
  Result<void> put(std::span<const std::byte> bytes);
  bool large(std::uint64_t value) const noexcept;

  Sink sink_;
  Zip64 zip64_;
  std::uint64_t at_ = 0;
  std::vector<Record> records_;
};

}  // namespace cohort::formats
