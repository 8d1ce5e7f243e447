#include "launch/agent/host_workers.h"

#include "base/env.h"
#include "base/hardware.h"
#include "base/parse.h"
#include "launch/processes.h"

#include <cohort/exit_status.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;

/// Limits what is read from the pipes of an ended server: processes that it left may write for ever.
constexpr int kMostPieces = 64;
constexpr auto kStuckLimit = std::chrono::seconds(10);
/// Time for a shell to end by itself after its rank has ended.
constexpr auto kShellTime = std::chrono::seconds(1);
/// Time for a rank to write its stacks.
constexpr auto kStacksTime = std::chrono::milliseconds(500);

}  // namespace

void HostWorkers::start(StartJob job) {
  // (Output of the earlier epoch that is still under way keeps counting.)
  stacks_ = Timer();
  workers_.clear();
  launch_.reset();
  epoch_ = {};
  paused_ = false;
  stage_ = Stage::Running;
  epoch_.out_of_memory_before = sys::out_of_memory_kills();
  auto started = launch_.emplace(loop_, upstream_, options_, secret_, made_at_).prepare(std::move(job));
  if (started) started = start_workers();
  if (!started) {
    // Some workers cannot be started, so the others are ended before the supervisor is told.
    epoch_.swept = 0;
    const auto stuck = sweep({}, std::chrono::seconds(2), {});
    workers_.clear();
    upstream_.send(StartFailed{started.error().context().rank, started.error().what()});
    stage_ = Stage::Finished;
    upstream_.send(AllGone{0, describe_stuck(stuck)});
  }
}

Result<void> HostWorkers::start_workers() {
  const auto fail_for = [](int rank, const Error& error) {
    ErrorContext context;
    context.rank = rank;
    return tl::unexpected(Error(error.code(), error.what(), context));
  };
  for (const WorkerPlan& plan : launch_->job().workers) {
    auto worker = launch_->start(plan, Worker::Log::New);
    if (!worker) return fail_for(plan.rank, worker.error());
    workers_.push_back(*std::move(worker));
  }
  epoch_.started_at = Clock::now();
  Started report;
  report.threads =
      parse_integer<std::int32_t>(launch_->environment().find(env::kOmpNumThreads).value_or("")).value_or(0);
  for (auto& worker : workers_) {
    if (auto running = worker->confirm(); !running) return fail_for(worker->rank(), running.error());
    report.pids.push_back(static_cast<std::int32_t>(worker->pid()));
  }
  epoch_.alive = workers_.size();
  upstream_.send(report);
  if (launch_->traces()) launch_->traces()->begin();
  watch_for_dying();
  reports_ = Timer(loop_, kReportEvery, [this] { report_regularly(); });
  reap();  // some workers may have ended already
  return {};
}

void HostWorkers::start_again(StartAgain order) {
  Worker* const before = awaiting(order.rank);
  if (before == nullptr) {
    upstream_.send(StartedAgain{order.rank, 0, {}});
    return;
  }
  epoch_.awaited[order.rank] = std::move(order);
  start_those_again();
}

void HostWorkers::go_on_without(int rank) {
  if (awaiting(rank) == nullptr) return;
  epoch_.awaited.erase(rank);
  reap();
}

Worker* HostWorkers::awaiting(int rank) {
  if (!epoch_.awaited.contains(rank)) return nullptr;
  const auto found = std::ranges::find_if(workers_, [rank](const auto& worker) { return worker->rank() == rank; });
  return found->get();
}

/// A server's address and files are free when the kernel has removed the old process, maybe a while after its end.
void HostWorkers::start_those_again() {
  for (auto& worker : workers_) {
    const auto found = epoch_.awaited.find(worker->rank());
    if (found == epoch_.awaited.end() || !found->second || worker->alive()) continue;
    const StartAgain order = *std::move(found->second);
    epoch_.awaited.erase(found);
    StartedAgain answer{order.rank, 0, {}};
    if (auto started = replace(worker, order)) {
      answer.pid = static_cast<std::int32_t>(worker->pid());
      ++epoch_.alive;
    } else {
      answer.why = started.error().what();
    }
    upstream_.send(answer);
  }
}

void HostWorkers::start_more(const WorkerPlan& plan) {
  StartedAgain answer{plan.rank, 0, "nothing runs there any more"};
  if (stage_ == Stage::Running && !epoch_.stopping) {
    forget_ended();
    auto worker = start_confirmed(plan, Worker::Log::New);
    answer.why = worker ? std::string() : worker.error().what();
    if (worker) {
      answer.pid = static_cast<std::int32_t>((*worker)->pid());
      ++epoch_.alive;
      workers_.push_back(*std::move(worker));
    }
  }
  upstream_.send(answer);
}

// Bounds memory: workers come and go for as long as the job runs. (The first worker is kept for stdin.)
void HostWorkers::forget_ended() {
  if (stacks_) return;  // the timer refers to the workers
  std::erase_if(workers_, [first = workers_.front().get()](const auto& worker) {
    return worker.get() != first && worker->over();
  });
}

void HostWorkers::kill_group(pid_t group) {
  const auto of_group = [group](pid_t pid) { return ::getpgid(pid) == group && sys::descends_from(pid, ::getpid()); };
  for (const pid_t pid : sys::descendants(::getpid())) sys::signal_if(pid, SIGKILL, of_group);
}

Result<void> HostWorkers::replace(std::unique_ptr<Worker>& worker, const StartAgain& order) {
  kill_group(worker->pid());  // its children may hold its address or its journal
  for (int piece = 0; piece < kMostPieces && worker->drain(); ++piece) {
  }
  WorkerPlan plan =
      *std::ranges::find_if(launch_->job().workers, [&](const WorkerPlan& one) { return one.rank == order.rank; });
  plan.environment.insert(plan.environment.end(), order.environment.begin(), order.environment.end());
  auto again = start_confirmed(plan, Worker::Log::Continued);
  if (!again) return tl::unexpected(again.error());
  stacks_ = Timer();  // the timer refers to the old worker
  worker = *std::move(again);
  return {};
}

Result<std::unique_ptr<Worker>> HostWorkers::start_confirmed(const WorkerPlan& plan, Worker::Log log) {
  auto worker = launch_->start(plan, log);
  if (!worker) return worker;
  if (auto running = (*worker)->confirm(); !running) return tl::unexpected(running.error());
  if (paused_) (*worker)->pause_reading();
  return worker;
}

void HostWorkers::start_no_more() {
  for (const auto& [rank, order] : std::exchange(epoch_.awaited, {})) {
    if (order && !upstream_.lost()) upstream_.send(StartedAgain{rank, 0, {}});
  }
}

void HostWorkers::on_reaped(pid_t pid, const sys::ExitStatus& status) {
  for (auto& worker : workers_) {
    if (worker->pid() != pid || !worker->alive()) continue;
    worker->set_reaped();
    --epoch_.alive;
    report_exit(*worker, status);
    if (launch_->job().elastic && !status.success())
      kill_group(pid);
    else if (epoch_.stopping && worker->spares_its_group())
      ask_what_is_left_of(*worker);
    return;
  }
}

void HostWorkers::reap() {
  reap_children([this](pid_t pid, const sys::ExitStatus& status) { on_reaped(pid, status); });
  if (stage_ == Stage::Running) start_those_again();
  if (stage_ == Stage::Running && status_alone_ && !runs(Role::Worker)) return kill_all();
  if (stage_ == Stage::Running && !workers_.empty() && epoch_.alive == 0 && epoch_.awaited.empty()) {
    stage_ = Stage::Sweeping;
    dying_ = Timer();
    epoch_.sweep_since = Clock::now();
    sweep_further();
  } else if (stage_ == Stage::Sweeping) {
    sweep_further();
  }
}

void HostWorkers::watch_for_dying() {
  // The kernel frees a dying process's memory (60 ms per GiB and more) before it notifies the parent; the process's
  // flags show the end immediately.
  for (auto& worker : workers_) {
    if (!worker->alive() || worker->reported) continue;
    const auto stat = sys::process_stat(worker->pid());
    if (stat && stat->exiting && stat->exit_word != 0)
      report_exit(*worker, sys::exit_status_from_wait(stat->exit_word));
  }
  // Membership of an elastic job depends on these reports.
  std::uint64_t meetings = 0;
  for (const auto& worker : workers_) meetings += worker->meetings();
  if (launch_->job().elastic && meetings != std::exchange(epoch_.meetings, meetings)) send_reports();
  const milliseconds pause(std::max<std::size_t>(100, 2 * workers_.size()));
  dying_ = Timer(loop_, pause, [this] { watch_for_dying(); });
}

void HostWorkers::report_exit(Worker& worker, const sys::ExitStatus& status) {
  if (worker.reported) return;
  worker.reported = true;
  // The worker's last words are in the pipe, so the window does not matter now. A pipe holds little, so this loop ends.
  for (int piece = 0; piece < 32 && worker.drain(); ++piece) {
  }
  // Reports what the other ranks are doing: useful for the post-mortem, and lost after they have been stopped.
  if (!status.success() && !epoch_.stopping) send_reports();
  const bool asks = worker.role() == Role::Worker && status.shell_status() == kRequeueStatus;
  if (asks && worker.report().preempted_by != 0) epoch_.saved = true;  // (a rank that leaves ends with it, too)
  if (status_alone_ && worker.role() == Role::Worker && status.shell_status() != kRequeueStatus)
    status_alone_ = 128 + SIGTERM;
  Exited report;
  report.rank = worker.rank();
  report.last = worker.report();
  report.words = worker.words();
  report.cause = worker.cause();
  report.status = status;
  report.before_stop = !epoch_.stopping || worker.ended_before_stop;
  // The failure began when the rank wrote its last words; the rest of its end can take long.
  const auto failed = std::min(Clock::now(), worker.words_began().value_or(Clock::time_point::max()));
  report.after_ns = static_cast<std::uint64_t>(std::max<std::int64_t>((failed - epoch_.started_at).count(), 0));
  report.last_stderr = worker.tail();
  if (status.signal == SIGKILL && !epoch_.stopping) {
    const auto now = sys::out_of_memory_kills();
    report.out_of_memory = now && epoch_.out_of_memory_before && *now > *epoch_.out_of_memory_before;
  }
  if (launch_->job().servers_again && worker.role() == Role::Server && !status.success() && !epoch_.stopping)
    epoch_.awaited.try_emplace(worker.rank());
  upstream_.send(report);
}

void HostWorkers::stop(const StopWorkers& order) {
  if (stage_ == Stage::Sweeping && epoch_.grace_end) {
    // The workers have ended. The processes that they have started are in their grace, which this order may shorten.
    if (order.signal == SIGKILL || order.grace_ms == 0) return kill_all();
    for (const pid_t pid : sys::descendants(::getpid())) sys::signal_if(pid, order.signal, is_ours);
    epoch_.grace_end = Clock::now() + milliseconds(order.grace_ms);
    return;
  }
  if (stage_ != Stage::Running) return;
  start_no_more();
  if (epoch_.alive == 0) return reap();
  if (!epoch_.stopping) {
    epoch_.stopping = true;
    for (auto& worker : workers_) {
      if (!worker->alive()) continue;
      const auto stat = sys::process_stat(worker->pid());
      worker->ended_before_stop = !stat || stat->exiting || stat->state == 'Z';
    }
  }
  if (order.signal == SIGKILL || order.grace_ms == 0) return kill_all();
  // Later roles may outlive the ranks here: ranks of other hosts need them while they save.
  if (!runs(order.role)) return;
  const bool saves = order.role == Role::Worker && makes_room();
  const milliseconds grace(saves ? std::max(order.grace_ms, order.saving_ms) : order.grace_ms);
  if (saves) send_reports();  // so that the supervisor waits as long
  for (auto& worker : workers_) {
    if (worker->role() != order.role) continue;
    worker->announce_end();
    worker->ask_to_end(order.signal);
    worker->signal(SIGCONT);  // a stopped process would not handle the signal
  }
  epoch_.asked.clear();
  ask_those_apart(order);
  ask_those_around_ranks();
  epoch_.grace_end = Clock::now() + grace;
  grace_ = Timer(loop_, grace, [this, role = order.role] { end_of_grace(role); });
}

// Also asks processes that left their worker's group (setsid, daemons), so that they need not be killed. Leaves out
// those that descend from a rank whose group is not to be asked yet.
void HostWorkers::ask_those_apart(const StopWorkers& order) {
  for (const pid_t pid : sys::descendants(::getpid())) {
    const bool apart = std::ranges::any_of(workers_, [&](const auto& worker) {
      if (!worker->alive()) return false;
      return worker->pid() == ::getpgid(pid) ||
             ((worker->role() != order.role || worker->spares_its_group()) && sys::descends_from(pid, worker->pid()));
    });
    if (apart || !epoch_.asked.insert(pid).second) continue;
    sys::signal_if(pid, order.signal, is_ours);
  }
}

// Tells the processes left by an ended rank to end: only the rank itself was asked, without its group.
void HostWorkers::ask_what_is_left_of(const Worker& worker) {
  const auto of_its_group = [&worker](pid_t pid) { return ::getpgid(pid) == worker.pid() && is_ours(pid); };
  for (const pid_t pid : sys::descendants(::getpid())) {
    if (sys::signal_if(pid, SIGTERM, of_its_group)) epoch_.asked.insert(pid);
  }
  ask_those_apart({SIGTERM, 0, 0, worker.role()});
}

// A shell around a rank ends when the rank has ended; a shell that goes on is told to end.
void HostWorkers::ask_those_around_ranks() {
  bool more = false;
  for (auto& worker : workers_) {
    if (!worker->alive() || !worker->spares_its_group()) continue;
    if (worker->left_by_its_rank()) {
      const auto since = epoch_.left.try_emplace(worker->rank(), Clock::now()).first->second;
      if (Clock::now() - since >= kShellTime) worker->ask_group();
    }
    more = more || worker->spares_its_group();
  }
  if (more) around_ = Timer(loop_, milliseconds(200), [this] { ask_those_around_ranks(); });
}

// Ranks that still reach each other save together, at the same step, as in a preemption.
void HostWorkers::save_alone() {
  if (!runs(Role::Worker)) return kill_all();
  status_alone_ = kRequeueStatus;
  stop({SIGTERM, kTimeAlone.count(), kTimeAlone.count(), Role::Worker});
}

void HostWorkers::end_of_grace(Role role) {
  if (upstream_.lost()) return kill_all();
  const bool last =
      std::ranges::all_of(workers_, [role](const auto& worker) { return !worker->alive() || worker->role() == role; });
  if (last) return kill_all();
  for (auto& worker : workers_) {
    if (worker->role() == role) worker->signal(SIGKILL);
  }
}

void HostWorkers::kill_all() {
  start_no_more();
  if (!epoch_.stopping) {
    epoch_.stopping = true;
    for (auto& worker : workers_) worker->ended_before_stop = !worker->alive();
  }
  grace_ = Timer();
  around_ = Timer();
  epoch_.grace_end.reset();
  if (stage_ == Stage::Finished || workers_.empty()) return;
  if (stage_ == Stage::Running) {
    for (auto& worker : workers_) worker->signal(SIGKILL);
    stage_ = Stage::Sweeping;
    dying_ = Timer();
    epoch_.sweep_since = Clock::now();
  }
  sweep_further();
}

void HostWorkers::sweep_further() {
  if (stage_ != Stage::Sweeping) return;
  // Within the grace, what outlives its worker may end by itself: a shell dies of SIGTERM while its child saves.
  const bool wait = epoch_.grace_end && Clock::now() < *epoch_.grace_end;
  bool clean = false;
  const auto reaped = [this](pid_t pid, const sys::ExitStatus& status) { on_reaped(pid, status); };
  if (wait) {
    clean = !reap_children(reaped);
  } else {
    const SweepStep step = sweep_once({}, reaped);
    epoch_.swept += static_cast<std::uint32_t>(step.killed);
    clean = step.clean;
  }
  if (!clean) {
    if (!wait && Clock::now() - epoch_.sweep_since > kStuckLimit) {
      return all_gone(describe_stuck(sys::descendants(::getpid())));
    }
    // SIGCHLD runs this again immediately; the timer is for processes that are not our own children.
    sweeping_ = Timer(loop_, milliseconds(5), [this] { sweep_further(); });
    return;
  }
  // All writers are gone, so the pipes hold the last output. It is little, so a full window is ignored.
  for (auto& worker : workers_) {
    while (worker->drain()) {
    }
  }
  all_gone({});
}

void HostWorkers::all_gone(const std::string& stuck) {
  stage_ = Stage::Finished;
  sweeping_ = Timer();
  grace_ = Timer();
  stuck_ = stuck_ || !stuck.empty();
  if (stuck_) status_alone_.reset();
  if (!launch_->made_folder().empty()) ::rmdir(launch_->made_folder().c_str());
  if (upstream_.lost()) return;
  if (launch_->traces()) launch_->traces()->finish();
  upstream_.send(AllGone{epoch_.swept, stuck});
}

bool HostWorkers::runs(Role role) const {
  return std::ranges::any_of(workers_,
                             [role](const auto& worker) { return worker->alive() && worker->role() == role; });
}

// Ranks that were told at the same moment may have saved, or even ended, before this is called.
bool HostWorkers::makes_room() const {
  return std::ranges::any_of(workers_,
                             [](const auto& worker) { return worker->saves_when_asked() || worker->makes_room(); });
}

void HostWorkers::send_reports() {
  Reports reports;
  for (const auto& worker : workers_) {
    if (worker->alive() && !worker->reported) reports.ranks.push_back(worker->report());
  }
  reports.gpus = gpus_.use();
  upstream_.send(reports);  // sent even without ranks: it shows that the agent itself is not stopped
}

void HostWorkers::report_regularly() {
  if ((stage_ != Stage::Running && stage_ != Stage::Sweeping) || upstream_.lost()) return;
  send_reports();
  reports_ = Timer(loop_, kReportEvery, [this] { report_regularly(); });
}

void HostWorkers::ask_stacks() {
  if (stage_ != Stage::Running || stacks_) return;
  send_reports();
  std::vector<Worker*> asked;
  for (const auto& worker : workers_) {
    if (worker->ask_stacks()) asked.push_back(worker.get());
  }
  stacks_ = Timer(loop_, kStacksTime, [this, asked] {
    for (const Worker* const worker : asked) upstream_.send(Stacks{worker->rank(), worker->stacks()});
    stacks_ = Timer();
  });
}

void HostWorkers::pass_on(int signal) {
  if (signal != SIGSTOP && signal != SIGTSTP && signal != SIGCONT) {
    for (auto& worker : workers_) worker->announce_end();
  }
  if (signal == SIGUSR1 || signal == SIGUSR2) return kept_signals_.pass_on(signal);
  for (auto& worker : workers_) worker->signal(signal);
}

void HostWorkers::look() {
  const std::size_t waiting = upstream_.unacknowledged();
  if (!paused_ && waiting >= kOutputWindow) {
    paused_ = true;
    for (auto& worker : workers_) worker->pause_reading();
  } else if (paused_ && waiting < kOutputWindow / 2) {
    paused_ = false;
    for (auto& worker : workers_) worker->resume_reading();
  }
}

void HostWorkers::announce(std::uint64_t epoch) {
  for (auto& worker : workers_) worker->announce(epoch);
}

void HostWorkers::kill(int rank) {
  for (auto& worker : workers_) {
    if (worker->rank() == rank) worker->signal(SIGKILL);
  }
}

}  // namespace cohort::launch
