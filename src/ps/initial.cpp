#include "ps/initial.h"

#include "ps/philox.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace cohort::ps {
namespace {

/// In (0, 1), never 0 or 1.
double unit(std::uint32_t bits) noexcept { return (static_cast<double>(bits) + 0.5) * 0x1p-32; }

}  // namespace

void fill_initial(std::span<float> row, const Initializer& initializer, std::uint64_t seed,
                  std::uint64_t key) noexcept {
  const double a = initializer.a, b = initializer.b;
  if (initializer.kind == Initializer::Kind::Constant) {
    std::fill(row.begin(), row.end(), static_cast<float>(a));
    return;
  }
  const PhiloxKey by{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
  for (std::size_t at = 0; at < row.size(); at += 4) {
    const PhiloxCounter random = philox(
        {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32), static_cast<std::uint32_t>(at / 4), 0},
        by);
    double values[4];
    if (initializer.kind == Initializer::Kind::Uniform) {
      for (std::size_t i = 0; i < 4; ++i) values[i] = a + (b - a) * unit(random[i]);
    } else {
      for (std::size_t i = 0; i < 4; i += 2) {  // Box and Muller 1958
        const double radius = b * std::sqrt(-2 * std::log(unit(random[i])));
        const double angle = 2 * std::numbers::pi * unit(random[i + 1]);
        values[i] = a + radius * std::cos(angle);
        values[i + 1] = a + radius * std::sin(angle);
      }
    }
    for (std::size_t i = 0; i < 4 && at + i < row.size(); ++i) row[at + i] = static_cast<float>(values[i]);
  }
}

}  // namespace cohort::ps
