// How a job is brought to its end, and what else comes to it from the caller: the owner's end and stdin. All belong to
// the supervisor and its thread.
#pragma once

#include "base/unique_fd.h"
#include "launch/loop.h"
#include "launch/start/agent_pool.h"
#include "launch/supervise/members.h"
#include "launch/supervise/run_output.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace cohort::launch {

/// The process that a job belongs to (--owner): its end ends the job, and its private folder goes then, which it can no
/// longer remove itself.
class Owner {
 public:
  /// Throws cohort::Error (Unavailable) if `pid` is not this process's parent.
  Owner(Loop& loop, int pid);

  bool gone() const noexcept { return gone_; }
  /// It has gone, and nobody has asked since.
  bool take_gone() noexcept { return std::exchange(news_, false); }

 private:
  bool gone_ = false, news_ = false;
  sys::UniqueFd process_;
  Watch watch_;
};

/// Removes a folder that is this user's alone (0700); leaves any other.
void remove_private_folder(const std::string& path);

/// Reads this process's stdin for rank 0, no faster than rank 0 reads, where that cannot have it itself: a terminal,
/// and a rank on another host.
class InputReader {
 public:
  /// Sends what comes in to the agent of rank 0; empty: the end, once.
  InputReader(Loop& loop, int fd, AgentHandle& agent);

  /// So many bytes have gone on to the rank.
  void taken(std::uint64_t bytes);
  /// A terminal is read only from the foreground, since reading from the background stops a process; ask again after
  /// SIGCONT.
  void look_again();

  /// False for a closed descriptor and for /dev/null.
  static bool worth_reading(int fd);
  /// True for what a rank on this host can have itself: then nothing is taken from the caller that no rank reads. A
  /// terminal it cannot, since it would read that in the background, too.
  static bool may_be_given(int fd);

 private:
  void read_some();
  void update();

  int fd_;
  AgentHandle& agent_;
  Watch watch_;
  std::uint64_t under_way_ = 0;
  bool ended_ = false;
};

/// First as it was asked for (SIGINT, SIGTERM), then harder, each signal with its time, and a line now and then for
/// whoever waits. Pure: it says when to look again, and what is due then.
class Stopping {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  struct Grace {
    Milliseconds usual{0};
    Milliseconds saving{0};  ///< where ranks save when they are asked, if it is longer
  };
  /// Ranks get `signal`, and SIGKILL after the grace if they still run.
  struct Order {
    int signal = 0;
    Grace grace = {};
  };
  struct Due {
    std::optional<Order> order = {};
    bool notice = false;   ///< whoever waits is told
    bool give_up = false;  ///< those that tell ranks have not answered in time
  };
  /// `grace`: between one signal and the next, harder one.
  explicit Stopping(Milliseconds grace) : grace_(grace) {}

  /// The first reason counts; a further call makes it harder, or not. `grace` 0: at once.
  Order begin(const std::string& reason, int signal, Grace grace, Clock::time_point now);
  /// Some ranks save.
  void they_save(Clock::time_point now);
  /// Told once more: SIGTERM after SIGINT, SIGKILL after SIGTERM.
  Order hurry(Clock::time_point now);
  void be_quiet() { quiet_ = true; }
  /// Nothing is left to be stopped.
  void finish() { notice_at_ = harder_at_ = give_up_at_ = std::nullopt; }

  std::optional<Clock::time_point> next_look() const;
  Due look(Clock::time_point now);
  /// Notice that `ranks` still run, else `others` ("servers 0-1"), and the time left; both empty: ranks' leftovers run.
  std::string notice(int ranks, const std::string& others, Clock::time_point now);

  /// Empty while nothing is being stopped.
  const std::string& reason() const noexcept { return reason_; }

 private:
  Milliseconds grace_;
  std::string reason_;
  int signal_ = 0;  ///< the last one
  Milliseconds saving_{0};
  Grace harder_;
  Clock::time_point began_;
  Clock::time_point limit_;
  bool announced_ = false;
  bool quiet_ = false;
  std::optional<Clock::time_point> notice_at_, harder_at_, give_up_at_;
};

/// Has agents end what runs, role after role, as Stopping says.
class StopOrders {
 public:
  /// All outlive this. `grace`: as Stopping has it.
  StopOrders(Loop& loop, AgentPool& agents, Members& members, RunOutput& run, Stopping::Milliseconds grace)
      : loop_(loop), agents_(agents), members_(members), run_(run), stopping_(grace) {}

  /// Those of the first role that runs are told to end; agents that run nothing yet: that the job ends with `status`.
  void begin(const std::string& reason, int signal, Stopping::Grace grace, int status = 1);
  /// Asks the processes of the role to end, though the job is not being ended.
  void ask(Role role, Stopping::Milliseconds grace);
  /// A process of this role has been told to end; of ranks only where the job goes on without them.
  bool asked(Role role) const { return role == Role::Worker ? workers_asked_ : asked_ >= role; }
  /// Those of roles before this one are not to be asked any more.
  bool is_next(Role role) const { return role > asked_; }
  void they_save();
  void hurry();
  void be_quiet() { stopping_.be_quiet(); }
  void finish();
  /// An agent has not answered in time.
  bool given_up() const noexcept { return given_up_; }
  /// Empty while nothing is being stopped.
  const std::string& reason() const noexcept { return stopping_.reason(); }

 private:
  void look();
  void wait();
  void tell(const Stopping::Order& order);

  Loop& loop_;
  AgentPool& agents_;
  Members& members_;
  RunOutput& run_;
  Stopping stopping_;
  int status_ = 1;
  Role asked_ = Role::Worker;   ///< those of this role have been told to end; of workers it is not known
  bool workers_asked_ = false;  ///< since TensorFlow's chief has ended, or an elastic job's training
  bool given_up_ = false;
  Timer next_;
};

}  // namespace cohort::launch
