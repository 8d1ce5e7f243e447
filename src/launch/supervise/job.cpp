// Job holds what lives as long as a job, however often its ranks are started. Each start is an Epoch, and only one
// Epoch exists at a time. Job runs the loop event by event, and after each step takes events from its parts, which do
// not know the Job. One thread.
#include "base/files.h"
#include "base/signals.h"
#include "base/terminal.h"
#include "launch/output/other_hosts.h"
#include "launch/processes.h"
#include "launch/start/agent_pool.h"
#include "launch/start/hosts.h"
#include "launch/supervise/control.h"
#include "launch/supervise/epoch.h"
#include "launch/supervise/orders.h"
#include "launch/supervise/run_output.h"
#include "launch/supervise/stopping.h"
#include "launch/supervise/supervisor.h"
#include "launch/supervise/tracing.h"
#include "net/secret.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

namespace cohort::launch {
namespace {

constexpr std::initializer_list<int> kJobSignals = {SIGINT,  SIGTERM, SIGHUP,  SIGQUIT,
                                                    SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};

/// How long to wait for more nodes than the minimum; torchrun's value.
constexpr auto kLastCall = std::chrono::seconds(30);

/// Holds what lives as long as a job: its secret, store, port, agents, output and signals. Has one epoch at a time; its
/// members are those in `setup_.plan`.
class Job {
 public:
  Job(const JobSpec& spec, Plan plan) : spec_(spec), setup_(set_up_job(spec, std::move(plan))), past_(spec) {}
  JobResult run();

 private:
  void prepare();
  /// To be called after each step of the loop: handles the events since then.
  void look();
  void on_event(AgentEvent event);
  void on_message(AgentHandle& agent, Message message);
  /// When all agents are there, settles the plan and begins the first epoch.
  void on_joined(AgentHandle& agent);
  void begin();
  /// Writes the invitation for the owner, who passes it to the agents.
  void leave_invitation() const;
  void on_signal(int signal);
  void on_owner_gone();
  void make_epoch();
  /// Starts the ranks once more, when nothing of the last epoch runs any more.
  void begin_epoch(const Plan& plan);
  /// Called when the epoch has ended.
  void conclude();
  /// Called before the last epoch's end is reported.
  Result<void> close();

  /// Returns true if the plan depends on what agents say that they take.
  bool settles_late() const { return says_itself(setup_.plan.method); }
  std::ptrdiff_t nodes_there() const {
    return std::ranges::count_if(agents_->members(), [](const auto& member) { return member->channel != nullptr; });
  }
  /// Handles orders of `cohort ctl`.
  void take_orders();
  bool owner_gone() const { return owner_ && owner_->gone(); }

  const JobSpec& spec_;
  JobSetup setup_;
  JobPast past_;

  Loop loop_;
  sys::TerminalGuard terminal_{0};
  std::optional<sys::SignalFd> signals_;
  Watch signal_watch_;
  std::optional<Owner> owner_;
  std::optional<net::Secret> secret_;
  std::optional<PayloadTransferOptions> payload_transfer_;  ///< set if the owner has payloads for ranks elsewhere
  std::vector<pid_t> spared_;                               ///< processes that the end of the job must not kill
  std::optional<AgentPool> agents_;
  std::optional<RunOutput> run_;
  std::optional<Tracing> tracing_;
  std::optional<Orders> orders_;
  std::unique_ptr<Epoch> epoch_;
  std::optional<ControlSocket> control_;
  Timer last_call_;         ///< wait for nodes beyond the minimum
  bool may_begin_ = false;  ///< an agent has come since `begin`
  bool over_ = false;       ///< the job's end has been reported
  int status_ = 1;
};

JobResult Job::run() {
  try {
    prepare();
  } catch (...) {
    if (agents_) agents_->drop_lifelines();
    sweep(spared_, std::chrono::seconds(5), {});
    throw;
  }
  for (look(); !loop_.stopped(); look()) loop_.step();
  return {status_, tracing_ ? run_->folder().path : std::string()};
}

void Job::prepare() {
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);  // stdout or stderr may be a file at its size limit
  value_or_throw(sys::become_subreaper());
  spared_ = sys::descendants(::getpid());  // children of a shell that became us by `exec`
  signals_.emplace(value_or_throw(sys::SignalFd::create(kJobSignals)));
  const Plan& plan = setup_.plan;
  if (plan.node)
    secret_ = plan.node->secret;
  else
    secret_ = value_or_throw(plan.method == StartMethod::Hand ? net::Secret::from_file(spec_.secret_file)
                                                              : net::Secret::generate());
  agents_.emplace(loop_, *secret_, spec_, plan, InputReader::may_be_given(0) ? 0 : -1);

  signal_watch_ = Watch(loop_, signals_->fd());
  signal_watch_.on_readable([this] {
    while (const auto signal = signals_->next()) on_signal(*signal);
  });

  if (spec_.owner_pid) owner_.emplace(loop_, *spec_.owner_pid);
  run_.emplace(loop_, setup_, sys::random_hex(6));
  agents_->keep_open(run_->folder().lock.get());  // ranks that save after this process is gone still have the folder
  if (spec_.trace) tracing_.emplace(loop_, *run_);
  orders_.emplace(setup_, *agents_, *run_, *secret_, past_);
  make_epoch();
  if (plan.least > 0) take_orders();

  agents_->start(plan.hosts);  // their processes start while this one goes on
  if (const std::string text = agents_->invitation(); !text.empty()) run_->say(text);
  orders_->open();
  if (has_payloads(spec_.owner_folder)) {
    payload_transfer_ = PayloadTransferOptions{spec_.owner_folder, orders_->store_port(), *secret_};
    value_or_throw(bring_to_ranks(*payload_transfer_));
  }
  if (!settles_late()) epoch_->settle(shown_ranks(spec_, plan));
  if (plan.method == StartMethod::Owner) leave_invitation();
}

void Job::take_orders() {
  try {
    control_.emplace(loop_, run_->folder());
  } catch (const Error& error) {  // the folder's file system has no sockets
    run_->say(fmt::format("no orders can be given to this job (cohort ctl): {}", error.what()));
  }
}

void Job::leave_invitation() const {
  std::string text = to_line(own_announcement()) + "\n" + to_text(agents_->invitation_for_owner());
  const sys::UniqueFd pipe(*spec_.invitation_fd);
  const ssize_t written = ::write(pipe.get(), text.data(), text.size());  // less than a pipe holds
  const int error = errno;
  const bool whole = written == static_cast<ssize_t>(text.size());
  net::wipe(text);
  if (!whole)
    raise(ErrorCode::Unavailable, "the owner does not take the invitation of its agents: {}", errno_text(error));
}

void Job::look() {
  bool more = true;
  while (more) {
    while (auto event = agents_->next_event()) on_event(*std::move(event));
    if (owner_ && owner_->take_gone()) on_owner_gone();
    const Display::News news = run_->take_news();
    for (const auto& [source, bytes] : news.taken) agents_->members()[source]->channel->send(OutputTaken{bytes});
    if (news.reader_gone) epoch_->on_reader_gone();
    while (auto order = control_ ? control_->next() : std::nullopt) control_->answer(epoch_->obey(*order));
    epoch_->look();
    more = agents_->has_events();
    if (may_begin_ && epoch_->starting() && agents_->all_joined()) {
      more = true;
      begin();
    }
    if (epoch_->ended() && !over_) {
      more = true;
      conclude();
    }
  }
  if (over_ && run_->finished()) loop_.stop();
}

void Job::on_event(AgentEvent event) {
  AgentHandle* const agent = event.agent;
  if (auto* said = std::get_if<agent_event::Said>(&event.what)) {
    on_message(*agent, std::move(said->message));
  } else if (std::holds_alternative<agent_event::Joined>(event.what)) {
    if (tracing_) tracing_->on_joined(*agent);
    on_joined(*agent);
  } else if (const auto* closed = std::get_if<agent_event::ChannelClosed>(&event.what)) {
    if (tracing_) tracing_->on_closed(*agent);
    epoch_->on_channel_closed(*agent, closed->error);
  } else if (std::holds_alternative<agent_event::ProcessEnded>(event.what)) {
    epoch_->on_agent_process_ended(*agent);
  } else if (const auto* unfit = std::get_if<agent_event::Unfit>(&event.what)) {
    epoch_->on_unfit(agent, unfit->why);
  } else if (const auto* complaint = std::get_if<agent_event::Complaint>(&event.what)) {
    if (epoch_->running()) run_->say(fmt::format("{}: {}", agent->host.name, complaint->line));
  }
}

void Job::on_message(AgentHandle& agent, Message message) {
  if (tracing_ && tracing_->take(agent, message)) return;
  auto* const leased = std::get_if<LeasedPorts>(&message);
  if (leased == nullptr) return epoch_->on_message(agent, std::move(message));
  if (!epoch_->starting()) return;
  const auto all = orders_->take_ports(agent, std::move(*leased));
  if (!all) return epoch_->fail_start(all.error().what());
  if (*all) epoch_->give_orders();
}

void Job::on_joined(AgentHandle& agent) {
  if (epoch_->is_newcomer(agent)) return void(epoch_->decide(event::AgentJoined{agent.host.index}));
  // (An agent that was given up on its way does not start its ranks.)
  const bool late = epoch_->running() && epoch_->membership() != nullptr && !agent.lost;
  if (late) return void(epoch_->decide(event::AgentCame{agent.host}));
  const bool idle = epoch_->starting() && epoch_->membership() != nullptr && epoch_->has_ordered();
  if (idle || !epoch_->starting()) {
    // Nothing is started there, so its end is no loss. An elastic job may admit it once the job runs.
    agent.started = agent.all_gone = true;
    agent.lost = agent.lost || !idle;
    if (!idle) agent.channel->send(Finish{epoch_->stop_status()});
    return;
  }
  may_begin_ = true;
  const int least = setup_.plan.node ? setup_.plan.node->least : 0;
  const auto there = nodes_there();
  if (agents_->all_joined() || least == 0 || there < least || last_call_) return;
  const auto wait = std::min<std::chrono::milliseconds>(kLastCall, start_timeout_of(spec_, setup_.plan) / 2);
  run_->say(fmt::format("{} of {} nodes are there, and {} are enough: the job begins in {:g} s, if no others come",
                        there, setup_.plan.node->count, least, std::chrono::duration<double>(wait).count()));
  last_call_ = Timer(loop_, wait, [this, least] {
    last_call_ = Timer();
    if (nodes_there() >= least) agents_->drop_missing();
  });
}

// Called when all agents are there: rank 0's port is known only now, and nothing runs anywhere if a host is missing.
void Job::begin() {
  may_begin_ = false;
  last_call_ = Timer();
  agents_->take_late_ones();
  try {
    if (settles_late()) {
      orders_->settle_nodes();
      epoch_->settle(shown_ranks(spec_, setup_.plan));
    }
  } catch (const Error& error) {
    return epoch_->fail_start(error.what());
  }
  orders_->note_first_plan();
  if (orders_->have_ports()) epoch_->give_orders();
}

void Job::on_signal(int signal) {
  switch (signal) {
    case SIGTSTP: {
      agents_->broadcast(SignalWorkers{SIGSTOP});
      // SIGCONT has arrived meanwhile, and stopping now would discard it, and the job would stay stopped.
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
  if (epoch_->ended() && !over_) conclude();
  if (!epoch_->ended()) return epoch_->on_owner_gone();
  if (!spec_.owner_folder.empty()) remove_private_folder(spec_.owner_folder);
  loop_.stop();
}

void Job::make_epoch() { epoch_ = std::make_unique<Epoch>(loop_, setup_, *agents_, *orders_, *run_, past_); }

void Job::begin_epoch(const Plan& plan) {
  if (setup_.plan.least > 0) {
    past_.workers += setup_.plan.world_size;
    past_.members.barred = epoch_->membership()->barred();
    orders_->take(plan);
  }
  agents_->begin_again();
  make_epoch();
  epoch_->settle(shown_ranks(spec_, setup_.plan));
  epoch_->give_orders();
}

void Job::conclude() {
  if (const std::optional<Plan> next = epoch_->next_plan()) {
    epoch_->report({});
    return begin_epoch(*next);
  }
  status_ = epoch_->report(close());
  over_ = true;
  if (tracing_) tracing_->finish();
  agents_->send_exit_status(status_);
  if (owner_gone() && !spec_.owner_folder.empty()) remove_private_folder(spec_.owner_folder);
  run_->finish();
}

Result<void> Job::close() {
  run_->finish_warnings();
  // The kernel has made this process the parent of processes that a killed agent left.
  const auto helpers = run_->helpers();
  spared_.insert(spared_.end(), helpers.begin(), helpers.end());
  const auto stuck = sweep(spared_, std::chrono::seconds(10), {});
  if (!stuck.empty()) run_->say(fmt::format("even SIGKILL does not end {}", describe_stuck(stuck)));
  if (!payload_transfer_ || owner_gone()) return {};
  return bring_from_ranks(*payload_transfer_, setup_.plan.world_size);
}

}  // namespace

JobResult run_job(const JobSpec& spec, Plan plan) { return Job(spec, std::move(plan)).run(); }

}  // namespace cohort::launch
