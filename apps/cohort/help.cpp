// `cohort help [COMMAND or TOPIC]`. The topics are sections of the documentation, embedded when this is built.
#include "base/result.h"

#include "commands.h"
#include "help_page.h"

#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::app {
namespace {

struct Topic {
  const char* name;
  const char* about;
  std::vector<std::string_view> sections;  ///< of docs/reference/run.md
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

/// From its heading to the next one.
std::string_view section(std::string_view heading) {
  const std::string line = "## " + std::string(heading) + "\n";
  const std::string_view page = kRunPage;
  const auto begin = page.find(line);
  if (begin == std::string_view::npos) raise(ErrorCode::Internal, "the page has no section '{}'", heading);
  return page.substr(begin, page.find("\n## ", begin + 1) - begin);
}

/// `[text](page.md#part)` as it is read where nothing can be followed.
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
    // Not app.help(), which is that of the chosen command.
    std::fputs(app.get_formatter()->make_help(&app, app.get_name(), CLI::AppFormatMode::Normal).c_str(), stdout);
    std::fputs("\nTopics (cohort help TOPIC):\n", stdout);
    for (const Topic& topic : topics()) std::printf("  %-12s %s\n", topic.name, topic.about);
    return;
  }
  for (const Topic& topic : topics()) {
    if (word == topic.name) return print_topic(topic);
    known.emplace_back(topic.name);
  }
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (word == command->get_name()) {
      std::fputs(command->help(app.get_name() + " " + word).c_str(), stdout);
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
  CLI::App* command = app.add_subcommand("help", "Explain a command or a topic");
  command->add_option("TOPIC", *word, "A command, or one of: environment, failures, output, config")->type_name("");
  command->add_flag("--markdown", *markdown, "The tables of the documentation: of run, and of environment");
  command->callback([&app, word, markdown] {
    if (!*markdown) return print_help(app, *word);
    if (*word != "run" && *word != "environment")
      raise(ErrorCode::InvalidArgument, "--markdown: there are tables of run and of environment");
    std::fputs((*word == "run" ? run_reference() : environment_reference()).c_str(), stdout);
  });
}

}  // namespace cohort::app
