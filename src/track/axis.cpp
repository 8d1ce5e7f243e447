#include "track/axis.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace cohort::track {
namespace {

double nice_step(double range, int wanted_ticks) {
  const double rough = range / std::max(wanted_ticks, 1);
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double fraction = rough / power;
  const double nice = fraction < 1.5 ? 1 : fraction < 3.5 ? 2 : fraction < 7.5 ? 5 : 10;
  return nice * power;
}

// A range without extent, or so small that ticks within it could not be told apart.
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

}  // namespace

std::string tick_label(double value, double step) {
  if (std::abs(value) < step * 1e-9) return "0";
  const double size = std::abs(value);
  if (size >= 1e7 || size < 1e-4) return fmt::format("{:.3g}", value);
  const int decimals = std::clamp(static_cast<int>(-std::floor(std::log10(step) + 1e-9)), 0, 9);
  return with_commas(fmt::format("{:.{}f}", value, decimals));
}

Axis Axis::around(double low, double high, Scale scale, int wanted_ticks) {
  Axis axis;
  axis.scale_ = scale;
  if (scale == Scale::Log) {
    const double lowest = std::floor(std::log10(low) + 1e-9);
    const double highest = std::max(std::ceil(std::log10(high) - 1e-9), lowest + 1);
    // Few decades get 2 and 5 as well; many decades, not each.
    const bool fine = std::log10(high / low) < 2.5;
    const double every = std::max(1.0, std::ceil((highest - lowest) / 6));
    for (double power = lowest; power <= highest; power += 1) {
      const bool labelled = std::fmod(power - lowest, every) < 0.5;
      const double decade = std::pow(10.0, power);
      axis.ticks_.push_back({decade, labelled ? tick_label(decade, decade) : ""});
      if (!fine || power == highest) continue;
      for (const double part : {2.0, 5.0}) axis.ticks_.push_back({part * decade, tick_label(part * decade, decade)});
    }
    // Whole decades would leave much of the panel empty: stop at the data, a little beyond.
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

}  // namespace cohort::track
