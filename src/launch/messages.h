// Messages between supervisor and agents, as values and as bytes, and the Channel that carries them. Every message is
// one tagged record of base/records.h; decoding checks every length, so that hostile bytes are harmless. A tag's number
// never changes; new tags get new numbers. Plain data, any thread; a Channel belongs to one thread.
#pragma once

#include <cohort/role.h>

#include "base/process.h"
#include "base/result.h"
#include "launch/loop.h"
#include "launch/rank_report.h"
#include "net/address.h"
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

/// Version of the protocol, which both ends have to share.
inline constexpr std::uint32_t kProtocol = 21;
/// Longest message. The arguments and environment of a job are at most 8 MiB (the kernel takes less).
inline constexpr std::size_t kLongestMessage = std::size_t{16} << 20;
/// Output and input are sent in pieces of at most this size; a window bounds the bytes that are not yet acknowledged.
inline constexpr std::size_t kOutputPiece = std::size_t{64} << 10;
inline constexpr std::size_t kOutputWindow = std::size_t{2} << 20;
inline constexpr std::size_t kInputWindow = std::size_t{64} << 10;

enum class Stream : std::uint8_t { Stdout = 0, Stderr = 1 };

// `rank` is the number of a process in the job's Roles: first the ranks of the world, then the other roles.

// Messages from the agent.

struct Hello {
  std::uint32_t protocol = kProtocol;
  std::string version;
  std::int32_t host_index = 0;  ///< -1: the host that `host` names; for a launcher, the first free one
  std::string host;
  std::int32_t pid = 0;
  std::int32_t cores = 1;
  std::uint16_t free_port = 0;       ///< port held for the job: MASTER_PORT if the agent runs rank 0
  std::string build;                 ///< build of the agent, as in an Announcement
  std::int32_t nodes = 0;            ///< for one of several launchers: its --nnodes; else 0
  std::int32_t ranks = 0;            ///< for an agent that comes by itself: number of ranks
  std::string nodes_id;              ///< launcher: --rdzv-id, the same for all of them
  std::vector<std::string> devices;  ///< GPUs of the agent, for the job
  std::vector<std::string> router;   ///< for a router: where its children reach it, "ADDRESS:PORT"
};

/// All workers of the host are running.
struct Started {
  std::vector<std::int32_t> pids;  ///< in the order of StartJob::workers
  std::int32_t threads = 0;        ///< OMP_NUM_THREADS of each worker; 0 if it is not a number
};

/// The job could not be started on this host: none of its processes runs here.
struct StartFailed {
  std::int32_t rank = -1;
  std::string reason;
};

struct Output {
  std::int32_t rank = 0;
  Stream stream = Stream::Stdout;
  std::string bytes;
};

/// How a process ended, as seen by its agent.
struct ProcessEnd {
  sys::ExitStatus status;
  bool before_stop = true;     ///< the process was dead or dying when the agent began to stop the job
  bool out_of_memory = false;  ///< the kernel counted an out-of-memory kill around the same time
  std::string last_stderr;     ///< the last lines of its stderr
  RankReport last;             ///< what the process was doing
  std::string words;           ///< the process's last words: for example an exception with its trace
  CauseReport cause;           ///< the cause, as programs read it
};

struct Exited : ProcessEnd {
  std::int32_t rank = 0;
  std::uint64_t after_ns = 0;  ///< time since the workers were started, by the agent's clock
};

struct InputTaken {
  std::uint64_t bytes = 0;
};

/// A problem that the user should know of and that does not end the job, e.g. a log that cannot be written.
struct Trouble {
  std::string text;
};

/// No process of the job is left on this host, and all its output has been sent.
struct AllGone {
  std::uint32_t swept = 0;  ///< number of the workers' descendants that had to be killed
  std::string stuck;        ///< processes that even SIGKILL did not end, with the kernel function that they are in
};

/// Says what the host's ranks are doing; sent more than twice a second, and whenever a rank has failed.
struct Reports {
  std::vector<RankReport> ranks;
  std::vector<GpuUse> gpus = {};  ///< use of the host's GPUs
};

/// A rank's answer to AskStacks.
struct Stacks {
  std::int32_t rank = 0;
  std::string text;
};

/// The agent ends the job by itself, because it was told to end or because its guard is gone.
struct Ends {
  std::string why;
};

/// The agent was told to end, and its ranks save when they are asked: the job ends as if the supervisor had been told.
struct Told {
  std::int32_t signal = 0;
};

/// Part of the timelines of the host's ranks: events of the trace as text, to be appended to the earlier ones.
struct TracePiece {
  std::int64_t base_ns = 0;  ///< time 0 of the events, by the host's CLOCK_MONOTONIC; the same in all pieces
  std::string events;
};

/// The answer to a ClockQuestion.
struct ClockAnswer {
  std::uint64_t number = 0;
  std::int64_t now_ns = 0;  ///< CLOCK_MONOTONIC
};

/// The answer to LeasePorts.
struct LeasedPorts {
  std::vector<std::int32_t> ports;  ///< 32 bits each: an element of an encoded list takes at least 4 bytes
  std::string why;                  ///< why there are fewer ports than were wanted
};

/// The answer to StartAgain and StartMore.
struct StartedAgain {
  std::int32_t rank = 0;
  std::int32_t pid = 0;  ///< 0: the process was not started
  std::string why;       ///< why not; empty: the host was told meanwhile to end its processes
};

// Messages from the supervisor.

struct WorkerPlan {
  std::int32_t rank = 0;
  std::vector<std::string> environment;  ///< "NAME=value"; overrides the job's environment
  Role role = Role::Worker;
  std::int32_t number = 0;  ///< number within the role
};

/// Program of a role whose processes do not run the ranks' program.
struct RoleProgram {
  Role role = Role::Server;
  std::string path;
  std::vector<std::string> arguments;
};

/// Starts the ranks of an epoch. Another StartJob may follow once these processes and all their descendants are gone.
struct StartJob {
  std::string path;  ///< executable
  std::vector<std::string> arguments;
  std::vector<std::string> environment;
  std::string folder;
  std::string log_folder;
  std::vector<WorkerPlan> workers;  ///< the ranks by local rank, then the other roles
  bool input = false;               ///< rank 0's stdin comes over this connection; otherwise it is /dev/null
  std::uint32_t tail_lines = 20;
  std::uint64_t open_files = 0;  ///< soft limit of open files of the workers
  bool bind_to_cores = false;    ///< binds each worker to its share of the host's cores
  bool elsewhere = false;        ///< the environment is another host's, so HOME etc. come from the agent's
  std::string run_folder;        ///< made on this host if it does not exist
  bool trace = false;            ///< the supervisor wants TracePieces
  bool divides_cores = true;     ///< unset env::kThreadCounts become each rank's share of the cores
  std::vector<RoleProgram> programs = {};
  /// A failed server keeps its host busy until StartAgain or GoOnWithout is sent for it, or all are told to end.
  bool servers_again = false;
  /// signals that `cohort run`'s caller ignores; workers ignore them, too
  std::vector<std::int32_t> ignored = {};
  /// The other ranks go on when a rank fails, so the processes that the failed rank has started are ended with it.
  bool elastic = false;
};

/// Starts a failed server again as before, but with these variables overriding the earlier ones.
struct StartAgain {
  std::int32_t rank = 0;
  std::vector<std::string> environment;  ///< "NAME=value"
};

/// Starts one more worker beside those that run.
struct StartMore {
  WorkerPlan worker;
};

/// Says that a failed server is not started again.
struct GoOnWithout {
  std::int32_t rank = 0;
};

struct Input {
  std::string bytes;  ///< empty: end of input
};

struct OutputTaken {
  std::uint64_t bytes = 0;
};

/// Sends a signal to every worker's process group; SIGUSR1 and SIGUSR2 only to processes that survive it (KeptSignals).
struct SignalWorkers {
  std::int32_t signal = 0;
};

/// Sends `signal` to the processes of `role`, and SIGKILL to those that are left after the grace. `role` is the first
/// role with running processes; later roles wait for orders of their own. SIGKILL, or a grace of 0, kills the processes
/// of all roles. If a rank saves when it is asked, the agent makes the grace at least `saving_ms`: it sees such a rank
/// at once, the supervisor only a second later.
struct StopWorkers {
  std::int32_t signal = 15;
  std::uint32_t grace_ms = 5000;
  std::uint32_t saving_ms = 0;
  Role role = Role::Worker;
};

/// For elastic jobs: the job's store has the members of this epoch, and ranks can read them.
struct NewMembership {
  std::uint64_t epoch = 0;
};

/// For elastic jobs: kills this rank; the others go on without it.
struct KillWorker {
  std::int32_t rank = 0;
};

/// Nothing more is wanted, so the agent ends. One of several launchers ends with the job's exit status.
struct Finish {
  std::int32_t status = 0;
};

/// Tells an agent that the job cannot take it.
struct Refused {
  std::string why;
};

/// Asks for Reports now, and for the stacks of all ranks that can write them.
struct AskStacks {};

/// Asks for the time of the host's clock; to be answered immediately.
struct ClockQuestion {
  std::uint64_t number = 0;
};

/// Asks the agent to hold this many ports of its host for as long as it lives.
struct LeasePorts {
  std::int32_t count = 0;
};

// Messages by which agents reach the supervisor through another agent, their router (launch/numbered_messages.h).

/// Number of a message between the supervisor and the agent `host`.
struct MessageNumber {
  std::int32_t host = 0;
  std::uint64_t number = 0;    ///< from 1 in each direction; 0: there is no message, only `received`
  std::uint64_t received = 0;  ///< the sender has the other direction's messages up to this one
};

/// A message between the supervisor and an agent. Routers pass it on without decoding `bytes`.
struct Relayed {
  MessageNumber number;
  std::string bytes;
};

/// One message for several children of a router, which sends it to each as Relayed.
struct RelayedToMany {
  std::vector<MessageNumber> numbers;
  std::string bytes;
};

/// A router tells the supervisor of a child's connection.
struct ChildLink {
  enum class State : std::uint8_t {
    Connected,  ///< `text` is the child's address
    Silent,     ///< the child's host has not been heard for longer than usual
    Heard,      ///< it has been heard again
    Closed,     ///< it has ended: `text` says why
  };
  std::int32_t host = 0;
  State state = State::Connected;
  std::string text;
};

/// A router shows its children regularly that it runs.
struct RouterRuns {};

using Message =
    std::variant<Hello, Started, StartFailed, Output, Exited, InputTaken, Trouble, AllGone, StartJob, Input,
                 OutputTaken, SignalWorkers, StopWorkers, Finish, Reports, Stacks, AskStacks, Ends, Refused, Told,
                 TracePiece, ClockAnswer, ClockQuestion, LeasedPorts, LeasePorts, StartedAgain, StartAgain, GoOnWithout,
                 NewMembership, StartMore, KillWorker, Relayed, RelayedToMany, ChildLink, RouterRuns>;

std::string encode(const Message& message);
/// Fails with Corrupt on anything that `encode` would not have made.
Result<Message> decode(std::string_view bytes);

/// Options that keep the control connection's keys apart from the store's.
net::SecureOptions control_options();

/// Carries messages between supervisor and agent over one authenticated connection, driven by a Loop. A handler may
/// destroy other parts of the Channel's owner; the Channel itself has to live until the handler has returned.
class Channel {
 public:
  using OnMessage = std::function<void(Message)>;
  /// Called once; no error means that the other end closed in good order.
  using OnClosed = std::function<void(std::optional<Error>)>;

  Channel(Loop& loop, net::SecureConnection connection, OnMessage on_message, OnClosed on_closed);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// Sends immediately, or as soon as the other end reads; messages arrive in order. Does nothing on a closed Channel.
  void send(const Message& message);
  /// Returns the time since the other host's kernel was last heard; after `watch_link`, it answers each second.
  std::chrono::milliseconds silence() const;
  /// Stops or resumes reading, so that the other end cannot send more than fits into the sockets.
  void pause_reading(bool paused);
  /// Makes the Channel close with PeerLost when the other end's host has been silent for `longest`.
  void watch_link(std::chrono::milliseconds longest);
  /// Addresses of this end and the other. They throw Io if the connection was lost before the Channel was made.
  net::Address own_address() const { return value_or_throw(own_).tcp; }
  net::Address peer_address() const { return value_or_throw(other_).tcp; }
  std::size_t unsent_bytes() const noexcept { return connection_ ? connection_->unsent_bytes() : 0; }
  const std::string& peer() const noexcept { return peer_; }

 private:
  void advance();
  void update_interest();
  void close(std::optional<Error> error);

  void look_at_link(std::chrono::milliseconds longest);

  Loop& loop_;
  std::optional<net::SecureConnection> connection_;  ///< until the Channel is closed
  const std::string peer_;
  const Result<net::Endpoint> own_, other_;
  Watch watch_;
  Timer begun_;  ///< handles bytes that came before the Channel was made
  Timer link_;
  const OnMessage on_message_;
  const OnClosed on_closed_;
  bool closed_ = false;
  bool wants_write_ = false;
};

}  // namespace cohort::launch
