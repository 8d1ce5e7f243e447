#include "base/hardware.h"
#include "base/process.h"
#include "launch/agent/agent_impl.h"
#include "launch/processes.h"

#include <cohort/exit_status.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <ctime>
#include <utility>

namespace cohort::launch {
namespace {

constexpr auto kDrainEvery = std::chrono::milliseconds(100);
/// NTP moves CLOCK_REALTIME, which traces of other programs are in.
constexpr std::int64_t kNoteClocksEvery = 60'000'000'000;
/// Of a message.
constexpr std::size_t kPiece = std::size_t{256} << 10;

std::int64_t now_of(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

const status::TimelineLayout& layout_of(const sys::SharedSegment& ring) {
  return *static_cast<const status::TimelineLayout*>(ring.mapping.data());
}

}  // namespace

TraceCollector::TraceCollector(Loop& loop, Options options) : loop_(loop), options_(std::move(options)) {}

Result<int> TraceCollector::add(int rank) {
  auto ring = status::create_timeline();
  if (!ring) return tl::unexpected(ring.error());
  const status::TimelineLayout& layout = layout_of(*ring);
  ranks_.push_back({*std::move(ring), status::TimelineReader(layout), nullptr, 0, rank});
  return ranks_.back().ring.fd.get();
}

void TraceCollector::wait() {
  again_ = Timer(loop_, kDrainEvery, [this] {
    if (options_.has_room()) drain(status::TimelineReader::Until::Now);
    wait();
  });
}

void TraceCollector::drain(status::TimelineReader::Until until) {
  std::string out;
  note_clocks(out);
  for (Rank& rank : ranks_) {
    drain(rank, until, out);
    if (out.size() >= kPiece) options_.send({options_.base_ns, std::exchange(out, {})});
  }
  if (!out.empty()) options_.send({options_.base_ns, std::move(out)});
}

void TraceCollector::drain(Rank& rank, status::TimelineReader::Until until, std::string& out) const {
  std::int64_t first_ns = 0;
  std::string events;
  rank.reader.drain(until, [&](const status::TimelineEntry& entry) {
    if (!rank.trace) {
      rank.trace = std::make_unique<status::RankTrace>(
          status::RankTrace::Options{static_cast<std::uint32_t>(rank.rank), options_.epoch, options_.host.name,
                                     layout_of(rank.ring).pid.load(), options_.base_ns});
    }
    if (first_ns == 0) first_ns = entry.ended_ns;
    rank.trace->append(events, entry, rank.reader.name(entry.name));
  });
  // Those that are missing came before these.
  if (const std::uint64_t lost = rank.reader.lost(); lost > rank.told_lost && rank.trace) {
    rank.trace->append_lost(out, first_ns != 0 ? first_ns : now_of(CLOCK_MONOTONIC), lost - rank.told_lost);
    rank.told_lost = lost;
  }
  out += events;
}

// Both clocks as close together as they can be read.
void TraceCollector::note_clocks(std::string& out) {
  const std::int64_t before = now_of(CLOCK_MONOTONIC);
  if (clocks_noted_ns_ != 0 && before - clocks_noted_ns_ < kNoteClocksEvery) return;
  clocks_noted_ns_ = before;
  std::int64_t shortest = INT64_MAX, monotonic = before, realtime = 0;
  for (int look = 0; look < 5; ++look) {
    const std::int64_t begun = now_of(CLOCK_MONOTONIC);
    const std::int64_t then = now_of(CLOCK_REALTIME);
    const std::int64_t ended = now_of(CLOCK_MONOTONIC);
    if (ended - begun >= shortest) continue;
    shortest = ended - begun;
    monotonic = begun + (ended - begun) / 2;
    realtime = then;
  }
  options_.host.append_clocks(out, options_.base_ns, monotonic, realtime);
}

namespace {

using std::chrono::milliseconds;

constexpr auto kStuckLimit = std::chrono::seconds(10);
/// For ranks that save after the supervisor is gone.
constexpr std::chrono::duration<std::uint32_t, std::milli> kTimeAlone{10'000};
/// For a shell to end by itself when its rank has ended.
constexpr auto kShellTime = std::chrono::seconds(1);

}  // namespace

void Agent::on_reaped(pid_t pid, const sys::ExitStatus& status) {
  for (auto& worker : workers_) {
    if (worker->pid() != pid || !worker->alive()) continue;
    worker->set_reaped();
    --epoch_->alive;
    report_exit(*worker, status);
    if (epoch_->launch->job.elastic && !status.success())
      kill_group(pid);
    else if (epoch_->stopping && worker->spares_its_group())
      ask_what_is_left_of(*worker);
    return;
  }
}

void Agent::reap() {
  reap_children([this](pid_t pid, const sys::ExitStatus& status) { on_reaped(pid, status); });
  if (stage_ == Stage::Running) start_those_again();
  if (stage_ == Stage::Running && saves_ && !runs(Role::Worker)) return kill_all();
  if (stage_ == Stage::Running && !workers_.empty() && epoch_->alive == 0 && epoch_->awaited.empty()) {
    stage_ = Stage::Sweeping;
    dying_ = Timer();
    epoch_->sweep_since = Clock::now();
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
  // An elastic job goes on by them.
  std::uint64_t meetings = 0;
  for (const auto& worker : workers_) meetings += worker->meetings();
  if (epoch_->launch->job.elastic && meetings != std::exchange(epoch_->meetings, meetings)) send_reports();
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
  if (!status.success() && !epoch_->stopping) send_reports();
  Exited report;
  report.rank = worker.rank();
  report.last = worker.report();
  report.words = worker.words();
  report.cause = worker.cause();
  report.status = status;
  report.before_stop = !epoch_->stopping || worker.ended_before_stop;
  // A rank that said what ended it began to end then; what it does on its way out can take long.
  const auto failed = std::min(Clock::now(), worker.words_began().value_or(Clock::time_point::max()));
  report.after_ns = static_cast<std::uint64_t>(std::max<std::int64_t>((failed - epoch_->started_at).count(), 0));
  report.last_stderr = worker.tail();
  if (status.signal == SIGKILL && !epoch_->stopping) {
    const auto now = sys::out_of_memory_kills();
    report.out_of_memory = now && epoch_->out_of_memory_before && *now > *epoch_->out_of_memory_before;
  }
  if (saves_ && worker.role() == Role::Worker && status.shell_status() != kRequeueStatus) exit_status_ = 128 + SIGTERM;
  if (epoch_->launch->job.servers_again && worker.role() == Role::Server && !status.success() && !epoch_->stopping)
    epoch_->awaited.try_emplace(worker.rank());
  channel_->send(report);
}

void Agent::stop(const StopWorkers& order) {
  if (stage_ == Stage::Sweeping && epoch_->grace_end) {
    // The workers have ended; what they have started is still within its grace, which may end sooner now.
    if (order.signal == SIGKILL || order.grace_ms == 0) return kill_all();
    for (const pid_t pid : sys::descendants(::getpid())) sys::signal_if(pid, order.signal, is_ours);
    epoch_->grace_end = Clock::now() + milliseconds(order.grace_ms);
    return;
  }
  if (stage_ != Stage::Running) return;
  start_no_more();
  if (epoch_->alive == 0) return reap();
  if (!epoch_->stopping) {
    epoch_->stopping = true;
    for (auto& worker : workers_) {
      if (!worker->alive()) continue;
      const auto stat = sys::process_stat(worker->pid());
      worker->ended_before_stop = !stat || stat->exiting || stat->state == 'Z';
    }
  }
  if (order.signal == SIGKILL || order.grace_ms == 0) return kill_all();
  // The roles behind it may outlive its ranks here: ranks of other hosts need them while they save.
  if (!runs(order.role)) return;
  const bool saves = order.role == Role::Worker && makes_room();
  const milliseconds grace(saves ? std::max(order.grace_ms, order.saving_ms) : order.grace_ms);
  if (saves) send_reports();  // the supervisor waits as long, then
  for (auto& worker : workers_) {
    if (worker->role() != order.role) continue;
    worker->announce_end();
    worker->ask_to_end(order.signal);
    worker->signal(SIGCONT);  // a stopped process would not hear it
  }
  epoch_->asked.clear();
  ask_those_apart(order);
  ask_those_around_ranks();
  epoch_->grace_end = Clock::now() + grace;
  grace_ = Timer(loop_, grace, [this, role = order.role] { end_of_grace(role); });
}

// Those that left their worker's group (setsid, daemons) are asked too, so that they need not be killed; but not what a
// rank that was asked alone has started.
void Agent::ask_those_apart(const StopWorkers& order) {
  for (const pid_t pid : sys::descendants(::getpid())) {
    const bool apart = std::ranges::any_of(workers_, [&](const auto& worker) {
      if (!worker->alive()) return false;
      return worker->pid() == ::getpgid(pid) ||
             ((worker->role() != order.role || worker->spares_its_group()) && sys::descends_from(pid, worker->pid()));
    });
    if (apart || !epoch_->asked.insert(pid).second) continue;
    sys::signal_if(pid, order.signal, is_ours);
  }
}

// A rank that was asked alone has ended, and so it is the turn of what it has left.
void Agent::ask_what_is_left_of(const Worker& worker) {
  const auto of_its_group = [&worker](pid_t pid) { return ::getpgid(pid) == worker.pid() && is_ours(pid); };
  for (const pid_t pid : sys::descendants(::getpid())) {
    if (sys::signal_if(pid, SIGTERM, of_its_group)) epoch_->asked.insert(pid);
  }
  ask_those_apart({SIGTERM, 0, 0, worker.role()});
}

// A shell around a rank ends when that has ended; if it goes on, it is told.
void Agent::ask_those_around_ranks() {
  bool more = false;
  for (auto& worker : workers_) {
    if (!worker->alive() || !worker->spares_its_group()) continue;
    if (worker->left_by_its_rank()) {
      const auto since = epoch_->left.try_emplace(worker->rank(), Clock::now()).first->second;
      if (Clock::now() - since >= kShellTime) worker->ask_group();
    }
    more = more || worker->spares_its_group();
  }
  if (more) around_ = Timer(loop_, milliseconds(200), [this] { ask_those_around_ranks(); });
}

// Ranks that still reach each other save together, at one step, as where the job is preempted. Those that were asked
// before go on with it.
void Agent::save_alone() {
  saves_ = true;
  exit_status_ = kRequeueStatus;
  stop({SIGTERM, kTimeAlone.count(), kTimeAlone.count(), Role::Worker});
}

void Agent::end_of_grace(Role role) {
  if (lost_supervisor_) return kill_all();
  const bool last =
      std::ranges::all_of(workers_, [role](const auto& worker) { return !worker->alive() || worker->role() == role; });
  if (last) return kill_all();
  for (auto& worker : workers_) {
    if (worker->role() == role) worker->signal(SIGKILL);
  }
}

void Agent::kill_all() {
  start_no_more();
  if (!epoch_->stopping) {
    epoch_->stopping = true;
    for (auto& worker : workers_) worker->ended_before_stop = !worker->alive();
  }
  grace_ = Timer();
  around_ = Timer();
  epoch_->grace_end.reset();
  if (stage_ == Stage::Finished || workers_.empty()) return;
  if (stage_ == Stage::Running) {
    for (auto& worker : workers_) worker->signal(SIGKILL);
    stage_ = Stage::Sweeping;
    dying_ = Timer();
    epoch_->sweep_since = Clock::now();
  }
  sweep_further();
}

void Agent::sweep_further() {
  if (stage_ != Stage::Sweeping) return;
  // Within the grace, what outlives its worker may still end by itself: a shell dies of SIGTERM while its child saves.
  const bool wait = epoch_->grace_end && Clock::now() < *epoch_->grace_end;
  bool clean = false;
  const auto reaped = [this](pid_t pid, const sys::ExitStatus& status) { on_reaped(pid, status); };
  if (wait) {
    clean = !reap_children(reaped);
  } else {
    const SweepStep step = sweep_once({}, reaped);
    epoch_->swept += static_cast<std::uint32_t>(step.killed);
    clean = step.clean;
  }
  if (!clean) {
    if (!wait && Clock::now() - epoch_->sweep_since > kStuckLimit) {
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
  if (!epoch_->run_folder.empty()) ::rmdir(epoch_->run_folder.c_str());
  if (lost_supervisor_ || channel_->closed()) return loop_.stop();
  if (epoch_->traces) epoch_->traces->finish();
  channel_->send(AllGone{epoch_->swept, stuck});
}

}  // namespace cohort::launch
