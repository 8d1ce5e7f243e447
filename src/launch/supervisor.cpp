#include "launch/supervisor.h"

#include "base/log.h"
#include "launch/attempts.h"
#include "launch/crew.h"
#include "launch/display.h"
#include "launch/health_watch.h"
#include "launch/input_reader.h"
#include "launch/job_record.h"
#include "launch/job_setup.h"
#include "launch/notices.h"
#include "launch/owner.h"
#include "launch/port_lease.h"
#include "launch/run_folder.h"
#include "launch/sweep.h"
#include "launch/verdict.h"
#include "store/server.h"
#include "sys/signals.h"
#include "sys/terminal.h"

#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <memory>
#include <utility>

namespace cohort::launch {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::initializer_list<int> kSignals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};
/// An agent has this long for what it does after everything has been killed.
constexpr auto kAgentEndLimit = std::chrono::seconds(15);
/// For the rank that others have fallen after to be dead, too.
constexpr auto kCauseTime = milliseconds(500);

/// One attempt.
class Supervisor {
 public:
  Supervisor(const RunOptions& options, Attempts& attempts);
  int run();
  bool wants_restart() const noexcept { return restart_; }

 private:
  enum class Stage { Starting, Running, Stopping, Ended };

  void prepare();
  Crew::Events crew_events();
  void start_agents();
  void on_joined(CrewMember& agent);
  void on_message(CrewMember& agent, Message message);
  void on_channel_closed(CrewMember& agent, const std::optional<Error>& error);
  void on_agent_process_ended(CrewMember& agent);
  void on_started(CrewMember& agent, const Started& started);
  void on_exited(const Exited& exited);
  void stop_for_failure();
  void on_stuck(const std::string& why);
  void on_signal(int signal);
  void on_reader_gone();
  void on_owner_gone();
  void say(const std::string& text) { display_.say(text); }
  std::string logs_below(const std::string& run_folder) const {
    return options_.keep_logs ? log_folder(attempts_, options_.output_folder, run_folder) : std::string();
  }
  void announce_stop();
  void stop(const std::string& reason, int signal, milliseconds grace);
  void fail_start(const std::string& why);
  void check_end();
  void finish();
  void write_record();
  int running_ranks() const;

  const RunOptions& options_;
  Attempts& attempts_;
  const JobSetup setup_;
  std::string job_id_;
  RunFolder folder_;
  JobRecord record_;

  Loop loop_;
  sys::TerminalGuard terminal_{0};
  std::optional<sys::SignalFd> signals_;
  Watch signal_watch_;
  std::optional<Owner> owner_;
  std::optional<net::Secret> secret_;
  std::unique_ptr<store::StoreServer> store_;
  std::optional<PortLease> port_;
  std::vector<pid_t> spared_;
  std::optional<Crew> crew_;
  Display display_;  ///< its sources are the crew's members
  std::unique_ptr<InputReader> input_;
  std::vector<Ending> endings_;
  std::optional<HealthWatch> health_;
  std::vector<std::string> others_;  ///< what they were doing when the first rank failed

  Stage stage_ = Stage::Starting;
  std::string stop_reason_;
  std::string start_failure_;
  std::optional<int> stop_status_;  ///< the exit status, where it is not a rank's
  bool agent_lost_ = false;
  bool quiet_end_ = false;
  bool restart_ = false;
  bool told_to_end_ = false;
  int stop_signal_ = 0;  ///< the last one that the ranks were told to end by
  Clock::time_point stop_limit_;
  bool stop_announced_ = false;
  Clock::time_point started_at_ = Clock::now();
  Timer start_limit_;
  Timer job_limit_;
  Timer cause_limit_;
  Timer notice_;
  Timer escalation_;
  Timer end_limit_;
};

Supervisor::Supervisor(const RunOptions& options, Attempts& attempts)
    : options_(options),
      attempts_(attempts),
      setup_(set_up_job(options)),
      display_(loop_, {[this](std::size_t source, std::uint64_t bytes) {
                         crew_->members()[source]->channel->send(OutputTaken{bytes});
                       },
                       [this] { on_reader_gone(); }}) {}

void Supervisor::prepare() {
  ::signal(SIGPIPE, SIG_IGN);
  value_or_throw(sys::become_subreaper());
  spared_ = sys::descendants(::getpid());  // of a shell that became us with `exec`
  signals_.emplace(value_or_throw(sys::SignalFd::create(kSignals)));
  secret_ = value_or_throw(net::Secret::generate());
  crew_.emplace(loop_, *secret_, crew_events());
  const std::string id = random_hex(6);
  const bool first = attempts_.job_id.empty();
  if (first) attempts_.job_id = fmt::format("{}-{}", setup_.program.name, id);
  job_id_ = attempts_.job_id;
  Display::Look look{options_.prefix, options_.collapse, hosts_of_ranks(setup_.plan), {}};
  look.ranks = shown_ranks(options_, setup_.plan);

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
  }
  folder_ = attempts_.folder;
  if (options_.keep_logs && !options_.output_folder.empty()) make_log_folder(options_.output_folder);

  start_agents();  // its process starts while we go on
  port_ = value_or_throw(PortLease::take(std::hash<std::string>{}(job_id_)));
  store::StoreServerOptions store_options;
  store_options.secret = *secret_;
  store_ = std::make_unique<store::StoreServer>(store_options);

  display_.set_up(std::move(look));
  health_.emplace(loop_, hosts_of_ranks(setup_.plan), options_.health,
                  HealthWatch::Events{[this](const std::string& text) { say(text); },
                                      [this](const std::string& why) { on_stuck(why); }});

  record_.job_id = job_id_;
  record_.command_line = options_.command_line;
  record_.program = setup_.program;
  record_.plan = setup_.plan;
  record_.master_port = port_->port();
  record_.pids.resize(static_cast<std::size_t>(setup_.plan.world_size));
  record_.start = utc_now();
  record_.max_restarts = options_.max_restarts;
  record_.attempts = attempts_.records;
  if (options_.keep_logs) record_.log_folder = absolute_path(logs_below(folder_.path));
}

Crew::Events Supervisor::crew_events() {
  Crew::Events events;
  events.on_joined = [this](CrewMember& agent) { on_joined(agent); };
  events.on_message = [this](CrewMember& agent, Message message) { on_message(agent, std::move(message)); };
  events.on_channel_closed = [this](CrewMember& agent, const std::optional<Error>& error) {
    on_channel_closed(agent, error);
  };
  events.on_process_ended = [this](CrewMember& agent) { on_agent_process_ended(agent); };
  events.on_unfit = [this](const std::string& why) { fail_start(why); };
  return events;
}

void Supervisor::start_agents() {
  crew_->start(setup_.plan.hosts);
  start_limit_ = Timer(loop_, options_.start_timeout, [this] {
    fail_start(fmt::format("no sign of running ranks from {} after {:.0f} s", crew_->missing(),
                           std::chrono::duration<double>(options_.start_timeout).count()));
  });
}

void Supervisor::on_joined(CrewMember& agent) {
  if (stage_ != Stage::Starting) return agent.channel->send(Finish{});

  JobFacts facts;
  facts.job_id = job_id_;
  facts.run_folder = folder_.path;
  facts.store = net::to_string(store_->endpoint().tcp);
  facts.master_address = "127.0.0.1";
  facts.master_port = port_->port();
  facts.log_folder = record_.log_folder;
  facts.restart = attempts_.restarts.done();
  facts.max_restarts = attempts_.restarts.most();
  agent.channel->send(order_for(setup_, agent.host, facts));
}

void Supervisor::on_message(CrewMember& agent, Message message) {
  if (auto* output = std::get_if<Output>(&message)) {
    if (output->rank < 0 || output->rank >= setup_.plan.world_size) return;
    display_.feed(static_cast<std::size_t>(agent.host.index), *output);
  } else if (const auto* started = std::get_if<Started>(&message)) {
    on_started(agent, *started);
  } else if (const auto* failed = std::get_if<StartFailed>(&message)) {
    const std::string where =
        failed->rank >= 0 ? fmt::format("rank {} on {}", failed->rank, agent.host.name) : agent.host.name;
    fail_start(fmt::format("cannot start {}: {}: {}", setup_.program.path, where, failed->reason));
  } else if (const auto* exited = std::get_if<Exited>(&message)) {
    on_exited(*exited);
  } else if (auto* reports = std::get_if<Reports>(&message)) {
    health_->take(std::move(*reports));
  } else if (const auto* stacks = std::get_if<Stacks>(&message)) {
    if (!stacks->text.empty()) say(fmt::format("stacks of rank {}:\n{}", stacks->rank, stacks->text));
  } else if (const auto* taken = std::get_if<InputTaken>(&message)) {
    if (input_) input_->taken(taken->bytes);
  } else if (const auto* trouble = std::get_if<Trouble>(&message)) {
    say(fmt::format("{}: {}", agent.host.name, trouble->text));
  } else if (const auto* gone = std::get_if<AllGone>(&message)) {
    agent.all_gone = true;
    if (!gone->stuck.empty()) {
      say(fmt::format("{}: even SIGKILL does not end {}; the host may have to be restarted", agent.host.name,
                      gone->stuck));
      if (!stop_status_) stop_status_ = 1;
    }
    agent.channel->send(Finish{});
    check_end();
  }
}

void Supervisor::on_started(CrewMember& agent, const Started& started) {
  if (started.pids.size() != static_cast<std::size_t>(agent.host.ranks)) return;
  agent.started = true;
  std::copy(started.pids.begin(), started.pids.end(), record_.pids.begin() + agent.host.first_rank);
  if (stage_ != Stage::Starting) return;
  if (!crew_->all_started()) return;
  stage_ = Stage::Running;
  start_limit_ = Timer();
  started_at_ = Clock::now();
  record_.threads = started.threads;
  if (!options_.quiet) {
    say(to_string(StartNotice{setup_.plan, started.threads, setup_.bind == Binding::Core,
                              options_.keep_logs ? folder_.shown : std::string()}));
  }
  log::info("launch", "job {} is not contained: {}", job_id_, kNotContained);
  health_->start();
  write_record();
  if (options_.timeout) {
    if (!attempts_.limit) attempts_.limit = Clock::now() + *options_.timeout;
    job_limit_ = Timer(loop_, *attempts_.limit - Clock::now(), [this] {
      if (!stop_status_) stop_status_ = kTimeoutStatus;
      stop(fmt::format("the time limit of {:g} s is over", std::chrono::duration<double>(*options_.timeout).count()),
           SIGTERM, options_.grace);
    });
  }
  if (InputReader::worth_reading(0)) {
    CrewMember* const first = crew_->members().front().get();
    input_ = std::make_unique<InputReader>(
        loop_, 0, [first](std::string bytes) { first->channel->send(Input{std::move(bytes)}); });
  }
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
  ending.words = exited.words;
  endings_.push_back(std::move(ending));
  if (!exited.status.success() && others_.empty()) others_ = health_->overview(exited.rank);
  health_->rank_ended(exited.rank);
  if (exited.rank == 0) input_.reset();
  if (stage_ != Stage::Running || !first_failure(endings_)) return;
  // A rank that fell after another can be dead before it: that one still writes its core, frees its memory or runs its
  // last destructors. Told to end now, it would lose the status that it is about to give.
  if (follows_another(*first_failure(endings_)) && running_ranks() > 0) {
    if (!cause_limit_) cause_limit_ = Timer(loop_, kCauseTime, [this] { stop_for_failure(); });
  } else {
    stop_for_failure();
  }
}

void Supervisor::stop_for_failure() {
  const auto first = first_failure(endings_);
  stop(fmt::format("rank {} failed: {}", first->rank, sys::to_string(first->status)), SIGTERM, options_.grace);
}

void Supervisor::on_stuck(const std::string& why) {
  if (!stop_status_) stop_status_ = kTimeoutStatus;
  stop(why, SIGTERM, options_.grace);
}

void Supervisor::stop(const std::string& reason, int signal, milliseconds grace) {
  if (stage_ == Stage::Ended) return;
  if (stage_ != Stage::Stopping) {
    stage_ = Stage::Stopping;
    stop_reason_ = reason;
  }
  stop_signal_ = signal;
  stop_limit_ = Clock::now() + grace;
  // Most jobs end at once; who has to wait is told what for.
  if (grace > milliseconds(0)) notice_ = Timer(loop_, milliseconds(1000), [this] { announce_stop(); });
  // Ctrl-C asks kindly, SIGTERM comes before SIGKILL. The agents' own limit is behind ours.
  escalation_ = Timer();
  const bool kindly = signal == SIGINT && grace > milliseconds(0);
  if (kindly) escalation_ = Timer(loop_, grace, [this, grace] { stop(stop_reason_, SIGTERM, grace); });
  if (kindly) grace *= 2;
  start_limit_ = Timer();
  job_limit_ = Timer();
  cause_limit_ = Timer();
  if (health_) health_->stop();
  input_.reset();
  for (const auto& agent : crew_->members()) {
    if (agent->channel == nullptr) {
      agent->process.lifeline.reset();  // it has nothing to end but itself
    } else if (!agent->started) {
      agent->channel->send(Finish{});
    } else {
      agent->channel->send(StopWorkers{signal, static_cast<std::uint32_t>(grace.count())});
    }
  }
  end_limit_ = Timer(loop_, grace + kAgentEndLimit, [this] {
    say("an agent does not answer; ending its processes from here");
    agent_lost_ = true;
    finish();
  });
  check_end();
}

void Supervisor::announce_stop() {
  if (stage_ != Stage::Stopping || quiet_end_ || stop_signal_ == SIGKILL) return;
  const double left = std::max(0.0, std::chrono::duration<double>(stop_limit_ - Clock::now()).count());
  StopNotice notice;
  if (!stop_announced_) notice.reason = stop_reason_;
  notice.ranks = running_ranks();
  notice.seconds_left = left;
  notice.next_signal = stop_signal_ == SIGINT ? SIGTERM : SIGKILL;
  notice.at_terminal = ::isatty(0) != 0;
  say(to_string(notice));
  stop_announced_ = true;
  // A line now and then, however long the grace.
  notice_ = Timer(loop_, milliseconds(static_cast<std::int64_t>(std::max(2.0, left / 5) * 1000)),
                  [this] { announce_stop(); });
}

void Supervisor::fail_start(const std::string& why) {
  if (!stop_status_) stop_status_ = kCannotStartStatus;
  start_failure_ = why;
  stop(why, SIGKILL, milliseconds(0));
}

void Supervisor::on_channel_closed(CrewMember& agent, const std::optional<Error>& error) {
  if (agent.all_gone || stage_ == Stage::Ended) return;
  agent_lost_ = true;
  agent.process.lifeline.reset();  // its guard, if it lives, ends what is left
  if (stop_reason_.empty()) {
    say(fmt::format("the agent of {} is lost{}; ending the job", agent.host.name,
                    error ? fmt::format(" ({})", error->what()) : ""));
  }
  if (!stop_status_) stop_status_ = 1;
  stop(fmt::format("the agent of {} was lost", agent.host.name), SIGKILL, milliseconds(0));
}

void Supervisor::on_agent_process_ended(CrewMember& agent) {
  if (!agent.all_gone && stage_ != Stage::Ended) {
    // What it said last may still be on its way; an agent whose guard was killed ends the job and says so.
    if (agent.channel == nullptr || agent.channel->closed()) {
      agent_lost_ = true;
      if (!stop_status_) stop_status_ = 1;
      if (stop_reason_.empty())
        say(fmt::format("the agent of {} ended before the job; ending the job", agent.host.name));
      if (stage_ != Stage::Stopping)
        stop(fmt::format("the agent of {} was lost", agent.host.name), SIGKILL, milliseconds(0));
    } else if (stage_ != Stage::Stopping) {
      if (!stop_status_) stop_status_ = 1;
      say(fmt::format("the guard of {} was killed; ending the job", agent.host.name));
      stop(fmt::format("the guard of {} was killed", agent.host.name), SIGKILL, milliseconds(0));
    }
  }
  check_end();
}

void Supervisor::on_signal(int signal) {
  switch (signal) {
    case SIGUSR1:
    case SIGUSR2: return crew_->broadcast(SignalWorkers{signal});
    case SIGTSTP:
      crew_->broadcast(SignalWorkers{SIGSTOP});
      ::raise(SIGSTOP);
      return;
    case SIGCONT:
      crew_->broadcast(SignalWorkers{SIGCONT});
      if (input_) input_->look_again();
      return;
    case SIGQUIT:
      if (stage_ != Stage::Running) break;
      if (health_->show_soon()) crew_->broadcast(AskStacks{});
      return;
    default: break;
  }
  if (stage_ == Stage::Ended) {
    quiet_end_ = true;
    if (std::exchange(restart_, false)) stop_status_ = 128 + signal;
    return loop_.stop();  // output that nobody takes is given up
  }
  if (stage_ == Stage::Stopping) {
    told_to_end_ = true;
    // INT, then TERM, then KILL; whatever comes while they are ending by TERM is KILL.
    if (stop_signal_ == SIGINT) return stop(stop_reason_, SIGTERM, options_.grace);
    return stop(stop_reason_, SIGKILL, milliseconds(0));
  }
  told_to_end_ = true;
  if (!stop_status_) stop_status_ = 128 + signal;
  stop(fmt::format("told to end by {}", sys::signal_name(signal)), signal, options_.grace);
}

void Supervisor::on_reader_gone() {
  if (stage_ != Stage::Running) return;
  quiet_end_ = true;
  stop_status_ = 128 + SIGPIPE;
  stop("nobody reads stdout any more", SIGTERM, options_.grace);
}

void Supervisor::on_owner_gone() {
  quiet_end_ = true;
  if (stage_ == Stage::Ended) return loop_.stop();
  if (!stop_status_ && stage_ != Stage::Stopping) stop_status_ = 128 + SIGHUP;
  stop(fmt::format("the process that it belongs to (pid {}) has ended", *options_.owner_pid), SIGTERM, options_.grace);
}

int Supervisor::running_ranks() const { return setup_.plan.world_size - static_cast<int>(endings_.size()); }

void Supervisor::check_end() {
  if (stage_ == Stage::Ended) return;
  if (crew_->all_ended()) finish();
}

void Supervisor::finish() {
  stage_ = Stage::Ended;
  end_limit_ = Timer();
  notice_ = Timer();
  escalation_ = Timer();
  input_.reset();
  // What a killed agent has left was handed to us by the kernel.
  const auto stuck = sweep(spared_, std::chrono::seconds(10), {});
  if (!stuck.empty()) say(fmt::format("even SIGKILL does not end {}", describe_stuck(stuck)));
  display_.end_lines();

  JobEnd end;
  end.world_size = setup_.plan.world_size;
  end.endings = endings_;
  end.others = others_;
  end.start_failure = start_failure_;
  end.stop_reason = stop_reason_;
  end.stop_status = stop_status_;
  end.quiet = quiet_end_;
  end.seconds = std::chrono::duration<double>(Clock::now() - started_at_).count();
  end.log_folder = logs_below(folder_.shown);
  end.colour = sys::wants_colour(2);
  const Verdict verdict = judge(end);
  Restarts::Decision restart;
  if (verdict.failure && !told_to_end_ && !(owner_ && owner_->gone()) && !agent_lost_ && !display_.reader_gone()) {
    restart = attempts_.restarts.after(*verdict.failure, setup_.plan.world_size);
  }
  restart_ = restart.again;
  if (!restart_ && !verdict.text.empty()) display_.write_error(verdict.text);
  if (!restart.text.empty()) {
    say(restart_ && !end.log_folder.empty() ? restart.text + "; logs in " + end.log_folder : restart.text);
  }
  stop_status_ = verdict.status;
  record_.failure = verdict.failure;
  record_.end = utc_now();
  record_.exit_status = verdict.status;
  record_.reason = stop_reason_;
  attempts_.records.push_back(attempt_of(record_));
  record_.attempts = attempts_.records;
  write_record();
  if (owner_ && owner_->gone() && !options_.owner_folder.empty()) remove_private_folder(options_.owner_folder);
  const UnreadNotice unread{std::chrono::duration<double>(options_.output_timeout).count(), end.log_folder};
  display_.drain(options_.output_timeout, to_string(unread), [this] { loop_.stop(); });
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

}  // namespace

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
