// Draws the panels of a figure: what figure.cpp and panel.cpp share. Pure; any thread.
#pragma once

#include "track/axis.h"
#include "track/figure.h"

#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::track {

inline constexpr double kWidth = 860;
inline constexpr double kLeft = 74, kRight = 28;
inline constexpr double kPanelHeight = 236;
inline constexpr double kPlotWidth = kWidth - kLeft - kRight;

using Out = std::back_insert_iterator<std::string>;

/// Beyond 1e300 a range could overflow.
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
/// About as wide as a sans-serif of 12 px draws it; there is no font here to ask.
double text_width(std::string_view text);
/// A piece of line and a name.
void draw_key(Out out, double left, double y, std::string_view colour, std::string_view name);

/// Below `top`; its title and legend above that. `x` and `marks` are those of curves.
void draw_panel(Out out, const Panel& panel, const Axis& x, const std::vector<Mark>& marks, double top);

}  // namespace cohort::track
