// Scenarios of jobs whose members do not change, and the command that runs all scenarios.
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
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace scenarios {
namespace {

/// The time at which the job's command has ended: a run goes on for 3 s to see what is left.
Nanoseconds end_of(const sim::Result& result) { return result.time - 3 * kSecond; }

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

int run(int argc, char** argv) {
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

}  // namespace scenarios
