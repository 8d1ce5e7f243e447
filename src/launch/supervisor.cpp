#include "launch/supervisor.h"

#include "base/env.h"
#include "base/log.h"
#include "launch/channel.h"
#include "launch/console.h"
#include "launch/input_reader.h"
#include "launch/job_record.h"
#include "launch/plan.h"
#include "launch/port_lease.h"
#include "launch/post_mortem.h"
#include "launch/rank_environment.h"
#include "launch/run_folder.h"
#include "launch/starter.h"
#include "launch/sweep.h"
#include "net/socket.h"
#include "store/server.h"
#include "sys/cpus.h"
#include "sys/signals.h"
#include "sys/terminal.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <deque>
#include <list>
#include <memory>
#include <utility>

namespace cohort::launch {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Connections that have not said who they are yet.
constexpr std::size_t kMostStrangers = 64;
/// An agent has this long for what it does after everything has been killed.
constexpr auto kAgentEndLimit = std::chrono::seconds(15);

int terminal_columns() {
  winsize size{};
  for (const int fd : {1, 2}) {
    if (::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  }
  return 80;
}

std::string random_hex(std::size_t bytes) {
  const net::Secret noise = value_or_throw(net::Secret::generate());
  std::string text;
  for (const std::uint8_t byte : noise.bytes().first(bytes)) text += fmt::format("{:02x}", byte);
  return text;
}

class Supervisor {
 public:
  explicit Supervisor(const RunOptions& options);
  int run();

 private:
  enum class Stage { Starting, Running, Stopping, Ended };

  /// One agent, from its start to its end.
  struct Agent {
    PlannedHost host;
    AgentProcess process;
    Watch ended;  ///< its process has
    std::unique_ptr<Channel> channel;
    bool started = false;
    bool all_gone = false;
    bool process_gone = false;
    int threads = 0;
  };
  struct Stranger {
    std::unique_ptr<Channel> channel;
    bool leaving = false;
    Timer limit;
  };

  void plan();
  void prepare();
  void start_agents();
  void accept_agents();
  void on_hello(Stranger& stranger, const Hello& hello);
  void on_message(Agent& agent, Message message);
  void on_channel_closed(Agent& agent, const std::optional<Error>& error);
  void on_agent_process_ended(Agent& agent);
  void on_started(Agent& agent, const Started& started);
  void on_exited(const Exited& exited);
  void on_signal(int signal);
  void on_console();
  void show(const std::vector<Text>& texts);
  void say(const std::string& text);
  void stop(const std::string& reason, int signal, milliseconds grace);
  void fail_start(const std::string& why);
  void check_end();
  void finish();
  void write_record();
  int running_ranks() const;
  bool succeeded() const;

  const RunOptions& options_;
  Plan plan_;
  Program program_;
  Environment environment_;
  std::string job_id_;
  std::uint64_t open_files_ = 0;
  RunFolder folder_;
  JobRecord record_;

  Loop loop_;
  sys::TerminalGuard terminal_{0};
  std::optional<sys::SignalFd> signals_;
  Watch signal_watch_;
  std::optional<net::Secret> secret_;
  sys::UniqueFd listener_;
  Watch listener_watch_;
  std::unique_ptr<store::StoreServer> store_;
  std::optional<PortLease> port_;
  LocalStarter starter_;
  std::vector<pid_t> spared_;
  std::vector<std::unique_ptr<Agent>> agents_;
  std::list<Stranger> strangers_;
  Console console_;
  Watch console_watch_;
  std::optional<OutputView> view_;
  std::unique_ptr<InputReader> input_;
  std::deque<std::pair<Agent*, std::uint64_t>> shown_;  ///< weights that the console has not written yet
  std::uint64_t credited_ = 0;
  std::vector<Ending> endings_;

  Stage stage_ = Stage::Starting;
  std::string stop_reason_;
  std::string start_failure_;
  std::optional<int> stop_status_;  ///< the exit status, where it is not a rank's
  bool agent_lost_ = false;
  bool quiet_end_ = false;
  int interrupts_ = 0;
  Clock::time_point started_at_ = Clock::now();
  Timer start_limit_;
  Timer job_limit_;
  Timer notice_;
  Timer end_limit_;
  Timer partial_;
};

Supervisor::Supervisor(const RunOptions& options) : options_(options) {}

void Supervisor::plan() {
  environment_ = Environment::current();
  for (const std::string& assignment : options_.environment) environment_.set(assignment);
  if (!environment_.find("PYTHONUNBUFFERED")) environment_.set("PYTHONUNBUFFERED", "1");
  program_ = value_or_throw(resolve_program(options_.program, environment_));
  const std::string host = sys::host_name();
  const int processes = options_.processes == 0 ? sys::usable_cores() : options_.processes;
  plan_ = value_or_throw(make_plan({{host, kMostProcesses}}, processes));

  const auto [before, now] = sys::raise_open_files_limit();
  open_files_ = before;
  // Two pipes, two logs and a pidfd for each rank.
  const auto needed = 5 * static_cast<std::uint64_t>(processes) + 64;
  if (now != 0 && needed > now) {
    raise(ErrorCode::Unavailable,
          "{} processes on one host need {} open files and the limit is {}; raise it (ulimit -Hn {}) or start fewer",
          processes, needed, now, needed);
  }
}

void Supervisor::prepare() {
  ::signal(SIGPIPE, SIG_IGN);
  value_or_throw(sys::become_subreaper());
  spared_ = sys::descendants(::getpid());  // of a shell that became us with `exec`
  signals_.emplace(
      value_or_throw(sys::SignalFd::create({SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT})));
  secret_ = value_or_throw(net::Secret::generate());
  listener_ = value_or_throw(net::listen_on({{"127.0.0.1", 0}, {}}));
  const std::string id = random_hex(6);
  job_id_ = fmt::format("{}-{}", program_.name, id);

  signal_watch_ = Watch(loop_, signals_->fd());
  signal_watch_.on_readable([this] {
    while (const auto signal = signals_->next()) on_signal(*signal);
  });
  listener_watch_ = Watch(loop_, listener_.get());
  listener_watch_.on_readable([this] { accept_agents(); });
  console_watch_ = Watch(loop_, console_.event_fd());
  console_watch_.on_readable([this] { on_console(); });

  RunFolderRequest request;
  request.path = options_.run_folder;
  request.program_name = program_.name;
  request.id = id.substr(0, 4);
  folder_ = value_or_throw(make_run_folder(request));

  start_agents();  // its process starts while we go on
  port_ = value_or_throw(PortLease::take(std::hash<std::string>{}(job_id_)));
  store::StoreServerOptions store_options;
  store_options.secret = *secret_;
  store_ = std::make_unique<store::StoreServer>(store_options);

  ViewOptions view;
  view.style = options_.prefix;
  view.hosts.resize(static_cast<std::size_t>(plan_.world_size));
  for (const PlannedHost& host : plan_.hosts) {
    for (int i = 0; i < host.ranks; ++i) view.hosts[static_cast<std::size_t>(host.first_rank + i)] = host.name;
  }
  view.terminal = {::isatty(1) != 0, ::isatty(2) != 0};
  view.colour = {sys::wants_colour(1), sys::wants_colour(2)};
  view.columns = terminal_columns;
  view_.emplace(std::move(view));

  record_.job_id = job_id_;
  record_.command_line = options_.command_line;
  record_.program = program_;
  record_.plan = plan_;
  record_.master_port = port_->port();
  record_.pids.resize(static_cast<std::size_t>(plan_.world_size));
  record_.start = utc_now();
}

void Supervisor::start_agents() {
  const net::Endpoint here = value_or_throw(net::local_endpoint(listener_.get()));
  for (const PlannedHost& host : plan_.hosts) {
    Agent& agent = *agents_.emplace_back(std::make_unique<Agent>());
    agent.host = host;
    agent.process = value_or_throw(starter_.start({host, here}, *secret_));
    agent.ended = Watch(loop_, agent.process.process.pidfd.get());
    agent.ended.on_readable([this, &agent] { on_agent_process_ended(agent); });
  }
  start_limit_ = Timer(loop_, options_.start_timeout, [this] {
    std::string missing;
    for (const auto& agent : agents_) {
      if (!agent->started) missing += (missing.empty() ? "" : ", ") + agent->host.name;
    }
    fail_start(fmt::format("no sign of running ranks from {} after {:.0f} s", missing,
                           std::chrono::duration<double>(options_.start_timeout).count()));
  });
}

void Supervisor::accept_agents() {
  while (listener_) {
    auto socket = net::accept_one(listener_.get());
    if (!socket || !*socket) return;
    strangers_.remove_if([](const Stranger& stranger) { return stranger.leaving || stranger.channel == nullptr; });
    if (strangers_.size() >= kMostStrangers) continue;  // closes it
    auto connection =
        net::SecureConnection::with_secret(std::move(**socket), net::Role::Server, *secret_, control_options());
    if (!connection) continue;
    Stranger& stranger = strangers_.emplace_back();
    stranger.channel = std::make_unique<Channel>(
        loop_, *std::move(connection),
        [this, &stranger](Message message) {
          if (const auto* hello = std::get_if<Hello>(&message)) on_hello(stranger, *hello);
        },
        [&stranger](const std::optional<Error>& error) {
          if (error) log::info("launch", "a connection to the supervisor failed: {}", error->what());
          stranger.leaving = true;
        });
    stranger.limit = Timer(loop_, std::chrono::seconds(5), [&stranger] { stranger.leaving = true; });
  }
}

void Supervisor::on_hello(Stranger& stranger, const Hello& hello) {
  const auto found = std::find_if(agents_.begin(), agents_.end(),
                                  [&hello](const auto& agent) { return agent->host.index == hello.host_index; });
  if (hello.protocol != kProtocol || found == agents_.end() || (*found)->channel != nullptr) {
    if (hello.protocol != kProtocol) {
      fail_start(
          fmt::format("the agent of {} is Cohort {} (protocol {}), this is protocol {}: install one version everywhere",
                      hello.host, hello.version, hello.protocol, kProtocol));
    }
    return;
  }
  Agent& agent = **found;
  agent.channel = std::move(stranger.channel);
  // The channel is calling us at this moment; from the next message on it talks to the agent.
  agent.channel->redirect([this, &agent](Message message) { on_message(agent, std::move(message)); },
                          [this, &agent](const std::optional<Error>& error) { on_channel_closed(agent, error); });
  stranger.limit = Timer();
  if (std::all_of(agents_.begin(), agents_.end(), [](const auto& each) { return each->channel != nullptr; })) {
    listener_watch_ = Watch();
    listener_.reset();
  }
  if (stage_ != Stage::Starting) return agent.channel->send(Finish{});

  JobFacts facts;
  facts.job_id = job_id_;
  facts.run_folder = folder_.path;
  facts.store = net::to_string(store_->endpoint().tcp);
  facts.master_address = "127.0.0.1";
  facts.master_port = port_->port();
  StartJob job;
  job.path = program_.path;
  job.arguments = program_.arguments;
  job.environment = environment_.assignments();
  char* folder = ::get_current_dir_name();
  if (folder != nullptr) job.folder = folder;
  std::free(folder);  // NOLINT: get_current_dir_name allocates with malloc
  job.log_folder = folder_.path + "/logs";
  job.input = InputReader::worth_reading(0);
  job.open_files = open_files_;
  for (int rank = agent.host.first_rank; rank < agent.host.first_rank + agent.host.ranks; ++rank) {
    job.workers.push_back({rank, rank_environment(plan_, agent.host, rank, facts)});
  }
  agent.channel->send(std::move(job));
}

void Supervisor::on_message(Agent& agent, Message message) {
  if (auto* output = std::get_if<Output>(&message)) {
    if (output->rank < 0 || output->rank >= plan_.world_size) return;
    const auto size = static_cast<std::uint64_t>(output->bytes.size());
    show(view_->feed(output->rank, output->stream, output->bytes, Clock::now()));
    shown_.emplace_back(&agent, size);
    console_.write(1, {}, size);
    if (view_->has_partial() && !partial_) {
      partial_ = Timer(loop_, milliseconds(100), [this] {
        partial_ = Timer();
        show(view_->show_partial());
      });
    }
  } else if (const auto* started = std::get_if<Started>(&message)) {
    on_started(agent, *started);
  } else if (const auto* failed = std::get_if<StartFailed>(&message)) {
    const std::string where =
        failed->rank >= 0 ? fmt::format("rank {} on {}", failed->rank, agent.host.name) : agent.host.name;
    fail_start(fmt::format("cannot start {}: {}: {}", program_.path, where, failed->reason));
  } else if (const auto* exited = std::get_if<Exited>(&message)) {
    on_exited(*exited);
  } else if (const auto* taken = std::get_if<InputTaken>(&message)) {
    if (input_) input_->taken(taken->bytes);
  } else if (const auto* trouble = std::get_if<Trouble>(&message)) {
    say(fmt::format("{}: {}", agent.host.name, trouble->text));
  } else if (const auto* gone = std::get_if<AllGone>(&message)) {
    agent.all_gone = true;
    if (!gone->stuck.empty()) {
      say(fmt::format("{}: even SIGKILL does not end {}; the host may have to be restarted", agent.host.name,
                      gone->stuck));
      if (!stop_status_) stop_status_ = 1;
    }
    agent.channel->send(Finish{});
    check_end();
  }
}

void Supervisor::on_started(Agent& agent, const Started& started) {
  if (started.pids.size() != static_cast<std::size_t>(agent.host.ranks)) return;
  agent.started = true;
  agent.threads = started.threads;
  std::copy(started.pids.begin(), started.pids.end(), record_.pids.begin() + agent.host.first_rank);
  if (stage_ != Stage::Starting) return;
  if (!std::all_of(agents_.begin(), agents_.end(), [](const auto& each) { return each->started; })) return;
  stage_ = Stage::Running;
  start_limit_ = Timer();
  started_at_ = Clock::now();
  record_.threads = agent.threads;
  if (!options_.quiet) {
    const std::string threads =
        agent.threads > 0 ? fmt::format(", {} thread{} each", agent.threads, agent.threads == 1 ? "" : "s") : "";
    say(fmt::format("{}{}, run {}", to_string(plan_), threads, folder_.shown));
  }
  write_record();
  if (options_.timeout) {
    job_limit_ = Timer(loop_, *options_.timeout, [this] {
      if (!stop_status_) stop_status_ = kTimeoutStatus;
      stop(fmt::format("the time limit of {:g} s is over", std::chrono::duration<double>(*options_.timeout).count()),
           SIGTERM, options_.grace);
    });
  }
  if (InputReader::worth_reading(0)) {
    Agent* const first = agents_.front().get();
    input_ = std::make_unique<InputReader>(
        loop_, 0, [first](std::string bytes) { first->channel->send(Input{std::move(bytes)}); });
  }
}

void Supervisor::on_exited(const Exited& exited) {
  if (exited.rank < 0 || exited.rank >= plan_.world_size) return;
  Ending ending;
  ending.rank = exited.rank;
  for (const PlannedHost& host : plan_.hosts) {
    if (exited.rank >= host.first_rank) ending.host = host.name;
  }
  ending.pid = record_.pids[static_cast<std::size_t>(exited.rank)];
  ending.status = exited.status;
  ending.before_stop = exited.before_stop;
  ending.out_of_memory = exited.out_of_memory;
  ending.after_seconds = static_cast<double>(exited.after_ns) * 1e-9;
  ending.last_stderr = exited.last_stderr;
  endings_.push_back(std::move(ending));
  if (exited.rank == 0) input_.reset();
  if (!exited.status.success() && stage_ == Stage::Running) {
    stop(fmt::format("rank {} failed: {}", exited.rank, sys::to_string(exited.status)), SIGTERM, options_.grace);
  }
}

void Supervisor::stop(const std::string& reason, int signal, milliseconds grace) {
  if (stage_ == Stage::Ended) return;
  if (stage_ != Stage::Stopping) {
    stage_ = Stage::Stopping;
    stop_reason_ = reason;
    // Most jobs end at once; who has to wait is told what for.
    notice_ = Timer(loop_, milliseconds(1000), [this, grace] {
      if (stage_ != Stage::Stopping || quiet_end_) return;
      say(fmt::format("{}; waiting up to {:g} s for {} rank{} to end", stop_reason_,
                      std::chrono::duration<double>(grace).count(), running_ranks(), running_ranks() == 1 ? "" : "s"));
    });
  }
  start_limit_ = Timer();
  job_limit_ = Timer();
  input_.reset();
  for (const auto& agent : agents_) {
    if (agent->channel == nullptr) {
      agent->process.lifeline.reset();  // it has nothing to end but itself
    } else if (!agent->started) {
      agent->channel->send(Finish{});
    } else {
      agent->channel->send(StopWorkers{signal, static_cast<std::uint32_t>(grace.count())});
    }
  }
  end_limit_ = Timer(loop_, grace + kAgentEndLimit, [this] {
    say("an agent does not answer; ending its processes from here");
    agent_lost_ = true;
    finish();
  });
  check_end();
}

void Supervisor::fail_start(const std::string& why) {
  if (!stop_status_) stop_status_ = kCannotStartStatus;
  start_failure_ = why;
  stop(why, SIGKILL, milliseconds(0));
}

void Supervisor::on_channel_closed(Agent& agent, const std::optional<Error>& error) {
  if (agent.all_gone || stage_ == Stage::Ended) return;
  agent_lost_ = true;
  agent.process.lifeline.reset();  // its guard, if it lives, ends what is left
  if (stop_reason_.empty()) {
    say(fmt::format("the agent of {} is lost{}; ending the job", agent.host.name,
                    error ? fmt::format(" ({})", error->what()) : ""));
  }
  if (!stop_status_) stop_status_ = 1;
  stop(fmt::format("the agent of {} was lost", agent.host.name), SIGKILL, milliseconds(0));
}

void Supervisor::on_agent_process_ended(Agent& agent) {
  agent.ended = Watch();
  agent.process_gone = true;
  if (!agent.all_gone && stage_ != Stage::Ended) {
    // What it said last may still be on its way; an agent whose guard was killed ends the job and says so.
    if (agent.channel == nullptr || agent.channel->closed()) {
      agent_lost_ = true;
      if (!stop_status_) stop_status_ = 1;
      if (stop_reason_.empty())
        say(fmt::format("the agent of {} ended before the job; ending the job", agent.host.name));
      if (stage_ != Stage::Stopping)
        stop(fmt::format("the agent of {} was lost", agent.host.name), SIGKILL, milliseconds(0));
    } else if (stage_ != Stage::Stopping) {
      if (!stop_status_) stop_status_ = 1;
      say(fmt::format("the guard of {} was killed; ending the job", agent.host.name));
      stop(fmt::format("the guard of {} was killed", agent.host.name), SIGKILL, milliseconds(0));
    }
  }
  check_end();
}

void Supervisor::on_signal(int signal) {
  const auto broadcast = [this](int number) {
    for (const auto& agent : agents_) {
      if (agent->channel != nullptr) agent->channel->send(SignalWorkers{number});
    }
  };
  switch (signal) {
    case SIGUSR1:
    case SIGUSR2: return broadcast(signal);
    case SIGTSTP:
      broadcast(SIGSTOP);
      ::raise(SIGSTOP);
      return;
    case SIGCONT:
      broadcast(SIGCONT);
      if (input_) input_->look_again();
      return;
    default: break;
  }
  if (stage_ == Stage::Ended) {
    quiet_end_ = true;
    return loop_.stop();  // output that nobody takes is given up
  }
  ++interrupts_;
  if (!stop_status_ && stage_ != Stage::Stopping) stop_status_ = 128 + signal;
  if (interrupts_ > 1) return stop(stop_reason_, SIGKILL, milliseconds(0));
  stop(fmt::format("told to end by {}", sys::signal_name(signal)), signal, options_.grace);
}

void Supervisor::on_console() {
  console_.acknowledge();
  const std::uint64_t written = console_.written();
  std::vector<std::pair<Agent*, std::uint64_t>> credits;
  while (!shown_.empty() && credited_ + shown_.front().second <= written) {
    const auto [agent, weight] = shown_.front();
    shown_.pop_front();
    credited_ += weight;
    if (!credits.empty() && credits.back().first == agent)
      credits.back().second += weight;
    else
      credits.emplace_back(agent, weight);
  }
  for (const auto& [agent, weight] : credits) agent->channel->send(OutputTaken{weight});
  if (console_.reader_gone(1) && stage_ == Stage::Running) {
    quiet_end_ = true;
    stop_status_ = 128 + SIGPIPE;
    stop("nobody reads stdout any more", SIGTERM, options_.grace);
  }
  if (stage_ == Stage::Ended && console_.idle()) loop_.stop();
}

void Supervisor::show(const std::vector<Text>& texts) {
  for (const Text& text : texts) console_.write(text.fd, text.bytes);
}

void Supervisor::say(const std::string& text) { console_.write(2, "cohort: " + text + "\n"); }

int Supervisor::running_ranks() const { return plan_.world_size - static_cast<int>(endings_.size()); }

bool Supervisor::succeeded() const {
  return std::all_of(endings_.begin(), endings_.end(), [](const Ending& ending) { return ending.status.success(); }) &&
         endings_.size() == static_cast<std::size_t>(plan_.world_size);
}

void Supervisor::check_end() {
  if (stage_ == Stage::Ended) return;
  const bool done = std::all_of(agents_.begin(), agents_.end(), [](const auto& agent) {
    return agent->process_gone && (agent->all_gone || agent->channel == nullptr || agent->channel->closed());
  });
  if (done) finish();
}

void Supervisor::finish() {
  stage_ = Stage::Ended;
  end_limit_ = Timer();
  notice_ = Timer();
  input_.reset();
  // What a killed agent has left was handed to us by the kernel.
  const auto stuck = sweep(spared_, std::chrono::seconds(10), {});
  if (!stuck.empty()) say(fmt::format("even SIGKILL does not end {}", describe_stuck(stuck)));
  show(view_->finish());

  const auto failure = first_failure(endings_);
  const double seconds = std::chrono::duration<double>(Clock::now() - started_at_).count();
  int status = stop_status_.value_or(0);
  if (!start_failure_.empty()) {
    say(start_failure_);
  } else if (!stop_status_ && failure) {
    status = failure->status.shell_status();
    PostMortem post_mortem;
    post_mortem.first = *failure;
    post_mortem.world_size = plan_.world_size;
    post_mortem.ended_well = static_cast<int>(std::count_if(endings_.begin(), endings_.end(), [](const Ending& each) {
      return each.before_stop && each.status.success();
    }));
    post_mortem.log_folder = folder_.shown + "/logs";
    post_mortem.colour = sys::wants_colour(2);
    console_.write(2, to_string(post_mortem));
    record_.failure = failure;
  } else if (!stop_status_ && !succeeded()) {
    status = 1;
    say("the job ended without word from all ranks");
  } else if (stop_status_ && !quiet_end_) {
    say(fmt::format("{}, after {:.1f} s; logs in {}/logs", stop_reason_.empty() ? "ended" : stop_reason_, seconds,
                    folder_.shown));
  }
  stop_status_ = status;
  record_.end = utc_now();
  record_.exit_status = status;
  record_.reason = stop_reason_;
  write_record();
  if (console_.idle()) loop_.stop();
}

void Supervisor::write_record() {
  if (auto written = write_job_record(folder_, to_json(record_)); !written) say(written.error().what());
}

int Supervisor::run() {
  plan();
  try {
    prepare();
  } catch (...) {
    for (const auto& agent : agents_) agent->process.lifeline.reset();
    sweep(spared_, std::chrono::seconds(5), {});
    throw;
  }
  loop_.run();
  return stop_status_.value_or(1);
}

}  // namespace

int run_job(const RunOptions& options) {
  Supervisor supervisor(options);
  return supervisor.run();
}

}  // namespace cohort::launch
