// A rank on this host, or a process of another role, as its agent sees it: the process, its pipes, complete logs and
// last words; and the delivery of signals to all of them. Belongs to the agent's thread. Destroying a Worker closes the
// descriptors; ending the process is the agent's task.
#pragma once

#include "base/memory.h"
#include "base/process.h"
#include "base/unique_fd.h"
#include "launch/agent/upstream.h"
#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/processes.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::launch {

inline constexpr std::size_t kTracebackLines = 60;

/// The last lines of a stream, in bounded memory.
class Tail {
 public:
  explicit Tail(std::size_t lines, std::size_t longest_bytes = 16'384) : lines_(lines), longest_(longest_bytes) {}

  void append(std::string_view bytes);
  /// Returns the last lines within both limits, from the beginning of a line if possible. Leaves out the stack frames
  /// that libtorch's errors have by the hundred ("frame #12: ..."), and does not count them. If the kept text has a
  /// Python traceback, the result begins with the traceback's first line, since a traceback gives the reason. If more
  /// than kTracebackLines follow, only the end of the traceback and the last lines after it are returned.
  std::string text() const;

 private:
  std::size_t lines_;
  std::size_t longest_;
  std::string bytes_;     ///< whole lines without frames, then the beginning of one
  std::size_t line_ = 0;  ///< start of the unfinished line
};

/// Number of the secret's descriptor in workers; higher than those that shell scripts use for redirections.
inline constexpr int kWorkerSecretFd = 100;
/// Number of the status page's descriptor.
inline constexpr int kWorkerStatusFd = 101;
/// Number of the timeline's descriptor.
inline constexpr int kWorkerTimelineFd = 102;

class Worker {
 public:
  /// `upstream` gets the worker's output, its troubles, and notice of input that was taken; it outlives this.
  Worker(Loop& loop, const WorkerPlan& plan, std::size_t tail_lines, Upstream& upstream);

  enum class Log { New, Continued };  ///< Continued: append to the logs of the previous process

  /// Makes pipes and log files. Fails with Io or Unavailable, naming the file.
  Result<void> prepare(const std::string& log_folder, Log log, bool with_input);
  /// Forks; `confirm` tells whether the program runs.
  Result<void> start(const sys::SpawnOptions& program);
  /// Waits until the program runs.
  Result<void> confirm();

  /// Returns the number of the process in the job's Roles.
  int rank() const noexcept { return rank_; }
  Role role() const noexcept { return role_; }
  /// Returns "rank 3" or "server 0".
  std::string name() const { return process_name(role_, number_); }
  pid_t pid() const noexcept { return child_.pid; }
  bool alive() const noexcept { return child_.pid > 0 && !reaped_; }
  /// Returns true if nothing more comes from the process or from those that it has started.
  bool over() const noexcept { return reported && !alive() && !pipes_[0].fd && !pipes_[1].fd; }
  /// Signals the process group, which is safe while the leader has not been reaped.
  void signal(int number) const;
  /// Asks the worker to end. A rank that has a handler for SIGTERM gets the signal without its group, since it may need
  /// the processes that it has started (data loaders) to save. For any other process, the whole group gets the signal.
  void ask_to_end(int number);
  /// Asks the rest of the group, too.
  void ask_group();
  /// Returns true if the rank was asked, and the rest of its group is still to be asked.
  bool spares_its_group() const noexcept { return asked_alone_ > 0; }
  /// Returns true if the process that was asked has ended, but not the shell around it that the agent has started.
  bool left_by_its_rank() const;
  /// Sends the signal to those processes of the group that survive it. Returns false if no process has a use for it.
  bool offer(int number) const;
  /// Returns true if a signal makes the rank save and end.
  bool saves_when_asked() const;
  /// Returns a number that changes when the rank forms a world, or begins to wait for one.
  std::uint64_t meetings() const;
  /// Returns true if a signal has made the rank save, after which it ends or has ended.
  bool makes_room() const;

  void pause_reading();
  void resume_reading();
  /// Reads the bytes that are in the pipes now. Returns false when both pipes have ended or are empty.
  bool drain();

  void give_input(std::string_view bytes);  ///< empty: end of input

  /// Writes into the status page that the job has members of this epoch.
  void announce(std::uint64_t epoch) noexcept;
  /// Writes into the status page that the job is about to be told to end.
  void announce_end() noexcept;

  void set_reaped() noexcept { reaped_ = true; }
  const std::string tail() const { return tail_.text(); }

  /// Returns what the rank is doing now.
  RankReport report() const;
  std::string words() const;
  CauseReport cause() const;
  /// Returns when the rank began to write its last words; nullopt if there are none.
  std::optional<std::chrono::steady_clock::time_point> words_began() const;
  /// Makes the rank write its stacks; false if it cannot.
  bool ask_stacks();
  /// Returns the stacks that the rank has written since `ask_stacks`.
  std::string stacks() const;
  /// Returns the descriptor of the status page, which the program inherits; -1: there was no memory for a page.
  int status_fd() const noexcept { return status_.fd.get(); }

  /// The worker's end has been reported to the supervisor.
  bool reported = false;
  /// The process was dead or dying before the agent began to stop the job.
  bool ended_before_stop = true;

 private:
  struct Pipe {
    sys::UniqueFd fd;
    sys::UniqueFd log;
    std::string log_path;
    Watch watch;
  };
  bool read_some(Stream stream);
  bool is_of_this_rank(pid_t pid) const;
  /// Returns the rank's own process if it has a handler for SIGTERM; else 0.
  pid_t takes_term() const;
  void write_input();
  void close_input();

  Loop& loop_;
  int rank_;
  Role role_;
  int number_;
  Upstream& upstream_;
  status::StatusLayout* page() const noexcept { return static_cast<status::StatusLayout*>(status_.mapping.data()); }

  Tail tail_;
  sys::SharedSegment status_;  ///< empty: no page
  sys::ChildProcess child_;
  pid_t asked_alone_ = 0;
  std::optional<sys::PendingSpawn> pending_;
  bool reaped_ = false;
  std::array<Pipe, 2> pipes_;
  std::array<sys::UniqueFd, 3> child_ends_;
  sys::UniqueFd input_;
  Watch input_watch_;
  std::string unwritten_;
  bool input_ended_ = false;
};

/// Delivers SIGUSR1 and SIGUSR2 to ranks. They would end a program without a handler, or a helper that a rank has
/// started (a data loader), so only processes that have a use for the signal get it. For a rank that is still starting
/// and has no such process, the signal is kept until there is one.
class KeptSignals {
 public:
  /// `workers` is the agent's; `upstream` gets messages for the user.
  KeptSignals(Loop& loop, const std::vector<std::unique_ptr<Worker>>& workers, Upstream& upstream)
      : loop_(loop), workers_(workers), upstream_(upstream) {}

  /// Passes the signal on to all workers.
  void pass_on(int signal);

 private:
  void look_again();

  Loop& loop_;
  const std::vector<std::unique_ptr<Worker>>& workers_;
  Upstream& upstream_;
  std::set<std::pair<int, int>> kept_;  ///< signal, rank
  std::chrono::steady_clock::time_point since_;
  bool told_ = false;
  Timer again_;
};

}  // namespace cohort::launch
