// The sub-commands of `cohort`. To add one: write `void add_NAME(CLI::App& app, int& exit_status)` in its own file or
// in that of similar commands, declare it here, call it in main.cpp. The function adds its options and a callback that
// does the work, sets `exit_status` unless it is 0, and throws cohort::Error for errors that main prints for the user.
// Never include torch: the command starts in milliseconds.
#pragma once

#include "shared/program.h"

#include <string>
#include <string_view>
#include <vector>

namespace cohort::app {

void add_run(CLI::App& app, int& exit_status);
void add_agent(CLI::App& app, int& exit_status);
void add_submit(CLI::App& app, int& exit_status);
void add_ctl(CLI::App& app, int& exit_status);
void add_version(CLI::App& app, int& exit_status);
void add_secret(CLI::App& app, int& exit_status);
void add_build_mpi(CLI::App& app, int& exit_status);
void add_help(CLI::App& app, int& exit_status);
void add_completion(CLI::App& app, int& exit_status);

/// Output of `cohort help environment`.
void print_environment();
/// Writes cohort.1, and a page for each command. Creates the folder.
void write_manual_pages(const CLI::App& app, const std::string& folder);
/// The tables for the pages in docs/reference, in Markdown.
std::string run_reference();
std::string environment_reference();
/// Topics of `cohort help` besides commands.
std::vector<std::string> help_topics();

/// Runs `cohort run` with these arguments. Throws CLI::CallForHelp if they ask for help, and cohort::Error as above.
void run(const std::vector<std::string>& words, int& exit_status);

/// Does the same for `cohort submit`.
void submit(const std::vector<std::string>& words, int& exit_status);

/// Sets the text around the options in `cohort run --help` and --help-all, and how lines are broken.
void set_run_help(CLI::App& command);

}  // namespace cohort::app
