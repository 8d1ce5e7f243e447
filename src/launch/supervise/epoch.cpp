#include "launch/supervise/epoch.h"

#include <cohort/exit_status.h>

#include "base/signals.h"
#include "base/terminal.h"
#include "launch/processes.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <utility>

namespace cohort::launch {
namespace {

/// Time to find the rank dead that caused another rank's failure. Waits again while a rank that has left its world runs
/// its last destructors, or a host that may be lost is silent.
constexpr auto kCauseTime = std::chrono::milliseconds(500);
constexpr int kMostCauseWaits = 10;
/// Latest time after a rank's failure at which it is reported.
constexpr auto kTellTime = std::chrono::milliseconds(700);
/// Time for more hosts to fail, after the agent of one could not be started.
constexpr auto kOtherHostsTime = std::chrono::milliseconds(1500);
constexpr std::size_t kMostHostsTold = 8;
/// Interval between checks of the ranks' health.
constexpr auto kLookEvery = std::chrono::seconds(1);
/// Time for agents to report what ranks do.
constexpr auto kOverviewTime = std::chrono::milliseconds(100);

std::string why_not_started(const AgentPool& agents, const Plan& plan, std::chrono::milliseconds timeout) {
  const int cores = crowded_cores(plan);
  return fmt::format(
      "no sign of running ranks from {} after {:.0f} s{}", agents.missing(),
      std::chrono::duration<double>(timeout).count(),
      cores == 0
          ? std::string()
          : fmt::format(
                ": {} processes share the {} core{} here -- start fewer, or give them more time (--start-timeout)",
                plan.roles().all(), cores, cores == 1 ? "" : "s"));
}

std::string what_failed(const StartFailed& failed, const Roles& roles, const std::string& host) {
  return failed.rank >= 0 ? fmt::format("{} on {}: {}", roles.name_of(failed.rank), host, failed.reason)
                          : fmt::format("{}: {}", host, failed.reason);
}

/// `failed` says by host index why agents do not come.
std::string why_not_had(const std::map<int, std::string>& failed) {
  if (failed.size() == 1) return failed.begin()->second;
  std::string text =
      fmt::format("{} hosts cannot be had (`cohort doctor` with the same hosts looks at all of them)", failed.size());
  std::size_t told = 0;
  for (const auto& [index, why] : failed) {
    if (++told > kMostHostsTold) break;
    text += "\n  " + why;
  }
  if (failed.size() > kMostHostsTold) text += fmt::format("\n  and {} more", failed.size() - kMostHostsTold);
  return text;
}

AgentHandle& agent_of(const AgentPool& agents, const Plan& plan, int process) {
  const auto found = std::ranges::find_if(agents.members(), [&](const auto& member) {
    const std::vector<int> here = processes_on(plan, member->host.index);
    return std::ranges::find(here, process) != here.end();
  });
  return **found;
}

}  // namespace

Epoch::Epoch(Loop& loop, const JobSetup& setup, AgentPool& agents, Orders& orders, RunOutput& run, JobPast& past)
    : loop_(loop),
      setup_(setup),
      agents_(agents),
      orders_(orders),
      run_(run),
      past_(past),
      members_(setup, run),
      stopping_(loop, agents, members_, run, spec_.grace) {
  past_.servers.begin_epoch();
  run_.begin_attempt(past_.restarts.done());
  limits_.start = Timer(loop_, start_timeout_, [this] { on_start_late(); });
}

void Epoch::on_start_late() {
  bool goes_on = false;
  for (std::size_t i = 0; i < agents_.members().size(); ++i) {  // (the loop may remove agents)
    AgentHandle& agent = *agents_.members()[i];
    if (agent.channel == nullptr && !agent.lost) goes_on = begins_without(agent, agents_.why_not(agent)) || goes_on;
  }
  if (!goes_on) return fail_start(why_not_started(agents_, setup_.plan, start_timeout_));
  limits_.start = Timer(loop_, start_timeout_, [this] { on_start_late(); });
}

void Epoch::settle(const std::vector<int>& shown) {
  members_.settle(shown);
  if (setup_.plan.least > 0) elastic_.emplace(loop_, setup_, agents_, orders_, run_, members_.health(), past_.members);
}

void Epoch::look() {
  if (stopping_.given_up() && stage_ != Stage::Ended) {
    say("an agent does not answer; ending its processes from here");
    end_.agent_lost = true;
    finish();
  }
  while (elastic_) {
    const std::vector<Event> due = elastic_->take();
    if (due.empty()) return;
    for (const Event& event : due) decide(event);
  }
}

void Epoch::give_orders() {
  if (stage_ != Stage::Starting) return;
  ordered_ = true;
  try {
    if (elastic_) {
      decide(event::Ordered{});
      orders_.write_members(elastic_->membership().current());
    } else if (past_.restarts.done() > 0) {
      orders_.announce_epoch();
    }
  } catch (const Error& error) {
    return fail_start(fmt::format("the job's store does not take {}: {}",
                                  elastic_ ? "its members" : "the ranks' next start", error.what()));
  }
  orders_.give();
}

bool Epoch::begins_without(AgentHandle& agent, const std::string& why) {
  // (Agents that come by themselves are waited for without limit; ranks that have been told their number keep it.)
  if (stage_ != Stage::Starting || !elastic_ || ordered_ || comes_by_itself(setup_.plan.method)) return false;
  if (!orders_.plan_without(agent, membership()->barred())) return false;
  say(fmt::format("{}; the job begins without {}", why, agent.host.name));
  settle(shown_ranks(spec_, setup_.plan));
  return true;
}

Membership::Answer Epoch::follow(Membership::Answer answer) {
  for (const Action& action : answer.actions) {
    std::visit([this](const auto& one) { carry_out(one); }, action);
  }
  if (answer.actions.empty()) return answer;
  look_for_failure();
  check_end();
  return answer;
}

void Epoch::carry_out(const action::Drop& drop) {
  AgentHandle& agent = *agents_.members()[static_cast<std::size_t>(drop.agent)];
  agent.started = agent.all_gone = agent.lost = true;
  // An agent that was only stopped may have no lifeline, but it will read this message.
  if (agent.channel != nullptr) agent.channel->send(StopWorkers{SIGKILL, 0, 0, Role::Worker});
  AgentPool::kill(agent);  // its guard, if it lives, ends the processes that are left
  for (const int worker : drop.workers) end_lost(worker, !drop.failed);
  members_.health().host_ended(processes_on(setup_.plan, drop.agent));
}

void Epoch::carry_out(const action::Excuse& excuse) {
  if (Ending* const ending = members_.find(excuse.worker)) ending->spared = excuse.excused;
}

void Epoch::carry_out(const action::EndJob& end) {
  end_.set_status(end.status);
  stop(end.why, end.signal, end.signal == SIGKILL ? Stopping::Grace() : grace_after(end.signal));
}

void Epoch::carry_out(const action::EndAsTold& end) {
  told_by_agent(*agents_.members()[static_cast<std::size_t>(end.agent)], end.signal);
}

void Epoch::on_unfit(AgentHandle* agent, const std::string& why) {
  if (agent != nullptr && is_newcomer(*agent)) return void(decide(event::AgentFailed{agent->host.index, why}));
  if (stage_ != Stage::Starting) return;
  // The agent is unknown; or it is local, so that no other local agent could be started either.
  if (agent == nullptr || agent->remote == nullptr) return fail_start(why);
  on_host_failed(*agent, why);
}

void Epoch::on_message(AgentHandle& agent, Message message) {
  if (agent.lost) {
    // Takes only the output of ended ranks, since the numbers of other ranks may have been given to new processes.
    const auto* words = std::get_if<Output>(&message);
    if (words == nullptr || !members_.roles().has(words->rank) || !members_.has_ended(words->rank)) return;
  }
  if (auto* output = std::get_if<Output>(&message)) {
    if (!members_.roles().has(output->rank)) return;
    members_.take(agent, *output);
  } else if (const auto* started = std::get_if<Started>(&message)) {
    on_started(agent, *started);
  } else if (const auto* failed = std::get_if<StartFailed>(&message)) {
    const std::string why = what_failed(*failed, members_.roles(), agent.host.name);
    if (is_newcomer(agent)) return void(decide(event::AgentFailed{agent.host.index, why}));
    if (elastic_ && stage_ == Stage::Stopping) return;
    // (Each of several launchers starts its own program, so the reason names it.)
    fail_start(setup_.plan.method == StartMethod::Launcher
                   ? why
                   : fmt::format("cannot start {}: {}", program_of(setup_, failed->rank), why));
  } else if (const auto* exited = std::get_if<Exited>(&message)) {
    on_exited(*exited);
  } else if (const auto* again = std::get_if<StartedAgain>(&message)) {
    on_started_again(*again);
  } else if (auto* reports = std::get_if<Reports>(&message)) {
    run_.take(agent.host.name, *reports);
    if (elastic_) decide(reported_by(*reports));
    members_.health().take(std::move(*reports), processes_on(setup_.plan, agent.host.index));
    if (stage_ == Stage::Stopping && members_.somebody_saves()) stopping_.they_save();
  } else if (const auto* stacks = std::get_if<Stacks>(&message)) {
    if (!stacks->text.empty())
      say(fmt::format("stacks of {}:\n{}", members_.roles().name_of(stacks->rank), demangled(stacks->text)));
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
    members_.health().host_ended(processes_on(setup_.plan, agent.host.index));
    if (elastic_) decide(event::AgentEmpty{agent.host.index});
    if (!gone->stuck.empty()) {
      say(fmt::format("{}: even SIGKILL does not end {}; the host may have to be restarted", agent.host.name,
                      gone->stuck));
      end_.set_status(1);
    }
    check_end();
  }
}

void Epoch::on_started(AgentHandle& agent, const Started& started) {
  const std::vector<int> processes = processes_of(setup_.plan, agent.host);
  if (started.pids.size() != processes.size()) return;
  agent.started = true;
  members_.started(agent, processes);
  run_.started(processes, started.pids);
  if (&agent == &agent_of(agents_, setup_.plan, 0)) run_.state().threads = started.threads;  // on rank 0's host
  if (is_newcomer(agent)) return void(decide(event::AgentStarted{agent.host.index}));
  look_for_running();
}

void Epoch::look_for_running() {
  if (stage_ != Stage::Starting || !agents_.all_started()) return;
  stage_ = Stage::Running;
  limits_.start = Timer();
  started_at_ = Clock::now();
  run_.running();
  look_at_health();
  if (spec_.timeout) {
    if (!past_.limit) past_.limit = Clock::now() + *spec_.timeout;
    limits_.job = Timer(loop_, *past_.limit - Clock::now(), [this] {
      end_.set_status(kTimeoutStatus);
      stop(fmt::format("the time limit of {:g} s is over", std::chrono::duration<double>(*spec_.timeout).count()),
           SIGTERM, grace_after(SIGTERM));
    });
  }
  for (const int signal : std::exchange(early_signals_, {})) pass_on(signal);
  AgentHandle& first = agent_of(agents_, setup_.plan, 0);
  if (!members_.has_ended(0) && InputReader::worth_reading(0) && !(first.host.local && InputReader::may_be_given(0)))
    input_ = std::make_unique<InputReader>(loop_, 0, first);
  if (elastic_) follow(elastic_->begin());
  look_for_failure();  // on a host that started faster than another
  ask_next_role();
}

void Epoch::on_exited(const Exited& exited) {
  const Roles& roles = members_.roles();
  if (!roles.has(exited.rank) || members_.has_ended(exited.rank)) return;
  Ending ending = members_.ending_of(exited.rank, exited);
  ending.asked = stopping_.asked(ending.role);
  ending.after_seconds = static_cast<double>(exited.after_ns) * 1e-9;
  ending.words = demangled(exited.words);
  run_.rank_ended(ending);
  if (ending.asked && ending.status.signal == SIGKILL && stage_ == Stage::Running)
    say(fmt::format("{} has not ended within its grace, and was killed", ending.name()));
  if (starts_again(ending, exited.rank)) return;
  if (ending.role == Role::Server && !ending.asked && members_.running_ranks() > 0) {
    orders_.server_ended(ending.rank,
                         fmt::format("{} after {:.1f} s", sys::to_string(ending.status), ending.after_seconds));
  }
  const bool well = ending.spared || (ending.asked && has_ended_well(ending));
  if (!exited.status.success() && !well) members_.note_failure(ending);
  end_process(exited.rank, std::move(ending), exited.status.success() || well);
  if (elastic_) decide(ended_by(members_.endings().back()));
  look_for_failure();
  look_for_requeue();
  look_for_chief(exited);
  ask_next_role();
}

void Epoch::end_process(int process, Ending ending, bool well) {
  members_.end(process, std::move(ending), well);
  if (process == 0) input_.reset();
}

// Asks the workers to end after the chief: with ParameterServerStrategy, their program never ends by itself.
void Epoch::look_for_chief(const Exited& exited) {
  const bool chief = spec_.tf_config && setup_.plan.servers > 0 && exited.rank == 0;
  if (!chief || !exited.status.success() || stage_ != Stage::Running || members_.running_ranks() == 0) return;
  stopping_.ask(Role::Worker, spec_.grace);
}

void Epoch::ask_next_role() {
  const Role next = members_.running_role();
  if (stage_ == Stage::Starting || stage_ == Stage::Ended || !stopping_.is_next(next) || members_.running(next) == 0)
    return;
  // If all has gone well, the evaluator still has the last checkpoint to evaluate.
  const bool evaluates = next == Role::Evaluator && stage_ == Stage::Running;
  stopping_.ask(next, evaluates ? spec_.evaluator_grace : spec_.grace);
}

// Ranks that save do so together. A rank that later neither ends nor fails has missed the request, or hangs.
void Epoch::look_for_requeue() {
  const auto saved = std::ranges::find_if(members_.endings(), asks_for_requeue);
  if (saved == members_.endings().end() || limits_.requeue || stage_ != Stage::Running) return;
  limits_.requeue = Timer(loop_, spec_.preempt_grace, [this, rank = saved->rank] {
    on_stuck(
        fmt::format("rank {} has saved and ended (exit status {}), and {} {} still running {:g} s later -- do all "
                    "ranks ask Preemption::requested, at every step?",
                    rank, kRequeueStatus, members_.running_ranks(),
                    members_.running_ranks() == 1 ? "other rank is" : "other ranks are",
                    std::chrono::duration<double>(spec_.preempt_grace).count()));
  });
}

void Epoch::look_for_failure() {
  if (stage_ != Stage::Running || !first_failure(members_.endings())) return;
  // A rank that failed as a consequence can be dead before the rank that caused it, which still writes its core, frees
  // its memory or runs its last destructors. If it were told to end now, its own exit status would be lost.
  if (follows_another(*first_failure(members_.endings())) && members_.running_ranks() > 0) {
    if (!limits_.cause) wait_for_cause();
  } else {
    stop_for_failure();
  }
}

bool Epoch::starts_again(Ending& ending, int process) {
  past_.servers.recall(process, ending);
  const bool may = ending.role == Role::Server && !ending.asked && !ending.status.success() && ending.before_stop &&
                   (stage_ == Stage::Starting || stage_ == Stage::Running);
  if (!may) return false;
  const auto decision = past_.servers.after(process, ending, members_.running(Role::Server));
  if (decision.outcome == ServerLosses::Outcome::Failed) return false;
  say(decision.text);
  const AgentHandle& agent = agent_of(agents_, setup_.plan, process);
  if (decision.outcome == ServerLosses::Outcome::Without) {
    ending.spared = true;
    if (spec_.server_restarts > 0) agent.channel->send(GoOnWithout{process});
    return false;
  }
  agent.channel->send(StartAgain{process, {fmt::format("{}={}", env::kServerRestart, ending.restarts + 1)}});
  members_.health().rank_ended(process, ending.last);
  run_.starts_again(process, ending);
  return true;
}

void Epoch::end_lost(int process, bool excused) {
  Ending ending = members_.killed(process);
  ending.after_seconds = std::chrono::duration<double>(Clock::now() - started_at_).count();
  ending.spared = excused;
  end_process(process, std::move(ending), false);
  members_.health().left(process);
}

bool Epoch::goes_on_without(AgentHandle& agent, const std::string& why) {
  if (elastic_) {
    if (begins_without(agent, why)) return true;
    if (!decide(event::AgentLost{agent.host.index, why}).taken) return false;
    look_for_running();
    return true;
  }
  if (stage_ != Stage::Running || agent.host.ranks > 0 || agent.all_gone) return false;
  const Roles& roles = members_.roles();
  std::vector<int> lost;
  for (const int process : processes_of(setup_.plan, agent.host)) {
    if (roles.role_of(process) != Role::Server) return false;
    if (!members_.has_ended(process)) lost.push_back(process);
  }
  const auto text =
      past_.servers.after_host(agent.host.name, why, lost, roles.names_of(lost), members_.running(Role::Server));
  if (!text) return false;
  agent.all_gone = true;
  AgentPool::kill(agent);  // its guard, if it lives, ends the processes that are left
  say(*text);
  for (const int process : lost) {
    Ending ending = members_.killed(process);
    ending.spared = true;
    orders_.server_ended(ending.rank, "lost with its host");
    end_process(process, std::move(ending), true);
  }
  members_.health().host_ended(processes_of(setup_.plan, agent.host));
  ask_next_role();
  return true;
}

void Epoch::on_started_again(const StartedAgain& started) {
  if (elastic_) {
    if (!elastic_->membership().awaits(started.rank)) return;
    members_.started(agent_of(agents_, setup_.plan, started.rank), {started.rank});
    run_.started({started.rank}, {started.pid});
    return void(decide(event::StartedOne{started.rank, started.pid != 0 ? std::string() : started.why}));
  }
  auto before = past_.servers.settle(started.rank);
  if (!before) return;
  const int process = started.rank;
  if (started.pid != 0) {
    members_.health().started_again(process);
    return run_.started_again(process, *before, started.pid);
  }
  // A server that cannot be started has failed; if all have been told to end meanwhile, nobody needs it.
  before->spared = started.why.empty();
  if (!before->spared)
    say(fmt::format("{} on {} cannot be started again: {}", before->name(), before->host, started.why));
  const bool well = before->spared;
  end_process(process, *std::move(before), well);
  look_for_failure();
  ask_next_role();
}

void Epoch::wait_for_cause() {
  limits_.cause = Timer(loop_, kCauseTime, [this] {
    const bool more = members_.health().somebody_leaves() || agents_.somebody_is_silent();
    if (more && ++cause_waits_ < kMostCauseWaits) return wait_for_cause();
    stop_for_failure();
  });
}

void Epoch::stop_for_failure() {
  const auto first = first_failure(members_.endings());
  stop(fmt::format("{} failed: {}", first->name(), sys::to_string(first->status)), SIGTERM, {spec_.grace});
  // Ranks may take their whole grace, and the kernel 60 ms for each GiB that it frees, so the post-mortem does not wait
  // for that. (If a restart is possible, its message says what has failed.)
  if (spec_.max_restarts == 0) tell_limit_ = Timer(loop_, kTellTime, [this] { tell_failure(); });
}

void Epoch::tell_failure() {
  if (stage_ != Stage::Stopping) return;
  JobEnd end = how_it_ended();
  end.early = true;
  if (const Verdict verdict = judge(end); verdict.post_mortem) run_.failed(*verdict.post_mortem);
}

void Epoch::on_stuck(const std::string& why) {
  end_.known.stuck = !end_.known.stop_status && stage_ == Stage::Running;
  end_.set_status(kTimeoutStatus);
  stop(why, SIGTERM, {spec_.grace});
}

void Epoch::look_at_health() {
  Health::Findings findings = members_.health().look();
  for (const Warning& warning : findings.warnings) run_.warn(warning);
  for (const auto& stopped : findings.stopped) {
    const bool goes_on =
        elastic_ &&
        (stopped.with_its_host ? goes_on_without(agent_of(agents_, setup_.plan, stopped.process), stopped.why)
                               : decide(event::StoppedTooLong{stopped.process, stopped.since}).taken);
    if (goes_on) continue;
    findings.end = stopped.why;
    break;
  }
  if (findings.end && stage_ == Stage::Running) {
    show_overview();
    return on_stuck(*findings.end);
  }
  if (stage_ == Stage::Running) limits_.health = Timer(loop_, kLookEvery, [this] { look_at_health(); });
}

void Epoch::show_overview() {
  for (const std::string& line : members_.health().overview()) say(line);
}

void Epoch::stop(const std::string& reason, int signal, Stopping::Grace grace) {
  if (stage_ == Stage::Ended) return;
  stage_ = Stage::Stopping;
  limits_ = {};
  if (elastic_) elastic_->stop();
  overview_ = Timer();
  run_.ending();
  input_.reset();
  agents_.start_no_more();
  if (end_.known.quiet) stopping_.be_quiet();
  stopping_.begin(reason, signal, grace, stop_status());
  check_end();
}

void Epoch::fail_start(const std::string& why) {
  end_.set_status(kCannotStartStatus);
  end_.known.start_failure = why;
  stop(why, SIGKILL, {});
}

void Epoch::on_host_failed(AgentHandle& agent, const std::string& why) {
  if (begins_without(agent, why)) return;
  if (!failed_hosts_.emplace(agent.host.index, why).second) return;
  agents_.start_no_more();
  const auto& all = agents_.members();
  const bool settled = std::ranges::all_of(all, [this](const auto& member) {
    return member->host.local || member->channel != nullptr || member->process_gone || member->remote == nullptr ||
           failed_hosts_.contains(member->host.index);
  });
  if (settled) return fail_start_of_hosts();
  // Waits for further failures, since a person who repairs one host wants to know about the others that fail, too.
  if (!limits_.other_hosts) limits_.other_hosts = Timer(loop_, kOtherHostsTime, [this] { fail_start_of_hosts(); });
}

void Epoch::fail_start_of_hosts() {
  if (stage_ != Stage::Starting) return;
  fail_start(why_not_had(failed_hosts_));
}

void Epoch::on_channel_closed(AgentHandle& agent, const std::optional<Error>& error) {
  if (agent.all_gone && elastic_) decide(event::AgentLost{agent.host.index, {}});  // it can start nothing any more
  if (agent.all_gone && stage_ == Stage::Stopping) return check_end();
  if (agent.all_gone || stage_ == Stage::Ended) return;
  if (goes_on_without(agent, error ? error->what() : "its agent is lost")) return;
  if (stage_ == Stage::Starting && !ordered_ && agents_.await_again(agent))
    return say(fmt::format("{} is lost before the job has begun, and is awaited again", agent.host.name));
  AgentPool::kill(agent);  // its guard, if it lives, ends the processes that are left
  const std::string why = error ? fmt::format(" ({})", error->what()) : "";
  if (stopping_.reason().empty()) say(fmt::format("the agent of {} is lost{}; ending the job", agent.host.name, why));
  end_.lose_agent(members_, fmt::format("the agent of {} was lost{}", agent.host.name, why));
  stop(fmt::format("the agent of {} was lost", agent.host.name), SIGKILL, {});
}

void Epoch::on_agent_process_ended(AgentHandle& agent) {
  if (!agent.all_gone && stage_ != Stage::Ended) {
    if (elastic_ && stage_ == Stage::Stopping && agent.channel == nullptr) {
      // The agent was a newcomer on its way, and the stop has ended it.
      agent.started = agent.all_gone = agent.lost = true;
      return check_end();
    }
    if (is_newcomer(agent) && agent.channel == nullptr) {
      decide(event::AgentFailed{agent.host.index, agents_.why_not(agent)});
      return check_end();
    }
    // The agent's last message may still be under way; an agent whose guard was killed ends the job and says so.
    if (agent.channel == nullptr && agent.remote && stage_ == Stage::Starting) {
      on_host_failed(agent, agents_.why_not(agent));
    } else if ((agent.remote || elastic_) &&
               goes_on_without(agent, agent.remote
                                          ? fmt::format("the connection to it has ended, {}", agents_.how_ended(agent))
                                          : std::string("its guard was killed"))) {
      return check_end();
    } else if (!AgentPool::is_connected(agent)) {
      end_.lose_agent(members_, fmt::format("the agent of {} was lost", agent.host.name));
      if (stopping_.reason().empty())
        say(fmt::format("the agent of {} ended before the job; ending the job", agent.host.name));
      if (stage_ != Stage::Stopping) stop(fmt::format("the agent of {} was lost", agent.host.name), SIGKILL, {});
    } else if (stage_ != Stage::Stopping) {
      end_.set_status(1);
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
  if (agent.all_gone || stage_ == Stage::Stopping || stage_ == Stage::Ended) return;
  if (goes_on_without(agent, ends.why)) return;
  end_.agent_lost = true;
  end_.set_status(1);
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
      if (stage_ == Stage::Starting) return say("SIGQUIT: not all ranks run yet");
      if (stage_ == Stage::Ended || overview_) return;
      overview_ = Timer(loop_, kOverviewTime, [this] {
        overview_ = Timer();
        show_overview();
      });
      agents_.broadcast(AskStacks{});
      return;
    default: break;
  }
  // A batch system signals all processes of a job together, so the agents' message and this signal are one request.
  if (stage_ == Stage::Stopping && signal == end_.told_by && std::exchange(told_by_agent_, false)) return;
  on_told(signal, fmt::format("told to end by {}", sys::signal_name(signal)));
}

Result<std::string> Epoch::obey(const ControlOrder& order) {
  if (stage_ == Stage::Running && elastic_) {
    const auto event = elastic_->event_of(order);
    if (!event) return tl::unexpected(event.error());
    return decide(*event).reply;
  }
  return fail(ErrorCode::Unavailable, "{}",
              stage_ == Stage::Starting ? "its ranks do not all run yet" : "the job is about to end");
}

void Epoch::pass_on(int signal) {
  if (stage_ == Stage::Starting) return early_signals_.push_back(signal);
  passed_on_usr1_ |= signal == SIGUSR1;
  if (stage_ == Stage::Running && members_.health().somebody_saves())
    say(fmt::format("{}: asking the ranks to save and end", sys::signal_name(signal)));
  agents_.broadcast(SignalWorkers{signal});
}

void Epoch::on_agent_told(AgentHandle& agent, const Told& told) {
  // Each agent got the signal, but the repeated reports must not hurry the end.
  if (stage_ == Stage::Stopping || stage_ == Stage::Ended) return;
  if (!elastic_ || !decide(event::AgentNoticed{agent.host.index, told.signal}).taken) told_by_agent(agent, told.signal);
}

void Epoch::told_by_agent(const AgentHandle& agent, int signal) {
  told_by_agent_ = true;
  on_told(signal, fmt::format("the agent of {} was told to end by {}", agent.host.name, sys::signal_name(signal)));
}

void Epoch::on_told(int signal, const std::string& reason) {
  if (stage_ == Stage::Ended) return loop_.stop();  // output that nobody reads is dropped
  end_.told_to_end = true;
  if (stage_ == Stage::Stopping) return stopping_.hurry();
  if (end_.set_status(128 + signal)) end_.told_by = signal;
  stop(reason, signal == SIGHUP ? SIGTERM : signal, grace_after(signal));  // a closed terminal asks ranks to save
}

Stopping::Grace Epoch::grace_after(int signal) const {
  return {spec_.grace, signal == SIGTERM || signal == SIGHUP ? spec_.preempt_grace : Milliseconds(0)};
}

void Epoch::on_reader_gone() {
  if (stage_ != Stage::Running) return;
  end_.known.quiet = true;
  end_.known.stop_status = 128 + SIGPIPE;
  stop("nobody reads stdout any more", SIGTERM, {spec_.grace});
}

void Epoch::on_owner_gone() {
  end_.known.quiet = end_.told_to_end = true;
  if (!end_.known.stop_status && stage_ != Stage::Stopping) end_.known.stop_status = 128 + SIGHUP;
  stop(fmt::format("the process that it belongs to (pid {}) has ended", *spec_.owner_pid), SIGTERM, {spec_.grace});
}

void Epoch::check_end() {
  if (stage_ == Stage::Ended || !agents_.nothing_runs()) return;
  if (!restart_) {
    restart_ = after(judge(how_it_ended()));
    if (!restart_->again) agents_.finish();
  }
  if (restart_->again || agents_.all_ended()) finish();
}

Restarts::Decision Epoch::after(const Verdict& verdict) {
  for (const Ending& one : members_.endings())
    if (one.last.preempted_by != 0 || (passed_on_usr1_ && one.last.saves_when_asked)) return {};
  if (!verdict.breakdown || end_.told_to_end || end_.agent_lost || run_.reader_gone()) return {};
  if (!elastic_ && !agents_.can_go_on()) return {};
  auto next = elastic_ ? orders_.plan_again(AgentPool::is_usable, membership()->barred()) : std::optional(setup_.plan);
  if (!next) return {};
  const Restarts::Decision restart = past_.restarts.after(*verdict.breakdown, next->world_size);
  if (restart.again) next_plan_ = std::move(next);
  return restart;
}

JobEnd Epoch::how_it_ended() const {
  JobEnd end = end_.with(members_, stopping_.reason());
  if (elastic_) end.excuse_elastic_ranks();
  end.seconds = std::chrono::duration<double>(Clock::now() - started_at_).count();
  end.log_folder = run_.shown_logs();
  end.colour = sys::wants_colour(2);
  return end;
}

void Epoch::finish() {
  stage_ = Stage::Ended;
  stopping_.finish();
  tell_limit_ = Timer();
  if (elastic_) elastic_->stop();
  input_.reset();
  run_.end_lines();
}

int Epoch::report(const Result<void>& closed) {
  // A job whose results are lost has not ended well; but an earlier reason takes precedence.
  if (!closed && !end_.lose_payloads(members_, closed.error().what())) say(closed.error().what());
  const JobEnd end = how_it_ended();
  const Verdict verdict = judge(end);
  end_.known.stop_status = verdict.status;
  run_.attempt_ended(end, verdict, restart_.value_or(Restarts::Decision()));
  return verdict.status;
}

}  // namespace cohort::launch
