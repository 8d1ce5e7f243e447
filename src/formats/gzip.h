// gzip members in memory, over zlib. Pure functions: any thread may call.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace cohort::formats {

/// True if the bytes begin as gzip does.
bool is_gzip(std::span<const std::byte> bytes) noexcept;

/// The content of all members. Corrupt, naming `name`, if the checksum is wrong, the end is missing, something else
/// follows, or there is more than `max_bytes` of it.
Result<std::vector<std::byte>> gunzip(std::span<const std::byte> bytes, std::uint64_t max_bytes,
                                      const std::string& name);

/// One member without a time stamp: the same bytes for the same input.
std::vector<std::byte> gzip(std::span<const std::byte> bytes);

}  // namespace cohort::formats
