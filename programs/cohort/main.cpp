// The program `cohort`: runs one of its sub-commands, or a program beside it.
#include "base/env.h"
#include "base/files.h"
#include "base/process.h"
#include "base/result.h"
#include "cohort/commands.h"
#include "launch/output/job_record.h"
#include "launch/version.h"
#include "net/secret.h"
#include "shared/run_options.h"
#include "shared/words.h"

#include <fmt/core.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <memory>
#include <regex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::app {

void add_version(CLI::App& app, int&) {
  app.set_version_flag("--version",
                       fmt::format("cohort {} ({}, {})", launch::kVersion, launch::kCompiler, launch::kBuildType));
  const auto print_prefix = [] {
    fmt::print("{}\n", installed_prefix());
    throw CLI::Success();
  };
  app.add_flag_callback("--prefix", print_prefix,
                        "Print the folder that it was installed in: cmake -DCMAKE_PREFIX_PATH=$(cohort --prefix) ...");
  const auto print_flags = [] {
    fmt::print("-I{0}/include -L{0}/{1} -Wl,-rpath,{0}/{1} -lcohort_c\n", installed_prefix(), COHORT_LIBDIR);
    throw CLI::Success();
  };
  app.add_flag_callback("--cflags", print_flags, "Print what compiles a C program: cc program.c $(cohort --cflags)");
}

void add_secret(CLI::App& app, int&) {
  auto path = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("secret", "Make a secret for jobs that `cohort run` does not start");
  command->add_option("FILE", *path, "New file of mode 0600; give it to all ranks as COHORT_SECRET_FILE")->required();
  command->callback([path] {
    value_or_throw(net::write_new_secret_file(*path));
    fmt::print("{}: a new secret, readable by you alone; start every rank with COHORT_SECRET_FILE={}\n", *path, *path);
  });
}

namespace {

void print_rows(env::Variable::Use use) {
  for (const env::Variable& variable : env::variables()) {
    if (variable.use != use) continue;
    fmt::print("  {}={}\n      {}", variable.name, variable.value(), variable.meaning);
    if (!variable.default_value.empty()) fmt::print(" (default: {})", variable.default_value);
    if (const auto value = env::get(variable.name)) {
      // Hides secrets, since this output is pasted into reports. A file's name is no secret.
      const bool is_private =
          launch::looks_private(variable.name) && !std::string_view(variable.name).ends_with("_FILE");
      fmt::print("  [now: {}]", is_private ? "set, not shown" : *value);
    }
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

namespace {

// `cohort completion bash`: a script that completes commands, options and their values, generated from the command's
// own tables. zsh uses bash's script.

/// Puts the cases of the programs beside this one before this program's empty cases of the same names.
std::string all_cases(const CLI::App& app, const std::string& commands) {
  std::string cases;
  std::string_view last;
  for (const CommandProgram& program : programs()) {
    if (std::exchange(last, program.program) != program.program) cases += completion_cases_of(program.program);
  }
  return cases + completion_cases(app, {{"help", fmt::format("{} {}", fmt::join(help_topics(), " "), commands)},
                                        {"completion", "bash zsh"},
                                        {"runs", "compare rm"}});
}

std::string script(const CLI::App& app, std::string_view shell) {
  std::vector<std::string> commands;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!command->get_group().empty()) commands.push_back(command->get_name());
  }
  const std::string all = fmt::format("{}", fmt::join(commands, " "));
  const std::string cases = all_cases(app, all);
  const std::string head = shell == "zsh" ? "#compdef cohort\nautoload -Uz bashcompinit && bashcompinit\n" : "";
  return head + fmt::format(R"(# Completion of `cohort`; made by `cohort completion`.
_cohort() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  local options='' valued='' words='' choices='' i
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{} --cflags --help --prefix --version' -- "$current"))
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
complete {}-F _cohort cohort
)",
                            all, cases, shell == "zsh" ? "-o default " : "");
}

}  // namespace

void add_completion(CLI::App& app, int&) {
  auto shell = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("completion", "Print a script that completes the command in a shell");
  command->add_option("SHELL", *shell, "bash or zsh")->required()->type_name("");
  command->footer("Example: source <(cohort completion bash)");
  command->callback([&app, shell] {
    if (*shell != "bash" && *shell != "zsh")
      raise(ErrorCode::InvalidArgument, "completion for {}: there is one for bash and zsh", *shell);
    std::fputs(script(app, *shell).c_str(), stdout);
  });
}

void write_manual_pages(const CLI::App& app, const std::string& folder) {
  value_or_throw(sys::make_folders(folder));
  std::string text = manual_head("cohort", kAbout, "cohort COMMAND [OPTIONS]") + ".SH COMMANDS\n";
  std::string pages;
  for (const CLI::App* one : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (one->get_group().empty()) continue;
    text += fmt::format(".TP\n\\fBcohort {}\\fR\n{}\n", one->get_name(), roff(one->get_description()));
    pages += fmt::format("{}.BR cohort\\-{} (1)", pages.empty() ? "" : ",\n", roff(one->get_name()));
  }
  value_or_throw(sys::write_file_atomically(folder + "/cohort.1", text + ".SH SEE ALSO\n" + pages + "\n"));
  write_manual(app, folder);
  std::string_view last;
  for (const CommandProgram& program : programs()) {
    if (std::exchange(last, program.program) != program.program) write_manual_of(program.program, folder);
  }
}

namespace {

// The tables of docs/reference/run.md and environment.md, from the rows that the command itself uses.

/// Formats options in a text as code, and escapes all markup except existing code.
std::string cell(std::string_view plain) {
  static const std::regex special("`[^`]*`|\"[^\"]*\"|--?[a-z]+(-[a-z]+)*|[|<*]");
  const std::string text(plain);
  std::string out;
  std::size_t done = 0;
  for (std::sregex_iterator found(text.begin(), text.end(), special), end; found != end; ++found) {
    const auto at = static_cast<std::size_t>(found->position());
    out += text.substr(done, at - done);
    const std::string what = found->str();
    const bool within_word = at > 0 && std::isalnum(static_cast<unsigned char>(text[at - 1])) != 0;
    if (what.front() == '"')
      out += "`" + what.substr(1, what.size() - 2) + "`";
    else if (what.front() == '-' && !within_word)
      out += "`" + what + "`";
    else
      out += (what.size() == 1 ? "\\" : "") + what;
    done = at + what.size();
  }
  return out + text.substr(done);
}

std::string code(std::string_view text) { return text.empty() ? std::string() : fmt::format("`{}`", text); }

std::string row_of(const RunOption& option) {
  std::vector<std::string> names = option.all_names();
  if (!option.type.empty()) names.back() += fmt::format(" {}", option.type);
  for (std::string& name : names) name = code(name);
  // A default that is no value stands at the end of the help.
  std::string_view help = option.help, standard;
  if (const auto bracket = help.rfind(" ["); bracket != std::string_view::npos && help.ends_with(']')) {
    standard = help.substr(bracket + 2, help.size() - bracket - 3);
    help = help.substr(0, bracket);
  }
  return fmt::format("| {} | {} | {} |\n", fmt::join(names, ", "),
                     option.standard.empty() ? cell(standard) : code(option.standard), cell(help));
}

}  // namespace

std::string run_reference() {
  std::string text;
  for (const RunPart& part : run_parts()) {
    text += fmt::format("{}### {}\n\n| option | default | meaning |\n|---|---|---|\n", text.empty() ? "" : "\n",
                        part.title.empty() ? "For programs that start the command" : part.title);
    for (const RunOption* option : part.options) text += row_of(*option);
  }
  return text;
}

std::string environment_reference() {
  std::string text;
  for (const auto& [use, title] : {std::pair(env::Variable::Use::Read, "Read by the library and the command"),
                                   std::pair(env::Variable::Use::SetForRanks, "Set by `cohort run` for its ranks")}) {
    text += fmt::format("{}## {}\n\n| variable | value | default | meaning |\n|---|---|---|---|\n",
                        text.empty() ? "" : "\n", title);
    for (const env::Variable& row : env::variables()) {
      if (row.use != use) continue;
      const bool described = row.type.kind == env::Type::Kind::Text || row.default_value.starts_with("as ");
      text += fmt::format("| `{}` | {} | {} | {} |\n", row.name, cell(row.value()),
                          described ? cell(row.default_value) : code(row.default_value), cell(row.meaning));
    }
  }
  return text;
}

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
       {add_submit, add_ctl, add_secret, add_build_mpi, add_help, add_completion, add_version, add_agent})
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
    if (words.front() != "run" && words.front() != "submit") return parse_words(app, words);
    try {
      (words.front() == "run" ? run : submit)({words.begin() + 1, words.end()}, exit_status);
    } catch (const CLI::Success& asked) {
      parse_words(app, {words.front(), asked.get_name() == "CallForAllHelp" ? "--help-all" : "--help"});
    }
  });
}

}  // namespace
}  // namespace cohort::app

int main(int argc, char** argv) { return cohort::app::guarded_main(argc, argv, cohort::app::run_command); }
