// Scenarios: a command line, what happens to its job, and what has to be true in the end. Every random number is the
// seed's, so a seed that fails, fails again.
#include "scenarios.h"

#include "sim.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace {

using sim::kMillisecond;
using sim::kSecond;
using sim::Nanoseconds;

constexpr const char* kCommand = "/simulated/cohort";
constexpr const char* kSsh = "/simulated/ssh";

int draw(int bound) { return static_cast<int>(sim::random_number(static_cast<std::uint64_t>(bound))); }

int ranks_per_host = 1;  ///< of `start` and `kill`

std::string name_of(int host) { return "host" + std::to_string(host); }

std::vector<std::string> job(int hosts, const std::vector<std::string>& program, int first = 0) {
  std::string list;
  for (int host = first; host < hosts; ++host)
    list += (host > first ? "," : "") + name_of(host) + ":" + std::to_string(ranks_per_host);
  std::vector<std::string> words = {kCommand, "run", "-H", list, "--ssh", kSsh};
  words.insert(words.end(), program.begin(), program.end());
  return words;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// The time at which the job's command has ended: a run goes on for 3 s to see what is left.
Nanoseconds end_of(const sim::Result& result) { return result.time - 3 * kSecond; }

void want(sim::Result& result, bool condition, const std::string& problem) {
  if (result.problem.empty() && !condition) result.problem = problem;
}

// --- jobs without changes of members ---

sim::Result start(const sim::Options& options, int hosts) {
  auto result = sim::run(options, hosts, job(hosts, {"/simulated/train", "3", "10"}), [] {});
  want(result, result.status == 0, "status " + std::to_string(result.status));
  want(result, has(result.output, "trained 3 steps on " + std::to_string(hosts * ranks_per_host) + " ranks"),
       "it has not trained");
  return result;
}

/// A rank is killed: the job ends with 137, and names it, within a second.
sim::Result kill(const sim::Options& options, int hosts) {
  int rank = 0;
  bool began = false;  // else there was no rank to kill yet
  Nanoseconds when = 0;
  auto result = sim::run(options, hosts, job(hosts, {"/simulated/train", "300", "100"}), [&] {
    rank = draw(hosts * ranks_per_host);
    when = draw(4'000) * kMillisecond;
    sim::at(when, [&] {
      const auto pids = sim::processes_of(rank / ranks_per_host, "train");
      const auto at = static_cast<std::size_t>(rank % ranks_per_host);
      began = at < pids.size();
      if (began) sim::kill_process(pids[at], SIGKILL);
    });
  });
  want(result, !began || result.status == 137, "status " + std::to_string(result.status) + " instead of 137");
  want(result, !began || has(result.output, "rank " + std::to_string(rank)), "the killed rank is not named");
  want(result, !began || end_of(result) < when + kSecond, "it took more than a second");
  return result;
}

/// A host is lost: the job ends, and names it, within the limit of silence and two seconds.
sim::Result lose(const sim::Options& options, int hosts) {
  int host = 0;
  Nanoseconds when = 0;
  auto result = sim::run(options, hosts, job(hosts, {"/simulated/train", "300", "100"}), [&] {
    host = 1 + draw(hosts - 1);
    when = 1 * kSecond + draw(4'000) * kMillisecond;
    sim::at(when, [host] { sim::lose_host(host); });
  });
  want(result, result.status > 0, "status " + std::to_string(result.status));
  want(result, has(result.output, name_of(host)), "the lost host is not named");
  want(result, end_of(result) < when + 5 * kSecond, "it took more than 5 s");
  return result;
}

/// A link is cut for a while: shorter than the limit of silence, the job goes on.
sim::Result cut(const sim::Options& options, int hosts) {
  bool heals = false;
  auto result = sim::run(options, hosts, job(hosts, {"/simulated/train", "100", "100"}), [&] {
    const int from = draw(hosts), to = (from + 1 + draw(hosts - 1)) % hosts;
    const bool both = draw(2) == 0;
    heals = draw(2) == 0;
    const Nanoseconds when = 1 * kSecond + draw(4'000) * kMillisecond;
    const Nanoseconds length = heals ? draw(1'500) * kMillisecond : 60 * kSecond;
    for (const bool is_cut : {true, false}) {
      sim::at(is_cut ? when : when + length, [=] {
        sim::cut(from, to, is_cut);
        if (both) sim::cut(to, from, is_cut);
      });
    }
  });
  want(result, heals == (result.status == 0), heals ? "the link was back soon" : "status 0 although a link was cut");
  return result;
}

/// The launcher is killed, its host is lost, or nobody reaches it: ranks that can save do so, all at one step, within
/// 10 s, and the others end at once. Nothing is left.
sim::Result launcher(const sim::Options& given, int hosts) {
  sim::Options options = given;
  options.after_end = 600 * kSecond;  // (the script below looks at what is left)
  const bool saving = options.seed % 2 == 0;
  std::vector<std::string> program = {"/simulated/train", "300", "100"};
  if (saving) program.emplace_back("save");
  auto result = sim::run(options, hosts, job(hosts, program, 1), [&] {
    const int kind = draw(3);
    const Nanoseconds when = 1 * kSecond + draw(4'000) * kMillisecond;
    sim::at(when, [=] {
      if (kind == 0) return sim::kill_process(sim::processes_of(0, "cohort").front(), SIGKILL);
      if (kind == 1) return sim::lose_host(0);
      for (int host = 1; host < hosts; ++host) {
        sim::cut(0, host, true);
        sim::cut(host, 0, true);
      }
    });
    const Nanoseconds noticed = kind == 0 ? 0 : 4 * kSecond;  // (3 s of silence)
    sim::at(when + noticed + (saving ? 10 : 0) * kSecond + 2 * kSecond, [=] {
      const std::string left = sim::living_processes();
      sim::fail(left.empty() ? "" : "processes are left:" + left);
    });
  });
  want(result, sim::saved() == (saving ? hosts - 1 : 0), std::to_string(sim::saved()) + " ranks have saved");
  return result;
}

/// More hosts than the supervisor has connections: some agents are routers for others. A router's agent or its host is
/// lost, or is frozen for a while, or an agent behind it is lost: who is lost ends the job at once, and is named; who
/// was frozen does not.
sim::Result route(const sim::Options& options, int hosts) {
  const int group = static_cast<int>(std::ceil(std::sqrt(hosts - 1)));  // of host 1, ..: a router and its children
  enum { Nothing, RouterKilled, RouterLost, RouterFrozen, ChildKilled, ChildLost };
  int kind = Nothing, host = 0;
  Nanoseconds when = 0;
  auto result = sim::run(options, hosts, job(hosts, {"/simulated/train", "60", "100"}), [&] {
    kind = static_cast<int>(options.seed % 6);
    host = 1 + draw((hosts - 1) / group) * group;
    if (kind == ChildKilled || kind == ChildLost) host += 1 + draw(group - 1);
    when = 1 * kSecond + draw(3'000) * kMillisecond;
    sim::at(900 * kMillisecond, [=] {
      const int most = (hosts - 2) / group + 1;
      if (sim::root_connections() != most)
        sim::fail("the supervisor has " + std::to_string(sim::root_connections()) + " connections");
    });
    sim::at(when, [=] {
      if (kind == RouterLost || kind == ChildLost) sim::lose_host(host);
      for (const int pid : sim::processes_of(host, "cohort")) {
        if (kind == RouterKilled || kind == ChildKilled) sim::kill_process(pid, SIGKILL);
        if (kind != RouterFrozen) continue;
        sim::kill_process(pid, SIGSTOP);
        sim::at(sim::now() + (1'000 + draw(4'000)) * kMillisecond, [pid] { sim::kill_process(pid, SIGCONT); });
      }
    });
    sim::at(100 * kSecond, [] { sim::fail("the job does not end"); });
  });
  const bool goes_on = kind == Nothing || kind == RouterFrozen;
  want(result, goes_on == (result.status == 0), "status " + std::to_string(result.status));
  want(result, !goes_on || has(result.output, "trained 60 steps"), "it has not trained");
  want(result, goes_on || has(result.output, name_of(host)), "the lost host is not named");
  const Nanoseconds limit = kind == RouterLost || kind == ChildLost ? 6 * kSecond : 2 * kSecond;
  want(result, goes_on || end_of(result) < when + limit, "the end took too long");
  return result;
}

/// The disk with the run's folder is slow, full or broken, for a while or for good: the training takes no notice.
sim::Result disk(const sim::Options& options, int hosts) {
  auto result = sim::run(options, hosts, job(hosts, {"/simulated/train", "100", "100"}), [&] {
    const auto kind = static_cast<sim::Disk>(draw(3));
    const Nanoseconds takes = kind == sim::Disk::Works || draw(2) == 0 ? draw(3'000) * kMillisecond : 0;
    const Nanoseconds when = 1 * kSecond + draw(8'000) * kMillisecond;
    sim::at(when, [=] { sim::set_disk(0, kind, takes); });
    if (draw(2) == 0) sim::at(when + draw(5'000) * kMillisecond, [] { sim::set_disk(0, sim::Disk::Works, 0); });
    sim::at(200 * kSecond, [] { sim::fail("the job does not end"); });
  });
  want(result, result.status == 0, "status " + std::to_string(result.status));
  want(result, has(result.output, "trained 100 steps"), "it has not trained");
  return result;
}

// --- elastic jobs ---

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

bool links_are_cut = false;  // in this run

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
void plan_change(int hosts) {
  const int any = draw(hosts);
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

/// Any change, but for a lost or cut host 0, where the supervisor is: the launcher lost is a scenario of its own.
void change(int hosts) {
  const int host = 1 + draw(hosts - 1), any = draw(hosts);
  switch (draw(16)) {
    case 0:
    case 1:
    case 2:
    case 3:
    case 9:
    case 10: return plan_change(hosts);
    case 4: return signal_some(any, "elastic", SIGKILL, 2);
    case 5: {  // ranks of several hosts at once
      for (int h = 0; h < hosts; ++h) signal_some(h, "elastic", SIGKILL, 2);
      return;
    }
    case 6: return sim::lose_host(host);
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
      links_are_cut = true;
      sim::cut(host, any, true);
      if (both) sim::cut(any, host, true);
      return sim::at(until, [=] {
        sim::cut(host, any, false);
        if (both) sim::cut(any, host, false);
      });
    }
    case 11: return order(any, "remove");
    case 12: {  // agents and their guards
      const auto agents = sim::processes_of(host, "cohort");
      if (!agents.empty())
        sim::kill_process(agents[static_cast<std::size_t>(draw(static_cast<int>(agents.size())))], SIGKILL);
      return;
    }
    case 13: return sim::slow_host(host, draw(2) == 0 ? 1 : 50);
    case 14: return sim::set_disk(any, static_cast<sim::Disk>(draw(3)), draw(2'000) * kMillisecond);
    default: return signal_some(any, "elastic", SIGTERM, 1);  // a rank is told to save and leave
  }
}

constexpr Nanoseconds kLookEvery = 5 * kSecond;
constexpr Nanoseconds kForms = 35 * kSecond;  // more than the limits after which the silent are given up

/// An epoch that is announced forms a world, or another one is announced, or the job ends.
void look_at_epochs(std::string epoch, Nanoseconds since) {
  const std::string& text = sim::output();
  const auto goes_on = text.rfind(" goes on with ");
  if (goes_on != text.npos) {
    const auto begin = text.rfind("epoch ", goes_on);
    const std::string latest = text.substr(begin, goes_on - begin);
    const bool waits = text.find(": waiting up to ", goes_on) != text.npos;  // for hosts
    if (latest != epoch || waits || has(text, latest + " is formed")) since = sim::now();
    epoch = latest;
    if (!links_are_cut && sim::now() > since + kForms) return sim::fail(epoch + " is not formed");
  }
  sim::at(sim::now() + kLookEvery, [=] { look_at_epochs(epoch, since); });
}

/// An elastic job among whose hosts and ranks changes happen at random, several at once as well.
sim::Result elastic(const sim::Options& given, int hosts) {
  sim::Options options = given;
  const auto setting = [&options](std::uint64_t salt, int bound) {
    return static_cast<int>((options.seed * 2654435761 + salt * 40503) % 65'521 % static_cast<std::uint64_t>(bound));
  };
  if (setting(8, 2) == 0) options.longest_start = 3 * kSecond;
  const bool listed = setting(6, 3) != 0;  // else the hosts are told, and change by orders alone
  std::ofstream("hosts") << "host0:1\nhost1:1\n";
  std::vector<std::string> words = {kCommand,
                                    "run",
                                    "--ssh",
                                    kSsh,
                                    "--min-np",
                                    std::to_string(1 + setting(1, 2)),
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
  if (listed && setting(2, 3) == 0) words.insert(words.end(), {"--max-np", "4"});
  if (setting(3, 4) == 0) words.insert(words.end(), {"--max-restarts", "1"});
  if (!listed && setting(4, 2) == 0) words.insert(words.end(), {"-np", "3", "--spares", "1"});
  words.insert(words.end(), {"/simulated/elastic", "150", std::to_string(setting(5, 2) == 0 ? 50 : 300)});
  const bool planned = setting(7, 3) == 0, lacks = setting(9, 3) == 0;
  auto result = sim::run(options, hosts, words, [hosts, planned, lacks] {
    // A host that comes, and cannot start anything, is no fault of the job's.
    if (lacks) sim::remove_program(3 + draw(hosts - 3), "elastic");
    Nanoseconds when = draw(2'000) * kMillisecond;
    const int changes = 1 + draw(8);
    for (int i = 0; i < changes; ++i) {
      when += draw(2) == 0 ? draw(150) * kMillisecond : draw(5'000) * kMillisecond;
      sim::at(when, [hosts, planned] { planned ? plan_change(hosts) : change(hosts); });
    }
    links_are_cut = false;
    sim::at(kLookEvery, [] { look_at_epochs({}, 0); });
    if (!planned && draw(10) == 0)
      sim::at(when + draw(3'000) * kMillisecond, [] { signal_some(0, "cohort", SIGTERM, 1); });
    sim::at(400 * kSecond, [] { sim::fail("the job does not end"); });
  });
  want(result, result.status != 0 || has(result.output, " right"), "status 0, and no rank has ended its training");
  want(result, !planned || result.status == 0, "status " + std::to_string(result.status) + ", and nothing had failed");
  want(result, result.status != 124 || links_are_cut, "status 124, and nothing was silent for long");
  want(result, !has(result.output, "WRONG"), "wrong weights");
  want(result, result.status == 0 || result.output.size() > 20, "it fails, and says nothing");
  return result;
}

/// The list of hosts shrinks to a half, grows again, and a host is lost: each time there is a world of the new size
/// within 15 s, and the training goes on.
sim::Result grow(const sim::Options& options, int hosts) {
  const auto list_of = [](int count) {
    std::string list;
    for (int host = 0; host < count; ++host) list += name_of(host) + ":1\n";
    return list;
  };
  std::ofstream("hosts") << list_of(hosts);
  const std::vector<std::string> words = {kCommand,
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
                                          "60",
                                          "/simulated/elastic",
                                          "100",
                                          "500"};
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
  want(result, result.status == 0 && has(result.output, " right"), "status " + std::to_string(result.status));
  return result;
}

/// A host of an elastic job cannot reach one other any more, or all but the supervisor's: one worker ends, in the
/// second case the one of that host, and the others train to the end.
sim::Result part(const sim::Options& options, int hosts) {
  std::vector<std::string> words = job(hosts, {"/simulated/elastic", "60", "100"});
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
  want(result, result.status == 0 && has(result.output, " right"), "status " + std::to_string(result.status));
  want(result, ended(") ended with exit code 1;") == 1, "more than one worker has ended, or none");
  want(result, !all || ended("(" + name_of(from) + ") ended with exit code 1;") == 1,
       "another worker than the bad host's has ended");
  return result;
}

struct Scenario {
  const char* name;
  sim::Result (*run)(const sim::Options& options, int hosts);
  int hosts;
};
constexpr Scenario kScenarios[] = {
    {"start", start, 16},    {"kill", kill, 8},         {"lose", lose, 8},    {"cut", cut, 5},   {"part", part, 5},
    {"elastic", elastic, 5}, {"launcher", launcher, 5}, {"route", route, 18}, {"disk", disk, 4}, {"grow", grow, 6}};

struct Outcome {
  bool right = false;
  std::uint64_t digest = 0;
};

/// Runs one world in a process of its own, which keeps what the world's processes have left in memory.
Outcome run_one(const Scenario& scenario, const sim::Options& options, int hosts, bool quiet) {
  std::fflush(stdout);
  int ends[2];
  if (::pipe(ends) != 0) return {};
  const auto number = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
  const pid_t child = ::fork();
  if (child == 0) {
    char folder[] = "/tmp/simulation-XXXXXX";
    if (::mkdtemp(folder) == nullptr || ::chdir(folder) != 0) std::_Exit(1);
    const sim::Result result = scenario.run(options, hosts);
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
    const Outcome outcome{result.problem.empty(), result.digest};
    if (!quiet || !outcome.right) {
      std::printf(
          "%-7s seed %llu: %s, status %d after %.3f s; %llu events, %llu turns, %llu messages, digest %016llx\n",
          scenario.name, number(options.seed), outcome.right ? "right" : "WRONG", result.status,
          static_cast<double>(end_of(result)) / 1e9, number(result.events), number(result.switches),
          number(result.messages), number(result.digest));
    }
    if (!outcome.right) std::printf("%s\nit printed:\n%s\n", result.problem.c_str(), result.output.c_str());
    std::fflush(stdout);
    const bool told = ::write(ends[1], &outcome, sizeof outcome) == sizeof outcome;
    std::_Exit(told ? 0 : 1);
  }
  ::close(ends[1]);
  Outcome outcome;
  const bool told = ::read(ends[0], &outcome, sizeof outcome) == sizeof outcome;
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (told) return outcome;
  std::printf("%-7s seed %llu: the simulation itself failed, wait status %d\n", scenario.name, number(options.seed),
              status);
  return {};
}

}  // namespace

int run_scenarios(int argc, char** argv) {
  constexpr const char* kUsage =
      "usage: simulation [start|kill|lose|cut|part|elastic|launcher|route|disk|grow] [--seed N] [--count N] [--hosts "
      "N, from 3 on] [--ranks N on each host] [--verbose]\n";
  sim::Options options;
  std::string wanted;
  int count = 1, hosts = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--verbose")
      options.verbose = true;
    else if (word == "--seed" && i + 1 < argc)
      options.seed = std::strtoull(argv[++i], nullptr, 10);
    else if (word == "--count" && i + 1 < argc)
      count = std::atoi(argv[++i]);
    else if (word == "--hosts" && i + 1 < argc)
      hosts = std::atoi(argv[++i]);
    else if (word == "--ranks" && i + 1 < argc)
      ranks_per_host = std::atoi(argv[++i]);
    else if (const auto known = [&](const Scenario& one) { return word == one.name; };
             wanted.empty() && std::ranges::any_of(kScenarios, known))
      wanted = word;
    else
      return std::fputs(kUsage, stderr), 2;
  }
  if (count < 1 || ranks_per_host < 1 || (hosts != 0 && hosts < 3)) return std::fputs(kUsage, stderr), 2;
  int failures = 0, runs = 0;
  for (const Scenario& scenario : kScenarios) {
    if (!wanted.empty() && wanted != scenario.name) continue;
    for (int i = 0; i < count; ++i) {
      sim::Options own = options;
      own.seed += static_cast<std::uint64_t>(i);
      ++runs;
      const int size = hosts > 0 ? hosts : scenario.hosts;
      const Outcome outcome = run_one(scenario, own, size, count > 50);
      if (!outcome.right) ++failures;
      // The same seed, the same world. (Of large ones, small ones have to tell.)
      constexpr int kLarge = 64;
      if (i > 0 || !outcome.right || size > kLarge) continue;
      const Outcome again = run_one(scenario, own, size, true);
      if (again.digest == outcome.digest) continue;
      std::printf("%-7s seed %llu: another digest the second time\n", scenario.name,
                  static_cast<unsigned long long>(own.seed));
      ++failures;
    }
  }
  std::printf("%d of %d right\n", runs - failures, runs);
  return failures == 0 ? 0 : 1;
}
