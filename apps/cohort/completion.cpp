// `cohort completion bash`: a script that completes commands, options and their values, made from what the command
// itself knows of them.
#include "base/result.h"

#include "commands.h"

#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace cohort::app {
namespace {

/// "none rank full" from the type name "STYLE:{none,rank,full}"; empty if any text may be the value.
std::string choices(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const auto begin = type.find('{');
  const auto end = type.find('}', begin);
  if (begin == std::string::npos || end == std::string::npos) return {};
  std::string words = type.substr(begin + 1, end - begin - 1);
  for (char& c : words) {
    if (c == ',') c = ' ';
  }
  return words;
}

std::string names_of(const CLI::Option& option, const std::string& between) {
  std::string names;
  const auto add = [&names, &between](const std::string& name) { names += (names.empty() ? "" : between) + name; };
  for (const std::string& name : option.get_snames()) add("-" + name);
  for (const std::string& name : option.get_lnames()) add("--" + name);
  if (option.check_lname("np")) add("-np");
  return names;
}

std::string script(const CLI::App& app) {
  std::string commands;
  std::string cases;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_group().empty()) continue;
    commands += (commands.empty() ? "" : " ") + command->get_name();
    std::string options;
    std::string valued;
    std::string values;
    for (const CLI::Option* option : command->get_options()) {
      const std::string names = names_of(*option, " ");
      if (names.empty()) continue;
      options += (options.empty() ? "" : " ") + names;
      if (option->get_items_expected_min() == 0) continue;
      valued += (valued.empty() ? "" : " ") + names;
      if (const std::string words = choices(*option); !words.empty()) {
        values += fmt::format("        {}) choices='{}' ;;\n", names_of(*option, "|"), words);
      }
    }
    std::string words;
    if (command->get_name() == "help") words = fmt::format("{} {}", fmt::join(help_topics(), " "), "COMMANDS");
    if (command->get_name() == "completion") words = "bash";
    cases += fmt::format("    {})\n      options='{}'\n      valued=' {} '\n      words='{}'\n", command->get_name(),
                         options, valued, words);
    if (!values.empty()) cases += fmt::format("      case $before in\n{}      esac\n", values);
    cases += "      ;;\n";
  }
  const auto place = cases.find("COMMANDS");
  if (place != std::string::npos) cases.replace(place, 8, commands);
  return fmt::format(R"(# Completion of `cohort` for bash; made by `cohort completion bash`.
_cohort() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  local options='' valued='' words='' choices='' i
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{} --help --version' -- "$current"))
    return
  fi
  # bash splits --option=value in three.
  if [ "$current" = = ]; then current=; fi
  if [ "$before" = = ]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  case ${{COMP_WORDS[1]}} in
{}  esac
  if [ -n "$choices" ]; then
    COMPREPLY=($(compgen -W "$choices" -- "$current"))
    return
  fi
  # After the program everything is its own.
  if [ "${{COMP_WORDS[1]}}" = run ]; then
    for ((i = 2; i < COMP_CWORD; i++)); do
      case ${{COMP_WORDS[i]}} in
        --) compopt -o default 2>/dev/null; return ;;
        =) i=$((i + 1)) ;;
        -*) [[ $valued != *" ${{COMP_WORDS[i]}} "* ]] || [ "${{COMP_WORDS[i+1]}}" = = ] || i=$((i + 1)) ;;
        *) compopt -o default 2>/dev/null; return ;;
      esac
    done
  fi
  if [[ $valued == *" $before "* ]]; then compopt -o default 2>/dev/null; return; fi
  case $current in
    -*) COMPREPLY=($(compgen -W "$options" -- "$current")) ;;
    *)
      COMPREPLY=($(compgen -W "$words" -- "$current"))
      [ -n "$words" ] || compopt -o default 2>/dev/null ;;
  esac
}}
complete -F _cohort cohort
)",
                     commands, cases);
}

}  // namespace

void add_completion(CLI::App& app, int&) {
  auto shell = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("completion", "Print a script that completes the command in a shell");
  command->add_option("SHELL", *shell, "bash")->required()->type_name("");
  command->footer("Example: source <(cohort completion bash)");
  command->callback([&app, shell] {
    if (*shell != "bash") raise(ErrorCode::InvalidArgument, "completion for {}: bash is the one that there is", *shell);
    std::fputs(script(app).c_str(), stdout);
  });
}

}  // namespace cohort::app
