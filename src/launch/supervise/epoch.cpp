// Of an epoch: servers that fail while it goes on, and are started again, or gone on without.
#include "launch/supervise/job.h"

#include <cohort/exit_status.h>

#include "base/hardware.h"
#include "base/log.h"
#include "launch/health/verdict.h"
#include "launch/output/other_hosts.h"
#include "launch/output/run_folder.h"
#include "launch/supervise/supervisor.h"
#include "telemetry/last_words.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <utility>
#include <vector>

namespace cohort::launch {
namespace {

/// The cores of this host, where it has more ranks than these; else 0.
int crowded_cores(const Plan& plan) {
  const int cores = sys::usable_cores();
  const bool crowded =
      std::ranges::any_of(plan.hosts, [cores](const PlannedHost& host) { return host.local && host.ranks > cores; });
  return crowded ? cores : 0;
}

}  // namespace

Epoch::Epoch(Job& job) : job_(job), agents_(*job.agents_), stopping_(job.loop_, spec_.grace, stopping_events()) {
  static_cast<Attempt&>(state_) = {};
  state_.start = utc_now();
  if (spec_.keep_logs) state_.log_folder = absolute_path(job_.logs_below(job_.folder_.path));
  limits_.start = Timer(job_.loop_, start_timeout_, [this] {
    const Plan& plan = job_.setup_.plan;
    const int cores = crowded_cores(plan);
    fail_start(fmt::format(
        "no sign of running ranks from {} after {:.0f} s{}", agents_.missing(),
        std::chrono::duration<double>(start_timeout_).count(),
        cores == 0
            ? std::string()
            : fmt::format(
                  ": {} processes share the {} core{} here -- start fewer, or give them more time (--start-timeout)",
                  plan.roles().all(), cores, cores == 1 ? "" : "s")));
  });
}

void Epoch::look_at_plan() {
  const Plan& plan = job_.setup_.plan;
  hosts_ = hosts_of_processes(plan);
  health_.emplace(job_.loop_, hosts_, plan.roles(), spec_,
                  HealthWatch::Events{[this](const std::string& text) { say(text); },
                                      [this](const Warning& warning) { job_.warnings_->tell(warning); },
                                      [this](const std::string& why) { on_stuck(why); }});
  state_.plan = plan;
  state_.stage = "starting";
  state_.restarts = job_.restarts_.done();
  job_.live_->begin_epoch();
  state_.pids.assign(static_cast<std::size_t>(plan.roles().all()), 0);
  if (spec_.keep_logs && goes_elsewhere(plan))
    remote_logs_.emplace(state_.log_folder, plan.roles(), [this](const std::string& text) { say(text); });
}

void Epoch::give_orders() {
  if (stage_ != Stage::Starting) return;
  for (const auto& each : agents_.members())
    each->channel->send(order_for(job_.setup_, each->host, job_.facts_for(*each)));
}

void Epoch::on_unfit(const AgentHandle* agent, const std::string& why) {
  if (stage_ != Stage::Starting) return;
  // Which it is, is not known; or no other one could be started either.
  if (agent == nullptr || agent->remote == nullptr) return fail_start(why);
  on_host_failed(*agent, why);
}

void Epoch::on_message(AgentHandle& agent, Message message) {
  if (auto* output = std::get_if<Output>(&message)) {
    if (!job_.setup_.plan.roles().has(output->rank)) return;
    if (remote_logs_ && !agent.host.local) remote_logs_->keep(*output);
    job_.live_->take(*output);
    job_.display_.feed(static_cast<std::size_t>(agent.host.index), *output);
  } else if (const auto* started = std::get_if<Started>(&message)) {
    on_started(agent, *started);
  } else if (const auto* failed = std::get_if<StartFailed>(&message)) {
    const std::string where =
        failed->rank >= 0 ? fmt::format("{} on {}", job_.setup_.plan.roles().name_of(failed->rank), agent.host.name)
                          : agent.host.name;
    // (Each of several launchers starts a program of its own, which its reason names.)
    fail_start(job_.has_launchers() ? fmt::format("{}: {}", where, failed->reason)
                                    : fmt::format("cannot start {}: {}: {}", program_of(job_.setup_, failed->rank),
                                                  where, failed->reason));
  } else if (const auto* exited = std::get_if<Exited>(&message)) {
    on_exited(*exited);
  } else if (const auto* again = std::get_if<StartedAgain>(&message)) {
    on_started_again(*again);
  } else if (auto* reports = std::get_if<Reports>(&message)) {
    job_.live_->take(*reports);
    health_->take(std::move(*reports), processes_of(job_.setup_.plan, agent.host));
    if (stage_ == Stage::Stopping && health_->somebody_saves()) stopping_.they_save();
  } else if (const auto* stacks = std::get_if<Stacks>(&message)) {
    if (!stacks->text.empty())
      say(fmt::format("stacks of {}:\n{}", job_.setup_.plan.roles().name_of(stacks->rank), demangled(stacks->text)));
  } else if (const auto* taken = std::get_if<InputTaken>(&message)) {
    if (input_) input_->taken(taken->bytes);
  } else if (const auto* told = std::get_if<Told>(&message)) {
    on_agent_told(agent, *told);
  } else if (const auto* ends = std::get_if<Ends>(&message)) {
    on_agent_ends(agent, *ends);
  } else if (const auto* trouble = std::get_if<Trouble>(&message)) {
    say(fmt::format("{}: {}", agent.host.name, trouble->text));
  } else if (const auto* gone = std::get_if<AllGone>(&message)) {
    agent.all_gone = true;
    health_->host_ended(processes_of(job_.setup_.plan, agent.host));
    if (!gone->stuck.empty()) {
      say(fmt::format("{}: even SIGKILL does not end {}; the host may have to be restarted", agent.host.name,
                      gone->stuck));
      if (!end_.stop_status) end_.stop_status = 1;
    }
    check_end();
  }
}

void Epoch::on_started(AgentHandle& agent, const Started& started) {
  const std::vector<int> processes = processes_of(job_.setup_.plan, agent.host);
  if (started.pids.size() != processes.size()) return;
  agent.started = true;
  if (remote_logs_ && !agent.host.local) remote_logs_->open(processes);
  for (std::size_t i = 0; i < processes.size(); ++i)
    state_.pids[static_cast<std::size_t>(processes[i])] = started.pids[i];
  if (&agent == agents_.members().front().get()) state_.threads = started.threads;  // of rank 0's host
  if (stage_ != Stage::Starting) return;
  if (!agents_.all_started()) return;
  stage_ = Stage::Running;
  limits_.start = Timer();
  started_at_ = Clock::now();
  job_.announcer_.started(state_, job_.folder_.path, start_text());
  log::info("launch", "job {} is not contained: {}", state_.job_id, kNotContained);
  health_->start();
  state_.stage = "running";
  state_.running_since = seconds_now();
  job_.live_->changed();
  job_.start_page();
  job_.write_record();
  job_.start_trackers();
  if (spec_.timeout) {
    if (!job_.limit_) job_.limit_ = Clock::now() + *spec_.timeout;
    limits_.job = Timer(job_.loop_, *job_.limit_ - Clock::now(), [this] {
      if (!end_.stop_status) end_.stop_status = kTimeoutStatus;
      stop(fmt::format("the time limit of {:g} s is over", std::chrono::duration<double>(*spec_.timeout).count()),
           SIGTERM, grace_after(SIGTERM));
    });
  }
  for (const int signal : std::exchange(early_signals_, {})) pass_on(signal);
  AgentHandle* const first = agents_.members().front().get();
  if (InputReader::worth_reading(0) && !(first->host.local && InputReader::may_be_given(0))) {
    input_ = std::make_unique<InputReader>(
        job_.loop_, 0, [first](std::string bytes) { first->channel->send(Input{std::move(bytes)}); });
  }
  look_for_failure();  // on a host that was faster than another
  ask_next_role();
}

/// "4 processes on 1 host (a: ranks 0-3), 2 threads each, run runs/..."
std::string Epoch::start_text() const {
  const Plan& plan = state_.plan;
  std::string text = to_string(plan);
  if (job_.has_launchers()) {
    const int ranks = plan.hosts.front().ranks;
    const bool same = std::ranges::all_of(plan.hosts, [ranks](const PlannedHost& host) { return host.ranks == ranks; });
    text += same ? fmt::format(", -np {} of a launcher on each", ranks) : ", a launcher on each with its own -np";
  }
  if (const int cores = crowded_cores(plan); cores > 0)
    text += fmt::format(", more than the {} core{} here", cores, cores == 1 ? "" : "s");
  if (spec_.bind == Binding::Core) text += ", each bound to its share of the cores";
  if (const int threads = state_.threads; threads > 0)
    text += fmt::format(", {} thread{} each", threads, threads == 1 ? "" : "s");
  return spec_.keep_logs ? text + ", run " + job_.folder_.shown : text;
}

/// The stack that an exception or a crash left is long: it is at the end of the log.
void Epoch::keep_words(const Ending& ending) const {
  const bool stack = ending.words.find(status::kThrowStack) != std::string::npos ||
                     ending.words.find(status::kNativeStack) != std::string::npos;
  if (!stack || !spec_.keep_logs) return;
  const auto folder = open_folder(state_.log_folder);
  if (!folder) return;
  const std::string name = log_name(ending.role, ending.rank, Stream::Stderr);
  const sys::UniqueFd log(::openat(folder->get(), name.c_str(), O_WRONLY | O_APPEND | O_NOFOLLOW | O_CLOEXEC));
  const std::string text = fmt::format("cohort: its own last words:\n{}", ending.words);
  if (log) static_cast<void>(!::write(log.get(), text.data(), text.size()));  // a full disk has been told of
}

void Epoch::on_exited(const Exited& exited) {
  const Roles roles = job_.setup_.plan.roles();
  if (!roles.has(exited.rank)) return;
  Ending ending;
  ending.role = roles.role_of(exited.rank);
  ending.rank = roles.number_of(exited.rank);
  ending.asked = ending.role == Role::Worker ? workers_asked_ : asked_ >= ending.role;
  ending.host = hosts_[static_cast<std::size_t>(exited.rank)];
  ending.pid = state_.pids[static_cast<std::size_t>(exited.rank)];
  ending.status = exited.status;
  ending.before_stop = exited.before_stop;
  ending.out_of_memory = exited.out_of_memory;
  ending.after_seconds = static_cast<double>(exited.after_ns) * 1e-9;
  ending.last_stderr = exited.last_stderr;
  ending.last = exited.last;
  ending.words = demangled(exited.words);
  keep_words(ending);
  ending.cause = exited.cause;
  job_.announcer_.rank_ended(ending);
  if (ending.asked && ending.status.signal == SIGKILL && stage_ == Stage::Running)
    say(fmt::format("{} has not ended within its grace, and was killed", ending.name()));
  if (settle_fate(ending, exited.rank) == Fate::Again) return;
  if (ending.role == Role::Server && !ending.asked && running_ranks() > 0) {
    job_.tell_how_server_ended(ending.rank,
                               fmt::format("{} after {:.1f} s", sys::to_string(ending.status), ending.after_seconds));
  }
  const bool well = ending.spared || (ending.asked && has_ended_well(ending));
  ++ended_[static_cast<std::size_t>(ending.role)];
  end_.endings.push_back(std::move(ending));
  if (!exited.status.success() && !well && end_.doing_then.empty()) {
    end_.doing_then = health_->doing_now();
    if (roles.is_rank(exited.rank))
      end_.doing_then[static_cast<std::size_t>(exited.rank)] = doing(exited.last) + at_step(exited.last);
  }
  health_->rank_ended(exited.rank, exited.last);
  job_.live_->process_ended(exited.rank, exited.status.success() || well, exited.status);
  if (exited.rank == 0) input_.reset();
  look_for_requeue();
  look_for_failure();
  look_for_chief(exited);
  ask_next_role();
}

// What ParameterServerStrategy's workers run never ends by itself.
void Epoch::look_for_chief(const Exited& exited) {
  const bool chief = spec_.tf_config && job_.setup_.plan.servers > 0 && exited.rank == 0;
  if (!chief || !exited.status.success() || stage_ != Stage::Running || running_ranks() == 0) return;
  workers_asked_ = true;
  stopping_.begin({}, SIGTERM, {spec_.grace});
}

void Epoch::ask_next_role() {
  const Role next = running_role();
  if (stage_ == Stage::Starting || stage_ == Stage::Ended || next <= asked_ || running(next) == 0) return;
  // Where all has gone well it has the last checkpoint to look at.
  const bool evaluates = next == Role::Evaluator && stage_ == Stage::Running;
  asked_ = next;
  stopping_.begin({}, SIGTERM, {evaluates ? spec_.evaluator_grace : spec_.grace});
}

// Ranks that save do so together. One that neither ends nor fails then has missed the question, or hangs.
void Epoch::look_for_requeue() {
  const auto saved = std::ranges::find_if(end_.endings, asks_for_requeue);
  if (saved == end_.endings.end() || limits_.requeue || stage_ != Stage::Running) return;
  limits_.requeue = Timer(job_.loop_, spec_.preempt_grace, [this, rank = saved->rank] {
    on_stuck(
        fmt::format("rank {} has saved and ended (exit status {}), and {} {} still running {:g} s later -- do all "
                    "ranks ask Preemption::requested, at every step?",
                    rank, kRequeueStatus, running_ranks(), running_ranks() == 1 ? "other rank is" : "other ranks are",
                    std::chrono::duration<double>(spec_.preempt_grace).count()));
  });
}

void Epoch::look_for_failure() {
  if (stage_ != Stage::Running || !first_failure(end_.endings)) return;
  // A rank that fell after another can be dead before it: that one still writes its core, frees its memory or runs its
  // last destructors. Told to end now, it would lose the status that it is about to give.
  if (follows_another(*first_failure(end_.endings)) && running_ranks() > 0) {
    if (!limits_.cause) wait_for_cause();
  } else {
    stop_for_failure();
  }
}

AgentHandle& Epoch::agent_of(int process) const {
  const auto& all = agents_.members();
  const auto found = std::ranges::find_if(all, [&](const auto& member) {
    const std::vector<int> here = processes_of(job_.setup_.plan, member->host);
    return std::ranges::find(here, process) != here.end();
  });
  return **found;
}

Epoch::Fate Epoch::settle_fate(Ending& ending, int process) {
  const auto before = again_.find(process);
  if (before != again_.end()) {
    ending.restarts = before->second.restarts + 1;
    ending.first_cause =
        before->second.restarts == 0 ? sys::to_string(before->second.status) : before->second.first_cause;
  }
  const bool may = ending.role == Role::Server && !ending.asked && !ending.status.success() && ending.before_stop &&
                   (stage_ == Stage::Starting || stage_ == Stage::Running);
  if (!may) return Fate::Failed;
  const std::string lost =
      fmt::format("{} on {} is lost ({})", ending.name(), ending.host, sys::to_string(ending.status));
  if (job_.server_restarts_ < spec_.server_restarts) {
    say(fmt::format("{}; it is started again ({} of {} times, --server-restarts)", lost, ++job_.server_restarts_,
                    spec_.server_restarts));
    agent_of(process).channel->send(
        StartAgain{process, {fmt::format("{}={}", env::kServerRestart, ending.restarts + 1)}});
    awaited_.insert(process);
    health_->rank_ended(process, ending.last);
    job_.live_->starts_again(process);
    state_.server_failures.push_back(ending);
    job_.write_record();
    again_.insert_or_assign(process, std::move(ending));
    return Fate::Again;
  }
  if (lost_servers_ < spec_.lost_servers && running(Role::Server) > 1) {
    ending.spared = true;
    say(fmt::format("{}; the job goes on without it ({} of {} that may be, --lost-servers)", lost, ++lost_servers_,
                    spec_.lost_servers));
    if (spec_.server_restarts > 0) agent_of(process).channel->send(GoOnWithout{process});
    return Fate::Without;
  }
  return Fate::Failed;
}

// Servers are not started again elsewhere: their place is taken by those of other hosts that have copies.
bool Epoch::goes_on_without(AgentHandle& agent, const std::string& why) {
  if (stage_ != Stage::Running || agent.host.ranks > 0 || agent.all_gone) return false;
  const Roles roles = job_.setup_.plan.roles();
  std::vector<int> lost;
  for (const int process : processes_of(job_.setup_.plan, agent.host)) {
    if (roles.role_of(process) != Role::Server) return false;
    if (!has_ended(process)) lost.push_back(process);
  }
  const int count = static_cast<int>(lost.size());
  if (lost_servers_ + count > spec_.lost_servers || running(Role::Server) <= count) return false;
  lost_servers_ += count;
  agent.all_gone = true;
  AgentPool::kill(agent);  // its guard, if it lives, ends what is left
  if (count == 0) {
    say(fmt::format("{} is lost ({}), where nothing ran any more", agent.host.name, why));
  } else {
    say(fmt::format(
        "{} on {} {} lost with {} host ({}); the job goes on without ({} of {} that may be, --lost-servers)",
        roles.names_of(lost), agent.host.name, count == 1 ? "is" : "are", count == 1 ? "its" : "their", why,
        lost_servers_, spec_.lost_servers));
  }
  for (const int process : lost) {
    awaited_.erase(process);
    Ending ending;
    ending.role = Role::Server;
    ending.rank = roles.number_of(process);
    ending.host = agent.host.name;
    ending.pid = state_.pids[static_cast<std::size_t>(process)];
    ending.status.signal = SIGKILL;
    ending.spared = true;
    ++ended_[static_cast<std::size_t>(Role::Server)];
    job_.tell_how_server_ended(ending.rank, "lost with its host");
    health_->rank_ended(process, {});
    job_.live_->process_ended(process, ending.spared, ending.status);
    end_.endings.push_back(std::move(ending));
  }
  health_->host_ended(processes_of(job_.setup_.plan, agent.host));
  ask_next_role();
  return true;
}

void Epoch::on_started_again(const StartedAgain& started) {
  if (awaited_.erase(started.rank) == 0) return;
  const int process = started.rank;
  Ending& before = again_.at(process);
  if (started.pid != 0) {
    state_.pids[static_cast<std::size_t>(process)] = started.pid;
    health_->started_again(process);
    job_.announcer_.started_again(before, started.pid);
    job_.write_record();
    return;
  }
  // It stays what it was: a failure, or, where all are told to end, nothing that anybody needs.
  before.spared = started.why.empty();
  if (!before.spared) say(fmt::format("{} on {} cannot be started again: {}", before.name(), before.host, started.why));
  ++ended_[static_cast<std::size_t>(Role::Server)];
  job_.live_->process_ended(process, before.spared, before.status);
  end_.endings.push_back(before);
  look_for_failure();
  ask_next_role();
}

}  // namespace cohort::launch
