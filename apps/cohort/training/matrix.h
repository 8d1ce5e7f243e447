// Products of matrices on one core, as fast as plain code gets: what the trainee computes with. Any thread, own memory.
#pragma once

#include <cstddef>

namespace cohort::app::training {

/// Elements of a matrix lie at data[row * row_step + column * column_step].
struct Matrix {
  const float* data = nullptr;
  std::size_t row_step = 0;
  std::size_t column_step = 1;
};

struct Product {
  Matrix left;
  const float* right = nullptr;  ///< rows one after the other
  float* out = nullptr;          ///< likewise; overwritten
  std::size_t rows = 0, inner = 0, columns = 0;
};

/// out[rows x columns] = left[rows x inner] * right[inner x columns].
void multiply(const Product& product);

}  // namespace cohort::app::training
