// Compiled once per instruction set by foreach_target.h; the best one is chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/training/matrix.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "bench/training/network.h"

HWY_BEFORE_NAMESPACE();
namespace cohort::app::training::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Vectors = hn::ScalableTag<float>;

/// kRows rows and kWide vectors of columns of the result, kept in registers over all of `inner`.
template <std::size_t kRows, std::size_t kWide>
void Tile(const Product& p, std::size_t row, std::size_t column) {
  const Vectors d;
  const std::size_t lanes = hn::Lanes(d);
  hn::Vec<Vectors> sums[kRows][kWide];
  for (auto& line : sums) {
    for (auto& sum : line) sum = hn::Zero(d);
  }
  for (std::size_t k = 0; k < p.inner; ++k) {
    const float* const right = p.right + k * p.columns + column;
    const float* const left = p.left.data + row * p.left.row_step + k * p.left.column_step;
    hn::Vec<Vectors> values[kWide];
    for (std::size_t w = 0; w < kWide; ++w) values[w] = hn::LoadU(d, right + w * lanes);
    for (std::size_t r = 0; r < kRows; ++r) {
      const auto factor = hn::Set(d, left[r * p.left.row_step]);
      for (std::size_t w = 0; w < kWide; ++w) sums[r][w] = hn::MulAdd(factor, values[w], sums[r][w]);
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t w = 0; w < kWide; ++w) {
      hn::StoreU(sums[r][w], d, p.out + (row + r) * p.columns + column + w * lanes);
    }
  }
}

/// All rows of kWide vectors of columns.
template <std::size_t kWide>
void Panel(const Product& p, std::size_t column) {
  std::size_t row = 0;
  for (; row + 6 <= p.rows; row += 6) Tile<6, kWide>(p, row, column);
  for (; row < p.rows; ++row) Tile<1, kWide>(p, row, column);
}

void Multiply(const Product& p) {
  const std::size_t lanes = hn::Lanes(Vectors());
  std::size_t column = 0;
  for (; column + 2 * lanes <= p.columns; column += 2 * lanes) Panel<2>(p, column);
  for (; column + lanes <= p.columns; column += lanes) Panel<1>(p, column);
  for (; column < p.columns; ++column) {
    for (std::size_t row = 0; row < p.rows; ++row) {
      float sum = 0;
      for (std::size_t k = 0; k < p.inner; ++k) {
        sum += p.left.data[row * p.left.row_step + k * p.left.column_step] * p.right[k * p.columns + column];
      }
      p.out[row * p.columns + column] = sum;
    }
  }
}

}  // namespace cohort::app::training::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cohort::app::training {

HWY_EXPORT(Multiply);

void multiply(const Product& product) { HWY_DYNAMIC_DISPATCH(Multiply)(product); }

}  // namespace cohort::app::training
#endif
