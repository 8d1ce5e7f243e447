#include "launch/version.h"
#include "commands.h"

#include <fmt/core.h>

namespace cohort::app {

void add_version(CLI::App& app, int&) {
  app.add_subcommand("version", "Print the version")->callback([] {
    fmt::print("cohort {} ({}, {})\n", launch::kVersion, launch::kCompiler, launch::kBuildType);
  });
  app.set_version_flag("--version", std::string("cohort ") + std::string(launch::kVersion));
}

}  // namespace cohort::app
