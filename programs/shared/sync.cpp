#include "shared/sync.h"

#include "base/files.h"
#include "base/parse.h"
#include "base/process.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "launch/plan/program.h"
#include "launch/processes.h"
#include "launch/start/starter.h"
#include "launch/step_costs.h"
#include "shared/run_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <pwd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

namespace cohort::app {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using launch::shell_quoted;

constexpr std::chrono::hours kLimit(12);  // limit of one copy; rsync itself stops if no data moves
constexpr std::size_t kAtOnce = 8;

/// A list of files, for commands to read and write by its path. It disappears with this process, even after a kill.
struct ListFile {
  sys::UniqueFd fd{::memfd_create("cohort-sync", MFD_CLOEXEC)};
  // (Uses our pid as /proc shows it, since /proc may belong to another namespace.)
  std::string path = fmt::format("/proc/{}/fd/{}", fs::read_symlink("/proc/self").string(), fd.get());
};

bool is_within(const fs::path& inner, const fs::path& outer) {
  return std::ranges::mismatch(outer, inner).in1 == outer.end();
}

/// Takes $HOME or, if that is not set, the entry in the list of users.
fs::path home_folder() {
  const auto said = launch::Environment::current().find("HOME");
  const passwd* const user = said && !said->empty() ? nullptr : ::getpwuid(::getuid());
  const std::string home = said && !said->empty() ? *said : user != nullptr ? user->pw_dir : "/";
  return fs::weakly_canonical(home);
}

/// True for files that every host makes itself, or that belong only to this host. ("runs" counts only at the top.)
bool is_left_out(const std::string& name, bool at_top) {
  constexpr std::array<std::string_view, 4> kNames = {".git", "build", "__pycache__", "node_modules"};
  return std::ranges::find(kNames, name) != kNames.end() || name.starts_with("cmake-build-") ||
         (at_top && name == "runs");
}

/// A Python environment that the other hosts need in addition to the folder.
struct VirtualEnvironment {
  std::string folder;       ///< empty: none is active
  std::string interpreter;  ///< interpreter outside of `folder`, from which the environment was made
};

VirtualEnvironment active_environment() {
  const auto active = launch::Environment::current().find("VIRTUAL_ENV");
  std::error_code error;
  if (!active || active->empty()) return {};
  // Only a virtual environment may overwrite the same path on another host.
  if (!fs::is_regular_file(fs::path(*active) / "pyvenv.cfg", error)) {
    raise(
        ErrorCode::InvalidArgument,
        "--sync: VIRTUAL_ENV={} is no virtual environment (it has no pyvenv.cfg): deactivate it, or unset VIRTUAL_ENV",
        *active);
  }
  VirtualEnvironment found{(fs::absolute(*active) / "").lexically_normal().parent_path().string(), {}};
  const fs::path interpreter = fs::canonical(fs::path(*active) / "bin" / "python3", error);
  if (!error && !interpreter.string().starts_with(fs::canonical(*active, error).string() + "/"))
    found.interpreter = interpreter.string();
  return found;
}

/// Parses a line such as "Number of regular files transferred: 1,234".
double counted(const std::string& text, std::string_view title) {
  const auto at = text.find(title);
  double number = 0;
  for (std::size_t i = at == std::string::npos ? text.size() : at + title.size(); i < text.size() && text[i] != '\n';
       ++i) {
    if (std::isdigit(static_cast<unsigned char>(text[i])) != 0) number = number * 10 + (text[i] - '0');
  }
  return number;
}

struct Copied {
  double files = 0, bytes = 0;
};

/// Copies to one host; errors contain the host's output.
class HostSync {
 public:
  HostSync(const SyncRequest& request, const std::string& host, const VirtualEnvironment& environment)
      : request_(request), host_(host), environment_(environment) {}

  void prepare(const std::string& folder) const {
    constexpr int kNoFolder = 91, kNoRsync = 92, kNoInterpreter = 93;
    std::string folders = shell_quoted(folder);
    if (!environment_.folder.empty()) folders += " " + shell_quoted(environment_.folder);
    std::string order = fmt::format("mkdir -p {} || exit {}; command -v rsync >/dev/null 2>&1 || exit {}", folders,
                                    kNoFolder, kNoRsync);
    if (!environment_.interpreter.empty())
      order += fmt::format("; [ -x {} ] || exit {}", shell_quoted(environment_.interpreter), kNoInterpreter);
    std::vector<std::string> command = request_.ssh;
    command.insert(command.end(), {"--", host_, "exec sh -c " + shell_quoted(order)});
    const launch::Captured said = value_or_throw(launch::capture(command, std::chrono::minutes(2)));
    const std::string words = launch::last_of(said.text);
    if (said.status == 0) return;
    if (said.status == kNoFolder) raise(ErrorCode::Unavailable, "the folder cannot be made there: {}", words);
    if (said.status == kNoRsync)
      raise(ErrorCode::Unavailable,
            "there is no rsync there: apt-get install rsync, dnf install rsync, or conda install rsync");
    if (said.status == kNoInterpreter) {
      raise(
          ErrorCode::Unavailable,
          "the environment {} is made over {}, which is not there: install the same Python at the same path (uv python "
          "install, apt-get), or make the environment there",
          environment_.folder, environment_.interpreter);
    }
    launch::FailedStart failed;
    failed.host = host_;
    failed.ssh = fmt::format("{}", fmt::join(request_.ssh, " "));
    failed.status = sys::ExitStatus{said.status, 0, false};
    failed.complaints = said.text;
    const launch::Diagnosis why = launch::diagnose(failed);
    raise(ErrorCode::Unavailable, "{}{} -- {}", why.why, why.said, why.advice);
  }

  Copied copy(const std::vector<std::string>& options, const std::string& input, const std::string& from,
              const std::string& to) const {
    std::string ssh;
    for (const std::string& word : request_.ssh) ssh += (ssh.empty() ? "" : " ") + shell_quoted(word);
    // No --delete, since files that exist only there may be somebody's work. -K keeps links to folders there, for the
    // same reason. -s: the shell there does not interpret names.
    std::vector<std::string> command = {"sh",     "-c",      "exec \"$@\" <\"$0\"", input, "rsync",
                                        "-lptKs", "--stats", "--timeout=120",       "-e",  ssh};
    command.insert(command.end(), options.begin(), options.end());
    const std::string host = host_.find(':') == std::string::npos ? host_ : "[" + host_ + "]";
    command.insert(command.end(), {"--", from + "/", host + ":" + to + "/"});
    const launch::Captured said = value_or_throw(launch::capture(command, kLimit));
    if (said.status != 0)  // rsync's figures follow its error messages
      raise(ErrorCode::Unavailable, "rsync ended with {}: {}", said.status,
            launch::last_of(said.text.substr(0, said.text.find("\nNumber of files:"))));
    return {counted(said.text, "files transferred:"), counted(said.text, "Total transferred file size:")};
  }

 private:
  const SyncRequest& request_;
  const std::string& host_;
  const VirtualEnvironment& environment_;
};

std::string to_string(const Copied& copied) {
  return fmt::format("{} file{}, {}", copied.files, copied.files == 1 ? "" : "s", launch::bytes_in_words(copied.bytes));
}

}  // namespace

namespace {

/// True if there is a .git here or above, so that git has to list the files.
bool in_work_tree(fs::path folder) {
  std::error_code error;
  for (;; folder = folder.parent_path()) {
    if (fs::exists(fs::symlink_status(folder / ".git", error))) return true;
    if (folder == folder.root_path()) return false;
  }
}

std::vector<std::string> files_of(const std::string& folder);

/// Adds the files of a nested repository, by that repository's rules.
void add_nested(const std::string& folder, const std::string& nested, std::vector<std::string>& files) {
  const std::string inner = (fs::path(nested) / "").string();
  for (const std::string& file : files_of(folder + "/" + inner)) files.push_back(inner + file);
}

std::vector<std::string> files_of(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code error;
  if (in_work_tree(folder)) {
    const ListFile listed;
    const auto git = value_or_throw(launch::capture(
        {"sh", "-c",
         "cd \"$1\" && GIT_DISCOVERY_ACROSS_FILESYSTEM=1 exec git ls-files -z -t -c -o --exclude-standard >\"$2\"",
         "sh", folder, listed.path},
        std::chrono::minutes(10)));
    if (git.status != 0) {
      raise(ErrorCode::Unavailable, "--sync: git does not say which files of {} it ignores: {}", folder,
            git.text.substr(0, git.text.find_last_not_of('\n') + 1));
    }
    for (const std::string& line : split(value_or_throw(sys::read_file(listed.path)).text(), '\0')) {
      if (line.size() < 3) continue;
      const std::string file = line.substr(2);  // behind "H ", or behind "? " if it is not tracked
      const fs::file_status status = fs::symlink_status(fs::path(folder) / file, error);
      if (fs::is_directory(status)) {  // a nested repository, or a submodule that is not checked out
        if (fs::exists(fs::path(folder) / file / ".git", error)) add_nested(folder, file, files);
      } else if (fs::exists(status) && !(line.starts_with('?') && file.starts_with("runs/"))) {
        files.push_back(file);
      }
    }
    if (files.empty()) {
      raise(ErrorCode::InvalidArgument,
            "--sync: the git repository around {} ignores all that is in it, or nothing is -- go to the project's "
            "folder, "
            "or make this one a repository of its own (git init)",
            folder);
    }
  } else {
    // (Files removed during the walk are not copied.)
    for (fs::recursive_directory_iterator entry(folder, fs::directory_options::skip_permission_denied, error), end;
         !error && entry != end; entry.increment(error)) {
      // Status of the entry itself, since a link is copied as a link, wherever it leads.
      const fs::file_status status = entry->symlink_status(error);
      const bool is_folder = fs::is_directory(status);
      const std::string file = entry->path().lexically_relative(folder).string();
      if (is_folder && is_left_out(entry->path().filename().string(), entry.depth() == 0)) {
        entry.disable_recursion_pending();
      } else if (is_folder && fs::exists(entry->path() / ".git", error)) {
        entry.disable_recursion_pending();
        add_nested(folder, file, files);
      } else if (fs::is_regular_file(status) || fs::is_symlink(status)) {
        files.push_back(file);
      }
    }
  }
  return files;
}

}  // namespace

std::vector<std::string> files_to_sync(const std::string& folder, const std::string& program) {
  std::vector<std::string> files = files_of(folder);
  std::error_code error;
  // git usually ignores built programs.
  const fs::path own = fs::absolute(fs::path(folder) / program).lexically_normal().lexically_relative(folder);
  if (!program.empty() && !own.empty() && *own.begin() != ".." && fs::is_regular_file(fs::path(folder) / own, error) &&
      std::ranges::find(files, own.string()) == files.end())
    files.push_back(own.string());
  return files;
}

void sync(const SyncRequest& request) {
  const std::string here = fs::current_path().string();
  const std::string folder = request.folder.empty() ? here : request.folder;
  if (here == "/" || is_within(home_folder(), here))
    raise(ErrorCode::InvalidArgument, "--sync copies the working folder, and {} is all of yours: cd into the project",
          here);
  if (!launch::find_command("rsync", launch::Environment::current()))
    raise(ErrorCode::Unavailable,
          "--sync: there is no rsync here: apt-get install rsync, dnf install rsync, or brew install rsync");
  const VirtualEnvironment environment = active_environment();
  const ListFile list;
  std::string text;
  for (const std::string& file : files_to_sync(here, request.program)) {
    if (!environment.folder.empty() && is_within(fs::path(here) / file, environment.folder)) continue;
    text += file + '\0';
  }
  if (!list.fd || !sys::write_all(list.fd.get(), text))
    raise(ErrorCode::Unavailable, "--sync: the list of the files: {}", errno_text(errno));
  // Copies only the files; rsync makes folders that are missing there.
  std::vector<std::string> options = {"--no-implied-dirs", "--from0", "--files-from=-"};
  for (const std::string& pattern : request.excludes) options.push_back("--exclude=" + pattern);

  const auto to_host = [&](const std::string& host) {
    const auto begun = Clock::now();
    const HostSync one(request, host, environment);
    one.prepare(folder);
    std::string said = to_string(one.copy(options, list.path, here, folder));
    if (!environment.folder.empty())
      said += fmt::format(" of the folder; {} of {}",
                          to_string(one.copy({"-r"}, "/dev/null", environment.folder, environment.folder)),
                          environment.folder);
    return fmt::format("{} in {:.1f} s", said, std::chrono::duration<double>(Clock::now() - begun).count());
  };
  std::string failed;
  for (std::size_t begin = 0; begin < request.hosts.size(); begin += kAtOnce) {
    std::vector<std::future<std::string>> copies;
    const std::size_t end = std::min(begin + kAtOnce, request.hosts.size());
    for (std::size_t at = begin; at < end; ++at)
      copies.push_back(std::async(std::launch::async, to_host, std::cref(request.hosts[at])));
    for (std::size_t at = begin; at < end; ++at) {
      try {
        const std::string said = copies[at - begin].get();
        if (!request.quiet) fmt::print(stderr, "cohort: sync to {}: {}\n", request.hosts[at], said);
      } catch (const Error& error) {
        failed += fmt::format("{}{}: {}", failed.empty() ? "" : "; ", request.hosts[at], error.what());
      }
    }
  }
  if (!failed.empty()) raise(ErrorCode::Unavailable, "--sync: {}", failed);
}

}  // namespace cohort::app
