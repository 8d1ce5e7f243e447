// One rank on this host, or one process of another role, as its agent sees it: the process, its pipes, its complete
// logs, its last words; and signals on their way to all of them. Belongs to the agent's thread. Destroying a Worker
// closes the descriptors; ending the process is the agent's business.
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
  explicit Tail(std::size_t lines, std::size_t longest_bytes = 16 * 1024) : lines_(lines), longest_(longest_bytes) {}

  void append(std::string_view bytes);
  /// At most so many lines and bytes, the last ones; starts at the beginning of a line where that is possible. Stack
  /// frames as libtorch's errors have them by the hundred ("frame #12: ...") are left out and do not count. If a
  /// Python traceback is among what is kept, from its first line on, since it says why: all of it up to
  /// kTracebackLines, else its end and the last of what came after it.
  std::string text() const;

 private:
  std::size_t lines_;
  std::size_t longest_;
  std::string bytes_;     ///< whole lines without frames, then the beginning of one
  std::size_t line_ = 0;  ///< where that begins
};

/// Number of the secret's descriptor in workers: away from what shell scripts use for redirections.
inline constexpr int kWorkerSecretFd = 100;
/// And of its status page.
inline constexpr int kWorkerStatusFd = 101;
/// And of its timeline.
inline constexpr int kWorkerTimelineFd = 102;

class Worker {
 public:
  /// `upstream` gets the worker's output, troubles, and notice of input that was taken; it outlives this.
  Worker(Loop& loop, const WorkerPlan& plan, std::size_t tail_lines, Upstream& upstream);

  enum class Log { New, Continued };  ///< Continued: of the process that was here before

  /// Makes pipes and log files. Fails with Io or Unavailable, naming the file.
  Result<void> prepare(const std::string& log_folder, Log log, bool with_input);
  /// Forks; the program is confirmed by `confirm`.
  Result<void> start(const sys::SpawnOptions& program);
  /// Waits until the program runs.
  Result<void> confirm();

  /// The number of the process in the job.
  int rank() const noexcept { return rank_; }
  Role role() const noexcept { return role_; }
  /// "rank 3", "server 0".
  std::string name() const { return process_name(role_, number_); }
  pid_t pid() const noexcept { return child_.pid; }
  bool alive() const noexcept { return child_.pid > 0 && !reaped_; }
  /// Nothing more comes of it, nor of what it has started.
  bool over() const noexcept { return reported && !alive() && !pipes_[0].fd && !pipes_[1].fd; }
  /// To the process group, which is safe while the leader has not been reaped.
  void signal(int number) const;
  /// Asks it to end. A rank that has a handler for SIGTERM gets that alone: what it has started (loaders of data) it
  /// may need to save. Everything else is told with it, and so is its group where there is no such handler.
  void ask_to_end(int number);
  /// The rest of its group, too.
  void ask_group();
  /// It was asked alone: the rest of its group is still to be told.
  bool spares_its_group() const noexcept { return asked_alone_ > 0; }
  /// The process that was asked has ended, but not the one that the agent has started (a shell around it).
  bool left_by_its_rank() const;
  /// To those processes of the group that it does not end. False if no process has a use for it.
  bool offer(int number) const;
  /// A signal makes the rank save and end.
  bool saves_when_asked() const;
  /// Another number once it has formed a world, or waits for one.
  std::uint64_t meetings() const;
  /// A signal has made it save, on which it ends, or has ended.
  bool makes_room() const;

  void pause_reading();
  void resume_reading();
  /// Reads what is in the pipes now. Returns false once both have ended or are empty.
  bool drain();

  void give_input(std::string_view bytes);  ///< empty: end of input

  /// The job has members of this epoch: it stands on the page.
  void announce(std::uint64_t epoch) noexcept;
  /// The job is about to be told to end: likewise.
  void announce_end() noexcept;

  void set_reaped() noexcept { reaped_ = true; }
  const std::string tail() const { return tail_.text(); }

  /// Reports what the rank is doing now.
  RankReport report() const;
  std::string words() const;
  CauseReport cause() const;
  /// When it began to say them; nullopt if it said nothing.
  std::optional<std::chrono::steady_clock::time_point> words_began() const;
  /// Has the rank write its stacks; false if it cannot.
  bool ask_stacks();
  /// The stacks written since.
  std::string stacks() const;
  /// The file of the status page, which the program inherits; -1: there was no memory for one.
  int status_fd() const noexcept { return status_.fd.get(); }

  /// The worker's exit is reported only once.
  bool reported = false;
  /// It was dead or dying before the agent began to stop the job.
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
  /// The rank's own process, if that has a handler for SIGTERM; 0.
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

/// SIGUSR1 and SIGUSR2 on their way to ranks. Where a program has no handler they would end it, and so they would any
/// helper that a rank has started (a loader of data): only processes that have a use for the signal get it, and for a
/// rank that has no such process, since it is still starting, it is kept until there is one.
class KeptSignals {
 public:
  /// `workers` is the agent's; `upstream` gets what the user should know.
  KeptSignals(Loop& loop, const std::vector<std::unique_ptr<Worker>>& workers, Upstream& upstream)
      : loop_(loop), workers_(workers), upstream_(upstream) {}

  /// To all workers.
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
