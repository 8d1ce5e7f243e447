#include "launch/agent.h"

#include "base/env.h"
#include "base/log.h"
#include "base/parse.h"
#include "launch/binding.h"
#include "launch/channel.h"
#include "launch/environment.h"
#include "launch/guard.h"
#include "launch/host_check.h"
#include "launch/host_environment.h"
#include "launch/invitation.h"
#include "launch/job_setup.h"
#include "launch/kept_signals.h"
#include "launch/port_lease.h"
#include "launch/sweep.h"
#include "launch/version.h"
#include "launch/worker.h"
#include "net/reach.h"
#include "sys/cpus.h"
#include "sys/signals.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::launch {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kReportEvery = std::chrono::seconds(1);
/// For a rank to write its stacks.
constexpr auto kStacksTime = std::chrono::milliseconds(500);
/// By hand, an agent may be there before its supervisor.
constexpr auto kTryAgain = std::chrono::milliseconds(200);
constexpr auto kStuckLimit = std::chrono::seconds(10);

class Agent {
 public:
  Agent(const AgentOptions& options, net::Secret secret);
  int run();

 private:
  enum class Stage { Waiting, Running, Sweeping, Finished };

  void on_message(Message message);
  void on_closed(std::optional<Error> error);
  void on_signal();
  bool told_to_make_room(int signal);
  void pass_on(int signal);
  void start_job(StartJob job);
  Result<void> start_workers(const StartJob& job);
  void stop(const StopWorkers& order);
  void kill_all();
  void reap();
  void watch_for_dying();
  void report_exit(Worker& worker, const sys::ExitStatus& status);
  bool makes_room() const;
  void send_reports();
  void report_regularly();
  void ask_stacks();
  void forward(Output output);
  void sweep_further();
  void all_gone(const std::string& stuck);

  const AgentOptions& options_;
  net::Secret secret_;
  const pid_t guard_ = ::getppid();
  Loop loop_;
  sys::SignalFd signals_;
  Watch signal_watch_;
  std::unique_ptr<Channel> channel_;
  std::optional<PortLease> port_;  ///< MASTER_PORT, where the supervisor cannot hold it
  std::string run_folder_;         ///< made here, so removed if nothing was put into it
  Stage stage_ = Stage::Waiting;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::size_t alive_ = 0;
  std::size_t unacknowledged_ = 0;
  bool paused_ = false;
  bool stopping_ = false;
  bool lost_supervisor_ = false;
  std::optional<Clock::time_point> grace_end_;
  Clock::time_point started_at_;
  Clock::time_point sweep_since_;
  std::uint32_t swept_ = 0;
  std::optional<std::uint64_t> out_of_memory_before_;
  KeptSignals kept_signals_{loop_, workers_, [this](std::string text) { channel_->send(Trouble{std::move(text)}); }};
  bool passed_on_ = false;  ///< the supervisor knows that somebody told us to end
  Timer grace_;
  Timer reports_;
  Timer stacks_;
  Timer dying_;
  Timer sweeping_;
  int exit_status_ = 0;
};

Agent::Agent(const AgentOptions& options, net::Secret secret)
    : options_(options),
      secret_(std::move(secret)),
      signals_(value_or_throw(sys::SignalFd::create({SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}))),
      signal_watch_(loop_, signals_.fd()) {}

int Agent::run() {
  // A log that reaches the limit of file size is trouble with a log, not the end of the job.
  ::signal(SIGXFSZ, SIG_IGN);
  const net::Deadline deadline = net::deadline_in(options_.connect_timeout);
  auto connection = net::reach(options_.supervisor, secret_, control_options(), deadline);
  while (!connection && options_.patient && connection.error().code() == ErrorCode::Unavailable &&
         !net::passed(deadline)) {
    std::this_thread::sleep_for(kTryAgain);
    auto again = net::reach(options_.supervisor, secret_, control_options(), deadline);
    // What the end of the time cut short says less than what was found before.
    if (!again && net::passed(deadline)) break;
    connection = std::move(again);
  }
  if (!connection) {
    raise(connection.error().code(), "the agent of {} does not reach the supervisor: {}", sys::host_name(),
          connection.error().what());
  }
  channel_ = std::make_unique<Channel>(
      loop_, *std::move(connection), [this](Message message) { on_message(std::move(message)); },
      [this](std::optional<Error> error) { on_closed(std::move(error)); });
  Hello hello;
  hello.version = kVersion;
  hello.host_index = options_.host_index;
  hello.host = options_.host_name.empty() ? sys::host_name() : options_.host_name;
  hello.build = own_announcement().build;
  hello.pid = static_cast<std::int32_t>(::getpid());
  hello.cores = sys::usable_cores();
  if (options_.elsewhere) {
    channel_->watch_link(options_.host_timeout);
    if (options_.host_index <= 0) port_ = value_or_throw(PortLease::take(static_cast<std::uint64_t>(::getpid())));
    if (port_) hello.free_port = port_->port();
  }
  channel_->send(hello);
  signal_watch_.on_readable([this] { on_signal(); });
  loop_.run();
  return exit_status_;
}

void Agent::on_message(Message message) {
  if (auto* job = std::get_if<StartJob>(&message)) {
    if (stage_ == Stage::Waiting) start_job(std::move(*job));
  } else if (const auto* taken = std::get_if<OutputTaken>(&message)) {
    unacknowledged_ -= std::min<std::size_t>(unacknowledged_, taken->bytes);
    if (paused_ && unacknowledged_ < kOutputWindow / 2) {
      paused_ = false;
      for (auto& worker : workers_) worker->resume_reading();
    }
  } else if (const auto* input = std::get_if<Input>(&message)) {
    if (!workers_.empty()) workers_.front()->give_input(input->bytes);
  } else if (const auto* signal = std::get_if<SignalWorkers>(&message)) {
    pass_on(signal->signal);
  } else if (const auto* order = std::get_if<StopWorkers>(&message)) {
    stop(*order);
  } else if (const auto* refused = std::get_if<Refused>(&message)) {
    exit_status_ = 1;
    log::error("launch", "not taken: {}", refused->why);
    if (stage_ == Stage::Waiting) loop_.stop();
  } else if (std::holds_alternative<AskStacks>(message)) {
    ask_stacks();
  } else if (std::holds_alternative<Finish>(message)) {
    if (stage_ == Stage::Waiting || stage_ == Stage::Finished)
      loop_.stop();
    else
      kill_all();
  }
}

void Agent::on_closed(std::optional<Error> error) {
  if (stage_ == Stage::Finished) return loop_.stop();
  log::info("launch", "the supervisor is gone{}", error ? fmt::format(": {}", error->what()) : "");
  lost_supervisor_ = true;
  exit_status_ = 1;
  if (stage_ == Stage::Waiting) return loop_.stop();
  // Nobody takes output any more; reading on keeps the logs complete.
  unacknowledged_ = 0;
  paused_ = false;
  kill_all();
}

void Agent::on_signal() {
  bool ended = false;
  int told = 0;
  while (const auto signal = signals_.next()) {
    if (*signal == SIGCHLD) continue;
    if (*signal == SIGUSR1 || *signal == SIGUSR2) {  // a batch system's, to all processes of its step
      pass_on(*signal);
      continue;
    }
    if (told_to_make_room(*signal)) continue;
    ended = true;
    told = *signal;
  }
  reap();
  if (!ended) return;
  // Somebody ends the agent, or its guard is gone: the job must not go on unguarded.
  exit_status_ = 1;
  if (workers_.empty()) return loop_.stop();
  if (stage_ == Stage::Running && !stopping_) {
    channel_->send(Ends{::getppid() != guard_ ? fmt::format("the guard of {} was killed", sys::host_name())
                                              : fmt::format("the agent of {} was told to end by {}", sys::host_name(),
                                                            sys::signal_name(told))});
  }
  kill_all();
}

void Agent::pass_on(int signal) {
  if (signal == SIGUSR1 || signal == SIGUSR2) return kept_signals_.pass_on(signal);
  for (auto& worker : workers_) worker->signal(signal);
}

// A batch system tells all processes of a step to end, and kills them a while later: ranks that save are given that
// time, and those on other hosts have to hear of it.
bool Agent::told_to_make_room(int signal) {
  if (signal != SIGTERM || ::getppid() != guard_ || lost_supervisor_) return false;
  if (!makes_room() && !passed_on_) return false;
  // The guard passes on what it is told itself: the same twice is one request.
  if (!std::exchange(passed_on_, true) && stage_ == Stage::Running) channel_->send(Told{signal});
  return true;
}

// Ranks that were told at the same moment may have saved, and even ended, before it is asked.
bool Agent::makes_room() const {
  return std::any_of(workers_.begin(), workers_.end(),
                     [](const auto& worker) { return worker->saves_when_asked() || worker->makes_room(); });
}

void Agent::start_job(StartJob job) {
  stage_ = Stage::Running;
  out_of_memory_before_ = sys::out_of_memory_kills();
  if (auto started = start_workers(job); !started) {
    // Whatever runs already is not a job: end it before anything is said.
    swept_ = 0;
    const auto stuck = sweep({}, std::chrono::seconds(2), {});
    workers_.clear();
    channel_->send(StartFailed{started.error().context().rank, started.error().what()});
    stage_ = Stage::Finished;
    channel_->send(AllGone{0, describe_stuck(stuck)});
  }
}

Result<void> Agent::start_workers(const StartJob& job) {
  const auto fail_for = [](int rank, const Error& error) {
    ErrorContext context;
    context.rank = rank;
    return tl::unexpected(Error(error.code(), error.what(), context));
  };
  if (job.elsewhere) {
    auto made = check_host(job);
    if (!made) return tl::unexpected(made.error());
    if (*made) run_folder_ = job.run_folder;
  }
  if (!job.log_folder.empty() && ::mkdir(job.log_folder.c_str(), 0777) != 0 && errno != EEXIST) {
    return fail(ErrorCode::Io, "folder {}: {}", job.log_folder, errno_text(errno));
  }
  auto secret_file = secret_.to_sealed_memfd();
  if (!secret_file) return tl::unexpected(secret_file.error());

  sys::SpawnOptions program;
  program.path = job.path;
  program.arguments = job.arguments;
  program.folder = job.folder;
  // Its own group, to be signalled as one, but the agent's session: where the kernel groups what it schedules by
  // session (autogroup), ranks that share cores could otherwise not yield to each other.
  program.group = sys::Group::Own;
  program.parent_death_signal = SIGKILL;
  program.open_files = job.open_files;

  Environment environment(job.environment);
  if (job.elsewhere) {
    environment = environment_there(environment, Environment::current());
    environment.set("PWD", job.folder);
  }
  const int threads = threads_of(sys::usable_cores(), static_cast<int>(job.workers.size()));
  std::vector<std::vector<int>> shares(job.workers.size());
  if (job.bind_to_cores) {
    auto shared = share_cores(sys::cores_of_process(), static_cast<int>(job.workers.size()));
    if (!shared) return tl::unexpected(shared.error());
    shares = *std::move(shared);
  }
  if (!environment.find(env::kOmpNumThreads)) environment.set(env::kOmpNumThreads, std::to_string(threads));
  environment.set(env::kSecretFd, std::to_string(kWorkerSecretFd));

  Worker::Events events;
  events.output = [this](Output output) { forward(std::move(output)); };
  events.trouble = [this](std::string text) { channel_->send(Trouble{std::move(text)}); };
  events.input_taken = [this](std::size_t bytes) { channel_->send(InputTaken{bytes}); };
  for (const WorkerPlan& plan : job.workers) {
    auto& worker = *workers_.emplace_back(std::make_unique<Worker>(loop_, plan.rank, job.tail_lines, events));
    if (auto ready = worker.prepare(job.log_folder, job.input && plan.rank == 0); !ready) {
      return fail_for(plan.rank, ready.error());
    }
    Environment own = environment;
    for (const std::string& assignment : plan.environment) own.set(assignment);
    program.inherited = {{secret_file->get(), kWorkerSecretFd}};
    if (worker.status_fd() >= 0) {
      own.set(env::kStatusFd, std::to_string(kWorkerStatusFd));
      program.inherited.emplace_back(worker.status_fd(), kWorkerStatusFd);
    }
    program.environment = own.assignments();
    program.processors = shares[workers_.size() - 1];
    if (auto started = worker.start(program); !started) return fail_for(plan.rank, started.error());
  }
  started_at_ = Clock::now();
  Started report;
  report.threads = parse_integer<std::int32_t>(environment.find(env::kOmpNumThreads).value_or("")).value_or(0);
  for (auto& worker : workers_) {
    if (auto running = worker->confirm(); !running) return fail_for(worker->rank(), running.error());
    report.pids.push_back(static_cast<std::int32_t>(worker->pid()));
  }
  alive_ = workers_.size();
  channel_->send(report);
  watch_for_dying();
  reports_ = Timer(loop_, kReportEvery, [this] { report_regularly(); });
  reap();  // some may have ended before anyone looked
  return {};
}

void Agent::forward(Output output) {
  if (lost_supervisor_) return;
  unacknowledged_ += output.bytes.size();
  channel_->send(std::move(output));
  if (!paused_ && unacknowledged_ >= kOutputWindow) {
    paused_ = true;
    for (auto& worker : workers_) worker->pause_reading();
  }
}

void Agent::reap() {
  reap_children([this](pid_t pid, const sys::ExitStatus& status) {
    for (auto& worker : workers_) {
      if (worker->pid() != pid || !worker->alive()) continue;
      worker->set_reaped();
      --alive_;
      report_exit(*worker, status);
      return;
    }
  });
  if (stage_ == Stage::Running && !workers_.empty() && alive_ == 0) {
    stage_ = Stage::Sweeping;
    dying_ = Timer();
    sweep_since_ = Clock::now();
    sweep_further();
  } else if (stage_ == Stage::Sweeping) {
    sweep_further();
  }
}

void Agent::watch_for_dying() {
  // The kernel frees a dying process's memory before it tells the parent, which takes 60 ms per GiB and more; the
  // process's flags show it at once.
  for (auto& worker : workers_) {
    if (!worker->alive() || worker->reported) continue;
    const auto stat = sys::process_stat(worker->pid());
    if (stat && stat->exiting && stat->exit_word != 0)
      report_exit(*worker, sys::exit_status_from_wait(stat->exit_word));
  }
  const milliseconds pause(std::max<std::size_t>(100, 2 * workers_.size()));
  dying_ = Timer(loop_, pause, [this] { watch_for_dying(); });
}

void Agent::report_exit(Worker& worker, const sys::ExitStatus& status) {
  if (worker.reported) return;
  worker.reported = true;
  // Its last words are in the pipe; nobody waits for the window now. A pipe holds little, so this ends.
  for (int piece = 0; piece < 32 && worker.drain(); ++piece) {
  }
  // What the others were doing then is of use, and lost once they have been stopped.
  if (!status.success() && !stopping_) send_reports();
  Exited report;
  report.rank = worker.rank();
  report.last = worker.report();
  report.words = worker.words();
  report.status = status;
  report.before_stop = !stopping_ || worker.ended_before_stop;
  // A rank that said what ended it began to end then; what it does on its way out can take long.
  const auto failed = std::min(Clock::now(), worker.words_began().value_or(Clock::time_point::max()));
  report.after_ns = static_cast<std::uint64_t>(std::max<std::int64_t>((failed - started_at_).count(), 0));
  report.last_stderr = worker.tail();
  if (status.signal == SIGKILL && !stopping_) {
    const auto now = sys::out_of_memory_kills();
    report.out_of_memory = now && out_of_memory_before_ && *now > *out_of_memory_before_;
  }
  channel_->send(report);
}

void Agent::send_reports() {
  Reports reports;
  for (const auto& worker : workers_) {
    if (worker->alive() && !worker->reported) reports.ranks.push_back(worker->report());
  }
  if (!reports.ranks.empty()) channel_->send(reports);
}

void Agent::report_regularly() {
  if (stage_ != Stage::Running || lost_supervisor_) return;
  send_reports();
  reports_ = Timer(loop_, kReportEvery, [this] { report_regularly(); });
}

void Agent::ask_stacks() {
  if (stage_ != Stage::Running || stacks_) return;
  send_reports();
  std::vector<Worker*> asked;
  for (const auto& worker : workers_) {
    if (worker->ask_stacks()) asked.push_back(worker.get());
  }
  stacks_ = Timer(loop_, kStacksTime, [this, asked] {
    for (const Worker* const worker : asked) channel_->send(Stacks{worker->rank(), worker->stacks()});
    stacks_ = Timer();
  });
}

void Agent::stop(const StopWorkers& order) {
  if (stage_ == Stage::Sweeping && grace_end_) {
    // The workers have ended; what they have started is still within its grace, which may end sooner now.
    if (order.signal == SIGKILL || order.grace_ms == 0) return kill_all();
    for (const pid_t pid : sys::descendants(::getpid())) ::kill(pid, order.signal);
    grace_end_ = Clock::now() + milliseconds(order.grace_ms);
    return;
  }
  if (stage_ != Stage::Running) return;
  if (!stopping_) {
    stopping_ = true;
    for (auto& worker : workers_) {
      if (!worker->alive()) continue;
      const auto stat = sys::process_stat(worker->pid());
      worker->ended_before_stop = !stat || stat->exiting || stat->state == 'Z';
    }
  }
  if (order.signal == SIGKILL || order.grace_ms == 0) return kill_all();
  const bool saves = makes_room();
  const milliseconds grace(saves ? std::max(order.grace_ms, order.saving_ms) : order.grace_ms);
  if (saves) send_reports();  // the supervisor waits as long, then
  for (auto& worker : workers_) {
    // One that has saved and is on its way out would die of it, and its status be lost.
    if (order.signal != SIGTERM || !worker->makes_room()) worker->signal(order.signal);
    worker->signal(SIGCONT);  // a stopped process would not hear it
  }
  // Those that left their worker's group (setsid, daemons) are asked too, so that they need not be killed.
  for (const pid_t pid : sys::descendants(::getpid())) {
    const bool in_group = std::any_of(workers_.begin(), workers_.end(), [group = ::getpgid(pid)](const auto& worker) {
      return worker->alive() && worker->pid() == group;
    });
    if (!in_group) ::kill(pid, order.signal);
  }
  grace_end_ = Clock::now() + grace;
  grace_ = Timer(loop_, grace, [this] { kill_all(); });
}

void Agent::kill_all() {
  if (!stopping_) {
    stopping_ = true;
    for (auto& worker : workers_) worker->ended_before_stop = !worker->alive();
  }
  grace_ = Timer();
  grace_end_.reset();
  if (stage_ == Stage::Finished || workers_.empty()) return;
  if (stage_ == Stage::Running) {
    for (auto& worker : workers_) worker->signal(SIGKILL);
    stage_ = Stage::Sweeping;
    dying_ = Timer();
    sweep_since_ = Clock::now();
  }
  sweep_further();
}

void Agent::sweep_further() {
  if (stage_ != Stage::Sweeping) return;
  // Within the grace, what outlives its worker may still end by itself: a shell dies of SIGTERM while its child saves.
  const bool wait = grace_end_ && Clock::now() < *grace_end_;
  bool clean = false;
  const OnReaped on_reaped = [this](pid_t pid, const sys::ExitStatus& status) {
    for (auto& worker : workers_) {
      if (worker->pid() != pid || !worker->alive()) continue;
      worker->set_reaped();
      --alive_;
      report_exit(*worker, status);
    }
  };
  if (wait) {
    clean = !reap_children(on_reaped);
  } else {
    const SweepStep step = sweep_once({}, on_reaped);
    swept_ += static_cast<std::uint32_t>(step.killed);
    clean = step.clean;
  }
  if (!clean) {
    if (!wait && Clock::now() - sweep_since_ > kStuckLimit) {
      return all_gone(describe_stuck(sys::descendants(::getpid())));
    }
    // SIGCHLD brings us back at once; the timer is for what is not our own child.
    sweeping_ = Timer(loop_, milliseconds(5), [this] { sweep_further(); });
    return;
  }
  // All writers are gone: what the pipes hold, little enough to ignore the window, is all that there will be.
  for (auto& worker : workers_) {
    while (worker->drain()) {
    }
  }
  all_gone({});
}

void Agent::all_gone(const std::string& stuck) {
  stage_ = Stage::Finished;
  sweeping_ = Timer();
  grace_ = Timer();
  if (!stuck.empty()) exit_status_ = 1;
  if (!run_folder_.empty()) ::rmdir(run_folder_.c_str());
  if (lost_supervisor_ || channel_->closed()) return loop_.stop();
  channel_->send(AllGone{swept_, stuck});
}

}  // namespace

int run_agent(const AgentOptions& options) {
  ::signal(SIGPIPE, SIG_IGN);  // a rank may end while its input is written; workers start with the default again
  return run_guarded(options.lifeline_fd, [&options] {
    value_or_throw(sys::become_subreaper());
    Agent agent(options, options.secret.value());
    return agent.run();
  });
}

}  // namespace cohort::launch
