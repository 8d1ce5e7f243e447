// `cohort help [COMMAND or TOPIC]`. The topics are sections of the documentation, which the build embeds.

#include "base/result.h"
#include "cohort/commands.h"
#include "help_page.h"
#include "shared/run_options.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::app {
namespace {

struct Topic {
  const char* name;
  const char* about;
  std::vector<std::string_view> sections;  ///< sections of docs/reference/run.md
};

const std::vector<Topic>& topics() {
  static const std::vector<Topic> all = {
      {"environment", "the variables that Cohort reads and sets", {}},
      {"failures",
       "how a job ends, exit statuses, signals, hangs, restarts",
       {"How a job ends", "Jobs that do not go on", "Restarts"}},
      {"output", "lines, logs, progress bars, and the record of a run", {"Output", "job.json"}},
      {"config", "options from the environment and from a file", {"Where a value comes from"}},
  };
  return all;
}

/// The section from its heading to the next heading.
std::string_view section(std::string_view heading) {
  const std::string line = "## " + std::string(heading) + "\n";
  const std::string_view page = kRunPage;
  const auto begin = page.find(line);
  if (begin == std::string_view::npos) raise(ErrorCode::Internal, "the page has no section '{}'", heading);
  return page.substr(begin, page.find("\n## ", begin + 1) - begin);
}

/// Replaces `[text](page.md#part)` by text without links.
std::string without_links(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const auto middle = text.find("](");
    const auto begin = text.rfind('[', middle);
    const auto end = text.find(')', middle);
    if (middle == std::string_view::npos || begin == std::string_view::npos || end == std::string_view::npos) break;
    out.append(text.substr(0, begin)).append(text.substr(begin + 1, middle - begin - 1));
    text.remove_prefix(end + 1);
  }
  return out.append(text);
}

void print_topic(const Topic& topic) {
  if (topic.sections.empty()) return print_environment();
  std::string text;
  for (const std::string_view heading : topic.sections) {
    text += (text.empty() ? "" : "\n");
    text += section(heading);
    if (!text.ends_with('\n')) text += '\n';
  }
  std::fputs(without_links(text).c_str(), stdout);
}

void print_help(const CLI::App& app, const std::string& word) {
  std::vector<std::string> known;
  if (word.empty()) {
    // Does not use app.help(), which is the help of the chosen command.
    std::fputs(app.get_formatter()->make_help(&app, app.get_name(), CLI::AppFormatMode::Normal).c_str(), stdout);
    std::fputs("\nTopics (cohort help TOPIC):\n", stdout);
    for (const Topic& topic : topics()) std::printf("  %-12s %s\n", topic.name, topic.about);
    return;
  }
  for (const Topic& topic : topics()) {
    if (word == topic.name) return print_topic(topic);
    known.emplace_back(topic.name);
  }
  if (const CommandProgram* const program = program_of(word)) run_program(*program, {word, "--help"});
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (word == command->get_name()) {
      std::fputs(command->help(app.get_name()).c_str(), stdout);
      return;
    }
    if (!command->get_group().empty()) known.push_back(command->get_name());
  }
  const std::string meant = closest(word, known);
  raise(ErrorCode::InvalidArgument, "there is no help on '{}'{}", word,
        meant.empty() ? "; `cohort help` lists the topics" : "; did you mean " + meant + "?");
}

}  // namespace

std::vector<std::string> help_topics() {
  std::vector<std::string> names;
  for (const Topic& topic : topics()) names.emplace_back(topic.name);
  return names;
}

void add_help(CLI::App& app, int&) {
  auto word = std::make_shared<std::string>();
  auto markdown = std::make_shared<bool>(false);
  auto manual = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("help", "Explain a command or a topic");
  command->add_option("TOPIC", *word, "A command, or one of: environment, failures, output, config")->type_name("");
  command->add_flag("--markdown", *markdown, "The tables of the documentation: of run, and of environment");
  command->add_option("--manual", *manual, "Write the manual pages there: cohort.1, and one of each command")
      ->type_name("FOLDER");
  command->callback([&app, word, markdown, manual] {
    if (!manual->empty()) return write_manual_pages(app, *manual);
    if (!*markdown) return print_help(app, *word);
    if (*word != "run" && *word != "environment")
      raise(ErrorCode::InvalidArgument, "--markdown: there are tables of run and of environment");
    std::fputs((*word == "run" ? run_reference() : environment_reference()).c_str(), stdout);
  });
}

namespace {

constexpr const char* kRunExamples = R"(Examples:
  cohort run -np 4 ./train --epochs 10
  cohort run -np auto train.py            a .py file runs with the active Python
  cohort run -np 2 -m package.train       as `python -m`
  cohort run -np 2 --as-horovod train.py  a program that imports horovod.torch
  cohort run -np 4 --env OMP_NUM_THREADS=2 -- ./train -np 7
  cohort run -np 8 -H a:4,b:4 ./train     on two hosts, reached by ssh
  srun -N2 --ntasks-per-node=1 cohort run -np 4 ./train              on each node of a step: one job of 8
  cohort run --nnodes 2 --node-rank 0 --master-addr a -np 4 ./train  likewise by hand: here on a, with 1 on the other)";

constexpr const char* kMore = R"(
`cohort run --help-all` prints all options, `cohort help` the topics: failures, output, config, environment.
)";

constexpr const char* kDetails = R"(
Each option can be set by an environment variable (--start-timeout: COHORT_RUN_START_TIMEOUT) and in a file (--config), too;
the command line counts before the variable, the variable before the file. --show-config says what counts.

Everything after PROGRAM belongs to it. Workers find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as
under torchrun, and what cohort::init() needs (`cohort help environment` lists all). stdin is rank 0's. The complete output
of every rank is in the run's folder. The first rank to fail ends the job and gives the exit status (128 + signal if it was
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
  /// Shows only the common options, unless all are asked for.
  std::string make_help(const CLI::App* command, std::string name, CLI::AppFormatMode mode) const override {
    if (mode == CLI::AppFormatMode::All) return CLI::Formatter::make_help(command, std::move(name), mode) + kDetails;
    const auto shown = command->get_options([](const CLI::Option* option) {
      const RunOption* const row = run_option("--" + option->get_single_name());
      return option->nonpositional() && (row == nullptr || row->common);
    });
    return make_description(command) + make_usage(command, name) + make_positionals(command) +
           make_group("Options", false, shown) + "\n" + make_footer(command) + kMore;
  }
  /// Breaks the description into lines that fit a terminal, beside the names.
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
