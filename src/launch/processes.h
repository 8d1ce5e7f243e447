// The processes of a job: their roles (Roles), their environment as a value, and the end of all descendants of this
// process. Each value belongs to one thread; only one thread of a process may reap and sweep.
#pragma once

#include <cohort/role.h>

#include "base/env.h"
#include "base/process.h"
#include "base/result.h"
#include "base/unique_fd.h"

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

/// The processes of a job by role. Supervisor and agents refer to each process by one number: first come the ranks of
/// the world, numbered by rank, then the servers, then the evaluator. Pure.
struct Roles {
  int workers = 1;
  int servers = 0;
  bool evaluator = false;

  int others() const noexcept { return servers + (evaluator ? 1 : 0); }
  int all() const noexcept { return workers + others(); }
  bool has(int process) const noexcept { return process >= 0 && process < all(); }
  bool is_rank(int process) const noexcept { return process >= 0 && process < workers; }
  Role role_of(int process) const noexcept;
  /// Returns its number within its role.
  int number_of(int process) const noexcept;
  int process_of(Role role, int number) const noexcept;
  /// Returns "rank 3", "server 2", "evaluator".
  std::string name_of(int process) const;
  /// Returns "rank 1", "ranks 0-3, servers 1-2".
  std::string names_of(const std::vector<int>& processes) const;
};

/// Returns "rank 3", "server 2", "evaluator".
std::string process_name(Role role, int number);
/// "rank-3", "server-2", "evaluator": the beginning of the names of a process's files.
std::string file_name(Role role, int number);

/// A set of environment variables: those of this process, or those of a process to be started.
class Environment {
 public:
  Environment() = default;
  /// Takes "NAME=value" texts; the last one for a name counts, texts without '=' are dropped.
  explicit Environment(const std::vector<std::string>& assignments);
  /// Returns the environment of this process.
  static Environment current();

  void set(std::string_view name, std::string_view value);
  void set(std::string_view assignment);
  void remove(std::string_view name);
  /// Removes the variables that stand for options of `cohort run`: they are meant for one command only.
  void remove_run_options();
  std::optional<std::string> find(std::string_view name) const;
  std::vector<std::string> assignments() const;
  const env::Map& variables() const noexcept { return variables_; }

 private:
  env::Map variables_;
};

struct Pipe {
  sys::UniqueFd read_end;
  sys::UniqueFd write_end;
};
/// Makes a pipe that programs started later do not inherit (CLOEXEC). Fails with Unavailable.
Result<Pipe> make_pipe();
void set_nonblocking(int fd);
/// Reads the available bytes of a non-blocking pipe, at most `most`: empty if there are none, nullopt if it has ended.
std::optional<std::string> read_piece(int fd, std::size_t most);

// Ends all descendants of this process. Works only for a process that adopts its orphans (sys::become_subreaper): then
// no descendant can escape by fork or setsid, and "no child left" proves that no descendant is left.

/// Returns true if the process descends from this one.
bool is_ours(pid_t pid);

/// Called with a child that has been reaped.
using OnReaped = std::function<void(pid_t, const sys::ExitStatus&)>;

/// Reaps all children that have ended. Returns false when there is no child at all, running or ended.
bool reap_children(const OnReaped& on_reaped);

struct SweepStep {
  bool clean = false;  ///< nothing is left but the spared processes and their descendants
  int killed = 0;      ///< number of processes that were sent SIGKILL in this step
};
/// Reaps, and sends SIGKILL to every descendant that is not spared. Call it again after a moment, until it is clean.
SweepStep sweep_once(std::span<const pid_t> spared, const OnReaped& on_reaped);

/// Sweeps until nothing is left or `longest` has passed. Returns the processes that are left.
std::vector<pid_t> sweep(std::span<const pid_t> spared, std::chrono::milliseconds longest, const OnReaped& on_reaped);

/// Describes processes that SIGKILL does not end: "pid 4711 (python3 train.py), in state D at nfs_wait".
std::string describe_stuck(std::span<const pid_t> pids);

}  // namespace cohort::launch
