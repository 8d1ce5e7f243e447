#include "launch/environment.h"

#include <unistd.h>

namespace cohort::launch {

Environment::Environment(const std::vector<std::string>& assignments) {
  for (const std::string& assignment : assignments) set(assignment);
}

Environment Environment::current() {
  Environment all;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) all.set(std::string_view(*entry));
  return all;
}

void Environment::set(std::string_view name, std::string_view value) {
  variables_.insert_or_assign(std::string(name), std::string(value));
}

void Environment::set(std::string_view assignment) {
  const auto equals = assignment.find('=');
  if (equals == std::string_view::npos || equals == 0) return;
  set(assignment.substr(0, equals), assignment.substr(equals + 1));
}

void Environment::remove(std::string_view name) {
  if (const auto found = variables_.find(name); found != variables_.end()) variables_.erase(found);
}

void Environment::remove_run_options() {
  std::erase_if(variables_, [](const auto& variable) {
    return variable.first.starts_with(env::kRunOptionPrefix) && variable.first != env::kRunDir;
  });
}

std::optional<std::string> Environment::find(std::string_view name) const {
  const auto found = variables_.find(name);
  if (found == variables_.end()) return std::nullopt;
  return found->second;
}

std::vector<std::string> Environment::assignments() const {
  std::vector<std::string> out;
  out.reserve(variables_.size());
  for (const auto& [name, value] : variables_) out.push_back(name + "=" + value);
  return out;
}

}  // namespace cohort::launch
