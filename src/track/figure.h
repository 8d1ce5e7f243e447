// A picture of curves: panels under each other over one horizontal axis, drawn as SVG. Values and pure functions; any
// thread may use them.
#pragma once

#include "track/axis.h"

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::track {

struct Point {
  double x = 0, y = 0;
};

struct Curve {
  std::string name;           ///< for the legend
  std::string colour;         ///< "#4c78a8"
  std::string latest;         ///< its last value as the legend shows it
  std::vector<Point> points;  ///< what is not finite is left out, and said so
  bool markers = false;       ///< a dot at each point
  bool smooth = false;        ///< many noisy points: drawn pale, with a moving average over them
};

struct Panel {
  std::string title;
  bool percent = false;  ///< y is a share of 1, labelled in per cent
  std::vector<Curve> curves;
  std::string note;  ///< e.g. "best 98.9 % at epoch 7"
};

struct Figure {
  std::string title, subtitle, x_label;
  std::vector<double> marks = {};  ///< values of x where something happened: a line through all panels
  std::vector<Panel> panels;
  Scale x_scale = Scale::Linear;  ///< Log: powers of two, labelled 64, 1K, 2M; what is not above 0 is left out
};

/// Of the curve with this number in its panel, where colours mean nothing else; from kColours on they begin again.
inline constexpr std::size_t kColours = 8;
const char* colour_of(std::size_t curve) noexcept;

/// Self-contained SVG 1.1 without scripts, fonts or links. Any text and any number may come in.
std::string render_svg(const Figure& figure);

/// For text between tags and in attributes; control characters, which XML cannot hold, become U+FFFD.
std::string escape_xml(std::string_view text);

}  // namespace cohort::track
