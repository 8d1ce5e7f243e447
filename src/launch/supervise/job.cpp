#include "launch/supervise/job.h"

#include "base/files.h"
#include "launch/processes.h"
#include "launch/supervise/supervisor.h"
#include "net/served_store.h"
#include "net/store.h"
#include "rendezvous/place.h"

#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

constexpr const char* kPageFile = "page.url";

constexpr std::initializer_list<int> kJobSignals = {SIGINT,  SIGTERM, SIGHUP,  SIGQUIT,
                                                    SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};
/// Of the job's store, which is in this process.
constexpr auto kStoreTime = std::chrono::seconds(10);
/// After the job's end, for its record to get where --track says.
constexpr auto kTrackersTime = std::chrono::seconds(30);

/// Of TF_CONFIG's cluster, that are on a host.
int tasks_of(const PlannedHost& host) { return host.ranks + host.servers; }

}  // namespace

Job::Job(const JobSpec& spec, Plan plan, const std::function<void(const std::string&)>& on_trace)
    : spec_(spec),
      on_trace_(on_trace),
      setup_(set_up_job(spec, std::move(plan))),
      restarts_(spec.max_restarts),
      display_(loop_, {[this](std::size_t source, std::uint64_t bytes) {
                         agents_->members()[source]->channel->send(OutputTaken{bytes});
                       },
                       [this] { epoch_->on_reader_gone(); }, [this](int fd, int error) { on_no_room(fd, error); }}),
      announcer_(display_, spec.json    ? Announcer::Form::Json
                           : spec.quiet ? Announcer::Form::QuietText
                                        : Announcer::Form::Text) {}

Job::~Job() = default;

int Job::run() {
  try {
    prepare();
  } catch (...) {
    if (agents_) agents_->drop_lifelines();
    trackers_.reset();
    sweep(spared_, std::chrono::seconds(5), {});
    throw;
  }
  loop_.run();
  if (tracing_ && on_trace_) {
    tracing_.reset();
    on_trace_(folder_.path);
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
  const std::string id = sys::random_hex(6);
  state_.job_id = fmt::format("{}-{}", setup_.program.name, id);
  state_.program = setup_.program;
  if (!settles_late()) shown_ranks(spec_, setup_.plan);  // what is wrong with them is told before anything starts

  signal_watch_ = Watch(loop_, signals_->fd());
  signal_watch_.on_readable([this] {
    while (const auto signal = signals_->next()) on_signal(*signal);
  });

  if (spec_.owner_pid)
    owner_.emplace(loop_, *spec_.owner_pid, [this] {
      if (next_) begin_next();
      epoch_->on_owner_gone();
    });
  make_folders(id.substr(0, 4));
  if (spec_.trace) tracing_.emplace(loop_, folder_.path, [this](const std::string& text) { say(text); });
  epoch_ = std::make_unique<Epoch>(*this);

  start_agents();  // its process starts while we go on
  port_ = value_or_throw(PortLease::take(std::hash<std::string>{}(state_.job_id)));
  store::StoreServerOptions store_options;
  store_options.secret = *secret_;
  if (goes_elsewhere(setup_.plan)) store_options.endpoint = agents_->open_endpoint();
  store_ = std::make_unique<store::StoreServer>(store_options);
  if (has_payloads(spec_.owner_folder)) {
    payload_transfer_ = PayloadTransferOptions{spec_.owner_folder, store_->endpoint().tcp.port, *secret_};
    value_or_throw(bring_to_ranks(*payload_transfer_));
  }

  state_.command_line = spec_.command_line;
  state_.master_port = port_->port();
  state_.max_restarts = spec_.max_restarts;
  if (!settles_late()) look_at_plan();
  if (plan.method == StartMethod::Owner) leave_invitation();
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

void Job::say(const std::string& text) {
  announcer_.say(text);
  note(text);
}

void Job::note(const std::string& text) {
  state_.note(text);
  if (live_) live_->changed();
}

void Job::make_folders(const std::string& id) {
  folder_ = value_or_throw(make_run_folder({spec_.run_folder, setup_.program.name, id}));
  live_.emplace(loop_, folder_, state_,
                Live::Events{[this](const std::string& why) {
                               say(fmt::format("{}; the job goes on, but nobody can watch it", why));
                             },
                             [this](std::string summary) {
                               if (spec_.status && !spec_.quiet) display_.set_status(std::move(summary));
                             }});
  warnings_.emplace(loop_, folder_,
                    Warnings::Options{.on_warning = spec_.on_warning,
                                      .job_id = state_.job_id,
                                      .show =
                                          [this](const Warning& warning) {
                                            announcer_.warn(warning);
                                            note(warning.text);
                                          },
                                      .say = [this](const std::string& text) { say(text); }});
  if (!folder_.earlier.empty() && !spec_.quiet)
    say(fmt::format("{} has a run before this one; its job.json and logs are now in {}", folder_.shown,
                    folder_.earlier));
  if (!spec_.keep_logs || spec_.output_folder.empty()) return;
  auto taken = make_log_folder(spec_.output_folder, folder_);
  if (!taken) raise(taken.error().code(), "--output-dir {}: {}", spec_.output_folder, taken.error().what());
  logs_ = *std::move(taken);
  if (!logs_.earlier.empty() && !spec_.quiet)
    say(fmt::format("{} has logs of a run before this one; they are now in {}", spec_.output_folder, logs_.earlier));
}

void Job::look_at_plan() {
  display_.set_up(spec_, setup_.plan, shown_ranks(spec_, setup_.plan));
  epoch_->look_at_plan();
}

Result<void> Job::settle_nodes() {
  Plan whole = setup_.plan;
  whole.hosts.clear();
  int ranks = 0;
  if (!has_launchers()) agents_->sort_by_host();
  for (const auto& member : agents_->members()) {
    whole.hosts.push_back(member->host);
    ranks += member->host.slots;
  }
  auto plan = make_plan(std::move(whole), ranks, spec_);
  if (!plan) return tl::unexpected(plan.error());
  setup_.plan = *std::move(plan);
  for (std::size_t i = 0; i < setup_.plan.hosts.size(); ++i) agents_->members()[i]->host = setup_.plan.hosts[i];
  try {
    look_at_plan();
  } catch (const Error& error) {  // --ranks names one that there is not
    return tl::unexpected(error);
  }
  return {};
}

void Job::start_trackers() {
  if (spec_.track.empty() || trackers_) return;
  trackers_.emplace(loop_, spec_.track, folder_.shown, [this](const std::string& text) { say(text); });
  const auto pids = trackers_->pids();
  spared_.insert(spared_.end(), pids.begin(), pids.end());
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
    if (epoch_->running()) say(fmt::format("{}: {}", agent.host.name, line));
  };
  return events;
}

void Job::start_agents() {
  agents_->start(setup_.plan.hosts);
  if (const std::string text = agents_->invitation(); !text.empty()) say(text);
}

void Job::on_joined(AgentHandle& agent) {
  if (!epoch_->starting()) return agent.channel->send(Finish{epoch_->stop_status()});
  // Where rank 0's port is, is known only then; and nothing runs anywhere if a host is missing.
  if (!agents_->all_joined()) return;
  if (settles_late()) {
    if (auto settled = settle_nodes(); !settled) return epoch_->fail_start(settled.error().what());
  }
  state_.master_port = facts_for(agent).master_port;
  if (have_ports()) epoch_->give_orders();
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
  if (all) epoch_->give_orders();
}

JobFacts Job::facts_for(const AgentHandle& agent) const {
  JobFacts facts;
  facts.job_id = state_.job_id;
  facts.run_folder = folder_.path;
  // Of this host too as others see it, so that what serves here knows where to listen.
  const std::string here = agent.host.local ? address_of(agent) : AgentPool::own_address(agent).host;
  facts.store = net::to_string(net::Address{here, store_->endpoint().tcp.port});
  // Rank 0's host, as seen from the others.
  const AgentHandle& first = *agents_->members().front();
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
  facts.log_folder = state_.log_folder;
  facts.restart = restarts_.done();
  facts.max_restarts = restarts_.most();
  facts.servers_may_die = spec_.server_restarts > 0 || spec_.lost_servers > 0;
  if (spec_.host_timeout != kHostTimeout) {
    facts.host_timeout = std::chrono::ceil<std::chrono::seconds>(spec_.host_timeout);
  }
  return facts;
}

std::string Job::address_of(const AgentHandle& member) const {
  for (const auto& other : agents_->members()) {
    if (member.host.local && !other->host.local) return AgentPool::own_address(*other).host;
  }
  return AgentPool::agent_address(member).host;
}

void Job::on_signal(int signal) {
  if (next_) begin_next();  // it is for those that are about to be started
  switch (signal) {
    case SIGTSTP:
      agents_->broadcast(SignalWorkers{SIGSTOP});
      ::raise(SIGSTOP);
      return;
    case SIGCONT: agents_->broadcast(SignalWorkers{SIGCONT}); break;
    default: break;
  }
  epoch_->on_signal(signal);
}

void Job::on_no_room(int fd, int error) {
  const std::string logs = shown_logs();
  const std::string text =
      fmt::format("{}: {}; the job goes on, and what does not fit there is {}", fd == 1 ? "stdout" : "stderr",
                  errno_text(error), logs.empty() ? "lost" : "only in " + logs);
  display_.say(text);  // on stderr in any form: stdout may be what is full
  state_.output_lost = text;
  if (!epoch_->starting()) write_record();
}

Restarts::Decision Job::after(const Breakdown& breakdown) {
  if (owner_gone() || display_.reader_gone() || !agents_->can_go_on()) return {};
  return restarts_.after(breakdown, setup_.plan.world_size);
}

void Job::begin_next() {
  next_ = Timer();
  agents_->begin_again();
  epoch_ = std::make_unique<Epoch>(*this);
  epoch_->look_at_plan();
  announce_epoch();
  epoch_->give_orders();
}

void Job::announce_epoch() {
  try {
    const net::Deadline deadline = net::deadline_in(kStoreTime);
    const auto store = store::connect_tcp_store("127.0.0.1", store_->endpoint().tcp.port, *secret_, deadline);
    store->set(store::kEpochKey, std::to_string(restarts_.done()));
  } catch (const Error& error) {
    epoch_->fail_start(fmt::format("the job's store does not take the ranks' next start: {}", error.what()));
  }
}

void Job::tell_how_server_ended(int number, const std::string& how) {
  store_->set_if_absent(rendezvous::ended_key(restarts_.done(), number), how);
  store_->set_if_absent(rendezvous::server_key(restarts_.done(), number), std::string(rendezvous::kEndedBefore));
}

void Job::start_page() {
  if (page_ || !spec_.page) return;
  // Its address lets in whoever has it: it is for a terminal. What a batch system keeps may be read by others.
  auto page = SideCommand::cohort({"watch", folder_.path, "--page"}, SIGKILL);
  page.output = SideCommand::Options::Output::All;
  page.say = [this](const std::string& line) {
    if (line.find("?token=") == std::string::npos || ::isatty(STDERR_FILENO) != 0) return announcer_.say(line);
    if (auto kept = replace_file(folder_, kPageFile, line + "\n"); !kept) return announcer_.say(kept.error().what());
    announcer_.say(fmt::format("the page's address, with its token: cat {}/{}", folder_.shown, kPageFile));
  };
  try {
    page_.emplace(loop_, std::move(page));
  } catch (const Error& error) {
    say(fmt::format("no page: {}", error.what()));
  }
}

void Job::end(int status) {
  status_ = status;
  page_.reset();
  ::unlinkat(folder_.fd.get(), kPageFile, 0);
  if (tracing_) tracing_->finish();
  agents_->send_exit_status(status);
  if (owner_gone() && !spec_.owner_folder.empty()) remove_private_folder(spec_.owner_folder);
  const auto drain = [this] {
    const std::string logs = shown_logs();
    display_.drain(
        spec_.output_timeout,
        fmt::format("the job is over and its output has not been read for {:g} s, so the rest of it is not shown{}",
                    std::chrono::duration<double>(spec_.output_timeout).count(),
                    logs.empty() ? "" : "; the complete logs are in " + logs),
        [this] { loop_.stop(); });
  };
  if (!trackers_) return drain();
  trackers_->finish(kTrackersTime, drain);
}

std::string Job::logs_below(const std::string& run_folder) const {
  if (!spec_.keep_logs) return {};
  const std::string first = spec_.output_folder.empty() ? run_folder + "/logs" : spec_.output_folder;
  return restarts_.done() == 0 ? first : fmt::format("{}/restart-{}", first, restarts_.done());
}

void Job::write_record() {
  if (auto written = write_job_record(folder_, to_json(state_)); !written) say(written.error().what());
}

int run_job(const JobSpec& spec, Plan plan, const std::function<void(const std::string&)>& on_trace) {
  return Job(spec, std::move(plan), on_trace).run();
}

}  // namespace cohort::launch
