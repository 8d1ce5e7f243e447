// The command. Parses, hands over to one sub-command, and is the one place that prints errors.
#include "commands.h"

#include "sys/files.h"
#include "sys/process.h"

#include <cohort/error.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace cohort::app {
namespace {

constexpr int kUsageStatus = 2;

/// Of the process that this command belongs to (--owner-folder); empty: none.
std::string owner_folder;

/// Why the command ends: on stderr; and for its owner, since there may be no record, in the file `refused`.
void complain(const std::string& why) {
  std::fprintf(stderr, "cohort: %s\n", why.c_str());
  if (!owner_folder.empty()) (void)sys::write_file_atomically(owner_folder + "/refused", why);
}

int fail_usage(const std::string& message, const std::string& command) {
  complain(message);
  std::fprintf(stderr, "(try `%s --help`)\n", command.c_str());
  return kUsageStatus;
}

/// The sub-command that the words chose, for help texts.
std::string chosen_command(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? "cohort" : "cohort " + chosen.front()->get_name();
}

/// "; did you mean --json?" for an option that the chosen command does not have.
std::string meant_option(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  if (chosen.empty()) return {};
  for (const std::string& word : app.remaining(true)) {
    if (!word.starts_with('-')) continue;
    const std::string meant = closest(word.substr(0, word.find('=')), option_names(*chosen.front()));
    if (!meant.empty()) return "; did you mean " + meant + "?";
  }
  return {};
}

int parse_and_run(int argc, char** argv) {
  for (int i = 1; i + 1 < argc && std::string_view(argv[i]) != "--"; ++i) {
    if (std::string_view(argv[i]) == "--owner-folder") owner_folder = argv[i + 1];
  }
  CLI::App app("Makes a training program run on N processes as if it were one program.", "cohort");
  app.require_subcommand(1);
  app.failure_message([](const CLI::App*, const CLI::Error& error) { return std::string(error.what()) + "\n"; });
  int exit_status = 0;
  add_run(app, exit_status);
  add_export(app, exit_status);
  add_plot(app, exit_status);
  add_watch(app, exit_status);
  add_trace(app, exit_status);
  add_secret(app, exit_status);
  add_build_mpi(app, exit_status);
  add_env(app, exit_status);
  add_bench(app, exit_status);
  add_doctor(app, exit_status);
  add_check_build(app, exit_status);
  add_help(app, exit_status);
  add_completion(app, exit_status);
  add_version(app, exit_status);
  add_agent(app, exit_status);

  std::vector<std::string> names;
  bool known = false;
  for (const auto* command : app.get_subcommands({})) {
    known = known || (argc > 1 && command->get_name() == argv[1]);
    if (!command->get_group().empty()) names.push_back(command->get_name());
  }
  if (argc > 1 && argv[1][0] != '-' && !known) {
    const std::string meant = closest(argv[1], names);
    return fail_usage("there is no command '" + std::string(argv[1]) + "'" +
                          (meant.empty() ? "" : "; did you mean `cohort " + meant + "`?"),
                      "cohort");
  }
  std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  // Horovod's option, for those who type it.
  if (!words.empty() && words.front() == "--check-build") words.front() = "check-build";
  // horovodrun and mpirun have no sub-commands.
  if (!words.empty() && words.front().starts_with('-')) {
    const std::string name = words.front().substr(0, words.front().find('='));
    const CLI::App& run = *app.get_subcommand("run");
    const bool starts =
        name.starts_with("-np") || run.get_option_no_throw(name) != nullptr || !foreign_option(name).empty();
    if (starts && app.get_option_no_throw(name) == nullptr)
      return fail_usage(name + " is for programs that are started: `cohort run " + words.front() + " ...`",
                        "cohort run");
  }
  if (!words.empty() && words.front() == "bench") {
    // -np is one word to everyone who comes from MPI; CLI11 would read -n p.
    for (std::string& word : words) {
      if (word == "--") break;  // a command's own
      if (word == "-np" || word == "-nproc" || word.starts_with("-np=")) word = "-" + word;
    }
  }
  try {
    if (!words.empty() && words.front() == "run") {
      try {
        run({words.begin() + 1, words.end()}, exit_status);
      } catch (const CLI::Success& asked) {
        app.parse(asked.get_name() == "CallForAllHelp" ? "run --help-all" : "run --help");
      }
    } else {
      std::reverse(words.begin(), words.end());  // CLI11 takes them from the back
      app.parse(words);
    }
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ExtrasError& error) {
    return fail_usage(error.what() + meant_option(app), chosen_command(app));
  } catch (const CLI::ParseError& error) {
    if (argc <= 1) {
      std::fputs(app.help().c_str(), stderr);
      return kUsageStatus;
    }
    return fail_usage(error.what(), chosen_command(app));
  } catch (const Error& error) {
    complain(error.what());
    if (exit_status != 0) return exit_status;
    return error.code() == ErrorCode::InvalidArgument ? kUsageStatus : 1;
  }
  return exit_status;
}

/// Where a daemon has closed them (`cohort run <&- >&-`), a socket would get the number of stdin or stdout otherwise.
void open_standard_descriptors() {
  int fd = -1;
  do {
    fd = ::open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= 2);
  if (fd >= 0) ::close(fd);
}

}  // namespace
}  // namespace cohort::app

int main(int argc, char** argv) {
  std::signal(SIGCHLD, SIG_DFL);  // where the caller ignores it, no child could be waited for
  cohort::app::open_standard_descriptors();
  try {
    return cohort::app::parse_and_run(argc, argv);
  } catch (const cohort::Error& error) {
    cohort::app::complain(error.what());
    return error.code() == cohort::ErrorCode::InvalidArgument ? 2 : 1;
  } catch (const std::system_error& error) {  // of a thread that cannot be started
    const bool limited = error.code() == std::errc::resource_unavailable_try_again;
    cohort::app::complain(error.what() + (limited ? "; " + cohort::sys::limit_of_processes() : ""));
    return 1;
  } catch (const std::exception& error) {
    cohort::app::complain(error.what());
    return 1;
  }
}
