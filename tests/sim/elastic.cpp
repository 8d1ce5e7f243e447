// Scenarios of elastic jobs: hosts and ranks come, leave and are lost, and the weights after each step have to be those
// of a training that nothing has happened to.
#include "scenarios.h"
#include "sim.h"
#include "training.h"

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace scenarios {
namespace {

void write_list(const std::string& text) {
  std::string line = text;
  for (char& c : line) c = c == '\n' ? ' ' : c;
  sim::note_event("list: " + line);
  std::ofstream file("hosts.new");
  file << text;
  file.close();
  std::error_code ignored;
  std::filesystem::rename("hosts.new", "hosts", ignored);
}

// One world's state.
bool links_are_cut = false;
bool silence_is_due = false;         // a host or an agent may be silent for longer than the limits
int youngest = 0;                    // the host on which processes were started last
std::vector<std::size_t> processes;  // by host, when they were last looked at

/// A training with so many virtual ranks; its weights are due at each step.
std::vector<std::string> elastic_program(const sim::Options& options, int steps, int pause_ms, int virtual_ranks) {
  sim::expect_weights(sim::Training{virtual_ranks, options.seed}.digests(steps));
  return {"/simulated/elastic", std::to_string(steps), std::to_string(pause_ms), std::to_string(virtual_ranks),
          std::to_string(options.seed)};
}

bool has_trained(const sim::Result& result, int steps) {
  return has(result.output, "ended with 0 after " + std::to_string(steps) + " steps");
}

void order(int host, const char* action) {
  sim::note_event(std::string("ctl ") + action + " " + name_of(host));
  const std::string meant =
      name_of(host) + (action == std::string_view("add") ? ":" + std::to_string(1 + draw(2)) : "");
  sim::start_process(0, {kCommand, "ctl", "runs/latest", action, meant});
}

void signal_some(int host, const char* program, int number, int of) {
  for (const int pid : sim::processes_of(host, program)) {
    if (draw(of) == 0) sim::kill_process(pid, number);
  }
}

/// Changes that are no faults: a job among whose hosts only these happen trains to its end.
void plan_change(int hosts, int any) {
  switch (draw(5)) {
    case 0:
    case 1: {  // another list: any hosts, with 0 to 2 ranks each
      std::string list;
      for (int h = 0; h < hosts; ++h) {
        if (draw(2) == 0) list += name_of(h) + ":" + std::to_string(draw(3)) + "\n";
      }
      return write_list(list);
    }
    case 2: return write_list(name_of(any) + ":1\n");  // everything moves
    case 3: return order(any, "add");
    default: return order(any, "drain");
  }
}

/// Any change, but for a lost or cut host 0, where the supervisor is: the launcher lost is a scenario of its own. Most
/// happen to host `any`.
void change(int hosts, int any) {
  const int host = any > 0 && draw(2) == 0 ? any : 1 + draw(hosts - 1);
  switch (draw(16)) {
    case 0:
    case 1:
    case 2:
    case 3:
    case 9:
    case 10: return plan_change(hosts, any);
    case 4: return signal_some(any, "elastic", SIGKILL, 2);
    case 5: {  // ranks of several hosts at once
      for (int h = 0; h < hosts; ++h) signal_some(h, "elastic", SIGKILL, 2);
      return;
    }
    case 6: silence_is_due = true; return sim::lose_host(host);
    case 7: {  // frozen for a while
      const int pids = draw(3'000);
      for (const int pid : sim::processes_of(any, "elastic")) {
        sim::kill_process(pid, SIGSTOP);
        sim::at(sim::now() + pids * kMillisecond, [pid] { sim::kill_process(pid, SIGCONT); });
      }
      return;
    }
    case 8: {  // a link that is cut in one direction or both, for a while or for good
      const bool both = draw(2) == 0;
      const Nanoseconds until = sim::now() + (draw(4) == 0 ? 600 * kSecond : draw(5'000) * kMillisecond);
      if (any == host) return;
      links_are_cut = silence_is_due = true;
      sim::cut(host, any, true);
      if (both) sim::cut(any, host, true);
      return sim::at(until, [=] {
        sim::cut(host, any, false);
        if (both) sim::cut(any, host, false);
      });
    }
    case 11: return order(any, "remove");
    case 12: {  // agents and their guards
      silence_is_due = true;
      const auto agents = sim::processes_of(host, "cohort");
      if (!agents.empty())
        sim::kill_process(agents[static_cast<std::size_t>(draw(static_cast<int>(agents.size())))], SIGKILL);
      return;
    }
    case 13: silence_is_due = true; return sim::slow_host(host, draw(2) == 0 ? 1 : 50);
    case 14: return sim::set_disk(any, static_cast<sim::Disk>(draw(3)), draw(2'000) * kMillisecond);
    default: return signal_some(any, "elastic", SIGTERM, 1);  // a rank is told to save and leave
  }
}

/// A phase of the job in which a change comes.
enum class Phase { Any, Starts, TooFew, Forms };

/// True if such a line is the last one after that of the latest epoch.
bool said_since_epoch(const char* line) {
  const std::string& text = sim::output();
  const auto goes_on = text.rfind(" goes on with "), said = text.rfind(line);
  return said != text.npos && (goes_on == text.npos || said > goes_on);
}

/// Looks whether processes have been started on a host. (Orders run on host 0, too.)
bool some_start(int hosts) {
  bool any = false;
  processes.resize(static_cast<std::size_t>(hosts));
  for (int host = 0; host < hosts; ++host) {
    auto& before = processes[static_cast<std::size_t>(host)];
    const auto now =
        sim::processes_of(host, "elastic").size() + sim::processes_of(host, host > 0 ? "cohort" : "").size();
    if (now > before) youngest = host;
    any = any || now > before;
    before = now;
  }
  return any;
}

bool is_in(Phase phase, int hosts) {
  const bool starts = some_start(hosts);
  switch (phase) {
    case Phase::Starts: return starts;
    case Phase::TooFew: return said_since_epoch(": waiting up to ") || said_since_epoch("; waiting for more hosts");
    case Phase::Forms: return has(sim::output(), " goes on with ") && !said_since_epoch(" is formed: ");
    default: return true;
  }
}

/// Calls `then` some time after the job has come into the phase, or at `limit`.
void wait_for(Phase phase, int hosts, Nanoseconds limit, Nanoseconds after, const std::function<void()>& then) {
  constexpr Nanoseconds kLook = 10 * kMillisecond;
  if (is_in(phase, hosts) || sim::now() >= limit) return sim::at(sim::now() + after, then);
  sim::at(sim::now() + kLook, [=] { wait_for(phase, hosts, limit, after, then); });
}

/// A job with too few workers gets some more, host by host, and loses some of those that have come.
void change_few(int any) {
  if (draw(3) > 0) return order(any, "add");
  signal_some(youngest, "elastic", SIGKILL, 1);
}

/// Changes, each in a phase of the job, about at once or some time later; every other one where the job has just grown.
/// While the job has too few workers, `more` may follow.
void change_often(int changes, int more, int hosts, bool planned) {
  if (changes == 0 && more > 0 && is_in(Phase::TooFew, hosts)) return change_often(1, more - 1, hosts, planned);
  if (changes == 0) {
    if (!planned && draw(10) == 0)
      sim::at(sim::now() + draw(3'000) * kMillisecond, [] { signal_some(0, "cohort", SIGTERM, 1); });
    return;
  }
  constexpr Phase kPhases[] = {Phase::Any, Phase::Any, Phase::Any, Phase::Starts, Phase::TooFew, Phase::Forms};
  const Nanoseconds after = draw(draw(2) == 0 ? 150 : 5'000) * kMillisecond;
  wait_for(kPhases[draw(6)], hosts, sim::now() + 5 * kSecond, after, [=] {
    some_start(hosts);
    const int any = draw(2) == 0 ? youngest : draw(hosts);
    if (planned)
      plan_change(hosts, any);
    else if (draw(2) == 0 && is_in(Phase::TooFew, hosts))
      change_few(any);
    else
      change(hosts, any);
    change_often(changes - 1, more, hosts, planned);
  });
}

constexpr Nanoseconds kLookEvery = 5 * kSecond;
constexpr Nanoseconds kForms = 35 * kSecond;  // more than the limits after which the silent are given up

/// An epoch that is announced forms a world, or another one is announced, or the job ends or begins anew.
void look_at_epochs(std::string epoch, Nanoseconds since) {
  const std::string& text = sim::output();
  const auto goes_on = text.rfind(" goes on with ");
  if (goes_on != text.npos) {
    const auto begin = text.rfind("epoch ", goes_on);
    const std::string latest = text.substr(begin, goes_on - begin);
    // (For hosts; or all ranks begin anew, in a world that is of no such epoch.)
    const bool waits = said_since_epoch(": waiting up to ") || said_since_epoch(" ranks again (");
    if (latest != epoch || waits || has(text, latest + " is formed")) since = sim::now();
    epoch = latest;
    if (!links_are_cut && sim::now() > since + kForms) return sim::fail(epoch + " is not formed");
  }
  sim::at(sim::now() + kLookEvery, [=] { look_at_epochs(epoch, since); });
}

}  // namespace

sim::Result elastic(const sim::Options& given, int hosts) {
  sim::Options options = given;
  const auto setting = [&options](std::uint64_t salt, int bound) {
    return static_cast<int>((options.seed * 2654435761 + salt * 40503) % 65'521 % static_cast<std::uint64_t>(bound));
  };
  if (setting(8, 2) == 0) options.longest_start = 3 * kSecond;
  const bool listed = setting(6, 3) != 0;  // else the hosts are told, and change by orders alone
  constexpr int kVirtualRanks[] = {3, 5, 6, 7, 8, 13};
  const int virtual_ranks = kVirtualRanks[setting(10, 6)];
  const bool spare = !listed && setting(4, 2) == 0;
  const int least = std::min(1 + setting(1, 4), spare || virtual_ranks == 3 ? 3 : 4);
  std::ofstream("hosts") << "host0:1\nhost1:1\nhost2:" << std::max(0, least - 2) << "\n";
  std::vector<std::string> words = {kCommand,
                                    "run",
                                    "--ssh",
                                    kSsh,
                                    "--min-np",
                                    std::to_string(least),
                                    "--elastic-timeout",
                                    "40",
                                    "--start-timeout",
                                    "20",
                                    "--stopped-timeout",
                                    "20"};
  if (listed)
    words.insert(words.end(), {"--host-discovery-script", "/simulated/discover"});
  else
    words.insert(words.end(), {"-H", "host0:2,host1:1,host2:1"});
  // Now and then a world may have more ranks than there are virtual ones, and refuses to train.
  const bool capped = setting(11, 8) != 0;
  const int most = std::min(listed && setting(2, 3) == 0 ? 4 : 100, capped ? virtual_ranks : 100);
  if (most < 100) words.insert(words.end(), {"--max-np", std::to_string(most)});
  const bool restarts = setting(3, 4) == 0;
  if (restarts) words.insert(words.end(), {"--max-restarts", "1"});
  if (spare) words.insert(words.end(), {"-np", "3", "--spares", "1"});
  if (setting(12, 2) == 0) words.insert(words.end(), {"--blacklist-cooldown-range", "1,4"});
  constexpr int kSteps = 100;
  const auto program = elastic_program(options, kSteps, setting(5, 2) == 0 ? 75 : 450, virtual_ranks);
  words.insert(words.end(), program.begin(), program.end());
  const bool planned = setting(7, 3) == 0, lacks = setting(9, 3) == 0;
  auto result = sim::run(options, hosts, words, [hosts, planned, lacks] {
    // A host that comes, and cannot start anything, is no fault of the job's.
    if (lacks) sim::remove_program(3 + draw(hosts - 3), "elastic");
    sim::at(draw(2'000) * kMillisecond, [=] { change_often(1 + draw(8), 8, hosts, planned); });
    sim::at(kLookEvery, [] { look_at_epochs({}, 0); });
    sim::at(400 * kSecond, [] { sim::fail("the job does not end"); });
  });
  const bool refused = has(result.output, ", of which some would have none");
  want(result, result.status != 0 || has_trained(result, kSteps), "status 0, and no rank has ended its training");
  want(result, !refused || !capped, "it refuses to train");
  want(result, !refused || restarts || result.status != 0, "status 0 of a training that was refused");
  want(result, !planned || refused || result.status == 0,
       "status " + std::to_string(result.status) + ", and nothing had failed");
  want(result, result.status != 124 || links_are_cut, "status 124, and nothing was silent for long");
  want(result, silence_is_due || !has(result.output, "nothing has come from "), "a warning of silence without reason");
  want(result, result.status == 0 || result.output.size() > 20, "it fails, and says nothing");
  return result;
}

sim::Result grow(const sim::Options& options, int hosts) {
  const auto list_of = [](int count) {
    std::string list;
    for (int host = 0; host < count; ++host) list += name_of(host) + ":1\n";
    return list;
  };
  std::ofstream("hosts") << list_of(hosts);
  std::vector<std::string> words = {kCommand,
                                    "run",
                                    "--ssh",
                                    kSsh,
                                    "--host-discovery-script",
                                    "/simulated/discover",
                                    "--min-np",
                                    "2",
                                    "--elastic-timeout",
                                    "60",
                                    "--start-timeout",
                                    "60"};
  const auto program = elastic_program(options, 100, 500, std::max(8, hosts));
  words.insert(words.end(), program.begin(), program.end());
  auto result = sim::run(options, hosts, words, [&] {
    const auto expect = [](Nanoseconds when, int size) {
      sim::at(when, [size] {
        if (sim::world_size() != size || sim::root_status() >= 0)
          sim::fail("no world of " + std::to_string(size) + ", but of " + std::to_string(sim::world_size()));
      });
    };
    expect(5 * kSecond, hosts);
    sim::at(5 * kSecond, [=] { write_list(list_of(hosts / 2)); });
    expect(20 * kSecond, hosts / 2);
    sim::at(20 * kSecond, [=] { write_list(list_of(hosts)); });
    expect(35 * kSecond, hosts);
    sim::at(35 * kSecond, [=] { sim::lose_host(1 + draw(hosts - 1)); });
    expect(50 * kSecond, hosts - 1);
    sim::at(300 * kSecond, [] { sim::fail("the job does not end"); });
  });
  want(result, result.status == 0 && has_trained(result, 100), "status " + std::to_string(result.status));
  return result;
}

sim::Result part(const sim::Options& options, int hosts) {
  std::vector<std::string> words = job(hosts, elastic_program(options, 60, 100, std::max(8, hosts * ranks_per_host)));
  words.insert(words.begin() + 2, {"--min-np", "2"});
  int from = 0;
  bool all = false;
  auto result = sim::run(options, hosts, words, [&] {
    from = 1 + draw(hosts - 1);
    all = draw(2) == 0;
    const int other = from == hosts - 1 ? 1 : from + 1;
    const bool both = all || draw(2) == 0;
    sim::at(draw(5'000) * kMillisecond, [=] {
      for (int to = 1; to < hosts; ++to) {
        if (to == from || (!all && to != other)) continue;
        sim::cut(from, to, true);
        if (both) sim::cut(to, from, true);
      }
    });
    sim::at(300 * kSecond, [] { sim::fail("the job does not end"); });
  });
  const auto ended = [&result](const std::string& who) {
    int times = 0;
    for (auto found = result.output.find(who); found != std::string::npos; found = result.output.find(who, found + 1))
      ++times;
    return times;
  };
  want(result, result.status == 0 && has_trained(result, 60), "status " + std::to_string(result.status));
  want(result, ended(") ended with exit code 1;") == 1, "more than one worker has ended, or none");
  want(result, !all || ended("(" + name_of(from) + ") ended with exit code 1;") == 1,
       "another worker than the bad host's has ended");
  return result;
}

}  // namespace scenarios
