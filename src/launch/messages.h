// Messages between supervisor and agents, as values and as bytes, and the Channel that carries them. Every message is
// one tagged record of base/records.h; decoding checks every length, so that bytes from outside are harmless. Numbers
// of tags never change, they only grow. Plain data, any thread; a Channel belongs to one thread.
#pragma once

#include <cohort/role.h>

#include "base/process.h"
#include "base/result.h"
#include "launch/loop.h"
#include "launch/rank_report.h"
#include "net/secure_connection.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace cohort::launch {

/// Both ends have to speak the same one.
inline constexpr std::uint32_t kProtocol = 20;
/// Longest message: arguments and environment of a job are at most 8 MiB (the kernel takes less).
inline constexpr std::size_t kLongestMessage = std::size_t{16} << 20;
/// Output and input travel in pieces of this size, and at most a window of them is under way.
inline constexpr std::size_t kOutputPiece = std::size_t{64} << 10;
inline constexpr std::size_t kOutputWindow = std::size_t{2} << 20;
inline constexpr std::size_t kInputWindow = std::size_t{64} << 10;

enum class Stream : std::uint8_t { Stdout = 0, Stderr = 1 };

// `rank` is the number of a process in the job's Roles: the ranks of the world, and behind them the other roles.

// From the agent.

struct Hello {
  std::uint32_t protocol = kProtocol;
  std::string version;
  std::int32_t host_index = 0;  ///< -1: the one that `host` names; of a launcher, the first that is free
  std::string host;
  std::int32_t pid = 0;
  std::int32_t cores = 1;
  std::uint16_t free_port = 0;       ///< that the agent holds for the job: MASTER_PORT, if rank 0 is its
  std::string build;                 ///< as in an Announcement
  std::int32_t nodes = 0;            ///< of a launcher that is one of several: as many as it was told of; 0: it is none
  std::int32_t ranks = 0;            ///< of one that comes by itself: so many ranks it wants
  std::string nodes_id;              ///< of a launcher: what all of them say, --rdzv-id
  std::vector<std::string> devices;  ///< GPUs that it brings along
};

/// All workers of the host run.
struct Started {
  std::vector<std::int32_t> pids;  ///< in the order of StartJob's workers
  std::int32_t threads = 0;        ///< OMP_NUM_THREADS of each; 0 if it is not a number
};

/// Nothing of the job runs on this host.
struct StartFailed {
  std::int32_t rank = -1;
  std::string reason;
};

struct Output {
  std::int32_t rank = 0;
  Stream stream = Stream::Stdout;
  std::string bytes;
};

/// How a process ended, as its agent saw it.
struct ProcessEnd {
  sys::ExitStatus status;
  bool before_stop = true;     ///< it was dead or dying when the agent began to stop the job
  bool out_of_memory = false;  ///< the kernel counted an out-of-memory kill around the same time
  std::string last_stderr;     ///< its last lines
  RankReport last;             ///< what it was doing
  std::string words;           ///< its own last words: an exception with its trace
  CauseReport cause;           ///< and for programs
};

struct Exited : ProcessEnd {
  std::int32_t rank = 0;
  std::uint64_t after_ns = 0;  ///< since the workers were started, by the agent's clock
};

struct InputTaken {
  std::uint64_t bytes = 0;
};

/// Something that the user should know and that does not end the job, e.g. a log that cannot be written.
struct Trouble {
  std::string text;
};

/// No process of the job is left on this host, and all its output has been sent.
struct AllGone {
  std::uint32_t swept = 0;  ///< descendants of workers that had to be killed
  std::string stuck;        ///< processes that even SIGKILL did not end, with where the kernel holds them
};

/// Reports what the host's ranks are doing, more than twice a second and whenever one has failed.
struct Reports {
  std::vector<RankReport> ranks;
  std::vector<GpuUse> gpus = {};  ///< of the host
};

/// A rank's answer to AskStacks.
struct Stacks {
  std::int32_t rank = 0;
  std::string text;
};

/// The agent ends the job by itself: it was told to, or nobody guards it any more.
struct Ends {
  std::string why;
};

/// Somebody has told the agent to end, and its ranks save when they are asked: the job is to end as if the supervisor
/// had been told.
struct Told {
  std::int32_t signal = 0;
};

/// Part of the timelines of the host's ranks: packets of Perfetto's format, to be appended to the earlier ones.
struct TracePiece {
  std::int64_t base_ns = 0;  ///< what is 0 in them, by the host's CLOCK_MONOTONIC: always the same
  std::string packets;
};

/// The answer to a ClockQuestion.
struct ClockAnswer {
  std::uint64_t number = 0;
  std::int64_t now_ns = 0;  ///< CLOCK_MONOTONIC
};

/// The answer to LeasePorts.
struct LeasedPorts {
  std::vector<std::int32_t> ports;  ///< each element of a list takes 4 bytes at least
  std::string why;                  ///< there are fewer than were wanted
};

/// The answer to StartAgain and StartMore.
struct StartedAgain {
  std::int32_t rank = 0;
  std::int32_t pid = 0;  ///< 0: it was not started,
  std::string why;       ///< and why not; empty: the host was told to end what it runs meanwhile
};

// From the supervisor.

struct WorkerPlan {
  std::int32_t rank = 0;
  std::vector<std::string> environment;  ///< "NAME=value", over the job's
  Role role = Role::Worker;
  std::int32_t number = 0;  ///< in its role
};

/// Program of the processes of a role, where it is not the ranks' program.
struct RoleProgram {
  Role role = Role::Server;
  std::string path;
  std::vector<std::string> arguments;
};

/// The ranks of an epoch; another such order may follow once they and all below them are gone.
struct StartJob {
  std::string path;  ///< executable
  std::vector<std::string> arguments;
  std::vector<std::string> environment;
  std::string folder;
  std::string log_folder;
  std::vector<WorkerPlan> workers;  ///< the ranks, by local rank, and behind them the other roles
  bool input = false;               ///< stdin of rank 0 comes over this connection, else it is /dev/null
  std::uint32_t tail_lines = 20;
  std::uint64_t open_files = 0;  ///< soft limit of the workers
  bool bind_to_cores = false;    ///< each worker to its share of the host's
  bool elsewhere = false;        ///< the environment is another host's: the agent's own has HOME and the like
  std::string run_folder;        ///< made there if it is not
  bool trace = false;            ///< TracePieces are wanted
  bool divides_cores = true;     ///< env::kThreadCounts, where nobody has set them, are each rank's share of the cores
  std::vector<RoleProgram> programs = {};
  /// StartAgain or GoOnWithout says what becomes of a failed server; until then, or until all are told to end, its host
  /// is not done.
  bool servers_again = false;
  std::vector<std::int32_t> ignored = {};  ///< signals that the caller of `cohort run` ignores, and so do the workers
  /// Others go on when a rank fails: what it has started is ended with it.
  bool elastic = false;
};

/// A server that has failed, as it was started before, but with these variables over those.
struct StartAgain {
  std::int32_t rank = 0;
  std::vector<std::string> environment;  ///< "NAME=value"
};

/// Another worker, beside those that run.
struct StartMore {
  WorkerPlan worker;
};

/// A server that has failed is not started again.
struct GoOnWithout {
  std::int32_t rank = 0;
};

struct Input {
  std::string bytes;  ///< empty: end of input
};

struct OutputTaken {
  std::uint64_t bytes = 0;
};

/// To every worker's process group; SIGUSR1 and SIGUSR2 only where they do not end a process (KeptSignals).
struct SignalWorkers {
  std::int32_t signal = 0;
};

/// Sends `signal`, and SIGKILL to all that is left after the grace. Where a rank saves when it is asked, the grace is
/// `saving_ms`, if that is longer: the agent sees at once what the supervisor hears a second later. Those of the role
/// are meant, which has no other one before it that runs; the roles behind it have to wait for an order of their own,
/// as long as nobody is to be killed at once.
struct StopWorkers {
  std::int32_t signal = 15;
  std::uint32_t grace_ms = 5000;
  std::uint32_t saving_ms = 0;
  Role role = Role::Worker;
};

/// In an elastic job: the job's store has the members of this epoch, for ranks to see.
struct NewMembership {
  std::uint64_t epoch = 0;
};

/// In an elastic job: the others go on without this rank.
struct KillWorker {
  std::int32_t rank = 0;
};

/// Nothing more is wanted: the agent ends. A launcher that is one of several ends with the job's exit status.
struct Finish {
  std::int32_t status = 0;
};

/// To an agent that cannot be taken.
struct Refused {
  std::string why;
};

/// Reports are wanted now, and the stacks of all ranks that can tell them.
struct AskStacks {};

/// Asks for the time of the host's clock, at once.
struct ClockQuestion {
  std::uint64_t number = 0;
};

/// So many ports of the host are wanted, for as long as the agent lives.
struct LeasePorts {
  std::int32_t count = 0;
};

using Message = std::variant<Hello, Started, StartFailed, Output, Exited, InputTaken, Trouble, AllGone, StartJob, Input,
                             OutputTaken, SignalWorkers, StopWorkers, Finish, Reports, Stacks, AskStacks, Ends, Refused,
                             Told, TracePiece, ClockAnswer, ClockQuestion, LeasedPorts, LeasePorts, StartedAgain,
                             StartAgain, GoOnWithout, NewMembership, StartMore, KillWorker>;

std::string encode(const Message& message);
/// Fails with Corrupt on anything that `encode` would not have made.
Result<Message> decode(std::string_view bytes);

/// Keeps the control connection's keys apart from the store's.
net::SecureOptions control_options();

/// Messages between supervisor and agent over one authenticated connection, driven by a Loop. The handlers may destroy
/// the Channel's owner's other parts, but not the Channel itself: note it down and do so later.
class Channel {
 public:
  using OnMessage = std::function<void(Message)>;
  /// Called once; no error means that the other end closed in good order.
  using OnClosed = std::function<void(std::optional<Error>)>;

  Channel(Loop& loop, net::SecureConnection connection, OnMessage on_message, OnClosed on_closed);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// Takes effect at once or as soon as the other end reads; messages arrive in order. Does nothing once closed.
  void send(const Message& message);
  /// Since the other host's kernel was heard last. (After `watch_link`, it answers each second.)
  std::chrono::milliseconds silence() const;
  /// Closes with PeerLost once the other end's host has been silent so long.
  void watch_link(std::chrono::milliseconds longest);
  int fd() const noexcept { return connection_.fd(); }
  bool closed() const noexcept { return closed_; }
  std::size_t unsent_bytes() const noexcept { return connection_.unsent_bytes(); }
  const std::string& peer() const noexcept { return connection_.peer(); }

 private:
  void advance();
  void update_interest();
  void close(std::optional<Error> error);

  void look_at_link(std::chrono::milliseconds longest);

  Loop& loop_;
  net::SecureConnection connection_;
  Watch watch_;
  Timer begun_;  ///< for what has come before there was a Channel
  Timer link_;
  const OnMessage on_message_;
  const OnClosed on_closed_;
  bool closed_ = false;
  bool wants_write_ = false;
};

}  // namespace cohort::launch
