#include "training/report.h"

#include "track/figure.h"
#include "training/verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <set>

namespace cohort::app::training {
namespace {

constexpr int kBar = 60;  // columns of the longest bar

double speed_up(const Point& point, const std::vector<Point>& points) {
  return points.front().rate > 0 ? point.rate / points.front().rate : 0;
}

/// Of a step, in per cent.
std::array<double, 4> percentages(const Point& point) {
  const double step = std::max(point.step.step(), 1e-12);
  return {100 * point.step.compute / step, 100 * point.step.waiting / step, 100 * point.step.local / step,
          100 * point.step.wire / step};
}

}  // namespace

std::string table_of(const std::vector<Point>& points, const Workload& workload) {
  std::string out = fmt::format("{:>5} {:>9} {:>12} {:>8} {:>10} {:>10}  {:>7} {:>7} {:>7} {:>7}  {}\n", "hosts",
                                "processes", workload.unit + "/s", "speed-up", "efficiency", "step", "compute",
                                "waiting", "local", "wire", "least..most " + workload.unit + "/s");
  bool estimated = false;
  for (const Point& point : points) {
    const double faster = speed_up(point, points);
    const double fair = static_cast<double>(point.processes) / points.front().processes;
    out += fmt::format("{:>5} {:>9} {:>12.1f} {:>8.2f} {:>8.0f} % {:>10}  ", point.hosts, point.processes, point.rate,
                       faster, 100 * faster / fair,
                       seconds_text(point.steps > 0 ? point.seconds / point.steps : point.seconds));
    if (point.split == Split::Unknown) {
      out += fmt::format("{:>7} {:>7} {:>7} {:>7}", "-", "-", "-", "-");
    } else {
      const auto share = percentages(point);
      out += fmt::format("{:>5.0f} % {:>5.0f} % {:>5.0f} % {:>5.0f} %", share[0], share[1], share[2], share[3]);
      estimated = estimated || point.split == Split::Estimated;
    }
    const auto [least, most] = std::minmax_element(point.rates.begin(), point.rates.end());
    if (least != point.rates.end()) out += fmt::format("  {:.1f}..{:.1f}", *least, *most);
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

std::string bars_of(const std::vector<Point>& points) {
  double most = 1e-12;
  for (const Point& point : points) most = std::max(most, speed_up(point, points));
  std::string out =
      "speed-up, divided as a step is:  # compute  ~ waiting for slower ranks  + reduction on the host  = wire\n";
  for (const Point& point : points) {
    const double faster = speed_up(point, points);
    const auto length = static_cast<std::size_t>(std::lround(kBar * faster / most));
    std::string bar(length, '#');
    if (point.split != Split::Unknown) {
      const auto share = percentages(point);
      double end = share[0];
      std::size_t at = static_cast<std::size_t>(std::lround(static_cast<double>(length) * end / 100));
      for (std::size_t part = 1; part < share.size(); ++part) {
        end += share[part];
        const auto next =
            std::min(length, static_cast<std::size_t>(std::lround(static_cast<double>(length) * end / 100)));
        for (; at < next; ++at) bar[at] = "#~+="[part];
      }
    }
    out += fmt::format("{:>3} x {:<4} |{:<{}}| {:.2f}\n", point.hosts, point.processes, bar, kBar, faster);
  }
  return out;
}

std::string svg_of(const std::vector<Point>& points, const Workload& workload, const std::string& subtitle) {
  track::Figure figure;
  figure.title = "cohort bench training";
  figure.subtitle = subtitle;
  figure.x_label = "processes";
  figure.x_scale = track::Scale::Log;
  std::set<int> hosts;
  for (const Point& point : points) hosts.insert(point.hosts);
  const auto add_panel = [&](const std::string& title, bool percent, auto value) {
    track::Panel panel;
    panel.title = title;
    panel.percent = percent;
    for (const int number : hosts) {
      track::Curve curve;
      curve.name = fmt::format("{} host{}", number, number == 1 ? "" : "s");
      curve.colour = track::colour_of(panel.curves.size());
      curve.markers = true;
      for (const Point& point : points) {
        if (point.hosts == number) curve.points.push_back({static_cast<double>(point.processes), value(point)});
      }
      if (!curve.points.empty()) curve.latest = fmt::format("{:.2f}", curve.points.back().y);
      panel.curves.push_back(std::move(curve));
    }
    figure.panels.push_back(std::move(panel));
  };
  add_panel(workload.unit + " per second", false, [](const Point& point) { return point.rate; });
  add_panel("speed-up", false, [&](const Point& point) { return speed_up(point, points); });
  const char* const parts[] = {"share of a step: compute", "share of a step: waiting for slower ranks",
                               "share of a step: reduction on the host", "share of a step: wire"};
  if (std::all_of(points.begin(), points.end(), [](const Point& point) { return point.split != Split::Unknown; })) {
    for (std::size_t part = 0; part < std::size(parts); ++part) {
      add_panel(parts[part], true, [part](const Point& point) { return percentages(point)[part] / 100; });
    }
  }
  return track::render_svg(figure);
}

}  // namespace cohort::app::training
