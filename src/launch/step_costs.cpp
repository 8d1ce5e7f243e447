#include "launch/step_costs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <utility>

namespace cohort::launch {
namespace {

constexpr double kPays = 0.05;  // share of a step; a smaller gain may be chance
constexpr int kLocalSteps = 8;  // this many local steps after a warm-up lose no accuracy
constexpr double kStillWire = 1.0 / 3;

/// Divides `exposed` seconds in proportion to the operations' own time.
StepShares divide(double step, double exposed, const RankTimes& times) {
  StepShares shares;
  exposed = std::clamp(exposed, 0.0, step);
  shares.compute = step - exposed;
  if (times.busy <= 0) {
    shares.compute = step;
    return shares;
  }
  shares.waiting = exposed * std::clamp(times.waited / times.busy, 0.0, 1.0);
  shares.wire = std::min(exposed - shares.waiting, exposed * times.wire / times.busy);
  shares.local = exposed - shares.waiting - shares.wire;
  return shares;
}

/// Returns the bytes that one host sends between hosts for each byte of a sum over all of them.
double two_level_bytes(const StepCosts& costs) noexcept { return 2.0 * (costs.hosts - 1) / costs.hosts; }

/// Returns the part of `busy` seconds of wire in `operations` that computing does not hide. Assumes that as much is
/// hidden as now, except for the last operation, which nothing can hide.
double exposed_wire(const StepCosts& costs, double busy, double operations) {
  const double hidden = std::max(0.0, costs.busy_wire - costs.step.wire);
  const double last = std::min(costs.step.wire, costs.busy_wire / std::max(1.0, costs.operations));
  const double tail = last * (busy / std::max(costs.busy_wire, 1e-12)) * costs.operations / std::max(1.0, operations);
  return std::max(tail, busy - hidden);
}

std::string percent_of(double part, double whole) { return fmt::format("{:.0f} %", 100 * part / whole); }

}  // namespace

RankTimes times_of(int rank, const std::string& host, const TimesReport& report) {
  const auto number = [](auto count) { return static_cast<double>(count); };
  return {.rank = rank,
          .host = host,
          .steps = number(report.steps),
          .seconds = number(report.steps_ns) / 1e9,
          .operations = number(report.operations),
          .bytes = number(report.bytes),
          .busy = number(report.busy_ns) / 1e9,
          .waited = number(report.waited_ns) / 1e9,
          .wire = number(report.wire_ns) / 1e9,
          .exposed = number(report.exposed_ns) / 1e9,
          .wire_bytes = number(report.wire_bytes)};
}

bool takes_steps(const std::vector<RankTimes>& ranks) {
  return !ranks.empty() &&
         std::ranges::all_of(ranks, [](const RankTimes& rank) { return rank.steps > 0 && rank.seconds > 0; });
}

StepCosts costs_of(const std::vector<RankTimes>& ranks, int hosts) {
  StepCosts costs;
  costs.processes = static_cast<int>(ranks.size());
  costs.hosts = hosts;
  costs.steps = ranks.front().steps;
  const auto all = static_cast<double>(ranks.size());
  std::map<std::string, double> sent;
  std::vector<std::pair<double, const RankTimes*>> computes;
  double exposed = 0, speeds = 0;
  for (const RankTimes& rank : ranks) {
    const double step = rank.seconds / rank.steps;
    const StepShares shares = divide(step, rank.exposed / rank.steps, rank);
    costs.seconds = std::max(costs.seconds, rank.seconds);
    costs.step.compute += shares.compute / all;
    costs.step.waiting += shares.waiting / all;
    costs.step.local += shares.local / all;
    costs.step.wire += shares.wire / all;
    costs.operations = std::max(costs.operations, rank.operations / rank.steps);
    costs.bytes = std::max(costs.bytes, rank.bytes / rank.steps);
    costs.busy_wire = std::max(costs.busy_wire, rank.wire / rank.steps);
    sent[rank.host] += rank.wire_bytes / rank.steps;
    computes.emplace_back(shares.compute, &rank);
    speeds += 1 / std::max(shares.compute, 1e-9);
    exposed += rank.exposed;
  }
  for (const auto& [host, bytes] : sent) costs.wire_bytes = std::max(costs.wire_bytes, bytes);
  std::sort(computes.begin(), computes.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  costs.median_compute = computes[(computes.size() - 1) / 2].first;
  costs.slowest_compute = computes.back().first;
  costs.balanced_compute = all / speeds;
  costs.slowest_rank = computes.back().second->rank;
  costs.slowest_host = computes.back().second->host;
  // No program hides every wait of every step: if none was seen, the program waits where it is not measured.
  costs.waits_seen = ranks.size() == 1 || exposed > 0;
  return costs;
}

double present_ratio(const StepCosts& costs) noexcept {
  if (costs.hosts < 2 || costs.bytes <= 0 || costs.wire_bytes <= 0) return 0;
  const double ratio = costs.wire_bytes / (costs.bytes * two_level_bytes(costs));
  return ratio > 1.25 || ratio < 0.1 ? 0 : std::min(ratio, 1.0);
}

double ratio_of(WireFormat format) noexcept {
  switch (format) {
    case WireFormat::None: break;
    case WireFormat::BFloat16: return 0.5;
    case WireFormat::Int8: return 8.125 / 32;
    case WireFormat::Int4: return 4.125 / 32;
  }
  return 1;
}

std::vector<FormatCosts> usual_formats() {
  std::vector<FormatCosts> formats;
  for (const WireFormat format : {WireFormat::BFloat16, WireFormat::Int8, WireFormat::Int4})
    formats.push_back({format, ratio_of(format), 0.2, 0.1});
  return formats;
}

std::vector<Change> changes_of(const StepCosts& costs, const PlanFacts& facts) {
  std::vector<Change> changes;
  const StepShares& now = costs.step;
  const double gained = costs.slowest_compute - costs.balanced_compute;
  if (costs.processes > 1 && costs.slowest_compute > 1.1 * costs.median_compute)
    changes.push_back(
        {Change::Kind::Shares, "shares of the samples by speed", now.step() - std::min(gained, now.waiting), now.wire});
  const double ratio = present_ratio(costs);
  const double rest = now.step() - now.wire;
  // Bytes that a stripe's owner handles: it encodes what it sends and what it has reduced, and decodes both.
  const double own_bytes = costs.bytes * costs.hosts / costs.processes;
  std::optional<double> least;  // seconds for all bytes of a step
  for (const FormatCosts& format : facts.formats) {
    if (ratio <= 0 || format.ratio > 0.9 * ratio) continue;
    const double codec = own_bytes * 1e-9 * (format.encode_ns + two_level_bytes(costs) * format.decode_ns);
    const double busy = costs.busy_wire * format.ratio / ratio + codec;
    const double wire = exposed_wire(costs, busy, costs.operations);
    changes.push_back(
        {Change::Kind::Format, fmt::format("{} on the wire", to_string(format.format)), rest + wire, wire});
    least = std::min(least.value_or(busy), busy);
  }
  if (costs.hosts > 1 && facts.latency > 0 && costs.operations >= 2) {
    const double fewer = std::max(1.0, costs.operations / 4);
    const double busy = std::max(0.0, costs.busy_wire - facts.latency * (costs.operations - fewer));
    const double wire = exposed_wire(costs, busy, fewer);
    changes.push_back({Change::Kind::Buckets,
                       fmt::format("buckets 4 times as large ({:.0f} of {:.0f} operations)", fewer, costs.operations),
                       rest + wire, wire});
  }
  if (costs.hosts > 1) {
    const double wire = costs.busy_wire / kLocalSteps;
    changes.push_back(
        {Change::Kind::LocalSteps,
         fmt::format("weights averaged every {} steps instead of gradients (LocalSGD: another training)", kLocalSteps),
         now.compute + (now.waiting + now.local) / kLocalSteps + wire, wire});
  }
  if (costs.processes > costs.hosts)
    changes.push_back(
        {Change::Kind::FewerRanks, "a rank on each host, with all of its cores", now.step() - now.local, now.wire});
  return changes;
}

std::optional<Change> best_of(const std::vector<Change>& changes, const StepCosts& costs) {
  Change best{Change::Kind::FewerRanks, {}, costs.step.step(), costs.step.wire};  // the present state
  for (const Change& change : changes) {
    // It is not known how well a single rank uses all cores.
    if (change.kind == Change::Kind::LocalSteps || change.kind == Change::Kind::FewerRanks) continue;
    if (change.step < best.step * (1 - kPays)) best = change;
  }
  const auto fewer = std::ranges::find(changes, Change::Kind::LocalSteps, &Change::kind);
  if (fewer != changes.end() && best.wire > kStillWire * best.step && fewer->step < best.step * (1 - kPays))
    best = *fewer;
  return best.what.empty() ? std::nullopt : std::optional(best);
}

std::string advice_of(const StepCosts& costs, const PlanFacts& facts) {
  if (costs.steps <= 0 || !costs.waits_seen) return {};
  const std::vector<Change> changes = changes_of(costs, facts);
  const std::optional<Change> best = best_of(changes, costs);
  if (!best) return {};
  const StepShares& now = costs.step;
  std::string text;
  if (best->kind == Change::Kind::Shares) {
    text = fmt::format(
        "ranks wait {} of each step of {} for slower ones (rank {} on host {} computes for {}, most for {})",
        seconds_in_words(now.waiting), seconds_in_words(now.step()), costs.slowest_rank, costs.slowest_host,
        seconds_in_words(costs.slowest_compute), seconds_in_words(costs.median_compute));
  } else {
    text = fmt::format("{} of each step ({} of {}) is waiting for the wire, which brings {}/s and is given {}",
                       percent_of(now.wire, now.step()), seconds_in_words(now.wire), seconds_in_words(now.step()),
                       bytes_in_words(costs.wire_bytes / std::max(costs.busy_wire, 1e-12)),
                       bytes_in_words(costs.wire_bytes));
  }
  // Only the number of bytes is known, and not their type.
  const char* const of = best->kind == Change::Kind::Format
                             ? " (wire_format of DistributedDataParallel, for float32; it rounds gradients)"
                             : "";
  return fmt::format("{}; with {}{} a step would take about {}, {:.2f} times as fast", text, best->what, of,
                     seconds_in_words(best->step), now.step() / best->step);
}

std::string no_advice_of(const StepCosts& costs) {
  const StepShares& now = costs.step;
  if (costs.hosts > 1 && now.wire < kPays * now.step()) {
    return fmt::format(
        "the wire is hidden behind computing: of {} of it in a step of {} the program waits {}; fewer bytes would not "
        "help",
        seconds_in_words(costs.busy_wire), seconds_in_words(now.step()), seconds_in_words(now.wire));
  }
  return fmt::format("nothing brings {} of a step of {}", percent_of(kPays, 1), seconds_in_words(now.step()));
}

std::string three_digits(double value) {
  return value >= 99.95   ? fmt::format("{:.0f}", value)
         : value >= 9.995 ? fmt::format("{:.1f}", value)
                          : fmt::format("{:.2f}", value);
}

std::string bytes_in_words(double bytes) {
  const char* const units[] = {"bytes", "kB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  while (bytes >= 999.5 && unit < 4) {
    bytes /= 1000;
    ++unit;
  }
  return fmt::format("{} {}", unit == 0 ? fmt::format("{:.0f}", bytes) : three_digits(bytes), units[unit]);
}

std::string seconds_in_words(double seconds) {
  if (seconds >= 0.9995) return three_digits(seconds) + " s";
  if (seconds >= 0.9995e-3) return three_digits(seconds * 1e3) + " ms";
  return fmt::format("{:.0f} us", seconds * 1e6);
}

}  // namespace cohort::launch
