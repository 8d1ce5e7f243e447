#include "launch/agent/agent.h"

#include "base/env.h"
#include "base/hardware.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/parse.h"
#include "base/signals.h"
#include "launch/agent/host_workers.h"
#include "launch/agent/router.h"
#include "launch/agent/upstream.h"
#include "launch/plan/rank_environment.h"
#include "launch/processes.h"
#include "launch/start/invitation.h"
#include "launch/version.h"
#include "net/secure_connection.h"

#include <cohort/exit_status.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;

/// Pause before the next attempt, since the supervisor may not be there yet, or its full listener may have refused us.
constexpr int kTryAgainMs = 200;
/// Time limit of one attempt to reach a supervisor that may start later.
constexpr auto kOneTry = std::chrono::seconds(5);
/// How long an agent waits for node 0 before it prints something.
constexpr auto kSilentWait = std::chrono::seconds(3);
/// Signals within this time count as one, since a Ctrl-C reaches guard and agent, and the guard passes it on.
constexpr auto kOnePress = std::chrono::milliseconds(500);
/// Time limits of connecting to a router, and to the supervisor after the router is lost.
constexpr auto kRouterTime = std::chrono::seconds(5);
constexpr auto kAttachTime = std::chrono::seconds(2);
/// Limit for the children of a router to end, once it has nothing else to do.
constexpr auto kChildrenEnd = std::chrono::seconds(2);
constexpr std::initializer_list<int> kAgentSignals = {SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

/// Returns "ranks 4-7, server 1".
std::string names_of(const std::vector<WorkerPlan>& workers) {
  Roles roles{0, 0, false};
  std::vector<int> processes;
  for (const WorkerPlan& worker : workers) {
    processes.push_back(worker.rank);
    if (worker.role == Role::Worker) roles.workers = std::max(roles.workers, worker.rank + 1);
    if (worker.role == Role::Server) roles.workers = worker.rank - worker.number, roles.servers = worker.number + 1;
    if (worker.role == Role::Evaluator) roles.evaluator = true;
  }
  return roles.names_of(processes);
}

class Agent {
 public:
  /// `saves` is set while ranks save without a supervisor, for the guard.
  Agent(const AgentOptions& options, const net::Secret& secret, std::atomic<bool>& saves);
  int run();

 private:
  using Clock = std::chrono::steady_clock;

  /// Connects to the supervisor; throws if that is impossible. Returns false if there is nothing more to do.
  bool come();
  Result<net::SecureConnection> find_supervisor();
  std::optional<int> told_while_waiting();
  void say(const std::string& text) const;
  /// Returns "node 1", if the number is known.
  std::string own_name() const;
  std::chrono::milliseconds pause();
  void connect(net::SecureConnection connection);
  void on_received(Message message);
  void on_message(Message message);
  void on_closed(std::optional<Error> error);
  /// Connects to the supervisor itself, as the router is lost or does not run. Returns false if that fails.
  bool leave_router(const std::string& why);
  void look_at_router();
  void on_signal();
  bool told_to_make_room(int signal);
  bool told_as_launcher(int signal);
  void start_job(StartJob job);
  void lease_ports(int count);

  const AgentOptions& options_;
  int host_index_;
  net::Secret secret_;
  const pid_t guard_ = ::getppid();
  Loop loop_;
  sys::SignalFd signals_;
  Watch signal_watch_;
  net::Deadline deadline_;  ///< time limit for the supervisor to accept this agent
  std::minstd_rand random_{static_cast<unsigned>(::getpid())};
  Timer again_;  ///< for the next attempt
  Upstream upstream_;
  std::optional<PortLease> port_;  ///< MASTER_PORT, if the supervisor cannot hold it
  std::vector<PortLease> leases_;  ///< ports on which ranks are told to listen
  HostWorkers workers_{loop_, upstream_, options_, secret_};
  std::optional<Router> router_;   ///< set if this agent is a router
  bool behind_router_ = false;     ///< the connection leads to a router
  std::uint64_t connections_ = 0;  ///< number of the current connection
  int missing_ = 0;                ///< number of times that the router has not shown that it runs
  Timer router_looks_;
  bool ends_ = false;         ///< this agent has nothing more to do than to pass on messages of its children
  Timer children_end_;        ///< limit for that; a child that goes on connects to the supervisor
  std::atomic<bool>& saves_;  ///< shared with the guard
  bool passed_on_ = false;    ///< the supervisor knows that this process was told to end
  int told_times_ = 0;        ///< how often a launcher got a signal for the job
  int exit_status_ = 0;
  std::optional<Clock::time_point> told_at_;  ///< when the last of these signals came
};

Agent::Agent(const AgentOptions& options, const net::Secret& secret, std::atomic<bool>& saves)
    : options_(options),
      host_index_(options.host_index),
      secret_(secret),
      signals_(value_or_throw(sys::SignalFd::create(kAgentSignals))),
      signal_watch_(loop_, signals_.fd()),
      saves_(saves) {}

int Agent::run() {
  // A log that reaches the limit of file size is a problem of that log, and must not end the job.
  ::signal(SIGXFSZ, SIG_IGN);
  deadline_ = net::deadline_in(options_.connect_timeout);
  if (options_.own) exit_status_ = 1;  // replaced when the supervisor says how the job has ended
  if (!come()) return exit_status_;
  signal_watch_.on_readable([this] { on_signal(); });
  while (!loop_.stopped()) {
    loop_.step();
    workers_.look();
    if (router_) router_->look();
    if (ends_ && (!router_ || router_->empty())) loop_.stop();
    if (workers_.take_stuck()) exit_status_ = 1;
    if (workers_.finished() && upstream_.lost()) loop_.stop();
    if (const auto status = workers_.status_alone(); status && workers_.finished()) exit_status_ = *status;
  }
  return exit_status_;
}

// Random, so that agents that were turned away together do not come back together.
milliseconds Agent::pause() {
  return milliseconds(std::uniform_int_distribution<int>(kTryAgainMs / 2, kTryAgainMs * 3 / 2)(random_));
}

void Agent::say(const std::string& text) const { fmt::print(stderr, "cohort: {}\n", text); }

std::string Agent::own_name() const { return host_index_ < 0 ? "this node" : fmt::format("node {}", host_index_); }

/// Returns the signal by which this process is to end.
std::optional<int> Agent::told_while_waiting() {
  pollfd waited{signals_.fd(), POLLIN, 0};
  ::poll(&waited, 1, static_cast<int>(pause().count()));
  while (const auto signal = signals_.next()) {
    if (*signal != SIGCHLD && *signal != SIGUSR1 && *signal != SIGUSR2) return signal;
  }
  return std::nullopt;
}

Result<net::SecureConnection> Agent::find_supervisor() {
  // Waits in pieces where it may take long, so that signals are noticed in between.
  const auto once = [this] {
    const net::Deadline piece = options_.patient ? std::min(deadline_, net::deadline_in(kOneTry)) : deadline_;
    return net::reach(options_.supervisor, secret_, control_options(), piece);
  };
  const bool waits = options_.patient && (!upstream_.connected() || options_.own);
  const auto worth_another = [waits](const Error& error) {
    return error.code() == ErrorCode::PeerLost ||
           (waits && (error.code() == ErrorCode::Unavailable || error.code() == ErrorCode::Timeout));
  };
  const auto begun = Clock::now();
  bool told = false;
  auto connection = once();
  while (!connection && worth_another(connection.error()) && !net::passed(deadline_)) {
    if (const auto signal = told_while_waiting()) {
      exit_status_ = 128 + *signal;
      return fail(ErrorCode::Aborted, "told to end by {}", sys::signal_name(*signal));
    }
    if (options_.own && !options_.quiet && !told && Clock::now() - begun > kSilentWait) {
      told = true;
      say(fmt::format("{} waits for node 0 at {}: {}", own_name(), options_.place, connection.error().what()));
    }
    auto again = once();
    // The error of an attempt cut short by the deadline says less than the error before it.
    if (!again && net::passed(deadline_)) break;
    connection = std::move(again);
  }
  return connection;
}

bool Agent::come() {
  Result<net::SecureConnection> connection = fail(ErrorCode::Unavailable, "no router");
  if (!options_.router.empty()) {
    const auto limit = std::min(deadline_, net::deadline_in(kRouterTime));
    connection = net::reach(options_.router, secret_, control_options(), limit);
    if (!connection) log::info("launch", "the router is not reached: {}", connection.error().what());
  }
  behind_router_ = connection.has_value();
  if (!connection) connection = find_supervisor();
  if (connection && upstream_.connected() && !options_.router.empty()) {  // the greeting is sent again with the rest
    connect(*std::move(connection));
    return true;
  }
  if (!connection && connection.error().code() == ErrorCode::Aborted) {
    loop_.stop();
    return false;
  }
  if (!connection && upstream_.connected()) {
    log::info("launch", "the supervisor is gone: {}", connection.error().what());
    exit_status_ = 1;
    loop_.stop();
    return false;
  }
  if (!connection && options_.own) {
    raise(connection.error().code(),
          "{} does not reach node 0: {} -- is `cohort run --nnodes {}` started there, {}with the same place and the "
          "same secret, and does a firewall stand between?",
          own_name(), connection.error().what(), options_.nodes, host_index_ < 0 ? "" : "as --node-rank 0, ");
  }
  if (!connection) {
    raise(connection.error().code(), "the agent of {} does not reach the supervisor: {}", sys::host_name(),
          connection.error().what());
  }
  Hello hello;
  hello.version = kVersion;
  hello.host_index = host_index_;
  hello.host = options_.host_name.empty() ? sys::host_name() : options_.host_name;
  hello.build = own_announcement().build;
  hello.pid = static_cast<std::int32_t>(::getpid());
  hello.cores = sys::usable_cores();
  if (options_.elsewhere) {
    if (options_.host_index <= 0 && !port_)
      port_ = value_or_throw(PortLease::take(static_cast<std::uint64_t>(::getpid())));
    if (port_) hello.free_port = port_->port();
  }
  hello.nodes = options_.nodes;
  hello.ranks = options_.ranks;
  hello.nodes_id = options_.nodes_id;
  hello.devices = options_.devices;
  if (options_.routes) {
    router_.emplace(loop_, secret_, options_.host_timeout);
    hello.router = router_->addresses();
  }
  if (!options_.router.empty()) upstream_.number(host_index_);
  connect(*std::move(connection));
  upstream_.send(hello);
  if (!options_.unable.empty()) upstream_.send(StartFailed{-1, options_.unable});
  return true;
}

void Agent::connect(net::SecureConnection connection) {
  // Messages that still come over an earlier connection are sent again over this one.
  const std::uint64_t number = ++connections_;
  upstream_.connect(std::make_unique<Channel>(
      loop_, std::move(connection),
      [this, number](Message message) {
        if (number == connections_) on_received(std::move(message));
      },
      [this, number](std::optional<Error> error) {
        if (number == connections_) on_closed(std::move(error));
      }));
  if (options_.elsewhere) upstream_.channel().watch_link(options_.host_timeout);
  if (router_) router_->connect(upstream_.channel());
  missing_ = 0;
  if (behind_router_) look_at_router();
}

void Agent::look_at_router() {
  if (!behind_router_) return;
  // If this process was stopped itself, it finds at most one message missing.
  if (++missing_ > kMostMissing && leave_router("it has not shown for a while that it runs")) return;
  router_looks_ = Timer(loop_, kRouterRunsEvery, [this] { look_at_router(); });
}

bool Agent::leave_router(const std::string& why) {
  auto connection = net::reach(options_.supervisor, secret_, control_options(), net::deadline_in(kAttachTime));
  log::info("launch", "the router is lost: {}; the supervisor {}", why,
            connection ? "is reached directly" : connection.error().what());
  if (!connection) return false;
  behind_router_ = false;
  connect(*std::move(connection));
  return true;
}

void Agent::on_received(Message message) {
  missing_ = 0;
  if (std::holds_alternative<RouterRuns>(message)) return;
  if (auto* const relayed = std::get_if<Relayed>(&message); relayed != nullptr && router_)
    return router_->pass_down(std::move(*relayed));
  if (const auto* const many = std::get_if<RelayedToMany>(&message); many != nullptr && router_)
    return router_->pass_down(*many);
  auto taken = upstream_.take(std::move(message));
  if (!taken) return on_closed(taken.error());
  if (*taken) on_message(std::move(**taken));
}

void Agent::on_message(Message message) {
  if (auto* job = std::get_if<StartJob>(&message)) {
    if (workers_.idle() && options_.unable.empty()) start_job(std::move(*job));
  } else if (const auto* taken = std::get_if<OutputTaken>(&message)) {
    upstream_.taken(taken->bytes);
  } else if (const auto* input = std::get_if<Input>(&message)) {
    workers_.give_input(input->bytes);
  } else if (const auto* signal = std::get_if<SignalWorkers>(&message)) {
    workers_.pass_on(signal->signal);
  } else if (const auto* order = std::get_if<StopWorkers>(&message)) {
    workers_.stop(*order);
  } else if (const auto* refused = std::get_if<Refused>(&message)) {
    exit_status_ = 1;
    log::error("launch", "not taken: {}", refused->why);
    if (workers_.waiting()) loop_.stop();
  } else if (const auto* wanted = std::get_if<LeasePorts>(&message)) {
    lease_ports(wanted->count);
  } else if (std::holds_alternative<AskStacks>(message)) {
    workers_.ask_stacks();
  } else if (const auto* question = std::get_if<ClockQuestion>(&message)) {
    upstream_.send(ClockAnswer{question->number, Clock::now().time_since_epoch() / std::chrono::nanoseconds(1)});
  } else if (auto* again = std::get_if<StartAgain>(&message)) {
    workers_.start_again(std::move(*again));
  } else if (const auto* without = std::get_if<GoOnWithout>(&message)) {
    workers_.go_on_without(without->rank);
  } else if (const auto* more = std::get_if<StartMore>(&message)) {
    workers_.start_more(more->worker);
  } else if (const auto* members = std::get_if<NewMembership>(&message)) {
    workers_.announce(members->epoch);
  } else if (const auto* kill = std::get_if<KillWorker>(&message)) {
    workers_.kill(kill->rank);
  } else if (const auto* finish = std::get_if<Finish>(&message)) {
    if (options_.own) {
      // A host that leaves has not failed, but its ranks may have saved because the whole job ends.
      exit_status_ = finish->status == 0 && workers_.have_saved() ? kRequeueStatus : finish->status;
      if (workers_.idle() && finish->status != 0 && !options_.quiet && options_.unable.empty())
        say(fmt::format("the job has ended with status {}; node 0 ({}) says why", finish->status, options_.place));
    }
    ends_ = workers_.idle();
    if (!ends_) workers_.kill_all();
    if (ends_ && router_) children_end_ = Timer(loop_, kChildrenEnd, [this] { loop_.stop(); });
  }
}

void Agent::start_job(StartJob job) {
  if (brings_environment(options_)) {
    std::error_code error;  // a missing folder is reported by check_host
    job.folder = std::filesystem::current_path(error).string();
    if (!std::filesystem::is_directory(job.run_folder, error)) job.run_folder.clear();
  }
  if (options_.own) {
    job.path = options_.own->path;
    job.arguments = options_.own->arguments;
    job.environment = options_.own->environment;
    job.folder = options_.own->folder;
    job.open_files = options_.own->open_files;
    job.ignored = options_.own->ignored;
    job.bind_to_cores = options_.own->bind_to_cores;
    host_index_ = parse_integer<int>(Environment(job.workers.front().environment).find("GROUP_RANK").value_or(""))
                      .value_or(host_index_);
    if (!options_.quiet) {
      say(fmt::format("{} of {}: {} here; output and logs are at node 0 ({})", own_name(), options_.nodes,
                      names_of(job.workers), options_.place));
    }
  }
  passed_on_ = false;
  told_times_ = 0;
  workers_.start(std::move(job));
}

void Agent::on_closed(std::optional<Error> error) {
  if (behind_router_ && !ends_ && leave_router(error ? error->what() : "it has ended")) return;
  if (router_) router_->close();
  if (workers_.finished()) return loop_.stop();
  if (workers_.waiting() && error && !net::passed(deadline_)) {
    log::info("launch", "not taken so far: {}; trying again", error->what());
    again_ = Timer(loop_, pause(), [this] { (void)come(); });
    return;
  }
  log::info("launch", "the supervisor is gone{}", error ? fmt::format(": {}", error->what()) : "");
  upstream_.lose();
  exit_status_ = 1;
  saves_ = workers_.running() && workers_.makes_room();
  if (options_.own)
    say(fmt::format("node 0 at {} is lost; {}", options_.place,
                    saves_ ? fmt::format("the ranks here have {} s to save", kTimeAlone / std::chrono::seconds(1))
                           : std::string("ending what runs here")));
  if (workers_.waiting()) return loop_.stop();
  if (saves_) return workers_.save_alone();
  workers_.kill_all();  // (reading on keeps the logs complete)
}

void Agent::on_signal() {
  bool ended = false;
  int told = 0;
  while (const auto signal = signals_.next()) {
    if (*signal == SIGCHLD) continue;
    if (*signal == SIGUSR1 || *signal == SIGUSR2) {  // sent by a batch system to all processes of its step
      workers_.pass_on(*signal);
      continue;
    }
    if (told_as_launcher(*signal) || told_to_make_room(*signal)) continue;
    // Ignored while ranks save: signals also come if the ssh connection is lost or a batch system ends the step.
    if (saves_ && (*signal == SIGTERM || *signal == SIGHUP) && ::getppid() == guard_) continue;
    ended = true;
    told = *signal;
  }
  workers_.reap();
  if (!ended) return;
  // The agent is being ended, or its guard is gone: the job must not go on unguarded.
  exit_status_ = 1;
  if (workers_.empty() || workers_.finished()) return loop_.stop();
  if (workers_.running() && !workers_.stopping()) {
    upstream_.send(
        Ends{::getppid() != guard_
                 ? fmt::format("the {} of {} was killed", options_.own ? "command" : "guard", sys::host_name())
                 : fmt::format("the agent of {} was told to end by {}", sys::host_name(), sys::signal_name(told))});
  }
  workers_.kill_all();
}

// A batch system tells all processes of a step to end, and kills them a while later. Ranks that save are given that
// time; the supervisor is notified, for ranks on other hosts. An elastic job may go on without this host.
bool Agent::told_to_make_room(int signal) {
  if (signal != SIGTERM || ::getppid() != guard_ || upstream_.lost()) return false;
  const bool elastic = !options_.own && workers_.elastic();
  if (!workers_.makes_room() && !elastic && !passed_on_) return false;
  // The guard passes on the signals that it gets, so the same signal twice is one request.
  if (!std::exchange(passed_on_, true) && workers_.running()) upstream_.send(Told{signal});
  return true;
}

// A signal to the launcher of a node is meant for the job, so the supervisor ends the job on all nodes. The third
// signal ends the launcher immediately.
bool Agent::told_as_launcher(int signal) {
  if (!options_.own || ::getppid() != guard_ || upstream_.lost() || !upstream_.connected()) return false;
  const auto now = Clock::now();
  if (told_at_ && now - *told_at_ < kOnePress) return true;
  told_at_ = now;
  if (++told_times_ > 2) return false;
  upstream_.send(Told{signal});
  return true;
}

void Agent::lease_ports(int count) {
  LeasedPorts answer;
  while (static_cast<int>(answer.ports.size()) < count) {
    auto lease = PortLease::take(static_cast<std::uint64_t>(::getpid()) + leases_.size());
    if (!lease) {
      answer.why = lease.error().what();
      break;
    }
    answer.ports.push_back(lease->port());
    leases_.push_back(*std::move(lease));
  }
  upstream_.send(answer);
}

using Clock = std::chrono::steady_clock;

/// Nothing of a job may be left 2 s after its supervisor's end, and the agent gets most of that time.
constexpr auto kAgentGrace = std::chrono::milliseconds(1200);
constexpr auto kSweepLimit = std::chrono::seconds(10);

/// Covers the time in which ranks save without a supervisor, and a second for the agent.
constexpr auto kSavingGrace = kTimeAlone + std::chrono::seconds(1);

/// Signal for the agent when the guard has to end. AsTerm: SIGTERM, which ends the agent; Unchanged: the same signal.
enum class Passes { AsTerm, Unchanged };

/// Forks `agent` into a child, waits for it, then ends every process that is left. If `lifeline_fd` ends, the agent has
/// a moment to end the job by itself, and longer if `saves` says that ranks save. Returns the agent's exit status. The
/// child gets SIGTERM if the guard dies.
int run_guarded(int lifeline_fd, const std::function<int()>& agent, const std::atomic<bool>& saves, Passes pass) {
  value_or_throw(sys::become_subreaper());
  const pid_t guard = ::getpid();
  std::optional<sys::SignalFd> signals = value_or_throw(sys::SignalFd::create(kAgentSignals));
  const pid_t child = ::fork();
  if (child < 0) raise(ErrorCode::Unavailable, "the agent: {}", sys::to_string(sys::SpawnFailure{errno, "fork"}));
  if (child == 0) {
    signals.reset();
    sys::lock_hidden_memory();
    if (::prctl(PR_SET_PDEATHSIG, SIGTERM) != 0 || ::getppid() != guard) return 1;
    return agent();
  }

  std::optional<sys::ExitStatus> ended;
  const OnReaped on_reaped = [&](pid_t pid, const sys::ExitStatus& status) {
    if (pid == child) ended = status;
  };
  std::optional<Clock::time_point> give_up;
  bool longer = false;
  while (true) {
    reap_children(on_reaped);
    if (ended) break;
    if (give_up && Clock::now() >= *give_up) {
      if (longer || !saves) break;
      longer = true;
      *give_up += kSavingGrace;
    }
    pollfd waited[2] = {{signals->fd(), POLLIN, 0}, {lifeline_fd, POLLIN, 0}};
    int timeout = -1;
    if (give_up) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*give_up - Clock::now());
      timeout = static_cast<int>(std::max<std::int64_t>(left.count(), 0));
    }
    if (::poll(waited, give_up ? 1 : 2, timeout) < 0 && errno != EINTR) break;
    while (const auto signal = signals->next()) {
      if (*signal == SIGCHLD) continue;
      const bool passes = pass == Passes::Unchanged || *signal == SIGUSR1 || *signal == SIGUSR2;
      ::kill(child, passes ? *signal : SIGTERM);  // the agent ends the job on SIGTERM
    }
    if (!give_up && waited[1].revents != 0) {
      char byte = 0;
      if (::read(lifeline_fd, &byte, 1) <= 0) give_up = Clock::now() + kAgentGrace;
    }
  }
  const auto stuck = sweep({}, kSweepLimit, on_reaped);
  if (!stuck.empty()) log::error("launch", "cannot end {}", describe_stuck(stuck));
  return ended && stuck.empty() ? ended->shell_status() : 1;
}

}  // namespace

int run_agent(const AgentOptions& options) {
  ::signal(SIGTERM, SIG_DFL);  // guard and agent end each other with it
  ::signal(SIGPIPE, SIG_IGN);  // a rank may end while its input is written; workers start with the default again
  // Shared by the guard and the agent.
  void* const shared =
      ::mmap(nullptr, sizeof(std::atomic<bool>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) raise(ErrorCode::Unavailable, "the agent: no memory to share with its guard");
  std::atomic<bool>& saves = *::new (shared) std::atomic<bool>(false);
  const auto agent = [&options, &saves] {
    value_or_throw(sys::become_subreaper());
    return Agent(options, options.secret.value(), saves).run();
  };
  return run_guarded(options.lifeline_fd, agent, saves, options.own ? Passes::Unchanged : Passes::AsTerm);
}

}  // namespace cohort::launch
