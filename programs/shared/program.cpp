#include "shared/program.h"

#include "base/env.h"
#include "base/files.h"
#include "base/parse.h"
#include "base/process.h"
#include "base/result.h"
#include "launch/output/live_run.h"
#include "launch/start/starter.h"
#include "launch/version.h"

#include <cohort/error.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>

namespace cohort::app {
namespace {

constexpr int kUsageStatus = 2;

/// Hidden options that ask a program for its part of the completion, or for its manual pages (given a folder).
constexpr const char* kCompletion = "--completion";
constexpr const char* kManual = "--manual";

/// Commands of one program are adjacent, so that it is asked only once for its part of the completion.
constexpr std::array kPrograms{
    CommandProgram{"export", "cohort-export", "observe",
                   "A checkpoint for Python's torch.load; the record of a run for TensorBoard, MLflow, wandb, "
                   "Prometheus, a CSV file"},
    CommandProgram{"plot", "cohort-plot", "observe",
                   "Draw the curves of a run, or of several to compare them, as an SVG picture"},
    CommandProgram{"watch", "cohort-watch", "observe",
                   "Show a run's progress: steps, speed, waiting and last line of each rank"},
    CommandProgram{"runs", "cohort-watch", "observe",
                   "List the runs in ./runs with their state, last values and size; remove old ones"},
    CommandProgram{"trace", "cohort-trace", "observe",
                   "What the ranks of a run did, event by event: `cohort run --trace` first"},
    CommandProgram{"bench", "cohort-bench", "bench", "Measure collectives on this machine"},
    CommandProgram{"doctor-run", "cohort-bench", "bench", ""},  // `cohort doctor --run` becomes this program
    CommandProgram{"doctor", "cohort-doctor", "observe",
                   "Look for what would hinder a job, on this host or on several; what this build has; try hosts for a "
                   "minute"},
    CommandProgram{"doctor-host", "cohort-doctor", "observe", ""},  // `cohort doctor` starts this program
};

/// Folder of the process that owns this command (--owner PID,DIR); empty: no owner.
std::string owner_folder;

/// Reports why the command ends, on stderr and, for its owner, in the file `refused`, since there may be no record.
void complain(const std::string& why) {
  std::fprintf(stderr, "cohort: %s\n", why.c_str());
  if (!owner_folder.empty()) (void)sys::write_file_atomically(owner_folder + "/refused", why);
}

/// The sub-command chosen on the command line, for help texts.
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

/// Opens stdin, stdout and stderr if a daemon has closed them (`cohort run <&- >&-`): otherwise a socket would get one
/// of their numbers.
void open_standard_descriptors() {
  int fd = -1;
  do {
    fd = ::open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= 2);
  if (fd >= 0) ::close(fd);
}

// "Did you mean": edit distance with transpositions (Damerau 1964, restricted form).

std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> cost(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) cost[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) cost[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[a.size()][b.size()];
}

std::string_view without_dashes(std::string_view word) {
  word.remove_prefix(std::min(word.find_first_not_of('-'), word.size()));
  return word;
}

/// "none rank full" from the type name "STYLE:{none,rank,full}"; empty if any text may be the value.
std::string choices(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const auto begin = type.find('{');
  const auto end = type.find('}', begin);
  if (begin == std::string::npos || end == std::string::npos) return {};
  std::string words;
  std::string_view all = std::string_view(type).substr(begin + 1, end - begin - 1);
  while (!all.empty()) {
    const std::string_view one = take_until(all, ",");
    words.append(words.empty() ? "" : " ").append(one.substr(0, one.find("->")));  // without its value
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

}  // namespace

bool takes_value(const CLI::Option& option) { return option.get_items_expected_min() != 0; }

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

std::string closest(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string_view wanted = without_dashes(word);
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(1, wanted.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const std::string_view name = without_dashes(candidate);
    std::size_t d = distance(wanted, name);
    // A word cut short ("--time" for "--timeout") is close too.
    if (wanted.size() >= 3 && name.starts_with(wanted)) d = std::min<std::size_t>(d, 1);
    if (d < best_distance) {
      best_distance = d;
      best = candidate;
    }
  }
  return best;
}

std::span<const CommandProgram> programs() noexcept {
  // COHORT_EXTENSIONS is, for instance, "ps,observe"; no name is part of another one.
  static const std::vector<CommandProgram> built = [] {
    std::vector<CommandProgram> found;
    for (const CommandProgram& one : kPrograms) {
      if (std::string_view(COHORT_EXTENSIONS).find(one.extension) != std::string_view::npos) found.push_back(one);
    }
    return found;
  }();
  return built;
}

const CommandProgram* program_of(std::string_view command) noexcept {
  for (const CommandProgram& program : programs()) {
    if (program.command == command) return &program;
  }
  return nullptr;
}

bool has_command(const CLI::App& app, std::string_view name) {
  const auto commands = app.get_subcommands([](const CLI::App*) { return true; });
  return std::any_of(commands.begin(), commands.end(), [&](const CLI::App* one) { return one->get_name() == name; });
}

int fail_usage(const std::string& message, const std::string& command) {
  complain(message);
  std::fprintf(stderr, "(try `%s --help`)\n", command.c_str());
  return kUsageStatus;
}

void run_program(const CommandProgram& program, const std::vector<std::string>& words) {
  const std::filesystem::path own = value_or_throw(sys::own_executable());
  const std::string path = (own.parent_path() / program.program).string();
  std::vector<std::string> all = {own.string()};
  all.insert(all.end(), words.begin(), words.end());
  std::vector<char*> arguments;
  for (std::string& word : all) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(path.c_str(), arguments.data());
  raise(
      ErrorCode::Unavailable,
      "`cohort {}` is the program {}, which cannot be started: {} -- it is installed with the command (tools/install, "
      "pip); in a build folder: cmake --build BUILD --target programs",
      program.command, path, errno_text(errno));
}

std::string installed_prefix() {
  // The shared library is in a folder of the prefix, or else this program is. A build folder has no prefix.
  namespace fs = std::filesystem;
  const std::string own = value_or_throw(sys::own_executable());
  Dl_info info{};
  const bool found = ::dladdr(reinterpret_cast<const void*>(&env::variables), &info) != 0 && info.dli_fname != nullptr;
  for (const fs::path& file : {fs::path(found ? info.dli_fname : ""), fs::path(own)}) {
    std::error_code error;
    fs::path folder = fs::canonical(file, error).parent_path();
    for (int up = 0; !error && up < 3; ++up, folder = folder.parent_path()) {
      if (fs::exists(folder / "share/cohort/torch", error)) return folder.string();
    }
  }
  raise(
      ErrorCode::Unavailable,
      "{} is not installed with headers and CMake's files: `tools/install --prefix DIR` does that, and so do wheels of "
      "tools/release/make-wheels",
      own);
}

void set_up(CLI::App& app) {
  app.require_subcommand(1);
  app.failure_message([](const CLI::App*, const CLI::Error& error) { return std::string(error.what()) + "\n"; });
}

void parse_words(CLI::App& app, std::vector<std::string> words) {
  std::reverse(words.begin(), words.end());  // CLI11 takes them from the back
  app.parse(words);
}

int parse_and_run(CLI::App& app, int& exit_status, const std::function<void()>& parse) {
  try {
    parse();
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ExtrasError& error) {
    return fail_usage(error.what() + meant_option(app), chosen_command(app));
  } catch (const CLI::ParseError& error) {
    return fail_usage(error.what(), chosen_command(app));
  } catch (const Error& error) {
    complain(error.what());
    if (exit_status != 0) return exit_status;
    return error.code() == ErrorCode::InvalidArgument ? kUsageStatus : 1;
  }
  return exit_status;
}

int guarded_main(int argc, char** argv, const std::function<int(const std::vector<std::string>&)>& body) {
  std::signal(SIGCHLD, SIG_DFL);  // if the caller ignores SIGCHLD, no child can be waited for
  open_standard_descriptors();
  // An owner gives its option first, since a program's own options (`cohort run train ...`) may have the same name.
  if (argc > 3 && std::string_view(argv[2]) == "--owner") {
    const std::string_view owner = argv[3];
    if (const auto comma = owner.find(','); comma != std::string_view::npos) owner_folder = owner.substr(comma + 1);
  }
  try {
    return body({argv + std::min(argc, 1), argv + argc});
  } catch (const Error& error) {
    complain(error.what());
    return error.code() == ErrorCode::InvalidArgument ? kUsageStatus : 1;
  } catch (const std::system_error& error) {  // a thread could not be started
    const bool limited = error.code() == std::errc::resource_unavailable_try_again;
    complain(error.what() + (limited ? "; " + sys::limit_of_processes() : ""));
    return 1;
  } catch (const std::exception& error) {
    complain(error.what());
    return 1;
  }
}

namespace {

/// Commands that appear in the help.
std::vector<const CLI::App*> shown_commands(const CLI::App& app) {
  std::vector<const CLI::App*> shown;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!command->get_group().empty()) shown.push_back(command);
  }
  return shown;
}

/// A command's part of the completion script: branches of a `case`.
std::string case_of(const CLI::App& command, const std::string& words) {
  std::string options, valued, values;
  for (const CLI::Option* option : command.get_options()) {
    const std::string names = names_of(*option, " ");
    if (names.empty()) continue;
    options += (options.empty() ? "" : " ") + names;
    if (!takes_value(*option)) continue;
    valued += (valued.empty() ? "" : " ") + names;
    if (const std::string known = choices(*option); !known.empty())
      values += fmt::format("        {}) choices='{}' ;;\n", names_of(*option, "|"), known);
  }
  std::string text = fmt::format("    {})\n      options='{}'\n      valued=' {} '\n      words='{}'\n",
                                 command.get_name(), options, valued, words);
  if (!values.empty()) text += fmt::format("      case $before in\n{}      esac\n", values);
  return text + "      ;;\n";
}

/// Output of a program with these arguments.
std::string said_by(std::string_view program, const std::vector<std::string>& words) {
  const std::string path =
      (std::filesystem::path(value_or_throw(sys::own_executable())).parent_path() / program).string();
  std::vector<std::string> command = {path};
  command.insert(command.end(), words.begin(), words.end());
  const auto said = launch::capture(command, std::chrono::minutes(2));
  if (!said) raise(said.error().code(), "asking {} for {} failed -- {}", path, words[0].substr(2), said.error().what());
  if (said->status != 0)
    raise(ErrorCode::Unavailable,
          "asking {} for {} failed: it has ended with status {} -- the programs beside `cohort` are installed with it; "
          "in a build folder: cmake --build BUILD --target programs",
          path, words[0].substr(2), said->status);
  return said->text;
}

/// Manual text: a tagged paragraph for each option, and a section for each sub-command.
std::string manual_options(const CLI::App& command) {
  std::string text;
  for (const CLI::Option* option : command.get_options()) {
    std::string names = names_of(*option, ", ");
    if (names.empty()) names = option->get_name();
    const std::string known = choices(*option);
    const std::string type = !known.empty() ? "{" + known + "}" : takes_value(*option) ? option->get_type_name() : "";
    text += fmt::format(".TP\n\\fB{}\\fR {}\n{}{}\n", roff(names), roff(option->nonpositional() ? type : ""),
                        roff(option->get_description()),
                        option->get_default_str().empty() ? "" : roff(" [" + option->get_default_str() + "]"));
  }
  return text;
}

std::string manual_page(const CLI::App& command) {
  std::string usage = "cohort " + command.get_name() + " [OPTIONS]";
  for (const CLI::Option* option : command.get_options()) {
    if (!option->nonpositional())
      usage += option->get_required() ? " " + option->get_name() : " [" + option->get_name() + "]";
  }
  std::string text = manual_head("cohort-" + command.get_name(), command.get_description(), usage);
  text += ".SH OPTIONS\n" + manual_options(command);
  for (const CLI::App* below : shown_commands(command))
    text += fmt::format(".SH COHORT {} {}\n{}\n{}", command.get_name(), below->get_name(),
                        roff(below->get_description()), manual_options(*below));
  if (!command.get_footer().empty()) text += ".SH EXAMPLES\n.nf\n" + roff(command.get_footer()) + "\n.fi\n";
  return text + ".SH SEE ALSO\n.BR cohort (1)\n";
}

}  // namespace

std::string roff(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if ((c == '.' || c == '\'') && (out.empty() || out.back() == '\n')) out += "\\&";
    if (c == '\\')
      out += "\\e";
    else if (c == '-')
      out += "\\-";
    else
      out += c;
  }
  return out;
}

std::string manual_head(std::string_view name, std::string_view about, std::string_view usage) {
  std::string title(name);
  for (char& c : title) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return fmt::format(".TH {} 1 \"\" \"cohort {}\" \"Cohort\"\n.SH NAME\n{} \\- {}\n.SH SYNOPSIS\n{}\n", title,
                     launch::kVersion, roff(name), roff(about), roff(usage));
}

void write_manual(const CLI::App& app, const std::string& folder) {
  for (const CLI::App* command : shown_commands(app)) {
    if (program_of(command->get_name()) != nullptr && has_command(app, "run")) continue;
    value_or_throw(
        sys::write_file_atomically(fmt::format("{}/cohort-{}.1", folder, command->get_name()), manual_page(*command)));
  }
}

void write_manual_of(std::string_view program, const std::string& folder) { (void)said_by(program, {kManual, folder}); }

std::string completion_cases(const CLI::App& app, const std::map<std::string, std::string>& behind) {
  std::string cases;
  for (const CLI::App* command : shown_commands(app)) {
    const auto found = behind.find(command->get_name());
    cases += case_of(*command, found == behind.end() ? "" : found->second);
  }
  return cases;
}

std::string completion_cases_of(std::string_view program) { return said_by(program, {kCompletion}); }

/// "there is no `cohort trace summary`; there are merge and report", if a command has sub-commands; else empty.
static std::string no_such_part(const CLI::App& app, const std::vector<std::string>& words) {
  if (words.size() < 2 || words[1].starts_with('-')) return {};
  std::vector<std::string> parts;
  const CLI::App* const command = app.get_subcommand(words[0]);
  for (const CLI::Option* option : command->get_options()) {
    if (option->get_positional()) return {};  // a positional argument, as bench has
  }
  for (const CLI::App* part : command->get_subcommands([](const CLI::App*) { return true; }))
    parts.push_back(part->get_name());
  if (parts.empty() || has_command(*command, words[1])) return {};
  const std::string meant = closest(words[1], parts);
  return fmt::format("there is no `cohort {} {}`; there {} {}{}", words[0], words[1], parts.size() == 1 ? "is" : "are",
                     fmt::join(parts, " and "), meant.empty() ? "" : "; did you mean " + meant + "?");
}

int program_main(int argc, char** argv, std::initializer_list<AddCommand> commands,
                 void (*prepare)(std::vector<std::string>& words)) {
  launch::set_beside_command();
  return guarded_main(argc, argv, [commands, prepare](std::vector<std::string> words) {
    CLI::App app(std::string(kAbout), "cohort");
    set_up(app);
    int exit_status = 0;
    for (const AddCommand add : commands) add(app, exit_status);
    if (words.size() == 1 && words[0] == kCompletion) {
      std::fputs(completion_cases(app).c_str(), stdout);
      return 0;
    }
    if (words.size() == 2 && words[0] == kManual) {
      write_manual(app, words[1]);
      return 0;
    }
    // A program called by its own name runs its first command.
    if (words.empty() || !has_command(app, words.front()))
      words.insert(words.begin(), app.get_subcommands([](const CLI::App*) { return true; }).front()->get_name());
    if (prepare != nullptr) prepare(words);
    if (const std::string why = no_such_part(app, words); !why.empty())
      return fail_usage(why, "cohort " + words.front());
    return parse_and_run(app, exit_status, [&] { parse_words(app, words); });
  });
}

}  // namespace cohort::app

namespace fs = std::filesystem;

namespace cohort::app {

TemporaryFolder::TemporaryFolder(const fs::path& parent, std::string_view prefix) {
  std::string name = (parent / prefix).string() + "XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) raise(ErrorCode::Io, "{}: {}", parent.string(), errno_text(errno));
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

fs::path newest_run(std::string_view command) {
  fs::path newest;
  fs::file_time_type newest_time;
  std::error_code error;
  for (fs::directory_iterator entry("runs", error), end; !error && entry != end; entry.increment(error)) {
    if (entry->is_symlink(error) || !entry->is_directory(error)) continue;
    if (entry->path().filename().string().starts_with('.')) continue;  // `cohort runs rm` is removing it
    std::error_code none;
    auto time = fs::last_write_time(entry->path() / launch::kLiveFile, none);
    if (none) continue;
    if (newest.empty() || time > newest_time) {
      newest = entry->path();
      newest_time = time;
    }
  }
  if (newest.empty()) {
    raise(ErrorCode::Unavailable,
          "no run to {0} -- ./runs has none with a live.json -- name the run's folder: cohort {0} RUN", command);
  }
  return newest;
}

}  // namespace cohort::app
