// Axes of a figure: range, ticks, and positions of values. Plain values; any thread may use them.
// The ticks are Heckbert's "nice numbers" (Graphics Gems, 1990): steps of 1, 2 or 5 times a power of ten.
// A figure: panels, one below the other, with curves over a common horizontal axis or with columns, drawn as SVG. Plain
// values and pure functions; any thread may use them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::track {

enum class Scale { Linear, Log };

struct Tick {
  double value = 0;
  std::string label;  ///< empty: the tick has no number
};

class Axis {
 public:
  /// Covers [low, high], widened to whole ticks if `scale` is Linear. Accepts any finite values (> 0 with Log).
  static Axis around(double low, double high, Scale scale, int wanted_ticks);
  /// Covers exactly [low, high], with the nice ticks within it.
  static Axis exactly(double low, double high, int wanted_ticks);

  /// Makes a logarithmic axis over [low, high], both above 0. Its ticks are powers of two, labelled like sizes in
  /// bytes: "64", "1K", "2M".
  static Axis powers_of_two(double low, double high, int wanted_ticks);

  double low() const noexcept { return low_; }
  double high() const noexcept { return high_; }
  bool is_log() const noexcept { return scale_ == Scale::Log; }
  const std::vector<Tick>& ticks() const noexcept { return ticks_; }
  /// Returns the value's position: 0 at `low`, 1 at `high`.
  double position(double value) const noexcept;

 private:
  double low_ = 0, high_ = 1;
  Scale scale_ = Scale::Linear;
  std::vector<Tick> ticks_;
};

struct Point {
  double x = 0, y = 0;
};

struct Curve {
  std::string name;           ///< for the legend; empty: the legend leaves the curve out
  std::string colour;         ///< "#4c78a8"
  std::string latest;         ///< text of the last value in the legend
  std::vector<Point> points;  ///< non-finite points are left out, and the panel says so
  bool markers = false;       ///< a dot at each point
  bool smooth = false;        ///< for many noisy points, which are drawn pale, under a moving average
};

/// A bar from the panel's lower end, in parts on top of each other.
struct Column {
  std::string label;          ///< shown below the column
  std::string text;           ///< shown above the column
  std::vector<double> parts;  ///< heights, in the order of Panel::parts; those not above 0 are left out
  double aim = 0;             ///< height of a line that marks the ideal value; 0: no line
};

struct Part {
  std::string name;  ///< for the legend
  std::string colour;
};

struct Panel {
  std::string title;
  bool percent = false;  ///< y values are shares of 1, labelled in per cent
  std::vector<Curve> curves;
  std::string note;        ///< e.g. "best 98.9 % at epoch 7"
  bool from_zero = false;  ///< the y axis begins at 0, as it always does for columns
  /// Columns, side by side in this order, instead of curves.
  std::vector<Column> columns = {};
  std::vector<Part> parts = {};
};

/// An event, drawn as a line through all panels.
struct Mark {
  double x = 0;
  std::string colour = "#bbbbbb";
  std::string text = {};  ///< tooltip
};

struct Figure {
  std::string title, subtitle, x_label;
  std::vector<Mark> marks = {};
  std::vector<Part> legend = {};  ///< below the subtitle, for curves that all panels have
  std::vector<Panel> panels;
  Scale x_scale = Scale::Linear;  ///< Log: powers of two, labelled 64, 1K, 2M; points not above 0 are left out
};

/// Returns the colour of the nth curve, column part or run; colours repeat after the eighth.
const char* colour_of(std::size_t number) noexcept;

/// Returns self-contained SVG 1.1 without scripts, fonts or links. Accepts any text and any numbers.
std::string render_svg(const Figure& figure);

}  // namespace cohort::track
