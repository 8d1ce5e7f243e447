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
/// The first record of `bytes`, which goes on behind it then. The body lies in `bytes`. nullopt, and nothing happens:
/// it does not begin with a whole one; `damaged` says why more bytes would not make it one.
std::optional<Command> next_record(std::string_view& bytes, std::optional<Error>* damaged = nullptr);

}  // namespace cohort::ps
