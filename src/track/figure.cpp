#include "track/figure.h"

#include "track/panel.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace cohort::track {
namespace {

constexpr double kTop = 76, kBottom = 52, kPanelGap = 74, kLegendLine = 20;

}  // namespace

const char* colour_of(std::size_t number) noexcept {
  constexpr const char* kColours[] = {"#4c78a8", "#e4763a", "#54a24b", "#b279a2",
                                      "#d6a000", "#439894", "#9d755d", "#d67195"};
  return kColours[number % std::size(kColours)];
}

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
  // What went wrong last is behind the last value that can be drawn.
  for (const Mark& mark : figure.marks) {
    if (std::abs(mark.x) < 1e300) x_range.add(mark.x);
  }
  if (x_range.empty()) x_range = {0, 1};
  if (figure.x_scale == Scale::Log) {
    if (x_range.low <= 0) x_range = {1, 2};
    return Axis::powers_of_two(x_range.low, x_range.high, 12);
  }
  // Training begins at 0, also where the first value stands at the end of the first epoch.
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
  std::vector<Point> keys;  // where those of the legend begin
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