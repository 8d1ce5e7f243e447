#include "training/measured.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <utility>

namespace cohort::app::training {
namespace {

/// `exposed` seconds as the operations' own time was spent.
Shares divide(double step, double exposed, const RankTimes& times) {
  Shares shares;
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

bool takes_steps(const JobOutcome& outcome) {
  return !outcome.ranks.empty() && std::all_of(outcome.ranks.begin(), outcome.ranks.end(), [](const RankTimes& rank) {
    return rank.steps > 0 && rank.seconds > 0;
  });
}

}  // namespace

std::string unit_of(const JobOutcome& outcome, const Counting& counting) {
  // What is in a step, and how many there are with other numbers of processes, is not known by itself.
  return takes_steps(outcome) && (counting.per_rank > 0 || counting.per_step > 0) ? "samples" : "runs";
}

Point point_of(const JobOutcome& outcome, int processes, int hosts, const Counting& counting) {
  Point point;
  point.processes = processes;
  point.hosts = hosts;
  point.run = outcome.seconds;
  if (!takes_steps(outcome)) {
    point.seconds = outcome.seconds;
    point.rate = outcome.seconds > 0 ? 1 / outcome.seconds : 0;
    return point;
  }
  const auto ranks = static_cast<double>(outcome.ranks.size());
  point.steps = outcome.ranks.front().steps;
  std::map<std::string, double> sent;
  std::vector<std::pair<double, const RankTimes*>> computes;
  double exposed = 0;
  for (const RankTimes& rank : outcome.ranks) {
    const double step = rank.seconds / rank.steps;
    const Shares shares = divide(step, rank.exposed / rank.steps, rank);
    point.seconds = std::max(point.seconds, rank.seconds);
    point.step.compute += shares.compute / ranks;
    point.step.waiting += shares.waiting / ranks;
    point.step.local += shares.local / ranks;
    point.step.wire += shares.wire / ranks;
    point.busy_wire = std::max(point.busy_wire, rank.wire / rank.steps);
    sent[rank.host] += rank.wire_bytes / rank.steps;
    computes.emplace_back(shares.compute, &rank);
    exposed += rank.exposed;
  }
  for (const auto& [host, bytes] : sent) point.wire_bytes = std::max(point.wire_bytes, bytes);
  std::sort(computes.begin(), computes.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  point.median_compute = computes[(computes.size() - 1) / 2].first;
  point.slowest_compute = computes.back().first;
  point.slowest_rank = computes.back().second->rank;
  point.slowest_host = computes.back().second->host;
  // Nobody hides every wait of every step: where none was ever seen, the program waits where it cannot be.
  point.split = processes == 1 || exposed > 0 ? Split::Measured : Split::Unknown;
  const double samples = counting.per_step > 0 ? counting.per_step : counting.per_rank * ranks;
  if (samples > 0) {
    point.rate = samples * point.steps / point.seconds;
  } else if (point.run > 0) {
    point.rate = 1 / point.run;
  }
  return point;
}

Point median_of(std::vector<Point> points) {
  std::sort(points.begin(), points.end(), [](const Point& a, const Point& b) { return a.rate < b.rate; });
  Point median = points[(points.size() - 1) / 2];
  for (const Point& point : points) median.rates.push_back(point.rate);
  return median;
}

void estimate_split(Point& point, const Point& alone, Scaling scaling) {
  if (point.split != Split::Unknown || point.steps <= 0 || alone.steps <= 0) return;
  const double step = point.step.step();
  const double share = scaling == Scaling::PerStep ? static_cast<double>(alone.processes) / point.processes : 1;
  const double more = step - alone.step.step() * share;
  point.split = Split::Estimated;
  const double wire = std::clamp(point.busy_wire, 0.0, std::max(more, 0.0));
  point.step.compute = more > 0 ? step - more : step;
  point.step.wire = wire;
  point.step.waiting = std::max(more, 0.0) - wire;
  point.step.local = 0;
}

nlohmann::ordered_json to_json(const Point& point) {
  const char* const split = point.split == Split::Measured    ? "measured"
                            : point.split == Split::Estimated ? "estimated"
                                                              : "unknown";
  return {{"event", "training"},
          {"hosts", point.hosts},
          {"processes", point.processes},
          {"rate", point.rate},
          {"rates", point.rates},
          {"steps", point.steps},
          {"seconds", point.seconds},
          {"run_s", point.run},
          {"split", split},
          {"compute_s", point.step.compute},
          {"waiting_s", point.step.waiting},
          {"local_s", point.step.local},
          {"wire_s", point.step.wire},
          {"wire_busy_s", point.busy_wire},
          {"wire_bytes", point.wire_bytes}};
}

}  // namespace cohort::app::training
