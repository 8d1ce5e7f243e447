#include "training/report.h"

#include "track/figure.h"
#include "training/verdict.h"

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

constexpr int kBar = 60;  // columns of the longest bar

double speed_up(const Point& point, const std::vector<Point>& points) {
  return points.front().rate > 0 ? point.rate / points.front().rate : 0;
}

std::string rate_text(double rate) { return rate < 10 ? fmt::format("{:.3g}", rate) : fmt::format("{:.1f}", rate); }

/// Of a step, in per cent.
std::array<double, 4> percentages(const Point& point) {
  const double step = std::max(point.step.step(), 1e-12);
  return {100 * point.step.compute / step, 100 * point.step.waiting / step, 100 * point.step.local / step,
          100 * point.step.wire / step};
}

/// Of a step, in the order of `percentages`.
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

/// A value for each point, divided as a step is; undivided ones are all compute.
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
