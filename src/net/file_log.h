// The file format of a file store: a header, then records. Also defines the frame of a record, which other logs use
// too: length, checksum of the length, checksum of the body, body. The length has its own checksum because a damaged
// length would look like a record that is still being written. Pure functions; the bytes may come from another program,
// or be cut short.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::store {

inline constexpr std::size_t kFrame = 12;  ///< bytes before the body

/// Returns the frame for the body `first` + `second`.
std::string frame_of(std::string_view first, std::string_view second = {});
/// Returns the body of the first frame; nullopt if the bytes end before the frame does (a writer was killed, or is
/// still writing); Corrupt if the bytes are not a frame.
Result<std::optional<std::string_view>> unframe(std::string_view bytes, std::size_t longest);

/// Identifies the file's maker and purpose.
struct FileHeader {
  std::string nonce;  ///< 16 random bytes
  std::string boot_id;
  std::string host;
  std::int64_t pid = 0;
  std::int64_t created = 0;  ///< seconds since 1970
  std::int32_t size = 1;     ///< size of the world
  std::string meeting;
};

enum class RecordKind : std::uint8_t {
  Set,       ///< key, value
  Delete,    ///< key
  Member,    ///< slot, value = description
  Will,      ///< slot, key, value
  Withdraw,  ///< slot, key
  Left,      ///< slot
};
inline constexpr std::uint8_t kRecordKinds = 6;

struct FileRecord {
  RecordKind kind = RecordKind::Set;
  std::uint32_t slot = 0;
  std::string key;
  std::string value;
};

std::string encode(const FileHeader& header);
std::string encode(const FileRecord& record);

template <class T>
struct Decoded {
  T value;
  std::size_t bytes = 0;  ///< number of bytes consumed from the front
};
/// Both functions return nullopt if the bytes end before the header or record does (a writer was killed, or is still
/// writing), and Corrupt if the bytes are anything else.
Result<std::optional<Decoded<FileHeader>>> decode_header(std::string_view bytes);
Result<std::optional<Decoded<FileRecord>>> decode_record(std::string_view bytes);

}  // namespace cohort::store
