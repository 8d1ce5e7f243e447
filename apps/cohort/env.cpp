#include "base/env.h"

#include "commands.h"
#include "run_options.h"

#include <fmt/core.h>

namespace cohort::app {
namespace {

void print_rows(env::Variable::Use use) {
  for (const env::Variable& variable : env::variables()) {
    if (variable.use != use) continue;
    fmt::print("  {}={}\n      {}", variable.name, variable.value(), variable.meaning);
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
  for (const RunOption& option : run_options()) {
    if (option.only_on_command_line()) continue;
    const std::string variable = option.variable();
    fmt::print("  {}={}\n      {} of `cohort run`", variable,
               option.is_flag()                             ? "1"
               : option.kind == RunOption::Kind::Repeatable ? fmt::format("{}[;...]", option.type)
               : option.choices.empty()                     ? std::string(option.type)
                                                            : std::string(option.choices),
               option.name());
    if (!option.standard.empty()) fmt::print(" (default: {})", option.standard);
    if (const auto value = env::get(variable)) fmt::print("  [now: {}]", *value);
    fmt::print("\n");
  }
}

void add_env(CLI::App& app, int&) {
  app.add_subcommand("env", "List the environment variables that Cohort reads and sets")->callback(print_environment);
}

}  // namespace cohort::app
