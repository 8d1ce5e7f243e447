// A set of environment variables as a value: of this process, or for one that is to be started. Plain; one thread.
#pragma once

#include "base/env.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

class Environment {
 public:
  Environment() = default;
  /// From "NAME=value" texts; the last one of a name counts, texts without '=' are dropped.
  explicit Environment(const std::vector<std::string>& assignments);
  /// Of this process.
  static Environment current();

  void set(std::string_view name, std::string_view value);
  void set(std::string_view assignment);
  void remove(std::string_view name);
  /// The variables that stand for options of `cohort run`: they are meant for one command alone.
  void remove_run_options();
  std::optional<std::string> find(std::string_view name) const;
  std::vector<std::string> assignments() const;
  const env::Map& variables() const noexcept { return variables_; }

 private:
  env::Map variables_;
};

}  // namespace cohort::launch
