// The program `cohort`: hands over to one of its sub-commands, or to a program beside it.
#include "cohort/commands.h"

#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace cohort::app {
namespace {

int run_command(std::vector<std::string> words) {
  CLI::App app(std::string(kAbout), "cohort");
  set_up(app);
  int exit_status = 0;
  add_run(app, exit_status);
  for (const CommandProgram& program : programs()) {
    CLI::App* const there = app.add_subcommand(std::string(program.command), std::string(program.about));
    if (program.about.empty()) there->group("");
  }
  for (const AddCommand add :
       {add_secret, add_build_mpi, add_env, add_check_build, add_help, add_completion, add_version, add_agent})
    add(app, exit_status);

  if (words.empty()) {
    std::fputs(app.help().c_str(), stderr);
    return 2;
  }
  if (const CommandProgram* const program = program_of(words.front())) run_program(*program, words);
  if (!words.front().starts_with('-') && !has_command(app, words.front())) {
    std::vector<std::string> names;
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
      if (!command->get_group().empty()) names.push_back(command->get_name());
    }
    const std::string meant = closest(words.front(), names);
    return fail_usage(
        "there is no command '" + words.front() + "'" + (meant.empty() ? "" : "; did you mean `cohort " + meant + "`?"),
        "cohort");
  }
  // Horovod's option, for those who type it.
  if (words.front() == "--check-build") words.front() = "check-build";
  // horovodrun and mpirun have no sub-commands.
  if (words.front().starts_with('-')) {
    const std::string name = words.front().substr(0, words.front().find('='));
    const CLI::App& run = *app.get_subcommand("run");
    const bool starts =
        name.starts_with("-np") || run.get_option_no_throw(name) != nullptr || !foreign_option(name).empty();
    if (starts && app.get_option_no_throw(name) == nullptr)
      return fail_usage(name + " is for programs that are started: `cohort run " + words.front() + " ...`",
                        "cohort run");
  }
  return parse_and_run(app, exit_status, [&] {
    if (words.front() != "run") return parse_words(app, words);
    try {
      run({words.begin() + 1, words.end()}, exit_status);
    } catch (const CLI::Success& asked) {
      parse_words(app, {"run", asked.get_name() == "CallForAllHelp" ? "--help-all" : "--help"});
    }
  });
}

}  // namespace
}  // namespace cohort::app

int main(int argc, char** argv) { return cohort::app::guarded_main(argc, argv, cohort::app::run_command); }
