#include "launch/health/health.h"

#include "base/parse.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <tuple>
#include <utility>

namespace cohort::launch {
namespace {

using std::chrono::duration_cast;
using std::chrono::seconds;

/// Share of processor time below which a rank is idle: a waiting rank wakes up now and then.
constexpr double kIdleShare = 0.05;
/// Longest normal time between two calls of `judge`, which is called once a second.
constexpr auto kLongestBetween = std::chrono::seconds(5);

std::uint64_t waited(const RankReport& report) {
  std::uint64_t sum = 0;
  for (const GroupReport& group : report.groups) sum += group.waited_ns;
  return sum;
}

bool same_operations(const RankReport& a, const RankReport& b) {
  return a.step == b.step && a.named.ended == b.named.ended &&
         std::equal(
             a.groups.begin(), a.groups.end(), b.groups.begin(), b.groups.end(),
             [](const GroupReport& one, const GroupReport& other) {
               return one.id == other.id && one.begun == other.begun && one.ended == other.ended &&
                      (one.message_number == other.message_number || one.message.empty() || other.message.empty());
             });
}

}  // namespace

Health::Health(std::vector<std::string> hosts, const Roles& roles, const HealthLimits& limits)
    : hosts_(std::move(hosts)),
      roles_(roles),
      limits_(limits),
      ranks_(hosts_.size()),
      away_told_(hosts_.size(), seconds(0)) {}

void Health::report(RankReport report, Clock::time_point now) {
  if (report.rank < 0 || static_cast<std::size_t>(report.rank) >= ranks_.size()) return;
  Rank& rank = ranks_[static_cast<std::size_t>(report.rank)];
  report.step = std::max<std::int64_t>(report.step, 0);  // the page may hold any value
  const bool stays = rank.known && same_operations(rank.report, report);
  // A rank that waits in slices (as Python does, for signals) may report between slices; one such report is ignored.
  rank.paused = stays && !rank.paused && waits(rank.report) && !waits(report);
  if (rank.paused) {
    report.groups = rank.report.groups;
    report.named = rank.report.named;
  }
  const bool moved = !stays || waits(report) != waits(rank.report);
  const double busy = static_cast<double>(report.cpu_ms - std::min(report.cpu_ms, rank.moved_cpu_ms)) * 1e-3;
  const double quiet = std::chrono::duration<double>(now - rank.moved_at).count();
  if (moved || busy > 0.1 + kIdleShare * quiet) {
    rank.moved_at = now;
    rank.moved_cpu_ms = report.cpu_ms;
  }
  if (moved || !waits(report)) rank.waiting_at = now;
  if (!rank.known || rank.report.forming != report.forming) rank.forming_at = now;
  if (report.state != 'T' && report.state != 't') {
    rank.stopped_at.reset();
    rank.stopped_told = false;
  } else if (!rank.stopped_at) {
    rank.stopped_at = now;
  }
  const std::uint64_t waiting = waited(report);
  if (!rank.known || report.step < rank.step || waiting < rank.step_waited_ns) {
    rank.step_at = now;
    rank.step = report.step;
    rank.step_waited_ns = waiting;
  } else if (report.step - rank.step >= limits_.slow_steps) {
    const double took = std::chrono::duration<double>(now - rank.step_at).count();
    const double own = took - static_cast<double>(waiting - rank.step_waited_ns) * 1e-9;
    rank.own_seconds = std::max(own, 0.0) / static_cast<double>(report.step - rank.step);
    rank.own_is_new = true;
    rank.step_at = now;
    rank.step = report.step;
    rank.step_waited_ns = waiting;
  }
  rank.heard_at = now;
  rank.silence_told = false;
  rank.known = true;
  rank.report = std::move(report);
}

void Health::ended(int rank, Clock::time_point now, std::uint32_t worlds) {
  if (rank < 0 || static_cast<std::size_t>(rank) >= ranks_.size()) return;
  Rank& one = ranks_[static_cast<std::size_t>(rank)];
  one.gone = true;
  one.report.worlds = worlds;
  one.heard_at = now;
  one.silence_told = false;
}

void Health::grow(std::vector<std::string> hosts, Clock::time_point now) {
  const std::size_t before = ranks_.size();
  hosts_ = std::move(hosts);
  roles_.workers = static_cast<int>(hosts_.size());
  ranks_.resize(hosts_.size());
  away_told_.resize(hosts_.size(), seconds(0));
  for (std::size_t rank = before; rank < ranks_.size(); ++rank) began_anew(static_cast<int>(rank), now);
}

void Health::left(int rank, bool has_left) {
  Rank& one = ranks_.at(static_cast<std::size_t>(rank));
  one.left = has_left;
  if (has_left) one.report.groups.clear();
}

int Health::members() const {
  const auto end = ranks_.begin() + roles_.workers;
  return roles_.workers -
         static_cast<int>(std::count_if(ranks_.begin(), end, [](const Rank& one) { return one.left; }));
}

void Health::began_anew(int rank, Clock::time_point now) {
  if (rank < 0 || static_cast<std::size_t>(rank) >= ranks_.size()) return;
  Rank& one = ranks_[static_cast<std::size_t>(rank)];
  one = {};
  one.heard_at = one.moved_at = one.waiting_at = now;
}

// Running ranks have reports of their own. A rank that has ended may take long to free its memory, and its children may
// take long to be ended.
void Health::heard_of_host(const std::vector<int>& processes, Clock::time_point now) {
  for (const int rank : processes) {
    if (rank < 0 || static_cast<std::size_t>(rank) >= ranks_.size()) continue;
    Rank& one = ranks_[static_cast<std::size_t>(rank)];
    if (!one.gone) continue;
    one.heard_at = now;
    one.silence_told = false;
  }
}

void Health::host_ended(const std::vector<int>& processes) {
  for (const int rank : processes) {
    if (rank >= 0 && static_cast<std::size_t>(rank) < ranks_.size())
      ranks_[static_cast<std::size_t>(rank)].swept = true;
  }
}

std::string Health::name(int rank) const {
  const Rank& one = ranks_[static_cast<std::size_t>(rank)];
  return fmt::format("{} ({}, pid {})", roles_.name_of(rank), hosts_[static_cast<std::size_t>(rank)], one.report.pid);
}

std::optional<int> Health::world_rank(std::uint64_t group, int rank) const {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    for (const GroupReport& own : ranks_[i].report.groups) {
      if (own.id == group && own.rank == rank) return static_cast<int>(i);
    }
  }
  return std::nullopt;
}

std::optional<Health::Need> Health::need_of(const Rank& rank) const {
  if (!rank.known || rank.gone) return std::nullopt;
  // While a requested operation is executed, the rank is not waiting for an operation matched by name.
  const bool idle =
      std::ranges::all_of(rank.report.groups, [](const GroupReport& group) { return group.begun == group.ended; });
  if (rank.report.named.waiting && idle) {
    // Only the ranks know which of them have not requested the operation.
    Need need;
    need.anyone = true;
    need.what = fmt::format("'{}' (by name)", rank.report.named.name);
    for (std::size_t other = 0; roles_.is_rank(static_cast<int>(other)); ++other) {
      if (&ranks_[other] != &rank && !ranks_[other].gone) need.ranks.push_back(static_cast<int>(other));
    }
    return need;
  }
  for (const GroupReport& group : rank.report.groups) {
    if (!group.message.empty()) {
      Need need;
      need.what = group.message;
      need.message = true;
      if (const auto peer = world_rank(group.id, group.peer)) need.ranks.push_back(*peer);
      return need;
    }
    if (!group.waiting) continue;
    Need need;
    need.what = fmt::format("{}, operation {}", group.operation, group.begun);
    for (std::size_t other = 0; other < ranks_.size(); ++other) {
      for (const GroupReport& theirs : ranks_[other].report.groups) {
        if (theirs.id == group.id && theirs.begun < group.begun) need.ranks.push_back(static_cast<int>(other));
      }
    }
    return need;
  }
  return std::nullopt;
}

// Handles a supervisor that was stopped itself (Ctrl-Z, a suspended machine). Its data is old, and the passed time says
// nothing about the ranks.
void Health::forgive_sleep(Clock::time_point now) {
  const bool slept = !judged_at_ || now - *judged_at_ > kLongestBetween;  // also before the first call
  judged_at_ = now;
  if (!slept) return;
  for (Rank& rank : ranks_) {
    rank.heard_at = rank.moved_at = rank.waiting_at = rank.forming_at = now;
    if (rank.stopped_at) rank.stopped_at = now;
  }
}

Health::Findings Health::judge(Clock::time_point now) {
  Findings findings;
  forgive_sleep(now);
  look_for_stopped(now, findings);
  look_for_silent(now, findings);
  look_for_absent(now, findings);
  look_for_deadlock(findings);
  look_for_away(now, findings);
  look_for_slow(now, findings);
  return findings;
}

void Health::look_for_stopped(Clock::time_point now, Findings& findings) {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    // (This includes ranks that leave as planned: the others are in a world with them until the step's end.)
    if (rank.gone || !rank.stopped_at) continue;
    const auto since = duration_cast<seconds>(now - *rank.stopped_at);
    const std::string who = name(static_cast<int>(i));
    if (since >= limits_.stopped_notice && !rank.stopped_told) {
      rank.stopped_told = true;
      const auto end = limits_.stopped_end.count();
      warn(findings, WarningKind::Stopped, static_cast<int>(i),
           fmt::format("{} has been stopped for {} s (SIGSTOP, a debugger, or a read from the terminal); kill -CONT {} "
                       "lets it go on{}",
                       who, since.count(), rank.report.pid,
                       end == 0
                           ? std::string()
                           : fmt::format(", at {} s {}", end,
                                         limits_.elastic ? "it is killed where the others can go on without it, and "
                                                           "else the job ends"
                                                         : "the job ends")));
    }
    if (limits_.stopped_end.count() > 0 && since >= limits_.stopped_end)
      findings.stopped.push_back(
          {static_cast<int>(i), since, fmt::format("{} has been stopped for {} s", who, since.count()), false});
  }
}

// An agent reports more than once a second, also while it ends leftovers of its ranks, and says when none are left. If
// no report comes, the agent or its whole host is stopped or overloaded.
void Health::look_for_silent(Clock::time_point now, Findings& findings) {
  std::map<std::string, std::optional<Clock::time_point>> over;  // hosts without running ranks: the last one's end
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    auto& last = over.try_emplace(hosts_[i], Clock::time_point::min()).first->second;
    if (!rank.gone || rank.swept) last.reset();
    if (last) last = std::max(*last, rank.heard_at);
  }
  std::map<std::string, std::vector<int>> silent;
  std::map<std::string, Clock::time_point> since;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    const auto& last = over[hosts_[i]];
    const Clock::time_point heard_at = last.value_or(rank.heard_at);
    if ((rank.gone && !last) || now - heard_at < limits_.stopped_notice) continue;
    silent[hosts_[i]].push_back(static_cast<int>(i));
    since.try_emplace(hosts_[i], heard_at);
  }
  for (const auto& [host, ranks] : silent) {
    const auto time = duration_cast<seconds>(now - since[host]);
    const std::string what =
        fmt::format("nothing has come from the agent of {} ({}) for {} s", host, roles_.names_of(ranks), time.count());
    bool& told = ranks_[static_cast<std::size_t>(ranks.front())].silence_told;
    const auto end = limits_.stopped_end;
    if (!told) {
      const char* const then =
          limits_.elastic ? "the others go on without it where they can, and else the job ends" : "the job ends";
      warn(
          findings, WarningKind::Silent, ranks.front(),
          fmt::format(
              "{}, although the host is connected: it is stopped, or the host is too busy{}", what,
              end.count() > 0 ? fmt::format("; at {} s {}", std::max(end, limits_.stopped_notice).count(), then) : ""));
    }
    told = true;
    if (end.count() > 0 && time >= end) findings.stopped.push_back({ranks.front(), time, what, true});
  }
}

// Finds worlds of all ranks that cannot be formed, since a rank has ended.
void Health::look_for_absent(Clock::time_point now, Findings& findings) const {
  if (limits_.absent.count() == 0 || findings.end) return;
  const int members = this->members();
  std::vector<int> absent, waiting;
  for (std::size_t i = 0; roles_.is_rank(static_cast<int>(i)); ++i) {
    const Rank& rank = ranks_[i];
    if (limits_.elastic && rank.report.worlds > 0) continue;  // the others go on, as Membership decides
    if (rank.gone || rank.report.forming < members || now - rank.forming_at < limits_.absent) continue;
    waiting.push_back(static_cast<int>(i));
    for (std::size_t other = 0; roles_.is_rank(static_cast<int>(other)); ++other) {
      const Rank& theirs = ranks_[other];
      // A rank that has formed more worlds than the waiting rank took part in this world, too.
      if (theirs.gone && !theirs.left && theirs.report.worlds <= rank.report.worlds)
        absent.push_back(static_cast<int>(other));
    }
  }
  if (absent.empty()) return;
  std::ranges::sort(absent);
  absent.erase(std::unique(absent.begin(), absent.end()), absent.end());
  const bool again = ranks_[static_cast<std::size_t>(waiting.front())].report.worlds > 0;
  findings.end = fmt::format(
      "{} had ended {}before {} formed the world that {} {} for (init, init_process_group) -- do all "
      "ranks call it? (a script on stdin reaches rank 0 alone)",
      roles_.names_of(absent), again ? "with 0, after an earlier world, " : "with 0 ",
      absent.size() == 1 ? "it" : "they", roles_.names_of(waiting), waiting.size() == 1 ? "waits" : "wait");
}

// Finds the largest set of waiting ranks in which each needs another one, so that none can go on first.
void Health::look_for_deadlock(Findings& findings) {
  if (limits_.deadlock.count() == 0 || findings.end) return;
  std::map<int, Need> stuck;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    // Only reports count: whether a silent rank has moved since its last report is not known.
    if (rank.heard_at - rank.moved_at < limits_.deadlock || rank.stopped_at) continue;
    if (auto need = need_of(rank)) stuck.emplace(static_cast<int>(i), *std::move(need));
  }
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (auto at = stuck.begin(); at != stuck.end();) {
      const std::vector<int>& needed = at->second.ranks;
      const auto is_stuck = [&](int rank) { return stuck.contains(rank); };
      const bool held = at->second.anyone ? !needed.empty() && std::ranges::all_of(needed, is_stuck)
                                          : std::ranges::any_of(needed, is_stuck);
      smaller = smaller || !held;
      at = held ? std::next(at) : stuck.erase(at);
    }
  }
  if (stuck.empty()) return;
  std::string text = "nothing can go on:";
  for (const auto& [rank, need] : stuck) {
    text += fmt::format("{} {} waits ", rank == stuck.begin()->first ? "" : ";", name(rank));
    if (need.anyone) {
      text += "for " + need.what;
    } else {
      text += fmt::format("in {} for rank{} {}", need.what, need.ranks.size() == 1 ? "" : "s", to_ranges(need.ranks));
    }
  }
  findings.end = text + " -- do all ranks take the same branches of the program?";
}

void Health::look_for_away(Clock::time_point now, Findings& findings) {
  struct Wait {
    std::vector<int> ranks;
    std::string what;
    bool message = false;
    Clock::time_point since;
  };
  std::map<int, Wait> awaited;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    const auto need = need_of(rank);
    if (!need || need->anyone) continue;
    for (const int other : need->ranks) {
      const Rank& theirs = ranks_[static_cast<std::size_t>(other)];
      if (theirs.gone || theirs.stopped_at || need_of(theirs)) continue;
      if (now - theirs.heard_at >= limits_.stopped_notice) continue;
      const auto [at, fresh] = awaited.try_emplace(other, Wait{{}, need->what, need->message, rank.waiting_at});
      at->second.ranks.push_back(static_cast<int>(i));
      at->second.since = std::min(at->second.since, rank.waiting_at);
    }
  }
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const auto found = awaited.find(static_cast<int>(i));
    seconds& told = away_told_[i];
    if (found == awaited.end()) {
      told = seconds(0);
      continue;
    }
    const Wait& wait = found->second;
    const auto since = duration_cast<seconds>(now - wait.since);
    const std::string who = fmt::format("rank{} {}", wait.ranks.size() == 1 ? "" : "s", to_ranges(wait.ranks));
    if (since >= (told.count() == 0 ? limits_.away_notice : 2 * told)) {
      told = told.count() == 0 ? limits_.away_notice : 2 * told;
      warn(findings, WarningKind::Awaited, static_cast<int>(i),
           fmt::format("{} {} for {} s in {} for {}, which is elsewhere (saving, evaluating, loading, or lost){}", who,
                       wait.ranks.size() == 1 ? "has waited" : "have waited", since.count(), wait.what,
                       name(static_cast<int>(i)),
                       limits_.stall.count() > 0 ? fmt::format("; at {} s the job ends", limits_.stall.count()) : ""));
    }
    if (limits_.stall.count() > 0 && since >= limits_.stall && !findings.end) {
      findings.end = fmt::format("{} did not {} {} within {} s; {} {} waiting", name(static_cast<int>(i)),
                                 wait.message ? "take part in" : "call", wait.what, since.count(), who,
                                 wait.ranks.size() == 1 ? "was" : "were");
    }
  }
}

void Health::warn(Findings& findings, WarningKind kind, int rank, std::string text) const {
  Warning warning{.kind = kind, .text = std::move(text), .rank = {}, .step = {}};
  if (roles_.is_rank(rank)) warning.rank = rank;
  if (const std::int64_t step = last(rank).step; step > 0) warning.step = step;
  findings.warnings.push_back(std::move(warning));
}

void Health::look_for_slow(Clock::time_point now, Findings& findings) {
  std::vector<double> own;
  for (std::size_t i = 0; roles_.is_rank(static_cast<int>(i)); ++i) {
    const Rank& rank = ranks_[i];
    if (!rank.gone && rank.own_seconds > 0) own.push_back(rank.own_seconds);
  }
  if (own.size() < static_cast<std::size_t>(members()) || own.size() < 2) return;
  std::ranges::sort(own);
  const double median = own[(own.size() - 1) / 2];
  for (std::size_t i = 0; roles_.is_rank(static_cast<int>(i)); ++i) {
    Rank& rank = ranks_[i];
    if (!std::exchange(rank.own_is_new, false)) continue;
    const bool slow = rank.own_seconds > limits_.slow_factor * median && rank.own_seconds > 1e-3;
    rank.slow_windows = slow ? rank.slow_windows + 1 : 0;
    if (rank.slow_windows <= 1) {
      rank.slow_since = now;
      rank.slow_told = false;
    }
    if (rank.slow_windows < limits_.slow_windows || now - rank.slow_since < limits_.slow_least) continue;
    if (std::exchange(rank.slow_told, true)) continue;
    warn(findings, WarningKind::LateRank, static_cast<int>(i),
         fmt::format("{} is slow: {:.3g} ms of its own work per step over {} steps, where the median of the ranks is "
                     "{:.3g} ms; the others wait for it",
                     name(static_cast<int>(i)), rank.own_seconds * 1e3, rank.slow_windows * limits_.slow_steps,
                     median * 1e3));
  }
}

bool Health::somebody_leaves() const {
  return std::ranges::any_of(ranks_,
                             [](const Rank& rank) { return rank.known && !rank.gone && has_left(rank.report); });
}

bool Health::somebody_saves() const {
  return std::any_of(ranks_.begin(), ranks_.begin() + roles_.workers, [](const Rank& rank) {
    return rank.known && !rank.gone && (rank.report.saves_when_asked || rank.report.preempted_by != 0);
  });
}

std::string Health::waiting_times() const {
  constexpr std::size_t kMostShown = 32;
  std::string text;
  std::size_t shown = 0;
  for (std::size_t i = 0; i < ranks_.size() && shown < kMostShown; ++i) {
    const Rank& rank = ranks_[i];
    double longest = 0;
    std::uint64_t number = 0;
    const auto look = [&](double time, std::uint64_t of) {
      if (time > longest) std::tie(longest, number) = std::tuple(time, of);
    };
    double all = static_cast<double>(waited(rank.report)) * 1e-9;
    // The rank's sums do not include operations that have not ended.
    const double now =
        rank.known && !rank.gone ? std::chrono::duration<double>(rank.heard_at - rank.waiting_at).count() : 0;
    for (const GroupReport& group : rank.report.groups) {
      look(static_cast<double>(group.longest_ns) * 1e-9, group.longest_number);
      if (!group.waiting) continue;
      look(now, group.begun);
      all += now;
    }
    if (longest == 0) continue;
    text += fmt::format("{}rank {}: {:.3g} s (longest {:.3g} s, operation {})", shown == 0 ? "" : "; ", i, all, longest,
                        number);
    ++shown;
  }
  return shown == 0 ? text : "waited for others in collectives: " + text;
}

std::vector<std::string> Health::doing_now() const {
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    std::string text = rank.gone                              ? "has ended"
                       : !rank.known                          ? "has not reported"
                       : !roles_.is_rank(static_cast<int>(i)) ? "running"
                                                              : doing(rank.report) + at_step(rank.report);
    if (!rank.gone && rank.stopped_at) text += ", stopped";
    texts.push_back(std::move(text));
  }
  return texts;
}

namespace {

HealthLimits limits_of(const JobSpec& spec) {
  HealthLimits limits = spec.health;
  limits.elastic = spec.elastic.least > 0;
  return limits;
}

}  // namespace

HealthWatch::HealthWatch(std::vector<std::string> hosts, const Roles& roles, const JobSpec& spec)
    : roles_(roles), health_(std::move(hosts), roles, limits_of(spec)), steps_(spec.steps) {}

void HealthWatch::take(Reports reports, const std::vector<int>& processes) {
  health_.heard_of_host(processes, Health::Clock::now());
  for (RankReport& report : reports.ranks) {
    if (roles_.is_rank(report.rank)) steps_.report(report, StepWatch::Clock::now());
    health_.report(std::move(report), Health::Clock::now());
  }
}

std::vector<Warning> HealthWatch::rank_ended(int process, RankReport last) {
  const auto now = Health::Clock::now();
  last.rank = process;
  health_.ended(process, now, last.worlds);
  if (!roles_.is_rank(last.rank)) return {};
  steps_.report(last, now);
  steps_.ended(last.rank);
  return steps_.judge(now);
}

Health::Findings HealthWatch::look() {
  const auto now = Health::Clock::now();
  Health::Findings findings = health_.judge(now);
  for (Warning& warning : steps_.judge(now)) findings.warnings.push_back(std::move(warning));
  return findings;
}

std::vector<std::string> HealthWatch::overview() const {
  std::vector<std::string> lines = folded(health_.doing_now(), roles_);
  if (std::string waits = health_.waiting_times(); !waits.empty()) lines.push_back(std::move(waits));
  return lines;
}

}  // namespace cohort::launch
