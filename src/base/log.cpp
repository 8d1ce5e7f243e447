#include "base/log.h"

#include "base/env.h"
#include "base/result.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace cohort::log {
namespace {

struct Settings {
  Level base = Level::Warn;
  std::map<std::string, Level, std::less<>> of_subsystem;
};

Result<Level> parse_level(std::string_view text) {
  if (text == "debug") return Level::Debug;
  if (text == "info") return Level::Info;
  if (text == "warn") return Level::Warn;
  if (text == "error") return Level::Error;
  if (text == "off") return Level::Off;
  return fail(ErrorCode::InvalidArgument,
              "COHORT_LOG: unknown level '{}' -- give debug, info, warn, error or off, as in 'warn,net=debug'", text);
}

Result<Settings> parse(std::string_view specification) {
  Settings settings;
  bool base_given = false;
  while (!specification.empty()) {
    const std::size_t comma = specification.find(',');
    const std::string_view item = specification.substr(0, comma);
    specification = comma == std::string_view::npos ? std::string_view() : specification.substr(comma + 1);
    if (item.empty()) continue;
    if (item == "plan") {  // "plan" (what the communicator chose, and why) means level info
      settings.of_subsystem.insert_or_assign("plan", Level::Info);
      continue;
    }
    const std::size_t equals = item.find('=');
    auto level = parse_level(equals == std::string_view::npos ? item : item.substr(equals + 1));
    if (!level) return tl::unexpected(level.error());
    if (equals == std::string_view::npos) {
      settings.base = *level;
      base_given = true;
    } else {
      settings.of_subsystem.emplace(std::string(item.substr(0, equals)), *level);
    }
  }
  for (const char* const told : {"world", "elastic"}) {
    if (!base_given) settings.of_subsystem.emplace(told, Level::Info);
  }
  return settings;
}

class Logger {
 public:
  Logger() : sink_(std::make_shared<spdlog::sinks::stderr_color_sink_mt>()), spdlog_("cohort", sink_) {
    spdlog_.set_pattern("%^cohort %l%$: %v");
    spdlog_.set_level(spdlog::level::trace);
    spdlog_.flush_on(spdlog::level::trace);
    auto settings = parse(env::text(env::kLog));
    if (!settings) spdlog_.warn("{}", settings.error().what());
    settings_ = settings ? *std::move(settings) : *parse({});
  }

  bool enabled(std::string_view subsystem, Level level) {
    const std::lock_guard lock(mutex_);
    const auto found = settings_.of_subsystem.find(subsystem);
    return level >= (found == settings_.of_subsystem.end() ? settings_.base : found->second);
  }

  void write(std::string_view subsystem, Level level, std::string_view message) {
    constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info, spdlog::level::warn,
                                                     spdlog::level::err, spdlog::level::off};
    spdlog_.log(kLevels[static_cast<std::size_t>(level)], "{}: {}", subsystem, message);
  }

  void configure(Settings settings) {
    const std::lock_guard lock(mutex_);
    settings_ = std::move(settings);
  }

 private:
  std::mutex mutex_;
  Settings settings_;
  std::shared_ptr<spdlog::sinks::stderr_color_sink_mt> sink_;
  spdlog::logger spdlog_;
};

Logger& logger() {
  static Logger* instance = new Logger;  // never destroyed: threads may log while the process exits
  return *instance;
}

}  // namespace

bool enabled(std::string_view subsystem, Level level) noexcept {
  try {
    return logger().enabled(subsystem, level);
  } catch (...) {
    return false;
  }
}

void write(std::string_view subsystem, Level level, std::string_view message) noexcept {
  try {
    logger().write(subsystem, level, message);
  } catch (...) {  // failing to write a message must not end the program
  }
}

void configure(std::string_view specification) { logger().configure(value_or_throw(parse(specification))); }

}  // namespace cohort::log
