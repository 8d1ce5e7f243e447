// Processes: starting them (SpawnOptions), learning how they ended, and looking them up in /proc.
// A ChildProcess owns its descriptors, but not the process, for which the parent has to wait. `spawn` may be called by
// a process with several threads. A child with `parent_death_signal` lives no longer than the thread that started it.
// PeerProcess: watches whether a process that is not a child is alive, dying or gone. Identifies it by pid and start
// time, since a pid may be reused. Not thread-safe. Also the cores that this process may use.
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
  int code = 0;    ///< exit code if `signal` is 0
  int signal = 0;  ///< the signal that killed the process; 0: none
  bool core_dumped = false;

  bool success() const noexcept { return code == 0 && signal == 0; }
  /// The status as a shell reports it: the code, or 128 + signal.
  int shell_status() const noexcept { return signal != 0 ? 128 + signal : code; }
};

/// Reads waitpid's status word.
ExitStatus exit_status_from_wait(int wait_status) noexcept;
/// "exit code 3" or "killed by SIGKILL".
std::string to_string(const ExitStatus& status);

/// Returns the exit status of a child that has ended and has not been reaped, without reaping it; nullopt if not known.
std::optional<ExitStatus> peek_exit_status(pid_t pid);

/// The process group that a child begins in.
enum class Group {
  Caller,   ///< the caller's group
  Own,      ///< leads a group of its own, in the caller's session
  Session,  ///< leads a session of its own, without a terminal
};

struct SpawnOptions {
  std::string path;                    ///< executable, no search
  std::vector<std::string> arguments;  ///< argv, with argv[0]
  /// "NAME=value"; the complete environment.
  std::vector<std::string> environment;
  std::string folder;  ///< working directory; empty: the caller's
  int stdin_fd = -1;   ///< these three become 0, 1, 2; -1: /dev/null for stdin, the caller's for the others
  int stdout_fd = -1;
  int stderr_fd = -1;
  /// Pairs (the caller's descriptor, its number in the child, above 2). All other descriptors are closed.
  std::vector<std::pair<int, int>> inherited = {};
  Group group = Group::Caller;
  int parent_death_signal = 0;  ///< PR_SET_PDEATHSIG; also works if the parent has just died
  /// Initial soft limit of open files; 0 leaves it unchanged.
  std::uint64_t open_files = 0;
  /// Processors that the child may run on; empty: the caller's.
  std::vector<int> processors = {};
  /// Signals that the child ignores from its start.
  std::vector<int> ignored = {};
};

struct ChildProcess {
  pid_t pid = -1;
  UniqueFd pidfd;
};

/// Reason why a program did not start, and the step that failed.
struct SpawnFailure {
  int error_number = 0;
  std::string step;  ///< e.g. "execve"
};

/// Returns "fork: Resource temporarily unavailable (EAGAIN); ...". If a limit is reached, also names it and its usage.
std::string to_string(const SpawnFailure& failure);
/// Describes the limits that may have caused EAGAIN when a process or thread could not be created.
std::string limit_of_processes();

/// A started child whose exec has not been confirmed yet, so that many can be started side by side.
class PendingSpawn {
 public:
  /// Waits until the child has executed the program. On failure the child has been reaped.
  tl::expected<ChildProcess, SpawnFailure> confirm() &&;

 private:
  friend tl::expected<PendingSpawn, SpawnFailure> spawn(const SpawnOptions& options);
  ChildProcess child_;
  UniqueFd report_;
};

/// Forks and executes. The child has the default signal mask and dispositions, except for the signals it is to ignore.
tl::expected<PendingSpawn, SpawnFailure> spawn(const SpawnOptions& options);

/// Contents of /proc/PID/stat.
struct ProcessStat {
  char state = '?';
  pid_t parent = 0;
  std::uint64_t cpu_ticks = 0;  ///< user and system time of all threads
  int threads = 0;
  std::uint64_t memory = 0;       ///< resident, in bytes
  std::uint64_t start_ticks = 0;  ///< start time since boot; distinguishes two processes with the same pid
  bool exiting = false;           ///< the kernel has begun to end the process (PF_EXITING)
  int exit_word = 0;              ///< status word as in waitpid; 0 if not known yet
};
std::optional<ProcessStat> process_stat(pid_t pid);
/// The pure part of `process_stat`, which parses the file's text.
std::optional<ProcessStat> parse_process_stat(std::string_view text);

/// Effect that a signal would have on a process, from /proc/PID/status.
enum class SignalFate {
  Default,  ///< default action; or unknown, since all signals are blocked (around a fork)
  Ignored,
  Taken,  ///< taken by a handler, or blocked until the process asks for it
};
/// Returns nullopt if the process has ended or is gone.
std::optional<SignalFate> signal_fate(pid_t pid, int number);
/// The pure part of `signal_fate`, which parses the file's text.
std::optional<SignalFate> parse_signal_fate(std::string_view text, int number);

/// All living descendants (zombies excepted) of a process, nearest first.
std::vector<pid_t> descendants(pid_t ancestor);

/// True if `ancestor`, or one of its descendants, has started `pid`.
bool descends_from(pid_t pid, pid_t ancestor);

/// Sends a signal to the process with this pid if `is_meant` returns true. `is_meant` is called while a pidfd holds the
/// process, so a reused pid gets no signal. Returns false if no signal was sent.
bool signal_if(pid_t pid, int number, const std::function<bool(pid_t)>& is_meant);

/// Makes this process adopt orphaned descendants (PR_SET_CHILD_SUBREAPER).
Result<void> become_subreaper();

/// Returns /proc/PID/cmdline as one line of at most 200 bytes; empty if it cannot be read.
std::string command_line(pid_t pid);

/// Raises this process's soft limit of open files to the hard one. Returns {soft limit before, limit now}.
std::pair<std::uint64_t, std::uint64_t> raise_open_files_limit();

/// This process's command line arguments.
std::vector<std::string> own_arguments();

/// Opens a descriptor that becomes readable when the process ends. Fails with Unavailable if there is no such process.
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
  /// Watches no process; `gone` always returns false.
  PeerProcess() = default;
  explicit PeerProcess(ProcessId id);

  pid_t pid() const noexcept { return id_.pid; }
  /// True if the process is exiting or has ended. After SIGKILL the kernel first frees memory, and only then closes
  /// sockets and makes pidfds readable. It sets the PF_EXITING flag within milliseconds, so this checks the flag. Needs
  /// no new descriptor, so that a process without free ones does not take a living process for dead.
  bool gone() const;

 private:
  ProcessId id_;
  UniqueFd stat_;  // /proc/PID/stat; still of the same process if the pid is reused
};

/// Cores that this process may run on.
using CoreSet = std::array<std::uint64_t, 16>;
CoreSet allowed_cores();
int count(const CoreSet& cores);

}  // namespace cohort::sys
