#include "base/env.h"

#include "commands.h"

#include <fmt/core.h>

namespace cohort::app {
namespace {

void print_rows(env::Variable::Use use) {
  for (const env::Variable& variable : env::variables()) {
    if (variable.use != use) continue;
    fmt::print("  {}={}\n      {}", variable.name, variable.value, variable.meaning);
    if (!variable.default_value.empty()) fmt::print(" (default: {})", variable.default_value);
    if (const auto value = env::get(variable.name)) fmt::print("  [now: {}]", *value);
    fmt::print("\n");
  }
}

}  // namespace

void print_environment() {
  fmt::print("Read by the library and the command:\n");
  print_rows(env::Variable::Use::Read);
  fmt::print("\nSet by `cohort run` for its workers:\n");
  print_rows(env::Variable::Use::SetForRanks);
  fmt::print("\nOptions of `cohort run`, which the command line has before them:\n");
  print_rows(env::Variable::Use::RunOption);
}

void add_env(CLI::App& app, int&) {
  app.add_subcommand("env", "List the environment variables that Cohort reads and sets")->callback(print_environment);
}

}  // namespace cohort::app
