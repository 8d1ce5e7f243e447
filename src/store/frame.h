// A record of a log: its length, the checksum of that, the checksum of the body, the body. The length has a checksum of
// its own: a damaged one would pass for a record that is being written. Pure functions; the bytes may be another
// program's or cut short.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::store {

inline constexpr std::size_t kFrame = 12;  ///< bytes before the body

/// What stands before a body that is `first` and `second`.
std::string frame_of(std::string_view first, std::string_view second = {});
/// The body of the frame at the front. nullopt if the bytes end before it does (a writer was killed, or is writing);
/// Corrupt if they are something else.
Result<std::optional<std::string_view>> unframe(std::string_view bytes, std::size_t longest);

}  // namespace cohort::store
