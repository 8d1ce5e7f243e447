// Where a writer of a format puts its bytes, front to back: a file, a digest, memory. Not thread-safe.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <functional>
#include <span>
#include <string_view>

namespace cohort::formats {

using Sink = std::function<Result<void>(std::span<const std::byte>)>;

inline std::span<const std::byte> as_bytes(std::string_view text) noexcept {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace cohort::formats
