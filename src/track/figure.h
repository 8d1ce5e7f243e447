// A picture: panels under each other, of curves over one horizontal axis or of columns, drawn as SVG. Values and pure
// functions; any thread may use them.
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
  std::string name;           ///< for the legend; empty: it has no place there
  std::string colour;         ///< "#4c78a8"
  std::string latest;         ///< its last value as the legend shows it
  std::vector<Point> points;  ///< what is not finite is left out, and said so
  bool markers = false;       ///< a dot at each point
  bool smooth = false;        ///< many noisy points: drawn pale, with a moving average over them
};

/// A bar from the panel's lower end, in parts on top of each other.
struct Column {
  std::string label;          ///< below it
  std::string text;           ///< above it
  std::vector<double> parts;  ///< heights, of Panel::parts in their order; what is not above 0 is left out
  double aim = 0;             ///< a line at this height: what it might have been; 0: none
};

struct Part {
  std::string name;  ///< for the legend
  std::string colour;
};

struct Panel {
  std::string title;
  bool percent = false;  ///< y is a share of 1, labelled in per cent
  std::vector<Curve> curves;
  std::string note;        ///< e.g. "best 98.9 % at epoch 7"
  bool from_zero = false;  ///< y begins at 0, as columns' always does
  /// Instead of curves: side by side, in their order.
  std::vector<Column> columns = {};
  std::vector<Part> parts = {};
};

/// Something that happened: a line through all panels.
struct Mark {
  double x = 0;
  std::string colour = "#bbbbbb";
  std::string text = {};  ///< shown by viewers when the pointer is on it
};

struct Figure {
  std::string title, subtitle, x_label;
  std::vector<Mark> marks = {};
  std::vector<Part> legend = {};  ///< below the subtitle, of curves that all panels have
  std::vector<Panel> panels;
  Scale x_scale = Scale::Linear;  ///< Log: powers of two, labelled 64, 1K, 2M; what is not above 0 is left out
};

/// The colour of the nth of several curves, columns' parts or runs; they begin again after the eighth.
const char* colour_of(std::size_t number) noexcept;

/// Self-contained SVG 1.1 without scripts, fonts or links. Any text and any number may come in.
std::string render_svg(const Figure& figure);

/// For text between tags and in attributes; control characters, which XML cannot hold, become U+FFFD.
std::string escape_xml(std::string_view text);

}  // namespace cohort::track
