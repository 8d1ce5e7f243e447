// A job: what lives as long as it, however often its ranks are started (each time an Epoch, of which there is one at a
// time), and its trace. One thread.
#include "base/files.h"
#include "base/signals.h"
#include "base/terminal.h"
#include "launch/output/other_hosts.h"
#include "launch/plan/rank_environment.h"
#include "launch/processes.h"
#include "launch/start/agent_pool.h"
#include "launch/start/hosts.h"
#include "launch/supervise/control.h"
#include "launch/supervise/epoch.h"
#include "launch/supervise/run_output.h"
#include "launch/supervise/stopping.h"
#include "launch/supervise/supervisor.h"
#include "net/secret.h"
#include "net/served_store.h"
#include "net/store.h"
#include "rendezvous/place.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <variant>

namespace cohort::launch {
namespace {

constexpr std::initializer_list<int> kJobSignals = {SIGINT,  SIGTERM, SIGHUP,  SIGQUIT,
                                                    SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};
/// Of the job's store, which is in this process.
constexpr auto kStoreTime = std::chrono::seconds(10);

/// As torchrun's, for nodes beyond the fewest.
constexpr auto kLastCall = std::chrono::seconds(30);

/// Its address is known.
bool is_there(const AgentHandle& agent) {
  return agent.host.local || (agent.channel != nullptr && !agent.channel->closed());
}

/// Of TF_CONFIG's cluster, that are on a host.
int tasks_of(const PlannedHost& host) { return host.ranks + host.servers; }

/// Good clocks drift by some parts in a million: 1 ms in a minute at the worst, most of which is taken out again.
constexpr auto kMeasureEvery = std::chrono::minutes(1);

std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

status::HostTrace host_of(const AgentHandle& agent) { return {agent.host.index, agent.host.name}; }

/// What the supervisor does for a trace (`--trace`): keeps what agents send of their ranks' timelines, and measures
/// their hosts' clocks against its own: when they come, each minute, and when their ranks end.
class Tracing {
 public:
  Tracing(Loop& loop, const std::string& run_folder, std::function<void(std::string)> on_trouble);

  void on_joined(AgentHandle& agent);
  /// True: it was for this.
  bool take(const AgentHandle& agent, const Message& message);
  /// Ranks of this agent begin to end.
  void on_ending(const AgentHandle& agent);
  /// Nothing more comes.
  void finish();

 private:
  void measure_again();

  Loop& loop_;
  TracePieces pieces_;
  std::map<int, std::unique_ptr<ClockSync>> clocks_;  ///< by host, of those that are elsewhere
  Timer again_;
};

Tracing::Tracing(Loop& loop, const std::string& run_folder, std::function<void(std::string)> on_trouble)
    : loop_(loop), pieces_(run_folder, std::move(on_trouble)) {}

void Tracing::on_joined(AgentHandle& agent) {
  // An agent on this host has this very clock.
  if (agent.host.local) return pieces_.keep_offset(host_of(agent), {now_ns(), 0, 0});
  ClockSync::Ports ports;
  ports.now = now_ns;
  ports.send = [&agent](std::uint64_t number) { agent.channel->send(ClockQuestion{number}); };
  ports.found = [this, &agent](const ClockOffset& offset) { pieces_.keep_offset(host_of(agent), offset); };
  auto& clock = clocks_[agent.host.index];
  clock = std::make_unique<ClockSync>(std::move(ports));
  clock->begin();
  if (!again_) measure_again();
}

void Tracing::measure_again() {
  again_ = Timer(loop_, kMeasureEvery, [this] {
    for (const auto& [host, clock] : clocks_) clock->begin();
    measure_again();
  });
}

bool Tracing::take(const AgentHandle& agent, const Message& message) {
  if (const auto* piece = std::get_if<TracePiece>(&message)) {
    pieces_.keep(host_of(agent), piece->base_ns, piece->packets);
  } else if (const auto* answer = std::get_if<ClockAnswer>(&message)) {
    if (const auto clock = clocks_.find(agent.host.index); clock != clocks_.end())
      clock->second->answer(answer->number, answer->now_ns);
  } else {
    return false;
  }
  return true;
}

void Tracing::on_ending(const AgentHandle& agent) {
  if (const auto clock = clocks_.find(agent.host.index); clock != clocks_.end()) clock->second->begin();
}

void Tracing::finish() {
  again_ = Timer();
  for (const auto& [host, clock] : clocks_) clock->end();
}

/// What lives as long as a job: its secret, store, port and agents, what is shown of it, the signals. Has one epoch at
/// a time, of the members that `setup_.plan` names.
class Job {
 public:
  Job(const JobSpec& spec, Plan plan, const std::function<void(const std::string&)>& on_trace)
      : spec_(spec), on_trace_(on_trace), setup_(set_up_job(spec, std::move(plan))), restarts_(spec.max_restarts) {}
  int run();

 private:
  void prepare();
  AgentPool::Events agent_events();
  /// All agents are there: the plan is settled, and the first epoch can begin.
  void on_joined(AgentHandle& agent);
  void begin();
  /// Everybody has said how many ranks they want. Throws, also where --ranks names one that there is not.
  void settle_nodes();
  /// To the owner, who brings it to the agents.
  void leave_invitation() const;
  void on_signal(int signal);
  void on_owner_gone();
  JobFacts facts_for(const AgentHandle& agent) const;
  /// Of a host, as seen from the others.
  std::string address_of(const AgentHandle& member) const;
  /// Each agent holds a port for each of its ranks. False: not yet, and those that do not were asked.
  bool have_ports();
  void take_ports(AgentHandle& agent, LeasedPorts leased);

  /// One more start of ranks, by `next_plan_`; nothing of the one before runs any more.
  void begin_epoch();
  /// Of an elastic job whose ranks have failed: for the hosts that there are. False: they are too few.
  bool plan_again(bool (*usable)(const AgentHandle&));
  void take_next_plan();
  /// Before anything runs: whether others are enough to begin with.
  bool begin_without(AgentHandle& agent, const std::string& why);
  void make_epoch();
  void give_orders();
  /// Those that have been told to begin anew meet in this epoch of the job's store.
  void announce_epoch();
  std::shared_ptr<store::Store> own_store() const;
  void start_more(AgentHandle& agent, int ranks);
  int start_one_more(AgentHandle& agent, int local_rank);
  /// Of an elastic job, into its store: the record, and then that it counts. Throws cohort::Error.
  void write_members(rendezvous::Membership members);
  /// One that has ended for the last time; before the last word on it.
  Result<void> close();
  void end(int status);

  /// The plan is what agents say that they take.
  bool settles_late() const { return says_itself(setup_.plan.method); }
  /// From `cohort ctl`.
  void take_orders();
  bool owner_gone() const { return owner_ && owner_->gone(); }

  const JobSpec& spec_;
  const std::function<void(const std::string&)>& on_trace_;
  JobSetup setup_;
  Restarts restarts_;
  EpochBudget budget_;

  Loop loop_;
  sys::TerminalGuard terminal_{0};
  std::optional<sys::SignalFd> signals_;
  Watch signal_watch_;
  std::optional<Owner> owner_;
  std::optional<net::Secret> secret_;
  std::unique_ptr<store::StoreServer> store_;
  std::optional<PayloadTransferOptions> payload_transfer_;  ///< where the owner has something for ranks elsewhere
  std::optional<PortLease> port_;
  std::vector<pid_t> spared_;  ///< by what ends the job's processes
  std::optional<AgentPool> agents_;
  std::optional<RunOutput> run_;
  std::optional<Tracing> tracing_;
  std::unique_ptr<Epoch> epoch_;
  std::optional<ControlSocket> control_;
  Timer last_call_;  ///< for nodes that need not come
  Plan next_plan_;
  int first_ranks_ = 0;   ///< that the job had, with its spares
  bool ordered_ = false;  ///< agents have been told what to start
  Timer begin_;           ///< it does, once what has led to that is no longer on the stack
  Timer next_;            ///< the next epoch, once the last one is no longer on the stack
  int status_ = 1;
};

int Job::run() {
  try {
    prepare();
  } catch (...) {
    if (agents_) agents_->drop_lifelines();
    sweep(spared_, std::chrono::seconds(5), {});
    throw;
  }
  loop_.run();
  if (tracing_ && on_trace_) {
    tracing_.reset();
    on_trace_(run_->folder().path);
  }
  return status_;
}

void Job::prepare() {
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);  // our output may be a file at its limit
  value_or_throw(sys::become_subreaper());
  spared_ = sys::descendants(::getpid());  // of a shell that became us with `exec`
  signals_.emplace(value_or_throw(sys::SignalFd::create(kJobSignals)));
  const Plan& plan = setup_.plan;
  if (plan.node)
    secret_ = plan.node->secret;
  else
    secret_ = value_or_throw(plan.method == StartMethod::Hand ? net::Secret::from_file(spec_.secret_file)
                                                              : net::Secret::generate());
  agents_.emplace(loop_, *secret_, spec_, plan, InputReader::may_be_given(0) ? 0 : -1, agent_events());
  if (!settles_late()) shown_ranks(spec_, plan);  // what is wrong with them is told before anything starts

  signal_watch_ = Watch(loop_, signals_->fd());
  signal_watch_.on_readable([this] {
    while (const auto signal = signals_->next()) on_signal(*signal);
  });

  if (spec_.owner_pid) owner_.emplace(loop_, *spec_.owner_pid, [this] { on_owner_gone(); });
  run_.emplace(loop_, setup_, sys::random_hex(6),
               Display::Events{[this](std::size_t source, std::uint64_t bytes) {
                                 agents_->members()[source]->channel->send(OutputTaken{bytes});
                               },
                               [this] { epoch_->on_reader_gone(); },
                               {}});
  if (spec_.trace) tracing_.emplace(loop_, run_->folder().path, [this](const std::string& text) { run_->say(text); });
  make_epoch();
  if (plan.least > 0) take_orders();
  if (!settles_late()) first_ranks_ = plan.world_size;

  agents_->start(plan.hosts);  // their processes start while we go on
  if (const std::string text = agents_->invitation(); !text.empty()) run_->say(text);
  port_ = value_or_throw(PortLease::take(std::hash<std::string>{}(run_->state().job_id)));
  store::StoreServerOptions store_options;
  store_options.secret = *secret_;
  if (goes_elsewhere(plan)) store_options.endpoint = agents_->open_endpoint();
  store_ = std::make_unique<store::StoreServer>(store_options);
  if (has_payloads(spec_.owner_folder)) {
    payload_transfer_ = PayloadTransferOptions{spec_.owner_folder, store_->endpoint().tcp.port, *secret_};
    value_or_throw(bring_to_ranks(*payload_transfer_));
  }

  run_->state().master_port = port_->port();
  if (!settles_late()) epoch_->settle(shown_ranks(spec_, plan));
  if (plan.method == StartMethod::Owner) leave_invitation();
}

void Job::take_orders() {
  try {
    control_.emplace(loop_, run_->folder(), [this](const ControlOrder& order) { return epoch_->obey(order); });
  } catch (const Error& error) {  // a file system without sockets
    run_->say(fmt::format("no orders can be given to this job (cohort ctl): {}", error.what()));
  }
}

void Job::leave_invitation() const {
  std::string text = to_line(own_announcement()) + "\n" + to_text(agents_->invitation_for_owner());
  const sys::UniqueFd pipe(*spec_.invitation_fd);
  const ssize_t written = ::write(pipe.get(), text.data(), text.size());  // less than a pipe takes at once
  const int error = errno;
  const bool whole = written == static_cast<ssize_t>(text.size());
  net::wipe(text);
  if (!whole)
    raise(ErrorCode::Unavailable, "the owner does not take the invitation of its agents: {}", errno_text(error));
}

void Job::settle_nodes() {
  Plan whole = setup_.plan;
  whole.hosts.clear();
  int ranks = 0;
  if (whole.method == StartMethod::Owner) agents_->sort_by_host();
  for (const auto& member : agents_->members()) {
    whole.hosts.push_back(member->host);
    ranks += member->host.slots;
  }
  check_first_ranks(spec_, ranks);
  setup_.plan = value_or_throw(make_plan(std::move(whole), ranks, spec_));
  for (std::size_t i = 0; i < setup_.plan.hosts.size(); ++i) agents_->members()[i]->host = setup_.plan.hosts[i];
  epoch_->settle(shown_ranks(spec_, setup_.plan));
}

AgentPool::Events Job::agent_events() {
  AgentPool::Events events;
  events.on_joined = [this](AgentHandle& agent) {
    if (tracing_) tracing_->on_joined(agent);
    on_joined(agent);
  };
  events.on_message = [this](AgentHandle& agent, Message message) {
    if (tracing_ && tracing_->take(agent, message)) return;
    if (tracing_ && std::holds_alternative<Exited>(message)) tracing_->on_ending(agent);
    if (auto* leased = std::get_if<LeasedPorts>(&message)) return take_ports(agent, std::move(*leased));
    epoch_->on_message(agent, std::move(message));
  };
  events.on_channel_closed = [this](AgentHandle& agent, const std::optional<Error>& error) {
    epoch_->on_channel_closed(agent, error);
  };
  events.on_process_ended = [this](AgentHandle& agent) { epoch_->on_agent_process_ended(agent); };
  events.on_unfit = [this](const AgentHandle* agent, const std::string& why) { epoch_->on_unfit(agent, why); };
  events.on_complaint = [this](const AgentHandle& agent, const std::string& line) {
    if (epoch_->running()) run_->say(fmt::format("{}: {}", agent.host.name, line));
  };
  return events;
}

void Job::on_joined(AgentHandle& agent) {
  if (epoch_->is_newcomer(agent)) return void(epoch_->decide(event::AgentJoined{agent.host.index}));
  // (One that was given up on its way: what was to be started there is not.)
  const bool late = epoch_->running() && epoch_->membership() != nullptr && !agent.lost;
  if (late) return void(epoch_->decide(event::AgentCame{agent.host}));
  if (!epoch_->starting()) return agent.channel->send(Finish{epoch_->stop_status()});
  // Where rank 0's port is, is known only then; and nothing runs anywhere if a host is missing.
  if (agents_->all_joined()) return begin();
  const int least = setup_.plan.node ? setup_.plan.node->least : 0;
  const auto there =
      std::ranges::count_if(agents_->members(), [](const auto& member) { return member->channel != nullptr; });
  if (least == 0 || there < least || last_call_) return;
  const auto wait = std::min<std::chrono::milliseconds>(kLastCall, start_timeout_of(spec_, setup_.plan) / 2);
  run_->say(fmt::format("{} of {} nodes are there, and {} are enough: the job begins in {:g} s, if no others come",
                        there, setup_.plan.node->count, least, std::chrono::duration<double>(wait).count()));
  last_call_ = Timer(loop_, wait, [this, least] {
    last_call_ = Timer();
    const auto still_there =
        std::ranges::count_if(agents_->members(), [](const auto& member) { return member->channel != nullptr; });
    if (still_there < least) return;
    agents_->drop_missing();
    begin();
  });
}

void Job::begin() {
  last_call_ = Timer();
  if (!epoch_->starting()) return;
  agents_->take_late_ones();
  try {
    if (settles_late()) settle_nodes();
  } catch (const Error& error) {
    return epoch_->fail_start(error.what());
  }
  first_ranks_ = std::max(first_ranks_, setup_.plan.world_size);
  const auto first = std::ranges::find_if(agents_->members(), [](const auto& member) { return !member->lost; });
  run_->state().master_port = facts_for(**first).master_port;
  if (have_ports()) give_orders();
}

bool Job::have_ports() {
  if (!spec_.tf_config) return true;
  for (const auto& member : agents_->members()) member->channel->send(LeasePorts{tasks_of(member->host)});
  return false;
}

void Job::take_ports(AgentHandle& agent, LeasedPorts leased) {
  const auto wanted = static_cast<std::size_t>(tasks_of(agent.host));
  if (!epoch_->starting() || leased.ports.size() > wanted) return;
  agent.ports = std::move(leased.ports);
  if (agent.ports.size() < wanted)
    return epoch_->fail_start(fmt::format("--tf-config: {}: {}", agent.host.name, leased.why));
  const bool all = std::ranges::all_of(agents_->members(), [](const auto& member) {
    return member->ports.size() == static_cast<std::size_t>(tasks_of(member->host));
  });
  if (all) give_orders();
}

JobFacts Job::facts_for(const AgentHandle& agent) const {
  JobFacts facts;
  facts.job_id = run_->state().job_id;
  facts.run_folder = run_->folder().path;
  // Of this host too as others see it, so that what serves here knows where to listen.
  const std::string here = agent.host.local ? address_of(agent) : AgentPool::own_address(agent).host;
  facts.store = net::to_string(net::Address{here, store_->endpoint().tcp.port});
  // Rank 0's host, as seen from the others; of an elastic job the first that is there.
  const auto found = std::ranges::find_if(agents_->members(), [](const auto& member) { return is_there(*member); });
  const AgentHandle& first = found != agents_->members().end() ? **found : agent;
  facts.master_port = first.host.local ? port_->port() : first.free_port;
  facts.master_address = address_of(first);
  // In the order of the plan's Roles: all ranks, then all servers.
  std::vector<std::string> servers;
  for (const auto& member : agents_->members()) {
    for (std::size_t i = 0; i < member->ports.size(); ++i) {
      const bool is_rank = i < static_cast<std::size_t>(member->host.ranks);
      (is_rank ? facts.tf_addresses : servers)
          .push_back(net::to_string(net::Address{address_of(*member), static_cast<std::uint16_t>(member->ports[i])}));
    }
  }
  facts.tf_addresses.insert(facts.tf_addresses.end(), servers.begin(), servers.end());
  facts.log_folder = run_->state().log_folder;
  facts.restart = restarts_.done();
  facts.max_restarts = restarts_.most();
  facts.first_worker = budget_.elastic.workers;
  if (setup_.plan.least > 0) facts.elastic = patience_of(spec_.elastic);
  facts.servers_may_die = spec_.server_restarts > 0 || spec_.lost_servers > 0;
  if (spec_.host_timeout != kHostTimeout) {
    facts.host_timeout = std::chrono::ceil<std::chrono::seconds>(spec_.host_timeout);
  }
  return facts;
}

std::string Job::address_of(const AgentHandle& member) const {
  for (const auto& other : agents_->members()) {
    if (member.host.local && !other->host.local && is_there(*other)) return AgentPool::own_address(*other).host;
  }
  return AgentPool::agent_address(member).host;
}

void Job::on_signal(int signal) {
  if (next_) begin_epoch();  // it is for those that are about to be started
  switch (signal) {
    case SIGTSTP: {
      agents_->broadcast(SignalWorkers{SIGSTOP});
      // Told to go on meanwhile: a stop would take that signal away, and nobody would hear of it.
      sigset_t pending;
      if (::sigpending(&pending) == 0 && sigismember(&pending, SIGCONT) == 1) return;
      ::raise(SIGSTOP);
      return;
    }
    case SIGCONT: agents_->broadcast(SignalWorkers{SIGCONT}); break;
    default: break;
  }
  epoch_->on_signal(signal);
}

void Job::on_owner_gone() {
  if (next_) begin_epoch();
  if (!epoch_->ended()) return epoch_->on_owner_gone();
  if (!spec_.owner_folder.empty()) remove_private_folder(spec_.owner_folder);
  loop_.stop();
}

void Job::make_epoch() {
  Epoch::Events events;
  events.on_server_ended = [this](int number, const std::string& how) {
    store_->set_if_absent(rendezvous::ended_key(restarts_.done(), number), how);
    store_->set_if_absent(rendezvous::server_key(restarts_.done(), number), std::string(rendezvous::kEndedBefore));
  };
  events.on_more = [this](AgentHandle& agent, int ranks) { start_more(agent, ranks); };
  events.on_one_more = [this](AgentHandle& agent, int local_rank) { return start_one_more(agent, local_rank); };
  events.on_host_missing = [this](AgentHandle& agent, const std::string& why) { return begin_without(agent, why); };
  events.on_members = [this](const rendezvous::Membership& members) { write_members(members); };
  events.on_breakdown = [this](const Breakdown& breakdown) {
    if (owner_gone() || run_->reader_gone()) return Restarts::Decision();
    next_plan_ = setup_.plan;
    if (setup_.plan.least > 0 ? !plan_again(AgentPool::is_usable) : !agents_->can_go_on()) return Restarts::Decision();
    return restarts_.after(breakdown, next_plan_.world_size);
  };
  events.before_end = [this] { return close(); };
  events.on_ended = [this](int status, bool again) {
    if (!again) return end(status);
    next_ = Timer(loop_, {}, [this] { begin_epoch(); });
  };
  epoch_ = std::make_unique<Epoch>(loop_, setup_, *agents_, *run_, budget_, restarts_.done(), std::move(events));
}

bool Job::plan_again(bool (*usable)(const AgentHandle&)) {
  Plan plan = setup_.plan;
  plan.hosts.clear();
  const std::set<std::string> barred =
      epoch_->membership() != nullptr ? epoch_->membership()->barred() : std::set<std::string>();
  std::vector<int> agents;  // of the hosts
  int slots = 0;
  for (const auto& member : agents_->members()) {
    if (!usable(*member) || barred.contains(member->host.name)) continue;
    PlannedHost host = member->host;
    host.part_of.clear();
    // (Later orders may have been for less.)
    for (const PlannedHost& before : setup_.plan.hosts) {
      if (before.index == host.index) host.slots = std::max(host.slots, before.ranks);
    }
    host.slots = std::min(host.slots, kMostProcesses - slots);
    slots += host.slots;
    agents.push_back(host.index);
    plan.hosts.push_back(std::move(host));
  }
  const int most = plan.method == StartMethod::Launcher ? slots : std::min(slots, first_ranks_);
  if (most < plan.least) return false;
  plan.spares = std::clamp(most - (first_ranks_ - spec_.elastic.spares), 0, spec_.elastic.spares);
  next_plan_ = value_or_throw(make_plan(std::move(plan), most, spec_));
  for (PlannedHost& host : next_plan_.hosts) host.index = agents[static_cast<std::size_t>(host.index)];
  return true;
}

void Job::take_next_plan() {
  for (const auto& member : agents_->members()) member->host.ranks = member->host.local_ranks = 0;
  for (const PlannedHost& host : next_plan_.hosts)
    agents_->members()[static_cast<std::size_t>(host.index)]->host = host;
  setup_.plan = next_plan_;
}

bool Job::begin_without(AgentHandle& agent, const std::string& why) {
  // (Who comes by himself is waited for as long as it takes; and ranks that have been told their number keep it.)
  if (ordered_ || comes_by_itself(setup_.plan.method)) return false;
  agent.lost = true;
  next_plan_ = setup_.plan;
  if (!plan_again([](const AgentHandle& member) { return !member.lost; })) {
    agent.lost = false;
    return false;
  }
  run_->say(fmt::format("{}; the job begins without {}", why, agent.host.name));
  agent.all_gone = agent.started = true;
  AgentPool::kill(agent);
  take_next_plan();
  epoch_->settle(shown_ranks(spec_, setup_.plan));
  if (agents_->all_joined()) begin_ = Timer(loop_, {}, [this] { begin(); });
  return true;
}

void Job::begin_epoch() {
  next_ = Timer();
  if (setup_.plan.least > 0) {
    budget_.elastic.workers += setup_.plan.world_size;
    budget_.elastic.members.barred = epoch_->membership()->barred();
    take_next_plan();
  }
  agents_->begin_again();
  make_epoch();
  epoch_->settle(shown_ranks(spec_, setup_.plan));
  if (setup_.plan.least == 0) announce_epoch();
  give_orders();
}

void Job::give_orders() {
  if (!epoch_->starting()) return;
  ordered_ = true;
  epoch_->note_orders();
  try {
    if (const auto* membership = epoch_->membership()) write_members(membership->current());
  } catch (const Error& error) {
    return epoch_->fail_start(fmt::format("the job's store does not take its members: {}", error.what()));
  }
  for (const auto& each : agents_->members()) {
    if (each->host.processes() > 0) each->channel->send(order_for(setup_, each->host, facts_for(*each)));
  }
}

std::shared_ptr<store::Store> Job::own_store() const {
  return store::connect_tcp_store("127.0.0.1", store_->endpoint().tcp.port, *secret_, net::deadline_in(kStoreTime));
}

void Job::start_more(AgentHandle& agent, int ranks) {
  Plan& plan = setup_.plan;
  PlannedHost host = agent.host;
  host.first_rank = plan.world_size;
  host.ranks = host.local_ranks = ranks;
  host.machine = plan.machines++;
  plan.world_size += ranks;
  plan.hosts.push_back(host);
  agent.host = std::move(host);
  agent.started = agent.all_gone = false;
  epoch_->grow();
  agent.channel->send(order_for(setup_, agent.host, facts_for(agent)));
}

int Job::start_one_more(AgentHandle& agent, int local_rank) {
  Plan& plan = setup_.plan;
  PlannedHost host = agent.host;
  host.first_rank = plan.world_size;
  host.ranks = 1;
  host.first_local = local_rank;
  host.local_ranks = std::max(host.local_ranks, local_rank + 1);
  ++plan.world_size;
  plan.hosts.push_back(host);
  epoch_->grow();
  agent.channel->send(StartMore{order_for(setup_, host, facts_for(agent)).workers.front()});
  return host.first_rank;
}

void Job::write_members(rendezvous::Membership members) {
  budget_.elastic.members.next_epoch = members.epoch + 1;
  for (rendezvous::Member& member : members.members) member.worker += budget_.elastic.workers;
  const auto store = own_store();
  store->set(rendezvous::membership_key(members.epoch), rendezvous::encode(members));
  store->set(store::kEpochKey, std::to_string(members.epoch));
}

void Job::announce_epoch() {
  try {
    own_store()->set(store::kEpochKey, std::to_string(restarts_.done()));
  } catch (const Error& error) {
    epoch_->fail_start(fmt::format("the job's store does not take the ranks' next start: {}", error.what()));
  }
}

Result<void> Job::close() {
  run_->finish_warnings();
  // What a killed agent has left was handed to us by the kernel.
  const auto helpers = run_->helpers();
  spared_.insert(spared_.end(), helpers.begin(), helpers.end());
  const auto stuck = sweep(spared_, std::chrono::seconds(10), {});
  if (!stuck.empty()) run_->say(fmt::format("even SIGKILL does not end {}", describe_stuck(stuck)));
  if (!payload_transfer_ || owner_gone()) return {};
  return bring_from_ranks(*payload_transfer_, setup_.plan.world_size);
}

void Job::end(int status) {
  status_ = status;
  if (tracing_) tracing_->finish();
  agents_->send_exit_status(status);
  if (owner_gone() && !spec_.owner_folder.empty()) remove_private_folder(spec_.owner_folder);
  run_->finish([this] { loop_.stop(); });
}

}  // namespace

int run_job(const JobSpec& spec, Plan plan, const std::function<void(const std::string&)>& on_trace) {
  return Job(spec, std::move(plan), on_trace).run();
}

}  // namespace cohort::launch
