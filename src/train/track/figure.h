// Axes of a picture: which range, which ticks, where a value lies. Values; any thread may use them.
// The ticks are Heckbert's "nice numbers" (Graphics Gems, 1990): steps of 1, 2 or 5 times a power of ten.
// A picture: panels under each other, of curves over one horizontal axis or of columns, drawn as SVG. Values and pure
// functions; any thread may use them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::track {

enum class Scale { Linear, Log };

struct Tick {
  double value = 0;
  std::string label;  ///< empty: a line without a number
};

class Axis {
 public:
  /// Covers [low, high], widened to whole ticks where `Scale` is Linear; any two finite values will do (> 0 with Log).
  static Axis around(double low, double high, Scale scale, int wanted_ticks);
  /// Exactly [low, high], with the nice ticks that fall into it.
  static Axis exactly(double low, double high, int wanted_ticks);

  /// Logarithmic over [low, high], both above 0, with powers of two as ticks, labelled as numbers of bytes are: "64",
  /// "1K", "2M".
  static Axis powers_of_two(double low, double high, int wanted_ticks);

  double low() const noexcept { return low_; }
  double high() const noexcept { return high_; }
  bool is_log() const noexcept { return scale_ == Scale::Log; }
  const std::vector<Tick>& ticks() const noexcept { return ticks_; }
  /// 0 at `low`, 1 at `high`.
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

}  // namespace cohort::track
