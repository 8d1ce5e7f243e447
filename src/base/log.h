// The logging facade: one level per subsystem, chosen by COHORT_LOG ("warn", "info,net=debug"; "plan" is short for
// "plan=info"), written to stderr.
// Any thread may log. The default level is warn, since a library prints nothing unless something is wrong. Unless they
// are given a level, "world" and "elastic" log info: which world has been formed, and how training continues in it.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string_view>
#include <utility>

namespace cohort::log {

enum class Level : std::uint8_t { Debug, Info, Warn, Error, Off };

/// True if a message of this subsystem ("net", "comm", "launch", ...) and level would be written.
bool enabled(std::string_view subsystem, Level level) noexcept;
void write(std::string_view subsystem, Level level, std::string_view message) noexcept;
/// Replaces the levels from COHORT_LOG. Throws cohort::Error (InvalidArgument) for an unknown level.
void configure(std::string_view specification);

template <class... Args>
void debug(std::string_view subsystem, fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(subsystem, Level::Debug))
    write(subsystem, Level::Debug, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void info(std::string_view subsystem, fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(subsystem, Level::Info)) write(subsystem, Level::Info, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void warn(std::string_view subsystem, fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(subsystem, Level::Warn)) write(subsystem, Level::Warn, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void error(std::string_view subsystem, fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(subsystem, Level::Error))
    write(subsystem, Level::Error, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace cohort::log
