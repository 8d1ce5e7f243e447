#include <cohort/exit_status.h>

#include "base/log.h"
#include "launch/supervise/supervisor_impl.h"
#include "launch/sweep.h"
#include "launch/watch/demangle.h"
#include "sys/cpus.h"

#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

constexpr std::initializer_list<int> kSignals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};

/// The cores of this host, where it has more ranks than these; else 0.
int crowded_cores(const Plan& plan) {
  const int cores = sys::usable_cores();
  const bool crowded = std::any_of(plan.hosts.begin(), plan.hosts.end(),
                                   [cores](const PlannedHost& host) { return host.local && host.ranks > cores; });
  return crowded ? cores : 0;
}

}  // namespace

Supervisor::Supervisor(const RunOptions& options, Attempts& attempts)
    : options_(options),
      attempts_(attempts),
      setup_(set_up_job(options)),
      display_(loop_, {[this](std::size_t source, std::uint64_t bytes) {
                         crew_->members()[source]->channel->send(OutputTaken{bytes});
                       },
                       [this] { on_reader_gone(); }, [this](int fd, int error) { on_no_room(fd, error); }}),
      announcer_(display_, options.json    ? Announcer::Form::Json
                           : options.quiet ? Announcer::Form::QuietText
                                           : Announcer::Form::Text),
      stopping_(loop_, options.grace, stopping_events()) {}

void Supervisor::prepare() {
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);  // our output may be a file at its limit
  value_or_throw(sys::become_subreaper());
  spared_ = sys::descendants(::getpid());  // of a shell that became us with `exec`
  signals_.emplace(value_or_throw(sys::SignalFd::create(kSignals)));
  secret_ = options_.remote.secret;
  if (!secret_) {
    secret_ = value_or_throw(options_.remote.secret_file.empty() ? net::Secret::generate()
                                                                 : net::Secret::from_file(options_.remote.secret_file));
  }
  Crew::Options crew;
  crew.remote = options_.remote;
  crew.elsewhere = goes_elsewhere(setup_.plan);
  crew.host_timeout = options_.host_timeout;
  crew_.emplace(loop_, *secret_, crew, crew_events());
  const std::string id = random_hex(6);
  const bool first = attempts_.job_id.empty();
  if (first) attempts_.job_id = fmt::format("{}-{}", setup_.program.name, id);
  job_id_ = attempts_.job_id;
  if (!has_launchers()) shown_ranks(options_, setup_.plan);  // what is wrong with them is told before anything starts

  signal_watch_ = Watch(loop_, signals_->fd());
  signal_watch_.on_readable([this] {
    while (const auto signal = signals_->next()) on_signal(*signal);
  });

  if (options_.owner_pid) owner_.emplace(loop_, *options_.owner_pid, [this] { on_owner_gone(); });

  if (first) {
    RunFolderRequest request;
    request.path = options_.run_folder;
    request.program_name = setup_.program.name;
    request.id = id.substr(0, 4);
    attempts_.folder = value_or_throw(make_run_folder(request));
    if (!folder_.earlier.empty() && !options_.quiet)
      say(fmt::format("{} has a run before this one; its job.json and logs are now in {}", folder_.shown,
                      folder_.earlier));
    if (options_.keep_logs && !options_.output_folder.empty()) take_log_folder();
  }

  start_agents();  // its process starts while we go on
  port_ = value_or_throw(PortLease::take(std::hash<std::string>{}(job_id_)));
  store::StoreServerOptions store_options;
  store_options.secret = *secret_;
  if (goes_elsewhere(setup_.plan)) store_options.endpoint = crew_->open_endpoint();
  store_ = std::make_unique<store::StoreServer>(store_options);
  if (has_parcels(options_.owner_folder)) {
    courier_ = CourierOptions{options_.owner_folder, store_->endpoint().tcp.port, *secret_};
    value_or_throw(bring_to_ranks(*courier_));
  }

  if (!has_launchers()) look_at_plan();
  record_.job_id = job_id_;
  record_.command_line = options_.command_line;
  record_.program = setup_.program;
  record_.master_port = port_->port();
  record_.start = utc_now();
  record_.max_restarts = options_.max_restarts;
  record_.attempts = attempts_.records;
  if (options_.keep_logs) record_.log_folder = absolute_path(logs_below(folder_.path));
  if (options_.keep_logs && goes_elsewhere(setup_.plan))
    remote_logs_.emplace(record_.log_folder, [this](const std::string& text) { say(text); });
}

void Supervisor::take_log_folder() {
  auto taken = make_log_folder(options_.output_folder, folder_);
  if (!taken) raise(taken.error().code(), "--output-dir {}: {}", options_.output_folder, taken.error().what());
  attempts_.logs = *std::move(taken);
  if (!attempts_.logs.earlier.empty() && !options_.quiet)
    say(fmt::format("{} has logs of a run before this one; they are now in {}", options_.output_folder,
                    attempts_.logs.earlier));
}

void Supervisor::look_at_plan() {
  Display::Look look{
      options_.json ? PrefixStyle::Json : options_.prefix, options_.collapse, hosts_of_ranks(setup_.plan), {}};
  look.ranks = shown_ranks(options_, setup_.plan);
  display_.set_up(std::move(look));
  health_.emplace(loop_, hosts_of_ranks(setup_.plan), options_.health,
                  HealthWatch::Events{[this](const std::string& text) { say(text); },
                                      [this](const std::string& why) { on_stuck(why); }});
  record_.plan = setup_.plan;
  record_.pids.resize(static_cast<std::size_t>(setup_.plan.world_size));
}

Result<void> Supervisor::settle_nodes() {
  std::vector<HostSlots> hosts;
  int ranks = 0;
  for (const auto& member : crew_->members()) {
    hosts.push_back({member->host.name, member->host.ranks, member->host.local});
    ranks += member->host.ranks;
  }
  auto plan = make_plan(hosts, ranks);
  if (!plan) return tl::unexpected(plan.error());
  setup_.plan = *std::move(plan);
  for (std::size_t i = 0; i < setup_.plan.hosts.size(); ++i) crew_->members()[i]->host = setup_.plan.hosts[i];
  try {
    look_at_plan();
  } catch (const Error& error) {  // --ranks names one that there is not
    return tl::unexpected(error);
  }
  return {};
}

Crew::Events Supervisor::crew_events() {
  Crew::Events events;
  events.on_joined = [this](CrewMember& agent) { on_joined(agent); };
  events.on_message = [this](CrewMember& agent, Message message) { on_message(agent, std::move(message)); };
  events.on_channel_closed = [this](CrewMember& agent, const std::optional<Error>& error) {
    on_channel_closed(agent, error);
  };
  events.on_process_ended = [this](CrewMember& agent) { on_agent_process_ended(agent); };
  events.on_unfit = [this](const CrewMember* agent, const std::string& why) {
    if (stage_ != Stage::Starting) return;
    // Which it is, is not known; or no other one could be started either.
    if (agent == nullptr || agent->remote == nullptr) return fail_start(why);
    on_host_failed(*agent, why);
  };
  events.on_complaint = [this](const CrewMember& agent, const std::string& line) {
    if (stage_ == Stage::Running) say(fmt::format("{}: {}", agent.host.name, line));
  };
  return events;
}

void Supervisor::start_agents() {
  crew_->start(setup_.plan.hosts);
  // The launchers of other nodes come again by themselves.
  if (const std::string text = crew_->invitation(); !text.empty() && attempts_.restarts.done() == 0) say(text);
  start_limit_ = Timer(loop_, options_.start_timeout, [this] {
    fail_start(fmt::format("no sign of running ranks from {} after {:.0f} s", crew_->missing(),
                           std::chrono::duration<double>(options_.start_timeout).count()));
  });
}

void Supervisor::on_joined(CrewMember& agent) {
  if (stage_ != Stage::Starting) return agent.channel->send(Finish{stop_status_.value_or(1)});
  // Where rank 0's port is, is known only then; and nothing runs anywhere if a host is missing.
  if (!crew_->all_joined()) return;
  if (has_launchers()) {
    if (auto settled = settle_nodes(); !settled) return fail_start(settled.error().what());
  }
  for (const auto& each : crew_->members()) each->channel->send(order_for(setup_, each->host, facts_for(*each)));
  record_.master_port = facts_for(agent).master_port;
}

JobFacts Supervisor::facts_for(const CrewMember& agent) const {
  JobFacts facts;
  facts.job_id = job_id_;
  facts.run_folder = folder_.path;
  facts.store = net::to_string(net::Address{Crew::own_address(agent).host, store_->endpoint().tcp.port});
  // Rank 0's host, as seen from the others.
  const CrewMember& first = *crew_->members().front();
  facts.master_port = first.host.local ? port_->port() : first.free_port;
  facts.master_address = Crew::agent_address(first).host;
  for (const auto& other : crew_->members()) {
    if (first.host.local && !other->host.local) {
      facts.master_address = Crew::own_address(*other).host;
      break;
    }
  }
  facts.log_folder = record_.log_folder;
  facts.restart = attempts_.restarts.done();
  facts.max_restarts = attempts_.restarts.most();
  if (options_.host_timeout != RunOptions().host_timeout) {
    facts.host_timeout = std::chrono::ceil<std::chrono::seconds>(options_.host_timeout);
  }
  return facts;
}

void Supervisor::on_message(CrewMember& agent, Message message) {
  if (auto* output = std::get_if<Output>(&message)) {
    if (output->rank < 0 || output->rank >= setup_.plan.world_size) return;
    if (remote_logs_ && !agent.host.local) remote_logs_->keep(*output);
    display_.feed(static_cast<std::size_t>(agent.host.index), *output);
  } else if (const auto* started = std::get_if<Started>(&message)) {
    on_started(agent, *started);
  } else if (const auto* failed = std::get_if<StartFailed>(&message)) {
    const std::string where =
        failed->rank >= 0 ? fmt::format("rank {} on {}", failed->rank, agent.host.name) : agent.host.name;
    // (Each of several launchers starts a program of its own, which its reason names.)
    fail_start(has_launchers() ? fmt::format("{}: {}", where, failed->reason)
                               : fmt::format("cannot start {}: {}: {}", setup_.program.path, where, failed->reason));
  } else if (const auto* exited = std::get_if<Exited>(&message)) {
    on_exited(*exited);
  } else if (auto* reports = std::get_if<Reports>(&message)) {
    health_->take(std::move(*reports), agent.host.first_rank, agent.host.ranks);
    if (stage_ == Stage::Stopping && health_->somebody_saves()) stopping_.they_save();
  } else if (const auto* stacks = std::get_if<Stacks>(&message)) {
    if (!stacks->text.empty()) say(fmt::format("stacks of rank {}:\n{}", stacks->rank, demangled(stacks->text)));
  } else if (const auto* taken = std::get_if<InputTaken>(&message)) {
    if (input_) input_->taken(taken->bytes);
  } else if (const auto* told = std::get_if<Told>(&message)) {
    on_agent_told(agent, *told);
  } else if (const auto* ends = std::get_if<Ends>(&message)) {
    on_agent_ends(*ends);
  } else if (const auto* trouble = std::get_if<Trouble>(&message)) {
    say(fmt::format("{}: {}", agent.host.name, trouble->text));
  } else if (const auto* gone = std::get_if<AllGone>(&message)) {
    agent.all_gone = true;
    health_->host_ended(agent.host.first_rank, agent.host.ranks);
    if (!gone->stuck.empty()) {
      say(fmt::format("{}: even SIGKILL does not end {}; the host may have to be restarted", agent.host.name,
                      gone->stuck));
      if (!stop_status_) stop_status_ = 1;
    }
    crew_->see_off(agent);
    check_end();
  }
}

void Supervisor::on_started(CrewMember& agent, const Started& started) {
  if (started.pids.size() != static_cast<std::size_t>(agent.host.ranks)) return;
  agent.started = true;
  if (remote_logs_ && !agent.host.local) remote_logs_->open(agent.host.first_rank, agent.host.ranks);
  std::copy(started.pids.begin(), started.pids.end(), record_.pids.begin() + agent.host.first_rank);
  if (stage_ != Stage::Starting) return;
  if (!crew_->all_started()) return;
  stage_ = Stage::Running;
  start_limit_ = Timer();
  started_at_ = Clock::now();
  record_.threads = started.threads;
  announcer_.started({setup_.plan, started.threads, setup_.bind == Binding::Core, crowded_cores(setup_.plan),
                      options_.keep_logs ? folder_.shown : std::string(), has_launchers()},
                     record_, folder_.path);
  log::info("launch", "job {} is not contained: {}", job_id_, kNotContained);
  health_->start();
  write_record();
  if (options_.timeout) {
    if (!attempts_.limit) attempts_.limit = Clock::now() + *options_.timeout;
    job_limit_ = Timer(loop_, *attempts_.limit - Clock::now(), [this] {
      if (!stop_status_) stop_status_ = kTimeoutStatus;
      stop(fmt::format("the time limit of {:g} s is over", std::chrono::duration<double>(*options_.timeout).count()),
           SIGTERM, grace_after(SIGTERM));
    });
  }
  for (const int signal : std::exchange(early_signals_, {})) pass_on(signal);
  if (InputReader::worth_reading(0)) {
    CrewMember* const first = crew_->members().front().get();
    input_ = std::make_unique<InputReader>(
        loop_, 0, [first](std::string bytes) { first->channel->send(Input{std::move(bytes)}); });
  }
  look_for_failure();  // on a host that was faster than another
}

void Supervisor::on_exited(const Exited& exited) {
  if (exited.rank < 0 || exited.rank >= setup_.plan.world_size) return;
  Ending ending;
  ending.rank = exited.rank;
  for (const PlannedHost& host : setup_.plan.hosts) {
    if (exited.rank >= host.first_rank) ending.host = host.name;
  }
  ending.pid = record_.pids[static_cast<std::size_t>(exited.rank)];
  ending.status = exited.status;
  ending.before_stop = exited.before_stop;
  ending.out_of_memory = exited.out_of_memory;
  ending.after_seconds = static_cast<double>(exited.after_ns) * 1e-9;
  ending.last_stderr = exited.last_stderr;
  ending.last = exited.last;
  ending.words = demangled(exited.words);
  ending.cause = exited.cause;
  announcer_.rank_ended(ending);
  endings_.push_back(std::move(ending));
  if (!exited.status.success() && doing_then_.empty()) {
    doing_then_ = health_->doing_now();
    doing_then_[static_cast<std::size_t>(exited.rank)] = doing(exited.last) + at_step(exited.last);
  }
  health_->rank_ended(exited.rank);
  if (exited.rank == 0) input_.reset();
  look_for_requeue();
  look_for_failure();
}

// Ranks that save do so together. One that neither ends nor fails then has missed the question, or hangs.
void Supervisor::look_for_requeue() {
  const auto saved = std::find_if(endings_.begin(), endings_.end(), asks_for_requeue);
  if (saved == endings_.end() || requeue_limit_ || stage_ != Stage::Running) return;
  requeue_limit_ = Timer(loop_, options_.preempt_grace, [this, rank = saved->rank] {
    on_stuck(fmt::format(
        "rank {} has saved and ended (exit status {}), and {} {} still running {:g} s later -- do all ranks ask "
        "Preemption::requested, at every step?",
        rank, kRequeueStatus, running_ranks(), running_ranks() == 1 ? "other rank is" : "other ranks are",
        std::chrono::duration<double>(options_.preempt_grace).count()));
  });
}

void Supervisor::look_for_failure() {
  if (stage_ != Stage::Running || !first_failure(endings_)) return;
  // A rank that fell after another can be dead before it: that one still writes its core, frees its memory or runs its
  // last destructors. Told to end now, it would lose the status that it is about to give.
  if (follows_another(*first_failure(endings_)) && running_ranks() > 0) {
    if (!cause_limit_) wait_for_cause();
  } else {
    stop_for_failure();
  }
}

void Supervisor::write_record() {
  if (auto written = write_job_record(folder_, to_json(record_)); !written) say(written.error().what());
}

int Supervisor::run() {
  try {
    prepare();
  } catch (...) {
    if (crew_) crew_->let_go();
    sweep(spared_, std::chrono::seconds(5), {});
    throw;
  }
  loop_.run();
  return stop_status_.value_or(1);
}

int run_job(const RunOptions& options) {
  Attempts attempts(options.max_restarts);
  std::optional<sys::SignalFd> between;  // a signal between two attempts waits for the next one
  while (true) {
    Supervisor supervisor(options, attempts);
    if (options.max_restarts > 0 && !between) between.emplace(value_or_throw(sys::SignalFd::create(kSignals)));
    const int status = supervisor.run();
    if (!supervisor.wants_restart()) return status;
  }
}

}  // namespace cohort::launch
