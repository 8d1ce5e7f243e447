// Appending to a file so that it always ends with something whole. Any thread; whoever shares a file keeps order
// himself.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string_view>

namespace cohort::track {

/// What is gathered before it is appended.
inline constexpr std::size_t kAppendBuffer = std::size_t{1} << 20;

struct AppendTo {
  int fd = -1;
  const std::filesystem::path& file;  ///< for errors
  std::string_view what;              ///< likewise: "writing to the run record"
};

/// All of `bytes`. Throws Io, naming the file, where they cannot be written (a full disk); the file then ends as
/// before.
void append_all(const AppendTo& to, std::string_view bytes);
/// "WHAT failed -- FILE -- errno's text -- ..."
[[noreturn]] void raise_io(const AppendTo& to, int error);

}  // namespace cohort::track
