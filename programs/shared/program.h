// A command of `cohort`, either in the program `cohort` or, as with git, in its own program beside it: `cohort doctor`
// runs `cohort-doctor`. Parses arguments, runs the command, and is the only code that prints errors. Main thread.
#pragma once

#include <CLI/CLI.hpp>

#include <filesystem>
#include <functional>
#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::app {

/// Adds a sub-command: its options, and a callback that does the work, sets `exit_status` unless it is 0, and throws
/// cohort::Error for errors that the user has to see.
using AddCommand = void (*)(CLI::App& app, int& exit_status);

/// A command with its own program, and the extension that has it.
struct CommandProgram {
  std::string_view command, program, extension, about;
};
/// The command programs of the extensions in this build.
std::span<const CommandProgram> programs() noexcept;
/// The program of `command`, or nullptr if the command has none.
const CommandProgram* program_of(std::string_view command) noexcept;

/// The `main` of such a program. It accepts the arguments of `cohort COMMAND ...`, or only those behind COMMAND.
/// `prepare` may change the arguments before they are parsed.
int program_main(int argc, char** argv, std::initializer_list<AddCommand> commands,
                 void (*prepare)(std::vector<std::string>& words) = nullptr);

inline constexpr std::string_view kAbout = "Makes a training program run on N processes as if it were one program.";

/// Wraps the `body` of every `main`: handles descriptors, signals, exit statuses, and the text of a thrown error.
int guarded_main(int argc, char** argv, const std::function<int(const std::vector<std::string>& words)>& body);
/// Sets `app` up like all commands of `cohort`: it requires one sub-command, and formats errors in the common way.
void set_up(CLI::App& app);
/// Calls `parse`, which parses into `app` and thereby runs the command. Returns the status of the process.
int parse_and_run(CLI::App& app, int& exit_status, const std::function<void()>& parse);
void parse_words(CLI::App& app, std::vector<std::string> words);

/// Replaces this process by `program`, with these arguments unchanged (the first is the command). Throws Unavailable,
/// saying how to build it, if it is not beside this program.
[[noreturn]] void run_program(const CommandProgram& program, const std::vector<std::string>& words);

/// The folder with include/, lib/ and share/ that this command was installed in. Throws Unavailable.
std::string installed_prefix();

/// True if `name` is a sub-command, including hidden ones.
bool has_command(const CLI::App& app, std::string_view name);

/// Prints to stderr; returns the status for wrong use.
int fail_usage(const std::string& message, const std::string& command);

std::vector<std::string> option_names(const CLI::App& app);
bool takes_value(const CLI::Option& option);
/// The option or command that was probably meant, e.g. "--timeout" for "--timout"; empty if no candidate is close.
std::string closest(std::string_view word, const std::vector<std::string>& candidates);

/// Shell completion data for the commands of `app`: parts of a `case`, for bash and zsh. `behind`: for a command, the
/// possible arguments besides options.
std::string completion_cases(const CLI::App& app, const std::map<std::string, std::string>& behind = {});
/// Does the same for another program. Throws Unavailable if that program is missing.
std::string completion_cases_of(std::string_view program);

/// Writes cohort-NAME.1, a manual page for each command of `app`, into `folder`. Throws Io.
void write_manual(const CLI::App& app, const std::string& folder);
/// Does the same for another program, if it exists.
void write_manual_of(std::string_view program, const std::string& folder);
/// A page's head and introduction; `name` is, for instance, "cohort-run".
std::string manual_head(std::string_view name, std::string_view about, std::string_view usage);
/// Escapes text of a page, or a part of a name whose - has to stay.
std::string roff(std::string_view text);

/// A private folder (0700) in `parent`, removed on destruction. Throws Io.
class TemporaryFolder {
 public:
  TemporaryFolder(const std::filesystem::path& parent, std::string_view prefix);
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

/// The folder of the newest run in ./runs. Throws Unavailable if there is none, with a proposal for `command`.
std::filesystem::path newest_run(std::string_view command);

}  // namespace cohort::app
