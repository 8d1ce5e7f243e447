#include "bench/training/training.h"
#include "observe/plot/figure.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <iterator>
#include <set>

namespace cohort::app::training {
namespace {

constexpr double kFaster = 1.05;  // two rates count as equal below this ratio, and above its inverse
constexpr double kChance = 0.05;  // smaller shares of the measured time justify no promise

using launch::three_digits;

std::string plural(int number, const char* one) { return fmt::format("{} {}{}", number, one, number == 1 ? "" : "s"); }

std::string link_text(double bits) {
  const char* const units[] = {"bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"};
  std::size_t unit = 0;
  while (bits >= 999.5 && unit < 4) {
    bits /= 1000;
    ++unit;
  }
  return fmt::format("{} {}", three_digits(bits), units[unit]);
}

/// The best point on this number of hosts, or null.
const Point* best_on(const std::vector<Point>& points, int hosts) {
  const Point* best = nullptr;
  for (const Point& point : points) {
    if (point.hosts == hosts && (best == nullptr || point.rate > best->rate)) best = &point;
  }
  return best;
}

/// Bytes per second over the wire while an operation waited for it; 0: not known.
double wire_rate(const Point& point) { return point.busy_wire > 0 ? point.wire_bytes / point.busy_wire : 0; }

/// "7.2 MB over a wire that brings 11.8 MB/s".
std::string wire_text(const Point& point) {
  return fmt::format("{} from each host over a wire that brings {}/s", bytes_text(point.wire_bytes),
                     bytes_text(wire_rate(point)));
}

std::string remedy_text(const Point& fewer, const Point& more, const Workload& workload) {
  if (workload.scaling == Scaling::Unknown) return "what would change that depends on the work of a step";
  const Remedies remedies = remedies_of(fewer, more, workload);
  std::vector<std::string> ways;
  if (remedies.batch_factor > 1) {
    ways.push_back(fmt::format("from a batch of {:.0f} {} (now {:.0f})",
                               std::ceil(workload.batch * remedies.batch_factor),
                               workload.scaling == Scaling::PerStep ? "in all" : "per rank", workload.batch));
  }
  if (remedies.link_factor > 1 && wire_rate(more) > 0) {
    ways.push_back(fmt::format("on a link of {}", link_text(wire_rate(more) * 8 * remedies.link_factor)));
  }
  if (remedies.format) ways.push_back(fmt::format("with {} on the wire", to_string(*remedies.format)));
  if (ways.empty()) return "neither a larger batch nor a faster link would change that";
  std::string text = fmt::format("{} pay off ", plural(more.hosts, "host"));
  for (std::size_t i = 0; i < ways.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == ways.size() ? ", or " : ", ") + ways[i];
  }
  return text;
}

/// Bytes on the wire for a byte of float32, in the present format.
double ratio_now(const Point& point, const Workload& workload) {
  const double measured = launch::present_ratio(point);
  return measured > 0 ? measured : launch::ratio_of(workload.wire_format);
}

/// "a larger batch, a faster link or int8 on the wire": the changes that make the part of a step on the wire smaller.
std::string less_wire_text(const Point& point, const Workload& workload) {
  return ratio_now(point, workload) < 0.4 ? "a larger batch or a faster link"
                                          : "a larger batch, a faster link or int8 on the wire";
}

/// Reason why the parts of a step's time are unknown.
std::string unseen_text(const Point& point) {
  return point.steps > 0
             ? "where the time goes is not known, since the program waits where it cannot be seen; a row with one "
               "process (--processes 1,...) gives an estimate"
             : "where the time goes is not known, since its steps are not Cohort's";
}

enum class Part { Compute, Waiting, Local, Wire };

/// The largest part of a step besides computing.
Part largest_loss(const Shares& shares) {
  if (shares.wire >= shares.waiting && shares.wire >= shares.local) return Part::Wire;
  return shares.waiting >= shares.local ? Part::Waiting : Part::Local;
}

std::string waiting_text(const Point& point) {
  if (point.slowest_compute > 1.1 * point.median_compute && point.slowest_rank >= 0) {
    return fmt::format(
        "ranks wait {} of each step of {} for slower ones: rank {} (host {}) computes for {}, most for {}",
        seconds_text(point.step.waiting), seconds_text(point.step.step()), point.slowest_rank, point.slowest_host,
        seconds_text(point.slowest_compute), seconds_text(point.median_compute));
  }
  return fmt::format(
      "ranks wait {} of each step of {} for each other, and now one and now another is late: they share "
      "cores, or their steps differ",
      seconds_text(point.step.waiting), seconds_text(point.step.step()));
}

/// Computing time of a step of `more` if its processes did not hinder each other.
double fair_compute(const Point& fewer, const Point& more, const Workload& workload) {
  const double share = static_cast<double>(fewer.processes) / more.processes;
  return fewer.step.compute * (workload.scaling == Scaling::PerStep ? share : 1);
}

/// Text for whole runs that are mostly not steps, so that waits within steps do not explain slow runs. Else empty.
std::string start_text(const Point& point, const Workload& workload) {
  const double steps = point.steps * point.step.step();
  if (workload.unit != "runs" || point.run <= 0 || point.steps <= 0 || steps >= point.run / 2) return {};
  return fmt::format(
      "of a run of {} its steps are {}, and the rest is its start and end: longer runs, or --batch, would "
      "have the steps compared",
      seconds_text(point.run), seconds_text(steps));
}

/// Reason why a step takes longer on one host with more processes.
std::string one_host_text(const Point& fewer, const Point& more, const Workload& workload) {
  if (std::string start = start_text(more, workload); !start.empty()) return start;
  if (more.split == Split::Unknown) return unseen_text(more);
  const double fair = fair_compute(fewer, more, workload);
  if (more.step.compute > 1.2 * fair && more.step.compute - fair >= more.step.waiting + more.step.local) {
    return fmt::format("computing a step takes {} instead of {}: {} share {}, or its memory",
                       seconds_text(more.step.compute), seconds_text(fair),
                       more.processes == 1 ? "1 process" : fmt::format("{} processes", more.processes),
                       plural(workload.cores, "core"));
  }
  if (largest_loss(more.step) == Part::Waiting) return waiting_text(more);
  return fmt::format("of a step of {}, {} are computing and {} reductions on the host", seconds_text(more.step.step()),
                     seconds_text(more.step.compute), seconds_text(more.step.local));
}

}  // namespace

Remedies remedies_of(const Point& fewer, const Point& more, const Workload& workload) {
  Remedies remedies;
  if (workload.scaling == Scaling::Unknown) return remedies;
  // Samples per second are processes * batch / step, or batch / step if all ranks share a batch. x is the batch divided
  // by the present batch.
  const double ratio = workload.scaling == Scaling::PerRank ? static_cast<double>(more.processes) / fewer.processes : 1;
  const double rest_fewer = fewer.step.step() - fewer.step.compute;
  const double rest_more = more.step.step() - more.step.compute;
  const double gain = ratio * fewer.step.compute - more.step.compute;  // gain per unit of x
  if (gain > kChance * more.step.compute)
    remedies.batch_factor = std::max(1.0, (rest_more - ratio * rest_fewer) / gain);
  const double allowed = ratio * fewer.step.step() - (more.step.step() - more.step.wire);  // for the wire
  if (allowed > kChance * ratio * fewer.step.step() && more.step.wire > 0) {
    remedies.link_factor = std::max(1.0, more.step.wire / allowed);
    for (const launch::FormatCosts& one : launch::usual_formats()) {
      const double bytes = one.ratio / ratio_now(more, workload);
      if (!remedies.format && bytes < 0.9 && more.step.wire * bytes < allowed) remedies.format = one.format;
    }
  }
  return remedies;
}

namespace {

std::string comparison_of(const std::vector<Point>& points, const Workload& workload) {
  int most_hosts = 1;
  for (const Point& point : points) most_hosts = std::max(most_hosts, point.hosts);
  const Point* more = best_on(points, most_hosts);
  const Point* one = nullptr;
  for (int hosts = 1; hosts < most_hosts && one == nullptr; ++hosts) one = best_on(points, hosts);
  // The gain of more hosts shows between points with equal numbers per host. Takes the fastest on fewer hosts.
  const Point* alike = nullptr;
  for (const Point& with : points) {
    if (one == nullptr || with.hosts != most_hosts) continue;
    for (const Point& without : points) {
      if (without.hosts != one->hosts || without.processes * with.hosts != with.processes * without.hosts) continue;
      if (alike != nullptr && alike->rate >= without.rate) continue;
      alike = &without;
      more = &with;
    }
  }
  if (alike != nullptr) one = alike;

  if (one == nullptr) {  // all points have the same number of hosts
    const Point& fewest = *std::min_element(points.begin(), points.end(),
                                            [](const Point& a, const Point& b) { return a.processes < b.processes; });
    const std::string where = plural(most_hosts, "host");
    if (more->processes == fewest.processes) {
      if (points.size() == 1) {
        return fmt::format(
            "Only {} on {} was measured: other numbers of processes and hosts are there to compare with.",
            more->processes == 1 ? "1 process" : fmt::format("{} processes", more->processes), where);
      }
      const Point& last = *std::max_element(points.begin(), points.end(),
                                            [](const Point& a, const Point& b) { return a.processes < b.processes; });
      return fmt::format("On {} more processes do not help ({} train {:.2f} times as fast as {}): {}.", where,
                         last.processes, last.rate / more->rate, more->processes,
                         one_host_text(fewest, last, workload));
    }
    return fmt::format("On {} {} processes train {:.2f} times as fast as {}: {}.", where, more->processes,
                       more->rate / fewest.rate, fewest.processes, one_host_text(fewest, *more, workload));
  }

  const double speed = more->rate / one->rate;
  const std::string compared =
      fmt::format("{} with {} train {:.2f} times as fast as {} with {}", plural(more->hosts, "host"),
                  more->processes == 1 ? "1 process" : fmt::format("{} processes", more->processes), speed,
                  one->hosts == 1 ? "one" : fmt::format("{}", one->hosts), one->processes);
  if (const std::string start = start_text(*more, workload); !start.empty())
    return fmt::format("{}: {}.", compared, start);
  if (more->split == Split::Unknown || one->split == Split::Unknown) {
    return fmt::format("{}: {}.", compared, unseen_text(more->split == Split::Unknown ? *more : *one));
  }
  const Shares& step = more->step;
  const Part loss = largest_loss(step);
  const double lost = step.step() - step.compute;
  if (speed >= kFaster) {
    const double ideal = static_cast<double>(more->processes) / one->processes;
    std::string text = fmt::format("{}: {} of each step of {} are computing", compared, seconds_text(step.compute),
                                   seconds_text(step.step()));
    if (lost < 0.05 * step.step()) return text + ", and next to nothing is lost between hosts.";
    if (loss == Part::Wire) {
      text += fmt::format(", {} go to {}", seconds_text(step.wire), wire_text(*more));
      if (ideal < kFaster * speed || workload.scaling == Scaling::Unknown) return text + ".";
      return fmt::format("{}; {} would bring it nearer to {:.2f}.", text, less_wire_text(*more, workload), ideal);
    }
    if (loss == Part::Waiting) return fmt::format("{}; {}.", text, waiting_text(*more));
    return fmt::format("{}, {} go to reductions within the hosts.", text, seconds_text(step.local));
  }
  const std::string start = fmt::format("{}: ", speed < 1 / kFaster ? compared + ", so they are slower" : compared);
  if (loss == Part::Wire && step.wire > 0.1 * step.step()) {
    return fmt::format("{}each step needs {}, and waits {} of {} for it, against {} of computing; {}.", start,
                       wire_text(*more), seconds_text(step.wire), seconds_text(step.step()), seconds_text(step.compute),
                       remedy_text(*one, *more, workload));
  }
  if (loss == Part::Waiting && step.waiting > 0.1 * step.step()) {
    return fmt::format(
        "{}{}; {}.", start, waiting_text(*more),
        more->slowest_compute > 1.1 * more->median_compute && more->processes <= more->hosts * workload.cores
            ? "give that rank less to do, or its host fewer processes"
            : "fewer processes on each host would help");
  }
  const double fair = fair_compute(*one, *more, workload);
  if (more->step.compute > 1.2 * fair) {
    return fmt::format(
        "{}computing a step takes {} instead of {}: the processes of all hosts share the same cores, or "
        "the other hosts are slower.",
        start, seconds_text(step.compute), seconds_text(fair));
  }
  if (more->processes <= one->processes) {
    return fmt::format(
        "{}they are not more processes, and nothing else was in the way; as many on each host would help.", start);
  }
  return fmt::format("{}of each step of {}, {} go to reductions within the hosts, against {} of computing; {}.", start,
                     seconds_text(step.step()), seconds_text(step.local), seconds_text(step.compute),
                     remedy_text(*one, *more, workload));
}

}  // namespace

std::string verdict_of(const std::vector<Point>& points, const Workload& workload) {
  const std::string text = comparison_of(points, workload);
  if (points.size() == 1 || workload.unit != "runs") return text;
  return text +
         " Whole runs are compared, their start included; --batch or --global-batch has samples of steps compared.";
}

namespace {

constexpr int kBar = 60;  // columns of the longest bar

double speed_up(const Point& point, const std::vector<Point>& points) {
  return points.front().rate > 0 ? point.rate / points.front().rate : 0;
}

std::string rate_text(double rate) { return rate < 10 ? fmt::format("{:.3g}", rate) : fmt::format("{:.1f}", rate); }

/// Parts of a step, in per cent.
std::array<double, 4> percentages(const Point& point) {
  const double step = std::max(point.step.step(), 1e-12);
  return {100 * point.step.compute / step, 100 * point.step.waiting / step, 100 * point.step.local / step,
          100 * point.step.wire / step};
}

/// A part of a step, in the order of `percentages`.
struct PartOfStep {
  const char *name, *plain, *block, *colour;
};
constexpr PartOfStep kParts[] = {{"compute", "#", "█", "34"},
                                 {"waiting for slower ranks", "~", "░", "33"},
                                 {"reduction on the host", "+", "▒", "32"},
                                 {"wire", "=", "▓", "35"}};

std::string drawn(const PartOfStep& part, std::size_t length, const sys::TextStyle& style) {
  std::string out;
  for (std::size_t i = 0; i < length; ++i) out += style.unicode ? part.block : part.plain;
  return style.colour && length > 0 ? fmt::format("\033[{}m{}\033[0m", part.colour, out) : out;
}

/// A column for each point's value, divided like its step; an undivided one counts as compute.
track::Panel columns_of(const std::vector<Point>& points, const std::string& title,
                        const std::function<double(const Point&)>& value) {
  track::Panel panel{.title = title, .percent = false, .curves = {}, .note = {}};
  for (std::size_t part = 0; part < std::size(kParts); ++part) {
    panel.parts.push_back({kParts[part].name, track::colour_of(part)});
  }
  for (const Point& point : points) {
    track::Column column{.label = fmt::format("{} x {}", point.hosts, point.processes), .text = {}, .parts = {}};
    if (point.split == Split::Unknown) {
      column.parts = {value(point)};
    } else {
      for (const double share : percentages(point)) column.parts.push_back(value(point) * share / 100);
    }
    panel.columns.push_back(std::move(column));
  }
  return panel;
}

}  // namespace

std::string table_of(const std::vector<Point>& points, const Workload& workload) {
  std::string out = fmt::format("{:>5} {:>9} {:>12} {:>9} {:>8} {:>10} {:>10}  {:>7} {:>7} {:>7} {:>7}  {}\n", "hosts",
                                "processes", workload.unit + "/s", "run", "speed-up", "efficiency", "step", "compute",
                                "waiting", "local", "wire", "least..most " + workload.unit + "/s");
  bool estimated = false;
  for (const Point& point : points) {
    const double faster = speed_up(point, points);
    const double fair = static_cast<double>(point.processes) / points.front().processes;
    out += fmt::format("{:>5} {:>9} {:>12} {:>9} {:>8.2f} {:>8.0f} % {:>10}  ", point.hosts, point.processes,
                       rate_text(point.rate), seconds_text(point.run), faster, 100 * faster / fair,
                       seconds_text(point.steps > 0 ? point.seconds / point.steps : point.seconds));
    if (point.split == Split::Unknown) {
      out += fmt::format("{:>7} {:>7} {:>7} {:>7}", "-", "-", "-", "-");
    } else {
      const auto share = percentages(point);
      out += fmt::format("{:>5.0f} % {:>5.0f} % {:>5.0f} % {:>5.0f} %", share[0], share[1], share[2], share[3]);
      estimated = estimated || point.split == Split::Estimated;
    }
    const auto [least, most] = std::minmax_element(point.rates.begin(), point.rates.end());
    if (least != point.rates.end()) out += fmt::format("  {}..{}", rate_text(*least), rate_text(*most));
    if (point.split == Split::Estimated) out += " *";
    out += '\n';
  }
  if (estimated) {
    out +=
        "* none of the program's waits were seen (it waits in futures of torch): what a step takes longer than alone "
        "is "
        "taken for waiting and wire\n";
  }
  return out;
}

std::string bars_of(const std::vector<Point>& points, const sys::TextStyle& style) {
  double most = 1e-12;
  for (const Point& point : points) most = std::max(most, speed_up(point, points));
  std::string out = "speed-up, divided as a step is:";
  for (const PartOfStep& part : kParts) out += fmt::format("  {} {}", drawn(part, 1, style), part.name);
  out += '\n';
  for (const Point& point : points) {
    const double faster = speed_up(point, points);
    const auto length = static_cast<std::size_t>(std::lround(kBar * faster / most));
    std::string bar;
    std::size_t at = 0;
    double end = 0;
    for (std::size_t part = 0; part < std::size(kParts); ++part) {
      end += point.split == Split::Unknown ? 100 : percentages(point)[part];
      const auto next =
          std::min(length, static_cast<std::size_t>(std::lround(static_cast<double>(length) * end / 100)));
      if (next > at) bar += drawn(kParts[part], next - at, style);
      at = std::max(at, next);
    }
    out += fmt::format("{:>3} x {:<4} |{}{:<{}}| {:.2f}\n", point.hosts, point.processes, bar, "", kBar - at, faster);
  }
  return out;
}

std::string svg_of(const std::vector<Point>& points, const Workload& workload, const std::string& subtitle) {
  track::Figure figure;
  figure.title = "cohort bench training";
  figure.subtitle = subtitle;
  figure.x_label = "hosts x processes";
  figure.x_scale = track::Scale::Log;

  track::Panel rates{.title = workload.unit + " per second",
                     .percent = false,
                     .curves = {},
                     .note = "over processes",
                     .from_zero = true};
  std::set<int> hosts;
  for (const Point& point : points) hosts.insert(point.hosts);
  for (const int number : hosts) {
    track::Curve curve;
    curve.name = fmt::format("{} host{}", number, number == 1 ? "" : "s");
    curve.colour = track::colour_of(rates.curves.size());
    curve.markers = true;
    for (const Point& point : points) {
      if (point.hosts == number) curve.points.push_back({static_cast<double>(point.processes), point.rate});
    }
    rates.curves.push_back(std::move(curve));
  }
  figure.panels.push_back(std::move(rates));

  const bool divided =
      std::any_of(points.begin(), points.end(), [](const Point& point) { return point.split != Split::Unknown; });
  track::Panel gains = columns_of(points, "speed-up", [&](const Point& point) { return speed_up(point, points); });
  gains.note = "lines: what as many processes could gain";
  track::Panel steps = columns_of(points, "a step, in milliseconds", [](const Point& point) {
    return 1e3 * (point.steps > 0 ? point.seconds / point.steps : point.seconds);
  });
  for (std::size_t i = 0; i < points.size(); ++i) {
    gains.columns[i].text = fmt::format("{:.2f}", speed_up(points[i], points));
    gains.columns[i].aim = static_cast<double>(points[i].processes) / points.front().processes;
    steps.columns[i].text = seconds_text(points[i].steps > 0 ? points[i].seconds / points[i].steps : points[i].seconds);
  }
  if (!divided) gains.parts = {{"not divided", track::colour_of(0)}};
  figure.panels.push_back(std::move(gains));
  if (divided) figure.panels.push_back(std::move(steps));
  return track::render_svg(figure);
}

}  // namespace cohort::app::training
