// Brings a job to its end, and watches two further inputs from the caller: the end of its owner, and stdin. All classes
// belong to the supervisor and its thread.
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

/// The process that a job belongs to (--owner). Its end ends the job; the job then also removes the owner's private
/// folder, which the owner can no longer do itself.
class Owner {
 public:
  /// Throws cohort::Error (Unavailable) if `pid` is not this process's parent.
  Owner(Loop& loop, int pid);

  bool gone() const noexcept { return gone_; }
  /// Returns true if the owner has gone since the last call.
  bool take_gone() noexcept { return std::exchange(news_, false); }

 private:
  bool gone_ = false, news_ = false;
  sys::UniqueFd process_;
  Watch watch_;
};

/// Removes a folder that only this user can read (0700); leaves any other folder.
void remove_private_folder(const std::string& path);

/// Reads this process's stdin for rank 0, no faster than rank 0 reads. Needed where rank 0 cannot inherit stdin: if it
/// is a terminal, or if rank 0 is on another host.
class InputReader {
 public:
  /// Sends the input to the agent of rank 0; an empty piece, sent once, means its end.
  InputReader(Loop& loop, int fd, AgentHandle& agent);

  /// Called when this many bytes have been passed on to the rank.
  void taken(std::uint64_t bytes);
  /// Reads a terminal only from the foreground, since the kernel stops a background process that reads; call this after
  /// SIGCONT.
  void look_again();

  /// Returns false for a closed descriptor and for /dev/null.
  static bool worth_reading(int fd);
  /// Returns true for an input that a rank on this host can inherit. Then only input that the rank reads is taken from
  /// the caller. A terminal cannot be inherited, since the rank would read it in the background, too.
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

/// Stops a job first with the signal that was asked for (SIGINT, SIGTERM), then with harder ones, each with its grace,
/// and with a notice now and then for a waiting user. Pure: it says when to look again, and what is due then.
class Stopping {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  struct Grace {
    Milliseconds usual{0};
    Milliseconds saving{0};  ///< used instead if ranks save when they are asked, and if it is longer
  };
  /// Ranks get `signal`, and SIGKILL after the grace if they still run.
  struct Order {
    int signal = 0;
    Grace grace = {};
  };
  struct Due {
    std::optional<Order> order = {};
    bool notice = false;   ///< a notice to the waiting user is due
    bool give_up = false;  ///< the agents have not answered in time
  };
  /// `grace`: time between one signal and the next, harder one.
  explicit Stopping(Milliseconds grace) : grace_(grace) {}

  /// The first reason is kept; a further call may make the stop harder. A grace of 0 kills immediately.
  Order begin(const std::string& reason, int signal, Grace grace, Clock::time_point now);
  /// Called when some ranks save.
  void they_save(Clock::time_point now);
  /// Called when the user asks again: SIGTERM after SIGINT, SIGKILL after SIGTERM.
  Order hurry(Clock::time_point now);
  void be_quiet() { quiet_ = true; }
  /// Called when nothing is left to be stopped.
  void finish() { notice_at_ = harder_at_ = give_up_at_ = std::nullopt; }

  std::optional<Clock::time_point> next_look() const;
  Due look(Clock::time_point now);
  /// Says that `ranks` still run, else `others` ("servers 0-1"), and the time left; neither: leftovers of ranks run.
  std::string notice(int ranks, const std::string& others, Clock::time_point now);

  /// Returns why things are being stopped; empty while nothing is.
  const std::string& reason() const noexcept { return reason_; }

 private:
  Milliseconds grace_;
  std::string reason_;
  int signal_ = 0;  ///< the last signal sent
  Milliseconds saving_{0};
  Grace harder_;
  Clock::time_point began_;
  Clock::time_point limit_;
  bool announced_ = false;
  bool quiet_ = false;
  std::optional<Clock::time_point> notice_at_, harder_at_, give_up_at_;
};

/// Has agents end the running processes, role after role, as Stopping decides.
class StopOrders {
 public:
  /// All arguments outlive this. `grace`: as in Stopping.
  StopOrders(Loop& loop, AgentPool& agents, Members& members, RunOutput& run, Stopping::Milliseconds grace)
      : loop_(loop), agents_(agents), members_(members), run_(run), stopping_(grace) {}

  /// Tells the first running role to end. Agents that run nothing yet are told that the job ends with `status`.
  void begin(const std::string& reason, int signal, Stopping::Grace grace, int status = 1);
  /// Asks the processes of the role to end, even if the job is not being stopped.
  void ask(Role role, Stopping::Milliseconds grace);
  /// Returns true if processes of this role have been told to end; for ranks only if the job goes on without them.
  bool asked(Role role) const { return role == Role::Worker ? workers_asked_ : asked_ >= role; }
  /// Returns true if processes of this role may be asked to end: neither they nor those of later roles have been.
  bool is_next(Role role) const { return role > asked_; }
  void they_save();
  void hurry();
  void be_quiet() { stopping_.be_quiet(); }
  void finish();
  /// Returns true if an agent has not answered in time.
  bool given_up() const noexcept { return given_up_; }
  /// Returns why things are being stopped; empty while nothing is.
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
  Role asked_ = Role::Worker;   ///< the last role that was told to end; not known for workers
  bool workers_asked_ = false;  ///< TensorFlow's chief or an elastic job's training has ended
  bool given_up_ = false;
  Timer next_;
};

}  // namespace cohort::launch
