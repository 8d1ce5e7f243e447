// Scenarios: a command line, what happens to its job, and what has to be true in the end. Every random number is the
// seed's, so a seed that fails, fails again. A scenario runs in a process of its own, on one thread.
#pragma once

#include "sim.h"

#include <cstdint>
#include <string>
#include <vector>

namespace scenarios {

using sim::kMillisecond;
using sim::kSecond;
using sim::Nanoseconds;

constexpr const char* kCommand = "/simulated/cohort";
constexpr const char* kSsh = "/simulated/ssh";

inline int ranks_per_host = 1;  ///< of `job`

inline int draw(int bound) { return static_cast<int>(sim::random_number(static_cast<std::uint64_t>(bound))); }

inline std::string name_of(int host) { return "host" + std::to_string(host); }

/// The command that runs this program on each host from `first` on.
inline std::vector<std::string> job(int hosts, const std::vector<std::string>& program, int first = 0) {
  std::string list;
  for (int host = first; host < hosts; ++host)
    list += (host > first ? "," : "") + name_of(host) + ":" + std::to_string(ranks_per_host);
  std::vector<std::string> words = {kCommand, "run", "-H", list, "--ssh", kSsh};
  words.insert(words.end(), program.begin(), program.end());
  return words;
}

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline void want(sim::Result& result, bool condition, const std::string& problem) {
  if (result.problem.empty() && !condition) result.problem = problem;
}

// elastic.cpp

/// An elastic job among whose hosts and ranks changes happen at random, several at once as well.
sim::Result elastic(const sim::Options& given, int hosts);
/// The list of hosts shrinks to a half, grows again, and a host is lost: each time there is a world of the new size
/// within 15 s, and the training goes on.
sim::Result grow(const sim::Options& options, int hosts);
/// A host of an elastic job cannot reach one other any more, or all but the supervisor's: one worker ends, in the
/// second case the one of that host, and the others train to the end.
sim::Result part(const sim::Options& options, int hosts);

/// Runs the scenarios that the command line names: `simulation [SCENARIO] [--seed N] [--count N] [--verbose]`.
int run(int argc, char** argv);

}  // namespace scenarios
