#include "observe/plot/figure.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::track {

// Draws the panels of a figure.

inline constexpr double kWidth = 860;
inline constexpr double kLeft = 74, kRight = 28;
inline constexpr double kPanelHeight = 236;
inline constexpr double kPlotWidth = kWidth - kLeft - kRight;

using Out = std::back_insert_iterator<std::string>;

/// Returns whether both coordinates are below 1e300; above that, a range could overflow.
inline bool finite(const Point& point) { return std::abs(point.x) < 1e300 && std::abs(point.y) < 1e300; }

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  void add(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};

void draw_text(Out out, double x, double y, std::string_view style, std::string_view text);
/// Estimates the width of text in a 12 px sans-serif font, since no font is available here.
double text_width(std::string_view text);
/// Draws a legend's key: a short line and a name.
void draw_key(Out out, double left, double y, std::string_view colour, std::string_view name);

/// Draws a panel below `top`, with its title and legend above `top`. `x` and `marks` are for curves.
void draw_panel(Out out, const Panel& panel, const Axis& x, const std::vector<Mark>& marks, double top);

namespace {

/// Escapes text for elements and attributes; control characters, which XML cannot hold, become U+FFFD.
std::string escape_xml(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 && c != '\t' && c != '\n') {
          out += "\xEF\xBF\xBD";
        } else {
          out += c;
        }
    }
  }
  return out;
}

double nice_step(double range, int wanted_ticks) {
  const double rough = range / std::max(wanted_ticks, 1);
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double fraction = rough / power;
  const double nice = fraction < 1.5 ? 1 : fraction < 3.5 ? 2 : fraction < 7.5 ? 5 : 10;
  return nice * power;
}

// Widens a range that is empty, or so small that its ticks could not be distinguished.
void widen(double& low, double& high) {
  const double least = std::max({std::abs(low), std::abs(high), 1.0}) * 1e-6;
  if (high - low >= least) return;
  const double half = std::max(std::abs(low) * 0.1, 0.5);
  low -= half;
  high += half;
}

std::string with_commas(const std::string& digits) {
  std::string out = digits;
  const std::size_t first = out.starts_with('-') ? 1 : 0;
  for (std::size_t at = std::min(out.find('.'), out.size()); at > first + 3;) {
    at -= 3;
    out.insert(at, 1, ',');
  }
  return out;
}

/// Returns a short label, "0.25", "1,500", "2e-05", with as many decimals as ticks at a distance of `step` need.
std::string tick_label(double value, double step) {
  if (std::abs(value) < step * 1e-9) return "0";
  const double size = std::abs(value);
  if (size >= 1e7 || size < 1e-4) return fmt::format("{:.3g}", value);
  const int decimals = std::clamp(static_cast<int>(-std::floor(std::log10(step) + 1e-9)), 0, 9);
  return with_commas(fmt::format("{:.{}f}", value, decimals));
}

}  // namespace

Axis Axis::around(double low, double high, Scale scale, int wanted_ticks) {
  Axis axis;
  axis.scale_ = scale;
  if (scale == Scale::Log) {
    const double lowest = std::floor(std::log10(low) + 1e-9);
    const double highest = std::max(std::ceil(std::log10(high) - 1e-9), lowest + 1);
    // With few decades, 2 and 5 get ticks, too; with many decades, not every decade gets a label.
    const bool fine = std::log10(high / low) < 2.5;
    const double every = std::max(1.0, std::ceil((highest - lowest) / 6));
    for (double power = lowest; power <= highest; power += 1) {
      const bool labelled = std::fmod(power - lowest, every) < 0.5;
      const double decade = std::pow(10.0, power);
      axis.ticks_.push_back({decade, labelled ? tick_label(decade, decade) : ""});
      if (!fine || power == highest) continue;
      for (const double part : {2.0, 5.0}) axis.ticks_.push_back({part * decade, tick_label(part * decade, decade)});
    }
    // Whole decades would leave much of the panel empty, so the axis ends a little beyond the data.
    axis.low_ = std::max(std::pow(10.0, lowest), low / 1.3);
    axis.high_ = std::min(std::pow(10.0, highest), high * 1.3);
    if (axis.high_ <= axis.low_ * 1.01) axis.high_ = axis.low_ * 10;
    std::erase_if(axis.ticks_,
                  [&](const Tick& tick) { return tick.value < axis.low_ * 0.999 || tick.value > axis.high_ * 1.001; });
    return axis;
  }
  widen(low, high);
  const double step = nice_step(high - low, wanted_ticks);
  axis = exactly(std::floor(low / step + 1e-9) * step, std::ceil(high / step - 1e-9) * step, wanted_ticks);
  return axis;
}

Axis Axis::exactly(double low, double high, int wanted_ticks) {
  Axis axis;
  widen(low, high);
  axis.low_ = low;
  axis.high_ = high;
  const double step = nice_step(high - low, wanted_ticks);
  const double first = std::ceil(low / step - 1e-9);
  for (double i = first; i * step <= high + step * 1e-9; i += 1)
    axis.ticks_.push_back({i * step, tick_label(i * step, step)});
  return axis;
}

Axis Axis::powers_of_two(double low, double high, int wanted_ticks) {
  Axis axis;
  axis.scale_ = Scale::Log;
  const double lowest = std::ceil(std::log2(low) - 1e-9);
  const double highest = std::floor(std::log2(high) + 1e-9);
  const double every = std::max(1.0, std::ceil((highest - lowest) / std::max(wanted_ticks, 1)));
  for (double power = lowest; power <= highest; power += every) {
    constexpr const char* kUnits[] = {"", "K", "M", "G", "T", "P", "E"};
    const int unit = std::clamp(static_cast<int>(std::floor(power / 10)), 0, 6);
    const double value = std::exp2(power);
    axis.ticks_.push_back({value, fmt::format("{:.4g}{}", value / std::exp2(10.0 * unit), kUnits[unit])});
  }
  const double margin = high > low * 1.01 ? std::pow(high / low, 0.01) : 2;
  axis.low_ = low / margin;
  axis.high_ = high * margin;
  return axis;
}

double Axis::position(double value) const noexcept {
  if (scale_ == Scale::Log) return std::log(value / low_) / std::log(high_ / low_);
  return (value - low_) / (high_ - low_);
}

namespace {

constexpr std::size_t kMostMarkers = 60;

/// Returns at most about `most` points that look the same: the lowest and the highest of each part, in order of x.
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

/// Returns the centred mean over a twentieth of the points, at about 400 positions.
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
  // The axis includes zero if the data are near it.
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

/// Draws the title, and at the right end of the same line the legend.
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

/// Returns the height of a column's part, or 0 if it cannot be drawn.
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

namespace {

constexpr double kTop = 76, kBottom = 52, kPanelGap = 74, kLegendLine = 20;

}  // namespace

const char* colour_of(std::size_t number) noexcept {
  constexpr const char* kColours[] = {"#4c78a8", "#e4763a", "#54a24b", "#b279a2",
                                      "#d6a000", "#439894", "#9d755d", "#d67195"};
  return kColours[number % std::size(kColours)];
}

namespace {

Axis x_axis(const Figure& figure) {
  Range x_range;
  for (const Panel& panel : figure.panels) {
    for (const Curve& curve : panel.curves) {
      for (const Point& point : curve.points) {
        if (finite(point)) x_range.add(point.x);
      }
    }
  }
  // Includes the marks, since the last event may come after the last value that can be drawn.
  for (const Mark& mark : figure.marks) {
    if (std::abs(mark.x) < 1e300) x_range.add(mark.x);
  }
  if (x_range.empty()) x_range = {0, 1};
  if (figure.x_scale == Scale::Log) {
    if (x_range.low <= 0) x_range = {1, 2};
    return Axis::powers_of_two(x_range.low, x_range.high, 12);
  }
  // The axis begins at 0, where training begins, even if the first value is at the end of the first epoch.
  if (x_range.low > 0 && x_range.low <= 0.2 * x_range.high + 1) x_range.low = 0;
  return Axis::exactly(x_range.low, x_range.high, 10);
}

}  // namespace

std::string render_svg(const Figure& shown) {
  Figure figure = shown;
  if (figure.x_scale == Scale::Log) {
    for (Panel& panel : figure.panels) {
      for (Curve& curve : panel.curves) std::erase_if(curve.points, [](const Point& point) { return !(point.x > 0); });
    }
  }
  const Axis x = x_axis(figure);

  double top = kTop + 8, end = kLeft;
  std::vector<Point> keys;  // where the legend's keys begin
  for (const Part& key : figure.legend) {
    const double width = 24 + text_width(key.name);
    if (keys.empty() || end + width > kWidth - kRight) {
      end = kLeft;
      top += kLegendLine;
    }
    keys.push_back({end, top - 36});
    end += width + 20;
  }
  if (!keys.empty()) top += 8;
  const double count = static_cast<double>(figure.panels.size());
  const double height = top - 8 + count * kPanelHeight + std::max(count - 1, 0.0) * kPanelGap + kBottom;
  std::string svg;
  const Out out = std::back_inserter(svg);
  fmt::format_to(out,
                 R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}" role="img">)"
                 "\n<title>{2}</title>\n<desc>{3}</desc>\n",
                 kWidth, height, escape_xml(figure.title), escape_xml(figure.subtitle));
  svg += R"(<style>
text { font-family: "DejaVu Sans", "Helvetica Neue", Arial, sans-serif; fill: #333333; }
.title { font-size: 18px; font-weight: 600; } .subtitle { font-size: 12px; fill: #777777; }
.panel { font-size: 13px; font-weight: 600; } .tick { font-size: 11px; fill: #666666; }
.legend { font-size: 12px; } .note { font-size: 11px; fill: #777777; }
.grid { stroke: #e8e8e8; stroke-width: 1; } .axis { stroke: #999999; stroke-width: 1; fill: none; }
.mark { stroke-width: 1; stroke-dasharray: 4 3; } .aim { stroke: #555555; stroke-width: 1.5; }
.over { font-size: 11px; fill: #333333; }
</style>
)";
  fmt::format_to(out, "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n");
  draw_text(out, kLeft, 28, R"(class="title")", figure.title);
  draw_text(out, kLeft, 46, R"(class="subtitle")", figure.subtitle);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    draw_key(out, keys[i].x, keys[i].y, figure.legend[i].colour, figure.legend[i].name);
  }
  for (const Panel& panel : figure.panels) {
    draw_panel(out, panel, x, figure.marks, top);
    top += kPanelHeight + kPanelGap;
  }
  draw_text(out, kLeft + kPlotWidth / 2, height - 8, R"(class="tick" text-anchor="middle")", figure.x_label);
  svg += "</svg>\n";
  return svg;
}

}  // namespace cohort::track
