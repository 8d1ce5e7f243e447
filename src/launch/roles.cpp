#include "launch/roles.h"

#include "base/parse.h"

#include <fmt/format.h>

#include <algorithm>

namespace cohort::launch {

Role Roles::role_of(int process) const noexcept {
  return process < workers ? Role::Worker : process < workers + servers ? Role::Server : Role::Evaluator;
}

int Roles::number_of(int process) const noexcept {
  return process < workers ? process : process < workers + servers ? process - workers : process - workers - servers;
}

int Roles::process_of(Role role, int number) const noexcept {
  return number + (role == Role::Worker ? 0 : role == Role::Server ? workers : workers + servers);
}

std::string Roles::name_of(int process) const { return process_name(role_of(process), number_of(process)); }

std::string Roles::names_of(const std::vector<int>& processes) const {
  std::string text;
  for (const Role role : {Role::Worker, Role::Server, Role::Evaluator}) {
    std::vector<int> numbers;
    for (const int process : processes) {
      if (role_of(process) == role) numbers.push_back(number_of(process));
    }
    if (numbers.empty()) continue;
    if (!text.empty()) text += ", ";
    if (numbers.size() == 1)
      text += process_name(role, numbers.front());
    else
      text += fmt::format("{} {}", role == Role::Worker ? "ranks" : "servers", to_ranges(numbers));
  }
  return text;
}

std::string process_name(Role role, int number) {
  if (role == Role::Evaluator) return to_string(role);
  return fmt::format("{} {}", role == Role::Worker ? "rank" : "server", number);
}

std::string file_name(Role role, int number) {
  std::string name = process_name(role, number);
  std::replace(name.begin(), name.end(), ' ', '-');
  return name;
}

}  // namespace cohort::launch
