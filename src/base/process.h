// Processes: start one with everything said in its options, learn how it ended, look others up in /proc.
// A ChildProcess owns the descriptors it holds, not the process: its parent has to wait for it. `spawn` may be called
// by a process with several threads; a child with `parent_death_signal` lives no longer than the thread that started
// it.
// Watching a process that is not our child: is it alive, dying or gone? Knows it by pid and start time, so that a
// reused pid is not mistaken for it. Also which cores this process may use. Not thread-safe.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::sys {

/// How a process ended.
struct ExitStatus {
  int code = 0;    ///< exit code, where `signal` is 0
  int signal = 0;  ///< the signal that killed it
  bool core_dumped = false;

  bool success() const noexcept { return code == 0 && signal == 0; }
  /// The status as a shell gives it: the code, or 128 + signal.
  int shell_status() const noexcept { return signal != 0 ? 128 + signal : code; }
};

/// Reads waitpid's status word.
ExitStatus exit_status_from_wait(int wait_status) noexcept;
/// "exit code 3" or "killed by SIGKILL".
std::string to_string(const ExitStatus& status);

/// Exit status of a child that has ended and is not reaped, neither before nor by this; nullopt if it is not known.
std::optional<ExitStatus> peek_exit_status(pid_t pid);

/// The process group that a child begins in.
enum class Group {
  Caller,   ///< the caller's
  Own,      ///< leads a group of its own, in the caller's session
  Session,  ///< leads a session of its own, without a terminal
};

struct SpawnOptions {
  std::string path;                    ///< executable, no search
  std::vector<std::string> arguments;  ///< argv, with argv[0]
  /// "NAME=value"; the complete environment.
  std::vector<std::string> environment;
  std::string folder;  ///< working directory; empty: the caller's
  int stdin_fd = -1;   ///< becomes 0, 1, 2; -1: /dev/null for stdin, the caller's own for the others
  int stdout_fd = -1;
  int stderr_fd = -1;
  /// (the caller's descriptor, its number in the child); the numbers have to be above 2. All others are closed.
  std::vector<std::pair<int, int>> inherited = {};
  Group group = Group::Caller;
  int parent_death_signal = 0;  ///< PR_SET_PDEATHSIG; a parent that has died meanwhile is noticed
  /// Soft limit of open files to start with; 0 leaves it.
  std::uint64_t open_files = 0;
  /// Processors that it may run on; empty: those of the caller.
  std::vector<int> processors = {};
  /// Signals that it ignores from its start.
  std::vector<int> ignored = {};
};

struct ChildProcess {
  pid_t pid = -1;
  UniqueFd pidfd;
};

/// Cause and step of a program that did not start.
struct SpawnFailure {
  int error_number = 0;
  std::string step;  ///< e.g. "execve"
};

/// "fork: Resource temporarily unavailable (EAGAIN); ...": of a limit that is reached also which, and what counts to
/// it.
std::string to_string(const SpawnFailure& failure);
/// Describes the limits behind EAGAIN when a process or thread could not be created.
std::string limit_of_processes();

/// A started child whose exec has not been confirmed yet, so that many can be started side by side.
class PendingSpawn {
 public:
  /// Waits until the program runs. On failure the child has been reaped.
  tl::expected<ChildProcess, SpawnFailure> confirm() &&;

 private:
  friend tl::expected<PendingSpawn, SpawnFailure> spawn(const SpawnOptions& options);
  ChildProcess child_;
  UniqueFd report_;
};

/// Forks and executes. Signal mask and dispositions are the default ones in the child, but for what it is to ignore.
tl::expected<PendingSpawn, SpawnFailure> spawn(const SpawnOptions& options);

/// Contents of /proc/PID/stat.
struct ProcessStat {
  char state = '?';
  pid_t parent = 0;
  std::uint64_t cpu_ticks = 0;  ///< of all its threads, user and system
  int threads = 0;
  std::uint64_t memory = 0;       ///< resident, in bytes
  std::uint64_t start_ticks = 0;  ///< since boot; distinguishes two processes of the same pid
  bool exiting = false;           ///< the kernel has begun to take it down (PF_EXITING)
  int exit_word = 0;              ///< as waitpid gives it; 0 where not known yet
};
std::optional<ProcessStat> process_stat(pid_t pid);
/// Pure part of `process_stat`.
std::optional<ProcessStat> parse_process_stat(std::string_view text);

/// Effect that a signal would have on a process, as /proc/PID/status has it.
enum class SignalFate {
  Default,  ///< its default action; or unknown, as all are blocked (around a fork, whose child gets them then)
  Ignored,
  Taken,  ///< by a handler, or it is blocked until the process asks for it
};
/// nullopt for a process that is gone, or has ended.
std::optional<SignalFate> signal_fate(pid_t pid, int number);
/// Pure part of `signal_fate`.
std::optional<SignalFate> parse_signal_fate(std::string_view text, int number);

/// All living descendants (zombies excepted) of a process, nearest first.
std::vector<pid_t> descendants(pid_t ancestor);

/// True if `pid` was started by `ancestor` or by one of its descendants.
bool descends_from(pid_t pid, pid_t ancestor);

/// Sends a signal to whatever process has this pid, if that is the one that is meant. `is_meant` is asked while the
/// process is held, so that a pid which is in use again meanwhile gets nothing. False where nothing was sent.
bool signal_if(pid_t pid, int number, const std::function<bool(pid_t)>& is_meant);

/// This process adopts orphaned descendants (PR_SET_CHILD_SUBREAPER).
Result<void> become_subreaper();

/// The folded line of /proc/PID/cmdline, at most 200 bytes; empty if it cannot be read.
std::string command_line(pid_t pid);

/// Raises this process's soft limit of open files to the hard one. Returns {soft limit before, limit now}.
std::pair<std::uint64_t, std::uint64_t> raise_open_files_limit();

/// This process's arguments, as they were given.
std::vector<std::string> own_arguments();

/// Becomes readable when the process ends. Fails with Unavailable if there is none.
Result<UniqueFd> open_pidfd(pid_t pid);

/// Path of the running executable.
Result<std::string> own_executable();

struct ProcessId {
  pid_t pid = 0;
  std::uint64_t start_time = 0;  ///< clock ticks since boot, as in /proc/PID/stat
};

ProcessId own_process();

class PeerProcess {
 public:
  /// Nothing to watch; `gone` is then always false.
  PeerProcess() = default;
  explicit PeerProcess(ProcessId id);

  pid_t pid() const noexcept { return id_.pid; }
  /// True once the process is exiting or has ended. After SIGKILL the kernel frees memory first, and end-of-file on
  /// sockets and pidfds wait for that; the PF_EXITING flag shows within milliseconds, so this looks at that. Needs no
  /// descriptor but its own: a process that has run out of them does not take the living for dead.
  bool gone() const;

 private:
  ProcessId id_;
  UniqueFd stat_;  // of /proc/PID/stat: it stays this process's, even if its pid is reused
};

/// Cores that this process may run on.
using CoreSet = std::array<std::uint64_t, 16>;
CoreSet allowed_cores();
int count(const CoreSet& cores);

}  // namespace cohort::sys
