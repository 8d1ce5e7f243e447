// How an epoch ends: who stops it and why, what its agents are told then, and what is said and kept of it.
#include "launch/processes.h"
#include "launch/supervise/job.h"
#include "launch/supervise/supervisor.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <utility>

namespace cohort::launch {
namespace {

/// For the rank that others have fallen after to be dead, too; as often while a rank that has left its world goes on to
/// run its last destructors, or a host is silent, which may be lost.
constexpr auto kCauseTime = std::chrono::milliseconds(500);
constexpr int kMostCauseWaits = 10;
/// A rank's failure is told so long after it at the latest.
constexpr auto kTellTime = std::chrono::milliseconds(700);
/// For more hosts to fail, once the agent of one cannot be started.
constexpr auto kOtherHostsTime = std::chrono::milliseconds(1500);
constexpr std::size_t kMostHostsTold = 8;

}  // namespace

void Epoch::wait_for_cause() {
  limits_.cause = Timer(job_.loop_, kCauseTime, [this] {
    const bool more = health_->somebody_leaves() || agents_.somebody_is_silent();
    if (more && ++cause_waits_ < kMostCauseWaits) return wait_for_cause();
    stop_for_failure();
  });
}

void Epoch::stop_for_failure() {
  const auto first = first_failure(end_.endings);
  stop(fmt::format("{} failed: {}", first->name(), sys::to_string(first->status)), SIGTERM, {spec_.grace});
  // Ranks may take their whole grace, and the kernel 60 ms for each GiB that it frees: nobody has to wait for that.
  // (Where there may be a restart, its line says what has failed.)
  if (job_.restarts_.most() == 0) tell_limit_ = Timer(job_.loop_, kTellTime, [this] { tell_failure(); });
}

void Epoch::tell_failure() {
  if (stage_ != Stage::Stopping) return;
  JobEnd end = how_it_ended();
  end.early = true;
  if (const Verdict verdict = judge(end); verdict.post_mortem) job_.announcer_.failed(*verdict.post_mortem);
}

void Epoch::on_stuck(const std::string& why) {
  end_.stuck = !end_.stop_status && stage_ == Stage::Running;
  if (!end_.stop_status) end_.stop_status = kTimeoutStatus;
  stop(why, SIGTERM, {spec_.grace});
}

Stopping::Events Epoch::stopping_events() {
  Stopping::Events events;
  events.tell = [this](int signal, Stopping::Grace grace) { tell_agents(signal, grace); };
  events.give_up = [this] {
    say("an agent does not answer; ending its processes from here");
    agent_lost_ = true;
    finish();
  };
  events.running_ranks = [this] { return running_ranks(); };
  events.running_others = [this] { return running_others(); };
  events.say = [this](const std::string& text) { say(text); };
  return events;
}

void Epoch::stop(const std::string& reason, int signal, Stopping::Grace grace) {
  if (stage_ == Stage::Ended) return;
  before_stop();
  if (end_.quiet) stopping_.be_quiet();
  stopping_.begin(reason, signal, grace);
  if (health_ && health_->somebody_saves()) stopping_.they_save();
  check_end();
}

void Epoch::before_stop() {
  stage_ = Stage::Stopping;
  limits_ = {};
  if (health_) health_->stop();
  state_.stage = "ending";
  job_.live_->changed();
  input_.reset();
  agents_.start_no_more();
}

void Epoch::tell_agents(int signal, Stopping::Grace grace) {
  const Role role = running_role();
  asked_ = std::max(asked_, role);
  for (const auto& agent : agents_.members()) {
    if (agent->channel == nullptr) {
      AgentPool::kill(*agent);  // it has nothing to end but itself
    } else if (!agent->started) {
      agent->channel->send(Finish{end_.stop_status.value_or(1)});
    } else {
      agent->channel->send(StopWorkers{signal, static_cast<std::uint32_t>(grace.usual.count()),
                                       static_cast<std::uint32_t>(grace.saving.count()), role});
    }
  }
}

void Epoch::fail_start(const std::string& why) {
  if (!end_.stop_status) end_.stop_status = kCannotStartStatus;
  end_.start_failure = why;
  stop(why, SIGKILL, {});
}

void Epoch::on_host_failed(const AgentHandle& agent, const std::string& why) {
  if (!failed_hosts_.emplace(agent.host.index, why).second) return;
  agents_.start_no_more();
  const auto& all = agents_.members();
  const bool settled = std::ranges::all_of(all, [this](const auto& member) {
    return member->host.local || member->channel != nullptr || member->process_gone || member->remote == nullptr ||
           failed_hosts_.contains(member->host.index);
  });
  if (settled) return fail_start_of_hosts();
  // Whoever mends one host wants to know of the others that do not work either.
  if (!limits_.other_hosts) limits_.other_hosts = Timer(job_.loop_, kOtherHostsTime, [this] { fail_start_of_hosts(); });
}

void Epoch::fail_start_of_hosts() {
  if (stage_ != Stage::Starting) return;
  if (failed_hosts_.size() == 1) return fail_start(failed_hosts_.begin()->second);
  std::string text = fmt::format("{} hosts cannot be had (`cohort doctor` with the same hosts looks at all of them)",
                                 failed_hosts_.size());
  std::size_t told = 0;
  for (const auto& [index, why] : failed_hosts_) {
    if (++told > kMostHostsTold) break;
    text += "\n  " + why;
  }
  if (failed_hosts_.size() > kMostHostsTold)
    text += fmt::format("\n  and {} more", failed_hosts_.size() - kMostHostsTold);
  fail_start(text);
}

// Unless a rank had failed before, and not because it had lost others.
void Epoch::lose_agent(const std::string& what) {
  agent_lost_ = true;
  const auto first = first_failure(end_.endings);
  if (end_.stop_status || (first && !follows_another(*first))) return;
  end_.stop_status = 1;
  lost_agent_ = what;
}

void Epoch::on_channel_closed(AgentHandle& agent, const std::optional<Error>& error) {
  if (agent.all_gone || stage_ == Stage::Ended) return;
  if (goes_on_without(agent, error ? error->what() : "its agent is lost")) return;
  AgentPool::kill(agent);  // its guard, if it lives, ends what is left
  const std::string why = error ? fmt::format(" ({})", error->what()) : "";
  if (stopping_.reason().empty()) say(fmt::format("the agent of {} is lost{}; ending the job", agent.host.name, why));
  lose_agent(fmt::format("the agent of {} was lost{}", agent.host.name, why));
  stop(fmt::format("the agent of {} was lost", agent.host.name), SIGKILL, {});
}

void Epoch::on_agent_process_ended(AgentHandle& agent) {
  if (!agent.all_gone && stage_ != Stage::Ended) {
    // What it said last may still be on its way; an agent whose guard was killed ends the job and says so.
    if (agent.channel == nullptr && agent.remote && stage_ == Stage::Starting) {
      on_host_failed(agent, agents_.why_not(agent));
    } else if (agent.remote &&
               goes_on_without(agent, fmt::format("the connection to it has ended, {}", agents_.how_ended(agent)))) {
      return check_end();
    } else if (agent.channel == nullptr || agent.channel->closed()) {
      lose_agent(fmt::format("the agent of {} was lost", agent.host.name));
      if (stopping_.reason().empty())
        say(fmt::format("the agent of {} ended before the job; ending the job", agent.host.name));
      if (stage_ != Stage::Stopping) stop(fmt::format("the agent of {} was lost", agent.host.name), SIGKILL, {});
    } else if (stage_ != Stage::Stopping) {
      if (!end_.stop_status) end_.stop_status = 1;
      const std::string what =
          agent.remote ? fmt::format("the connection to {} has ended ({})", agent.host.name, agents_.how_ended(agent))
                       : fmt::format("the guard of {} was killed", agent.host.name);
      say(what + "; ending the job");
      stop(what, SIGKILL, {});
    }
  }
  check_end();
}

void Epoch::on_agent_ends(AgentHandle& agent, const Ends& ends) {
  if (stage_ == Stage::Stopping || stage_ == Stage::Ended || goes_on_without(agent, ends.why)) return;
  agent_lost_ = true;
  if (!end_.stop_status) end_.stop_status = 1;
  say(ends.why + "; ending the job");
  stop(ends.why, SIGKILL, {});
}

void Epoch::on_signal(int signal) {
  switch (signal) {
    case SIGUSR1:
    case SIGUSR2: return pass_on(signal);
    case SIGCONT:
      if (input_) input_->look_again();
      return;
    case SIGQUIT:
      if (stage_ != Stage::Running) break;
      if (health_->show_soon()) agents_.broadcast(AskStacks{});
      return;
    default: break;
  }
  // A batch system tells all processes of a job at once: the agents' word and this are one request.
  if (stage_ == Stage::Stopping && signal == told_by_ && std::exchange(told_by_agent_, false)) return;
  on_told(signal, fmt::format("told to end by {}", sys::signal_name(signal)));
}

void Epoch::pass_on(int signal) {
  if (stage_ == Stage::Starting) return early_signals_.push_back(signal);
  if (stage_ == Stage::Running && health_->somebody_saves())
    say(fmt::format("{}: asking the ranks to save and end", sys::signal_name(signal)));
  agents_.broadcast(SignalWorkers{signal});
}

void Epoch::on_agent_told(const AgentHandle& agent, const Told& told) {
  // Each agent has heard it, and it is no reason for more haste.
  if (stage_ == Stage::Stopping || stage_ == Stage::Ended) return;
  told_by_agent_ = true;
  on_told(told.signal,
          fmt::format("the agent of {} was told to end by {}", agent.host.name, sys::signal_name(told.signal)));
}

void Epoch::on_told(int signal, const std::string& reason) {
  if (stage_ == Stage::Ended) {
    end_.quiet = true;
    return job_.loop_.stop();  // output that nobody takes is given up
  }
  if (stage_ == Stage::Stopping) {
    told_to_end_ = true;
    return stopping_.hurry();
  }
  told_to_end_ = true;
  if (!end_.stop_status) {
    end_.stop_status = 128 + signal;
    told_by_ = signal;
  }
  stop(reason, signal, grace_after(signal));
}

Stopping::Grace Epoch::grace_after(int signal) const {
  return {spec_.grace, signal == SIGTERM ? spec_.preempt_grace : Milliseconds(0)};
}

void Epoch::on_reader_gone() {
  if (stage_ != Stage::Running) return;
  end_.quiet = true;
  end_.stop_status = 128 + SIGPIPE;
  stop("nobody reads stdout any more", SIGTERM, {spec_.grace});
}

void Epoch::on_owner_gone() {
  end_.quiet = true;
  if (stage_ == Stage::Ended) {
    if (!spec_.owner_folder.empty()) remove_private_folder(spec_.owner_folder);
    return job_.loop_.stop();
  }
  if (!end_.stop_status && stage_ != Stage::Stopping) end_.stop_status = 128 + SIGHUP;
  stop(fmt::format("the process that it belongs to (pid {}) has ended", *spec_.owner_pid), SIGTERM, {spec_.grace});
}

int Epoch::running(Role role) const {
  const Roles roles = job_.setup_.plan.roles();
  const int all = role == Role::Worker   ? roles.workers
                  : role == Role::Server ? roles.servers
                                         : roles.others() - roles.servers;
  return all - ended_[static_cast<std::size_t>(role)];
}

Role Epoch::running_role() const {
  for (const Role role : {Role::Worker, Role::Server}) {
    if (running(role) > 0) return role;
  }
  return Role::Evaluator;
}

bool Epoch::has_ended(int process) const {
  return std::ranges::any_of(end_.endings, [&](const Ending& ending) {
    return state_.plan.roles().process_of(ending.role, ending.rank) == process;
  });
}

std::string Epoch::running_others() const {
  const Roles roles = job_.setup_.plan.roles();
  std::vector<int> processes;
  for (int process = roles.workers; process < roles.all(); ++process) {
    if (!has_ended(process)) processes.push_back(process);
  }
  return roles.names_of(processes);
}

void Epoch::check_end() {
  if (stage_ == Stage::Ended || !agents_.nothing_runs()) return;
  if (!restart_) {
    restart_ = restart_after();
    if (!restart_->again) agents_.finish();
  }
  if (restart_->again || agents_.all_ended()) finish();
}

Restarts::Decision Epoch::restart_after() const {
  const Verdict verdict = judge(how_it_ended());
  if (!verdict.breakdown || told_to_end_ || agent_lost_) return {};
  return job_.after(*verdict.breakdown);
}

JobEnd Epoch::how_it_ended() const {
  JobEnd end = end_;
  end.roles = job_.setup_.plan.roles();
  end.stop_reason = !undelivered_.empty() ? undelivered_ : lost_agent_.empty() ? stopping_.reason() : lost_agent_;
  end.told_to_end = told_by_ != 0;
  end.seconds = std::chrono::duration<double>(Clock::now() - started_at_).count();
  end.log_folder = shown_logs_;
  end.colour = sys::wants_colour(2);
  return end;
}

void Epoch::bring_to_owner() {
  const auto brought = bring_from_ranks(*job_.payload_transfer_, job_.setup_.plan.world_size);
  if (brought) return;
  // A job whose results are lost has not ended well; a reason that there is already came first.
  if (end_.stop_status || first_failure(end_.endings)) return say(brought.error().what());
  end_.stop_status = 1;
  undelivered_ = brought.error().what();
}

void Epoch::finish() {
  stage_ = Stage::Ended;
  stopping_.finish();
  tell_limit_ = Timer();
  input_.reset();
  const Restarts::Decision restart = restart_.value_or(Restarts::Decision());
  if (!restart.again) {
    job_.warnings_->finish();
    // What a killed agent has left was handed to us by the kernel.
    const auto stuck = sweep(job_.spared_, std::chrono::seconds(10), {});
    if (!stuck.empty()) say(fmt::format("even SIGKILL does not end {}", describe_stuck(stuck)));
  }
  job_.display_.end_lines();
  if (!restart.again && job_.payload_transfer_ && !job_.owner_gone()) bring_to_owner();

  const JobEnd end = how_it_ended();
  const Verdict verdict = judge(end);
  if (const std::string doubt = doubt_about(end, verdict); !doubt.empty() && !spec_.quiet && !spec_.tf_config)
    say(doubt);
  job_.announcer_.ended(end, verdict, restart);
  end_.stop_status = verdict.status;
  if (verdict.post_mortem) state_.failure = verdict.post_mortem->first;
  state_.end = utc_now();
  state_.exit_status = verdict.status;
  state_.reason = verdict.reason;
  state_.attempts.push_back(static_cast<const Attempt&>(state_));
  state_.stage = "ended";
  job_.live_->write();
  if (restart.again) {  // its attempts say how this one has ended; who reads the record must not take that for the job
    state_.end.clear();
    state_.exit_status.reset();
  }
  job_.write_record();
  if (!restart.again) return job_.end(verdict.status);
  job_.next_ = Timer(job_.loop_, {}, [&job = job_] { job.begin_next(); });
}

}  // namespace cohort::launch
