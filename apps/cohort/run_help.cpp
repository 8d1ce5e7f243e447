#include "run_help.h"

#include "run_options.h"

#include <CLI/CLI.hpp>

#include <memory>
#include <sstream>
#include <string>
#include <utility>

namespace cohort::app {
namespace {

constexpr const char* kRunExamples = R"(Examples:
  cohort run -np 4 ./train --epochs 10
  cohort run -np auto train.py            a .py file runs with the active Python
  cohort run -np 2 -m package.train       as `python -m`
  cohort run -np 2 --as-horovod train.py  a program that imports horovod.torch
  cohort run -np 4 --env OMP_NUM_THREADS=2 -- ./train -np 7
  cohort run -np 8 -H a:4,b:4 ./train     on two hosts, reached by ssh
  srun -N2 --ntasks-per-node=1 cohort run -np 4 ./train         on each node of a step: one job of 8
  cohort run --nnodes 2 --node-rank 0 --master a -np 4 ./train  likewise by hand: here on a, with 1 on the other)";

constexpr const char* kMore = R"(
`cohort run --help-all` prints all options, `cohort help` the topics: failures, output, config, environment.
)";

constexpr const char* kDetails = R"(
Each option can be set by an environment variable (--start-timeout: COHORT_RUN_START_TIMEOUT) and in a file (--config), too;
the command line counts before the variable, the variable before the file. --show-config says what counts.

Everything after PROGRAM belongs to it. Workers find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as
under torchrun, and what cohort::join() needs (`cohort env` lists all). stdin is rank 0's. The complete output of every
rank is in the run's folder. The first rank to fail ends the job and gives the exit status (128 + signal if it was
killed; 75 if all ranks have saved and ask for a requeue; 124 after --timeout, or if the job did not go on; 127 if PROGRAM
cannot be started). Ctrl-C sends SIGINT to all ranks, SIGTERM after --grace and SIGKILL after as much again; a second Ctrl-C
sends SIGTERM at once, a third one SIGKILL.
)";

/// CLI11's own usage line would put OPTIONS after the program.
class RunHelp : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: cohort run -np N [OPTIONS] [--] PROGRAM [ARGUMENTS...]\n";
  }
  /// The common options alone, unless all are asked for.
  std::string make_help(const CLI::App* command, std::string name, CLI::AppFormatMode mode) const override {
    if (mode == CLI::AppFormatMode::All) return CLI::Formatter::make_help(command, std::move(name), mode) + kDetails;
    const auto shown = command->get_options([](const CLI::Option* option) {
      const RunOption* const row = run_option("--" + option->get_single_name());
      return option->nonpositional() && (row == nullptr || row->common);
    });
    return make_description(command) + make_usage(command, name) + make_positionals(command) +
           make_group("Options", false, shown) + "\n" + make_footer(command) + kMore;
  }
  /// In lines that a terminal shows whole, each behind the names.
  std::string make_option_desc(const CLI::Option* option) const override {
    constexpr std::size_t kWidth = 80;
    std::string lines;
    std::size_t length = 0;
    std::istringstream words(CLI::Formatter::make_option_desc(option));
    for (std::string word; words >> word;) {
      if (length > 0) lines += length + 1 + word.size() > kWidth ? '\n' : ' ';
      length = length > 0 && lines.back() == ' ' ? length + 1 + word.size() : word.size();
      lines += word;
    }
    return lines;
  }
};

}  // namespace

void set_run_help(CLI::App& command) {
  command.formatter(std::make_shared<RunHelp>());
  command.footer(kRunExamples);
}

}  // namespace cohort::app
