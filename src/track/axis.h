// Axes of a picture: which range, which ticks, where a value lies. Values; any thread may use them.
// The ticks are Heckbert's "nice numbers" (Graphics Gems, 1990): steps of 1, 2 or 5 times a power of ten.
#pragma once

#include <string>
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

/// "0.25", "1,500", "2e-05": short, with as many decimals as a step of `step` needs.
std::string tick_label(double value, double step);

}  // namespace cohort::track
