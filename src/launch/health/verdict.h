// How a job has ended: which failure came first, what a person is told about it and can try, whether the job is started
// again (Restarts), and the exit status that it gives. Pure; one thread.
#pragma once

#include "launch/messages.h"
#include "launch/processes.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

/// How one process ended.
struct Ending : ProcessEnd {
  Role role = Role::Worker;
  int rank = 0;  ///< its number in its role
  std::string host;
  int pid = 0;
  double after_seconds = 0;
  bool asked = false;            ///< to end, since those before it had ended
  bool spared = false;           ///< the job goes on without it
  int restarts = 0;              ///< of a server: how often it had been started again,
  std::string first_cause = {};  ///< and how it had ended the first time

  std::string name() const { return process_name(role, rank); }
};

/// It has saved and wants to be started again (kRequeueStatus), and the job does not go on without it: no failure.
bool asks_for_requeue(const Ending& ending);

/// The failure that the others follow from: among those that ended before the job was stopped, one that was killed by a
/// signal comes before one that ended by itself, one that had not lost a peer before one that had, the
/// earlier before the later. nullopt if none failed. (A peer's death is often noticed, and died of, before the kernel
/// has finished the first death; the order of the reports alone would accuse the wrong one.)
std::optional<Ending> first_failure(const std::vector<Ending>& endings);

/// True if this rank failed because another one had: by its cause; of what fails without one of Cohort's errors, by
/// what other libraries write of a lost peer.
bool follows_another(const Ending& ending);

/// It has not failed: it has ended with 0, saved, or died of the signal that it was asked to end by; or the job goes on
/// without it.
bool has_ended_well(const Ending& ending);

/// As `doing` of its last report; of who is no rank "running, in no world, as servers are".
std::string doing(const Ending& ending);

struct PostMortem {
  Ending first;
  int world_size = 1;
  int ended_well = 0;               ///< ranks that had ended with 0 before
  std::vector<int> missed = {};     ///< of these, the ones without which `first` could not go on
  int running = 0;                  ///< ranks that have not ended yet
  std::vector<std::string> others;  ///< what the others were doing then
  std::string log_folder;
  bool colour = false;
};
/// The block, with "\n" at the end of each line.
std::string to_string(const PostMortem& post_mortem);

/// The names of C++ functions in a stack, as a person reads them: a dying process leaves them as its symbol table has
/// them, since making them readable takes memory.
/// `text` with "_ZN1a1bEv" as "a::b()". Names that are none, or too long to be trusted, stay as they are.
std::string demangled(std::string_view text);

/// Suggests what a person can try after a rank has failed, from how it ended and what it said last. One or two
/// sentences: the likely reason and the way out. Empty where the rank's own words suffice.
std::string advice(const Ending& ending);

/// Why an attempt ended that might have gone well.
struct Breakdown {
  std::string text;   ///< "rank 1 on h failed after 10.0 s: exit code 1"
  std::string cause;  ///< "exit code 1": equal where two attempts broke down in the same way
  double after_seconds = 0;
};

/// Whether a job that broke down (a rank failed, or nothing went on) is started again.
class Restarts {
 public:
  /// A job that breaks down this soon has hardly made a step: so often in a row in the same way, and no restart will
  /// help.
  static constexpr double kSoonSeconds = 5;
  static constexpr int kSameInARow = 3;

  explicit Restarts(int most) : most_(most) {}

  int most() const noexcept { return most_; }
  /// How often the job has been started again; 0 in the first attempt.
  int done() const noexcept { return done_; }

  struct Decision {
    bool again = false;
    int number = 0;    ///< of the restart that follows
    std::string text;  ///< for the user; empty where restarts were never wanted
  };
  /// After an attempt that has ended like this.
  Decision after(const Breakdown& breakdown, int world_size);

 private:
  int most_;
  int done_ = 0;
  int same_ = 0;
  std::optional<std::string> last_;  ///< the cause
};

/// How a job came to its end.
struct JobEnd {
  Roles roles;
  std::vector<Ending> endings;
  bool early = false;                   ///< processes without an ending still run
  std::string start_failure;            ///< why it could not be started, where it could not
  std::string stop_reason;              ///< why it was stopped, where it was
  std::optional<int> stop_status;       ///< the exit status, where it is not a rank's
  bool told_to_end = false;             ///< it was stopped because somebody wanted that
  bool stuck = false;                   ///< it was stopped because it did not go on
  bool quiet = false;                   ///< nobody is left to read the reason
  double seconds = 0;                   ///< it ran
  std::vector<std::string> doing_then;  ///< by process: what it was doing when the first failure was seen
  std::string log_folder;
  bool colour = false;
};

struct Verdict {
  int status = 0;
  bool requeue = false;                   ///< all ranks have saved what they need, and some ask to be started again
  std::string reason;                     ///< why it ended, where it did not by itself
  std::string text;                       ///< for stderr; whole lines, or nothing
  std::optional<PostMortem> post_mortem;  ///< where a rank's failure ended the job
  std::optional<Breakdown> breakdown;     ///< where starting it again may help
};

/// Returns the report on a job that has ended, and its exit status.
Verdict judge(const JobEnd& end);

/// For a job that has ended well: notes that its ranks may have been independent runs of one rank each; else empty.
std::string doubt_about(const JobEnd& end, const Verdict& verdict);

}  // namespace cohort::launch
