// Decides about the end of a job: which failure came first, what a person is told about it and can try, whether the job
// is started again (Restarts), and its exit status. Pure; one thread.
#pragma once

#include "launch/messages.h"
#include "launch/processes.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

/// The end of one process.
struct Ending : ProcessEnd {
  Role role = Role::Worker;
  int rank = 0;  ///< number within its role
  std::string host;
  int pid = 0;
  double after_seconds = 0;
  bool asked = false;            ///< asked to end, since the roles before its own had ended
  bool spared = false;           ///< the job goes on without the process
  int restarts = 0;              ///< for servers: number of restarts before this end
  std::string first_cause = {};  ///< for servers: status of the first end

  std::string name() const { return process_name(role, rank); }
};

/// Returns true if the process has saved and asks for a restart (kRequeueStatus), and the job needs it: no failure.
bool asks_for_requeue(const Ending& ending);

/// Returns the failure that caused the others; nullopt if none failed. Among those that ended before the job was
/// stopped, a process killed by a signal comes before one that ended by itself, one that had not lost a peer before one
/// that had, the earlier before the later. (A peer's death is often noticed, and died of, before the kernel has
/// finished the first death; by the order of the reports alone, the wrong process would be blamed.)
std::optional<Ending> first_failure(const std::vector<Ending>& endings);

/// Returns true if this rank failed because another one had: by its cause or, if it did not fail with one of Cohort's
/// errors, by the messages of other libraries about a lost peer.
bool follows_another(const Ending& ending);

/// Returns true if the process has not failed: it has ended with 0, saved, or died of the signal that it was asked to
/// end by; or the job goes on without it.
bool has_ended_well(const Ending& ending);

/// Returns what the process did by its last report; for a server or evaluator "running, in no world, as servers are".
std::string doing(const Ending& ending);

struct PostMortem {
  Ending first;
  int world_size = 1;
  int ended_well = 0;               ///< ranks that had already ended with 0
  std::vector<int> missed = {};     ///< ranks among `ended_well` without which `first` could not go on
  int running = 0;                  ///< ranks that have not ended yet
  std::vector<std::string> others;  ///< what the other processes were doing then
  std::string log_folder;
  bool colour = false;
};
/// Returns the post-mortem as whole lines, each with its "\n".
std::string to_string(const PostMortem& post_mortem);

/// Replaces the mangled names of C++ functions in a stack: "_ZN1a1bEv" becomes "a::b()". A dying process prints its
/// symbols mangled, since demangling takes memory. Words that are no such names, or too long to be trusted, stay
/// unchanged.
std::string demangled(std::string_view text);

/// Suggests in one or two sentences what a person can try after a rank has failed: the likely reason and the remedy,
/// from the rank's status and last words. Empty if the last words suffice.
std::string advice(const Ending& ending);

/// The reason why an attempt broke down, if another attempt may go well.
struct Breakdown {
  std::string text;   ///< "rank 1 on h failed after 10.0 s: exit code 1"
  std::string cause;  ///< "exit code 1": identical if two attempts broke down in the same way
  double after_seconds = 0;
};

/// Decides whether a job that broke down (a rank failed, or nothing went on) is started again.
class Restarts {
 public:
  /// A job that breaks down within kSoonSeconds has hardly made a step. If kSameInARow attempts break down so early for
  /// the same cause, no restart will help.
  static constexpr double kSoonSeconds = 5;
  static constexpr int kSameInARow = 3;

  explicit Restarts(int most) : most_(most) {}

  int most() const noexcept { return most_; }
  /// Returns how often the job has been started again; 0 in the first attempt.
  int done() const noexcept { return done_; }

  struct Decision {
    bool again = false;
    int number = 0;    ///< number of the restart that follows
    std::string text;  ///< for the user; empty if restarts were never wanted
  };
  /// Decides after an attempt that has ended with this breakdown.
  Decision after(const Breakdown& breakdown, int world_size);

 private:
  int most_;
  int done_ = 0;
  int same_ = 0;
  std::optional<std::string> last_;  ///< cause of the latest breakdown
};

/// The end of a job.
struct JobEnd {
  Roles roles;
  std::vector<Ending> endings;
  bool early = false;                   ///< made while processes still run; they have no entry in `endings`
  std::string start_failure;            ///< why the job could not be started; empty: it could
  std::string stop_reason;              ///< why the job was stopped; empty: it was not
  std::optional<int> stop_status;       ///< the exit status, if it is not a rank's
  bool told_to_end = false;             ///< the job was stopped because somebody asked for it
  bool stuck = false;                   ///< the job was stopped because it made no progress
  bool quiet = false;                   ///< nobody is left to read the reason
  double seconds = 0;                   ///< duration of the job
  std::vector<std::string> doing_then;  ///< by process: what it was doing when the first failure was seen
  std::string log_folder;
  bool colour = false;

  /// Excuses ranks whose end does not count in an elastic job: ranks that are lost while the job ends, and newcomers,
  /// which have nothing to save.
  void excuse_elastic_ranks();
};

struct Verdict {
  int status = 0;
  bool requeue = false;                   ///< all ranks have saved what they need, and some ask to be started again
  std::string reason;                     ///< why the job ended, if it was ended
  std::string text;                       ///< for stderr; whole lines, or nothing
  std::optional<PostMortem> post_mortem;  ///< if a rank's failure ended the job
  std::optional<Breakdown> breakdown;     ///< if starting the job again may help
};

/// Returns the report on a job that has ended, and its exit status.
Verdict judge(const JobEnd& end);

/// Returns a note that the ranks of a job that ended well may have been independent runs of one rank each; else empty.
std::string doubt_about(const JobEnd& end, const Verdict& verdict);

}  // namespace cohort::launch
