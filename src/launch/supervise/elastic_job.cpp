#include "launch/supervise/elastic_job.h"

#include "launch/start/hosts.h"
#include "telemetry/status_page.h"

#include <algorithm>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

Membership::Options membership_options(const JobSetup& setup) {
  const JobSpec& spec = setup.spec;
  Membership::Options options;
  options.least = setup.plan.least;
  options.most = spec.elastic.most;
  if (options.most == 0 && spec.elastic.spares > 0) options.most = setup.plan.world_size - setup.plan.spares;
  options.most_changes = spec.elastic.most_changes;
  options.spares = spec.elastic.spares;
  options.others_may_come = !spec.elastic.script.empty() || spec.elastic.cooldown.has_value();
  options.restarts = spec.max_restarts > 0;
  options.asks_script = !spec.elastic.script.empty();
  options.come_by_themselves = comes_by_itself(setup.plan.method);
  options.cooldown = spec.elastic.cooldown;
  options.timeout = spec.elastic.timeout.value_or(kElasticTimeout);
  options.start_timeout = start_timeout_of(spec, setup.plan);
  options.grace = spec.grace;
  options.preempt_grace = spec.preempt_grace;
  return options;
}

}  // namespace

event::Reported reported_by(const Reports& reports) {
  event::Reported reported;
  for (const RankReport& report : reports.ranks) {
    reported.workers.push_back({report.rank, report.forming != 0, report.forming == status::StatusLayout::kToBeMember,
                                report.formed_epoch, report.has_state});
  }
  return reported;
}

event::Ended ended_by(const Ending& ending) {
  using How = event::Ended::How;
  How how = ending.status.signal != 0 ? How::Killed : How::Failed;
  if (ending.status.success()) {
    how = How::Done;
  } else if (asks_for_requeue(ending) && ending.last.preempted_by == 0) {  // (if all ranks save and end, the job ends)
    how = How::Notice;
  } else if (has_ended_well(ending)) {
    how = How::Asked;
  }
  return {ending.rank, how, sys::to_string(ending.status), ending.last.formed_epoch, ending.last.has_state};
}

ElasticJob::ElasticJob(Loop& loop, const JobSetup& setup, AgentPool& agents, Orders& orders, RunOutput& run,
                       HealthWatch& health, Membership::Past past)
    : loop_(loop),
      setup_(setup),
      agents_(agents),
      orders_(orders),
      run_(run),
      health_(health),
      membership_(membership_options(setup), setup.plan, std::move(past)) {
  run_.state().members = {{utc_now(), membership_.current()}};
}

Membership::Answer ElasticJob::on(const Event& event) {
  Membership::Answer answer = membership_.on(event, std::chrono::steady_clock::now());
  std::vector<Action> rest = std::exchange(rest_, {});  // (keeps the actions of the event that has led to this one)
  for (const Action& action : answer.actions) {
    std::visit([this](const auto& one) { carry_out(one); }, action);
  }
  answer.actions = std::exchange(rest_, std::move(rest));
  wait_for_next();
  return answer;
}

Membership::Answer ElasticJob::begin() {
  event::Running running;
  running.agents = static_cast<int>(agents_.members().size());
  for (const auto& member : agents_.members()) {
    if (member->all_gone && AgentPool::is_usable(*member)) running.usable.push_back(member->host);
  }
  if (!setup_.spec.elastic.script.empty()) discovery_.emplace(loop_, setup_.spec, setup_.plan.method);
  return on(running);
}

std::vector<Event> ElasticJob::take() {
  Discovery::News news = discovery_ ? discovery_->take() : Discovery::News();
  if (!news.trouble.empty()) run_.say(news.trouble);
  if (news.hosts) due_.emplace_back(event::Listed{*std::move(news.hosts)});
  return std::exchange(due_, {});
}

void ElasticJob::stop() {
  discovery_.reset();
  on(event::Stopping{});
}

Result<Event> ElasticJob::event_of(const ControlOrder& order) const {
  if (order.kind != ControlOrder::Kind::Add)
    return event::TakeAway{order.host, order.kind == ControlOrder::Kind::Remove};
  const Plan& plan = setup_.plan;
  if (comes_by_itself(plan.method))
    return fail(ErrorCode::Unavailable, "the hosts of this job come by themselves, by a command that is started there");
  const auto hosts = listed_hosts(setup_.spec, plan.method, order.host + "\n");
  if (!hosts) return tl::unexpected(hosts.error());
  if (hosts->empty()) return fail(ErrorCode::InvalidArgument, "{}: a host without slots takes no workers", order.host);
  if (!hosts->front().local && !goes_elsewhere(plan))
    return fail(ErrorCode::Unavailable,
                "the job was started for this host alone and listens to no other: -H or --host-discovery-script is "
                "for jobs of several");
  return event::Add{hosts->front()};
}

void ElasticJob::wait_for_next() {
  const auto next = membership_.next_look();
  if (next == tick_at_) return;
  tick_at_ = next;
  tick_ = Timer();
  if (!next) return;
  const auto wait = std::max(*next - std::chrono::steady_clock::now(), Membership::Time::duration::zero());
  tick_ = Timer(loop_, wait, [this] {
    tick_at_.reset();
    due_.emplace_back(event::Tick{});
  });
}

void ElasticJob::carry_out(const action::Say& say) { run_.say(say.text); }

void ElasticJob::carry_out(const action::Announce& announce) {
  try {
    orders_.write_members(announce.members);
  } catch (const Error& error) {
    rest_.emplace_back(
        action::EndJob{1, fmt::format("the job's store does not take its new members: {}", error.what()), SIGTERM});
    return;
  }
  agents_.broadcast(NewMembership{announce.members.epoch});
  run_.members_changed(announce.members, announce.text);
}

void ElasticJob::carry_out(const action::Formed& formed) { run_.members_formed(formed.took); }

void ElasticJob::carry_out(const action::AddAgent& add) {
  const int index = static_cast<int>(agents_.members().size());
  try {
    agents_.add(add.host);
  } catch (const Error& error) {
    due_.emplace_back(event::AgentFailed{index, fmt::format("{} cannot be had: {}", add.host.name, error.what())});
  }
}

void ElasticJob::carry_out(const action::StartRanks& start) {
  agent(start.agent).host.slots = start.ranks;
  orders_.start_more(agent(start.agent), start.ranks);
  grow();
  rest_.emplace_back(start);  // the epoch keeps the members
}

void ElasticJob::carry_out(const action::StartOne& start) {
  const int number = orders_.start_one_more(agent(start.agent), start.slot);
  if (number != start.worker) raise(ErrorCode::Internal, "worker {} was started as {}", start.worker, number);
  grow();
  rest_.emplace_back(start);
}

void ElasticJob::grow() {
  health_.grow(hosts_of_processes(setup_.plan));
  run_.grow(setup_.plan);
}

void ElasticJob::carry_out(const action::Finish& finish) {
  AgentHandle& agent = this->agent(finish.agent);
  agent.all_gone = true;
  if (agent.channel != nullptr) agent.channel->send(Finish{});
  rest_.emplace_back(finish);  // nothing may run any more
}

void ElasticJob::carry_out(const action::Hold& hold) { agent(hold.agent).started = agent(hold.agent).all_gone = true; }

void ElasticJob::carry_out(const action::Leaves& leaves) { health_.left(leaves.worker, leaves.leaves); }

void ElasticJob::carry_out(const action::StopRanks& stop) {
  const AgentHandle& agent = this->agent(stop.agent);
  if (agent.all_gone || agent.channel == nullptr) return;
  const auto grace = static_cast<std::uint32_t>(setup_.spec.grace.count());
  agent.channel->send(StopWorkers{stop.signal, grace, grace, Role::Worker});
}

void ElasticJob::carry_out(const action::Kill& kill) {
  if (AgentHandle& agent = this->agent(kill.agent); agent.channel != nullptr)
    agent.channel->send(KillWorker{kill.worker});
}

}  // namespace cohort::launch
