#include "track/panel.h"

#include <fmt/format.h>

#include <algorithm>

namespace cohort::track {
namespace {

constexpr std::size_t kMostMarkers = 60;

/// At most about `most` points that look the same: lowest and highest of each part, in the order of x.
std::vector<Point> thinned(const std::vector<Point>& points, std::size_t most) {
  if (points.size() <= most) return points;
  std::vector<Point> out;
  const std::size_t parts = most / 2;
  for (std::size_t part = 0; part < parts; ++part) {
    const auto begin = points.begin() + static_cast<std::ptrdiff_t>(part * points.size() / parts);
    const auto end = points.begin() + static_cast<std::ptrdiff_t>((part + 1) * points.size() / parts);
    const auto [low, high] = std::minmax_element(begin, end, [](const Point& a, const Point& b) { return a.y < b.y; });
    out.push_back(*std::min(low, high));
    if (low != high) out.push_back(*std::max(low, high));
  }
  return out;
}

/// Centred mean over a twentieth of the points, at most 400 of them.
std::vector<Point> smoothed(const std::vector<Point>& points) {
  std::vector<double> sums(points.size() + 1, 0.0);
  for (std::size_t i = 0; i < points.size(); ++i) sums[i + 1] = sums[i] + points[i].y;
  const std::size_t half = std::max<std::size_t>(points.size() / 40, 1);
  const std::size_t stride = std::max<std::size_t>(points.size() / 400, 1);
  std::vector<Point> out;
  for (std::size_t i = 0;; i = std::min(i + stride, points.size() - 1)) {
    const std::size_t reach = std::min({half, i, points.size() - 1 - i});
    const double sum = sums[i + reach + 1] - sums[i - reach];
    out.push_back({points[i].x, sum / static_cast<double>(2 * reach + 1)});
    if (i == points.size() - 1) return out;
  }
}

struct PanelFrame {
  const Axis& x;
  const Axis& y;
  double top;
  double px(double value) const { return kLeft + x.position(value) * kPlotWidth; }
  double py(double value) const { return top + (1 - y.position(value)) * kPanelHeight; }
};

void draw_line(Out out, const PanelFrame& frame, const std::vector<Point>& points, std::string_view colour,
               double width, double opacity) {
  if (points.size() < 2) return;
  fmt::format_to(
      out,
      R"(<polyline fill="none" stroke="{}" stroke-width="{}" stroke-opacity="{}" stroke-linejoin="round" points=")",
      colour, width, opacity);
  for (const Point& point : points) fmt::format_to(out, "{:.1f},{:.1f} ", frame.px(point.x), frame.py(point.y));
  fmt::format_to(out, "\"/>\n");
}

void draw_curve(Out out, const PanelFrame& frame, const Curve& curve, const std::vector<Point>& points) {
  const std::string colour = escape_xml(curve.colour);
  if (curve.smooth && points.size() > 40) {
    draw_line(out, frame, thinned(points, 1600), colour, 1, 0.35);
    draw_line(out, frame, smoothed(points), colour, 2, 1);
  } else {
    draw_line(out, frame, thinned(points, 1600), colour, 2, 1);
  }
  const bool few = points.size() == 1 || (curve.markers && points.size() <= kMostMarkers);
  if (!few) return;
  for (const Point& point : points) {
    fmt::format_to(out, "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.2\" fill=\"{}\" stroke=\"#ffffff\"/>\n",
                   frame.px(point.x), frame.py(point.y), colour);
  }
}

Axis y_axis(const Panel& panel, const Range& range) {
  if (panel.percent) return Axis::around(range.low, std::max(range.high, range.low), Scale::Linear, 5);
  if (panel.from_zero) return Axis::around(std::min(range.low, 0.0), range.high, Scale::Linear, 5);
  const bool wide = panel.columns.empty() && range.low > 0 && range.high > 20 * range.low;
  if (wide) return Axis::around(range.low, range.high, Scale::Log, 5);
  // Zero belongs to the picture where the data are not far from it.
  const double low = range.low > 0 && range.low < 0.5 * range.high ? 0 : range.low;
  return Axis::around(low, range.high, Scale::Linear, 5);
}

void draw_y_axis(Out out, const Panel& panel, const PanelFrame& frame) {
  const Axis& y = frame.y;
  for (const Tick& tick : y.ticks()) {
    const double at = frame.py(tick.value);
    fmt::format_to(out, "<line class=\"grid\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n", kLeft, at,
                   kLeft + kPlotWidth, at);
    if (tick.label.empty()) continue;
    const std::string label =
        panel.percent ? tick_label(tick.value * 100, (y.high() - y.low()) * 100 / 5 / 2) + " %" : tick.label;
    draw_text(out, kLeft - 9, at + 4, R"(class="tick" text-anchor="end")", label);
  }
}

void draw_axes(Out out, double top) {
  fmt::format_to(out, "<path class=\"axis\" d=\"M{:.1f} {:.1f}V{:.1f}H{:.1f}\"/>\n", kLeft, top, top + kPanelHeight,
                 kLeft + kPlotWidth);
}

/// Title, and at the right end of its line the legend.
void draw_head(Out out, const Panel& panel, double top) {
  draw_text(out, kLeft, top - 14, R"(class="panel")", panel.title);
  std::vector<Part> keys = panel.columns.empty() ? std::vector<Part>() : panel.parts;
  for (const Curve& curve : panel.curves) {
    if (curve.name.empty()) continue;
    keys.push_back({curve.latest.empty() ? curve.name : curve.name + "  " + curve.latest, curve.colour});
  }
  double right = kLeft + kPlotWidth;
  for (std::size_t i = keys.size(); i > 0; --i) {
    right -= 24 + text_width(keys[i - 1].name);
    draw_key(out, right, top - 14, keys[i - 1].colour, keys[i - 1].name);
    right -= 20;
  }
}

void draw_curves(Out out, const Panel& panel, const Axis& x, const std::vector<Mark>& marks, double top) {
  std::vector<std::vector<Point>> finite_points;
  Range range;
  std::size_t left_out = 0;
  for (const Curve& curve : panel.curves) {
    std::vector<Point>& kept = finite_points.emplace_back();
    std::copy_if(curve.points.begin(), curve.points.end(), std::back_inserter(kept), finite);
    left_out += curve.points.size() - kept.size();
    for (const Point& point : kept) range.add(point.y);
  }
  const bool empty = range.empty();
  if (empty) range = {0, 1};
  const Axis y = y_axis(panel, range);
  const PanelFrame frame{x, y, top};
  draw_y_axis(out, panel, frame);
  const double bottom = top + kPanelHeight;
  for (const Tick& tick : x.ticks()) {
    const double at = frame.px(tick.value);
    fmt::format_to(out, "<line class=\"axis\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n", at, bottom,
                   at, bottom + 5);
    draw_text(out, at, bottom + 19, R"(class="tick" text-anchor="middle")", tick.label);
  }
  draw_axes(out, top);
  for (const Mark& mark : marks) {
    if (!(mark.x >= x.low() && mark.x <= x.high())) continue;
    fmt::format_to(
        out,
        "<line class=\"mark\" x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{0:.1f}\" y2=\"{2:.1f}\" stroke=\"{3}\">{4}</line>\n",
        frame.px(mark.x), top, bottom, escape_xml(mark.colour),
        mark.text.empty() ? "" : fmt::format("<title>{}</title>", escape_xml(mark.text)));
  }
  for (std::size_t i = 0; i < panel.curves.size(); ++i) draw_curve(out, frame, panel.curves[i], finite_points[i]);
  if (empty) {
    draw_text(out, kLeft + kPlotWidth / 2, top + kPanelHeight / 2, R"(class="note" text-anchor="middle")",
              "no values yet");
  }
  std::string note = panel.note;
  if (y.is_log()) note += note.empty() ? "log scale" : "; log scale";
  if (left_out > 0) {
    note += fmt::format("{}{} that {} not finite {} left out", note.empty() ? "" : "; ",
                        left_out == 1 ? "a value" : fmt::format("{} values", left_out), left_out == 1 ? "is" : "are",
                        left_out == 1 ? "is" : "are");
  }
  if (!note.empty()) draw_text(out, kLeft + kPlotWidth - 6, bottom - 9, R"(class="note" text-anchor="end")", note);
}

/// Of a column's part: what can be drawn.
double height_of(double part) { return part > 0 && part < 1e300 ? part : 0; }

void draw_columns(Out out, const Panel& panel, double top) {
  Range range{0, 0};
  for (const Column& column : panel.columns) {
    double sum = 0;
    for (const double part : column.parts) sum += height_of(part);
    range.add(height_of(sum));
    range.add(height_of(column.aim));
  }
  if (range.high <= 0) range.high = 1;
  const Axis x = Axis::exactly(0, static_cast<double>(panel.columns.size()), 1);
  const Axis y = y_axis(panel, range);
  const PanelFrame frame{x, y, top};
  draw_y_axis(out, panel, frame);
  const double bottom = top + kPanelHeight;
  const double width = std::min(kPlotWidth / static_cast<double>(panel.columns.size()) * 0.6, 72.0);
  for (std::size_t i = 0; i < panel.columns.size(); ++i) {
    const Column& column = panel.columns[i];
    const double centre = frame.px(static_cast<double>(i) + 0.5);
    double base = 0;
    for (std::size_t part = 0; part < std::min(column.parts.size(), panel.parts.size()); ++part) {
      const double end = base + height_of(column.parts[part]);
      if (end > base && end < 1e300) {
        fmt::format_to(out, "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\"/>\n",
                       centre - width / 2, frame.py(end), width, frame.py(base) - frame.py(end),
                       escape_xml(panel.parts[part].colour));
        base = end;
      }
    }
    if (height_of(column.aim) > 0) {
      fmt::format_to(out, "<line class=\"aim\" x1=\"{0:.1f}\" y1=\"{2:.1f}\" x2=\"{1:.1f}\" y2=\"{2:.1f}\"/>\n",
                     centre - width / 2 - 5, centre + width / 2 + 5, frame.py(column.aim));
    }
    draw_text(out, centre, frame.py(base) - 5, R"(class="over" text-anchor="middle")", column.text);
    draw_text(out, centre, bottom + 19, R"(class="tick" text-anchor="middle")", column.label);
  }
  draw_axes(out, top);
  if (!panel.note.empty()) draw_text(out, kLeft, bottom + 36, R"(class="note")", panel.note);
}

}  // namespace

void draw_text(Out out, double x, double y, std::string_view style, std::string_view text) {
  fmt::format_to(out, "<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, style, escape_xml(text));
}

double text_width(std::string_view text) { return 6.7 * static_cast<double>(text.size()); }

void draw_key(Out out, double left, double y, std::string_view colour, std::string_view name) {
  fmt::format_to(out,
                 "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"3\"/>\n",
                 left, y - 4, left + 17, y - 4, escape_xml(colour));
  draw_text(out, left + 24, y, R"(class="legend")", name);
}

void draw_panel(Out out, const Panel& panel, const Axis& x, const std::vector<Mark>& marks, double top) {
  draw_head(out, panel, top);
  if (panel.columns.empty()) {
    draw_curves(out, panel, x, marks, top);
  } else {
    draw_columns(out, panel, top);
  }
}

}  // namespace cohort::track
