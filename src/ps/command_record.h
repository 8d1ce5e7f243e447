// A command as bytes, framed as the records of a file store: in journals, and on the way to a backup. Pure; any thread.
#pragma once

#include "ps/state.h"

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::ps {

/// What stands before a command's body.
inline constexpr std::size_t kRecordHead = 32;

/// The head alone: the body follows it as it is.
std::string record_head(const Command& command);
/// The first record of `bytes`, which goes on behind it then. nullopt, and nothing happens: they end before it does.
/// Corrupt: they do not begin with one. The body lies in `bytes`.
Result<std::optional<Command>> next_record(std::string_view& bytes);

}  // namespace cohort::ps
