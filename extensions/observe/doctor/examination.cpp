// Asks hosts, one question after the other, about the time, a file, each other's addresses, and the network's speed.

#include "observe/doctor/examination.h"

#include "base/env.h"
#include "base/files.h"
#include "base/hardware.h"
#include "base/json.h"
#include "base/process.h"
#include "base/signals.h"
#include "base/unique_fd.h"
#include "launch/output/live_run.h"
#include "launch/plan/rank_environment.h"
#include "launch/processes.h"
#include "launch/start/agent_pool.h"
#include "launch/supervise/supervisor.h"
#include "net/secret.h"
#include "observe/doctor/probe.h"

#include <nlohmann/json.hpp>
#include <nlohmann/json_fwd.hpp>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::doctor {
namespace {

// A file in the working folder that `cohort doctor` has other hosts look for. The SharedFile removes it on destruction;
// if this process is killed, a small shell that waits for that does so. One thread; the shell is a child that the owner
// of this process's children reaps.

class SharedFile {
 public:
  SharedFile() : content_(sys::random_hex(16)), path_(launch::absolute_path(".cohort-doctor-" + sys::random_hex(4))) {
    std::array<int, 2> ends{};
    const sys::UniqueFd nothing(::open("/dev/null", O_WRONLY | O_CLOEXEC));
    if (::pipe2(ends.data(), O_CLOEXEC) == 0) {
      const sys::UniqueFd in(ends[0]);
      lifeline_.reset(ends[1]);
      sys::SpawnOptions shell;
      shell.path = "/bin/sh";
      shell.arguments = {"sh", "-c", "cat >/dev/null; rm -f -- \"$1\"", "sh", path_};
      shell.environment = launch::Environment::current().assignments();
      shell.folder = "/";
      shell.stdin_fd = in.get();
      shell.stdout_fd = nothing.get();
      shell.stderr_fd = nothing.get();
      shell.group = sys::Group::Session;  // so that Ctrl-C does not end the shell
      // Without the shell, the file is removed only if this process ends in good order.
      if (auto pending = sys::spawn(shell)) (void)std::move(*pending).confirm();
    }
    const sys::UniqueFd file(::open(path_.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644));
    if (!file) return;
    made_ = true;
    const std::string line = content_ + "\n";
    if (::write(file.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size()) || ::fsync(file.get()) != 0)
      remove();
  }
  ~SharedFile() { remove(); }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;
  /// False if the file could not be written.
  explicit operator bool() const noexcept { return made_; }
  const std::string& path() const noexcept { return path_; }
  const std::string& content() const noexcept { return content_; }

 private:
  void remove() noexcept {
    if (std::exchange(made_, false)) ::unlink(path_.c_str());
  }

  std::string content_, path_;
  sys::UniqueFd lifeline_;  ///< lifeline of the shell
  bool made_ = false;
};

}  // namespace

// One examination, from its hosts to its results: the implementation of `examine`. The functions that start, ask and
// release hosts come first, then the questions. One thread.

class Examination {
 public:
  explicit Examination(const ExaminationOptions& options);
  Examined run();

 private:
  struct ExaminedHost {
    bool joined = false;
    std::string line;
    std::string order;    ///< order not yet answered
    double asked_at = 0;  ///< by this host's clock
    std::function<void(const std::string&)> take;
    bool over = false;  ///< the host gives no further answers
  };

  HostState& state(std::size_t at) { return checkup_.hosts[at]; }
  bool ready(std::size_t at) const { return !examined_[at].over && checkup_.hosts[at].facts.has_value(); }
  std::vector<std::size_t> all_ready() const;
  void give_up(std::size_t at, std::string row, std::string why, std::string fix);
  /// Handles the agents' events since the last call.
  void take_events();
  void on_joined(launch::AgentHandle& member);
  void on_unfit(const launch::AgentHandle* member, const std::string& why);
  void on_message(std::size_t at, launch::Message message);
  void on_line(std::size_t at, const std::string& line);
  void on_process_ended(launch::AgentHandle& member);
  void diagnose_start(const launch::AgentHandle& member);
  void ask(std::size_t at, const nlohmann::json& order, std::function<void(const std::string&)> take);
  bool wait(std::chrono::milliseconds limit, const std::function<bool()>& done);
  /// Waits until all hosts have answered. Hosts that have not answered within `limit` are lost.
  void wait_for_answers(std::chrono::milliseconds limit, const char* meanwhile);

  void get_facts();
  void compare_clocks();
  void compare_folders();
  void probe_peers();
  void measure_speeds();
  void end();

  const ExaminationOptions& options_;
  launch::Loop loop_;
  std::optional<sys::SignalFd> signals_;
  launch::Watch signal_watch_;
  int signal_ = 0;
  bool ending_ = false;  ///< true: hosts are meant to end now
  std::uint64_t open_files_ = 0;
  net::Secret secret_ = value_or_throw(net::Secret::generate());
  std::optional<launch::AgentPool> agents_;
  std::vector<ExaminedHost> examined_;
  Checkup checkup_;
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

std::vector<Pairs> rounds_of_pairs(std::size_t count, bool all) {
  std::vector<Pairs> rounds;
  if (count < 2) return rounds;
  const auto ordered = [](std::size_t a, std::size_t b) { return std::pair(std::min(a, b), std::max(a, b)); };
  if (!all) {
    for (const std::size_t first : {std::size_t{0}, std::size_t{1}}) {
      Pairs round;
      for (std::size_t at = first; at + 1 < count; at += 2) round.emplace_back(at, at + 1);
      if (!round.empty()) rounds.push_back(std::move(round));
    }
    // The circle's last pair, which joins both ends, is added to the second round if that has neither of its hosts.
    if (count > 2) {
      if (count % 2 == 0)
        rounds.back().emplace_back(0, count - 1);
      else
        rounds.push_back({{0, count - 1}});
    }
    return rounds;
  }
  // Uses the circle method: one host stays, the others move on by one place.
  const std::size_t places = count + count % 2;
  for (std::size_t turn = 0; turn + 1 < places; ++turn) {
    Pairs round;
    for (std::size_t i = 0; i < places / 2; ++i) {
      const auto host = [&](std::size_t place) { return place == 0 ? 0 : 1 + (place - 1 + turn) % (places - 1); };
      const std::size_t a = host(i), b = host(places - 1 - i);
      if (a < count && b < count) round.push_back(ordered(a, b));
    }
    rounds.push_back(std::move(round));
  }
  return rounds;
}

namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFactsLimit(8000);
constexpr milliseconds kEndLimit(3000);
constexpr milliseconds kNamesHereLimit(2000);
/// Longest line of the doctor's own workers, which print no environment or output of a job.
constexpr std::size_t kLongestLine = std::size_t{4} << 20;

/// Returns true if an ancestor is a launcher whose variables are meant for the processes that it starts.
bool has_launcher_above() {
  constexpr std::array<std::string_view, 12> kNames = {
      "torchrun",        "torch.distributed", "mpirun",     "mpiexec", "orted", "prted",
      "hydra_pmi_proxy", "horovodrun",        "slurmstepd", "jsrun",   "jsmd",  "prterun"};
  pid_t pid = ::getppid();
  for (int depth = 0; depth < 100 && pid > 1; ++depth) {
    const std::string line = sys::command_line(pid);
    if (std::any_of(kNames.begin(), kNames.end(), [&line](auto name) { return line.find(name) != std::string::npos; }))
      return true;
    const auto stat = sys::process_stat(pid);
    if (!stat) return false;
    pid = stat->parent;
  }
  return false;
}

}  // namespace

Examination::Examination(const ExaminationOptions& options) : options_(options) {
  checkup_.here = sys::host_name();
  checkup_.method = options.method;
  checkup_.starter_local = options.spec.starter == launch::Starter::Local;
  checkup_.environment = rendezvous::current_environment();
  checkup_.launcher_alive = has_launcher_above();
  std::vector<launch::PlannedHost> hosts = options.hosts;
  if (hosts.empty()) hosts = {{sys::host_name(), sys::usable_cores(), true}};
  checkup_.several_hosts = hosts.size() > 1;
  for (const launch::PlannedHost& host : hosts) {
    HostState state;
    state.name = host.name;
    state.here = host.local;
    state.slots = host.slots;
    checkup_.hosts.push_back(std::move(state));
  }
  examined_.resize(hosts.size());
}

std::vector<std::size_t> Examination::all_ready() const {
  std::vector<std::size_t> out;
  for (std::size_t at = 0; at < examined_.size(); ++at) {
    if (ready(at)) out.push_back(at);
  }
  return out;
}

void Examination::give_up(std::size_t at, std::string row, std::string why, std::string fix) {
  if (ending_ || std::exchange(examined_[at].over, true)) return;
  examined_[at].order.clear();
  state(at).trouble = std::move(row);
  state(at).why = std::move(why);
  state(at).fix = std::move(fix);
}

bool Examination::wait(milliseconds limit, const std::function<bool()>& done) {
  const Clock::time_point deadline = std::min(Clock::now() + limit, begun_ + options_.whole_limit);
  for (take_events(); !done() && signal_ == 0 && Clock::now() < deadline; take_events())
    loop_.run_for(std::min<Clock::duration>(deadline - Clock::now(), milliseconds(200)));
  return done();
}

void Examination::take_events() {
  while (auto event = agents_->next_event()) {
    launch::AgentHandle* const member = event->agent;
    if (auto* said = std::get_if<launch::agent_event::Said>(&event->what)) {
      on_message(static_cast<std::size_t>(member->host.index), std::move(said->message));
    } else if (std::holds_alternative<launch::agent_event::Joined>(event->what)) {
      on_joined(*member);
    } else if (const auto* closed = std::get_if<launch::agent_event::ChannelClosed>(&event->what)) {
      if (!member->all_gone)
        give_up(static_cast<std::size_t>(member->host.index), "lost",
                closed->error ? closed->error->what() : "its agent has ended", "");
    } else if (std::holds_alternative<launch::agent_event::ProcessEnded>(event->what)) {
      on_process_ended(*member);
    } else if (const auto* unfit = std::get_if<launch::agent_event::Unfit>(&event->what)) {
      on_unfit(member, unfit->why);
    }
  }
}

void Examination::on_unfit(const launch::AgentHandle* member, const std::string& why) {
  if (member == nullptr) return;  // its host does not connect, which is reported elsewhere
  if (member->remote) {
    return give_up(static_cast<std::size_t>(member->host.index), "version", why,
                   "install one version on all hosts, or name it with --remote-cohort");
  }
  // The command that starts agents is missing, so none can start.
  for (const auto& each : agents_->members()) {
    const auto at = static_cast<std::size_t>(each->host.index);
    if (!each->host.local && !examined_[at].joined)
      give_up(at, "starter", why, "install it, or choose another way with --starter or --ssh");
  }
}

void Examination::on_joined(launch::AgentHandle& member) {
  const auto at = static_cast<std::size_t>(member.host.index);
  if (examined_[at].over) return member.channel->send(launch::Finish{});
  examined_[at].joined = true;
  state(at).start_seconds = std::chrono::duration<double>(Clock::now() - begun_).count();
  if (member.remote) state(at).printed = launch::last_of(member.remote->noise());
  // A job's order for the process, so its environment and its end are like a rank's.
  launch::StartJob job;
  job.path = "/proc/self/exe";  // the agent's executable, at any path on its host
  job.arguments = {"cohort", "doctor-host"};
  job.folder = "/";
  job.input = true;
  job.open_files = open_files_;
  job.elsewhere = !member.host.local;
  job.divides_cores = false;  // examines the host's own variables, and not those that a job would set
  launch::Environment travels;
  for (const std::string& assignment : launch::Environment::current().assignments()) {
    if (member.host.local || !launch::belongs_to_host(assignment.substr(0, assignment.find('='))))
      travels.set(assignment);
  }
  travels.remove_run_options();
  job.environment = travels.assignments();
  job.workers = {{0, {fmt::format("{}={}", env::kRank, at)}}};
  member.channel->send(job);
}

void Examination::on_message(std::size_t at, launch::Message message) {
  launch::AgentHandle& member = *agents_->members()[at];
  ExaminedHost& examined = examined_[at];
  if (auto* output = std::get_if<launch::Output>(&message)) {
    member.channel->send(launch::OutputTaken{output->bytes.size()});
    if (output->stream != launch::Stream::Stdout) return;
    examined.line += output->bytes;
    for (auto end = examined.line.find('\n'); end != std::string::npos; end = examined.line.find('\n')) {
      const std::string line = examined.line.substr(0, end);
      examined.line.erase(0, end + 1);
      on_line(at, line);
    }
    if (examined.line.size() > kLongestLine) examined.line.clear();
  } else if (std::holds_alternative<launch::Started>(message)) {
    member.started = true;
    json names = json::array();
    for (const HostState& host : checkup_.hosts) names.push_back(host.name);
    ask(at,
        {{"do", "facts"},
         {"names", checkup_.starter_local ? json::array() : names},
         {"folder", launch::absolute_path(".")},
         {"stay", std::chrono::duration_cast<std::chrono::seconds>(options_.whole_limit).count() + 60}},
        [this, at](const std::string& data) {
          auto facts = parse_host_facts(data);
          if (!facts) return give_up(at, "lost", facts.error().what(), "");
          state(at).facts = *std::move(facts);
        });
  } else if (const auto* failed = std::get_if<launch::StartFailed>(&message)) {
    give_up(at, "lost", fmt::format("its agent cannot start a process: {}", failed->reason), "");
  } else if (const auto* exited = std::get_if<launch::Exited>(&message)) {
    // It is normal that it ends after its release; give_up knows about that.
    give_up(at, "lost",
            fmt::format("what looked around there ended ({}){}", sys::to_string(exited->status),
                        exited->last_stderr.empty() ? "" : ": " + launch::last_of(exited->last_stderr)),
            "");
  } else if (std::holds_alternative<launch::AllGone>(message)) {
    member.all_gone = true;
    member.channel->send(launch::Finish{});
  }
}

void Examination::on_line(std::size_t at, const std::string& line) {
  ExaminedHost& examined = examined_[at];
  const std::string mark = kAnswerMark;
  if (examined.over || !line.starts_with(mark) || examined.order.empty()) return;
  // The data is parsed later, by the caller that knows its type.
  const std::string head = fmt::format("{{\"did\":\"{}\",\"data\":", examined.order);
  if (line.compare(mark.size(), head.size(), head) != 0 || !line.ends_with('}')) return;
  examined.order.clear();
  const std::size_t begin = mark.size() + head.size();
  const auto take = std::exchange(examined.take, nullptr);
  take(line.substr(begin, line.size() - begin - 1));
}

void Examination::diagnose_start(const launch::AgentHandle& member) {
  const auto at = static_cast<std::size_t>(member.host.index);
  if (member.remote == nullptr) {
    give_up(at, "starter", "it was not its turn to be started", "");
    return;
  }
  const launch::Diagnosis found = launch::diagnose(agents_->failed_start(member));
  give_up(at, std::string(found.kind), found.why + found.said, found.advice);
}

void Examination::on_process_ended(launch::AgentHandle& member) {
  const auto at = static_cast<std::size_t>(member.host.index);
  if (examined_[at].over || member.all_gone) return;
  if (member.channel == nullptr && member.remote) return diagnose_start(member);
  give_up(at, "lost",
          member.remote ? fmt::format("the connection to it has ended ({})", agents_->how_ended(member))
                        : "its agent has ended",
          "");
}

void Examination::ask(std::size_t at, const json& order, std::function<void(const std::string&)> take) {
  ExaminedHost& examined = examined_[at];
  launch::AgentHandle& member = *agents_->members()[at];
  examined.order = order.at("do").get<std::string>();
  examined.take = std::move(take);
  examined.asked_at = launch::seconds_now();
  member.channel->send(launch::Input{order.dump(-1, ' ', true, json::error_handler_t::replace) + "\n"});
}

void Examination::wait_for_answers(milliseconds limit, const char* meanwhile) {
  const auto waits = [](const ExaminedHost& examined) { return !examined.over && !examined.order.empty(); };
  wait(limit, [&] { return std::none_of(examined_.begin(), examined_.end(), waits); });
  if (signal_ != 0) return;
  if (Clock::now() >= begun_ + options_.whole_limit) {
    // Hosts for which too little time was left are not reported as faulty.
    for (ExaminedHost& examined : examined_) examined.order.clear();
    return;
  }
  for (std::size_t at = 0; at < examined_.size(); ++at) {
    if (waits(examined_[at]))
      give_up(at, "lost", fmt::format("it went silent {}", meanwhile),
              fmt::format("is it alive? ssh {} uptime", state(at).name));
  }
}

void Examination::get_facts() {
  const auto begun = [this](std::size_t at) { return examined_[at].over || examined_[at].joined; };
  const auto all = [this](auto what) {
    for (std::size_t at = 0; at < examined_.size(); ++at) {
      if (!what(at)) return false;
    }
    return true;
  };
  wait(options_.start_limit, [&] { return all(begun); });
  if (signal_ != 0) return;
  agents_->start_no_more();
  for (const auto& member : agents_->members()) {
    const auto at = static_cast<std::size_t>(member->host.index);
    if (begun(at)) continue;
    diagnose_start(*member);
    launch::AgentPool::kill(*member);
  }
  wait(kFactsLimit, [&] { return all([this](std::size_t at) { return examined_[at].over || state(at).facts; }); });
  if (signal_ != 0) return;
  for (std::size_t at = 0; at < examined_.size(); ++at) {
    if (!state(at).facts)
      give_up(at, "lost", "it went silent while it looked around",
              fmt::format("is it alive? ssh {} uptime", state(at).name));
  }
}

void Examination::end() {
  ending_ = true;
  for (const auto& member : agents_->members()) {
    if (member->channel == nullptr) {
      launch::AgentPool::kill(*member);
    } else if (!member->started) {
      member->channel->send(launch::Finish{});
    } else {
      member->channel->send(launch::Input{});
      // A hanging process does not read its input.
      member->channel->send(launch::StopWorkers{SIGTERM, 1000, 0});
    }
  }
  const Clock::time_point deadline = Clock::now() + kEndLimit;
  for (; !agents_->all_ended() && Clock::now() < deadline; take_events()) loop_.run_for(milliseconds(50));
  agents_->drop_lifelines();
  const Clock::time_point last = Clock::now() + milliseconds(1000);
  for (; !agents_->all_ended() && Clock::now() < last; take_events()) loop_.run_for(milliseconds(50));
}

Examined Examination::run() {
  ::signal(SIGPIPE, SIG_IGN);
  value_or_throw(sys::become_subreaper());
  const std::vector<pid_t> spared = sys::descendants(::getpid());
  signals_.emplace(value_or_throw(sys::SignalFd::create({SIGINT, SIGTERM, SIGHUP, SIGQUIT})));
  signal_watch_ = launch::Watch(loop_, signals_->fd());
  signal_watch_.on_readable([this] {
    while (const auto told = signals_->next()) signal_ = *told;
  });
  open_files_ = sys::raise_open_files_limit().first;
  launch::Plan plan;
  plan.method = options_.method;
  std::vector<launch::PlannedHost>& hosts = plan.hosts;
  for (const HostState& host : checkup_.hosts) {
    const int index = static_cast<int>(hosts.size());
    hosts.push_back({.name = host.name, .local = host.here, .index = index, .first_rank = index, .ranks = 1});
    if (!options_.hosts.empty()) hosts.back().component = options_.hosts[static_cast<std::size_t>(index)].component;
  }
  const auto clean_up = [&spared] { launch::sweep(spared, std::chrono::seconds(2), {}); };
  try {
    agents_.emplace(loop_, secret_, options_.spec, plan, -1);
    agents_->start(hosts);
    get_facts();
    for (const auto& step : {&Examination::compare_clocks, &Examination::compare_folders, &Examination::probe_peers,
                             &Examination::measure_speeds}) {
      if (signal_ == 0) (this->*step)();
    }
    end();
  } catch (...) {
    if (agents_) agents_->drop_lifelines();
    clean_up();
    throw;
  }
  clean_up();
  // This comes last, since it starts threads.
  if (signal_ == 0 &&
      std::none_of(hosts.begin(), hosts.end(), [](const launch::PlannedHost& host) { return host.local; })) {
    std::vector<std::string> names;
    for (const launch::PlannedHost& host : hosts) names.push_back(host.name);
    checkup_.names_here = resolve_names(names, kNamesHereLimit);
  }
  return {std::move(checkup_), signal_};
}

Examined examine(const ExaminationOptions& options) { return Examination(options).run(); }

namespace {

constexpr milliseconds kClockLimit(1500);
constexpr int kClockRounds = 3;
constexpr milliseconds kFolderLimit(3500);
constexpr milliseconds kProbeLimit(10000);
constexpr milliseconds kSpeedLimit(3500);
/// With more hosts than this, only neighbours measure their speed.
constexpr std::size_t kAllPairs = 8;

}  // namespace

void Examination::compare_clocks() {
  for (int round = 0; round < kClockRounds; ++round) {
    for (const std::size_t at : all_ready()) {
      if (state(at).here) continue;
      ask(at, {{"do", "clock"}}, [this, at](const std::string& data) {
        const json said = parse_json_or_discard(data);
        if (!said.is_number()) return;
        const double now = launch::seconds_now();
        const double error = (now - examined_[at].asked_at) / 2;
        if (state(at).clock_offset && state(at).clock_error <= error) return;
        state(at).clock_offset = said.get<double>() - (examined_[at].asked_at + now) / 2;
        state(at).clock_error = error;
      });
    }
    wait_for_answers(kClockLimit * 2, "when it was asked for the time");
  }
}

void Examination::compare_folders() {
  if (!checkup_.several_hosts && checkup_.hosts.front().here) return;
  const SharedFile shared_file;
  if (!shared_file) return;  // the row about the folder says why, if this host is among them
  for (const std::size_t at : all_ready()) {
    if (state(at).here || !state(at).facts->folder.error.empty()) continue;
    ask(at, {{"do", "see"}, {"path", shared_file.path()}, {"content", shared_file.content()}},
        [this, at](const std::string& data) { state(at).same_folder = data == "true"; });
  }
  wait_for_answers(kFolderLimit, "when it looked for a file");
}

void Examination::probe_peers() {
  const auto hosts = all_ready();
  if (hosts.size() < 2) return;
  for (const std::size_t from : hosts) {
    json peers = json::array();
    for (const std::size_t to : hosts) {
      if (to == from) continue;
      for (const NetworkFacts& network : state(to).facts->networks)
        peers.push_back({to, network.address, state(to).facts->port});
    }
    ask(from, {{"do", "probe"}, {"peers", std::move(peers)}}, [this, from](const std::string& data) {
      auto probes = parse_probes(data);
      if (!probes) return give_up(from, "lost", probes.error().what(), "");
      for (ProbeFacts& probe : *probes) {
        if (static_cast<std::size_t>(probe.peer) >= examined_.size()) continue;
        if (state(static_cast<std::size_t>(probe.peer)).facts)
          checkup_.probes.push_back({static_cast<int>(from), std::move(probe)});
      }
    });
  }
  std::vector<bool> told(examined_.size());
  wait_for_answers(kProbeLimit, "while it knocked at the others");
  for (const auto& probe : checkup_.probes) told[static_cast<std::size_t>(probe.from)] = true;
  for (const std::size_t from : hosts) {
    if (!told[from]) checkup_.silent.push_back(static_cast<int>(from));
  }
}

void Examination::measure_speeds() {
  const auto hosts = all_ready();
  for (const auto& round : rounds_of_pairs(hosts.size(), hosts.size() <= kAllPairs)) {
    for (const auto& [first, second] : round) {
      std::size_t from = hosts[first], to = hosts[second];
      const ProbeFacts* way = chosen_way(checkup_, static_cast<int>(from), static_cast<int>(to));
      if (way == nullptr) {
        std::swap(from, to);
        way = chosen_way(checkup_, static_cast<int>(from), static_cast<int>(to));
      }
      if (way == nullptr || !ready(from) || !ready(to)) continue;
      ask(from, {{"do", "measure"}, {"to", to}, {"address", way->address}, {"port", state(to).facts->port}},
          [this, from, to](const std::string& data) {
            auto speed = parse_speed(data);
            if (!speed) return give_up(from, "lost", speed.error().what(), "");
            speed->from = static_cast<int>(from);
            speed->to = static_cast<int>(to);
            checkup_.speeds.push_back(*std::move(speed));
          });
    }
    // The limit is doubled, so that a very slow network is reported, and its host not lost.
    wait_for_answers(kSpeedLimit * 2, "while it measured a way");
    if (signal_ != 0 || Clock::now() > begun_ + options_.whole_limit - kSpeedLimit) return;
  }
}

}  // namespace cohort::doctor
